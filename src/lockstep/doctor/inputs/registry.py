"""Finds the format of a path."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import did_you_mean
from lockstep.doctor.inputs import chat, run_dump, trainers  # noqa: F401 - they define formats
from lockstep.doctor.inputs.base import DECLARED, Dump
from lockstep.doctor.inputs.native import RowsDump
from lockstep.doctor.inputs.places import check_place, why_no_rows
from lockstep.errors import DataError

FORMATS = sorted(
    (kind for kind in Dump.formats if kind.format in DECLARED),
    key=lambda kind: [*DECLARED].index(kind.format),
)
"""The formats of the package, in the order of formats.toml."""

EXAMPLE = Path(__file__).parents[1] / "example.parquet"
"""A dump with two defects, written by docs/proof/example.py: `lockstep doctor example`."""


def open_dump(path: str | Path, *, format: str = "") -> Dump:
    """The run or dump at `path`; "example" is the shipped dump, unless a file has that name.

    format: name of a format; empty recognises it. A plugin's formats are tried before the
    package's. Raises DataError if there is no file, or no format recognises it.
    """
    path = Path(path)
    formats = [*(kind for kind in Dump.formats if kind not in FORMATS), *FORMATS]
    names = [kind.format for kind in formats]
    if format and format not in names:
        raise DataError(f"--format {format}: no such format.{did_you_mean(format, names)}")
    if path == Path("example") and not path.exists():
        shipped = RowsDump(EXAMPLE)
        shipped.path = path  # the name in the commands that a diagnosis shows
        return shipped
    check_place(path)
    for kind in formats:
        if kind.format == format or (not format and kind.recognises(path)):
            return kind(path)
    if why := why_no_rows(path):
        known = ", ".join(kind.format for kind in FORMATS)
        raise DataError(f"{path} {why}. The doctor reads: {known} (documentation: Doctor).")
    return RowsDump(path)  # names the missing columns
