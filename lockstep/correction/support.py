"""The bias of a trainer that ignores top-p and top-k.

With q = p / S on the tokens that were kept, and S their mass under p, a trainer that takes p for q
follows the gradient of log q + log S: every token with a positive advantage also makes the kept
tokens more probable. `ops.log_probs` over a recorded support divides by S and has no such bias.
"""

from __future__ import annotations

import torch

from lockstep.correction import kl

Tensor = torch.Tensor


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
    log_ratio, is_valid = kl.log_ratio(logprobs, rollout_logprobs, mask)
    return -log_ratio.sum(dtype=torch.float64) / is_valid.sum().clamp(min=1)
