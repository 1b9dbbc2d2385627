"""Linear attention by the gated delta rule, over ops alone.

Source: Gated DeltaNet (arXiv 2412.06464) in the form of Qwen3-Next.

# T tokens  D model width  G key heads  H value heads  K key width  V value width
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.config import ModelConfig
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.lora import Projection
from lockstep.ops.context import sum_dtype

Tensor = torch.Tensor


class LinearAttention(nn.Module):
    """Queries, keys, values, gates, strengths and decays come from one fused projection; queries,
    keys and values pass a short convolution."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        assert c.linear is not None, "the config names the layers"
        self.shape = at = c.linear
        self.number, self.eps = at.layers.index(layer), c.rms_norm_eps
        outputs = at.channels + at.value_width + 2 * at.value_heads
        self.in_proj = Projection(c.hidden_size, outputs, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(at.channels, 1, at.conv_width))
        self.A_log = nn.Parameter(torch.zeros(at.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(at.value_heads))
        self.value_norm = nn.Parameter(torch.ones(at.value_dim))
        self.out_proj = Projection(at.value_width, c.hidden_size, bias=False)

    def forward(
        self, x_TD: Tensor, inputs: LayerInputs, norm: Tensor | None, output_norm: Tensor | None
    ) -> Tensor:
        """As `Attention.forward`; positions are known by the order of tokens alone."""
        at, T, wide = self.shape, len(x_TD), sum_dtype(x_TD.dtype)
        ops, context = inputs.ops, inputs.context
        mixed, z, b, a = self._parts(self.in_proj.of_norm(x_TD, norm, self.eps, inputs))
        mixed = ops.short_conv(mixed, self.conv_weight[:, 0], self.number, context)
        keys = at.key_heads * at.key_dim
        q, k, v = mixed.split([keys, keys, at.value_width], -1)
        out_THV = ops.delta_rule(
            q.reshape(T, at.key_heads, at.key_dim),
            k.reshape(T, at.key_heads, at.key_dim),
            v.reshape(T, at.value_heads, at.value_dim),
            -self.A_log.to(wide).exp() * ops.softplus(a.to(wide) + self.dt_bias.to(wide)),
            ops.sigmoid(b).to(b.dtype),
            self.number,
            context,
        )
        normed = ops.rms_norm(out_THV, self.value_norm, self.eps).flatten(1)
        # silu of the gate times the normed value, rounded once.
        gated = ops.swiglu(torch.cat([z.to(wide), normed.to(wide)], -1)).to(x_TD.dtype)
        return self.out_proj.added(x_TD, gated, output_norm, self.eps, inputs)

    def _parts(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries, keys and values, [T, channels]; gates [T, H * V]; strengths, decays [T, H]),
        before any function."""
        at = self.shape
        rest = [at.value_heads, at.value_heads]
        if not at.is_grouped:
            mixed, z, b, a = fused.split([at.channels, at.value_width, *rest], -1)
            return mixed.contiguous(), z, b, a
        groups = at.key_heads
        qkvz, ba = fused.split([at.channels + at.value_width, 2 * at.value_heads], -1)
        values = at.value_width // groups
        parts = qkvz.unflatten(-1, (groups, -1)).split([at.key_dim] * 2 + [values] * 2, -1)
        q, k, v, z = (part.flatten(1) for part in parts)
        b, a = (part.flatten(1) for part in ba.unflatten(-1, (groups, 2, -1)).unbind(2))
        return torch.cat([q, k, v], -1), z, b, a
