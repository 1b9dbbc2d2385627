"""One account of requests, kept alike by the embedded engine, served engines and the pool.

A ledger admits each request once, delivers each token once and in order, ends each request once,
and counts what happened. It also holds the engine's state (paused, asleep, closed, broken) and lets
requests wait for it to change.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.errors import CapabilityError, EngineDownError, EngineError
from lockstep.types import (
    Delta,
    Distribution,
    FinishReason,
    Int32Array,
    Ragged,
    Request,
    SamplingParams,
)

NUM_REMEMBERED = 4096
"""Ended replies that are kept, so that a repeated id is answered and not sampled again."""

CANCEL_SECONDS = 5.0
"""Longest wait for a cancelled task: a frozen engine may never end its part."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request in a ledger. An engine adds the fields that it needs to work on it."""

    request: Request
    deltas: list[Delta] = field(default_factory=list)
    num_sent: int = 0
    """Tokens delivered."""
    error: Exception | None = None
    is_done: bool = False
    is_aborted: bool = False
    """True once its end was requested: it is not resumed."""
    num_readers: int = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    """Task that works on it, in an engine that has one for each request."""

    @property
    def where(self) -> str:
        """Begins the messages about this request."""
        return f"request {self.request.id}"

    @property
    def sent_ids(self) -> Int32Array:
        """[T] int32: the tokens delivered."""
        return np.concatenate([np.empty(0, np.int32), *(delta.token_ids for delta in self.deltas)])

    @property
    def version(self) -> int | None:
        """Policy version of the last token that was delivered; None before the first."""
        return next((d.policy_version for d in reversed(self.deltas) if len(d.token_ids)), None)


E = TypeVar("E", bound=Entry)


class LedgerEngine(Engine, Generic[E]):
    """Base of the engines that keep an account of their requests: a repeated id gets the same
    tokens again. A subclass samples: `_start` begins a request, and the methods below `_changing`
    change the engine's state, one after another."""

    EVENTS: ClassVar[tuple[str, ...]]
    """Counters that `take_metrics` reports."""

    def __init__(self) -> None:
        self._running: dict[str, E] = {}
        """Requests that have not ended, by id."""
        self.stats: Counter[str] = Counter()
        """Events since the start; each kind of engine counts some."""
        self._is_paused = self._is_asleep = self._is_closed = False
        self._broken = ""
        """Why the engine cannot answer anything; empty if it can."""
        self._ended: OrderedDict[str, E] = OrderedDict()
        self._waiters: list[asyncio.Future[None]] = []
        self._reported: Counter[str] = Counter()
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}

    def take_metrics(self) -> dict[str, float]:
        found = {name: float(self.stats[name] - self._reported[name]) for name in self.EVENTS}
        self._reported = self.stats.copy()
        return found

    # -- state ------------------------------------------------------------------------------------

    @property
    def _may_sample(self) -> bool:
        return not (self._is_paused or self._is_asleep or self._is_closed)

    def _check_open(self) -> None:
        """Raises EngineError once the engine is closed."""
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def _check_ready(self, where: str) -> None:
        """Raises EngineError unless the engine takes requests, now or after a pause."""
        self._check_open()
        if self._is_asleep:
            raise EngineError(f"{where}: the engine is asleep; call wake() first.")
        if self._broken:
            raise EngineError(self._broken)

    async def _changed(self, seconds: float | None = None) -> None:
        """Waits for the next `_notify`, at most for `seconds`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await asyncio.wait([waiter], timeout=seconds)

    def _notify(self) -> None:
        """Wakes all coroutines that wait for a change of the state."""
        _wake(self._waiters)

    # -- requests ---------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self._check_open()
        entry = self._running.get(request.id) or self._ended.get(request.id)
        if entry is not None and _asked(entry.request) != _asked(request):
            raise EngineError(
                f"{entry.where}: the id was used for another prompt, seed, routes_from, adapter or "
                "sampling parameters. An id names one generation; make ids unique."
            )
        if entry is None:
            self._check_ready(f"request {request.id}")
            ids = checked_prompt(request, self.capabilities)
            check_abilities(request, self.capabilities)
            entry = self._start(request, ids)
            self.stats["requests"] += 1
            if not entry.is_done:
                self._running[request.id] = entry
        entry.num_readers += 1
        try:
            at = 0
            while True:
                while at < len(entry.deltas):
                    at += 1
                    yield entry.deltas[at - 1]
                if entry.error is not None:
                    raise entry.error.with_traceback(None)
                if entry.is_done:
                    return
                waiter = asyncio.get_running_loop().create_future()
                entry.waiters.append(waiter)
                await waiter
        finally:
            entry.num_readers -= 1
            if not entry.is_done and entry.num_readers == 0:
                await self._abandon(entry)

    def _hand_out(self, entry: E, delta: Delta) -> None:
        """Hands a delta to the readers of a request, unless it is a duplicate.

        Tokens of another version than the last ones begin a segment: if the last delta did not end
        its segment, an empty one with finish_reason "weight_update" is put between. Raises
        EngineDownError for a delta that leaves tokens out, or comes before its predecessors.
        """
        count = len(delta.token_ids)
        first = entry.num_sent if delta.first is None else delta.first
        if entry.is_done or (count and first + count <= entry.num_sent):
            return
        if count and first != entry.num_sent:
            raise EngineDownError(
                f"a delta of request {entry.request.id} begins at sampled token {first}; "
                f"{entry.num_sent} came before it: one was lost, or came out of order"
            )
        last = entry.deltas[-1] if entry.deltas else None
        if last and not last.finish_reason and last.policy_version != delta.policy_version:
            entry.deltas.append(end_delta(entry, "weight_update", version=last.policy_version))
        for array in (delta.token_ids, delta.logprobs, delta.routed_experts):
            if array is not None:
                array.setflags(write=False)
        entry.deltas.append(replace(delta, first=entry.num_sent))
        entry.num_sent += count
        if delta.finish_reason not in (None, "weight_update"):
            # Whoever repeats an aborted id wants an answer, not the news that somebody gave up.
            self._close_entry(entry, is_forgotten=delta.finish_reason == "abort")
        _wake(entry.waiters)

    def _fail_entry(self, entry: E, error: Exception, *, doing: str = "") -> None:
        """Ends a request with an error, which its readers get. A repeated id is sampled anew.

        doing: begins the message of an unexpected error.
        """
        if entry.is_done:
            return
        if not isinstance(error, EngineError):
            unforeseen = error
            error = EngineError(f"{entry.where}: {doing}: {type(error).__name__}: {error}")
            error.__cause__ = unforeseen
        self.stats["failed_requests"] += 1
        entry.error = error
        self._close_entry(entry, is_forgotten=True)
        _wake(entry.waiters)

    def _close_entry(self, entry: E, *, is_forgotten: bool) -> None:
        entry.is_done = True
        self._running.pop(entry.request.id, None)
        if not is_forgotten:
            self._ended[entry.request.id] = entry
            if len(self._ended) > NUM_REMEMBERED:
                self._ended.popitem(last=False)

    def _start(self, request: Request, ids: Int32Array) -> E:
        """Begins a new request. ids: its prompt."""
        raise NotImplementedError

    async def _abandon(self, entry: E) -> None:
        """Ends a request that nobody reads."""
        await self._abort(entry)

    async def abort(self, request_id: str) -> None:
        if (entry := self._running.get(request_id)) is not None:
            entry.is_aborted = True
            await self._abort(entry)

    async def _abort(self, entry: E) -> None:
        """Ends a request with its tokens so far."""
        raise NotImplementedError

    async def score(
        self,
        token_ids: Int32Array,
        *,
        distribution: Distribution = "model",
        temperature: float = 1.0,
        first: int = 1,
        **request: Any,
    ) -> Scores:
        found = self.capabilities
        check_scoring(found, distribution, temperature)
        if first < 1:
            raise EngineError(f"score: first={first} must be at least 1: nothing predicts id 0.")
        if len(token_ids) > found.max_tokens:
            raise EngineError(
                f"score: the text has {len(token_ids)} tokens; engine {found.name} holds "
                f"{found.max_tokens}."
            )
        ids = checked_ids(np.asarray(token_ids), vocab_size=found.vocab_size, where="score")
        self._check_ready("score")
        heat = temperature if distribution == "tempered" else 1.0
        sampling = SamplingParams(max_tokens=1, temperature=heat)
        text = Request(id="score", prompt_ids=ids, sampling=sampling, **request)
        return await self._score(text, first=first)

    async def _score(self, request: Request, *, first: int) -> Scores:
        """`score` of checked ids, the prompt of `request`, at its temperature."""
        raise NotImplementedError

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """A block that changes the engine's state, after the blocks before it. Each event loop has
        a lock of its own. Raises EngineError if the engine is closed."""
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            self._check_open()
            yield

    async def pause(self) -> None:
        async with self._changing():
            await self._suspend()
            self._is_paused = True

    async def _suspend(self) -> None:
        """Returns when no step is running."""

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        async with self._changing():
            if self._is_paused:
                self._is_paused = False
                await self._proceed(drop_cache=kv == "drop")

    async def _proceed(self, *, drop_cache: bool) -> None:
        """Samples again, unless it is paused, asleep or closed."""

    async def sleep(self) -> None:
        """Requests in flight keep their place and continue after `wake`; new ones are refused."""
        async with self._changing():
            if not self.capabilities.has_sleep:
                raise CapabilityError(
                    f"sleep: engine {self.capabilities.name} cannot give its memory back. Give the "
                    "trainer a device of its own."
                )
            if not self._is_asleep:
                await self._free_memory()
                self._is_asleep = True

    async def _free_memory(self) -> None: ...

    async def wake(self) -> None:
        async with self._changing():
            if self._is_asleep:
                await self._take_memory()
                self._is_asleep = False
                await self._proceed(drop_cache=False)

    async def _take_memory(self) -> None: ...

    async def ping(self) -> None:
        self._check_open()

    async def close(self) -> None:
        """Requests in flight fail."""
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [entry.task for entry in self._running.values()]
        self._fail_all(EngineError("the engine was closed while the request was in flight."))
        for task in tasks:
            await cancel(task)
        await self._close()

    def _fail_all(self, error: EngineError) -> None:
        for entry in list(self._running.values()):
            self._fail_entry(entry, error)
        self._notify()

    async def _close(self) -> None:
        """Frees what the engine holds."""


async def cancel(task: asyncio.Task[Any] | None) -> None:
    """Ends a task of this event loop and waits for its end. Ignores the calling task."""
    if task is None or task.done() or task is asyncio.current_task():
        return
    if task.get_loop() is not asyncio.get_running_loop():
        return
    task.cancel()
    await asyncio.wait([task], timeout=CANCEL_SECONDS)


def end_delta(
    entry: Entry, reason: FinishReason, *, version: int, stop: int | str | None = None
) -> Delta:
    """A delta without tokens that ends a segment or a reply."""
    last = next((delta for delta in reversed(entry.deltas) if len(delta.token_ids)), None)
    if last is None:
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        last = Delta(token_ids=ids, logprobs=logprobs, policy_version=version)
    return replace(
        last,
        token_ids=last.token_ids[:0],
        logprobs=last.logprobs[:0],
        finish_reason=reason,
        stop=stop,
        num_cached_tokens=0,
        num_prefilled_tokens=0,
        first=entry.num_sent,
        support=None if last.support is None else Ragged.of([]),
        routed_experts=None if last.routed_experts is None else last.routed_experts[:0],
    )


def limit_of(request: Request, limits: Capabilities) -> int:
    """Tokens to sample: the request's max_tokens, or less if the engine has less room."""
    return min(request.sampling.max_tokens, limits.max_tokens - len(request.prompt_ids))


def ending_of(
    request: Request, token_ids: Sequence[int] | Int32Array, limits: Capabilities
) -> tuple[FinishReason, int | None] | None:
    """(reason, stop id) of a reply of these tokens; None if it goes on."""
    if len(token_ids) and token_ids[-1] in request.sampling.stop_ids:
        return "stop", int(token_ids[-1])
    return ("length", None) if len(token_ids) >= limit_of(request, limits) else None


def seed_after(seed: int, count: int) -> int:
    """A seed in [0, 2^31), which every server takes, for the draws after the first `count`."""
    digest = hashlib.blake2b(f"{seed}/{count}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def rest_of(
    request: Request, token_ids: Sequence[int] | Int32Array, limits: Capabilities, *, call_id: str
) -> Request:
    """The request for the rest of a reply after `token_ids`.

    If an engine counts draws from the start of a call, the request gets another seed, since the
    same one would repeat the draws of the beginning.
    """
    count = len(token_ids)
    keeps_seed = limits.has_positional_draws or not count
    return replace(
        request,
        id=call_id,
        prompt_ids=np.concatenate([request.prompt_ids, token_ids]).astype(np.int32),
        sampling=replace(request.sampling, max_tokens=limit_of(request, limits) - count),
        seed=request.seed if keeps_seed else seed_after(request.seed, count),
    )


def equal_distributions(sampling: SamplingParams) -> frozenset[Distribution]:
    """The distributions whose log-probs equal the log-probs of `sampling.distribution`. These are
    all distributions at temperature 1 without top-p and top-k.

    >>> sorted(equal_distributions(SamplingParams(max_tokens=1, temperature=0.7)))
    ['sampled', 'tempered']
    >>> sorted(equal_distributions(SamplingParams(max_tokens=1, top_p=0.9)))
    ['model', 'tempered']

    A greedy request records the model's log-probs; no server knows another distribution for it.
    """
    heat = sampling.temperature or 1.0
    made: dict[Distribution, tuple[float, bool]] = {
        "model": (1.0, False),
        "tempered": (heat, False),
        "sampled": (heat, sampling.is_truncated),
    }
    return frozenset(name for name in made if made[name] == made[sampling.distribution])


def check_abilities(request: Request, limits: Capabilities) -> None:
    """Raises CapabilityError for a request of something that the engine cannot do."""
    sampling, lack = request.sampling, ""
    if not equal_distributions(sampling) & set(limits.distributions):
        lack = (
            f"records log-probs of {', '.join(limits.distributions)}, and not of the distribution "
            f"{sampling.distribution!r} at temperature={sampling.temperature:g}, "
            f"top_p={sampling.top_p:g}, top_k={sampling.top_k}"
        )
    elif sampling.stop_strings and not limits.has_stop_strings:
        lack = "has no stop strings"
    elif sampling.grammar and not limits.has_grammar:
        lack = "constrains no reply by a grammar"
    elif request.adapter and not limits.has_adapters:
        lack = f"has no adapter {request.adapter!r}"
    elif sampling.record_support and sampling.is_truncated and not limits.has_support:
        lack = "does not hand back what top_p and top_k kept (record_support)"
    elif sampling.record_routes and not limits.has_routed_experts:
        lack = "does not hand back routed experts (record_routes)"
    if lack:
        raise CapabilityError(f"request {request.id}: engine {limits.name} {lack}.")


def check_source(source: Mapping[str, Any] | str | None, limits: Capabilities) -> None:
    """Raises CapabilityError for weights in a form that the engine does not take. A path may be a
    checkpoint or an adapter."""
    forms = ("shared",) if source is None else ("tensors",)
    if isinstance(source, str):
        forms = ("directory", "adapter")
    if not set(forms) & set(limits.weight_sources):
        raise CapabilityError(
            f"load_weights: engine {limits.name} takes "
            f"{' or '.join(limits.weight_sources) or 'no new weights at all'}; found "
            f"{' or '.join(forms)}."
        )


def checked_prompt(request: Request, limits: Capabilities) -> Int32Array:
    """[T] int32. Raises EngineError for a prompt that is empty, too long, or has an id outside of
    the vocabulary."""
    where, ids = f"request {request.id}", np.asarray(request.prompt_ids)
    if not len(ids):
        raise EngineError(f"{where}: the prompt is empty; at least one id is needed.")
    if len(ids) >= limits.max_tokens:
        raise EngineError(
            f"{where}: the prompt has {len(ids)} tokens; engine {limits.name} holds "
            f"{limits.max_tokens} tokens of prompt and reply."
        )
    if request.sampling.record_routes and not 0 <= request.routes_from <= len(ids):
        raise EngineError(
            f"{where}: routes_from={request.routes_from} lies outside of its {len(ids)} prompt ids."
        )
    return checked_ids(ids, vocab_size=limits.vocab_size, where=where)


def check_scoring(limits: Capabilities, distribution: Distribution, temperature: float) -> None:
    """Raises CapabilityError or EngineError if ids cannot be scored under this distribution."""
    if not limits.has_score:
        raise CapabilityError(f"score: engine {limits.name} cannot score given ids.")
    if distribution == "sampled":
        raise CapabilityError(
            "score: the distribution after top-p and top-k cannot be scored; expected 'model' or "
            "'tempered'."
        )
    if temperature != 1 and distribution not in limits.scored_distributions:
        raise CapabilityError(
            f"score: engine {limits.name} scores under {', '.join(limits.scored_distributions)}, "
            f"and not under {distribution!r} at temperature={temperature:g}."
        )
    if distribution == "tempered" and temperature <= 0:
        raise EngineError(f"score: temperature={temperature} must be above 0.")


def checked_ids(ids: np.ndarray, *, vocab_size: int, where: str) -> Int32Array:
    """[T] int32. Raises EngineError that names the first id outside of the vocabulary."""
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise EngineError(
            f"{where}: token {at} has the id {int(ids[at])}; the vocabulary has the ids "
            f"0..{vocab_size - 1}. The tokenizer of another model?"
        )
    return ids.astype(np.int32)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


def _asked(request: Request) -> tuple[object, ...]:
    prompt = np.asarray(request.prompt_ids, np.int64).tobytes()
    return prompt, request.seed, request.sampling, request.routes_from, request.adapter


def no_adapter(where: str, name: str, loaded: Iterable[str]) -> EngineError:
    """The error for an adapter that an engine does not have."""
    return EngineError(
        f"{where}: the engine has no adapter {name!r}; loaded are: {', '.join(loaded) or 'none'}. "
        "load_adapter loads one."
    )
