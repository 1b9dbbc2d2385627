"""`check_engine`: tests that an engine keeps the promises of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

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
        self.greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        self.name = ""
        self._num_requests = 0

    def fail(self, expected: str, found: object) -> NoReturn:
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

    async def collect(self, request: Request) -> list[Delta]:
        """All deltas of a request, checked for what holds in every reply."""
        deltas = [delta async for delta in self.engine.generate(request)]
        self.hold(request, deltas)
        return deltas

    async def ids_of(self, request: Request) -> list[int]:
        return [int(i) for d in await self.collect(request) for i in d.token_ids]

    def hold(self, request: Request, deltas: Sequence[Delta]) -> None:
        if not deltas:
            self.fail("at least one delta", "none")
        for at, delta in enumerate(deltas):
            if len(delta.token_ids) != len(delta.logprobs):
                self.fail(f"{len(delta.token_ids)} log-probs for as many ids", len(delta.logprobs))
            values = np.asarray(delta.logprobs)
            if not (np.isfinite(values) & (values <= MAX_LOGPROB)).all():
                self.fail("log-probs that are finite and at most 0", values.tolist())
            ids = np.asarray(delta.token_ids)
            if ((ids < 0) | (ids >= self.engine.capabilities.vocab_size)).any():
                self.fail("sampled ids of the vocabulary", ids.tolist())
            asks = request.sampling.record_support and request.sampling.is_truncated
            if len(ids) and (delta.support is not None) != asks:
                wanted = "the support of each token" if asks else "no support where none is asked"
                self.fail(wanted, "none" if asks else "one")
            if delta.support is not None and len(delta.support) != len(ids):
                self.fail(f"a support of {len(ids)} tokens", len(delta.support))
            asks = request.sampling.record_routes
            if len(ids) and (delta.routed_experts is not None) != asks:
                wanted = "the experts of what was read" if asks else "no experts where none asked"
                self.fail(wanted, "none" if asks else "some")
            if at + 1 < len(deltas) and delta.finish_reason not in (None, "weight_update"):
                self.fail("a finish reason on the last delta only", f"one on delta {at}")
        last = deltas[-1]
        if last.finish_reason not in ("stop", "length", "abort"):
            self.fail("the last delta to say why the reply ended", last.finish_reason)
        total = sum(len(d.token_ids) for d in deltas)
        if total > request.sampling.max_tokens:
            self.fail(f"at most max_tokens={request.sampling.max_tokens} ids", total)
        if last.finish_reason == "length" and total < request.sampling.max_tokens:
            room = self.engine.capabilities.max_tokens - len(request.prompt_ids)
            if total < room:
                self.fail(f"{request.sampling.max_tokens} ids before 'length'", total)

    async def one_reply(self) -> None:
        request = self.request()
        deltas = await self.collect(request)
        if len(deltas) != 1:
            self.fail("one delta at the end where stream=False", len(deltas))
        if deltas[0].policy_version != self.engine.version:
            self.fail(f"policy_version {self.engine.version}", deltas[0].policy_version)
        first = deltas[0]
        counted = first.num_cached_tokens + first.num_prefilled_tokens
        if self.engine.capabilities.has_prefix_cache and counted != len(self.prompt_ids):
            self.fail(
                f"cached and prefilled tokens to sum to {len(self.prompt_ids)}, the prompt's",
                counted,
            )

    async def many_replies(self) -> None:
        alone = await self.ids_of(self.request())
        together = await asyncio.gather(*(self.ids_of(self.request()) for _ in range(8)))
        for ids in together:
            if ids != alone:
                self.fail(f"the greedy reply in company to be {alone}", ids)

    async def stop_ids(self) -> None:
        ids = await self.ids_of(self.request())
        stop = ids[len(ids) // 2]
        wanted = ids[: ids.index(stop) + 1]
        delta = (await self.collect(self.request(replace(self.greedy, stop_ids=(stop,)))))[-1]
        found = [int(i) for i in delta.token_ids]
        if (found, delta.finish_reason, delta.stop) != (wanted, "stop", stop):
            self.fail(
                f"{wanted} with the stop id {stop} kept, finish_reason 'stop' and stop={stop}",
                f"{found}, {delta.finish_reason!r}, stop={delta.stop!r}",
            )

    async def streams(self) -> None:
        whole = await self.ids_of(self.request())
        deltas = await self.collect(self.request(stream=True))
        parts = [[int(i) for i in d.token_ids] for d in deltas]
        if max(map(len, parts)) > 1:
            self.fail("one delta per token where stream=True", parts)
        if (streamed := [i for part in parts for i in part]) != whole:
            self.fail(f"the stream to be the reply {whole}", streamed)

    async def distributions(self) -> None:
        base = SamplingParams(max_tokens=self.num_tokens, temperature=0.8, top_p=0.8)
        found: dict[str, Delta] = {}
        for name in self.engine.capabilities.distributions:
            request = self.request(replace(base, distribution=name), seed=5)
            found[name] = (await self.collect(request))[-1]
        if not self.engine.capabilities.has_seeds:
            return
        replies = {name: tuple(map(int, delta.token_ids)) for name, delta in found.items()}
        if len(set(replies.values())) > 1:
            self.fail("the recorded distribution not to change what is drawn", replies)
        if {"tempered", "sampled"} <= set(found):
            gap = np.asarray(found["sampled"].logprobs) - np.asarray(found["tempered"].logprobs)
            if gap.min() < -self.tolerance:
                self.fail(
                    "no token less likely after top_p than before (probability is only taken away "
                    "from others)",
                    f"a log-prob that falls by {-gap.min():g}",
                )

    async def support(self) -> None:
        base = SamplingParams(
            max_tokens=self.num_tokens, temperature=0.8, distribution="sampled", record_support=True
        )
        await self.collect(self.request(base, seed=5))
        for top_p, top_k in ((1.0, 4), (0.8, 0), (0.8, 4), (1.0, 1)):
            sampling = replace(base, top_p=top_p, top_k=top_k)
            where = f"with top_p={top_p:g}, top_k={top_k}"
            for stream in (False, True):
                for delta in await self.collect(self.request(sampling, seed=5, stream=stream)):
                    self._hold_support(delta, top_k, where)
            if self.engine.capabilities.has_seeds:
                without = replace(sampling, record_support=False)
                found = await self.ids_of(self.request(sampling, seed=5))
                if (wanted := await self.ids_of(self.request(without, seed=5))) != found:
                    self.fail(f"recording the support not to change the reply {wanted}", found)

    def _hold_support(self, delta: Delta, top_k: int, where: str) -> None:
        vocab_size = self.engine.capabilities.vocab_size
        support = () if delta.support is None else delta.support  # held to be there already
        for token_id, logprob, ids in zip(delta.token_ids, delta.logprobs, support, strict=False):
            kept = ids.tolist()
            if not kept and not top_k:
                continue  # the whole vocabulary
            if len(set(kept)) < len(kept) or not all(0 <= i < vocab_size for i in kept):
                self.fail(f"different ids of the vocabulary in a support {where}", kept)
            if int(token_id) not in kept:
                self.fail(f"the sampled id {int(token_id)} in its support {where}", kept)
            if top_k and len(kept) > top_k:
                self.fail(f"at most {top_k} ids in a support {where}", len(kept))
            if len(kept) == 1 and abs(float(logprob)) > self.tolerance:
                self.fail(f"the log-prob 0 of the only token that was left {where}", logprob)

    async def routed_experts(self) -> None:
        sampling = replace(self.greedy, record_routes=True)
        whole = await self._routes_of(self.request(sampling), routes_from=0)
        for routes_from in (len(self.prompt_ids) - 1, len(self.prompt_ids)):
            for stream in (False, True):
                request = self.request(sampling, routes_from=routes_from, stream=stream)
                found = await self._routes_of(request, routes_from)
                differing = (np.sort(found) != np.sort(whole[routes_from:])).any(-1).mean()
                if differing > MAX_DIFFERING_ROUTES:
                    self.fail(
                        f"the experts of the same tokens again, from position {routes_from} on, "
                        "also where the prompt is cached",
                        f"others in {differing:.0%} of the layers",
                    )
        without = await self.ids_of(self.request())
        if (found := await self.ids_of(self.request(sampling))) != without:
            self.fail(f"recording the experts not to change the reply {without}", found)

    async def _routes_of(self, request: Request, routes_from: int) -> Any:
        deltas = await self.collect(request)
        routes = [d.routed_experts for d in deltas if d.routed_experts is not None]
        found = np.concatenate(routes)
        num_sampled = sum(len(d.token_ids) for d in deltas)
        wanted = len(self.prompt_ids) + num_sampled - 1 - routes_from
        if found.ndim != 3 or len(found) != wanted:
            self.fail(
                f"[{wanted}, layers, active] experts: of {len(self.prompt_ids)} prompt ids and "
                f"{num_sampled} sampled ones from position {routes_from} on, but for the last",
                list(found.shape),
            )
        if found.shape[2] > 1 and (np.diff(np.sort(found.astype(np.int32))) == 0).any():
            self.fail("different experts in each slot of a layer", found.tolist())
        return found

    async def seeds(self) -> None:
        sampling = SamplingParams(max_tokens=self.num_tokens)
        alone = await self.ids_of(self.request(sampling, seed=17))
        others = [self.request(sampling, seed=seed) for seed in range(7)]
        again, *_ = await asyncio.gather(
            self.ids_of(self.request(sampling, seed=17)), *(self.ids_of(r) for r in others)
        )
        if again != alone:
            self.fail(f"seed 17 to give {alone} again, in company", again)

    async def repeated_ids(self) -> None:
        sampling = SamplingParams(max_tokens=self.num_tokens)
        request = self.request(sampling, seed=3)
        first, second = await asyncio.gather(self.ids_of(request), self.ids_of(request))
        third = await self.ids_of(request)
        if not first == second == third:
            self.fail("one id to be answered with the same tokens", f"{first}, {second}, {third}")

    async def score(self) -> None:
        cases: tuple[tuple[Distribution, float], ...] = (("model", 1.0), ("tempered", 0.7))
        limits = self.engine.capabilities
        for distribution, temperature in cases:
            claimed = {*limits.distributions} & {*limits.scored_distributions}
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
            num_given = len(self.prompt_ids)
            found, late = await asked(), await asked(first=num_given)
            scores = found.logprobs
            if len(scores) != len(path) or not np.isnan(scores[0]):
                self.fail(f"{len(path)} scores, NaN at 0", scores.tolist())
            if found.policy_version != self.engine.version:
                self.fail(f"scores of version {self.engine.version}", found.policy_version)
            if not np.isnan(late.logprobs[:num_given]).all():
                self.fail(f"NaN before first={num_given}", late.logprobs.tolist())
            gap = max(np.abs(s[num_given:] - delta.logprobs).max() for s in (scores, late.logprobs))
            if not gap <= self.tolerance:
                self.fail(
                    f"score to agree with the recorded log-probs ({distribution}) to "
                    f"{self.tolerance:g}",
                    f"a difference of {gap:g}",
                )

    async def prefix_cache(self, page_size: int) -> None:
        first = await self.ids_of(self.request(affinity="an episode"))
        path = [*self.prompt_ids, *first, *self.prompt_ids]
        request = self.request(prompt_ids=np.array(path, np.int32), affinity="an episode")
        delta = (await self.collect(request))[0]
        # The last sampled id was never fed, so it is computed with the turn that follows.
        least = (len(self.prompt_ids) + len(first) - 1) // page_size * page_size
        if delta.num_cached_tokens < least:
            self.fail(
                f"at least {least} of the second turn's {len(path)} prompt tokens to be cached",
                delta.num_cached_tokens,
            )

    async def stop_strings(self, token_bytes: Sequence[bytes]) -> None:
        ids = await self.ids_of(self.request())
        text = b"".join(token_bytes[i] for i in ids[:4])
        wanted = next(
            (
                s
                for start in range(len(text))
                for stop in range(len(text), start, -1)
                if (s := _as_text(text[start:stop]))
            ),
            None,
        )
        if wanted is None:
            return  # no bytes among the first tokens that are text: nothing to wait for
        read, at = b"", 0
        while wanted.encode() not in read:
            read += token_bytes[ids[at]]
            at += 1
        sampling = replace(self.greedy, stop_strings=(wanted,))
        delta = (await self.collect(self.request(sampling)))[-1]
        found = [int(i) for i in delta.token_ids]
        if (found, delta.finish_reason, delta.stop) != (ids[:at], "stop", wanted):
            self.fail(
                f"{ids[:at]}, whole tokens up to the one that completes {wanted!r}, with stop set",
                f"{found}, {delta.finish_reason!r}, stop={delta.stop!r}",
            )

    async def bad_requests(self) -> None:
        limits = self.engine.capabilities
        bad = {
            "an id out of the vocabulary": [*self.prompt_ids, limits.vocab_size],
            "an empty prompt": [],
            "a prompt that leaves no room": [self.prompt_ids[0]] * limits.max_tokens,
        }
        for what, ids in bad.items():
            try:
                async for _ in self.engine.generate(
                    self.request(prompt_ids=np.array(ids, np.int32))
                ):
                    pass
            except EngineError:
                continue
            self.fail(f"EngineError for {what}", "an answer")
        await self.collect(self.request())

    async def abort(self) -> None:
        await self.engine.abort("an id that nobody used")
        room = self.engine.capabilities.max_tokens - len(self.prompt_ids)
        sampling = SamplingParams(max_tokens=min(room, 4096))
        request = self.request(sampling, stream=True)
        deltas: list[Delta] = []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 2:
                await self.engine.abort(request.id)
        if deltas[-1].finish_reason != "abort" and len(deltas) > 4:
            self.fail("an aborted reply to end with 'abort'", deltas[-1].finish_reason)
        await self.engine.abort(request.id)
        await self.collect(self.request())

    async def closed_early(self) -> None:
        room = self.engine.capabilities.max_tokens - len(self.prompt_ids)
        request = self.request(SamplingParams(max_tokens=min(room, 4096)), stream=True)
        deltas = self.engine.generate(request)
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
            if running.done():
                self.fail("no token to be sampled while paused", "a finished reply")
            await self.engine.resume(kv=kv)
            await running

    async def weights(self, weights: Mapping[str, Any] | str | None) -> None:
        before = self.engine.version
        room = self.engine.capabilities.max_tokens - len(self.prompt_ids)
        request = self.request(SamplingParams(max_tokens=min(room, 64)), stream=True)
        deltas: list[Delta] = []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                await self.engine.load_weights(weights, version=before + 1)
        self.hold(request, deltas)
        if self.engine.version != before + 1:
            self.fail(f"version {before + 1} after load_weights", self.engine.version)
        reasons = [d.finish_reason for d in deltas]
        if "weight_update" not in reasons:
            if len(deltas) > 8:
                self.fail("a segment to end with 'weight_update' when the weights changed", reasons)
            return
        at = reasons.index("weight_update")
        versions = [d.policy_version for d in deltas]
        if versions != [before] * (at + 1) + [before + 1] * (len(deltas) - at - 1):
            self.fail(f"version {before} up to delta {at} and {before + 1} after it", versions)

    async def sleep_and_wake(self) -> None:
        wanted = await self.ids_of(self.request())
        await self.engine.sleep()
        try:
            await self.collect(self.request())
        except EngineError as error:
            if str(error).startswith("check_engine"):
                raise
        else:
            self.fail("EngineError for a request to a sleeping engine", "a reply")
        await self.engine.wake()
        found = await self.ids_of(self.request())
        if found != wanted:
            self.fail(f"the greedy reply after waking to be {wanted}", found)


def _as_text(part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError:
        return ""
