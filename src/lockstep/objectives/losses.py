"""Losses on trained tokens: per-token tensors in, one loss per token out. Usable from any trainer.

A loss does not sum: the caller sums and divides (`objectives/aggregation.py`), so that cutting a
batch into micro-batches or spreading it over ranks cannot change the result. A loss of your own is
a function from `TokenBatch` to `TokenLoss`.

Every tensor is [T] packed or [B, T] padded. Places where `mask` is False may hold anything, NaN
included: loss, gradient and metrics are 0.0 there. float32; half precision is widened
before anything is subtracted, float64 is kept.

Beside the policy losses stand the terms that keep a policy near a reference, and the critic's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch

import torch

from lockstep.correction import kl
from lockstep.correction.arrays import takes_arrays
from lockstep.correction.kl import RATIO_LIMIT
from lockstep.correction.layout import Int64Array, Layout, counted
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.config import (
    CISPO,
    DPPO,
    GSPO,
    Divergence,
    KLEstimator,
    KLOrder,
    ObjectiveConfig,
    PPOClip,
    Reinforce,
    check_kind,
)
from lockstep.objectives.distillation import SMALLEST_COMPLEMENT, top_k_kl


def read_tokens(mask: Tensor | None, **tensors: Tensor) -> list[Tensor]:
    """The tensors, of one shape, at least float32, 0.0 where `mask` is False.

    The first carries gradient; the others are constants and are detached. Masked places are blanked
    here, before anything is computed from them: a where() afterwards would keep the value and let a
    NaN gradient through. Raises AlignmentError if the shapes differ.

    >>> mask = torch.tensor([True, False])
    >>> [x.tolist() for x in read_tokens(mask, a=torch.tensor([1.0, torch.nan]), b=mask.half())]
    [[1.0, 0.0], [1.0, 0.0]]
    """
    (first, live), *_ = tensors.items()
    for name, other in (tensors | ({} if mask is None else {"mask": mask})).items():
        if other.shape != live.shape:
            raise AlignmentError(
                f"{first} have the shape {list(live.shape)} and {name} {list(other.shape)}: each "
                "is one number per token. Shifted twice, or not at all?"
            )
    given = [live, *(x.detach() for name, x in tensors.items() if name != first)]
    wide = [x if x.dtype == torch.float64 else x.float() for x in given]
    is_on = None if mask is None else counted(mask)
    return wide if is_on is None else [torch.where(is_on, x, 0.0) for x in wide]


Tensor = torch.Tensor

Clip = tuple[float | Tensor, float | Tensor] | float
"""Distances from 1 to the bounds of a ratio, below and above, or one number for both; a tensor has
one for each token."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenBatch:
    """The trained tokens of some whole rows, as a loss reads them: one after another, no padding.

    Two rows with two and one trained tokens; the correction rejected nothing:

    >>> tokens = TokenBatch(
    ...     logprobs=torch.tensor([-0.1, -0.2, -0.3]), entropy=torch.zeros(3),
    ...     columns={"advantages": torch.tensor([1.0, 1.0, -1.0])},
    ...     row=torch.tensor([0, 0, 1]), num_rows=2,
    ... )
    >>> tokens.layout.row_sums(tokens.column("advantages")).tolist()
    [2.0, -1.0]
    """

    logprobs: Tensor
    """[T] float32 nats, of the trained policy; carries gradient."""
    entropy: Tensor
    """[T] float32 nats, of the distribution that each token was drawn from; carries gradient."""
    columns: Mapping[str, Tensor]
    """name -> [T, ...], the samples' columns at the same tokens."""
    row: Tensor
    """[T] int64 in [0, num_rows), not decreasing: which row a token belongs to."""
    num_rows: int
    weights: Tensor | None = None
    """[T] float32 without gradient: the correction's weights. The trainer multiplies the loss by
    them; None: no weights."""
    kept: Tensor | None = None
    """[T] int64: index of each token among the `num_all` trained tokens of its micro-batch. The
    correction rejected the other tokens. None: all were kept."""
    num_all: int = 0
    sizes: Int64Array | None = None
    """[num_rows]: tokens of each row, on the host. None counts them, which waits for a GPU."""
    mask: Tensor | None = None
    """[T] bool: the tokens that count, where others are left in place with columns of 0.0. None:
    all."""
    listed: Tensor | None = None
    """[T, K] float32 nats, of the trained policy at the ids of the column `teacher_ids`; carries
    gradient. None without that column."""
    teacher_kl: Tensor | None = None
    """[T] float32 nats, the divergence from a teacher over the vocabulary; carries gradient. None
    where no teacher shares the process."""

    def select(self, values: Tensor) -> Tensor:
        """[num_all] -> [T]: the values of the tokens that were kept."""
        return values if self.kept is None else values.index_select(0, self.kept)

    def spread(self, values: Tensor) -> Tensor:
        """[T] -> [num_all]: the values at their tokens, 0.0 at rejected tokens."""
        if self.kept is None:
            return values
        return values.new_zeros(self.num_all).index_copy(0, self.kept, values)

    @property
    def layout(self) -> Layout:
        """The rows of the tokens, for losses that need sums over a row."""
        if self.sizes is not None:
            return Layout.packed(self.sizes, self.mask)
        return Layout.packed(torch.bincount(self.row, minlength=self.num_rows))

    def column(self, name: str) -> Tensor:
        """Raises AlignmentError if the samples do not have it."""
        if name not in self.columns:
            raise AlignmentError(
                f"the loss needs the column {name!r}; the samples have {sorted(self.columns)}."
            )
        return self.columns[name]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """A loss per token, and figures about it.

    >>> out = reinforce(torch.tensor([-0.5, -2.0]), torch.tensor([1.0, -1.0]))
    >>> out.loss.tolist()
    [0.5, -2.0]
    """

    loss: Tensor
    """[T]: to be minimised; carries gradient. The correction's weights multiply it, so it holds the
    policy loss and an unbiased reference KL, whose ratio is to the old policy too."""
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [T] without gradient, reported as the mean over all trained tokens of the batch."""
    maximum: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [T] without gradient, reported as the maximum over them."""
    regularizer: Tensor | None = None
    """[T]: added to the loss after the correction's weights; carries gradient."""


LossFn = Callable[[TokenBatch], TokenLoss]


# -- with the ratio to the old policy -------------------------------------------------------------


@takes_arrays
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip: Clip = (0.2, 0.2),
    dual_clip: float | None = None,
    mask: Tensor | None = None,
) -> TokenLoss:
    """-min(r * A, clamp(r, 1 - clip[0], 1 + clip[1]) * A) with r = exp(logprobs - old_logprobs).

    old_logprobs and advantages are constants. dual_clip: with A < 0 the loss is at most
    -dual_clip * A, so a token that became much likelier cannot push without bound. `clip_fraction`
    is the share of tokens whose gradient the clip cuts off, `dual_clip_fraction` the share for the
    dual clip. Sources: Schulman et al. 2017, eq. 7; Ye et al. 2020 (arXiv 1912.09729), the dual
    clip; DAPO (arXiv 2503.14476), eq. 8, two different distances.
    """
    logprobs, old_logprobs, advantages = _read_ratio(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    loss, is_clipped = _clipped(ratio, advantages, clip)
    mean = {"clip_fraction": is_clipped}
    if dual_clip is not None:
        is_negative = advantages < 0
        loss = torch.where(is_negative, torch.minimum(loss, -dual_clip * advantages), loss)
        mean["dual_clip_fraction"] = is_negative & (ratio > dual_clip)
    return _report(mask, loss, *_with_ratio(mean, ratio, log_ratio))


@takes_arrays
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    layout: Layout | Tensor,
    *,
    clip: Clip = (3e-4, 4e-4),
    averaged: Layout | None = None,
) -> TokenLoss:
    """PPO's clip on the ratio of a whole row: s = exp(mean over its tokens of the log ratio).

    Each token has the value of s and, through s * exp(logprobs - stop(logprobs)), a gradient of its
    own: A * s on its log-prob. With aggregate=sequence_mean that is the gradient of s * A. Tokens
    that `layout` does not count are in no mean; `averaged`, of the same rows, counts others for the
    mean alone. Rows that are split over ranks give the same: the
    layout's sums are all-reduced. `ratio_mean` and `ratio_max` are of s, `log_ratio_abs_max` is of
    single tokens. Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 and, as GSPO-token, eq. 13.
    """
    layout = Layout.of(layout, logprobs=logprobs)
    mask = layout.mask
    logprobs, old_logprobs, advantages = _read_ratio(mask, logprobs, old_logprobs, advantages)
    log_ratio = (logprobs - old_logprobs).detach()
    averaged = averaged or layout
    count_R = averaged.row_counts(logprobs.device).clamp(min=1)
    mean_R = (averaged.row_sums(log_ratio) / count_R).clamp(-RATIO_LIMIT, RATIO_LIMIT)
    row_log_ratio = layout.expand(mean_R).to(logprobs.dtype)
    ratio = row_log_ratio.exp() * (logprobs - logprobs.detach()).exp()
    loss, is_clipped = _clipped(ratio, advantages, clip)
    return _report(mask, loss, *_with_ratio({"clip_fraction": is_clipped}, ratio, log_ratio))


@takes_arrays
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip: Clip = (1.0, 1.0),
    mask: Tensor | None = None,
) -> TokenLoss:
    """-stop(clamp(r, 1 - clip[0], 1 + clip[1])) * A * logprobs, r = exp(logprobs - old_logprobs).

    The clip bounds a token's weight and never takes its gradient away. clip[0] = 1 leaves the ratio
    free below, as its authors do. `clip_fraction` is the share of tokens whose weight was bounded.
    Source: MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5.
    """
    logprobs, old_logprobs, advantages = _read_ratio(mask, logprobs, old_logprobs, advantages)
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    weight, is_below, is_above = _bounded(ratio, clip)
    loss = -weight * advantages * logprobs
    mean = {"clip_fraction": is_below | is_above}
    return _report(mask, loss, *_with_ratio(mean, ratio, log_ratio))


@takes_arrays
def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence = "tv",
    max_divergence: tuple[float, float] = (0.2, 0.2),
    max_ratio: float = 20.0,
    mask: Tensor | None = None,
) -> TokenLoss:
    """-stop(min(r, max_ratio) * M) * A * logprobs: a trust region on probabilities, not on ratios.

    M is 0 where the update would push a token further away that is already too far: A > 0, likelier
    than under the old policy, and the divergence above max_divergence[1]; or A < 0, less likely,
    and above max_divergence[0]. The divergence is between the events "this token" and "any other",
    see `binary_divergence`. `clip_fraction` is the share of tokens with M = 0, `truncated_fraction`
    the share of the others whose ratio was cut. Source: Qi et al. 2026 (arXiv 2602.04879), eq. 11
    to 14; the truncation, section 5.4. There the old policy is the sampler:
    correction.anchor=rollout.
    """
    logprobs, old_logprobs, advantages = _read_ratio(mask, logprobs, old_logprobs, advantages)
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    distance = binary_divergence(logprobs.detach(), old_logprobs, divergence)
    low, high = max_divergence
    is_outside = torch.where(
        log_ratio > 0, (advantages > 0) & (distance > high), (advantages < 0) & (distance > low)
    )
    loss = -torch.where(is_outside, 0.0, ratio.clamp(max=max_ratio)) * advantages * logprobs
    mean = {
        "clip_fraction": is_outside,
        "truncated_fraction": ~is_outside & (ratio > max_ratio),
        "divergence_mean": distance,
    }
    mean, maximum = _with_ratio(mean, ratio, log_ratio)
    return _report(mask, loss, mean, maximum | {"divergence_max": distance})


@takes_arrays
def binary_divergence(logprobs: Tensor, old_logprobs: Tensor, kind: Divergence) -> Tensor:
    """Divergence of two policies on "this token or any other", per token; never negative.

    "tv": |p - old p|, the total variation. "kl": KL(old || policy) of the two-way choice, in nats.
    Both are lower bounds of the divergence over the vocabulary. Probabilities within half a float32
    step of 1 count as that step away from it. Source: arXiv 2602.04879, eq. 13 and 14.

    >>> binary_divergence(torch.tensor([0.5]).log(), torch.tensor([0.75]).log(), "tv").tolist()
    [0.25]
    """
    check_kind("divergence", kind, Divergence)
    logprobs, old_logprobs = read_tokens(None, logprobs=logprobs, old_logprobs=old_logprobs)
    if kind == "tv":
        return (logprobs.exp() - old_logprobs.exp()).abs()
    old_prob = old_logprobs.exp()
    other, old_other = (
        (-torch.expm1(x)).clamp(min=SMALLEST_COMPLEMENT) for x in (logprobs, old_logprobs)
    )
    kl = old_prob * (old_logprobs - logprobs) + old_other * (old_other / other).log()
    return kl.clamp(min=0)


# -- without --------------------------------------------------------------------------------------


@takes_arrays
def reinforce(logprobs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> TokenLoss:
    """-A * log-prob. Source: Williams 1992."""
    logprobs, advantages = read_tokens(mask, logprobs=logprobs, advantages=advantages)
    return _report(mask, -advantages * logprobs)


@takes_arrays
def cross_entropy(
    logprobs: Tensor, weights: Tensor | None = None, *, mask: Tensor | None = None
) -> TokenLoss:
    """-weight * log-prob. The caller divides by the sum of weights."""
    weights = torch.ones_like(logprobs) if weights is None else weights
    logprobs, weights = read_tokens(mask, logprobs=logprobs, weights=weights)
    return _report(mask, -weights * logprobs)


# -- from settings --------------------------------------------------------------------------------


def make_loss(config: ObjectiveConfig) -> LossFn:
    """The loss that `config` describes: policy loss and regularizers, with their metrics."""
    policy_loss = make_policy_loss(config)
    if not (config.entropy_coef or config.kl_coef):
        return policy_loss

    def loss(tokens: TokenBatch) -> TokenLoss:
        out = policy_loss(tokens)
        policy, regularizer = out.loss, -config.entropy_coef * tokens.entropy
        mean = dict(out.mean)
        if config.kl_coef:
            kl = reference_kl(
                tokens.logprobs,
                tokens.column("reference_logprobs"),
                estimator=config.kl_estimator,
                old_logprobs=tokens.column("old_logprobs") if config.reads_old_logprobs else None,
            )
            if config.kl_estimator == "unbiased":
                # Its ratio is to the old policy: the correction's weight covers the gap from there
                # to the sampler, as in the policy loss.
                policy = policy + config.kl_coef * kl
            else:
                regularizer = regularizer + config.kl_coef * kl
            mean["reference_kl"] = kl.detach()
        if out.regularizer is not None:
            regularizer = regularizer + out.regularizer
        return TokenLoss(policy, mean=mean, maximum=out.maximum, regularizer=regularizer)

    return loss


@singledispatch
def make_policy_loss(config: ObjectiveConfig) -> LossFn:
    """The loss that `config` describes, without the regularizers that every objective can have.

    Its type decides; a type of your own is registered:

    @make_policy_loss.register
    def _(config: MyObjective) -> LossFn: ...
    """
    raise ConfigError(
        f"no loss for a {type(config).__name__}; register one with make_policy_loss.register "
        "(--plugin)."
    )


@make_policy_loss.register
def _(config: PPOClip) -> LossFn:
    return lambda tokens: ppo_clip(*_with_old(tokens), clip=config.clip, dual_clip=config.dual_clip)


@make_policy_loss.register
def _(config: GSPO) -> LossFn:
    return lambda tokens: gspo(*_with_old(tokens), tokens.layout, clip=config.clip)


@make_policy_loss.register
def _(config: CISPO) -> LossFn:
    return lambda tokens: cispo(*_with_old(tokens), clip=config.clip)


@make_policy_loss.register
def _(config: DPPO) -> LossFn:
    return lambda tokens: dppo(
        *_with_old(tokens),
        divergence=config.divergence,
        max_divergence=config.bounds,
        max_ratio=config.max_ratio,
    )


@make_policy_loss.register
def _(config: Reinforce) -> LossFn:
    return lambda tokens: reinforce(tokens.logprobs, tokens.column("advantages"))


def _with_old(tokens: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.logprobs, tokens.column("old_logprobs"), tokens.column("advantages")


def supervised_loss(tokens: TokenBatch) -> TokenLoss:
    """Cross entropy with the column `weights` where the samples have one; with soft targets, which
    are the column `teacher_ids`, KL(teacher || policy) in its place."""
    weights = tokens.columns.get("weights")
    if tokens.listed is None:
        return cross_entropy(tokens.logprobs, weights)
    kl = top_k_kl(tokens.listed, tokens.column("teacher_ids_logprobs"), order="forward")
    return cross_entropy(-kl, weights)


def with_teacher(policy_loss: LossFn, *, coef: float, order: KLOrder) -> LossFn:
    """`policy_loss`, and coef times the divergence from a teacher as its regularizer."""

    def loss(tokens: TokenBatch) -> TokenLoss:
        out, kl = policy_loss(tokens), tokens.teacher_kl
        if kl is None:
            if tokens.listed is None:
                raise AlignmentError("the samples have no teacher_ids: no teacher has scored them.")
            kl = top_k_kl(tokens.listed, tokens.column("teacher_ids_logprobs"), order=order)
        regularizer = coef * kl if out.regularizer is None else out.regularizer + coef * kl
        return replace(out, mean={**out.mean, "teacher_kl": kl.detach()}, regularizer=regularizer)

    return loss


# -- mechanism ------------------------------------------------------------------------------------


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(PPO's pessimistic loss, where its clip cuts the gradient off)."""
    bounded, is_below, is_above = _bounded(ratio, clip)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    return loss, (is_above & (advantages > 0)) | (is_below & (advantages < 0))


def _bounded(ratio: Tensor, clip: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """(`ratio` within its bounds, where it is below them, where it is above)."""
    below, above = clip if isinstance(clip, tuple | list) else (clip, clip)
    if not all(isinstance(bound, Tensor) or bound >= 0 for bound in (below, above)):
        raise ConfigError(f"clip={clip}: expected distances from 1, at least 0.")
    low, high = 1.0 - below, 1.0 + above
    # Two steps, since `clamp` does not mix numbers and tensors.
    return ratio.clamp(min=low).clamp(max=high), ratio < low, ratio > high


Figures = dict[str, Tensor]


def _with_ratio(mean: Figures, ratio: Tensor, log_ratio: Tensor) -> tuple[Figures, Figures]:
    """(means, maxima) of a loss with a ratio. log_ratio: of single tokens."""
    maxima = {"ratio_max": ratio, "log_ratio_abs_max": log_ratio.abs()}
    return mean | {"ratio_mean": ratio, "approx_kl": -log_ratio}, maxima


def _read_ratio(
    mask: Tensor | None, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor
) -> list[Tensor]:
    return read_tokens(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)


def _report(
    mask: Tensor | None,
    loss: Tensor,
    mean: Mapping[str, Tensor] = {},
    maximum: Mapping[str, Tensor] = {},
) -> TokenLoss:
    """Everything 0 where `mask` is False; metrics without gradient."""

    def inside(x: Tensor) -> Tensor:  # the mask was checked where the tokens were read
        return x if mask is None else torch.where(mask > 0, x, torch.zeros_like(x))

    return TokenLoss(
        inside(loss),
        mean={name: inside(x.detach()) for name, x in mean.items()},
        maximum={name: inside(x.detach()) for name, x in maximum.items()},
    )


@takes_arrays
def reference_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    estimator: KLEstimator = "unbiased",
    old_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """An estimate of KL(policy || reference) per token, as a loss.

    All [T] or [B, T] float32 nats; `logprobs` carries gradient, the others are constants. 0.0 and
    no gradient where `mask` is False. old_logprobs: of the policy that drew the tokens; read by
    "unbiased" alone. Logs of ratios are cut at 20. Raises AlignmentError if a column is missing or
    of another shape.

    With d = reference_logprobs - logprobs, "k2" is d^2 / 2 and "k3" is exp(d) - 1 - d. "unbiased"
    is r * k3(d) with r = exp(logprobs - old_logprobs) and the gradient through both: over tokens a
    that old drew, sum old(a) r(a) k3(a) = sum pi(a) (ref(a) / pi(a) - 1 + log(pi(a) / ref(a)))
    = KL(pi || ref) for every pi, hence its gradient too. Without r the sampling stays fixed while
    pi moves. Then k1 has the mean gradient 0, k2 the right gradient, and k3 the gradient of
    KL(reference || policy).

    Source: DeepSeek-V3.2 (arXiv 2512.02556), the unbiased KL estimate.
    Guard: tests/cpu/correction/test_unbiased_kl.py
    """
    check_kind("estimator", estimator, KLEstimator)
    if estimator != "unbiased":
        old_logprobs = logprobs  # not read
    elif old_logprobs is None:
        raise AlignmentError(
            'the estimator "unbiased" weighs each token by its ratio to the policy that drew '
            "it: give old_logprobs, or take another estimator."
        )
    policy, old, reference = read_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, reference_logprobs=reference_logprobs
    )
    d = (reference - policy).clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT)
    if estimator != "unbiased":
        return kl.k2(d) if estimator == "k2" else kl.k3(d)
    return (policy - old).clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT).exp() * kl.k3(d)


@takes_arrays
def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float = 0.0,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Half the squared error of each value, pessimistic about values that have moved far.

        max((v - R)^2, (clamp(v, v_old - clip, v_old + clip) - R)^2) / 2

    values: carry gradient; old_values, from before the batch, and returns are constants; all of one
    shape, float32. clip: at least 0; 0 is off. Places where `mask` is False may hold anything: loss
    and gradient are 0 there. `clip_fraction` is the share of tokens whose gradient the clip cuts
    off.
    Source: Schulman et al.'s PPO code (openai/baselines, ppo2); as in TRL and verl.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> value_loss(one, 0 * one, two).loss.tolist(), value_loss(one, 0 * one, two, clip=0.5).loss
    ([0.5], tensor([1.1250]))
    """
    values, old_values, returns = read_tokens(
        mask, values=values, old_values=old_values, returns=returns
    )
    loss = (values - returns).square()
    is_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if clip:
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
        is_clipped = (clipped > loss).detach()
        loss = torch.maximum(loss, clipped)
    return TokenLoss(loss / 2, mean={"clip_fraction": is_clipped})


@takes_arrays
def explained_variance(values: Tensor, returns: Tensor, layout: Layout | Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over all tokens that count.

    1: the critic predicts returns exactly. 0: no better than their mean. Below 0: worse than their
    mean. None if all returns are equal: there is nothing to explain.

    >>> explained_variance(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), Layout.packed([2]))
    1.0
    """
    layout = Layout.of(layout, values=values, returns=returns)
    if not values.numel():
        return None
    values, returns = values.detach().double(), returns.detach().double()
    is_counted = torch.ones_like(returns, dtype=torch.bool) if layout.mask is None else layout.mask
    count = is_counted.sum().clamp(min=1)

    def variance(x: Tensor) -> Tensor:
        x = torch.where(is_counted, x, 0.0)
        return torch.where(is_counted, x - x.sum() / count, 0.0).square().sum() / count

    low = torch.where(is_counted, returns, torch.inf).amin()
    high = torch.where(is_counted, returns, -torch.inf).amax()
    left, whole, is_level = torch.stack(
        [variance(returns - values), variance(returns), (low >= high).double()]
    ).cpu()
    return None if is_level else 1.0 - float(left / whole)
