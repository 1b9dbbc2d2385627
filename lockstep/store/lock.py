"""One writer per run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.errors import RunError


class RunLock:
    """Holds `path` for as long as this process lives, or until `release`.

    The kernel's advisory lock decides on one host, and it frees itself when the process dies, so a
    killed run never has to be cleaned up by hand. What the file holds (process id and host) is for
    the message, and for hosts that share a file system whose kernel locks do not reach across:
    a lock that names another host is respected until somebody deletes it.
    The file is emptied on release, never removed: removing it would let two processes hold two
    files of one name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = None

    def acquire(self) -> None:
        """Raises RunError, naming the process and the host, if another writer holds the lock."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(self._in_use(self._holder(descriptor), "")) from None
            holder = self._holder(descriptor)
            if holder.get("host", platform.node()) != platform.node():
                raise RunError(
                    self._in_use(
                        holder,
                        " This host cannot see whether that process lives: if it does not, delete "
                        f"{self.path} and start again.",
                    )
                )
            text = json.dumps(
                {
                    "pid": os.getpid(),
                    "host": platform.node(),
                    "since": datetime.now(UTC).isoformat(timespec="seconds"),
                }
            )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._file = descriptor

    def release(self) -> None:
        """Lets the next writer in. Does nothing if the lock is not held."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not hide why the run ended
            os.ftruncate(self._file, 0)
        os.close(self._file)
        self._file = None

    def _in_use(self, holder: dict[str, Any], advice: str) -> str:
        who = (
            f"process {holder['pid']} on {holder.get('host', 'an unknown host')} "
            f"(since {holder.get('since', 'an unknown time')})"
            if "pid" in holder
            else "another process"
        )
        return (
            f"{self.path.parent} is in use by {who}: a run directory has one writer. "
            f"Choose another directory with out=DIR, or end that run first.{advice}"
        )

    @staticmethod
    def _holder(descriptor: int) -> dict[str, Any]:
        """What the holder wrote; empty if it wrote nothing readable."""
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}


def is_locked(path: Path) -> bool:
    """Whether the lock at `path` seems to be held. For people: it is not waited for, and not taken
    where a writer could be in the way of."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        holder = RunLock._holder(descriptor)
        if not holder or holder.get("host", platform.node()) != platform.node():
            return bool(holder)
        # A killed writer leaves its name, and the kernel's lock does not survive it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # and with it the shared lock
    return False
