"""The log ratio of two log-probs of the same token, and the three estimators of KL from it.

Sign: `log_ratio` is trainer minus rollout, so its exponential is the importance weight, and the
estimators are of KL(rollout || trainer), from tokens that rollout drew (Schulman 2020).
"""

from __future__ import annotations

import torch

from lockstep.errors import AlignmentError

Tensor = torch.Tensor

SERIES_BELOW = 1e-4  # there exp(d) - 1 - d by its series: the subtraction would lose what is left


def log_ratio(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(trainer - rollout, is_valid): [T] float64 and [T] bool, without gradient.

    is_valid: `mask` is True and both log-probs are finite. Elsewhere the ratio is 0.0, whatever
    stands there: padding and NaN cannot reach a sum. The difference of two float32 is exact in
    float64, so a 0 means equal bits. Raises AlignmentError if the lengths differ.
    """
    logprobs, rollout_logprobs = logprobs.detach(), rollout_logprobs.detach()
    if logprobs.shape != rollout_logprobs.shape or (
        mask is not None and mask.shape != logprobs.shape
    ):
        shapes = [list(logprobs.shape), list(rollout_logprobs.shape)]
        shapes += [] if mask is None else [list(mask.shape)]
        raise AlignmentError(
            f"logprobs, rollout_logprobs and mask have the shapes {shapes}: each is one value per "
            "token, at the same index. Shifted twice, or not at all?"
        )
    is_valid = torch.isfinite(logprobs) & torch.isfinite(rollout_logprobs)
    if mask is not None:
        is_valid &= mask.bool()
    difference = logprobs.double() - rollout_logprobs.double()
    return torch.where(is_valid, difference, 0.0), is_valid


def k1(log_ratio: Tensor) -> Tensor:
    """rollout - trainer, per token: unbiased, of both signs; cancels when tokens are shifted."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square, per token: low variance, and its gradient is that of the KL."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - 1 - d, per token: unbiased and never negative, at any size of d.

    Guard: tests/cpu/correction/test_kl.py::test_k3_keeps_its_digits_near_zero
    """
    d = log_ratio
    series = d * d * (0.5 + d / 6 + d * d / 24)
    return torch.where(d.abs() < SERIES_BELOW, series, torch.expm1(d) - d)
