"""Memory that a process and its workers map: written once, read by all of them. No torch."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.errors import EngineError

HEADER = struct.Struct("<Q")
"""Beginning of a region: the number of its last writing, 0 while it is being written."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the file that is mapped as one."""

    start: int
    num_bytes: int
    writing: int
    """Number in its header as long as it is not written over."""


@dataclass(slots=True, eq=False)
class _Held:
    region: Region
    source: object | None = None
    """Source that it was filled from, until it is written over."""
    version: int = 0
    num_readers: int = 0


class SharedFile:
    """A file in memory without a name, which disappears with the processes that have it open."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
            self.fd = os.memfd_create("lockstep", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self._num_writings = 0

    @contextmanager
    def holding(
        self, source: object, version: int, num_bytes: int, fill: Callable[[mmap.mmap], None]
    ) -> Iterator[Region]:
        """Holds a region with the contents that `fill` writes after the header. Blocks meanwhile.

        A version of a source is written once, however many hold it, until another takes its place:
        late readers read the source as it was.
        """
        with self._lock:
            held = self._take(source, version, num_bytes, fill)
            held.num_readers += 1
        try:
            yield held.region
        finally:
            with self._lock:
                held.num_readers -= 1

    def has(self, source: object, version: int) -> bool:
        """Whether `holding` this version would write nothing."""
        with self._lock:
            return any(h.source is source and h.version == version for h in self._held)

    def _take(
        self, source: object, version: int, num_bytes: int, fill: Callable[[mmap.mmap], None]
    ) -> _Held:
        for held in self._held:
            if held.source is source and held.version == version:
                return held
        free = (h for h in self._held if not h.num_readers and h.region.num_bytes >= num_bytes)
        held = next(free, None) or self._grow(num_bytes)
        self._num_writings += 1
        held.source = None
        memory = mapped(self.fd, held.region)
        HEADER.pack_into(memory, 0, 0)
        fill(memory)
        HEADER.pack_into(memory, 0, self._num_writings)
        held.region = Region(held.region.start, held.region.num_bytes, self._num_writings)
        held.source, held.version = source, version
        return held

    def _grow(self, num_bytes: int) -> _Held:
        end = max((h.region.start + h.region.num_bytes for h in self._held), default=0)
        start = -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self.fd, start, num_bytes)
        except OSError as error:
            raise EngineError(
                f"no memory for {num_bytes / 2**30:.1f} GiB of weights on their way to the "
                f"engine's processes: {error.strerror}."
            ) from error
        self._held.append(_Held(Region(start, num_bytes, 0)))
        return self._held[-1]

    def __del__(self) -> None:
        os.close(self.fd)


def mapped(fd: int, region: Region) -> mmap.mmap:
    """The memory of a region, unmapped when nothing refers to it any more."""
    return mmap.mmap(fd, region.num_bytes, offset=region.start)


def is_whole(memory: mmap.mmap, region: Region) -> bool:
    """Whether the region still holds the writing that it was handed over with."""
    return HEADER.unpack_from(memory, 0)[0] == region.writing
