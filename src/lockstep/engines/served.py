"""An engine behind a server: everything but the server's own wire format.

A `Wire` sends one call and returns the server's answer. `ServedEngine` makes an `Engine` of it:
each request is answered once, every answer is checked against its request, and weights change
between two calls, never within one.

Weights change in four steps. The gate closes: new requests wait on this side. The server ends every
running call, and the call returns its tokens so far: a segment of the old version. The weights are
loaded. The gate opens, and each request continues as a new call under the new version, with its
tokens so far as the prompt. So the version of a token is known whatever the server reports, and
keys and values of older weights are never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from lockstep.engines.base import Capabilities, Scores
from lockstep.engines.lease import FREE, Lease
from lockstep.engines.ledger import (
    Entry,
    LedgerEngine,
    check_source,
    checked_ids,
    ending_of,
    limit_of,
    no_adapter,
    rest_of,
    seed_after,
)
from lockstep.errors import CapabilityError, EngineError, ServerUnreachableError
from lockstep.launch.background import Background
from lockstep.models.peft_format import is_adapter
from lockstep.types import (
    MAX_LOGPROB,
    Delta,
    FinishReason,
    Float32Array,
    Int32Array,
    Ragged,
    Request,
    Routes,
)

T = TypeVar("T")

SETTLE_SECONDS = 1.0
"""Longest wait for the next call to end after the server was asked to end all; then the connections
are closed. A call normally ends within a step. A call that reaches a server after its pause never
ends by itself."""

NUM_RETRIES = 2
"""Repeats of a call whose connection was lost. A server closes idle connections, and the next
request on one of them finds out."""

RETRY_SECONDS = 0.2
"""Wait before a call is repeated: a server that restarts refuses connections in the meantime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChunk:
    """One part of a server's answer to a call: the tokens since the part before.

    >>> AnswerChunk(token_ids=[7, 2], logprobs=[-0.5, -1.25], finish_reason="stop", stop=2).stop
    2
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each of `token_ids`, under a distribution that the request may be answered with
    (`equal_distributions`)."""
    finish_reason: str | None = None
    """Set on the last chunk of a call only: stop, length, or abort if the server was told to end
    the call."""
    stop: int | str | None = None
    """Id or string that ended the reply, as the server reports it; None without a report."""
    prompt_ids: Sequence[int] | None = None
    """The server's echo of the prompt, if any; compared with the sent prompt."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found. Counts once per call, on any chunk."""
    routed_experts: Routes | None = None
    """[T, layers, active] experts of the positions from `Request.routes_from` up to, and without,
    the last token; complete, on the last chunk of a call that asked."""
    support: Sequence[Sequence[int]] | None = None
    """Ids that each of `token_ids` was drawn from; empty means the whole vocabulary."""
    labels: Sequence[str] = ()
    """Labels of the weights that sampled the chunk, from a server that reports them."""


class Wire(Protocol):
    """The wire format of one server; subclass it, the methods after `score` have defaults.

    Raises the errors of `engines/http.py`, and EngineError for an answer that cannot be read. Does
    not compare answers with requests: `ServedEngine` does.
    """

    capabilities: Capabilities
    lease: Lease | None = None
    """The run's claim to a server that stores a text beside its weights."""
    sent_bytes: int = 0
    """Bytes of weights that all loads have sent over the wire; a directory has none."""

    def generate(self, request: Request) -> AsyncIterator[AnswerChunk]:
        """Makes one call. `request.id` is unique among all calls, its max_tokens is the length left
        for the reply, and `stream` asks for chunks as they come."""
        ...

    async def score(self, request: Request, *, first: int) -> AnswerChunk:
        """The prompt's ids from `first` on, with the model's log-probs; 1 <= first < their
        number."""
        raise CapabilityError(f"score: engine {self.capabilities.name} scores nothing.")

    async def abort(self, call_id: str) -> None:
        """Makes one call answer with the tokens that it has; ignores an unknown one."""

    async def pause(self) -> None:
        """Does so to all calls of this client; returns when the server takes no step for them."""

    async def resume(self, *, drop_cache: bool) -> None:
        """Lets the server continue; with drop_cache it has forgotten every prefix."""

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Loads weights into the paused server. After an error its weights are unknown, and the
        engine answers nothing until a load succeeds."""
        raise CapabilityError(f"load_weights: engine {self.capabilities.name} takes no weights.")

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Loads an adapter under a name that the server does not know, beside what runs. The
        directory stays until it is dropped."""
        raise CapabilityError(f"load_adapter: engine {self.capabilities.name} takes no adapter.")

    async def drop_adapter(self, name: str) -> None:
        """Frees an adapter that no call names any longer."""

    async def read_label(self) -> str:
        """The text beside the weights."""
        return ""

    async def write_label(self, label: str) -> None:
        """Stores `label` beside the weights."""

    async def ping(self) -> None:
        """Raises EngineDownError if the server does not answer."""

    async def sleep(self) -> None:
        """Frees memory of the paused server: keys and values, and weights if it can."""

    async def wake_weights(self) -> None:
        """Takes the memory of weights again. A load writes into it, so this call comes before."""

    async def wake(self) -> None:
        """Takes the rest of the memory again, after `wake_weights`."""

    async def close(self) -> None:
        """Ends what the wire has opened."""


@dataclass(slots=True, eq=False, kw_only=True)
class _ServedEntry(Entry):
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[Sequence[int]] | None = None
    routes: list[Routes] = field(default_factory=list)
    """Routes of calls that have ended, not handed over yet."""
    num_routed: int = 0
    """Routes up to this position have come."""
    num_cached: int = 0
    call_version: int = 0
    """Version of the weights that sample the running call."""
    is_moving: bool = False
    """Its call is ended because its adapter has new tensors."""
    call_id: str = ""
    """Id of the running call; empty between two."""


class ServedEngine(LedgerEngine[_ServedEntry]):
    """`Engine` over a `Wire`."""

    EVENTS = ("failed_requests", "retries", "dropped_tokens", "sent_bytes")

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire, self._lease = wire, wire.lease
        self.version = 0
        self._calls: dict[asyncio.Task[Any], _ServedEntry | None] = {}
        """Running calls, and the request that each is for; None for scores."""
        self._aborts = Background()
        self._adapters: dict[str, tuple[str, int]] = {}
        """Adapter -> (name on the server, version). New tensors get a new name, because the server
        caches prefixes by name."""
        self._policy = ""
        """Name on the server of the adapter that the run trains; empty for a whole model."""
        self._is_shut = self._is_cache_old = self._are_weights_asleep = False
        self._name = secrets.token_hex(4)  # calls of two runs on one server must not share ids
        self._num_calls = itertools.count()

    # -- the protocol -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.wire.capabilities

    async def _score(self, request: Request, *, first: int) -> Scores:
        """A pause ends the call, and it is made again afterwards."""
        found, ids = self.capabilities, request.prompt_ids
        values = np.full(len(ids), np.nan, np.float32)
        if len(ids) <= first:
            return Scores(logprobs=values, policy_version=self._weights_of(request.adapter)[1])

        async def call(call_id: str) -> tuple[AnswerChunk, int]:
            name, version = self._weights_of(request.adapter)
            asked = replace(request, id=call_id, adapter=name)
            return await self.wire.score(asked, first=first), version

        scores, version = await self._call_when_open(call)
        self._check_labels(scores.labels)
        self._check_echo("score", ids, scores.prompt_ids)
        if len(scores.logprobs) != len(ids) - first:
            raise EngineError(
                f"score: engine {found.name} answered {len(scores.logprobs)} log-probs for the "
                f"{len(ids) - first} ids from index {first} on."
            )
        values[first:] = scores.logprobs
        self._check_logprobs("score", ids[first:], values[first:], "id", first)
        num_prefilled = max(0, len(ids) - scores.num_cached_tokens)
        self.stats["scored_tokens"] += num_prefilled
        return Scores(
            logprobs=values,
            policy_version=version,
            num_cached_tokens=scores.num_cached_tokens,
            num_prefilled_tokens=num_prefilled,
            fingerprint=found.fingerprint,
        )

    async def _abandon(self, entry: _ServedEntry) -> None:
        self._abort_now(entry)

    async def _abort(self, entry: _ServedEntry) -> None:
        try:
            if entry.call_id:  # else it waits between two calls
                await self.wire.abort(entry.call_id)
                await self._wait_for_end(call for call, of in self._calls.items() if of is entry)
        finally:
            if not entry.is_done:
                self._abort_now(entry)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        async with self._changing():
            check_source(source, self.capabilities)
            if self._lease is not None:  # nobody else's weights are replaced
                self._lease.claim(await self.wire.read_label())
            await self._suspend()
            for reply in self._running.values():
                self._send(reply, "weight_update")
            takes_adapters = self.capabilities.has_adapters
            before, self._policy = self._policy, ""
            try:
                await self._wake_weights()
                if takes_adapters and isinstance(source, str) and is_adapter(source):
                    self._policy = await self._put("policy", source)
                else:
                    await self.wire.load_weights(source, version=version)
                    self.stats["sent_bytes"] = self.wire.sent_bytes
                if before:
                    await self.wire.drop_adapter(before)
                if self._lease is not None:
                    await self.wire.write_label(self._lease.take(version))
            except BaseException as error:
                self._break(f"loading the weights of version {version} failed", error)
                raise
            self._broken = ""
            self.version = version
            await self._proceed(drop_cache=True)

    async def load_adapter(self, name: str, source: Any, *, version: int) -> None:
        """See `Engine.load_adapter`: a directory in PEFT's form, which stays until the adapter is
        dropped or has other tensors. Calls of other names go on."""
        async with self._changing():
            if not self.capabilities.has_adapters:
                await super().load_adapter(name, source, version=version)
            await self._wake_weights()
            before = self._adapters.get(name)
            self._adapters[name] = await self._put(name, source), version
            if before is not None:
                await self._interrupt_adapter(name)
                await self.wire.drop_adapter(before[0])

    async def _put(self, name: str, directory: str | Path) -> str:
        """Loads an adapter. Returns its name on the server, which no other tensors have."""
        wire_name = f"{name}~{self._name}-{next(self._num_calls)}"
        await self.wire.load_adapter(wire_name, Path(directory).absolute())
        return wire_name

    async def _interrupt_adapter(self, name: str) -> None:
        """Ends calls with the adapter's old tensors. Their requests continue with the new ones."""
        for reply in self._replies_of(name):
            if reply.call_id:
                reply.is_moving = True
                await self._send_abort(reply.call_id)
            else:
                self._send(reply, "weight_update")
        calls = [call for call, of in self._calls.items() if of is not None and of.is_moving]
        await self._end_calls(calls)

    async def drop_adapter(self, name: str) -> None:
        """See `Engine.drop_adapter`."""
        async with self._changing():
            if (adapter := self._adapters.pop(name, None)) is None:
                raise no_adapter("drop_adapter", name, self._adapters)
            text = f"the adapter {name!r} was dropped while the request was in flight."
            for reply in self._replies_of(name):
                call_id = reply.call_id
                self._fail_entry(reply, EngineError(text))
                if call_id:
                    await self._send_abort(call_id)
            await self.wire.drop_adapter(adapter[0])

    def _replies_of(self, adapter: str) -> list[_ServedEntry]:
        return [r for r in self._running.values() if r.request.adapter == adapter]

    def _weights_of(self, adapter: str) -> tuple[str, int]:
        """(name on the server, version) of an adapter. An adapter that was not loaded here belongs
        to the server."""
        return self._adapters.get(adapter, (adapter or self._policy, self.version))

    async def check_lease(self) -> None:
        """Raises LeaseError if somebody else has loaded weights, even if they are gone by now, and
        EngineDownError if the server was restarted."""
        if self._lease is not None and self._lease.held is not None:
            if self._lease.violation is not None:
                raise self._lease.violation
            self._lease.check_held(await self.wire.read_label())

    def _check_labels(self, labels: Iterable[str]) -> None:
        """Compares the labels of an answer with the label of the loaded weights."""
        if self._lease is not None:
            for label in labels:
                self._lease.check_held(label)

    async def ping(self) -> None:
        await super().ping()
        await self.wire.ping()

    async def _free_memory(self) -> None:
        await self._suspend()
        await self.wire.sleep()
        self._is_cache_old = self._are_weights_asleep = True

    async def _wake_weights(self) -> None:
        if self._are_weights_asleep:
            await self.wire.wake_weights()
            self._are_weights_asleep = False

    async def _take_memory(self) -> None:
        await self._wake_weights()
        await self.wire.wake()

    async def _close(self) -> None:
        """The server keeps running."""
        if self._lease is not None and self._lease.is_ours:
            with contextlib.suppress(EngineError):  # it may be gone, and holds no claim then
                await self.wire.write_label(FREE)
        await self.wire.close()

    # -- calls --------------------------------------------------------------------------------

    def _start(self, request: Request, ids: Int32Array) -> _ServedEntry:
        sampling = request.sampling
        reply = _ServedEntry(
            request=request,
            num_routed=request.routes_from,
            support=[] if sampling.record_support and sampling.is_truncated else None,
        )
        reply.task = asyncio.get_running_loop().create_task(self._drive(reply))
        return reply

    async def _drive(self, reply: _ServedEntry) -> None:
        """Works on one request, call after call, until it has ended."""
        try:
            while not reply.is_done:
                await self._call_when_open(partial(self._call, reply), reply)
        except Exception as error:
            answer = f"the answer of engine {self.capabilities.name} could not be read"
            self._fail_entry(reply, error, doing=answer)

    async def _call_when_open(
        self, call: Callable[[str], Coroutine[Any, Any, T]], reply: _ServedEntry | None = None
    ) -> T:
        """The result of a call, once the gate is open. If the gate cuts a call off, it is made
        again. If the connection is lost without a token, it is made again NUM_RETRIES times.

        call: makes the call under the given id.
        """
        name, tokens = ("score", []) if reply is None else (reply.request.id, reply.token_ids)
        num_retries = 0
        while True:
            while self._is_shut and not self._is_closed:
                if self._broken:
                    raise EngineError(self._broken)
                await self._changed()
            self._check_open()
            num_before = len(tokens)
            call_id = f"{name}~{self._name}-{next(self._num_calls)}"
            task = asyncio.get_running_loop().create_task(call(call_id))
            self._calls[task] = reply
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                task.cancel()
                raise
            finally:
                del self._calls[task]
            if task.cancelled():
                continue
            error = task.exception()
            if len(tokens) > num_before:
                num_retries = 0
            if not isinstance(error, ServerUnreachableError) or num_retries == NUM_RETRIES:
                return task.result()
            num_retries += 1
            self.stats["retries"] += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _call(self, reply: _ServedEntry, call_id: str) -> None:
        """Makes one call to the server, for the rest of the request."""
        if self._end_if_complete(reply):  # only the end of the last call was lost
            return
        request, num_before = reply.request, len(reply.token_ids)
        call = replace(
            request,
            seed=seed_after(request.seed, 0),
            # Routes come with the end of a call: tokens handed over before it would be without.
            stream=request.stream and not request.sampling.record_routes,
            routes_from=reply.num_routed,
            adapter=self._weights_of(request.adapter)[0],
        )
        call = rest_of(call, reply.token_ids, self.capabilities, call_id=call_id)
        num_cached, has_ended = 0, False
        reply.call_id, reply.call_version = call_id, self._weights_of(request.adapter)[1]
        reply.is_moving = False
        try:
            async for chunk in self.wire.generate(call):
                if has_ended:
                    raise self._fault(reply.where, "sent more after the end of the reply")
                num_cached = max(num_cached, chunk.num_cached_tokens)
                self._check_echo(reply.where, call.prompt_ids, chunk.prompt_ids)
                self._check_labels(chunk.labels)
                self._receive(reply, chunk)
                if not reply.deltas:
                    reply.num_cached = min(num_cached, len(request.prompt_ids))
                has_ended = chunk.finish_reason is not None
                if has_ended:
                    self._end_call(reply, chunk, len(reply.token_ids) - num_before)
                elif call.stream:
                    self._send(reply, None)
        finally:
            reply.call_id = ""
        if not has_ended:
            raise self._fault(reply.where, "ended its answer without a reason")

    def _end_if_complete(self, reply: _ServedEntry, found: object = None) -> bool:
        """Ends a reply that needs no further call. found: where the server says it stopped."""
        end = ending_of(reply.request, reply.token_ids, self.capabilities)
        if isinstance(found, str) and found in reply.request.sampling.stop_strings:
            self._send(reply, "stop", found)
        elif end is not None:
            self._send(reply, *end)
        return reply.is_done

    def _receive(self, reply: _ServedEntry, chunk: AnswerChunk) -> None:
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
        limit = limit_of(reply.request, found)
        if at + len(ids) > limit:
            raise self._fault(where, f"sampled {at + len(ids)} tokens of {limit}")
        path = [*reply.token_ids, *ids.tolist()]
        for index in range(max(0, at - 1), len(path) - 1):
            if path[index] in reply.request.sampling.stop_ids:
                text = f"went on after the stop id {path[index]} (token {index})"
                raise self._fault(where, f"{text}: it does not honour stop ids")
        if reply.support is not None:
            if chunk.support is None or len(chunk.support) != len(ids):
                num = "none" if chunk.support is None else len(chunk.support)
                raise self._fault(where, f"sent the support of {num} of {len(ids)} tokens")
            reply.support += chunk.support
        reply.token_ids += ids.tolist()
        reply.logprobs += values.tolist()
        self.stats["sampled_tokens"] += len(ids)

    def _end_call(self, reply: _ServedEntry, chunk: AnswerChunk, num_sampled: int) -> None:
        """Ends the reply where this call completes it. Raises EngineError for an end that the
        request did not ask for."""
        ids, sampling, reason = reply.token_ids, reply.request.sampling, chunk.finish_reason
        if sampling.record_routes:
            if reason == "abort" and chunk.routed_experts is None:
                self._drop_last(reply, num_sampled)  # without their routes they are of no use
            self._take_routes(reply, chunk.routed_experts)
        if self._end_if_complete(reply, chunk.stop if reason == "stop" else None):
            return
        if reason == "stop" and num_sampled and chunk.stop == ids[-1]:
            return  # at an id of the server's own: the model chose it, and the reply goes on
        problem = ""
        if reason == "abort" and (reply.is_aborted or reply.is_moving):
            self._send(reply, "abort" if reply.is_aborted else "weight_update")
        elif reason == "abort" and not self._is_shut:
            problem = "aborted it, and was not asked to: was its server paused or ended?"
        elif reason == "length":
            limit = limit_of(reply.request, self.capabilities)
            problem = f"ended after {len(ids)} of {limit} tokens, without room for more"
        elif reason == "stop":
            found = "without saying where" if chunk.stop is None else f"at {chunk.stop!r}"
            last = f"ends in {ids[-1]}" if ids else "is empty"
            problem = f"stopped {found}, and the reply {last}: the stop id is left out of the ids. "
            problem += f"Expected one of {list(sampling.stop_ids)} as the last id"
        elif reason != "abort":
            problem = f"ended with {reason!r}, not stop, length or abort"
        if problem:
            raise self._fault(reply.where, problem)

    def _drop_last(self, reply: _ServedEntry, num_sampled: int) -> None:
        """Forgets the tokens of a call: they are sampled again."""
        stop = len(reply.token_ids) - num_sampled
        del reply.token_ids[stop:], reply.logprobs[stop:]
        if reply.support is not None:
            del reply.support[stop:]
        self.stats["dropped_tokens"] += num_sampled

    def _take_routes(self, reply: _ServedEntry, routes: Routes | None) -> None:
        stop = max(reply.num_routed, len(reply.request.prompt_ids) + len(reply.token_ids) - 1)
        num_wanted = stop - reply.num_routed
        if not reply.token_ids or (routes is None and not num_wanted):
            return  # nothing was read for a token
        if routes is None or len(routes) != num_wanted:
            found = "none" if routes is None else f"routes of {len(routes)}"
            wanted = f"the experts of the {num_wanted} positions from {reply.num_routed} on"
            raise self._fault(reply.where, f"sent {found}; expected {wanted}")
        reply.routes.append(routes)
        reply.num_routed = stop

    def _check_echo(self, where: str, sent: Int32Array, echo: Sequence[int] | None) -> None:
        """Raises EngineError unless the server read the sent prompt: some add a first token."""
        if echo is None or np.array_equal(sent, echo):
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
                f"from engine {self.capabilities.name} (version {self.version}); expected a "
                f"finite number <= {MAX_LOGPROB:g}. Diverged or half-loaded weights?"
            )

    def _fault(self, where: str, text: str) -> EngineError:
        """The error for an answer that breaks the protocol."""
        end = "" if text.endswith("?") else "."
        return EngineError(f"{where}: engine {self.capabilities.name} {text}{end}")

    # -- the gate -----------------------------------------------------------------------------

    async def _suspend(self) -> None:
        """Stops sampling. What was sampled so far stays with its request."""
        if self._is_shut:
            return
        self._is_shut = True
        for call, reply in self._calls.items():
            if reply is None:
                call.cancel()  # a score: only its time is lost
        try:
            await self.wire.pause()
        except BaseException:
            self._reopen()  # nothing has changed
            raise
        await self._end_calls(self._calls)

    async def _end_calls(self, calls: Iterable[asyncio.Task[Any]]) -> None:
        """Waits while calls end, and closes the connections of calls that do not."""
        if left := await self._wait_for_end(calls):
            for call in left:
                call.cancel()
            await asyncio.wait(left)

    async def _wait_for_end(self, calls: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
        """Waits while calls end, one after another. Returns calls that do not."""
        left = set(calls)
        while left:
            done, left = await asyncio.wait(
                left, timeout=SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
        return left

    async def _proceed(self, *, drop_cache: bool) -> None:
        """Resumes the server, unless it is still to be paused or asleep. Requests continue as new
        calls, which find their tokens in the server's prefix cache, if it has one."""
        self._is_cache_old |= drop_cache
        if not self._may_sample or not self._is_shut:
            return
        try:
            await self.wire.resume(drop_cache=self._is_cache_old)
        except BaseException as error:
            self._break("it could not be resumed", error)
            raise
        self._is_cache_old = False
        self._reopen()

    def _reopen(self) -> None:
        self._is_shut = False
        self._notify()

    def _break(self, what: str, error: BaseException) -> None:
        """Answers nothing until weights are loaded: which ones the server has is not known."""
        self._broken = (
            f"engine {self.capabilities.name}: {what}: {type(error).__name__}: {error}. Which "
            "weights its server runs is not known: load them again, or restart it."
        )
        self._fail_all(EngineError(self._broken))

    # -- replies ------------------------------------------------------------------------------

    def _send(
        self, reply: _ServedEntry, reason: FinishReason | None, stop: int | str | None = None
    ) -> None:
        """Hands over everything that is new, as the end of a segment, which has a token, or of the
        reply. Of a reply that streams, each token but the last one, which may be the end, is a
        delta of its own."""
        count = len(reply.token_ids)
        if reason == "weight_update" and count == reply.num_sent:
            return
        ends = [*range(reply.num_sent + 1, count)] if reply.request.stream else []
        for end in ends if reason is None else [*ends, count]:
            fresh, is_first, is_last = slice(reply.num_sent, end), not reply.deltas, end == count
            num_prefilled = len(reply.request.prompt_ids) - reply.num_cached if count else 0
            delta = Delta(
                token_ids=np.array(reply.token_ids[fresh], np.int32),
                logprobs=np.array(reply.logprobs[fresh], np.float32),
                policy_version=reply.call_version,
                finish_reason=reason if is_last else None,
                stop=stop if is_last else None,
                num_cached_tokens=reply.num_cached if is_first else 0,
                num_prefilled_tokens=num_prefilled if is_first else 0,
                routed_experts=self._routes_up_to(reply, end) if reply.routes else None,
                support=None if reply.support is None else Ragged.of(reply.support[fresh]),
                fingerprint=self.capabilities.fingerprint,
            )
            self._hand_out(reply, delta)

    def _routes_up_to(self, reply: _ServedEntry, stop_at: int) -> Routes:
        """Routes of the positions that were read for tokens before `stop_at`, not handed over."""
        held = np.concatenate(reply.routes)
        start = reply.num_routed - len(held)
        num = max(0, min(len(held), len(reply.request.prompt_ids) + stop_at - 1 - start))
        reply.routes = [held[num:]]
        return held[:num]

    def _abort_now(self, reply: _ServedEntry) -> None:
        """Ends a request here and now, with the tokens that it has."""
        self._send(reply, "abort")
        assert reply.task is not None, "started"
        reply.task.cancel()
        if reply.call_id:  # the server notices a closed connection in its own time
            self._aborts.start(self._send_abort(reply.call_id))

    async def _send_abort(self, call_id: str) -> None:
        with contextlib.suppress(EngineError):  # a server that is gone has ended the call as well
            await self.wire.abort(call_id)

    def _fail_all(self, error: EngineError) -> None:
        super()._fail_all(error)
        for call in self._calls:
            call.cancel()
