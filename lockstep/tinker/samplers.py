"""Sampling sessions: which weights each one has, and which of them are in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from lockstep.agent.tasks import derive_seed
from lockstep.tinker.checkpoints import CheckpointStore
from lockstep.tinker.journal import Journal, Sampler
from lockstep.tinker.requests import BaseModel, Sampling, SamplingResult, TinkerError, not_found
from lockstep.tinker_config import TinkerConfig

if TYPE_CHECKING:
    from lockstep.tinker.embedded import EmbeddedBackend


class SamplerPool:
    """Opens a sampler when it is asked, and closes the one unused for longest for another."""

    def __init__(
        self,
        backend: EmbeddedBackend,
        *,
        bases: Mapping[str, BaseModel],
        journal: Journal,
        store: CheckpointStore,
        config: TinkerConfig,
    ) -> None:
        self._backend, self._bases, self._config = backend, bases, config
        self._journal, self._store = journal, store
        self.known = journal.all(Sampler)
        self._open: dict[str, None] = {}
        """Those in memory, the one unused for longest first."""
        self._users: Counter[str] = Counter()
        self._opening = asyncio.Lock()
        needed = {sampler.directory for sampler in self.known.values()}
        for place in store.directory.glob("samplers/*"):  # of a process that was killed
            if f"samplers/{place.name}" not in needed:
                store.remove(place)

    def find(self, sampler_id: str) -> Sampler:
        """Raises TinkerError (404)."""
        found = self.known.get(sampler_id)
        if found is None:
            raise not_found(
                f"sampling session {sampler_id[:200]!r} is not known: its session ended, it was "
                f"unused for {self._config.sampler_seconds:g} s, or it is of another server. Make "
                "another sampling client."
            )
        return found

    def base_of(self, sampler: Sampler) -> BaseModel:
        return self._bases[sampler.base_model]

    def add(self, sampler: Sampler) -> None:
        """Notes a sampler. Its weights are loaded with its first request."""
        self._journal.put(sampler)
        self.known[sampler.id] = sampler

    async def sample(
        self, sampler: Sampler, request: Sampling, seq_id: int, name: str
    ) -> SamplingResult:
        """name: of the request; the replies are called NAME.0, NAME.1, ..."""
        count = range(request.num_samples)
        # A client's own seed gives the same replies in every session.
        key = (sampler.id, seq_id) if request.seed is None else ("seed", request.seed)
        seeds = [derive_seed(*key, at) for at in count]
        names = [f"{name}.{at}" for at in count]
        sampler.last_used = time.time()
        async with self._opened(sampler):
            return await self._backend.sample(sampler.id, request, seeds=seeds, sequence_ids=names)

    @contextlib.asynccontextmanager
    async def _opened(self, sampler: Sampler) -> AsyncIterator[None]:
        """Keeps the weights in memory inside the block."""
        self._users[sampler.id] += 1
        try:
            if sampler.id not in self._open:
                async with self._opening:
                    if sampler.id not in self._open:
                        await self._make_room()
                        await self._load(sampler)
            self._open.pop(sampler.id, None)
            self._open[sampler.id] = None  # the last one again
            yield
        finally:
            self._users[sampler.id] -= 1

    async def _make_room(self) -> None:
        unused = [each for each in self._open if not self._users[each]]
        for sampler_id in unused[: len(self._open) + 1 - self._config.max_open_samplers]:
            await self._close(sampler_id)

    async def _load(self, sampler: Sampler) -> None:
        known = sampler.directory
        place = None if known is None else self._store.directory / known
        if place is not None and not place.is_dir():
            raise TinkerError(
                f"the weights of sampling session {sampler.id} ({sampler.model_path}) were deleted."
            )
        await self._backend.open_sampler(
            sampler.id, sampler.base_model, place, version=sampler.version
        )

    async def _close(self, sampler_id: str) -> None:
        self._open.pop(sampler_id, None)
        await self._backend.close_sampler(sampler_id)

    def followers(self, sampler: Sampler) -> list[Sampler]:
        """The earlier samplers that take over the weights of this one."""
        if not sampler.is_inflight:
            return []
        return [
            each
            for each in self.known.values()
            if each.is_inflight and each.model == sampler.model and each.id != sampler.id
        ]

    async def reload(self, samplers: list[Sampler], replaced: set[str | None]) -> None:
        """Replaces the weights of those that are in memory, under their running requests. replaced:
        the directories that they had."""
        async with self._opening:
            for sampler in samplers:
                if sampler.id in self._open:
                    await self._load(sampler)
        self._release(replaced)

    def _release(self, directories: set[str | None]) -> None:
        """Deletes directories of unnamed weights that no sampler has any longer."""
        for directory in directories - {sampler.directory for sampler in self.known.values()}:
            if directory is not None and directory.startswith("samplers/"):
                self._store.remove(self._store.directory / directory)

    async def end(self, session: str) -> None:
        """Forgets the samplers of a session."""
        await self._forget([each for each in self.known.values() if each.session == session])

    async def expire(self) -> None:
        """Forgets unnamed samplers that nobody uses."""
        before = time.time() - self._config.sampler_seconds
        unused = (s for s in self.known.values() if s.last_used < before and not self._users[s.id])
        await self._forget([sampler for sampler in unused if sampler.model])

    async def _forget(self, samplers: list[Sampler]) -> None:
        for sampler in samplers:
            self._journal.remove(sampler)
            del self.known[sampler.id]
            if sampler.id in self._open:
                await self._close(sampler.id)
        self._release({sampler.directory for sampler in samplers})
