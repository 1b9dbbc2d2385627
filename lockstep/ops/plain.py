"""The stock-torch backend: fast, equal to other implementations to rounding.

# T tokens  B rows of a block  L its length  H query heads  G key heads  D head width
# Q new tokens per sequence  P pages  S page size  E experts  R token-expert pairs  V vocabulary
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lockstep.ops import trace
from lockstep.ops.context import (
    PackedContext,
    PagedBlock,
    PagedContext,
    ResidentRows,
    Support,
)

Tensor = torch.Tensor

MASK_TABLE_LENGTH = 1024  # 4 MiB of float32: longer sequences have their mask made in every step

HEAD_CHUNK_BYTES = 64 << 20  # logits of one chunk; a chunk is recomputed in backward, not kept


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


class _ExpertLinear(torch.autograd.Function):
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
    return _ExpertLinear.apply(x, weight, bias, tokens_per_expert)


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
    return _paged_attention(q, k, v, sinks, window, scale, layer, context)


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
            return x[index].transpose(1, 2)  # [B, heads, L, D]

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
        grad_q, grad_k, grad_v = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
            )
        )
        grad_sinks = None
        if sinks is not None:
            through = (grad_out * out).sum(-1).to(lse.dtype)
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            grad_sinks = -(share * through).sum((0, 2)).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


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


def _paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    scale: float,
    layer: int,
    context: PagedContext,
) -> Tensor:
    """Queries of one key head stand together as rows of one matrix: [H/G * Q, D]."""
    H, D = q_THD.shape[1:]
    keys, values = context.keys[layer], context.values[layer]
    G = keys.shape[0]
    keys.view(G, -1, D).index_copy_(1, context.write_index, k_TGD.transpose(0, 1))
    values.view(G, -1, D).index_copy_(1, context.write_index, v_TGD.transpose(0, 1))
    outs = []
    for block in context.blocks:
        B, Q = block.positions.shape
        if block.token_index is None:
            q = q_THD[block.first_token : block.first_token + B * Q]
        else:
            q = q_THD[block.token_index.view(-1)]
        if block.resident is not None:
            tokens = slice(block.first_token, block.first_token + B)
            k, v = _resident_rows(block, block.resident, k_TGD[tokens], v_TGD[tokens], layer)
            out = _paged_softmax(q.reshape(B * G, -1, D), k, v, sinks_H, window, scale, block)
            outs.append(out.view(B, H, D))
        else:
            k, v = _read_pages(keys, block), _read_pages(values, block)
            q = q.view(B, Q, G, -1, D).permute(2, 0, 3, 1, 4).reshape(G * B, -1, D)
            out = _paged_softmax(q, k, v, sinks_H, window, scale, block)
            out = out.view(G, B, -1, Q, D).permute(1, 3, 0, 2, 4)
            outs.append(out.reshape(B * Q, H, D))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if context.place_index is None else out[context.place_index]


def _paged_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    scale: float,
    block: PagedBlock,
) -> Tensor:
    """q [N, H/G * Q, D], k and v [N, num_keys, D] -> like q. N is B * G if the block is resident,
    else G * B."""
    wide = torch.float32 if q.dtype.itemsize < 4 else q.dtype
    B, Q = block.positions.shape
    G = len(q) // B
    mask = _paged_mask(block, window, groups=G, repeat=q.shape[1] // Q, dtype=wide)
    if q.dtype == wide:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).to(wide).mul_(scale).add_(mask)
    if sinks_H is None:
        probs = scores.softmax(-1)
    else:
        sinks = sinks_H.to(wide).view(G, 1, -1, 1)
        if block.resident is not None:
            sinks = sinks.transpose(0, 1)
        shape = (B, G) if block.resident is not None else (G, B)
        sinks = sinks.expand(*shape, -1, Q).reshape(B * G, -1, 1)
        probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.bmm(probs.to(v.dtype), v)


def _resident_rows(
    block: PagedBlock, rows: ResidentRows, k_BGD: Tensor, v_BGD: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [B * G, num_keys, D] in place, the new ones written first."""
    B, G, D = k_BGD.shape
    if (views := rows.memo.get((layer, B, block.num_keys))) is None:
        views = rows.memo[layer, B, block.num_keys] = [
            (cache[layer].view(-1, D), cache[layer, :B].view(B * G, -1, D)[:, : block.num_keys])
            for cache in (rows.keys, rows.values)
        ]
    (all_k, k), (all_v, v) = views
    all_k.index_copy_(0, rows.write_index, k_BGD.reshape(-1, D))
    all_v.index_copy_(0, rows.write_index, v_BGD.reshape(-1, D))
    return k, v


def _read_pages(cache_GPSD: Tensor, block: PagedBlock) -> Tensor:
    """[G * B, num_keys, D]: the keys of each sequence of the block, in order."""
    read = cache_GPSD.index_select(1, block.pages.reshape(-1))
    rows = len(cache_GPSD) * len(block.pages)
    return read.view(rows, -1, read.shape[-1])[:, : block.num_keys]


def _paged_mask(
    block: PagedBlock, window: int | None, *, groups: int, repeat: int, dtype: torch.dtype
) -> Tensor:
    """[N, repeat * Q, num_keys]: 0 where a query sees a key, else -inf. N: `_paged_softmax`'s."""
    key = ("mask", window, dtype)
    if key not in block.memo and block.resident is not None:
        table = _mask_table(block.resident, window, dtype)
        if table is not None:
            at = block.positions.expand(-1, groups * repeat).reshape(-1)
            mask = table.index_select(0, at)[:, : block.num_keys]
            block.memo[key] = mask.view(len(block.positions) * groups, repeat, -1)
    if key not in block.memo:
        at_query = block.positions[:, :, None]
        at_key = torch.arange(block.num_keys, device=at_query.device)
        hidden = at_key > at_query
        if window is not None:
            hidden |= at_key <= at_query - window
        B, Q, L = hidden.shape
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, float("-inf"))
        if block.resident is not None:
            mask = mask.view(B, 1, 1, Q, L).expand(B, groups, repeat, Q, L)
        else:
            mask = mask.view(1, B, 1, Q, L).expand(groups, B, repeat, Q, L)
        block.memo[key] = mask.reshape(groups * B, -1, L)
    return block.memo[key]


def _mask_table(rows: ResidentRows, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """[N, N]: the mask of a query at each position; None where it would be large."""
    length = rows.keys.shape[3]
    if length > MASK_TABLE_LENGTH:
        return None
    key = ("mask", window, dtype)
    if key not in rows.memo:
        at = torch.arange(length, device=rows.keys.device)
        hidden = at > at[:, None]
        if window is not None:
            hidden |= at <= at[:, None] - window
        table = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
        rows.memo[key] = table.masked_fill_(hidden, float("-inf"))
    return rows.memo[key]


# -- log-prob head ----------------------------------------------------------------------------


def log_softmax(logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, float("-inf"))
    return torch.log_softmax(logits, -1)


class _LogProbs(torch.autograd.Function):
    """Log-prob and entropy without a [T, V] tensor: rows in chunks, and again in backward.

    Over a support, the probability of an id outside is 0, and with it its part of the entropy and
    of every gradient: nothing else changes. Its log-prob is written as 0 where it is a factor of
    that, since 0 * -inf is NaN.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature, rows, support):
        logprobs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        kept = None
        for at in range(0, len(ids), rows):
            part = slice(at, at + rows)
            choices = None if support is None else support.mask(part, len(weight))
            logits = F.linear(hidden[part], weight)
            logp = log_softmax(logits, temperature=temperature, kept=choices)
            logprobs[part] = logp.gather(1, ids[part, None])[:, 0]
            _clear_outside(logp, choices)
            entropy[part] = -(_probs(logp, choices) * logp).sum(-1)
            kept = logp
        # A single chunk is no larger than what one chunk takes in backward anyway: keep it.
        ctx.save_for_backward(hidden, weight, ids, entropy, kept if len(ids) <= rows else None)
        ctx.temperature, ctx.rows, ctx.support = temperature, rows, support
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, ids, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        has_entropy_grad = bool((grad_entropy != 0).any())
        for at in range(0, len(ids), ctx.rows):
            part = slice(at, at + ctx.rows)
            choices = None if ctx.support is None else ctx.support.mask(part, len(weight))
            logp = kept
            if logp is None:
                logits = F.linear(hidden[part], weight)
                logp = log_softmax(logits, temperature=ctx.temperature, kept=choices)
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
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            grad_weight.add_(torch.mm(grad.t(), hidden[part]))
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _clear_outside(logp: Tensor, choices: Tensor | None) -> None:
    """0 in place of -inf outside of what each token was drawn from. It also spares the exponential
    a case in which it is several times slower."""
    if choices is not None:
        logp.masked_fill_(~choices, 0.0)


def _probs(logp: Tensor, choices: Tensor | None) -> Tensor:
    """exp(logp), and 0 outside."""
    probs = logp.exp()
    return probs if choices is None else probs.masked_fill_(~choices, 0.0)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    rows = max(1, HEAD_CHUNK_BYTES // (4 * weight.shape[0]))
    return _LogProbs.apply(hidden, weight, ids, temperature, rows, support)
