"""Names by which trainers log the figures that the rules of training read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

THEIR_NAMES: Mapping[str, Sequence[str]] = {
    ours: theirs.split()
    for ours, theirs in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text("utf-8")
    ).items()
}
"""Our name -> the same figure in other programs."""


def known_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics with our names beside those of other programs; ours win.

    >>> known_metrics([{"actor/pg_clipfrac": 0.1, "step": 3}])[0]["train/clip_fraction"]
    0.1
    """
    return [
        {
            ours: row[name]
            for ours, theirs in THEIR_NAMES.items()
            for name in reversed(theirs)
            if name in row
        }
        | dict(row)
        for row in rows
    ]
