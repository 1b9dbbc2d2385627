"""The functions that a model may call. Sampler and trainer run the same decoder over these.

`Ops` computes them with stock torch: fast, and equal to other implementations up to rounding.
`invariant.InvariantOps` and `cuda.CudaOps` override what depends on the batch. A decoder holds one
such object (`Decoder.ops`) and computes nothing by itself: that is why two sides which hold the
same ops give the same numbers.

# T tokens  H query heads  G key heads  D head width  E experts  R token-expert pairs  V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.errors import AlignmentError, CapabilityError
from lockstep.ops import delta, head, packed
from lockstep.ops.chunks import StateStep
from lockstep.ops.context import (
    AttentionSpec,
    PackedContext,
    PagedContext,
    Support,
    sum_dtype,
    take_rows,
)
from lockstep.ops.onednn import PackedWeights, can_pack, packed_linear
from lockstep.ops.paged import PagedKernel, paged_attention
from lockstep.ops.split import SplitContext, split_attention
from lockstep.ops.transfer import to_device

Tensor = torch.Tensor
Context = PackedContext | PagedContext | SplitContext
Counts = list[int] | Tensor
"""[E] number of rows of each expert, for rows sorted by expert. A list, or for ops that read their
inputs on the device (`Ops.reads_work`) an int32 tensor there, so that the host does not wait."""

ACTIVATION_CHUNK = 1 << 19  # activations computed at once: bounds the size of temporaries
GPU_ACTIVATION_CHUNK = 1 << 25  # where a launch must be worth its while
GELU_SLOPE, GELU_CUBIC = 1.5957691216057308, 0.044715
"""gelu in its tanh form is x * sigmoid(slope * (x + cubic * x^3)): the slope is 2 sqrt(2 / pi)."""
FAST_ROWS = 4  # oneDNN's products of 4 to 6 rows read a weight faster than those of fewer
KEY_QUANTUM = 16  # attention reads a multiple of this many keys: it fills a vector register


class Rotary(NamedTuple):
    """How queries and keys are made ready for attention."""

    cos: Tensor
    """[T, 1, R] float32: see `Ops.rope`."""
    sin: Tensor
    num_heads: int
    """Heads of the queries."""
    norms: tuple[Tensor, Tensor] | None = None
    """Norms of queries [D] and of keys [D]."""
    eps: float = 0.0


class Ops:
    """Stock torch.

    >>> ops = Ops()
    >>> ops.linear(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """

    name: ClassVar[str] = "plain"
    """Name in the fingerprint: plain, invariant or cuda."""
    is_invariant: ClassVar[bool] = False
    """True if a row has the same bits decoded, prefilled and packed, in any batch."""
    key_block: ClassVar[int] = 0
    """Keys that attention sums in one piece; 0: the kernel decides."""

    def __init__(self) -> None:
        self.packed = PackedWeights()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ops:
        return self  # a copied model computes with the same ops

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # made anew in the other process, where it may be unavailable

    def reads_work(self, device: torch.device) -> bool:
        """True if these ops read the layout of rows on the device: `AttentionWork` in place of
        padded blocks, tensors of counts in place of lists."""
        return device.type != "cpu"

    def describe_gemm(self, dtype: torch.dtype) -> str:
        """How GEMMs of this dtype are computed, for the fingerprint."""
        return "native"

    def take_one_tile(self) -> bool:
        """Gives up speed so that GEMMs of few rows and of many agree; False if there is nothing to
        give up."""
        return False

    def learn_library(self, weight_NK: Tensor) -> None:
        """Finds where a library's product of this weight may be taken. The self-test asks it."""

    def gradient_dtype(self, dtype: torch.dtype, weight: Tensor | None = None) -> torch.dtype:
        """Dtype of the products in a backward, for operands of this dtype, or for this weight."""
        return dtype

    # -- products -----------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N]."""
        if not (torch.is_inference_mode_enabled() and can_pack(weight)):
            return F.linear(x, weight, bias)
        rows = x.flatten(0, -2)
        missing = max(0, FAST_ROWS - len(rows))
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        out = packed_linear(padded, self.packed.of(weight, x.dtype), bias)
        return out[: len(rows)].view(*x.shape[:-1], len(weight))

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """x [N, R, K] @ y [N, K, L] -> [N, R, L], of numbers that are no parameters."""
        return torch.bmm(x, y)

    def expert_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Counts
    ) -> Tensor:
        """x [R, K], rows sorted by expert, weight [E, N, K], bias [E, N] -> [R, N].

        tokens_per_expert: sums to R; the first rows belong to expert 0, and so on.
        Not differentiable: `models.experts` does that, by `expert_linear_backward`.
        """
        if _is_grouped(x, weight):
            counts = on_device(tokens_per_expert, x.device)
            out = grouped_mm(x, weight.transpose(1, 2), counts)
            if bias is None:
                return out
            return out.add_(bias.repeat_interleave(counts, 0, output_size=len(x)))
        tokens_per_expert = on_host(tokens_per_expert)
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
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        tokens_per_expert: Counts,
        *,
        grad_weight: Tensor | None,
    ) -> Tensor:
        """Gradient of x [R, K], from the gradient of the output, grad [R, N].

        grad_weight: [E, N, K]; the weight's gradient is added to it. None: it is not computed.
        """
        if _is_grouped(x, weight):
            if grad_weight is not None:
                grad_weight += grouped_mm(grad.t(), x, tokens_per_expert)
            return grouped_mm(grad, weight, tokens_per_expert)
        dtype, wide = x.dtype, self.gradient_dtype(x.dtype)
        grad, x = grad.to(wide), x.to(wide)
        grad_x = torch.empty_like(x)
        for expert, part in rows_by_expert(on_host(tokens_per_expert)):
            torch.mm(grad[part], weight[expert].to(grad.dtype), out=grad_x[part])
            if grad_weight is not None:
                head.add_product(grad_weight[expert], grad[part].t(), x[part])
        return grad_x.to(dtype)

    # -- elementwise and per row --------------------------------------------------------------

    def route(
        self,
        logits: Tensor,
        num_active: int,
        *,
        experts: Tensor | None = None,
        is_normalized: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """(weights, experts [T, A] int64) of the `num_active` largest logits [T, E], largest first;
        weights [T, A] in the logits' dtype.

        experts: [T, A] int64 taken in place of the largest, in their order (routing replay).
        is_normalized: weights are the softmax over the chosen logits alone and sum to 1. Otherwise
        they are the chosen experts' share of the softmax over all logits.
        """
        if experts is None:
            top, experts = logits.topk(num_active, -1)
        else:
            top = logits.gather(-1, experts)
        if is_normalized:
            return top.softmax(-1), experts
        # A softmax in two bytes loses the small probabilities.
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        return wide.softmax(-1).gather(-1, experts).to(logits.dtype), experts

    def sigmoid(self, x: Tensor) -> Tensor:
        """Sigmoid in float32, or in x's dtype if that is wider."""
        return x.to(sum_dtype(x.dtype)).sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x)), for any x; in x's dtype."""
        return (x + x.abs()) / 2 + torch.log1p((-x.abs()).exp())

    def route_by_sigmoid(
        self,
        logits: Tensor,
        num_active: int,
        *,
        bias: Tensor,
        num_groups: int = 1,
        num_active_groups: int = 1,
        experts: Tensor | None = None,
        is_normalized: bool = True,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """`route` by sigmoid scores of logits [T, E]: the bias [E] is added for the choice alone.

        Of `num_groups` groups of experts, those `num_active_groups` are left whose two best scores
        sum to the most. is_normalized: a token's weights are divided by their sum. scale: factor on
        them. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, and transformers'
        `Glm4MoeTopkRouter`.
        """
        scores = self.sigmoid(logits)
        if experts is None:
            wanted = scores + bias
            if num_groups > 1:
                groups = wanted.unflatten(-1, (num_groups, -1))
                best = groups.topk(2, -1)[0].sum(-1).topk(num_active_groups, -1)[1]
                is_left = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(
                    -1, best, True
                )
                wanted = groups.masked_fill(~is_left[..., None], float("-inf")).flatten(-2)
            experts = wanted.topk(num_active, -1)[1]
        weights = scores.gather(-1, experts)
        if is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * scale, experts

    def sort_pairs(self, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Pairs of token and slot, sorted by expert, of experts [T, A] int64, where the ops have a
        kernel for it: (order [T * A] int64, place of each pair [T, A] int64, rows of each expert
        [E] int32). A stable sort."""
        return None

    def combine(self, out: Tensor, weights: Tensor) -> Tensor:
        """Each token's expert outputs [T, A, D], times weights [T, A], summed -> [T, D]."""
        return (out * weights[..., None]).sum(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) over the last dim, times weight; computed in float32, returned in x's dtype.

        weight: [D], or [heads, D] for x [T, heads, D]. One in float32 scales before the result is
        rounded to x's dtype, any other after it.
        """
        if weight.dtype != x.dtype:
            return Ops.rms_norm(self, x.float(), weight, eps).to(x.dtype)
        if x.device.type == "cpu":
            if torch.is_grad_enabled():
                return RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
            return _rms_norm(x, weight, eps)[0]
        # Hugging Face's order of roundings: normalise in float32, round, then scale.
        normed = F.rms_norm(x.to(sum_dtype(x.dtype)), weight.shape[-1:], None, eps)
        return weight * normed.to(x.dtype)

    def swiglu(self, gate_up: Tensor, *, alpha: float = 1.0, limit: float | None = None) -> Tensor:
        """silu(gate) * up of gate_up [..., 2F] = [gate, up] -> [..., F].

        alpha, limit: of gpt-oss' activation, (clamp(up) + 1) * g * sigmoid(alpha * g) with
        g = min(gate, limit) and up between -limit and limit.
        """
        if torch.is_grad_enabled():
            return Activation.apply(gate_up, alpha, limit, self._swiglu)
        return self._swiglu(gate_up, alpha, limit)

    @staticmethod
    def _swiglu(gate_up: Tensor, alpha: float, limit: float | None) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if limit is None:
            return F.silu(gate) * up
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))

    def geglu(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up of gate_up [..., 2F] = [gate, up] -> [..., F], gelu in its tanh form."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates x [T, H, D] by position; cos and sin [T, 1, D] float32, with the first half of
        sin negated."""
        # roll by half the width swaps the halves; sin carries the minus of rotate_half.
        half = x.shape[-1] // 2
        return torch.addcmul(x * cos.to(x.dtype), x.roll(half, -1), sin.to(x.dtype))

    # -- attention ----------------------------------------------------------------------------

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: Context
    ) -> Tensor:
        """Causal attention of q [T, H, D] over k, v [T, G, D] and, paged, over cached keys.

        Differentiable over a PackedContext, sinks included. Returns [T, H, D].
        """
        if isinstance(context, SplitContext):
            return split_attention(self.attention, q, k, v, spec, context)
        if isinstance(context, PackedContext):
            return self._packed_attention(q, k, v, spec, context)
        context.write(spec.layer, k, v)
        return self._paged_attention(q, k, v, spec, context)

    def _packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PackedContext
    ) -> Tensor:
        both = packed.attend, packed.attend_backward
        if self.reads_work(q.device):
            from lockstep.ops import cuda_attention  # needs Triton

            both = cuda_attention.packed_attention, cuda_attention.packed_backward
        return packed.PackedAttention.apply(q, k, v, spec.sinks, spec, context, *both)  # pyright: ignore

    def _paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PagedContext
    ) -> Tensor:
        """`attention` over pages that already hold the new keys and values."""
        if self.reads_work(q.device):
            from lockstep.ops import cuda_attention

            return cuda_attention.paged_attention(q, spec, context)
        attend, is_narrow = partial(_attend, scale=spec.scale), q.dtype.itemsize < 4
        kernel = PagedKernel(attend, KEY_QUANTUM, KEY_QUANTUM, copies_parts=is_narrow)
        return paged_attention(q, k, v, spec, context, kernel)

    # -- linear attention ---------------------------------------------------------------------

    def short_conv(self, x: Tensor, weight: Tensor, layer: int, context: Context) -> Tensor:
        """silu of a causal convolution of each channel with itself: x [T, channels], weight
        [channels, W], the newest input last -> [T, channels]. layer: number of the linear layer."""
        width, wide = weight.shape[1], sum_dtype(x.dtype)
        if isinstance(context, PackedContext):
            before, is_there = context.previous(width)
            taps = [
                take_rows(x, token) * seen[:, None]
                for token, seen in zip(before.flip(0), is_there.flip(0).to(x.dtype), strict=True)
            ]
            taps = [tap.to(wide) for tap in (*taps, x)]
        else:
            step = _states_of(context)
            tails = step.states.tails[layer].index_select(0, step.slots).flatten(0, 1)
            inputs = torch.cat([tails, x])
            taken = inputs.index_select(0, step.taps.reshape(-1)).to(wide)
            taps = taken.view(*step.taps.shape, -1).unbind(0)
            step.states.tails[layer, step.slots] = inputs[step.tails]
            step.states.border_tails[layer, step.bordering] = inputs[step.borders]
        first, *others = (tap * of for tap, of in zip(taps, weight.to(wide).unbind(1), strict=True))
        out = sum(others, first)
        return (out * self.sigmoid(out)).to(x.dtype)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: int, context: Context
    ) -> Tensor:
        """Gated delta rule (`ops.delta`) of q, k [T, G, K], which it brings to unit length, v [T,
        H, V], log-decays g and strengths beta, each [T, H] -> [T, H, V] in v's dtype. Computed in
        float32. layer: number of the linear layer."""
        wide, dtype = sum_dtype(v.dtype), v.dtype
        q, k = delta.unit_length(q.to(wide), k.to(wide))
        parts = q, k, v.to(wide), g.to(wide), beta.to(wide)
        if isinstance(context, PackedContext):
            return delta.over_chunks(parts, context.chunks, self.delta_chunks).to(dtype)
        step = _states_of(context)
        n, out = step.num_rows, []
        if step.chunks is None:
            return self.delta_decode(parts, layer=layer, step=step).to(dtype)
        of_step = {"layer": layer, "step": step}
        if n:
            rows = [x[:n] for x in parts]
            out.append(self.delta_decode(rows, **of_step))
        prefill = partial(delta.prefill, **of_step)
        rest = tuple(x[n:] for x in parts)
        out.append(delta.over_chunks(rest, step.chunks, self.delta_chunks, prefill))
        return torch.cat(out).to(dtype)

    def delta_chunks(
        self, parts: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False
    ) -> tuple[delta.Solved, Tensor | None]:
        """(chunks [n], states after them [n, H, K, V]) of the chunks' tokens and the states before.

        parts: (q, k, v, g, beta) as `delta.DeltaRule` has them, of n chunks. is_last: no state
        after them is needed.
        """
        if self.reads_work(parts[0].device):
            from lockstep.ops import cuda_delta

            return cuda_delta.run_chunks(parts, state)
        q, k, v, g, beta = parts
        c = g.cumsum(-1)
        solved = delta.solve(q, k, v, c, beta, state, self.matmul)
        after = None if is_last else delta.advance(k, solved.writes, c, state, self.matmul)
        return solved, after

    def delta_decode(self, parts: Sequence[Tensor], *, layer: int, step: StateStep) -> Tensor:
        """The rule for one token of each row: q, k [B, G, K], v [B, H, V], g, beta [B, H] -> [B, H,
        V]."""
        if self.reads_work(parts[0].device):
            from lockstep.ops import cuda_delta

            return cuda_delta.decode(parts, layer=layer, step=step)
        return delta.decode(parts, layer=layer, step=step, matmul=self.matmul)

    # -- composed -----------------------------------------------------------------------------
    # Parts of a layer, for ops that compute several at once, with the same bits as one by one.

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """`linear` of `rms_norm`: x [T, K] -> [T, N]."""
        return self.linear(self.rms_norm(x, norm, eps), weight, bias)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """`swiglu` of `norm_linear`: x [T, K], weight [2F, K] -> [T, F]."""
        return self.swiglu(self.norm_linear(x, norm, eps, weight))

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """residual [T, N] + `linear` of x [T, K]."""
        out = self.linear(x, weight, bias)
        return residual + out if torch.is_grad_enabled() else out.add_(residual)

    def rotary_attention(
        self, qkv: Tensor, rotary: Rotary, spec: AttentionSpec, context: Context
    ) -> Tensor:
        """`attention` of qkv [T, H + 2 G, D]: returns [T, H, D]. Queries and keys are first normed,
        if there are norms, then rotated in the dims of cos and sin."""
        (cos, sin, H, norms, eps), R = rotary, rotary.cos.shape[-1]
        G = (qkv.shape[1] - H) // 2
        qk = qkv[:, : H + G]
        if norms is not None:
            weight = torch.cat([norms[0].expand(H, -1), norms[1].expand(G, -1)])
            qk = self.rms_norm(qk, weight, eps)
        if qk.shape[-1] > R:
            qk = torch.cat([self.rope(qk[..., :R].contiguous(), cos, sin), qk[..., R:]], -1)
        else:
            qk = self.rope(qk, cos, sin)
        q, k = qk.split([H, G], 1)
        return self.attention(q, k, qkv[:, H + G :], spec, context)

    # -- log-prob head ------------------------------------------------------------------------

    def log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        *,
        temperature: float = 1.0,
        support: Support | None = None,
        vocab_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-prob of ids, entropy [T]), float32 nats, of softmax(hidden @ weight^T / t).

        hidden [T, D], weight [V, D], ids [T] or [T, K]; the log-probs have the shape of the ids.
        Both outputs are differentiable. The logits are formed in chunks of rows; no more than one
        chunk of [rows, V] lives at a time. vocab_size: ids that the softmax is over, the first of
        the V; None takes all.

        support: the ids that each of the T tokens was drawn from. The softmax is over these alone;
        an id outside has log-prob -inf. Raises AlignmentError for another number of tokens.
        """
        if support is not None and len(support) != len(ids):
            raise AlignmentError(
                f"log_probs: {len(ids)} ids, and a support of {len(support)} tokens: one entry "
                "each."
            )
        size = len(weight) if vocab_size is None else vocab_size
        return head.LogProbs.apply(hidden, weight, ids, self, temperature, support, size)  # pyright: ignore[reportReturnType]

    def log_softmax(
        self, logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None
    ) -> Tensor:
        """[..., V] float32 log-probabilities: the sampler's side of `log_probs`, same arithmetic.

        kept: [..., V] bool, True at the ids that the softmax is over; the others get -inf. A row
        that keeps none is NaN.
        """
        logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        if kept is not None:
            logits = logits.masked_fill(~kept, float("-inf"))
        return torch.log_softmax(logits, -1)

    # -- draws --------------------------------------------------------------------------------

    def draw(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """[B, 1] int64: first id whose cumulative probability exceeds u times the sum. probs [B, V]
        float32 need not sum to 1; an id of probability 0 is not drawn. uniform: [B] float32."""
        cumulative = probs.cumsum(-1)
        target = cumulative[:, -1:] * uniform[:, None]
        return torch.searchsorted(cumulative, target, right=True).clamp_(max=probs.shape[1] - 1)

    def nucleus(self, probs: Tensor, top_p: Tensor) -> Tensor:
        """[B, V] bool: True while the sum of larger probs is below `top_p` [B]. probs [B, V]
        float32, largest first."""
        before = probs.cumsum(-1) - probs
        return before < top_p[:, None] * probs.sum(-1, keepdim=True)


# -- mechanism ------------------------------------------------------------------------------------


def _states_of(context: PagedContext | SplitContext) -> StateStep:
    step = context.states if isinstance(context, PagedContext) else None
    if step is None:
        raise CapabilityError(
            "linear attention runs over packed rows, or over a sampler's states; found "
            f"{type(context).__name__} without them."
        )
    return step


class GemmOps(Ops):
    """Ops whose linear maps are one GEMM of their own."""

    is_invariant = True

    def gemm(self, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """x W^T + b, rounded once: [M, N]."""
        raise NotImplementedError

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():
            out = Linear.apply(x_MK, weight, bias, self)
        else:
            out = self.gemm(x_MK, weight, bias)
        return out.view(*x.shape[:-1], len(weight))


def on_host(counts: Counts) -> list[int]:
    """Counts as a list. Waits for the device. For dtypes without a kernel that reads counts there
    (float32)."""
    return counts.tolist() if isinstance(counts, Tensor) else counts


def on_device(counts: Counts, device: torch.device) -> Tensor:
    return counts if isinstance(counts, Tensor) else to_device(np.array(counts, np.int32), device)


def grouped_mm(x: Tensor, y: Tensor, counts: Counts) -> Tensor:
    """`torch.nn.functional.grouped_mm`, given rows in place of offsets."""
    offsets = on_device(counts, x.device).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, y, offs=offsets)


def rows_by_expert(tokens_per_expert: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), for the experts that have any."""
    at = 0
    for expert, count in enumerate(tokens_per_expert):
        if count:
            yield expert, slice(at, at + count)
            at += count


def _is_grouped(x: Tensor, weight: Tensor) -> bool:
    """True if one kernel can run all experts, however many rows each has. Source:
    torch.nn.functional.grouped_mm of torch 2.13, which takes rows of whole 16 bytes."""
    if x.device.type == "cpu" or x.dtype != torch.bfloat16:
        return False
    return weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`Ops.rms_norm`, 1 / rms(x) of each row)."""
    wide = x if x.dtype.itemsize >= 4 else x.float()
    factor = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * factor
    return (normed if wide is x else normed.to(x.dtype)).mul_(weight), factor


class RmsNorm(torch.autograd.Function):
    """`Ops.rms_norm` on a CPU: up to a third faster than torch's. Rounds as on a GPU.

    Keeps its input, and a factor for each row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, factor = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, factor)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, factor = ctx.saved_tensors
        grad, normed = grad.to(factor.dtype), x * factor
        grad_weight = (grad * normed).sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None
        grad = grad * weight
        along = (grad * normed).mean(-1, keepdim=True)
        grad_x = grad.addcmul_(normed, along, value=-1.0).mul_(factor)
        return grad_x.to(x.dtype), None if grad_weight is None else grad_weight.to(x.dtype), None


class Activation(torch.autograd.Function):
    """gate * sigmoid(alpha * gate) times up or, clamped, times up + 1. Keeps only its input.

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


class Linear(torch.autograd.Function):
    """x W^T + b by the `gemm` of some ops, whose backward is stock."""

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, ops):
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.dtype = ops.gradient_dtype(x_MK.dtype, weight_NK)
        return ops.gemm(x_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx, grad_MN):
        x_MK, weight_NK = ctx.saved_tensors  # once: a recomputed block gives them a single time
        return *linear_backward(ctx, grad_MN, x_MK, weight_NK), None


def linear_backward(ctx, grad_MN: Tensor, x_MK: Tensor, weight_NK: Tensor) -> list[Tensor | None]:
    """Gradients of x, W and b in x W^T + b, computed in `ctx.dtype`; None where none is needed."""
    dtype = x_MK.dtype
    grad_MN, x_MK, weight_NK = (x.to(ctx.dtype) for x in (grad_MN, x_MK, weight_NK))
    made = (lambda: grad_MN @ weight_NK, lambda: grad_MN.t() @ x_MK, lambda: grad_MN.sum(0))
    needed = zip(ctx.needs_input_grad, made, strict=False)
    return [make().to(dtype) if is_needed else None for is_needed, make in needed]


def activation_chunks(gate_up: Tensor) -> Iterator[slice]:
    most = ACTIVATION_CHUNK if gate_up.device.type == "cpu" else GPU_ACTIVATION_CHUNK
    rows = max(1, 2 * most // gate_up[0].numel()) if len(gate_up) else 1
    yield from (slice(at, at + rows) for at in range(0, len(gate_up), rows))


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
