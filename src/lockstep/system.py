"""Locks on files, limits and ends of processes, which operating systems do differently.

Linux and macOS have all of it. On Windows a child has no limits of memory and files, and its own
children outlive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

_OF_MALLOC = {-1: (1 << 31) - 1, -3: 1 << 30, -8: 1}
"""Options of glibc's malloc.h: bytes kept at the top of the heap, bytes of a block with a mapping
of its own, number of heaps."""
_LOCKED_BYTE = 1 << 30
"""Windows locks a range of bytes, which others cannot read either: one behind the file's end."""


def keep_freed_memory() -> None:
    """Lets the process keep large blocks that it frees, for its next ones.

    glibc gives a block of more than 32 MiB back to the system, and the system clears every page of
    the next one: 4 % of the time of a training step on a CPU, and three quarters of a softmax over
    64 rows of a vocabulary of 150,000. Other C libraries, and what the user's own variables of
    malloc set, stay as they are.
    """
    if platform.libc_ver()[0] != "glibc" or any(k.startswith("MALLOC_") for k in os.environ):
        return
    allocator = ctypes.CDLL(None)
    for option, value in _OF_MALLOC.items():
        allocator.mallopt(option, value)


def try_lock(file: IO[bytes], *, is_shared: bool = False) -> bool:
    """Takes the lock on an open file; False if another process has it. It is given back when the
    file is closed, and when the process dies. is_shared: several may have it, on Windows one."""
    if fcntl is not None:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    import msvcrt

    windows: Any = msvcrt
    file.seek(_LOCKED_BYTE)
    try:
        windows.locking(file.fileno(), windows.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        file.seek(0)
    return True


def available_bytes(root: Path = Path("/")) -> tuple[int, str] | None:
    """(bytes that this machine can give to the process, source of that number): the least of
    MemAvailable and the limits of the process's control groups. None where neither is known."""
    found: list[tuple[int, str]] = []
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append((int(rest.split()[0]) * 1024, "MemAvailable of this machine"))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.strip().lstrip("/")
        for directory in (group, *group.parents):
            limit = "".join(_lines(directory / file)).strip()
            if limit.isdigit():
                found.append((int(limit), f"{file} of this control group"))
            if directory == base:
                break
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def limit_process(**limits: int) -> None:
    """Limits this process: `limit_process(AS=bytes, NOFILE=0)`, by the names of RLIMIT_*."""
    if resource is None:
        return
    for name, value in limits.items():
        with contextlib.suppress(ValueError):  # macOS does not limit address space
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


@contextlib.contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Limits the memory that this process may add to `num_bytes`; beyond it: MemoryError. Linux."""
    statm = Path("/proc/self/statm")
    if resource is None or not statm.exists():
        yield
        return
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def max_open_files() -> int | None:
    """Limit of open files of this process; None if unknown."""
    return None if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def signal_tree(pid: int, number: int) -> None:
    """Sends a signal to a process and all of its descendants, those included that start meanwhile.
    Linux tells them; elsewhere only the process gets it."""
    signalled, waiting = set[int](), {pid}
    while waiting:
        for each in waiting:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, number)
        signalled |= waiting
        waiting = {child for each in signalled for child in children_of(each)} - signalled


def children_of(pid: int) -> set[int]:
    """Ids of the processes that a process has started; empty without /proc."""
    found = set[int]()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found |= set(map(int, file.read().split()))
    return found


def kill_group(pid: int) -> None:
    """Kills a process that was started with `start_new_session`, and all of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)  # on Windows it ends the process at once
