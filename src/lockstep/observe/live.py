"""The view of a run in training: a line for each step, and warnings. In a notebook, a chart and a
table too."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any, Literal, get_args

from lockstep.display import block, chart_of, number, table
from lockstep.errors import ConfigError
from lockstep.observe.alarms import Alarm, Architecture, Level, mismatch_alarm
from lockstep.observe.metrics import held_out_label, is_step_row
from lockstep.tables import tables_beside

_STATUS_SECONDS = 0.2
"""Shortest time between two status lines: drawing must cost nothing beside a step."""


ViewKind = Literal["live", "verbose", "json"]


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """Facts that stay the same during a run."""

    num_steps: int | None
    """Number of steps, including steps before a resume; None if unknown."""
    architecture: Architecture = "dense"
    is_one_process: bool = False
    """True if sampler and trainer share the process and the ops; see `mismatch_alarm`."""
    lines: tuple[str, ...] = ()
    """Lines that are shown once, at the start: model, device, contract."""


class View:
    """Writes a line for each step, evaluation and note. On a terminal a last line shows the phase.

    >>> view = View(print)
    >>> view.start(RunHeader(num_steps=100))
    >>> view.step({"step": 0, "reward/mean": 0.25, "time/step_seconds": 2.0})
    step   0/100  reward 0.25  2.0 s  left 3:18
    """

    def __init__(self, write: Callable[[str], object] | None, *, has_status: bool = False) -> None:
        """write: gets each line; None shows nothing. has_status: show phases on stderr."""
        self._write, self._has_status = write, has_status
        self._header = RunHeader(num_steps=0)
        self._level: Level = "unmeasured"
        self._unhealthy: set[str] = set()
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._next_status = 0.0

    def start(self, header: RunHeader) -> None:
        """Shows the header's lines. Called before the first step."""
        self._header = header
        for line in header.lines:
            self._say(line)

    def phase(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        """The step is at "sampling" (episodes), "training", ..."""
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + _STATUS_SECONDS
            self._show_status(f"> {_phase_text(name, num_done, num_total)}")

    def step(self, row: Mapping[str, Any], alarms: Sequence[Alarm] = ()) -> None:
        """Shows a metrics row as it is logged: of a step, or of an evaluation between two. alarms:
        of `Health`; each is said in full when it begins, and in short at every step."""
        evaluation = evaluation_text(row)
        if not is_step_row(row):
            when = "at the start" if row["step"] < 0 else f"step {row['step']}"
            self._say(f"eval  {when}: {evaluation}")
            return
        header = self._header
        alarm = mismatch_alarm(row, header.architecture, is_one_process=header.is_one_process)
        of_all = "" if header.num_steps is None else f"/{header.num_steps}"
        parts = [f"step {row['step']:>{max(len(of_all) - 1, 1)}}{of_all}"]
        for label, name in (("reward", "reward/mean"), ("loss", "train/loss")):
            if name in row:
                parts.append(f"{label} {number(row[name])}")
        if alarm.level != "unmeasured":
            parts.append(f"kl {number(alarm.value)}")
        if (seconds := row.get("time/step_seconds")) is not None:
            self._step_seconds.append(seconds)
            parts.append(format_seconds(seconds))
        for label, tokens, phase in (
            ("sample", "tokens/sampled", "time/sample_seconds"),
            ("train", "tokens/trained", "time/train_seconds"),
        ):
            if tokens in row and row.get(phase, 0) > 0:
                parts.append(f"{label} {number(row[tokens] / row[phase])} tok/s")
        if self._step_seconds and header.num_steps is not None:
            mean = sum(self._step_seconds) / len(self._step_seconds)
            left = mean * max(0, header.num_steps - row["step"] - 1)
            parts.append(f"left {format_seconds(left)}")
        if evaluation:
            parts.append(f"eval {evaluation}")
        if num_failed := row.get("episodes/failed"):
            parts.append(f"failed {num_failed:g}/{row['episodes/total']:g}")
        if alarms:
            parts.append(f"health: {', '.join(each.label for each in alarms)}")
        self._say("  ".join(parts))
        # Said when it changes, not at every step that stays bad.
        if alarm.level != self._level and alarm.level not in ("ok", "unmeasured"):
            self.note(alarm.text, alarm.level)
        self._level = alarm.level
        for each in alarms:
            if each.name not in self._unhealthy:
                self.note(each.text, each.level)
        self._unhealthy = {each.name for each in alarms}

    def note(self, text: str, level: Level = "notice") -> None:
        """One line that must not be lost: a warning, a failure, an address."""
        self._say(f"{level}: {text}" if level in ("warning", "critical") else text)

    def close(self) -> None:
        """Removes the status line."""
        self._show_status("")

    def _show_status(self, text: str) -> None:
        if self._has_status:
            try:
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            except (OSError, ValueError):
                self._has_status = False

    def _say(self, line: str) -> None:
        if self._write is None:
            return
        self._show_status("")
        try:
            self._write(line)
        except UnicodeError:  # the console has another encoding
            self._write(ascii(line))
        except (OSError, ValueError):  # nobody reads it any more: the run goes on without it
            self._write = None


def _phase_text(name: str, num_done: int, num_total: int) -> str:
    return f"{name} {num_done}/{num_total}" if num_total else name


# -- in a notebook ---------------------------------------------------------------------------------

DRAW_SECONDS = 0.3
"""Shortest time between two drawings: a page with many open outputs stays quick."""
NUM_ROWS = 5
"""Steps in the table."""
NUM_LINES = 12
"""Last lines of the plain form, for a frontend without HTML."""
_COLUMNS: dict[str, str] = tables_beside(__file__)["columns"]

Show = Callable[[dict[str, str]], object]
"""Draws the bundle {mime type: text} in place of the one before."""


class NotebookView(View):
    """One run in the output of a cell, drawn anew at each step. It is plain HTML: it stays in the
    file, and needs no widgets."""

    def __init__(self, show: Show, *, name: str = "") -> None:
        """name: of a run among several."""
        super().__init__(self._add_line)
        self._show, self._name = show, name
        self._notes: list[str] = []
        self._lines: list[str] = []
        self._rows: list[Mapping[str, Any]] = []
        self._is_started, self._phase, self._next = False, "", 0.0

    def start(self, header: RunHeader) -> None:
        super().start(header)
        self._is_started = True
        self._draw()

    def phase(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        self._phase = _phase_text(name, num_done, num_total)
        self._draw_if_due()

    def step(self, row: Mapping[str, Any], alarms: Sequence[Alarm] = ()) -> None:
        self._rows.append(row)
        super().step(row, alarms)
        self._draw_if_due()

    def close(self) -> None:
        """The last drawing, which stays."""
        self._phase = ""
        self._draw()

    def _add_line(self, text: str) -> None:
        """A line as a terminal shows it. A line that repeats no row stays visible."""
        self._lines.append(text)
        if text not in self._header.lines and not text.startswith(("step ", "eval ")):
            self._notes.append(text)
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
        done, num_steps = steps[-1]["step"] + 1 if steps else 0, self._header.num_steps
        of_all = f" of {num_steps}" if num_steps else ""
        at = f"{self._name} step {done}{of_all}".strip() if self._is_started else ""
        title = ", ".join(filter(None, [at, self._phase]))
        chart = chart_of(self._rows, num_steps=num_steps)
        columns = [name for name in _COLUMNS if any(name in row for row in steps)]
        shown = [[row.get(name, "") for name in columns] for row in steps[-NUM_ROWS:]]
        last = table(shown, head=[_COLUMNS[name] for name in columns]) if shown else ""
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        about = escape("\n".join(self._header.lines))
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


def open_view(kind: ViewKind = "live", *, name: str = "") -> View:
    """A view on stdout, or in the cell of a notebook. "json" shows nothing, since stdout belongs to
    the result.

    name: of a run among several, which begins each of its lines. Raises ConfigError for another
    kind.
    """
    if kind not in (kinds := get_args(ViewKind)):
        raise ConfigError(f"view={kind!r}; expected one of {', '.join(kinds)}.")
    if kind == "json" or sys.stdout is None:
        return View(None)
    if (show := find_cell()) is not None:
        return NotebookView(show, name=name)
    has_status = sys.stdout.isatty() and sys.stderr.isatty() and not name
    return View(partial(print, *filter(None, [name]), flush=True), has_status=has_status)


def evaluation_text(row: Mapping[str, Any]) -> str:
    """The held-out means of a row in one line; empty if it has none.

    >>> evaluation_text({"eval/greedy/mean@1": 0.9141, "eval/greedy/mean@1/low": 0.9})
    'greedy 0.914'
    """
    means = [(held_out_label(name), value) for name, value in row.items()]
    return ", ".join(f"{label} {number(value)}" for label, value in means if label)


def format_seconds(seconds: float) -> str:
    """A duration as people write it.

    >>> [format_seconds(s) for s in (0.42, 8.0, 75.0, 7384.0)]
    ['0.4 s', '8 s', '1:15', '2:03:04']
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 5 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
