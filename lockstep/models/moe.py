"""What follows attention in a layer: a dense gated MLP, or routed experts, over `ops.api` alone.

# T tokens  D model width  E experts  A active experts  F expert width  L routed layers
# R = T * A token-expert pairs
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.errors import AlignmentError
from lockstep.models.config import ModelConfig
from lockstep.models.lora import ExpertLowRank, Projection
from lockstep.ops import api as ops
from lockstep.ops.context import take_rows

Tensor = torch.Tensor

GPT_OSS_ALPHA = 1.702  # sigmoid slope of gpt-oss' activation; a constant in its config class too

ALL_EXPERTS_MULTIPLIES = 1 << 19
"""Multiplications per matrix that may be wasted on experts that a token did not choose: below it,
sorting tokens by expert costs more than it saves (a few dozen tokens of a tiny model on a CPU)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Routing:
    """Which experts the tokens of one forward go to, and which they went to.

    Handed to `Decoder.forward`; each routed layer reads its own slice and writes its own choice, by
    its number and not in turn, so that a layer that is run again (activation checkpointing) finds
    the same. Routed layers are counted from 0, dense ones in between are left out.
    """

    replay_TLA: Tensor | None = None
    """[T, L, A] integers: the experts that each token goes to, in slot order. The router's logits
    still decide how they are weighed, with gradient. None lets the router choose."""
    is_known_T: Tensor | None = None
    """[T] bool: where `replay_TLA` holds; elsewhere the router chooses. None: everywhere."""
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Routed layer -> [T, A] int64: what was taken in the end."""

    def __post_init__(self) -> None:
        if self.is_known_T is not None and self.replay_TLA is None:
            raise AlignmentError("Routing: is_known_T says where routes are known; none are given.")

    def stacked(self) -> Tensor:
        """[T, L, A] int64 of all routed layers, after the forward."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1)


class MLP(nn.Module):
    """Dense gated MLP; gate and up come from one fused projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.dense_intermediate_size if config.is_moe else config.intermediate_size
        self.gate_up_proj = Projection(config.hidden_size, 2 * width, bias=False)
        self.down_proj = Projection(width, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x_TD)))


class MoE(nn.Module):
    """Top-k routed experts: pairs are sorted by expert, combined in slot order."""

    def __init__(self, config: ModelConfig, routed_layer: int) -> None:
        super().__init__()
        self.routed_layer = routed_layer
        E, D, F = config.num_experts, config.hidden_size, config.intermediate_size
        self.num_active, self.limit = config.num_active_experts, config.swiglu_limit
        self.has_normalized_routes = config.has_normalized_routes
        has_bias = config.has_expert_bias
        self.router = nn.Linear(D, E, bias=config.has_router_bias)
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, D))
        self.gate_up_bias = nn.Parameter(torch.zeros(E, 2 * F)) if has_bias else None
        self.down_proj = nn.Parameter(torch.empty(E, D, F))
        self.down_bias = nn.Parameter(torch.zeros(E, D)) if has_bias else None
        self.gate_up_lora: ExpertLowRank | None = None
        self.down_lora: ExpertLowRank | None = None

    def forward(self, x_TD: Tensor, routing: Routing | None = None) -> Tensor:
        weights_TA, experts_TA = self._route(x_TD, routing)
        E, A = len(self.down_proj), self.num_active
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

    def _route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        logits_TE = self.router_logits(x_TD)
        replayed_TA = None
        if routing is not None and routing.replay_TLA is not None:
            replayed_TA = routing.replay_TLA[:, self.routed_layer].long()
            if routing.is_known_T is not None:
                own_TA = ops.route(logits_TE.detach(), self.num_active)[1]
                replayed_TA = torch.where(routing.is_known_T[:, None], replayed_TA, own_TA)
        weights_TA, experts_TA = ops.route(
            logits_TE,
            self.num_active,
            experts=replayed_TA,
            is_normalized=self.has_normalized_routes,
        )
        if routing is not None:
            routing.chosen[self.routed_layer] = experts_TA
        return weights_TA, experts_TA

    def router_logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] in the compute dtype: what experts are chosen and weighed by."""
        return ops.linear(x_TD, self.router.weight, self.router.bias)

    def _experts(self, x_RD: Tensor, counts: list[int]) -> Tensor:
        x_RF = ops.expert_linear(x_RD, self.gate_up_proj, self.gate_up_bias, counts)
        if self.gate_up_lora is not None:
            x_RF = self.gate_up_lora(x_RD, x_RF, counts)
        if self.limit:
            x_RF = ops.swiglu_clamped(x_RF, alpha=GPT_OSS_ALPHA, limit=self.limit)
        else:
            x_RF = ops.swiglu(x_RF)
        out_RD = ops.expert_linear(x_RF, self.down_proj, self.down_bias, counts)
        return out_RD if self.down_lora is None else self.down_lora(x_RF, out_RD, counts)
