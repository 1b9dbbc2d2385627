"""A side deviates from the model, and nothing that is known makes these numbers.

Weights, prompts and formats give the same number each time that the same ids are read; noise does
not. The deviation of a token is predicted by its mean in other rows, after the same ids and after
the same few ids.

# N tokens  n compared tokens
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.explain import Explanation, Prediction, View, hypothesis, size
from lockstep.doctor.facts.base import FAR
from lockstep.doctor.findings import MIN_TOKENS, MOST
from lockstep.doctor.rows import SIDES, Float64Array, Rows

NOISE = 4.0
"""Largest ratio of a numeric deviation's mean square to the mean square of bfloat16: the kernels of
another engine round twice as far."""
STEADY = 0.2
"""Share of variance within equal contexts, between what weights leave (0.06 and less) and what
dropout does (0.37 and more): proof of numerics, docs/doctor-causes.md."""
MOSTLY = 0.95
"""Largest share of a repeated deviation that the last few ids leave: they explain nothing of noise
(1.08 and more is left), and a sixth and more of other weights."""
CORE = 6.0
"""Medians of noise within which its tokens are: four standard deviations."""
QUARTER = 0.4
"""Least ratio of the lower quartile of noise to its median: 0.47 for a Gaussian, and 0.43 if
another cause hits 30 % of the tokens. Other ids leave tokens of all sizes: 0.38 and less."""
MIN_SPREAD = 1e-3
"""Variance under unit noise on the logits that a token needs to tell anything about noise."""
NUM_FIRST = 5
"""First tokens of a row's first reply: other spellings and shifts of later replies are not in
them."""


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
    for key in reversed(contexts(rows)):  # the general first: each adds its mean of the rest
        rest = d[at] - guess
        _, place = np.unique(key[at], return_inverse=True)
        mine = place.astype(np.int64) * len(rows) + rows.row_of[at]
        _, own = np.unique(mine, return_inverse=True)
        total, num = np.bincount(place, rest), np.bincount(place)
        of_row, num_row = np.bincount(own, rest), np.bincount(own)
        others = total[place] - of_row[own]
        count = num[place] - num_row[own]
        guess = guess + others / (count + 1)  # one deviation is as much noise as signal
    out[at] = guess
    return out


def steadiness(rows: Rows, d: Float64Array, numeric: float) -> float:
    """Share of the deviation's variance within equal contexts, counted from the first id: 0 for
    numbers that are computed from the ids, 1 for noise; NaN if too few contexts repeat.

    d: [N] in units of noise on logits, since rows begin with tokens that are certain. numeric: mean
    square of bfloat16 in these units.
    """
    at = np.flatnonzero(np.isfinite(d))
    _, place = np.unique(rows.prefix_keys[at], return_inverse=True)
    num = np.bincount(place)
    is_repeated = num[place] > 1
    values, place = d[at][is_repeated], place[is_repeated]
    # Repeated contexts must show the deviation: rows begin alike where nothing is wrong yet. They
    # deviate as all tokens do, or both they and the typical token deviate far beyond numerics.
    beyond = min(size(values), float(np.median(d[at] ** 2))) >= NOISE**2 * numeric
    if len(values) < MIN_TOKENS or not (beyond or size(values) >= 0.25 * size(d)):
        return float("nan")
    mean = np.bincount(place, values, len(num)) / np.maximum(num, 1)
    left = (values - mean[place]) ** 2 * (num / np.maximum(num - 1, 1))[place]
    return float(left.sum() / max((values**2).sum(), 1e-12))


def deviating(view: View) -> tuple[str, Float64Array] | None:
    """(side, its deviation) of the side that is further from the model than its noise; None where
    neither is, or where its weights are not at hand."""
    if not view.model.has_own(view.rows):
        return None
    found = {side: getattr(view, side) - view.plain for side in SIDES}
    found = {side: np.where(np.abs(d) <= view.step, 0.0, d) for side, d in found.items()}
    side = max(found, key=lambda name: size(found[name]))
    return (side, found[side]) if size(found[side]) > view.scale**2 else None


@hypothesis(cause="other_weights", needs=("model",), fitted=9)
def rest(view: View) -> Iterator[Prediction]:
    """Neither side deviates from the model by more than the explained gap.

    Judged last, by `rest_of`: a deviation that nothing predicts is noise, or other weights.
    """
    return iter(())


def rest_of(view: View, found: Explanation) -> tuple[str, str, float] | None:
    """(cause, in words, its part) of what no prediction explains; None if it cannot be decided.

    A side that deviates alike in equal contexts, in nearly all rows, ran other weights; a sampler
    may have read another prompt as well, and then a prompt that is tried explains a part. Noise
    has another value each time, on every token: it is named only where equal contexts repeat.
    """
    if (one := deviating(view)) is None:
        return None
    (side, d), rows, model = one, view.rows, view.model
    for judged, *_ in found.causes:
        if judged.hypothesis.is_of_other_ids:  # so is what these rows still deviate by
            d = np.where(judged.hit[rows.row_of], np.nan, d)
    at = np.flatnonzero(np.isfinite(d))
    if size(d) <= view.scale**2:
        return None
    spread = np.maximum(model.spread(rows), MIN_SPREAD)
    numeric = (model.bfloat16(rows) - model.plain(rows)) / np.sqrt(spread)
    units = d / np.sqrt(spread)
    steady = steadiness(rows, units, size(numeric))
    numeric *= not view.setting.is_one_process  # the same ops on both sides: no noise at all
    limit = NOISE * size(numeric)
    left = size(d - repeated(rows, d)) / size(d)
    repeats = steady < STEADY or (np.isnan(steady) and left < MOSTLY)
    first = np.minimum(rows.firsts(rows.spans.begin), rows.offsets[1:] - 1)
    # Weights, prompts and noise leave likely tokens likely; else these are of other tokens.
    is_own = np.corrcoef(getattr(view, side)[at], view.plain[at])[0, 1] >= MOST
    if is_own and side == "sampler":
        prompts = rows.prefix_keys[np.maximum(first - 1, rows.offsets[:-1])]
        if _is_by_prompt(prompts, rows.row_means(at, units[at] ** 2), limit):
            return "wrong_template", "the sampler deviates in all rows of some prompts alone", 1.0
    if is_own and steady >= STEADY:
        cause, part = _noise(view, side, units, numeric)
        if cause:
            return cause, f"the {side} differs from the model each time in another way", part
    if is_own and np.isnan(steady) and not repeats:
        found.lacks["hypotheses/rest"] = ("repeated_rows",)
    told = f"the {side} deviates from the model alike in equal contexts"
    if side == "trainer":
        cause = "after_update" if _follows_advantages(rows, d) else "other_weights"
        return (cause, told, 1.0) if repeats else None
    early = np.minimum(first[:, None] + np.arange(NUM_FIRST), rows.offsets[1:, None] - 1)
    with np.errstate(invalid="ignore"):
        is_early = (units[early] ** 2 > limit).any(1)
    if not is_own or view.setting.tokenizer is None or is_early.mean() < 1 - MOST / 2:
        return None  # no other prompt was tried; what begins inside of replies is of other ids
    named = {judged.cause: judged for judged, *_ in found.causes}
    read = [j for j in found.tried.values() if j.hypothesis.basis == "repair"]
    if any(j.share > j.chance and named.get(j.cause, j).share < 0.5 for j in read):
        told = "another prompt explains a part of what the sampler deviates by"
        return "wrong_template", told, 1.0
    if not repeats:
        return None
    drawn = np.where(model.spread(rows) > MIN_SPREAD, units, np.nan)[rows.spans.begin]
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) >= MIN_TOKENS and size(drawn) <= limit:
        return "captured_graphs", f"{told}, but at the first token of a reply", 1.0
    why = "no prompt that was tried explains any of it; the engine's prompt ids would decide"
    return "other_weights", f"{told}, and {why}", 1.0


def _is_by_prompt(prompts: np.ndarray, far: Float64Array, limit: float) -> bool:
    """True if all rows of some prompts deviate, and no row of the other prompts does.

    prompts: [R] key of each row's prompt. far: [R] mean square of its deviation.
    """
    _, place, num = np.unique(prompts, return_inverse=True, return_counts=True)
    least, most = np.full(len(num), np.inf), np.zeros(len(num))
    np.minimum.at(least, place, far)
    np.maximum.at(most, place, far)
    order = np.argsort(most, kind="stable")
    least, most, is_group = least[order], most[order], num[order] > 1
    for n in np.flatnonzero(most[:-1] < limit) + 1:  # the n prompts that deviate least, the others
        if most[n - 1] < least[n:].min() / NOISE and is_group[:n].any() and is_group[n:].any():
            return True
    return False


def _noise(view: View, side: str, units: Float64Array, numeric: Float64Array) -> tuple[str, float]:
    """(cause of noise on every token, its part of the deviation); no cause if the deviation is no
    noise. units, numeric: [N] the deviation, and the noise of bfloat16, in units of noise on
    logits."""
    model, rows, at = view.model, view.rows, np.flatnonzero(np.isfinite(units))
    spread = np.maximum(model.spread(rows)[at], MIN_SPREAD)
    d2, units2, every = units[at] ** 2 * spread, units[at] ** 2, np.arange(len(rows))
    routes = model.once(
        rows, "routers", lambda: model.scorer.router_variances(model.loaded(rows), rows, every)
    )
    fits = [_likelihood(d2, spread), *(_likelihood(d2, v[at]) for v in routes)]
    if int(np.argmax(fits)) > 0:
        return "routing_flips", 1.0
    typical = float(np.median(units2))
    is_numeric = typical <= NOISE * float(np.nanmedian(numeric[at] ** 2))
    if side == "trainer" and (routes or not view.setting.is_moe or not is_numeric):
        return "dropout", 1.0
    if is_numeric:
        return "", 0.0
    low, middle = np.quantile(np.sqrt(units2[spread > MIN_SPREAD]), (0.25, 0.5))
    core = d2[units2 <= CORE**2 * typical]  # outliers are of another cause
    is_even = low >= QUARTER * middle and core.mean() < FAR**2
    return ("kernel_noise", float(core.sum() / d2.sum())) if is_even else ("", 0.0)


def _follows_advantages(rows: Rows, d: Float64Array) -> bool:
    """True if log-probs have moved as an update on these rows moves them: up for advantages above
    0, down for advantages below."""
    if rows.advantages is None:
        return False
    at = np.flatnonzero(np.isfinite(d) & np.isfinite(rows.advantages))
    by_row = rows.row_means(at, d[at] * np.sign(rows.advantages[at]))
    known = by_row[by_row != 0]
    return len(known) > 1 and float(known.mean()) > 3 * float(known.std() / np.sqrt(len(known)))


def _likelihood(d2: Float64Array, variance: Float64Array) -> float:
    """Mean log-likelihood of squares under Gaussian noise of this pattern, at its best scale, over
    a floor."""
    relative = variance / max(float(variance.mean()), 1e-12)
    patterns = [relative + floor for floor in (1e-3, 1e-2, 0.1)]
    return max(-0.5 * float(np.log((d2 / p).mean() * p + 1e-12).mean()) - 0.5 for p in patterns)
