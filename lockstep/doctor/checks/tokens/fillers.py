"""Is a number that means "there is no log-prob" read as one?

# N tokens  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lockstep.doctor.checks.base import Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.context import TemplateCheck
from lockstep.doctor.checks.tokens.masks import misplaced
from lockstep.types import Int64Array

MIN_DIFF = 0.1
"""Nats between the trainer and a filler: closer, a forced token was 0.0 in float32, or it was
rounded to a decimal."""
SURE_DIFF = 1.0
"""Nats from which a 0.0 is not that of a distribution cut by top-p, which would need a top_p below
exp(-1) = 0.37."""
MIN_SURE = 0.05
"""Share of the fillers that must be that far from the trainer's."""
MIN_TOKENS = 2
"""Fillers before a cause is named."""
MIN_EXCESS = 4.0
"""Ratio of the rate at which the trainer disagrees with 0.0 to that for values within 0.01 of it.
Other weights make it disagree with both alike."""
MIN_REPEATED = 8
"""Occurrences of a value other than 0.0, among the tokens that differ, to be a filler."""
MIN_LEAD = 5.0
"""Ratio of these to the next value's: rounded log-probs all repeat alike."""
MIN_ABOVE = 0.2
"""Share of the tokens with a repeated value where the trainer's must be above it."""
MAX_ASKED = 4
"""Most common values of a chunk that are tested for being a lower bound."""
MAX_CROSSED = 0.05
"""Tokens of the same rows below a value, per token at it, up to which it is a lower bound."""
MIN_BELOW = 0.8
"""Tokens of the same rows that the trainer has below a lower bound, per token at it."""
MOVED_GAP = 0.5
"""Share of the gap at the fillers: rows whose other tokens disagree as much have been moved."""
LEAST_LOGPROB = -50.0
"""A token that the model sampled is likelier than exp(-50)."""
MIN_ZERO_TURN = 8
"""Sampled tokens of a turn that are all 0.0, without a trainer to compare, to be fillers: forced
tokens (the end of a call) come in twos and threes."""


class Fillers(TemplateCheck):
    """Trained tokens whose rollout log-prob is exactly 0.0, or another number again and again,
    where the trainer's is far from it.

    A forced token may be 0.0 in float32; the trainer then agrees.
    """

    name = "tokens/fillers"
    claim = "each trained token has a log-prob of its own"
    cause = "fillers"
    needs = ("rollout_logprobs",)

    def begin(self) -> None:
        self._far: Counter[float] = Counter()
        """Repeated values -> tokens that differ from the trainer's by MIN_DIFF."""
        self._above: Counter[float] = Counter()
        """The same, where the trainer's is above the value."""

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self.template.add(rows)
        own, logprobs = self._own(rows), rows.rollout
        is_zero = own & (logprobs == 0.0)
        filled = own & (logprobs < LEAST_LOGPROB) & np.isfinite(logprobs)
        self.count(
            trained_tokens=own,
            turns=len(rows.spans),
            zero_logprobs=is_zero,
            impossible_logprobs=filled,
        )
        if rows.trainer_logprobs is None:
            begin, end = self._zero_turns(rows, is_zero)
            self.count(turns_of_zeros=len(begin))
            filled |= rows.within(begin, end)
        else:
            objected = self._objected_zeros(rows, is_zero)
            is_near = own & (logprobs > -0.01) & (logprobs < 0.0)
            self.count(
                compared_tokens=len(rows.compared),
                zero_logprobs_objected=objected,
                sure=rows.trainer[objected] < -SURE_DIFF,
                near=is_near,
                near_objected=rows.trainer[is_near] < -MIN_DIFF,
            )
            self._count_repeated(rows, own)
            filled |= objected
        begin, end = rows.runs(filled)

        def note(b: int, e: int) -> str:
            told = f"{e - b} tokens of {logprobs[b]:g}"
            if rows.trainer_logprobs is not None:
                told += f", the trainer says {rows.trainer[b:e].min():.3g}"
            return told

        self.show_runs(rows, begin, end, note)

    def _own(self, rows: Rows) -> BoolArray:
        """[N] trained tokens but those of others, which are wrong in another way."""
        if rows.is_sampled is not None:
            return rows.loss_mask & rows.is_sampled
        return rows.loss_mask & ~misplaced(rows, self.template).observed

    def _objected_zeros(self, rows: Rows, is_zero: BoolArray) -> BoolArray:
        """[N] tokens of 0.0 that the trainer disagrees with, but for those that a move has left.

        Log-probs that were moved, or laid on other ids, leave fillers at the ends of a row or its
        turns, and the tokens around them disagree as much: that has another cause.
        """
        out = is_zero & (rows.trainer < -MIN_DIFF)
        at = np.flatnonzero(out)
        not_zero = np.flatnonzero(rows.sampled & ~is_zero)
        if not len(at) or not len(not_zero):
            return out
        spans, gap = rows.spans, np.abs(rows.gap)
        rest = np.flatnonzero(rows.loss_mask & ~is_zero & np.isfinite(gap))
        filler_gap, rest_gap = rows.row_means(at, gap[at]), rows.row_means(rest, gap[rest])
        is_unlike = (rest_gap >= MOVED_GAP * filler_gap) & (rows.row_sums(rest) > 0)
        # Zeros between two other log-probs of their turn were never pushed over an end.
        before = np.searchsorted(not_zero, at)
        span = np.searchsorted(spans.begin, at, side="right") - 1
        has_left = (before > 0) & (not_zero[np.maximum(before - 1, 0)] >= spans.begin[span])
        has_right = (before < len(not_zero)) & (
            not_zero[np.minimum(before, len(not_zero) - 1)] < spans.end[span]
        )
        num_inner = rows.row_sums(at[has_left & has_right])
        out[at[(is_unlike & (num_inner == 0))[rows.row_of[at]]]] = False
        return out

    def _count_repeated(self, rows: Rows, own: BoolArray) -> None:
        """Counts values other than 0.0 that repeat in this chunk far from the trainer's."""
        logprobs, gap = rows.rollout, rows.gap
        far = np.flatnonzero(own & (np.abs(gap) > MIN_DIFF) & (logprobs != 0.0))
        if len(far) < MIN_REPEATED:
            return
        values, of, num = np.unique(logprobs[far], return_inverse=True, return_counts=True)
        above = np.bincount(of, gap[far] > 0, minlength=len(values))
        repeated = np.flatnonzero(num >= 3)  # a value that occurs once is no filler
        repeated = repeated[np.argsort(-num[repeated], kind="stable")]
        for rank, v in enumerate(repeated.tolist()):
            value = float(values[v])
            if rank >= MAX_ASKED or not self._is_lower_bound(rows, own, value):
                self._far[value] += int(num[v])
                self._above[value] += int(above[v])

    @staticmethod
    def _is_lower_bound(rows: Rows, own: BoolArray, value: float) -> bool:
        """True if log-probs were clamped at the value: none of the same rows is below it, and about
        as many of the trainer's are, even at other tokens (the rows may be shifted besides)."""
        at = own & (rows.rollout == value)
        num = np.count_nonzero(at)
        beside = own & (rows.row_sums(np.flatnonzero(at)) > 0)[rows.row_of]
        crossed = np.count_nonzero(beside & (rows.rollout < value))
        below = np.count_nonzero(beside & (rows.trainer < value))
        return bool(crossed <= MAX_CROSSED * num and below >= MIN_BELOW * num)

    def _zero_turns(self, rows: Rows, is_zero: BoolArray) -> tuple[Int64Array, Int64Array]:
        """(begin, end) of turns in which every token is 0.0."""
        spans = rows.spans
        is_all = rows.num_in(is_zero, spans.begin, spans.end) == spans.size
        is_all &= spans.size >= MIN_ZERO_TURN
        return spans.begin[is_all], spans.end[is_all]

    @property
    def _constant(self) -> float | None:
        """The filler other than 0.0, if there is one."""
        (value, num), (_, next_num) = [*self._far.most_common(2), (0.0, 0), (0.0, 0)][:2]
        if num < max(MIN_REPEATED, MIN_LEAD * next_num):
            return None
        # At a lower bound of clamping, the trainer's are below it and never above.
        return value if self._above[value] >= MIN_ABOVE * num else None

    @property
    def _zeros_are_fillers(self) -> bool:
        c = self.counts
        if not c["compared_tokens"]:
            return c["turns_of_zeros"] >= MIN_TOKENS
        objected = c["zero_logprobs_objected"]
        rate = objected / max(c["zero_logprobs"], 1)
        near = c["near_objected"] / max(c["near"], 1)
        return (
            objected >= MIN_TOKENS
            and c["sure"] >= max(MIN_TOKENS, MIN_SURE * objected)
            and rate >= MIN_EXCESS * near
        )

    def conclude(self) -> Finding:
        c, constant = self.counts, self._constant
        num_constant = 0 if constant is None else self._far[constant]
        zeros = f"{c['zero_logprobs_objected']} of {c['zero_logprobs']} log-probs of exactly 0.0"
        told: list[str] = []
        if self._zeros_are_fillers:
            told.append(
                f"{zeros} are more than {MIN_DIFF} nats from the trainer's"
                if c["compared_tokens"]
                else f"all log-probs of {c['turns_of_zeros']} of {c['turns']} turns are exactly 0.0"
            )
        if constant is not None:
            told.append(f"{num_constant} tokens have {constant:g}, whatever the trainer says")
        elif c["impossible_logprobs"]:
            told.append(f"{c['impossible_logprobs']} sampled tokens are below {LEAST_LOGPROB:g}")
        if not told:
            return self.consistent(f"{zeros} are fillers", repeated_logprobs=num_constant)
        is_greedy = self.setting.temperature == 0 or self.setting.top_k == 1
        return self.found(
            "information" if is_greedy else "differs",
            "; ".join(told) + (": sampled greedily, each token is certain" if is_greedy else ""),
            repeated_logprobs=num_constant,
        )

    def repair(self, rows: Rows) -> Rows:
        """NaN in place of the fillers: the right numbers are not in the dump."""
        if rows.rollout_logprobs is None:
            return rows
        own, logprobs = self._own(rows), rows.rollout
        filled = own & (logprobs < LEAST_LOGPROB)
        if self._zeros_are_fillers:
            is_zero = own & (logprobs == 0.0)
            if rows.trainer_logprobs is None:
                filled |= rows.within(*self._zero_turns(rows, is_zero))
            else:
                filled |= self._objected_zeros(rows, is_zero)
        if (constant := self._constant) is not None:
            filled |= own & (logprobs == np.float32(constant)) & (np.abs(rows.gap) > MIN_DIFF)
        if not filled.any():
            return rows
        return rows.with_(rollout_logprobs=np.where(filled, np.float32(np.nan), logprobs))
