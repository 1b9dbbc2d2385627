"""The stock-torch backend: fast, equal to other implementations to rounding.

# T tokens  H query heads  G key heads  D head width  Q new tokens per sequence
# P pages  S page size  E experts  R token-expert pairs  V vocabulary
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from lockstep.ops import flex, head
from lockstep.ops.context import PackedContext, PagedContext, Support
from lockstep.ops.head import log_softmax
from lockstep.ops.packed import SinkAttention
from lockstep.ops.paged import paged_attention

__all__ = [
    "attention", "combine", "expert_linear", "linear", "log_probs", "log_softmax", "name",
    "resident_dtype", "rms_norm", "rope", "route", "swiglu", "swiglu_clamped",
]  # fmt: skip

Tensor = torch.Tensor

name = "plain"

KEY_QUANTUM = 16  # keys looked at are a multiple of this: what fills a vector register


def resident_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    # Hugging Face's order of roundings: normalise in float32, round, then scale.
    normed = F.rms_norm(x.float(), weight.shape[-1:], None, eps)
    return weight * normed.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_clamped(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # roll by half the width swaps the halves; sin carries the minus of rotate_half.
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos.to(x.dtype), x.roll(half, -1), sin.to(x.dtype))


def route(
    logits: Tensor,
    num_active: int,
    *,
    experts: Tensor | None = None,
    is_normalized: bool = True,
) -> tuple[Tensor, Tensor]:
    if experts is None:
        top, experts = logits.topk(num_active, -1)
    else:
        top = logits.gather(-1, experts)
    if is_normalized:
        return top.softmax(-1), experts
    return _widen(logits).softmax(-1).gather(-1, experts).to(logits.dtype), experts


def combine(out: Tensor, weights: Tensor) -> Tensor:
    return (out * weights[..., None]).sum(1)


class ExpertLinear(torch.autograd.Function):
    """One GEMM per expert on the rows that chose it. Backward writes each expert's gradient into
    its slice: indexing weight[e] under autograd would fill a gradient of all experts each time.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tokens_per_expert):
        out = x.new_empty(x.shape[0], weight.shape[1])
        at = 0
        for expert, count in enumerate(tokens_per_expert):
            if count:
                rows = slice(at, at + count)
                if bias is None:
                    torch.mm(x[rows], weight[expert].t(), out=out[rows])
                else:
                    torch.addmm(bias[expert], x[rows], weight[expert].t(), out=out[rows])
                at += count
        ctx.save_for_backward(x, weight)
        ctx.tokens_per_expert = tokens_per_expert
        ctx.has_bias = bias is not None
        return out

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)
        grad_bias = weight.new_zeros(weight.shape[:2]) if ctx.has_bias else None
        at = 0
        for expert, count in enumerate(ctx.tokens_per_expert):
            if count:
                rows = slice(at, at + count)
                torch.mm(grad_out[rows], weight[expert], out=grad_x[rows])
                torch.mm(grad_out[rows].t(), x[rows], out=grad_weight[expert])
                if grad_bias is not None:
                    torch.sum(grad_out[rows], 0, out=grad_bias[expert])
                at += count
        return grad_x, grad_weight, grad_bias, None


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: list[int]
) -> Tensor:
    rows = tokens_per_expert[0]
    if rows and not torch.is_grad_enabled() and tokens_per_expert.count(rows) == len(weight):
        x = x.view(len(weight), rows, -1)
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2)).flatten(0, 1)
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)).flatten(0, 1)
    return ExpertLinear.apply(x, weight, bias, tokens_per_expert)


# -- attention --------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
    layer: int,
    context: PackedContext | PagedContext,
) -> Tensor:
    if isinstance(context, PackedContext):
        if q.device.type == "cpu":
            return SinkAttention.apply(q, k, v, sinks, window, scale, context)  # pyright: ignore
        return flex.attend(q, k, v, sinks, window, scale, context)
    return paged_attention(
        q, k, v, sinks=sinks, window=window, layer=layer, context=context,
        attend=partial(_attend, scale=scale), key_block=KEY_QUANTUM, key_quantum=KEY_QUANTUM,
    )  # fmt: skip


def _widen(x: Tensor) -> Tensor:
    """bfloat16 and float16 as float32: a softmax in fewer bits loses the small probabilities."""
    return x.float() if x.dtype.itemsize < 4 else x


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, *, scale: float
) -> Tensor:
    """See `paged.Attend`."""
    if q.dtype == mask.dtype:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).to(mask.dtype).mul_(scale).add_(mask)
    if sinks is None:
        probs = scores.softmax(-1)
    else:
        probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.bmm(probs.to(v.dtype), v)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    return head.log_probs(
        hidden, weight, ids, linear=linear, temperature=temperature, support=support
    )
