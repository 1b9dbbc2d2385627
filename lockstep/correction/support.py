"""Top-p and top-k cut the distribution that tokens are drawn from: what the trainer makes of it.

With q = p / S on the tokens that were kept, and S their mass under p, a trainer that takes p for q
follows the gradient of log q + log S: every token with a positive advantage also makes what was
kept more probable. Dividing by S again, over the ids that the sampler recorded, removes that.

# T tokens  V vocabulary
"""

from __future__ import annotations

import torch

from lockstep.correction import kl
from lockstep.errors import AlignmentError
from lockstep.types import Ragged

Tensor = torch.Tensor


def renormalized_logprobs(
    logits: Tensor, ids: Tensor, support: Ragged, *, temperature: float = 1.0
) -> Tensor:
    """[T] log-probs of `ids` under softmax(logits / temperature) over each token's support alone.

    logits [T, V] floating, ids [T] int64; an empty entry of the support is the whole vocabulary.
    Differentiable; float32, or float64 for float64 logits. Raises AlignmentError if the lengths
    differ or an id is not in its support. `ops.log_probs` gives the same from hidden states,
    without a [T, V] tensor.

    >>> logits = torch.zeros(2, 4)
    >>> support = Ragged.of([[1, 3], []])
    >>> renormalized_logprobs(logits, torch.tensor([3, 0]), support).exp().tolist()
    [0.5, 0.25]
    """
    logp = _scaled(logits, temperature)
    kept = _mask(logits, ids, support)
    logp = torch.log_softmax(logp.masked_fill(~kept, float("-inf")), -1)
    return logp.gather(1, ids[:, None])[:, 0]


def kept_log_mass(
    logits: Tensor, ids: Tensor, support: Ragged, *, temperature: float = 1.0
) -> Tensor:
    """[T] log S <= 0: how much of softmax(logits / temperature) each token's support holds.

    Arguments and errors as in `renormalized_logprobs`; the log-prob over the whole vocabulary is
    that one plus this.
    """
    logp = torch.log_softmax(_scaled(logits, temperature), -1)
    kept = _mask(logits, ids, support)
    return logp.masked_fill(~kept, float("-inf")).logsumexp(-1).clamp(max=0.0)


def support_bias(rollout_logprobs: Tensor, logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean(-log S), a float64 scalar, from log-probs alone: where the support is not known.

    rollout_logprobs: [T], under the distribution that was drawn from, S divided out. logprobs: [T],
    the trainer's, over the whole vocabulary. Their difference is -log S, and besides the mismatch
    of sampler and trainer. mask: [T] bool, the tokens that were drawn from a part of the
    vocabulary.
    Tokens without a finite log-prob on either side are left out; 0.0 if none is left.
    """
    log_ratio, is_valid = kl.log_ratio(logprobs, rollout_logprobs, mask)
    return -log_ratio.sum(dtype=torch.float64) / is_valid.sum().clamp(min=1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature


def _mask(logits: Tensor, ids: Tensor, support: Ragged) -> Tensor:
    """[T, V] bool: what each token was drawn from."""
    num_tokens, vocab_size = logits.shape
    if len(ids) != num_tokens or len(support) != num_tokens:
        raise AlignmentError(
            f"logits of {num_tokens} tokens, {len(ids)} ids, a support of {len(support)} tokens: "
            "each has one entry per token. Shifted twice, or not at all?"
        )
    values = torch.tensor(support.values, dtype=torch.int64)
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
        raise AlignmentError(
            f"the support has ids from {int(values.min())} to {int(values.max())}, the logits end "
            f"at {vocab_size - 1}. Another model's sampler?"
        )
    sizes = torch.tensor(support.sizes)
    kept = torch.zeros(num_tokens, vocab_size, dtype=torch.bool)
    kept[torch.repeat_interleave(sizes), values] = True
    kept[sizes == 0] = True
    kept = kept.to(logits.device)
    is_inside = kept.gather(1, ids[:, None])[:, 0]
    if not bool(is_inside.all()):
        at = int(is_inside.int().argmin())
        raise AlignmentError(
            f"token {at} (id {int(ids[at])}) is not in its support of {int(sizes[at])} ids: it "
            "cannot have been drawn from them. A shifted row?"
        )
    return kept
