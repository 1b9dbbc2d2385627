"""The sampler's own probabilities, estimated from several scorings instead of one.

The log-probs of a noisy engine differ from pass to pass. The one recorded while sampling is a
single draw, and a biased one: a token is drawn more often when noise favours it. The mean over
re-scorings has neither fault.
Source: KwaiKAT team 2025, "Reducing Sampling Noise to Improve Stability of MoE RL".

# S scorings  T tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.correction.arrays import takes_arrays
from lockstep.errors import AlignmentError

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AveragedLogprobs:
    """Several scorings of the same tokens as one estimate, and how far they were apart."""

    logprobs: Tensor
    """[T] float32 nats: log of the mean probability. NaN where a scoring is not finite."""
    variance: Tensor
    """[T] float64 nats^2: variance of the log-prob between scorings (divided by n - 1). The
    estimate has about 1 / n of this variance. NaN where there are fewer than two scorings."""
    sampling_bias: Tensor | None
    """[T] float64 nats: the log-prob recorded while sampling minus the estimate without it; NaN
    where either is not finite. None without `rollout_logprobs`."""


@takes_arrays
def average_logprobs(
    scorings: Tensor | Sequence[Tensor], *, rollout_logprobs: Tensor | None = None
) -> AveragedLogprobs:
    """The behaviour policy from its re-scorings: the mean of probabilities, in log space.

    scorings: [S, T] or S tensors [T], float32 nats, of the same tokens by the engine that sampled
    them, each from a pass of its own. rollout_logprobs: [T], recorded while sampling; not averaged.

    The mean is of probabilities, not of log-probs: the ratio divides by a probability.

    >>> two = torch.tensor([[0.2], [0.4]]).log()
    >>> round(average_logprobs(two).logprobs.exp().item(), 4)
    0.3
    """
    stacked = (scorings if isinstance(scorings, Tensor) else torch.stack(list(scorings))).double()
    if stacked.ndim != 2 or not len(stacked):
        raise AlignmentError(
            f"the scorings have the shape {list(stacked.shape)}; expected [scorings, tokens], at "
            "least one scoring."
        )
    if rollout_logprobs is not None and rollout_logprobs.shape != stacked.shape[1:]:
        raise AlignmentError(
            f"rollout_logprobs have the shape {list(rollout_logprobs.shape)}, each scoring "
            f"{list(stacked.shape[1:])}: one value per token, at the same index."
        )
    stacked = _finite_or_nan(stacked)
    variance = torch.full_like(stacked[0], float("nan"))
    if len(stacked) > 1 and stacked.shape[1]:
        variance = stacked.var(0, unbiased=True)
    mean = torch.logsumexp(stacked, 0) - math.log(len(stacked))
    bias = None
    if rollout_logprobs is not None:
        bias = _finite_or_nan(rollout_logprobs.double()[None])[0] - mean
    return AveragedLogprobs(mean.float(), variance, bias)


def _finite_or_nan(stacked: Tensor) -> Tensor:
    """The scorings, with NaN in all of a token's if one of them is not finite."""
    return torch.where(torch.isfinite(stacked).all(0), stacked, float("nan"))
