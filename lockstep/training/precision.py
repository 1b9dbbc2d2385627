"""Which moments are kept in 8 bits, and what a moment then takes. No torch: the plan of a run's
memory asks too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256
"""Codes that share a scale, at most: they stand in one row of the last dimension."""

MIN_ELEMENTS = 4096  # below, 8 bits save nothing that counts
MIN_WIDTH = 64  # of the last dimension: shorter blocks are mostly scale


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether the moments of this parameter are kept in 8 bits where that is asked for. Those of an
    embedding are not: its rows differ more in how often they are used than 8 bits can tell apart.
    """
    return (
        len(shape) > 1
        and math.prod(shape) >= MIN_ELEMENTS
        and shape[-1] >= MIN_WIDTH
        and not name.endswith("embedding")
    )


def moment_bytes(name: str, shape: Sequence[int], *, bits: int) -> int:
    """Of one moment of a parameter, with `trainer.optimizer_bits=bits`."""
    size = math.prod(shape)
    if bits == 32 or not is_quantized(name, shape):
        return 4 * size
    return size + 4 * (size // shape[-1]) * math.ceil(shape[-1] / BLOCK)
