"""The stock-torch backend: fast, equal to other implementations to rounding.

# T tokens  B rows of a block  L its length  H query heads  G key heads  D head width
# Q new tokens per sequence  P pages  S page size  E experts  R token-expert pairs  V vocabulary
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F

from lockstep.ops import head, trace
from lockstep.ops.context import PackedContext, PagedContext, Support, take_rows
from lockstep.ops.head import log_softmax
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
        return _packed_attention(q, k, v, sinks, window, scale, context)
    return paged_attention(
        q, k, v, sinks=sinks, window=window, layer=layer, context=context,
        attend=partial(_attend, scale=scale), key_block=KEY_QUANTUM, key_quantum=KEY_QUANTUM,
    )  # fmt: skip


def _packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    scale: float,
    context: PackedContext,
) -> Tensor:
    """Rows of similar length as padded blocks. Padding stands after a row's real tokens, so the
    causal mask alone hides it, and its outputs are never read."""
    H, D = q_THD.shape[1:]
    repeat = H // k_TGD.shape[1]
    outs = []
    for block in context.blocks:

        def lay(x: Tensor, index: Tensor = block.token_index) -> Tensor:
            return take_rows(x, index).transpose(1, 2)  # [B, heads, L, D]

        q, k, v = lay(q_THD), lay(k_TGD), lay(v_TGD)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        if window is None or block.length <= window:
            out = _sink_attention(q, k, v, sinks_H, None, scale)
        else:
            out = _banded_attention(q, k, v, sinks_H, window, scale)
        outs.append(out.transpose(1, 2).reshape(-1, H, D))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if context.place_index is None else out[context.place_index]


def _banded_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int, scale: float
) -> Tensor:
    """A sliding window at cost O(L x window): queries in chunks of `window`, each over the keys of
    its own chunk and the one before. The first chunk has none before it: plain causal."""
    B, H, L, D = q.shape
    first = _sink_attention(
        q[:, :, :window], k[:, :, :window], v[:, :, :window], sinks, None, scale
    )
    chunks = math.ceil(L / window) - 1
    pad = (chunks + 1) * window - L
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))

    def fold(x: Tensor) -> Tensor:  # [B, H, n * window, D] -> [B * n, H, window, D]
        return x.reshape(B, H, -1, window, D).transpose(1, 2).reshape(-1, H, window, D)

    q_band = fold(q[:, :, window:])
    k_band = torch.cat([fold(k[:, :, :-window]), fold(k[:, :, window:])], 2)
    v_band = torch.cat([fold(v[:, :, :-window]), fold(v[:, :, window:])], 2)
    at_query = torch.arange(window, device=q.device)[:, None] + window
    at_key = torch.arange(2 * window, device=q.device)
    hidden = (at_key > at_query) | (at_key <= at_query - window)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    mask.masked_fill_(hidden, float("-inf"))
    band = _sink_attention(q_band, k_band, v_band, sinks, mask, scale)
    band = band.reshape(B, chunks, H, window, D).transpose(1, 2).reshape(B, H, -1, D)
    return torch.cat([first, band[:, :, : L - window]], 2)


class _FlashWithSinks(torch.autograd.Function):
    """Stock CPU flash attention, made exact for sinks in both directions.

    With L = logaddexp(lse, sink) the softmax over keys and sink is exp(s - L), so the output is the
    sinkless one times exp(lse - L). Handing the rescaled output and L to the stock backward gives
    exact dQ, dK, dV, since they use only exp(s - L) and dO . O; dsink = -sum exp(sink - L) dO . O.
    Rescaling by a detached lse leaves output, dV and dsink right and dQ, dK wrong by 28-55 %.
    Guard: tests/cpu/ops/test_attention.py
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, mask, scale):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        if sinks is not None:
            sink = sinks.to(lse.dtype)[:, None]
            total = torch.logaddexp(lse, sink)
            out = out * torch.exp(lse - total).to(out.dtype)[..., None]
            lse = total
            if trace.is_on():
                trace.record("sink_share", torch.exp(sink - lse).mean())
        ctx.save_for_backward(q, k, v, sinks, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, sinks, mask, out, lse = ctx.saved_tensors
        grads = flash_backward(grad_out, q, k, v, sinks, mask, out, lse, ctx.scale)
        return *grads, None, None


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV and dsinks by the stock CPU backward. q, k, v, out [B, H, L, D] of equal heads;
    lse [B, H, L] float32 of keys and sink together; mask additive, or None for causal. dsinks is
    None for sinks that want none."""
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    grad_sinks = None
    if sinks is not None and sinks.requires_grad:
        through = (grad_out * out).sum(-1).to(lse.dtype)
        share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        grad_sinks = -(share * through).sum((0, 2)).to(sinks.dtype)
    return grad_q, grad_k, grad_v, grad_sinks


def _sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float
) -> Tensor:
    """q, k, v [B, H, L, D] of equal heads; mask [L, keys] additive, or None for causal."""
    if q.device.type == "cpu":
        return _FlashWithSinks.apply(q, k, v, sinks, mask, scale)
    scores = _widen(q @ k.transpose(-1, -2)) * scale
    if mask is None:
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    else:
        scores = scores + mask
    return (_softmax_with_sinks(scores, sinks) @ v.to(scores.dtype)).to(q.dtype)


def _widen(x: Tensor) -> Tensor:
    """bfloat16 and float16 as float32: a softmax in fewer bits loses the small probabilities."""
    return x.float() if x.dtype.itemsize < 4 else x


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax over keys and one more logit per head that has no value. scores [B, H, Q, keys]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


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
