"""Facts about numbers: what cannot be the natural log of a probability."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.facts.base import FAR, MAX_SHIFT, MIN_EQUAL, Contradiction, fact
from lockstep.doctor.findings import MIN_TOKENS, MOST, Setting
from lockstep.doctor.rows import SIDES, Rows
from lockstep.types import MAX_LOGPROB, Float32Array

ALIKE = 1e-3
"""Nats within which both sides have the same number: certain tokens have 0.0 on both."""
COLD = 0.1
"""Largest temperature at which float32 rounds the log-prob of a usual argmax to 0.0: the next
token needs at most a fifth of its probability, 0.19^(1 / 0.1) = 2^-24."""


def sides(rows: Rows) -> Iterator[tuple[str, Float32Array, str, Float32Array | None]]:
    """(side, its numbers, the other side's field, the other's numbers) of each recorded side."""
    for (who, name), (_, theirs) in permutations(SIDES.items()):
        if (values := getattr(rows, name)) is not None:
            yield who, values, theirs, getattr(rows, theirs)


@fact()
def finite(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """Every trained token of a scored row has a finite log-prob."""
    for who, values, *_ in sides(rows):
        # The first token of a row has no log-prob; a side without any was not recorded.
        is_wrong = rows.loss_mask & ~np.isfinite(values) & (rows.position > 0)
        is_wrong &= ~rows.unscored(SIDES[who])[rows.row_of]
        if who == "trainer" and rows.trainer_version is not None:
            is_wrong &= rows.trainer_version[rows.row_of] >= 0
        if is_wrong.any() and np.isfinite(values[rows.loss_mask]).any():
            kind = "NaN" if np.isnan(values[is_wrong]).any() else "infinite"
            note = f"the {who}'s log-prob of a trained token is {kind}"
            yield Contradiction("nonfinite", note, *rows.runs(is_wrong))


@fact()
def positive(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """No log-prob is above 0."""
    for who, values, *_ in sides(rows):
        with np.errstate(invalid="ignore"):
            is_wrong = rows.loss_mask & (values > MAX_LOGPROB)
        if not is_wrong.any():
            continue
        known = values[rows.loss_mask & np.isfinite(values)]
        kind = "a probability" if known.min() >= 0 and known.max() <= 1 else "above 0"
        begin, end = rows.runs(rows.loss_mask & np.isin(rows.row_of, rows.row_of[is_wrong]))
        note = f"the {who}'s log-prob of a trained token is {kind}"
        yield Contradiction("positive", note, begin, end)


def on_grid(values: npt.NDArray[np.floating[Any]]) -> str:
    """The grid that all numbers lie on: "bfloat16", "float16", "2 decimals"; empty for none."""
    found = values[np.isfinite(values) & (values <= 0)].astype(np.float32)
    known = np.unique(found)
    if len(known) < MIN_TOKENS:  # whole numbers and tenths repeat
        if len(found) < MIN_TOKENS or len(known) <= 2:
            return ""
        return _decimals(known, up_to=2 if len(known) >= MIN_TOKENS // 2 else 1)
    if not (known.view(np.uint32) & 0xFFFF).any():
        return "bfloat16"
    if (known == known.astype(np.float16)).all():
        return "float16"
    return _decimals(known, up_to=4)


def _decimals(known: npt.NDArray[np.float32], up_to: int) -> str:
    grids = (f"{digits} decimals" for digits in range(up_to + 1))
    return next((grid for grid in grids if (known == rounded(known, grid)).all()), "")


def step_of(values: npt.NDArray[np.floating[Any]]) -> float:
    """Distance of neighbouring numbers on the grid that all numbers lie on; 0 without a grid."""
    bits = {"": np.inf, "bfloat16": 8, "float16": 11}
    if (found := on_grid(values)) in bits:
        return float(np.median(np.abs(values)) * 2.0 ** -bits[found]) if len(values) else 0.0
    return 10.0 ** -int(found[0])


def rounded(values: npt.NDArray[Any], grid: str) -> npt.NDArray[np.float32]:
    """Numbers on the grid, as the side that has it would store them."""
    plain = values.astype(np.float32)
    if grid == "float16":
        return plain.astype(np.float16).astype(np.float32)
    if grid == "bfloat16":
        bits = plain.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return np.where(np.isfinite(plain), bits.astype(np.uint32).view(np.float32), plain)
    return np.round(plain.astype(np.float64), int(grid[0])).astype(np.float32)


@fact()
def grid(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """Log-probs have the precision of float32."""
    for who, values, theirs, other in sides(rows):
        if found := on_grid(values[rows.loss_mask]):
            repair = partial(_round_other, name=theirs, grid=found) if other is not None else None
            note = f"all of the {who}'s log-probs are numbers of {found}"
            begin, end = rows.runs(rows.loss_mask)
            yield Contradiction("quantised", note, begin, end, repair=repair)


def _round_other(rows: Rows, *, name: str, grid: str) -> Rows:
    return rows.with_(**{name: rounded(getattr(rows, name), grid)})


def _is_cold(setting: Setting, values: Float32Array, other: Any, rest: Any) -> bool:
    """True if exact zeros may be certain tokens: the run is greedy, or the side's other numbers
    (rest) lie above the other side's throughout, as at a temperature near 0."""
    temperature = 1.0 if setting.temperature is None else setting.temperature
    rise = np.empty(0) if other is None else (values - other)[rest]
    is_above = len(rise) >= MIN_EQUAL and np.nanquantile(rise, (0.1, 0.5)) > (0.0, FAR / 2)
    return setting.top_k == 1 or temperature <= COLD or bool(np.all(is_above))


@fact()
def repeated(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """No single number replaces different log-probs."""
    for who, values, _, other in sides(rows):
        is_known = rows.loss_mask & np.isfinite(values)
        known = values[is_known]
        if len(known) < MIN_EQUAL or on_grid(known):
            continue
        numbers, count = np.unique(known, return_counts=True)
        for value in numbers[count >= MIN_EQUAL][:64]:
            same = is_known & (values == value)
            near, alike, different = same, np.zeros_like(same), rows.token_ids[same]
            is_denied = same  # by nobody: zeros at nearly all tokens, of many ids
            if value == 0.0 and _is_cold(setting, values, other, is_known & ~same):
                continue
            if other is not None:
                with np.errstate(invalid="ignore"):
                    is_denied = same & (other < value - FAR)
                    near = is_known & (np.abs(values - value) < ALIKE)
                    alike = is_known & (np.abs(other - value) < ALIKE)
                # Bounds and fillers replace numbers that differ; tokens of one context repeat.
                different = other[is_denied]
            elif value != 0.0 or same.sum() < 0.9 * len(known):
                continue  # certain tokens have a log-prob of 0.0
            # If the other side has it as often, it was moved. A shift brings few into a reply.
            more = np.bincount(rows.span_of + 1, near.astype(np.float64) - alike).max()
            is_new = np.count_nonzero(same) - np.count_nonzero(alike) >= MIN_EQUAL
            is_new |= more > MIN_EQUAL
            if not is_new or len(np.unique(different)) < MIN_EQUAL:
                continue
            mine = is_known & np.isin(rows.row_of, rows.row_of[is_denied])
            is_bound = value == values[mine].min() and value < -FAR / 2
            cause, word = ("clamped", "the bound") if is_bound else ("fillers", "the number")
            begin, end = rows.runs(same & (rows.span_of >= 0))
            spans, span = rows.spans, rows.span_of[begin]
            is_inner = (spans.begin[span] < begin) & (end < spans.end[span])
            is_inner &= end - begin >= MIN_EQUAL
            inner = int(rows.num_in(is_denied, begin, end)[is_inner].sum())
            if not is_bound and inner > MOST * is_denied.sum():
                cause = "observation_trained"  # nobody drew the inside of a trained run
            note = f"{word} {value:g} replaces the {who}'s log-probs"
            basis = "shown" if is_bound or more > MAX_SHIFT else "fit"
            yield Contradiction(cause, note, *rows.runs(is_denied), basis=basis)
