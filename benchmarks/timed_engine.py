"""A scripted engine whose steps take stated time, and a clock that waits for nobody.

What overlaps with what, and what it costs, is then arithmetic: the same on every machine.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lockstep.engines.base import Scores
from lockstep.testing.engines import FakeEngine, Reply
from lockstep.types import Delta, Distribution, Int32Array, Request

T = TypeVar("T")


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """(what `main` returns, the seconds that it took) on a clock that jumps to whatever is due
    next, from 0. For what waits by asyncio alone: no thread, process or socket.

    >>> run_in_virtual_time(asyncio.sleep(3600, "done"))
    ('done', 3600.0)
    """
    loop = _VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main)
        return result, loop.time()


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    """Waits no time: the clock is set to when the wait would have ended."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError(
                "in virtual time nothing is left to happen, and somebody waits: for a thread or a "
                "socket, or for ever?"
            )
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


@dataclass(slots=True, eq=False)
class _Ask:
    """Tokens to be computed in one step."""

    num_tokens: int
    is_score: bool
    done: asyncio.Future[None]


class TimedEngine(FakeEngine):
    """`FakeEngine`, one step after the other, each of `step_seconds + token_seconds * tokens`.

    A step computes the next token of every reply under way, and what is new of the prompts that
    arrived: all keys and values are kept. What has a low priority waits: a step scores only if
    there is nothing to sample, and then `max_score_tokens` at most, since whoever comes to be
    sampled has to wait for its end.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        step_seconds: float,
        token_seconds: float,
        max_score_tokens: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(reply, **options)
        self._fixed, self._per_token = step_seconds, token_seconds
        self._max_score_tokens = max_score_tokens
        self._asks: list[_Ask] = []
        self._driver: asyncio.Task[None] | None = None
        self._num_known: dict[str, int] = {}
        """Affinity -> ids whose keys and values are there."""
        self.sample_seconds = 0.0
        """In steps that sampled."""
        self.score_seconds = 0.0
        """In steps that scored."""

    async def _sample(self, request: Request) -> AsyncIterator[Delta]:
        num_new = len(request.prompt_ids) - self._num_known.get(request.affinity, 0)
        num_sampled = min(len(self._reply(request)), request.sampling.max_tokens)
        for at in range(num_sampled):
            await self._step(num_new if at == 0 else 1, is_score=False)
        self._num_known[request.affinity] = len(request.prompt_ids) + num_sampled - 1
        async for delta in super()._sample(request):
            yield delta

    async def score(
        self,
        token_ids: Int32Array,
        *,
        distribution: Distribution = "model",
        temperature: float = 1.0,
        priority: int = 0,
        first: int = 1,
        affinity: str = "",
    ) -> Scores:
        num_cached = min(first - 1, self._num_known.get(affinity, 0))
        await self._step(len(token_ids) - 1 - num_cached, is_score=True)
        found = await super().score(token_ids, first=first)
        return replace(found, num_cached_tokens=num_cached)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        await super().load_weights(source, version=version)
        self._num_known.clear()

    async def _step(self, num_tokens: int, *, is_score: bool) -> None:
        """Returns when the step that computes these tokens has ended."""
        loop = asyncio.get_running_loop()
        ask = _Ask(num_tokens, is_score, loop.create_future())
        self._asks.append(ask)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._run())
        await ask.done

    async def _run(self) -> None:
        while True:
            for _ in range(8):  # whoever was answered has asked for more by then
                await asyncio.sleep(0)
            if not self._asks:
                return
            batch = self._next_batch()
            seconds = self._fixed + self._per_token * sum(ask.num_tokens for ask in batch)
            await asyncio.sleep(seconds)
            if batch[0].is_score:
                self.score_seconds += seconds
            else:
                self.sample_seconds += seconds
            for ask in batch:
                if not ask.done.done():
                    ask.done.set_result(None)

    def _next_batch(self) -> list[_Ask]:
        batch = [ask for ask in self._asks if not ask.is_score]
        if not batch:
            room = self._max_score_tokens
            for ask in self._asks:
                if batch and ask.num_tokens > room:
                    break
                batch.append(ask)
                room -= ask.num_tokens
        self._asks = [ask for ask in self._asks if ask not in batch]
        return batch
