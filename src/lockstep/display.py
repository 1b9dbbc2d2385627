"""Tables and curves for results in a notebook, readable on a white page and on a black one."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from itertools import cycle
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lockstep.errors import MissingExtraError, UnknownNameError, printable, require_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2f8fd0", "#e07a2f", "#22a079", "#b8629b", "#a5871d", "#6f7a86")
"""Series of a chart: readable on white and on black, as GREY is."""
GREY = "#808080"
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
    """Curves over steps, drawn by matplotlib. A notebook shows them; `save` writes a file."""

    series: Mapping[str, Series]
    """Label -> (steps, values). A value that is not finite leaves a hole."""
    num_steps: int | None = None
    """Right end of the axis; None: the last step."""

    def __repr__(self) -> str:
        names = ", ".join(f"{name}: {len(steps)} steps" for name, (steps, _) in self.series.items())
        return f"Chart({names})"

    def figure(self) -> Figure:
        """The chart as a figure of matplotlib, to be changed. Raises MissingExtraError without that
        package."""
        require_package("matplotlib", extra="plot", needed_for="a chart")
        from matplotlib.figure import Figure

        figure = Figure((6.4, 2.4), layout="constrained", facecolor="none")
        axes = figure.subplots(subplot_kw={"facecolor": "none"})
        for (name, (steps, values)), colour in zip(self.series.items(), cycle(COLOURS)):
            finite = [value if math.isfinite(value) else math.nan for value in values]
            known = [value for value in finite if value == value]
            if len(finite) >= NUM_SMOOTHED:
                axes.plot(steps, finite, color=colour, alpha=0.25)
                width = len(finite) // 10
                finite = [fmean(finite[max(0, i + 1 - width) : i + 1]) for i in range(len(finite))]
            label = f"{name} {number(known[-1])}" if known else name
            axes.plot(steps, finite, color=colour, label=label, marker="o" * (len(known) == 1))
        axes.set_xlim(right=self.num_steps)
        axes.set_xlabel("step", color=GREY)
        axes.tick_params(colors=GREY)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[:].set_visible(False)
        if self.series:
            figure.legend(loc="outside upper left", ncols=9, frameon=False, labelcolor=GREY)
        return figure

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the chart in the format of the file's ending: .svg, .png, .pdf. Returns its path.
        Raises MissingExtraError without matplotlib."""
        self.figure().savefig(path)
        return Path(path)

    def _repr_html_(self) -> str:
        """The chart as SVG, or a line that says what to install."""
        try:
            figure = self.figure()
        except MissingExtraError as error:
            return f"<div>{escape(str(error))}</div>"
        page = io.StringIO()
        figure.savefig(page, format="svg")
        return page.getvalue()[page.getvalue().index("<svg") :]


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
