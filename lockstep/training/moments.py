"""AdamW whose two moments take 8 bits each: codes, and a scale per 256 of them.

A value is sign * (|code| / levels)^4 * scale, the scale being the largest magnitude of its block.
The fourth power gives small values, the most frequent ones of a block, as many digits as large
ones: the smallest that differs from 0 is 2.4e-10 of the largest. A second moment is rounded up to
the first code and never becomes 0: a first moment beside a 0 would move a weight without bound.
Blocks lie within the last dimension, so a tensor sharded along another one has the same blocks.

The idea of block-wise 8-bit moments: Dettmers, Lewis, Shleifer and Zettlemoyer 2022, 8-bit
Optimizers via Block-wise Quantization, whose code book has gaps where this one has a power.

# R rows, all dimensions but the last  K the last dimension  B blocks of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lockstep.training.precision import BLOCK

Tensor = torch.Tensor

SIGNED_LEVELS, UNSIGNED_LEVELS = 127, 255

CHUNK_ELEMENTS = {"cpu": 1 << 18}  # float32 elements at one time: they fit a core's cache
OTHER_CHUNK_ELEMENTS = 1 << 24  # on an accelerator: 64 MiB, enough to fill it


@dataclass(slots=True, eq=False)
class QuantizedMoment:
    """One moment of one parameter, sharded like the parameter."""

    codes: Tensor
    """The parameter's shape, int8 (first moment) or uint8 (second)."""
    scales: Tensor
    """[..., B] float32: the largest magnitude of each block of the last dimension."""

    @classmethod
    def zeros_like(cls, parameter: Tensor, *, is_signed: bool) -> QuantizedMoment:
        dtype = torch.int8 if is_signed else torch.uint8
        like = parameter.detach()
        return cls(
            torch.zeros_like(like, dtype=dtype),
            torch.zeros_like(like[..., ::BLOCK], dtype=torch.float32),
        )

    def read(self) -> Tensor:
        """float32, the parameter's shape; the local part of a sharded one."""
        codes, scales = _rows(self.codes), _rows(self.scales)
        return _dequantize(codes, scales).view(local(self.codes).shape)

    def write(self, values: Tensor) -> None:
        """values: float32, the (local) shape of the codes."""
        codes = _rows(self.codes)
        _quantize(values.reshape(codes.shape), codes, _rows(self.scales))


Moments = tuple[QuantizedMoment, QuantizedMoment]


def zero_moments(parameter: Tensor) -> Moments:
    """The first and the second moment before the first update."""
    return (
        QuantizedMoment.zeros_like(parameter, is_signed=True),
        QuantizedMoment.zeros_like(parameter, is_signed=False),
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in its own memory; any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def quantized_adamw(
    parameter: Tensor,
    gradient: Tensor,
    moments: Moments,
    *,
    update: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019) in place, a chunk of rows at a time, so that
    no moment is in float32 as a whole. The step uses the moments before they are rounded.

    parameter, gradient: float32. update: of this parameter, counted from 1.
    """
    first, second = moments
    parameter_RK = _rows(parameter)
    gradient_RK = local(gradient).reshape(parameter_RK.shape)  # backward may have transposed it
    parts = [_rows(x) for x in (first.codes, first.scales, second.codes, second.scales)]
    low, high = betas
    step_size = lr / (1 - low**update)
    correction = (1 - high**update) ** 0.5
    R, K = parameter_RK.shape
    num_elements = CHUNK_ELEMENTS.get(parameter.device.type, OTHER_CHUNK_ELEMENTS)
    num_rows = max(1, num_elements // max(K, 1))
    for at in range(0, R, num_rows):
        rows = slice(at, at + num_rows)
        first_codes, first_scales, second_codes, second_scales = (part[rows] for part in parts)
        g = gradient_RK[rows]
        m = _dequantize(first_codes, first_scales).lerp_(g, 1 - low)
        v = _dequantize(second_codes, second_scales).mul_(high).addcmul_(g, g, value=1 - high)
        p = parameter_RK[rows]
        if weight_decay:
            p.mul_(1 - lr * weight_decay)
        p.addcdiv_(m, v.sqrt().div_(correction).add_(eps), value=-step_size)
        _quantize(m, first_codes, first_scales)
        _quantize(v, second_codes, second_scales)


def _rows(tensor: Tensor) -> Tensor:
    """[R, K], in the tensor's own memory."""
    found = local(tensor.detach())
    return found.view(-1, found.shape[-1])


def _levels(codes: Tensor) -> int:
    return SIGNED_LEVELS if codes.dtype == torch.int8 else UNSIGNED_LEVELS


def _dequantize(codes_RK: Tensor, scales_RB: Tensor) -> Tensor:
    """[R, K] float32."""
    x_RK = codes_RK.float().div_(_levels(codes_RK))
    x_RK = x_RK * x_RK.abs() if codes_RK.dtype == torch.int8 else x_RK.square_()
    x_RK = x_RK.mul_(x_RK.abs())
    blocks, scales_RB1 = _blocks(x_RK), scales_RB[..., None]
    return blocks.mul_(scales_RB1).flatten(1)[:, : codes_RK.shape[1]]


def _quantize(x_RK: Tensor, codes_RK: Tensor, scales_RB: Tensor) -> None:
    """Writes codes and scales of x."""
    is_signed = codes_RK.dtype == torch.int8
    blocks = _blocks(x_RK)
    top_RB1 = blocks.abs().amax(-1, keepdim=True)
    scales_RB.copy_(top_RB1[..., 0])
    # Divided before the root, so that the largest value of a block does not underflow.
    shares = blocks / top_RB1.clamp_min(torch.finfo(torch.float32).tiny)
    levels = shares.abs().sqrt_().sqrt_().mul_(_levels(codes_RK)).round_()
    levels = levels.copysign_(shares) if is_signed else levels.clamp_min_(1)
    codes_RK.copy_(levels.flatten(1)[:, : codes_RK.shape[1]])


def _blocks(x_RK: Tensor) -> Tensor:
    """[R, B, 256]; a short last block is padded with zeros, in a copy."""
    extra = -x_RK.shape[1] % BLOCK
    if extra:
        x_RK = F.pad(x_RK, (0, extra))
    return x_RK.unflatten(1, (-1, BLOCK))
