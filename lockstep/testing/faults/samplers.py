"""Faults of the sampler: its numbers, its weights, its distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.agent.tasks import derive_seed
from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run.hooks import LogProbs
from lockstep.run_config import Config
from lockstep.testing.faults.base import (
    FaultConfig,
    Learn,
    check_embedded,
    check_routed,
    check_shared,
)
from lockstep.testing.faults.edits import without_early_routes
from lockstep.testing.faults.noise import GrowingNoise
from lockstep.types import Sample

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.models.decoder import Decoder
    from lockstep.testing.faulty_decoders import Noise


@dataclass(frozen=True, kw_only=True)
class KernelNoise(GrowingNoise, FaultConfig):
    """Gaussian noise on the sampler's logits: the kernels of another engine, which round
    differently.

    It is added before temperature, top-k and top-p. The recorded log-prob is that of the noisy
    distribution; `score` has noise of its own draws.
    """

    bias: float = 0.0
    """Standard deviation of a constant offset per token id: a systematic error, which averaging
    does not remove."""

    def __post_init__(self) -> None:
        GrowingNoise.__post_init__(self)
        if not 0 <= self.bias < math.inf:
            raise ConfigError(f"bias={self.bias} must be a finite number of at least 0.")

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        check_shared(self, config.engine)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import NoisyEngine

        return NoisyEngine(*self.noisy(context.model), check_shared(self, config), context)

    def make_sampler(self, model: Decoder) -> Decoder:
        return self.noisy(model)[0]

    def noisy(self, model: Decoder) -> tuple[Decoder, list[Noise]]:
        """`model` with this noise, over the same parameters, and the noises in it."""
        from lockstep.testing.faulty_decoders import Noise, with_noisy_head

        noise = Noise(self)
        return with_noisy_head(model, noise, bias=self.bias, seed=self.seed), [noise]


@dataclass(frozen=True, kw_only=True)
class RouterNoise(GrowingNoise, FaultConfig):
    """Gaussian noise on the logits of every router of the sampler: near a tie, tokens go to other
    experts than in the trainer. Cached keys and values have it too."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        check_shared(self, config.engine)
        check_routed(self, config, model)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import NoisyEngine

        return NoisyEngine(*self.noisy(context.model), check_shared(self, config), context)

    def make_sampler(self, model: Decoder) -> Decoder:
        return self.noisy(model)[0]

    def noisy(self, model: Decoder) -> tuple[Decoder, list[Noise]]:
        """`model` with this noise, over the same parameters, and the noises in it."""
        from lockstep.testing.faulty_decoders import Noise, with_noisy_routers

        noise = Noise(self)
        return with_noisy_routers(model, noise), [noise]


@dataclass(frozen=True, kw_only=True)
class SamplingNoise(FaultConfig):
    """The noise of a large mixture of experts, on both sides: the mean difference of the two
    log-probs, their variance in the sampler, and in the trainer."""

    router_std: float = 0.0
    """Standard deviation on the sampler's router logits, like `router_noise`: rare, large, new in
    each pass."""
    head_std: float = 0.0
    """The same on its logits, like `kernel_noise`: small, everywhere, new in each pass."""
    bias: float = 0.0
    """`bias` of `kernel_noise`: the same in each pass."""
    trainer_std: float = 0.0
    """Standard deviation on the output of the trainer's experts, as of atomic adds in any order.
    Backward has the same noise, except in blocks that activation checkpointing recomputes."""
    seed: int = 0
    """Seed of all draws."""

    def __post_init__(self) -> None:
        for name in ("router_std", "head_std", "bias", "trainer_std"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be a finite number of at least 0.")

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        check_shared(self, config.engine)
        check_routed(self, config, model)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import NoisyEngine

        return NoisyEngine(*self.noisy(context.model), check_shared(self, config), context)

    def make_sampler(self, model: Decoder) -> Decoder:
        return self.noisy(model)[0]

    def noisy(self, model: Decoder) -> tuple[Decoder, list[Noise]]:
        """`model` with this noise, over the same parameters, and the noises in it."""
        from lockstep.testing.faulty_decoders import Noise, with_noisy_head

        routers, head = (
            Noise(GrowingNoise(std=std, seed=derive_seed(self.seed, name)))
            for name, std in (("routers", self.router_std), ("head", self.head_std))
        )
        noisy = with_noisy_head(model, head, bias=self.bias, seed=self.seed, of_routers=routers)
        return noisy, [routers, head]

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.testing.faulty_decoders import Noise, with_noisy_experts

        if self.trainer_std == 0:
            return model
        return with_noisy_experts(model, Noise(GrowingNoise(std=self.trainer_std, seed=self.seed)))


@dataclass(frozen=True, kw_only=True)
class LostRoutes(FaultConfig):
    """Later turns find their prefix gone from the engine's cache: the routes of all positions
    before are lost to `trainer.routing_replay=rollout`."""

    share: float = 0.5
    """Share of the later turns that are hit."""
    seed: int = 0
    """Seed of the choice."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share} must lie in (0, 1].")

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        return [without_early_routes(row, self.share, seed=self.seed) for row in rows]


@dataclass(frozen=True, kw_only=True)
class StaleWeights(FaultConfig):
    """The sampler runs the weights of `lag` policy versions ago, or the oldest that it has seen. A
    resumed run has seen none: the lag builds up again."""

    verifies_sync: ClassVar[bool] = False

    lag: int = 1
    """Policy versions by which the sampler is behind."""
    is_honest: bool = True
    """True: tokens carry the version that sampled them, so that their age shows. False: they carry
    the newest one, as if the sync had worked."""

    def __post_init__(self) -> None:
        if self.lag < 0:
            raise ConfigError(f"lag={self.lag} must be at least 0.")

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        check_embedded(self, config.engine)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import StaleEngine

        own = check_embedded(self, config)
        return StaleEngine(own, context, lag=self.lag, is_honest=self.is_honest)

    @property
    def age(self) -> int:
        return self.lag if self.is_honest else 0

    def make_other(self, model: Decoder, learn: Learn) -> Decoder:
        return learn(self.lag)


@dataclass(frozen=True, kw_only=True)
class UnmergedAdapter(FaultConfig):
    """The sampler runs the base model without its adapter: a server that was started without LoRA,
    or is asked for the base model. In the first step both are the same."""

    verifies_sync: ClassVar[bool] = False

    least: ClassVar = {"updates": 1}

    updates: int = 8
    """Updates of the adapter of a dump. In a run the adapter is trained."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        check_shared(self, config.engine)
        if config.lora is None:
            raise ConfigError(
                "fault unmerged_adapter needs an adapter to leave out: set lora.rank=8. Without "
                "one, the fault stale_weights has the sampler behind."
            )

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import base_model_engine

        return base_model_engine(check_shared(self, config), context)

    def make_other(self, model: Decoder, learn: Learn) -> Decoder:
        return learn(self.updates, has_adapter=True)


@dataclass(frozen=True, kw_only=True)
class ProcessedLogprobs(FaultConfig):
    """The sampler draws with a temperature, top-p or top-k and records log-probs of that
    distribution, while the trainer's are of the raw one: vLLM's logprobs_mode=processed_logprobs,
    or SGLang's log-probs after temperature, with a trainer that ignores both."""

    temperature: float = 1.0
    """Divisor of the sampler's logits, besides the requested one."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""

    def __post_init__(self) -> None:
        is_known = 0 < self.temperature < math.inf and 0 < self.top_p <= 1 and self.top_k >= 0
        if not is_known:
            raise ConfigError(
                f"temperature={self.temperature} must be above 0, top_p={self.top_p} in (0, 1], "
                f"top_k={self.top_k} at least 0."
            )
        if (self.temperature, self.top_p, self.top_k) == (1.0, 1.0, 0):
            raise ConfigError(
                "processed_logprobs processes nothing: set its temperature, top_p or top_k."
            )

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        check_embedded(self, config.engine)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.engines.registry import open_engine

        return self.processing(open_engine(config, context))

    def processing(self, engine: Engine) -> Any:
        """`engine` with this fault: the rows of a dump must be sampled by it."""
        from lockstep.testing.faulty_engines import ProcessingEngine

        return ProcessingEngine(
            engine, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )
