"""The diagnosis for people at a terminal, worst first: a screen of 80 columns."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.doctor.checks.causes import Cause
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.diagnosis import FLOAT_NOISE, Certainty, Diagnosis, Outcome
from lockstep.doctor.row_choice import fetch
from lockstep.errors import printable
from lockstep.observe.live import format_number, format_seconds
from lockstep.renderers.tokenizer import Tokenizer

NUM_SHOWN = 2
"""Causes that are shown with their tokens; the others in a line each."""
NUM_TOKENS = 6
"""Tokens of a piece of evidence: around the first that differs, or the largest difference."""
NUM_LINES = 4
"""Checks in each of the lists of those ruled out and those not made."""

_WORDS: dict[Outcome, tuple[str, str]] = {
    "consistent": ("CONSISTENT", "bold green"),
    "differs": ("DIFFERS", "bold red"),
    "could_not_check": ("COULD NOT CHECK", "bold yellow"),
}
_CERTAINTY: dict[Certainty, str] = {"proved": "red", "likely": "yellow", "possible": "dim"}
_LABEL_WIDTH = 12


def show(diagnosis: Diagnosis, console: Console, *, page: str = "") -> None:
    """Prints the diagnosis. page: where the HTML page was written, if it was."""
    shown = diagnosis.causes[:NUM_SHOWN]
    rows = _rows_of_evidence(diagnosis, [finding for _, finding in shown])
    for part in (
        _head(diagnosis),
        *(
            _cause(diagnosis, number, cause, finding, rows)
            for number, (cause, finding) in enumerate(shown, 1)
        ),
        _other_causes(diagnosis),
        _where(diagnosis),
        _lists(diagnosis),
        _last(diagnosis, page),
    ):
        if part is not None:
            console.print(part)


def summary(diagnosis: Diagnosis, *, width: int = 80, page: str = "") -> str:
    """The same as text without colours."""
    out = io.StringIO()
    show(diagnosis, Console(file=out, width=width, highlight=False, no_color=True), page=page)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# -- parts of the screen --------------------------------------------------------------------------


def _head(diagnosis: Diagnosis) -> RenderableType:
    examined = diagnosis.examination
    word, style = _WORDS[diagnosis.outcome]
    gap = examined.gap
    head = Text.assemble((word, style), f"  {printable(diagnosis.name)}")
    size = (
        f"{diagnosis.dump.format}: {examined.num_rows:,} rows, {examined.num_tokens:,} tokens "
        f"({gap.tokens:,} compared), {format_seconds(diagnosis.seconds)}"
    )
    if not gap.tokens:
        measured = "not measured: no token has the log-probs of both sides"
    else:
        means = gap.means()
        measured = (
            f"k1 {means['k1']:.2e}  k2 {means['k2']:.2e}  k3 {means['k3']:.2e}  largest "
            f"{means['max_abs_diff']:.2e}"
        )
    notes = [("note", printable(note)) for note in diagnosis.dump.notes]
    return Group(head, _pairs([("input", size), *notes, ("gap", measured)]))


def _cause(
    diagnosis: Diagnosis, number: int, cause: Cause, finding: Finding, rows: dict[str, Rows]
) -> RenderableType:
    certainty, why = diagnosis.certainty_of(cause, finding)
    share = diagnosis.share_of(cause.name)
    title = Text.assemble(
        (f"\n{number}. {cause.name}", "bold red"),
        (f"  {share:.1%} of k2" if share >= 0.001 else "  moves few log-probs, or none", "bold"),
        ("  "),
        (certainty, _CERTAINTY[certainty]),
    )
    lines: list[tuple[str, RenderableType]] = [
        ("what", cause.title),
        ("measured", printable(finding.measured)),
        ("sure", why),
    ]
    parts: list[RenderableType] = [title, _pairs(lines)]
    for evidence in finding.evidence[:1]:
        if evidence.row in rows:
            parts.append(_proof(evidence, rows[evidence.row], diagnosis.setting.tokenizer))
    remedy = Text(diagnosis.remedy_for(cause), style="green")
    command = Text(diagnosis.command_for(finding), style="cyan")
    engines: list[tuple[str, RenderableType]] = [
        (f"in {name}"[: _LABEL_WIDTH - 1], Text(text, style="green"))
        for name, text in cause.in_engines.items()
    ]
    parts.append(_pairs([("remedy", remedy), *engines, ("again", command)]))
    return Group(*parts)


def _proof(evidence: Evidence, rows: Rows, tokenizer: Tokenizer | None) -> RenderableType:
    """The tokens that show it: ids of both sides where others are expected, else log-probs."""
    lines: list[tuple[str, RenderableType]] = [
        (
            "proof",
            f"row {printable(evidence.row)}, {_places(evidence)}: {printable(evidence.note)}",
        )
    ]
    begin = max(0, min(evidence.begin, rows.num_tokens))
    end = max(begin, min(evidence.end, rows.num_tokens))
    if evidence.expected_ids:
        found = rows.token_ids[begin:end].tolist()
        table = _ids_side_by_side(found, evidence.expected_ids, begin, tokenizer)
    else:
        table = _logprobs_side_by_side(rows, begin, end, tokenizer)
    return Group(_pairs(lines), Padding(table, (0, 0, 0, _LABEL_WIDTH)))


def _places(evidence: Evidence) -> str:
    if evidence.end - evidence.begin <= 1:
        return f"token {evidence.begin}"
    return f"tokens {evidence.begin} to {evidence.end - 1}"


def _ids_side_by_side(
    found: Sequence[int], expected: Sequence[int], begin: int, tokenizer: Tokenizer | None
) -> Table:
    size = min(len(found), len(expected))
    apart = np.flatnonzero(np.asarray(found[:size]) != np.asarray(expected[:size]))
    first = max(0, (int(apart[0]) if len(apart) else size) - 1)
    table = plain_table("place", "in the row", "expected")
    for i in range(first, min(first + NUM_TOKENS, max(len(found), len(expected)))):
        mine, other = (
            token_text(int(ids[i]), tokenizer) if i < len(ids) else "-" for ids in (found, expected)
        )
        style = "" if mine == other else "bold red"
        table.add_row(str(begin + i), Text(mine, style), Text(other, style))
    return table


def _logprobs_side_by_side(rows: Rows, begin: int, end: int, tokenizer: Tokenizer | None) -> Table:
    gap = np.abs(np.nan_to_num(rows.gap[begin:end]))
    worst = begin + (int(gap.argmax()) if len(gap) else 0)
    # Evidence of fewer tokens is shown among its neighbours.
    low, high = min(begin, worst - NUM_TOKENS // 2), max(end, worst + NUM_TOKENS // 2)
    low, high = max(low, 0), min(high, rows.num_tokens)
    first = max(low, min(worst - NUM_TOKENS // 2, high - NUM_TOKENS))
    end = high
    table = plain_table("place", "token", "rollout", "trainer", "difference")
    for at in range(first, min(first + NUM_TOKENS, end)):
        d = rows.gap[at]
        table.add_row(
            str(at),
            token_text(int(rows.token_ids[at]), tokenizer),
            "-" if rows.rollout_logprobs is None else logprob_text(rows.rollout_logprobs[at]),
            "-" if rows.trainer_logprobs is None else logprob_text(rows.trainer_logprobs[at]),
            Text("-" if np.isnan(d) else f"{d:+.4g}", style=gap_style(d)),
        )
    return table


def _other_causes(diagnosis: Diagnosis) -> RenderableType | None:
    rest = diagnosis.causes[NUM_SHOWN:]
    if not rest:
        return None
    lines: list[tuple[str, RenderableType]] = [
        (
            "" if number else "also",
            f"{cause.name} ({diagnosis.share_of(cause.name):.1%} of k2): "
            f"{printable(finding.measured)}",
        )
        for number, (cause, finding) in enumerate(rest)
    ]
    return Group("", _pairs(lines))


def _where(diagnosis: Diagnosis) -> RenderableType | None:
    """What is left, and where it sits."""
    examined = diagnosis.examination
    left = examined.after.total
    if not left.tokens:
        return None
    means = left.means()
    text = f"k2 {means['k2']:.2e}, largest {means['max_abs_diff']:.2e}"
    if diagnosis.is_float_noise:
        return Group("", _pairs([("gap", f"both sides agree to float noise ({text})")]))
    if diagnosis.causes:
        text = f"{max(examined.unexplained_k2, 0.0):.1%} of k2 ({text})"
    places = diagnosis.unexplained
    if places:
        text += "; " + "; ".join(
            f"{place.share_k2:.0%} of it in {place.part} {place.label} "
            f"({place.share_tokens:.0%} of the tokens)"
            for place in places
        )
    elif left.max_abs < FLOAT_NOISE:
        text += "; float noise"
    else:
        text += "; spread over turns, positions and kinds of token"
    lines: list[tuple[str, RenderableType]] = [("unexplained", text)]
    lines += [
        ("" if number else "next", Text(step, style="green"))
        for number, step in enumerate(diagnosis.next_steps)
    ]
    return Group("", _pairs(lines))


def _lists(diagnosis: Diagnosis) -> RenderableType:
    told = [
        *(
            ("note", f"{f.check}: {printable(f.measured)}", "cyan")
            for f in diagnosis.with_verdict("information")
        ),
        *_limited(
            "ruled out",
            [f"{f.check}: {printable(f.measured)}" for f in diagnosis.with_verdict("consistent")],
            "green",
        ),
        *_limited(
            "not checked",
            [
                f"{checks[0]} {f'and {len(checks) - 1} more need' if checks[1:] else 'needs'} {why}"
                for why, checks in _not_checked(diagnosis).items()
            ],
            "yellow",
        ),
    ]
    lines: list[tuple[str, RenderableType]] = []
    before = ""
    for label, text, style in told:
        check, colon, rest = text.partition(" ")
        lines.append((label if label != before else "", Text.assemble((check, style), colon, rest)))
        before = label
    return _pairs(lines)


def _not_checked(diagnosis: Diagnosis) -> dict[str, list[str]]:
    """What is missing -> the checks that need it."""
    out: dict[str, list[str]] = {}
    for finding in diagnosis.with_verdict("not_checkable"):
        out.setdefault("; ".join(diagnosis.missing_for(finding)), []).append(finding.check)
    return out


def _limited(label: str, texts: Sequence[str], style: str) -> list[tuple[str, str, str]]:
    lines = [(label, text, style) for text in texts[:NUM_LINES]]
    if len(texts) > NUM_LINES:
        more = f"... and {len(texts) - NUM_LINES} more: --json lists them"
        lines.append((label, more, "dim"))
    return lines


def _last(diagnosis: Diagnosis, page: str) -> RenderableType | None:
    if page:
        return Group("", _pairs([("page", Text(page, style="cyan"))]))
    if diagnosis.outcome == "could_not_check":
        return Text("\nNo check could be made: exit code 2.", style="yellow")
    return None


# -- pieces ---------------------------------------------------------------------------------------


def token_text(id_: int, tokenizer: Tokenizer | None) -> str:
    """`'text' id`, or the id alone; nothing in it can move a terminal's cursor."""
    if tokenizer is None:
        return str(id_)
    return f"{printable(repr(tokenizer.decode([id_])))} {id_}"


def gap_style(d: float) -> str:
    """The colour of one token's trainer - rollout: by decades, none for float noise."""
    size = 0.0 if np.isnan(d) else abs(d)
    if size < 1e-4:
        return "dim"
    if size < 0.01:
        return ""
    return "yellow" if size < 0.5 else "bold red"


def logprob_text(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) >= 1e-3 else format_number(float(value))


def plain_table(*columns: str) -> Table:
    """A table without lines; text stands left, numbers right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        is_text = column in ("token", "in the row", "expected")
        table.add_column(
            column,
            justify="left" if is_text or not number else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=26 if is_text else None,
            min_width=None if is_text else max(len(column), 8 if number else 5),
        )
    return table


def _pairs(lines: Sequence[tuple[str, RenderableType]]) -> Table:
    """Labels in a column of their own, so that what is said wraps beside them."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL_WIDTH - 1, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, Text(text) if isinstance(text, str) else text)
    return grid


def _rows_of_evidence(diagnosis: Diagnosis, findings: Sequence[Finding]) -> dict[str, Rows]:
    names = {finding.evidence[0].row for finding in findings if finding.evidence}
    return {rows.row_ids[0]: rows for rows in fetch(diagnosis.dump, names=names).values()}
