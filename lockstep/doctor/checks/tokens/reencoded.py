"""Whether the ids of rows are those that were sampled, or their text's own spelling.

A policy draws tokens, and one text has many spellings: that some rows would come back from decoding
and encoding as other ids is healthy, and says only what a program would do that keeps text. The
defect is that it was done. What shows it, strongest first: the engine's ids, where the dump kept
them; and else the log-probs, which agree up to some token and then belong to other places, in rows
that are spelt canonically without exception.

# N tokens  R rows
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import MAX_EVIDENCE, Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.doctor.checks.tokens.alignment import MIN_GAIN, best_moves, in_question
from lockstep.doctor.checks.tokens.replies import ChangedReply, changed_replies
from lockstep.doctor.checks.tokens.spelling import speller_of
from lockstep.types import Int64Array

BREAK = 0.5
"""Nats from which on a token counts as disagreeing: one model's kernels differ by less on nearly
all tokens, also in bfloat16 on both sides."""
MIN_BROKEN_TOKENS = 2
"""Of a row, before it counts as broken: one token alone may be an outlier of the kernels."""
MAX_START = 0.25
"""Mean |d| before the first disagreeing token, over that from it on: a clean start."""
MIN_BROKEN_ROWS = 3
"""Rows that must show the pattern where only log-probs can."""
MIN_CANONICAL = 0.95
"""Share of the rows with the pattern that must be spelt canonically. All are, of those that were
encoded again; the rest is for rows of another cause that look alike."""
MIN_TEXT_BREAKS = 0.7
"""Share of the patterns that must begin at a token of text: control tokens are spelt in one way."""
MAX_CHANCE = 0.05
"""Of so many rows being canonical, were they as the other rows are."""
MIN_AGAINST_MOVED = 0.5
"""Where all rows are canonical: those with the pattern, over those that one offset from their
beginning explains as well. Short rows of confident tokens cannot tell the two apart."""
MIN_MOVED = 2
"""Rows of another spelling that one offset explains, for log-probs to be shifted besides."""
MAX_REALIGNED = 0.75
"""What is left of the disagreement where the log-probs may be moved, piece by piece: 0.4 in rows
that were encoded again; 0.96 to 1 where other ids, other weights or noise are behind it."""
MAX_ALIGNED_ROWS = 256
"""Rows that are realigned, of a dump; those after them are not counted as broken, for it is not
known whether one offset would explain them."""
MAX_ALIGNED_TOKENS = 512
"""Tokens after the first disagreement that are realigned."""
MIN_OVERLAP = 0.5
"""Share of a row that must be left to compare at an offset, for it to explain the row."""
_BACK, _AHEAD = 8, 24
"""Places that a log-prob may have been moved by. Canonical spellings are shorter, so that what was
sampled lies ahead of where it is looked for."""
_CAP, _CHANGE = 2.0, 1.0
"""Nats that one token can cost, and that one change of place costs."""


class Reencoded(Check):
    """Decoding and encoding, tried on every run of sampled text, and looked for in the dump."""

    name = "tokens/reencoded"
    claim = "the ids of a row are those that were sampled, however its text could be spelt"
    cause = "reencoded"
    needs = ("tokenizer",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._speller = speller_of(setting)
        self._num_rows = self._num_runs = self._num_respelt_runs = self._num_respelt_rows = 0
        self._num_engine_turns = self._num_changed_turns = 0
        self._num_compared = 0
        self._broken = {True: 0, False: 0}
        """Rows with a clean start and then disagreement, by whether they are canonical."""
        self._num_text_breaks = 0
        self._num_aligned = 0
        self._moved = {True: 0, False: 0}
        """Rows that one offset explains from their beginning on."""
        self._cost = self._realigned_cost = 0.0
        self._healthy: list[Evidence] = []
        self._by_engine = False
        self._by_logprobs = False

    def look(self, rows: Rows) -> None:
        runs = self._speller.runs(rows)
        respelt = [u for u, ids in enumerate(runs.respelt) if ids is not None]
        is_canonical = np.ones(len(rows), np.bool_)
        is_canonical[rows.row_of[runs.begin[respelt]]] = False
        self._num_rows += len(rows)
        self._num_runs += len(runs)
        self._num_respelt_runs += len(respelt)
        self._num_respelt_rows += int((~is_canonical).sum())
        for u in respelt[: MAX_EVIDENCE - len(self._healthy)]:
            row, begin = rows.where(int(runs.begin[u]))
            ids = runs.respelt[u]
            assert ids is not None
            self._healthy.append(
                Evidence(
                    row=row,
                    begin=begin,
                    end=begin + int(runs.end[u] - runs.begin[u]),
                    note="a spelling that the tokenizer would not have chosen: its own is beside",
                    expected_ids=tuple(ids.tolist()),
                )
            )
        for changed in self._changed(rows):
            self._num_changed_turns += 1
            row, begin = rows.where(changed.begin)
            self.show(
                1e6 + changed.end - changed.first,
                Evidence(
                    row=row,
                    begin=begin,
                    end=begin + changed.end - changed.begin,
                    note=f"{changed.what}; the engine's ids are beside, the first other one is "
                    f"token {changed.first - changed.begin} of the turn",
                    expected_ids=tuple(changed.engine_ids.tolist()),
                ),
            )
        if rows.engine_ids is not None:
            self._num_engine_turns += sum(len(turns or ()) for turns in rows.engine_ids)
        self._look_at_logprobs(rows, is_canonical)

    def _changed(self, rows: Rows) -> list[ChangedReply]:
        replies = changed_replies(rows, self._speller, self.setting)
        return [reply for reply in replies if reply.change == "reencoded"]

    def _look_at_logprobs(self, rows: Rows, is_canonical: BoolArray) -> None:
        if rows.rollout_logprobs is None or rows.trainer_logprobs is None:
            return
        first = first_breaks(rows)
        self._num_compared += int((~np.isnan(rows.gap)).sum())
        for r in np.flatnonzero(first >= 0).tolist():
            at = int(first[r])
            if self._num_aligned >= MAX_ALIGNED_ROWS:
                break
            cost, realigned, moved = realign(rows, r, at)
            if moved:  # one offset from the row's beginning: that is another check's
                self._moved[bool(is_canonical[r])] += 1
                continue
            self._num_aligned += 1
            self._cost += cost
            self._realigned_cost += realigned
            self._broken[bool(is_canonical[r])] += 1
            self._num_text_breaks += bool(self._speller.is_text(rows.token_ids[at : at + 1])[0])
            if is_canonical[r]:
                row, begin = rows.where(at)
                self.show(
                    float(rows.sizes[r] - begin),
                    Evidence(
                        row=row,
                        begin=begin,
                        end=begin + 1,
                        note="both sides agree up to here; from here on the log-probs are of "
                        "other tokens",
                    ),
                )

    def conclude(self) -> Finding:
        canonical, other = self._broken[True], self._broken[False]
        share = self._num_respelt_rows / max(self._num_rows, 1)
        left = self._realigned_cost / self._cost if self._cost else 1.0
        figures = {
            "rows": self._num_rows,
            "respelt_rows": self._num_respelt_rows,
            "respelt_runs": self._num_respelt_runs,
            "runs": self._num_runs,
            "engine_turns": self._num_engine_turns,
            "changed_turns": self._num_changed_turns,
            "broken_canonical_rows": canonical,
            "broken_other_rows": other,
            "realigned": left,
        }
        if self._num_changed_turns:
            self._by_engine = True
            return self.found(
                "differs",
                f"{self._num_changed_turns} of {self._num_engine_turns} turns are the engine's "
                "replies decoded and encoded again",
                **figures,
            )
        broken, moved = canonical + other, sum(self._moved.values())
        others = max(self._num_rows - broken, 1)
        chance = max(1 - (self._num_respelt_rows - other) / others, 0.0) ** canonical
        if (
            canonical >= MIN_BROKEN_ROWS
            and canonical >= MIN_CANONICAL * broken
            and (chance <= MAX_CHANCE or canonical >= MIN_AGAINST_MOVED * moved)
            and self._num_text_breaks >= MIN_TEXT_BREAKS * broken
            and left <= MAX_REALIGNED
        ):
            self._by_logprobs = True
            tried = " (more were not tried)" if self._num_aligned >= MAX_ALIGNED_ROWS else ""
            return self.found(
                "differs",
                f"{canonical} rows{tried} agree up to some token and then have log-probs of other "
                f"places, and {canonical} of {broken} such rows are spelt as the tokenizer "
                f"spells; of all rows {1 - share:.0%} are",
                **figures,
            )
        self._evidence.clear()
        for evidence in self._healthy:
            self.show(0.0, evidence)
        if not share:
            known = (
                "the engine's ids are the rows'"
                if self._num_engine_turns
                else "whether they were sampled so only engine_ids could tell"
                if not self._num_compared
                else "the two sides' log-probs do not say otherwise"
            )
            return self.found(
                "consistent",
                f"all {self._num_runs} runs of text are spelt as the tokenizer spells; {known}",
                **figures,
            )
        return self.found(
            "information",
            f"a program that decodes and encodes would change {share:.1%} of the rows "
            f"({self._num_respelt_runs} of {self._num_runs} runs of text); these did not pass "
            "through one",
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first token that is another on: what follows stands behind
        other ids, and its log-probs may lie at other places."""
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for changed in self._changed(rows):
            begin[changed.row] = min(begin[changed.row], changed.first)
        if self._by_logprobs and rows.trainer_logprobs is not None:
            first = first_breaks(rows, has_clean_start=False)
            runs = self._speller.runs(rows)
            respelt = [u for u, ids in enumerate(runs.respelt) if ids is not None]
            first[rows.row_of[runs.begin[respelt]]] = -1
            tokens = in_question(rows)
            # One offset explains some rows from their beginning on, by chance, or as another cause:
            # then it explains rows that nothing encoded again, too.
            if self._moved[False] >= MIN_MOVED and len(tokens):
                moves = best_moves(tokens, tokens.row, MIN_GAIN)
                first[tokens.row[moves.low[~moves.is_late]]] = -1
            begin = np.where(first >= 0, np.minimum(begin, first), begin)
        return without_explained(rows, begin)


def without_explained(rows: Rows, begin: Int64Array) -> Rows:
    """`rows` whose tokens from index `begin` of each row on are neither sampled nor trained, and
    have no log-prob of the sampler's: what stands behind other ids is explained by them, and says
    nothing about anything else. Where that is inside of a turn it is from the turn's beginning on:
    half a turn would be another defect."""
    spans = rows.spans
    if len(spans):
        turn = np.maximum(np.searchsorted(spans.begin, begin, side="right") - 1, 0)
        is_inside = (begin >= spans.begin[turn]) & (begin < spans.end[turn])
        begin = np.where(is_inside, spans.begin[turn], begin)
    is_lost = np.arange(rows.num_tokens) >= np.repeat(begin, rows.sizes)
    if not is_lost.any():
        return rows
    changed: dict[str, Any] = {"loss_mask": rows.loss_mask & ~is_lost}
    if rows.rollout_logprobs is not None:
        changed["rollout_logprobs"] = np.where(is_lost, np.float32(np.nan), rows.rollout_logprobs)
    if rows.is_sampled is not None:
        changed["is_sampled"] = rows.is_sampled & ~is_lost
    if rows.turn is not None:
        changed["turn"] = np.where(is_lost, np.int32(-1), rows.turn)
    return rows.with_(**changed)


def first_breaks(
    rows: Rows, *, has_clean_start: bool = True, min_tokens: int = MIN_BROKEN_TOKENS
) -> Int64Array:
    """[R] index of the first token of each row on which the two sides disagree, in a row where
    they do on `min_tokens`; -1 where they do not, or (has_clean_start) where they do not agree
    before."""
    gap = np.abs(rows.gap)
    is_compared = ~np.isnan(gap)
    row_of = rows.row_of
    is_big = is_compared & (gap > BREAK)
    at = np.flatnonzero(is_big)
    first = np.full(len(rows), -1, np.int64)
    first[row_of[at[::-1]]] = at[::-1]  # the last one written is the first of its row
    num_big = np.bincount(row_of[at], minlength=len(rows))
    first[num_big < min_tokens] = -1
    if not has_clean_start:
        return first
    compared = np.flatnonzero(is_compared)
    before = compared < first[row_of[compared]]

    def mean(chosen: Int64Array) -> Float64Array:
        total = np.bincount(row_of[chosen], gap[chosen], minlength=len(rows))
        num = np.bincount(row_of[chosen], minlength=len(rows))
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / num

    is_clean = mean(compared[before]) <= MAX_START * mean(compared[~before])
    first[~is_clean] = -1  # also where there is nothing before it
    return first


def realign(rows: Rows, row: int, at: int) -> tuple[float, float, bool]:
    """How well the sampler's log-probs from `at` on fit the trainer's where they stand, and where
    they may be moved piece by piece; and whether one offset of the whole row explains more.

    Returns (nats as it is, nats if moved, one offset is better). Each token costs |d|, at most
    _CAP; each change of place costs _CHANGE. By dynamic programming over tokens and offsets.
    """
    assert rows.rollout_logprobs is not None and rows.trainer_logprobs is not None
    whole = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    index = np.flatnonzero(rows.sampled[whole]) + whole.start
    start = int(np.searchsorted(index, at))
    index = index[: start + MAX_ALIGNED_TOKENS]
    trainer = rows.trainer_logprobs[index].astype(np.float64)
    rollout = rows.rollout_logprobs[index].astype(np.float64)
    costs = _costs(trainer, rollout)
    after = np.minimum(costs[start:], _CAP)
    best = after[0] + _CHANGE
    best[_BACK] = after[0][_BACK]
    for cost in after[1:]:
        best = np.minimum(best, best.min() + _CHANGE) + cost
    is_there = np.isfinite(costs)
    num = is_there.sum(axis=0)
    one = np.where(is_there, costs, 0.0).sum(axis=0) / np.maximum(num, 1) * len(costs)
    one[num < MIN_OVERLAP * len(costs)] = np.inf
    one[_BACK] = np.inf
    constant = float(one.min())
    realigned, as_is = float(best.min()), float(after[:, _BACK].sum())
    margin = _CHANGE / 2  # the piecewise way pays one change that the other does not need
    return as_is, realigned, constant <= realigned + float(costs[:start, _BACK].sum()) - margin


def _costs(trainer: Float64Array, rollout: Float64Array) -> Float64Array:
    """[T, offsets] of |trainer[i] - rollout[i + offset]|, at most _CAP; inf where there is none."""
    size = len(trainer)
    out = np.full((size, _BACK + _AHEAD + 1), np.inf)
    for column, offset in enumerate(range(-_BACK, _AHEAD + 1)):
        begin, end = max(0, -offset), min(size, size - offset)
        if end > begin:
            d = np.abs(trainer[begin:end] - rollout[begin + offset : end + offset])
            out[begin:end, column] = np.minimum(np.nan_to_num(d, nan=_CAP), _CAP)
    return out
