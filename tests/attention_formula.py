"""Attention as a formula, for tests: the whole score matrix, softmax over keys and sink."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def reference_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    *,
    sinks_H: Tensor | None,
    window: int | None,
    scale: float,
    lengths: list[int],
) -> Tensor:
    """Causal attention row by row with plain autograd. Same arguments as `ops.attention`'s packed
    form, `lengths` in place of the context. Returns [T, H, D]."""
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    outs = []
    for q, k, v in zip(
        q_THD.split(lengths), k_TGD.split(lengths), v_TGD.split(lengths), strict=True
    ):
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        at = torch.arange(len(q), device=q.device)
        seen = at[:, None] >= at
        if window is not None:
            seen &= at[:, None] - at < window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks_H is not None:
            column = sinks_H[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], -1)
        probs = scores.softmax(-1)[..., : len(k)]
        outs.append(torch.einsum("hqk,khd->qhd", probs, v))
    return torch.cat(outs)
