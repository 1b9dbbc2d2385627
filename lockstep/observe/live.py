"""What a person sees while a run goes on: a panel in a terminal, lines elsewhere, or nothing.

A view is told what happens (`phase`, `step`, `note`) and decides itself when to draw. It has no
thread and no timer: between calls it costs nothing, and drawing is limited to a share of the time.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.observe.alarms import Alarm, Architecture, Level, mismatch_alarm
from lockstep.observe.metrics import held_out_label, is_step_row

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_FULL, _EMPTY = "\u2501", "\u2500"
_STYLES: dict[Level, str] = {
    "unmeasured": "dim",
    "ok": "green",
    "notice": "cyan",
    "warning": "yellow",
    "critical": "bold red",
}
_MARKS: dict[Level, str] = {
    "unmeasured": " ", "ok": " ", "notice": "~", "warning": "!", "critical": "!!",
}  # fmt: skip

_SPARKLINE_WIDTH = 40
_DRAWING_SHARE = 1 / 1000
"""Share of the time that drawing may take: 0.6 ms of a step of 0.6 s."""
_MIN_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What stays the same during a run."""

    name: str
    num_steps: int
    """Steps in all, those before a resume included."""
    first_step: int = 0
    """Above 0 after a resume."""
    architecture: Architecture = "dense"
    is_one_process: bool = False
    """Sampler and trainer share the process and the ops; see `mismatch_alarm`."""
    lines: tuple[str, ...] = ()
    """Said once at the start: model, device, contract, run directory."""


class View(Protocol):
    """Receives what happens in a run. Methods may be called in any order after `start`."""

    def start(self, header: RunHeader) -> None: ...

    def phase(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        """What the step is at: "sampling" (episodes), "training" (micro-batches), ..."""
        ...

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is complete: its metrics row, as it is logged."""
        ...

    def note(self, text: str, level: Level = "notice") -> None:
        """One line that must not be lost: a warning, a checkpoint, a failure."""
        ...

    def close(self) -> None: ...


def open_view(
    *, is_json: bool = False, console: Console | None = None, plain: bool = False
) -> View:
    """A panel in a terminal, one line per step elsewhere (or if `plain`), nothing for --json."""
    if is_json:
        return SilentView()
    console = console or Console(highlight=False)
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainView(print)
    return LiveView(console)


# ---------------------------------------------------------------------------------------------
# Shared figures
# ---------------------------------------------------------------------------------------------


@dataclass
class _Progress:
    """What the views derive from the rows."""

    header: RunHeader
    started: float
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_SPARKLINE_WIDTH))
    mismatches: deque[float] = field(default_factory=lambda: deque(maxlen=_SPARKLINE_WIDTH))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    last_step: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    alarm: Alarm = field(default_factory=lambda: Alarm("unmeasured", math.nan, ""))
    evaluation: str = ""

    def add(self, row: Mapping[str, Any]) -> None:
        if text := evaluation_text(row):
            self.evaluation = f"step {row['step']}: {text}"
        if not is_step_row(row):
            return
        self.last_step = row["step"]
        self.row = row
        self.alarm = mismatch_alarm(
            row, self.header.architecture, is_one_process=self.header.is_one_process
        )
        if "reward/mean" in row:
            self.rewards.append(row["reward/mean"])
        if self.alarm.level != "unmeasured":
            self.mismatches.append(self.alarm.value)
        if "time/step_seconds" in row:
            self.step_seconds.append(row["time/step_seconds"])

    @property
    def num_done(self) -> int:
        return self.header.first_step if self.last_step is None else self.last_step + 1

    @property
    def seconds_left(self) -> float:
        """From the mean of the last 20 steps; NaN before the first."""
        if not self.step_seconds:
            return math.nan
        mean = sum(self.step_seconds) / len(self.step_seconds)
        return mean * max(0, self.header.num_steps - self.num_done)

    def tokens_per_second(self, tokens: str, seconds: str) -> float:
        elapsed = self.row.get(seconds, 0)
        return self.row.get(tokens, math.nan) / elapsed if elapsed > 0 else math.nan


def evaluation_text(row: Mapping[str, Any]) -> str:
    """The held-out means of a row in one line; empty if it has none.

    >>> evaluation_text({"eval/greedy/mean@1": 0.9141, "eval/greedy/mean@1/low": 0.9})
    'greedy 0.914'
    """
    means = [(held_out_label(name), value) for name, value in row.items()]
    return ", ".join(f"{label} {format_number(value)}" for label, value in means if label)


def sparkline(values: Sequence[float], *, is_log: bool = False) -> str:
    """Values as a row of block characters, lowest to highest; a gap where one is not finite.

    >>> sparkline([0.0, 0.5, 1.0])
    '\u2581\u2585\u2588'
    """
    # On a log scale a value of exactly 0 stands at the bottom, with the smallest that is not 0.
    scaled = [math.log10(v) if is_log and v > 0 else math.nan if is_log else v for v in values]
    finite = [v for v in scaled if math.isfinite(v)]
    if not finite:
        return "".join(_BLOCKS[0] if v == 0 else " " for v in values)
    low, high = min(finite), max(finite)
    span = high - low
    out = []
    for value, place in zip(values, scaled, strict=True):
        if is_log and value == 0:
            out.append(_BLOCKS[0])
        elif not math.isfinite(place):
            out.append(" ")
        elif span == 0:
            out.append(_BLOCKS[3])
        else:
            out.append(_BLOCKS[round((place - low) / span * (len(_BLOCKS) - 1))])
    return "".join(out)


def format_number(value: float) -> str:
    """Three significant digits; exponents only where they are needed.

    >>> [format_number(v) for v in (0.0, 0.8349, 12.0, 5234.0, 3.1e-9)]
    ['0', '0.835', '12', '5234', '3.1e-09']
    """
    if value != value:
        return "-"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.2g}"


def format_seconds(seconds: float) -> str:
    """As people say it.

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


# ---------------------------------------------------------------------------------------------
# The views
# ---------------------------------------------------------------------------------------------


class SilentView:
    """For --json: stdout belongs to the result."""

    def start(self, header: RunHeader) -> None:
        pass

    def phase(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        pass

    def step(self, row: Mapping[str, Any]) -> None:
        pass

    def note(self, text: str, level: Level = "notice") -> None:
        pass

    def close(self) -> None:
        pass


class PlainView:
    """One line per step, for logs and pipes. `write` gets each line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._progress: _Progress | None = None
        self._level: Level = "unmeasured"

    def start(self, header: RunHeader) -> None:
        self._progress = _Progress(header, time.monotonic())
        for line in header.lines:
            self._write(line)

    def phase(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        pass

    def step(self, row: Mapping[str, Any]) -> None:
        progress = self._progress
        assert progress is not None, "a view is started before its first step"
        progress.add(row)
        if not is_step_row(row):
            self._write(f"eval  {progress.evaluation}")
            return
        width = len(str(progress.header.num_steps))
        parts = [f"step {row['step']:>{width}}/{progress.header.num_steps}"]
        for label, name in (("reward", "reward/mean"), ("loss", "train/loss")):
            if name in row:
                parts.append(f"{label} {format_number(row[name])}")
        if progress.alarm.level != "unmeasured":
            parts.append(f"kl {format_number(progress.alarm.value)}")
        if "time/step_seconds" in row:
            parts.append(format_seconds(row["time/step_seconds"]))
        for label, tokens, seconds in _RATES:
            rate = progress.tokens_per_second(tokens, seconds)
            if math.isfinite(rate):
                parts.append(f"{label} {format_number(rate)} tok/s")
        if math.isfinite(progress.seconds_left):
            parts.append(f"left {format_seconds(progress.seconds_left)}")
        if text := evaluation_text(row):
            parts.append(f"eval {text}")
        self._write("  ".join(parts))
        # Said when it changes, not at every step that stays bad.
        if progress.alarm.level != self._level:
            if progress.alarm.level not in ("ok", "unmeasured"):
                self.note(progress.alarm.text, progress.alarm.level)
            self._level = progress.alarm.level

    def note(self, text: str, level: Level = "notice") -> None:
        self._write(f"{level}: {text}" if level in ("warning", "critical") else text)

    def close(self) -> None:
        pass


_RATES = (
    ("sample", "tokens/sampled", "time/sample_seconds"),
    ("train", "tokens/trained", "time/train_seconds"),
)


class LiveView:
    """A panel, redrawn in place: progress, curves, speed, alarms, and the phase of the step."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._progress: _Progress | None = None
        self._phase = ""
        self._notes: deque[tuple[str, Level]] = deque(maxlen=3)
        self._next_draw = 0.0
        self._level: Level = "unmeasured"
        self.drawing_seconds = 0.0
        """Spent on drawing so far."""

    def start(self, header: RunHeader) -> None:
        self._progress = _Progress(header, self._clock())
        for line in header.lines:
            self._console.print(Text(line, style="dim"))
        self._live.start()
        self._draw()

    def phase(self, name: str, num_done: int = 0, num_total: int = 0) -> None:
        self._phase = f"{name} {num_done}/{num_total}" if num_total else name
        self._draw_if_due()

    def step(self, row: Mapping[str, Any]) -> None:
        progress = self._progress
        assert progress is not None, "a view is started before its first step"
        progress.add(row)
        alarm = progress.alarm
        if alarm.level != self._level:
            if alarm.level not in ("ok", "unmeasured"):
                self._notes.append((f"step {row['step']}: {alarm.text}", alarm.level))
            self._level = alarm.level
        self._draw_if_due()

    def note(self, text: str, level: Level = "notice") -> None:
        self._notes.append((text, level))
        self._draw_if_due()

    def close(self) -> None:
        if self._progress is not None:
            self._phase = ""
            self._draw()
        self._live.stop()

    def _draw_if_due(self) -> None:
        if self._clock() >= self._next_draw and self._progress is not None:
            self._draw()

    def _draw(self) -> None:
        assert self._progress is not None, "a view is started before it is drawn"
        start = time.perf_counter()
        self._live.update(self._panel(self._progress, self._console.width), refresh=True)
        cost = time.perf_counter() - start
        self.drawing_seconds += cost
        self._next_draw = self._clock() + max(_MIN_INTERVAL_SECONDS, cost / _DRAWING_SHARE)

    def _panel(self, progress: _Progress, width: int) -> Text:
        header, row = progress.header, progress.row
        out = Text(no_wrap=True, overflow="ellipsis")
        out.append(header.name, "bold")
        out.append(f"  step {progress.num_done}/{header.num_steps}  ")
        out.append(f"{format_seconds(self._clock() - progress.started)} gone", "dim")
        if math.isfinite(progress.seconds_left):
            out.append(f", {format_seconds(progress.seconds_left)} left", "dim")
        bar_width = max(10, min(60, width - 2))
        share = progress.num_done / max(1, header.num_steps)
        filled = min(bar_width, round(share * bar_width))
        out.append("\n")
        out.append(_FULL * filled, "green")
        out.append(_EMPTY * (bar_width - filled), "dim")
        spark_width = max(8, min(_SPARKLINE_WIDTH, width - 30))
        if progress.rewards:
            _line(out, "reward", progress.rewards[-1])
            out.append(sparkline(list(progress.rewards)[-spark_width:]), "cyan")
        if progress.mismatches:
            _line(out, "kl", progress.mismatches[-1], _STYLES[progress.alarm.level])
            out.append(sparkline(list(progress.mismatches)[-spark_width:], is_log=True), "magenta")
            out.append(" log", "dim")
        speeds = [
            f"{label} {format_number(rate)} tok/s"
            for label, tokens, seconds in _RATES
            if math.isfinite(rate := progress.tokens_per_second(tokens, seconds))
        ]
        if "time/step_seconds" in row:
            speeds.append(f"{format_seconds(row['time/step_seconds'])} a step")
        if speeds:
            out.append("\nspeed    ", "dim")
            out.append("   ".join(speeds))
        losses = [
            f"{label} {format_number(row[name])}"
            for label, name in (
                ("loss", "train/loss"),
                ("grad norm", "train/grad_norm"),
                ("entropy", "train/entropy"),
                ("clipped", "train/clip_fraction"),
            )
            if name in row
        ]
        if losses:
            out.append("\ntrain    ", "dim")
            out.append("   ".join(losses))
        if progress.evaluation:
            out.append("\neval     ", "dim")
            out.append(progress.evaluation)
        for text, level in self._notes:
            out.append(f"\n{_MARKS[level]:<2} ", _STYLES[level])
            # Folded here, because the panel's lines do not wrap and the advice stands at the end.
            lines = textwrap.wrap(text, max(10, width - 3), max_lines=3, placeholder=" ...")
            out.append("\n   ".join(lines), _STYLES[level])
        if self._phase:
            out.append("\n> ", "dim")
            out.append(self._phase, "dim")
        return out


def _line(out: Text, label: str, value: float, style: str = "bold") -> None:
    out.append(f"\n{label:<9}", "dim")
    out.append(f"{format_number(value):<9}", style)
