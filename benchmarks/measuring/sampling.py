"""Ops by name, and requests to an embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import numpy as np

from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps, ask_for_reproducible_gemm
from lockstep.types import Delta, Request, SamplingParams


def ops_of(name: str) -> Ops:
    """Makes the contract's ops for "invariant", and stock ops for any other name."""
    if name != "invariant":
        return Ops()
    ask_for_reproducible_gemm()
    return InvariantOps()


def requests_of(
    prompts: Sequence[Sequence[int] | np.ndarray],
    limits: int | Sequence[int],
    *,
    temperature: float = 1.0,
    adapter: str = "",
) -> list[Request]:
    """A request for each prompt. limits: tokens of all replies, or of each."""
    if isinstance(limits, int):
        limits = [limits] * len(prompts)
    return [
        Request(
            id=uuid4().hex,  # an engine refuses an id that was used for something else
            prompt_ids=np.asarray(prompt, np.int32),
            sampling=SamplingParams(max_tokens=int(limit), temperature=temperature),
            seed=number,
            adapter=adapter,
        )
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


async def reply_to(engine: EmbeddedEngine, request: Request) -> Delta:
    (reply,) = [delta async for delta in engine.generate(request)]
    return reply


def sample(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Delta]:
    """All replies, sampled at the same time."""
    replies: list[Delta] = []

    async def all_of_them() -> None:
        replies.extend(await asyncio.gather(*(reply_to(engine, r) for r in requests)))

    # Python 3.11 formats the result of the main coroutine while it restores the signal handler
    # (signal.signal tries it as an enum): nothing large may be returned through asyncio.run.
    asyncio.run(all_of_them())
    return replies
