"""Attention over packed rows on a CPU: whole rows and windows, with exact sinks and gradients.

Stock flash attention has no sinks. With L = logaddexp(lse, sink), the softmax over keys and sink
is exp(score - L): the output is the stock one times exp(lse - L). The stock backward, given that
output and L in place of its own, returns the exact dQ, dK and dV, since it uses nothing but
exp(score - L) and dO . O. (Rescaling by a detached lse gives the right output, dV and sink
gradient, but a dQ and dK wrong by 28 to 55 %.) The sink's own gradient is -sum P_sink (dO . O) with
P_sink = exp(sink - L): its column of probabilities is dropped, so dP is 0 there. (The article on
gpt-oss with verl has a wrong sign in its full formula; its simplified one is this.)
Guard: tests/cpu/ops/test_attention.py

Rows go through the kernel in pieces, so that memory does not grow with their number. A token that
several rows begin with asks once, in the first of them. With a window, or behind a shared
beginning, the queries of a piece go in tiles over the keys that they see: a window costs
O(T x window). Only inputs, output and L are kept. The kernel reads grouped heads and strides as
they are (since torch 2.9): keys are not repeated.

# T tokens  H query heads  G key heads  D head width  B rows of a piece  L its length
# Q queries of a row  K keys
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.ops.context import AttentionSpec, PackedContext, sum_dtype
from lockstep.ops.paged import causal_mask

Tensor = torch.Tensor

MAX_PADDING = 1.25  # rows of one piece differ in length by at most this factor
PIECE_TOKENS = 2048  # queries of several rows per call: enough to fill a kernel, little to copy
BEGIN_QUANTUM = 128  # tokens: rows whose shared beginnings differ by less go together
TILE = 64  # queries that attend together; with more, most would read keys that they do not see


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The tokens of B rows of L places."""

    index: Tensor
    """[B, L] int64: the token at each place. Past a row's end its last token is repeated."""
    first: int | None
    """First token, where the places are B * L tokens in order, which are read in place."""

    @classmethod
    def of(cls, index: Tensor) -> Places:
        flat = index.flatten()
        first = int(flat[0])
        is_slice = torch.equal(flat, torch.arange(first, first + len(flat), device=flat.device))
        return cls(index, first if is_slice else None)

    def take(self, x: Tensor) -> Tensor:
        """x [T, ...] at the places: [B, L, ...]."""
        if self.first is not None:
            return x[self.first : self.first + self.index.numel()].unflatten(0, self.index.shape)
        return x.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """B rows that attend together: the keys of each are its tokens, the queries its last ones."""

    keys: Places
    queries: Places
    owned: Tensor | None
    """[n] int64: queries, of B * Q laid end to end, whose output is written to their token; None if
    all are. A place past a row's end owns no token, and a token of several rows has one owner."""

    @property
    def begin(self) -> int:
        """Place of the first query."""
        return self.keys.index.shape[1] - self.queries.index.shape[1]

    def take_owned(self, x: Tensor) -> Tensor:
        """x [T, ...] at the queries: [B, Q, ...], and 0 where they own no token."""
        taken = self.queries.take(x)
        if self.owned is None:
            return taken
        hidden = torch.ones(self.queries.index.numel(), dtype=torch.bool, device=x.device)
        hidden[self.owned] = False
        return taken.masked_fill(hidden.view(*taken.shape[:2], *[1] * (x.dim() - 1)), 0.0)

    def put(self, out: Tensor, values: Tensor) -> None:
        """values [B, Q, ...] into out [T, ...], at the tokens that the queries own. Values that
        `queries.take` has shown in place are there."""
        values, index = values.flatten(0, 1), self.queries.index.flatten()
        if self.owned is not None:
            out[index[self.owned]] = values[self.owned].to(out.dtype)
        elif self.queries.first is None:
            out[index] = values.to(out.dtype)
        elif values.data_ptr() != out[self.queries.first].data_ptr():
            out[self.queries.first : self.queries.first + len(values)] = values

    def tiles(
        self, window: int | None, dtype: torch.dtype, *, size: int | None = None
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """(queries, keys, mask [Q, K]) that are computed together; without a mask, a query sees the
        keys up to its own. size: queries of a tile; None leaves whole rows whole."""
        length, device = self.keys.index.shape[1], self.keys.index.device
        is_whole = size is None and not self.begin and (window is None or length <= window)
        size = length if is_whole else size or TILE
        for start in range(self.begin, length, size):
            stop = min(start + size, length)
            first = 0 if window is None else max(0, start - window + 1)
            mask = None
            if not is_whole:
                at_key = torch.arange(first, stop, device=device)
                mask = causal_mask(at_key[start - first :, None], at_key, window, dtype)
            yield slice(start - self.begin, stop - self.begin), slice(first, stop), mask


def pieces_of(context: PackedContext, *, num_tokens: int = PIECE_TOKENS) -> tuple[Piece, ...]:
    """The context cut into pieces, made once. Each token asks in the first row that has it.
    num_tokens: most queries of a piece of several rows."""
    key = "pieces", num_tokens
    if key not in context.memo:
        context.memo[key] = tuple(_make_pieces(context, num_tokens))
    return context.memo[key]


def _make_pieces(context: PackedContext, num_tokens: int) -> Iterator[Piece]:
    lengths, starts, rows = context.lengths, context.starts, context.rows
    begins = starts // BEGIN_QUANTUM * BEGIN_QUANTUM
    order = np.lexsort((-lengths, begins))
    waiting = order[starts[order] < lengths[order]].tolist()
    while waiting:
        first = waiting[0]
        begin, longest = int(begins[first]), int(lengths[first])
        chosen: list[int] = []
        for row in waiting[: max(1, num_tokens // (longest - begin))]:
            if begins[row] != begin or lengths[row] * MAX_PADDING < longest:
                break
            chosen.append(row)
        del waiting[: len(chosen)]
        index = np.stack([np.pad(rows[i], (0, longest - lengths[i]), mode="edge") for i in chosen])
        place = np.arange(begin, longest)
        is_own = (place >= starts[chosen, None]) & (place < lengths[chosen, None])
        keys = Places.of(torch.from_numpy(index).to(context.device))
        if is_own.all():
            yield Piece(keys, Places.of(keys.index[:, begin:]), None)
        else:  # results go through memory of their own: other rows have some of these tokens
            owned = torch.from_numpy(np.flatnonzero(is_own)).to(context.device)
            yield Piece(keys, Places(keys.index[:, begin:], None), owned)


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    spec: AttentionSpec,
    context: PackedContext,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], L [T, H]: log-sum over keys and sink, float32, or float64 for float64)."""
    wide = sum_dtype(q_THD.dtype)
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse = q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    for piece in pieces_of(context):
        q_BHQD = piece.queries.take(q_THD).transpose(1, 2)
        k_BGLD, v_BGLD = (piece.keys.take(x).transpose(1, 2) for x in (k_TGD, v_TGD))
        found = [piece.queries.take(x) for x in (out, lse)]
        for asked, seen, mask in piece.tiles(spec.window, q_THD.dtype):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_BHQD[:, :, asked],
                k_BGLD[:, :, seen],
                v_BGLD[:, :, seen],
                0.0,
                mask is None,
                attn_mask=mask,
                scale=spec.scale,
            )
            for of_piece, part in zip(found, parts, strict=True):
                of_piece[:, asked] = part.transpose(1, 2)
        for whole, of_piece in zip((out, lse), found, strict=True):
            piece.put(whole, of_piece)
    if spec.sinks is not None:
        both = torch.logaddexp(lse, spec.sinks.to(wide))
        out.mul_(torch.exp(lse - both)[..., None])
        lse = both
    return out, lse


Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""(q, k, v, sinks, out, L) of a forward, kept for its backward."""


Gradients = Callable[..., Sequence[Tensor]]
"""Called with dO, q, k, v, out, L, mask and scale of a tile, heads before places: (dQ, dK, dV)."""


def _stock_gradients(*tile: Tensor, mask: Tensor | None, scale: float) -> Sequence[Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tile, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def attend_backward(
    grad_out: Tensor,
    saved: Saved,
    spec: AttentionSpec,
    context: PackedContext,
    *,
    dtype: torch.dtype | None = None,
    tile: int | None = None,
    gradients: Gradients = _stock_gradients,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dQ, dK, dV, dsinks) from the output and L of any forward. dtype: of the products; None is
    the dtype of q. tile, gradients: how many queries `gradients` gets at once, None for whole rows;
    without a mask a query sees the keys up to its own."""
    q_THD, k_TGD, v_TGD, sinks_H, out, lse_TH = saved
    dtype, grad_out = dtype or q_THD.dtype, grad_out.contiguous()
    grad_q = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    totals = [
        torch.zeros_like(x, dtype=sum_dtype(x.dtype), memory_format=torch.contiguous_format)
        for x in (k_TGD, v_TGD)
    ]
    is_shared = bool(context.starts.any())
    for piece in pieces_of(context):
        take = piece.queries.take
        asked_q, asked_out = (take(x).to(dtype).transpose(1, 2) for x in (q_THD, out))
        asked_grad = piece.take_owned(grad_out).to(dtype).transpose(1, 2)
        asked_lse = take(lse_TH).transpose(1, 2).contiguous()
        keys, values = (piece.keys.take(x).to(dtype).transpose(1, 2) for x in (k_TGD, v_TGD))
        # Several tiles add to one key: in bfloat16 the small ones would be lost.
        sums = [
            torch.zeros(x.shape, dtype=totals[0].dtype, device=x.device) for x in (keys, values)
        ]
        found_q = piece.queries.take(grad_q)
        for asked, seen, mask in piece.tiles(spec.window, dtype, size=tile):
            queries = (x[:, :, asked] for x in (asked_grad, asked_q))
            results = (x[:, :, asked] for x in (asked_out, asked_lse))
            of_q, *of_keys = gradients(
                *queries,
                keys[:, :, seen],
                values[:, :, seen],
                *results,
                mask=mask,
                scale=spec.scale,
            )
            found_q[:, asked] = of_q.transpose(1, 2)
            for whole, part in zip(sums, of_keys, strict=True):
                whole[:, :, seen] += part
        piece.put(grad_q, found_q)
        for total, found in zip(totals, sums, strict=True):
            found = found.transpose(1, 2)
            if is_shared:
                total += sum_places(found.flatten(0, 1), piece.keys.index.flatten(), len(total))
            else:
                piece.put(total, found)
    grad_sinks = None if sinks_H is None else sink_gradient(sinks_H, grad_out, out, lse_TH)
    grad_k, grad_v = (total.to(k_TGD.dtype) for total in totals)
    return grad_q, grad_k, grad_v, grad_sinks


class SinkAttention(torch.autograd.Function):
    """`attend` and `attend_backward`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, spec, context):
        out, lse = attend(q, k, v, spec, context)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = spec, context
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return *attend_backward(grad_out, ctx.saved_tensors, *ctx.settings), None, None


def sum_places(values: Tensor, index: Tensor, num_tokens: int) -> Tensor:
    """[T, ...]: values [n, ...] of places, summed by token in an order that does not depend on the
    number of threads (see `context.take_rows`)."""
    summed = torch.ops.aten.embedding_dense_backward(
        values.flatten(1), index, num_tokens, -1, False
    )
    return summed.view(num_tokens, *values.shape[1:])


def sink_gradient(sinks_H: Tensor, grad_out: Tensor, out: Tensor, lse_TH: Tensor) -> Tensor:
    """[H]: -sum exp(sink - L) dO . O."""
    share = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH)
    return -share.mul_(_row_dots(grad_out, out, lse_TH.dtype)).sum(0).to(sinks_H.dtype)


def _row_dots(a_THD: Tensor, b_THD: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H]: dO . O, without a copy of either."""
    out = a_THD.new_empty(a_THD.shape[:2], dtype=dtype)
    for at in range(0, len(out), PIECE_TOKENS):
        part = slice(at, at + PIECE_TOKENS)
        torch.sum(a_THD[part].to(dtype) * b_THD[part], -1, out=out[part])
    return out
