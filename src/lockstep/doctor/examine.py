"""Rows become findings: facts over all rows, then hypotheses over a sample."""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from heapq import nlargest
from random import Random
from typing import Any

import numpy as np

from lockstep.doctor.causes import CAUSES
from lockstep.doctor.explain import (
    HYPOTHESES,
    MIN_SHARE,
    Explanation,
    Hypothesis,
    Judged,
    View,
    Z,
    evidence_of,
    explain,
    repaired,
    size,
)
from lockstep.doctor.facts.base import FACTS, Fact, Tally
from lockstep.doctor.facts.physical import PHYSICAL, contradictions
from lockstep.doctor.facts.values import step_of
from lockstep.doctor.findings import MAX_EVIDENCE, MOST, Finding, Setting, Verdict
from lockstep.doctor.gap import Gap, Split
from lockstep.doctor.hypotheses.unlike import NOISE, rest_of
from lockstep.doctor.rows import SIDES, Rows
from lockstep.observe.alarms import DENSE_BAND, ONE_PROCESS_BAND

ROOMS = ("facts.engine", "facts.structure", "facts.text", "facts.values")
"""Facts in the order that they take their tokens' gap: other ids explain the numbers there."""
_HYPOTHESES = ("arithmetic", "dialogue", "scale", "respelled", "stale")
"""Modules of hypotheses in the order of the trials: what explains nearly all ends a round."""
for _name in (*ROOMS, *(f"hypotheses.{name}" for name in _HYPOTHESES)):
    importlib.import_module(f"lockstep.doctor.{_name}")

SAMPLE_TOKENS = 1 << 16
"""Tokens of the sample without a model: a share has an error of about 1 % (explain.TIE)."""
BLOCK_ROWS = 8
"""Rows that are drawn together: a group's rows share prompts, and attention may leak between
neighbours."""

MAX_ROWS = 200
"""Rows of each sort that a page can show, whatever the size of the dump."""


@dataclass(slots=True)
class Share:
    """Share of the gap that a cause explains, with its interval."""

    k2: float = 0.0
    least: float = 0.0
    most: float = 0.0


@dataclass(kw_only=True)
class RowChoice:
    """The rows to show, the worst and a fair sample, by their numbers in the dump."""

    worst: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(largest |d|, number) of the rows with the largest gaps."""
    num_rows: int = 0

    def add(self, rows: Rows) -> None:
        """Takes the next chunk into account."""
        numbers = range(self.num_rows, self.num_rows + len(rows))
        self.num_rows += len(rows)
        largest = np.full(len(rows), -1.0)  # of a row without a compared token
        np.maximum.at(largest, rows.row_of[rows.compared], np.abs(rows.gap[rows.compared]))
        worst = zip(largest.tolist(), numbers, strict=True)
        self.worst = nlargest(MAX_ROWS, [*self.worst, *worst])

    @property
    def numbers(self) -> list[tuple[int, str]]:
        """(number, "worst mismatch" or "sample"), the worst first, then the sample in order."""
        worst = [n for size, n in self.worst if size > 0]
        drawn = Random(0).sample(range(self.num_rows), min(self.num_rows, MAX_ROWS))
        sampled = sorted(set(drawn) - set(worst))
        return [(n, "worst mismatch") for n in worst] + [(n, "sample") for n in sampled]


@dataclass(kw_only=True)
class Examination:
    """Findings, and the share of the gap that each cause explains."""

    findings: list[Finding] = field(default_factory=list[Finding])
    before: Split = field(default_factory=Split)
    """Gap of the rows as they are, by place."""
    after: Split = field(default_factory=Split)
    """The unexplained gap, after all repairs. Of the sample, if a cause was found there."""
    shares: dict[str, Share] = field(default_factory=lambda: defaultdict[str, Share](Share))
    """Cause -> its share: the sum over the checks that found it."""
    num_rows: int = 0
    num_tokens: int = 0
    num_unscored: Counter[str] = field(default_factory=Counter[str])
    """Side -> rows that it did not score, though it scored others."""
    limit: float = 0.0
    """Mean of d^2 / 2 that numerics can make."""
    rivals: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Cause -> causes that explain the same."""
    choice: RowChoice = field(default_factory=RowChoice)
    """Rows to show: the worst, and a sample of all."""

    def add_share(self, cause: str, k2: float, least: float, most: float) -> None:
        share = self.shares[cause]
        share.k2, share.least, share.most = share.k2 + k2, share.least + least, share.most + most

    @property
    def gap(self) -> Gap:
        """Gap of the rows as they are."""
        return self.before.total

    @property
    def unexplained_k2(self) -> float:
        """Share of k2 that no cause explains; 1 without causes."""
        return max(1.0 - sum(share.k2 for share in self.shares.values()), 0.0)

    @property
    def is_numeric(self) -> bool:
        """True if numerics can make the gap that is left."""
        left = self.after.total
        return left.k2 <= within(self.limit, left.tokens) * left.tokens


class Sample:
    """Blocks of neighbouring rows, drawn at random up to a number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._rng = np.random.default_rng(0)
        self._max, self._kept = max_tokens, list[tuple[float, int, Rows]]()
        self._number = 0

    def add(self, rows: Rows) -> None:
        index = np.arange(len(rows))
        usable = rows.row_sums(rows.compared) > 0
        for block in np.split(index, np.arange(BLOCK_ROWS, len(rows), BLOCK_ROWS)):
            block = block[usable[block]]
            if len(block):
                self._kept.append((float(self._rng.random()), self._number, rows.take(block)))
                self._number += 1
        self._kept.sort(key=lambda one: one[0])
        size = np.cumsum([part.num_tokens for *_, part in self._kept])
        keep = max(int(np.searchsorted(size, self._max, side="right")), 1)
        del self._kept[keep:]

    def rows(self) -> Rows | None:
        parts = [part for _, _, part in sorted(self._kept, key=lambda one: one[1])]
        if not parts:
            return None
        joined = Rows.joined(parts)
        at = joined.offsets[np.searchsorted(joined.offsets[1:], self._max) + 1 :]
        return joined.take(np.arange(len(joined) - len(at))) if len(at) else joined


def limit_of(setting: Setting, rows: Rows | None) -> float:
    """Mean of d^2 / 2 that numerics can make: by the model's own bfloat16, or by the band of two
    engines."""
    if setting.is_one_process:
        return ONE_PROCESS_BAND[1] * 100
    if setting.model is not None and rows is not None and setting.model.has_own(rows):
        return max(NOISE * setting.model.noise(rows) / 2, DENSE_BAND[0])
    return setting.band


def within(limit: float, num_tokens: int) -> float:
    """The limit of a mean over this number of tokens: a mean of few squares is uncertain."""
    return limit * (1 + Z * float(np.sqrt(2 / max(num_tokens, 1))))


def examine(
    chunks: Callable[[], Iterable[Rows]],
    setting: Setting,
    *,
    has: frozenset[str],
    only: Collection[str] = (),
    is_live: bool = False,
) -> Examination:
    """Judges the rows of a dump, which are read once, one chunk at a time.

    has: columns that some rows have. only: facts and hypotheses to report; empty reports all. The
    others are judged too, so that one finds the same alone as among all. is_live: a gap within what
    numerics make is not explained, to save time.
    """
    out = Examination(before=Split(tokenizer=setting.tokenizer))
    known = has | setting.has
    tallies = [Tally(fact=one) for one in sorted(FACTS.values(), key=_place)]
    missing = {t.fact.name: tuple(n for n in t.fact.needs if n not in known) for t in tallies}
    model = setting.model
    sample = Sample(SAMPLE_TOKENS if model is None else model.max_tokens)
    after: Split | None = None  # since the first chunk that a fact changes
    for rows in chunks():
        out.num_rows += len(rows)
        out.num_tokens += rows.num_tokens
        if not is_live:  # a watch shows the rows of its files
            out.choice.add(rows)
        left = rows
        for tally in tallies:
            if not missing[tally.fact.name]:
                left = tally.take(rows, setting, left)
        if after is None and left is not rows:
            after = deepcopy(out.before)
        if after is not None:
            after.add(left)
        for side, column in SIDES.items():
            out.num_unscored[side] += int(rows.unscored(column).sum())
        out.before.add(rows)
        sample.add(left)
    out.after = after or out.before
    whole = out.gap.k2 or 1.0
    for tally in tallies:
        out.findings += tally.findings(missing[tally.fact.name])
        for cause, count in tally.counts.items():
            share = min(max(count.k2 / whole, 0.0), 1.0)
            out.add_share(cause, share, share, share)
    rows = sample.rows()
    lacks = set(SIDES.values()) - known
    if rows is not None and not lacks:
        _explain(out, View(rows=rows, setting=setting), is_live=is_live)
    else:
        out.limit = limit_of(setting, None)
        out.findings += [_lacking(h, lacks) for h in HYPOTHESES.values()]
    if out.unexplained_k2 > MOST and not out.is_numeric:
        # A record that was learnt from rows whose gap nothing explains proves nothing.
        learnt = {
            f.cause
            for f in out.findings
            if f.verdict == "differs" and f.check.startswith("facts") and f.basis == "fit"
        }
        out.findings = [
            replace(f, verdict="consistent", cause="") if f.cause in learnt else f
            for f in out.findings
        ]
        for cause in learnt:
            out.shares.pop(cause, None)
    out.findings.append(contradictions(setting))
    if only:
        out.findings = [finding for finding in out.findings if finding.check in only]
    return out


def _place(one: Fact) -> int:
    """Place of a fact's room in ROOMS; a plugin's is behind them."""
    room = one.look.__module__.removeprefix("lockstep.doctor.")
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def _explain(out: Examination, view: View, *, is_live: bool) -> None:
    """Adds the hypotheses' findings: of the gap that facts leave."""
    setting = view.setting
    step = max(step_of(side[np.isfinite(side)]) for side in (view.sampler, view.trainer))
    # Two numbers that were rounded one by one differ by step^2 / 6 in the mean square.
    limit = out.limit = max(limit_of(setting, view.rows), step**2 / 12)
    view = replace(view, step=step, scale=float(np.sqrt(2 * max(limit, DENSE_BAND[0]))))
    left = out.unexplained_k2

    def is_enough(view: View) -> bool:
        d = view.rows.gap
        return size(d) <= 2 * within(limit, int(np.isfinite(d).sum()))

    tried = [] if is_live and is_enough(view) else list(HYPOTHESES.values())
    found = explain(view, tried, is_enough=is_enough)
    out.rivals = found.rivals
    known = setting.has | view.rows.has
    for judged, share, half in found.causes:
        share *= left
        out.findings.append(_named(view, judged))
        out.add_share(judged.cause, share, max(share - half, 0.0), min(share + half, 1.0))
        view = repaired(view, judged)
    told = None if setting.model is None or is_enough(view) else rest_of(view, found)
    if told is not None and told[0] not in {f.cause for f in out.findings}:
        cause, words, part = told
        rest, share = HYPOTHESES["hypotheses/rest"], part * out.unexplained_k2
        out.findings.append(_finding(rest, "differs", words, cause=cause))
        out.add_share(cause, share, 0.0, share)
        if CAUSES[cause].room != "noise" and share >= MIN_SHARE:
            # Another model sampled, so this one's numbers for other inputs rule out nothing.
            found.lost -= {h.name for h in HYPOTHESES.values() if "model" in h.needs}
    named = {f.check for f in out.findings if f.verdict == "differs"}
    for one in (h for h in HYPOTHESES.values() if h.name not in named):
        if lacks := found.lacks.get(one.name) or tuple(n for n in one.needs if n not in known):
            out.findings.append(_lacking(one, lacks))
        elif one.name in found.errors:
            out.findings.append(_finding(one, "not_checkable", found.errors[one.name]))
        else:
            out.findings.append(_not_found(one, found))
    if found.causes:
        out.after = Split(tokenizer=setting.tokenizer)
        out.after.add(view.rows)


def _finding(one: Hypothesis, verdict: Verdict, measured: str, **more: Any) -> Finding:
    return Finding(check=one.name, claim=one.claim, verdict=verdict, measured=measured, **more)


def _lacking(one: Hypothesis, lacks: Iterable[str]) -> Finding:
    return _finding(one, "not_checkable", f"needs {', '.join(lacks)}", lacks=tuple(lacks))


def _named(view: View, judged: Judged) -> Finding:
    one, told = judged.hypothesis, judged.prediction
    num, rows = int(judged.hit.sum()), len(view.rows)
    return _finding(
        one,
        "differs",
        f"{told.text}: explains {judged.share:.1%} (+- {2 * judged.error:.1%}) of the gap in rows "
        f"that it was not fitted on, in {num} of {rows} rows",
        cause=judged.cause,
        basis=one.basis,
        figures={"share": judged.share, "error": judged.error, "hit_rows": num},
        evidence=evidence_of(view, judged, MAX_EVIDENCE),
    )


def _not_found(one: Hypothesis, found: Explanation) -> Finding:
    """Ruled out only where its predictions were tested on enough tokens, and lost."""
    judged, figures = found.tried.get(one.name), dict[str, float]()
    told = "nothing in the rows that it would change"
    if judged is not None:
        share, moved = max(judged.share, 0.0), f"moves {judged.num_tested:,} log-probs"
        told = f"explains {share:.1%} of the gap, {moved}: {judged.prediction.text}"
        figures = {"share": judged.share, "error": judged.error, "tokens": judged.num_tested}
    told += "; not all was tried in time" if one.name in found.late else ""
    verdict: Verdict = "consistent" if one.name in found.lost else "not_shown"
    return _finding(one, verdict, told, figures=figures)


def names() -> list[str]:
    """Every fact and hypothesis, as `--only` takes them."""
    return [*FACTS, *HYPOTHESES, PHYSICAL]
