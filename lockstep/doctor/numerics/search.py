"""Finds the variants of the model that are worth scoring, on a few rows first.

There are some dozens of variants, each a forward. They are tried only where a side deviates by
more than is explained, on NUM_PROBES rows that deviate; what reproduces one of these is scored on
all rows that deviate. So a search costs a forward of some 10 rows for each variant, whatever the
dump; the number of variants grows with the layers that have sinks or windows.

Imported with torch, when there is something to search for.

# R rows  N tokens
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.numerics.compare import (
    EXACT,
    FLOAT_K2,
    MAX_FEW_RESIDUAL,
    MAX_PROMPT_LEFT,
    MAX_ROUNDED_LEFT,
    NOISE_FACTOR,
    TIE,
    Comparison,
    Defect,
    Distribution,
    Evidence,
    Side,
    Variant,
    compare,
    limit_of,
    rank_of,
    row_residual,
)
from lockstep.doctor.numerics.layouts import Layout, Lines, arrangements, laid_out
from lockstep.doctor.numerics.prompts import Prompt, with_prompt
from lockstep.doctor.numerics.scorer import Scorer, has_plain_head
from lockstep.models.changes import Change, Kind
from lockstep.types import Int64Array

NUM_PROBES = 10
"""Rows on which each variant is tried, drawn in proportion to what they deviate: of a cause with a
quarter of the deviation, the least that is named (MIN_SHARE), some two or three are among them."""
MAX_ROUNDS = 3
"""Searches, each among what the one before it left: two causes may be in different rows."""

CAUSE_OF: dict[Kind, str] = {
    "sinks": "ignored_sinks",
    "window": "ignored_window",
    "rope": "ignored_rope_scaling",
    "quantised": "quantised_rollout",
}
HALF_HEAD = "half_head"


@dataclass(frozen=True, kw_only=True)
class Trial(Defect):
    """A variant that can be scored. Those of a lower rank come first; a higher one's are not made
    where they leave nothing."""

    score: Callable[[Int64Array], Float64Array]
    """Places of rows -> [N], NaN elsewhere."""
    is_precision: bool = False
    """Tried on deviations of any size."""
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Known:
    """Facts about the dump that trials are made of."""

    lines: Lines
    distributions: Mapping[str, Sequence[Distribution]]
    """Cause -> processing of the logits that it would be."""
    prompts: Sequence[Prompt] = ()
    """Other prompts, the likely mistakes first."""


class Search:
    """All trials of some rows under the weights that the trainer ran on them."""

    def __init__(
        self, rows: Rows, scorer: Scorer, weights: Sequence[Any], own: Int64Array, known: Known
    ) -> None:
        """own: [R] index of each row's weights; -1: not at hand."""
        self._rows, self._scorer, self._weights = rows, scorer, weights
        self._own, self._known = own, known
        self._scored: dict[str, Float64Array] = {}
        """Text of a trial -> [N], NaN for rows that were not scored by it."""
        self._done: dict[str, set[int]] = defaultdict(set)
        self._tried: dict[str, dict[str, None]] = {}
        self._promoted: dict[str, Variant] = {}

    def explained(self, evidence: Evidence) -> Comparison:
        """The comparison of these rows with every variant that reproduces some of them."""
        found = compare(self._with(evidence))
        for _ in range(MAX_ROUNDS):
            if not self._promote(evidence, found):
                break
            found = compare(self._with(evidence))
        return found

    def _with(self, evidence: Evidence) -> Evidence:
        variants = [*evidence.variants, *self._promoted.values()]
        return replace(
            evidence,
            variants=sorted(variants, key=lambda v: rank_of(v.cause)),
            tried={cause: list(texts) for cause, texts in self._tried.items()} or None,
        )

    def _promote(self, evidence: Evidence, found: Comparison) -> bool:
        """Whether a variant was scored that reproduces rows which none did before."""
        probes = {True: _probes(found, is_precision=True), False: _probes(found)}
        is_new = False
        for number, weights in enumerate(self._weights):
            mine = {k: rows[self._own[rows] == number] for k, rows in probes.items()}
            if not len(mine[True]):
                continue
            model = self._scorer.load(weights)
            trials = sorted(self._trials(model, evidence), key=lambda t: t.rank)
            is_open = {k: np.ones(len(rows), np.bool_) for k, rows in mine.items()}
            best: dict[tuple[str, int], tuple[float, Trial]] = {}
            for rank in sorted({t.rank for t in trials}):
                for trial in (t for t in trials if t.rank == rank):
                    rows = mine[trial.is_precision][is_open[trial.is_precision]]
                    if len(rows):
                        self._try(trial, rows, evidence, found, best)
                for k, rows in mine.items():
                    is_open[k] = np.array(
                        [self._is_open(int(row), found, best) for row in rows], np.bool_
                    )
            chosen = {trial.text: trial for _, trial in best.values()}
            chosen |= self._approximate(trials, mine[False], evidence, found)
            families = {t.family for t in chosen.values() if t.family}
            for trial in trials:
                if trial.text in chosen or trial.family in families:
                    is_new |= self._score_all(trial, number, evidence, found)
        return is_new

    def _try(
        self,
        trial: Trial,
        rows: Int64Array,
        evidence: Evidence,
        found: Comparison,
        best: dict[tuple[str, int], tuple[float, Trial]],
    ) -> None:
        """Scores the rows, and keeps the trial where it is the best for one."""
        self._tried.setdefault(trial.cause, {})[trial.text] = None
        variant = self._variant(trial, self._values(trial, rows), evidence)
        for side in found.sides.values():
            left = row_residual(evidence.rows, side, variant)
            limits = limit_of(trial.fit, side.k2, side.tokens)
            for row in rows.tolist():
                k2, before = side.k2[row], best.get((side.name, row), (side.left[row], trial))[0]
                if not _is_left(side, found, row, is_precision=trial.is_precision):
                    continue
                is_nearer = left[row] < before - TIE * k2 or EXACT * left[row] < before
                if left[row] <= limits[row] and is_nearer:
                    best[side.name, row] = float(left[row]), trial

    def _approximate(
        self, trials: Sequence[Trial], rows: Int64Array, evidence: Evidence, found: Comparison
    ) -> dict[str, Trial]:
        """The approximate trial that leaves the least of these rows together, by side."""
        out: dict[str, Trial] = {}
        for side in found.sides.values():
            mine = [r for r in rows.tolist() if _is_left(side, found, r)]
            whole, sums = float(side.k2[mine].sum()), dict[float, Trial]()
            for trial in (t for t in trials if t.approximates and t.text in self._scored):
                if mine and self._done[trial.text].issuperset(mine):
                    variant = self._variant(trial, self._scored[trial.text], evidence)
                    left = row_residual(evidence.rows, side, variant)[mine]
                    sums.setdefault(float(left.sum()), trial)
            if sums and min(sums) <= sums[min(sums)].approximates * whole:
                out[sums[min(sums)].text] = sums[min(sums)]
        return out

    def _is_open(
        self, row: int, found: Comparison, best: dict[tuple[str, int], tuple[float, Trial]]
    ) -> bool:
        """Whether a side's deviation in this row is still unexplained."""
        return any(
            best.get((side.name, row), (side.left[row], None))[0] > _least(side, found, row)
            for side in found.sides.values()
        )

    def _score_all(self, trial: Trial, number: int, evidence: Evidence, found: Comparison) -> bool:
        """Scores all rows of these weights in which a side deviates."""
        deviates = np.zeros(len(self._rows), np.bool_)
        for side in found.sides.values():
            deviates |= side.is_known & (side.k2 > FLOAT_K2 * side.tokens)
        values = self._values(trial, np.flatnonzero(deviates & (self._own == number)))
        is_new = trial.text not in self._promoted
        self._promoted[trial.text] = self._variant(trial, values, evidence)
        return is_new

    def _values(self, trial: Trial, rows: Int64Array) -> Float64Array:
        known = self._scored.setdefault(trial.text, np.full(self._rows.num_tokens, np.nan))
        missing = [row for row in rows.tolist() if row not in self._done[trial.text]]
        if missing:
            new = trial.score(np.array(missing, np.int64))
            at = np.isin(self._rows.row_of, missing)
            known[at] = new[at]
            self._done[trial.text].update(missing)
        return known

    def _variant(self, trial: Trial, values: Float64Array, evidence: Evidence) -> Variant:
        defect = {of.name: getattr(trial, of.name) for of in fields(Defect)}
        plain = None if trial.is_precision else evidence.plain
        return Variant(**defect, logprobs=values, plain=plain)

    # -- trials -------------------------------------------------------------------------------

    def _trials(self, model: Any, evidence: Evidence) -> Iterator[Trial]:
        rows, known, scorer = self._rows, self._known, self._scorer
        chosen = evidence.processing

        def plain(places: Int64Array, **settings: Any) -> Float64Array:
            of = settings.pop("of", model)
            distribution = settings.pop("distribution", chosen)
            scored = scorer.score(of, rows, places, distributions=[distribution], **settings)
            return scored.logprobs[distribution].astype(np.float64)

        def changed(change: Change, places: Int64Array) -> Float64Array:
            with change.made():
                return plain(places)

        for change in scorer.changes(model):
            yield Trial(
                cause=CAUSE_OF[change.kind],
                text=change.text,
                score=partial(changed, change),
                rank=change.rank,
                approximates=MAX_ROUNDED_LEFT if change.kind == "quantised" else 0.0,
            )

        def scored_as(layout: Layout | None) -> Float64Array:
            out = np.full(rows.num_tokens, np.nan)
            if layout is not None:
                others, every = layout.rows, np.arange(len(layout.rows))
                scored = scorer.score(
                    model, others, every, distributions=[chosen], positions=layout.positions
                )
                is_own = layout.place >= 0
                out[layout.place[is_own]] = scored.logprobs[chosen][is_own]
            return out

        def arranged(arrangement: Any, places: Int64Array) -> Float64Array:
            return scored_as(laid_out(arrangement, rows, places.tolist(), known.lines))

        def asked(prompt: Prompt, places: Int64Array) -> Float64Array:
            return scored_as(with_prompt(prompt, rows, places.tolist()))

        for prompt in known.prompts:
            yield Trial(
                cause="wrong_template",
                text=f"after the prompt {prompt.text}",
                score=partial(asked, prompt),
                approximates=MAX_PROMPT_LEFT,
            )
        for arrangement in arrangements(known.lines):
            yield Trial(
                cause=arrangement.cause,
                text=arrangement.text,
                family=arrangement.family,
                fit="exact",
                score=partial(arranged, arrangement),
            )
        for cause, distributions in known.distributions.items():
            for distribution in distributions:
                if distribution != chosen:
                    yield Trial(
                        cause=cause,
                        text=f"after {distribution.describe()}",
                        score=partial(plain, distribution=distribution),
                        fit="near",
                    )
        if has_plain_head(model):

            def in_bfloat16(places: Int64Array) -> Float64Array:
                # The loaded model stays as it is: this is a copy, made and dropped.
                return plain(places, of=scorer.copied_in_bfloat16(model), head=torch.float32)

            for text, score in (
                ("in float32 with a head in bfloat16", partial(plain, head=torch.bfloat16)),
                ("in bfloat16 with a head in float32", in_bfloat16),
            ):
                yield Trial(cause=HALF_HEAD, text=text, score=score, is_precision=True)


def _least(side: Side, found: Comparison, row: int, *, is_precision: bool = False) -> float:
    """k2 of a row that needs no explanation."""
    least = FLOAT_K2 if is_precision else max(NOISE_FACTOR * found.floor, FLOAT_K2)
    return max(MAX_FEW_RESIDUAL * side.k2[row], least * side.tokens[row])


def _is_left(side: Side, found: Comparison, row: int, *, is_precision: bool = False) -> bool:
    """Whether a side deviates in this row by more than is explained: after the variant that
    reproduces it, if there is one, by more than a pair of precisions does."""
    least = _least(side, found, row, is_precision=is_precision)
    return bool(side.is_known[row]) and side.left[row] > least


def _probes(found: Comparison, *, is_precision: bool = False) -> Int64Array:
    """Rows in which something is unexplained, NUM_PROBES of each side."""
    out: set[int] = set()
    for side in found.sides.values():
        rows = [
            row
            for row in range(len(side.k2))
            if _is_left(side, found, row, is_precision=is_precision)
        ]
        if len(rows) > NUM_PROBES:
            reached = np.cumsum(side.left[rows])
            marks = (np.arange(NUM_PROBES) + 0.5) / NUM_PROBES * reached[-1]
            rows = [rows[i] for i in np.searchsorted(reached, marks).tolist()]
        out |= set(rows)
    return np.array(sorted(out), np.int64)
