"""What is added to a policy loss so that the policy stays near a reference. Pure functions."""

from __future__ import annotations

import torch

from lockstep.correction import kl
from lockstep.errors import AlignmentError
from lockstep.objectives.config import KLEstimator

Tensor = torch.Tensor


def reference_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    estimator: KLEstimator = "unbiased",
    old_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """An estimate of KL(policy || reference) per token, as a loss; of tokens that the policy drew.

    All [T] or [B, T] float32 nats; `logprobs` carries gradient. 0.0 and no gradient where `mask` is
    False. old_logprobs: of the policy that drew the tokens; "unbiased" needs them, the others do
    not read them. What the estimators are as losses is said at `ObjectiveConfig.kl_estimator`.
    Raises AlignmentError if a column is missing or of another shape.
    """
    if estimator == "unbiased":
        if old_logprobs is None:
            raise AlignmentError(
                'the estimator "unbiased" weighs each token by its ratio to the policy that drew '
                "it: give old_logprobs, or take another estimator."
            )
        return kl.unbiased_kl(logprobs, old_logprobs, reference_logprobs, mask)
    for name, other in {"reference_logprobs": reference_logprobs, "mask": mask}.items():
        if other is not None and other.shape != logprobs.shape:
            raise AlignmentError(
                f"logprobs have the shape {list(logprobs.shape)} and {name} {list(other.shape)}: "
                "each is one number per token. Shifted twice, or not at all?"
            )
    policy, reference = (
        x if x.dtype == torch.float64 else x.float()
        for x in (logprobs, reference_logprobs.detach())
    )
    if mask is not None:  # before exp: the gradient of what is not finite is NaN even times 0
        policy, reference = (torch.where(mask != 0, x, 0.0) for x in (policy, reference))
    d = (reference - policy).clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT)
    return kl.k2(d) if estimator == "k2" else kl.k3(d)
