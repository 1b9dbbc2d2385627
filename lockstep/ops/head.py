"""The log-prob head: what sampler and trainer call alike, over any backend's `linear`.

# T tokens  D model width  V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.ops.context import Support

Tensor = torch.Tensor
Linear = Callable[[Tensor, Tensor], Tensor]
LogSoftmax = Callable[..., Tensor]

CHUNK_BYTES = 64 << 20  # logits of one chunk; a chunk is recomputed in backward, not kept
ROW_QUANTUM = 16  # rows of a chunk are a multiple of this, so that no backend has to pad them


def log_softmax(logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    """See `ops.api.log_softmax`."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, float("-inf"))
    return torch.log_softmax(logits, -1)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    linear: Linear,
    log_softmax: LogSoftmax = log_softmax,
    gradient_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """See `ops.api.log_probs`. linear and log_softmax: the backend's own, which must give the same
    numbers whether or not a gradient is wanted. gradient_dtype: what backward multiplies in; None
    is that of hidden."""
    rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    if rows > ROW_QUANTUM:
        rows -= rows % ROW_QUANTUM
    return _LogProbs.apply(
        hidden, weight, ids, temperature, rows, support, linear, log_softmax,
        gradient_dtype or hidden.dtype,
    )  # fmt: skip


class _LogProbs(torch.autograd.Function):
    """Log-prob and entropy without a [T, V] tensor: rows in chunks, and again in backward.

    Over a support, the probability of an id outside is 0, and with it its part of the entropy and
    of every gradient: nothing else changes. Its log-prob is written as 0 where it is a factor of
    that, since 0 * -inf is NaN.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, ids, temperature, rows, support, linear, log_softmax, gradient_dtype
    ):
        logprobs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        kept = None
        for at in range(0, len(ids), rows):
            part = slice(at, at + rows)
            choices = None if support is None else support.mask(part, len(weight))
            logits = linear(hidden[part], weight)
            logp = log_softmax(logits, temperature=temperature, kept=choices)
            logprobs[part] = logp.gather(1, ids[part, None])[:, 0]
            _clear_outside(logp, choices)
            entropy[part] = -(_probs(logp, choices) * logp).sum(-1)
            kept = logp
        # A single chunk is no larger than what one chunk takes in backward anyway: keep it.
        ctx.save_for_backward(hidden, weight, ids, entropy, kept if len(ids) <= rows else None)
        ctx.temperature, ctx.rows, ctx.support = temperature, rows, support
        ctx.linear, ctx.log_softmax, ctx.gradient_dtype = linear, log_softmax, gradient_dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, ids, entropy, kept = ctx.saved_tensors
        wide_hidden, wide_weight = hidden.to(ctx.gradient_dtype), weight.to(ctx.gradient_dtype)
        grad_hidden = torch.empty_like(wide_hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        has_entropy_grad = bool((grad_entropy != 0).any())
        for at in range(0, len(ids), ctx.rows):
            part = slice(at, at + ctx.rows)
            choices = None if ctx.support is None else ctx.support.mask(part, len(weight))
            logp = kept
            if logp is None:
                logits = ctx.linear(hidden[part], weight)
                logp = ctx.log_softmax(logits, temperature=ctx.temperature, kept=choices)
                _clear_outside(logp, choices)
            grad = _probs(logp, choices)
            if has_entropy_grad:  # dH/dlogit_j = -p_j (log p_j + H)
                through = logp.add(entropy[part, None]).mul_(grad_entropy[part, None])
                through.add_(grad_logprobs[part, None])
                grad.mul_(through).neg_()
            else:
                grad.mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, ids[part, None], grad_logprobs[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad = grad.to(ctx.gradient_dtype)
            torch.mm(grad, wide_weight, out=grad_hidden[part])
            grad_weight.add_(torch.mm(grad.t(), wide_hidden[part]))
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), *[None] * 7


def _clear_outside(logp: Tensor, choices: Tensor | None) -> None:
    """0 in place of -inf outside of what each token was drawn from. It also spares the exponential
    a case in which it is several times slower."""
    if choices is not None:
        logp.masked_fill_(~choices, 0.0)


def _probs(logp: Tensor, choices: Tensor | None) -> Tensor:
    """exp(logp), and 0 outside."""
    probs = logp.exp()
    return probs if choices is None else probs.masked_fill_(~choices, 0.0)
