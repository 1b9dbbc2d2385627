"""The fields of each dialect's requests, and what becomes of them: fields.toml.

A field is honoured, accepted without effect, ignored (counted in the trajectory's metrics), or
refused. A field in no table is refused as well, because its sender expects something of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from lockstep.tables import tables_beside


@dataclass(frozen=True, slots=True)
class Field:
    """Treatment of one field of a body."""

    treatment: Literal["honoured", "accepted", "ignored", "refused"]
    """accepted: changes nothing and need not. ignored: has no effect; a request that sets it is
    counted as gateway/ignored/NAME. refused: status 400."""
    about: str = ""
    """Explains how the field is honoured, why it is accepted or ignored, or what to send instead.
    """
    neutral: tuple[Any, ...] = ()
    """Values of an ignored or refused field that change nothing; null always is one."""


Fields = Mapping[str, Field]

_TABLES = tables_beside(__file__)
"""Names of fields, separated by blanks -> treatment = about, and neutral."""


def _read(*tables: str) -> Fields:
    found: dict[str, Field] = {}
    for names, row in (entry for table in tables for entry in _TABLES[table].items()):
        ((treatment, about),) = ((key, text) for key, text in row.items() if key != "neutral")
        field = Field(cast(Any, treatment), about, tuple(row.get("neutral", ())))
        found |= dict.fromkeys(names.split(), field)
    return found


_SHARED = {"chat": ("shared", "openai"), "responses": ("shared", "openai"), "messages": ("shared",)}
FIELDS = {name: _read(*_SHARED.get(name, ()), name) for name in _TABLES}
"""Name of a table -> its fields. "others" are fields of other servers, which every dialect refuses
unless they change nothing."""
