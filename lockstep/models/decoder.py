"""One decoder for the trainer and the embedded engine, over `ops.api` alone.

# T tokens  D model width  H query heads  G key heads  K head width  E experts  A active experts
# F expert width  R = T * A token-expert pairs
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lockstep.models.config import ModelConfig, YarnScaling
from lockstep.ops import api as ops
from lockstep.ops.context import PackedContext, PagedContext, take_rows

Tensor = torch.Tensor
Context = PackedContext | PagedContext

GPT_OSS_ALPHA = 1.702  # sigmoid slope of gpt-oss' activation; a constant in its config class too

ALL_EXPERTS_MULTIPLIES = 1 << 19
"""Multiplications per matrix that may be wasted on experts that a token did not choose: below it,
sorting tokens by expert costs more than it saves (a few dozen tokens of a tiny model on a CPU)."""


class Attention(nn.Module):
    """Queries, keys and values come from one fused projection, rows ordered [q, k, v]."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.layer, self.window = layer, c.windows[layer]
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        self.eps = c.rms_norm_eps
        fused = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv_proj = nn.Linear(c.hidden_size, fused, bias=c.has_attention_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.has_attention_bias)
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.has_qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.has_qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(c.num_heads)) if c.has_sinks else None

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, context: Context) -> Tensor:
        H, G = self.num_heads, self.num_kv_heads
        qkv = ops.linear(x_TD, self.qkv_proj.weight, self.qkv_proj.bias)
        qkv = qkv.view(len(x_TD), H + 2 * G, self.head_dim)
        qk = qkv[:, : H + G]
        if self.q_norm is not None and self.k_norm is not None:
            weight = torch.cat([self.q_norm.expand(H, -1), self.k_norm.expand(G, -1)])
            qk = ops.rms_norm(qk, weight, self.eps)
        q_THK, k_TGK = ops.rope(qk, cos, sin).split([H, G], 1)
        out_THK = ops.attention(
            q_THK,
            k_TGK,
            qkv[:, H + G :],
            sinks=self.sinks,
            window=self.window,
            scale=self.scale,
            layer=self.layer,
            context=context,
        )
        return ops.linear(out_THK.flatten(1), self.o_proj.weight, self.o_proj.bias)


class MLP(nn.Module):
    """Dense gated MLP; gate and up come from one fused projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden_TF = ops.swiglu(ops.linear(x_TD, self.gate_up_proj.weight))
        return ops.linear(hidden_TF, self.down_proj.weight)


class MoE(nn.Module):
    """Top-k routed experts (gpt-oss): pairs are sorted by expert, combined in slot order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, D, F = config.num_experts, config.hidden_size, config.intermediate_size
        self.num_active, self.limit = config.num_active_experts, config.swiglu_limit
        self.router = nn.Linear(D, E)
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, D))
        self.gate_up_bias = nn.Parameter(torch.zeros(E, 2 * F))
        self.down_proj = nn.Parameter(torch.empty(E, D, F))
        self.down_bias = nn.Parameter(torch.zeros(E, D))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TA, experts_TA = ops.route(self.router_logits(x_TD), self.num_active)
        E, A = len(self.down_bias), self.num_active
        if x_TD.numel() * (E - A) * self.down_proj.shape[2] <= ALL_EXPERTS_MULTIPLIES:
            # Every expert on every token: no sorting, and the pairs that count are the same.
            counts = [len(x_TD)] * E
            x_RD = x_TD.expand(E, *x_TD.shape).flatten(0, 1)
            place_TA = torch.arange(len(x_TD), device=x_TD.device)[:, None] + experts_TA * len(x_TD)
            return ops.combine(take_rows(self._experts(x_RD, counts), place_TA), weights_TA)
        experts_R = experts_TA.flatten()
        order_R = experts_R.argsort(stable=True)
        counts = torch.bincount(experts_R, minlength=E).tolist()
        out_RD = self._experts(take_rows(x_TD, order_R // A), counts)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        return ops.combine(take_rows(out_RD, place_R.view_as(experts_TA)), weights_TA)

    def router_logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] in the compute dtype: what experts are chosen and weighed by."""
        return ops.linear(x_TD, self.router.weight, self.router.bias)

    def _experts(self, x_RD: Tensor, counts: list[int]) -> Tensor:
        x_RF = ops.expert_linear(x_RD, self.gate_up_proj, self.gate_up_bias, counts)
        x_RF = ops.swiglu_clamped(x_RF, alpha=GPT_OSS_ALPHA, limit=self.limit)
        return ops.expert_linear(x_RF, self.down_proj, self.down_bias, counts)


class Block(nn.Module):
    """Attention and MLP, each on a normed copy and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.attention = Attention(config, layer)
        self.post_attention_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.mlp = MoE(config) if config.is_moe else MLP(config)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, context: Context) -> Tensor:
        normed = ops.rms_norm(x_TD, self.input_norm, self.eps)
        x_TD = x_TD + self.attention(normed, cos, sin, context)
        return x_TD + self.mlp(ops.rms_norm(x_TD, self.post_attention_norm, self.eps))


class Decoder(nn.Module):
    """Ids and positions in, final hidden states out. Stateless: what it attends to is the context.

    `hidden = decoder(ids, positions, context)`, then `decoder.log_probs(hidden, ids)` or
    `decoder.logits(hidden)`. Made on its config's shapes with random weights; `load_checkpoint`
    fills them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        shape = (config.vocab_size, config.hidden_size)
        self.untied_head = None if config.tie_embeddings else nn.Parameter(torch.empty(shape))
        self._rope_table: tuple[Tensor, Tensor] | None = None
        self.init_weights()

    @property
    def head(self) -> Tensor:
        """[V, D]: the output projection, which may be the embedding itself."""
        return self.embedding if self.untied_head is None else self.untied_head

    def init_weights(self, *, std: float = 0.02, seed: int | None = None) -> None:
        """Normal weights, unit norms, zero biases and sinks."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm"):
                    parameter.fill_(1.0)
                elif name.endswith(("bias", "sinks")):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, std, generator=generator)

    def forward(self, ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        """ids, positions [T] int64 -> [T, D] normed hidden states in the compute dtype."""
        cos, sin = self._rope(positions_T)
        x_TD = torch.nn.functional.embedding(ids_T, self.embedding)
        for block in self.layers:
            x_TD = block(x_TD, cos, sin, context)
        return ops.rms_norm(x_TD, self.final_norm, self.config.rms_norm_eps)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, V] in the compute dtype: what a sampler draws from."""
        return ops.linear(hidden_TD, self.head)

    def log_probs(
        self, hidden_TD: Tensor, ids_T: Tensor, *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(log-prob of ids, entropy), each [T] float32: `ops.log_probs` over this head."""
        return ops.log_probs(hidden_TD, self.head, ids_T, temperature=temperature)

    def _rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, K], from a table that is computed once per device."""
        table = self._rope_table
        if table is None or table[0].device != self.embedding.device:
            with torch.inference_mode(False):  # the engine may be first, the trainer reads it too
                table = self._rope_table = rope_table(self.config, self.embedding.device)
        return table[0].index_select(0, positions_T), table[1].index_select(0, positions_T)


def rope_table(config: ModelConfig, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos, sin) [max_positions, 1, K] float32 as `ops.rope` wants them: sin's first half negated.

    Source: Hugging Face's default and yarn initialisation (transformers 5, modeling_rope_utils).
    """
    K = config.head_dim
    inverse = config.rope_theta ** -(torch.arange(0, K, 2, dtype=torch.float32) / K)
    factor = 1.0
    if config.rope_scaling is not None:
        inverse, factor = _yarn(config.rope_scaling, inverse, K, config.rope_theta)
    angle = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos() * factor, angle.sin() * factor
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cos[:, None].to(device), sin[:, None].to(device)


def _yarn(y: YarnScaling, inverse: Tensor, width: int, theta: float) -> tuple[Tensor, float]:
    """Low frequencies are interpolated, high ones kept, with a linear ramp between."""

    def dim_of(rotations: float) -> float:
        length = y.original_max_positions / (rotations * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    low, high = dim_of(y.beta_fast), dim_of(y.beta_slow)
    if y.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # as upstream: the ramp must not divide by zero
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled = inverse / y.factor * ramp + inverse * (1 - ramp)
    factor = y.attention_factor
    if factor is None:
        factor = 0.1 * math.log(y.factor) + 1.0 if y.factor > 1 else 1.0
    return scaled, factor
