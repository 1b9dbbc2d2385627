"""Memory that a process fills once and its workers map. No torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable

from lockstep.errors import EngineError

Address = tuple[str, int]
"""(path, inode) of a file in another process: its path may come to mean a later file."""


class SharedFile:
    """A file in memory without a name, which is gone with the last process that has it open."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create("lockstep")  # not limited by the size of /dev/shm
        self._file = os.fdopen(fd, "r+b", buffering=0)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            raise EngineError(
                f"no memory for {num_bytes / 2**30:.1f} GiB of weights on their way to the "
                f"engine's processes: {error.strerror}."
            ) from error
        self.memory = mmap.mmap(fd, num_bytes)
        self.address: Address = f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino


def mapped(address: Address) -> mmap.mmap:
    """The memory of another process's file. Raises EngineError if that process has let it go."""
    path, inode = address
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_ino == inode:
            return mmap.mmap(file.fileno(), 0)
    raise EngineError("the weights are gone: the trainer has given this load up.")


class Newest:
    """The newest version of a source, written once for all workers that read it. Those that read
    an older one keep its memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: object = None
        self._version = 0
        self._file: SharedFile | None = None

    def has(self, source: object, version: int) -> bool:
        """True if `written` would write nothing."""
        return self._file is not None and self._source is source and self._version == version

    def written(self, source: object, version: int, write: Callable[[], SharedFile]) -> SharedFile:
        """The file that `write` has returned for this version. Blocks meanwhile. The source may
        have changed since."""
        with self._lock:
            if self._file is None or not self.has(source, version):
                self._file = None  # first, so that there is room for the next one
                self._source, self._version, self._file = source, version, write()
            return self._file
