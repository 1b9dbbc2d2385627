"""Weights rounded to the narrow formats that engines serve, and back: what such an engine computes
with.

# N outputs  K inputs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Number = Literal["fp8", "int8", "int4", "int4 to 7", "int4 asymmetric", "mxfp4", "nf4"]

FP8_LARGEST = 448.0  # of e4m3
FP4_LARGEST_POWER = 2  # exponent of e2m1's largest number, 6
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1
_NF4 = """
-1 -0.6961928 -0.5250731 -0.3949175 -0.2844414 -0.1847734 -0.0910500 0
0.0795803 0.1609302 0.2461123 0.3379152 0.4407098 0.5626170 0.7229568 1
"""
NF4 = tuple(map(float, _NF4.split()))
"""Source: bitsandbytes; quantiles of a normal distribution (arXiv 2305.14314)."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the weights of linear maps, and perhaps their inputs, are rounded."""

    number: Number
    block: tuple[int, int]
    """(outputs, inputs) that share a scale; 0 is all of them. A last block may be smaller."""
    is_fused: bool = False
    """True if the projections that read one input (queries, keys and values; gate and up) are one
    tensor with shared scales."""
    has_inputs: bool = False
    """True if inputs are rounded to the same number format: a scale per token, and per block of
    inputs if weights have blocks."""

    def describe(self) -> str:
        outputs, inputs = self.block
        shape = {(0, 0): "per tensor", (1, 0): "per channel"}.get(self.block)
        if shape is None:
            shape = f"in groups of {inputs}" if outputs == 1 else f"in blocks of {outputs}x{inputs}"
        of = "weights and inputs" if self.has_inputs else "weights"
        fused = ", fused projections as one" if self.is_fused else ""
        return f"{of} in {self.number} {shape}{fused}"

    def rounded(self, weight: Tensor) -> Tensor:
        """weight [..., N, K] -> the same shape and dtype."""
        return _in_blocks(weight, self.block, _ROUND[self.number])

    def rounded_inputs(self, x: Tensor) -> Tensor:
        """x [..., K] -> the same shape and dtype."""
        inputs = self.block[1]
        return _in_blocks(x[..., None, :], (1, inputs), _ROUND[self.number])[..., 0, :]


_INT4: tuple[Number, ...] = ("int4", "int4 to 7", "int4 asymmetric")
_EIGHT_BITS: tuple[tuple[Number, tuple[int, int]], ...] = (
    ("fp8", (0, 0)),
    ("fp8", (1, 0)),
    ("fp8", (128, 128)),
    ("int8", (1, 0)),
)
SCHEMES: tuple[Scheme, ...] = (
    *(
        Scheme(number=number, block=block, has_inputs=has_inputs, is_fused=is_fused)
        for number, block in _EIGHT_BITS
        for is_fused in ((False,) if block[0] == 1 else (False, True))
        for has_inputs in (False, True)
    ),
    *(Scheme(number=number, block=(1, group)) for number in _INT4 for group in (32, 64, 128)),
    Scheme(number="mxfp4", block=(1, 32)),
    Scheme(number="nf4", block=(1, 64)),
)
"""Formats that vLLM and SGLang serve: fp8 per tensor is vLLM's quantization=fp8, blocks are
DeepSeek's, groups are GPTQ's and AWQ's, mxfp4 is gpt-oss' own, nf4 is bitsandbytes'."""


def _in_blocks(
    weight: Tensor, block: tuple[int, int], rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    *lead, N, K = weight.shape
    rows, columns = block[0] or N, block[1] or K
    padded = F.pad(weight.float(), (0, -K % columns, 0, -N % rows))
    tall, wide = padded.shape[-2] // rows, padded.shape[-1] // columns
    split = padded.reshape(*lead, tall, rows, wide, columns).transpose(-2, -3)
    out = rounded(split.flatten(-2)).view_as(split).transpose(-2, -3).reshape(padded.shape)
    return out[..., :N, :K].to(weight.dtype)


def _scaled(x: Tensor, *, largest: float, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """x rounded on a scale where its largest number is `largest`; 1 where everything is 0."""
    scale = x.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    return rounded(x / scale) * scale


def _to_fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _to_int4(x: Tensor) -> Tensor:
    return x.round().clamp(-8, 7)


def _int4_asymmetric(x: Tensor) -> Tensor:
    least, most = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = (most - least) / 15
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-least / scale).round()
    return ((x / scale).round() + zero).clamp(0, 15).sub(zero) * scale


def _mxfp4(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # below it, all are 0 anyway
    scale = torch.exp2(largest.log2().floor() - FP4_LARGEST_POWER)
    return _nearest((x / scale).abs(), FP4) * x.sign() * scale


def _nearest(x: Tensor, grid: tuple[float, ...]) -> Tensor:
    numbers = torch.tensor(grid, device=x.device)
    return numbers[torch.bucketize(x, (numbers[1:] + numbers[:-1]) / 2)]


_ROUND: dict[Number, Callable[[Tensor], Tensor]] = {
    "fp8": partial(_scaled, largest=FP8_LARGEST, rounded=_to_fp8),
    "int8": partial(_scaled, largest=127, rounded=torch.round),
    # GPTQ's and compressed-tensors': 15 steps over twice the largest
    "int4": partial(_scaled, largest=7.5, rounded=_to_int4),
    "int4 to 7": partial(_scaled, largest=7, rounded=_to_int4),
    "int4 asymmetric": _int4_asymmetric,
    "mxfp4": _mxfp4,
    "nf4": partial(_scaled, largest=1, rounded=partial(_nearest, grid=NF4)),
}
