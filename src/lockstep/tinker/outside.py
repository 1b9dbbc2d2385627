"""Samplers on an engine that has weights of its own: vLLM, SGLang, replicas of the embedded engine.

Adapters lie beside the engine's model, by name. A whole model (rank 0) takes the place of the base,
by turns with all other samplers. What is pushed is verified as in training: once with a change that
cannot be missed, and after every push by the log-probs of a probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.engines.adapter_engine import AdapterEngine
from lockstep.engines.base import Engine
from lockstep.errors import EngineError
from lockstep.models.adapters import decoder_over
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.sync.config import SyncConfig
from lockstep.sync.following import GAP_GROWTH, LEAST_GAP
from lockstep.sync.probe import LogProbs, Probe
from lockstep.sync.publisher import Publisher
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer

QUALIFICATION = LoraConfig(rank=1)
"""The adapter that the engine is tested with before anybody samples: any server takes its rank."""


@dataclass(frozen=True, slots=True, eq=False)
class FullWeights:
    """Weights of a whole model, for a sampler."""

    sampler_id: str
    """"" for the base."""
    directory: Path
    version: int
    expected: LogProbs
    """Log-probs of the probe, by the learner's decoder."""


class OutsideEngine:
    """An engine of one base model, whose weights are pushed and verified."""

    def __init__(
        self,
        engine: Engine,
        decoder: Decoder,
        directory: Path,
        *,
        left_out: frozenset[int],
        max_tokens: int,
    ) -> None:
        """decoder, directory: the base model. left_out, max_tokens: of a probe, see `Publisher`."""
        self._engine = engine
        model = decoder_over(decoder)
        add_adapter(model, lora_shape(QUALIFICATION, model.config), seed=0)
        budget = max(max_tokens, TrainerConfig().max_tokens_per_microbatch)
        config = TrainerConfig(max_tokens_per_microbatch=budget)
        self._trainer = Trainer(model, config, like=directory)
        self._of_probe: Mapping[str, Any] = {"left_out": left_out, "max_tokens": max_tokens}
        self._limit = LEAST_GAP
        """Nats between engine and decoder on the probe, above which other weights are at work."""
        self._holder: str | None = ""
        """The sampler whose whole weights the engine runs; "" is the base, None not known."""
        self._door, self._empty, self._num_inside = asyncio.Lock(), asyncio.Event(), 0
        self._empty.set()
        self.base = FullWeights("", directory, engine.version, self.scores(decoder))

    def _probe(self, engine: Engine) -> Probe:
        return Probe(SyncConfig(), engine, self._trainer, **self._of_probe)

    async def qualify(self, place: Path) -> str:
        """Pushes an adapter in `place` with a large change, and one without. Returns a line for a
        person; raises EngineError if the engine does not run the weights that it was sent."""
        view = AdapterEngine(self._engine, "qualification")
        publisher = Publisher(
            view, self._trainer, self._trainer.model, place=place, probed=self._of_probe
        )
        try:
            await publisher.publish(0)
        finally:
            publisher.close()
        await view.close()
        if publisher.qualification is not None:
            self._limit = max(LEAST_GAP, GAP_GROWTH * publisher.qualification.gap)
        await self.check("", self.base.expected, version=self.base.version)
        return publisher.describe()

    def scores(self, decoder: Decoder) -> LogProbs:
        """The log-probs of the probe that the engine gives if it runs the weights of `decoder`."""
        return self._probe(self._engine).by_trainer(decoder)

    async def check(self, adapter: str, expected: LogProbs, *, version: int) -> None:
        """Raises EngineError unless every replica scores the probe as expected. adapter: the name
        that requests give; "" for the whole model."""
        if not self._engine.capabilities.has_score:
            return
        probe = self._probe(AdapterEngine(self._engine, adapter) if adapter else self._engine)
        for replica, found in (await probe.by_engines(version=version)).items():
            gap = float(np.median(np.abs(found - expected)))
            if gap > self._limit:
                name = f"{self._engine.capabilities.name}{f' ({replica})' * bool(replica)}"
                raise EngineError(
                    f"engine {name} took the weights of version {version} and is {gap:.2g} nats "
                    f"from them on the probe; up to {self._limit:.2g} is rounding. Nothing was "
                    "sampled from them. Look at its log."
                )

    @asynccontextmanager
    async def holding(self, weights: FullWeights) -> AsyncIterator[None]:
        """The engine has these weights inside the block. Others wait, first come first served,
        until nobody needs the current weights."""
        async with self._door:
            if self._holder != weights.sampler_id:
                await self._empty.wait()
                await self._load(weights)
            self._num_inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    async def replace(self, weights: FullWeights) -> None:
        """Gives running requests of a sampler its new weights, if the engine has its old ones."""
        async with self._door:
            if self._holder == weights.sampler_id:
                await self._load(weights)

    async def _load(self, weights: FullWeights) -> None:
        self._holder = None
        await self._engine.load_weights(str(weights.directory), version=weights.version)
        await self.check("", weights.expected, version=weights.version)
        self._holder = weights.sampler_id
