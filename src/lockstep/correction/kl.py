"""The log ratio of two log-probs of the same token, and the three estimators of KL from it.

Sign: `log_ratio` is trainer minus rollout, so its exponential is the importance weight, and the
estimators are of KL(rollout || trainer), from tokens that rollout drew (Schulman 2020).

`support_bias` is the bias of a trainer that ignores top-p and top-k. With q = p / S on the tokens
that were kept, and S their mass under p, a trainer that takes p for q follows the gradient of
log q + log S: every token with a positive advantage also makes the kept tokens more probable.
`ops.log_probs` over a recorded support divides by S and has no such bias.
"""

from __future__ import annotations

import torch

from lockstep.correction.arrays import takes_arrays
from lockstep.errors import AlignmentError

Tensor = torch.Tensor

# Below, exp(d) - 1 - d is taken from its series: the subtraction would lose its digits. At 0.25 the
# series is right to 4e-7 of the result, the precision of the subtraction in float32.
SERIES_BELOW = {torch.float32: 0.25, torch.float64: 1e-4}

RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: a log ratio that large means misaligned tokens; stays finite


def log_ratio(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(trainer - rollout, is_valid), of the inputs' shape, without gradient.

    float32, or float64 if both inputs are. is_valid: `mask` is True and both log-probs are finite.
    Elsewhere the ratio is 0.0, before anybody takes its exponential: padding and NaN cannot reach a
    sum. Log-probs that are within a factor of two of each other differ exactly in their own
    precision, so a 0 means equal bits. Raises AlignmentError if the shapes differ.
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
    if not logprobs.dtype == rollout_logprobs.dtype == torch.float64:
        logprobs, rollout_logprobs = logprobs.float(), rollout_logprobs.float()
    difference = logprobs - rollout_logprobs
    # A difference is not finite exactly where an input is not: finite log-probs cannot overflow.
    if mask is None and _is_below(difference, float("inf")):
        return difference, torch.ones_like(difference, dtype=torch.bool)
    is_valid = torch.isfinite(difference)
    if mask is not None:
        is_valid &= mask if mask.dtype == torch.bool else mask != 0
    return torch.where(is_valid, difference, 0.0), is_valid


def k1(log_ratio: Tensor) -> Tensor:
    """rollout - trainer, per token: unbiased, of both signs; cancels when tokens are shifted."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square, per token: low variance, with the gradient of the KL."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - 1 - d, per token: unbiased and never negative; float32, or float64 of float64;
    differentiable.

    The argument is cut at 20: the result stays finite, and is a lower bound there, without
    gradient.

    Guard: tests/cpu/correction/test_kl.py::test_k3_keeps_its_digits_near_zero
    """
    # Cut in the whole: expm1(20) - d falls below 0 at last.
    d = log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32)).clamp(max=RATIO_LIMIT)
    series = d / 720 + 1 / 120
    for term in (1 / 24, 1 / 6, 1 / 2):
        series = torch.addcmul(d.new_full((), term), series, d)
    series = series * d * d
    if _is_below(d, SERIES_BELOW[d.dtype]):
        return series
    return torch.where(d.abs() < SERIES_BELOW[d.dtype], series, torch.expm1(d) - d)


def is_readable(values: Tensor) -> bool:
    """True if values can be read now: a GPU would make the host wait for all that it has to do."""
    return values.device.type == "cpu"


def _is_below(values: Tensor, bound: float) -> bool:
    """True if all values are below `bound` in size and none is NaN. On a CPU the test is cheap and
    saves work in the usual case. Always False on a GPU, where the test would wait for the
    device."""
    if not is_readable(values) or not values.numel():
        return False
    return bool(values.detach().abs().amax() < bound)


def penalty(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    mask: Tensor | None = None,
    coef: float = 0.01,
    clip: float | None = None,
    mean: float | Tensor | None = None,
) -> Tensor:
    """A term for the advantages: it makes tokens rarer that the sampler finds likelier than the
    trainer does. It does not pull the trainer back: `pull` does.

    coef * (mean(diff) - diff) with diff = rollout - trainer, per token. In expectation, the policy
    gradient of -diff is minus the gradient of KL(rollout || trainer) in the sampler's log-probs,
    the trainer's held fixed. So it lowers the KL if an update moves the sampler as well: the two
    share weights and compute differently. A fixed sampler does not follow, and the KL grows.

    All [T] or [B, T], float32 nats; 0.0 where `mask` is False or a log-prob is not finite, and such
    tokens are not in the mean. clip: largest |diff| that counts. mean: mean of the clipped
    diff over the whole batch, where these are not all of its tokens. Without gradient.
    """
    d, is_valid = log_ratio(logprobs, rollout_logprobs, mask)
    diff = -d if clip is None else (-d).clamp(-clip, clip)
    if mean is None:
        mean = diff.sum(dtype=torch.float64) / is_valid.sum().clamp(min=1)
    return torch.where(is_valid, coef * (mean - diff), 0.0).to(d.dtype)


def pull(
    logprobs: Tensor, rollout_logprobs: Tensor, *, coef: float, clip: float | None = None
) -> Tensor:
    """A term of the loss that pulls the trainer back to the sampler: coef * k3, per token.

    Its mean gradient over the sampler's tokens is the gradient of coef * KL(rollout || trainer) in
    the trainer's log-probs, the sampler's held fixed. With r = trainer / rollout,

        grad k3 = (r - 1) grad log trainer,   E_rollout[r grad log trainer] = grad 1 = 0,
        E_rollout[grad k3] = -E_rollout[grad log trainer] = grad KL(rollout || trainer),

    and the r removes noise: where both sides agree, no token pulls. KL(trainer || rollout) needs
    weights, r * k3(-log r) as in `objectives.losses.reference_kl`, and the weights add noise.

    All [T] or [B, T], nats; float32, or float64 if both are. `logprobs` carry the gradient. 0.0
    where a log-prob is not finite. clip: largest |log r| that counts, at most 20. Beyond it a token
    has the gradient of a token at the bound, and not 0.

    Guard: tests/cpu/correction/test_kl_penalty.py
    """
    d, is_valid = log_ratio(logprobs, rollout_logprobs)
    bound = RATIO_LIMIT if clip is None else min(clip, RATIO_LIMIT)
    d, live = d.clamp(-bound, bound), torch.where(is_valid, logprobs, 0.0).to(d.dtype)
    return coef * (k3(d) + torch.expm1(d) * (live - live.detach()))


@takes_arrays
def support_bias(rollout_logprobs: Tensor, logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean(-log S), a float64 scalar, from log-probs alone, where the support is not known.

    rollout_logprobs: [T], renormalised over the kept tokens. logprobs: [T], the trainer's, over the
    whole vocabulary. Their difference is -log S, plus the mismatch of sampler and trainer. mask:
    [T] bool, the tokens drawn from a part of the vocabulary. Tokens without a finite log-prob on
    either side are left out; 0.0 if none is left.

    >>> half = torch.tensor([-1.0]) + torch.tensor([0.5]).log()
    >>> round(float(support_bias(torch.tensor([-1.0]), half)), 4)
    0.6931
    """
    d, is_valid = log_ratio(logprobs, rollout_logprobs, mask)
    return -d.sum(dtype=torch.float64) / is_valid.sum().clamp(min=1)
