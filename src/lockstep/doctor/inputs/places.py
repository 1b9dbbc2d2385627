"""Recognises the content of a path by its first bytes, before it is read. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import DataError

PARQUET_MAGIC = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER = {
    b"\x1f\x8b": "is compressed with gzip",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd",
    b"PK\x03\x04": "is a zip archive (as .pt and .npz files are)",
    b"ARROW1": "is an Arrow IPC (Feather) file",
}
"""First bytes -> kind of file."""
_PICKLE = re.compile(rb"\x80[\x02-\x05]|\(?c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n")
"""The first bytes of a pickle: of protocol 2 to 5, or a global by name in the older ones."""


def check_place(path: Path) -> None:
    """Raises DataError unless there is a file or a directory that can be read."""
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
        if is_file:
            head_of(path, 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from None
    if not is_file and not is_directory:
        kind = "is neither a file nor a directory" if path.exists() else "does not exist"
        if path.is_symlink():
            kind = "is a link to nothing"
        raise DataError(
            f"{path} {kind}. Expected the directory of a run, or a dump: a file, or its parts."
        )


def judged(path: Path, files: Sequence[Path]) -> Path:
    """The only file of a directory, else the directory, if its own files are parts of one dump:
    their names differ in their numbers alone. Raises DataError otherwise."""
    own = sorted(file.name for file in files if file.parent == path)
    if len({re.sub(r"\d+", "", name) for name in own}) > 1:
        raise DataError(
            f"{path} holds several dumps, and the doctor judges one. Give one of them: "
            f"{', '.join(str(path / name) for name in own)}. (Names of parts of one dump differ in "
            "their numbers alone.)"
        )
    return path / own[0] if len(files) == len(own) == 1 else path


def head_of(path: Path, num_bytes: int = 4096) -> bytes:
    """The first bytes of a file; OSError if it cannot be read."""
    with open(path, "rb") as file:
        return file.read(num_bytes)


def why_no_rows(path: Path) -> str:
    """The reason why a path cannot hold rows, to end an error with; empty for Parquet, JSON lines,
    and directories of them. `path` was given to `check_place`."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        if any(name.endswith((".parquet", ".jsonl")) for name in names):
            return ""
        if runs := sorted(p.parent.name for p in path.glob("*/environment.json")):
            listed = ", ".join(str(path / run) for run in runs)
            return f"holds runs and is none. Give one of them: {listed}"
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return f"is a directory without a .parquet or .jsonl file; it has {shown or 'nothing'}"
    head = head_of(path)
    if not head:
        return "is empty (0 bytes): nothing was written, or it was still in a buffer"
    if _PICKLE.match(head):
        return (
            "is a pickle. Reading one runs whatever code is in it, so nothing of it was run. Have "
            "the program that wrote it write Parquet or JSONL"
        )
    for magic, kind in _OTHER.items():
        if head.startswith(magic):
            return f"{kind}. Unpack it, or write the rows as Parquet or JSONL"
    if head.startswith(PARQUET_MAGIC):
        return ""
    if not head.strip(b"\0"):
        return f"begins with {len(head)} zero bytes: it was never written, or a copy failed"
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith(b"["):
        return f"holds one JSON array; expected one object per line: jq -c '.[]' {path.name}"
    if text.startswith(b"{") and not text.startswith(b"{\0"):
        return ""
    return f"is neither Parquet nor JSON lines; it begins with {head[:24]!r}"
