"""Numbers that stand for "there is no log-prob", and are read as one.

# N tokens  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.masks import indices_of, misplaced, runs_of
from lockstep.doctor.checks.tokens.template_ids import TemplateIds
from lockstep.types import Int64Array

MIN_DIFF = 0.1
"""Nats that the trainer must be away from the filler: below, a forced token was 0.0 in float32, or
it was rounded to a decimal."""
SURE_DIFF = 1.0
"""Nats from which it cannot be the 0.0 of a distribution cut by top-p: that would need a top_p
below exp(-1) = 0.37."""
MIN_SURE = 0.05
"""Share of the fillers that must be so far from the trainer's."""
MIN_TOKENS = 2
"""Fillers before a cause is named."""
MIN_EXCESS = 4.0
"""How many times more often the trainer must object to an exact filler than to values within 0.01
of it. Of other weights it objects to both alike."""
MIN_REPEATED = 8
"""Occurrences of one other value than 0.0 among the tokens that differ, to be a filler."""
MIN_LEAD = 5.0
"""How many times more often than the next one: rounded log-probs repeat all alike."""
MIN_ABOVE = 0.2
"""Share of the tokens with a repeated value at which the trainer's must be above it."""
MAX_ASKED = 4
"""Values of a chunk, the most common ones, that are asked whether they are a lower bound."""
MAX_CROSSED = 0.05
"""Of the tokens at a value: as many of their rows that are below it make it no lower bound."""
MIN_BELOW = 0.8
"""Of the tokens at a lower bound, that the trainer has below it, anywhere in the same rows."""
MOVED_GAP = 0.5
"""Of the gap at the fillers: rows whose other tokens disagree as much have been moved."""
LEAST_LOGPROB = -50.0
"""What the model has drawn is likelier than exp(-50)."""
MIN_ZERO_TURN = 8
"""Sampled tokens in a turn that are all 0.0, without a trainer to ask, to be fillers: forced tokens
(the end of a call) come in twos and threes."""


class Fillers(Check):
    """Trained tokens whose rollout log-prob is exactly 0.0, or another number again and again,
    where the trainer's is far from it.

    A forced token may well be 0.0 in float32: the trainer then agrees.
    """

    name = "tokens/fillers"
    claim = "each trained token has a log-prob of its own"
    cause = "fillers"
    needs = ("rollout_logprobs",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._trained = 0
        self._zeros = 0
        self._objected = 0
        self._sure = 0
        self._near = 0
        self._near_objected = 0
        self._turns = 0
        self._zero_turns = 0
        self._lows = 0
        self._lasts = 0
        self._has_trainer = False
        self._above: Counter[float] = Counter()
        self._below: Counter[float] = Counter()

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self._template.add(rows)
        own = self._own(rows)
        logprobs = rows.rollout_logprobs
        assert logprobs is not None, "the check's needs"
        self._trained += int(np.count_nonzero(own))
        self._turns += len(rows.spans)
        is_zero = own & (logprobs == 0.0)
        self._zeros += int(np.count_nonzero(is_zero))
        is_low = own & (logprobs < LEAST_LOGPROB) & np.isfinite(logprobs)
        self._lows += int(np.count_nonzero(is_low))
        filled = is_low
        if rows.trainer_logprobs is None:
            zero_turns = self._all_zero_turns(rows, is_zero)
            self._zero_turns += len(zero_turns)
            filled |= self._tokens_of(zero_turns, rows)
        else:
            self._has_trainer = True
            objected = self._objected_zeros(rows, is_zero)
            self._objected += int(np.count_nonzero(objected))
            self._sure += int(np.count_nonzero(rows.trainer_logprobs[objected] < -SURE_DIFF))
            is_near = own & (logprobs > -0.01) & (logprobs < 0.0)
            self._near += int(np.count_nonzero(is_near))
            self._near_objected += int(np.count_nonzero(rows.trainer_logprobs[is_near] < -MIN_DIFF))
            self._count_repeated(rows, own)
            filled |= objected
        if not filled.any():
            return
        last = np.zeros(rows.num_tokens, np.bool_)
        last[rows.spans.end - 1] = True
        self._lasts += int(np.count_nonzero(filled & last))
        begins, ends = runs_of(filled, rows)
        for begin, end in zip(begins[:64].tolist(), ends[:64].tolist(), strict=True):
            row, place = rows.where(begin)
            said = "" if rows.trainer_logprobs is None else (
                f", the trainer says {rows.trainer_logprobs[begin:end].min():.3g}"
            )  # fmt: skip
            self.show(
                end - begin,
                Evidence(
                    row=row,
                    begin=place,
                    end=place + end - begin,
                    note=f"{end - begin} tokens of {logprobs[begin]:g}{said}",
                ),
            )

    def _own(self, rows: Rows) -> BoolArray:
        """[N] trained, and not the words of others: those are wrong in another way."""
        if rows.is_sampled is not None:
            return rows.loss_mask & rows.is_sampled
        observed = misplaced(rows, self._template).observed
        return rows.loss_mask & ~observed if observed.any() else rows.loss_mask

    def _objected_zeros(self, rows: Rows, is_zero: BoolArray) -> BoolArray:
        """[N] 0.0 on one side and far from it on the other, other than what a move has left.

        Log-probs that were moved, or laid on other ids, leave fillers at the ends of a row or its
        turns, and what is beside them disagrees as much: that has another cause.
        """
        trainer = rows.trainer_logprobs
        assert trainer is not None, "asked only where there is one"
        out = is_zero & (trainer < -MIN_DIFF)
        at = np.flatnonzero(out)
        if not len(at):
            return out
        spans = rows.spans
        gap = np.abs(rows.gap)
        num = len(rows)
        row = rows.row_of[at]
        filler_gap = np.bincount(row, gap[at], minlength=num) / np.maximum(
            np.bincount(row, minlength=num), 1
        )
        is_rest = rows.loss_mask & ~is_zero & np.isfinite(gap)
        rest = np.flatnonzero(is_rest)
        rest_num = np.bincount(rows.row_of[rest], minlength=num)
        rest_gap = np.bincount(rows.row_of[rest], gap[rest], minlength=num) / np.maximum(
            rest_num, 1
        )
        is_unlike = (rest_gap >= MOVED_GAP * filler_gap) & (rest_num > 0)
        # Zeros between two other log-probs of their turn were never pushed over an end.
        not_zero = np.flatnonzero(rows.sampled & ~is_zero)
        if not len(not_zero):
            return out
        before = np.searchsorted(not_zero, at)
        span = np.searchsorted(spans.begin, at, side="right") - 1
        has_left = (before > 0) & (not_zero[np.maximum(before - 1, 0)] >= spans.begin[span])
        has_right = (before < len(not_zero)) & (
            not_zero[np.minimum(before, len(not_zero) - 1)] < spans.end[span]
        )
        num_inner = np.bincount(row[has_left & has_right], minlength=num)
        out[at[(is_unlike & (num_inner == 0))[row]]] = False
        return out

    def _count_repeated(self, rows: Rows, own: BoolArray) -> None:
        """Counts other values than 0.0 that the trainer is far from, if they come again here."""
        logprobs = rows.rollout_logprobs
        assert logprobs is not None, "the check's needs"
        gap = rows.gap
        far = np.flatnonzero(own & (np.abs(gap) > MIN_DIFF) & (logprobs != 0.0))
        if len(far) < MIN_REPEATED:
            return
        values, of, num = np.unique(logprobs[far], return_inverse=True, return_counts=True)
        above = np.bincount(of, gap[far] > 0, minlength=len(values))
        repeated = np.flatnonzero(num >= 3)  # a value by itself is no filler
        repeated = repeated[np.argsort(-num[repeated], kind="stable")]
        for rank, v in enumerate(repeated.tolist()):
            if rank < MAX_ASKED and self._is_lower_bound(rows, own, float(values[v])):
                continue
            self._above[float(values[v])] += int(above[v])
            self._below[float(values[v])] += int(num[v] - above[v])

    @staticmethod
    def _is_lower_bound(rows: Rows, own: BoolArray, value: float) -> bool:
        """Whether log-probs were cut at it: none is below, and the trainer's are about as often,
        be it beside other tokens because the rows are shifted besides."""
        rollout, trainer = rows.rollout_logprobs, rows.trainer_logprobs
        assert rollout is not None and trainer is not None, "asked where there is a gap"
        at = own & (rollout == value)
        has = np.bincount(rows.row_of[at], minlength=len(rows)) > 0
        beside = own & has[rows.row_of]
        crossed = np.count_nonzero(beside & (rollout < value))
        below = np.count_nonzero(beside & (trainer < value))
        num = np.count_nonzero(at)
        return bool(crossed <= MAX_CROSSED * num and below >= MIN_BELOW * num)

    def _all_zero_turns(self, rows: Rows, is_zero: BoolArray) -> Int64Array:
        """Turns of which every token is 0.0."""
        spans = rows.spans
        total = np.concatenate([[0], np.cumsum(is_zero)])
        zeros = total[spans.end] - total[spans.begin]
        return np.flatnonzero((zeros == spans.size) & (spans.size >= MIN_ZERO_TURN))

    def _tokens_of(self, turns: Int64Array, rows: Rows) -> BoolArray:
        out = np.zeros(rows.num_tokens, np.bool_)
        out[indices_of(rows.spans.begin[turns], rows.spans.end[turns])] = True
        return out

    @property
    def _constant(self) -> float | None:
        """The number other than 0.0 that stands for none, if there is one."""
        total = (self._above + self._below).most_common(2)
        if not total or total[0][1] < MIN_REPEATED:
            return None
        value, num = total[0]
        if len(total) > 1 and num < MIN_LEAD * total[1][1]:
            return None
        # At a lower bound that log-probs were cut at, the trainer's are below it and never above.
        return value if self._above[value] >= MIN_ABOVE * num else None

    @property
    def _zeros_are_fillers(self) -> bool:
        if not self._has_trainer:
            return self._zero_turns >= MIN_TOKENS
        rate = self._objected / max(self._zeros, 1)
        near = self._near_objected / max(self._near, 1)
        return (
            self._objected >= MIN_TOKENS
            and self._sure >= max(MIN_TOKENS, MIN_SURE * self._objected)
            and rate >= MIN_EXCESS * near
        )

    def conclude(self) -> Finding:
        constant = self._constant
        num_constant = 0 if constant is None else self._above[constant] + self._below[constant]
        zeros = self._objected if self._has_trainer else self._zero_turns
        figures = {
            "trained_tokens": self._trained,
            "zero_logprobs": self._zeros,
            "zero_logprobs_objected": self._objected,
            "turns_of_zeros": self._zero_turns,
            "impossible_logprobs": self._lows,
            "repeated_logprobs": num_constant,
            "fillers_at_turn_ends": self._lasts,
        }
        said: list[str] = []
        if self._zeros_are_fillers:
            said.append(
                f"{self._objected} of {self._zeros} log-probs of exactly 0.0 are more than "
                f"{MIN_DIFF} from the trainer's"
                if self._has_trainer
                else f"all log-probs of {self._zero_turns} of {self._turns} turns are exactly 0.0"
            )
        if constant is not None:
            said.append(f"{num_constant} tokens have {constant:g}, whatever the trainer says")
        elif self._lows:
            said.append(f"{self._lows} sampled tokens have less than {LEAST_LOGPROB:g}")
        if not said:
            return self.found(
                "consistent",
                f"{zeros} of {self._zeros} log-probs of exactly 0.0 stand for none",
                **figures,
            )
        is_greedy = self.setting.temperature == 0 or self.setting.top_k == 1
        return self.found(
            "information" if is_greedy else "differs",
            "; ".join(said) + (": sampled greedily, each token is certain" if is_greedy else ""),
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """NaN in place of the fillers: the right numbers are not in the dump."""
        own, logprobs = self._own(rows), rows.rollout_logprobs
        if logprobs is None:
            return rows
        filled = own & (logprobs < LEAST_LOGPROB)
        if self._zeros_are_fillers:
            is_zero = own & (logprobs == 0.0)
            if rows.trainer_logprobs is None:
                filled |= self._tokens_of(self._all_zero_turns(rows, is_zero), rows)
            else:
                filled |= self._objected_zeros(rows, is_zero)
        if (constant := self._constant) is not None:
            filled |= own & (logprobs == np.float32(constant)) & (np.abs(rows.gap) > MIN_DIFF)
        if not filled.any():
            return rows
        return rows.with_(rollout_logprobs=np.where(filled, np.float32(np.nan), logprobs))
