"""The experts' MLPs on the tokens that chose them, in memory for one chunk of tokens.

Pairs of token and expert are sorted by expert and run chunk by chunk of the tokens. So memory is
bounded, whatever the number of tokens and however unevenly they choose. For backward, the layer's
input and the routes are kept; the rest is computed again, chunk by chunk, and the experts'
gradients are summed in place. A token's numbers are the same with and without a gradient.

# T tokens  C tokens of a chunk  D model width  E experts  A active experts  F expert width
# P = T * A token-expert pairs  R = C * A pairs of a chunk  K inner width  N outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.models.adapter_rows import AdapterRows, Groups, StackedFactors
from lockstep.ops.base import Counts, Ops, grouped_mm, on_host, rows_by_expert
from lockstep.ops.context import sum_dtype

Tensor = torch.Tensor

ROWS_PER_EXPERT = {"cpu": 128, "cuda": 1024}
"""Rows per expert in a chunk whose tokens choose evenly; with fewer, products are slower. On a CPU
a chunk then takes about as much memory as its layer's weights (widths of 512), less for wider
ones."""
LEAST_CHUNK = 1024  # tokens; for few experts, or experts that are all active

ALL_EXPERTS_MULTIPLIES = 1 << 19
"""Multiplications per matrix that may be wasted on experts that a token did not choose: below it,
sorting tokens by expert costs more than it saves (a few dozen tokens of a tiny model on a CPU)."""

READING = 16
"""Tokens whose multiplications take as long as reading an expert from memory. Fewer tokens cost as
much as this many."""


@dataclass(slots=True, eq=False)
class ExpertProjection:
    """One linear map of every expert. A gradient is computed for what requires one, and the
    products for what does not (experts frozen under an adapter) are left out."""

    weight: Tensor
    """[E, N, K]."""
    bias: Tensor | None = None
    """[E, N]."""
    A: Tensor | None = None
    """[E, r, K]. With B, a low-rank addition: B (A x * scale)."""
    B: Tensor | None = None
    """[E, N, r]."""
    scale: float = 1.0
    of_rows: Sequence[StackedFactors | None] = ()
    """Factors of `AdapterRows.of_experts`, in place of A and B: each row has its own adapter."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors that may have a gradient, in the order of the fields."""
        return self.weight, self.bias, self.A, self.B

    def forward(
        self, x_RK: Tensor, counts: Counts, ops: Ops, groups: Sequence[Groups] = ()
    ) -> Tensor:
        """[R, N] of rows sorted by expert; counts: how many each expert has. groups: of
        `AdapterRows.by_expert`, for `of_rows`."""
        out_RN = ops.expert_linear(x_RK, self.weight, self.bias, counts)
        for factors, of_shape in zip(self.of_rows, groups, strict=True):
            if factors is not None:
                factors.add(x_RK, out_RN, of_shape, ops)
        if self.A is None or self.B is None:
            return out_RN
        inner = ops.expert_linear(x_RK, self.A, None, counts) * self.scale
        return out_RN + ops.expert_linear(inner, self.B, None, counts)

    def backward(
        self,
        grad_RN: Tensor,
        x_RK: Tensor,
        counts: Counts,
        into: Sequence[Tensor | None],
        ops: Ops,
        *,
        share_R: Tensor | None = None,
    ) -> Tensor:
        """[R, K]: the gradient of x. Those of `tensors` are added to `into`, None where not needed.

        share_R: factor of each row's output. The caller has multiplied x by it instead of the
        gradient, which is why the bias needs it separately.
        """
        grad_weight, grad_bias, grad_A, grad_B = into
        grad_RK = ops.expert_linear_backward(
            grad_RN, x_RK, self.weight, counts, grad_weight=grad_weight
        )
        if grad_bias is not None:
            _add_sums(grad_bias, grad_RN, share_R, counts)
        if self.A is not None and self.B is not None:
            inner = ops.expert_linear(x_RK, self.A, None, counts) * self.scale
            grad_inner = ops.expert_linear_backward(
                grad_RN, inner, self.B, counts, grad_weight=grad_B
            )
            grad_RK += ops.expert_linear_backward(
                grad_inner * self.scale, x_RK, self.A, counts, grad_weight=grad_A
            )
        return grad_RK


@dataclass(slots=True, eq=False, kw_only=True)
class ExpertPlan:
    """How pairs of token and expert are computed in one forward."""

    gate_up: ExpertProjection
    down: ExpertProjection
    activation: Callable[[Tensor], Tensor]
    """[R, 2F] -> [R, F], over `ops`."""
    ops: Ops
    num_chunk_tokens: int | None = None
    """None derives it from ROWS_PER_EXPERT."""
    adapters: AdapterRows | None = None
    """Adapters of the tokens, with factors in the projections' `of_rows`; without a gradient."""

    def chunks(self, experts_TA: Tensor) -> list[_Chunk]:
        """One sort of all pairs, by chunk and then by expert. The host waits for the counts only
        where it reads them: on a CPU."""
        (T, A), num_experts, device = experts_TA.shape, len(self.down.weight), experts_TA.device
        size = self.num_chunk_tokens
        if size is None:
            rows = ROWS_PER_EXPERT["cpu" if device.type == "cpu" else "cuda"]
            size = max(LEAST_CHUNK, rows * num_experts // A)
        num_chunks = -(-T // size)
        if size >= T and (found := self.ops.sort_pairs(experts_TA, num_experts)) is not None:
            return [_Chunk(slice(0, T), *found)]
        group_P = (
            torch.arange(T, device=device)[:, None] // size * num_experts + experts_TA
        ).flatten()
        order_P = group_P.argsort(stable=True)
        counts = torch.zeros(num_chunks * num_experts, dtype=torch.int32, device=device)
        counts.scatter_add_(0, group_P, torch.ones_like(group_P, dtype=torch.int32))
        counts = counts.view(num_chunks, num_experts)
        by_chunk = list(counts) if self.ops.reads_work(device) else counts.tolist()
        out: list[_Chunk] = []
        for i, of_chunk in enumerate(by_chunk):
            start, stop = i * size, min((i + 1) * size, T)
            order_R = order_P[start * A : stop * A] - start * A
            place_R = torch.empty_like(order_R)
            place_R[order_R] = torch.arange(len(order_R), device=device)
            out.append(_Chunk(slice(start, stop), order_R, place_R.view(-1, A), of_chunk))
        return out


def mix_experts(x_TD: Tensor, weights_TA: Tensor, experts_TA: Tensor, **how: Any) -> Tensor:
    """[T, D]: outputs of each token's experts, times its weights, summed in the order of its slots.

    experts_TA: [T, A] int64, distinct per token. how: the fields of `ExpertPlan`.
    """
    plan = ExpertPlan(**how)
    if torch.is_grad_enabled():
        tensors = (*plan.gate_up.tensors, *plan.down.tensors)
        inputs = (x_TD, weights_TA, *tensors)
        if any(x is not None and x.requires_grad for x in inputs):
            return _Mix.apply(x_TD, weights_TA, experts_TA, plan, *tensors)  # pyright: ignore[reportReturnType]
    return _mix(x_TD, weights_TA, experts_TA, plan)


class ExpertLinear(torch.autograd.Function):
    """`Ops.expert_linear` without a bias, with its gradient."""

    @staticmethod
    def forward(ctx, x_RK, weight_ENK, counts, ops):
        ctx.save_for_backward(x_RK, weight_ENK)
        ctx.settings = counts, ops
        return ops.expert_linear(x_RK, weight_ENK, None, counts)

    @staticmethod
    def backward(ctx, grad_RN):
        (x_RK, weight), (counts, ops) = ctx.saved_tensors, ctx.settings
        grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_RK = ops.expert_linear_backward(
            grad_RN.contiguous(), x_RK, weight, counts, grad_weight=grad
        )
        return grad_RK, grad, None, None


class _Mix(torch.autograd.Function):
    """Keeps the layer's input, the routes and the parameters.

    With y = W h + b, the gradient of a pair's weight is g . y = (W^T g) . h + g . b. W^T g is
    needed for h anyway, so the second product of the forward is not computed again.
    """

    @staticmethod
    def forward(ctx, x_TD, weights_TA, experts_TA, plan, *tensors):
        ctx.save_for_backward(x_TD, weights_TA, experts_TA, *tensors)
        ctx.plan = plan
        return _mix(x_TD, weights_TA, experts_TA, plan)

    @staticmethod
    def backward(ctx, grad_TD):
        x_TD, weights_TA, experts_TA, *tensors = ctx.saved_tensors
        plan: ExpertPlan = ctx.plan
        needs_x, needs_weights, _, _, *needed = ctx.needs_input_grad
        gate_up = ExpertProjection(*tensors[:4], scale=plan.gate_up.scale)
        down = ExpertProjection(*tensors[4:], scale=plan.down.scale)
        chunks = plan.chunks(experts_TA)
        into = [
            _zeros(x, len(chunks)) if is_needed else None
            for x, is_needed in zip(tensors, needed, strict=True)
        ]
        grad_x_TD = torch.empty_like(x_TD)
        grad_weights_TA = torch.empty_like(weights_TA)
        for chunk in chunks:
            token_R, counts = chunk.token_R, chunk.counts
            x_RD = x_TD[chunk.tokens].index_select(0, token_R)
            share_R = weights_TA[chunk.tokens].flatten().index_select(0, chunk.order_R)
            gate_up_RF = gate_up.forward(x_RD, counts, plan.ops).requires_grad_()
            with torch.enable_grad():
                active_RF = plan.activation(gate_up_RF)
            hidden_RF = active_RF.detach()
            grad_RD = grad_TD[chunk.tokens].index_select(0, token_R)
            grad_RF = down.backward(
                grad_RD, hidden_RF * share_R[:, None], counts, into[4:], plan.ops, share_R=share_R
            )
            if needs_weights:
                through_R = (grad_RF * hidden_RF).sum(-1)
                if down.bias is not None:
                    through_R += _with_bias(grad_RD, down.bias, counts)
                grad_weights_TA[chunk.tokens] = chunk.by_slot(through_R)
            del grad_RD, hidden_RF
            (grad_RF,) = torch.autograd.grad(active_RF, gate_up_RF, grad_RF.mul_(share_R[:, None]))
            del active_RF, gate_up_RF
            grad_RD = gate_up.backward(grad_RF, x_RD, counts, into[:4], plan.ops)
            del grad_RF, x_RD
            if needs_x:
                grad_x_TD[chunk.tokens] = chunk.by_slot(grad_RD).sum(1)
        return (
            grad_x_TD if needs_x else None,
            grad_weights_TA if needs_weights else None,
            None,
            None,
            *(
                None if grad is None else grad.to(x.dtype)
                for grad, x in zip(into, tensors, strict=True)
            ),
        )


def _mix(x_TD: Tensor, weights_TA: Tensor, experts_TA: Tensor, plan: ExpertPlan) -> Tensor:
    E, _, F = plan.down.weight.shape
    num_wasted = max(len(x_TD), READING) * x_TD.shape[1] * (E - experts_TA.shape[1]) * F
    if num_wasted <= ALL_EXPERTS_MULTIPLIES and x_TD.device.type == "cpu":
        # Every expert on every token: no sorting, and the pairs that count are the same.
        x_RD = x_TD.expand(E, *x_TD.shape).flatten(0, 1)
        place_TA = torch.arange(len(x_TD), device=x_TD.device)[:, None] + experts_TA * len(x_TD)
        groups = () if plan.adapters is None else plan.adapters.on_all_experts(E)
        out_RD = _experts(x_RD, [len(x_TD)] * E, plan, groups)
        return plan.ops.combine(_rows(out_RD, place_TA), weights_TA)
    chunks = plan.chunks(experts_TA)
    parts = (_mix_chunk(x_TD, weights_TA, chunk, plan) for chunk in chunks)
    if len(chunks) == 1:
        return next(parts)
    out_TD = torch.empty_like(x_TD)
    for chunk, part in zip(chunks, parts, strict=True):
        out_TD[chunk.tokens] = part
    return out_TD


def _mix_chunk(x_TD: Tensor, weights_TA: Tensor, chunk: _Chunk, plan: ExpertPlan) -> Tensor:
    x_RD = x_TD[chunk.tokens].index_select(0, chunk.token_R)
    groups = ()
    if plan.adapters is not None:
        token_R = chunk.token_R + chunk.tokens.start
        groups = plan.adapters.by_expert(token_R, chunk.counts)
    out_RD = _experts(x_RD, chunk.counts, plan, groups)
    return plan.ops.combine(chunk.by_slot(out_RD), weights_TA[chunk.tokens])


def _experts(x_RD: Tensor, counts: Counts, plan: ExpertPlan, groups: Sequence[Groups]) -> Tensor:
    active_RF = plan.activation(plan.gate_up.forward(x_RD, counts, plan.ops, groups))
    return plan.down.forward(active_RF, counts, plan.ops, groups)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    tokens: slice
    order_R: Tensor
    """[R] int64: pairs (token * A + slot, counted within the chunk) sorted by expert."""
    place_CA: Tensor
    """[C, A] int64: place of each pair in that order."""
    counts: Counts
    """Pairs of each expert."""

    @property
    def token_R(self) -> Tensor:
        """[R] int64: the token of each sorted pair."""
        return self.order_R // self.place_CA.shape[1]

    def by_slot(self, sorted_R: Tensor) -> Tensor:
        """[R, ...] of sorted pairs as [C, A, ...]."""
        return _rows(sorted_R, self.place_CA)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def _zeros(x: Tensor, num_chunks: int) -> Tensor:
    """Zeros to sum a gradient into; at least four bytes wide for several chunks."""
    is_narrow = num_chunks > 1 and x.dtype.itemsize < 4
    return torch.zeros_like(x, dtype=torch.float32 if is_narrow else x.dtype)


def _add_sums(grad_EN: Tensor, grad_RN: Tensor, share_R: Tensor | None, counts: Counts) -> None:
    if isinstance(counts, Tensor) and grad_RN.dtype == torch.bfloat16:
        # A product with one column that counts: its kernel takes eight.
        column_R8 = grad_RN.new_zeros(len(grad_RN), 8)
        column_R8[:, 0] = 1.0 if share_R is None else share_R
        grad_EN += grouped_mm(grad_RN.t(), column_R8, counts)[..., 0]
        return
    wide = sum_dtype(grad_RN.dtype)  # in bfloat16, oneDNN keeps a kernel for each number of rows
    for expert, part in rows_by_expert(on_host(counts)):
        of_expert = grad_RN[part].to(wide)
        total = of_expert.sum(0) if share_R is None else share_R[part].to(wide) @ of_expert
        grad_EN[expert] += total


def _with_bias(grad_RN: Tensor, bias_EN: Tensor, counts: Counts) -> Tensor:
    """[R]: each row's product with the bias of its expert."""
    if isinstance(counts, Tensor):
        bias_RN = bias_EN.repeat_interleave(counts, 0, output_size=len(grad_RN))
        return (grad_RN * bias_RN).sum(-1)
    out_R, wide = grad_RN.new_zeros(len(grad_RN)), sum_dtype(grad_RN.dtype)
    for expert, part in rows_by_expert(counts):
        out_R[part] = torch.mv(grad_RN[part].to(wide), bias_EN[expert].to(wide))
    return out_R
