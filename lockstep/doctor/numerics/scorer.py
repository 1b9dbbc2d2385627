"""Scores rows by weights on disk, and by variants of the arithmetic. The doctor's one torch module.

# T packed tokens  N tokens of all rows  P predictors  V vocabulary  L routed layers  A experts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.doctor.checks.rows import BoolArray, Float32Array, Float64Array, Rows
from lockstep.doctor.numerics.weights import Weights
from lockstep.models.decoder import Decoder
from lockstep.models.fallback import load_fallback
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.lora import adapter_off, add_adapter
from lockstep.models.moe import MoE, Routing
from lockstep.models.peft_format import read_shape
from lockstep.models.peft_io import load_adapter
from lockstep.models.variants import (
    adapter_scaled,
    with_dropout,
    with_perturbed_routers,
    without_sinks,
    without_windows,
)
from lockstep.ops.context import PackedContext
from lockstep.types import UNKNOWN_EXPERT, Int64Array

Tensor = torch.Tensor

BATCH_TOKENS = 8192
"""Of one forward: more gains nothing on a CPU, and logits are formed in chunks anyway."""
LOGIT_BYTES = 64 << 20  # of logits that live at once


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What is made of the logits before a log-prob is taken."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""

    def describe(self) -> str:
        parts = [f"temperature={self.temperature:g}"]
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"top_k={self.top_k}"] if self.top_k else []
        return " ".join(parts)


@dataclass(kw_only=True)
class Scored:
    """[N] of some rows under one model; NaN where a token was not asked for."""

    logprobs: dict[Distribution, Float32Array]
    spread: Float64Array
    """Variance of the log-prob under unit noise on every logit: (1 - p)^2 plus all other p^2."""
    margin: Float64Array
    """Least difference, over the routed layers, between the last expert that was chosen and the
    first that was not, at the token which predicts this one; inf in a dense model."""
    routes_differ: BoolArray
    """Of a replay: the router would have chosen other experts at the predicting token."""


class Scorer:
    """Loads a set of weights at a time, and scores rows by it."""

    def __init__(self, *, device: str = "") -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: tuple[Weights, Any] | None = None

    def load(self, weights: Weights) -> Any:
        """The model; what was loaded before is let go."""
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

    @contextmanager
    def variant(self, name: str, model: Any) -> Iterator[Any]:
        """The model that a side would have run with this defect."""
        if name == "without_sinks":
            yield without_sinks(model)
        elif name == "without_windows":
            yield without_windows(model)
        elif name == "without_adapter":
            with adapter_off(model):
                yield model
        elif name == "adapter_twice":
            with adapter_scaled(model, 2.0):
                yield model
        elif name in ("bfloat16", "float16"):
            dtype, before = getattr(torch, name), model.embedding.dtype
            # Casting there and back would lose the weights: a copy is loaded when it is let go.
            self._loaded = None
            assert before == torch.float32, f"variants start from float32, found {before}"
            yield model.to(dtype)
        else:
            assert name == "", f"no such variant: {name}"
            yield model

    def variants_of(self, model: Any) -> tuple[str, ...]:
        """Those that change something in this model; the narrow types last, for they use it up."""
        out: list[str] = []
        if isinstance(model, Decoder):
            config = model.config
            out += ["without_sinks"] * config.has_sinks
            out += ["without_windows"] * any(w is not None for w in config.windows)
            out += ["without_adapter", "adapter_twice"] * (model.lora is not None)
        return (*out, "bfloat16")

    def dropout(self, model: Any, share: float, *, seed: int) -> Any:
        return with_dropout(model, share, seed=seed)

    def perturbed_routers(self, model: Any, std: float, *, seed: int) -> Any:
        return with_perturbed_routers(model, std, seed=seed)

    # -- scoring ------------------------------------------------------------------------------

    def score(
        self,
        model: Any,
        rows: Rows,
        chosen: Sequence[int] | Int64Array,
        *,
        distributions: Sequence[Distribution] = (Distribution(),),
        is_replaying: bool = False,
        has_details: bool = False,
    ) -> Scored:
        """Log-probs of the tokens that are asked for in the rows at these places.

        Asked for are trained tokens, but a row's first. has_details: fills spread and margin too.
        is_replaying: the sampler's recorded experts are taken where they are known.
        """
        N = rows.num_tokens
        out = Scored(
            logprobs={d: np.full(N, np.nan, np.float32) for d in distributions},
            spread=np.full(N, np.nan),
            margin=np.full(N, np.inf),
            routes_differ=np.zeros(N, np.bool_),
        )
        with torch.inference_mode():
            for batch in _batches(rows, chosen):
                self._score_batch(model, rows, batch, out, is_replaying, has_details)
        return out

    def _score_batch(
        self,
        model: Any,
        rows: Rows,
        batch: Int64Array,
        out: Scored,
        is_replaying: bool,
        has_details: bool,
    ) -> None:
        sizes = rows.sizes[batch]
        begin = rows.offsets[batch]
        first = np.cumsum(sizes) - sizes
        at = np.arange(sizes.sum()) + np.repeat(begin - first, sizes)  # [T] places in the rows
        positions = rows.position[at]
        targets = np.flatnonzero(rows.loss_mask[at] & (positions > 0))  # [P] among the T
        if not len(targets):
            return
        device = self.device
        ids_T = torch.from_numpy(rows.token_ids[at].astype(np.int64)).to(device)
        positions_T = torch.from_numpy(positions).to(device)
        predictors_P = torch.from_numpy(targets - 1).to(device)
        targets_P = ids_T[torch.from_numpy(targets).to(device)]
        context = PackedContext.of(sizes.tolist(), device=device)
        place = at[targets]
        if not isinstance(model, Decoder):
            for distribution, values in out.logprobs.items():
                if distribution.top_p < 1 or distribution.top_k:
                    continue  # its logits are not handed out: this is left unknown
                logprobs, _ = model.score(
                    ids_T,
                    positions_T,
                    context,
                    predictors_N=predictors_P,
                    targets_N=targets_P,
                    temperature=distribution.temperature,
                )
                values[place] = logprobs.float().cpu().numpy()
            return
        routing = self._routing(model, rows, at, is_replaying)
        with _margins(model) if has_details else nullcontext([]) as margins:
            hidden_TD = model(ids_T, positions_T, context, routing)
        hidden_PD = hidden_TD.index_select(0, predictors_P)
        step = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
        for i in range(0, len(place), step):
            part = slice(i, i + step)
            logits = model.logits(hidden_PD[part]).float()
            for distribution, values in out.logprobs.items():
                logp = _logprobs(logits, distribution)
                values[place[part]] = logp.gather(1, targets_P[part, None])[:, 0].cpu().numpy()
            if has_details:
                p = logits.softmax(-1)
                own = p.gather(1, targets_P[part, None])[:, 0].double()
                square = p.double().square().sum(-1)
                out.spread[place[part]] = (1 - 2 * own + square).clamp_min(0).cpu().numpy()
        if margins:
            least = torch.stack(margins).amin(0)
            out.margin[place] = least.index_select(0, predictors_P).double().cpu().numpy()
        if routing is not None and routing.differing:
            is_other = torch.stack(list(routing.differing.values())).any(0)
            if routing.is_known_T is not None:
                is_other &= routing.is_known_T
            out.routes_differ[place] = is_other.index_select(0, predictors_P).cpu().numpy()

    def _routing(
        self, model: Decoder, rows: Rows, at: Int64Array, is_replaying: bool
    ) -> Routing | None:
        if not is_replaying or rows.routed_experts is None:
            return None
        routes = torch.from_numpy(rows.routed_experts[at].astype(np.int64)).to(self.device)
        is_known = (routes != UNKNOWN_EXPERT).all(-1).all(-1)
        return Routing(replay_TLA=routes.clamp_min(0), is_known_T=is_known)


@contextmanager
def _margins(model: Decoder) -> Iterator[list[Tensor]]:
    """In the block, each routed layer's forward leaves [T]: how clear its choice was."""
    kept: list[Tensor] = []
    hooks = []
    for block in model.layers:
        if isinstance(block.mlp, MoE):

            def keep(mlp: Any, inputs: tuple[Any, ...], _: Any) -> None:
                logits = mlp.router_logits(*inputs[:2]).float()
                if logits.shape[-1] > mlp.num_active:
                    top = logits.topk(mlp.num_active + 1).values
                    kept.append(top[:, -2] - top[:, -1])

            hooks.append(block.mlp.register_forward_hook(keep))
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def _logprobs(logits: Tensor, distribution: Distribution) -> Tensor:
    """[P, V] float32, -inf outside of what is kept."""
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


def _batches(rows: Rows, chosen: Sequence[int] | Int64Array) -> Iterator[Int64Array]:
    """Rows of similar length together, at most BATCH_TOKENS of them or one row."""
    chosen = np.asarray(chosen, np.int64)
    order = chosen[np.argsort(-rows.sizes[chosen], kind="stable")]
    batch: list[int] = []
    size = 0
    for row in order.tolist():
        if batch and size + rows.sizes[row] > BATCH_TOKENS:
            yield np.array(batch, np.int64)
            batch, size = [], 0
        if rows.sizes[row]:
            batch.append(row)
            size += int(rows.sizes[row])
    if batch:
        yield np.array(batch, np.int64)
