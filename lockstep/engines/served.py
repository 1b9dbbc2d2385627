"""What all engines behind a server have in common, so that an adapter is its wire format alone.

A `Wire` sends one call and says what came back. `ServedEngine` makes an `Engine` of it: ids that
are answered once, everything that a server might get wrong held against what was asked, and weights
that change between two calls and never within one.

Weights change like this. The gate closes: requests that come wait on this side. Every running call
is ended by the server and answers with the tokens that it has; what it had is a segment of the old
version. The weights are loaded. The gate opens, and each request goes on as a new call, whose
prompt is all that it had so far, under the new version. So no token's version is a guess, whatever
the server reports, and keys and values of older weights are never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from lockstep.engines.base import Capabilities, Scores
from lockstep.engines.lease import FREE, Labelled, Lease
from lockstep.engines.ledger import Replies, Reply, answer, checked_ids
from lockstep.errors import (
    CapabilityError,
    EngineDownError,
    EngineError,
    LeaseError,
    ServerUnreachableError,
)
from lockstep.types import (
    MAX_LOGPROB,
    Delta,
    Distribution,
    FinishReason,
    Float32Array,
    Int32Array,
    Ragged,
    Request,
    Routes,
    SamplingParams,
)

SETTLE_SECONDS = 1.0
"""How long calls that the server was told to end may go without one of them ending, until their
connections are closed. Ends come within a step; a call that reached a paused server after the pause
is held there and never ends by itself."""

NUM_RETRIES = 2
"""Times that a call is made again after its connection was lost. A server closes connections that
were idle, and the next request on one of them finds out."""

RETRY_SECONDS = 0.2
"""Before a call is made again: a server that restarts refuses connections in the meantime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a server sent back for one call: the tokens since the chunk before."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of `token_ids`, under one of the distributions that the request may be answered with
    (`equal_distributions`)."""
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """On the last chunk of a call, and only there. abort: the server was told to end the call."""
    stop: int | str | None = None
    """What the server says that it stopped at; None where it does not say."""
    prompt_ids: Sequence[int] | None = None
    """The server's echo of the prompt, if it sends one; compared with what was sent."""
    num_cached_tokens: int = 0
    """Of the prompt: keys and values that were found. Counts once per call, on any chunk."""
    routed_experts: Routes | None = None
    """[T, layers, active] of the positions from `Request.routes_from` to the last token, which is
    not among them; whole, on the last chunk of a call that asked."""
    support: Sequence[Sequence[int]] | None = None
    """For each of `token_ids`, the ids that it was drawn from; empty is the whole vocabulary."""
    labels: Sequence[str] = ()
    """Of the weights that sampled it, by a server that keeps labels (`lease.Labelled`) and says so
    with its answers: on the last chunk of a call, or on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireScores:
    """What a server thinks of given ids."""

    logprobs: Sequence[float]
    """Of `token_ids[first:]`."""
    prompt_ids: Sequence[int] | None = None
    """As of `Chunk`."""
    num_cached_tokens: int = 0
    labels: Sequence[str] = ()
    """As of `Chunk`."""


class Wire(Protocol):
    """One server, in its own words. Raises the errors of `engines/http.py`, and EngineError for an
    answer that cannot be read; holds nothing against the request: `ServedEngine` does."""

    @property
    def capabilities(self) -> Capabilities:
        """Of the server, as found at its start."""
        ...

    @property
    def ends_calls(self) -> bool:
        """`abort` and `pause` make running calls answer with finish_reason "abort" and the tokens
        they have. If not, closing their connection ends them, and calls should stream, so that the
        tokens so far are here."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """One call. `request.id` is unique among all calls, its sampling is what the call is to do
        (max_tokens is what is left), and `stream` asks for chunks as they come."""
        ...

    async def score(
        self,
        call_id: str,
        token_ids: Int32Array,
        *,
        first: int,
        distribution: Distribution,
        temperature: float,
        priority: int,
    ) -> WireScores:
        """The log-probs of `token_ids[first:]`; first is at least 1, and below their number."""
        ...

    async def abort(self, call_id: str) -> None:
        """Ends one call; an unknown one is ignored."""
        ...

    async def pause(self) -> None:
        """Ends all calls of this client, and returns when the server takes no step for them."""
        ...

    async def resume(self, *, drop_cache: bool) -> None:
        """The server goes on; drop_cache: no prefix is known to it any more."""
        ...

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """The server is paused and runs the new weights from here on. An error leaves it unknown
        what it runs: the engine then answers nothing until a load succeeds."""
        ...

    async def ping(self) -> None:
        """Raises EngineDownError if the server does not answer."""
        ...

    async def sleep(self) -> None:
        """The server is paused, and frees the memory of keys and values."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class ServedStats:
    """Counters since the start or the last `reset`."""

    requests: int = 0
    calls: int = 0
    """To sample; more than requests where weights changed, connections broke or pauses came."""
    retries: int = 0
    """Calls made again because the connection was lost."""
    cut_calls: int = 0
    """Calls whose connection was closed because the server did not end them when told."""
    own_stops: int = 0
    """Calls that the server ended at a stop id of its own, and that were gone on with."""
    failed_requests: int = 0
    sampled_tokens: int = 0
    dropped_tokens: int = 0
    """Of those: sampled in calls that were aborted, without the routes that were asked for."""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    scored_tokens: int = 0
    call_seconds: float = 0.0
    """Summed over calls, from sending to the last token."""
    paused_seconds: float = 0.0
    """That the gate was closed."""

    def reset(self) -> None:
        """Every counter to 0."""
        for entry in fields(self):
            setattr(self, entry.name, entry.default)


def equal_distributions(sampling: SamplingParams) -> frozenset[Distribution]:
    """The distributions whose log-probs are those of `sampling.distribution`, by its numbers: all
    of them where nothing is tempered and nothing is cut, and for greedy requests, of which every
    engine records the model's.

    >>> sorted(equal_distributions(SamplingParams(max_tokens=1, temperature=0.7)))
    ['sampled', 'tempered']
    >>> sorted(equal_distributions(SamplingParams(max_tokens=1, top_p=0.9)))
    ['model', 'tempered']

    A greedy request records the model's log-probs; no server knows another distribution for it.
    """
    if sampling.temperature == 0:
        return frozenset({"model", "tempered", "sampled"})
    equal: set[Distribution] = {sampling.distribution}
    is_plain, is_whole = sampling.temperature == 1, not sampling.is_truncated
    if is_whole and equal & {"tempered", "sampled"}:
        equal |= {"tempered", "sampled"}
    if is_plain and equal & {"tempered", "model"}:
        equal |= {"tempered", "model"}
    if is_plain and is_whole:
        equal |= {"model", "tempered", "sampled"}
    return frozenset(equal)


@dataclass(slots=True, eq=False, kw_only=True)
class _Reply(Reply):
    limit: int
    """Tokens to sample: what was asked for, or what the engine has room for."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[Sequence[int]] | None = None
    routes: list[Routes] = field(default_factory=list)
    """Of calls that have ended, not handed over yet."""
    num_routed: int = 0
    """Position up to which routes have come."""
    num_sent: int = 0
    segment_start: int = 0
    num_cached: int = 0
    has_sent: bool = False
    version: int = 0
    """Of the weights that sample the running call."""
    is_aborted: bool = False
    """Somebody wants it ended: it is not taken up again."""
    driver: asyncio.Task[None] | None = None
    call: asyncio.Task[None] | None = None
    """The running call; None between two."""
    call_id: str = ""


class ServedEngine:
    """`Engine` over a `Wire`."""

    def __init__(self, wire: Wire, *, version: int = 0, lease: Lease | None = None) -> None:
        """lease: the run's claim to the server; kept where the wire can (`lease.Labelled`)."""
        self._wire, self._version = wire, version
        self._fingerprint = ""
        """Of the numerics that a comparison has found its log-probs to be those of."""
        self._labels = wire if isinstance(wire, Labelled) and lease is not None else None
        self._lease, self._is_held = lease, False
        self._violation: LeaseError | None = None
        self._is_labelled = False
        """Whether answers since the last load carried their label: each was checked then."""
        self.stats = ServedStats()
        self._reported: Counter[str] = Counter()
        self._replies: Replies[_Reply] = Replies()
        self._running: dict[str, _Reply] = {}
        self._scores: set[asyncio.Task[WireScores]] = set()
        self._waiters: list[asyncio.Future[None]] = []
        """Of requests before the closed gate."""
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_paused = self._is_asleep = self._is_closed = False
        self._is_cache_old = False
        self._closed_at = 0.0
        self._broken = ""
        """Why it is not known which weights the server runs."""
        self._name = secrets.token_hex(4)  # calls of two runs on one server must not share ids
        self._num_calls = itertools.count()

    # -- the protocol -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        found = self._wire.capabilities
        return replace(found, fingerprint=self._fingerprint) if self._fingerprint else found

    def vouch(self, fingerprint: str) -> None:
        """See `Vouchable`."""
        self._fingerprint = fingerprint

    @property
    def version(self) -> int:
        return self._version

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        return answer(partial(self._submit, request), self._cut)

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
        """As the protocol says. A pause ends it, and it is asked for again afterwards."""
        self._check_open()
        found = self.capabilities
        if not found.has_score:
            raise CapabilityError(f"score: engine {found.name} cannot score given ids.")
        if distribution == "sampled" or (
            temperature != 1 and distribution not in found.scored_distributions
        ):
            raise CapabilityError(
                f"score: engine {found.name} scores under {', '.join(found.scored_distributions)}, "
                f"and not under {distribution!r} at temperature={temperature:g}."
            )
        if self._is_asleep:
            raise EngineError("score: the engine is asleep; call wake() first.")
        if temperature <= 0:
            raise EngineError(f"score: temperature={temperature} must be above 0.")
        if first < 1:
            raise EngineError(f"score: first={first} must be at least 1: nothing predicts id 0.")
        ids = self._checked_ids("score", np.asarray(token_ids))
        if len(ids) > found.max_tokens:
            raise EngineError(
                f"score: the text has {len(ids)} tokens; engine {found.name} takes "
                f"{found.max_tokens}."
            )
        values = np.full(len(ids), np.nan, np.float32)
        if len(ids) <= first:
            return Scores(logprobs=values, policy_version=self._version)
        if distribution not in found.scored_distributions:
            distribution = found.scored_distributions[0]  # at temperature 1 they are one
        scores, version = await self._score(
            ids,
            first=first,
            distribution=distribution,
            temperature=temperature if distribution == "tempered" else 1.0,
            priority=priority,
        )
        if scores.prompt_ids is not None:
            self._check_echo("score", ids, scores.prompt_ids)
        if len(scores.logprobs) != len(ids) - first:
            raise EngineError(
                f"score: engine {found.name} answered {len(scores.logprobs)} log-probs for the "
                f"{len(ids) - first} ids from index {first} on."
            )
        values[first:] = scores.logprobs
        self._check_logprobs("score", ids[first:], values[first:], "id", first)
        num_prefilled = max(0, len(ids) - scores.num_cached_tokens)
        self.stats.scored_tokens += num_prefilled
        return Scores(
            logprobs=values,
            policy_version=version,
            num_cached_tokens=scores.num_cached_tokens,
            num_prefilled_tokens=num_prefilled,
            fingerprint=found.fingerprint,
        )

    async def abort(self, request_id: str) -> None:
        reply = self._running.get(request_id)
        if reply is None:
            return
        reply.is_aborted = True
        if reply.call is None:  # it waits before the gate, or between two calls
            self._cut(reply)
            return
        try:
            if self._wire.ends_calls:
                await self._wire.abort(reply.call_id)
                await self._settle([reply])
        finally:
            if not reply.is_done:
                self.stats.cut_calls += self._wire.ends_calls
                self._cut(reply)

    async def pause(self) -> None:
        async with self._lock:
            self._check_open()
            await self._close_gate()
            self._is_paused = True

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        """Requests go on as new calls: with "keep" they find what they had in the server's prefix
        cache, if it has one, unless the weights have changed since."""
        async with self._lock:
            self._check_open()
            if self._is_paused:
                self._is_paused = False
                self._is_cache_old |= kv == "drop"
                await self._open_gate()

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        async with self._lock:
            self._check_open()
            self._check_source(source)
            await self._claim()
            await self._close_gate()
            for reply in self._running.values():
                self._end_segment(reply)
            try:
                await self._wire.load_weights(source, version=version)
                if self._labels is not None and self._lease is not None:
                    await self._labels.write_label(self._lease.label(version))
                    self._is_held, self._is_labelled = True, False
            except BaseException as error:
                self._broken = (
                    f"loading the weights of version {version} failed: "
                    f"{type(error).__name__}: {error}"
                )
                self._fail_all(self._broken_error())
                raise
            self._broken = ""
            self._version, self._is_cache_old = version, True
            await self._open_gate()

    async def _claim(self) -> None:
        """Nobody else's weights are replaced without being told to."""
        if self._labels is None or self._lease is None:
            return
        found = await self._labels.read_label()
        if not self._is_held:
            self._lease.check_free(found)
            return
        with contextlib.suppress(EngineDownError):  # a server that began again gets its weights
            self._lease.check_held(found, self._version)

    async def check_lease(self) -> None:
        """Raises LeaseError if somebody else has loaded weights since, or the server was started
        again and did not say so with its answers."""
        if self._violation is not None:
            raise self._violation
        if self._labels is None or self._lease is None or not self._is_held:
            return
        try:
            self._lease.check_held(await self._labels.read_label(), self._version)
        except LeaseError as error:
            self._violation = error
            raise
        except ServerUnreachableError:
            raise
        except EngineDownError as error:
            if self._is_labelled:
                raise
            raise LeaseError(
                f"{error}. What it has sampled since is of unknown weights."
            ) from error

    def _check_labels(self, labels: Sequence[str], version: int) -> None:
        """Of an answer by the weights of `version`."""
        if self._lease is None or not self._is_held:
            return
        for label in labels:
            self._is_labelled = True
            try:
                self._lease.check_held(label, version)
            except LeaseError as error:
                self._violation = error
                raise

    def take_metrics(self) -> dict[str, float]:
        """Requests that failed, and calls that were made again."""
        now = Counter(failed_requests=self.stats.failed_requests, retries=self.stats.retries)
        found = {name: float(count - self._reported[name]) for name, count in now.items()}
        self._reported = now
        return found

    async def ping(self) -> None:
        self._check_open()
        await self._wire.ping()

    async def sleep(self) -> None:
        """Requests in flight keep their place and go on after `wake`; those that arrive in between
        are refused."""
        async with self._lock:
            self._check_open()
            if not self.capabilities.has_sleep:
                raise CapabilityError(
                    f"sleep: engine {self.capabilities.name} cannot give its memory back. Give the "
                    "trainer a device of its own."
                )
            if not self._is_asleep:
                await self._close_gate()
                await self._wire.sleep()
                self._is_asleep = self._is_cache_old = True

    async def wake(self) -> None:
        async with self._lock:
            self._check_open()
            if self._is_asleep:
                await self._wire.wake()
                self._is_asleep = False
                await self._open_gate()

    async def close(self) -> None:
        """Requests in flight fail; the server goes on running."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(EngineError("the engine was closed while the request was in flight."))
        for call in list(self._scores):
            call.cancel()
        if self._labels is not None and self._is_held and self._violation is None:
            with contextlib.suppress(EngineError):  # it may be gone, and holds no claim then
                await self._labels.write_label(FREE)
        await self._wire.close()

    # -- arrival ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def _broken_error(self) -> EngineError:
        return EngineError(
            f"engine {self.capabilities.name}: {self._broken}. Which weights its server "
            "runs is not known: load them again, or start it anew."
        )

    @property
    def _lock(self) -> asyncio.Lock:
        """Held while the state of the server changes: pauses, loads and sleeps follow each other.
        Of this event loop: a lock that was waited for serves no other."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def _check_source(self, source: Mapping[str, Any] | str | None) -> None:
        """Which forms a mapping or a directory stand for is the wire's to tell apart."""
        allowed = self.capabilities.weight_sources
        forms = ("shared",) if source is None else ("tensors",)
        if isinstance(source, str):
            forms = ("directory", "adapter")
        if not set(forms) & set(allowed):
            raise CapabilityError(
                f"load_weights: engine {self.capabilities.name} takes "
                f"{' or '.join(allowed) or 'no new weights at all'}; found {' or '.join(forms)}."
            )

    def _checked_ids(self, where: str, ids: np.ndarray) -> Int32Array:
        return checked_ids(ids, vocab_size=self.capabilities.vocab_size, where=where)

    def _submit(self, request: Request) -> _Reply:
        self._check_open()
        if (known := self._replies.known(request)) is not None:
            return known
        where = f"request {request.id}"
        if self._is_asleep:
            raise EngineError(f"{where}: the engine is asleep; call wake() first.")
        if self._broken:
            raise self._broken_error()
        ids = self._checked_ids(where, np.asarray(request.prompt_ids))
        if not len(ids):
            raise EngineError(f"{where}: the prompt is empty; at least one id is needed.")
        found = self.capabilities
        if len(ids) >= found.max_tokens:
            raise EngineError(
                f"{where}: the prompt has {len(ids)} tokens; engine {found.name} takes "
                f"{found.max_tokens} tokens of prompt and reply."
            )
        self._check_abilities(where, request)
        limit = min(request.sampling.max_tokens, found.max_tokens - len(ids))
        reply = _Reply(request=request, limit=limit, num_routed=request.routes_from)
        if request.sampling.record_support and request.sampling.is_truncated:
            reply.support = []
        self._replies.add(reply)
        self._running[request.id] = reply
        self.stats.requests += 1
        reply.driver = asyncio.get_running_loop().create_task(self._drive(reply))
        return reply

    def _check_abilities(self, where: str, request: Request) -> None:
        found, sampling = self.capabilities, request.sampling
        for holds, text in (
            (
                bool(equal_distributions(sampling) & set(found.distributions)),
                f"records log-probs of {', '.join(found.distributions)}, and not of the "
                f"distribution {sampling.distribution!r} at temperature={sampling.temperature:g}, "
                f"top_p={sampling.top_p:g}, top_k={sampling.top_k}",
            ),
            (not sampling.stop_strings or found.has_stop_strings, "has no stop strings"),
            (not request.adapter or found.has_adapters, f"has no adapter {request.adapter!r}"),
            (
                not (sampling.record_support and sampling.is_truncated) or found.has_support,
                "does not hand back what top_p and top_k kept (record_support)",
            ),
            (
                not sampling.record_routes or found.has_routed_experts,
                "does not hand back routed experts (record_routes)",
            ),
        ):
            if not holds:
                raise CapabilityError(f"{where}: engine {found.name} {text}.")
        if sampling.record_routes and not 0 <= request.routes_from <= len(request.prompt_ids):
            raise EngineError(
                f"{where}: routes_from={request.routes_from} lies outside of its "
                f"{len(request.prompt_ids)} prompt ids."
            )

    # -- calls --------------------------------------------------------------------------------

    async def _pass_gate(self) -> None:
        while self._is_shut and not self._is_closed:
            if self._broken:
                raise self._broken_error()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._check_open()

    async def _drive(self, reply: _Reply) -> None:
        """One request, from call to call, until it has ended."""
        num_retries = 0
        try:
            while not reply.is_done:
                await self._pass_gate()
                reply.version = self._version
                reply.call_id = f"{reply.request.id}~{self._name}-{next(self._num_calls)}"
                num_before = len(reply.token_ids)
                started = time.perf_counter()
                self.stats.calls += 1
                reply.call = asyncio.get_running_loop().create_task(self._call(reply))
                await asyncio.wait({reply.call})
                call, reply.call = reply.call, None
                self.stats.call_seconds += time.perf_counter() - started
                if reply.is_done:
                    continue
                error = None if call.cancelled() else call.exception()
                is_lost = isinstance(error, ServerUnreachableError)
                if (is_lost or call.cancelled()) and self._end_if_complete(reply):
                    continue
                if is_lost and num_retries < NUM_RETRIES:
                    # What came stays, and the rest is asked for: nothing is sampled twice.
                    num_retries = 1 if len(reply.token_ids) > num_before else num_retries + 1
                    self.stats.retries += 1
                    await asyncio.sleep(RETRY_SECONDS)
                elif error is not None:
                    raise error
        except asyncio.CancelledError:
            raise
        except EngineError as error:
            self._fail(reply, error)
        except Exception as error:
            # What no one foresaw fails this request alone, with its cause; its readers must not
            # wait for ever.
            failure = EngineError(
                f"request {reply.request.id}: the answer of engine {self.capabilities.name} could "
                f"not be read: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(reply, failure)

    def _seed_after(self, seed: int, num_sampled: int) -> int:
        """In [0, 2^31), which every server takes. Of what is left of a reply: another one than of
        its beginning, whose draws would come again where the server counts them from the start."""
        if self.capabilities.has_positional_draws:
            num_sampled = 0
        text = f"{seed}/{num_sampled}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1

    def _end_if_complete(self, reply: _Reply) -> bool:
        """A call that broke off after its last token has nothing left to ask for."""
        ids = reply.token_ids
        if ids and ids[-1] in reply.request.sampling.stop_ids:
            self._end(reply, "stop", ids[-1])
        elif len(ids) == reply.limit:
            self._end(reply, "length")
        return reply.is_done

    async def _call(self, reply: _Reply) -> None:
        """One call to the server: what is left of the request."""
        request, num_before = reply.request, len(reply.token_ids)
        prompt_ids = np.asarray(request.prompt_ids, np.int32)
        if num_before:
            prompt_ids = np.concatenate([prompt_ids, np.array(reply.token_ids, np.int32)])
        call = replace(
            request,
            id=reply.call_id,
            prompt_ids=prompt_ids,
            sampling=replace(request.sampling, max_tokens=reply.limit - num_before),
            seed=self._seed_after(request.seed, num_before),
            # Routes come with the end of a call: tokens that came before it would be without.
            stream=request.stream and not request.sampling.record_routes,
            routes_from=reply.num_routed,
        )
        where = f"request {request.id}"
        num_cached, has_ended = 0, False
        async for chunk in self._wire.generate(call):
            if has_ended:
                raise EngineError(
                    f"{where}: engine {self.capabilities.name} sent more after the end of the "
                    "reply."
                )
            num_cached = max(num_cached, chunk.num_cached_tokens)
            if chunk.prompt_ids is not None:
                self._check_echo(where, prompt_ids, chunk.prompt_ids)
            self._check_labels(chunk.labels, reply.version)
            self._take(where, reply, chunk)
            has_ended = chunk.finish_reason is not None
            if has_ended or not reply.has_sent:
                self._count_prompt(reply, len(prompt_ids), num_cached, is_counted=has_ended)
            if has_ended:
                self._end_call(where, reply, chunk, len(reply.token_ids) - num_before)
            elif request.stream and not request.sampling.record_routes:
                self._send_single(reply)
        if not has_ended:
            raise EngineError(
                f"{where}: engine {self.capabilities.name} ended its answer without a reason."
            )

    def _count_prompt(
        self, reply: _Reply, num_prompt: int, num_cached: int, *, is_counted: bool
    ) -> None:
        if not reply.has_sent:
            reply.num_cached = min(num_cached, len(reply.request.prompt_ids))
        if is_counted:
            self.stats.cached_tokens += num_cached
            self.stats.prefilled_tokens += num_prompt - num_cached

    def _take(self, where: str, reply: _Reply, chunk: Chunk) -> None:
        """Adds the tokens of a chunk, if they can be."""
        name, at = self.capabilities.name, len(reply.token_ids)
        ids = self._checked_ids(f"{where}: the reply of engine {name}", np.array(chunk.token_ids))
        if len(chunk.logprobs) != len(ids):
            raise EngineError(
                f"{where}: engine {name} sent {len(ids)} ids and {len(chunk.logprobs)} log-probs."
            )
        values = np.asarray(chunk.logprobs, np.float32)
        self._check_logprobs(where, ids, values, "sampled token", at)
        if at + len(ids) > reply.limit:
            raise EngineError(
                f"{where}: engine {name} sampled {at + len(ids)} tokens of {reply.limit}."
            )
        stop_ids = reply.request.sampling.stop_ids
        path = [*reply.token_ids[-1:], *ids.tolist()]
        for index, token_id in enumerate(path[:-1], start=at - len(reply.token_ids[-1:])):
            if token_id in stop_ids:
                raise EngineError(
                    f"{where}: engine {name} went on after the stop id {token_id} (token {index}): "
                    "it does not honour stop ids."
                )
        if reply.support is not None:
            if chunk.support is None or len(chunk.support) != len(ids):
                found = "none" if chunk.support is None else len(chunk.support)
                raise EngineError(
                    f"{where}: engine {name} sent the support of {found} of {len(ids)} tokens."
                )
            reply.support += chunk.support
        reply.token_ids += ids.tolist()
        reply.logprobs += values.tolist()
        self.stats.sampled_tokens += len(ids)

    def _end_call(self, where: str, reply: _Reply, chunk: Chunk, num_sampled: int) -> None:
        name, ids = self.capabilities.name, reply.token_ids
        if reply.request.sampling.record_routes:
            if chunk.finish_reason == "abort" and chunk.routed_experts is None:
                self._drop_last(reply, num_sampled)  # without their routes they are of no use
            self._take_routes(where, reply, chunk.routed_experts)
        stop_ids = reply.request.sampling.stop_ids
        has_stopped = bool(ids) and ids[-1] in stop_ids
        if chunk.finish_reason == "abort" and not has_stopped and len(ids) < reply.limit:
            if reply.is_aborted:
                self._end(reply, "abort")
            elif not self._is_shut:
                raise EngineError(
                    f"{where}: engine {name} aborted it, and was not asked to: its server was "
                    "paused or ended by somebody else?"
                )
            return
        if has_stopped:
            self._end(reply, "stop", ids[-1])
        elif (
            chunk.finish_reason == "stop"
            and isinstance(chunk.stop, str)
            and (chunk.stop in reply.request.sampling.stop_strings)
        ):
            self._end(reply, "stop", chunk.stop)
        elif len(ids) == reply.limit:
            self._end(reply, "length")
        elif chunk.finish_reason == "stop" and num_sampled and chunk.stop == ids[-1]:
            # An end of the server's own, which the request did not ask for: the token is the
            # model's, it is here, and the reply goes on after it as another call.
            self.stats.own_stops += 1
        elif chunk.finish_reason == "length":
            raise EngineError(
                f"{where}: engine {name} ended after {len(ids)} of {reply.limit} tokens for want "
                f"of room, although it said that it takes {self.capabilities.max_tokens}."
            )
        else:
            found = "without saying where" if chunk.stop is None else f"at {chunk.stop!r}"
            last = f"ends in {ids[-1]}" if ids else "is empty"
            raise EngineError(
                f"{where}: engine {name} stopped {found}, and the reply {last}: the stop id is "
                "left out of the ids. It was chosen by the model and is trained, so it is not put "
                f"back by guess. Expected one of {list(stop_ids)} as the last id."
            )

    def _drop_last(self, reply: _Reply, num_sampled: int) -> None:
        """Forgets the tokens of a call: they are sampled again."""
        stop = len(reply.token_ids) - num_sampled
        del reply.token_ids[stop:], reply.logprobs[stop:]
        if reply.support is not None:
            del reply.support[stop:]
        self.stats.dropped_tokens += num_sampled

    def _take_routes(self, where: str, reply: _Reply, routes: Routes | None) -> None:
        stop = max(reply.num_routed, len(reply.request.prompt_ids) + len(reply.token_ids) - 1)
        num_wanted = stop - reply.num_routed
        if not reply.token_ids or (routes is None and not num_wanted):
            return  # nothing was read for a token
        if routes is None or len(routes) != num_wanted:
            found = "none" if routes is None else f"those of {len(routes)}"
            raise EngineError(
                f"{where}: engine {self.capabilities.name} sent {found}; expected the experts of "
                f"the {num_wanted} positions from {reply.num_routed} on."
            )
        reply.routes.append(routes)
        reply.num_routed = stop

    def _check_echo(self, where: str, sent: Int32Array, echo: Sequence[int]) -> None:
        """The server read what was sent. One that adds a first token of its own does not."""
        if np.array_equal(sent, echo):
            return
        name, shared = self.capabilities.name, min(len(sent), len(echo))
        differing = np.flatnonzero(np.asarray(sent[:shared]) != np.asarray(echo[:shared]))
        if not differing.size:
            raise EngineError(
                f"{where}: {len(sent)} prompt ids were sent, and engine {name} read {len(echo)}; "
                f"the first {shared} are the same. It cuts or pads prompts?"
            )
        at = int(differing[0])
        raise EngineError(
            f"{where}: engine {name} read another prompt than was sent: token {at} is "
            f"{int(echo[at])} and was sent as {int(sent[at])}. It adds tokens of its own, or "
            "encodes the prompt again?"
        )

    def _check_logprobs(
        self, where: str, ids: Int32Array, values: Float32Array, what: str, start: int
    ) -> None:
        bad = np.flatnonzero(~np.isfinite(values) | (values > MAX_LOGPROB))
        if bad.size:
            at = int(bad[0])
            raise EngineError(
                f"{where}: {what} {start + at} (id {int(ids[at])}) has the log-prob {values[at]:g} "
                f"from engine {self.capabilities.name} (version {self._version}); expected a "
                f"finite number <= {MAX_LOGPROB:g}. Diverged or half-loaded weights?"
            )

    async def _score(self, ids: Int32Array, **asked: Any) -> tuple[WireScores, int]:
        num_retries = 0
        while True:
            await self._pass_gate()
            version = self._version
            call_id = f"score~{self._name}-{next(self._num_calls)}"
            call = asyncio.ensure_future(self._wire.score(call_id, ids, **asked))
            self._scores.add(call)
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError:
                call.cancel()
                raise
            finally:
                self._scores.discard(call)
            if call.cancelled():
                continue  # by a pause; `_pass_gate` raises if it was the end
            error = call.exception()
            if isinstance(error, ServerUnreachableError) and num_retries < NUM_RETRIES:
                num_retries += 1
                self.stats.retries += 1
                await asyncio.sleep(RETRY_SECONDS)
            elif error is not None:
                raise error
            else:
                self._check_labels(call.result().labels, version)
                return call.result(), version

    # -- the gate -----------------------------------------------------------------------------

    @property
    def _is_shut(self) -> bool:
        return self._closed_at > 0

    async def _close_gate(self) -> None:
        """From here on nothing is sampled. What was so far stays with its request."""
        if self._is_shut:
            return
        self._closed_at = time.perf_counter()
        for call in self._scores:
            call.cancel()  # nothing of it is lost but its time
        try:
            await self._wire.pause()
        except BaseException:
            self._reopen()  # nothing has changed
            raise
        if self._wire.ends_calls:
            await self._settle(self._running.values())
        calls = [reply.call for reply in self._running.values() if reply.call is not None]
        for call in calls:
            self.stats.cut_calls += self._wire.ends_calls
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def _settle(self, replies: Any) -> None:
        """Waits while calls end, one after another."""
        calls = {reply.call for reply in replies if reply.call is not None}
        while calls:
            done, calls = await asyncio.wait(
                calls, timeout=SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return

    async def _open_gate(self) -> None:
        """Unless somebody still wants it closed."""
        if self._is_paused or self._is_asleep or not self._is_shut:
            return
        try:
            await self._wire.resume(drop_cache=self._is_cache_old)
        except BaseException as error:
            self._broken = f"it could not be resumed: {type(error).__name__}: {error}"
            self._fail_all(self._broken_error())
            raise
        self._is_cache_old = False
        self._reopen()

    def _reopen(self) -> None:
        self.stats.paused_seconds += time.perf_counter() - self._closed_at
        self._closed_at = 0.0
        self._notify()

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    # -- replies ------------------------------------------------------------------------------

    def _send(
        self,
        reply: _Reply,
        stop_at: int,
        reason: FinishReason | None = None,
        stop: int | str | None = None,
    ) -> None:
        """Hands over the tokens from the last one sent up to `stop_at`."""
        fresh = slice(reply.num_sent, stop_at)
        ids = np.array(reply.token_ids[fresh], np.int32)
        logprobs = np.array(reply.logprobs[fresh], np.float32)
        routes = None
        if reply.request.sampling.record_routes and reply.routes:
            routes = self._routes_up_to(reply, stop_at)
        for array in (ids, logprobs, routes):
            if array is not None:
                array.setflags(write=False)
        is_first = not reply.has_sent
        reply.num_sent, reply.has_sent = stop_at, True
        reply.deltas.append(
            Delta(
                token_ids=ids,
                logprobs=logprobs,
                policy_version=reply.version,
                finish_reason=reason,
                stop=stop,
                num_cached_tokens=reply.num_cached if is_first else 0,
                num_prefilled_tokens=(
                    len(reply.request.prompt_ids) - reply.num_cached
                    if is_first and len(reply.token_ids)
                    else 0
                ),
                routed_experts=routes,
                support=None if reply.support is None else Ragged.of(reply.support[fresh]),
                fingerprint=self.capabilities.fingerprint,
            )
        )
        reply.notify()

    def _routes_up_to(self, reply: _Reply, stop_at: int) -> Routes:
        """Of what was read for the tokens before `stop_at` and has not been handed over."""
        held = np.concatenate(reply.routes)
        start = reply.num_routed - len(held)
        num = max(0, min(len(held), len(reply.request.prompt_ids) + stop_at - 1 - start))
        reply.routes = [held[num:]]
        return held[:num]

    def _send_single(self, reply: _Reply) -> None:
        """For whoever streams: one delta per token, but for the last, which may be the end."""
        for stop_at in range(reply.num_sent + 1, len(reply.token_ids)):
            self._send(reply, stop_at)

    def _end_segment(self, reply: _Reply) -> None:
        """The weights change: what was sampled under the old ones is a segment of its own. Nothing
        is sent if nothing was sampled since the last change."""
        count = len(reply.token_ids)
        if count > reply.segment_start:
            if reply.request.stream:
                self._send_single(reply)
            self._send(reply, count, "weight_update")
            reply.segment_start = count

    def _end(self, reply: _Reply, reason: FinishReason, stop: int | str | None = None) -> None:
        """The last delta, and the request leaves."""
        if reply.request.stream:
            self._send_single(reply)
        self._send(reply, len(reply.token_ids), reason, stop)
        self._leave(reply)
        if reason == "abort":
            # Whoever asks again wants an answer, not the news that somebody else gave up.
            self._replies.pop(reply.request.id, None)

    def _cut(self, reply: _Reply) -> None:
        """Ends a request here and now, with what has come of it."""
        reply.is_aborted = True
        call, call_id = reply.call, reply.call_id
        self._end(reply, "abort")
        if reply.driver is not None:
            reply.driver.cancel()
        if call is not None:
            call.cancel()
            if self._wire.ends_calls:
                # The server notices a closed connection in its own time.
                told = asyncio.get_running_loop().create_task(self._tell_abort(call_id))
                self._aborts.add(told)
                told.add_done_callback(self._aborts.discard)

    async def _tell_abort(self, call_id: str) -> None:
        # Nobody waits for it: a server that is gone has ended the call as well.
        with contextlib.suppress(EngineError):
            await self._wire.abort(call_id)

    def _fail(self, reply: _Reply, error: Exception) -> None:
        reply.error = error
        self._leave(reply)
        self._replies.pop(reply.request.id, None)
        self.stats.failed_requests += 1

    def _leave(self, reply: _Reply) -> None:
        self._running.pop(reply.request.id, None)
        reply.is_done = True
        reply.notify()

    def _fail_all(self, error: EngineError) -> None:
        for reply in list(self._running.values()):
            self._fail(reply, error)
            for task in (reply.call, reply.driver):
                if task is not None:
                    task.cancel()
        self._notify()
