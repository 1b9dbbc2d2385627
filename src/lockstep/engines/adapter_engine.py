"""One adapter of an engine, as the engine of a run that shares it with others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.errors import CapabilityError
from lockstep.types import Delta, Int32Array, Request


class AdapterEngine(Engine):
    """`Engine` over the adapter `name` of an engine that samples for others too.

    Its weights are the adapter's: `load_weights` hands them on under the name, and `close` drops
    them. It cannot be paused or put to sleep, which would stop the others.

    >>> mine = AdapterEngine(engine, "mine", model)                             # doctest: +SKIP
    >>> await mine.load_weights(None, version=3)   # copies the adapter of `model`
    """

    def __init__(self, engine: Engine, name: str, adapted: Any = None) -> None:
        """adapted: the decoder in training, for an engine in this process; None for an engine that
        reads directories in PEFT's form."""
        self._engine, self._name, self._adapted = engine, name, adapted
        self.version, self._is_loaded = 0, False

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            self._engine.capabilities,
            has_adapters=False,
            has_sleep=False,
            weight_sources=("adapter",) if self._adapted is None else ("shared",),
        )

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        # Two runs may ask for the same task and sample, and an id names one generation.
        named = replace(request, id=f"{self._name}/{request.id}", adapter=self._name)
        return self._engine.generate(named)

    async def score(self, token_ids: Int32Array, **how: Any) -> Scores:
        how["adapter"] = self._name
        return await self._engine.score(token_ids, **how)

    async def score_by_each(self, token_ids: Int32Array, **how: Any) -> Mapping[str, Scores]:
        how["adapter"] = self._name
        return await self._engine.score_by_each(token_ids, **how)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(f"{self._name}/{request_id}")

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        adapter = source if self._adapted is None else self._adapted
        await self._engine.load_adapter(self._name, adapter, version=version)
        self.version, self._is_loaded = version, True

    async def close(self) -> None:
        """Drops the adapter; requests in flight fail. The engine goes on."""
        if self._is_loaded:
            self._is_loaded = False
            await self._engine.drop_adapter(self._name)

    async def _refuse(self, **_: Any) -> None:
        raise CapabilityError(
            f"engine {self._engine.capabilities.name} samples for others beside {self._name}: it "
            "cannot be paused or put to sleep for one."
        )

    pause = resume = sleep = wake = _refuse

    def take_metrics(self) -> dict[str, float]:
        """Events of the whole engine since the last call by any of its users."""
        return self._engine.take_metrics()

    async def check_lease(self) -> None:
        await self._engine.check_lease()

    async def ping(self) -> None:
        await self._engine.ping()
