"""Writing files so that a reader finds the old one or the whole of the next, and an error of the
disk is an answer; strict JSON and its lines; and the lock that leaves a run directory one writer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import BufferedReader, RawIOBase
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep.errors import DataError, RunError, StorageError
from lockstep.system import try_lock

RETRY_SECONDS = (0.1, 0.5)
"""Pauses before a failed write is made again: a network's disk is often back by then."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_log = logging.getLogger(__name__)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes through a neighbour and renames it: `path` is never half written, also after a kill.

    `write` gets the open binary file; it is called again after an error of the disk. Raises
    StorageError.
    """
    neighbour = path.with_name(f"{path.name}.partial")

    def attempt() -> None:
        with open(neighbour, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, path)
        sync_directory(path.parent)

    durably(path, attempt, partial=neighbour)


def durably(path: Path, attempt: Callable[[], object], *, partial: Path | None = None) -> None:
    """Makes one attempt to write `path`, and a few more if the disk fails. Each begins from
    nothing: after a failed fsync the disk's contents are unknown. partial: see `storage_errors`."""
    for seconds in RETRY_SECONDS:
        try:
            attempt()
            return
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            _log.warning("%s is written again: %s.", path, error.strerror or error)
            time.sleep(seconds)
    with storage_errors(path, partial=partial):
        attempt()


@contextlib.contextmanager
def storage_errors(path: Path, *, partial: Path | None = None) -> Iterator[None]:
    """Raises an error of the system within the block as a StorageError of `path`. partial: what the
    block has half written, which is removed, as a full disk needs the room."""
    try:
        yield
    except OSError as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. What was written before is "
            "kept. Make it writable; a run then goes on with resume=true."
        ) from error


def replace_directory(made: Path, target: Path, *, aside: Path) -> None:
    """Renames the directory `made` to `target`, once `sync_tree` has it on the disk. What was there
    is at `aside` meanwhile: a kill in between loses neither."""
    if target.exists():
        os.replace(target, aside)
    os.replace(made, target)
    sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_tree(directory: Path) -> None:
    """Waits until the disk has a directory and everything below it."""
    for path in (*directory.rglob("*"), directory):
        sync_directory(path)


def sync_directory(path: Path) -> None:
    """Makes renames in a directory, or the content of a file, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, written atomically."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def encode_number(value: Any) -> Any:
    """A metric value as strict JSON, which has no NaN: those become "NaN" or "[-]Infinity".

    numpy scalars become Python numbers; a zero-dimensional tensor is read through `item`.
    """
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode_number(value: Any) -> Any:
    """The inverse of `encode_number`."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


PACKED = (".gz", ".zst", ".bz2")
"""Suffixes of packed files, which are read as their contents."""
MAX_PLAIN_BYTES, MAX_EXPANSION = 1 << 30, 100
"""A packed file holds at most this many bytes, or this many times its own size."""


def max_bytes(path: Path) -> int:
    """Bytes that a file may expand to."""
    return max(MAX_PLAIN_BYTES, MAX_EXPANSION * path.stat().st_size)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line with its end) of a file, unpacked. Raises DataError."""
    try:
        if path.suffix in PACKED:
            import pyarrow

            source = BufferedReader(cast("RawIOBase", pyarrow.input_stream(str(path))))
            left = max_bytes(path)
        else:
            source = open(path, "rb")  # noqa: SIM115 - closed below
            left = path.stat().st_size + 1
        with source as file:
            for number in count(1):
                line = file.readline(left + 1)
                left -= len(line)
                if left < 0:
                    raise DataError(f"{path}:{number}: expands to over {max_bytes(path):,} bytes.")
                if not line:
                    return
                yield number, line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error


def read_jsonl(
    path: str | Path, *, allow_nan: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every line that is not blank.

    Raises DataError that begins with `path:line` for a line that is no JSON object in UTF-8, or
    gives a key twice. allow_nan: read NaN and Infinity, which pandas and Python write.
    """
    path = Path(path)
    constant = None if allow_nan else _refuse_constant
    for number, line in lines_of(path):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            record = json.loads(text, parse_constant=constant, object_pairs_hook=unique_keys)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8: {error.reason}.") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a JSON object: {error}.") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{path}:{number}: expected a JSON object, found {type(record).__name__}."
            )
        yield number, record


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook of the JSON reader that refuses an object with one key twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return made


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds the lock of a run directory; raises RunError, naming the process and the host, if
    another writer holds it.

    On one host the kernel's advisory lock decides, and a process that dies frees it, so a killed
    run needs no cleaning up. The file holds process id and host, for the message and for hosts that
    share a file system without sharing kernel locks: a lock that names another host is respected
    until somebody deletes it. The file is emptied in the end, never removed: two processes could
    otherwise hold two files of one name.
    """
    try:
        file = open(path, "a+b")  # noqa: SIM115 - closed below
    except OSError as error:
        raise RunError(
            f"{path} cannot be opened ({error.strerror}); a run keeps its lock in this "
            "file. Remove it, or choose another directory with out=DIR."
        ) from error
    with file:
        if not try_lock(file):
            raise RunError(_in_use(path, _holder(file)))
        holder = _holder(file)
        if holder.get("host", platform.node()) != platform.node():
            raise RunError(
                f"{_in_use(path, holder)} This host cannot see whether that process lives: if "
                f"it does not, delete {path} and start again."
            )
        since = datetime.now(UTC).isoformat(timespec="seconds")
        mine = {"pid": os.getpid(), "host": platform.node(), "since": since}
        file.truncate(0)
        file.write(json.dumps(mine).encode())  # at the end, whatever was read
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a full disk must not hide why the run ended
                file.truncate(0)


def _in_use(path: Path, holder: dict[str, Any]) -> str:
    who = "another process"
    if "pid" in holder:
        host, since = holder.get("host", "unknown host"), holder.get("since", "unknown time")
        who = f"process {holder['pid']} on {host} (since {since})"
    return (
        f"{path.parent} is in use by {who}: a run directory has one writer. "
        "Choose another directory with out=DIR, or end that run first."
    )


def is_locked(path: Path) -> bool:
    """True if a writer seems to hold the lock at `path`. Takes the lock only if the writer that it
    names has died."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # none, or a directory
        holder = _holder(file)
        if holder.get("host", platform.node()) != platform.node():
            return True
        # A killed writer leaves its name, and the kernel's lock does not survive it.
        return bool(holder) and not try_lock(file, is_shared=True)
    return False


def _holder(file: BinaryIO) -> dict[str, Any]:
    """The holder's own words; empty if it wrote nothing readable."""
    try:
        file.seek(0)
        holder = json.loads(file.read(4096) or b"{}")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def why_no_directory(path: Path) -> str:
    """The reason why no directory can be made, or written to, at `path`; empty if one can."""
    at = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if at.is_dir() and os.access(at, os.W_OK | os.X_OK):
        return ""
    return f"{at} {'cannot be written to' if at.is_dir() else 'is no directory'}"
