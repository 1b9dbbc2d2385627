"""Weights in transit to workers: tensors one after another in memory that both sides map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep.errors import EngineError
from lockstep.launch.shared_file import Newest, SharedFile
from lockstep.models.hf_io import HFTensors

Tensor = torch.Tensor

ALIGNMENT = 64  # of a tensor's first byte: a cache line, and more than any dtype takes

Outline = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape) of a tensor."""


class TornWeightsError(EngineError):
    """The weights of an engine are part one version, part another: its process must end."""


def outlines_of(source: Mapping[str, Tensor]) -> list[Outline]:
    """The tensors of a source, in its order. Sharded tensors are not gathered."""
    found = source.outlines() if isinstance(source, HFTensors) else source
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]


def tensors_in(memory: Any, outlines: Sequence[Outline]) -> dict[str, Tensor]:
    """name -> a view of the tensor at its place in `memory`, a writable buffer."""
    whole, out, at = torch.frombuffer(memory, dtype=torch.uint8), {}, 0
    for name, dtype, shape in outlines:
        num_bytes = math.prod(shape) * dtype.itemsize
        out[name] = whole[at : at + num_bytes].view(dtype).view(shape)
        at += _aligned(num_bytes)
    return out


def written(
    newest: Newest, source: Mapping[str, Tensor], outlines: Sequence[Outline], *, version: int
) -> SharedFile:
    """The file that holds the tensors, copied in the order of the mapping, once per version."""

    def fill(memory: Any) -> None:
        for name, tensor in tensors_in(memory, outlines).items():
            tensor.copy_(source[name].detach())

    sizes = [_aligned(math.prod(shape) * dtype.itemsize) for _, dtype, shape in outlines]
    return newest.written(source, version, sum(sizes), fill)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
