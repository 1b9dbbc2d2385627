"""Writing files so that a reader finds the old one or the whole of the next; strict JSON and its
lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import DataError

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes through a neighbour and renames it: `path` is never half written, also after a kill.

    `write` gets the open binary file.
    """
    neighbour = path.with_name(f"{path.name}.partial")
    with open(neighbour, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(neighbour, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames in `path` survive a power cut."""
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


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for every line that is not blank.

    Raises DataError that begins with `path:line` for a line that is no JSON object in UTF-8.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(
                line.decode("utf-8-sig" if number == 1 else "utf-8"),
                parse_constant=_refuse_constant,
            )
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8: {error.reason}.") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a JSON object: {error}.") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{path}:{number}: expected a JSON object, found {type(record).__name__}."
            )
        yield number, record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
