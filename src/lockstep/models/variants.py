"""Decoders that share another one's parameters and compute with a defect.

The doctor scores by them to find the defect that reproduces a deviating side (`doctor.numerics`);
faults of a run are built from them (`testing.faulty_decoders`).

# T tokens  D model width  E experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lockstep.models.attention import Attention
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.moe import MoE
from lockstep.ops.base import Ops

Tensor = torch.Tensor
AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


def sharing(
    model: Decoder, make: Callable[[ModelConfig], AnyDecoder] = Decoder, *, has_adapter: bool = True
) -> AnyDecoder:
    """A decoder with the ops and the very parameters of `model`: an update of one is an update of
    both. make: called with the config, on the meta device. has_adapter: False leaves the adapter
    of `model` out."""
    with torch.device("meta"):
        twin = make(model.config)
    twin.ops = model.ops
    if has_adapter and model.lora is not None:
        add_adapter(twin, model.lora, seed=0)
    # Assigned parameters take over requires_grad from the replaced parameters.
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    twin.load_state_dict({name: state[name] for name in twin.state_dict()}, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    return twin


def with_attention(model: Decoder, kind: Callable[..., Attention]) -> Decoder:
    """`model` with attention of this kind in every layer. kind: called with config and layer."""

    def make(config: ModelConfig) -> Decoder:
        twin = Decoder(config)
        for layer, block in enumerate(twin.layers):
            block.attention = kind(config, layer)
        return twin

    return sharing(model, make)


class SinklessAttention(Attention):
    """Attention without its sinks."""

    def sink_logits(self) -> None:
        return None


def without_sinks(model: Decoder, *, layer: int | None = None) -> Decoder:
    """`model` without attention sinks, which then get no gradient. layer: the only one without;
    None: all."""

    def kind(config: ModelConfig, number: int) -> Attention:
        return (SinklessAttention if layer in (None, number) else Attention)(config, number)

    return with_attention(model, kind)


def without_windows(model: Decoder, *, layer: int | None = None) -> Decoder:
    """`model` with full attention in this layer; None: in every one."""
    windows = tuple(
        None if layer in (None, number) else width
        for number, width in enumerate(model.config.windows)
    )
    return with_config(model, windows=windows)


def with_config(model: Decoder, **changed: Any) -> Decoder:
    """`model` with other settings, of the same shapes."""
    return sharing(model, lambda config: Decoder(replace(config, **changed)))


class PerturbedRouter(MoE):
    """A router whose logits have normal noise: near a tie, a token goes to other experts."""

    def __init__(self, *args, std: float, generator: torch.Generator) -> None:
        super().__init__(*args)
        self._std, self._generator = std, generator

    def router_logits(self, x_TD: Tensor, ops: Ops) -> Tensor:
        logits_TE = super().router_logits(x_TD, ops)
        noise_TE = self._std * torch.randn(logits_TE.shape, generator=self._generator)
        return logits_TE + noise_TE.to(logits_TE.device, logits_TE.dtype)


def with_perturbed_routers(model: Decoder, std: float, *, seed: int) -> Decoder:
    """`model` with noise on the logits of its routers, drawn anew in each forward."""
    noise = {"std": std, "generator": torch.Generator().manual_seed(seed)}

    def make(config: ModelConfig) -> Decoder:
        twin = Decoder(config)
        for block in twin.layers:
            if isinstance(block.mlp, MoE):
                block.mlp = PerturbedRouter(config, block.mlp.routed_layer, **noise)
        return twin

    return sharing(model, make)
