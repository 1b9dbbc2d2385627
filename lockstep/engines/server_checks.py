"""What a server does is asked of the server: its words are read by the numbers that come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engines.base import EngineContext
from lockstep.errors import CapabilityError
from lockstep.types import Distribution, Float32Array

NUM_TOKENS = 12
"""Sampled by a probe. Enough for one of them to be in doubt."""

LEAST_DOUBT = 1e-3
"""nats below 0, from which a log-prob says under which distribution it was computed."""

LARGEST_NOISE = 0.02
"""nats by which two computations of one log-prob may differ in the mean: bfloat16 in another order
gives some thousandths (docs/mismatch.md)."""

LARGEST_GAP = 0.5
"""nats by which a server's log-probs of its own choices may differ from the trainer's in the mean.
bfloat16 against float32 stays below 0.1; another model differs by several."""


def prompt_of(vocab_size: int) -> list[int]:
    """Ids that any model of this vocabulary takes, the last of it among them."""
    return np.linspace(0, vocab_size - 1, 8).astype(int).tolist()


def recorded_distribution(
    greedy_ids: Sequence[int],
    plain: tuple[Sequence[int], Sequence[float]],
    cool: tuple[Sequence[int], Sequence[float]],
) -> Distribution | None:
    """Whose log-probs a server records, from two replies with top_k=1: they have to choose what the
    greedy one does, so only the distribution differs. None if top_k is not honoured.

    plain, cool: (ids, log-probs) at temperature 1 and 0.5. Where top_k=1 is all that is left, the
    log-prob after it is 0; before it, that at 0.5 is another than that at 1.
    """
    if list(plain[0]) != list(greedy_ids) or list(cool[0]) != list(greedy_ids):
        return None
    at_1, at_half = np.array(plain[1]), np.array(cool[1])
    if max(np.abs(at_1).max(), np.abs(at_half).max()) < LEAST_DOUBT:
        return "sampled"
    doubted = np.abs(at_1) > LEAST_DOUBT
    gaps = np.abs(at_1 - at_half)[doubted]
    return "model" if gaps.mean() < 0.1 * np.abs(at_1[doubted]).mean() else "tempered"


def check_same_model(
    name: str,
    url: str,
    context: EngineContext,
    prompt_ids: Sequence[int],
    sampled_ids: Sequence[int],
    logprobs: Sequence[float],
) -> None:
    """Raises CapabilityError if the trainer's model does not find likely what the server's chose.

    Of a whole decoder in this process; a sharded one and transformers' are left to the first step's
    mismatch. logprobs: the model's, of `sampled_ids` after `prompt_ids`.
    """
    own = _own_logprobs(context.model, [*prompt_ids, *sampled_ids])
    if own is None:
        return
    gap = float(np.abs(own[len(prompt_ids) :] - np.array(logprobs)).mean())
    if not gap <= LARGEST_GAP:
        raise CapabilityError(
            f"engine {name} at {url} runs another model than the trainer, or other weights: of the "
            f"{len(sampled_ids)} tokens that it chose, the trainer's log-probs differ by {gap:.2f} "
            f"nats in the mean (at most {LARGEST_GAP:g} is rounding). Start it with the same "
            "weights: `lockstep export RUN --hf DIR` writes those of a run, "
            f"{context.directory} are those that it began from."
        )


def _own_logprobs(model: Any, ids: Sequence[int]) -> Float32Array | None:
    import torch

    from lockstep.models.decoder import Decoder
    from lockstep.models.sharding import mesh_of
    from lockstep.ops.context import PackedContext

    if not isinstance(model, Decoder) or mesh_of(model.embedding) is not None:
        return None
    device = model.embedding.device
    row = torch.tensor(list(ids), dtype=torch.int64, device=device)
    with torch.inference_mode():
        positions = torch.arange(len(row), device=device)
        hidden = model(row, positions, PackedContext.of([len(row)], device=device))
        values, _ = model.log_probs(hidden[:-1], row[1:])
    return np.concatenate([[np.nan], values.float().cpu().numpy()]).astype(np.float32)


def agree(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether these are the same log-probs, computed twice."""
    return bool(np.abs(np.array(found) - np.array(wanted)).mean() <= LARGEST_NOISE)


def check_same_kind(name: str, url: str, context: EngineContext, found: Mapping[str, Any]) -> None:
    """Raises CapabilityError if a server says of its model what the config.json of the trainer's
    does not: for one whose weights are replaced, so that those it has tell nothing."""
    file = context.directory / "config.json"
    own = json.loads(file.read_text()) if file.is_file() else {}
    for key in ("model_type", "architectures"):
        if own.get(key) and found.get(key) and own[key] != found[key]:
            raise CapabilityError(
                f"engine {name} at {url} serves another model than {context.directory}: {key} "
                f"{found[key]!r}, and the trainer's is {own[key]!r}. Start it with that directory."
            )
