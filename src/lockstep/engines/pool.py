"""Several engines as one: which replica serves a request, and what happens when a replica fails.

A replica is *ready*, *loading* weights or *out*. A request goes to a ready one. If that one dies,
freezes or gives an impossible answer, it is out and the request continues in another: the tokens
that had arrived are kept and become part of the prompt, the rest is sampled there. No token is
handed out twice, and no token that was handed out is sampled again.

A replica that is out is tried again, with waits that double, and is ready once it has loaded the
weights that the others run and has answered a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.engines.config import PoolConfig
from lockstep.engines.ledger import Entry, LedgerEngine, cancel, end_delta, ending_of, rest_of
from lockstep.errors import CapabilityError, ConfigError, EngineDownError, EngineError, LeaseError
from lockstep.launch.event_loop import running
from lockstep.types import Delta, FinishReason, Int32Array, Request, SamplingParams

NUM_HOMES = 65536
"""Trajectories whose replica is remembered."""

CLOSE_SECONDS = 60.0
"""Longest wait for a replica to close: a frozen one must not hold up the end of a run."""

_OF_THE_REQUEST = (CapabilityError, LeaseError)
"""Errors that another replica would raise as well."""

_FAILURES = (EngineError, OSError, TimeoutError, EOFError)
"""Errors of a replica that are no defect of this program."""

TRIES = 3
"""Most attempts of a request, the first one included."""
SPILL_REQUESTS = 8
"""The next turn of an episode goes to the replica with its prefix, unless that replica has so many
requests more than the least busy one."""

_GONE = (EngineDownError, OSError, EOFError)
"""Failures that mean the replica is gone. After any other failure it is asked for one token."""


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine, and the state that it is known to be in."""

    name: str
    engine: Engine
    version: int
    versions: set[int]
    """Policy versions that it was given."""
    state: Literal["ready", "loading", "out"] = "ready"
    streams: set[asyncio.Timeout] = field(default_factory=set)
    """Limits of the requests in it."""
    num_served: int = 0
    alive_at: float = 0.0
    """Time of its last sign of life, or of the first request to it."""
    last_words: str = ""
    is_frozen: bool = False
    num_failures: int = 0
    """Failures since it was last ready."""
    retry_at: float = 0.0
    probe: asyncio.Task[bool] | None = None
    revival: asyncio.Task[None] | None = None
    num_probes: int = 0

    @property
    def is_reviving(self) -> bool:
        return self.revival is not None and not self.revival.done()


@dataclass(slots=True, eq=False, kw_only=True)
class _PoolEntry(Entry):
    at: tuple[_Replica, str] | None = None
    """Replica that samples it, and the id of the request there."""


@dataclass(slots=True, eq=False)
class _Tries:
    """The failed attempts of one question."""

    where: str
    affinity: str
    replicas: set[_Replica] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


class Pool(LedgerEngine[_PoolEntry]):
    """`Engine` over several engines of one kind that sample the same model.

    names: of the replicas, for messages. started_from: directory that a returning replica loads if
    the pool has no newer weights. on_event: called when a replica is lost or comes back.
    Raises ConfigError unless all are the same engine over the same model.

    >>> pool = Pool([engine, other], PoolConfig(), names=["a", "b"])            # doctest: +SKIP
    """

    EVENTS = (
        *("lost_replicas", "frozen_replicas", "returned_replicas", "retries", "continued_tokens"),
        *("lost_replies", "wrong_versions", "spilled_requests", "failed_requests"),
    )

    def __init__(
        self,
        engines: Sequence[Engine],
        config: PoolConfig,
        *,
        names: Sequence[str],
        started_from: str | None = None,
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self._config, self._on_event = config, on_event
        self.capabilities = _common([engine.capabilities for engine in engines], names)
        """Features that all replicas have."""
        self._replicas = [
            _Replica(name, engine, engine.version, {engine.version})
            for name, engine in zip(names, engines, strict=True)
        ]
        self._version = min(engine.version for engine in engines)
        self._source: Mapping[str, Any] | str | None = started_from
        self._adapters: dict[str, tuple[Any, int]] = {}
        """Name -> (directory, version)."""
        self._homes: OrderedDict[str, _Replica] = OrderedDict()
        self._is_updating = False
        self._watcher: asyncio.Task[None] | None = None

    # -- the protocol -------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The oldest version that samples."""
        return min((r.version for r in self._replicas if r.state != "out"), default=self._version)

    @property
    def ready(self) -> list[str]:
        """Names of the replicas that take requests."""
        return [r.name for r in self._replicas if r.state == "ready"]

    async def _abandon(self, entry: _PoolEntry) -> None:
        self._close_entry(entry, is_forgotten=True)
        await cancel(entry.task)

    async def score(self, token_ids: Int32Array, **how: Any) -> Scores:
        self._check_ready("score")
        tries = _Tries("score", how.get("affinity", ""))
        while True:
            replica = await self._choose(tries)
            try:
                return await self._score_in(replica, token_ids, **how)
            except _FAILURES as error:
                await self._suspect(replica, error)
                self._note_failure(tries, replica, error)

    async def _score_in(self, replica: _Replica, token_ids: Int32Array, **how: Any) -> Scores:
        async with self._serving(replica):
            found = await replica.engine.score(token_ids, **how)
            replica.alive_at = _now()
            self._check_version(replica, found.policy_version)
        return found

    async def score_by_each(self, token_ids: Int32Array, **how: Any) -> dict[str, Scores]:
        """The scores of every replica that is not out, which show whether all run the same weights.
        One that fails is out."""
        self._check_ready("score")
        found: dict[str, Scores] = {}

        async def ask(replica: _Replica) -> None:
            found[replica.name] = await self._score_in(replica, token_ids, **how)

        await self._call_all(ask)
        return found

    async def _abort(self, entry: _PoolEntry) -> None:
        if entry.at is None:  # it waits for a replica: nothing is sampled
            self._end(entry, "abort")
            await cancel(entry.task)
        else:
            replica, asked_id = entry.at
            await replica.engine.abort(asked_id)

    async def pause(self) -> None:
        self._is_paused = True
        await self._call_all(lambda replica: replica.engine.pause())

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        await self._call_all(lambda replica: replica.engine.resume(kv=kv))
        self._is_paused = False

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Loads the weights in every ready replica, and in every lost replica that is due for
        another try; if none is ready, in every lost one. A replica that fails is out. Raises
        EngineError if none is left."""
        self._check_open()
        self._source, self._version = source, version
        ready = [r for r in self._replicas if r.state == "ready"]
        out = [r for r in self._replicas if r.state == "out"]
        due = [r for r in out if not ready or _now() >= r.retry_at]
        begun = [r for r in due if r.is_reviving]
        self._is_updating = True
        try:
            if self._config.update == "together":
                await _all(self._load(r) for r in ready)
            else:
                for replica in ready:
                    await self._load(replica)
            await _all(self._start_revival(r) for r in due)
            # A revival that had begun before brought the weights of then.
            await _all(self._start_revival(r) for r in begun if r.state == "out")
        finally:
            self._is_updating = False
            self._notify()
        if not self.ready:
            raise EngineError(
                f"load_weights: no replica has taken version {version}. {self._last_words()}"
            )

    async def load_adapter(self, name: str, source: Any, *, version: int) -> None:
        """See `Engine.load_adapter`. A replica that fails alone is out, and takes the adapter when
        it comes back; if all fail, it is the adapter's fault, and the error of one is raised."""
        self._check_open()
        before = self._adapters.get(name)
        self._adapters[name] = source, version
        here = [replica for replica in self._replicas if replica.state != "out"]
        loads = (self._load_adapter(replica, name) for replica in here)
        found = zip(here, await asyncio.gather(*loads, return_exceptions=True), strict=True)
        errors = {r: error for r, error in found if isinstance(error, BaseException)}
        if len(errors) == len(here):
            del self._adapters[name]
            if before is not None:
                self._adapters[name] = before
            gone = EngineError(f"all replicas are gone. {self._last_words()}")
            raise next(iter(errors.values()), gone)
        for replica, error in errors.items():
            self._lose(replica, f"adapter {name!r} of version {version}: {_text(error)}")

    async def _load_adapter(self, replica: _Replica, name: str) -> None:
        source, version = self._adapters[name]
        replica.versions.add(version)
        async with asyncio.timeout(self._config.load_seconds):
            await replica.engine.load_adapter(name, source, version=version)

    async def drop_adapter(self, name: str) -> None:
        """See `Engine.drop_adapter`."""
        if self._adapters.pop(name, None) is None:
            raise EngineError(f"drop_adapter: the pool has no adapter {name!r}.")
        await self._call_all(lambda r: r.engine.drop_adapter(name))

    async def sleep(self) -> None:
        self._is_asleep = True
        await self._call_all(lambda replica: replica.engine.sleep())

    async def wake(self) -> None:
        await self._call_all(lambda replica: replica.engine.wake())
        self._is_asleep = False

    async def _close(self) -> None:
        """Closes every replica, lost replicas too."""
        of_replicas = [task for r in self._replicas for task in (r.probe, r.revival)]
        for task in (self._watcher, *of_replicas):
            await cancel(task)
        # A replica that is gone, or frozen, cannot be closed.
        await asyncio.gather(
            *(asyncio.wait_for(r.engine.close(), CLOSE_SECONDS) for r in self._replicas),
            return_exceptions=True,
        )

    def take_metrics(self) -> dict[str, float]:
        """The pool's own events, and the sums over its replicas."""
        found = Counter(super().take_metrics())
        for replica in self._replicas:
            of_one = replica.engine.take_metrics()
            # A request that failed in one replica and continued in another is a retry.
            found.update({n: v for n, v in of_one.items() if n != "failed_requests"})
        return {**found, "replicas": float(len(self.ready))}

    async def check_lease(self) -> None:
        """Checks every ready replica; without an answer a replica is out."""
        await self._call_all(lambda replica: replica.engine.check_lease())

    # -- one request --------------------------------------------------------------------------

    def _start(self, request: Request, ids: Int32Array) -> _PoolEntry:
        reply = _PoolEntry(request=request)
        reply.task = asyncio.get_running_loop().create_task(self._serve(reply))
        self._watch()
        return reply

    async def _serve(self, reply: _PoolEntry) -> None:
        """Asks one replica after another until the reply is complete."""
        tries = _Tries(reply.where, reply.request.affinity)
        try:
            while not reply.is_done:
                version = -1 if reply.request.adapter or reply.version is None else reply.version
                replica = await self._choose(tries, at_least=version)
                try:
                    await self._stream(replica, reply, len(tries.failures))
                except _FAILURES as error:
                    if reply.is_done:  # only the end of the iterator was missing
                        return
                    await self._suspect(replica, error)
                    reply.at = None
                    self._continue(reply, tries, replica, error)
        except Exception as error:  # a defect, here or in an engine, must be seen by the reader
            self._fail_entry(reply, error, doing="the pool failed")

    def _continue(
        self, reply: _PoolEntry, tries: _Tries, replica: _Replica, error: BaseException
    ) -> None:
        """After a failure: ends the reply if only its end was lost. Raises EngineError if no other
        replica can continue it."""
        end = ending_of(reply.request, reply.sent_ids, self.capabilities)
        if reply.is_aborted:
            end = "abort", None
        if end is not None:
            self._end(reply, *end)
            return
        self._note_failure(tries, replica, error)
        if reply.num_sent and reply.request.sampling.stop_strings:
            raise EngineError(
                f"{reply.where}: {tries.failures[-1]}. {reply.num_sent} tokens had come, and "
                "another replica would not see a stop string that begins in them."
            )
        self.stats["continued_tokens"] += reply.num_sent

    def _note_failure(self, tries: _Tries, replica: _Replica, error: BaseException) -> None:
        """Raises EngineError after the last attempt."""
        tries.replicas.add(replica)
        tries.failures.append(f"{replica.name}: {_text(error)}")
        if len(tries.failures) >= TRIES:
            raise EngineError(
                f"{tries.where}: {len(tries.failures)} tries failed. {'; '.join(tries.failures)}"
            ) from error
        self.stats["retries"] += 1

    async def _stream(self, replica: _Replica, reply: _PoolEntry, num_failed: int) -> None:
        """Hands over what one replica samples of a request. Raises if the replica fails."""
        asked = self._request_for(reply, num_failed)
        reply.at = (replica, asked.id)
        base = reply.num_sent
        async with self._serving(replica) as limit:
            deltas = replica.engine.generate(asked)
            try:
                async for delta in deltas:
                    replica.alive_at = _now()
                    _set(limit, _now() + self._config.reply_seconds)
                    self._check_version(replica, delta.policy_version)
                    self._deliver(reply, delta, base)
            finally:
                if (close := getattr(deltas, "aclose", None)) is not None:
                    await close()
        if not reply.is_done:
            raise EngineDownError(f"the reply to {asked.id} ended without a finish reason")

    def _request_for(self, reply: _PoolEntry, num_failed: int) -> Request:
        """The request for a replica: the whole request, or the rest of its reply."""
        request = reply.request
        if not num_failed:
            return request
        # An id of its own: the replica that failed may still hold the first one.
        name = f"{request.id}~{num_failed}"
        asked = rest_of(request, reply.sent_ids, self.capabilities, call_id=name)
        if reply.num_sent and request.sampling.record_routes:
            asked = replace(asked, routes_from=len(asked.prompt_ids) - 1)
        return asked

    def _deliver(self, reply: _PoolEntry, delta: Delta, base: int) -> None:
        """Hands a delta to the readers. base: tokens that came before this replica was asked."""
        if delta.finish_reason == "abort" and not (reply.is_aborted or reply.is_done):
            raise EngineDownError(f"request {reply.request.id} was aborted, but not by this run")
        if delta.first is not None and base:
            delta = replace(delta, first=base + delta.first)
        self._hand_out(reply, delta)

    def _check_version(self, replica: _Replica, version: int) -> None:
        if version not in replica.versions:
            self.stats["wrong_versions"] += 1
            raise EngineDownError(
                f"it samples with weights of version {version}, which this run has not sent. "
                "Another trainer on it, or a server that was started again?"
            )

    def _end(self, reply: _PoolEntry, reason: FinishReason, stop: int | None = None) -> None:
        """Ends a reply that has no more tokens."""
        self._hand_out(reply, end_delta(reply, reason, version=self.version, stop=stop))

    # -- which replica serves it --------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self, replica: _Replica) -> AsyncIterator[asyncio.Timeout]:
        """A request's time in a replica: counted there, and cut off when the replica is lost."""
        if not replica.streams:
            replica.alive_at = _now()
        limit = asyncio.timeout(self._config.reply_seconds)
        replica.streams.add(limit)
        replica.num_served += 1
        try:
            async with limit:
                yield limit
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = replica.last_words if replica.state == "out" else ""
            raise TimeoutError(why or "no sign of it, while others were served") from error
        finally:
            replica.streams.discard(limit)

    async def _choose(self, tries: _Tries, *, at_least: int = -1) -> _Replica:
        """A ready replica, preferably without a failure of this request. Waits if no replica is
        ready but a lost one may come back.

        at_least: the version that the request was sampled with so far.
        """
        deadline = _now() + self._config.frozen_seconds / 2
        while True:
            self._check_open()
            ready = [r for r in self._replicas if r.state == "ready" and r.version >= at_least]
            if ready:
                others = [r for r in ready if r not in tries.replicas]
                return self._pick(others or ready, tries.affinity)
            is_late = _now() >= deadline and not any(r.is_reviving for r in self._replicas)
            is_over = is_late or not any(map(self._can_revive, self._replicas))
            if is_over and not self._is_updating:
                raise EngineError(f"all replicas are gone. {self._last_words()}")
            await self._changed(max(0.05, deadline - _now()))

    def _pick(self, ready: Sequence[_Replica], affinity: str) -> _Replica:
        """The replica that has the trajectory's prefix. If it is much busier than the least busy
        replica: the least busy one, and among equals the one with the fewest requests so far."""
        least = min(ready, key=lambda r: (len(r.streams), r.num_served))
        chosen, home = least, self._homes.get(affinity)
        if home is not None and home in ready:
            if len(home.streams) - len(least.streams) < SPILL_REQUESTS:
                chosen = home
            else:
                self.stats["spilled_requests"] += 1
        if affinity:
            self._homes[affinity] = chosen
            self._homes.move_to_end(affinity)
            if len(self._homes) > NUM_HOMES:
                self._homes.popitem(last=False)
        return chosen

    def _last_words(self) -> str:
        return " ".join(f"{r.name}: {r.last_words or 'ready'}." for r in self._replicas)

    # -- health -------------------------------------------------------------------------------

    async def _suspect(self, replica: _Replica, error: BaseException) -> None:
        """After a request failed in it: takes the replica out if it is gone, or if it does not
        answer another request. Raises an error that every replica would raise."""
        if isinstance(error, _OF_THE_REQUEST):
            raise error
        if replica.state != "ready":  # it is known to be out, or its load will fail
            return
        if isinstance(error, TimeoutError):  # an OSError too
            self.stats["lost_replies"] += 1
        elif isinstance(error, _GONE):
            self._lose(replica, _text(error))
            return
        if self._may_sample and not await self._probe(replica):
            self._lose(replica, f"{_text(error)}; after that, not one token", is_frozen=True)

    async def _probe(self, replica: _Replica) -> bool:
        """True if it samples a token. Concurrent callers share one probe."""
        replica.probe = running(replica.probe, partial(self._answers, replica))
        return await asyncio.shield(replica.probe)

    async def _answers(self, replica: _Replica) -> bool:
        replica.num_probes += 1
        request = Request(
            id=f"probe/{replica.name}/{replica.num_probes}-v{replica.version}",
            prompt_ids=np.zeros(1, np.int32),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        try:
            async with asyncio.timeout(self._config.frozen_seconds / 2):
                async for _ in replica.engine.generate(request):
                    replica.alive_at = _now()
        except _FAILURES:
            return False
        return True

    def _lose(self, replica: _Replica, reason: str, *, is_frozen: bool = False) -> None:
        """Takes a replica out; the requests in it go elsewhere."""
        if self._is_closed:
            return
        patience = self._config.frozen_seconds
        wait = min(patience / 2, patience / 12 * 2.0 ** min(replica.num_failures, 30))
        replica.num_failures += 1
        replica.retry_at = _now() + wait
        replica.last_words = reason
        if replica.state == "out":
            return
        replica.state, replica.is_frozen = "out", is_frozen
        self.stats["lost_replicas"] += 1
        self.stats["frozen_replicas"] += is_frozen
        left = sum(r.state != "out" for r in self._replicas)
        self._on_event(f"{replica.name} is out: {reason}. Replicas left: {left}.")
        for limit in replica.streams:
            _set(limit, _now())
        self._notify()  # whoever waits may see that nobody is left
        self._watch()

    def _watch(self) -> None:
        """Starts the task that looks after the replicas, unless it runs."""
        self._watcher = running(self._watcher, self._look_after)

    async def _look_after(self) -> None:
        tick = self._config.frozen_seconds / 24
        checked_at = _now()
        while not self._is_closed:
            began = _now()
            await asyncio.sleep(tick)
            now = _now()
            # The loop itself may have been blocked, as by a trainer in this process: silence during
            # that time says nothing about the replicas.
            for replica in self._replicas:
                replica.alive_at += max(0.0, now - began - tick)
            if not self._may_sample:  # silence is no bad sign then
                for replica in self._replicas:
                    replica.alive_at = _now()
                continue
            for replica in self._replicas:
                if replica.state == "ready":
                    self._check_frozen(replica, now)
                elif (
                    replica.state == "out" and now >= replica.retry_at and self._can_revive(replica)
                ):
                    self._start_revival(replica)
            if now - checked_at >= self._config.frozen_seconds / 12:
                checked_at = now
                ready = [r for r in self._replicas if r.state == "ready"]
                await asyncio.gather(*(self._ping(r) for r in ready))

    def _check_frozen(self, replica: _Replica, now: float) -> None:
        quiet = now - replica.alive_at
        limit = self._config.frozen_seconds
        if not replica.streams or quiet < limit / 2:
            return
        if quiet >= limit:
            found = f"{len(replica.streams)} requests in it, and nothing came for {limit:g} s"
            self._lose(replica, f"frozen: {found}", is_frozen=True)
        else:
            replica.probe = running(replica.probe, partial(self._answers, replica))

    async def _ping(self, replica: _Replica) -> bool:
        """Takes the replica out if it does not answer."""
        try:
            async with asyncio.timeout(self._config.frozen_seconds / 2):
                await replica.engine.ping()
        except _FAILURES as error:
            self._lose(replica, f"it does not answer: {_text(error)}")
            return False
        return True

    async def _call_all(self, call: Callable[[_Replica], Awaitable[None]]) -> None:
        """Calls every replica that is not out; a replica that fails is out. If none is left, the
        next request says so, unless the next load brings one back."""

        async def one(replica: _Replica) -> None:
            try:
                async with asyncio.timeout(self._config.load_seconds):
                    await call(replica)
                replica.alive_at = _now()
            except _OF_THE_REQUEST:
                raise
            except _FAILURES as error:
                self._lose(replica, _text(error))

        self._check_open()
        await asyncio.gather(*(one(r) for r in self._replicas if r.state != "out"))

    # -- weights ------------------------------------------------------------------------------

    def _can_revive(self, replica: _Replica) -> bool:
        """True if it can load the newest weights at any time. The trainer may be changing its
        tensors, so a replica without a copy waits for the next update."""
        source = self._source
        if source is None or isinstance(source, str):
            return True
        return replica.engine.remembers(source, version=self._version)

    async def _load(self, replica: _Replica) -> bool:
        """Gives a replica the newest weights; it is ready afterwards, or out."""
        source, version, engine = self._source, self._version, replica.engine
        was_out = replica.state == "out"
        if not was_out:
            replica.state = "loading"
        replica.versions.add(version)
        try:
            async with asyncio.timeout(self._config.load_seconds):
                await engine.load_weights(source, version=version)
            for name in list(self._adapters) if was_out else ():
                await self._load_adapter(replica, name)
            if engine.version != version:
                raise EngineDownError(f"it was sent version {version} but runs {engine.version}")
        except _OF_THE_REQUEST:
            replica.state = "out" if was_out else "ready"
            raise
        except _FAILURES as error:
            self._lose(replica, f"weights of version {version}: {_text(error)}")
            return False
        replica.version = version
        replica.alive_at = _now()
        if not was_out and replica.state == "loading":
            replica.state = "ready"
            self._notify()
        return True

    def _start_revival(self, replica: _Replica) -> asyncio.Task[None]:
        replica.revival = running(replica.revival, partial(self._revive, replica))
        return replica.revival

    async def _revive(self, replica: _Replica) -> None:
        """Brings back a replica that is out, once it has the newest weights and has answered."""
        is_up = await self._ping(replica)
        if not is_up and not replica.engine.capabilities.has_restart:
            return  # else the load starts it again
        if is_up and replica.is_frozen and self._may_sample and not await self._probe(replica):
            self._lose(replica, "frozen: not one token", is_frozen=True)
            return
        version = self._version
        if not await self._load(replica):
            return
        if self._may_sample and not await self._probe(replica):
            self._lose(replica, "it took the weights, and gives not one token")
            return
        if self._is_paused:
            await replica.engine.pause()
        if self._is_asleep:
            await replica.engine.sleep()
        if version != self._version:  # newer weights came meanwhile
            return
        replica.state, replica.num_failures, replica.last_words = "ready", 0, ""
        self.stats["returned_replicas"] += 1
        self._on_event(f"{replica.name} is back, with version {version}.")
        self._notify()


def _common(found: Sequence[Capabilities], names: Sequence[str]) -> Capabilities:
    """The capabilities of the pool. Raises ConfigError unless all replicas have the same; only the
    longest text may differ."""
    if not found:
        raise ConfigError("a pool needs at least one engine.")
    first = found[0]
    for name, other in zip(names, found, strict=True):
        for entry in fields(Capabilities):
            own, theirs = getattr(first, entry.name), getattr(other, entry.name)
            if own != theirs and entry.name != "max_tokens":
                raise ConfigError(
                    f"the replicas of a pool must be one engine over one model: {entry.name} is "
                    f"{own!r} in {names[0]} and {theirs!r} in {name}. Start both alike."
                )
    name = first.name if len(found) == 1 else f"{first.name} x{len(found)}"
    return replace(first, name=name, max_tokens=min(f.max_tokens for f in found))


def _set(limit: asyncio.Timeout, when: float) -> None:
    """Cuts a request off at `when`, unless it is ending."""
    if not limit.expired():
        limit.reschedule(when)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _text(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {error}".rstrip(".: ")


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Waits for all of them to end, then raises the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
