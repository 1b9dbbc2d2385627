"""Chat templates of foreign programs, after public formats, for wild_players.py.

Each is written anew in the way of its model's family, with what that family refuses.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template after a public format, and how its replies are read: formats.toml explains
    the fields."""

    jinja: str
    controls: tuple[str, ...]
    ends: tuple[str, ...]
    call: str = ""
    thinks: bool = False
    tool_role: str = "tool"
    has_tools: bool = False
    bos: str = ""
    separator: str = ""
    header: str = ""
    has_date: bool = False
    no_thinking: str = ""
    ends_by_role: bool = False

    @classmethod
    def read(cls, name: str, *, controls: list[str], ends: list[str], **fields: Any) -> Template:
        # Players learnt their vocabulary from the texts with this first line.
        jinja = "\n" + (FOLDER / f"{name}.jinja").read_text("utf-8")
        return cls(jinja=jinja, controls=tuple(controls), ends=tuple(ends), **fields)


TEXT_CALL = r"CALL (?P<name>\w+) (?P<arguments>\{.*?\})"

FOLDER = Path(__file__).with_suffix("")
"""Has the templates, a file each, and their formats."""
TEMPLATES = {
    name: Template.read(name, **fields)
    for name, fields in tomllib.loads((FOLDER / "formats.toml").read_text("utf-8")).items()
}
