"""Does a token's version name the weights that sampled it, if they change while a row is sampled?

An engine that takes new weights while it writes leaves a row of two policies. If each token has its
own version, the earlier ones are merely old. If the whole row has the version of its end, it still
shows the break: the gap is there up to one token, and gone after it.

# N tokens  S spans (sampled turns)  n judged tokens of one row
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.attribution import Gap, gap_of
from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows, largest, once_per_chunk
from lockstep.types import FORCED_LOGPROB, Int64Array

MIN_K2 = 1e-8
"""k2 below which the two sides agree to float32."""
MIN_RATIO = 3.0
"""Ratio of the gap before the switch to the gap after it, as for other ages."""
MIN_TURNS = 8
"""Turns of several versions that a cause needs."""
MIN_LARGER = 0.75
"""Share of them whose gap is larger before the switch: 0.5 if it has nothing to do with it."""

MIN_PART = 6
"""Judged tokens on each side of a break: fewer have no median."""
MIN_STDS = 3.5
"""Standard deviations of the rank sum at the best break of a row. The best of some dozens of places
in one row reaches it by chance once in a hundred rows, and as often the other way."""
MIN_STEP = 5.0
"""Ratio of the median gaps before and after a break, both of |d| and of |d| over the uncertainty of
the token: noise follows one of the two, so that neither it nor a certain ending makes a break."""
MIN_GAP = 1e-4
"""Median |d| in nats before a break: in float32 another batch moves a log-prob by 1e-6."""
MIN_BREAKS = 8
"""Rows with a break that a cause needs."""
MIN_SHARE = 0.1
"""Share of the judged rows that they must be: an update hits every row that is being sampled."""
MIN_LEAD = 4
"""Times as many must break this way as the other way: a defect that begins inside of a row, or a
kind of text that comes first, breaks both ways or the other one."""
CERTAINTY = 0.05
"""Added to 1 - p, so that nearly certain tokens, whose gap is rounding, do not stand out."""
MAX_ROWS = 256
"""Rows of a chunk that are searched for a break, spread over it; more would tell no more."""
NUM_SHOWN = 4
"""Turns or rows of one chunk that are offered as evidence."""


class MixedVersions(Check):
    """The gap of turns that several versions sampled, before and after the last switch."""

    name = "training/mixed_versions"
    basis = "fit"
    claim = "one version of the weights sampled each turn, or the gap does not come with it"
    cause = "mixed_versions"
    needs = ("rollout_logprobs", "trainer_logprobs", "policy_version")

    def begin(self) -> None:
        self._before, self._after = Gap(), Gap()

    def look(self, rows: Rows) -> None:
        is_before, is_after = _parts(rows)
        square = np.nan_to_num(rows.gap**2)
        self._before.add(gap_of(rows.gap[is_before]))
        self._after.add(gap_of(rows.gap[is_after]))
        spans = rows.spans
        num_before, num_after = (_sums(rows, x.astype(float)) for x in (is_before, is_after))
        before, after = (_sums(rows, np.where(x, square, 0.0)) for x in (is_before, is_after))
        judged = (num_before > 0) & (num_after > 0)
        larger = judged & (before * num_after > after * num_before)
        self.count(turns=len(spans), mixed_turns=judged, larger_before=larger)
        worst = np.flatnonzero(larger)
        for s in worst[largest(before[worst], NUM_SHOWN)].tolist():
            begin, end = int(spans.begin[s]), int(spans.end[s])
            assert rows.policy_version is not None, "the check's needs"
            versions = rows.policy_version[begin:end]
            switch = begin + int(np.flatnonzero(versions < versions.max())[-1]) + 1
            note = f"version {versions[0]}; from position {rows.where(switch)[1]} on another one"
            self.show(float(before[s]), rows, begin, switch, note)

    def conclude(self) -> Finding:
        c = self.counts
        if not c["mixed_turns"]:
            return self.consistent(f"one version sampled each of {c['turns']} turns")
        before, after = (gap.means()["k2"] for gap in (self._before, self._after))
        told = (
            f"the weights changed inside of {c['mixed_turns']} of {c['turns']} turns: k2 is "
            f"{before:.1e} before the switch and {after:.1e} after it"
        )
        is_cause = (
            c["mixed_turns"] >= MIN_TURNS
            and c["larger_before"] >= MIN_LARGER * c["mixed_turns"]
            and before > max(MIN_K2, MIN_RATIO * after)
        )
        if is_cause and (self.setting.max_staleness or 0) > 0:
            told += "; the run's settings allow that age"
            is_cause = False
        verdict = "differs" if is_cause else "information"
        return self.found(verdict, told, k2_before=before, k2_after=after)

    def repair(self, rows: Rows) -> Rows:
        """The tokens before the switch as the trainer has them."""
        if rows.policy_version is None:
            return rows
        return rows.agreeing(_parts(rows)[0])


def _parts(rows: Rows) -> tuple[BoolArray, BoolArray]:
    """([N] compared tokens of turns of several versions that an older one sampled, [N] the others
    of these turns)."""
    assert rows.policy_version is not None, "the check's needs"
    spans, version = rows.spans, rows.policy_version
    nothing = np.zeros(rows.num_tokens, np.bool_)
    if not len(spans):
        return nothing, nothing
    known = np.where(rows.sampled, version, -1)
    newest = np.maximum.reduceat(known, spans.begin)
    oldest = np.array([known[b:e].min() for b, e in zip(spans.begin, spans.end, strict=True)])
    is_mixed = (oldest >= 0) & (oldest < newest)
    inside = np.append(is_mixed, False)[rows.span_of] & ~np.isnan(rows.gap)
    is_old = version < np.append(newest, -1)[rows.span_of]
    return inside & is_old, inside & ~is_old


def _sums(rows: Rows, values: Float64Array) -> Float64Array:
    """[S] sum of `values` [N], which are 0 where nothing was sampled, over each span."""
    return np.add.reduceat(np.append(values, 0.0), rows.spans.begin)


class LateVersion(Check):
    """Searches rows of one version for a break: a gap up to some token, and agreement after it."""

    name = "training/late_version"
    basis = "fit"
    claim = "the version of a row is that of the weights that sampled all of it"
    cause = "late_version"
    needs = ("rollout_logprobs", "trainer_logprobs", "policy_version")

    def look(self, rows: Rows) -> None:
        breaks = _breaks(rows)
        self.count(
            judged_rows=breaks.num_judged,
            broken_rows=breaks.gap_first,
            broken_the_other_way=~breaks.gap_first,
        )
        gap = np.abs(rows.gap)
        found = np.flatnonzero(breaks.gap_first)[:NUM_SHOWN]
        for row, at in zip(breaks.row[found].tolist(), breaks.at[found].tolist(), strict=True):
            begin, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
            before, after = (np.nanmedian(gap[part]) for part in (slice(begin, at), slice(at, end)))
            note = f"|d| is {before:.1e} up to here, and {after:.1e} in the rest of the row"
            self.show(float(before), rows, at - 1, at, note)

    def conclude(self) -> Finding:
        c = self.counts
        broken, other, judged = c["broken_rows"], c["broken_the_other_way"], c["judged_rows"]
        if broken >= max(MIN_BREAKS, MIN_SHARE * judged, MIN_LEAD * other):
            return self.differs(
                f"{broken} of {judged} rows claim one version, but disagree up to some token and "
                f"agree after it ({other} the other way round): the weights changed while they "
                "were sampled, and the version is that of their end"
            )
        return self.consistent(f"{broken} of {judged} rows of one version have a break")

    def repair(self, rows: Rows) -> Rows:
        """The tokens before each break as the trainer has them: of every row, at its likeliest
        place, for most rows are too short to prove their own."""
        begin, end = list[int](), list[int]()
        for row, at in _judged(rows, least=2).items():
            split = _likeliest(_scaled(rows, at))
            if split:
                begin.append(int(rows.offsets[row]))
                end.append(int(at[split - 1]) + 1)
        return rows.agreeing(rows.within(np.array(begin, np.int64), np.array(end, np.int64)))


@dataclass(frozen=True, slots=True, eq=False)
class _Breaks:
    """Rows whose gap changes at one token."""

    row: Int64Array
    """[B]"""
    at: Int64Array
    """[B] index of the first token after the break."""
    gap_first: BoolArray
    """[B] True where the gap is before the break, False where it is after it."""
    num_judged: int


@once_per_chunk
def _breaks(rows: Rows) -> _Breaks:
    found: list[tuple[int, int, int]] = []
    judged = list(_judged(rows, least=2 * MIN_PART).items())
    judged = judged[:: -(-len(judged) // MAX_ROWS) or 1]
    for row, at in judged:
        split = _break(_scaled(rows, at), np.abs(rows.gap[at]))
        if split:
            found.append((row, int(at[abs(split)]), int(split > 0)))
    row, at, gap_first = np.array(found, np.int64).reshape(-1, 3).T
    return _Breaks(row=row, at=at, gap_first=gap_first.astype(np.bool_), num_judged=len(judged))


def _judged(rows: Rows, *, least: int) -> dict[int, Int64Array]:
    """Row -> indices of its compared tokens that are not forced, of rows of one version that have
    at least so many."""
    assert rows.policy_version is not None, "the check's needs"
    compared = rows.compared
    judged = compared[rows.rollout[compared] < FORCED_LOGPROB]
    low, high = np.searchsorted(judged, [rows.offsets[:-1], rows.offsets[1:]])
    is_one = high - low >= least
    version = rows.policy_version[compared]
    first = np.append(version, -1)[np.searchsorted(compared, rows.offsets[:-1])]
    is_one[rows.row_of[compared[version != first[rows.row_of[compared]]]]] = False
    return {row: judged[low[row] : high[row]] for row in np.flatnonzero(is_one).tolist()}


def _scaled(rows: Rows, at: Int64Array) -> Float64Array:
    """|d| of the tokens `at` over their uncertainty."""
    mean = np.minimum((rows.rollout[at].astype(np.float64) + rows.trainer[at]) / 2, 0.0)
    return np.abs(rows.gap[at]) / (CERTAINTY - np.expm1(mean))


def _likeliest(scaled: Float64Array) -> int:
    """Number of tokens before the likeliest fall of the variance; 0 if it does not fall by
    MIN_STEP. scaled: [n] gaps, normal with one variance before and another one after."""
    size = np.arange(1, len(scaled))
    before = np.cumsum(scaled**2)[:-1]
    after = float((scaled**2).sum()) - before
    rest = len(scaled) - size
    one, other = (x / n + MIN_K2 for x, n in ((before, size), (np.maximum(after, 0.0), rest)))
    gain = -size * np.log(one) - rest * np.log(other)
    gain[one < MIN_STEP**2 * other] = -np.inf
    best = int(np.argmax(gain))
    return best + 1 if np.isfinite(gain[best]) else 0


def _break(scaled: Float64Array, gap: Float64Array) -> int:
    """Number of tokens before the break, negative if the gap is after it, 0 if there is none.

    scaled, gap: [n] the gap over the uncertainty of the token, and itself.
    """
    num = len(scaled)
    ranks = np.empty(num)
    ranks[np.argsort(scaled, kind="stable")] = np.arange(1, num + 1)
    size = np.arange(1, num)
    mean = size * (num + 1) / 2
    std = np.sqrt(size * (num - size) * (num + 1) / 12)
    apart = (np.cumsum(ranks)[:-1] - mean) / std
    apart[: MIN_PART - 1] = apart[num - MIN_PART :] = 0.0
    best = int(np.argmax(np.abs(apart)))
    if abs(apart[best]) < MIN_STDS:
        return 0
    is_first = apart[best] > 0
    for values in (scaled, gap):
        before, after = np.median(values[: best + 1]), np.median(values[best + 1 :])
        large, small = (before, after) if is_first else (after, before)
        if not large > max(MIN_STEP * small, MIN_GAP):
            return 0
    return best + 1 if is_first else -(best + 1)
