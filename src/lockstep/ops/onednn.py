"""Products of a CPU over weights in oneDNN's own layout.

For few rows they take half the time of a product that reads the weight as it is, and as much as
MKL's for many. In float32 and, where the CPU multiplies in it, in bfloat16.

# M GEMM rows  K inner width  N outputs
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Tensor = torch.Tensor

PACKED_SIZE = 1 << 17  # elements of a weight: a smaller one gains less than the call costs more
PACKED_WIDTH = 128  # and its least width: the factors of an adapter change too often
MANY_ROWS = 64  # the layout is chosen for this many rows; it serves any number


def is_packable(shape: tuple[int, ...]) -> bool:
    """True if torch has oneDNN, and products with a weight [N, K] of this shape gain by it."""
    is_large = len(shape) == 2 and min(shape) >= PACKED_WIDTH and shape[0] * shape[1] >= PACKED_SIZE
    return is_large and torch.backends.mkldnn.is_available()


@cache
def has_bfloat16() -> bool:
    """True if this CPU multiplies in bfloat16 (AVX-512 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported()


def can_pack(weight: Tensor) -> bool:
    """True if a sampler's products with this weight are to read it packed: one that lasts."""
    if weight.numel() < PACKED_SIZE or not is_packable(weight.shape):
        return False
    is_known = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16())
    return is_known and weight.device.type == "cpu" and not weight.is_inference()


def packed_linear(x_MK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
    """x W^T + b: [M, N]. packed: W as `PackedWeights.of` gives it, in x's dtype."""
    return torch.ops.mkldnn._linear_pointwise(x_MK, packed, bias_N, "none", [], "")


class PackedWeights:
    """Packed weights, each made once per version of its parameter (`Tensor._version`).

    After an optimizer that does not count its writes, the version must be incremented, as the
    embedded engine's `load_weights` does. They are kept for samplers, which run in inference mode,
    and for frozen weights. A trainer packs others in each forward, which takes 3 to 6 % of the
    products of 2,048 rows, and a quarter to half of those of 256.
    """

    def __init__(self) -> None:
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(
        self, weight_NK: Tensor, dtype: torch.dtype, owner: Tensor | None = None, index: int = 0
    ) -> Tensor:
        """The weight, packed in `dtype`. owner, index: it is slice `index` of the parameter
        `owner`; without an owner it is a parameter itself."""
        owner, packs = weight_NK if owner is None else owner, dict[Any, Tensor]()
        is_sampler = torch.is_inference_mode_enabled()
        if (is_sampler or not owner.requires_grad) and not owner.is_inference():
            entry = self._of.get(owner)
            if entry is None or entry[0] != owner._version:
                entry = self._of[owner] = (owner._version, packs)
            packs = entry[1]
        if (index, dtype) not in packs:
            source = weight_NK.detach().to(dtype)
            packs[index, dtype] = torch.ops.mkldnn._reorder_linear_weight(source, MANY_ROWS)
        return packs[index, dtype]
