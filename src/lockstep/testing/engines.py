"""Engines for tests: `FakeEngine` gives replies that you write, another passes every call on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.engines.ledger import checked_prompt
from lockstep.errors import EngineError
from lockstep.types import Delta, Int32Array, Ragged, Request

Reply = Callable[[Request], Sequence[int]]
"""Returns the ids that a model would sample after `request.prompt_ids`, its stop id included."""


def fake_logprob(token_id: int, position: int) -> float:
    """FakeEngine's log-prob of the token at `position` of its path: below 0, and different for each
    id and position, so that a shifted or mixed-up row shows."""
    return -(1 + (31 * token_id + 7 * position) % 97) / 50.0


class FakeEngine(Engine):
    """An engine without a model. Keeps its requests for tests to look at.

    reply: gives the ids to sample, cut after the first stop id or `max_tokens`. tokens_per_step: 0
    gives a reply in one step; otherwise each step of `step_seconds` adds this many tokens to every
    running request, and between steps `load_weights`, `abort` and `pause` take effect.

    >>> async def demo():
    ...     engine = FakeEngine(lambda request: [7, 2])
    ...     sampling = SamplingParams(max_tokens=8, stop_ids=(2,))
    ...     request = Request(id="a", prompt_ids=np.array([1], np.int32), sampling=sampling)
    ...     return [d.token_ids.tolist() async for d in engine.generate(request)]
    >>> from lockstep.types import SamplingParams
    >>> asyncio.run(demo())
    [[7, 2]]
    """

    def __init__(
        self,
        reply: Reply,
        *,
        vocab_size: int = 1 << 20,
        max_tokens: int = 1 << 20,
        tokens_per_step: int = 0,
        step_seconds: float = 0.0,
        logprob: Callable[[int, int], float] = fake_logprob,
        support: Callable[[int, int], Sequence[int]] | None = None,
        routes: Callable[[int, int], Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """logprob: (id, position on the path) -> the log-prob to report; break it to test checks.

        support: (id, position) -> the ids that were kept, for requests that ask; None claims no
        support. routes: (id, position) -> the experts of the id, [layers][active].
        """
        self._reply, self._logprob, self._support, self._routes = reply, logprob, support, routes
        self._tokens_per_step, self._step_seconds = tokens_per_step, step_seconds
        self.capabilities = Capabilities(
            name="fake",
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            distributions=("model", "tempered", "sampled"),
            has_seeds=True,
            has_score=True,
            has_support=support is not None,
            has_sleep=True,
            has_routed_experts=routes is not None,
        )
        self.version = 0
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._aborted: set[str] = set()
        self._finished: dict[str, list[Delta]] = {}
        self._running: dict[str, asyncio.Event] = {}
        self._is_asleep = False
        self.requests: list[Request] = []
        """Every request that was sampled for, in order of arrival."""
        self.max_running = 0
        """Largest number of requests that ran at the same time."""
        self.num_steps = 0
        """Sampling steps so far, over all requests: a test waits for one instead of a time."""

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        if request.id in self._running:
            await self._running[request.id].wait()
        if request.id in self._finished:
            for delta in self._finished[request.id]:
                yield delta
            return
        if self._is_asleep:
            raise EngineError(f"request {request.id}: the engine sleeps; wake it first.")
        checked_prompt(request, self.capabilities)
        self.requests.append(request)
        ended = self._running[request.id] = asyncio.Event()
        self.max_running = max(self.max_running, len(self._running))
        deltas: list[Delta] = []
        try:
            async for delta in self._sample(request):
                deltas.append(delta)
                if delta.finish_reason not in (None, "weight_update"):
                    self._finished[request.id] = deltas
                yield delta
        finally:
            del self._running[request.id]
            ended.set()

    async def _sample(self, request: Request) -> AsyncIterator[Delta]:
        sampling, start = request.sampling, len(request.prompt_ids)
        room = min(sampling.max_tokens, self.capabilities.max_tokens - start)
        ids = [int(id_) for id_ in self._reply(request)][:room]
        stop = next((id_ for id_ in ids if id_ in sampling.stop_ids), None)
        if stop is not None:
            ids = ids[: ids.index(stop) + 1]
        step = 1 if request.stream else self._tokens_per_step or max(1, len(ids))
        sent, done, version, routed = 0, 0, self.version, request.routes_from

        def delta(finish: Any, stop: int | None = None) -> Delta:
            nonlocal sent, routed
            first, sent = sent, done
            path = [*request.prompt_ids.tolist(), *ids]
            places = range(start + first, start + done)
            kept = routes = None
            if self._support and sampling.record_support and sampling.is_truncated:
                kept = Ragged.of([self._support(path[at], at) for at in places])
            if self._routes is not None and sampling.record_routes:
                end = start + done - 1 if done > first else routed
                experts = [self._routes(path[at], at) for at in range(routed, end)]
                shape = np.shape(self._routes(path[0], 0))
                routes = np.array(experts, np.uint8).reshape(len(experts), *shape)
                routed = end
            return Delta(
                token_ids=np.array(ids[first:done], np.int32),
                logprobs=np.array([self._logprob(path[at], at) for at in places], np.float32),
                policy_version=version,
                finish_reason=finish,
                stop=stop,
                num_prefilled_tokens=0 if first else start,
                support=kept,
                routed_experts=routes,
                first=first,
            )

        while done < len(ids):
            await asyncio.sleep(self._step_seconds)
            await self._may_run.wait()
            if request.id in self._aborted:
                yield delta("abort")
                return
            if version != self.version:
                yield delta("weight_update")
                version = self.version
            done = min(len(ids), done + step)
            self.num_steps += 1
            if request.stream and done < len(ids):
                yield delta(None)
        yield delta("length" if stop is None else "stop", stop)

    async def score(self, token_ids: Int32Array, *, first: int = 1, **how: Any) -> Scores:
        """The log-probs that `generate` would report for the same ids at the same positions."""
        values = [self._logprob(int(id_), at) for at, id_ in enumerate(token_ids)]
        values[:first] = [float("nan")] * min(first, len(values))
        return Scores(
            logprobs=np.array(values, np.float32),
            policy_version=self.version,
            num_prefilled_tokens=max(0, len(token_ids) - 1),
        )

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        self._may_run.set()

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        self.version = version

    async def sleep(self) -> None:
        self._is_asleep = True

    async def wake(self) -> None:
        self._is_asleep = False

    async def close(self) -> None:
        self._finished.clear()


class BrokenEngine:
    """Hands every call on to `inner`; a subclass breaks some.

    num_hits: number of times that the fault happened, for tests.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.num_hits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
