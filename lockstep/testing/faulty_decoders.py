"""Decoders of `faults`: the parameters of a given decoder with wrong arithmetic.

# T tokens  D model width  H heads  V vocabulary  E experts
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from lockstep.agent.tasks import derive_seed
from lockstep.models.attention import Attention
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.moe import MoE, Routing
from lockstep.models.variants import sharing, with_attention
from lockstep.ops.base import Ops
from lockstep.ops.head import CHUNK_BYTES
from lockstep.testing.faults.noise import GrowingNoise

Tensor = torch.Tensor


def with_noisy_head(
    model: Decoder, noise: Noise, *, bias: float, seed: int, of_routers: Noise | None = None
) -> Decoder:
    """`model` with noise on its logits. bias, seed: size and seed of the offset per token id.
    of_routers: noise on the logits of its routers."""
    with torch.device("meta"):
        twin = NoisyHead(model.config, noise, bias=bias, seed=seed)
        if of_routers is not None:
            _put_mixtures(twin, NoisyRouter, of_routers)
    return sharing(twin, model)


def with_noisy_routers(model: Decoder, noise: Noise) -> Decoder:
    """`model` with noise on the logits of its routers."""
    return _with_mixtures(model, NoisyRouter, noise)


def with_noisy_experts(model: Decoder, noise: Noise) -> Decoder:
    """`model` with noise on the output of its experts."""
    return _with_mixtures(model, NoisyExperts, noise)


def _with_mixtures(model: Decoder, kind: type[NoisyMoE], noise: Noise) -> Decoder:
    with torch.device("meta"):
        twin = Decoder(model.config)
        _put_mixtures(twin, kind, noise)
    return sharing(twin, model)


def _put_mixtures(twin: Decoder, kind: type[NoisyMoE], noise: Noise) -> None:
    for block in twin.layers:
        if isinstance(block.mlp, MoE):
            block.mlp = kind(twin.config, block.mlp.routed_layer, noise)


def with_detached_sinks(model: Decoder) -> Decoder:
    """`model` with sinks that get no gradient."""
    return with_attention(model, DetachedSinkAttention)


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

    def __init__(self, settings: GrowingNoise) -> None:
        self._settings = settings
        self._num_draws: Counter[bytes] = Counter()
        self.begin(0)

    def begin(self, version: int) -> None:
        """Starts the noise of this policy version."""
        self._version = version
        self.std = self._settings.std_at(version)
        self._num_draws.clear()

    def add_to(self, logits: Tensor, x_TD: Tensor) -> Tensor:
        """logits [T, N] computed from x [T, D] -> [T, N] float32 with noise, which has no gradient;
        `logits` itself if `std` is 0."""
        if self.std == 0:
            return logits
        digest = hashlib.blake2b(
            x_TD.detach().contiguous().cpu().view(torch.uint8).numpy().data, digest_size=16
        ).digest()
        seed = derive_seed(
            self._settings.seed, self._version, digest.hex(), self._num_draws[digest]
        )
        self._num_draws[digest] += 1
        return logits.float() + self.std * _normal(logits.shape, seed).to(logits.device)


class NoisyHead(Decoder):
    """A decoder with noise on its logits and its log-probs."""

    def __init__(self, config: ModelConfig, noise: Noise, *, bias: float, seed: int) -> None:
        super().__init__(config)
        self._noise = noise
        with torch.device("cpu"):  # the decoder is made on the meta device, its offsets are not
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
            logp = self.ops.log_softmax(self.logits(hidden), temperature=temperature)
            parts.append((logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)


class NoisyMoE(MoE):
    """Base of a mixture of experts with noise."""

    def __init__(self, config: ModelConfig, routed_layer: int, noise: Noise) -> None:
        super().__init__(config, routed_layer)
        self._noise = noise


class NoisyRouter(NoisyMoE):
    """Noise on the logits that choose and weigh experts."""

    def router_logits(self, x_TD: Tensor, ops: Ops) -> Tensor:
        logits_TE = super().router_logits(x_TD, ops)
        return self._noise.add_to(logits_TE, x_TD).to(logits_TE.dtype)


class NoisyExperts(NoisyMoE):
    """Noise on the sum of the experts, as of atomic adds in any order."""

    def forward(self, x_TD: Tensor, ops: Ops, routing: Routing | None = None) -> Tensor:
        out_TD = super().forward(x_TD, ops, routing)
        return self._noise.add_to(out_TD, x_TD).to(out_TD.dtype)


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    """N(0, 1) float32, drawn on the CPU so that all devices get the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
