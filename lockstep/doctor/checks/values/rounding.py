"""Were log-probs stored as they were computed, or clamped at a bound, or rounded?

# N tokens  R rows  J judged tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Evidence, Finding, evidence_at
from lockstep.doctor.checks.rows import (
    BoolArray,
    Float64Array,
    Rows,
    indices_of,
    largest,
    once_per_chunk,
)
from lockstep.types import Float32Array, Int64Array

MIN_CUT = 4
"""Tokens at one bound, after different ids: so many equal float32 numbers are no chance."""
MIN_CUT_SHARE = 0.95
"""Share of the tokens at a bound that the other side must have beyond it, without those within
CUT_MARGIN of it: at any other number it has half of them beyond."""
CUT_MARGIN = 0.02
"""Nats beyond the bound that do not count: about the noise of two engines."""
MIN_PILE = 8
"""Tokens at one number that show a bound by themselves, where the other side's log-probs of the
same tokens do not (because they are shifted or noisy)."""
MIN_OTHERS = 0.8
"""Tokens that the other side must have beyond the number, per token at it: at a filler, the other
side's are anywhere."""
MIN_PILE_LEAD = 2.0
"""Ratio of the tokens at it to those within PILE_WIDTH inside: rare log-probs do not crowd."""
PILE_WIDTH = 0.25
"""Nats inside of a bound in which tokens are counted."""
MAX_BOUNDS = 64
"""Values that are kept as possible bounds."""

FINE = -0.03
"""Log-probs above it are left out: float32 computes those of nearly certain tokens as multiples of
2^-24."""
MIN_ROUNDED = 12
"""Judged tokens before rounding is named."""
MIN_ROW_SHARE = 0.9
"""Share of a row's judged tokens that must be on the grid, for the row to be rounded."""
MIN_ROW = 2
"""Judged tokens of such a row: two are on the grid of 1e-4 by chance once in 1e4 rows, and so are
never those of MIN_ROWS_SHARE."""
MIN_ROWS_SHARE = 0.05
"""Share of the judged tokens that must be in such rows."""


class Clamped(Check):
    """A number at which many log-probs are equal, while the other side goes beyond it.

    An upper bound is looked for as a lower one, in log-probs with their signs turned.
    """

    name = "values/clamped"
    claim = "log-probs are stored at any size"
    cause = "clamped"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def begin(self) -> None:
        self._bounds: dict[_Bound, Counter[str]] = {}
        """Bound -> counts of `_at_bounds`."""
        self._shown: dict[_Bound, Evidence] = {}

    def look(self, rows: Rows) -> None:
        self.count(trained_tokens=rows.loss_mask)
        for who, _, _, other in rows.sides():
            assert other is not None, "the check's needs"
            for sign in (1, -1):
                for value, at, counts in _at_bounds(rows, who, other, sign):
                    bound = (who, sign, value)
                    self._bounds.setdefault(bound, Counter()).update(counts)
                    note = f"{value:.6g} exactly, where the other side has {float(other[at]):.4f}"
                    self._shown.setdefault(bound, evidence_at(rows, at, at + 1, note))
        if len(self._bounds) > 4 * MAX_BOUNDS:
            best = sorted(self._bounds.items(), key=lambda item: -item[1]["beyond"])
            self._bounds = dict(best[:MAX_BOUNDS])

    def conclude(self) -> Finding:
        found = self._found()
        if not found:
            return self.consistent("no number at which one side ends")
        bound = max(found, key=lambda bound: self._bounds[bound]["beyond"])
        who, sign, value = bound
        counts = self._bounds[bound]
        self.keep(1.0, self._shown[bound])
        return self.differs(
            f"{counts['at']} of {self.counts['trained_tokens']} tokens have the {who}'s log-prob "
            f"{value:.6g} exactly, and the other side is {'below' if sign > 0 else 'above'} it for "
            f"{counts['beyond']} of them",
            bound=value,
            clamped_tokens=counts["at"],
        )

    def repair(self, rows: Rows) -> Rows:
        """NaN: the right number is lost."""
        for who, field, side, other in rows.sides():
            assert other is not None, "the check's needs"
            cut = np.zeros(rows.num_tokens, np.bool_)
            for of, sign, value in self._found():
                cut |= (of == who) & (side == np.float32(value)) & (sign * other < sign * value)
            if cut.any():
                rows = rows.with_(**{field: np.where(cut, np.float32(np.nan), side)})
        return rows

    def _found(self) -> list[_Bound]:
        return [
            bound
            for bound, counts in self._bounds.items()
            if counts["different"] >= MIN_CUT and (_is_cut(counts) or _is_pile(counts))
        ]


_Bound = tuple[str, int, float]
"""Side, 1 for a lower bound or -1 for an upper one, and the number."""


def _is_cut(c: Counter[str]) -> bool:
    """True if the other side is beyond the bound at the same tokens."""
    return c["beyond"] >= MIN_CUT_SHARE * (c["beyond"] + c["inside"] + c["crossed"])


def _is_pile(c: Counter[str]) -> bool:
    """True if one side ends at the bound, with as many tokens there as the other has beyond it in
    the same rows, if not at the same tokens (because of a shift or noise)."""
    return (
        c["at"] >= max(MIN_PILE, MIN_PILE_LEAD * c["close"])
        and c["crossed"] <= (1 - MIN_CUT_SHARE) * c["at"]
        and c["others"] >= MIN_OTHERS * c["at"]
    )


def _at_bounds(
    rows: Rows, who: str, other: Float32Array, sign: int
) -> Iterator[tuple[float, int, dict[str, int]]]:
    """(number, index of a token, counts) of numbers that several trained tokens have on one side,
    and the other side is beyond.

    Counts: tokens `at` it; those that the other side has `beyond` it, with so many `different`
    numbers, or clearly `inside`. Of the same rows: tokens that are beyond it themselves
    (`crossed`), or on the other side (`others`), and those within PILE_WIDTH inside (`close`).
    """
    judged, side = rows.compared, rows.side(who)
    mine = side[judged]
    apart = (mine - other[judged]) * np.float32(sign)
    # Log-probs end at 0; a 0 where the other side is below it is a filler.
    beyond = np.flatnonzero((mine < -1e-6) & (apart > CUT_MARGIN))
    if not len(beyond):
        return
    margin = np.maximum(CUT_MARGIN, 2 * _half_steps(rows, side, grids_of(rows, who)))
    at = judged[beyond]
    at = at[apart[beyond] > margin[at]]
    values, count = np.unique(side[at], return_counts=True)
    values, count = values[count >= 2], count[count >= 2]
    begin_of, end_of = (np.searchsorted(judged, x) for x in (rows.offsets[:-1], rows.offsets[1:]))
    for value in values[largest(count, MAX_BOUNDS)]:
        equal = at[side[at] == value]
        different = len(np.unique(np.round(other[equal] / CUT_MARGIN)))
        if different < 2:
            continue
        hit = np.unique(rows.row_of[equal])
        beside = judged[indices_of(begin_of[hit], end_of[hit])]
        inward, inward_other = (sign * (x[beside] - value) for x in (side, other))
        is_at = judged[mine == value]
        is_inside = sign * (other[is_at] - value) > margin[is_at]
        counts = {
            "at": len(is_at),
            "beyond": len(equal),
            "inside": int(is_inside.sum()),
            "crossed": int((inward < 0).sum()),
            "different": different,
            "others": int((inward_other < 0).sum()),
            "close": int(((inward > 0) & (inward <= PILE_WIDTH)).sum()),
        }
        yield float(value), int(equal[0]), counts


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of a narrow type, or of so many decimals."""

    name: str
    zero_bits: int = 0
    """Number of low bits of a float32 that are 0."""
    decimals: int = 0

    def holds(self, values: Float32Array) -> BoolArray:
        """True for values on the grid, up to one unit in float32's last place."""
        if self.zero_bits:
            mask = np.uint32((1 << self.zero_bits) - 1)
            return (values.view(np.uint32) & mask) == 0
        scaled = values.astype(np.float64) * 10.0**self.decimals
        off = np.abs(scaled - np.round(scaled))
        return off <= np.abs(scaled) * 2.0**-23

    def half_step(self, values: Float32Array) -> Float64Array:
        """Largest error of rounding each value to the grid."""
        if self.decimals:
            return np.full(len(values), 0.5 * 10.0**-self.decimals)
        exponent = np.frexp(np.abs(values))[1] - 1
        return 0.5 * np.ldexp(1.0, exponent - (23 - self.zero_bits)).astype(np.float64)


GRIDS = (
    Grid("float8 (e5m2)", zero_bits=21),
    Grid("float8 (e4m3)", zero_bits=20),
    Grid("bfloat16", zero_bits=16),
    Grid("float16", zero_bits=13),
    Grid("1 decimal", decimals=1),
    Grid("2 decimals", decimals=2),
    Grid("3 decimals", decimals=3),
    Grid("4 decimals", decimals=4),
)
"""Types, then decimals, the coarsest first: a number on one grid is on the finer ones after it."""
NUM_TYPES = 4
"""Number of the grids that are types."""


class Quantised(Check):
    """Log-probs that are all on the grid of a narrow type, or of a few decimals."""

    name = "values/quantised"
    basis = "shown"
    claim = "log-probs have the digits of float32"
    cause = "quantised"
    needs = ("rollout_logprobs",)

    def begin(self) -> None:
        self._rounded: Counter[tuple[str, Grid]] = Counter()

    def look(self, rows: Rows) -> None:
        self.count(unequal=np.abs(rows.gap) > 0)
        for who, _, side, _ in rows.sides():
            judged = _judged(rows, side)
            self.count(**{who: judged})
            grid_of_row = grids_of(rows, who)
            for number in np.unique(grid_of_row[grid_of_row >= 0]).tolist():
                at = np.flatnonzero(judged & (grid_of_row == number)[rows.row_of])
                grid = GRIDS[number]
                self._rounded[who, grid] += len(at)
                for i in at[:4].tolist():
                    note = f"the {who}'s log-prob is a number of {grid.name}: {side[i]:.8g}"
                    self.show(float(-side[i]), rows, i, i + 1, note)

    def conclude(self) -> Finding:
        found = self._found()
        total = self.counts["sampler"] + self.counts["trainer"]
        if total < MIN_ROUNDED or not found:
            return self.consistent(f"of {total} log-probs none are rounded", judged_tokens=total)
        told = "; ".join(
            f"{n} of {self.counts[who]} of the {who}'s log-probs are numbers of {grid.name}"
            for (who, grid), n in found.items()
        )
        if len({who for who, _ in found}) == 2 and not self.counts["unequal"]:
            told += "; the two sides are rounded alike, and equal"
            return self.information(told, judged_tokens=total)
        return self.differs(told, judged_tokens=total, rounded_tokens=sum(found.values()))

    def repair(self, rows: Rows) -> Rows:
        """The gap without what rounding can make. A rounded number is taken to be where the other
        side is, or as close as its interval allows."""
        if rows.rollout_logprobs is None or rows.trainer_logprobs is None:
            return rows
        found = self._found()
        room = np.zeros(rows.num_tokens)
        for who, _, side, _ in rows.sides():
            number_of_row = grids_of(rows, who).copy()
            for number, grid in enumerate(GRIDS):
                if (who, grid) not in found:
                    number_of_row[number_of_row == number] = -1
            half = _half_steps(rows, side, number_of_row)
            room += half * (1 + 1e-3) + 1e-6 * (half > 0)  # and float32's own rounding
        rollout, trainer = rows.rollout, rows.trainer
        with np.errstate(invalid="ignore"):
            d = trainer.astype(np.float64) - rollout
            moved = np.where(room > 0, trainer - np.sign(d) * np.maximum(np.abs(d) - room, 0), 0.0)
        return rows.with_(rollout_logprobs=np.where(room > 0, moved, rollout).astype(np.float32))

    def _found(self) -> dict[tuple[str, Grid], int]:
        return {
            key: n
            for key, n in self._rounded.items()
            if n >= max(MIN_ROUNDED, MIN_ROWS_SHARE * self.counts[key[0]])
        }


def _judged(rows: Rows, side: Float32Array) -> BoolArray:
    """[N] True for trained tokens whose log-prob has digits to judge."""
    with np.errstate(invalid="ignore"):
        return rows.loss_mask & (side < FINE) & np.isfinite(side)


@once_per_chunk
def grids_of(rows: Rows, who: str) -> Int64Array:
    """[R] index into GRIDS of the coarsest grid that holds a row's log-probs, -1 for none; must not
    be changed. who: sampler or trainer."""
    side = rows.side(who)
    at = np.flatnonzero(_judged(rows, side))
    row, values = rows.row_of[at], side[at]
    judged = np.bincount(row, minlength=len(rows))
    out = np.full(len(rows), -1, np.int64)
    # A value that is not on the finest grid of a family is on none of it.
    finest = [GRIDS[n].holds(values) for n in (NUM_TYPES - 1, len(GRIDS) - 1)]
    for number in reversed(range(len(GRIDS))):
        if np.count_nonzero(finest[number >= NUM_TYPES]) < MIN_ROW:
            continue
        count = np.bincount(row[GRIDS[number].holds(values)], minlength=len(rows))
        is_held = (judged >= MIN_ROW) & (count >= MIN_ROW_SHARE * judged)
        out[is_held] = number
    return out


def _half_steps(rows: Rows, side: Float32Array, grid_of_row: Int64Array) -> Float64Array:
    """[N] largest error of rounding each log-prob to its row's grid; 0.0 without one."""
    out = np.zeros(rows.num_tokens)
    for number in np.unique(grid_of_row[grid_of_row >= 0]).tolist():
        at = np.flatnonzero((grid_of_row == number)[rows.row_of] & np.isfinite(side))
        out[at] = GRIDS[number].half_step(side[at])
    return out
