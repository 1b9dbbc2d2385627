"""Attention over packed rows on a GPU by torch's flex_attention, with exact sinks and gradients.

Rows are laid end to end in one sequence, and a block mask hides each from the others. No score
matrix is formed, and blocks outside a window are skipped. The log-sum that flex returns is
differentiable (unlike that of varlen_attn), so the output times sigmoid(lse - sink) has the exact
gradient by autograd alone.

# T tokens  P places of all rows laid end to end  H query heads  G key heads  D head width
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lockstep.ops.context import AttentionSpec, PackedContext, take_rows

Tensor = torch.Tensor


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    spec: AttentionSpec,
    context: PackedContext,
) -> Tensor:
    """[T, H, D]."""
    sinks_H, window = spec.sinks, spec.window
    flex_attention, create_block_mask, aux = _functions()
    if ("flex", window) not in context.memo:
        context.memo["flex", window] = _block_mask(context, window, create_block_mask)
    index, block_mask = context.memo["flex", window]
    q, k, v = (take_rows(x, index).transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
    out, found = flex_attention(
        q, k, v, block_mask=block_mask, scale=spec.scale, enable_gqa=True, return_aux=aux(lse=True)
    )
    if sinks_H is not None:
        keys_share = torch.sigmoid(found.lse - sinks_H.to(found.lse.dtype)[:, None])
        out = (out * keys_share[..., None]).to(q_THD.dtype)
    out_PHD = out[0].transpose(0, 1)
    return out_PHD if context.place_index is None else out_PHD[context.place_index]


def _block_mask(
    context: PackedContext, window: int | None, create_block_mask: Callable[..., Any]
) -> tuple[Tensor, Any]:
    """(token at each of P places, mask of which places see which)."""
    index = torch.cat([block.flatten() for block in context.blocks])
    row = torch.empty_like(index)
    first = at = 0
    for block in context.blocks:
        stop = at + block.numel()
        numbers = torch.arange(first, first + len(block), device=index.device)
        row[at:stop] = numbers.repeat_interleave(block.shape[1])
        first, at = first + len(block), stop

    # A row's places are adjacent and in order, so padding past its end comes after all real keys.
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = (row[query] == row[key]) & (query >= key)
        return is_seen if window is None else is_seen & (query - key < window)

    size = len(index)
    return index, create_block_mask(sees, None, None, size, size, device=index.device)


@cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    from torch.nn.attention import flex_attention as flex  # brings torch's compiler with it

    return (
        torch.compile(flex.flex_attention, dynamic=True),
        torch.compile(flex.create_block_mask, dynamic=True),
        flex.AuxRequest,
    )
