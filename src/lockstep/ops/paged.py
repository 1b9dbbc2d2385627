"""Attention of a step over a paged cache, for any ops.

Decides where keys are read and which of them a query sees; the ops compute. Queries of one key head
are rows of one matrix, so that each head's keys are read once.

# T tokens  B sequences of a block  Q new tokens of each  H query heads  G key heads  D head width
# N = B * G matrices  R rows of each: H/G * Q, rounded up  L keys  S page size  P pages
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lockstep.ops.context import AttentionSpec, PagedBlock, PagedContext, ResidentRows, planes_of

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [N, R, D], k [N, L, D], v [N, L, D], mask [N or 1, R, L], sinks [N, R, 1] or
None) -> [N, R, D]"""

MASK_TABLE_LENGTH = 1024  # 4 MiB of float32; masks of longer sequences are made in every step
ALL = slice(None)
QUERY_TILE = 128  # queries of a sequence that attend together; keys after them are not read


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """The parts of a paged context that ops compute, and the sizes of their blocks.

    The keys that `attend` gets begin at a multiple of `key_block`, counted from the start of the
    sequence, and their number is a multiple of `key_quantum`. R is a multiple of `row_quantum`.
    """

    attend: Attend
    key_block: int
    key_quantum: int
    row_quantum: int = 1
    copies_parts: bool = False
    """True if its products copy keys that are not contiguous: resident rows are read to their end,
    which is at most twice as far."""


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    spec: AttentionSpec,
    context: PagedContext,
    kernel: PagedKernel,
) -> Tensor:
    """Runs `attend` on each block of a context whose new keys and values are written: [T, H, D].
    Keys before every query's window or after every query are left out. Masks and sinks are float32,
    or q's dtype if that is wider."""
    key_block, key_quantum = kernel.key_block, kernel.key_quantum
    H, D = q_THD.shape[1:]
    planes = [plane[spec.layer] for plane in planes_of(context)]
    keys = planes[0]
    G = keys.shape[0]
    wide = torch.float32 if q_THD.dtype.itemsize < 4 else q_THD.dtype
    sinks = None if spec.sinks is None else spec.sinks.to(wide)
    window = spec.window

    def of_block(block: PagedBlock) -> Tensor:
        """Attention of one block: [B * Q, H, D]."""
        B, Q = block.positions.shape
        if block.token_index is None:
            q = q_THD[block.first_token : block.first_token + B * Q]
        else:
            q = q_THD[block.token_index.view(-1)]

        def run(q: Tensor, k: Tensor, v: Tensor, part: slice, seen: tuple[int, int]) -> Tensor:
            """`attend` for the queries [N, rows, D] of `part`, padded to the row quantum."""
            rows = q.shape[1]
            extra = -rows % kernel.row_quantum
            if extra:
                q = F.pad(q, (0, 0, 0, extra))
            column = None if sinks is None else _sink_column(sinks, block, G, rows, extra)
            mask = _mask(block, part, window, seen, G, H // G, extra, wide)
            out = kernel.attend(q, k, v, mask, column)
            return out[:, :rows] if extra else out

        if block.resident is not None:
            tokens = slice(block.first_token, block.first_token + B)
            seen = _key_range(block, ALL, window, key_block, key_quantum)
            if kernel.copies_parts and seen[0] == 0:
                seen = 0, block.resident.keys.shape[3]
            k, v = _resident_rows(block, k_TGD[tokens], v_TGD[tokens], spec.layer, *seen)
            return run(q.reshape(B * G, -1, D), k, v, ALL, seen).reshape(B, H, D)
        first_quantum = math.lcm(key_block, keys.shape[2])
        first, stop = _key_range(block, ALL, window, first_quantum, key_quantum)
        read = [_read_pages(plane, block, first, stop) for plane in planes]
        k, v = read[0], read[-1]
        q = q.view(B, Q, G, -1, D).permute(2, 0, 3, 1, 4)  # [G, B, H/G, Q, D]
        parts = []
        for at in range(0, Q, QUERY_TILE):
            part = slice(at, min(at + QUERY_TILE, Q))
            seen = _key_range(block, part, window, key_block, key_quantum)
            here = slice(seen[0] - first, seen[1] - first)
            out = run(q[:, :, :, part].reshape(G * B, -1, D), k[:, here], v[:, here], part, seen)
            out = out.reshape(G, B, H // G, -1, D).permute(1, 3, 0, 2, 4)
            parts.append(out.reshape(B, -1, H, D))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.reshape(B * Q, H, D)

    outs = [of_block(block) for block in context.blocks]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if context.place_index is None else out[context.place_index]


def _key_range(
    block: PagedBlock, part: slice, window: int | None, first_quantum: int, quantum: int
) -> tuple[int, int]:
    """[first, stop) of the positions whose keys the queries of `part` read."""
    key = ("range", part.start, window, first_quantum, quantum)
    if key not in block.memo:
        positions = block.positions[:, part]
        first, last = 0, block.num_keys
        if window is not None:
            first = max(0, int(positions.min()) - window + 1) // first_quantum * first_quantum
        if positions.shape[1] < block.positions.shape[1]:
            last = min(last, int(positions.max()) + 1)
        block.memo[key] = first, first + math.ceil((last - first) / quantum) * quantum
    return block.memo[key]


def _sink_column(sinks_H: Tensor, block: PagedBlock, groups: int, rows: int, extra: int) -> Tensor:
    """[N, R, 1]: the sink of each row of `attend`."""
    B = len(block.positions)
    sinks_GR = sink_rows(sinks_H, groups, rows * groups // len(sinks_H), extra)
    by_head = sinks_GR[:, None].expand(-1, B, -1)
    by_head = by_head if block.resident is None else by_head.transpose(0, 1)
    return by_head.reshape(B * groups, -1, 1)


def sink_rows(sinks_H: Tensor, groups: int, queries: int, extra: int) -> Tensor:
    """[G, R]: the sink of each row of a key head's matrix, `extra` of them padding."""
    by_row = sinks_H.view(groups, -1, 1).expand(-1, -1, queries).reshape(groups, -1)
    return F.pad(by_row, (0, extra)) if extra else by_row


def _resident_rows(
    block: PagedBlock, k_BGD: Tensor, v_BGD: Tensor, layer: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Views of keys and values [B * G, L, D], after the new ones are written."""
    rows = block.resident
    assert rows is not None, "only a resident block is read in place"
    B, G, D = k_BGD.shape
    key = (layer, B, first, stop)
    if (views := rows.memo.get(key)) is None:
        views = rows.memo[key] = [
            (cache[layer].view(-1, D), cache[layer, :B].view(B * G, -1, D)[:, first:stop])
            for cache in planes_of(rows)
        ]
    for (places, _), new in zip(views, (k_BGD, v_BGD), strict=False):
        places.index_copy_(0, rows.write_index, new.reshape(-1, D))
    return views[0][1], views[-1][1]


def _read_pages(cache_GPSD: Tensor, block: PagedBlock, first: int, stop: int) -> Tensor:
    """[G * B, L, D]: a copy of each sequence's keys in order."""
    G, _, S, D = cache_GPSD.shape
    pages = block.pages[:, first // S : math.ceil(stop / S)]
    read = cache_GPSD.index_select(1, pages.reshape(-1)).view(G * len(pages), -1, D)
    missing = stop - first - read.shape[1]
    return F.pad(read, (0, 0, 0, missing)) if missing > 0 else read[:, : stop - first]


def _mask(
    block: PagedBlock,
    part: slice,
    window: int | None,
    seen: tuple[int, int],
    groups: int,
    repeat: int,
    extra: int,
    dtype: torch.dtype,
) -> Tensor:
    """[N or 1, R, L]: 0 where a query sees a key, else -inf. Padding rows repeat the last row."""
    key = ("mask", part.start, window, dtype, seen, extra)
    if key in block.memo:
        return block.memo[key]
    positions, (first, stop), resident = block.positions[:, part], seen, block.resident
    B, Q = positions.shape
    index = torch.arange(repeat * Q + extra, device=positions.device).clamp_(max=repeat * Q - 1)
    table = None if resident is None else _mask_table(resident, window, dtype)
    if table is not None:
        at = positions.expand(-1, groups * len(index)).reshape(-1)
        mask = table.index_select(0, at)[:, first:stop].view(B * groups, len(index), -1)
    else:
        at_key = torch.arange(first, stop, device=positions.device)
        mask = causal_mask(positions[:, :, None], at_key, window, dtype)[:, index % Q]
        if B > 1:
            by_head = mask[None].expand(groups, -1, -1, -1)
            by_head = by_head if resident is None else by_head.transpose(0, 1)
            mask = by_head.reshape(B * groups, len(index), -1)
    block.memo[key] = mask
    return mask


def causal_mask(at_query: Tensor, at_key: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, else -inf. at_query [..., Q, 1], at_key [L]: positions."""
    hidden = at_key > at_query
    if window is not None:
        hidden |= at_key <= at_query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )


def _mask_table(rows: ResidentRows, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """[N, N]: mask of a query at each position; None where the table would be large."""
    length = rows.keys.shape[3]
    if length > MASK_TABLE_LENGTH:
        return None
    key = ("mask", window, dtype)
    if key not in rows.memo:
        at = torch.arange(length, device=rows.keys.device)
        rows.memo[key] = causal_mask(at[:, None], at, window, dtype)
    return rows.memo[key]
