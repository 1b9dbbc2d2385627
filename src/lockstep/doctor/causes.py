"""The known causes of a mismatch, and the remedy of each, from causes.toml.

Causes of one *class* leave the same marks on rows; a verdict is right if it names one of them. The
classes were fixed before the doctor was tried on anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.tables import tables_beside

Room = Literal["tokens", "template", "values", "numerics", "noise", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason why sampler and trainer differ, with the texts that users read about it."""

    name: str = ""
    room: Room = "tokens"
    kind: str = ""
    """Class of the cause; empty if it is the only one of its class."""
    title: str
    """The defect, in one sentence."""
    remedy: str
    """The repair, in any trainer."""
    shown_by: Sequence[str] = ("model",)
    """Records that show the cause where it moves log-probs little: any one of them does."""
    in_trainers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Trainer -> the setting or command that repairs it there."""
    in_engines: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engine or library of models -> the same."""

    @property
    def equivalents(self) -> str:
        """Its class: naming any cause of the class is right."""
        return self.kind or self.name


_TABLES: Any = tables_beside(__file__)
"""Room -> cause -> the fields of `Cause`."""
CAUSES: dict[str, Cause] = {
    name: Cause(name=name, room=room, **told)
    for room, causes in _TABLES.items()
    for name, told in causes.items()
}
"""Every cause by name; `add_cause` adds a plugin's."""


def add_cause(cause: Cause) -> None:
    """Makes a cause known, for a hypothesis of a plugin that names it."""
    CAUSES[cause.name] = cause
