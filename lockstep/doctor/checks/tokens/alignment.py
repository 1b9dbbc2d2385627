"""Are log-probs assigned to their own tokens, or shifted?

# M compared tokens of the rows in question, end to end  U units (rows, or turns)  K offsets
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows, indices_of
from lockstep.types import Int64Array

MAX_OFFSET = 8
"""Largest offset, to either side, that is tried for a whole row or turn."""
MAX_INNER_OFFSET = 2
"""Largest offset that may begin in the middle: a log-prob or two were lost or duplicated."""
MIN_GAP = 0.05
"""Mean |d| in nats above which a row is looked at. A shift makes about a nat, the kernels of two
engines a few hundredths."""
CAP = 4.0
"""Nats that one token counts at most, so that one filler of -9999 cannot move a row."""
FLOOR = 0.01
"""Nats added to both means before they are compared: agreement beyond the noise of 16-bit kernels
proves nothing more."""
MAX_LEFT = 0.35
"""Share of the gap that may be left at the offset. Other weights (a second cause) leave a quarter;
log-probs of one text are this close at a wrong offset only by chance."""
MIN_PAIRS = 3
"""Tokens that must be compared at the offset."""
MIN_GAIN = 12.0
"""Log-likelihood that an offset must gain if |d| is exponential: n log(before / after). With 16
offsets, exp(-12) is one row in 10,000 by chance."""
LATE_PENALTY = 6.0
"""Extra gain that an offset needs if it begins in the middle: some hundred positions were tried."""
WEAK_GAIN = 3.0
"""Gain that a row too short to prove an offset needs, to be counted where other rows prove it."""
MIN_VOTES = 8
"""Short rows that must agree on one offset, where no row proves it alone."""
VOTES_LEAD = 4.0
"""Ratio of those votes to the votes for any other offset."""
LONG = 12
"""Tokens of a row that can prove an offset alone: 12 log(1 / MAX_LEFT) > MIN_GAIN."""
MIN_SHARE = 0.02
"""Share of the rows in question that must be at one offset; fewer are chance among rows of another
cause."""
ALONE_GAIN = 25.0
"""Gain that a single row of a small dump needs."""
NUM_SHOWN = 32
"""Units of one chunk that are offered as evidence."""


class Shifted(Check):
    """The best alignment of the two sides' log-probs over offsets.

    Each row is tried as a whole, its trained tokens joined over the borders of turns, and then each
    turn alone. An offset holds from the first token, or from some token in the middle (where a
    log-prob was lost). Rows too short to prove an offset count where others prove it, or where many
    agree.

    Log-probs of rows that were encoded again are also off from the middle of turns on, at changing
    offsets: `reencoded` finds these first if there is a tokenizer.
    """

    name = "tokens/shifted"
    claim = "each log-prob is at its own token"
    cause = "shifted"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def begin(self) -> None:
        self._proved: Counter[int] = Counter()
        self._votes: Counter[int] = Counter()
        self._best_gain = 0.0

    def look(self, rows: Rows) -> None:
        tokens = in_question(rows)
        _, num = np.unique(tokens["row"], return_counts=True)
        self.count(rows=len(rows), rows_in_question=len(num), long_rows=num >= LONG)
        for moves in aligned(tokens, WEAK_GAIN):
            gain, is_late = moves["gain"], moves["is_late"]
            is_proved = gain >= MIN_GAIN + LATE_PENALTY * is_late
            self._votes.update(moves["by"][~is_late].tolist())
            self._proved.update(moves["by"][is_proved].tolist())
            self.count(from_middle=is_proved & is_late)
            self._best_gain = max(self._best_gain, float(gain.max(initial=0.0)))
            for move in np.sort(moves[is_proved], order="gain")[::-1][:NUM_SHOWN]:
                first, last = tokens["at"][move["begin"]], tokens["at"][move["end"] - 1]
                note = (
                    f"{'from here on, ' if move['is_late'] else ''}mean |d| {move['before']:.2g} "
                    f"becomes {move['after']:.2g} if log-probs are moved by {move['by']:+d}"
                )
                self.show(float(move["gain"]), rows, int(first), int(last) + 1, note)

    @property
    def _offsets(self) -> frozenset[int]:
        """Offsets that are proved."""
        asked, proved = self.counts["rows_in_question"], sum(self._proved.values())
        if self.counts["from_middle"] > proved / 2 and proved < self.counts["long_rows"] / 2:
            return frozenset()  # some stretches of rows with other ids agree at some offset
        least = max(2.0, MIN_SHARE * asked)
        found = {by for by, num in self._proved.items() if num >= least}
        if not found and self._best_gain >= ALONE_GAIN and asked <= 1 / MIN_SHARE:
            found = set(self._proved)
        if not found and self.counts["long_rows"] >= MIN_VOTES:
            return frozenset()  # long rows show no offset, so short ones have none
        first, second = [*self._votes.most_common(2), (0, 0), (0, 0)][:2]
        if first[1] >= max(MIN_VOTES, VOTES_LEAD * second[1], MIN_SHARE * asked):
            found.add(first[0])
        return frozenset(found)

    def conclude(self) -> Finding:
        offsets = self._offsets
        units = sum(self._proved[by] for by in offsets)
        if not offsets:
            return self.consistent(
                f"0 of {self.counts['rows']} rows agree better at an offset; "
                f"{self.counts['rows_in_question']} differ enough to be tested",
                proved=units,
            )
        common = max(offsets, key=lambda by: (self._proved[by], self._votes[by]))
        late = self.counts["from_middle"]
        inner = f", {late} of them from some token on" if late else ""
        return self.differs(
            f"{units or self._votes[common]} rows or turns agree if the sampler's log-probs are "
            f"moved, most of them by {common:+d}{inner}",
            proved=units,
            offset=common,
        )

    def repair(self, rows: Rows) -> Rows:
        """Log-probs moved back; NaN where a token has none left."""
        offsets, tokens = self._offsets, in_question(rows)
        if not offsets or not len(tokens):
            return rows
        rollout, trainer, turn = (tokens[name] for name in ("rollout", "trainer", "turn"))
        values = rollout.copy()
        crossed = np.zeros(len(tokens), np.bool_)
        """True for values that were moved over the border of a turn."""
        for moves in aligned(tokens, WEAK_GAIN):
            is_weak = moves["is_late"] & (moves["gain"] < MIN_GAIN + LATE_PENALTY)
            for move in moves[np.isin(moves["by"], list(offsets)) & ~is_weak]:
                by, low, begin, end, is_late, *_ = move.item()
                source = np.arange(begin, end) - by
                is_there = (source >= low) & (source < end)
                source = np.clip(source, low, end - 1)
                values[begin:end] = np.where(is_there, rollout[source], np.nan)
                crossed[begin:end] = is_there & (turn[source] != turn[begin:end])
                if is_late:  # the lost or duplicated value is next to the break
                    near = slice(max(low, begin - abs(by)), min(end, begin + abs(by)))
                    is_off = np.abs(values[near] - trainer[near]) > MIN_GAP
                    values[near] = np.where(is_off, np.nan, values[near])
        # If each turn was shifted by itself, values that crossed a border are of other tokens.
        off = np.abs(values[crossed] - trainer[crossed])
        was = np.abs(rollout[crossed] - trainer[crossed])
        if len(off) and not np.nansum(off) <= MAX_LEFT * np.nansum(was):
            values[crossed] = np.nan
        out = rows.rollout.copy()
        out[tokens["at"]] = values
        return rows.with_(rollout_logprobs=out)


Records = npt.NDArray[np.void]
TOKENS = np.dtype(
    [("at", "i8"), ("rollout", "f8"), ("trainer", "f8"), ("row", "i8"), ("turn", "i8")]
)
"""A trained token of the rows in question: its index in the rows, the log-probs of both sides (NaN
where none), and the numbers of its row and turn, which rise."""
MOVES = np.dtype(
    [
        *((name, "i8") for name in ("by", "low", "begin", "end")),
        ("is_late", "?"),
        *((name, "f8") for name in ("gain", "before", "after")),
    ]
)
"""A unit that agrees better if token i gets the sampler's log-prob of token i - `by`.

Indices into the tokens: of its first token (`low`), of the one from which on the offset holds
(`begin`; `is_late` if it is another), and after its last token (`end`). `before` and `after` are
the mean |d| as it is and at the offset, and `gain` is n log(before / after).
"""


def in_question(rows: Rows) -> Records:
    """[M] TOKENS of rows whose sides differ by more than kernels do."""
    compared = rows.compared
    total = rows.row_sums(compared, np.minimum(np.abs(rows.gap[compared]), CAP))
    num = rows.row_sums(compared)
    is_asked = (total > MIN_GAP * num) & (num >= MIN_PAIRS)
    at = compared[:0]
    if is_asked.any():
        at = np.flatnonzero(rows.loss_mask & rows.sampled & np.repeat(is_asked, rows.sizes))
    tokens = np.zeros(len(at), TOKENS)
    tokens["at"], tokens["rollout"], tokens["trainer"] = at, rows.rollout[at], rows.trainer[at]
    tokens["row"] = rows.row_of[at]
    tokens["turn"] = np.searchsorted(rows.spans.begin, at, side="right")
    return tokens


def aligned(tokens: Records, min_gain: float) -> list[Records]:
    """MOVES of whole rows, and of the turns of all other rows."""
    of_rows = best_moves(tokens, tokens["row"], min_gain)
    is_explained = np.zeros(len(tokens), np.bool_)
    is_explained[indices_of(of_rows["low"], of_rows["end"])] = True
    rest = np.flatnonzero(~is_explained)
    of_turns = best_moves(tokens[rest], tokens["turn"][rest], min_gain)
    of_turns["end"] = rest[of_turns["end"] - 1] + 1
    of_turns["low"], of_turns["begin"] = rest[of_turns["low"]], rest[of_turns["begin"]]
    return [of_rows, of_turns]


def best_moves(tokens: Records, unit: Int64Array, min_gain: float) -> Records:
    """MOVES of each unit with the largest gain; only those that gain `min_gain` and leave at most
    MAX_LEFT of the gap.

    tokens: [M] TOKENS. unit: [M] number of the unit of each. Costs a few passes per offset.
    """
    size = len(tokens)
    rollout, trainer = (np.ascontiguousarray(x) for x in (tokens["rollout"], tokens["trainer"]))
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    last = np.append(first[1:], size)[: len(first)]
    of = np.repeat(np.arange(len(first)), last - first)

    def prefix(values: Float64Array) -> Float64Array:
        """[M + 1] sum of the values before each token."""
        return np.concatenate([[0.0], np.cumsum(values)])

    def costs(by: int) -> tuple[Float64Array, Float64Array]:
        """Prefix sums of |trainer[i] - rollout[i - by]| within the unit, and of their number."""
        d = np.full(size, np.nan)
        if abs(by) < size:
            to = slice(max(by, 0), size + min(by, 0))
            source = slice(max(-by, 0), size - max(by, 0))
            d[to] = np.abs(trainer[to] - rollout[source])
            d[to][of[to] != of[source]] = np.nan
        is_pair = ~np.isnan(d)
        return prefix(np.where(is_pair, np.minimum(d, CAP), 0.0)), prefix(is_pair.astype(float))

    base, base_num = costs(0)
    best = np.zeros(len(first), MOVES)
    best["low"], best["begin"], best["end"] = first, first, last
    for by in (b for n in range(1, MAX_OFFSET + 1) for b in (n, -n)):
        moved, moved_num = costs(by)
        begins = [first]
        if abs(by) <= MAX_INNER_OFFSET and size:
            # Unmoved before the token, moved from it on: best where the sum of both costs is least.
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
                & (gain > best["gain"] + LATE_PENALTY * (is_late & ~best["is_late"]))
                & (~is_late | (start <= MAX_LEFT * before))
            )
            values = {"by": by, "begin": begin, "is_late": is_late}
            values |= {"gain": gain, "before": before, "after": after}
            for name, value in values.items():
                np.copyto(best[name], value, where=is_better)
    return best[best["by"] != 0]
