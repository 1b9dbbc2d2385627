"""Draws on a GPU whose result depends on the row alone, so that a request's seed decides its reply.

Stock cumulative sums and sums add in an order that depends on the number of rows.

# B rows  V vocabulary
"""

# Triton's annotations say that a reduction may give a tuple.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch

from lockstep.ops.cuda_kernels import VOCABULARY_BLOCK, aligned, jit, launch, tl

Tensor = torch.Tensor


@jit()
def _sum_of_row(probs, row, V: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    total = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + column
        total += tl.sum(tl.load(probs + row * V + at, mask=at < V, other=0.0), 0)
    return total


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """See `Ops.draw`."""
    B, V = probs_BV.shape
    ids = torch.empty(B, 1, dtype=torch.int64, device=probs_BV.device)
    inputs = aligned(probs_BV), uniform_B.contiguous()
    launch(_draw_kernel, (B,), *inputs, ids, V, VOCABULARY_BLOCK, num_warps=8)
    return ids


@jit(unaligned=("uniform", "ids"))
def _draw_kernel(probs, uniform, ids, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    target = _sum_of_row(probs, row, V, BLOCK) * tl.load(uniform + row)
    before = tl.zeros((), tl.float32)
    first = tl.full((), V, tl.int32)  # the first id that exceeds the target
    last = tl.zeros((), tl.int32)  # the last possible id, in case rounding leaves no first
    for start in range(0, V, BLOCK):
        at = start + column
        prob = tl.load(probs + row * V + at, mask=at < V, other=0.0)
        is_reached = (prob > 0) & (before + tl.cumsum(prob, 0) > target)
        first = tl.minimum(first, tl.min(tl.where(is_reached, at, V), 0))
        last = tl.maximum(last, tl.max(tl.where(prob > 0, at, 0), 0))
        before += tl.sum(prob, 0)
    tl.store(ids + row, tl.minimum(first, last).to(tl.int64))


def nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """See `Ops.nucleus`."""
    B, V = probs_BV.shape
    is_kept = torch.empty(B, V, dtype=torch.uint8, device=probs_BV.device)
    inputs = aligned(probs_BV), top_p_B.contiguous()
    launch(_nucleus_kernel, (B,), *inputs, is_kept, V, VOCABULARY_BLOCK, num_warps=8)
    return is_kept.view(torch.bool)


@jit(unaligned=("top_p",))
def _nucleus_kernel(probs, top_p, is_kept, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    most = _sum_of_row(probs, row, V, BLOCK) * tl.load(top_p + row)
    before = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + column
        prob = tl.load(probs + row * V + at, mask=at < V, other=0.0)
        is_inside = before + tl.cumsum(prob, 0) - prob < most
        tl.store(is_kept + row * V + at, is_inside.to(tl.uint8), mask=at < V)
        before += tl.sum(prob, 0)
