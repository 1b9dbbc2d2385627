"""Tables and curves as HTML and SVG, for results in a notebook. They need no package and no
network, and take the colours of the page around them."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

from lockstep.errors import UnknownNameError, printable

WIDTH, HEIGHT = 640, 220
"""Size of a chart in its own units; a narrow page scales it down."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 22
COLOURS = ("#2f8fd0", "#e07a2f", "#22a079", "#b8629b", "#a5871d", "#6f7a86")
"""Series of a chart: readable on white and on black."""
NUM_SMOOTHED = 20
"""Number of points above which a curve is drawn as a running mean over a tenth of them, with the
raw curve faintly behind it."""

Series = tuple[Sequence[float], Sequence[float]]
"""(steps, values)."""


def warn(text: str) -> None:
    """Prints a sentence to stderr, in lines of 100 characters."""
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    print("\n".join(map(printable, lines)), file=sys.stderr)


def show_once(error: BaseException) -> None:
    """Prints an error as one sentence, unless it was printed before."""
    if not getattr(error, "is_shown", False):
        warn(f"{type(error).__name__}: {error}")
        setattr(error, "is_shown", True)  # noqa: B010 - of any exception


class Named(dict[str, Any]):
    """A dict by name that answers a mistyped one with the nearest.

    >>> Named(reward=1.0)["rewrd"]
    Traceback (most recent call last):
    ...
    lockstep.errors.UnknownNameError: there is no 'rewrd'. Did you mean 'reward'?
    """

    def __missing__(self, name: str) -> Any:
        raise unknown_name(name, self)


def unknown_name(name: str, known: Iterable[str], *, where: str = "there is") -> UnknownNameError:
    """The error for a name that is not among `known`, with the nearest of them."""
    names = list(dict.fromkeys(map(str, known)))
    near = get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else ""
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return UnknownNameError(
        f"{where} no {name!r}. {hint or f'There are: {shown}.' if names else 'It is empty.'}"
    )


def number(value: Any) -> str:
    """A figure as it is read, any other value as it is.

    >>> [number(v) for v in (0.41562, 12, 51234.0, 3.12e-9, float("nan"), "done")]
    ['0.416', '12', '51,234', '3.1e-09', '-', 'done']
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    size = abs(float(value))
    if math.isnan(size):
        return "-"
    if isinstance(value, int) or size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.2g}"


def table(rows: Iterable[Sequence[Any]], *, head: Sequence[str] = ()) -> str:
    """An HTML table. The text of a cell is escaped; numbers are aligned to the right."""

    def cell(value: Any, tag: str) -> str:
        side = "right" if isinstance(value, (int, float)) else "left"
        style = f"text-align:{side};vertical-align:top;white-space:pre-wrap"
        return f'<{tag} style="{style}">{escape(number(value))}</{tag}>'

    lines = [f"<tr>{''.join(cell(name, 'th') for name in head)}</tr>"] if head else []
    lines += [f"<tr>{''.join(cell(value, 'td') for value in row)}</tr>" for row in rows]
    return f'<table style="margin:4px 0">{"".join(lines)}</table>'


def block(title: str, *parts: str) -> str:
    """A titled block. title: text; parts: HTML."""
    return f'<div><div style="font-weight:600">{escape(title)}</div>{"".join(parts)}</div>'


@dataclass(frozen=True, repr=False)
class Chart:
    """Curves over steps. A notebook shows them; `save` writes them as an SVG file."""

    series: Mapping[str, Series]
    """Label -> (steps, values). A value that is not finite leaves a hole."""
    num_steps: int | None = None
    """Right end of the axis; None: the last step."""

    def __repr__(self) -> str:
        names = ", ".join(f"{name}: {len(steps)} steps" for name, (steps, _) in self.series.items())
        return f"Chart({names})"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the chart to an .svg file. Returns its path."""
        path = Path(path)
        path.write_text(self._repr_html_(), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """SVG as a part of the page, whose colours it takes."""
        drawn = {
            name: [(x, y) for x, y in zip(*series, strict=True) if math.isfinite(y)]
            for name, series in self.series.items()
        }
        points = [point for curve in drawn.values() for point in curve]
        steps, values = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
        first, last = min(steps), max(*steps, self.num_steps or 0, min(steps) + 1)
        ticks = _ticks(min(values), max(values))
        low, high = min(*values, ticks[0]), max(*values, ticks[-1])

        def at(x: float, y: float) -> str:
            across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
            up = (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
            return f"{across:.1f},{HEIGHT - BOTTOM - up:.1f}"

        parts = [_axes(ticks, (first, last), at)]
        right = LEFT
        for number_, (name, curve) in enumerate(drawn.items()):
            colour = COLOURS[number_ % len(COLOURS)]
            parts.append(_curve(curve, colour, at))
            label = f"{name} {number(curve[-1][1])}" if curve else name
            parts.append(f'<rect x="{right}" y="6" width="9" height="9" fill="{colour}"/>')
            parts.append(_text(right + 13, 14, label))
            right += 32 + 6.2 * len(label)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" style="max-width:100%;height:auto;color:inherit" role="img" '
            f'font-family="system-ui,sans-serif" font-size="11" fill="currentColor">'
            f"{''.join(parts)}</svg>"
        )


def chart_of(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str] = (), *, num_steps: int | None = None
) -> Chart:
    """Curves of a run's metrics. names: those to draw; without any, the reward and the held-out
    means, or the loss where there is no reward.

    >>> chart_of([{"step": 0, "reward/mean": 0.25}, {"step": 1, "reward/mean": 0.5}])
    Chart(reward/mean: 2 steps)
    """
    if not names:
        known = dict.fromkeys(name for row in rows for name in row)
        held_out = [name for name in known if re.fullmatch(r"eval/.+/mean@\d+", name)]
        names = [name for name in ("reward/mean", *held_out) if name in known]
        names = names or [name for name in ("train/loss", "eval/loss") if name in known]
    series: dict[str, Series] = {}
    for name in names:
        found = [(row["step"], row[name]) for row in rows if name in row]
        series[name] = [step for step, _ in found], [value for _, value in found]
    return Chart(series, num_steps=num_steps)


def _axes(ticks: Sequence[float], steps: tuple[float, float], at: Any) -> str:
    parts: list[str] = []
    for tick in ticks:
        left, right = at(steps[0], tick), at(steps[1], tick)
        parts.append(f'<path d="M{left} L{right}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(_text(LEFT - 6, float(left.split(",")[1]) + 4, f"{tick:g}", anchor="end"))
    for step, anchor in zip(steps, ("start", "end"), strict=True):
        x = float(at(step, ticks[0]).split(",")[0])
        parts.append(_text(x, HEIGHT - 6, f"step {step:g}", anchor=anchor))
    return "".join(parts)


def _curve(points: list[tuple[float, float]], colour: str, at: Any) -> str:
    if not points:
        return ""
    if len(points) == 1:
        x, y = at(*points[0]).split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'

    def line(curve: list[tuple[float, float]], opacity: float) -> str:
        places = " ".join(at(*point) for point in curve)
        return (
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8" '
            f'stroke-opacity="{opacity}"/>'
        )

    if len(points) < NUM_SMOOTHED:
        return line(points, 1.0)
    width = len(points) // 10
    means = [
        (x, sum(y for _, y in points[max(0, i - width + 1) : i + 1]) / min(width, i + 1))
        for i, (x, _) in enumerate(points)
    ]
    return line(points, 0.25) + line(means, 1.0)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} stroke="none" fill-opacity=".8">{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` or above to `high` or below, two to six of them.

    >>> _ticks(0.03, 0.97), _ticks(2.0, 2.0)
    ([0.2, 0.4, 0.6, 0.8], [2.0, 3.0])
    """
    if high <= low:
        return [low, low + 1.0]
    step = 10.0 ** math.floor(math.log10(high - low))
    width = next(w for w in (step / 5, step / 2, step, step * 2) if (high - low) / w <= 6)
    first = math.ceil(low / width)
    ticks = [round(i * width, 12) for i in range(first, math.floor(high / width + 1e-9) + 1)]
    return ticks if len(ticks) > 1 else [low, high]
