"""Questions to a server at its start, whose answers show what it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engines.base import EngineContext
from lockstep.errors import CapabilityError
from lockstep.types import Distribution, Float32Array

NUM_TOKENS = 12
"""Tokens that a question samples: enough for the model to be in doubt about one of them."""

LEAST_DOUBT = 1e-3
"""Nats below 0 at which a log-prob shows under which distribution it was computed."""

LARGEST_NOISE = 0.02
"""Mean difference, in nats, of two computations of the same log-probs: bfloat16 in another order
gives some thousandths (docs/correction.md)."""

LARGEST_GAP = 0.5
"""Mean difference, in nats, of a server's log-probs of its own choices from the trainer's: bfloat16
against float32 stays below 0.1; another model differs by several."""


def prompt_of(vocab_size: int) -> list[int]:
    """Ids that any model of this vocabulary accepts, the last one among them."""
    return np.linspace(0, vocab_size - 1, 8).astype(int).tolist()


def recorded_distribution(
    greedy_ids: Sequence[int],
    plain: tuple[Sequence[int], Sequence[float]],
    cool: tuple[Sequence[int], Sequence[float]],
) -> Distribution | None:
    """The distribution under which a server records log-probs; None if it ignores top_k.

    plain, cool: (ids, log-probs) of two replies with top_k=1, at temperature 1 and 0.5. Both must
    choose the greedy ids. Log-probs after top_k are 0; log-probs after temperature differ between
    the two replies; the model's do not.
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
    """Raises CapabilityError if the ids that a server chose are unlikely under the trainer's model.

    Checks whole decoders in this process only; for sharded ones and transformers' models the first
    step's mismatch shows it. logprobs: the server's, of `sampled_ids` after `prompt_ids`.
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
    """Whether these are two computations of the same log-probs."""
    return bool(np.abs(np.array(found) - np.array(wanted)).mean() <= LARGEST_NOISE)


def check_same_config(
    name: str, url: str, context: EngineContext, found: Mapping[str, Any], keys: Sequence[str]
) -> None:
    """Raises CapabilityError if a server's model differs from the trainer's config.json in one of
    these keys: for a server whose weights are replaced, so that those it has tell nothing."""
    file = context.directory / "config.json"
    own = json.loads(file.read_text()) if file.is_file() else {}
    differing = [
        f"{key} {found[key]!r} (the trainer's: {own[key]!r})"
        for key in keys
        if own.get(key) is not None and found.get(key) is not None and own[key] != found[key]
    ]
    if differing:
        raise CapabilityError(
            f"engine {name} at {url} serves another model than {context.directory}: "
            f"{', '.join(differing)}. Start it with that directory, or name its model with model=."
        )
