"""Tests whether an engine's log-probs are bit-equal to the trainer's, on the running engine.

A few prompts are answered alone, in pairs and all together, each reply is scored again beside
others, and every log-prob is compared with that of the trainer's forward over the same ids. One
unequal bit means no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.engines.base import Engine
from lockstep.models.decoder import Decoder
from lockstep.ops.context import PackedContext
from lockstep.types import Float32Array, Int32Array, Request, SamplingParams

PROMPT_LENGTHS = (3, 17, 40, 130, 64, 33)
"""Lengths above and below a page of any engine's cache, and above and below whole registers."""
NEW_TOKENS = 24
COMPANIES = (1, 2, len(PROMPT_LENGTHS))
"""Numbers of prompts that are answered at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of a comparison."""

    num_tokens: int
    num_unequal: int
    largest: float
    """Largest difference, in nats."""

    @property
    def text(self) -> str:
        """One line: how many log-probs differ, and by how much at most."""
        if not self.num_unequal:
            return f"0 of {self.num_tokens} compared log-probs differ from the trainer's"
        return (
            f"{self.num_unequal} of {self.num_tokens} compared log-probs "
            f"({self.num_unequal / self.num_tokens:.1%}) differ from the trainer's, by up to "
            f"{self.largest:.2g} nats"
        )


async def compare(
    engine: Engine, model: Decoder, *, temperature: float = 1.0, seed: int = 0
) -> Agreement:
    """Compares the engine's log-probs with those of `model`, which has the same weights.

    Raises the engine's errors: EngineError, CapabilityError if it records or scores none.
    """
    limits = engine.capabilities
    room = limits.max_tokens - NEW_TOKENS
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, limits.vocab_size, max(1, min(length, room))).astype(np.int32)
        for length in PROMPT_LENGTHS
    ]
    gaps: list[Float32Array] = []
    for company in COMPANIES:
        for at in range(0, len(prompts), company):
            group = prompts[at : at + company]
            replies = await asyncio.gather(
                *(
                    _reply(engine, ids, f"agreement-{seed}-{company}-{at + i}", temperature)
                    for i, ids in enumerate(group)
                )
            )
            rows = [
                np.concatenate(pair) for pair in zip(group, (r[0] for r in replies), strict=True)
            ]
            found = [logprobs for _, logprobs in replies]
            gaps += _gaps(model, rows, [len(ids) for ids in group], found, temperature)
            if limits.has_score and temperature == 1:
                scores = await asyncio.gather(*(engine.score(row) for row in rows))
                gaps += _gaps(model, rows, [1] * len(rows), [s.logprobs[1:] for s in scores], 1.0)
    gap = np.concatenate(gaps)
    return Agreement(
        num_tokens=len(gap),
        num_unequal=int((gap != 0).sum()),
        largest=float(gap.max(initial=0.0)),
    )


async def _reply(
    engine: Engine, ids: Int32Array, name: str, temperature: float
) -> tuple[Int32Array, Float32Array]:
    """(ids, log-probs) of one sampled reply."""
    request = Request(
        id=name,
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature),
        seed=len(ids),
    )
    deltas = [delta async for delta in engine.generate(request)]
    return (
        np.concatenate([delta.token_ids for delta in deltas]),
        np.concatenate([delta.logprobs for delta in deltas]),
    )


def _gaps(
    model: Decoder,
    rows: Sequence[Int32Array],
    first: Sequence[int],
    found: Sequence[Float32Array],
    temperature: float,
) -> list[Float32Array]:
    """|engine - trainer| for the ids from `first` on of each row, packed as a trainer packs
    them."""
    device, lengths = model.embedding.device, [len(row) for row in rows]
    ids = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    ends = np.cumsum(lengths)
    targets = np.concatenate(
        [
            np.arange(end - length + begin, end)
            for end, length, begin in zip(ends, lengths, first, strict=True)
        ]
    )
    places = torch.from_numpy(targets).to(device)
    with torch.no_grad():
        values, _ = model.score(
            ids, positions, PackedContext.of(lengths, device=device),
            predictors_N=places - 1, targets_N=ids[places], temperature=temperature,
        )  # fmt: skip
    wanted = np.split(values.cpu().numpy(), np.cumsum([len(f) for f in found])[:-1])
    return [np.abs(mine - theirs) for mine, theirs in zip(wanted, found, strict=True)]
