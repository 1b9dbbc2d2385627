"""Faults of what the two sides compute: the sampler's numbers, weights and distribution, and the
trainer's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from lockstep.agent.tasks import derive_seed
from lockstep.config import ABOVE_0, Interval, at_least, tag
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run_config import Config
from lockstep.testing.engines import BrokenEngine
from lockstep.testing.faults.base import FaultConfig
from lockstep.types import Delta, Request

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.models.decoder import Decoder
    from lockstep.models.quantised import Scheme
    from lockstep.testing.faulty_decoders import NoisyDecoder


@dataclass(frozen=True, kw_only=True)
class _SamplerFault(FaultConfig):
    """Base of faults of the decoder that the embedded engine runs."""

    shares_weights: ClassVar[bool] = True
    """True if that decoder must be the trainer's own."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        super().check(config, model, renderer)
        name, engine = tag(type(self)), config.engine
        if not isinstance(engine, EmbeddedConfig) or engine.replicas:
            raise ConfigError(
                f"fault {name} changes the decoder of an engine in the trainer's process; "
                f"engine={tag(type(engine))} runs one of its own. Choose engine=embedded with "
                "engine.replicas=0, or a fault of the rows."
            )
        if self.shares_weights and engine.dtype != "same":
            raise ConfigError(
                f"fault {name} is on the trainer's own decoder; engine.dtype={engine.dtype} "
                "samples from a copy. Leave engine.dtype out."
            )


# -- the sampler's numbers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _NoiseFault(_SamplerFault):
    """Base of the faults with noise in the sampler."""

    def noises(self) -> dict[str, Any]:
        """The arguments of `with_noise`."""
        raise NotImplementedError(f"{type(self).__name__} has no noise")

    def noisy(self, model: Decoder) -> NoisyDecoder:
        """`model` with this noise, over the same parameters."""
        from lockstep.testing.faulty_decoders import with_noise

        return with_noise(model, **self.noises())

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_decoders import NoisyEngine

        assert isinstance(config, EmbeddedConfig), "checked before the run"
        return NoisyEngine(self.noisy(context.model), config, token_bytes=context.token_bytes)


@dataclass(frozen=True, kw_only=True)
class _GrowingNoise(_NoiseFault):
    """Noise with the standard deviation

        std + growth * max(version - growth_from, 0)

    which depends on the policy version only, so that a resumed run has the same noise. Draws are a
    hash of `seed`, the version and the inputs: a run repeats bitwise, while another batch, or the
    same tokens scored again, have other noise.
    """

    std: Annotated[float, at_least(0)]
    """Standard deviation, in logits."""
    growth: Annotated[float, at_least(0)] = 0.0
    """Added to `std` with each policy version."""
    growth_from: Annotated[int, at_least(0)] = 0
    """The policy version that it begins to grow at: the checkpoint's, for a run forked late."""
    seed: int = 0
    """Seed of the noise."""

    def std_at(self, version: int) -> float:
        """The standard deviation under this policy version."""
        return self.std + self.growth * max(version - self.growth_from, 0)


@dataclass(frozen=True, kw_only=True)
class KernelNoise(_GrowingNoise):
    """Gaussian noise on the sampler's logits: the kernels of another engine, which round
    differently.

    It is added before temperature, top-k and top-p. The recorded log-prob belongs to the noisy
    distribution; `score` draws its own noise.
    """

    bias: Annotated[float, at_least(0)] = 0.0
    """Standard deviation of a constant offset per token id: a systematic error, which averaging
    does not remove."""

    def noises(self) -> dict[str, Any]:
        return {"head": (self.std_at, self.seed), "bias": self.bias, "bias_seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class RouterNoise(_GrowingNoise):
    """Gaussian noise on the logits of every router of the sampler: near a tie, tokens go to other
    experts than in the trainer. Cached keys and values have it too."""

    needs: ClassVar = "a router"

    def noises(self) -> dict[str, Any]:
        return {"routers": (self.std_at, self.seed)}


@dataclass(frozen=True, kw_only=True)
class SamplingNoise(_NoiseFault):
    """The noise of a large mixture of experts, on both sides: the mean difference of the two
    log-probs, their variance in the sampler, and in the trainer."""

    needs: ClassVar = "a router"

    router_std: Annotated[float, at_least(0)] = 0.0
    """Standard deviation on the sampler's router logits, like `router_noise`: rare, large, new in
    each pass."""
    head_std: Annotated[float, at_least(0)] = 0.0
    """The same on its logits, like `kernel_noise`: small, everywhere, new in each pass."""
    bias: Annotated[float, at_least(0)] = 0.0
    """`bias` of `kernel_noise`: the same in each pass."""
    trainer_std: Annotated[float, at_least(0)] = 0.0
    """Standard deviation on the output of the trainer's experts, as of atomic adds in any order.
    Backward has the same noise, except in blocks that activation checkpointing recomputes."""
    seed: int = 0
    """Seed of all draws."""

    def noises(self) -> dict[str, Any]:
        return {
            "head": (lambda version: self.head_std, derive_seed(self.seed, "head")),
            "routers": (lambda version: self.router_std, derive_seed(self.seed, "routers")),
            "bias": self.bias,
            "bias_seed": self.seed,
        }

    @property
    def replaces_trained(self) -> bool:
        return self.trainer_std > 0

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.testing.faulty_decoders import with_noise

        noise = (lambda version: self.trainer_std, self.seed)
        return with_noise(model, experts=noise) if self.replaces_trained else model


# -- the sampler's weights and distribution --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StaleWeights(_SamplerFault):
    """The sampler runs the weights of `lag` policy versions ago, or the oldest that it has seen. A
    resumed run has seen none: the lag builds up again."""

    verifies_sync: ClassVar = False
    shares_weights: ClassVar = False

    lag: Annotated[int, at_least(0)] = 1
    """Number of policy versions that the sampler is behind."""
    is_honest: bool = True
    """True: tokens carry the version that sampled them, so that their age shows. False: they carry
    the newest one, as if the sync had worked."""

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_decoders import StaleEngine

        assert isinstance(config, EmbeddedConfig), "checked before the run"
        return StaleEngine(config, context, lag=self.lag, is_honest=self.is_honest)


@dataclass(frozen=True, kw_only=True)
class UnmergedAdapter(_SamplerFault):
    """The sampler runs the base model without its adapter: a server that was started without LoRA,
    or is asked for the base model. In the first step both are the same."""

    verifies_sync: ClassVar = False

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        super().check(config, model, renderer)
        if config.lora is None:
            raise ConfigError(
                "fault unmerged_adapter needs an adapter to leave out: set lora.rank=8. Without "
                "one, the fault stale_weights has the sampler behind."
            )

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.engines.registry import make_engine
        from lockstep.models.variants import sharing

        return make_engine(
            config, replace(context, model=sharing(context.model, has_adapter=False))
        )


@dataclass(frozen=True, kw_only=True)
class QuantisedRollout(_SamplerFault):
    """The sampler runs weights that are rounded to a narrow format after each sync: an engine that
    serves in fp8."""

    verifies_sync: ClassVar = False
    shares_weights: ClassVar = False

    number: Literal["fp8", "int8", "int4", "int4 to 7", "int4 asymmetric", "mxfp4", "nf4"] = "fp8"
    """Format of a number."""
    outputs: Annotated[int, at_least(0)] = 1
    """Outputs that share a scale; 0 for all."""
    inputs: Annotated[int, at_least(0)] = 0
    """Inputs that share one; 0 for all."""

    def rounded(self, model: Decoder) -> Decoder:
        """A copy of `model` with rounded weights."""
        from lockstep.models.changes import quantise
        from lockstep.models.hf_io import copy_decoder

        return quantise(copy_decoder(model), self.scheme).requires_grad_(False)

    @property
    def scheme(self) -> Scheme:
        from lockstep.models.quantised import Scheme

        return Scheme(number=self.number, block=(self.outputs, self.inputs))

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_decoders import QuantisedEngine

        assert isinstance(config, EmbeddedConfig), "checked before the run"
        return QuantisedEngine(config, context, scheme=self.scheme)


@dataclass(frozen=True, kw_only=True)
class ProcessedLogprobs(_SamplerFault):
    """The sampler draws with a temperature, top-p or top-k and records log-probs of that
    distribution, while the trainer's are of the raw one: vLLM's logprobs_mode=processed_logprobs,
    or SGLang's log-probs after temperature, with a trainer that ignores both."""

    CONFLICTS: ClassVar = {"temperature=1 with top_p=1 top_k=0": "nothing is processed. Set one."}
    shares_weights: ClassVar = False

    temperature: Annotated[float, ABOVE_0] = 1.0
    """Divisor of the sampler's logits, besides the requested one."""
    top_p: Annotated[float, Interval("(0, 1]")] = 1.0
    """1 is off."""
    top_k: Annotated[int, at_least(0)] = 0
    """0 is off."""

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.engines.registry import open_engine

        return self.processing(open_engine(config, context))

    def processing(self, engine: Engine) -> Any:
        """`engine` with this fault: the rows of a dump must be sampled by it."""
        return _ProcessingEngine(engine, self)


class _ProcessingEngine(BrokenEngine):
    """An engine that draws otherwise than it is asked to, and does not say so."""

    def __init__(self, inner: Engine, fault: ProcessedLogprobs) -> None:
        super().__init__(inner)
        self._fault = fault

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        asked, fault = request.sampling, self._fault
        if asked.temperature > 0:  # greedy leaves nothing to process
            sampling = replace(
                asked,
                temperature=asked.temperature * fault.temperature,
                top_p=fault.top_p,
                top_k=fault.top_k,
                distribution="sampled" if fault.top_p < 1 or fault.top_k else "tempered",
            )
            request = replace(request, sampling=sampling)
        return self.inner.generate(request)


# -- the trainer's numbers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _TrainedFault(FaultConfig):
    """Base of faults of the trainer's decoder."""

    verifies_sync: ClassVar = False


@dataclass(frozen=True, kw_only=True)
class IgnoredSinks(_TrainedFault):
    """The trainer's attention has no sinks: a training kernel that drops the argument, as flash
    attention 2 does for gpt-oss. All log-probs of the trainer are of another model."""

    needs: ClassVar = "attention sinks"

    layer: int = -1
    """Layer whose sinks are ignored; -1 for all."""

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import without_sinks

        return without_sinks(model, layer=None if self.layer < 0 else self.layer)


@dataclass(frozen=True, kw_only=True)
class DetachedSinks(_TrainedFault):
    """The trainer's sinks have no gradient: a kernel with sinks in its forward only. Log-probs are
    right, and the sinks stay as they were loaded."""

    needs: ClassVar = "attention sinks that learn"

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import with_attention
        from lockstep.testing.faulty_decoders import DetachedSinkAttention

        return with_attention(model, DetachedSinkAttention)


@dataclass(frozen=True, kw_only=True)
class IgnoredWindow(_TrainedFault):
    """The trainer's attention ignores sliding windows: a kernel that is called without the window.
    Rows up to the window's length are right."""

    needs: ClassVar = "a sliding window"

    layer: int = -1
    """Layer whose window is ignored; -1 for all."""

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import without_windows

        return without_windows(model, layer=None if self.layer < 0 else self.layer)
