"""Terms added to a policy loss so that the policy stays near a reference. Pure functions."""

from __future__ import annotations

import torch

from lockstep.correction import kl
from lockstep.errors import AlignmentError
from lockstep.objectives.config import KLEstimator
from lockstep.objectives.inputs import read_tokens

Tensor = torch.Tensor


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
    pi moves: the mean gradient of k1 is then 0, that of k2 right, and that of k3 the gradient of
    KL(reference || policy).

    Source: DeepSeek-V3.2 (arXiv 2512.02556), the unbiased KL estimate.
    Guard: tests/cpu/correction/test_unbiased_kl.py
    """
    if estimator != "unbiased":
        policy, reference = read_tokens(
            mask, logprobs=logprobs, reference_logprobs=reference_logprobs
        )
        d = (reference - policy).clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT)
        return kl.k2(d) if estimator == "k2" else kl.k3(d)
    if old_logprobs is None:
        raise AlignmentError(
            'the estimator "unbiased" weighs each token by its ratio to the policy that drew '
            "it: give old_logprobs, or take another estimator."
        )
    policy, old, reference = read_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, reference_logprobs=reference_logprobs
    )
    ratio = (policy - old).clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT).exp()
    return ratio * kl.k3((reference - policy).clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT))
