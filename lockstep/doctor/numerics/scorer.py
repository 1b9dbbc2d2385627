"""Scores rows by weights on disk, and by variants of the arithmetic. Imported when a row is scored,
because it imports torch.

# T packed tokens  N tokens of all rows  P predictors  V vocabulary  L routed layers  A experts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.inputs.assemble import grouped
from lockstep.doctor.numerics.compare import Distribution, Scored
from lockstep.doctor.numerics.weights import Weights
from lockstep.models.decoder import Decoder
from lockstep.models.fallback import load_fallback
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.lora import adapter_scaled, add_adapter
from lockstep.models.moe import Routing
from lockstep.models.peft_format import read_shape
from lockstep.models.peft_io import load_adapter
from lockstep.models.variants import (
    with_perturbed_routers,
    without_sinks,
    without_windows,
)
from lockstep.ops.context import PackedContext
from lockstep.types import UNKNOWN_EXPERT, Int64Array

Tensor = torch.Tensor

BATCH_TOKENS = 8192
"""Tokens of one forward: more gains nothing on a CPU, and logits are formed in chunks anyway."""
LOGIT_BYTES = 64 << 20  # logits that are in memory at once
NUM_PASSES = 4
"""Forwards with noise on the routers that estimate a variance."""
ROUTER_STDS = (0.03, 0.3)  # flips are rare at one and common at the other


class Scorer:
    """Loads one set of weights at a time, and scores rows by it."""

    def __init__(self, *, device: str = "") -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: tuple[Weights, Any] | None = None

    def load(self, weights: Weights) -> Any:
        """The model. The one that was loaded before is released."""
        if self._loaded is not None and self._loaded[0] == weights:
            return self._loaded[1]
        self._loaded = None
        if weights.is_fallback:
            model: Any = load_fallback(weights.directory, device=self.device)
        else:
            model = load_checkpoint(weights.model_directory, device=self.device)
            if weights.base is not None:
                add_adapter(model, read_shape(weights.directory, model.config), seed=0)
                load_adapter(model, weights.directory)
        model.requires_grad_(False)
        self._loaded = (weights, model)
        return model

    # -- variants -----------------------------------------------------------------------------

    def variants(self, model: Any) -> Iterator[tuple[str, Any]]:
        """(name, the model with a defect) for each that changes something in this model. A variant
        is good until the next one is made; bfloat16 is last because it uses the model up."""
        if isinstance(model, Decoder):
            if model.config.has_sinks:
                yield "without_sinks", without_sinks(model)
            if any(window is not None for window in model.config.windows):
                yield "without_windows", without_windows(model)
            if model.lora is not None:
                for name, scale in (("without_adapter", 0.0), ("adapter_twice", 2.0)):
                    with adapter_scaled(model, scale):
                        yield name, model
        # Casting there and back would lose the weights: they are loaded again afterwards.
        self._loaded = None
        assert model.embedding.dtype == torch.float32, "variants start from float32"
        yield "bfloat16", model.to(torch.bfloat16)

    def router_variances(
        self, weights: Weights, rows: Rows, chosen: Int64Array, *, seed: int
    ) -> tuple[Float64Array, ...]:
        """[N] variance of each log-prob under noise on the routers, one for each of ROUTER_STDS;
        none for a dense model."""
        model = self.load(weights)
        if not model.config.is_moe:
            return ()
        plain = self.score(model, rows, chosen).logprobs[Distribution()]

        def variance(std: float) -> Float64Array:
            total = np.zeros(rows.num_tokens)
            for number in range(NUM_PASSES):
                noisy = with_perturbed_routers(model, std, seed=seed + number)
                scored = self.score(noisy, rows, chosen).logprobs[Distribution()]
                total += (scored - plain) ** 2.0
            return total / NUM_PASSES

        return tuple(map(variance, ROUTER_STDS))

    # -- scoring ------------------------------------------------------------------------------

    @torch.inference_mode()
    def score(
        self,
        model: Any,
        rows: Rows,
        chosen: Sequence[int] | Int64Array,
        *,
        distributions: Sequence[Distribution] = (Distribution(),),
        is_replaying: bool = False,
        has_spread: bool = False,
    ) -> Scored:
        """Log-probs of the trained tokens of the rows at these places, without a row's first token.

        has_spread: fills `spread` too. is_replaying: takes the sampler's recorded experts where
        they are known.
        """
        N, device = rows.num_tokens, self.device
        out = Scored(
            logprobs={d: np.full(N, np.nan, np.float32) for d in distributions},
            spread=np.full(N, np.nan),
        )
        chosen = np.asarray(chosen, np.int64)
        longest_first = chosen[np.argsort(-rows.sizes[chosen], kind="stable")].tolist()
        sized = ((int(rows.sizes[row]), row) for row in longest_first if rows.sizes[row])
        for batch in map(np.array, grouped(sized, BATCH_TOKENS)):
            sizes = rows.sizes[batch]
            first = np.cumsum(sizes) - sizes
            at = np.arange(sizes.sum()) + np.repeat(rows.offsets[batch] - first, sizes)  # [T]
            positions = rows.position[at]
            targets = np.flatnonzero(rows.loss_mask[at] & (positions > 0))  # [P] among the T
            if not len(targets):
                continue
            ids_T = torch.from_numpy(rows.token_ids[at].astype(np.int64)).to(device)
            positions_T = torch.from_numpy(positions).to(device)
            predictors_P = torch.from_numpy(targets - 1).to(device)
            targets_P = ids_T[torch.from_numpy(targets).to(device)]
            context, place = PackedContext.of(sizes.tolist(), device=device), at[targets]
            if not isinstance(model, Decoder):
                for distribution, values in out.logprobs.items():
                    if distribution.top_p < 1 or distribution.top_k:
                        continue  # transformers hands out no logits: left unknown
                    logprobs, _ = model.score(
                        ids_T,
                        positions_T,
                        context,
                        predictors_N=predictors_P,
                        targets_N=targets_P,
                        temperature=distribution.temperature,
                    )
                    values[place] = logprobs.float().cpu().numpy()
                continue
            routing = self._routing(rows, at) if is_replaying else None
            hidden_PD = model(ids_T, positions_T, context, routing).index_select(0, predictors_P)
            step = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
            for i in range(0, len(place), step):
                part = slice(i, i + step)
                logits = model.logits(hidden_PD[part]).float()
                for distribution, values in out.logprobs.items():
                    logp = _logprobs(logits, distribution)
                    values[place[part]] = logp.gather(1, targets_P[part, None])[:, 0].cpu().numpy()
                if has_spread:
                    p = logits.softmax(-1)
                    own = p.gather(1, targets_P[part, None])[:, 0].double()
                    square = p.double().square().sum(-1)
                    out.spread[place[part]] = (1 - 2 * own + square).clamp_min(0).cpu().numpy()
        return out

    def _routing(self, rows: Rows, at: Int64Array) -> Routing | None:
        if rows.routed_experts is None:
            return None
        routes = torch.from_numpy(rows.routed_experts[at].astype(np.int64)).to(self.device)
        is_known = (routes != UNKNOWN_EXPERT).all(-1).all(-1)
        return Routing(replay_TLA=routes.clamp_min(0), is_known_T=is_known)


def _logprobs(logits: Tensor, distribution: Distribution) -> Tensor:
    """[P, V] float32, -inf outside of the tokens that are kept."""
    if distribution.temperature != 1.0:
        logits = logits / distribution.temperature
    if distribution.top_k and distribution.top_k < logits.shape[-1]:
        least = logits.topk(distribution.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if distribution.top_p < 1:
        ordered, index = logits.softmax(-1).sort(descending=True)
        # The first token past the bound is kept: those before it do not reach it.
        is_out = ordered.cumsum(-1) - ordered >= distribution.top_p
        logits = logits.masked_fill(
            torch.zeros_like(is_out).scatter(-1, index, is_out), float("-inf")
        )
    return logits.log_softmax(-1)
