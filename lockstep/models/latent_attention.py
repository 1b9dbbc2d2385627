"""Attention whose keys and values come from one latent vector per token, over ops alone.

Source: multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434), section 2.1. Keys and values
are unfolded before they are attended to and cached, in sampler and trainer alike: the folded form
of others' decoders adds up in another order.

# T tokens  D model width  H heads  K width of a query and a key  R rotated dims of it
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.models.adapter_rows import AdapterRows
from lockstep.models.attention import yarn_magnitude
from lockstep.models.attention_config import LatentShape, YarnScaling
from lockstep.models.config import ModelConfig
from lockstep.models.lora import Projection
from lockstep.ops.base import Context, Ops
from lockstep.ops.context import AttentionSpec

Tensor = torch.Tensor

LATENT_EPS = 1e-6  # of the norms of latents, whatever the config's is


class LatentAttention(nn.Module):
    """Queries from one projection, or from two with a narrow one between; keys and values from a
    narrow one, whose last dims are the rotated part of the key of all heads."""

    def __init__(self, config: ModelConfig, latent: LatentShape, layer: int) -> None:
        super().__init__()
        c, self.latent, self.layer = config, latent, layer
        self.num_heads, self.eps = c.num_heads, c.rms_norm_eps
        self.scale = c.head_dim**-0.5
        if isinstance(c.rope_scaling, YarnScaling) and c.rope_scaling.mscale_all_dim:
            scaling = c.rope_scaling
            self.scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim or 0.0) ** 2
        D, H, bias = c.hidden_size, c.num_heads, c.has_attention_bias
        self.q_proj = self.q_a_proj = self.q_b_proj = self.q_a_norm = None
        if latent.query_rank:
            self.q_a_proj = Projection(D, latent.query_rank, bias=bias)
            self.q_a_norm = nn.Parameter(torch.ones(latent.query_rank))
            self.q_b_proj = Projection(latent.query_rank, H * c.head_dim, bias=False)
        else:
            self.q_proj = Projection(D, H * c.head_dim, bias=False)
        self.kv_a_proj = Projection(D, latent.kv_rank + latent.rope_dim, bias=bias)
        self.kv_a_norm = nn.Parameter(torch.ones(latent.kv_rank))
        unfolded = H * (latent.nope_dim + latent.value_dim)
        self.kv_b_proj = Projection(latent.kv_rank, unfolded, bias=False)
        self.o_proj = Projection(H * latent.value_dim, D, bias=bias)

    def forward(
        self,
        x_TD: Tensor,
        norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        context: Context,
        ops: Ops,
        adapters: AdapterRows | None = None,
        *,
        output_norm: Tensor | None = None,
    ) -> Tensor:
        """As `Attention.forward`."""
        at, H, T = self.latent, self.num_heads, len(x_TD)
        normed_TD = x_TD if norm is None else ops.rms_norm(x_TD, norm, self.eps)
        if self.q_a_proj is not None and self.q_b_proj is not None and self.q_a_norm is not None:
            narrow = ops.rms_norm(
                self.q_a_proj(normed_TD, ops, adapters), self.q_a_norm, LATENT_EPS
            )
            q = self.q_b_proj(narrow, ops, adapters)
        else:
            assert self.q_proj is not None, "queries have one projection or two"
            q = self.q_proj(normed_TD, ops, adapters)
        folded, k_rope = self.kv_a_proj(normed_TD, ops, adapters).split(
            [at.kv_rank, at.rope_dim], -1
        )
        folded = ops.rms_norm(folded.contiguous(), self.kv_a_norm, LATENT_EPS)
        kv = self.kv_b_proj(folded, ops, adapters).view(T, H, at.nope_dim + at.value_dim)
        q_nope, q_rope = q.view(T, H, -1).split([at.nope_dim, at.rope_dim], -1)
        k_nope, v = kv.split([at.nope_dim, at.value_dim], -1)
        parts = torch.cat([q_rope, k_rope[:, None]], 1)
        if at.is_interleaved:  # pairs of neighbours are rotated, `Ops.rope` takes them by halves
            parts = parts.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        q_rope, k_rope = ops.rope(parts, cos, sin).split([H, 1], 1)
        out_THK = ops.attention(
            torch.cat([q_nope, q_rope], -1),
            torch.cat([k_nope, k_rope.expand(-1, H, -1)], -1),
            F.pad(v, (0, at.nope_dim + at.rope_dim - at.value_dim)),
            AttentionSpec(None, None, self.scale, self.layer),
            context,
        )
        out = out_THK[..., : at.value_dim].flatten(1)
        return self.o_proj.added(x_TD, out, ops, adapters, norm=output_norm, eps=self.eps)
