"""The stock-torch backend: fast, equal to other implementations to rounding.

# T tokens  H query heads  G key heads  D head width  Q new tokens per sequence
# P pages  S page size  E experts  R token-expert pairs  V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from lockstep.ops import flex, head
from lockstep.ops.context import Coefficients, PackedContext, PagedContext, Support
from lockstep.ops.head import log_softmax
from lockstep.ops.packed import SinkAttention
from lockstep.ops.paged import paged_attention

__all__ = [
    "attention", "combine", "expert_linear", "expert_linear_backward", "linear", "log_probs",
    "log_softmax", "name", "resident_dtype", "rms_norm", "rope", "route", "swiglu",
    "swiglu_clamped",
]  # fmt: skip

Tensor = torch.Tensor

name = "plain"

ACTIVATION_CHUNK = 1 << 19  # activations computed at once: bounds what the temporaries take
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
    if torch.is_grad_enabled():
        return Activation.apply(gate_up, alpha, limit, _swiglu_clamped)
    return _swiglu_clamped(gate_up, alpha, limit)


def _swiglu_clamped(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))


class Activation(torch.autograd.Function):
    """gate * sigmoid(alpha * gate) times up, or clamped, times up + 1: keeps only what came in.

    compute: called as compute(gate_up, alpha, limit). Backward is of these formulas, in chunks.
    """

    @staticmethod
    def forward(ctx, gate_up, alpha, limit, compute):
        ctx.save_for_backward(gate_up)
        ctx.alpha, ctx.limit = alpha, limit
        return compute(gate_up, alpha, limit)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        grad_in = torch.empty_like(gate_up)
        for part in activation_chunks(gate_up):
            (gate, up), g = gate_up[part].chunk(2, -1), grad[part]
            grad_gate, grad_up = grad_in[part].chunk(2, -1)
            scaled = (gate if limit is None else gate.clamp(max=limit)) * alpha
            through_gate = g * (up if limit is None else up.clamp(-limit, limit) + 1)
            through_gate = torch.ops.aten.silu_backward(through_gate, scaled)
            through_up = F.silu(scaled).mul_(g)
            if alpha != 1.0:
                through_up /= alpha
            if limit is not None:
                through_gate.masked_fill_(gate > limit, 0.0)
                through_up.masked_fill_(up.abs() > limit, 0.0)
            grad_gate.copy_(through_gate)
            grad_up.copy_(through_up)
        return grad_in, None, None, None


def activation_chunks(gate_up: Tensor) -> Iterator[slice]:
    rows = max(1, 2 * ACTIVATION_CHUNK // gate_up[0].numel()) if len(gate_up) else 1
    yield from (slice(at, at + rows) for at in range(0, len(gate_up), rows))


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


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: list[int]
) -> Tensor:
    if _is_grouped(x, weight):
        return grouped_linear(x, weight, bias, tokens_per_expert)
    rows = tokens_per_expert[0]
    if rows and tokens_per_expert.count(rows) == len(weight):
        x = x.view(len(weight), rows, -1)
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2)).flatten(0, 1)
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)).flatten(0, 1)
    out = x.new_empty(len(x), weight.shape[1])
    for expert, part in rows_by_expert(tokens_per_expert):
        if bias is None:
            torch.mm(x[part], weight[expert].t(), out=out[part])
        else:
            torch.addmm(bias[expert], x[part], weight[expert].t(), out=out[part])
    return out


def expert_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    tokens_per_expert: list[int],
    *,
    grad_weight: Tensor | None,
) -> Tensor:
    if _is_grouped(x, weight):
        return grouped_linear_backward(grad, x, weight, tokens_per_expert, grad_weight)
    grad_x = torch.empty_like(x)
    for expert, part in rows_by_expert(tokens_per_expert):
        torch.mm(grad[part], weight[expert].to(grad.dtype), out=grad_x[part])
        if grad_weight is None:
            continue
        if grad_weight.dtype == grad.dtype:
            grad_weight[expert].addmm_(grad[part].t(), x[part])
        else:
            grad_weight[expert] += grad[part].t() @ x[part]
    return grad_x


def rows_by_expert(tokens_per_expert: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of those that have any."""
    at = 0
    for expert, count in enumerate(tokens_per_expert):
        if count:
            yield expert, slice(at, at + count)
            at += count


# One kernel for all experts, however many rows each has. Source: torch.nn.functional.grouped_mm of
# torch 2.13, which takes rows of whole 16 bytes.


def _is_grouped(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    return weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: list[int]
) -> Tensor:
    """See `ops.api.expert_linear`."""
    counts = torch.tensor(tokens_per_expert, device=x.device)
    stops = counts.cumsum(0, dtype=torch.int32)
    out = F.grouped_mm(x, weight.transpose(1, 2), offs=stops)
    return out if bias is None else out.add_(bias.repeat_interleave(counts, 0, output_size=len(x)))


def grouped_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    tokens_per_expert: list[int],
    grad_weight: Tensor | None,
) -> Tensor:
    """See `ops.api.expert_linear_backward`."""
    stops = torch.tensor(tokens_per_expert, device=x.device).cumsum(0, dtype=torch.int32)
    if grad_weight is not None:
        grad_weight += F.grouped_mm(grad.t(), x, offs=stops)
    return F.grouped_mm(grad, weight, offs=stops)


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
    coefficients: Coefficients | None = None,
) -> tuple[Tensor, Tensor]:
    return head.log_probs(
        hidden,
        weight,
        ids,
        linear=linear,
        temperature=temperature,
        support=support,
        coefficients=coefficients,
    )
