"""What a path holds, by its first bytes, before anything tries to read it. Nothing is executed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import DataError

PARQUET_MAGIC = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_ENCODED: Sequence[tuple[bytes, str]] = (
    (b"\x1f\x8b", "is compressed with gzip. Unpack it first: gunzip FILE"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd. Unpack it first: zstd -d FILE"),
    (b"BZh", "is compressed with bzip2. Unpack it first: bunzip2 FILE"),
    (b"\xfd7zXZ\x00", "is compressed with xz. Unpack it first: unxz FILE"),
    (
        b"PK\x03\x04",
        "is a zip archive (a .pt of torch.save and an .npz are ones too). Unpack it, or write the "
        "rows as Parquet or JSONL",
    ),
    (
        b"ARROW1",
        "is an Arrow IPC (Feather) file. Write it as Parquet: "
        "pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), 'rows.parquet')",
    ),
    (b"SQLite format 3\x00", "is an SQLite database. Write its rows as Parquet or JSONL"),
    (b"\x89HDF\r\n", "is an HDF5 file. Write its rows as Parquet or JSONL"),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]|\(?c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n")
"""The first bytes of a pickle: of protocol 2 to 5, or a global by name in the older ones."""
_HEAD_BYTES = 4096


def check_place(path: Path) -> None:
    """Raises DataError unless there is a file or a directory that can be read."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(
                f"{path} is a link to {os.readlink(path)}, where there is nothing: it was moved or "
                "deleted, or the disk that it is on is not mounted. Give the file's own path."
            ) from None
        raise DataError(
            f"there is nothing at {path}. Expected the directory of a run, or a dump of another "
            "trainer (a file, or a directory of parts)."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be reached: {_reason(error)}.") from None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise DataError(
            f"{path} is neither a file nor a directory (a pipe, a socket, a device), and the rows "
            "are read more than once. Write them to a file first."
        )
    try:
        if stat.S_ISDIR(found.st_mode):
            os.listdir(path)
        else:
            head_of(path, 1)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {_reason(error)}. `ls -l` shows whose it is; chmod +r, or run "
            "as its owner."
        ) from None


def head_of(path: Path, num_bytes: int = _HEAD_BYTES) -> bytes:
    """The first bytes of a file; OSError if it cannot be read."""
    with open(path, "rb") as file:
        return file.read(num_bytes)


def why_no_rows(path: Path) -> str:
    """What is at `path` in place of rows, and what to do, to end an error with. Empty for what
    begins as Parquet or as JSON lines do. `path` was given to `check_place`."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        if not names:
            return "is a directory with nothing in it. Has the trainer written its first step?"
        if any(name.endswith((".parquet", ".jsonl")) for name in names):
            return ""
        runs = sorted(p.parent.name for p in path.glob("*/environment.json"))
        if runs:
            return f"holds runs and is none: give one of them, {path / runs[-1]} for example"
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return (
            f"is a directory without a .parquet or .jsonl file; it has {shown}. Give the directory "
            "of a run, or the one in which the rows themselves are"
        )
    head = head_of(path)
    if not head:
        return "is empty (0 bytes): nothing was written, or it was still in a buffer"
    if head.startswith(PARQUET_MAGIC):
        return ""
    for magic, text in _ENCODED:
        if head.startswith(magic):
            return text.replace("FILE", path.name)
    if _PICKLE.match(head):
        return (
            "is a pickle. Reading one runs whatever code is in it, so it was not opened and "
            "nothing of it was run. Have the program that wrote it write Parquet or JSONL"
        )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head[:2] in (b"{\0", b"\0{"):
        return (
            f"is text in UTF-16; expected UTF-8: iconv -f UTF-16 -t UTF-8 {path.name} > new.jsonl"
        )
    if not head.strip(b"\0"):
        return (
            f"begins with {len(head)} zero bytes (size {path.stat().st_size}): space that was "
            "reserved and never written, or a copy that failed. Write or copy it again"
        )
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith(b"["):
        return (
            "holds one JSON array; expected one object per line, so that it can be read a row at a "
            f"time: jq -c '.[]' {path.name} > rows.jsonl"
        )
    if text.startswith(b"{"):
        return ""
    return f"is neither Parquet nor JSON lines; it begins with {head[:24]!r}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
