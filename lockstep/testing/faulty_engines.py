"""The engines of `faults`: the embedded engine over a decoder that is not quite the trainer's.

# T tokens  D model width  V vocabulary  E experts
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lockstep.agent.tasks import derive_seed
from lockstep.engines.base import Capabilities
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import read_tensors
from lockstep.models.moe import MoE
from lockstep.ops import api as ops
from lockstep.ops.head import CHUNK_BYTES
from lockstep.testing.faults import GrowingNoise, KernelNoise, RouterNoise, StaleWeights

Tensor = torch.Tensor
AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


def kernel_noise_engine(
    fault: KernelNoise, config: EmbeddedConfig, model: Decoder, token_bytes: Sequence[bytes]
) -> NoisyEngine:
    """Shares the parameters of `model`, and adds noise to its logits."""
    noise = Noise(fault)
    with torch.device("meta"):
        twin = NoisyHead(model.config, noise, bias=fault.bias, seed=fault.seed)
    return NoisyEngine(_sharing(twin, model), config, noise=noise, token_bytes=token_bytes)


def router_noise_engine(
    fault: RouterNoise, config: EmbeddedConfig, model: Decoder, token_bytes: Sequence[bytes]
) -> NoisyEngine:
    """Shares the parameters of `model`, and adds noise to the logits of its routers."""
    noise = Noise(fault)
    with torch.device("meta"):
        twin = Decoder(model.config)
        for block in twin.layers:
            if isinstance(block.mlp, MoE):
                block.mlp = NoisyMoE(model.config, block.mlp.routed_layer, noise)
    return NoisyEngine(_sharing(twin, model), config, noise=noise, token_bytes=token_bytes)


def bfloat16_engine(
    config: EmbeddedConfig, model: Decoder, token_bytes: Sequence[bytes]
) -> CopyingEngine:
    """Computes in bfloat16, over a copy of the weights of `model` that each sync casts anew."""
    return CopyingEngine(_copy_of(model).to(torch.bfloat16), config, token_bytes=token_bytes)


def stale_engine(
    fault: StaleWeights, config: EmbeddedConfig, model: Decoder, token_bytes: Sequence[bytes]
) -> StaleEngine:
    """Runs copies of the weights that it was given `fault.lag` versions ago."""
    return StaleEngine(_copy_of(model), config, fault=fault, token_bytes=token_bytes)


# -- decoders --------------------------------------------------------------------------------------


class Noise:
    """Normal numbers, drawn anew for everything that is computed, that repeat with the run.

    A draw is a function of the seed, the policy version, the bits of what goes into the computation
    and how often that went in before under this version. So it does not depend on what happened
    before the last sync, and a batch put together in another way has other noise.
    """

    def __init__(self, settings: GrowingNoise) -> None:
        self._settings = settings
        self._num_draws: Counter[bytes] = Counter()
        self.begin(0)

    def begin(self, version: int) -> None:
        """The noise under this policy version, from its first draw."""
        self._version = version
        self.std = self._settings.std_at(version)
        self._num_draws.clear()

    def add_to(self, logits: Tensor, x_TD: Tensor) -> Tensor:
        """logits [T, N] computed from x [T, D] -> [T, N] float32 with noise; itself if there is
        none to add."""
        if self.std == 0:
            return logits
        digest = hashlib.blake2b(
            x_TD.contiguous().cpu().view(torch.uint8).numpy().data, digest_size=16
        ).digest()
        seed = derive_seed(
            self._settings.seed, self._version, digest.hex(), self._num_draws[digest]
        )
        self._num_draws[digest] += 1
        return logits.float() + self.std * _normal(logits.shape, seed).to(logits.device)


class NoisyHead(Decoder):
    """A decoder with noise on its logits, and on what it scores."""

    def __init__(self, config: ModelConfig, noise: Noise, *, bias: float, seed: int) -> None:
        super().__init__(config)
        self._noise = noise
        with torch.device("cpu"):  # this decoder is made without memory, its offsets are not
            offset_V = bias * _normal((config.vocab_size,), derive_seed(seed, "bias"))
        self._offset_V = offset_V if bias else None

    def logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV = super().logits(hidden_TD)
        if self._offset_V is not None:
            logits_TV = logits_TV.float() + self._offset_V.to(logits_TV.device)
        return self._noise.add_to(logits_TV, hidden_TD)

    def log_probs(
        self, hidden_TD: Tensor, ids_T: Tensor, *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if self._noise.std == 0 and self._offset_V is None:
            return super().log_probs(hidden_TD, ids_T, temperature=temperature)
        rows = max(1, CHUNK_BYTES // (4 * self.config.vocab_size))
        parts: list[tuple[Tensor, Tensor]] = []
        for hidden, ids in zip(hidden_TD.split(rows), ids_T.split(rows), strict=True):
            logp = ops.log_softmax(self.logits(hidden), temperature=temperature)
            parts.append((logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)


class NoisyMoE(MoE):
    """A mixture of experts with noise on the logits that choose and weigh them."""

    def __init__(self, config: ModelConfig, routed_layer: int, noise: Noise) -> None:
        super().__init__(config, routed_layer)
        self._noise = noise

    def router_logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super().router_logits(x_TD)
        return self._noise.add_to(logits_TE, x_TD).to(logits_TE.dtype)


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    """N(0, 1) float32 on the CPU, so that every device is given the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _sharing(twin: AnyDecoder, model: Decoder) -> AnyDecoder:
    """`twin` with the very parameters of `model`: an update of one is an update of both."""
    twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return twin


def _copy_of(model: Decoder) -> Decoder:
    return deepcopy(model).requires_grad_(False)


# -- engines ---------------------------------------------------------------------------------------


class NoisyEngine(EmbeddedEngine):
    """An engine that shares the trainer's weights, and whose noise follows their version."""

    def __init__(
        self, model: Decoder, config: EmbeddedConfig, *, noise: Noise, token_bytes: Sequence[bytes]
    ) -> None:
        super().__init__(model, config, token_bytes=token_bytes)
        self._noise = noise

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if source is not None:
            raise EngineError(
                "load_weights: this engine's noise is on the trainer's own decoder; expected None, "
                f"found {type(source).__name__}. A copy of the weights would be without noise."
            )
        await super().load_weights(None, version=version)
        self._noise.begin(version)


class CopyingEngine(EmbeddedEngine):
    """An engine over a copy of the weights, in its own dtype; each sync hands it all of them."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, shares_weights=False)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if source is None:
            raise EngineError(
                "load_weights: this engine has a copy of the weights; expected named tensors or a "
                "checkpoint directory, found None."
            )
        await super().load_weights(source, version=version)


class StaleEngine(CopyingEngine):
    """An engine that is given every version of the weights, and runs an older one."""

    def __init__(
        self,
        model: Decoder,
        config: EmbeddedConfig,
        *,
        fault: StaleWeights,
        token_bytes: Sequence[bytes],
    ) -> None:
        super().__init__(model, config, token_bytes=token_bytes)
        self._fault = fault
        self._weights: dict[int, dict[str, Tensor]] = {}
        """version -> tensors: the one that runs first, then those that will."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if isinstance(source, str):
            source = {name: read() for name, read in read_tensors(source).items()}
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
