"""Attention of an engine step over its paged cache, with the arithmetic left to a backend.

Where keys are written and read, and which of them a query sees. Queries of one key head stand
together as rows of one matrix, so that each head's keys are read once.

# T tokens  B sequences of a block  Q new tokens of each  H query heads  G key heads  D head width
# N = B * G matrices  R rows of each: H/G * Q, rounded up  L keys  S page size  P pages
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lockstep.ops.context import PagedBlock, PagedContext, ResidentRows

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [N, R, D], k [N, L, D], v [N, L, D], mask [N, R, L], sinks [N, R, 1] or None) -> [N, R, D]"""

MASK_TABLE_LENGTH = 1024  # 4 MiB of float32: longer sequences have their mask made in every step


def paged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    *,
    sinks: Tensor | None,
    window: int | None,
    layer: int,
    context: PagedContext,
    attend: Attend,
    key_block: int,
    row_quantum: int = 1,
) -> Tensor:
    """Writes the new keys and values, and runs `attend` on each block. Returns [T, H, D].

    The keys that `attend` gets begin and end at multiples of `key_block`, counted from the start of
    the sequence; those before every query's window are left out. R is a multiple of `row_quantum`.
    Masks and sinks are in the wide dtype: float32, or q's own if that is wider.
    """
    H, D = q_THD.shape[1:]
    keys, values = context.keys[layer], context.values[layer]
    G = keys.shape[0]
    keys.view(G, -1, D).index_copy_(1, context.write_index, k_TGD.transpose(0, 1))
    values.view(G, -1, D).index_copy_(1, context.write_index, v_TGD.transpose(0, 1))
    outs = []
    for block in context.blocks:
        B, Q = block.positions.shape
        first, stop = _key_range(block, window, math.lcm(key_block, keys.shape[2]), key_block)
        rows = H // G * Q
        extra = -rows % row_quantum
        wide = torch.float32 if q_THD.dtype.itemsize < 4 else q_THD.dtype
        mask = _mask(block, window, first, stop, G, H // G, extra, wide)
        if block.token_index is None:
            q = q_THD[block.first_token : block.first_token + B * Q]
        else:
            q = q_THD[block.token_index.view(-1)]
        is_resident = block.resident is not None
        if is_resident:
            tokens = slice(block.first_token, block.first_token + B)
            k, v = _resident_rows(block, k_TGD[tokens], v_TGD[tokens], layer, first, stop)
            q = q.reshape(B * G, rows, D)
        else:
            k, v = (_read_pages(cache, block, first, stop) for cache in (keys, values))
            q = q.view(B, Q, G, -1, D).permute(2, 0, 3, 1, 4).reshape(G * B, rows, D)
        if extra:
            q = F.pad(q, (0, 0, 0, extra))
        column = None
        if sinks is not None:
            column = _sink_column(sinks.to(wide), B, G, Q, extra, is_resident=is_resident)
        out = attend(q, k, v, mask, column)
        if extra:
            out = out[:, :rows]
        if is_resident:
            outs.append(out.reshape(B, H, D))
        else:
            out = out.reshape(G, B, -1, Q, D).permute(1, 3, 0, 2, 4)
            outs.append(out.reshape(B * Q, H, D))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if context.place_index is None else out[context.place_index]


def _key_range(
    block: PagedBlock, window: int | None, first_quantum: int, key_block: int
) -> tuple[int, int]:
    """[first, stop) of the positions whose keys are read."""
    key = ("first", window, first_quantum)
    if window is not None and key not in block.memo:
        earliest = max(0, int(block.positions.min()) - window + 1)
        block.memo[key] = earliest // first_quantum * first_quantum
    first = 0 if window is None else block.memo[key]
    return first, first + math.ceil((block.num_keys - first) / key_block) * key_block


def _sink_column(
    sinks_H: Tensor, B: int, G: int, Q: int, extra: int, *, is_resident: bool
) -> Tensor:
    """[N, R, 1] in the order of `attend`'s rows."""
    sinks = sinks_H.view(G, -1, 1).expand(-1, -1, Q).reshape(G, -1)
    if extra:
        sinks = F.pad(sinks, (0, extra))
    sinks = sinks[None, :] if is_resident else sinks[:, None]
    shape = (B, G, -1) if is_resident else (G, B, -1)
    return sinks.expand(*shape).reshape(B * G, -1, 1)


def _resident_rows(
    block: PagedBlock, k_BGD: Tensor, v_BGD: Tensor, layer: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [B * G, L, D] in place, the new ones written first."""
    rows = block.resident
    assert rows is not None, "only a resident block is read in place"
    B, G, D = k_BGD.shape
    key = (layer, B, first, stop)
    if (views := rows.memo.get(key)) is None:
        views = rows.memo[key] = [
            (cache[layer].view(-1, D), cache[layer, :B].view(B * G, -1, D)[:, first:stop])
            for cache in (rows.keys, rows.values)
        ]
    (all_k, k), (all_v, v) = views
    all_k.index_copy_(0, rows.write_index, k_BGD.reshape(-1, D).to(all_k.dtype))
    all_v.index_copy_(0, rows.write_index, v_BGD.reshape(-1, D).to(all_v.dtype))
    return k, v


def _read_pages(cache_GPSD: Tensor, block: PagedBlock, first: int, stop: int) -> Tensor:
    """[G * B, L, D]: the keys of each sequence of the block, in order."""
    G, _, S, D = cache_GPSD.shape
    pages = block.pages[:, first // S : math.ceil(stop / S)]
    read = cache_GPSD.index_select(1, pages.reshape(-1)).view(G * len(pages), -1, D)
    missing = stop - first - read.shape[1]
    return F.pad(read, (0, 0, 0, missing)) if missing > 0 else read[:, : stop - first]


def _mask(
    block: PagedBlock,
    window: int | None,
    first: int,
    stop: int,
    groups: int,
    repeat: int,
    extra: int,
    dtype: torch.dtype,
) -> Tensor:
    """[N, R, L]: 0 where a query sees a key, else -inf. Rows to fill up see what the last sees."""
    key = ("mask", window, dtype, first, stop, extra)
    if key not in block.memo:
        rows = repeat * block.positions.shape[1]
        index = torch.arange(rows + extra, device=block.positions.device).clamp_(max=rows - 1)
        block.memo[key] = _make_mask(block, window, first, stop, groups, repeat, index, dtype)
    return block.memo[key]


def _make_mask(
    block: PagedBlock,
    window: int | None,
    first: int,
    stop: int,
    groups: int,
    repeat: int,
    rows: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    B, Q = block.positions.shape
    if block.resident is not None:
        table = _mask_table(block.resident, window, dtype)
        if table is not None:
            at = block.positions.expand(-1, groups * len(rows)).reshape(-1)
            return table.index_select(0, at)[:, first:stop].view(B * groups, len(rows), -1)
    hidden = _hidden(
        block.positions[:, :, None],
        torch.arange(first, stop, device=block.positions.device),
        window,
    )
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    mask = mask.masked_fill_(hidden, float("-inf"))  # [B, Q, L]
    mask = mask[:, rows % Q]
    if block.resident is not None:
        mask = mask[:, None].expand(-1, groups, -1, -1)
    else:
        mask = mask[None].expand(groups, -1, -1, -1)
    return mask.reshape(B * groups, len(rows), -1)


def _hidden(at_query: Tensor, at_key: Tensor, window: int | None) -> Tensor:
    hidden = at_key > at_query
    return hidden if window is None else hidden | (at_key <= at_query - window)


def _mask_table(rows: ResidentRows, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """[N, N]: the mask of a query at each position; None where it would be large."""
    length = rows.keys.shape[3]
    if length > MASK_TABLE_LENGTH:
        return None
    key = ("mask", window, dtype)
    if key not in rows.memo:
        at = torch.arange(length, device=rows.keys.device)
        hidden = _hidden(at[:, None], at, window)
        table = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
        rows.memo[key] = table.masked_fill_(hidden, float("-inf"))
    return rows.memo[key]
