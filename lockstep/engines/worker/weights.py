"""Weights on their way to workers: laid out one after another in memory that both sides map.

One copy of the model serves every worker that loads it at the same time.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import EngineError
from lockstep.models.hf_io import HFTensors

Tensor = torch.Tensor

ALIGNMENT = 64  # of a tensor's first byte: a cache line, and more than any dtype asks for
HEADER = struct.Struct("<Q")  # the number of the writing, at the beginning of a region


class TornWeightsError(EngineError):
    """An engine's weights are half of one version and half of another: it must not go on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte, from the beginning of the region."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of one writing stand."""

    entries: tuple[Entry, ...]
    num_bytes: int
    """Of the region."""
    start: int = 0
    """Of the region in its file."""
    writing: int = 0
    """What its header says while it is whole."""


def layout_of(source: Mapping[str, Tensor]) -> Layout:
    """One tensor after another, in their own dtypes."""
    entries, at = [], ALIGNMENT
    outlines = source.outlines() if isinstance(source, HFTensors) else source
    for name, tensor in outlines.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = Entry(name, dtype, tuple(tensor.shape), at)
        entries.append(entry)
        at = _aligned(at + entry.num_bytes)
    return Layout(tuple(entries), at)


def tensors_in(layout: Layout, memory: Any) -> dict[str, Tensor]:
    """name -> the tensor at its place in `memory`, a writable buffer. Nothing is copied."""
    return {
        entry.name: torch.frombuffer(
            memory, dtype=getattr(torch, entry.dtype), count=math.prod(entry.shape),
            offset=entry.start,
        ).view(entry.shape) if math.prod(entry.shape)
        else torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for entry in layout.entries
    }  # fmt: skip


def bytes_of(tensor: Tensor) -> memoryview:
    """What a tensor's elements are in memory, row by row."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class _Region:
    start: int
    num_bytes: int
    layout: Layout | None = None
    source: Mapping[str, Tensor] | None = None
    """What it holds, while somebody reads it."""
    num_readers: int = 0


class SharedWeights:
    """A file in memory, without a name: gone with the processes that have it open."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
            self.fd = os.memfd_create("lockstep-weights", 0)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._regions: list[_Region] = []
        self._lock = threading.Lock()
        self._num_writings = 0

    @contextmanager
    def holding(self, source: Mapping[str, Tensor]) -> Iterator[Layout]:
        """In the block, the tensors stand where the layout says. Blocks while they are copied;
        several threads that hold one mapping at a time share one copy."""
        with self._lock:
            region = self._take(source)
            region.num_readers += 1
            layout = region.layout
        assert layout is not None, "a region that is taken has been written"
        try:
            yield layout
        finally:
            with self._lock:
                region.num_readers -= 1
                if not region.num_readers:
                    region.source = None

    def _take(self, source: Mapping[str, Tensor]) -> _Region:
        for region in self._regions:
            if region.source is source:
                return region
        layout = layout_of(source)
        for region in self._regions:
            if not region.num_readers and region.num_bytes >= layout.num_bytes:
                break
        else:
            end = max((r.start + r.num_bytes for r in self._regions), default=0)
            start = -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            region = _Region(start, layout.num_bytes)
            try:
                os.posix_fallocate(self.fd, start, layout.num_bytes)
            except OSError as error:
                raise EngineError(
                    f"no memory for {layout.num_bytes / 2**30:.1f} GiB of weights on their way to "
                    f"the engine's processes: {error.strerror}."
                ) from error
            self._regions.append(region)
        self._num_writings += 1
        region.layout = Layout(layout.entries, layout.num_bytes, region.start, self._num_writings)
        memory = _mapped(self.fd, region.layout)
        HEADER.pack_into(memory, 0, 0)
        for name, tensor in tensors_in(region.layout, memory).items():
            tensor.copy_(source[name].detach())
        HEADER.pack_into(memory, 0, self._num_writings)
        region.source = source
        return region

    def __del__(self) -> None:
        os.close(self.fd)


@contextmanager
def reading(fd: int, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """In the block, in another process: the tensors of a layout. Raises TornWeightsError after it
    if they were written over meanwhile: whoever wrote them had given this reader up."""
    memory = _mapped(fd, layout)
    yield tensors_in(layout, memory)
    (found,) = HEADER.unpack_from(memory, 0)
    if found != layout.writing:
        raise TornWeightsError(
            f"weights: writing {layout.writing} was read, and {found or 'another'} has been "
            "written over it meanwhile."
        )


def _mapped(fd: int, layout: Layout) -> mmap.mmap:
    """Unmapped with the last tensor that reads it."""
    return mmap.mmap(fd, layout.num_bytes, offset=layout.start)
