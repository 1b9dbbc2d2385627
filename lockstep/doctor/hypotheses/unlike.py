"""A side deviates from the model, and nothing that is known makes these numbers.

Weights, prompts and formats give the same number each time that the same ids are read; noise does
not. The deviation of a token is predicted by its mean in other rows, after the same ids and after
the same few ids.

# N tokens  n compared tokens
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.rows import Float64Array, Rows

NOISE = 4.0
"""Ratio to the mean square that bfloat16 makes, from which on a side deviates: another engine's
kernels round twice as far."""
STEADY = 0.2
"""Share of variance within equal contexts, between what weights leave (0.06 and less) and what
dropout does (0.37 and more): proof of numerics, docs/doctor-causes.md."""
MOSTLY = 0.95
"""Share of a deviation that the last few ids leave, up to which it repeats: of noise they explain
nothing (1.08 and more), of other weights a sixth and more."""
EVEN = 0.25
"""Ratio of the median to the root of the mean square, in units of noise on logits: 0.67 for noise
on every token, near 0 where a few tokens or rows have all of it."""
MIN_REPEATED = 40
"""Tokens in repeated contexts that a variance takes: its error is then a fifth."""
MIN_SPREAD = 1e-3
"""Variance under unit noise on the logits that a token needs to tell anything about noise."""
MAX_NOISE = 8.0
"""Nats of one token that kernels never make: a factor of 3,000 in probability."""
SHRINK = 1.0
"""Observations that a mean of none counts for: one deviation is as much noise as signal."""


def contexts(rows: Rows) -> list[np.ndarray]:
    """[N] keys of what a token follows: all ids before it, three, one, none."""
    ids = rows.token_ids.astype(np.uint64)
    out = [rows.prefix_keys]
    for width in (3, 1, 0):
        key = ids.copy()
        for back in range(1, width + 1):
            before = np.concatenate([np.zeros(back, np.uint64), ids[:-back]])
            before[rows.position < back] = 0
            key = key * np.uint64(1_000_003) + before + np.uint64(back)
        out.append(key)
    return out


def repeated(rows: Rows, d: Float64Array) -> Float64Array:
    """[N] the deviation that other rows have in the same contexts, the longest first."""
    at = np.flatnonzero(np.isfinite(d))
    out = np.zeros(rows.num_tokens)
    guess = np.zeros(len(at))
    for key in reversed(contexts(rows)):  # the general first: each adds what is left of it
        rest = d[at] - guess
        _, place = np.unique(key[at], return_inverse=True)
        mine = place.astype(np.int64) * len(rows) + rows.row_of[at]
        _, own = np.unique(mine, return_inverse=True)
        total, num = np.bincount(place, rest), np.bincount(place)
        of_row, num_row = np.bincount(own, rest), np.bincount(own)
        others = total[place] - of_row[own]
        count = num[place] - num_row[own]
        guess = guess + others / (count + SHRINK)
    out[at] = guess
    return out


def deviations(view: View) -> dict[str, Float64Array]:
    """Side -> [N] its deviation from the model."""
    model = view.model
    plain = model.plain(view.rows)
    return {"sampler": view.sampler - plain, "trainer": view.trainer - plain}


def size(d: Float64Array) -> float:
    d = d[np.isfinite(d)]
    return float(np.square(d).mean()) if len(d) else 0.0


def steadiness(view: View, d: Float64Array) -> float:
    """Share of the deviation's variance that is left within equal contexts, counted from the first
    id: 0 for what is computed from the ids, 1 for noise; NaN where too few contexts repeat. In
    units of what noise on logits makes at each token: rows begin with tokens that are certain."""
    rows, model = view.rows, view.setting.model
    assert model is not None, "a side deviates from it"
    d = d / np.sqrt(np.maximum(model.spread(rows), MIN_SPREAD))
    at = np.flatnonzero(np.isfinite(d))
    _, place = np.unique(rows.prefix_keys[at], return_inverse=True)
    num = np.bincount(place)
    is_repeated = num[place] > 1
    values, place, num = d[at][is_repeated], place[is_repeated], num
    # Repeated contexts must show the deviation: rows begin alike where nothing is wrong yet.
    if len(values) < MIN_REPEATED or np.square(values).mean() < 0.25 * np.square(d[at]).mean():
        return float("nan")
    mean = np.bincount(place, values, len(num)) / np.maximum(num, 1)
    left = (values - mean[place]) ** 2 * (num / np.maximum(num - 1, 1))[place]
    return float(left.sum() / max((values**2).sum(), 1e-12))


def deviating(view: View) -> tuple[str, Float64Array] | None:
    """(side, its deviation) of the side that is further from the model than its noise; None where
    neither is, or where its weights are not at hand."""
    model = view.setting.model
    if model is None or not model.has_own(view.rows):
        return None
    found = deviations(view)
    side = max(found, key=lambda name: size(found[name]))
    return (side, found[side]) if size(found[side]) > NOISE * model.noise(view.rows) else None


@hypothesis(
    "rest",
    cause="other_weights",
    needs=("model",),
    fitted=9,
    claim="neither side deviates from the model beyond what is explained",
)
def rest(view: View) -> Iterator[Prediction]:
    """Judged last, by `rest_of`: a deviation that nothing predicts is noise, or other weights."""
    return iter(())


def rest_of(view: View) -> tuple[str, str] | None:
    """(cause, in words) of what no prediction explains; None if it cannot be decided.

    A trainer that deviates alike in equal contexts ran other weights. A sampler that does may have
    read another prompt as well: only its own ids would tell. Noise has another value each time, on
    every token, and none that is larger than noise on logits can make.
    """
    model, found = view.setting.model, deviating(view)
    if model is None or found is None:
        return None
    side, d = found
    steady, rows = steadiness(view, d), view.rows
    left = size(d - repeated(rows, d)) / size(d)
    if steady < STEADY or (np.isnan(steady) and left < MOSTLY):
        if side == "sampler":
            return None
        cause = "after_update" if _follows_advantages(rows, d) else "other_weights"
        return cause, "the trainer deviates from the model alike in equal contexts"
    at = np.flatnonzero(np.isfinite(d))
    spread = np.maximum(model.spread(rows)[at], MIN_SPREAD)
    told = f"the {side} differs from the model each time in another way"
    routes = model.once(
        rows,
        "routers",
        lambda: model.scorer.router_variances(model.loaded(rows), rows, np.arange(len(rows))),
    )
    fits = [_likelihood(d[at], spread), *(_likelihood(d[at], v[at]) for v in routes)]
    if int(np.argmax(fits)) > 0 and steady >= STEADY:
        return "routing_flips", f"{told}, most where routers are near a tie"
    units = np.abs(d[at]) / np.sqrt(spread)
    typical = float(np.median(units) / np.sqrt(np.square(units).mean()))
    least = 2 * EVEN if np.isnan(steady) else EVEN
    if typical < least or float(np.abs(d[at]).max()) > MAX_NOISE:
        return None
    return ("dropout" if side == "trainer" else "kernel_noise"), told


def _follows_advantages(rows: Rows, d: Float64Array) -> bool:
    """Whether log-probs have moved as an update on these rows moves them: up where the advantage is
    above 0, and down below."""
    if rows.advantages is None:
        return False
    at = np.flatnonzero(np.isfinite(d) & np.isfinite(rows.advantages))
    by_row = rows.row_means(at, d[at] * np.sign(rows.advantages[at]))
    known = by_row[by_row != 0]
    return len(known) > 1 and float(known.mean()) > 3 * float(known.std() / np.sqrt(len(known)))


def _likelihood(d: Float64Array, variance: Float64Array) -> float:
    """Mean log-likelihood of d under Gaussian noise of this pattern, at its best scale, over a
    floor."""
    best = -np.inf
    for floor in (1e-3, 1e-2, 0.1):
        pattern = variance / max(float(variance.mean()), 1e-12) + floor
        scale = float((d**2 / pattern).mean())
        value = -0.5 * float(np.log(scale * pattern + 1e-12).mean()) - 0.5
        best = max(best, value)
    return best
