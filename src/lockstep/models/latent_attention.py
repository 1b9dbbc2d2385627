"""Attention whose keys and values come from one latent vector per token, over ops alone.

Source: multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434), section 2.1, in the absorbed
form. The latent and the rotated dims of a token are one key for all heads; the latent is also its
value, and only this key is cached. The key matrix is applied to the queries, the value matrix to
attention's output. The unfolded form makes keys and values first: its products in attention are
narrower, and it adds in another order. Rows whose bits need not equal the sampler's use it.

# T tokens  D model width  H heads  G adapters  r rank of an adapter
# K width of a folded query and of a key: C of the latent, then the rotated dims
# N dims of a query that are not rotated  V dims of a value
# I, O inputs and outputs of a product by head  R rows of it, head by head
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.models.adapter_rows import StackedFactors
from lockstep.models.attention import yarn_magnitude
from lockstep.models.attention_config import LatentShape, YarnScaling
from lockstep.models.config import ModelConfig
from lockstep.models.experts import ExpertLinear
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.lora import Projection
from lockstep.ops.context import AttentionSpec, PagedContext

Tensor = torch.Tensor

LATENT_EPS = 1e-6  # of the norms of latents, whatever the config's is

_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weight of a `kv_b_proj` -> (its version, its halves), for samplers on a CPU. Their ops cache
results per weight tensor, so the halves must stay the same tensors. A captured graph would keep old
values."""


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
        self.kv_a_proj = Projection(D, c.key_dim, bias=bias)
        self.kv_a_norm = nn.Parameter(torch.ones(latent.kv_rank))
        unfolded = H * (latent.nope_dim + latent.value_dim)
        self.kv_b_proj = Projection(latent.kv_rank, unfolded, bias=False)
        self.o_proj = Projection(H * latent.value_dim, D, bias=bias)

    def forward(
        self, x_TD: Tensor, inputs: LayerInputs, norm: Tensor | None, output_norm: Tensor | None
    ) -> Tensor:
        """As `Attention.forward`."""
        at, H, T = self.latent, self.num_heads, len(x_TD)
        ops, context = inputs.ops, inputs.context
        normed_TD = x_TD if norm is None else ops.rms_norm(x_TD, norm, self.eps)
        if self.q_a_proj is not None and self.q_b_proj is not None and self.q_a_norm is not None:
            narrow = ops.rms_norm(self.q_a_proj(normed_TD, inputs), self.q_a_norm, LATENT_EPS)
            q = self.q_b_proj(narrow, inputs)
        else:
            assert self.q_proj is not None, "queries have one projection or two"
            q = self.q_proj(normed_TD, inputs)
        folded, k_rope = self.kv_a_proj(normed_TD, inputs).split([at.kv_rank, at.rope_dim], -1)
        folded = ops.rms_norm(folded.contiguous(), self.kv_a_norm, LATENT_EPS)
        q_THN, q_rope = q.view(T, H, -1).split([at.nope_dim, at.rope_dim], -1)
        parts = torch.cat([q_rope, k_rope[:, None]], 1)
        if at.is_interleaved:  # pairs of neighbours are rotated, `Ops.rope` takes them by halves
            parts = parts.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        q_rope, k_rope = ops.rope(parts, inputs.cos, inputs.sin).split([H, 1], 1)
        spec = AttentionSpec(None, None, self.scale, self.layer)
        if isinstance(context, PagedContext) or ops.is_invariant:
            q_THK = torch.cat([self._by_head(0, q_THN, inputs), q_rope], -1)
            k_T1K = torch.cat([folded[:, None], k_rope], -1)
            out_THC = ops.attention(q_THK, k_T1K, k_T1K, spec, context)[..., : at.kv_rank]
            out_THV = self._by_head(1, out_THC, inputs)
        else:
            kv = self.kv_b_proj(folded, inputs).view(T, H, -1)
            k_nope, v = kv.split([at.nope_dim, at.value_dim], -1)
            q = torch.cat([q_THN, q_rope], -1)
            k = torch.cat([k_nope, k_rope.expand(-1, H, -1)], -1)
            width = max(q.shape[-1], at.value_dim)
            q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
            out_THV = ops.attention(q, k, v, spec, context)[..., : at.value_dim]
        out = out_THV.flatten(1)
        return self.o_proj.added(x_TD, out, output_norm, self.eps, inputs)

    def _by_head(self, half: int, x_THI: Tensor, inputs: LayerInputs) -> Tensor:
        """Each head's product with its half of `kv_b_proj`. half: 0 takes queries from N to C, 1
        takes what attention returns from C to V."""
        (T, H, _), whole, ops, adapters = x_THI.shape, self.kv_b_proj, inputs.ops, inputs.adapters
        counts = torch.full((H,), T, dtype=torch.int32, device=x_THI.device)

        def product(x_RI: Tensor, weight_HOI: Tensor) -> Any:
            return ExpertLinear.apply(x_RI, weight_HOI, counts, ops)

        x_RI = x_THI.transpose(0, 1).flatten(0, 1)
        out_RO = product(x_RI, self._half_of_weight(half))
        if adapters is not None:
            (of_shapes,) = adapters.of_experts(whole, "lora")
            groups_of = adapters.on_all_experts(H) if of_shapes else []
            for found, groups in zip(of_shapes, groups_of, strict=True):
                if found is not None:
                    A, B = self._factors(half, found.A, found.B[0])
                    StackedFactors(A, (B,), (slice(None),), found.scale).add(
                        x_RI, out_RO, groups, ops
                    )
        elif whole.lora is not None and whole.lora.is_on:
            A, B = self._factors(half, whole.lora.A, whole.lora.B[0])
            out_RO = out_RO + product(product(x_RI, A) * whole.lora.scale, B)
        return out_RO.view(H, T, -1).transpose(0, 1)

    def _half_of_weight(self, half: int) -> Tensor:
        weight = self.kv_b_proj.weight
        if weight.device.type != "cpu" or not torch.is_inference_mode_enabled():
            return self._half(half, weight)
        kept = _KEPT.get(weight)
        if kept is None or kept[0] != weight._version:
            with torch.inference_mode(False):
                halves = [self._half(number, weight.detach()) for number in (0, 1)]
            kept = _KEPT[weight] = weight._version, halves
        return kept[1][half]

    def _half(self, half: int, rows: Tensor) -> Tensor:
        """The half of [G, H * (N + V), I]: [G * H, I, N] or [G * H, V, I]."""
        sizes = [self.latent.nope_dim, self.latent.value_dim]
        found = rows.view(-1, sum(sizes), rows.shape[-1]).split(sizes, 1)[half]
        return (found if half else found.transpose(1, 2)).contiguous()

    def _factors(self, half: int, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """(A, B) of each head's half, [G * H, ...], of an adapter whose A [G, r, C] all heads
        share, and whose B is [G, H * (N + V), r]."""
        A, B = A.view(-1, 1, *A.shape[-2:]), self._half(half, B)
        A = A.expand(-1, self.num_heads, -1, -1).flatten(0, 1)
        return (A, B) if half else (B, A.transpose(1, 2).contiguous())
