"""The page at `/`: models, addresses to copy, counts and the last errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_suffix(".css").read_text("utf-8")


def section(
    title: str,
    *,
    addresses: Mapping[str, str],
    counts: Mapping[str, int],
    errors: Iterable[str] = (),
) -> str:
    """The part of one API."""
    lines = "".join(f"<li>{escape(error)}</li>" for error in errors)
    return (
        f"<h1>{escape(title)}</h1><h2>Addresses</h2>{_table(addresses, 'code')}"
        f"<h2>Since the start</h2>{_table(counts, 'span')}"
        + (f"<h2>Last errors</h2><ul>{lines}</ul>" if lines else "")
    )


def landing_page(sections: Iterable[str]) -> str:
    """Loads nothing, and itself again every 5 seconds."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" '
        'content="5"><meta name="viewport" content="width=device-width">'
        f"<title>lockstep serve</title><style>{STYLE}</style>{''.join(sections)}</html>"
    )


def _table(rows: Mapping[str, object], tag: str) -> str:
    cells = (
        f"<tr><td>{escape(name)}</td><td><{tag}>{escape(str(value))}</{tag}></td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"
