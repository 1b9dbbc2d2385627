"""Prints a diagnosis, worst first: a screen of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.doctor.diagnosis import FLOAT_NOISE, Diagnosis
from lockstep.doctor.findings import Evidence
from lockstep.doctor.row_choice import fetch
from lockstep.doctor.rows import Rows
from lockstep.errors import printable
from lockstep.observe.live import format_number, format_seconds
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Float32Array, Int32Array

MIN_RANGE = 0.1
"""Smallest width of an interval that is shown beside a share."""
NUM_SHOWN = 2
"""Causes that are shown with their tokens; each other cause gets a line."""
NUM_TOKENS = 6
"""Tokens shown of a piece of evidence."""
NUM_LINES = 4
"""Facts and hypotheses in each of the lists `ruled out` and `not checked`."""
_WORDS = {
    "consistent": ("CONSISTENT", "bold green"),
    "differs": ("DIFFERS", "bold red"),
    "not_judged": ("NOT JUDGED: exit code 2", "bold yellow"),
}
_CERTAINTY = {"proved": "red", "likely": "yellow", "possible": "dim"}
_LABEL_WIDTH = 12


def show(diagnosis: Diagnosis, console: Console, *, page: str = "") -> None:
    """Prints the diagnosis. page: file of the HTML page, if one was written."""
    word, style = _WORDS[diagnosis.outcome]
    console.print(Text.assemble((word, style), f"  {printable(diagnosis.name)}"))
    _show_head(diagnosis, console)
    shown = diagnosis.causes[:NUM_SHOWN]
    names = {finding.evidence[0].row for _, finding in shown if finding.evidence}
    rows = {rows.row_ids[0]: rows for rows in fetch(diagnosis.dump, names=names).values()}
    for number in range(len(shown)):
        _show_cause(diagnosis, console, number, rows)
    console.print()
    for cause, finding in diagnosis.causes[NUM_SHOWN:]:
        share = diagnosis.share_of(cause.name)
        _line(console, "also", f"{cause.name} ({share:.1%} of k2): {finding.measured}")
    _show_rest(diagnosis, console)
    _show_lists(diagnosis, console)
    if page:
        _line(console, "page", page, "cyan")


def _show_head(diagnosis: Diagnosis, console: Console) -> None:
    examined, gap = diagnosis.examination, diagnosis.examination.gap
    text = (
        f"{diagnosis.dump.format}: {examined.num_rows:,} rows, {examined.num_tokens:,} tokens "
        f"({gap.tokens:,} compared), {format_seconds(diagnosis.seconds)}"
    )
    _line(console, "input", text)
    if diagnosis.headline:
        _line(console, "verdict", diagnosis.headline, "bold")
    for note in diagnosis.dump.notes:
        _line(console, "note", note)
    means = gap.means()
    figures = "  ".join(f"{name} {means[name]:.2e}" for name in ("k1", "k2", "k3"))
    measured = f"{figures}  largest {means['max_abs_diff']:.2e}"
    _line(console, "gap", measured if gap.tokens else "not measured: no token has both log-probs")


def _show_cause(diagnosis: Diagnosis, console: Console, number: int, rows: dict[str, Rows]) -> None:
    cause, finding = diagnosis.causes[number]
    certainty, why = diagnosis.certainty_of(cause, finding)
    share = diagnosis.share_of(cause.name)
    least, most = diagnosis.range_of(cause.name)
    moves = f"  {share:.1%} of k2  " if share >= 0.001 else "  moves few log-probs, or none  "
    if most - least >= MIN_RANGE:
        moves = f"  {share:.1%} of k2 ({least:.0%} to {most:.0%})  "
    title = (f"\n{number + 1}. {cause.name}", "bold red")
    console.print(Text.assemble(title, (moves, "bold"), (certainty, _CERTAINTY[certainty])))
    _line(console, "what", cause.title)
    _line(console, "measured", finding.measured)
    _line(console, "sure", why)
    for evidence in finding.evidence[:1]:
        if evidence.row in rows:
            last = evidence.end - 1
            to = f"s {evidence.begin} to {last}" if last > evidence.begin else f" {last}"
            _line(console, "proof", f"row {evidence.row}, token{to}: {evidence.note}")
            table = _proof(evidence, rows[evidence.row], diagnosis.setting.tokenizer)
            console.print(Padding(table, (0, 0, 0, _LABEL_WIDTH)))
    _line(console, "remedy", diagnosis.remedy_for(cause), "green")
    for name, text in cause.in_engines.items():
        _line(console, f"in {name}"[: _LABEL_WIDTH - 1], text, "green")
    _line(console, "again", diagnosis.command_for(finding), "cyan")


def _proof(evidence: Evidence, rows: Rows, tokenizer: Tokenizer | None) -> Table:
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


def _show_rest(diagnosis: Diagnosis, console: Console) -> None:
    """The gap that no cause explains, and its places."""
    left = diagnosis.examination.after.total
    for step in diagnosis.next_steps:
        _line(console, "next", step, "green")
    if not left.tokens:
        return
    means = left.means()
    text = f"k2 {means['k2']:.2e}, largest {means['max_abs_diff']:.2e}"
    if diagnosis.is_float_noise:
        _line(console, "gap", f"both sides agree to float noise ({text})")
        return
    if diagnosis.causes:
        text = f"{max(diagnosis.examination.unexplained_k2, 0.0):.1%} of k2 ({text})"
    places = [
        f"{place.share_k2:.0%} of it in {place.part} {place.label} "
        f"({place.share_tokens:.0%} of the tokens)"
        for place in diagnosis.unexplained
    ]
    even = "float noise" if left.max_abs < FLOAT_NOISE else "spread over turns and positions"
    label = "unexplained" if diagnosis.causes or diagnosis.is_unexplained else "gap"
    _line(console, label, "; ".join([text, *(places or [even])]))


def _show_lists(diagnosis: Diagnosis, console: Console) -> None:
    needs: dict[str, list[str]] = {}
    for finding in diagnosis.with_verdict("not_checkable"):
        lacks = "; ".join(diagnosis.missing_for(finding))
        needs.setdefault(f"needs {lacks}" if lacks else finding.measured, []).append(finding.check)
    missing = [
        f"{checks[0]}{f' and {len(checks) - 1} more' * bool(checks[1:])}: {why}"
        for why, checks in needs.items()
    ]

    ruled_out = diagnosis.ruled_out
    tried: dict[bool, list[str]] = {True: [], False: []}
    for finding in diagnosis.with_verdict("consistent"):
        tried[finding.check in ruled_out].append(f"{finding.check}: {finding.measured}")
    for label, texts in (
        ("ruled out", tried[True]),
        ("not enough", tried[False]),
        ("not checked", missing),
    ):
        for text in texts[:NUM_LINES]:
            _line(console, label, text)
        if len(texts) > NUM_LINES:
            told = f"... and {len(texts) - NUM_LINES} more: --json lists them"
            _line(console, label, told, "dim")


# -- pieces ---------------------------------------------------------------------------------------


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    """A label with its text wrapped beside it; nothing in it can move a terminal's cursor."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL_WIDTH - 1, style="dim", no_wrap=True)
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
    return f"{value:.4f}" if abs(value) >= 1e-3 else format_number(value)


def _plain_table(*columns: str) -> Table:
    """A table without lines; text is on the left, numbers are on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        if column in ("token", "in the row", "expected"):
            table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=26)
        else:
            width = max(len(column), 8 if number else 5)
            justify = "right" if number else "left"
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
