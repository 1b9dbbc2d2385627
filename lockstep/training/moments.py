"""AdamW's moments in one byte a number: float8 in blocks, each with a scale of its own.

The scale is a power of two, so the numbers of a block are exact in float32 and packing them again
gives the same block: a checkpoint holds float32, and a resumed run has the same bits.
Source: block-wise quantised optimizers (arXiv 2110.02861), with the format of torchao's AdamWFp8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

BLOCK = 256  # numbers with one scale
FORMAT = torch.float8_e4m3fn
LARGEST = 448.0  # of the format


@dataclass(slots=True, eq=False)
class PackedMoment:
    """A float32 tensor, packed.

    >>> packed = PackedMoment.of(torch.tensor([1.0, 0.26, -3.0]))
    >>> packed.unpacked().tolist()
    [1.0, 0.25, -3.0]
    """

    codes: Tensor
    """[blocks, BLOCK] in FORMAT; the last block is filled up with zeros."""
    scales: Tensor
    """[blocks, 1] float32, powers of two."""
    shape: torch.Size

    @classmethod
    def of(cls, x: Tensor) -> PackedMoment:
        blocks = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True) / LARGEST
        mantissas, exponents = torch.frexp(largest)  # the next power of two is the scale
        exponents = torch.where(largest > 0, exponents - (mantissas == 0.5).int(), 0)
        scales = torch.ldexp(torch.ones_like(largest), exponents)
        return cls((blocks / scales).to(FORMAT), scales, x.shape)

    def unpacked(self) -> Tensor:
        """float32, of the shape that was packed."""
        numbers = (self.codes.float() * self.scales).flatten()
        return numbers[: self.shape.numel()].view(self.shape)
