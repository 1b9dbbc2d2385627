"""Attention over packed rows on a CPU: whole rows and windows, with exact sinks and gradients.

Stock flash attention has no sinks. With L = logaddexp(lse, sink), the softmax over keys and sink
is exp(score - L): the output is the stock one times exp(lse - L). The stock backward, given that
output and L in place of its own, returns the exact dQ, dK and dV, since it uses nothing but
exp(score - L) and dO . O. (Rescaling by a detached lse gives the right output, dV and sink
gradient, but a dQ and dK wrong by 28 to 55 %.) The sink's own gradient is -sum P_sink (dO . O) with
P_sink = exp(sink - L): its column of probabilities is dropped, so dP is 0 there. (The article on
gpt-oss with verl has a wrong sign in its full formula; its simplified one is this.)
Guard: tests/cpu/ops/test_attention.py

Rows go through the kernel in pieces, so that memory does not grow with their number. A long
beginning that several rows share is a stem: the tokens of all its rows read its keys in one call,
and the parts of a token's attention are merged by their L (as in arXiv 2402.05099). A window
costs O(T x window): rows are cut into chunks of queries, each over a band of keys: its own chunk
and the chunks before it that the window reaches. Only inputs, output and L are kept. The kernel
reads grouped heads and strides as they are (since torch 2.9): neither keys nor bands are repeated.

# T tokens  H query heads  G key heads  D head width  B rows (or chunks) of a piece  L its length
# N chunks  C queries of a chunk  K keys of a band  Q queries of a stem
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.ops.context import MAX_PADDING, AttentionSpec, PackedContext, sum_dtype
from lockstep.ops.transfer import to_device
from lockstep.types import Int32Array, Int64Array

Tensor = torch.Tensor

PIECE_TOKENS = 2048  # tokens of several rows per call: enough to fill a kernel, little to copy
CHUNK = 32  # queries that share a band; with more, most would read keys that they do not see
SLAB_CHUNKS = 16  # chunks per call
LEAST_STEM = 128  # tokens: a shorter beginning costs less than calls of its own


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Places that attend in one call: B rows of L queries, and the keys that they read."""

    index: Tensor
    """[B * L] int64: the token at each place. Past a row's end its last token is repeated."""
    shape: tuple[int, int]
    """(B, L)."""
    first: int | None
    """First token, where the places are B * L tokens in order, which are read in place."""
    owned: Tensor | None
    """[n] int64: places whose output is written to their token; None if all are. A place past a
    row's end owns no token, and a token shared by several rows has one owner."""
    key_index: Tensor | None = None
    """[(B + chunks before) * C] int64: tokens of the chunks that a windowed piece reads; None: a
    row's keys are its queries' tokens, and each query sees those up to itself."""
    reach: Tensor | None = None
    """[B] int64: number of preceding chunks of the same row, at most the chunks of a band."""
    first_key: int = 0
    """Start of `key_index` among the places of the whole band layout."""

    @classmethod
    def of(cls, index_BL: Tensor, is_owned_BL: Tensor, **band: Any) -> Piece:
        index, is_owned = index_BL.flatten(), is_owned_BL.flatten()
        is_whole = bool(is_owned.all())
        first = int(index[0])
        is_slice = is_whole and bool(
            (index == torch.arange(first, first + len(index), device=index.device)).all()
        )
        return cls(
            index,
            (index_BL.shape[0], index_BL.shape[1]),
            first if is_slice else None,
            None if is_whole else is_owned.nonzero()[:, 0],
            **band,
        )

    def take(self, x: Tensor) -> Tensor:
        """x [T, ...] at the places: [B, L, ...]."""
        if self.first is not None:
            return x[self.first : self.first + len(self.index)].unflatten(0, self.shape)
        return x.index_select(0, self.index).unflatten(0, self.shape)

    def take_owned(self, x: Tensor) -> Tensor:
        """Like `take`, and 0 at the places that own no token."""
        taken = self.take(x)
        if self.owned is not None:
            keep = torch.zeros(len(self.index), dtype=torch.bool, device=x.device)
            keep[self.owned] = True
            hidden = ~keep.view(*self.shape, *[1] * (x.dim() - 1))
            taken = taken.masked_fill_(hidden, 0.0)
        return taken

    def put(self, out: Tensor, values: Tensor) -> None:
        """values [B, L, ...] into out [T, ...], at the tokens that the places own."""
        values = values.flatten(0, 1)
        if self.first is not None:
            out[self.first : self.first + len(self.index)] = values
        elif self.owned is None:
            out[self.index] = values.to(out.dtype)
        else:
            out[self.index[self.owned]] = values[self.owned].to(out.dtype)

    def take_keys(self, x: Tensor) -> Tensor:
        """x [T, G, D] -> [B, G, keys, D]; with a window, bands that overlap in memory."""
        if self.key_index is None:
            return self.take(x).transpose(1, 2)
        G, D = x.shape[1:]
        keys = (len(self.key_index) // CHUNK - self.shape[0] + 1) * CHUNK
        flat = x.index_select(0, self.key_index)
        return flat.as_strided((self.shape[0], G, keys, D), (CHUNK * G * D, D, G * D, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """Tokens that several rows share, read by every later token of these rows."""

    keys: Tensor
    """[n] int64, adjacent in each of the rows."""
    queries: tuple[Tensor, ...]
    """[Q] int64 each: the tokens that follow in any of the rows, each once, in parts of one
    call."""


def stems_of(
    rows: Sequence[Int64Array],
) -> tuple[list[tuple[Int64Array, Int64Array]], list[Int64Array]]:
    """(keys and queries of each stem, runs of tokens that attend within themselves).

    rows: each the indices of its tokens; equal beginnings have equal indices. Every pair of a token
    and one before it in its row is in one stem or in one run; tokens of short common beginnings are
    in several runs. Cost: tokens of the rows times the depth of the tree.

    >>> long = np.arange(200)
    >>> stems, runs = stems_of([np.r_[long, 200:203], np.r_[long, 203:205]])
    >>> [(len(keys), queries.tolist()) for keys, queries in stems]
    [(200, [200, 201, 202, 203, 204])]
    >>> [len(run) for run in runs]
    [200, 3, 2]
    """
    stems: list[tuple[Int64Array, Int64Array]] = []
    runs: list[Int64Array] = []
    # Rows that are equal before `at`; their tokens before `start` are in stems already.
    waiting = [(list(rows), 0, 0)]
    while waiting:
        alike, start, at = waiting.pop()
        by_next: dict[int, list[Int64Array]] = {}
        for row in alike:
            if len(row) > at:
                by_next.setdefault(int(row[at]), []).append(row)
        if not by_next and at > start:
            runs.append(alike[0][start:])  # they all end here
        for group in by_next.values():
            first = group[0]
            if len(group) == 1:
                runs.append(first[start:])
                continue
            stop = min(num_equal(first, row) for row in group[1:])
            if stop - start < LEAST_STEM:
                waiting.append((group, start, stop))
                continue
            runs.append(first[start:stop])
            later = np.unique(np.concatenate([row[stop:] for row in group]))
            if len(later):
                stems.append((first[start:stop], later))
            waiting.append((group, stop, stop))
    return stems, runs


def num_equal(a: Int32Array | Int64Array, b: Int32Array | Int64Array) -> int:
    """Length of the longest common beginning."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """A context cut into pieces, for one window."""

    stems: tuple[Stem, ...]
    pieces: tuple[Piece, ...]
    mask: Tensor | None
    """[chunks before + 1, C, K] float32, indexed by `Piece.reach`: 0 where a query sees a key, else
    -inf. None if no row is longer than the window."""
    key_index: Tensor | None
    """[(chunks before + N) * C] int64: the token at each key of the bands. The first chunks fill
    the band before the first row, and are hidden."""
    key_owned: Tensor | None
    """[n] int64: one place of `key_index` for each token in it."""
    is_shared: bool
    """True if some token belongs to several rows."""


def layout_of(context: PackedContext, window: int | None) -> PackedLayout:
    """The layout, made once per context and window."""
    if window not in context.memo:
        context.memo[window] = _make_layout(context, window)
    return context.memo[window]


def _make_layout(context: PackedContext, window: int | None) -> PackedLayout:
    stems: list[Stem] = []
    if window is None or context.lengths.max() <= window:
        found, runs = stems_of(context.rows)
        if found:
            context = PackedContext.of_rows(runs, device=context.device)
        for keys, queries in found:
            at_keys, at_queries = (to_device(x, context.device) for x in (keys, queries))
            stems.append(Stem(at_keys, at_queries.split(PIECE_TOKENS)))
    pieces: list[Piece] = []
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    before = 0 if window is None else math.ceil((window - 1) / CHUNK)
    base = num_real = 0
    for index_BL in context.blocks:
        num_rows, length = index_BL.shape
        place = torch.arange(base, base + index_BL.numel(), device=index_BL.device)
        base += index_BL.numel()
        if context.place_index is None:
            is_owned_BL = torch.ones_like(index_BL, dtype=torch.bool)
        else:
            is_owned_BL = context.place_index[index_BL] == place.view_as(index_BL)
        # Tokens of a row differ from each other: only past its end does one repeat.
        lens = (index_BL[:, 1:] != index_BL[:, :-1]).sum(1) + 1
        num_real += int(lens.sum())
        if window is None or length <= window:
            rows = max(1, PIECE_TOKENS // length)
            for at in range(0, num_rows, rows):
                part = slice(at, at + rows), slice(int(lens[at : at + rows].max()))
                if bool(is_owned_BL[part].any()):
                    pieces.append(Piece.of(index_BL[part], is_owned_BL[part]))
        else:
            extra = -length % CHUNK
            index_BNC = F.pad(index_BL, (0, extra), mode="replicate").unflatten(1, (-1, CHUNK))
            is_owned_BNC = F.pad(is_owned_BL, (0, extra)).unflatten(1, (-1, CHUNK))
            number = torch.arange(index_BNC.shape[1], device=index_BL.device)
            has_tokens = number * CHUNK < lens[:, None]
            reach = number.clamp(max=before).expand(num_rows, -1)
            chunks.append((index_BNC[has_tokens], is_owned_BNC[has_tokens], reach[has_tokens]))
    num_tokens = base if context.place_index is None else len(context.place_index)
    is_shared = num_real > num_tokens
    if not chunks:
        return PackedLayout(tuple(stems), tuple(pieces), None, None, None, is_shared)
    index_NC, is_owned_NC, reach_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    key_index = F.pad(index_NC.flatten(), (before * CHUNK, 0), value=int(index_NC[0, 0]))
    # A chunk whose tokens are all owned elsewhere is read as keys and asks nothing.
    for start, stop in _runs(is_owned_NC.any(1).tolist()):
        for at in range(start, stop, SLAB_CHUNKS):
            end = min(at + SLAB_CHUNKS, stop)
            keys = slice(at * CHUNK, (end + before) * CHUNK)
            band = {"key_index": key_index[keys], "reach": reach_N[at:end], "first_key": keys.start}
            pieces.append(Piece.of(index_NC[at:end], is_owned_NC[at:end], **band))
    assert window is not None, "only a window makes chunks"
    mask = _band_masks(window, before, key_index.device)
    owned = is_owned_NC.flatten().nonzero()[:, 0] + before * CHUNK
    return PackedLayout((), tuple(pieces), mask, key_index, owned, is_shared)


def _runs(claims: list[bool]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of True."""
    stop = 0
    for claim, run in groupby(claims):
        start, stop = stop, stop + len(list(run))
        if claim:
            yield start, stop


def _band_masks(window: int, before: int, device: torch.device) -> Tensor:
    at_query = torch.arange(CHUNK, device=device)[:, None] + before * CHUNK
    at_key = torch.arange((before + 1) * CHUNK, device=device)
    hidden = (at_key > at_query) | (at_key <= at_query - window)
    # With `reach` chunks of the row before it, a chunk's band begins with keys of another row.
    first = (before - torch.arange(before + 1, device=device)) * CHUNK
    hidden = hidden | (at_key < first[:, None, None])
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)


def own_queries(context: PackedContext) -> tuple[tuple[Piece, Tensor], ...]:
    """(B rows of queries, [B, L] int64 the tokens of these rows from their start) of each piece.

    For ops that read a row's keys in its order: each token asks in the first row that has it, and
    its queries are the last of the L. Made once per context.
    """
    if "own queries" not in context.memo:
        context.memo["own queries"] = tuple(_own_queries(context))
    return context.memo["own queries"]


def _own_queries(context: PackedContext) -> Iterator[tuple[Piece, Tensor]]:
    lengths, starts, rows = context.lengths, context.starts, context.rows
    begins = starts // LEAST_STEM * LEAST_STEM  # rows that begin nearly alike go together
    order = np.lexsort((-lengths, begins))
    waiting = order[starts[order] < lengths[order]].tolist()
    while waiting:
        first = waiting[0]
        begin, longest = int(begins[first]), int(lengths[first])
        chosen: list[int] = []
        for row in waiting[: max(1, PIECE_TOKENS // (longest - begin))]:
            if begins[row] != begin or lengths[row] * MAX_PADDING < longest:
                break
            chosen.append(row)
        del waiting[: len(chosen)]
        begin = int(starts[chosen].min())
        index = np.stack([np.pad(rows[i], (0, longest - lengths[i]), mode="edge") for i in chosen])
        place = np.arange(begin, longest)
        is_own = (place >= starts[chosen, None]) & (place < lengths[chosen, None])
        index_BL = to_device(index, context.device)
        yield Piece.of(index_BL[:, begin:], to_device(is_own, context.device)), index_BL


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, spec: AttentionSpec, context: PackedContext
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], L [T, H]: log-sum over keys and sink, float32, or float64 for float64)."""
    layout, wide = layout_of(context, spec.window), sum_dtype(q_THD.dtype)
    dtype = wide if layout.stems else q_THD.dtype  # parts are merged
    out = torch.empty_like(q_THD, dtype=dtype, memory_format=torch.contiguous_format)
    lse = q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    for piece in layout.pieces:
        mask = _mask_of(piece, layout, q_THD.dtype)
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            piece.take(q_THD).transpose(1, 2),
            piece.take_keys(k_TGD),
            piece.take_keys(v_TGD),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=spec.scale,
        )
        piece.put(out, part.transpose(1, 2))
        piece.put(lse, part_lse.transpose(1, 2))
    for stem in layout.stems:
        keys, values = (_take_row(x, stem.keys) for x in (k_TGD, v_TGD))
        for queries in stem.queries:
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _take_row(q_THD, queries), keys, values, scale=spec.scale
            )
            part, part_lse = part[0].transpose(0, 1), part_lse[0].t()
            before = lse[queries]
            both = torch.logaddexp(before, part_lse)
            whole = out[queries].mul_(torch.exp(before - both)[..., None])
            out[queries] = whole.addcmul_(part.to(wide), torch.exp(part_lse - both)[..., None])
            lse[queries] = both
    if spec.sinks is not None:
        both = torch.logaddexp(lse, spec.sinks.to(wide))
        out.mul_(torch.exp(lse - both)[..., None])
        lse = both
    return out.to(q_THD.dtype), lse


def _take_row(x: Tensor, index: Tensor) -> Tensor:
    """x [T, H, D] at these tokens: [1, H, n, D]."""
    return x.index_select(0, index).transpose(0, 1)[None]


Saved = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""(q, k, v, sinks, out, L) of a forward, kept for its backward."""


def attend_backward(
    grad_out: Tensor,
    saved: Saved,
    spec: AttentionSpec,
    context: PackedContext,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dQ, dK, dV, dsinks) by the stock kernel, from the output and L of any forward. dtype: of the
    products; None is the dtype of q."""
    q_THD, k_TGD, v_TGD, sinks_H, out, lse_TH = saved
    layout, dtype = layout_of(context, spec.window), dtype or q_THD.dtype
    grad_out = grad_out.contiguous()
    # Several bands, rows or stems add to one token: in bfloat16 the small ones would be lost.
    wide = sum_dtype(q_THD.dtype) if layout.stems else q_THD.dtype
    grad_q = torch.empty_like(q_THD, dtype=wide, memory_format=torch.contiguous_format)
    totals = [
        torch.zeros_like(x, dtype=sum_dtype(x.dtype), memory_format=torch.contiguous_format)
        for x in (k_TGD, v_TGD)
    ]
    bands: list[Tensor] = []
    if layout.key_index is not None:
        bands = [x.new_zeros(len(layout.key_index), *x.shape[1:]) for x in totals]
    for piece in layout.pieces:
        mask = _mask_of(piece, layout, dtype)
        found_q, *found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            piece.take_owned(grad_out).to(dtype).transpose(1, 2),
            piece.take(q_THD).to(dtype).transpose(1, 2),
            piece.take_keys(k_TGD).to(dtype),
            piece.take_keys(v_TGD).to(dtype),
            piece.take(out).to(dtype).transpose(1, 2),
            piece.take(lse_TH).transpose(1, 2).contiguous(),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=spec.scale,
        )
        piece.put(grad_q, found_q.transpose(1, 2))
        if piece.key_index is not None:
            for band, part in zip(bands, found, strict=True):
                _add_bands(band, part.transpose(1, 2), piece.first_key)
        else:
            for total, part in zip(totals, found, strict=True):
                if layout.is_shared:
                    _add_places(total, part.transpose(1, 2).flatten(0, 1), piece.index)
                else:
                    piece.put(total, part.transpose(1, 2))
    for stem in layout.stems:
        _add_stem((grad_q, *totals), stem, grad_out, saved, scale=spec.scale, dtype=dtype)
    for total, band in zip(totals, bands, strict=False):
        assert layout.key_index is not None and layout.key_owned is not None, "bands have keys"
        if layout.is_shared:
            _add_places(total, band, layout.key_index)
        else:
            total[layout.key_index[layout.key_owned]] = band[layout.key_owned]
    grad_sinks = None if sinks_H is None else _sink_gradient(sinks_H, grad_out, out, lse_TH)
    grad_k, grad_v = (total.to(k_TGD.dtype) for total in totals)
    return grad_q.to(q_THD.dtype), grad_k, grad_v, grad_sinks


def _add_stem(
    grads: tuple[Tensor, ...],
    stem: Stem,
    grad_out: Tensor,
    saved: Saved,
    *,
    scale: float,
    dtype: torch.dtype,
) -> None:
    """Adds what a stem's queries and keys contribute to (dQ, dK, dV)."""
    q_THD, k_TGD, v_TGD, _, out, lse_TH = saved
    keys, values = (_take_row(x, stem.keys).to(dtype) for x in (k_TGD, v_TGD))
    for queries in stem.queries:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_take_row(x, queries).to(dtype) for x in (grad_out, q_THD)),
            keys,
            values,
            _take_row(out, queries).to(dtype),
            lse_TH[queries].t()[None].contiguous(),
            0.0,
            False,
            scale=scale,
        )
        places = queries, stem.keys, stem.keys
        for total, part, index in zip(grads, found, places, strict=True):
            # An index has each token once: sums follow the order of the stems.
            total.index_add_(0, index, part[0].transpose(0, 1).to(total.dtype))


class PackedAttention(torch.autograd.Function):
    """Attention over packed rows by two functions, such as `attend` and `attend_backward`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, spec, context, forward, backward):
        out, lse = forward(q, k, v, spec, context)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings, ctx.gradients = (spec, context), backward
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return *ctx.gradients(grad_out, ctx.saved_tensors, *ctx.settings), *[None] * 4


def _mask_of(piece: Piece, layout: PackedLayout, dtype: torch.dtype) -> Tensor | None:
    """[B, 1, C, K], or None: causal."""
    if piece.reach is None or layout.mask is None:
        return None
    return layout.mask[piece.reach, None].to(dtype)


def _add_bands(total: Tensor, part_BKGD: Tensor, first: int) -> None:
    """Adds bands, which overlap, chunk by chunk: the j-th chunks of all bands are adjacent."""
    B = len(part_BKGD)
    part = part_BKGD.unflatten(1, (-1, CHUNK))
    for j in range(part.shape[1]):
        at = first + j * CHUNK
        total[at : at + B * CHUNK].unflatten(0, (B, CHUNK)).add_(part[:, j])


def _add_places(total: Tensor, values: Tensor, index: Tensor) -> None:
    """Adds values [n, ...] of places to their tokens in total [T, ...], in an order that does not
    depend on the number of threads (see `context.take_rows`)."""
    summed = torch.ops.aten.embedding_dense_backward(
        values.flatten(1).to(total.dtype), index, len(total), -1, False
    )
    total.add_(summed.view_as(total))


def _sink_gradient(sinks_H: Tensor, grad_out: Tensor, out: Tensor, lse_TH: Tensor) -> Tensor:
    share = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH)
    return -share.mul_(_row_dots(grad_out, out, lse_TH.dtype)).sum(0).to(sinks_H.dtype)


def _row_dots(a_THD: Tensor, b_THD: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H]: dO . O, without a copy of either."""
    out = a_THD.new_empty(a_THD.shape[:2], dtype=dtype)
    for at in range(0, len(out), PIECE_TOKENS):
        part = slice(at, at + PIECE_TOKENS)
        torch.sum(a_THD[part].to(dtype) * b_THD[part], -1, out=out[part])
    return out
