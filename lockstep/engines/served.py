"""An engine behind a server: everything but the server's own wire format.

A `Wire` sends one call and returns what came back. `ServedEngine` makes an `Engine` of it: requests
that are answered once, every answer checked against what was asked, and weights that change between
two calls and never within one.

Weights change like this. The gate closes: new requests wait on this side. The server ends every
running call, which answers with the tokens that it has: a segment of the old version. The weights
are loaded. The gate opens, and each request continues as a new call whose prompt is everything that
it had so far, under the new version. The version of a token is therefore known whatever the server
reports, and keys and values of older weights are never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.engines.lease import FREE, Lease
from lockstep.engines.ledger import (
    Entry,
    Ledger,
    Stats,
    checked_ids,
    checked_prompt,
    checked_text,
)
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
"""Longest wait for the next of the calls that the server was told to end; then their connections
are closed. A call normally ends within a step, but one that reaches a paused server after the pause
never ends by itself."""

NUM_RETRIES = 2
"""Repeats of a call whose connection was lost. A server closes idle connections, and the next
request on one of them finds out."""

RETRY_SECONDS = 0.2
"""Wait before a call is repeated: a server that restarts refuses connections in the meantime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One part of a server's answer to a call: the tokens since the part before.

    >>> Chunk(token_ids=[7, 2], logprobs=[-0.5, -1.25], finish_reason="stop", stop=2).stop
    2
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each of `token_ids`, under a distribution that the request may be answered with
    (`equal_distributions`)."""
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """Set on the last chunk of a call only. abort: the server was told to end the call."""
    stop: int | str | None = None
    """Id or string at which the server says it stopped; None if it does not say."""
    prompt_ids: Sequence[int] | None = None
    """The server's echo of the prompt, if it sends one; compared with what was sent."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found. Counts once per call, on any chunk."""
    routed_experts: Routes | None = None
    """[T, layers, active] experts of the positions from `Request.routes_from` up to, and without,
    the last token; complete, on the last chunk of a call that asked."""
    support: Sequence[Sequence[int]] | None = None
    """Ids that each of `token_ids` was drawn from; empty means the whole vocabulary."""
    labels: Sequence[str] = ()
    """Labels of the weights that sampled the chunk, from a server that reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireScores:
    """A server's log-probs of given ids."""

    logprobs: Sequence[float]
    """Log-prob of each of `token_ids[first:]`."""
    prompt_ids: Sequence[int] | None = None
    num_cached_tokens: int = 0
    labels: Sequence[str] = ()


class Wire(Protocol):
    """The wire format of one server; subclass it, the methods after `score` have defaults.

    Raises the errors of `engines/http.py`, and EngineError for an answer that cannot be read. Does
    not compare answers with requests: `ServedEngine` does.
    """

    capabilities: Capabilities
    ends_calls: bool = True
    """`abort` and `pause` make running calls answer with finish_reason "abort" and the tokens that
    they have. If not, closing the connection ends a call, and calls should stream, so that the
    tokens so far have arrived."""
    keeps_labels: bool = False
    """The server stores a text beside its weights: `read_label` and `write_label` work."""
    must_restart: str = ""
    """Reason why the next load has to restart the server; empty if it does not."""

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Makes one call. `request.id` is unique among all calls, its max_tokens are what is left
        of the reply, and `stream` asks for chunks as they come."""
        ...

    async def score(
        self, call_id: str, token_ids: Int32Array, *, first: int, priority: int
    ) -> WireScores:
        """The model's log-probs of `token_ids[first:]`, with 1 <= first < their number."""
        raise CapabilityError(f"score: engine {self.capabilities.name} scores nothing.")

    async def abort(self, call_id: str) -> None:
        """Ends one call; ignores an unknown one."""

    async def pause(self) -> None:
        """Ends all calls of this client; returns when the server takes no step for them."""

    async def resume(self, *, drop_cache: bool) -> None:
        """Lets the server continue; with drop_cache it has forgotten every prefix."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Loads weights into the paused server. After an error its weights are unknown, and the
        engine answers nothing until a load succeeds."""
        raise CapabilityError(f"load_weights: engine {self.capabilities.name} takes no weights.")

    async def read_label(self) -> str:
        """The text beside the weights."""
        return ""

    async def write_label(self, label: str) -> None:
        """Stores `label` beside the weights."""

    async def ping(self) -> None:
        """Raises EngineDownError if the server does not answer."""

    async def sleep(self) -> None:
        """Frees the memory of keys and values of the paused server."""

    async def wake(self) -> None:
        """Takes that memory again."""

    async def close(self) -> None:
        """Ends what the wire has opened."""


def equal_distributions(sampling: SamplingParams) -> frozenset[Distribution]:
    """The distributions whose log-probs equal those of `sampling.distribution`: all of them where
    nothing is tempered and nothing is cut.

    >>> sorted(equal_distributions(SamplingParams(max_tokens=1, temperature=0.7)))
    ['sampled', 'tempered']
    >>> sorted(equal_distributions(SamplingParams(max_tokens=1, top_p=0.9)))
    ['model', 'tempered']

    A greedy request records the model's log-probs; no server knows another distribution for it.
    """
    if sampling.temperature == 0:
        return frozenset({"model", "tempered", "sampled"})
    is_plain, is_whole = sampling.temperature == 1, not sampling.is_truncated
    equal: set[Distribution] = {sampling.distribution}
    pairs: tuple[tuple[bool, set[Distribution]], ...] = (
        (is_whole, {"tempered", "sampled"}),
        (is_plain, {"tempered", "model"}),
        (is_whole, {"tempered", "sampled"}),
    )
    for holds, pair in pairs:
        if holds and equal & pair:
            equal |= pair
    return frozenset(equal)


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry(Entry):
    limit: int
    """Tokens to sample: as many as were asked for, or as the engine has room for."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[Sequence[int]] | None = None
    routes: list[Routes] = field(default_factory=list)
    """Routes of calls that have ended, not handed over yet."""
    num_routed: int = 0
    """Position up to which routes have come."""
    num_cached: int = 0
    call_version: int = 0
    """Version of the weights that sample the running call."""
    driver: asyncio.Task[None] | None = None
    call: asyncio.Task[None] | None = None
    """The running call; None between two."""
    call_id: str = ""


class ServedEngine(Engine):
    """`Engine` over a `Wire`."""

    def __init__(self, wire: Wire, *, version: int = 0, lease: Lease | None = None) -> None:
        """lease: the run's claim to the server; kept if the wire keeps labels."""
        self.wire = wire
        self._version = version
        self._lease = lease if getattr(wire, "keeps_labels", False) else None
        self._is_held = False
        """Whether the server has weights that this engine loaded and labelled."""
        self._is_labelled = False
        """Whether answers since the last load carried their label, so that each was checked."""
        self._violation: LeaseError | None = None
        self._ledger: Ledger[_Entry] = Ledger()
        self._scores: set[asyncio.Task[WireScores]] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._is_cache_old = False
        self._shut_at: float | None = None
        """Time at which the gate was closed; None while it is open."""
        self._name = secrets.token_hex(4)  # calls of two runs on one server must not share ids
        self._num_calls = itertools.count()

    # -- the protocol -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.wire.capabilities

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self._ledger.stats

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        return self._ledger.answer(request, self._start, self._cut)

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
        """As the protocol says. A pause ends the call, and it is made again afterwards."""
        self._ledger.check_ready("score")
        found = self.capabilities
        ids = checked_text(
            token_ids, found, distribution=distribution, temperature=temperature, first=first
        )
        values = np.full(len(ids), np.nan, np.float32)
        if len(ids) <= first:
            return Scores(logprobs=values, policy_version=self._version)
        scores, version = await self._score(ids, first=first, priority=priority)
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
        reply = self._ledger.running.get(request_id)
        if reply is None:
            return
        reply.is_aborted = True
        has_call = reply.call is not None  # else it waits at the gate, or between two calls
        try:
            if has_call and self.wire.ends_calls:
                await self.wire.abort(reply.call_id)
                await self._settle([reply])
        finally:
            if not reply.is_done:
                self.stats.cut_calls += has_call and self.wire.ends_calls
                self._cut(reply)

    async def pause(self) -> None:
        async with self._lock:
            self._ledger.check_open()
            await self._close_gate()
            self._ledger.is_paused = True

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        """Requests continue as new calls. With "keep" they find their tokens in the server's prefix
        cache, if it has one, unless the weights have changed since."""
        async with self._lock:
            self._ledger.check_open()
            if self._ledger.is_paused:
                self._ledger.is_paused = False
                self._is_cache_old |= kv == "drop"
                await self._open_gate()

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        async with self._lock:
            self._ledger.check_open()
            self._check_source(source)
            await self._claim()
            await self._close_gate()
            for reply in self._ledger.running.values():
                if len(reply.token_ids) > reply.num_sent:
                    self._send(reply, "weight_update")
            try:
                await self.wire.load_weights(source, version=version)
                if self._lease is not None:
                    await self.wire.write_label(self._lease.label(version))
                    self._is_held, self._is_labelled = True, False
            except BaseException as error:
                self._break(f"loading the weights of version {version} failed", error)
                raise
            self._ledger.broken = ""
            self._version, self._is_cache_old = version, True
            await self._open_gate()

    async def restart(self, directory: str, *, version: int) -> None:
        self.wire.must_restart = "it does not run the weights that it is sent"
        await self.load_weights(directory, version=version)

    async def _claim(self) -> None:
        """Makes sure that nobody else's weights are replaced."""
        if self._lease is None:
            return
        found = await self.wire.read_label()
        if not self._is_held:
            self._lease.check_free(found)
            return
        with contextlib.suppress(EngineDownError):  # a restarted server gets its weights now
            self._lease.check_held(found, self._version)

    async def check_lease(self) -> None:
        """Raises LeaseError if somebody else has loaded weights since, or if the server was
        restarted and its answers did not say so."""
        if self._violation is not None:
            raise self._violation
        if self._lease is None or not self._is_held:
            return
        try:
            self._check_labels([await self.wire.read_label()], self._version)
        except ServerUnreachableError:
            raise
        except EngineDownError as error:
            if self._is_labelled:
                raise
            raise LeaseError(
                f"{error}. What it has sampled since is of unknown weights."
            ) from error

    def _check_labels(self, labels: Iterable[str], version: int) -> None:
        """Compares the labels of an answer with that of the weights of `version`."""
        if self._lease is None or not self._is_held:
            return
        for label in labels:
            try:
                self._lease.check_held(label, version)
            except LeaseError as error:
                self._violation = error
                raise

    def take_metrics(self) -> dict[str, float]:
        """Requests that failed, and calls that were repeated."""
        return self._ledger.take_counts("failed_requests", "retries")

    async def ping(self) -> None:
        self._ledger.check_open()
        await self.wire.ping()

    async def sleep(self) -> None:
        """Requests in flight keep their place and continue after `wake`; new ones are refused."""
        async with self._lock:
            self._ledger.check_open()
            if not self.capabilities.has_sleep:
                raise CapabilityError(
                    f"sleep: engine {self.capabilities.name} cannot give its memory back. Give the "
                    "trainer a device of its own."
                )
            if not self._ledger.is_asleep:
                await self._close_gate()
                await self.wire.sleep()
                self._ledger.is_asleep = self._is_cache_old = True

    async def wake(self) -> None:
        async with self._lock:
            self._ledger.check_open()
            if self._ledger.is_asleep:
                await self.wire.wake()
                self._ledger.is_asleep = False
                await self._open_gate()

    async def close(self) -> None:
        """Requests in flight fail; the server keeps running."""
        if self._ledger.is_closed:
            return
        self._ledger.is_closed = True
        self._fail_all(EngineError("the engine was closed while the request was in flight."))
        for call in list(self._scores):
            call.cancel()
        if self._is_held and self._violation is None:
            with contextlib.suppress(EngineError):  # it may be gone, and holds no claim then
                await self.wire.write_label(FREE)
        await self.wire.close()

    # -- arrival ------------------------------------------------------------------------------

    @property
    def _lock(self) -> asyncio.Lock:
        """Held while the state of the server changes, so that pauses, loads and sleeps follow each
        other. One per event loop: a lock that was waited for serves no other."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def _check_source(self, source: Mapping[str, Any] | str | None) -> None:
        """A path may be a checkpoint or an adapter: the wire tells them apart."""
        allowed = self.capabilities.weight_sources
        forms = ("shared",) if source is None else ("tensors",)
        if isinstance(source, str):
            forms = ("directory", "adapter")
        if not set(forms) & set(allowed):
            raise CapabilityError(
                f"load_weights: engine {self.capabilities.name} takes "
                f"{' or '.join(allowed) or 'no new weights at all'}; found {' or '.join(forms)}."
            )

    def _start(self, request: Request) -> _Entry:
        found, sampling = self.capabilities, request.sampling
        ids = checked_prompt(request, found)
        self._check_abilities(request)
        reply = _Entry(
            request=request,
            limit=min(sampling.max_tokens, found.max_tokens - len(ids)),
            num_routed=request.routes_from,
            support=[] if sampling.record_support and sampling.is_truncated else None,
        )
        reply.driver = asyncio.get_running_loop().create_task(self._drive(reply))
        return reply

    def _check_abilities(self, request: Request) -> None:
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
                raise CapabilityError(f"request {request.id}: engine {found.name} {text}.")

    # -- calls --------------------------------------------------------------------------------

    async def _pass_gate(self) -> None:
        while self._shut_at is not None and not self._ledger.is_closed:
            if self._ledger.broken:
                raise EngineError(self._ledger.broken)
            await self._ledger.changed()
        self._ledger.check_open()

    async def _drive(self, reply: _Entry) -> None:
        """Works on one request, call after call, until it has ended."""
        num_retries = 0
        try:
            while not reply.is_done:
                await self._pass_gate()
                reply.call_version = self._version
                reply.call_id = f"{reply.request.id}~{self._name}-{next(self._num_calls)}"
                num_before = len(reply.token_ids)
                self.stats.calls += 1
                reply.call = asyncio.get_running_loop().create_task(self._call(reply))
                await asyncio.wait({reply.call})
                call, reply.call = reply.call, None
                if reply.is_done:
                    continue
                error = None if call.cancelled() else call.exception()
                is_lost = isinstance(error, ServerUnreachableError)
                if (is_lost or call.cancelled()) and self._end_if_complete(reply):
                    continue
                if is_lost and num_retries < NUM_RETRIES:
                    # The tokens that came are kept, and the rest is asked for.
                    num_retries = 1 if len(reply.token_ids) > num_before else num_retries + 1
                    self.stats.retries += 1
                    await asyncio.sleep(RETRY_SECONDS)
                elif error is not None:
                    raise error
        except EngineError as error:
            self._ledger.fail(reply, error)
        except Exception as error:
            # An unforeseen error fails this request alone, with its cause: readers must not wait
            # for ever.
            failure = EngineError(
                f"{reply.where}: the answer of engine {self.capabilities.name} could not be read: "
                f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._ledger.fail(reply, failure)

    def _seed_after(self, seed: int, num_sampled: int) -> int:
        """The seed of a call, in [0, 2^31), which every server takes. The rest of a reply gets
        another one than its beginning: a server that counts draws from the start of a call would
        repeat them."""
        if self.capabilities.has_positional_draws:
            num_sampled = 0
        text = f"{seed}/{num_sampled}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1

    def _end_if_complete(self, reply: _Entry, found: object = None) -> bool:
        """Ends a reply that needs no further call. found: where the server says it stopped."""
        ids, sampling = reply.token_ids, reply.request.sampling
        if ids and ids[-1] in sampling.stop_ids:
            self._send(reply, "stop", ids[-1])
        elif isinstance(found, str) and found in sampling.stop_strings:
            self._send(reply, "stop", found)
        elif len(ids) == reply.limit:
            self._send(reply, "length")
        return reply.is_done

    async def _call(self, reply: _Entry) -> None:
        """Makes one call to the server, for what is left of the request."""
        request, num_before = reply.request, len(reply.token_ids)
        prompt_ids = np.concatenate([request.prompt_ids, reply.token_ids]).astype(np.int32)
        # Routes come with the end of a call: tokens handed over before it would be without.
        streams = request.stream and not request.sampling.record_routes
        call = replace(
            request,
            id=reply.call_id,
            prompt_ids=prompt_ids,
            sampling=replace(request.sampling, max_tokens=reply.limit - num_before),
            seed=self._seed_after(request.seed, num_before),
            stream=streams,
            routes_from=reply.num_routed,
        )
        num_cached, has_ended = 0, False
        async for chunk in self.wire.generate(call):
            if has_ended:
                raise self._fault(reply.where, "sent more after the end of the reply")
            num_cached = max(num_cached, chunk.num_cached_tokens)
            if chunk.prompt_ids is not None:
                self._check_echo(reply.where, prompt_ids, chunk.prompt_ids)
            if chunk.labels:
                self._is_labelled = self._is_held
                self._check_labels(chunk.labels, reply.call_version)
            self._take(reply, chunk)
            if not reply.deltas:
                reply.num_cached = min(num_cached, len(request.prompt_ids))
            has_ended = chunk.finish_reason is not None
            if has_ended:
                self._end_call(reply, chunk, len(reply.token_ids) - num_before)
            elif streams:
                self._send_single(reply)
        if not has_ended:
            raise self._fault(reply.where, "ended its answer without a reason")

    def _take(self, reply: _Entry, chunk: Chunk) -> None:
        """Adds the tokens of a chunk. Raises EngineError for tokens that cannot be."""
        where, at = reply.where, len(reply.token_ids)
        found = self.capabilities
        ids = checked_ids(
            np.array(chunk.token_ids),
            vocab_size=found.vocab_size,
            where=f"{where}: the reply of engine {found.name}",
        )
        if len(chunk.logprobs) != len(ids):
            raise self._fault(where, f"sent {len(ids)} ids and {len(chunk.logprobs)} log-probs")
        values = np.asarray(chunk.logprobs, np.float32)
        self._check_logprobs(where, ids, values, "sampled token", at)
        if at + len(ids) > reply.limit:
            raise self._fault(where, f"sampled {at + len(ids)} tokens of {reply.limit}")
        stop_ids = reply.request.sampling.stop_ids
        path = [*reply.token_ids[-1:], *ids.tolist()]
        for index, token_id in enumerate(path[:-1], start=at + len(ids) - len(path)):
            if token_id in stop_ids:
                raise self._fault(
                    where,
                    f"went on after the stop id {token_id} (token {index}): it does not "
                    "honour stop ids",
                )
        if reply.support is not None:
            if chunk.support is None or len(chunk.support) != len(ids):
                num = "none" if chunk.support is None else len(chunk.support)
                raise self._fault(where, f"sent the support of {num} of {len(ids)} tokens")
            reply.support += chunk.support
        reply.token_ids += ids.tolist()
        reply.logprobs += values.tolist()
        self.stats.sampled_tokens += len(ids)

    def _end_call(self, reply: _Entry, chunk: Chunk, num_sampled: int) -> None:
        """Ends the reply where this call completes it. Raises EngineError for an end that the
        request did not ask for."""
        ids, sampling = reply.token_ids, reply.request.sampling
        if sampling.record_routes:
            if chunk.finish_reason == "abort" and chunk.routed_experts is None:
                self._drop_last(reply, num_sampled)  # without their routes they are of no use
            self._take_routes(reply, chunk.routed_experts)
        if self._end_if_complete(reply, chunk.stop if chunk.finish_reason == "stop" else None):
            return
        if chunk.finish_reason == "abort":
            if reply.is_aborted:
                self._send(reply, "abort")
            elif self._shut_at is None:
                raise self._fault(
                    reply.where,
                    "aborted it, and was not asked to: its server was paused or ended "
                    "by somebody else?",
                )
        elif chunk.finish_reason == "stop" and num_sampled and chunk.stop == ids[-1]:
            # The server ended at an id of its own. The model chose the token, so it is kept, and
            # the reply continues after it in another call.
            self.stats.own_stops += 1
        elif chunk.finish_reason == "length":
            raise self._fault(
                reply.where,
                f"ended after {len(ids)} of {reply.limit} tokens for want of room, "
                f"although it said that it takes {self.capabilities.max_tokens}",
            )
        else:
            found = "without saying where" if chunk.stop is None else f"at {chunk.stop!r}"
            last = f"ends in {ids[-1]}" if ids else "is empty"
            raise self._fault(
                reply.where,
                f"stopped {found}, and the reply {last}: the stop id is left out of "
                "the ids. It was chosen by the model and is trained, so it is not put back by "
                f"guess. Expected one of {list(sampling.stop_ids)} as the last id",
            )

    def _drop_last(self, reply: _Entry, num_sampled: int) -> None:
        """Forgets the tokens of a call: they are sampled again."""
        stop = len(reply.token_ids) - num_sampled
        del reply.token_ids[stop:], reply.logprobs[stop:]
        if reply.support is not None:
            del reply.support[stop:]
        self.stats.dropped_tokens += num_sampled

    def _take_routes(self, reply: _Entry, routes: Routes | None) -> None:
        stop = max(reply.num_routed, len(reply.request.prompt_ids) + len(reply.token_ids) - 1)
        num_wanted = stop - reply.num_routed
        if not reply.token_ids or (routes is None and not num_wanted):
            return  # nothing was read for a token
        if routes is None or len(routes) != num_wanted:
            found = "none" if routes is None else f"those of {len(routes)}"
            raise self._fault(
                reply.where,
                f"sent {found}; expected the experts of the {num_wanted} positions "
                f"from {reply.num_routed} on",
            )
        reply.routes.append(routes)
        reply.num_routed = stop

    def _check_echo(self, where: str, sent: Int32Array, echo: Sequence[int]) -> None:
        """Raises EngineError unless the server read what was sent: some add a first token."""
        if np.array_equal(sent, echo):
            return
        shared = min(len(sent), len(echo))
        at = next((i for i in range(shared) if sent[i] != echo[i]), shared)
        read, wanted = (int(ids[at]) if at < len(ids) else "missing" for ids in (echo, sent))
        raise self._fault(
            where,
            f"read {len(echo)} prompt ids, and {len(sent)} prompt ids were sent: token {at} "
            f"is {read} and was sent as {wanted}. It adds tokens, cuts or encodes prompts?",
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

    def _fault(self, where: str, text: str) -> EngineError:
        """The error for an answer that breaks the protocol."""
        return EngineError(f"{where}: engine {self.capabilities.name} {text}.")

    async def _score(self, ids: Int32Array, *, first: int, priority: int) -> tuple[WireScores, int]:
        num_retries = 0
        while True:
            await self._pass_gate()
            version = self._version
            call_id = f"score~{self._name}-{next(self._num_calls)}"
            call = asyncio.ensure_future(
                self.wire.score(call_id, ids, first=first, priority=priority)
            )
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

    async def _close_gate(self) -> None:
        """Stops sampling. What was sampled so far stays with its request."""
        if self._shut_at is not None:
            return
        self._shut_at = time.perf_counter()
        for call in self._scores:
            call.cancel()  # only its time is lost
        try:
            await self.wire.pause()
        except BaseException:
            self._reopen()  # nothing has changed
            raise
        if self.wire.ends_calls:
            await self._settle(self._ledger.running.values())
        calls = [reply.call for reply in self._ledger.running.values() if reply.call is not None]
        for call in calls:
            self.stats.cut_calls += self.wire.ends_calls
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def _settle(self, replies: Iterable[_Entry]) -> None:
        """Waits while calls end, one after another."""
        calls = {reply.call for reply in replies if reply.call is not None}
        while calls:
            done, calls = await asyncio.wait(
                calls, timeout=SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return

    async def _open_gate(self) -> None:
        """Resumes the server, unless it is still to be paused or asleep."""
        if self._ledger.is_paused or self._ledger.is_asleep or self._shut_at is None:
            return
        try:
            await self.wire.resume(drop_cache=self._is_cache_old)
        except BaseException as error:
            self._break("it could not be resumed", error)
            raise
        self._is_cache_old = False
        self._reopen()

    def _reopen(self) -> None:
        if self._shut_at is not None:
            self.stats.paused_seconds += time.perf_counter() - self._shut_at
        self._shut_at = None
        self._ledger.wake()

    def _break(self, what: str, error: BaseException) -> None:
        """Answers nothing until weights are loaded: which ones the server has is not known."""
        self._ledger.broken = (
            f"engine {self.capabilities.name}: {what}: {type(error).__name__}: {error}. Which "
            "weights its server runs is not known: load them again, or restart it."
        )
        self._fail_all(EngineError(self._ledger.broken))

    # -- replies ------------------------------------------------------------------------------

    def _send(self, reply: _Entry, reason: FinishReason, stop: int | str | None = None) -> None:
        """Hands over everything that is new, as the end of a segment or of the reply."""
        if reply.request.stream:
            self._send_single(reply)
        self._deliver(reply, len(reply.token_ids), reason, stop)

    def _send_single(self, reply: _Entry) -> None:
        """Hands over one delta per token, except for the last token, which may be the end."""
        for stop_at in range(reply.num_sent + 1, len(reply.token_ids)):
            self._deliver(reply, stop_at)

    def _deliver(
        self,
        reply: _Entry,
        stop_at: int,
        reason: FinishReason | None = None,
        stop: int | str | None = None,
    ) -> None:
        """Hands over the tokens from the last one sent up to `stop_at`."""
        fresh = slice(reply.num_sent, stop_at)
        ids = np.array(reply.token_ids[fresh], np.int32)
        logprobs = np.array(reply.logprobs[fresh], np.float32)
        routes = self._routes_up_to(reply, stop_at) if reply.routes else None
        for array in (ids, logprobs, routes):
            if array is not None:
                array.setflags(write=False)
        num_prompt, is_first = len(reply.request.prompt_ids), not reply.deltas
        self._ledger.deliver(
            reply,
            Delta(
                token_ids=ids,
                logprobs=logprobs,
                policy_version=reply.call_version,
                finish_reason=reason,
                stop=stop,
                num_cached_tokens=reply.num_cached if is_first else 0,
                num_prefilled_tokens=(
                    num_prompt - reply.num_cached if is_first and reply.token_ids else 0
                ),
                routed_experts=routes,
                support=None if reply.support is None else Ragged.of(reply.support[fresh]),
                fingerprint=self.capabilities.fingerprint,
            ),
        )

    def _routes_up_to(self, reply: _Entry, stop_at: int) -> Routes:
        """Routes of the positions that were read for tokens before `stop_at`, not handed over."""
        held = np.concatenate(reply.routes)
        start = reply.num_routed - len(held)
        num = max(0, min(len(held), len(reply.request.prompt_ids) + stop_at - 1 - start))
        reply.routes = [held[num:]]
        return held[:num]

    def _cut(self, reply: _Entry) -> None:
        """Ends a request here and now, with the tokens that it has."""
        call, call_id = reply.call, reply.call_id
        self._send(reply, "abort")
        if reply.driver is not None:
            reply.driver.cancel()
        if call is not None:
            call.cancel()
            if self.wire.ends_calls:
                # The server notices a closed connection in its own time.
                told = asyncio.get_running_loop().create_task(self._tell_abort(call_id))
                self._aborts.add(told)
                told.add_done_callback(self._aborts.discard)

    async def _tell_abort(self, call_id: str) -> None:
        with contextlib.suppress(EngineError):  # a server that is gone has ended the call as well
            await self.wire.abort(call_id)

    def _fail_all(self, error: EngineError) -> None:
        for reply in list(self._ledger.running.values()):
            self._ledger.fail(reply, error)
            for task in (reply.call, reply.driver):
                if task is not None:
                    task.cancel()
        self._ledger.wake()
