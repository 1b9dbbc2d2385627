"""Writes a report: one HTML file that needs nothing else, and the same as JSON.

The page holds its script and style, and its policy allows these two by their hash and nothing else:
the page sends no request, and text that a model wrote cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.errors import RunError
from lockstep.report.document import Vocabulary, build_document
from lockstep.report.selection import NUM_TOKENS, NUM_TRAJECTORIES
from lockstep.store.files import write_atomically
from lockstep.store.run import Run


@dataclass(frozen=True, kw_only=True)
class Template:
    """The files of this package that make one kind of page."""

    page: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]
    label: str
    """Kind of page, shown after its title."""


REPORT = Template(
    page="page.html",
    styles=("style.css",),
    scripts=("base.js", "charts.js", "trajectories.js", "page.js"),
    label="Lockstep report",
)


def write_report(
    runs: Sequence[Run],
    out: str | os.PathLike[str],
    *,
    vocabularies: Sequence[Vocabulary | None] | None = None,
    title: str = "",
    num_trajectories: int = NUM_TRAJECTORIES,
    num_tokens: int = NUM_TOKENS,
) -> Path:
    """Writes `out` (an .html file) and the same content beside it as .json; returns `out`.

    vocabularies: how the token ids of each run read; None shows ids.
    """
    if not runs:
        raise RunError("a report needs at least one run.")
    vocabularies = vocabularies or [None] * len(runs)
    if len(vocabularies) != len(runs):
        raise RunError(f"{len(runs)} runs, but {len(vocabularies)} vocabularies: expected as many.")
    document = build_document(
        runs,
        vocabularies=vocabularies,
        title=title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        num_trajectories=num_trajectories,
        num_tokens=num_tokens,
    )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    page, data = render_page(document), _dump(document)
    write_atomically(out, lambda file: file.write(page.encode()))
    write_atomically(out.with_suffix(".json"), lambda file: file.write(data.encode()))
    return out


def render_page(document: dict[str, Any], template: Template = REPORT) -> str:
    """The HTML of a document."""
    style = "".join(_read(name) for name in template.styles)
    script = "".join(_read(name) for name in template.scripts)
    # In JSON "<" can only stand inside a string, where its escape means the same: no text can
    # end the script element, or open a comment in it.
    data = _dump(document).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(f"{document['title']} - {template.label}"),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    # One pass over the template: a mark inside of a filled-in part stays what it is.
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], _read(template.page))


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return files("lockstep.report").joinpath(name).read_text("utf-8")
