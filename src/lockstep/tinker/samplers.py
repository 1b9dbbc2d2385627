"""Sampling sessions: their weights, the samplers in memory, and the requests for samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from lockstep.agent.gateway.reading import Value
from lockstep.agent.tasks import derive_seed
from lockstep.launch.background import Background
from lockstep.tinker import wire
from lockstep.tinker.futures import Done
from lockstep.tinker.journal import Accepted, Sampler, digest_of
from lockstep.tinker.requests import Sampling, SamplingResult, TinkerError, invalid, not_found
from lockstep.tinker.resources import Resources


class Samplers:
    """Opens a sampler with its first request. The sampler unused for longest makes room."""

    def __init__(self, resources: Resources) -> None:
        self._resources, self._config = resources, resources.config
        self._sessions, self._futures = resources.sessions, resources.futures
        self.known = resources.journal.all(Sampler)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Id of each request in progress, which begins with the sampler's -> its task."""
        self._background = Background()
        self._open: dict[str, None] = {}
        """Samplers in memory, the one unused for longest first."""
        self._users: Counter[str] = Counter()
        self._opening = asyncio.Lock()
        needed = {sampler.directory for sampler in self.known.values()}
        for place in resources.store.directory.glob("samplers/*"):  # of a process that was killed
            if f"samplers/{place.name}" not in needed:
                resources.store.remove(place)

    # -- sampling sessions ------------------------------------------------------------------------

    async def create(self, body: Value) -> dict[str, Any]:
        session = self._sessions.live(body["session_id"].text())
        number, store = wire.whole_number(body["sampling_session_seq_id"]), self._resources.store
        sampler = Sampler(id=f"{session.id}:sample:{number}", session=session.id)
        checkpoint = None
        if path := body["model_path"].text(""):
            checkpoint = store.find(path)
            sampler.base_model, sampler.model_path = checkpoint.spec["base_model"], path
            sampler.directory, sampler.version = f"samplers/{sampler.id}", checkpoint.num_updates
        else:
            sampler.base_model = self._resources.base(body["base_model"]).name
        known = self.known.get(sampler.id)
        if known is None:
            if checkpoint is not None:  # a copy, as the checkpoint may be deleted or replaced
                place = store.directory / str(sampler.directory)
                await store.link(store.place(checkpoint.id), place)
            self.add(sampler)
        elif (known.model_path, known.base_model) != (sampler.model_path, sampler.base_model):
            raise invalid(
                f"sampling_session_seq_id={number} of session {session.id} was used before for "
                f"other weights ({known.model_path or known.base_model}). Count by one."
            )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def add(self, sampler: Sampler) -> None:
        """Notes a sampler. Its weights are loaded with its first request."""
        self._resources.journal.put(sampler)
        self.known[sampler.id] = sampler

    def show(self, body: Value, sampler_id: str) -> dict[str, Any]:
        found = self.find(sampler_id)
        about = {"sampler_id": found.id, "base_model": found.base_model}
        return about | ({} if found.model_path is None else {"model_path": found.model_path})

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

    # -- requests for samples ---------------------------------------------------------------------

    def sample(self, body: Value) -> dict[str, Any]:
        sampler = self.find(body["sampling_session_id"].text())
        self._sessions.live(sampler.session)
        seq_id = wire.whole_number(body["seq_id"], 0, wire.MAX_SAMPLE_SEQ_ID)
        raw, num_samples = wire.canonical(body), body["num_samples"].integer(1) or 1
        digest = digest_of("sample", raw)
        request = Accepted(sampler.session, sampler.id, seq_id, "sample", raw, digest=digest)

        def read() -> Sampling:
            if len(self._tasks) >= self._config.max_pending_samples:
                raise TinkerError(
                    f"{len(self._tasks)} requests for samples are waiting "
                    "(the limit of this server); ask again in a second.",
                    status=429,
                )
            return self._read(body, sampler)

        names = [f"{request.id}.{at}" for at in range(num_samples)]
        return self._futures.accept(request, read, self.start) | {"sample_sequence_ids": names}

    def _read(self, body: Value, sampler: Sampler) -> Sampling:
        base = self._resources.bases[sampler.base_model]
        return wire.sampling_of(body, base, substitute=self._config.substitute)

    def start(self, request: Accepted) -> None:
        """Executes a request that the journal has."""
        task = self._tasks[request.id] = self._background.start(self._answer(request))
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    async def _answer(self, request: Accepted) -> None:
        try:
            sampler = self.find(request.target)
            asked: Sampling = request.value or self._read(Value(json.loads(request.body)), sampler)
            result = await self._draw(sampler, asked, request)
            remember = partial(self._resources.origins.add, request, asked, result)
            payload = wire.write_sampling(result, asked)
            outcome: Done | BaseException = Done(payload=payload, write=remember)
        except Exception as error:
            outcome = error
        await self._futures.settle(request, outcome)

    async def _draw(self, sampler: Sampler, asked: Sampling, request: Accepted) -> SamplingResult:
        count = range(asked.num_samples)
        # A client's own seed gives the same replies in every session.
        key = (sampler.id, request.seq_id) if asked.seed is None else ("seed", asked.seed)
        seeds = [derive_seed(*key, at) for at in count]
        names = [f"{request.id}.{at}" for at in count]
        sampler.last_used = time.time()
        async with self._opened(sampler):
            backend = self._resources.backend
            return await backend.sample(sampler.id, asked, seeds=seeds, sequence_ids=names)

    async def cancel(self, body: Value) -> dict[str, Any]:
        """Stops a request for samples; any other one is executed nevertheless."""
        await self._cancel(body["request_id"].text(), "the client cancelled it.")
        return {}

    async def _cancel(self, request_id: str, reason: str) -> None:
        task, journal = self._tasks.get(request_id), self._resources.journal
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = journal.outcome(request_id)
        if found is not None and found.state == "waiting":
            await self._futures.settle(found, TinkerError(reason))

    # -- weights in memory ------------------------------------------------------------------------

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
        name, backend = sampler.directory, self._resources.backend
        place = None if name is None else self._resources.store.directory / name
        if place is not None and not place.is_dir():
            raise TinkerError(f"the weights of {sampler.id} ({sampler.model_path}) were deleted.")
        await backend.open_sampler(sampler.id, sampler.base_model, place, version=sampler.version)

    async def _close(self, sampler_id: str) -> None:
        self._open.pop(sampler_id, None)
        await self._resources.backend.close_sampler(sampler_id)

    def followers(self, sampler: Sampler) -> list[Sampler]:
        """The earlier samplers that take over the weights of this one."""
        others = (each for each in self.known.values() if each.id != sampler.id)
        inflight = [each for each in others if each.is_inflight and sampler.is_inflight]
        return [each for each in inflight if each.model == sampler.model]

    async def reload(self, samplers: list[Sampler], replaced: set[str | None]) -> None:
        """Replaces the weights of samplers in memory, under their running requests. replaced: the
        directories that they had."""
        async with self._opening:
            for sampler in samplers:
                if sampler.id in self._open:
                    await self._load(sampler)
        self._release(replaced)

    def _release(self, directories: set[str | None]) -> None:
        """Deletes directories of unnamed weights that no sampler has any longer."""
        store = self._resources.store
        for directory in directories - {sampler.directory for sampler in self.known.values()}:
            if directory is not None and directory.startswith("samplers/"):
                store.remove(store.directory / directory)

    # -- the end ----------------------------------------------------------------------------------

    async def end(self, session_id: str, reason: str) -> None:
        """Cancels the requests of a session, and forgets its samplers."""
        ended = [each for each in self.known.values() if each.session == session_id]
        names = {sampler.id for sampler in ended}
        for request_id in list(self._tasks):
            if request_id.rpartition("/")[0] in names:
                await self._cancel(request_id, f"its session is over: {reason}.")
        await self._forget(ended)

    async def expire(self) -> None:
        """Forgets unnamed samplers that nobody uses."""
        before = time.time() - self._config.sampler_seconds
        unused = (s for s in self.known.values() if s.last_used < before and not self._users[s.id])
        await self._forget([sampler for sampler in unused if sampler.model])

    async def _forget(self, samplers: list[Sampler]) -> None:
        for sampler in samplers:
            self._resources.journal.remove(sampler)
            del self.known[sampler.id]
            if sampler.id in self._open:
                await self._close(sampler.id)
        self._release({sampler.directory for sampler in samplers})

    async def stop(self) -> None:
        """Stops all requests; the journal keeps them."""
        await self._background.cancel()
