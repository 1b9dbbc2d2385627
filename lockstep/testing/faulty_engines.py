"""The engines of `faults`: the embedded engine over a decoder that is not quite the trainer's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.agent.tasks import derive_seed
from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import copy_decoder, read_tensors
from lockstep.testing.broken_engines import BrokenEngine
from lockstep.testing.faults import (
    GrowingNoise,
    KernelNoise,
    ProcessedLogprobs,
    RouterNoise,
    SamplingNoise,
    StaleWeights,
)
from lockstep.testing.faulty_decoders import Noise, with_noisy_head, with_noisy_routers
from lockstep.types import Delta, Request

Tensor = torch.Tensor


def kernel_noise_engine(
    fault: KernelNoise, config: EmbeddedConfig, context: EngineContext
) -> NoisyEngine:
    """Shares the parameters of the trained decoder, and adds noise to its logits."""
    noise = Noise(fault)
    noisy = with_noisy_head(context.model, noise, bias=fault.bias, seed=fault.seed)
    return NoisyEngine(noisy, config, noises=[noise], token_bytes=context.token_bytes)


def router_noise_engine(
    fault: RouterNoise, config: EmbeddedConfig, context: EngineContext
) -> NoisyEngine:
    """Shares the parameters of the trained decoder, and adds noise to the logits of its routers."""
    noise = Noise(fault)
    noisy = with_noisy_routers(context.model, noise)
    return NoisyEngine(noisy, config, noises=[noise], token_bytes=context.token_bytes)


def sampling_noise_engine(
    fault: SamplingNoise, config: EmbeddedConfig, context: EngineContext
) -> NoisyEngine:
    """Shares the parameters of the trained decoder, with noise on its routers and its logits."""
    noisy, noises = noisy_sampler(fault, context.model)
    return NoisyEngine(noisy, config, noises=noises, token_bytes=context.token_bytes)


def noisy_sampler(fault: SamplingNoise, model: Decoder) -> tuple[Decoder, list[Noise]]:
    """`model` with noise on its routers and its logits, and the two noises."""
    of_routers, of_head = (
        Noise(GrowingNoise(std=std, seed=derive_seed(fault.seed, name)))
        for name, std in (("routers", fault.router_std), ("head", fault.head_std))
    )
    noisy = with_noisy_head(model, of_head, bias=fault.bias, seed=fault.seed, of_routers=of_routers)
    return noisy, [of_routers, of_head]


def base_model_engine(config: EmbeddedConfig, context: EngineContext) -> EmbeddedEngine:
    """Shares the parameters of the trained decoder, without its adapter."""
    with torch.device("meta"):
        base = Decoder(context.model.config, ops=context.model.ops)
    # Assigning hands down what the base's own, thrown away, had for requires_grad: the trainer
    # would go on to train what it froze.
    trained = {name: p.requires_grad for name, p in context.model.named_parameters()}
    state = context.model.state_dict(keep_vars=True)
    base.load_state_dict({k: v for k, v in state.items() if not trained.get(k)}, assign=True)
    for name, parameter in context.model.named_parameters():
        parameter.requires_grad_(trained[name])
    return EmbeddedEngine(base, config, token_bytes=context.token_bytes)


class ProcessingEngine(BrokenEngine):
    """An engine that draws in another way than it is asked to, and says nothing of it."""

    def __init__(self, engine: Engine, fault: ProcessedLogprobs) -> None:
        super().__init__(engine, at=0)
        self._fault = fault

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(self._processed(request)):
            yield delta

    def _processed(self, request: Request) -> Request:
        asked, fault = request.sampling, self._fault
        if asked.temperature == 0:  # greedy: there is nothing to process
            return request
        is_truncated = fault.top_p < 1 or fault.top_k > 0
        sampling = replace(
            asked,
            temperature=asked.temperature * fault.temperature,
            top_p=fault.top_p,
            top_k=fault.top_k,
            distribution="sampled" if is_truncated else "tempered",
        )
        return replace(request, sampling=sampling)


def stale_engine(
    fault: StaleWeights, config: EmbeddedConfig, context: EngineContext
) -> StaleEngine:
    """Runs copies of the weights that it was given `fault.lag` versions ago."""
    dtype = None if config.dtype == "same" else getattr(torch, config.dtype)
    own = copy_decoder(context.model, dtype=dtype)
    return StaleEngine(own, config, fault=fault, token_bytes=context.token_bytes)


class NoisyEngine(EmbeddedEngine):
    """An engine that shares the trainer's weights, and whose noise follows their version."""

    def __init__(
        self,
        model: Decoder,
        config: EmbeddedConfig,
        *,
        noises: Sequence[Noise],
        token_bytes: Sequence[bytes],
    ) -> None:
        super().__init__(model, config, token_bytes=token_bytes)
        self._noises = noises

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if source is not None:
            raise EngineError(
                "load_weights: this engine's noise is on the trainer's own decoder; expected None, "
                f"found {type(source).__name__}. A copy of the weights would be without noise."
            )
        await super().load_weights(None, version=version)
        for noise in self._noises:
            noise.begin(version)


class StaleEngine(EmbeddedEngine):
    """An engine that is given every version of the weights, and runs an older one."""

    def __init__(
        self,
        model: Decoder,
        config: EmbeddedConfig,
        *,
        fault: StaleWeights,
        token_bytes: Sequence[bytes],
    ) -> None:
        super().__init__(model, config, token_bytes=token_bytes, is_shared=False)
        self._fault = fault
        self._weights: dict[int, dict[str, Tensor]] = {}
        """version -> tensors: the one that runs first, then those that will."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if isinstance(source, str):
            source = {name: stored.read() for name, stored in read_tensors(source).items()}
        elif source is not None:  # the trainer's own memory, which the next update changes
            source = {name: tensor.clone() for name, tensor in source.items()}
        if source is not None:
            self._weights[version] = source
            due = [v for v in self._weights if v <= version - self._fault.lag]
            running = max(due, default=min(self._weights))
            self._weights = {v: w for v, w in self._weights.items() if v >= running}
            source = self._weights[running]
            version = running if self._fault.is_honest else version
        await super().load_weights(source, version=version)
