"""Whether each log-prob stands beside its own token.

# M compared tokens of the rows in question, end to end  U units (rows, or turns)  K offsets
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.types import Int64Array

MAX_OFFSET = 8
"""Places that a whole row or turn is tried at, to either side."""
MAX_INNER_OFFSET = 2
"""The same for an offset that begins in the middle: a log-prob or two were lost, or came twice."""
MIN_GAP = 0.05
"""Mean |d| in nats as it is, under which a row is not looked at. A shift makes a nat; the kernels
of two engines a few hundredths."""
CAP = 4.0
"""Nats that one token counts at most: a single filler of -9999 is no reason to move a row."""
FLOOR = 0.01
"""Nats added to both means before they are compared: agreement beyond the noise of 16-bit
kernels proves nothing more."""
MAX_LEFT = 0.35
"""Share of the gap that may be left at the offset. Next to other weights (a second cause) a
quarter is; log-probs of one text are this close at a wrong offset only by chance."""
MIN_PAIRS = 3
"""Tokens that must be compared at the offset."""
MIN_GAIN = 12.0
"""Nats that the offset must explain the row better by, were |d| exponential: n log(before / after).
exp(-12) times the 16 offsets is 1 row in 10,000 by chance."""
LATE_PENALTY = 6.0
"""Nats more for an offset that begins in the middle: any of some hundred places was tried."""
WEAK_GAIN = 3.0
"""Nats for a row that is too short to prove an offset, where others have: and for its vote."""
MIN_VOTES = 8
"""Short rows that must agree on one offset, where no row proves it alone."""
VOTES_LEAD = 4.0
"""How many times more often than any other one."""
LONG = 12
"""Tokens of a row that prove an offset, if it has one: 12 log(1 / MAX_LEFT) > MIN_GAIN."""
MIN_SHARE = 0.02
"""Share of the rows in question at one offset: less is chance among rows of another cause."""
ALONE_GAIN = 25.0
"""Nats for a single row of a dump."""


class Shifted(Check):
    """The best alignment of the two sides' log-probs over offsets.

    Each row is tried as a whole, its trained tokens strung together over the borders of turns, and
    each turn by itself; an offset holds from the first token on, or from some token in the middle
    (one log-prob was lost there). Rows too short to prove an offset are counted where others do, or
    where many agree.

    Log-probs that were laid on newly encoded ids begin to be off in the middle of turns, too, and
    at ever other offsets: `reencoded` sees these first where there is a tokenizer.
    """

    name = "tokens/shifted"
    claim = "each log-prob stands beside its own token"
    cause = "shifted"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._num_rows = 0
        self._in_question = 0
        self._long = 0
        self._proved: Counter[int] = Counter()
        self._votes: Counter[int] = Counter()
        self._from_middle = 0
        self._best_gain = 0.0

    def look(self, rows: Rows) -> None:
        self._num_rows += len(rows)
        tokens = in_question(rows)
        if not len(tokens):
            return
        self._in_question += tokens.num_rows
        self._long += int((np.unique(tokens.row, return_counts=True)[1] >= LONG).sum())
        for moves in aligned(tokens, WEAK_GAIN):
            is_proved = moves.gain >= np.where(moves.is_late, MIN_GAIN + LATE_PENALTY, MIN_GAIN)
            self._votes.update(moves.by[~moves.is_late].tolist())
            self._proved.update(moves.by[is_proved].tolist())
            self._from_middle += int((is_proved & moves.is_late).sum())
            self._best_gain = max(self._best_gain, float(moves.gain.max(initial=0.0)))
            best = np.flatnonzero(is_proved)
            for u in best[np.argsort(-moves.gain[best])][:32].tolist():
                first, last = int(tokens.at[moves.begin[u]]), int(tokens.at[moves.end[u] - 1])
                row, place = rows.where(first)
                inner = "from here on, " if moves.is_late[u] else ""
                self.show(
                    float(moves.gain[u]),
                    Evidence(
                        row=row,
                        begin=place,
                        end=place + last + 1 - first,
                        note=f"{inner}mean |d| {moves.before[u]:.2g} becomes {moves.after[u]:.2g} "
                        f"if the sampler's log-probs are moved by {int(moves.by[u]):+d}",
                    ),
                )

    @property
    def _offsets(self) -> frozenset[int]:
        """Offsets that are proved."""
        least = max(2.0, MIN_SHARE * self._in_question)
        found = {by for by, num in self._proved.items() if num >= least}
        if not found and self._best_gain >= ALONE_GAIN and self._in_question <= 1 / MIN_SHARE:
            found = set(self._proved)
        if not found and self._long >= MIN_VOTES:
            return (
                frozenset()
            )  # short rows by themselves are not shifted: long ones have been asked
        first, second = [*self._votes.most_common(2), (0, 0), (0, 0)][:2]
        if first[1] >= max(MIN_VOTES, VOTES_LEAD * second[1], MIN_SHARE * self._in_question):
            found.add(first[0])
        return frozenset(found)

    def conclude(self) -> Finding:
        offsets = self._offsets
        units = sum(self._proved[by] for by in offsets)
        figures: dict[str, float] = {
            "rows": self._num_rows,
            "rows_in_question": self._in_question,
            "proved": units,
            "from_middle": self._from_middle,
        }
        if not offsets:
            return self.found(
                "consistent",
                f"0 of {self._num_rows} rows agree better at an offset; {self._in_question} differ "
                "enough to ask",
                **figures,
            )
        common = max(offsets, key=lambda by: (self._proved[by], self._votes[by]))
        inner = f", {self._from_middle} of them from some token on" if self._from_middle else ""
        return self.found(
            "differs",
            f"{units or self._votes[common]} rows or turns agree if the sampler's log-probs are "
            f"moved, most of them by {common:+d}{inner}",
            **figures,
            offset=common,
        )

    def repair(self, rows: Rows) -> Rows:
        """The log-probs moved back; NaN where none is left for a token."""
        offsets, tokens = self._offsets, in_question(rows)
        if not offsets or not len(tokens) or rows.rollout_logprobs is None:
            return rows
        values = tokens.rollout.copy()
        over = np.zeros(len(tokens), np.bool_)
        """What came over the border of a turn."""
        for moves in aligned(tokens, WEAK_GAIN):
            is_weak = moves.is_late & (moves.gain < MIN_GAIN + LATE_PENALTY)
            for u in np.flatnonzero(np.isin(moves.by, list(offsets)) & ~is_weak).tolist():
                low, begin, end = int(moves.low[u]), int(moves.begin[u]), int(moves.end[u])
                by = int(moves.by[u])
                source = np.arange(begin, end) - by
                is_there = (source >= low) & (source < end)
                source = np.clip(source, low, end - 1)
                values[begin:end] = np.where(is_there, tokens.rollout[source], np.nan)
                over[begin:end] = is_there & (tokens.turn[source] != tokens.turn[begin:end])
                if moves.is_late[u]:  # what was lost, or stands twice, is beside the break
                    near = slice(max(low, begin - abs(by)), min(end, begin + abs(by)))
                    is_off = np.abs(values[near] - tokens.trainer[near]) > MIN_GAP
                    values[near] = np.where(is_off, np.nan, values[near])
        # Were they moved in each turn by itself, what comes over a border is another's.
        off = np.abs(values[over] - tokens.trainer[over])
        was = np.abs(tokens.rollout[over] - tokens.trainer[over])
        if len(off) and not np.nansum(off) <= MAX_LEFT * np.nansum(was):
            values[over] = np.nan
        out = rows.rollout_logprobs.copy()
        out[tokens.at] = values
        return rows.with_(rollout_logprobs=out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The trained tokens of the rows in question, end to end."""

    at: Int64Array
    """[M] index in the rows."""
    rollout: Float64Array
    """[M] NaN where none."""
    trainer: Float64Array
    row: Int64Array
    """[M] a number for each row, rising."""
    turn: Int64Array
    """[M] likewise for each turn."""

    def __len__(self) -> int:
        return len(self.at)

    @property
    def num_rows(self) -> int:
        return int(np.count_nonzero(np.diff(self.row, prepend=-1)))


def in_question(rows: Rows) -> Tokens:
    """The tokens of rows whose two sides differ by more than kernels do."""
    assert rows.rollout_logprobs is not None and rows.trainer_logprobs is not None
    gap = rows.gap
    compared = rows.compared
    row = rows.row_of[compared]
    total = np.bincount(row, np.minimum(np.abs(gap[compared]), CAP), minlength=len(rows))
    num = np.bincount(row, minlength=len(rows))
    is_asked = (total > MIN_GAP * num) & (num >= MIN_PAIRS)
    at = (
        np.flatnonzero(rows.loss_mask & rows.sampled & np.repeat(is_asked, rows.sizes))
        if is_asked.any()
        else compared[:0]
    )
    return Tokens(
        at=at,
        rollout=rows.rollout_logprobs[at].astype(np.float64),
        trainer=rows.trainer_logprobs[at].astype(np.float64),
        row=rows.row_of[at],
        turn=np.searchsorted(rows.spans.begin, at, side="right"),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """Units that agree better at an offset. [U] each; indices are of `Tokens`."""

    by: Int64Array
    """Places that the sampler's log-probs must be moved by: token i takes that of i - by."""
    low: Int64Array
    """Where the unit begins,"""
    begin: Int64Array
    """where the offset does,"""
    end: Int64Array
    """and where both end."""
    is_late: BoolArray
    """The offset begins behind the unit's first token."""
    gain: Float64Array
    """n log(before / after)."""
    before: Float64Array
    """Mean |d| as it is."""
    after: Float64Array
    """Mean |d| at the offset."""


def aligned(tokens: Tokens, min_gain: float) -> list[Moves]:
    """What an offset explains: rows as a whole, and the turns of the other rows."""
    of_rows = best_moves(tokens, tokens.row, min_gain)
    is_explained = np.zeros(len(tokens), np.bool_)
    for low, end in zip(of_rows.low.tolist(), of_rows.end.tolist(), strict=True):
        is_explained[low:end] = True
    rest = np.flatnonzero(~is_explained)
    if not len(rest):
        return [of_rows]
    left = Tokens(
        at=tokens.at[rest],
        rollout=tokens.rollout[rest],
        trainer=tokens.trainer[rest],
        row=tokens.row[rest],
        turn=tokens.turn[rest],
    )
    moves = best_moves(left, left.turn, min_gain)
    if not len(moves.by):
        return [of_rows]
    back = {"low": rest[moves.low], "begin": rest[moves.begin], "end": rest[moves.end - 1] + 1}
    return [of_rows, replace(moves, **back)]


def best_moves(tokens: Tokens, unit: Int64Array, min_gain: float) -> Moves:
    """For each unit the offset, and the token it begins at, that gains most; those that gain
    `min_gain` and leave at most MAX_LEFT of the gap.

    Cost: some passes over the tokens per offset; nothing of it is per row.
    """
    size = len(tokens)
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    last = np.append(first[1:], size)
    of = np.repeat(np.arange(len(first)), last - first)

    def prefix(values: Float64Array) -> Float64Array:
        """[M + 1] sums before each token, over the whole."""
        return np.concatenate([[0.0], np.cumsum(values)])

    def costs(by: int) -> tuple[Float64Array, Float64Array]:
        """Prefix sums of |trainer[i] - rollout[i - by]| in the unit, and of how many there are."""
        d = np.full(size, np.nan)
        if abs(by) < size:
            to = slice(max(by, 0), size + min(by, 0))
            source = slice(max(-by, 0), size - max(by, 0))
            d[to] = np.abs(tokens.trainer[to] - tokens.rollout[source])
            d[to][of[to] != of[source]] = np.nan
        is_pair = ~np.isnan(d)
        return prefix(np.where(is_pair, np.minimum(d, CAP), 0.0)), prefix(is_pair.astype(float))

    base, base_num = costs(0)
    best = Moves(
        by=np.zeros(len(first), np.int64),
        low=first,
        begin=first.copy(),
        end=last,
        is_late=np.zeros(len(first), np.bool_),
        gain=np.zeros(len(first)),
        before=np.zeros(len(first)),
        after=np.zeros(len(first)),
    )
    for by in (b for n in range(1, MAX_OFFSET + 1) for b in (n, -n)):
        moved, moved_num = costs(by)
        begins = [first]
        if abs(by) <= MAX_INNER_OFFSET:
            # As it is before the token, moved from it on: least where the sum of both is.
            split = base[:-1] - moved[:-1]
            least = np.minimum.reduceat(split, first)
            where = np.flatnonzero(split <= least[of])
            begins.append(where[np.searchsorted(where, first)])
        for begin in begins:
            num, pairs = base_num[last] - base_num[begin], moved_num[last] - moved_num[begin]
            with np.errstate(invalid="ignore", divide="ignore"):
                before = (base[last] - base[begin]) / num
                after = (moved[last] - moved[begin]) / pairs
                gain = pairs * np.log((before + FLOOR) / (after + FLOOR))
                start = (base[begin] - base[first]) / (base_num[begin] - base_num[first])
            is_late = begin > first
            is_better = (
                (pairs >= MIN_PAIRS)
                & (before > MIN_GAP)
                & (after <= MAX_LEFT * before)
                & (gain >= min_gain + LATE_PENALTY * is_late)
                & (gain > best.gain + LATE_PENALTY * (is_late & ~best.is_late))
                & (~is_late | (start <= MAX_LEFT * before))
            )
            for name, value in (
                *(("by", by), ("begin", begin), ("is_late", is_late)),
                *(("gain", gain), ("before", before), ("after", after)),
            ):
                np.copyto(getattr(best, name), value, where=is_better)
    kept = np.flatnonzero(best.by)
    return Moves(**{f.name: getattr(best, f.name)[kept] for f in fields(Moves)})
