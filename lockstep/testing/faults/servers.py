"""Faults of an engine as a server: it dies, freezes, repeats itself, or lies.

Each puts a `BrokenEngine` around one replica, sound up to policy version `at` and broken from then
on. docs/reference/faults.md says what a run makes of each; a pool sees most of them for what they
are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.agent.tasks import derive_seed
from lockstep.config import check_numbers
from lockstep.engines.base import Capabilities, Engine, EngineContext, Scores
from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError, EngineDownError, EngineError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run_config import Config
from lockstep.testing.engines import BrokenEngine
from lockstep.testing.faults.base import FaultConfig
from lockstep.types import Delta, Int32Array, Request


@dataclass(frozen=True, kw_only=True)
class _EngineFault(FaultConfig):
    """Base of the faults of one replica. The engine itself may be of any kind."""

    at: int = 1
    """Policy version from which on it happens."""
    replica: int = 0
    """Replica of a pool that it happens to; 0 for a single engine."""

    def __post_init__(self) -> None:
        check_numbers(self, "", "at", "replica", least=0)

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        num = len(config.engine.replica_configs())
        if self.replica >= num:
            raise ConfigError(
                f"replica={self.replica}: the engine has {num} of them, counted from 0."
            )

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.engines.registry import open_engine

        def wrap(engine: Engine, replica: int) -> Engine:
            return self.broken(engine) if replica == self.replica else engine

        return open_engine(config, context, wrap=wrap)

    def broken(self, engine: Engine) -> Any:
        """The engine with this fault."""
        return _Replying(engine, self)

    def replies(self, engine: _Replying, request: Request) -> AsyncIterator[Delta]:
        """The deltas that a broken engine gives in the place of its inner one's."""
        raise NotImplementedError(f"{type(self).__name__} breaks no replies")


class _Replying(BrokenEngine):
    """An engine whose replies are those that a fault makes."""

    def __init__(self, inner: Engine, fault: _EngineFault) -> None:
        super().__init__(inner)
        self._fault = fault

    def is_hit(self, request: Request) -> bool:
        """Whether this request goes wrong; counts it if it does."""
        share = getattr(self._fault, "share", 1.0)
        seed = derive_seed(getattr(self._fault, "seed", 0), request.id)
        is_hit = self.version >= self._fault.at and seed < share * 2.0**63
        self.num_hits += is_hit
        return is_hit

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        return self._fault.replies(self, request)


@dataclass(frozen=True, kw_only=True)
class EngineKilled(_EngineFault):
    """The engine dies in the middle of a reply: the connection breaks, and no other is accepted."""

    returns_after: float = 0.0
    """Seconds until it is back, with the weights that it had; 0 is never."""

    def broken(self, engine: Engine) -> _DeadEngine:
        return _DeadEngine(engine, self, is_frozen=False)


@dataclass(frozen=True, kw_only=True)
class EngineFrozen(_EngineFault):
    """The engine freezes in the middle of a reply: it accepts every request and answers none."""

    returns_after: float = 0.0
    """Seconds until it continues; 0 is never."""

    def broken(self, engine: Engine) -> _DeadEngine:
        return _DeadEngine(engine, self, is_frozen=True)


class _DeadEngine(BrokenEngine):
    """Gone, or frozen, from the middle of the first reply that is due."""

    def __init__(
        self, inner: Engine, fault: EngineKilled | EngineFrozen, *, is_frozen: bool
    ) -> None:
        super().__init__(inner)
        self._fault, self._is_frozen = fault, is_frozen
        self._died_at: float | None = None

    def _is_gone(self) -> bool:
        if self._died_at is None:
            return False
        age = asyncio.get_running_loop().time() - self._died_at
        return not self._fault.returns_after or age < self._fault.returns_after

    async def _live(self, text: str = "connection refused") -> None:
        if self._is_gone() and self._is_frozen:
            await asyncio.get_running_loop().create_future()
        if self._is_gone():
            raise EngineDownError(text)

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        await self._live()
        num_tokens = 0
        async for delta in self.inner.generate(replace(request, stream=True)):
            if self.version >= self._fault.at and self._died_at is None and num_tokens:
                self._died_at = asyncio.get_running_loop().time()
                self.num_hits += 1
            await self._live("connection reset by peer")
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


@dataclass(frozen=True, kw_only=True)
class _Share(_EngineFault):
    """Base of the faults that hit a share of something, chosen by names and not by chance."""

    share: float = 0.5
    """Share that is hit."""
    seed: int = 0
    """Seed of the choice."""

    def __post_init__(self) -> None:
        _EngineFault.__post_init__(self)
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share} must lie in (0, 1].")


@dataclass(frozen=True, kw_only=True)
class WrongWeights(_EngineFault):
    """The engine says that it has taken the new weights, and continues with the old ones."""

    def broken(self, engine: Engine) -> _UnloadedEngine:
        return _UnloadedEngine(engine, at=self.at)


@dataclass(frozen=True, kw_only=True)
class HalfLoadedWeights(_Share):
    """A share of the tensors keeps the values of the load before, as where a loader skips what it
    does not know."""

    def broken(self, engine: Engine) -> _UnloadedEngine:
        return _UnloadedEngine(engine, at=self.at, share=self.share, seed=self.seed)


class _UnloadedEngine(BrokenEngine):
    """Claims to have taken new weights. share: of the tensors that keep their values before."""

    def __init__(self, inner: Engine, *, at: int, share: float = 1.0, seed: int = 0) -> None:
        super().__init__(inner)
        self._at, self._share, self._seed = at, share, seed
        self._claimed = inner.version
        self._before: dict[str, Any] = {}

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
        from lockstep.models.hf_io import read_tensors

        if source is None:
            raise EngineError("load_weights: this engine has a copy of the weights; found None.")
        if isinstance(source, str):
            source = {name: stored.read() for name, stored in read_tensors(source).items()}
        if version >= self._at and self._before:
            self.num_hits += 1
            kept = {n for n in source if derive_seed(self._seed, n) < self._share * 2.0**63}
            source = {n: self._before[n] if n in kept else source[n] for n in source}
        # The trainer's own memory, which the next update changes.
        self._before = {name: tensor.clone() for name, tensor in source.items()}
        await self.inner.load_weights(source, version=version)
        self._claimed = version


@dataclass(frozen=True, kw_only=True)
class DuplicatedReplies(_Share):
    """Every piece of a share of the replies comes twice."""

    async def replies(self, engine: _Replying, request: Request) -> AsyncIterator[Delta]:
        async for delta in engine.inner.generate(request):
            yield delta
            if engine.is_hit(request):
                yield delta


@dataclass(frozen=True, kw_only=True)
class LostReplies(_Share):
    """A share of the replies is sampled and never sent."""

    async def replies(self, engine: _Replying, request: Request) -> AsyncIterator[Delta]:
        async for delta in engine.inner.generate(request):
            if not engine.is_hit(request):
                yield delta
        if engine.is_hit(request):
            await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, kw_only=True)
class MisorderedReplies(_Share):
    """A share of the replies comes in pieces, each two of them in the wrong order."""

    async def replies(self, engine: _Replying, request: Request) -> AsyncIterator[Delta]:
        if not engine.is_hit(request):
            async for delta in engine.inner.generate(request):
                yield delta
            return
        *pairs, last = [d async for d in engine.inner.generate(replace(request, stream=True))]
        for at in range(0, len(pairs), 2):
            for delta in reversed(pairs[at : at + 2]):
                yield delta
        yield last


@dataclass(frozen=True, kw_only=True)
class SlowReplies(_EngineFault):
    """The engine waits before every piece of a reply."""

    seconds: float = 0.1
    """Length of the wait."""

    def __post_init__(self) -> None:
        _EngineFault.__post_init__(self)
        check_numbers(self, "", "seconds")

    async def replies(self, engine: _Replying, request: Request) -> AsyncIterator[Delta]:
        async for delta in engine.inner.generate(request):
            if engine.is_hit(request):
                await asyncio.sleep(self.seconds)
            yield delta


@dataclass(frozen=True, kw_only=True)
class FalseVersions(_Share):
    """A share of the replies carries a version that the engine was never given."""

    async def replies(self, engine: _Replying, request: Request) -> AsyncIterator[Delta]:
        async for delta in engine.inner.generate(request):
            if engine.is_hit(request):
                delta = replace(delta, policy_version=delta.policy_version + 1)
            yield delta
