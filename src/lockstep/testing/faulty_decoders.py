"""Decoders and engines of `faults`: the parameters of a given decoder with wrong arithmetic, and
the embedded engine over them.

# T tokens  D model width  V vocabulary  E experts
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.agent.tasks import derive_seed
from lockstep.engines.base import EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.attention import Attention
from lockstep.models.changes import quantise
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import copy_decoder, read_tensors
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.moe import MoE
from lockstep.models.quantised import Scheme
from lockstep.models.variants import sharing
from lockstep.ops.base import Ops

Tensor = torch.Tensor


class DetachedSinkAttention(Attention):
    """Attention whose sinks are constants."""

    def sink_logits(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.detach()


class Noise:
    """Normal numbers that are new for each computation and repeat with the run.

    A draw is a function of the seed, the policy version, the bits of the inputs and how often these
    occurred under this version. So it does not depend on anything before the last sync, and another
    batch has other noise.
    """

    def __init__(self, std_at: Callable[[int], float] = lambda version: 0.0, seed: int = 0) -> None:
        """std_at: policy version -> standard deviation."""
        self._std_at, self._seed = std_at, seed
        self._num_draws: Counter[bytes] = Counter()
        self.begin(0)

    def begin(self, version: int) -> None:
        """Starts the noise of this policy version."""
        self._version, self.std = version, self._std_at(version)
        self._num_draws.clear()

    def add_to(self, out: Tensor, x_TD: Tensor) -> Tensor:
        """out [T, N] computed from x [T, D] -> [T, N] of its dtype with noise, which has no
        gradient."""
        if self.std == 0:
            return out
        digest = hashlib.blake2b(
            x_TD.detach().contiguous().cpu().view(torch.uint8).numpy().data, digest_size=16
        ).digest()
        seed = derive_seed(self._seed, self._version, digest.hex(), self._num_draws[digest])
        self._num_draws[digest] += 1
        return (out.float() + self.std * _normal(out.shape, seed).to(out.device)).to(out.dtype)


NoiseAt = tuple[Callable[[int], float], int]
"""The arguments of a `Noise`."""


def with_noise(
    model: Decoder,
    *,
    head: NoiseAt | None = None,
    routers: NoiseAt | None = None,
    experts: NoiseAt | None = None,
    bias: float = 0.0,
    bias_seed: int = 0,
) -> NoisyDecoder:
    """`model` with noise on its logits, its routers' logits and its experts' output, over the same
    parameters. bias, bias_seed: size and seed of the offset per token id."""
    noises = [Noise(*noise) if noise else Noise() for noise in (head, routers, experts)]
    offset_V = bias * _normal((model.config.vocab_size,), derive_seed(bias_seed, "bias"))
    return sharing(model, lambda config: NoisyDecoder(config, noises, offset_V))


class NoisyDecoder(Decoder):
    """A decoder with noise. noises: of the head, the routers and the experts."""

    def __init__(self, config: ModelConfig, noises: Sequence[Noise], offset_V: Tensor) -> None:
        super().__init__(config)
        self._noises, self._offset_V = noises, offset_V
        self._is_biased = bool(offset_V.any())
        for block in self.layers:
            if isinstance(block.mlp, MoE):
                block.mlp = NoisyMoE(config, block.mlp.routed_layer, *noises[1:])

    def begin(self, version: int) -> None:
        """Starts the noise of this policy version."""
        for noise in self._noises:
            noise.begin(version)

    @property
    def _is_sound(self) -> bool:
        return self._noises[0].std == 0 and not self._is_biased

    def logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV = super().logits(hidden_TD)
        if self._is_sound:
            return logits_TV
        offset_V = self._offset_V.to(logits_TV.device)
        return self._noises[0].add_to(logits_TV.float() + offset_V, hidden_TD)

    def log_probs(
        self, hidden_TD: Tensor, ids_T: Tensor, *, temperature: float = 1.0, **more: Any
    ) -> tuple[Tensor, Tensor]:
        if self._is_sound:
            return super().log_probs(hidden_TD, ids_T, temperature=temperature, **more)
        logp_TV = self.ops.log_softmax(self.logits(hidden_TD), temperature=temperature)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return logp_TV.gather(1, ids_T[:, None])[:, 0], entropy_T


class NoisyMoE(MoE):
    """A mixture of experts with noise on the logits that choose and weigh experts, and on the sum
    of the experts, as of atomic adds in any order."""

    def __init__(
        self, config: ModelConfig, routed_layer: int, routers: Noise, experts: Noise
    ) -> None:
        super().__init__(config, routed_layer)
        self._routers, self._experts = routers, experts

    def router_logits(self, x_TD: Tensor, ops: Ops) -> Tensor:
        return self._routers.add_to(super().router_logits(x_TD, ops), x_TD)

    def forward(self, x_TD: Tensor, at: LayerInputs) -> Tensor:
        return self._experts.add_to(super().forward(x_TD, at), x_TD)


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    """N(0, 1) float32, drawn on the CPU so that all devices get the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class NoisyEngine(EmbeddedEngine):
    """An engine over a NoisyDecoder, whose noise follows the version of the weights."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if source is not None:
            raise EngineError(
                "load_weights: this engine's noise is on the trainer's own decoder; expected None, "
                f"found {type(source).__name__}. A copy of the weights would be without noise."
            )
        await super().load_weights(None, version=version)
        assert isinstance(self._model, NoisyDecoder), "the engine was made over one"
        self._model.begin(version)


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
        """version -> tensors: the running version first, then the later ones."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if isinstance(source, str):
            source = {name: stored.read() for name, stored in read_tensors(source).items()}
        assert source is not None, "the engine shares no weights"
        # The trainer's own memory, which the next update changes.
        self._weights[version] = {name: tensor.clone() for name, tensor in source.items()}
        due = [v for v in self._weights if v <= version - self._lag]
        running = max(due, default=min(self._weights))
        self._weights = {v: w for v, w in self._weights.items() if v >= running}
        claimed = running if self._is_honest else version
        await super().load_weights(self._weights[running], version=claimed)


class QuantisedEngine(EmbeddedEngine):
    """An engine that rounds the weights of every version to a narrow format."""

    def __init__(self, config: EmbeddedConfig, context: EngineContext, *, scheme: Scheme) -> None:
        dtype = None if config.dtype == "same" else getattr(torch, config.dtype)
        own = quantise(copy_decoder(context.model, dtype=dtype), scheme)
        super().__init__(own, config, token_bytes=context.token_bytes, is_shared=False)
        self._scheme = scheme

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        await super().load_weights(source, version=version)
        quantise(self._model, self._scheme)
