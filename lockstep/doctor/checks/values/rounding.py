"""Whether log-probs were kept as they were computed: cut at a bound, or rounded.

# N tokens  R rows  J judged tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.types import Float32Array, Int64Array

MIN_CUT = 4
"""Tokens at one bound, after different ids: as many equal float32 numbers are no chance."""
MIN_CUT_SHARE = 0.95
"""Of the tokens at a bound, but for those within CUT_MARGIN of it, that the other side must have
beyond it: half are if it is none."""
CUT_MARGIN = 0.02
"""Nats beyond the bound that count: noise of two engines is about as large."""
MIN_PILE = 8
"""Tokens at one number that tell of a bound by themselves, where the other side's log-probs of the
same tokens do not (they stand beside other tokens, or are noisy)."""
MIN_OTHERS = 0.8
"""Of the tokens at it, that the other side must have beyond it: a filler's are anywhere."""
MIN_PILE_LEAD = 2.0
"""Times as many as lie within PILE_WIDTH inside of it: log-probs do not crowd at their rarest."""
PILE_WIDTH = 0.25
"""Nats."""
MAX_BOUNDS = 64
"""Values that are kept as possible bounds."""

FINE = -0.03
"""Log-probs above it are left out: those of nearly certain tokens are multiples of 2^-24 by the way
in which float32 computes them."""
MIN_ROUNDED = 12
"""Judged tokens before rounding is spoken of."""
MIN_ROW_SHARE = 0.9
"""Of a row's judged tokens that must be on the grid, for the row to count as rounded."""
MIN_ROW = 2
"""Judged tokens of such a row: two by chance on the coarsest grid of decimals that is tried, 1e-4,
come once in 1e4 rows; and so do a tenth of all rows never."""
MIN_ROWS_SHARE = 0.05
"""Of the judged tokens that must stand in such rows."""


class Clamped(Check):
    """A number at which many log-probs are equal, and the other side goes beyond."""

    name = "values/clamped"
    claim = "log-probs are kept at any size"
    cause = "clamped"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._bounds: dict[tuple[str, bool, float], _Bound] = {}
        self._trained = 0

    def look(self, rows: Rows) -> None:
        self._trained += int(rows.loss_mask.sum())
        for who, side, other in _sides(rows):
            for is_low in (True, False):
                for value, bound in _bounds_of(rows, side, other, is_low=is_low).items():
                    known = self._bounds.setdefault((who, is_low, value), _Bound())
                    known.add(bound)
        if len(self._bounds) > 4 * MAX_BOUNDS:
            best = sorted(self._bounds.items(), key=lambda item: -item[1].beyond)
            self._bounds = dict(best[:MAX_BOUNDS])

    def conclude(self) -> Finding:
        found = self._found()
        figures = {"trained_tokens": self._trained}
        if not found:
            return self.found("consistent", "no number at which one side ends", **figures)
        (who, is_low, value), bound = max(found.items(), key=lambda item: item[1].beyond)
        for evidence in bound.evidence:
            self.show(1.0, evidence)
        return self.found(
            "differs",
            f"{bound.at} of {self._trained} tokens have the {who}'s log-prob {value:.6g} exactly, "
            f"and the other side is {'below' if is_low else 'above'} it for {bound.beyond} of them",
            **figures,
            bound=value,
            clamped_tokens=bound.at,
        )

    def repair(self, rows: Rows) -> Rows:
        """NaN: what the number was is lost."""
        changed: dict[str, Float32Array] = {}
        for who, side, other in _sides(rows):
            bounds = [key for key in self._found() if key[0] == who]
            if not bounds:
                continue
            cut = np.zeros(rows.num_tokens, np.bool_)
            for _, is_low, value in bounds:
                beyond = other < value if is_low else other > value
                cut |= (side == np.float32(value)) & beyond
            name = "rollout_logprobs" if who == "sampler" else "trainer_logprobs"
            changed[name] = np.where(cut, np.float32(np.nan), side)
        return rows.with_(**changed) if changed else rows

    def _found(self) -> dict[tuple[str, bool, float], _Bound]:
        return {
            key: bound
            for key, bound in self._bounds.items()
            if bound.different >= MIN_CUT and (bound.is_cut or bound.is_pile)
        }


@dataclass(slots=True)
class _Bound:
    """Tokens that have one number exactly."""

    at: int = 0
    beyond: int = 0
    inside: int = 0
    """Tokens at it that the other side has clearly inside: as many as beyond it, if it is none."""
    crossed: int = 0
    """Tokens of the same rows that go beyond it themselves: the end of a row is crossed by none,
    and any other number by some."""
    different: int = 0
    """Different log-probs of the other side among those beyond it."""
    others: int = 0
    """Tokens of the same rows that the other side has beyond it, wherever they stand."""
    close: int = 0
    """Tokens of these rows that are within PILE_WIDTH inside of it."""
    evidence: tuple[Evidence, ...] = ()

    @property
    def is_cut(self) -> bool:
        """The other side is beyond it at the same tokens."""
        return self.beyond >= MIN_CUT_SHARE * (self.beyond + self.inside + self.crossed)

    @property
    def is_pile(self) -> bool:
        """One side ends at it, and has as many tokens there as the other has beyond it: of the same
        rows, and not of the same tokens, as beside a shift or noise."""
        return (
            self.at >= max(MIN_PILE, MIN_PILE_LEAD * self.close)
            and self.crossed <= (1 - MIN_CUT_SHARE) * self.at
            and self.others >= MIN_OTHERS * self.at
        )

    def add(self, more: _Bound) -> None:
        self.at += more.at
        self.beyond += more.beyond
        self.inside += more.inside
        self.crossed += more.crossed
        self.different += more.different
        self.others += more.others
        self.close += more.close
        self.evidence = (self.evidence + more.evidence)[:4]


def _bounds_of(
    rows: Rows, side: Float32Array, other: Float32Array, *, is_low: bool
) -> dict[float, _Bound]:
    """Numbers that several trained tokens of this chunk have on one side, and the other side is
    beyond them."""
    judged = rows.compared
    apart = (side[judged] - other[judged]) * np.float32(1 if is_low else -1)
    # 0 is where log-probs end, and one of 0 where the other side is below is a filler.
    beyond = np.flatnonzero((side[judged] < -1e-6) & (apart > CUT_MARGIN))
    if not len(beyond):
        return {}
    grids = grids_of(rows, side)
    at, apart = judged[beyond], apart[beyond]
    at = at[apart > _margins(rows, side, grids, at)]
    values, count = np.unique(side[at], return_counts=True)
    values = values[count >= 2][np.argsort(-count[count >= 2], kind="stable")][:MAX_BOUNDS]
    out: dict[float, _Bound] = {}
    for value in values:
        equal = at[side[at] == value]
        different = len(np.unique(np.round(other[equal] / CUT_MARGIN)))
        if different < 2:
            continue
        has_it = np.zeros(len(rows), np.bool_)
        has_it[rows.row_of[equal]] = True
        beside = judged[has_it[rows.row_of[judged]]]
        inward, inward_other = (
            (values_of[beside] - value) * (1 if is_low else -1) for values_of in (side, other)
        )
        is_at = judged[side[judged] == value]
        margin = _margins(rows, side, grids, is_at)
        is_inside = (other[is_at] > value + margin) if is_low else (other[is_at] < value - margin)
        row, begin = rows.where(int(equal[0]))
        note = f"{float(value):.6g} exactly, where the other side has {float(other[equal[0]]):.4f}"
        out[float(value)] = _Bound(
            at=len(is_at),
            beyond=len(equal),
            inside=int(np.count_nonzero(is_inside)),
            crossed=int(np.count_nonzero(inward < 0)),
            different=different,
            others=int(np.count_nonzero(inward_other < 0)),
            close=int(np.count_nonzero((inward > 0) & (inward <= PILE_WIDTH))),
            evidence=(Evidence(row=row, begin=begin, end=begin + 1, note=note),),
        )
    return out


def _margins(
    rows: Rows, side: Float32Array, grids: npt.NDArray[np.int64], at: Int64Array
) -> Float64Array:
    """Nats beyond a bound that count, of the tokens `at`. grids: [R]."""
    return np.maximum(CUT_MARGIN, 2 * _half_steps(rows, side, grids, at))


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers that a narrow type, or so many decimals, can hold."""

    name: str
    zero_bits: int = 0
    """Lowest bits of a float32 that are 0."""
    decimals: int = 0

    def holds(self, values: Float32Array) -> BoolArray:
        """Which of them are on it; float32 has room for one unit in its last place."""
        if self.zero_bits:
            mask = np.uint32((1 << self.zero_bits) - 1)
            return (values.view(np.uint32) & mask) == 0
        scaled = values.astype(np.float64) * 10.0**self.decimals
        off = np.abs(scaled - np.round(scaled))
        return off <= np.abs(scaled) * 2.0**-23

    def half_step(self, values: Float32Array) -> Float64Array:
        """The largest error of rounding to it."""
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
"""The coarsest first, of types and of decimals: what is on one is on the finer ones after it."""
NUM_TYPES = 4
"""Of these, before the decimals."""


class Quantised(Check):
    """Log-probs that are all on the grid of a narrow type, or of a few decimals."""

    name = "values/quantised"
    claim = "log-probs have the digits of float32"
    cause = "quantised"
    needs = ("rollout_logprobs",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._judged = {"sampler": 0, "trainer": 0}
        self._rounded: dict[tuple[str, Grid], int] = {}
        self._unequal = 0

    def look(self, rows: Rows) -> None:
        self._unequal += int((np.abs(rows.gap) > 0).sum())
        for who, side, _ in _sides(rows):
            judged = _judged(rows, side)
            self._judged[who] += int(judged.sum())
            grid_of_row = grids_of(rows, side)
            for number in np.unique(grid_of_row[grid_of_row >= 0]).tolist():
                grid = GRIDS[number]
                hit = judged & (grid_of_row == number)[rows.row_of]
                key = (who, grid)
                self._rounded[key] = self._rounded.get(key, 0) + int(hit.sum())
                for at in np.flatnonzero(hit)[:4].tolist():
                    row, begin = rows.where(at)
                    note = f"the {who}'s log-prob is a number of {grid.name}: {side[at]:.8g}"
                    self.show(
                        float(-side[at]),
                        Evidence(row=row, begin=begin, end=begin + 1, note=note),
                    )

    def conclude(self) -> Finding:
        found = self._found()
        total = sum(self._judged.values())
        figures = {"judged_tokens": total}
        if total < MIN_ROUNDED or not found:
            return self.found("consistent", f"of {total} log-probs none are rounded", **figures)
        told = "; ".join(
            f"{n} of {self._judged[who]} of the {who}'s log-probs are numbers of {grid.name}"
            for (who, grid), n in found.items()
        )
        sides = {who for who, _ in found}
        if len(sides) == 2 and not self._unequal:
            return self.found(
                "information", f"{told}; the two sides are rounded alike, and equal", **figures
            )
        return self.found("differs", told, **figures, rounded_tokens=sum(found.values()))

    def repair(self, rows: Rows) -> Rows:
        """The gap without the part that rounding can make. Where the number was within its
        interval is lost: it is taken to be where the other side is, or as near as may be."""
        rollout, trainer = rows.rollout_logprobs, rows.trainer_logprobs
        if rollout is None or trainer is None:
            return rows
        found = self._found()
        room = np.zeros(rows.num_tokens)
        for who, side, _ in _sides(rows):
            number_of_row = grids_of(rows, side).copy()
            for number, grid in enumerate(GRIDS):
                if (who, grid) not in found:
                    number_of_row[number_of_row == number] = -1
            half = _half_steps(rows, side, number_of_row, np.arange(rows.num_tokens))
            room += half * (1 + 1e-3) + 1e-6 * (half > 0)  # and float32's own
        with np.errstate(invalid="ignore"):
            d = trainer.astype(np.float64) - rollout
            moved = np.where(room > 0, trainer - np.sign(d) * np.maximum(np.abs(d) - room, 0), 0.0)
        return rows.with_(rollout_logprobs=np.where(room > 0, moved, rollout).astype(np.float32))

    def _found(self) -> dict[tuple[str, Grid], int]:
        return {
            key: n
            for key, n in self._rounded.items()
            if n >= max(MIN_ROUNDED, MIN_ROWS_SHARE * self._judged[key[0]])
        }


def _judged(rows: Rows, side: Float32Array) -> BoolArray:
    """[N] trained tokens whose log-prob has digits to judge."""
    with np.errstate(invalid="ignore"):
        return rows.loss_mask & (side < FINE) & np.isfinite(side)


def grids_of(rows: Rows, side: Float32Array) -> npt.NDArray[np.int64]:
    """[R] index into GRIDS of the coarsest grid that holds a row's log-probs; -1 for none. Not to
    be changed. side: one of the two of `rows`."""
    name = "sampler" if side is rows.rollout_logprobs else "trainer"
    return rows.once(f"{name}'s grids", lambda: _grids_of(rows, side))


def _grids_of(rows: Rows, side: Float32Array) -> npt.NDArray[np.int64]:
    at = np.flatnonzero(_judged(rows, side))
    row, values = rows.row_of[at], side[at]
    judged = np.bincount(row, minlength=len(rows))
    out = np.full(len(rows), -1, np.int64)
    # What is on no finest grid of its family is on none of it.
    finest = [GRIDS[n].holds(values) for n in (NUM_TYPES - 1, len(GRIDS) - 1)]
    for number in reversed(range(len(GRIDS))):
        if np.count_nonzero(finest[number >= NUM_TYPES]) < MIN_ROW:
            continue
        count = np.bincount(row[GRIDS[number].holds(values)], minlength=len(rows))
        is_held = (judged >= MIN_ROW) & (count >= MIN_ROW_SHARE * judged)
        out[is_held] = number
    return out


def _half_steps(
    rows: Rows, side: Float32Array, grid_of_row: npt.NDArray[np.int64], at: Int64Array
) -> Float64Array:
    """[M] the largest error of rounding the tokens `at` [M] to the grid of their row; 0.0 of a row
    with none (-1)."""
    out = np.zeros(len(at))
    for number in np.unique(grid_of_row[grid_of_row >= 0]).tolist():
        here = np.flatnonzero((grid_of_row == number)[rows.row_of[at]] & np.isfinite(side[at]))
        out[here] = GRIDS[number].half_step(side[at[here]])
    return out


def _sides(rows: Rows) -> list[tuple[str, Float32Array, Float32Array]]:
    """(who, its log-probs, the other side's) of each side that is known; a side that is not is all
    NaN as the other one."""
    sides = [("sampler", rows.rollout_logprobs), ("trainer", rows.trainer_logprobs)]
    none = np.full(rows.num_tokens, np.nan, np.float32)
    others = [none if side is None else side for _, side in reversed(sides)]
    return [
        (who, side, other)
        for (who, side), other in zip(sides, others, strict=True)
        if side is not None
    ]
