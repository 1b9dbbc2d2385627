"""Faults of an engine as a server: it dies, freezes, or lies about its weights.

Each puts a `BrokenEngine` around one replica, sound up to policy version `at` and broken from then
on. docs/doctor-causes.md lists a run's reaction to each; a pool recognises most of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from lockstep.config import Interval, at_least
from lockstep.engines.base import Capabilities, Engine, EngineContext, Scores
from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError, EngineDownError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run_config import Config
from lockstep.testing.engines import BrokenEngine
from lockstep.testing.faults.base import FaultConfig, is_chosen
from lockstep.types import Delta, Int32Array, Request


@dataclass(frozen=True, kw_only=True)
class _EngineFault(FaultConfig):
    """Base of the faults of one replica. The engine itself may be of any kind."""

    at: Annotated[int, at_least(0)] = 1
    """First policy version with the fault."""
    replica: Annotated[int, at_least(0)] = 0
    """Replica of a pool that it happens to; 0 for a single engine."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        num = len(config.engine.replica_configs())
        if self.replica >= num:
            raise ConfigError(f"replica={self.replica}: the engine has {num}, counted from 0.")

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.engines.registry import open_engine

        def wrap(engine: Engine, replica: int) -> Engine:
            return self.broken(engine) if replica == self.replica else engine

        return open_engine(config, context, wrap=wrap)

    def broken(self, engine: Engine) -> Any:
        """The engine with this fault."""
        raise NotImplementedError(f"{type(self).__name__} breaks no engine")


@dataclass(frozen=True, kw_only=True)
class EngineKilled(_EngineFault):
    """The engine dies in the middle of a reply: the connection breaks, and no other is accepted."""

    returns_after: float = 0.0
    """Seconds until it is back, with the weights that it had; 0 is never."""

    is_frozen: ClassVar[bool] = False

    def broken(self, engine: Engine) -> Any:
        return _DeadEngine(engine, self)


@dataclass(frozen=True, kw_only=True)
class EngineFrozen(EngineKilled):
    """The engine freezes in the middle of a reply: it accepts every request and answers none."""

    is_frozen: ClassVar = True


class _DeadEngine(BrokenEngine):
    """Gone, or frozen, from the middle of the first reply that is due."""

    def __init__(self, inner: Engine, fault: EngineKilled) -> None:
        super().__init__(inner)
        self._fault = fault
        self._died_at: float | None = None

    async def _live(self, text: str = "connection refused") -> None:
        if self._died_at is None:
            return
        loop, returns_after = asyncio.get_running_loop(), self._fault.returns_after
        if returns_after and loop.time() - self._died_at >= returns_after:
            return
        if self._fault.is_frozen:
            await loop.create_future()
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
class WrongWeights(_EngineFault):
    """The engine says that it has taken the new weights, and continues with the old ones."""

    share: Annotated[float, Interval("(0, 1]")] = 1.0
    """Share of the tensors that keep the values of the load before."""
    seed: int = 0
    """Seed of the choice."""

    def broken(self, engine: Engine) -> Any:
        return _UnloadedEngine(engine, self)


@dataclass(frozen=True, kw_only=True)
class HalfLoadedWeights(WrongWeights):
    """A share of the tensors keeps its old values, as if a loader skipped unknown names."""

    share: float = 0.5


class _UnloadedEngine(BrokenEngine):
    """Claims to have taken new weights."""

    def __init__(self, inner: Engine, fault: WrongWeights) -> None:
        super().__init__(inner)
        self._fault = fault
        self._before: dict[str, Any] = {}

    @property
    def capabilities(self) -> Capabilities:
        found = self.inner.capabilities
        sources = tuple(s for s in found.weight_sources if s in ("tensors", "directory"))
        return replace(found, weight_sources=sources)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        from lockstep.models.hf_io import read_tensors

        fault = self._fault
        if isinstance(source, str):
            source = {name: stored.read() for name, stored in read_tensors(source).items()}
        assert source is not None, "the engine shares no weights"
        if version >= fault.at and self._before:
            self.num_hits += 1
            kept = {name for name in source if is_chosen(fault.share, fault.seed, name)}
            source = {n: self._before[n] if n in kept else source[n] for n in source}
        # The trainer's own memory, which the next update changes.
        self._before = {name: tensor.clone() for name, tensor in source.items()}
        await self.inner.load_weights(source, version=version)
