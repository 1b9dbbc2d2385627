"""Weights in transit to workers: tensors one after another in memory that both sides map."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import EngineError
from lockstep.launch.shared_file import Region, SharedFile, is_whole, mapped
from lockstep.models.hf_io import HFTensors

Tensor = torch.Tensor

ALIGNMENT = 64  # of a tensor's first byte: a cache line, and more than any dtype or header takes


class TornWeightsError(EngineError):
    """The weights of an engine are part one version, part another: its process must end."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the region."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the tensors of one model."""

    entries: tuple[Entry, ...]
    num_bytes: int


def layout_of(source: Mapping[str, Tensor]) -> Layout:
    """The layout of tensors one after another, in their own dtypes."""
    entries, at = [], ALIGNMENT
    for name, tensor in source.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = Entry(name, dtype, tuple(tensor.shape), at)
        entries.append(entry)
        at = _aligned(at + entry.num_bytes)
    return Layout(tuple(entries), at)


def tensors_in(layout: Layout, memory: Any) -> dict[str, Tensor]:
    """name -> a view of the tensor at its place in `memory`, a writable buffer."""
    return {
        entry.name: torch.frombuffer(
            memory,
            dtype=getattr(torch, entry.dtype),
            count=math.prod(entry.shape),
            offset=entry.start,
        ).view(entry.shape)
        if math.prod(entry.shape)
        else torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for entry in layout.entries
    }


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@contextmanager
def holding(
    file: SharedFile, source: Mapping[str, Tensor], *, version: int
) -> Iterator[tuple[Layout, Region]]:
    """Holds the tensors in a region of the file, for workers that have it open. Blocks while they
    are copied, in the order of the mapping, once per version."""
    layout = layout_of(source.outlines() if isinstance(source, HFTensors) else source)

    def fill(memory: mmap.mmap) -> None:
        for name, tensor in tensors_in(layout, memory).items():
            tensor.copy_(source[name].detach())

    with file.holding(source, version, layout.num_bytes, fill) as region:
        yield layout, region


@contextmanager
def reading(fd: int, layout: Layout, region: Region) -> Iterator[dict[str, Tensor]]:
    """The tensors of `holding`, in a worker. Raises TornWeightsError at the end of the block if the
    region was written over meanwhile: its holder had given this reader up."""
    memory = mapped(fd, region)
    yield tensors_in(layout, memory)
    if not is_whole(memory, region):
        raise TornWeightsError(
            f"weights: writing {region.writing} was read, and written over meanwhile."
        )
