"""Attention of one layer, and the table of rotary angles, over ops alone.

# T tokens  D model width  H query heads  G key heads  K head width
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from lockstep.models.attention_config import LinearScaling, Llama3Scaling, YarnScaling
from lockstep.models.config import ModelConfig, NormWeights
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.lora import Projection
from lockstep.ops.base import Rotary
from lockstep.ops.context import AttentionSpec, sum_dtype

Tensor = torch.Tensor
RopeTables = tuple[tuple[Tensor, Tensor], ...]


class Attention(nn.Module):
    """Queries, keys and values come from one fused projection, rows ordered [q, k, v]."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer, self.window = c.attention_layers.index(layer), c.windows[layer]
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = (c.head_dim if c.query_scale is None else c.query_scale) ** -0.5
        self.eps = c.rms_norm_eps
        self.norm_weights: NormWeights = c.norm_weights
        self.has_wide_norm = c.has_wide_qk_norm
        self.has_gate = c.has_output_gate
        fused = (c.num_heads * (1 + self.has_gate) + 2 * c.num_kv_heads) * c.head_dim
        self.qkv_proj = Projection(c.hidden_size, fused, bias=c.has_attention_bias)
        self.o_proj = Projection(
            c.num_heads * c.head_dim, c.hidden_size, bias=c.has_attention_bias and c.has_output_bias
        )
        heads = (c.num_heads, c.num_kv_heads) if c.has_wide_qk_norm else (1, 1)
        self.q_norm, self.k_norm = (
            nn.Parameter(torch.ones(n * c.head_dim)) if c.has_qk_norm else None for n in heads
        )
        self.sinks = nn.Parameter(torch.zeros(c.num_heads)) if c.has_sinks else None

    def forward(
        self, x_TD: Tensor, at: LayerInputs, norm: Tensor | None, output_norm: Tensor | None
    ) -> Tensor:
        """x + attention of the normed x; output_norm: norm of the attention's output."""
        ops, qkv = at.ops, self.qkv_proj.of_norm(x_TD, norm, self.eps, at)
        gate = norms = None
        if self.has_gate:
            width = self.num_heads * self.head_dim
            q, kv = qkv.split([2 * width, qkv.shape[1] - 2 * width], -1)
            q, gate = (x.flatten(1) for x in q.unflatten(1, (self.num_heads, 2, -1)).unbind(2))
            qkv = torch.cat([q, kv], -1)
        if self.q_norm is not None and self.k_norm is not None:
            q_norm, k_norm = (norm_scale(w, self.norm_weights) for w in (self.q_norm, self.k_norm))
            if self.has_wide_norm:
                sizes = [len(q_norm), len(k_norm), len(k_norm)]
                q, k, v = (part.contiguous() for part in qkv.split(sizes, -1))
                q, k = ops.rms_norm(q, q_norm, self.eps), ops.rms_norm(k, k_norm, self.eps)
                qkv = torch.cat([q, k, v], -1)
            else:
                norms = q_norm, k_norm
        out_THK = ops.rotary_attention(
            qkv.view(len(x_TD), self.num_heads + 2 * self.num_kv_heads, self.head_dim),
            Rotary(at.cos, at.sin, self.num_heads, norms, self.eps),
            AttentionSpec(self.sink_logits(), self.window, self.scale, self.layer),
            at.context,
        )
        out_TK = out_THK.flatten(1)
        if gate is not None:
            out_TK = out_TK * ops.sigmoid(gate).to(out_TK.dtype)
        return self.add_output(x_TD, out_TK, output_norm, at)

    def add_output(
        self, residual_TD: Tensor, x_TK: Tensor, norm: Tensor | None, at: LayerInputs
    ) -> Tensor:
        """residual + the output projection, normed if there is a norm, of the heads [T, H * K]."""
        return self.o_proj.added(residual_TD, x_TK, norm, self.eps, at)

    def sink_logits(self) -> Tensor | None:
        """[H] logits of the sinks; None in a model without sinks."""
        return self.sinks


def norm_scale(weight: Tensor, form: NormWeights) -> Tensor:
    """A norm's weight as `Ops.rms_norm` takes it; form: `ModelConfig.norm_weights`."""
    if form == "plain":
        return weight
    wide = weight.to(sum_dtype(weight.dtype))
    return wide + 1 if form == "centered" else wide


def rope_tables(config: ModelConfig, device: torch.device | str = "cpu") -> RopeTables:
    """The rotary table of all layers. If layers with a window use another base: the table of full
    attention, then the table of windows."""
    tables = (rope_table(config, device),)
    if (theta := config.window_rope_theta) is not None:
        local = replace(config, rope_theta=theta, rope_scaling=None)
        tables = (*tables, rope_table(local, device))
    return tables


def rope_table(config: ModelConfig, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos, sin) [max_positions, 1, rotary_dim] float32, with the first half of sin negated, as
    `Ops.rope` takes it.

    The same float32 operations as Hugging Face's, so that angles are equal bit for bit: one ulp of
    a frequency is 1e-2 radians at position 100,000. Guard: tests/parity/test_decoder_parity.py
    Source: transformers 5, modeling_rope_utils.
    """
    K, scaling = config.rotary_dim, config.rope_scaling
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, K, 2, dtype=torch.float32) / K)
    factor = 1.0
    if isinstance(scaling, LinearScaling):
        inverse = inverse / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        inverse = _llama3(scaling, inverse)
    elif scaling is not None:
        inverse, factor = _yarn(scaling, K, config.rope_theta)
    angle = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos() * factor, angle.sin() * factor
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cos[:, None].to(device), sin[:, None].to(device)


def _llama3(scaling: Llama3Scaling, inverse: Tensor) -> Tensor:
    """Wavelengths above (original context / low_freq_factor) are stretched, those below (original
    context / high_freq_factor) kept, and those between interpolated."""
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    stretched = torch.where(wavelength > original / low, inverse / scaling.factor, inverse)
    share = (original / wavelength - low) / (high - low)
    mixed = (1 - share) * stretched / scaling.factor + share * stretched
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, mixed, stretched)


def _yarn(y: YarnScaling, width: int, theta: float) -> tuple[Tensor, float]:
    """Low frequencies are interpolated, high ones kept, with a linear ramp between."""

    def dim_of(rotations: float) -> float:
        length = y.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    low, high = dim_of(y.beta_fast), dim_of(y.beta_slow)
    if y.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # as upstream: the ramp must not divide by zero
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    period = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    share_kept = 1 - ramp
    inverse = 1.0 / (y.factor * period) * (1 - share_kept) + 1.0 / period * share_kept
    if y.attention_factor is not None:
        return inverse, y.attention_factor
    if y.mscale and y.mscale_all_dim:
        above, below = (yarn_magnitude(y.factor, x) for x in (y.mscale, y.mscale_all_dim))
        return inverse, above / below
    return inverse, yarn_magnitude(y.factor, 1.0)


def yarn_magnitude(factor: float, share: float) -> float:
    """YaRN's factor on the length of queries and keys: equation 22 of arXiv 2309.00071."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
