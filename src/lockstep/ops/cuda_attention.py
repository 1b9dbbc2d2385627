"""Attention on a GPU: one forward kernel for a sampler's steps and a trainer's packed rows, and the
backward of both precisions.

The keys of a sequence are cut into splits of SPLIT_KEYS, counted from its start. Within a split,
blocks of keys are summed left to right (online softmax); the splits are combined left to right,
after the sink. A program computes a tile of queries over all splits, or over a single one: then its
result waits in memory, and the program that ends last combines the splits of the tile. Both run the
same instructions in the same order, so how the work is cut changes no bit: a decode step of one
long row fills the chip, and a packed row needs no memory for its splits.

Backward is torch's own flash backward on this forward's output and log-sums. It uses only
exp(score - lse) and dO . O, and both include sinks (see `ops.packed`). That kernel has no float32,
so scores in float32 are computed again in tiles by stock products.

# T tokens  H query heads  G key heads  R = H / G  D head width  B rows  L length of a padded block
"""

# Triton's annotations say that a reduction may give a tuple, and that cdiv takes constants only.
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import deterministic

from lockstep.ops.context import (
    SPLIT_KEYS,
    TILE_ROWS,
    AttentionSpec,
    AttentionWork,
    PackedContext,
    PagedContext,
)
from lockstep.ops.cuda_kernels import (
    POINTER_ALIGNMENT,
    aligned,
    generation,
    jit,
    launch,
    loop_bound,
    of_chip,
    tl,
    triton,
)
from lockstep.ops.packed import Saved

Tensor = torch.Tensor

NO_WINDOW = 1 << 30  # wider than any sequence
BACKWARD_SCORES = 1 << 26  # scores of one tile of float32's backward: 256 MiB
FLASH_WIDTH = 256  # widest head of torch's flash backward


class Tile(NamedTuple):
    """Shape of a program. Depends on dtype and width alone: the same for one query and for
    thousands. It has 64 rows, the fewest of wgmma.

    The sums of a split and of all splits before it stay in registers, so a program takes at most
    128 columns of the values. In float32 it takes fewer, since products hold both factors in
    registers.   Guard: tests/gpu_host
    """

    keys: int
    """Keys of a block."""
    chunk: int
    """Columns of queries and keys that are multiplied at once."""
    values: int
    """Columns of the values."""
    num_warps: int
    num_stages: int


TILES = {
    8: {64: Tile(32, 64, 64, 4, 2), 128: Tile(64, 128, 128, 8, 2), 256: Tile(32, 256, 128, 8, 2)},
    9: {64: Tile(64, 64, 64, 4, 2), 128: Tile(64, 128, 128, 8, 2), 256: Tile(64, 256, 128, 8, 2)},
    10: {64: Tile(64, 64, 64, 8, 2), 128: Tile(32, 128, 128, 8, 2), 256: Tile(32, 128, 64, 8, 2)},
}
TILES[12] = TILES[8] | {128: TILES[10][128]}  # consumer Blackwell has Ampere's instructions
"""First generation of the chip -> width of a head -> the largest tile of two-byte numbers that
ptxas keeps in registers alone."""


def tile_of(dtype: torch.dtype, width: int, chip: int) -> Tile:
    """width: a power of two. chip: major number of the compute capability."""
    if dtype.itemsize > 2:
        return Tile(16, min(width, 32), min(width, 64), 8, 1)
    # Wider heads (of latents) are read in pieces, with the tile of width 128.
    tile = of_chip(TILES, chip)[max(width, 64) if width <= 256 else 128]
    return tile._replace(chunk=min(width, tile.chunk), values=min(width, tile.values))


# -- the kernel -----------------------------------------------------------------------------------

UNSPECIALIZED = (
    *("page_size", "slot_rows", "window"),
    *("q_head_step", "q_step", "k_head_step", "k_step", "v_head_step", "v_step"),
)
INTEGERS = (
    *("tokens", "query_starts", "lengths", "page_starts"),
    *("pages", "items", "num_items", "counters"),
)
"""Fields of `AttentionWork` in the order of the kernel: one instance whatever their addresses."""


@jit()
def _merge(highest, total, value, of_split, total_of_split, value_of_split):
    """A running softmax and the next split. Explicit multiply-adds: the two callers must not be
    contracted in two ways. A split that a row does not see leaves the row as it is."""
    new = tl.maximum(highest, of_split)
    shift = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is NaN
    old_share = tl.exp(highest - shift)
    new_share = tl.exp(of_split - shift)
    total = tl.fma(total, old_share, total_of_split * new_share)
    value = tl.fma(
        value, tl.broadcast_to(old_share[:, None], value.shape), value_of_split * new_share[:, None]
    )
    return new, total, value


@jit(*UNSPECIALIZED, unaligned=INTEGERS)
def _attention_kernel(
    q,
    q_head_step,
    q_step,
    k,
    k_head_step,
    k_step,
    v,
    v_head_step,
    v_step,
    sinks,
    tokens,
    query_starts,
    lengths,
    page_starts,
    pages,
    items,
    num_items,
    counters,
    values_of_splits,
    sums_of_splits,
    out,
    lse,
    page_size,
    slot_rows,
    window,
    scale,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Programs of key head `program_id(1)` take the items in turn. Rows of a tile are the queries
    of one key head: R heads of each query are adjacent. `program_id(2)` is one of the parts, VALUES
    wide, of the values.

    Blocks before every row's window and after every row's position are left out. A block that is
    read for another row changes nothing: its scores are -inf, so the maximum stays, the rescaling
    is exp(0) = 1 (or 0, of a sum that is still 0), and exact zeros are added.
    """
    g = tl.program_id(1)
    d = tl.arange(0, CHUNK)[None, :]
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)[None, :]
    is_column = column < D
    lane = tl.arange(0, ROWS)
    for item in range(
        loop_bound(tl.program_id(0)), loop_bound(tl.load(num_items)), loop_bound(tl.num_programs(0))
    ):
        b = tl.load(items + item * 4).to(tl.int64)
        row = tl.load(items + item * 4 + 1) + lane
        split = tl.load(items + item * 4 + 2)
        slot = tl.load(items + item * 4 + 3).to(tl.int64)
        first_place = tl.load(query_starts + b)
        Q = tl.load(query_starts + b + 1) - first_place
        page_start = tl.load(page_starts + b)
        is_row = row < Q * R
        query = row // R
        head = g * R + row % R
        place = (first_place + query).to(tl.int64)
        position = tl.where(is_row, tl.load(lengths + b) - Q + query, -1)
        token = place
        if tokens is not None:
            token = tl.load(tokens + place, mask=is_row, other=0).to(tl.int64)
        q_row = (head * q_head_step + token * q_step)[:, None] * D
        q_tile = tl.load(q + q_row + d, mask=is_row[:, None] & (d < D), other=0.0)

        is_cut = split >= 0
        if sinks is None:
            empty_highest = tl.full((ROWS,), float("-inf"), tl.float32)
            empty_total = tl.zeros((ROWS,), tl.float32)
        else:
            empty_highest = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            empty_total = tl.full((ROWS,), 1.0, tl.float32)  # the sink's own exp(sink - highest)
        highest = tl.where(is_cut, float("-inf"), empty_highest)
        total = tl.where(is_cut, 0.0, empty_total)
        value = tl.zeros((ROWS, VALUES), tl.float32)
        split_highest = tl.full((ROWS,), float("-inf"), tl.float32)
        split_total = tl.zeros((ROWS,), tl.float32)
        split_value = tl.zeros((ROWS, VALUES), tl.float32)
        stop = tl.max(position, 0) + 1
        start = tl.maximum(tl.min(tl.where(is_row, position, stop), 0) - window + 1, 0)
        num_splits = (stop + SPLIT - 1) // SPLIT
        first_block = tl.where(is_cut, tl.maximum(start, split * SPLIT), start) // KEYS
        end = tl.where(is_cut, tl.minimum(stop, (split + 1) * SPLIT), stop)
        for block in range(loop_bound(first_block), loop_bound((end + KEYS - 1) // KEYS)):
            if block % (SPLIT // KEYS) == 0:
                highest, total, value = _merge(
                    highest, total, value, split_highest, split_total, split_value
                )
                split_highest = tl.full((ROWS,), float("-inf"), tl.float32)
                split_total = tl.zeros((ROWS,), tl.float32)
                split_value = tl.zeros((ROWS, VALUES), tl.float32)
            key = block * KEYS + tl.arange(0, KEYS)
            is_key = key < stop
            page = tl.load(pages + page_start + key // page_size, mask=is_key, other=0)
            at_key = (page + key % page_size).to(tl.int64)
            k_row = (g * k_head_step + at_key * k_step)[:, None] * D
            v_row = (g * v_head_step + at_key * v_step)[:, None] * D
            k_tile = tl.load(k + k_row + d, mask=is_key[:, None] & (d < D), other=0.0)
            v_tile = tl.load(v + v_row + column, mask=is_key[:, None] & is_column, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            for at in range(CHUNK, WIDTH, CHUNK):
                part = at + d
                q_part = tl.load(q + q_row + part, mask=is_row[:, None] & (part < D), other=0.0)
                k_part = tl.load(k + k_row + part, mask=is_key[:, None] & (part < D), other=0.0)
                scores = tl.dot(q_part, tl.trans(k_part), scores, input_precision="ieee")
            scores = scores * scale
            age = position[:, None] - key[None, :]
            scores = tl.where((age >= 0) & (age < window), scores, float("-inf"))
            new_highest = tl.maximum(split_highest, tl.max(scores, 1))
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            rescale = tl.exp(split_highest - shift)
            probs = tl.exp(scores - shift[:, None])
            split_total = tl.fma(split_total, rescale, tl.sum(probs, 1))
            split_value = split_value * rescale[:, None]
            split_value = tl.dot(
                probs.to(v_tile.dtype), v_tile, split_value, input_precision="ieee"
            )
            split_highest = new_highest
        highest, total, value = _merge(
            highest, total, value, split_highest, split_total, split_value
        )

        at_slot = (slot * G + g) * slot_rows + lane
        is_kept = is_row & (lane < slot_rows)
        is_done = split < 0
        num_parts = 0
        if is_cut:
            tl.store(sums_of_splits + at_slot * 2, highest, mask=is_kept)
            tl.store(sums_of_splits + at_slot * 2 + 1, total, mask=is_kept)
            where = at_slot[:, None] * D + column
            tl.store(values_of_splits + where, value, mask=is_kept[:, None] & is_column)
            tl.debug_barrier()  # all threads have stored before one of them counts
            counter = counters + ((slot - split) * G + g) * MOST_PARTS + tl.program_id(2)
            is_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1
            if is_done:
                tl.store(counter, 0)
                num_parts = num_splits
        # The program that ends last combines; a whole piece has nothing to combine.
        highest = tl.where(num_parts > 0, empty_highest, highest)
        total = tl.where(num_parts > 0, empty_total, total)
        value = tl.where(num_parts > 0, 0.0, value)
        for part in range(0, loop_bound(num_parts)):
            at_part = at_slot + (part - split) * G * slot_rows
            sums = sums_of_splits + at_part * 2
            of_part = tl.load(sums, mask=is_kept, other=float("-inf"), cache_modifier=".cg")
            total_of_part = tl.load(sums + 1, mask=is_kept, other=0.0, cache_modifier=".cg")
            value_of_part = tl.load(
                values_of_splits + at_part[:, None] * D + column,
                mask=is_kept[:, None] & is_column,
                other=0.0,
                cache_modifier=".cg",
            )
            highest, total, value = _merge(
                highest, total, value, of_part, total_of_part, value_of_part
            )
        if is_done:
            where = place * (G * R) + head
            tl.store(lse + where, highest + tl.log(total), mask=is_row)
            result = (value / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + where[:, None] * D + column, result, mask=is_row[:, None] & is_column)


class Vectors(NamedTuple):
    """Heads of width D in memory: head h at place n is vector h * head_step + n * place_step.

    Steps are in units of D, so a vector's alignment does not depend on the steps.
    """

    storage: Tensor
    head_step: int
    place_step: int

    @classmethod
    def of_tokens(cls, x_THD: Tensor) -> Vectors:
        """A place is a token. Copies `x_THD` unless it is an array of aligned vectors."""
        D = x_THD.shape[2]
        token, head, element = x_THD.stride()
        offset = x_THD.storage_offset() * x_THD.element_size()
        if element != 1 or head % D or token % D or offset % POINTER_ALIGNMENT:
            x_THD = x_THD.clone(memory_format=torch.contiguous_format)
            token, head, _ = x_THD.stride()
        return cls(x_THD, head // D, token // D)

    @classmethod
    def of_pages(cls, cache_GPSD: Tensor) -> Vectors:
        """A place is page * page_size + offset. Never copies."""
        _, P, S, _ = cache_GPSD.shape
        return cls(cache_GPSD, P * S, 1)


def attend(
    q_THD: Tensor,
    keys: Vectors,
    values: Vectors,
    work: AttentionWork,
    spec: AttentionSpec,
    *,
    num_key_heads: int,
    num_places: int,
) -> tuple[Tensor, Tensor]:
    """(out [places, H, D], lse [places, H] float32: log-sum-exp of keys and sink)."""
    (_, H, D), G = q_THD.shape, num_key_heads
    out = q_THD.new_empty(num_places, H, D)
    lse = torch.empty(num_places, H, dtype=torch.float32, device=q_THD.device)
    queries, width = Vectors.of_tokens(q_THD), max(16, triton.next_power_of_2(D))
    tile = tile_of(q_THD.dtype, width, generation())
    slot_rows = min(TILE_ROWS, work.max_queries * (H // G))
    num_slots = len(work.counters)
    parts = torch.empty(num_slots, G, slot_rows, D, dtype=torch.float32, device=q_THD.device)
    sums = torch.empty(num_slots, G, slot_rows, 2, dtype=torch.float32, device=q_THD.device)
    launch(
        _attention_kernel,
        (work.num_programs or len(work.items), G, triton.cdiv(D, tile.values)),
        *queries,
        *keys,
        *values,
        None if spec.sinks is None else aligned(spec.sinks),
        *(getattr(work, name) for name in INTEGERS),
        *(parts, sums, out, lse),
        *(work.page_size, slot_rows),
        NO_WINDOW if spec.window is None else spec.window,
        spec.scale,
        *(G, H // G, D, triton.cdiv(D, tile.chunk) * tile.chunk, tile.chunk, tile.values),
        *(work.counters.shape[2], TILE_ROWS, tile.keys, SPLIT_KEYS),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


def paged_attention(q_THD: Tensor, spec: AttentionSpec, context: PagedContext) -> Tensor:
    """[T, H, D]: attention over pages that already hold the new keys and values."""
    work = context.work
    assert work is not None, "the context is for ops that read padded blocks"
    keys, values = context.keys[spec.layer], context.values[spec.layer]
    k, v = Vectors.of_pages(keys), Vectors.of_pages(values)
    return attend(q_THD, k, v, work, spec, num_key_heads=len(keys), num_places=len(q_THD))[0]


# -- packed rows ----------------------------------------------------------------------------------


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PackedContext
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], lse [T, H]). Packed rows are rows of one page each; rows that share tokens
    have pages of one token."""
    work = context.work((q.shape[1], k.shape[1]))
    at_k, at_v = Vectors.of_tokens(k), Vectors.of_tokens(v)
    out, lse = attend(q, at_k, at_v, work, spec, num_key_heads=k.shape[1], num_places=len(q))
    if work.token_places is not None:
        return out.index_select(0, work.token_places), lse.index_select(0, work.token_places)
    return out, lse


def packed_backward(
    grad_out: Tensor, saved: Saved, spec: AttentionSpec, context: PackedContext
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `packed.attend_backward`."""
    (q, k, v, sinks, out, lse), D = saved, saved[0].shape[2]
    is_flash = q.dtype.itemsize == 2 and D <= FLASH_WIDTH and D % 8 == 0
    backward = _flash_backward if is_flash else _tiled_backward
    grads = backward((grad_out, q, k, v, out, lse), spec, context)
    return *grads, None if sinks is None else _sink_gradient(grad_out, out, lse, sinks)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(dO, q, k, v, out, lse), the inputs of a backward."""


def _flash_backward(
    parts: Parts, spec: AttentionSpec, context: PackedContext
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, k, v, out, lse = parts
    work = context.work((q.shape[1], k.shape[1]))
    if work.tokens is None or work.token_places is None:
        return _flash(parts, spec, work, key_starts=work.query_starts)
    grad_Q, q_Q, out_Q, lse_Q = (x.index_select(0, work.tokens) for x in (grad_out, q, out, lse))
    k_P, v_P = (x.index_select(0, work.pages) for x in (k, v))
    key_starts = F.pad(work.page_starts, (0, 1), value=len(work.pages))
    found = _flash((grad_Q, q_Q, k_P, v_P, out_Q, lse_Q), spec, work, key_starts=key_starts)
    grad_k, grad_v = (_sum_places(x, work.pages, len(k)) for x in found[1:])
    return found[0].index_select(0, work.token_places), grad_k, grad_v


def _flash(
    parts: Parts, spec: AttentionSpec, work: AttentionWork, *, key_starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's backward in its deterministic form: otherwise dQ is summed by atomics. The queries of
    a row are at its last positions, as its causal mask has it (FlashAttention 2.1 and later)."""
    grad_out, q, k, v, out, lse = parts
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    grad_LHD, lse_HL = grad_out.contiguous(), lse.t().contiguous()
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(
            *(grad_LHD, q, k, v, out, lse_HL),
            *(work.query_starts, key_starts, work.max_queries, work.max_keys),
            *(0.0, True, unused, unused),
            scale=spec.scale,
            window_size_left=-1 if spec.window is None else spec.window - 1,
            window_size_right=0,
        )


_SWITCHING = threading.Lock()


@contextmanager
def _deterministic() -> Generator[None]:
    """Torch's deterministic mode for one call. The mode belongs to the process, so one thread at a
    time switches it: each has it on, and leaves it as it was. Ops of other threads may warn
    meanwhile, and raise nothing."""
    filling = "fill_uninitialized_memory"
    with _SWITCHING:
        before, fills = torch.get_deterministic_debug_mode(), getattr(deterministic, filling)
        setattr(deterministic, filling, False)  # a property that type checkers do not know
        torch.set_deterministic_debug_mode(max(before, 1))
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            setattr(deterministic, filling, fills)


def _through(grad_out: Tensor, out: Tensor) -> Tensor:
    """[T, H] float32: dO . O."""
    return (grad_out.float() * out.float()).sum(-1)


def _sink_gradient(grad_out: Tensor, out: Tensor, lse_TH: Tensor, sinks: Tensor) -> Tensor:
    """[H]: -sum exp(sink - lse) dO . O."""
    share_TH = torch.exp(sinks - lse_TH)  # in float32
    return -(share_TH * _through(grad_out, out)).sum(0).to(sinks.dtype)


def _sum_places(x: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """[T, ...]: values of places, summed by token in one order. On CUDA it sorts, without
    atomics."""
    total = torch.zeros(num_tokens, *x.shape[1:], dtype=torch.float32, device=x.device)
    return total.index_put_((tokens,), x.float(), accumulate=True).to(x.dtype)


def _tiled_backward(
    parts: Parts, spec: AttentionSpec, context: PackedContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the definition. With P = exp(scores - lse), dS = P * (dP - dO . O)."""
    grad_out, q, k, v, out, lse_TH = parts
    through_TH = _through(grad_out, out)
    # An output is read at one of its places; the gradient of its other places and of padding is 0.
    grad_places, through_places = (_spread(x, context) for x in (grad_out, through_TH))
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    first = 0
    for index in context.blocks:
        places = slice(first, first := first + index.numel())
        found = _block_gradients(
            q[index],
            k[index],
            v[index],
            grad_places[places].view(*index.shape, *q.shape[1:]),
            lse_TH[index],
            through_places[places].view(*index.shape, -1),
            spec,
        )
        for grad, part in zip(grads, found, strict=True):
            # Rows may share tokens. On CUDA this sorts, then sums in one order, without atomics.
            grad.index_put_((index,), part, accumulate=True)
    grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


def _spread(x_T: Tensor, context: PackedContext) -> Tensor:
    """Puts each token's value at its place in the blocks laid end to end; 0 elsewhere."""
    if context.place_index is None:
        return x_T
    num_places = sum(index.numel() for index in context.blocks)
    places = x_T.new_zeros(num_places, *x_T.shape[1:])
    places[context.place_index] = x_T
    return places


def _block_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    through: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ [B, L, H, D], dK, dV [B, L, G, D]), float32. q, grad_out [B, L, H, D], k, v [B, L, G, D],
    lse and through (dO . O) [B, L, H] float32."""
    (B, L, H, D), G, window, scale = q.shape, k.shape[2], spec.window, spec.scale
    q, grad_out = (x.view(B, L, G, -1, D).permute(0, 2, 3, 1, 4) for x in (q, grad_out))
    lse, through = (x.view(B, L, G, -1, 1).permute(0, 2, 3, 1, 4) for x in (lse, through))
    k, v = (x.transpose(1, 2).reshape(B * G, L, D) for x in (k, v))
    grad_q = q.new_empty(q.shape, dtype=torch.float32)
    grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    step = max(16, BACKWARD_SCORES // (B * H * L))
    for start in range(0, L, step):
        stop = min(L, start + step)
        keys = slice(0 if window is None else max(0, start - window + 1), stop)

        def tile(x: Tensor, rows: slice = slice(start, stop)) -> Tensor:
            return x[:, :, :, rows].reshape(B * G, -1, x.shape[-1])

        q_tile, grad_tile = tile(q), tile(grad_out)
        probs = _matmul(q_tile, k[:, keys].transpose(1, 2)).mul_(scale).sub_(tile(lse)).exp_()
        at_query = torch.arange(start, stop, device=q.device)[:, None]
        at_key = torch.arange(keys.start, stop, device=q.device)
        hidden = at_key > at_query
        if window is not None:
            hidden |= at_key <= at_query - window
        probs.view(B * G, -1, *hidden.shape).masked_fill_(hidden, 0.0)
        grad_v[:, keys] += _matmul(probs.to(q.dtype).transpose(1, 2), grad_tile)
        grad_scores = _matmul(grad_tile, v[:, keys].transpose(1, 2)).sub_(tile(through))
        grad_scores = grad_scores.mul_(probs).mul_(scale).to(q.dtype)
        grad_k[:, keys] += _matmul(grad_scores.transpose(1, 2), q_tile)
        grad_q[:, :, :, start:stop] = _matmul(grad_scores, k[:, keys]).view(
            B, G, -1, stop - start, D
        )
    grad_k, grad_v = (x.view(B, G, L, D).transpose(1, 2) for x in (grad_k, grad_v))
    return grad_q.permute(0, 3, 1, 2, 4).reshape(B, L, H, D), grad_k, grad_v


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, summed and returned in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)
