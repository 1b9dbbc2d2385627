"""Are the ids of rows those that were sampled, or their text encoded again?

A policy samples tokens, and one text has many spellings. That some rows would decode and encode to
other ids is healthy: it says only what a program that keeps text would do. The defect is that it
was done. It shows, strongest first, in the engine's ids, where the dump has them; else in
log-probs that agree up to some token and then belong to other positions, in rows that are all
spelt canonically.

# N tokens  R rows
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.doctor.checks.base import MAX_EVIDENCE, Evidence, Finding, evidence_at
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.doctor.checks.tokens.alignment import MIN_GAIN, best_moves, in_question
from lockstep.doctor.checks.tokens.replies import ReplyCheck
from lockstep.types import Int32Array, Int64Array

BREAK = 0.5
"""Nats from which a token disagrees: the kernels of one model differ by less on nearly all tokens,
also with bfloat16 on both sides."""
MIN_BROKEN_TOKENS = 2
"""Disagreeing tokens of a broken row: one may be an outlier of the kernels."""
MAX_START = 0.25
"""Ratio of the mean |d| before the first disagreeing token to that after it, for a clean start."""
MIN_BROKEN_ROWS = 3
"""Rows that must show the pattern where only log-probs can."""
MIN_CANONICAL = 0.95
"""Share of the rows with the pattern that must be spelt canonically. All rows that were encoded
again are; the rest allows for rows of another cause."""
MIN_TEXT_BREAKS = 0.7
"""Share of the patterns that must begin at text: control tokens have one spelling."""
MAX_CHANCE = 0.05
"""Probability of so many canonical rows, if they were spelt as the other rows are."""
MIN_AGAINST_MOVED = 0.5
"""Where all rows are canonical: ratio of the rows with the pattern to those that one offset from
their beginning explains as well. Short rows of confident tokens cannot tell the two apart."""
MIN_MOVED = 2
"""Rows of another spelling that one offset explains, for log-probs to be shifted besides."""
MAX_REALIGNED = 0.75
"""Share of the disagreement that is left if log-probs may be moved piece by piece: 0.4 in rows that
were encoded again, 0.96 to 1 with other ids, other weights or noise."""
MAX_ALIGNED_ROWS = 256
"""Rows that are realigned. Later ones do not count as broken: one offset might explain them."""
MAX_ALIGNED_TOKENS = 512
"""Tokens after the first disagreement that are realigned."""
MIN_OVERLAP = 0.5
"""Share of a row that must be left to compare at an offset that explains the row."""
_BACK, _AHEAD = 8, 24
"""Offsets that a log-prob may have been moved by. Canonical spellings are shorter, so what was
sampled is ahead of where it is looked for."""
_CAP, _CHANGE = 2.0, 1.0
"""Cost in nats of one token at most, and of one change of offset."""


class Reencoded(ReplyCheck):
    """Decodes and encodes every run of sampled text, and looks for the result in the dump."""

    name = "tokens/reencoded"
    claim = "the ids of a row are those that were sampled, however its text could be spelt"
    cause = change = "reencoded"
    needs = ("tokenizer",)

    def begin(self) -> None:
        self._cost = self._realigned_cost = 0.0
        self._healthy: list[Evidence] = []
        self._by_logprobs = False

    def look(self, rows: Rows) -> None:
        begin, end, again = self.speller.runs(rows)
        respelt = [
            (b, e, ids)
            for b, e, ids in zip(begin.tolist(), end.tolist(), again, strict=True)
            if ids is not None
        ]
        is_canonical = canonical_rows(rows, begin, again)
        self.count(
            rows=len(rows), runs=len(begin), respelt_runs=len(respelt), respelt_rows=~is_canonical
        )
        note = "a spelling that the tokenizer would not have chosen"
        for b, e, ids in respelt[: MAX_EVIDENCE - len(self._healthy)]:
            self._healthy.append(evidence_at(rows, b, e, note, ids.tolist()))
        self.look_at_replies(rows)
        if rows.rollout_logprobs is not None and rows.trainer_logprobs is not None:
            self._look_at_logprobs(rows, is_canonical)

    def _look_at_logprobs(self, rows: Rows, is_canonical: BoolArray) -> None:
        first, c = first_breaks(rows), self.counts
        c["compared"] += len(rows.compared)
        for r in np.flatnonzero(first >= 0).tolist():
            if c["aligned"] >= MAX_ALIGNED_ROWS:
                break
            at = int(first[r])
            cost, realigned, is_moved = realign(rows, r, at)
            if is_moved:  # one offset from the row's beginning: another check's cause
                c["moved_canonical_rows" if is_canonical[r] else "moved_other_rows"] += 1
                continue
            c["aligned"] += 1
            self._cost += cost
            self._realigned_cost += realigned
            c["broken_canonical_rows" if is_canonical[r] else "broken_other_rows"] += 1
            c["text_breaks"] += bool(self.speller.is_text(rows.token_ids[at : at + 1])[0])
            if is_canonical[r]:
                note = "both sides agree up to here; from here on, log-probs are of other tokens"
                self.show(float(rows.offsets[r + 1] - at), rows, at, at + 1, note)

    def conclude(self) -> Finding:
        c = self.counts
        canonical, other = c["broken_canonical_rows"], c["broken_other_rows"]
        left = self._realigned_cost / self._cost if self._cost else 1.0
        if c["changed_turns"]:
            return self.differs(
                f"{c['changed_turns']} of {c['engine_turns']} turns are the engine's replies, "
                "decoded and encoded again",
                "shown",
                realigned=left,
            )
        broken, moved = canonical + other, c["moved_canonical_rows"] + c["moved_other_rows"]
        share = c["respelt_rows"] / max(c["rows"], 1)
        rate = (c["respelt_rows"] - other) / max(c["rows"] - broken, 1)
        chance = max(1 - rate, 0.0) ** canonical
        if (
            canonical >= MIN_BROKEN_ROWS
            and canonical >= MIN_CANONICAL * broken
            and (chance <= MAX_CHANCE or canonical >= MIN_AGAINST_MOVED * moved)
            and c["text_breaks"] >= MIN_TEXT_BREAKS * broken
            and left <= MAX_REALIGNED
        ):
            self._by_logprobs = True
            tried = " (no more were tried)" if c["aligned"] >= MAX_ALIGNED_ROWS else ""
            return self.differs(
                f"{canonical} of {broken} rows{tried} that agree up to some token and then do not "
                f"are spelt as the tokenizer spells them; of all rows {1 - share:.0%} are",
                "fit",
                realigned=left,
            )
        self._evidence.clear()
        for evidence in self._healthy:
            self.keep(0.0, evidence)
        if share:
            return self.information(
                f"a program that decodes and encodes would change {share:.1%} of the rows "
                f"({c['respelt_runs']} of {c['runs']} runs of text)",
                realigned=left,
            )
        known = "only engine_ids could tell whether they were sampled so"
        if c["compared"]:
            known = "the two sides' log-probs do not contradict that"
        if c["engine_turns"]:
            known = "the engine's ids are the rows'"
        return self.consistent(
            f"all {c['runs']} runs of text are spelt as the tokenizer spells them; {known}",
            realigned=left,
        )

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first different token on: the tokens after it follow other
        ids, and their log-probs may be at other positions."""
        at = [reply.first for reply in self.changed(rows)]
        if self._by_logprobs and rows.trainer_logprobs is not None:
            first = first_breaks(rows, has_clean_start=False)
            begin, _, again = self.speller.runs(rows)
            first[~canonical_rows(rows, begin, again)] = -1
            tokens = in_question(rows)
            # One offset explains some rows from their beginning on, by chance or as another cause:
            # a cause would explain rows that nothing encoded again, too.
            if self.counts["moved_other_rows"] >= MIN_MOVED and len(tokens):
                moves = best_moves(tokens, tokens["row"], MIN_GAIN)
                first[tokens["row"][moves["low"][~moves["is_late"]]]] = -1
            at += first[first >= 0].tolist()
        return rows.cut_from(at)


def canonical_rows(rows: Rows, begin: Int64Array, again: Sequence[Int32Array | None]) -> BoolArray:
    """[R] True for rows whose text is all spelt as the tokenizer spells it. Both of `runs`."""
    is_respelt = np.array([ids is not None for ids in again], np.bool_)
    return rows.row_sums(begin[is_respelt]) == 0


def first_breaks(
    rows: Rows, *, has_clean_start: bool = True, min_tokens: int = MIN_BROKEN_TOKENS
) -> Int64Array:
    """[R] index of the first token of each row on which the two sides disagree; -1 for rows with
    fewer than `min_tokens` of these, or (has_clean_start) that disagree from the start."""
    gap, compared = np.abs(rows.gap), rows.compared
    # 0.0 at a token that the trainer finds unlikely is a filler, whatever stands there.
    at = compared[(gap[compared] > BREAK) & (rows.rollout[compared] != 0.0)]
    first = rows.firsts(at)
    first[(first == rows.num_tokens) | (rows.row_sums(at) < min_tokens)] = -1
    if not has_clean_start:
        return first
    is_before = compared < first[rows.row_of[compared]]
    before, after = compared[is_before], compared[~is_before]
    is_clean = rows.row_means(before, gap[before]) <= MAX_START * rows.row_means(after, gap[after])
    first[~is_clean | (rows.row_sums(before) == 0)] = -1
    return first


def realign(rows: Rows, row: int, at: int) -> tuple[float, float, bool]:
    """How well the sampler's log-probs from `at` on fit the trainer's as they are, and if they may
    be moved piece by piece; and whether one offset of the whole row explains more.

    Returns (nats as they are, nats if moved, one offset is better). Each token costs |d|, at most
    _CAP; each change of offset costs _CHANGE. By dynamic programming over tokens and offsets.
    """
    whole = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    index = np.flatnonzero(rows.sampled[whole]) + whole.start
    start = int(np.searchsorted(index, at))
    index = index[: start + MAX_ALIGNED_TOKENS]
    trainer = rows.trainer[index].astype(np.float64)
    rollout = rows.rollout[index].astype(np.float64)
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
    margin = _CHANGE / 2  # the piecewise path pays one change that the other does not need
    return as_is, realigned, constant <= realigned + float(costs[:start, _BACK].sum()) - margin


def _costs(trainer: Float64Array, rollout: Float64Array) -> Float64Array:
    """[T, offsets] |trainer[i] - rollout[i + offset]|, at most _CAP; inf where there is none."""
    size = len(trainer)
    out = np.full((size, _BACK + _AHEAD + 1), np.inf)
    for column, offset in enumerate(range(-_BACK, _AHEAD + 1)):
        begin, end = max(0, -offset), min(size, size - offset)
        if end > begin:
            d = np.abs(trainer[begin:end] - rollout[begin + offset : end + offset])
            out[begin:end, column] = np.minimum(np.nan_to_num(d, nan=_CAP), _CAP)
    return out
