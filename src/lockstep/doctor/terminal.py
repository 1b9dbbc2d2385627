"""Pieces of a screen: labelled lines, and tables of tokens with the log-probs of both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import StringIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.display import number
from lockstep.doctor.findings import Evidence
from lockstep.doctor.rows import Rows
from lockstep.errors import printable
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Float32Array, Int32Array

NUM_TOKENS = 6
"""Tokens shown of a piece of evidence."""
LABEL_WIDTH = 12


def as_html(show: Callable[[Console], None]) -> str:
    """The text that `show` prints to a terminal, in its colours."""
    console = Console(file=StringIO(), record=True, width=100, force_jupyter=False, highlight=False)
    show(console)
    style = "white-space:pre;overflow-x:auto;line-height:1.3;font-size:12px"
    form = f'<pre style="{style}"><code>{{code}}</code></pre>'
    return console.export_html(inline_styles=True, code_format=form)


def show_line(console: Console, label: str, text: str, style: str = "") -> None:
    """A label with its text wrapped beside it; nothing in it can move a terminal's cursor."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL_WIDTH - 1, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(label, Text(printable(text), style))
    console.print(grid)


def _token_text(id_: int, tokenizer: Tokenizer | None) -> str:
    """`'text' id`, or the id alone."""
    text = "" if tokenizer is None else f"{printable(repr(tokenizer.decode([id_])))} "
    return f"{text}{id_}"


def gap_style(d: float) -> str:
    """Colour of trainer - rollout at one token, by decades; float noise is dim."""
    size = 0.0 if np.isnan(d) else abs(d)
    if size < 0.01:
        return "dim" if size < 1e-4 else ""
    return "yellow" if size < 0.5 else "bold red"


def _logprob_text(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) >= 1e-3 else number(value)


def _plain_table(*columns: str) -> Table:
    """A table without lines; text is on the left, numbers are on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, column in enumerate(columns):
        if column in ("token", "in the row", "expected"):
            table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=26)
        else:
            width = max(len(column), 8 if at else 5)
            justify = "right" if at else "left"
            table.add_column(column, justify=justify, no_wrap=True, min_width=width)
    return table


def token_table(
    chosen: Iterable[int],
    token_ids: Int32Array,
    rollout: Float32Array | None,
    trainer: Float32Array | None,
    tokenizer: Tokenizer | None,
    *,
    begin: int = 0,
) -> Table:
    """A line for each chosen token, with both sides' log-probs and their difference.

    begin: place in the row of the token with index 0.
    """
    table = _plain_table("place", "token", "rollout", "trainer", "difference")
    for at in chosen:
        sides = (rollout, trainer)
        sampled, trained = (np.nan if side is None else float(side[at]) for side in sides)
        d = trained - sampled
        gap = Text("-" if np.isnan(d) else f"{d:+.4g}", style=gap_style(d))
        logprobs = _logprob_text(sampled), _logprob_text(trained)
        table.add_row(str(begin + at), _token_text(int(token_ids[at]), tokenizer), *logprobs, gap)
    return table


def proof_table(evidence: Evidence, rows: Rows, tokenizer: Tokenizer | None) -> Table:
    """The ids of both sides where others are expected, else both sides' log-probs."""
    begin = max(0, min(evidence.begin, rows.num_tokens))
    end = max(begin, min(evidence.end, rows.num_tokens))
    if evidence.expected_ids:
        found, expected = rows.token_ids[begin:end].tolist(), evidence.expected_ids
        first = max(0, first_difference(found, expected) - 1)
        table = _plain_table("place", "in the row", "expected")
        for i in range(first, min(first + NUM_TOKENS, max(len(found), len(expected)))):
            mine, other = (
                _token_text(ids[i], tokenizer) if i < len(ids) else "-" for ids in (found, expected)
            )
            style = "" if mine == other else "bold red"
            table.add_row(str(begin + i), Text(mine, style), Text(other, style))
        return table
    gap = np.abs(np.nan_to_num(rows.gap[begin:end]))
    worst = begin + (int(gap.argmax()) if len(gap) else 0)
    first = max(0, min(worst - NUM_TOKENS // 2, rows.num_tokens - NUM_TOKENS))
    places = range(first, min(first + NUM_TOKENS, rows.num_tokens))
    sides = rows.rollout_logprobs, rows.trainer_logprobs
    return token_table(places, rows.token_ids, *sides, tokenizer)
