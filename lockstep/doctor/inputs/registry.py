"""Which format a path is in."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import did_you_mean
from lockstep.doctor.inputs.base import Dump
from lockstep.doctor.inputs.run import RunDump
from lockstep.errors import DataError

FORMATS: tuple[type[Dump], ...] = (RunDump,)
"""In the order in which they are tried: the one that is most particular first."""


def open_dump(path: str | Path, *, format: str = "") -> Dump:
    """The run or dump at `path`. format: one of FORMATS by name; empty finds it out.

    Raises DataError if there is nothing, or nothing that any format recognises.
    """
    path = Path(path)
    names = [kind.format for kind in FORMATS]
    if format and format not in names:
        raise DataError(f"--format {format}: no such format.{did_you_mean(format, names)}")
    if not path.exists():
        raise DataError(f"there is nothing at {path}. Expected a run directory or a dump.")
    for kind in FORMATS:
        if kind.format == format or (not format and kind.recognises(path)):
            return kind(path)
    raise DataError(
        f"{path} is in no format that the doctor reads ({', '.join(names)}). See docs/doctor.md "
        "for the columns of a Parquet or JSONL file of your own; --format NAME says which it is."
    )
