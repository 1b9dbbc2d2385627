"""The engines of `faults`: the embedded engine over a decoder that is not quite the trainer's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import copy_decoder, read_tensors
from lockstep.testing.engines import BrokenEngine
from lockstep.testing.faulty_decoders import Noise
from lockstep.types import Delta, Request

Tensor = torch.Tensor


def base_model_engine(config: EmbeddedConfig, context: EngineContext) -> EmbeddedEngine:
    """An engine over the parameters of the trained decoder, without its adapter."""
    with torch.device("meta"):
        base = Decoder(context.model.config, ops=context.model.ops)
    # Assigning copies requires_grad from the base's own parameters, which are thrown away: the
    # trainer would then train what it froze.
    trained = {name: p.requires_grad for name, p in context.model.named_parameters()}
    state = context.model.state_dict(keep_vars=True)
    base.load_state_dict({k: v for k, v in state.items() if not trained.get(k)}, assign=True)
    for name, parameter in context.model.named_parameters():
        parameter.requires_grad_(trained[name])
    return EmbeddedEngine(base, config, token_bytes=context.token_bytes)


class ProcessingEngine(BrokenEngine):
    """An engine that draws otherwise than it is asked to, and does not say so."""

    def __init__(self, engine: Engine, *, temperature: float, top_p: float, top_k: int) -> None:
        super().__init__(engine)
        self._temperature, self._top_p, self._top_k = temperature, top_p, top_k

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(self._processed(request)):
            yield delta

    def _processed(self, request: Request) -> Request:
        asked = request.sampling
        if asked.temperature == 0:  # greedy: there is nothing to process
            return request
        is_truncated = self._top_p < 1 or self._top_k > 0
        sampling = replace(
            asked,
            temperature=asked.temperature * self._temperature,
            top_p=self._top_p,
            top_k=self._top_k,
            distribution="sampled" if is_truncated else "tempered",
        )
        return replace(request, sampling=sampling)


class NoisyEngine(EmbeddedEngine):
    """An engine that shares the trainer's weights, with noise that follows their version."""

    def __init__(
        self, noisy: Decoder, noises: list[Noise], config: EmbeddedConfig, context: EngineContext
    ) -> None:
        super().__init__(noisy, config, token_bytes=context.token_bytes)
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
    """An engine that takes every version of the weights, and runs copies of an older one."""

    def __init__(
        self, config: EmbeddedConfig, context: EngineContext, *, lag: int, is_honest: bool
    ) -> None:
        """lag: versions behind. is_honest: tokens carry the version that sampled them."""
        dtype = None if config.dtype == "same" else getattr(torch, config.dtype)
        own = copy_decoder(context.model, dtype=dtype)
        super().__init__(own, config, token_bytes=context.token_bytes, is_shared=False)
        self._lag, self._is_honest = lag, is_honest
        self._weights: dict[int, dict[str, Tensor]] = {}
        """version -> tensors: the one that runs first, then those that will."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if isinstance(source, str):
            source = {name: stored.read() for name, stored in read_tensors(source).items()}
        elif source is not None:  # the trainer's own memory, which the next update changes
            source = {name: tensor.clone() for name, tensor in source.items()}
        if source is not None:
            self._weights[version] = source
            due = [v for v in self._weights if v <= version - self._lag]
            running = max(due, default=min(self._weights))
            self._weights = {v: w for v, w in self._weights.items() if v >= running}
            source = self._weights[running]
            version = running if self._is_honest else version
        await super().load_weights(source, version=version)
