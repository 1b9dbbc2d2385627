"""`check_engine`: tests that an engine keeps the promises of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.engines.base import Engine
from lockstep.errors import EngineError
from lockstep.types import MAX_LOGPROB, Delta, Distribution, Request, SamplingParams

MAX_SECONDS = 60.0
"""Limit of one check; an engine that takes longer hangs."""

MAX_DIFFERING_ROUTES = 0.2
"""Share of a reply's routes that rounding may change when the reply is repeated. A shifted row
differs in nearly all of them."""


@dataclass(slots=True)
class EngineReport:
    """The checks that passed, and those that were skipped, with the reason."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


async def check_engine(
    engine: Engine,
    *,
    prompt_ids: Sequence[int],
    token_bytes: Sequence[bytes] | None = None,
    weights: Mapping[str, Any] | str | None = None,
    num_tokens: int = 12,
    page_size: int = 1,
    tolerance: float = 1e-4,
    seconds: float = MAX_SECONDS,
) -> EngineReport:
    """Raises EngineError, naming the check, if `engine` breaks a promise of the protocol.

    prompt_ids: a prompt after which the model does not stop at once. token_bytes: bytes of each id;
    without them stop strings are not checked. weights: argument for `load_weights`, unless the
    engine shares the trainer's. page_size: tokens of a known prefix that may be computed again.
    tolerance: largest difference of `score` from the log-probs recorded while sampling. The engine
    is left usable, with a higher version.

    Optional features are checked if `capabilities` claims them. Guard: tests/cpu/engines/
    test_check_engine.py breaks each promise.
    """
    checker = _Checker(engine, list(prompt_ids), num_tokens, tolerance)
    has = engine.capabilities
    report = EngineReport()
    checks: tuple[tuple[str, Callable[[], Awaitable[None]], str], ...] = (
        ("one reply", checker.one_reply, ""),
        ("many replies at once", checker.many_replies, ""),
        ("stop ids", checker.stop_ids, ""),
        ("streams", checker.streams, ""),
        ("seeds", checker.seeds, "has_seeds"),
        ("repeated ids", checker.repeated_ids, ""),
        ("distributions", checker.distributions, ""),
        ("support", checker.support, "has_support"),
        ("routed experts", checker.routed_experts, "has_routed_experts"),
        ("score", checker.score, "has_score"),
        ("prefix cache", partial(checker.prefix_cache, page_size), "has_prefix_cache"),
        ("stop strings", partial(checker.stop_strings, token_bytes or ()), "has_stop_strings"),
        ("bad requests", checker.bad_requests, ""),
        ("abort", checker.abort, ""),
        ("iterators closed early", checker.closed_early, ""),
        ("pause and resume", checker.pause_and_resume, ""),
        ("weights", partial(checker.weights, weights), ""),
        ("sleep and wake", checker.sleep_and_wake, "has_sleep"),
    )
    for name, check, claim in checks:
        if claim and not getattr(has, claim):
            report.skipped[name] = f"the engine does not claim {claim}"
        elif name == "stop strings" and not token_bytes:
            report.skipped[name] = "no token_bytes were given"
        elif name == "weights" and weights is None and not has.shares_weights:
            report.skipped[name] = "no weights were given"
        else:
            checker.name = name
            try:
                async with asyncio.timeout(seconds):
                    await check()
            except TimeoutError:
                raise EngineError(f"check_engine: {name}: no end after {seconds:g} s.") from None
            report.passed.append(name)
    return report


class _Checker:
    def __init__(
        self, engine: Engine, prompt_ids: list[int], num_tokens: int, tolerance: float
    ) -> None:
        self.engine, self.tolerance = engine, tolerance
        self.prompt_ids, self.num_tokens = prompt_ids, num_tokens
        self.limits = engine.capabilities
        self.greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        self.name = ""
        self._num_requests = 0

    def expect(self, holds: object, expected: str, found: object) -> None:
        if not holds:
            raise EngineError(f"check_engine: {self.name}: expected {expected}; found {found}.")

    def request(self, sampling: SamplingParams | None = None, **changes: Any) -> Request:
        self._num_requests += 1
        return Request(
            **{
                "id": f"check-{self._num_requests}-v{self.engine.version}",
                "prompt_ids": np.array(self.prompt_ids, np.int32),
                "sampling": sampling or self.greedy,
                **changes,
            }
        )

    def long_request(self, max_tokens: int = 4096) -> Request:
        """A stream that goes on long enough to be interrupted."""
        room = self.limits.max_tokens - len(self.prompt_ids)
        return self.request(SamplingParams(max_tokens=min(room, max_tokens)), stream=True)

    async def collect(self, request: Request) -> list[Delta]:
        """All deltas of a request, checked for what holds in every reply."""
        deltas = [delta async for delta in self.engine.generate(request)]
        self.hold(request, deltas)
        return deltas

    async def ids_of(self, request: Request) -> list[int]:
        return [int(i) for d in await self.collect(request) for i in d.token_ids]

    def hold(self, request: Request, deltas: Sequence[Delta]) -> None:
        sampling, expect = request.sampling, self.expect
        expect(deltas, "at least one delta", "none")
        for at, delta in enumerate(deltas):
            ids, values = np.asarray(delta.token_ids), np.asarray(delta.logprobs)
            expect(len(ids) == len(values), f"{len(ids)} log-probs for as many ids", len(values))
            is_logprob = np.isfinite(values) & (values <= MAX_LOGPROB)
            expect(is_logprob.all(), "log-probs that are finite and at most 0", values.tolist())
            is_known = (ids >= 0) & (ids < self.limits.vocab_size)
            expect(is_known.all(), "sampled ids of the vocabulary", ids.tolist())
            for name, found, asks in (
                ("support", delta.support, sampling.record_support and sampling.is_truncated),
                ("experts", delta.routed_experts, sampling.record_routes),
            ):
                if len(ids):
                    expect(
                        (found is not None) == asks,
                        f"the {name} of each token" if asks else f"no {name} unless asked",
                        "none" if asks else "some",
                    )
            if delta.support is not None:
                num = len(delta.support)
                expect(num == len(ids), f"a support of {len(ids)} tokens", num)
            if at + 1 < len(deltas):
                is_open = delta.finish_reason in (None, "weight_update")
                expect(is_open, "a finish reason on the last delta only", f"one on delta {at}")
        reason, total = deltas[-1].finish_reason, sum(len(d.token_ids) for d in deltas)
        is_end = reason in ("stop", "length", "abort")
        expect(is_end, "the last delta to say why the reply ended", reason)
        expect(total <= sampling.max_tokens, f"at most max_tokens={sampling.max_tokens} ids", total)
        room = self.limits.max_tokens - len(request.prompt_ids)
        is_full = total >= min(room, sampling.max_tokens)
        expect(is_full or reason != "length", f"{sampling.max_tokens} ids before 'length'", total)

    async def one_reply(self) -> None:
        deltas = await self.collect(self.request())
        self.expect(len(deltas) == 1, "one delta at the end where stream=False", len(deltas))
        first, version = deltas[0], self.engine.version
        self.expect(
            first.policy_version == version, f"policy_version {version}", first.policy_version
        )
        counted = first.num_cached_tokens + first.num_prefilled_tokens
        self.expect(
            counted == len(self.prompt_ids) or not self.limits.has_prefix_cache,
            f"cached and prefilled tokens to sum to {len(self.prompt_ids)}, the prompt's",
            counted,
        )

    async def many_replies(self) -> None:
        alone = await self.ids_of(self.request())
        for ids in await asyncio.gather(*(self.ids_of(self.request()) for _ in range(8))):
            self.expect(ids == alone, f"the greedy reply in company to be {alone}", ids)

    async def stop_ids(self) -> None:
        ids = await self.ids_of(self.request())
        stop = ids[len(ids) // 2]
        wanted = (ids[: ids.index(stop) + 1], "stop", stop)
        delta = (await self.collect(self.request(replace(self.greedy, stop_ids=(stop,)))))[-1]
        found = ([int(i) for i in delta.token_ids], delta.finish_reason, delta.stop)
        self.expect(found == wanted, f"(ids with the stop id, reason, stop) {wanted}", found)

    async def streams(self) -> None:
        whole = await self.ids_of(self.request())
        deltas = await self.collect(self.request(stream=True))
        parts = [[int(i) for i in d.token_ids] for d in deltas]
        self.expect(max(map(len, parts)) <= 1, "one delta per token where stream=True", parts)
        streamed = [i for part in parts for i in part]
        self.expect(streamed == whole, f"the stream to be the reply {whole}", streamed)

    async def distributions(self) -> None:
        base = SamplingParams(max_tokens=self.num_tokens, temperature=0.8, top_p=0.8)
        found: dict[str, Delta] = {}
        for name in self.limits.distributions:
            request = self.request(replace(base, distribution=name), seed=5)
            found[name] = (await self.collect(request))[-1]
        if not self.limits.has_seeds:
            return
        replies = {name: tuple(map(int, delta.token_ids)) for name, delta in found.items()}
        is_same = len(set(replies.values())) == 1
        self.expect(is_same, "the recorded distribution not to change what is drawn", replies)
        if {"tempered", "sampled"} <= set(found):
            gap = np.asarray(found["sampled"].logprobs) - np.asarray(found["tempered"].logprobs)
            self.expect(
                gap.min() >= -self.tolerance,
                "no token less likely after top_p than before",
                f"a log-prob that falls by {-gap.min():g}",
            )

    async def support(self) -> None:
        base = SamplingParams(
            max_tokens=self.num_tokens, temperature=0.8, distribution="sampled", record_support=True
        )
        await self.collect(self.request(base, seed=5))
        for top_p, top_k in ((1.0, 4), (0.8, 0), (0.8, 4), (1.0, 1)):
            sampling = replace(base, top_p=top_p, top_k=top_k)
            for stream in (False, True):
                for delta in await self.collect(self.request(sampling, seed=5, stream=stream)):
                    self._hold_support(delta, top_k, f"with top_p={top_p:g}, top_k={top_k}")
            if self.limits.has_seeds:
                found = await self.ids_of(self.request(sampling, seed=5))
                without = replace(sampling, record_support=False)
                wanted = await self.ids_of(self.request(without, seed=5))
                self.expect(found == wanted, f"recording not to change the reply {wanted}", found)

    def _hold_support(self, delta: Delta, top_k: int, where: str) -> None:
        support = () if delta.support is None else delta.support  # held to be there already
        for token_id, logprob, ids in zip(delta.token_ids, delta.logprobs, support, strict=False):
            kept = ids.tolist()
            if not kept and not top_k:
                continue  # the whole vocabulary
            is_set = len(set(kept)) == len(kept)
            is_known = all(0 <= i < self.limits.vocab_size for i in kept)
            self.expect(is_set and is_known, f"different known ids in a support {where}", kept)
            expected = f"the sampled id {int(token_id)} in its support {where}"
            self.expect(int(token_id) in kept, expected, kept)
            self.expect(not top_k or len(kept) <= top_k, f"at most {top_k} ids {where}", len(kept))
            is_sure = abs(float(logprob)) <= self.tolerance
            expected = f"the log-prob 0 of the only token that was left {where}"
            self.expect(len(kept) > 1 or is_sure, expected, logprob)

    async def routed_experts(self) -> None:
        sampling = replace(self.greedy, record_routes=True)
        whole = await self._routes_of(self.request(sampling), routes_from=0)
        for routes_from in (len(self.prompt_ids) - 1, len(self.prompt_ids)):
            for stream in (False, True):
                request = self.request(sampling, routes_from=routes_from, stream=stream)
                found = await self._routes_of(request, routes_from)
                differing = (np.sort(found) != np.sort(whole[routes_from:])).any(-1).mean()
                self.expect(
                    differing <= MAX_DIFFERING_ROUTES,
                    f"the experts of the same tokens again, from position {routes_from} on, also "
                    "where the prompt is cached",
                    f"others in {differing:.0%} of the layers",
                )
        without = await self.ids_of(self.request())
        found = await self.ids_of(self.request(sampling))
        self.expect(found == without, f"recording not to change the reply {without}", found)

    async def _routes_of(self, request: Request, routes_from: int) -> Any:
        deltas = await self.collect(request)
        found = np.concatenate([d.routed_experts for d in deltas if d.routed_experts is not None])
        num_sampled = sum(len(d.token_ids) for d in deltas)
        wanted = len(self.prompt_ids) + num_sampled - 1 - routes_from
        self.expect(
            found.ndim == 3 and len(found) == wanted,
            f"[{wanted}, layers, active] experts: of {len(self.prompt_ids)} prompt ids and "
            f"{num_sampled} sampled ones from position {routes_from} on, but for the last",
            list(found.shape),
        )
        differ = np.diff(np.sort(found.astype(np.int32))) != 0
        self.expect(differ.all(), "different experts in each slot of a layer", found.tolist())
        return found

    async def seeds(self) -> None:
        sampling = SamplingParams(max_tokens=self.num_tokens)
        alone = await self.ids_of(self.request(sampling, seed=17))
        others = [self.request(sampling, seed=seed) for seed in range(7)]
        again, *_ = await asyncio.gather(
            self.ids_of(self.request(sampling, seed=17)), *(self.ids_of(r) for r in others)
        )
        self.expect(again == alone, f"seed 17 to give {alone} again, in company", again)

    async def repeated_ids(self) -> None:
        request = self.request(SamplingParams(max_tokens=self.num_tokens), seed=3)
        first, second = await asyncio.gather(self.ids_of(request), self.ids_of(request))
        found = (first, second, await self.ids_of(request))
        is_same = found[0] == found[1] == found[2]
        self.expect(is_same, "one id to be answered with the same tokens", found)

    async def score(self) -> None:
        cases: tuple[tuple[Distribution, float], ...] = (("model", 1.0), ("tempered", 0.7))
        for distribution, temperature in cases:
            claimed = {*self.limits.distributions} & {*self.limits.scored_distributions}
            if distribution not in claimed and not (temperature == 1 and claimed):
                continue
            sampling = SamplingParams(
                max_tokens=self.num_tokens, temperature=temperature, distribution=distribution
            )
            delta = (await self.collect(self.request(sampling, seed=9)))[-1]
            path = np.concatenate([np.array(self.prompt_ids), delta.token_ids]).astype(np.int32)
            asked = partial(
                self.engine.score, path, distribution=distribution, temperature=temperature
            )
            num_given, version = len(self.prompt_ids), self.engine.version
            found, late = await asked(), await asked(first=num_given)
            scores = found.logprobs
            is_whole = len(scores) == len(path) and np.isnan(scores[0])
            self.expect(is_whole, f"{len(path)} scores, NaN at 0", scores.tolist())
            is_current = found.policy_version == version
            self.expect(is_current, f"scores of version {version}", found.policy_version)
            is_late = np.isnan(late.logprobs[:num_given]).all()
            self.expect(is_late, f"NaN before first={num_given}", late.logprobs.tolist())
            gap = max(np.abs(s[num_given:] - delta.logprobs).max() for s in (scores, late.logprobs))
            expected = f"score to agree with the recorded log-probs ({distribution}) to"
            self.expect(gap <= self.tolerance, f"{expected} {self.tolerance:g}", gap)

    async def prefix_cache(self, page_size: int) -> None:
        first = await self.ids_of(self.request(affinity="an episode"))
        path = [*self.prompt_ids, *first, *self.prompt_ids]
        request = self.request(prompt_ids=np.array(path, np.int32), affinity="an episode")
        found = (await self.collect(request))[0].num_cached_tokens
        # The last sampled id was never fed, so it is computed with the turn that follows.
        least = (len(self.prompt_ids) + len(first) - 1) // page_size * page_size
        expected = f"at least {least} of the second turn's {len(path)} prompt tokens to be cached"
        self.expect(found >= least, expected, found)

    async def stop_strings(self, token_bytes: Sequence[bytes]) -> None:
        ids = await self.ids_of(self.request())
        text = b"".join(token_bytes[i] for i in ids[:4])
        spans = [
            text[start:stop] for start in range(len(text)) for stop in range(len(text), start, -1)
        ]
        wanted = next(
            (s for span in spans if (s := span.decode(errors="ignore")).encode() == span), ""
        )
        if not wanted:
            return  # the first tokens are no text: nothing to wait for
        read, at = b"", 0
        while wanted.encode() not in read:
            read += token_bytes[ids[at]]
            at += 1
        sampling = replace(self.greedy, stop_strings=(wanted,))
        delta = (await self.collect(self.request(sampling)))[-1]
        found = ([int(i) for i in delta.token_ids], delta.finish_reason, delta.stop)
        expected = (ids[:at], "stop", wanted)
        self.expect(found == expected, f"(whole tokens, reason, stop) {expected}", found)

    async def bad_requests(self) -> None:
        bad = {
            "an id out of the vocabulary": [*self.prompt_ids, self.limits.vocab_size],
            "an empty prompt": [],
            "a prompt that leaves no room": [self.prompt_ids[0]] * self.limits.max_tokens,
        }
        for what, ids in bad.items():
            request = self.request(prompt_ids=np.array(ids, np.int32))
            await self._refused(request, f"EngineError for {what}")
        await self.collect(self.request())

    async def _refused(self, request: Request, expected: str) -> None:
        try:
            async for _ in self.engine.generate(request):
                pass
        except EngineError:
            return
        self.expect(False, expected, "an answer")

    async def abort(self) -> None:
        await self.engine.abort("an id that nobody used")
        request = self.long_request()
        deltas: list[Delta] = []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 2:
                await self.engine.abort(request.id)
        reason = deltas[-1].finish_reason
        is_ended = reason == "abort" or len(deltas) <= 4
        self.expect(is_ended, "an aborted reply to end with 'abort'", reason)
        await self.engine.abort(request.id)
        await self.collect(self.request())

    async def closed_early(self) -> None:
        deltas = self.engine.generate(self.long_request())
        async for _ in deltas:
            break
        if (close := getattr(deltas, "aclose", None)) is not None:
            await close()
        await self.collect(self.request())

    async def pause_and_resume(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self.collect(self.request())
        usual_seconds = loop.time() - started
        for kv in ("drop", "keep"):
            await self.engine.pause()
            running = asyncio.ensure_future(self.ids_of(self.request()))
            await asyncio.sleep(0.05 + 4 * usual_seconds)
            self.expect(not running.done(), "no token while paused", "a finished reply")
            await self.engine.resume(kv=kv)
            await running

    async def weights(self, weights: Mapping[str, Any] | str | None) -> None:
        before, request = self.engine.version, self.long_request(64)
        deltas: list[Delta] = []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                await self.engine.load_weights(weights, version=before + 1)
        self.hold(request, deltas)
        version = self.engine.version
        self.expect(version == before + 1, f"version {before + 1} after load_weights", version)
        reasons = [d.finish_reason for d in deltas]
        if "weight_update" not in reasons:
            is_over = len(deltas) <= 8
            self.expect(is_over, "a segment to end with 'weight_update'", reasons)
            return
        at = reasons.index("weight_update")
        found = [d.policy_version for d in deltas]
        wanted = [before] * (at + 1) + [before + 1] * (len(deltas) - at - 1)
        self.expect(found == wanted, f"the versions {wanted}", found)

    async def sleep_and_wake(self) -> None:
        wanted = await self.ids_of(self.request())
        await self.engine.sleep()
        await self._refused(self.request(), "EngineError for a request to a sleeping engine")
        await self.engine.wake()
        found = await self.ids_of(self.request())
        self.expect(found == wanted, f"the greedy reply after waking to be {wanted}", found)
