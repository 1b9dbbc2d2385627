"""The moments kept in 8 bits, and their size in bytes. No torch: the memory plan uses this."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256
"""Codes that share a scale, at most; all in one row of the last dimension."""

MIN_ELEMENTS = 4096  # below, 8 bits save nothing that counts
MIN_WIDTH = 64  # of the last dimension: shorter blocks are mostly scale


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether optimizer_bits=8 applies to the moments of this parameter. Not to an embedding's: use
    of its rows differs by more than 8 bits can tell apart."""
    return (
        len(shape) > 1
        and math.prod(shape) >= MIN_ELEMENTS
        and shape[-1] >= MIN_WIDTH
        and not name.endswith("embedding")
    )


def moment_bytes(name: str, shape: Sequence[int], *, bits: int) -> int:
    """Bytes of one moment of a parameter, with `trainer.optimizer_bits=bits`."""
    size = math.prod(shape)
    if bits == 32 or not is_quantized(name, shape):
        return 4 * size
    return size + 4 * (size // shape[-1]) * math.ceil(shape[-1] / BLOCK)
