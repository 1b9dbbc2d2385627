"""A run that shows itself in a notebook: a chart and a table in the output of the cell, drawn anew
at each step. They are plain HTML, so that they stay in the file, and need no widgets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from lockstep.display import block, chart_of, table
from lockstep.observe.metrics import is_step_row

DRAW_SECONDS = 0.3
"""Shortest time between two drawings: a page with many open outputs stays quick."""
NUM_ROWS = 5
"""Steps in the table."""
NUM_LINES = 12
"""Last lines of the plain form, for a frontend without HTML."""
_COLUMNS = {
    "step": "step",
    "reward/mean": "reward",
    "train/loss": "loss",
    "mismatch/k3": "kl (k3)",
    "tokens/sampled": "tokens",
    "time/step_seconds": "seconds",
    "health/alarms": "alarms",
}

Show = Callable[[dict[str, str]], object]
"""Draws the bundle {mime type: text} in place of the one before."""


class NotebookPanel:
    """One run in the output of a cell."""

    def __init__(self, show: Show, *, name: str = "") -> None:
        """name: of a run among several."""
        self._show, self._name = show, name
        self._start: list[str] = []
        self._notes: list[str] = []
        self._lines: list[str] = []
        self._rows: list[Mapping[str, Any]] = []
        self._is_started, self._num_steps = False, 0
        self._phase, self._next = "", 0.0

    def start(self, lines: Sequence[str], num_steps: int | None) -> None:
        """lines: facts that are known before the first step."""
        self._is_started, self._num_steps = True, num_steps or 0
        self._start = list(lines)
        self._draw()

    def line(self, text: str) -> None:
        """A line as a terminal shows it. A line that repeats no row stays visible."""
        self._lines.append(text)
        if text not in self._start and not text.startswith(("step ", "eval ")):
            self._notes.append(text)
            self._draw()

    def row(self, row: Mapping[str, Any]) -> None:
        """The metrics of a step, or of an evaluation between two."""
        self._rows.append(row)
        self._draw_if_due()

    def phase(self, text: str) -> None:
        """The part of the step that runs."""
        self._phase = text
        self._draw_if_due()

    def close(self) -> None:
        """The last drawing, which stays."""
        self._phase = ""
        self._draw()

    def _draw_if_due(self) -> None:
        if time.monotonic() >= self._next:
            self._draw()

    def _draw(self) -> None:
        self._show({"text/html": self.html(), "text/plain": "\n".join(self._lines[-NUM_LINES:])})
        self._next = time.monotonic() + DRAW_SECONDS

    def html(self) -> str:
        """The panel as it is drawn."""
        steps = [row for row in self._rows if is_step_row(row)]
        done = steps[-1]["step"] + 1 if steps else 0
        of_all = f" of {self._num_steps}" if self._num_steps else ""
        at = f"{self._name} step {done}{of_all}".strip() if self._is_started else ""
        title = ", ".join(filter(None, [at, self._phase]))
        chart = chart_of(self._rows, num_steps=self._num_steps)
        columns = [name for name in _COLUMNS if any(name in row for row in steps)]
        shown = [[row.get(name, "") for name in columns] for row in steps[-NUM_ROWS:]]
        last = table(shown, head=[_COLUMNS[name] for name in columns]) if shown else ""
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        about = escape("\n".join(self._start))
        folded = f"<details><summary>settings</summary><pre>{about}</pre></details>"
        curves = chart._repr_html_() if chart.series else ""
        return block(title, curves, last, notes, folded if about else "")


def find_cell() -> Show | None:
    """Draws in the output of the cell that runs; None outside of a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython  # pyright: ignore[reportMissingImports]
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    if not hasattr(get_ipython(), "kernel"):
        return None
    place: Any = None

    def show(bundle: dict[str, str]) -> None:
        nonlocal place
        if place is None:
            place = display(bundle, raw=True, display_id=True)
        else:
            place.update(bundle, raw=True)

    return show
