"""The second half of a layer: a dense gated MLP or routed experts, over ops alone.

# T tokens  D model width  E experts  A active experts  F expert width  L routed layers
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.models.adapter_rows import StackedFactors
from lockstep.models.config import ModelConfig
from lockstep.models.experts import ExpertProjection, mix_experts
from lockstep.models.layer_inputs import LayerInputs, Routing
from lockstep.models.lora import ExpertLowRank, Projection
from lockstep.ops.base import Ops

Tensor = torch.Tensor

GPT_OSS_ALPHA = 1.702  # sigmoid slope of gpt-oss' activation; a constant in its config class too


class MLP(nn.Module):
    """Dense gated MLP; gate and up come from one fused projection."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """width: None takes the width of a dense layer."""
        super().__init__()
        if width is None:
            width = config.dense_intermediate_size if config.is_moe else config.intermediate_size
        self.gate_up_proj = Projection(config.hidden_size, 2 * width, bias=False)
        self.down_proj = Projection(width, config.hidden_size, bias=False)
        self.is_gelu = config.activation == "gelu"

    def forward(
        self,
        x_TD: Tensor,
        at: LayerInputs,
        *,
        eps: float = 0.0,
        norm: Tensor | None = None,
        output_norm: Tensor | None = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """x, or the residual, + the MLP of the normed x; output_norm: norm of the MLP's output."""
        ops = at.ops
        if norm is not None and self.gate_up_proj.is_plain(at) and not self.is_gelu:
            hidden_TF = ops.norm_swiglu(x_TD, norm, eps, self.gate_up_proj.weight)
        else:
            activation = ops.geglu if self.is_gelu else ops.swiglu
            hidden_TF = activation(self.gate_up_proj.of_norm(x_TD, norm, eps, at))
        residual_TD = x_TD if residual_TD is None else residual_TD
        return self.down_proj.added(residual_TD, hidden_TF, output_norm, eps, at)


class Router(nn.Linear):
    """Logits of the experts and, where they are chosen by sigmoids, the bias of the choice, which
    no gradient reaches. It is float32 in a model of any dtype, as in its checkpoints."""

    def __init__(self, inputs: int, experts: int, *, bias: bool, has_choice_bias: bool) -> None:
        super().__init__(inputs, experts, bias=bias)
        self.choice_bias: nn.Parameter | None = None
        if has_choice_bias:
            # vLLM makes a model while the model's dtype is torch's default.
            self.choice_bias = nn.Parameter(
                torch.zeros(experts, dtype=torch.float32), requires_grad=False
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.choice_bias
        if bias is None:
            return super()._apply(fn, recurse)
        self.choice_bias = None
        super()._apply(fn, recurse)
        moved = fn(bias)
        moved = moved if moved.dtype == bias.dtype else bias.detach().to(moved.device)
        self.choice_bias = nn.Parameter(moved, requires_grad=False)
        return self


class MoE(nn.Module):
    """Top-k routed experts, computed by `experts.mix_experts`, and the shared ones."""

    def __init__(self, config: ModelConfig, routed_layer: int) -> None:
        super().__init__()
        self.routed_layer = routed_layer
        E, D, F = config.num_experts, config.hidden_size, config.intermediate_size
        has_bias = config.has_expert_bias
        self.config = config
        self.router = Router(
            D, E, bias=config.has_router_bias, has_choice_bias=config.has_sigmoid_routes
        )
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, D))
        self.gate_up_bias = nn.Parameter(torch.zeros(E, 2 * F)) if has_bias else None
        self.down_proj = nn.Parameter(torch.empty(E, D, F))
        self.down_bias = nn.Parameter(torch.zeros(E, D)) if has_bias else None
        self.gate_up_lora: ExpertLowRank | None = None
        self.down_lora: ExpertLowRank | None = None
        self.shared = MLP(config, config.shared_width) if config.shared_width else None
        self.shared_gate = nn.Linear(D, 1, bias=False) if config.has_shared_gate else None

    def forward(self, x_TD: Tensor, at: LayerInputs) -> Tensor:
        ops, rows = at.ops, at.adapters
        of_rows = [[], []] if rows is None else rows.of_experts(self, "gate_up_lora", "down_lora")
        weights_TA, experts_TA = self._route(x_TD, ops, at.routing)
        activation = ops.swiglu
        if limit := self.config.swiglu_limit:
            activation = partial(ops.swiglu, alpha=GPT_OSS_ALPHA, limit=limit)
        out_TD = mix_experts(
            x_TD,
            weights_TA,
            experts_TA,
            gate_up=self._projection("gate_up", at, of_rows[0]),
            down=self._projection("down", at, of_rows[1]),
            activation=activation,
            ops=ops,
            adapters=rows if of_rows[0] else None,
        )
        if self.shared is None:
            return out_TD
        if self.shared_gate is None:
            return self.shared(x_TD, at, residual_TD=out_TD)
        shared_TD = self.shared(x_TD, at, residual_TD=torch.zeros_like(out_TD))
        gate_T1 = ops.sigmoid(ops.linear(x_TD, self.shared_gate.weight)).to(x_TD.dtype)
        return out_TD + gate_T1 * shared_TD

    def _projection(
        self, name: str, at: LayerInputs, of_rows: list[StackedFactors | None]
    ) -> ExpertProjection:
        weight, bias = getattr(self, f"{name}_proj"), getattr(self, f"{name}_bias")
        lora: ExpertLowRank | None = getattr(self, f"{name}_lora")
        if lora is None or at.adapters is not None or not lora.is_on:
            return ExpertProjection(weight, bias, of_rows=of_rows)
        return ExpertProjection(weight, bias, lora.A, lora.B, lora.scale)

    def _route(self, x_TD: Tensor, ops: Ops, routing: Routing | None) -> tuple[Tensor, Tensor]:
        logits_TE = self.router_logits(x_TD, ops)
        if routing is not None and routing.weight_T is not None:
            routing.prob_sums.append(routing.weight_T @ logits_TE.float().softmax(-1))
        replayed_TA = None
        if routing is not None and routing.replay_TLA is not None:
            own_TA = self._choose(logits_TE.detach(), ops, None)[1]
            replayed_TA = routing.replay_TLA[:, self.routed_layer].long()
            if routing.is_known_T is not None:
                replayed_TA = torch.where(routing.is_known_T[:, None], replayed_TA, own_TA)
            is_other_TA = own_TA.sort(-1)[0] != replayed_TA.sort(-1)[0]
            routing.differing[self.routed_layer] = is_other_TA.any(-1)
        weights_TA, experts_TA = self._choose(logits_TE, ops, replayed_TA)
        if routing is not None:
            routing.chosen[self.routed_layer] = experts_TA
        return weights_TA.to(x_TD.dtype), experts_TA

    def _choose(
        self, logits_TE: Tensor, ops: Ops, experts_TA: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        c, bias_E = self.config, self.router.choice_bias
        of_both: Any = {"experts": experts_TA, "is_normalized": c.has_normalized_routes}
        if bias_E is None:
            return ops.route(logits_TE, c.num_active_experts, **of_both)
        return ops.route_by_sigmoid(
            logits_TE,
            c.num_active_experts,
            bias=bias_E,
            num_groups=c.num_expert_groups,
            num_active_groups=c.num_active_groups,
            scale=c.route_scale,
            **of_both,
        )

    def router_logits(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """[T, E] scores that choose and weigh experts: in the compute dtype, or in float32 for
        sigmoids."""
        weight, bias = self.router.weight, self.router.bias
        if self.router.choice_bias is not None:
            x_TD, weight = x_TD.float(), weight.float()
        return ops.linear(x_TD, weight, bias)
