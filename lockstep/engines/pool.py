"""Several engines as one: who serves what, and what happens when one of them fails.

A replica is *ready*, *loading* weights or *out*. A request goes to a ready one; if that one dies,
freezes or answers what cannot be, it is out and the request goes on in another: what had come over
is kept, as the beginning of the prompt, and what had not is sampled there. No token is handed out
twice, and none that was handed out is sampled again.

A replica that is out is tried again, with waits that double, and is ready once it has loaded the
weights that the others run and has answered.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from lockstep.engines.base import (
    Capabilities,
    Engine,
    Leased,
    Pinged,
    Remembering,
    Reporting,
    Restartable,
    Scores,
    WeightSource,
)
from lockstep.engines.config import PoolConfig
from lockstep.engines.ledger import Replies, Reply, answer, checked_ids, wake
from lockstep.errors import CapabilityError, ConfigError, EngineDownError, EngineError, LeaseError
from lockstep.types import (
    Delta,
    Distribution,
    FinishReason,
    Int32Array,
    Request,
    SamplingParams,
)

NUM_HOMES = 65536
"""Trajectories whose replica is remembered."""

CANCEL_SECONDS = 5.0
"""How long the end of a request in a replica is waited for: a frozen one may never say."""

CLOSE_SECONDS = 60.0
"""How long the end of a replica is waited for: one that stands still must not hold up a run that is
over."""

EVENTS = (
    "lost_replicas", "frozen_replicas", "returned_replicas", "retries", "continued_tokens",
    "dropped_tokens", "duplicated_deltas", "misordered_deltas", "lost_replies", "wrong_versions",
    "spilled_requests", "failed_requests",
)  # fmt: skip
"""What a pool counts."""

_OF_THE_REQUEST = (CapabilityError, LeaseError)
"""What another replica would answer too."""

_FAILURES = (EngineError, OSError, TimeoutError, EOFError)
"""What a replica may raise that is not a defect of this program."""

_GONE = (EngineDownError, OSError, EOFError)
"""Of those, what says that the replica is gone. Of any other it is asked for a token first."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One request in one replica."""

    clock: asyncio.Timeout
    versions: set[int]
    """Policy versions that the replica may have sampled it with."""
    num_tokens: int = 0
    is_done: bool = False

    def hurry(self, when: float) -> None:
        """Ends it at `when`, unless it is ending."""
        if not self.clock.expired():
            self.clock.reschedule(when)


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine, and what is known of its state."""

    name: str
    engine: Engine
    version: int
    state: Literal["ready", "loading", "out"] = "ready"
    incoming: int | None = None
    """The version that it is loading."""
    streams: set[_Stream] = field(default_factory=set)
    num_served: int = 0
    heard_at: float = 0.0
    """When something last came from it, or was first asked of it."""
    last_words: str = ""
    is_frozen: bool = False
    num_failures: int = 0
    """Since it was last ready."""
    retry_at: float = 0.0
    probe: asyncio.Task[bool] | None = None
    revival: asyncio.Task[None] | None = None
    num_probes: int = 0

    @property
    def versions(self) -> set[int]:
        return {self.version} if self.incoming is None else {self.version, self.incoming}


@dataclass(slots=True, eq=False, kw_only=True)
class _Reply(Reply):
    ids: list[Int32Array] = field(default_factory=list)
    num_tokens: int = 0
    is_aborted: bool = False
    task: asyncio.Task[None] | None = None
    at: tuple[_Replica, str] | None = None
    """Where it is sampled, and under which id."""

    @property
    def version(self) -> int | None:
        """Of the last token that was handed out."""
        sampled = [d.policy_version for d in self.deltas if len(d.token_ids)]
        return sampled[-1] if sampled else None


class Pool:
    """`Engine` over several engines of one kind, which sample the same model.

    names: of the replicas, for messages. on_event: told when one is lost or comes back.
    Raises ConfigError if they are not the same engine over the same model.

    >>> pool = Pool([engine, other], PoolConfig(), names=["a", "b"])            # doctest: +SKIP
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: PoolConfig,
        *,
        names: Sequence[str],
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config, self._on_event = config, on_event
        self._capabilities = _common([engine.capabilities for engine in engines], names)
        self._replicas = [
            _Replica(name, engine, engine.version)
            for name, engine in zip(names, engines, strict=True)
        ]
        self._version = min(engine.version for engine in engines)
        self._source: Mapping[str, Any] | str | None = None
        self._replies: Replies[_Reply] = Replies()
        self._homes: OrderedDict[str, _Replica] = OrderedDict()
        self._waiters: list[asyncio.Future[None]] = []
        """Requests that wait for a replica to be ready."""
        self._counts: Counter[str] = Counter()
        self._is_paused = self._is_asleep = self._is_closed = self._is_updating = False
        self._watcher: asyncio.Task[None] | None = None

    # -- the protocol -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What all replicas can do."""
        return self._capabilities

    @property
    def version(self) -> int:
        """The oldest that samples."""
        return min((r.version for r in self._replicas if r.state != "out"), default=self._version)

    @property
    def ready(self) -> list[str]:
        """Names of the replicas that take requests."""
        return [r.name for r in self._replicas if r.state == "ready"]

    @property
    def behind(self) -> list[str]:
        """Names of the replicas without the newest weights: those that are out, and those whose
        turn to load has not come."""
        return [r.name for r in self._replicas if r.state == "out" or r.version != self._version]

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        return answer(partial(self._submit, request), self._abandon)

    async def _abandon(self, reply: _Reply) -> None:
        self._replies.pop(reply.request.id, None)
        await _cancel(reply.task)

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
        self._check_awake("score")
        failures: list[str] = []
        failed: set[_Replica] = set()
        while True:
            replica = await self._choose(affinity, avoid=failed)
            try:
                async with self._serving(replica) as stream:
                    found = await replica.engine.score(
                        token_ids,
                        distribution=distribution,
                        temperature=temperature,
                        priority=priority,
                        first=first,
                        affinity=affinity,
                    )
                    self._hear(replica)
                    self._check_version(replica, stream, found.policy_version)
                return found
            except _OF_THE_REQUEST:
                raise
            except _FAILURES as error:
                await self._suspect(replica, error)
                failed.add(replica)
                failures.append(f"{replica.name}: {_text(error)}")
                if len(failures) >= self._config.tries:
                    raise EngineError(
                        f"score: {len(failures)} tries failed. {'; '.join(failures)}"
                    ) from error
                self._counts["retries"] += 1

    async def score_by_each(
        self, token_ids: Int32Array, *, distribution: Distribution, temperature: float
    ) -> dict[str, Scores]:
        """What every replica that is ready thinks of the same ids: whether all run the same
        weights. One that fails is suspected as by any request, and left out."""
        self._check_awake("score")
        found: dict[str, Scores] = {}

        async def by(replica: _Replica) -> None:
            try:
                async with self._serving(replica) as stream:
                    scores = await replica.engine.score(
                        token_ids, distribution=distribution, temperature=temperature
                    )
                    self._hear(replica)
                    self._check_version(replica, stream, scores.policy_version)
                found[replica.name] = scores
            except _OF_THE_REQUEST:
                raise
            except _FAILURES as error:
                await self._suspect(replica, error)
                failures.append(f"{replica.name}: {_text(error)}")

        failures: list[str] = []
        await _all(by(replica) for replica in self._replicas if replica.state == "ready")
        if not found:
            raise EngineError(f"score: no replica has answered. {'; '.join(failures)}")
        return found

    async def abort(self, request_id: str) -> None:
        reply = self._replies.get(request_id)
        if reply is None or reply.is_done:
            return
        reply.is_aborted = True
        if reply.at is None:  # it waits for a replica: nothing is sampled
            self._end(reply, "abort")
            await _cancel(reply.task)
            return
        replica, asked_id = reply.at
        await replica.engine.abort(asked_id)

    async def pause(self) -> None:
        self._is_paused = True
        await self._each(lambda engine: engine.pause())

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        await self._each(lambda engine: engine.resume(kv=kv))
        self._is_paused = False
        for replica in self._replicas:
            self._hear(replica)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Every replica that is ready takes the weights, and every one that is out and due for
        another try. One that fails is out. Raises EngineError if none is left."""
        await self._update(source, version)

    async def _update(self, source: Mapping[str, Any] | str | None, version: int) -> None:
        self._check_open()
        self._source, self._version = source, version
        ready = [r for r in self._replicas if r.state == "ready"]
        due = [r for r in self._replicas if r.state == "out" and _now() >= r.retry_at]
        self._is_updating = True
        try:
            if self._config.update == "together":
                await _all(self._load(r) for r in ready)
            else:
                for replica in ready:
                    await self._load(replica)
            await _all(self._start_revival(r) for r in due)
        finally:
            self._is_updating = False
            wake(self._waiters)
        if not self.ready:
            raise EngineError(
                f"load_weights: no replica has taken version {version}. {self._last_words()}"
            )

    async def sleep(self) -> None:
        self._is_asleep = True
        await self._each(lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._each(lambda engine: engine.wake())
        self._is_asleep = False
        for replica in self._replicas:
            self._hear(replica)

    async def close(self) -> None:
        """Closes every replica, also one that is out; requests in flight fail."""
        if self._is_closed:
            return
        self._is_closed = True
        running = [reply for reply in self._replies.values() if not reply.is_done]
        for reply in running:
            self._fail(reply, EngineError("the engine was closed while the request was in flight."))
        of_replicas = [task for r in self._replicas for task in (r.probe, r.revival)]
        for task in [self._watcher, *of_replicas, *(reply.task for reply in running)]:
            await _cancel(task)
        wake(self._waiters)
        closed = await asyncio.gather(
            *(asyncio.wait_for(r.engine.close(), CLOSE_SECONDS) for r in self._replicas),
            return_exceptions=True,
        )
        for replica, result in zip(self._replicas, closed, strict=True):
            # A replica that is gone cannot be closed; a defect must show.
            if isinstance(result, BaseException) and not isinstance(result, _FAILURES):
                raise result
            if isinstance(result, BaseException) and replica.state != "out":
                self._on_event(f"{replica.name} did not close: {_text(result)}")

    def take_metrics(self) -> dict[str, float]:
        """The pool's own events, and the sums of what its replicas report."""
        found: Counter[str] = Counter({name: self._counts[name] for name in EVENTS})
        for replica in self._replicas:
            if isinstance(replica.engine, Reporting):
                of_one = replica.engine.take_metrics()
                # What failed in one and went on in another has not failed: it is a retry.
                found.update({n: v for n, v in of_one.items() if n != "failed_requests"})
        self._counts.clear()
        return {**{name: float(n) for name, n in found.items()}, "replicas": float(len(self.ready))}

    async def check_lease(self) -> None:
        """Of every replica that is ready; one that does not answer is out."""

        async def check(engine: Engine) -> None:
            if isinstance(engine, Leased):
                await engine.check_lease()

        await self._each(check)

    # -- one request --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def _check_awake(self, where: str) -> None:
        self._check_open()
        if self._is_asleep:
            raise EngineError(f"{where}: the engine is asleep; call wake() first.")

    def _submit(self, request: Request) -> _Reply:
        where = f"request {request.id}"
        self._check_awake(where)
        if (known := self._replies.known(request)) is not None:
            return known
        self._check_prompt(where, np.asarray(request.prompt_ids))
        reply = _Reply(request=request)
        self._replies.add(reply)
        reply.task = asyncio.get_running_loop().create_task(self._serve(reply))
        self._watch()
        return reply

    def _check_prompt(self, where: str, ids: Int32Array) -> None:
        """What every replica would refuse is refused here, so that none comes under suspicion."""
        limits = self._capabilities
        if not len(ids):
            raise EngineError(f"{where}: the prompt is empty; at least one id is needed.")
        if len(ids) >= limits.max_tokens:
            raise EngineError(
                f"{where}: the prompt has {len(ids)} tokens; {limits.name} holds "
                f"{limits.max_tokens} of prompt and reply."
            )
        checked_ids(ids, vocab_size=limits.vocab_size, where=where)

    async def _serve(self, reply: _Reply) -> None:
        """Asks one replica after another until the reply is whole."""
        failures: list[str] = []
        failed: set[_Replica] = set()
        try:
            while not reply.is_done:
                if (end := self._ending(reply)) is not None:
                    self._end(reply, *end)
                    return
                replica = await self._choose(
                    reply.request.affinity, avoid=failed, at_least=reply.version
                )
                try:
                    await self._stream(replica, reply, num_tries=len(failures))
                    return
                except _OF_THE_REQUEST:
                    raise
                except _FAILURES as error:
                    reply.at = None
                    await self._suspect(replica, error)
                    if reply.is_aborted:
                        self._end(reply, "abort")
                        return
                    failed.add(replica)
                    failures.append(f"{replica.name}: {_text(error)}")
                    where = f"request {reply.request.id}"
                    if len(failures) >= self._config.tries:
                        raise EngineError(
                            f"{where}: {len(failures)} tries failed. {'; '.join(failures)}"
                        ) from error
                    if reply.num_tokens and reply.request.sampling.stop_strings:
                        raise EngineError(
                            f"{where}: {failures[-1]}. {reply.num_tokens} tokens had come, and a "
                            "stop string that they begin would not be seen by another replica."
                        ) from error
                    self._counts["retries"] += 1
                    self._counts["continued_tokens"] += reply.num_tokens
        except EngineError as error:
            self._fail(reply, error)
        except Exception as error:  # a defect, here or in an engine: the reader must see it
            failure = EngineError(
                f"request {reply.request.id}: the pool failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(reply, failure)

    async def _stream(self, replica: _Replica, reply: _Reply, *, num_tries: int) -> None:
        """Hands over what one replica samples of a request. Raises where it fails."""
        asked = self._asked(reply, num_tries)
        reply.at = (replica, asked.id)
        base = reply.num_tokens
        async with self._serving(replica) as stream:
            deltas = replica.engine.generate(asked)
            try:
                async for delta in deltas:
                    self._hear(replica)
                    stream.hurry(_now() + self._config.reply_seconds)
                    self._take(replica, stream, reply, delta, base)
            finally:
                if (close := getattr(deltas, "aclose", None)) is not None:
                    await close()
        if not reply.is_done:
            raise EngineDownError(f"the reply to {asked.id} ended without a finish reason")

    def _asked(self, reply: _Reply, num_tries: int) -> Request:
        """What a replica is asked for: the request, or what is left of it."""
        request, count = reply.request, reply.num_tokens
        if not num_tries:
            return request
        # An id of its own: the replica that failed may still hold the first one.
        request = replace(request, id=f"{request.id}~{num_tries}")
        if not count:
            return request
        seed = request.seed
        if not self._capabilities.has_positional_draws:
            # Draws that are counted from the first one would come a second time.
            seed = (seed * 6364136223846793005 + count) % 2**63
        has_routes = request.sampling.record_routes
        return replace(
            request,
            prompt_ids=np.concatenate([request.prompt_ids, *reply.ids]).astype(np.int32),
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - count),
            seed=seed,
            routes_from=len(request.prompt_ids) + count - 1 if has_routes else request.routes_from,
        )

    def _ending(self, reply: _Reply) -> tuple[FinishReason, int | None] | None:
        """How a reply ended whose last word was lost, if what came over is all of it."""
        request, count = reply.request, reply.num_tokens
        if not count:
            return None
        last = int(reply.ids[-1][-1])
        if last in request.sampling.stop_ids:
            return "stop", last
        room = self._capabilities.max_tokens - len(request.prompt_ids)
        return ("length", None) if count >= min(request.sampling.max_tokens, room) else None

    def _take(
        self, replica: _Replica, stream: _Stream, reply: _Reply, delta: Delta, base: int
    ) -> None:
        """Hands a delta to the readers, unless it was here before.

        Raises EngineDownError for one that does not follow on those before it.
        """
        count = len(delta.token_ids)
        if stream.is_done:
            self._drop("duplicated_deltas", count)
            return
        first = stream.num_tokens if delta.first is None else delta.first
        if count and first + count <= stream.num_tokens:
            self._drop("duplicated_deltas", count)
            return
        if count and first != stream.num_tokens:
            self._drop("misordered_deltas", count)
            raise EngineDownError(
                f"a delta of request {reply.request.id} begins at sampled token {first}; "
                f"{stream.num_tokens} came before it: one was lost, or came out of order"
            )
        self._check_version(replica, stream, delta.policy_version)
        last = reply.deltas[-1] if reply.deltas else None
        if last is not None and last.finish_reason is None and (
            last.policy_version != delta.policy_version
        ):  # fmt: skip
            # It went on in a replica with newer weights: a segment of its own.
            reply.deltas.append(
                Delta(
                    token_ids=np.empty(0, np.int32),
                    logprobs=np.empty(0, np.float32),
                    policy_version=last.policy_version,
                    finish_reason="weight_update",
                    fingerprint=last.fingerprint,
                    first=reply.num_tokens,
                )
            )
        stream.num_tokens += count
        if delta.first is not None and base:
            delta = replace(delta, first=base + delta.first)
        if delta.finish_reason == "abort" and not reply.is_aborted:
            raise EngineDownError(f"request {reply.request.id} was aborted, by nobody here")
        reply.deltas.append(delta)
        if count:
            reply.ids.append(delta.token_ids)
            reply.num_tokens += count
        if delta.finish_reason not in (None, "weight_update"):
            stream.is_done = reply.is_done = True
            if delta.finish_reason == "abort":
                self._replies.pop(reply.request.id, None)
        reply.notify()

    def _drop(self, name: str, num_tokens: int) -> None:
        self._counts[name] += 1
        self._counts["dropped_tokens"] += num_tokens

    def _check_version(self, replica: _Replica, stream: _Stream, version: int) -> None:
        if version not in stream.versions:
            self._counts["wrong_versions"] += 1
            known = ", ".join(map(str, sorted(stream.versions)))
            raise EngineDownError(
                f"it samples with weights that it calls version {version}; this run gave it "
                f"{known}. Another trainer on it, or a server that was started again?"
            )

    def _end(self, reply: _Reply, reason: FinishReason, stop: int | None = None) -> None:
        """Ends a reply of which nothing more will come."""
        sampled = [delta for delta in reply.deltas if len(delta.token_ids)]
        reply.deltas.append(
            Delta(
                token_ids=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                policy_version=sampled[-1].policy_version if sampled else self.version,
                finish_reason=reason,
                stop=stop,
                fingerprint=sampled[-1].fingerprint if sampled else "",
                first=reply.num_tokens,
            )
        )
        reply.is_done = True
        if reason == "abort":
            self._replies.pop(reply.request.id, None)
        reply.notify()

    def _fail(self, reply: _Reply, error: EngineError) -> None:
        self._counts["failed_requests"] += 1
        reply.error, reply.is_done = error, True
        self._replies.pop(reply.request.id, None)
        reply.notify()

    # -- who serves it ------------------------------------------------------------------------

    def _serving(self, replica: _Replica) -> _Serving:
        return _Serving(replica, self._config.reply_seconds)

    async def _choose(
        self, affinity: str, *, avoid: AbstractSet[_Replica], at_least: int | None = None
    ) -> _Replica:
        """A ready replica, waiting for one if none is ready and one may come back.

        avoid: those that have failed the request, as long as there are others. at_least: the
        version of what was sampled of it.
        """
        deadline = _now() + self._config.wait_seconds
        while True:
            self._check_open()
            oldest = -1 if at_least is None else at_least
            ready = [r for r in self._replicas if r.state == "ready" and r.version >= oldest]
            if ready:
                return self._pick([r for r in ready if r not in avoid] or ready, affinity)
            if not self._is_updating and (
                _now() >= deadline or not any(map(self._can_revive, self._replicas))
            ):
                raise EngineError(f"all replicas are gone. {self._last_words()}")
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await asyncio.wait([waiter], timeout=max(0.05, deadline - _now()))

    def _pick(self, ready: Sequence[_Replica], affinity: str) -> _Replica:
        """The replica that has the trajectory's prefix, unless it is much busier than the least
        busy one; that one otherwise, and among equals the one that has served least."""
        least = min(ready, key=lambda r: (len(r.streams), r.num_served))
        chosen, home = least, self._homes.get(affinity)
        if home is not None and home in ready:
            if len(home.streams) - len(least.streams) < self._config.spill_requests:
                chosen = home
            else:
                self._counts["spilled_requests"] += 1
        if affinity:
            self._homes[affinity] = chosen
            self._homes.move_to_end(affinity)
            if len(self._homes) > NUM_HOMES:
                self._homes.popitem(last=False)
        return chosen

    def _last_words(self) -> str:
        return " ".join(f"{r.name}: {r.last_words or 'ready'}." for r in self._replicas)

    # -- health -------------------------------------------------------------------------------

    def _hear(self, replica: _Replica) -> None:
        replica.heard_at = _now()

    async def _suspect(self, replica: _Replica, error: BaseException) -> None:
        """A request failed in it: it is out if it is gone, or does not answer another one."""
        if replica.state != "ready":  # it is known to be out, or what it is loading will tell
            return
        if isinstance(error, TimeoutError):  # an OSError too
            self._counts["lost_replies"] += 1
        elif isinstance(error, _GONE):
            self._lose(replica, _text(error))
            return
        if self._may_probe and not await self._probe(replica):
            self._lose(replica, f"{_text(error)}; after that, not one token", is_frozen=True)

    @property
    def _may_probe(self) -> bool:
        """An engine that is paused or asleep samples nothing, and is well."""
        return not self._is_paused and not self._is_asleep

    async def _probe(self, replica: _Replica) -> bool:
        """Whether it samples a token. Who asks meanwhile gets the same answer."""
        if replica.probe is None or replica.probe.done():
            replica.probe = asyncio.create_task(self._answers(replica))
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
                    self._hear(replica)
        except _FAILURES:
            return False
        return True

    def _lose(self, replica: _Replica, reason: str, *, is_frozen: bool = False) -> None:
        """Takes a replica out; the requests in it go elsewhere."""
        if self._is_closed:
            return
        first, longest = self._config.retry_seconds
        wait = min(longest, first * 2.0 ** min(replica.num_failures, 30))
        replica.num_failures += 1
        replica.retry_at = _now() + wait
        replica.last_words = reason
        if replica.state == "out":
            return
        replica.state, replica.is_frozen = "out", is_frozen
        self._counts["lost_replicas"] += 1
        self._counts["frozen_replicas"] += is_frozen
        left = sum(r.state != "out" for r in self._replicas)
        self._on_event(f"{replica.name} is out: {reason}. Replicas left: {left}.")
        for stream in replica.streams:
            stream.hurry(_now())
        wake(self._waiters)  # to see that nobody is left
        self._watch()

    def _watch(self) -> None:
        """Starts the task that looks after the replicas, unless it runs."""
        loop = asyncio.get_running_loop()
        watcher = self._watcher
        if watcher is None or watcher.done() or watcher.get_loop() is not loop:
            self._watcher = loop.create_task(self._look_after())

    async def _look_after(self) -> None:
        config = self._config
        tick = min(config.check_seconds, config.frozen_seconds / 8, config.retry_seconds[0])
        checked_at = _now()
        while not self._is_closed:
            began = _now()
            await asyncio.sleep(tick)
            now = _now()
            # The loop itself may have stood still, as while a trainer in this process trains: what
            # could not be heard meanwhile says nothing of the replicas.
            for replica in self._replicas:
                replica.heard_at += max(0.0, now - began - tick)
            if not self._may_probe:
                for replica in self._replicas:
                    self._hear(replica)
                continue
            for replica in self._replicas:
                if replica.state == "ready":
                    self._check_frozen(replica, now)
                elif (
                    replica.state == "out" and now >= replica.retry_at and self._can_revive(replica)
                ):
                    self._start_revival(replica)
            if now - checked_at >= config.check_seconds:
                checked_at = now
                await asyncio.gather(*(self._ping(r) for r in self._replicas))

    def _check_frozen(self, replica: _Replica, now: float) -> None:
        quiet = now - replica.heard_at
        limit = self._config.frozen_seconds
        if not replica.streams or quiet < limit / 2:
            return
        if quiet >= limit:
            self._lose(
                replica,
                f"frozen: {len(replica.streams)} requests in it, and nothing came for {limit:g} s",
                is_frozen=True,
            )
        elif replica.probe is None or replica.probe.done():
            replica.probe = asyncio.create_task(self._answers(replica))

    async def _ping(self, replica: _Replica) -> None:
        if replica.state != "ready" or not isinstance(replica.engine, Pinged):
            return
        try:
            async with asyncio.timeout(self._config.frozen_seconds / 2):
                await replica.engine.ping()
        except _FAILURES as error:
            self._lose(replica, f"it does not answer: {_text(error)}")

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """`call` of every replica that is not out; one that fails is out."""

        async def one(replica: _Replica) -> None:
            try:
                async with asyncio.timeout(self._config.load_seconds):
                    await call(replica.engine)
            except _OF_THE_REQUEST:
                raise
            except _FAILURES as error:
                self._lose(replica, _text(error))

        self._check_open()
        await asyncio.gather(*(one(r) for r in self._replicas if r.state != "out"))
        if all(r.state == "out" for r in self._replicas):
            raise EngineError(f"all replicas are gone. {self._last_words()}")

    # -- weights ------------------------------------------------------------------------------

    def _can_revive(self, replica: _Replica) -> bool:
        """Whether it can load the newest weights at any time. Tensors of the trainer it cannot,
        unless it has them still: they may be changing, and it waits for the next update."""
        source, engine = self._source, replica.engine
        if source is None or isinstance(source, str):
            return True
        return isinstance(engine, Remembering) and engine.remembers(source, version=self._version)

    async def _load(self, replica: _Replica) -> bool:
        """Gives a replica the newest weights; it is ready afterwards, or out."""
        source, version = self._source, self._version
        was_out = replica.state == "out"
        if not was_out:
            replica.state = "loading"
            await self._drain(replica)
        replica.incoming = version
        for stream in replica.streams:
            stream.versions.add(version)
        try:
            async with asyncio.timeout(self._config.load_seconds):
                await self._hand_over(replica.engine, source, version)
            if replica.engine.version != version:
                raise EngineDownError(
                    f"it was given version {version} and runs {replica.engine.version}"
                )
        except _OF_THE_REQUEST:
            replica.state = "out" if was_out else "ready"
            raise
        except _FAILURES as error:
            self._lose(replica, f"weights of version {version}: {_text(error)}")
            return False
        finally:
            replica.incoming = None
        replica.version = version
        self._hear(replica)
        if not was_out and replica.state == "loading":
            replica.state = "ready"
            wake(self._waiters)
        return replica.state != "out" or was_out

    async def _hand_over(
        self, engine: Engine, source: Mapping[str, Any] | str | None, version: int
    ) -> None:
        await engine.load_weights(source, version=version)

    async def _drain(self, replica: _Replica) -> None:
        deadline = _now() + self._config.drain_seconds
        while replica.streams and _now() < deadline:
            await asyncio.sleep(min(0.02, self._config.drain_seconds))

    def _start_revival(self, replica: _Replica) -> asyncio.Task[None]:
        if replica.revival is None or replica.revival.done():
            replica.revival = asyncio.create_task(self._revive(replica))
        return replica.revival

    async def _revive(self, replica: _Replica) -> None:
        """Brings back a replica that is out, once it has the newest weights and has answered."""
        engine = replica.engine
        if isinstance(engine, Pinged) and not isinstance(engine, Restartable):
            # One that can be started anew is, by the load.
            try:
                async with asyncio.timeout(self._config.frozen_seconds / 2):
                    await engine.ping()
            except _FAILURES as error:
                self._lose(replica, f"it does not answer: {_text(error)}")
                return
        elif replica.is_frozen and self._may_probe and not await self._probe(replica):
            self._lose(replica, "frozen: not one token", is_frozen=True)
            return
        version = self._version
        if not await self._load(replica):
            return
        if self._may_probe and not await self._probe(replica):
            self._lose(replica, "it took the weights, and gives not one token")
            return
        if self._is_paused:
            await replica.engine.pause()
        if self._is_asleep:
            await replica.engine.sleep()
        if version != self._version:  # the next ones came meanwhile
            return
        replica.state, replica.num_failures, replica.last_words = "ready", 0, ""
        self._counts["returned_replicas"] += 1
        self._on_event(f"{replica.name} is back, with version {version}.")
        wake(self._waiters)


class RestartablePool(Pool):
    """A pool of engines that can be started anew: `Restartable` as they are."""

    _is_restarting = False
    """Whether the newest weights came by a restart; a replica that was out gets them so too."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        self._is_restarting = False
        await self._update(source, version)

    async def restart(self, directory: str, *, version: int) -> None:
        """Every replica is started from `directory`, together or one after the other."""
        self._is_restarting = True
        await self._update(directory, version)

    async def _hand_over(
        self, engine: Engine, source: Mapping[str, Any] | str | None, version: int
    ) -> None:
        if self._is_restarting and isinstance(engine, Restartable) and isinstance(source, str):
            await engine.restart(source, version=version)
        else:
            await super()._hand_over(engine, source, version)


class _Serving:
    """A request's time in a replica: counted there, and ended when the replica is lost."""

    def __init__(self, replica: _Replica, seconds: float) -> None:
        self._replica = replica
        self._stream = _Stream(asyncio.timeout(seconds), replica.versions)

    async def __aenter__(self) -> _Stream:
        replica = self._replica
        if not replica.streams:
            replica.heard_at = _now()
        await self._stream.clock.__aenter__()
        replica.streams.add(self._stream)
        replica.num_served += 1
        return self._stream

    async def __aexit__(self, *raised: Any) -> bool:
        self._replica.streams.discard(self._stream)
        try:
            await self._stream.clock.__aexit__(*raised)
        except TimeoutError as error:
            if self._stream.is_done:
                return True  # the last delta was here; only the end of the iterator was not
            why = self._replica.last_words if self._replica.state == "out" else ""
            raise TimeoutError(why or "no sign of it, while others were served") from error
        return False


def _common(found: Sequence[Capabilities], names: Sequence[str]) -> Capabilities:
    """What all of them can do. Raises ConfigError if they do not sample the same model alike."""
    if not found:
        raise ConfigError("a pool needs at least one engine.")
    first = found[0]
    for name, other in zip(names, found, strict=True):
        for what in ("name", "vocab_size", "fingerprint", "has_positional_draws"):
            if getattr(other, what) != getattr(first, what):
                raise ConfigError(
                    f"the replicas of a pool must be one engine over one model: {what} is "
                    f"{getattr(first, what)!r} in {names[0]} and {getattr(other, what)!r} in "
                    f"{name}. Start both alike, or leave one out."
                )
    sources: list[WeightSource] = [
        source for source in first.weight_sources if all(source in f.weight_sources for f in found)
    ]
    if not sources and any(f.weight_sources for f in found):
        listed = "; ".join(
            f"{name}: {', '.join(f.weight_sources) or 'none'}"
            for name, f in zip(names, found, strict=True)
        )
        raise ConfigError(f"the replicas of a pool take weights in no common form. {listed}.")
    claims = {
        name: all(getattr(f, name) for f in found)
        for name in Capabilities.__dataclass_fields__
        if name.startswith("has_")
    }
    return replace(
        first,
        name=first.name if len(found) == 1 else f"{first.name} x{len(found)}",
        max_tokens=min(f.max_tokens for f in found),
        distributions=tuple(
            d for d in first.distributions if all(d in f.distributions for f in found)
        ),
        weight_sources=tuple(sources),
        **claims,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _text(error: BaseException) -> str:
    text = str(error).rstrip(".")
    return text if isinstance(error, EngineError) and text else f"{type(error).__name__}: {text}"


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Waits for the end of all of them; then raises what the first that failed has raised."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    """Ends a task and waits for its end, unless it is the one that asks."""
    if task is None or task.done() or task is asyncio.current_task():
        return
    task.cancel()
    await asyncio.wait([task], timeout=CANCEL_SECONDS)
