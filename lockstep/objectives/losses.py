"""Losses on trained tokens: `[T]` tensors in, one loss per token out.

A loss says nothing about how tokens become one number, how a batch is cut into micro-batches or
spread over ranks: whoever calls it sums and divides (`training/trainer.py`), so that none of that
can change the result. A loss of your own is a function from `TokenBatch` to `TokenLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import singledispatch

import torch

from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.config import ImportanceSampling, ObjectiveConfig, PPOClip, Reinforce

Tensor = torch.Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: a ratio that large means misaligned tokens; stays finite


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenBatch:
    """The trained tokens of some whole rows, one after another; nothing else, and no padding."""

    logprobs: Tensor
    """[T] float32 nats, of the trained policy; carries gradient."""
    entropy: Tensor
    """[T] float32 nats, of the distribution that each token was drawn from; carries gradient."""
    columns: Mapping[str, Tensor]
    """name -> [T, ...], the samples' columns at the same tokens."""
    row: Tensor
    """[T] int64 in [0, num_rows), not decreasing: which row a token belongs to."""
    num_rows: int

    def column(self, name: str) -> Tensor:
        """Raises AlignmentError if the samples do not have it."""
        if name not in self.columns:
            raise AlignmentError(
                f"the loss needs the column {name!r}; the samples have {sorted(self.columns)}."
            )
        return self.columns[name]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """What a loss gives back: a value per token, and what is worth showing about them."""

    loss: Tensor
    """[T]: to be minimised; carries gradient."""
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [T] without gradient, reported as the mean over all trained tokens of the batch."""
    maximum: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [T] without gradient, reported as the maximum over them."""


LossFn = Callable[[TokenBatch], TokenLoss]


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
) -> TokenLoss:
    """-min(r * A, clamp(r, 1 - clip[0], 1 + clip[1]) * A) with r = exp(logprobs - old_logprobs).

    All [T]; old_logprobs and advantages are constants. `clip_fraction` is the share of tokens whose
    gradient the clip has cut off. Source: Schulman et al. 2017, eq. 7.
    """
    _check_equal_lengths(logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = logprobs - old_logprobs.detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low, high = 1.0 - clip[0], 1.0 + clip[1]
    advantages = advantages.detach()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    with torch.no_grad():
        is_above = (ratio > high) & (advantages > 0)
        is_below = (ratio < low) & (advantages < 0)
        return TokenLoss(
            loss,
            mean={"clip_fraction": is_above | is_below, "ratio_mean": ratio.detach()},
            maximum={"ratio_max": ratio.detach(), "log_ratio_abs_max": log_ratio.detach().abs()},
        )


def reinforce(logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A * log-prob; both [T]. Source: Williams 1992."""
    _check_equal_lengths(logprobs, advantages=advantages)
    return TokenLoss(-advantages.detach() * logprobs)


def importance_sampling(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, max_ratio: float
) -> TokenLoss:
    """-min(r, max_ratio) * A * log-prob with r = exp(logprobs - old_logprobs) held constant.

    All [T]. `clip_fraction` is the share of tokens whose weight was cut.
    """
    _check_equal_lengths(logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss = -ratio.clamp(max=max_ratio) * advantages.detach() * logprobs
    return TokenLoss(
        loss,
        mean={"clip_fraction": ratio > max_ratio, "ratio_mean": ratio},
        maximum={"ratio_max": ratio, "log_ratio_abs_max": log_ratio.abs()},
    )


def cross_entropy(logprobs: Tensor, weights: Tensor | None = None) -> TokenLoss:
    """-weight * log-prob; both [T]. Dividing the sum by the sum of weights is the caller's."""
    if weights is None:
        return TokenLoss(-logprobs)
    _check_equal_lengths(logprobs, weights=weights)
    return TokenLoss(-weights.detach() * logprobs)


@singledispatch
def make_loss(config: ObjectiveConfig) -> LossFn:
    """The loss that `config` describes. Its type decides; a type of your own is registered:

    @make_loss.register
    def _(config: MyObjective) -> LossFn: ...
    """
    raise ConfigError(
        f"no loss for a {type(config).__name__}; register one with make_loss.register (--plugin)."
    )


@make_loss.register
def _(config: PPOClip) -> LossFn:
    return lambda tokens: ppo_clip(
        tokens.logprobs,
        tokens.column("old_logprobs"),
        tokens.column("advantages"),
        clip=config.clip,
    )


@make_loss.register
def _(config: Reinforce) -> LossFn:
    return lambda tokens: reinforce(tokens.logprobs, tokens.column("advantages"))


@make_loss.register
def _(config: ImportanceSampling) -> LossFn:
    return lambda tokens: importance_sampling(
        tokens.logprobs,
        tokens.column("old_logprobs"),
        tokens.column("advantages"),
        max_ratio=config.max_ratio,
    )


def supervised_loss(tokens: TokenBatch) -> TokenLoss:
    """Cross entropy with the column `weights` where the samples have one."""
    return cross_entropy(tokens.logprobs, tokens.columns.get("weights"))


def _check_equal_lengths(logprobs: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.shape != logprobs.shape:
            raise AlignmentError(
                f"logprobs have the shape {list(logprobs.shape)} and {name} {list(other.shape)}: "
                "each is one number per trained token. Shifted twice, or not at all?"
            )
