"""AdamW's moments in one byte a number, in blocks that each have a scale of their own.

The scale is a power of two, so the numbers of a block are exact in float32 and packing them again
gives the same block: a checkpoint holds float32, and a resumed run has the same bits.
Source: block-wise quantised optimizers (arXiv 2110.02861); the first moment has the format of
torchao's AdamWFp8.

The second moment has no sign. Its root is kept, with an additional bit, and never rounded to 0 (the
zero-point problem of arXiv 2309.01507). With 0, a first moment above 0 would be divided by `eps`
alone and move a weight by thousands of learning rates. It is rounded up or down at random, with the
right mean: with rounding to the nearest, a slow average would never move (arXiv 2505.00347).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

BLOCK = 256  # numbers with one scale
FORMAT = torch.float8_e4m3fn
LARGEST = 448.0  # of the format
ROOT_BITS = 19  # of a float32's fraction that a root lacks: it has 5 significant bits
ROOT_BASE = 112 << 4  # code of 2 ** -15 among float32's: a root's codes count from there
LARGEST_ROOT = 1.9375  # code 255
LEAST_ROOT = 2.0**-62  # the square of a smaller one is no full float32


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
        blocks, scales = _scaled(x, LARGEST)
        return cls(blocks.to(FORMAT), scales, x.shape)

    def unpacked(self) -> Tensor:
        """float32, of the shape that was packed."""
        return _joined(self.codes.float() * self.scales, self.shape)


@dataclass(slots=True, eq=False)
class PackedSquare:
    """A float32 tensor without negative numbers, packed by its root.

    >>> PackedSquare.of(torch.tensor([0.0, 4.0, 1e-30])).unpacked().tolist()
    [0.0, 4.0, 4.20...e-09]
    """

    codes: Tensor
    """[blocks, BLOCK] uint8: 0 is 0, others are 5 significant bits and a power of two."""
    scales: Tensor
    """[blocks, 1] float32, powers of two."""
    shape: torch.Size

    @classmethod
    def of(cls, x: Tensor) -> PackedSquare:
        """Rounds up."""
        return cls._of_roots(x.sqrt(), torch.zeros_like(x))

    @classmethod
    def bounded_by(
        cls, first: PackedMoment, second: Tensor, *, betas: tuple[float, float], step: Tensor
    ) -> PackedSquare:
        """AdamW's second moment, rounded at random, and at least what the first one implies: their
        ratio has a bound over all gradients (Cauchy-Schwarz). step: [] float32, updates made; the
        draws are a function of it alone, so a resumed run has the same."""
        least, share = first.unpacked().abs(), betas[0] ** 2 / max(betas[1], 1e-9)
        if share < 1:
            least = least * (math.sqrt((1 - betas[1]) * (1 - share)) / (1 - betas[0]))
        else:  # exact moments have no bound either
            least = torch.zeros_like(second)
        return cls._of_roots(torch.maximum(second.sqrt(), least), _draws(step, first.shape))

    @classmethod
    def _of_roots(cls, roots: Tensor, draws: Tensor) -> PackedSquare:
        blocks, scales = _scaled(torch.where(roots < LEAST_ROOT, 0.0, roots), LARGEST_ROOT)
        codes = ((blocks.view(torch.int32) >> ROOT_BITS) - ROOT_BASE).clamp(1, 255)
        below, above = (_root_of(codes + more).square() for more in (0, 1))
        is_up = _blocks(draws) * (above - below) < blocks.square() - below
        codes = torch.where(blocks > 0, (codes + is_up).clamp(max=255), 0)
        return cls(codes.to(torch.uint8), scales, roots.shape)

    def unpacked(self) -> Tensor:
        """float32, of the shape that was packed."""
        codes = self.codes.int()
        roots = torch.where(codes > 0, _root_of(codes), 0.0) * self.scales
        return _joined(roots, self.shape).square()


def _root_of(codes: Tensor) -> Tensor:
    return ((codes + ROOT_BASE) << ROOT_BITS).view(torch.float32)


def _draws(step: Tensor, shape: torch.Size) -> Tensor:
    """Numbers in [0, 1), by a hash of the update and of each number's place."""
    mixed = torch.arange(shape.numel(), dtype=torch.int32, device=step.device)
    mixed = mixed * 0x1E3779B1 + step.view(torch.int32) * 0x05EBCA6B
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = (mixed ^ (mixed >> 15 & 0x1FFFF)) * factor
    return ((mixed >> 8 & 0xFFFFFF) * 2.0**-24).view(shape)


def _blocks(x: Tensor) -> Tensor:
    return F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten()[: shape.numel()].view(shape)


def _scaled(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(blocks of x divided by their scales, so that no number is above `largest`; the scales
    [blocks, 1])."""
    blocks = _blocks(x)
    peaks = blocks.abs().amax(1, keepdim=True) / largest
    mantissas, exponents = torch.frexp(peaks)  # the next power of two is the scale
    exponents = torch.where(peaks > 0, exponents - (mantissas == 0.5).int(), 0)
    scales = torch.ldexp(torch.ones_like(peaks), exponents)
    return blocks / scales, scales
