"""Scores rows by weights on disk, and by variants of the arithmetic. Imported when a row is scored,
because it imports torch.

# T packed tokens  N tokens of all rows  P predictors  V vocabulary  L routed layers  A experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from lockstep.doctor.inputs.assemble import grouped
from lockstep.doctor.rows import Float64Array, Rows
from lockstep.doctor.scoring.distribution import Distribution
from lockstep.doctor.scoring.weights import Weights
from lockstep.models.changes import changes
from lockstep.models.decoder import Decoder
from lockstep.models.fallback import load_fallback
from lockstep.models.hf_io import copy_decoder, load_checkpoint
from lockstep.models.lora import adapter_scaled, add_adapter
from lockstep.models.peft_format import read_shape
from lockstep.models.peft_io import load_adapter
from lockstep.models.variants import with_perturbed_routers
from lockstep.ops.context import PackedContext
from lockstep.types import Int64Array

Tensor = torch.Tensor

BATCH_TOKENS = 8192
"""Tokens of one forward: more gains nothing on a CPU, and logits are formed in chunks anyway."""
LOGIT_BYTES = 64 << 20  # logits that are in memory at once
ALL_LOGIT_BYTES = 512 << 20
"""The same where a model gives the logits of all tokens at once."""
NUM_PASSES = 4
"""Forwards with noise on the routers that estimate a variance."""
ADAPTER_SCALES = (0.0, 0.5, 2.0, 4.0, 8.0, 16.0)
"""Strengths of an adapter: not merged, halved, twice, and times a number of ranks."""
ROUTER_STDS = (0.03, 0.3)  # flips are rare at one and common at the other


class Scorer:
    """Loads one set of weights at a time, and scores rows by it."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._loaded: tuple[Weights, Any] | None = None

    def load(self, weights: Weights) -> Any:
        """The model. The model before it is released."""
        if self._loaded is not None and self._loaded[0] == weights:
            return self._loaded[1]
        self._loaded = None
        if weights.is_fallback:
            model: Any = load_fallback(weights.directory, device=self.device)
        else:
            model = load_checkpoint(
                weights.model_directory, device=self.device, vocab_size=weights.vocab_size
            )
            if weights.base is not None:
                add_adapter(model, read_shape(weights.directory, model.config), seed=0)
                load_adapter(model, weights.directory)
        model.requires_grad_(False)
        self._loaded = (weights, model)
        return model

    # -- variants -----------------------------------------------------------------------------

    def adapters(self, model: Any) -> Iterator[tuple[str, Any]]:
        """(text, the model with its adapter at another strength), each until the next is made."""
        if isinstance(model, Decoder) and model.lora is not None:
            for scale in ADAPTER_SCALES:
                with adapter_scaled(model, scale):
                    times = f"with its adapter {scale:g} times"
                    yield times if scale else "without its adapter", model

    changes = staticmethod(changes)
    """Changes that may be wrong with the arithmetic of a model."""

    def copied_in_bfloat16(self, model: Any) -> Any:
        """A copy, beside the model."""
        if isinstance(model, Decoder):
            return copy_decoder(model, dtype=torch.bfloat16)
        return deepcopy(model).to(torch.bfloat16)

    def router_variances(self, model: Any, rows: Rows, chosen: Int64Array) -> list[Float64Array]:
        """[N] variance of each log-prob under noise on the routers, one for each of ROUTER_STDS;
        none for a dense model."""
        if not getattr(model.config, "is_moe", False) or not isinstance(model, Decoder):
            return []
        [plain] = self.score(model, rows, chosen).values()

        def variance(std: float) -> Float64Array:
            total = np.zeros(rows.num_tokens)
            for number in range(NUM_PASSES):
                noisy = with_perturbed_routers(model, std, seed=number)
                [scored] = self.score(noisy, rows, chosen).values()
                total += (scored - plain) ** 2
            return total / NUM_PASSES

        return [variance(std) for std in ROUTER_STDS]

    # -- scoring ------------------------------------------------------------------------------

    @torch.inference_mode()
    def score(
        self,
        model: Any,
        rows: Rows,
        chosen: Sequence[int] | Int64Array,
        *,
        distributions: Sequence[Distribution] = (Distribution(),),
        has_spread: bool = False,
        positions: Int64Array | None = None,
        head: torch.dtype | None = None,
    ) -> dict[Any, Float64Array]:
        """Distribution -> [N] log-probs of the trained tokens of the chosen rows. NaN elsewhere,
        and at the first token of a row.

        has_spread: also gives "spread", the variance of each log-prob under unit noise on every
        logit: (1 - p)^2 plus all other p^2. positions: [N] for the model; by default each row
        begins at 0. head: dtype of the output projection and its inputs; default: the model's.
        """
        N, device = rows.num_tokens, self.device
        names = [*distributions, *(["spread"] if has_spread else [])]
        out: dict[Any, Float64Array] = {name: np.full(N, np.nan) for name in names}
        told = rows.position if positions is None else positions
        chosen = np.asarray(chosen, np.int64)
        longest_first = chosen[np.argsort(-rows.sizes[chosen], kind="stable")].tolist()
        sized = ((int(rows.sizes[row]), row) for row in longest_first if rows.sizes[row])
        for batch in map(np.array, grouped(sized, _batch_tokens(model))):
            sizes = rows.sizes[batch]
            first = np.cumsum(sizes) - sizes
            at = np.arange(sizes.sum()) + np.repeat(rows.offsets[batch] - first, sizes)  # [T]
            targets = np.flatnonzero(rows.loss_mask[at] & (rows.position[at] > 0))  # [P] of the T
            if not len(targets):
                continue
            ids_T = torch.from_numpy(rows.token_ids[at].astype(np.int64)).to(device)
            positions_T = torch.from_numpy(told[at]).to(device)
            predictors_P = torch.from_numpy(targets - 1).to(device)
            targets_P = ids_T[torch.from_numpy(targets).to(device)]
            context, place = PackedContext.of(sizes.tolist(), device=device), at[targets]
            logits_of = _logits(model, ids_T, positions_T, context, predictors_P, head)
            step = max(1, LOGIT_BYTES // (4 * len(model.embedding)))
            for i in range(0, len(place), step):
                part = slice(i, i + step)
                logits = logits_of(part).float()
                for kind in distributions:
                    logp = _logprobs(_penalised(logits, kind, rows, place[part]), kind)
                    chosen_P = logp.gather(1, targets_P[part, None])[:, 0]
                    out[kind][place[part]] = chosen_P.cpu().numpy()
                if has_spread:
                    p = logits.softmax(-1)
                    own = p.gather(1, targets_P[part, None])[:, 0].double()
                    square = p.double().square().sum(-1)
                    out["spread"][place[part]] = (1 - 2 * own + square).clamp_min(0).cpu().numpy()
        return out


def has_plain_head(model: Any) -> bool:
    """True if the logits are hidden states times a matrix."""
    return isinstance(model, Decoder) or model.has_plain_head


def _batch_tokens(model: Any) -> int:
    """Tokens of one forward: fewer if it gives the logits of all of them at once."""
    if has_plain_head(model):
        return BATCH_TOKENS
    return max(min(BATCH_TOKENS, ALL_LOGIT_BYTES // (4 * len(model.embedding))), 1)


def _logits(
    model: Any,
    ids_T: Tensor,
    positions_T: Tensor,
    context: PackedContext,
    predictors_P: Tensor,
    head: torch.dtype | None,
) -> Callable[[slice], Tensor]:
    """Gives the logits [n, V] at a slice of the predictors."""
    if not has_plain_head(model):
        return model.logits(ids_T, positions_T, context, predictors_P)
    hidden_PD = model(ids_T, positions_T, context).index_select(0, predictors_P)
    if head is not None:
        weight_VD = model.head[: model.config.vocab_size].to(head)
        hidden_PD = hidden_PD.to(head)
        return lambda part: model.ops.linear(hidden_PD[part], weight_VD)
    if isinstance(model, Decoder):
        return lambda part: model.logits(hidden_PD[part])
    return lambda part: model.ops.linear(hidden_PD[part], model.head)


def _penalised(logits: Tensor, distribution: Distribution, rows: Rows, place: Int64Array) -> Tensor:
    """Logits [P, V] after the repetition penalty on the ids before each place of its row."""
    penalty = distribution.repetition_penalty
    if penalty == 1:
        return logits
    count = rows.position[place]
    ends = np.cumsum(count)
    before = np.arange(count.sum()) + np.repeat(place - ends, count)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[np.repeat(np.arange(len(place)), count), rows.token_ids[before].astype(np.int64)] = True
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _logprobs(logits: Tensor, distribution: Distribution) -> Tensor:
    """[P, V] float32, -inf outside of the tokens that are kept."""
    if distribution.temperature != 1.0:
        logits = logits / distribution.temperature
    if distribution.min_p:
        p = logits.softmax(-1)
        is_out = p < distribution.min_p * p.amax(-1, keepdim=True)
        logits = logits.masked_fill(is_out, float("-inf"))
    if distribution.top_k and distribution.top_k < logits.shape[-1]:
        least = logits.topk(distribution.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if distribution.top_p < 1:
        ordered, index = logits.softmax(-1).sort(descending=True)
        # The first token past the bound is kept: those before it do not reach it.
        is_out = ordered.cumsum(-1) - ordered >= distribution.top_p
        is_out = torch.zeros_like(is_out).scatter(-1, index, is_out)
        logits = logits.masked_fill(is_out, float("-inf"))
    return logits.log_softmax(-1)
