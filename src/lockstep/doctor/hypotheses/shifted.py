"""Log-probs are beside the wrong tokens: they moved by some places, or come from another row.

# N tokens  S rows or replies  L tokens of the longest  K offsets
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.explain import CHUNK, Prediction, View, hypothesis
from lockstep.doctor.facts.base import MAX_SHIFT
from lockstep.doctor.rows import Float64Array, Rows, given
from lockstep.types import Int64Array

OFFSETS = tuple(sign * by for by in range(1, MAX_SHIFT + 1) for sign in (1, -1))
MAX_OWN = 256
"""Largest offset of a row by itself: the published program laid rows by up to one reply off."""


def moved(rows: Rows, values: Float64Array, at: Int64Array, by: int) -> Float64Array:
    """[N] the values of the tokens `at`, in their order, as far on in their rows; NaN elsewhere."""
    out = np.full(rows.num_tokens, np.nan)
    source = np.arange(len(at)) + by
    inside = (source >= 0) & (source < len(at))
    inside[inside] = rows.row_of[at[source[inside]]] == rows.row_of[at[inside]]
    out[at[inside]] = values[at[source[inside]]]
    return out


def at_offsets(
    view: View, t: Float64Array, s: Float64Array, reach: int
) -> tuple[Float64Array, Float64Array]:
    """([S, K, L] the sampler's numbers, moved by each offset up to `reach` both ways; [S, K, L] the
    gap that each leaves). Nothing is recorded beyond an end: the token keeps its gap.

    t, s: [S, L] numbers of trainer and sampler.
    """
    size = t.shape[1]
    source = np.arange(size) + np.arange(-reach, reach + 1)[:, None]  # [K, L]
    is_inside = (source >= 0) & (source < size)
    laid = np.where(is_inside, s[:, source.clip(0, size - 1)], np.nan)
    left = view.loss(t[:, None] - laid)
    return laid, np.where(np.isnan(left), view.loss(t - s)[:, None], left)


@hypothesis(cause="shifted")
def shifted(view: View) -> Iterator[Prediction]:
    """Each log-prob is beside its own token."""
    rows, recorded = view.rows, _recorded(view.rows)
    trained = np.flatnonzero(rows.loss_mask & (rows.position > 0))
    for by in OFFSETS:
        yield Prediction(text=f"moved by {-by:+d}", sampler=moved(rows, recorded, trained, by))
    for by in OFFSETS[:2]:
        out = moved(rows, recorded, np.arange(rows.num_tokens), by)
        out[np.isnan(view.sampler)] = np.nan
        yield Prediction(text=f"moved by {-by:+d} place", sampler=out)


def _recorded(rows: Rows) -> Float64Array:
    """[N] everything that the sampler recorded, of untrained tokens too."""
    return given(rows.rollout_logprobs).astype(np.float64)


@hypothesis(cause="shifted", fitted=2, least=0.4)
def own_offset(view: View) -> Iterator[Prediction]:
    """Each reply's log-probs begin where the reply begins.

    Each row has its own offset; one half of its tokens chooses the offset for the other half.
    """
    rows, trainer = view.rows, view.trainer
    recorded, out = _recorded(rows), np.full(rows.num_tokens, np.nan)
    for tokens in rows.slices:
        at = np.flatnonzero(~np.isnan(view.sampler[tokens])) + tokens.start
        if len(at) < 4 * CHUNK:
            continue
        half = np.arange(len(at)) // CHUNK % 2
        reach = min(MAX_OWN, len(at) // 2)
        [laid], [cost] = at_offsets(view, trainer[None, at], recorded[None, at], reach)
        for h in (0, 1):
            best = int(cost[:, half != h].sum(1).argmin())
            out[at[half == h]] = laid[best, half == h]
    yield Prediction(text="moved by an offset of each row's own", sampler=out)


@hypothesis(cause="exchanged_rows", fitted=1, least=0.6)
def exchanged(view: View) -> Iterator[Prediction]:
    """A row has its own log-probs, not another row's.

    Rows of equal length have each other's numbers; half of the tokens choose the partner.
    """
    rows, sampler, trainer = view.rows, view.sampler, view.trainer
    at = rows.compared
    num = rows.row_sums(at)
    first = np.concatenate([[0], np.cumsum(num)])
    whole = rows.prefix_keys[rows.offsets[1:] - 1]  # rows of the same ids have the same numbers
    out = np.full(rows.num_tokens, np.nan)
    for size in np.unique(num[num >= 2 * CHUNK]).tolist():
        mine = np.flatnonzero(num == size)[:256]
        if len(mine) < 2:
            continue
        index: Int64Array = at[first[mine][:, None] + np.arange(size)]
        s, t = sampler[index], trainer[index]
        half = np.arange(size) // CHUNK % 2
        # [row, partner]: ||t - s||^2 over each half. Both must choose the same partner.
        partners = [
            (
                (t[:, half == h] ** 2).sum(1)[:, None]
                + (s[:, half == h] ** 2).sum(1)[None]
                - 2 * t[:, half == h] @ s[:, half == h].T
            ).argmin(1)
            for h in (0, 1)
        ]
        is_other = partners[0] == partners[1]
        is_other &= whole[mine][partners[0]] != whole[mine]
        is_other &= is_other[partners[0]]  # whose numbers a row has, has another row's
        out[index[is_other]] = s[partners[0]][is_other]
    if np.isfinite(out).any():
        yield Prediction(text="another row's log-probs", sampler=out)
