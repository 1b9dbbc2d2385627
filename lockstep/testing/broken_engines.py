"""Engines that fail on purpose, around any engine: what servers, networks and syncs do to a run.

Each is an `Engine` over another one, sound up to policy version `at` and broken from then on. What
a run makes of it is in docs/faults.md; a pool takes most of them for what they are (docs/pool.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.agent.tasks import derive_seed
from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.errors import EngineDownError, EngineError
from lockstep.models.hf_io import read_tensors
from lockstep.types import Delta, Int32Array, Request


class BrokenEngine:
    """Hands every call on to `inner`. A subclass breaks some from version `at` on.

    num_hits: how often the fault happened, for tests.
    """

    def __init__(self, inner: Engine, *, at: int = 1, share: float = 1.0, seed: int = 0) -> None:
        """share, seed: of the requests that are hit, chosen by their ids."""
        self.inner, self.at, self.share, self.seed = inner, at, share, seed
        self.num_hits = 0

    @property
    def is_due(self) -> bool:
        return self.version >= self.at

    def is_hit(self, request: Request) -> bool:
        """Whether this request is one of those that go wrong."""
        return self.is_due and derive_seed(self.seed, request.id) < self.share * 2.0**63

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class DeadEngine(BrokenEngine):
    """Gone, in the middle of the first reply that is due, and from then on; or it stands still.

    is_frozen: it takes every call and answers none. returns_after: seconds until it is back, with
    the weights that it had; 0 is never.
    """

    def __init__(
        self, inner: Engine, *, at: int = 1, is_frozen: bool = False, returns_after: float = 0.0
    ) -> None:
        super().__init__(inner, at=at)
        self.is_frozen, self.returns_after = is_frozen, returns_after
        self._died_at: float | None = None

    def _is_gone(self) -> bool:
        if self._died_at is None:
            return False
        age = asyncio.get_running_loop().time() - self._died_at
        return not self.returns_after or age < self.returns_after

    async def _live(self) -> None:
        if self._is_gone() and self.is_frozen:
            await asyncio.get_running_loop().create_future()
        if self._is_gone():
            raise EngineDownError("connection refused")

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        await self._live()
        num_tokens = 0
        async for delta in self.inner.generate(replace(request, stream=True)):
            if self.is_due and self._died_at is None and num_tokens:
                self._died_at = asyncio.get_running_loop().time()
                self.num_hits += 1
            if self._is_gone() and not self.is_frozen:
                raise EngineDownError("connection reset by peer")
            await self._live()
            num_tokens += len(delta.token_ids)
            yield delta

    async def score(self, token_ids: Int32Array, **how: Any) -> Scores:
        await self._live()
        return await self.inner.score(token_ids, **how)

    async def abort(self, request_id: str) -> None:
        await self._live()
        await self.inner.abort(request_id)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        await self._live()
        await self.inner.load_weights(source, version=version)


class UnloadedEngine(BrokenEngine):
    """Says that it has taken new weights, and has not: or only a share of the tensors.

    share: of the tensors that keep the values of the load before; 1 is all of them.
    """

    def __init__(self, inner: Engine, *, at: int = 1, share: float = 1.0, seed: int = 0) -> None:
        super().__init__(inner, at=at, share=share, seed=seed)
        self._claimed = inner.version
        self._before: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        found = self.inner.capabilities
        sources = tuple(s for s in found.weight_sources if s in ("tensors", "directory"))
        return replace(found, weight_sources=sources)

    @property
    def version(self) -> int:
        return self._claimed

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(request):
            yield replace(delta, policy_version=self._claimed)

    async def score(self, token_ids: Int32Array, **how: Any) -> Scores:
        found = await self.inner.score(token_ids, **how)
        return replace(found, policy_version=self._claimed)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if source is None:
            raise EngineError("load_weights: this engine has a copy of the weights; found None.")
        if isinstance(source, str):
            source = {name: stored.read() for name, stored in read_tensors(source).items()}
        if version >= self.at and self._before:
            self.num_hits += 1
            chosen = {n for n in source if derive_seed(self.seed, n) < self.share * 2.0**63}
            source = {n: self._before[n] if n in chosen else source[n] for n in source}
        # The trainer's own memory, which the next update changes.
        self._before = {name: tensor.clone() for name, tensor in source.items()}
        await self.inner.load_weights(source, version=version)
        self._claimed = version


class RepeatingEngine(BrokenEngine):
    """Every piece of a reply comes twice."""

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(request):
            yield delta
            if self.is_hit(request):
                self.num_hits += 1
                yield delta


class ForgetfulEngine(BrokenEngine):
    """Samples a reply, and never sends it."""

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(request):
            if not self.is_hit(request):
                yield delta
        if self.is_hit(request):
            self.num_hits += 1
            await asyncio.get_running_loop().create_future()


class MisorderingEngine(BrokenEngine):
    """Sends a reply in pieces, each two of them the wrong way round."""

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        if not self.is_hit(request):
            async for delta in self.inner.generate(request):
                yield delta
            return
        pieces = [delta async for delta in self.inner.generate(replace(request, stream=True))]
        self.num_hits += len(pieces) > 2
        *pairs, last = pieces
        for at in range(0, len(pairs), 2):
            for delta in reversed(pairs[at : at + 2]):
                yield delta
        yield last


class SlowEngine(BrokenEngine):
    """Waits before every piece of a reply."""

    def __init__(self, inner: Engine, *, at: int = 1, seconds: float = 0.1) -> None:
        super().__init__(inner, at=at)
        self.seconds = seconds

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(request):
            if self.is_due:
                self.num_hits += 1
                await asyncio.sleep(self.seconds)
            yield delta


class LyingEngine(BrokenEngine):
    """Says of its tokens that newer weights have sampled them than it was given."""

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        async for delta in self.inner.generate(request):
            if self.is_hit(request):
                self.num_hits += 1
                delta = replace(delta, policy_version=delta.policy_version + 1)
            yield delta
