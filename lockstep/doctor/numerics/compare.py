"""Finds the side that deviates from the model at hand, and its cause. numpy only.

Each side is compared with the model's own log-probs (`reference`), row by row. Where it deviates,
it is compared with each variant (no sinks, other weights, ...) too. The cause is the variant whose
numbers the side has, not one that merely makes the gap smaller: many do.

Of variants that explain a row equally well, the first in the order of `variants` is taken: wrong
arithmetic, then an adapter, other weights, processing of the logits, a precision.

A deviation that no variant reproduces is noise, or other weights that are not at hand. Noise gives
other numbers each time that the same tokens are read, other weights do not: see `variance_within`.

# R rows  N tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.rows import BoolArray, Float32Array, Float64Array, Rows
from lockstep.types import Int64Array

SideName = Literal["sampler", "trainer"]
COLUMN_OF: Mapping[SideName, str] = {"sampler": "rollout_logprobs", "trainer": "trainer_logprobs"}
"""Field of `Rows` with the log-probs of a side."""

MAX_ROW_RESIDUAL = 0.5
"""Share of a row's deviation that the right variant may leave: float noise, or that of a pair of
precisions. The gap of a fault that is three times the noise falls to a quarter."""
MAX_FAR_RESIDUAL = 0.02
"""The same for a row whose weights are not at hand. The weights of the step before are near the
model: a variant must be what the side ran, and not merely nearer than a fault."""
MIN_FAR_TOKENS = 0.5
"""Share of the tokens in such rows that a variant must reproduce: a failed sync hits whole steps,
chance a few rows."""
MAX_RESIDUAL = 0.35
"""Share of the deviation that a variant may leave over all its rows: chance may reproduce a short
row, but not many."""
MIN_MOVE = 0.25
"""Ratio of a variant's own distance from the model to the row's deviation. A variant that changes
nothing (full attention in a row shorter than the window) explains nothing."""
MIN_SHARE = 0.25
"""Share of a side's deviation that the rows of a variant must have. Noise has a few large tokens; a
variant that fits the row of one of them by chance must not be named."""
MIN_ROWS, MIN_TOKENS = 3, 8
"""Rows and tokens that a variant must explain; fewer rows if there are no more, or if the variant
leaves less of them than MAX_FEW_RESIDUAL."""
MAX_FEW_RESIDUAL = 0.05
MIN_EFFECTIVE = 4.0
"""Tokens that carry the deviation of such few rows, (sum of k2)^2 / sum of k2^2: of some hundred
variants, one fits a single large token by chance."""
MAX_ROUNDED_LEFT = 0.75
"""Share of the deviation that rounded weights may leave over all rows. Noise, or other weights,
have no part in common with them: with their own size they would leave more than all."""
MAX_PROMPT_LEFT = 0.6
"""The same for another prompt: one that lacks what the sampler read has much in common with it.
The best of 50 prompts left 0.79 and more of a deviation by other weights (four models)."""
Fit = Literal["most", "near", "exact"]
"""How well a variant must reproduce a row. most: it leaves at most MAX_ROW_RESIDUAL. near: it
leaves little of the deviation, or little at all, as a temperature next to the right one does.
exact: both, since the same ids in the same places give the same numbers up to the pair's noise."""
MAX_LITTLE = 0.05
"""Little of a row's deviation. Other weights are up to 70 % like a temperature, ..."""
MAX_LITTLE_K2 = 2e-3
"""... and little k2 per token: kernels in 16 bits are a few hundredths of a nat apart."""
TIE = 0.05
"""Share of the deviation within which two variants explain equally well."""
EXACT = 4.0
"""Ratio of what they leave within which they do: what leaves nothing is no tie."""
FLOAT_K2 = 1e-8
"""k2 per token below which a side agrees with the model: float32 kernels that sum in another order
are at 1e-13, TF32 is below this."""
NOISE_FACTOR = 2.0
"""Ratio to the k2 of computing in bfloat16, up to which a deviation counts as a pair of precisions:
an engine in bfloat16 has other kernels, with other noise of that size."""
NUM_ERRORS = 2.0
"""Standard errors by which k2 must exceed that: one token that bfloat16 sends to other experts can
dominate the mean."""
WILD_FACTOR = 6.0
"""Ratio to that k2 above which a few tokens are enough: bfloat16 sends fewer to other experts."""
DENSE_FACTOR = 6.0
"""The same for the typical token (the median of d^2 in units of its spread): in a mixture of
experts a few tokens that bfloat16 sends to other experts dominate the mean and would hide noise on
every token. Another engine's bfloat16 has at most twice the rounding of ours."""
FOREIGN = 4.0
"""Ratio to the gap between both sides: in rows where each side is further than this from the model,
neither side ran these weights."""
MAX_WITHIN = 0.65
"""Ratio of the variance within equal contexts to the whole, below which a deviation repeats and is
no noise. Other weights were at 0.05 to 0.37, noise and dropout at 0.78 to 1.04 (a shipped model and
a tiny one of transformers, four seeds)."""
LEAST_LOGPROB = -15.0
"""Log-prob from which on tokens count as equally unlikely in a trend."""
MIN_OWN_NOISE = 0.35
"""The same within contexts that are equal from the first id on, above which it is noise: what is
computed from the ids has none of its own. Hidden dropout was at 0.37 to 0.42, other weights and
prompts below 0.06 where they are ten times the noise of the pair."""
MAX_STEADY = 0.05
"""The same below which a deviation is computed from the ids alone: another prompt was below 0.03,
an engine in bfloat16 at 0.12 to 0.18, noise above 0.9 (three models) ..."""
MAX_PROMPT_WITHIN = 0.83
"""... and the ratio within equal contexts up to which it is another prompt's: these were at 0.66 to
0.82, what bfloat16 makes at 0.73 to 0.98."""
MIN_REPEATED = 60
"""Tokens in repeated contexts that are needed to tell."""
MIN_SPREAD = 1e-3
"""Variance under unit noise on the logits that a token needs to tell anything about noise."""
CONTEXTS = (2, 3, 8)
"""Lengths of a context in tokens: short ones occur often, long ones tell more."""


_ORDER = (
    ("ignored_sinks", "ignored_window", "ignored_rope_scaling", "wrong_positions", "packing_leak"),
    ("padding_attended", "adapter_not_merged"),
    (),
    ("other_weights",),
    ("processed", "generation_defaults"),
    ("quantised_rollout",),
    ("precision",),
    ("half_head",),
)
"""Causes in the order in which they are taken where they explain equally well. Those that are not
named here come third."""


def rank_of(cause: str) -> int:
    return next((i for i, causes in enumerate(_ORDER) if cause in causes), 2)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Processing of the logits before a log-prob is taken."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """Share of the largest probability below which a token is dropped."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits, and factor of the negative ones, of ids that are in the row
    already."""

    def describe(self) -> str:
        parts = [f"temperature={self.temperature:g}"]
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"top_k={self.top_k}"] if self.top_k else []
        parts += [f"min_p={self.min_p:g}"] if self.min_p else []
        if self.repetition_penalty != 1:
            parts += [f"repetition_penalty={self.repetition_penalty:g}"]
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """[N] values of some rows under one model; NaN for tokens that were not asked for."""

    logprobs: dict[Distribution, Float32Array]
    spread: Float64Array
    """Variance of the log-prob under unit noise on every logit: (1 - p)^2 plus all other p^2."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """The model otherwise than it is."""

    cause: str
    text: str
    """The model with the defect: "without its sinks"."""
    family: str = ""
    """Variants of one family are one defect, of which each row has another size; by default a
    variant is its own."""
    fit: Fit = "most"
    approximates: float = 0.0
    """Share of the deviation that it may leave over all rows at once, where what has this defect
    differs from the variant besides (an engine with rounded weights rounds more than them); 0: it
    must reproduce single rows."""


@dataclass(frozen=True, kw_only=True)
class Variant(Defect):
    """Log-probs that a defect would cause."""

    logprobs: Float64Array
    """[N], NaN where it was not computed."""
    plain: Float64Array | None = None
    """[N] the model without the defect, computed in the same way; None allows any move."""


@dataclass(kw_only=True)
class Evidence:
    """Scores of some rows by the model at hand."""

    rows: Rows
    reference: Float64Array
    """[N] the model with the weights that the trainer ran; NaN if these are not at hand."""
    variants: Sequence[Variant]
    bfloat16: Float64Array
    """[N] the reference computed in bfloat16: the effect of a pair of precisions."""
    spread: Float64Array
    """[N] as in `Scored`."""
    replayed: Float64Array | None = None
    """[N] with the sampler's recorded experts; None without any."""
    plain: Float64Array | None = None
    """[N] the model in float32 under `processing`; NaN where its weights are not at hand."""
    processing: Distribution = Distribution()
    """Processing of the logits of the reference."""
    is_replayed: bool = False
    """Whether the reference takes the sampler's recorded experts, as a trainer that replays
    them."""
    sides: Sequence[SideName] = ()
    """The sides that have log-probs of their own, and not the model's."""
    tried: Mapping[str, Sequence[str]] | None = None
    """Cause -> the variants that were tried on a few rows (`search`); None: nothing was left to
    explain."""

    def take(self, index: Int64Array) -> Evidence:
        """The rows at these places, in their order."""
        at = np.isin(self.rows.row_of, index)

        def taken(of: Any) -> Any:
            arrays = {f.name: getattr(of, f.name) for f in fields(of)}
            return replace(of, **{n: v[at] for n, v in arrays.items() if isinstance(v, np.ndarray)})

        out = taken(self)
        out.rows, out.variants = self.rows.take(index), [taken(v) for v in self.variants]
        return out

    def side(self, name: SideName) -> Float64Array:
        values = getattr(self.rows, COLUMN_OF[name])
        if values is None:
            return np.full(self.rows.num_tokens, np.nan)
        out = values.astype(np.float64)
        out[~self.rows.loss_mask | ~np.isfinite(out)] = np.nan
        return out


@dataclass(kw_only=True)
class Side:
    """One side against the model."""

    name: SideName
    values: Float64Array
    """[N]"""
    reference: Float64Array
    """[N] the model, or the other side where the weights are not at hand."""
    tokens: Int64Array
    """[R] compared tokens."""
    k2: Float64Array
    """[R] sums of (side - reference)^2 / 2."""
    hit: Int64Array
    """[R] index of the variant that reproduces the row; -1 for none."""
    left: Float64Array
    """[R] the same sums after that variant."""
    variants: Sequence[Variant]
    is_known: BoolArray
    """[R] whether the reference is the model itself."""

    @property
    def deviation(self) -> float:
        """k2 per token against the model, over rows whose weights are at hand."""
        return _mean(self.k2, self.tokens, self.is_known)

    def explained_by(self, cause: str) -> BoolArray:
        """[R] whether a variant of this cause reproduces the row."""
        found = np.array([v.cause == cause for v in self.variants] + [False])
        return found[self.hit]

    @cached_property
    def is_unexplained(self) -> BoolArray:
        """[R] whether no variant reproduces a known row."""
        return (self.hit < 0) & self.is_known & (self.tokens > 0)

    @property
    def noise(self) -> float:
        """k2 per token that no variant explains."""
        return _mean(self.k2, self.tokens, self.is_unexplained)


@dataclass(kw_only=True)
class Comparison:
    """Both sides of some rows against the model at hand."""

    evidence: Evidence
    sides: dict[SideName, Side]
    is_foreign: BoolArray
    """[R] whether neither side ran the weights at hand."""
    floor: float
    """k2 per token between the model in float32 and in bfloat16."""
    typical_floor: float
    """The median of d^2 over the token's spread, of the same."""

    def deviation(self, side: Side) -> Float64Array:
        """[N] side - model of the rows that no variant explains, NaN elsewhere."""
        chosen = side.is_unexplained[self.evidence.rows.row_of]
        return np.where(chosen, side.values - side.reference, np.nan)

    def is_noisy(self, side: Side) -> bool:
        """Whether the unexplained deviation of a side exceeds that of a pair of precisions."""
        if side.noise <= FLOAT_K2:
            return False
        d = self.deviation(side)
        if _typical(d, self.evidence.spread) > DENSE_FACTOR * self.typical_floor:
            return True
        squares = 0.5 * d[np.isfinite(d)] ** 2
        error = float(squares.std() / np.sqrt(len(squares)))
        is_many = side.noise - NUM_ERRORS * error > NOISE_FACTOR * self.floor
        return is_many or side.noise > WILD_FACTOR * self.floor

    def replayed_share(self, side: Side) -> float:
        """Share of the sampler's deviation that its recorded routes remove; 0 without any."""
        if self.evidence.replayed is None or side.name != "sampler":
            return 0.0
        d = self.deviation(side)
        again = side.values - self.evidence.replayed
        both = np.isfinite(d) & np.isfinite(again)
        whole = float((d[both] ** 2).sum())
        return 1 - float((again[both] ** 2).sum()) / whole if whole else 0.0

    def describe(self) -> str:
        """Which side agrees with the model, in words."""
        parts = [
            f"the {side.name} {'agrees' if side.deviation <= FLOAT_K2 else 'does not agree'} with "
            f"the model (k2 {side.deviation:.1e})"
            for side in self.sides.values()
            if side.is_known.any()
        ]
        return ", ".join(parts)

    @property
    def is_judged(self) -> BoolArray:
        """[R] whether a row was compared with the model, or has known other weights."""
        out = self.is_foreign.copy()
        for side in self.sides.values():
            out |= side.is_known | (side.hit >= 0)
        return out


def compare(evidence: Evidence) -> Comparison:
    """Compares each side that has log-probs of its own with the model and its variants."""
    rows = evidence.rows
    values = {name: evidence.side(name) for name in COLUMN_OF}
    reference = evidence.reference
    is_foreign = np.zeros(len(rows), np.bool_)
    if len(evidence.sides) == 2:
        gap, _ = _sums(rows, values["trainer"] - values["sampler"])
        far = [_sums(rows, values[name] - reference) for name in evidence.sides]
        is_foreign = np.ones(len(rows), np.bool_)
        for k2, tokens in far:
            is_foreign &= (k2 > FOREIGN * gap) & (k2 > FLOAT_K2 * tokens)
    reference = np.where(is_foreign[rows.row_of], np.nan, reference)
    floor_k2, floor_tokens = _sums(rows, evidence.bfloat16 - reference)
    sides = {}
    for name in evidence.sides:
        other = values["trainer" if name == "sampler" else "sampler"]
        sides[name] = _side(evidence, name, values[name], reference, other)
    return Comparison(
        evidence=evidence,
        sides=sides,
        is_foreign=is_foreign,
        floor=_mean(floor_k2, floor_tokens, np.ones(len(rows), np.bool_)),
        typical_floor=_typical(evidence.bfloat16 - reference, evidence.spread),
    )


def _side(
    evidence: Evidence,
    name: SideName,
    values: Float64Array,
    reference: Float64Array,
    other: Float64Array,
) -> Side:
    rows = evidence.rows
    _, num_known = _sums(rows, reference)
    is_known = num_known > 0
    held = np.where(is_known[rows.row_of], reference, other)
    k2, tokens = _sums(rows, values - held)
    hit = np.full(len(rows), -1)
    side = Side(
        name=name,
        values=values,
        reference=held,
        tokens=tokens,
        k2=k2,
        hit=hit,
        left=k2,
        variants=evidence.variants,
        is_known=is_known,
    )
    residuals = [row_residual(rows, side, variant) for variant in evidence.variants]
    best = np.min([np.full(len(rows), np.inf), *residuals], axis=0)
    is_deviating = k2 > FLOAT_K2 * tokens
    for number, left in reversed([*enumerate(residuals)]):
        limit = limit_of(evidence.variants[number].fit, k2, tokens)
        limit = np.where(is_known, limit, MAX_FAR_RESIDUAL * k2)
        is_near = (left <= best + TIE * k2) & (left <= EXACT * best + FLOAT_K2 * tokens)
        hit[is_deviating & is_near & (left <= limit)] = number
    near = [
        left if v.approximates and _is_typically_near(evidence, v, side) else None
        for left, v in zip(residuals, evidence.variants, strict=True)
    ]
    _add_approximate(side, near, is_deviating & is_known)
    is_far = ~is_known & (tokens > 0)
    if tokens[is_far & (hit >= 0)].sum() < MIN_FAR_TOKENS * tokens[is_far].sum():
        hit[is_far] = -1
    total = float(k2[is_known].sum()) if is_known.any() else float(k2.sum())

    def spread_over(chosen: BoolArray) -> float:
        squares = np.nan_to_num((values - held)[chosen[rows.row_of]]) ** 2
        return float(squares.sum() ** 2 / max((squares**2).sum(), 1e-300))

    enough = min(MIN_ROWS, int((tokens > 0).sum()))
    families = [v.family or v.text for v in evidence.variants]
    for family in dict.fromkeys(families):
        members = [own == family for own in families]
        is_hit = np.isin(hit, np.flatnonzero(members))
        left = np.stack([*residuals, k2])[hit, np.arange(len(rows))]
        whole, rest = float(k2[is_hit].sum()), float(left[is_hit].sum())
        approximates = evidence.variants[members.index(True)].approximates
        if (
            rest > (approximates or MAX_RESIDUAL) * whole
            or whole < MIN_SHARE * total
            or (
                is_hit.sum() < enough
                and (rest > MAX_FEW_RESIDUAL * whole or spread_over(is_hit) < MIN_EFFECTIVE)
            )
            or tokens[is_hit].sum() < MIN_TOKENS
        ):
            hit[is_hit] = -1
    side.left = np.stack([*residuals, k2])[hit, np.arange(len(rows))]  # -1 is k2 itself
    return side


def limit_of(fit: Fit, k2: Float64Array, tokens: Int64Array) -> Float64Array:
    """[R] sums of d^2 / 2 that a variant may leave of rows, to reproduce them."""
    little, little_k2 = MAX_LITTLE * k2, MAX_LITTLE_K2 * tokens
    if fit == "exact":
        return np.minimum(little, little_k2)
    if fit == "near":
        return np.minimum(MAX_ROW_RESIDUAL * k2, np.maximum(little, little_k2))
    return MAX_ROW_RESIDUAL * k2


def row_residual(rows: Rows, side: Side, variant: Variant) -> Float64Array:
    """[R] what the variant leaves of the side's k2; infinity where it explains nothing."""
    left, compared = _sums(rows, side.values - variant.logprobs)
    # A variant that was not computed for a row, or not for all its tokens, explains nothing.
    left[(compared < side.tokens) | (side.tokens == 0)] = np.inf
    if variant.plain is not None:
        plain = np.where(np.isfinite(variant.plain), variant.plain, side.reference)
        moved, _ = _sums(rows, variant.logprobs - plain)
        left[moved < MIN_MOVE * side.k2] = np.inf
    return left


def _is_typically_near(evidence: Evidence, variant: Variant, side: Side) -> bool:
    """Whether an approximate variant is nearer at the typical token too: a few tokens that go to
    other experts must not decide."""
    again = side.values - variant.logprobs
    d = np.where(np.isfinite(again), side.values - side.reference, np.nan)
    typical = variant.approximates * _typical(d, evidence.spread)
    return _typical(again, evidence.spread) <= typical


def _add_approximate(side: Side, near: Sequence[Float64Array | None], is_open: BoolArray) -> None:
    """Gives the rows that no variant reproduces, or only one that is approximate, and not their
    very numbers, to the approximate one that leaves the least of them, if that is little enough.

    near: by variant, [R] what it leaves; None if it is exact, or not near. is_open: [R]."""
    hit, k2 = side.hit, side.k2
    rows = is_open & (hit < 0)
    for number, left in enumerate(near):
        if left is not None:
            rows |= is_open & (hit == number) & (left > MAX_FEW_RESIDUAL * k2)
    of_all = {
        number: float(left[rows].sum())
        for number, left in enumerate(near)
        if left is not None and rows.any() and np.isfinite(left[rows]).all()
    }
    number = min(of_all, key=lambda n: of_all[n], default=-1)
    if number >= 0 and of_all[number] <= side.variants[number].approximates * float(k2[rows].sum()):
        hit[rows] = number


def variance_within(
    rows: Rows,
    d: Float64Array,
    spread: Float64Array,
    *,
    is_shared: bool,
    reference: Float64Array | None = None,
) -> float:
    """Ratio of the variance of d [N] within equal contexts to the whole: about 1 for noise, at most
    MAX_WITHIN for a deviation that repeats; NaN if too few tokens repeat.

    Tokens with the same last tokens, themselves included, are one context: other weights change
    them by much the same, noise does not. The length in CONTEXTS that repeats most counts. d is in
    units of the spread that noise on the logits would cause, without extremes. is_shared: rows that
    begin alike may have been computed once, so that one token of each beginning is taken. What
    varies after the very same ids is noise, whatever repeats besides.
    reference: [N] log-probs of the model. Strong noise makes likely tokens less likely each time
    that they are read; what d is at such log-probs on average is taken off first.
    """
    is_used = np.isfinite(d) & (spread > MIN_SPREAD)
    if own_noise(rows, d, spread) > MIN_OWN_NOISE:
        return 1.0
    if is_shared:
        places = np.flatnonzero(is_used)
        _, first = np.unique(rows.prefix_keys[places], return_index=True)
        is_used = np.zeros_like(is_used)
        is_used[places[first]] = True
    z = np.full(len(d), np.nan)
    z[is_used] = d[is_used] / np.sqrt(spread[is_used])
    if reference is not None and is_used.sum() > MIN_REPEATED:
        z[is_used] = _without_trend(z[is_used], reference[is_used], spread[is_used])
    found = [_within(rows, z, is_used, length) for length in CONTEXTS]
    return min((ratio for ratio in found if not np.isnan(ratio)), default=np.nan)


def _without_trend(z: Float64Array, logprobs: Float64Array, spread: Float64Array) -> Float64Array:
    """z less its mean, and over its size, at tokens of such a log-prob and spread: a polynomial of
    both is fitted."""
    x, y = np.clip(logprobs, LEAST_LOGPROB, 0), np.log(spread)
    columns = np.stack([x**0, x, x * x, np.exp(x), np.exp(2 * x), y, y * y, x * y], 1)
    z = _clipped(z)
    rest = z - columns @ np.linalg.lstsq(columns, z, rcond=None)[0]
    # The logarithm of a square that is 0 by chance would decide: none is below a share of the mean.
    squares = np.log(rest**2 + 1e-3 * (rest**2).mean() + 1e-30)
    return rest / np.exp(0.5 * columns @ np.linalg.lstsq(columns, squares, rcond=None)[0])


def _clipped(z: Float64Array) -> Float64Array:
    limit = np.quantile(np.abs(z), 0.98)
    return np.clip(z, -limit, limit)


def own_noise(rows: Rows, d: Float64Array, spread: Float64Array) -> float:
    """Ratio of the variance of d [N] after the very same ids to the whole: 0 for what is computed
    from the ids alone; NaN if too few tokens occur again after the same ids. As in
    `variance_within`, d is in units of the spread."""
    at = np.flatnonzero(np.isfinite(d) & (spread > MIN_SPREAD))
    if not len(at):
        return np.nan
    return _share_within(d[at] / np.sqrt(spread[at]), rows.prefix_keys[at])


def _within(rows: Rows, z: Float64Array, is_used: BoolArray, length: int) -> float:
    ids = rows.token_ids.astype(np.uint64)
    key = np.zeros(len(ids), np.uint64)
    for back in range(length):
        key = key * np.uint64(1_000_003) + np.roll(ids, back)
    is_used = is_used & (rows.position >= length)
    z, key = z[is_used], key[is_used]
    return np.nan if len(z) < MIN_REPEATED else _share_within(z, key)


def _share_within(z: Float64Array, key: npt.NDArray[np.uint64]) -> float:
    """Ratio of the variance of z [n], without extremes, among equal keys [n] to the whole; NaN if
    too few keys are equal."""
    z = _clipped(z)
    _, index, count = np.unique(key, return_inverse=True, return_counts=True)
    is_repeated = count[index] > 1
    _, index, count = np.unique(index[is_repeated], return_inverse=True, return_counts=True)
    z = z[is_repeated]
    if len(z) - len(count) < MIN_REPEATED // 2 or not (z * z).sum():
        return np.nan
    mean = np.bincount(index, z) / count
    within = ((z - mean[index]) ** 2).sum() / (len(z) - len(count))
    return float(within / (z * z).mean())


def log_likelihood_gain(d: Float64Array, scale: Float64Array, plain: Float64Array) -> float:
    """Nats by which noise of variances `scale` [N], mixed with any share of `plain`, explains d [N]
    better than `plain` alone. The size of each is fitted."""
    is_used = np.isfinite(d) & np.isfinite(scale) & (plain > MIN_SPREAD)
    d, scale, plain = d[is_used], scale[is_used], plain[is_used]
    if len(d) < MIN_REPEATED or not scale.sum() or not (d * d).sum():
        return 0.0
    scale, plain = scale / scale.mean(), plain / plain.mean()

    def fitted(share: float) -> float:
        u = (1 - share) * scale + share * plain
        size = float((d * d / u).mean())
        return -0.5 * float((np.log(size * u) + d * d / (size * u)).sum())

    return max(fitted(share) for share in (0.02, 0.1, 0.3, 0.6)) - fitted(1.0)


def _sums(rows: Rows, d: Float64Array) -> tuple[Float64Array, Int64Array]:
    """([R] sums of d^2 / 2, [R] numbers) over the tokens that are not NaN."""
    is_known = np.isfinite(d)
    index = rows.row_of[is_known]
    # Of no token at all, bincount gives integers.
    k2 = np.bincount(index, 0.5 * d[is_known] ** 2, minlength=len(rows)).astype(np.float64)
    return k2, np.bincount(index, minlength=len(rows))


def _typical(d: Float64Array, spread: Float64Array) -> float:
    is_used = np.isfinite(d) & (spread > MIN_SPREAD)
    return float(np.median(d[is_used] ** 2 / spread[is_used])) if is_used.any() else np.inf


def _mean(k2: Float64Array, tokens: Int64Array, chosen: BoolArray) -> float:
    return float(k2[chosen].sum() / max(tokens[chosen].sum(), 1))
