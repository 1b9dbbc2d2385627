"""Which format a path is in."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import did_you_mean
from lockstep.doctor.inputs.base import Dump
from lockstep.doctor.inputs.chat import ChatDump
from lockstep.doctor.inputs.files import check_place, why_no_rows
from lockstep.doctor.inputs.native import RowsDump
from lockstep.doctor.inputs.nemo_rl import NemoRlDump
from lockstep.doctor.inputs.prime_rl import PrimeRlDump
from lockstep.doctor.inputs.run import RunDump
from lockstep.doctor.inputs.slime import SlimeDump
from lockstep.doctor.inputs.tinker import TinkerDump, TinkerSummaries
from lockstep.doctor.inputs.trl import TrlDump, TrlTexts
from lockstep.doctor.inputs.verl import VerlDump, VerlTexts
from lockstep.errors import DataError

FORMATS: tuple[type[Dump], ...] = (
    RunDump,
    PrimeRlDump,
    NemoRlDump,
    RowsDump,
    VerlDump,
    VerlTexts,
    TrlDump,
    TrlTexts,
    TinkerDump,
    TinkerSummaries,
    ChatDump,
    SlimeDump,
)
"""In the order in which they are tried: the one that is most particular first."""

EXAMPLE = Path(__file__).parents[1] / "example.parquet"
"""A dump with two defects, which `example` means where nothing is called so. docs/proof/example.py
makes it."""


def open_dump(path: str | Path, *, format: str = "") -> Dump:
    """The run or dump at `path`; "example" is the one that is shipped. format: one of FORMATS by
    name; empty finds it out.

    Raises DataError if there is nothing, or nothing that any format recognises.
    """
    path = Path(path)
    names = [kind.format for kind in FORMATS]
    if format and format not in names:
        raise DataError(f"--format {format}: no such format.{did_you_mean(format, names)}")
    if path == Path("example") and not path.exists():
        shipped = RowsDump(EXAMPLE)
        shipped.path = path  # which a command that is shown should name
        return shipped
    check_place(path)
    for kind in FORMATS:
        if kind.format == format or (not format and kind.recognises(path)):
            return kind(path)
    if why := why_no_rows(path):
        raise DataError(f"{path} {why}. The doctor reads: {', '.join(names)} (docs/doctor.md).")
    return RowsDump(path)  # says which columns it lacks
