"""Tests that an engine keeps the promises of the protocol; my_engine.py shows how it is called.

report = await check_engine(MyEngine(...), prompt_ids=[3, 1, 4])
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.engines.base import Capabilities, Engine
from lockstep.errors import EngineError
from lockstep.types import MAX_LOGPROB, Delta, Request, SamplingParams

MAX_SECONDS = 60.0
"""Limit of one check; an engine that takes longer hangs."""

MAX_DIFFERING_ROUTES = 0.2
"""Share of a reply's routes that rounding may change when the reply is repeated. A shifted row
differs in nearly all of them."""


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
DRAWN = SamplingParams(max_tokens=8)


@dataclass(slots=True)
class EngineReport:
    """The checks that passed, and skipped checks with the reason."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


async def check_engine(
    engine: Engine,
    *,
    prompt_ids: Sequence[int],
    token_bytes: Sequence[bytes] | None = None,
    weights: Mapping[str, Any] | str | None = None,
    page_size: int = 1,
    tolerance: float = 1e-4,
) -> EngineReport:
    """Raises EngineError, naming the check, if `engine` breaks a promise of the protocol.

    prompt_ids: a prompt whose reply does not stop at once. token_bytes: bytes of each id; without
    them stop strings are not checked. weights: argument for `load_weights`, unless the
    engine shares the trainer's. page_size: tokens of a known prefix that may be computed again.
    tolerance: largest difference of `score` from the log-probs recorded while sampling. The engine
    is left usable, with a higher version.

    Optional features are checked if `capabilities` claims them. Guard: tests/cpu/engines/
    test_check_engine.py breaks each promise.
    """
    checker = _Checker(engine, prompt_ids, token_bytes or (), weights, page_size, tolerance)
    report = EngineReport()
    for method, check in vars(_Checker).items():
        if method.startswith("_") or not inspect.iscoroutinefunction(check):
            continue
        checker.name = name = method.replace("_", " ")
        if reason := checker.why_skipped(name):
            report.skipped[name] = reason
            continue
        try:
            async with asyncio.timeout(MAX_SECONDS):
                await check(checker)
        except TimeoutError:
            raise EngineError(f"check_engine: {name}: no end after {MAX_SECONDS:g} s.") from None
        report.passed.append(name)
    return report


_CLAIMS = {
    "seeds": "has_seeds",
    "support": "has_support",
    "routed experts": "has_routed_experts",
    "score": "has_score",
    "prefix cache": "has_prefix_cache",
    "stop strings": "has_stop_strings",
    "sleep and wake": "has_sleep",
}
"""Check -> the capability that it is for."""


@dataclass(slots=True)
class _Checker:
    """Each public coroutine is a check."""

    engine: Engine
    prompt_ids: Sequence[int]
    token_bytes: Sequence[bytes]
    source: Mapping[str, Any] | str | None
    page_size: int
    tolerance: float
    name: str = ""
    num_requests: int = 0

    @property
    def limits(self) -> Capabilities:
        return self.engine.capabilities

    def why_skipped(self, name: str) -> str:
        if (claim := _CLAIMS.get(name)) and not getattr(self.limits, claim):
            return f"the engine does not claim {claim}"
        if name == "stop strings" and not self.token_bytes:
            return "no token_bytes were given"
        if name == "weights" and self.source is None and not self.limits.shares_weights:
            return "no weights were given"
        return ""

    def expect(self, holds: object, expected: str, found: object) -> None:
        if not holds:
            raise EngineError(f"check_engine: {self.name}: expected {expected}; found {found}.")

    def equal(self, what: str, found: object, wanted: object) -> None:
        self.expect(found == wanted, f"{what} to be {wanted}", found)

    # -- asking -----------------------------------------------------------------------------------

    def request(self, sampling: SamplingParams | None = None, **changes: Any) -> Request:
        self.num_requests += 1
        name = f"check-{self.num_requests}-v{self.engine.version}"
        ids = np.array(changes.pop("prompt_ids", self.prompt_ids), np.int32)
        return Request(id=name, prompt_ids=ids, sampling=sampling or GREEDY, **changes)

    def long_request(self, max_tokens: int = 4096) -> Request:
        """A stream that goes on long enough to be interrupted."""
        room = self.limits.max_tokens - len(self.prompt_ids)
        return self.request(SamplingParams(max_tokens=min(room, max_tokens)), stream=True)

    async def _collect(self, request: Request) -> list[Delta]:
        """All deltas of a request, checked for the promises of every reply."""
        deltas = [delta async for delta in self.engine.generate(request)]
        self._hold(request, deltas)
        return deltas

    async def _ask(self, sampling: SamplingParams | None = None, **changes: Any) -> list[Delta]:
        return await self._collect(self.request(sampling, **changes))

    async def _ids(self, sampling: SamplingParams | None = None, **changes: Any) -> list[int]:
        return _ids(await self._ask(sampling, **changes))

    def _hold(self, request: Request, deltas: Sequence[Delta]) -> None:
        sampling = request.sampling
        self.expect(deltas, "at least one delta", "none")
        for at, delta in enumerate(deltas):
            ids, values = np.asarray(delta.token_ids), np.asarray(delta.logprobs)
            self.equal("the number of log-probs", len(values), len(ids))
            is_logprob = np.isfinite(values) & (values <= MAX_LOGPROB)
            self.expect(is_logprob.all(), "finite log-probs of at most 0", values.tolist())
            is_known = (ids >= 0) & (ids < self.limits.vocab_size)
            self.expect(is_known.all(), "sampled ids of the vocabulary", ids.tolist())
            if len(ids):
                has_support = sampling.record_support and sampling.is_truncated
                self.equal("whether it has a support", delta.support is not None, has_support)
                has_routes = delta.routed_experts is not None
                self.equal("whether it has experts", has_routes, sampling.record_routes)
            if delta.support is not None:
                self.equal("the tokens of the support", len(delta.support), len(ids))
            if delta is not deltas[-1]:
                is_open = delta.finish_reason in (None, "weight_update")
                self.expect(is_open, "a finish reason on the last delta only", f"one on delta {at}")
        reason, total = deltas[-1].finish_reason, len(_ids(deltas))
        is_end = reason in ("stop", "length", "abort")
        self.expect(is_end, "the last delta to say why the reply ended", reason)
        most = min(self.limits.max_tokens - len(request.prompt_ids), sampling.max_tokens)
        is_right = total == most if reason == "length" else total <= most
        self.expect(is_right, f"{most} ids before 'length', and at most these", total)

    async def _refused(self, what: str, request: Request) -> None:
        try:
            deltas = [delta async for delta in self.engine.generate(request)]
        except EngineError:
            return
        self.expect(False, f"EngineError for {what}", f"the answer {_ids(deltas)}")

    # -- the checks -------------------------------------------------------------------------------

    async def one_reply(self) -> None:
        deltas = await self._ask()
        self.equal("the number of deltas where stream=False", len(deltas), 1)
        self.equal("policy_version", deltas[0].policy_version, self.engine.version)
        if self.limits.has_prefix_cache:
            counted = deltas[0].num_cached_tokens + deltas[0].num_prefilled_tokens
            self.equal("the sum of cached and prefilled tokens", counted, len(self.prompt_ids))

    async def many_replies_at_once(self) -> None:
        alone = await self._ids()
        for ids in await asyncio.gather(*(self._ids() for _ in range(8))):
            self.equal("the greedy reply in company", ids, alone)

    async def stop_ids(self) -> None:
        ids = await self._ids()
        stop = ids[len(ids) // 2]
        *_, last = await self._ask(replace(GREEDY, stop_ids=(stop,)))
        wanted = (ids[: ids.index(stop) + 1], "stop", stop)
        self.equal("(ids with the stop id, reason, stop)", _end(last), wanted)

    async def streams(self) -> None:
        whole = await self._ids()
        deltas = await self._ask(stream=True)
        sizes = [len(delta.token_ids) for delta in deltas]
        self.expect(max(sizes) <= 1, "one delta per token where stream=True", sizes)
        self.equal("the stream", _ids(deltas), whole)

    async def seeds(self) -> None:
        alone = await self._ids(DRAWN, seed=17)
        asked = [self._ids(DRAWN, seed=seed) for seed in (17, *range(7))]
        again, *_ = await asyncio.gather(*asked)
        self.equal("the reply of seed 17 in company", again, alone)

    async def repeated_ids(self) -> None:
        request = self.request(DRAWN, seed=3)
        first, second = await asyncio.gather(self._collect(request), self._collect(request))
        self.equal("the answer to a running id", _ids(second), _ids(first))
        self.equal("the answer to a known id", _ids(await self._collect(request)), _ids(first))

    async def distributions(self) -> None:
        base = replace(DRAWN, temperature=0.8, top_p=0.8)
        found: dict[str, Delta] = {}
        for name in self.limits.distributions:
            *_, found[name] = await self._ask(replace(base, distribution=name), seed=5)
        if not self.limits.has_seeds:
            return
        for name, delta in found.items():
            drawn = _ids([found[self.limits.distributions[0]]])
            self.equal(f"ids drawn while {name} is recorded", _ids([delta]), drawn)
        if {"tempered", "sampled"} <= set(found):
            gap = np.asarray(found["sampled"].logprobs) - np.asarray(found["tempered"].logprobs)
            expected = "no token less likely after top_p than before"
            self.expect(gap.min() >= -self.tolerance, expected, f"{-gap.min():g} less")

    async def support(self) -> None:
        base = replace(DRAWN, temperature=0.8, distribution="sampled", record_support=True)
        await self._ask(base, seed=5)
        for top_p, top_k in ((1.0, 4), (0.8, 0), (0.8, 4), (1.0, 1)):
            sampling = replace(base, top_p=top_p, top_k=top_k)
            for stream in (False, True):
                for delta in await self._ask(sampling, seed=5, stream=stream):
                    self._hold_support(delta, top_k, f"with top_p={top_p:g}, top_k={top_k}")
            if self.limits.has_seeds:
                without = await self._ids(replace(sampling, record_support=False), seed=5)
                self.equal("the recorded reply", await self._ids(sampling, seed=5), without)

    def _hold_support(self, delta: Delta, top_k: int, where: str) -> None:
        for token_id, logprob, ids in zip(
            delta.token_ids.tolist(), delta.logprobs, delta.support or (), strict=False
        ):
            kept = ids.tolist()
            if not kept and not top_k:
                continue  # the whole vocabulary
            is_known = all(0 <= i < self.limits.vocab_size for i in kept)
            is_set = is_known and len(set(kept)) == len(kept)
            self.expect(is_set, f"different known ids in a support {where}", kept)
            self.expect(token_id in kept, f"the sampled id {token_id} in it {where}", kept)
            self.expect(not top_k or len(kept) <= top_k, f"at most {top_k} ids {where}", kept)
            is_sure = len(kept) > 1 or abs(float(logprob)) <= self.tolerance
            self.expect(is_sure, f"the log-prob 0 of the only id that was left {where}", logprob)

    async def routed_experts(self) -> None:
        sampling, num_given = replace(GREEDY, record_routes=True), len(self.prompt_ids)
        self.equal("the recorded reply", await self._ids(sampling), await self._ids())
        whole = self._routes(await self._ask(sampling), 0)
        for begin in (num_given - 1, num_given):
            for stream in (False, True):
                deltas = await self._ask(sampling, routes_from=begin, stream=stream)
                found = self._routes(deltas, begin)
                differing = (np.sort(found) != np.sort(whole[begin:])).any(-1).mean()
                expected = f"the experts of the same tokens again from position {begin} on"
                is_same = differing <= MAX_DIFFERING_ROUTES
                self.expect(is_same, expected, f"others in {differing:.0%} of the layers")

    def _routes(self, deltas: Sequence[Delta], begin: int) -> Any:
        """The experts of all positions from `begin` on."""
        found = np.concatenate([d.routed_experts for d in deltas if d.routed_experts is not None])
        wanted = len(self.prompt_ids) + len(_ids(deltas)) - 1 - begin
        expected = f"[{wanted}, layers, active] experts: of all ids from {begin} on but the last"
        self.expect(found.ndim == 3 and len(found) == wanted, expected, list(found.shape))
        differ = np.diff(np.sort(found.astype(np.int32))) != 0
        self.expect(differ.all(), "different experts in each slot of a layer", found.tolist())
        return found

    async def score(self) -> None:
        claimed = {*self.limits.distributions} & {*self.limits.scored_distributions}
        num_given = len(self.prompt_ids)
        for distribution, temperature in (("model", 1.0), ("tempered", 0.7)):
            if distribution not in claimed and not (temperature == 1 and claimed):
                continue
            how: Any = {"distribution": distribution, "temperature": temperature}
            *_, delta = await self._ask(replace(DRAWN, **how), seed=9)
            path = np.concatenate([self.prompt_ids, delta.token_ids]).astype(np.int32)
            for first in (1, num_given):
                version = self.engine.version
                scores = await self.engine.score(path, first=first, **how)
                self.equal("the version of scores", scores.policy_version, version)
                found = scores.logprobs
                is_whole = len(found) == len(path) and np.isnan(found[:first]).all()
                self.expect(is_whole, f"{len(path)} scores, NaN before {first}", found.tolist())
                gap = np.abs(found[num_given:] - delta.logprobs).max()
                expected = f"score to agree with the recorded log-probs ({distribution})"
                self.expect(gap <= self.tolerance, expected, gap)

    async def prefix_cache(self) -> None:
        first = await self._ids(affinity="an episode")
        path = [*self.prompt_ids, *first, *self.prompt_ids]
        found = (await self._ask(prompt_ids=path, affinity="an episode"))[0].num_cached_tokens
        # The last sampled id was never fed, so it is computed with the turn that follows.
        least = (len(self.prompt_ids) + len(first) - 1) // self.page_size * self.page_size
        self.expect(found >= least, f"{least} of {len(path)} prompt tokens to be cached", found)

    async def stop_strings(self) -> None:
        ids, token_bytes = await self._ids(), self.token_bytes
        begin = b"".join(token_bytes[i] for i in ids[:4])
        wanted = begin.decode(errors="ignore")
        if wanted.encode() not in begin:  # parts of characters were left out
            wanted = wanted[:1]
        if not wanted:
            return  # the first tokens are no text: nothing to wait for
        num = 1
        while wanted.encode() not in b"".join(token_bytes[i] for i in ids[:num]):
            num += 1
        *_, last = await self._ask(replace(GREEDY, stop_strings=(wanted,)))
        self.equal("(whole tokens, reason, stop)", _end(last), (ids[:num], "stop", wanted))

    async def bad_requests(self) -> None:
        for what, ids in (
            ("an id out of the vocabulary", [*self.prompt_ids, self.limits.vocab_size]),
            ("an empty prompt", []),
            ("a prompt that leaves no room", [self.prompt_ids[0]] * self.limits.max_tokens),
        ):
            await self._refused(what, self.request(prompt_ids=ids))
        await self._ask()

    async def abort(self) -> None:
        await self.engine.abort("an id that nobody used")
        request, deltas = self.long_request(), []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 2:
                await self.engine.abort(request.id)
        reason = deltas[-1].finish_reason
        is_ended = reason == "abort" or len(deltas) <= 4
        self.expect(is_ended, "an aborted reply to end with 'abort'", reason)
        await self.engine.abort(request.id)
        await self._ask()

    async def iterators_closed_early(self) -> None:
        deltas: Any = self.engine.generate(self.long_request())
        await anext(deltas)
        if hasattr(deltas, "aclose"):
            await deltas.aclose()
        await self._ask()

    async def pause_and_resume(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self._ask()
        usual_seconds = loop.time() - started
        for kv in ("drop", "keep"):
            await self.engine.pause()
            running = asyncio.ensure_future(self._ask())
            await asyncio.sleep(0.05 + 4 * usual_seconds)
            self.expect(not running.done(), "no token while paused", "a finished reply")
            await self.engine.resume(kv=kv)
            await running

    async def weights(self) -> None:
        before, request = self.engine.version, self.long_request(64)
        deltas: list[Delta] = []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                await self.engine.load_weights(self.source, version=before + 1)
        self._hold(request, deltas)
        self.equal("the version after load_weights", self.engine.version, before + 1)
        reasons = [delta.finish_reason for delta in deltas]
        if "weight_update" not in reasons:
            is_over = len(deltas) <= 8
            self.expect(is_over, "a segment to end with 'weight_update'", reasons)
            return
        num_old = reasons.index("weight_update") + 1
        wanted = [before] * num_old + [before + 1] * (len(deltas) - num_old)
        self.equal("the versions", [delta.policy_version for delta in deltas], wanted)

    async def sleep_and_wake(self) -> None:
        wanted = await self._ids()
        await self.engine.sleep()
        await self._refused("a request to a sleeping engine", self.request())
        await self.engine.wake()
        self.equal("the greedy reply after waking", await self._ids(), wanted)


def _ids(deltas: Sequence[Delta]) -> list[int]:
    return [int(id_) for delta in deltas for id_ in delta.token_ids]


def _end(delta: Delta) -> tuple[list[int], str | None, int | str | None]:
    return _ids([delta]), delta.finish_reason, delta.stop
