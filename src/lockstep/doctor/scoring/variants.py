"""Variants of the model at hand: each is tried on a few rows, and the best are scored on all.

# N tokens of the rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any

import numpy as np

from lockstep.doctor.explain import Predict, Prediction, View, residual
from lockstep.doctor.rows import SIDES, Float64Array, Rows
from lockstep.types import Int64Array

NUM_PROBES = 8
"""Rows on which each variant is tried. If a cause hits 30 % of all rows, at least one of eight has
it with 94 % probability."""
PROBED = 8
"""The probes have at most one eighth of the sample: a hundred variants are tried on them."""
MIN_PROBED = 0.15
"""Smallest share of the probes' gap for a variant to be scored on all rows (explain.MIN_SHARE, and
the error of eight rows)."""
NUM_PROMOTED, NEAR = 3, 0.2
"""Variants that are scored on all rows in a round, and how far their share may be below the best
share: twice the error of eight rows."""


@dataclass(frozen=True)
class Variant:
    """The model, or its input, with one defect."""

    cause: str
    text: str
    score: Callable[[Int64Array], Float64Array]
    """Rows -> [N] log-probs with the defect; NaN where it changes nothing."""
    _: KW_ONLY
    sides: Sequence[str] = (*SIDES,)
    is_of_rows: bool = True


def by_variants(make: Callable[[View], Iterable[Variant]]) -> Predict:
    """Makes a hypothesis of a function that gives variants, the likely ones first."""
    return wraps(make)(lambda view: tried(view, make(view)))


def tried(view: View, variants: Iterable[Variant]) -> Iterator[Prediction]:
    """Predictions of the variants. Each is made for one side, as if that side alone had the defect.

    A variant that explains a part of the NUM_PROBES rows is scored on all rows, others on these."""
    rows = view.rows
    probes = _probes(rows, view.model.max_tokens // PROBED)
    found: list[tuple[float, Variant, str]] = []
    suspects = view.suspects
    is_of_probes = np.isin(rows.row_of, probes)
    for variant in variants:
        if view.is_late:
            break
        sides = [side for side in variant.sides if side in suspects]
        values = _values(view, variant, probes) if sides else rows.gap
        for side in sides:
            share = _share(view, variant, values, side, is_of_probes)
            found.append((share, variant, side))
        if max((share for share, *_ in found), default=0.0) > 0.97:
            break
    found.sort(key=lambda one: -one[0])
    for number, (share, variant, side) in enumerate(found):
        is_near = share >= max(MIN_PROBED, found[0][0] - NEAR) and not view.is_late
        chosen = np.arange(len(rows)) if is_near and number < NUM_PROMOTED else probes
        yield prediction(view, variant, _values(view, variant, chosen), side)


def _values(view: View, variant: Variant, chosen: Int64Array) -> Float64Array:
    """[N] the variant's log-probs, of the chosen rows at least; each row is scored once."""
    rows = view.rows
    known, is_done = view.model.once(
        rows,
        ("variant", variant.text),
        lambda: (np.full(rows.num_tokens, np.nan), np.zeros(len(rows), np.bool_)),
    )
    new = chosen[~is_done[chosen]]
    if len(new):
        values = variant.score(new)
        at = np.isin(rows.row_of, new)
        known[at] = values[at]
        is_done[new] = True
    return known


def prediction(view: View, variant: Variant, values: Float64Array, side: str) -> Prediction:
    above = values - view.model.plain(view.rows)
    return Prediction.of_side(
        side,
        getattr(view, side) - above,
        f"the {side} {variant.text}",
        above=above if side == "sampler" else None,
        cause=variant.cause,
        is_of_rows=variant.is_of_rows,
    )


def _share(view: View, variant: Variant, values: Float64Array, side: str, where: Any) -> float:
    """Share of the gap of the tokens `where` that the variant explains, row by row."""
    left, gap = residual(view, prediction(view, variant, values, side)), view.rows.gap
    at = np.flatnonzero(where & np.isfinite(gap))
    d2, e2 = view.loss(gap[at]), view.loss(left[at])
    return float(np.maximum(view.rows.row_sums(at, d2 - e2), 0).sum() / max(d2.sum(), 1e-12))


def _probes(rows: Rows, max_tokens: int) -> Int64Array:
    """Rows with a gap, drawn in proportion to its square root: rows of every size of gap. As many
    as have `max_tokens`, two at least."""
    at = rows.compared
    d2 = np.sqrt(np.bincount(rows.row_of[at], rows.gap[at] ** 2, len(rows)))
    usable = np.flatnonzero(d2 > 0)
    num = max(min(NUM_PROBES, int(max_tokens / max(rows.sizes[usable].mean(), 1)), len(usable)), 2)
    if len(usable) <= num:
        return usable
    reached = np.cumsum(d2[usable])
    marks = (np.arange(num) + 0.5) / num * reached[-1]
    return np.unique(usable[np.searchsorted(reached, marks)])
