"""Batch-invariant ops for CPUs: a token's numbers depend on that token's own prefix alone.

They do not depend on how many rows run with it, on their order, on chunks, pages or packing. So a
decode step of the engine and the trainer's packed forward give the same bits, and their KL is 0.
This holds for the forward; backward is stock.

Places where stock torch depends on the batch, and the replacement here:

    GEMMs of few rows (other kernels, other orders)    rows padded to a quantum; packed weights
    small GEMMs on several threads (a sum is split)    outputs padded; a single product halved
    silu, sigmoid (vector body and tail round apart)   exp, add, divide: each the same in both
    attention (order by chunk, cache and batch)        fixed blocks of keys, summed left to right
    experts (a GEMM of few rows; index_add)            the same GEMM rule; summed in slot order

The libraries promise none of this: `ops.selftest` tests it for a model's shapes, and the trainer
checks every token.   Guard: tests/cpu/ops/test_invariant.py

# T tokens  B rows of a block  L its length  Q queries of a row
# H query heads  G key heads  D head width
# M GEMM rows  K inner width  N outputs  E experts  R token-expert pairs  A active experts
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lockstep.ops import packed
from lockstep.ops.base import (
    ACTIVATION_CHUNK,
    GELU_CUBIC,
    GELU_SLOPE,
    Counts,
    GemmOps,
    activation_chunks,
    on_host,
    rows_by_expert,
)
from lockstep.ops.context import KEY_BLOCK, AttentionSpec, PackedContext, PagedContext, sum_dtype
from lockstep.ops.onednn import MANY_ROWS, packed_linear
from lockstep.ops.paged import PagedKernel, causal_mask, paged_attention, sink_rows

Tensor = torch.Tensor

QUERY_TILE = 128  # most queries that attend together: equal to the keys of a block
LEAST_TILE = 16  # fewest: below it, extra calls cost more than scores gain by staying in a cache
TILE_SCORES = 1 << 20  # scores held at once, 4 MiB: smaller tiles leave a second thread idle
BATCHED_ROWS = 64  # experts of more rows fill a product of their own
BATCHED_WIDTH = 8  # narrower weights take other kernels in a batched product than in a single one
LEAST_ROWS = 4  # kernels for fewer differ occasionally, even where a test finds no difference
VECTOR = 16  # float32 numbers in a register of AVX-512, the widest


class Packing(NamedTuple):
    """How the GEMMs of one shape of weight run over oneDNN's layout."""

    dtype: torch.dtype
    """bfloat16 or float32: operands are cast to it."""
    rows: int = LEAST_ROWS
    """Rows are padded to a multiple of this. MANY_ROWS: and each call gets this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings that make a machine's GEMMs invariant; found by `ops.selftest`."""

    row_quantum: int = LEAST_ROWS
    """Rows of every GEMM are padded to a multiple of this."""
    head_quantum: int = LEAST_ROWS
    """Query rows of one key head are padded to a multiple of this in attention."""
    key_quantum: int = 16
    """Attention reads a multiple of this many keys: it fills a vector register."""
    packed: Mapping[tuple[int, ...], Packing] = field(default_factory=dict)
    """Shapes [N, K] of weights whose GEMMs read them packed. The self-test tries each shape of a
    model: a kernel may split its sums over threads, as it does for large K and small N."""


def ask_for_reproducible_gemm() -> None:
    """Asks Intel's MKL for sums whose order does not depend on rows or threads.

    MKL reads the setting once, at the first GEMM of the process. Set later it has no effect, and
    the self-test finds a larger row quantum, or none. Costs nothing on large GEMMs. A setting of
    the user's own is kept. Other libraries ignore it.
    Source: oneMKL developer guide, "Conditional Numerical Reproducibility", strict mode.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def is_widened(dtype: torch.dtype) -> bool:
    """True if GEMMs of this dtype are computed in float32 and rounded once at the end.

    Sums in float16 overflow. Kernels in the CPU's own bfloat16 give a row other bits in another
    batch, and without that arithmetic float32 is several times as fast. `Rules.packed` is the
    exception.
    """
    return dtype in (torch.bfloat16, torch.float16)


class InvariantOps(GemmOps):
    """`Ops` whose forward does not depend on the batch. The inherited `route` and `log_softmax` do
    not either: they handle each row by itself."""

    name = "invariant"
    key_block = KEY_BLOCK

    def __init__(self, rules: Rules | None = None) -> None:
        super().__init__()
        self.rules = rules or Rules()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rules,)

    def describe_gemm(self, dtype: torch.dtype) -> str:
        packings = sorted({(str(p.dtype), p.rows) for p in self.rules.packed.values()})
        found = [f"{name.removeprefix('torch.')} packed in {rows} rows" for name, rows in packings]
        return " and ".join(found) or ("float32" if is_widened(dtype) else "native")

    def gradient_dtype(self, dtype: torch.dtype, weight: Tensor | None = None) -> torch.dtype:
        """float32 where the forward computes in it."""
        packing = None if weight is None or dtype != weight.dtype else self.packing_of(weight)
        if packing is not None:
            return packing.dtype
        return torch.float32 if is_widened(dtype) else dtype

    # -- GEMMs --------------------------------------------------------------------------------

    def gemm(
        self,
        x_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        *,
        owner: Tensor | None = None,
        index: int = 0,
    ) -> Tensor:
        """owner, index: see `PackedWeights.of`."""
        (M, dtype), N, packing = (len(x_MK), x_MK.dtype), len(weight_NK), self.packing_of(weight_NK)
        extra = -M % (packing.rows if packing else self.rules.row_quantum)
        wide = packing.dtype if packing else torch.float32 if is_widened(dtype) else dtype
        x_MK = (F.pad(x_MK, (0, 0, 0, extra)) if extra else x_MK).to(wide)
        bias_N = None if bias_N is None else bias_N.to(wide)
        if packing:
            packed = self.packed.of(weight_NK, wide, owner, index)
            parts = x_MK.split(MANY_ROWS) if packing.rows == MANY_ROWS else [x_MK]
            outs = [packed_linear(part, packed, bias_N) for part in parts]
            out = outs[0] if len(outs) == 1 else torch.cat(outs)
        else:
            if (missing := _least_outputs(M + extra) - N) > 0:
                weight_NK = F.pad(weight_NK, (0, 0, 0, missing))
                bias_N = None if bias_N is None else F.pad(bias_N, (0, missing))
            out = F.linear(x_MK, weight_NK.to(wide), bias_N)
        return out[:M, :N].to(dtype)

    def packing_of(self, weight_NK: Tensor) -> Packing | None:
        """How products with this weight are packed; None if they are not, or would round it."""
        packing = self.rules.packed.get(tuple(weight_NK.shape))
        is_exact = packing is not None and packing.dtype in (torch.float32, weight_NK.dtype)
        return packing if is_exact else None

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.shape[1]
        if extra := -rows % self.rules.head_quantum:
            return _product(F.pad(x, (0, 0, 0, extra)), y)[:, :rows]
        return _product(x, y)

    def expert_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Counts
    ) -> Tensor:
        x_RK, weight_ENK, bias_EN, counts = x, weight, bias, on_host(tokens_per_expert)
        rows, (E, N, K) = counts[0], weight_ENK.shape
        wide = torch.float32 if is_widened(x_RK.dtype) else x_RK.dtype
        is_even = 0 < rows <= BATCHED_ROWS and counts.count(rows) == E
        is_batched = min(N, K) >= BATCHED_WIDTH and (N, K) not in self.rules.packed
        if is_even and is_batched and N >= VECTOR:
            x_EMK = F.pad(x_RK.view(E, rows, K), (0, 0, 0, -rows % self.rules.row_quantum))
            bias_E1N = None if bias_EN is None else bias_EN[:, None].to(wide)
            weight_EKN = weight_ENK.transpose(1, 2).to(wide)
            out = _product(x_EMK.to(wide), weight_EKN, added=bias_E1N)
            return out[:, :rows].reshape(len(x_RK), N).to(x_RK.dtype)
        out = x_RK.new_empty(len(x_RK), N)
        for expert, part in rows_by_expert(counts):
            of_expert = None if bias_EN is None else bias_EN[expert]
            out[part] = self.gemm(
                x_RK[part], weight_ENK[expert], of_expert, owner=weight_ENK, index=expert
            )
        return out

    # -- elementwise and per row --------------------------------------------------------------

    def combine(self, out: Tensor, weights: Tensor) -> Tensor:
        total = out[:, 0] * weights[:, 0, None]
        for slot in range(1, out.shape[1]):
            total = total + out[:, slot] * weights[:, slot, None]
        return total

    @staticmethod
    def _swiglu(gate_up: Tensor, alpha: float, limit: float | None) -> Tensor:
        if gate_up.numel() <= 2 * ACTIVATION_CHUNK:
            return _gate(gate_up, alpha, limit)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        for part in activation_chunks(gate_up):
            out[part] = _gate(gate_up[part], alpha, limit)
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        return _Sigmoid.apply(x.to(sum_dtype(x.dtype)))  # pyright: ignore[reportReturnType]

    def geglu(self, gate_up: Tensor) -> Tensor:
        return _Geglu.apply(gate_up)  # pyright: ignore[reportReturnType]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # One rounding per operation, where a fused multiply-add has one for both or not, by place.
        half = x.shape[-1] // 2
        return x * cos.to(x.dtype) + x.roll(half, -1) * sin.to(x.dtype)

    # -- attention ----------------------------------------------------------------------------

    def _packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PackedContext
    ) -> Tensor:
        forward = partial(_attend_packed, rules=self.rules)
        backward = partial(packed.attend_backward, dtype=self.gradient_dtype(q.dtype))
        return packed.PackedAttention.apply(q, k, v, spec.sinks, spec, context, forward, backward)  # pyright: ignore

    def _paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PagedContext
    ) -> Tensor:
        rules = self.rules
        kernel = PagedKernel(_attend, KEY_BLOCK, rules.key_quantum, rules.head_quantum)
        return paged_attention(q.float() * spec.scale, k, v, spec, context, kernel).to(q.dtype)


def _least_outputs(num_rows: int) -> int:
    """Number of outputs after padding, for a GEMM of `num_rows` rows.

    MKL on AMD's CPUs splits the sums of a GEMM over threads if it has too few rows and outputs to
    give each thread a part of them: the sum is then added up in another order. For fewer outputs
    than a register holds, packed weights and single columns have kernels of their own.
    Measured with 1 to 64 threads: tests/cpu/ops/test_invariant.py repeats it.
    """
    num_threads = torch.get_num_threads()
    return VECTOR * (num_threads if num_rows <= VECTOR * num_threads else 1)


def _product(x: Tensor, y: Tensor, *, added: Tensor | None = None) -> Tensor:
    """x [B, M, K] times y [B, K, N], and `added` [B or 1, M or 1, N].

    MKL splits the sums of a small product over threads only if it is alone, so a single product
    is computed as two: its rows in halves or, where they cannot be halved, twice.
    """
    if len(x) > 1:
        return torch.bmm(x, y) if added is None else torch.baddbmm(added, x, y)
    (_, M, K), N = x.shape, y.shape[2]
    if M % (2 * LEAST_ROWS):
        twice = None if added is None else added.expand(2, -1, -1)
        return _product(x.expand(2, -1, -1), y.expand(2, -1, -1), added=twice)[:1]
    if added is not None and added.shape[1] > 1:
        added = added.reshape(2, M // 2, N)
    halves = x.reshape(2, M // 2, K)
    return _product(halves, y.expand(2, -1, -1), added=added).view(1, M, N)


def _gate(gate_up: Tensor, alpha: float, limit: float | None) -> Tensor:
    """gate * sigmoid(alpha * gate) times up or, clamped, up + 1; from operations that round alike
    in vectors and in their tails."""
    gate, up = gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit).add_(1)
    wide = gate.float()
    below = (wide * -alpha).exp_().add_(1.0)
    return torch.div(wide, below, out=below).to(gate.dtype).mul_(up)


class _Sigmoid(torch.autograd.Function):
    """exp, sum and quotient round alike in vectors and in their tails. Keeps only its result."""

    @staticmethod
    def forward(ctx, x):
        out = torch.reciprocal(x.neg().exp_().add_(1.0))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.aten.sigmoid_backward(grad, *ctx.saved_tensors)


class _Geglu(torch.autograd.Function):
    """tanh(u) is 2 sigmoid(2 u) - 1, whose exp and quotient round alike in vectors and in their
    tails. Backward is stock: the derivative of this form overflows."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        wide = gate.float()
        below = (wide * -GELU_SLOPE * (wide * wide * GELU_CUBIC + 1)).exp_().add_(1.0)
        return torch.div(wide, below, out=below).to(gate.dtype).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        through_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return torch.cat([through_gate, grad * F.gelu(gate, approximate="tanh")], -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """See `paged.Attend`. Computes a query alike in sampler and trainer. q is scaled already, and
    the keys begin at a multiple of KEY_BLOCK."""
    return _weigh_values(_softmax(q, k.float(), mask, sinks)[1], v.float())


def _softmax(q: Tensor, k: Tensor, mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scores with sinks after the keys, their softmax).

    Torch's softmax adds every 8th or 16th element into one lane: keys past a masked end add exact
    zeros, and a sink after a multiple of 16 keys is always the last of its lane.
    """
    scores = _product(q, k.transpose(1, 2), added=mask)
    if sinks is not None:
        scores = torch.cat([scores, sinks], -1)
    return scores, scores.softmax(-1)


def _weigh_values(probs: Tensor, v: Tensor) -> Tensor:
    """probs [N, R, L or L + 1] times v [N, L, D], block by block from the left. Within a block the
    kernel adds one key after the other, so leaving out keys past a masked end changes nothing."""
    here = slice(min(KEY_BLOCK, v.shape[1]))
    out = _product(probs[..., here], v[:, here])
    for at in range(KEY_BLOCK, v.shape[1], KEY_BLOCK):
        here = slice(at, min(at + KEY_BLOCK, v.shape[1]))
        out = _product(probs[..., here], v[:, here], added=out)
    return out


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PackedContext, *, rules: Rules
) -> tuple[Tensor, Tensor]:
    """As `packed.attend`: invariant, over groups of rows of similar length."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for piece, index in packed.own_queries(context):
        length = index.shape[1]
        index = F.pad(index, (0, -length % rules.key_quantum), mode="replicate")
        keys, values = (
            x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in (k, v)
        )
        begin = length - piece.shape[1]
        part, sums = _attend_rows(piece.take(q), keys, values, spec, rules, begin=begin)
        piece.put(out, part)
        piece.put(lse, sums.transpose(1, 2))
    return out, lse


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, rules: Rules, *, begin: int
) -> tuple[Tensor, Tensor]:
    """q [B, Q, H, D], the queries at positions from `begin` to the end L of rows; k and v
    [B, L', G, D] with L' the next multiple of the key quantum.

    Returns out [B, Q, H, D] in q's dtype and lse [B, H, Q] float32.
    """
    B, Q, H, D = q.shape
    sinks, window = spec.sinks, spec.window
    G, repeat = k.shape[2], H // k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(B, H, Q, dtype=torch.float32)
    keys, values = (  # [B * G, L', D]
        x.transpose(1, 2).float().reshape(B * G, -1, D) for x in (k, v)
    )
    # [B, G, repeat, Q, D]: queries of one key head are adjacent, head by head.
    queries = q.view(B, Q, G, repeat, D).permute(0, 2, 3, 1, 4)
    outs = out.view(B, Q, G, repeat, D).permute(0, 2, 3, 1, 4)
    sums = lse.view(B, G, repeat, Q)
    L = begin + Q
    longest = L if window is None else min(L, window + KEY_BLOCK + QUERY_TILE)
    size = TILE_SCORES // (H * longest) // LEAST_TILE * LEAST_TILE
    size = min(max(size, LEAST_TILE), QUERY_TILE)
    for start in range(begin, L, size):
        stop = min(start + size, L)
        asked = slice(start - begin, stop - begin)
        first = 0 if window is None else max(0, start - window + 1) // KEY_BLOCK * KEY_BLOCK
        last = math.ceil(stop / rules.key_quantum) * rules.key_quantum
        rows = repeat * (stop - start)
        extra = -rows % rules.head_quantum
        at_query = torch.arange(start, stop, device=q.device).repeat(repeat)
        at_query = F.pad(at_query, (0, extra), value=stop - 1)[:, None]
        at_key = torch.arange(first, last, device=q.device)
        mask = causal_mask(at_query, at_key, window, torch.float32)[None]
        sinks_GR = None if sinks is None else sink_rows(sinks.float(), G, stop - start, extra)
        step = max(1, TILE_SCORES // (G * (rows + extra) * (last - first)))
        for at in range(0, B, step):
            part = slice(at, at + step)
            tile = (queries[part, :, :, asked].float() * spec.scale).reshape(-1, rows, D)
            if extra:
                tile = F.pad(tile, (0, 0, 0, extra))
            column = None if sinks_GR is None else sinks_GR.repeat(len(tile) // G, 1)[..., None]
            here = slice(at * G, at * G + len(tile)), slice(first, last)
            scores, probs = _softmax(tile, keys[here], mask, column)
            found = _weigh_values(probs, values[here])
            shape = (-1, G, repeat, stop - start)
            outs[part, :, :, asked] = found[:, :rows].reshape(*shape, D)
            # log of the sum of exponentials: the largest probability is exp(0) over that sum.
            total = scores.amax(-1) - probs.amax(-1).log()
            sums[part, :, :, asked] = total[:, :rows].reshape(shape)
    return out, lse
