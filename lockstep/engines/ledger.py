"""Requests as every engine takes them: ids of the vocabulary, and each request answered once, to
any number of readers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from lockstep.errors import EngineError
from lockstep.types import Delta, Int32Array, Request

NUM_REMEMBERED = 4096
"""Replies kept after their end, so that a repeated id is answered and not sampled again."""


def wake(waiters: list[asyncio.Future[None]]) -> None:
    """All who wait go on; nobody is left in the list."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class Reply:
    """What one request was answered so far. An engine adds what it needs to go on with it."""

    request: Request
    deltas: list[Delta] = field(default_factory=list)
    error: Exception | None = None
    is_done: bool = False
    num_readers: int = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def notify(self) -> None:
        """To be called after a delta, an error or the end has been put here."""
        wake(self.waiters)


R = TypeVar("R", bound=Reply)


class Replies(OrderedDict[str, R]):
    """By request id: those that are under way, and the last ones that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = 2 * NUM_REMEMBERED

    def known(self, request: Request) -> R | None:
        """The reply to this id, if there is one. Raises EngineError if another thing was asked."""
        reply = self.get(request.id)
        if reply is not None and _asked(reply.request) != _asked(request):
            raise EngineError(
                f"request {request.id}: the id was used for another prompt, seed, routes_from, "
                "adapter or sampling parameters. An id names one generation; make ids unique."
            )
        return reply

    def add(self, reply: R) -> None:
        """Remembers it, and in the long run forgets the oldest that have ended."""
        self[reply.request.id] = reply
        if len(self) > self._limit:
            ended = [name for name, known in self.items() if known.is_done]
            for name in ended[:-NUM_REMEMBERED]:
                del self[name]
            self._limit = max(2 * NUM_REMEMBERED, 2 * len(self))  # not at every request


def _asked(request: Request) -> tuple[object, ...]:
    prompt = np.asarray(request.prompt_ids, np.int64).tobytes()
    return prompt, request.seed, request.sampling, request.routes_from, request.adapter


def checked_ids(ids: np.ndarray, *, vocab_size: int, where: str) -> Int32Array:
    """[T] int32. Raises EngineError that names the first id outside of the vocabulary."""
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise EngineError(
            f"{where}: token {at} has the id {int(ids[at])}; the vocabulary has the ids "
            f"0..{vocab_size - 1}. The tokenizer of another model?"
        )
    return ids.astype(np.int32)


async def answer(
    submit: Callable[[], R], abandon: Callable[[R], Awaitable[None] | None]
) -> AsyncIterator[Delta]:
    """The deltas of one reply: those that have come, then each as it comes.

    submit: makes the reply, or finds it; called with the first delta that is asked for. abandon:
    called when its last reader leaves before its end. Raises what stands in `Reply.error`.
    """
    reply = submit()
    reply.num_readers += 1
    try:
        at = 0
        while True:
            while at < len(reply.deltas):
                at += 1
                yield reply.deltas[at - 1]
            if reply.error is not None:
                raise reply.error
            if reply.is_done:
                return
            waiter = asyncio.get_running_loop().create_future()
            reply.waiters.append(waiter)
            await waiter
    finally:
        reply.num_readers -= 1
        if not reply.is_done and reply.num_readers == 0:
            ending = abandon(reply)
            if ending is not None:
                await ending
