"""An engine of your own: a bigram table in numpy, behind the protocol of every engine.

`python my_engine.py` proves it with `check_engine`. A real one differs in `_logprobs` alone: there
it asks a server or a GPU. An engine knows ids only: no text, no messages, no template. Registered
with `make_engine.register`, it is a choice of the setting `engine`: lockstep/engines/registry.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.errors import EngineError
from lockstep.types import Delta, Distribution, Int32Array, Request, SamplingParams


class BigramEngine(Engine):
    """Samples the next id from a row of `logits`: [V, V] float32, previous id to next id."""

    def __init__(self, logits: np.ndarray, *, max_tokens: int = 256) -> None:
        self._logits, self.version = logits, 0
        self._may_run, self._is_asleep = asyncio.Event(), False
        self._may_run.set()
        self._stops: dict[str, asyncio.Event] = {}
        self.capabilities = Capabilities(
            name="bigram",
            vocab_size=len(logits),
            max_tokens=max_tokens,
            distributions=("model", "tempered"),
            has_seeds=True,
            has_sleep=True,
            has_score=True,
        )

    def _logprobs(self, previous: int, temperature: float) -> np.ndarray:
        """[V] float64: log softmax(logits / temperature) of the token after `previous`."""
        scaled = self._logits[previous].astype(np.float64) / temperature
        return scaled - np.logaddexp.reduce(scaled)

    def _draw(self, previous: int, position: int, request: Request) -> tuple[int, float]:
        """The next id and its log-prob. Decided by seed and position: alone or in company, a
        request repeats."""
        sampling = request.sampling
        recorded = self._logprobs(previous, _recorded_temperature(sampling))
        if sampling.temperature == 0:
            chosen = int(recorded.argmax())
        else:
            weights = np.exp(self._logprobs(previous, sampling.temperature))
            draw = np.random.default_rng([request.seed, position])
            chosen = int(draw.choice(len(weights), p=weights / weights.sum()))
        return chosen, float(recorded[chosen])

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self._check(request)
        sampling, path = request.sampling, list(map(int, request.prompt_ids))
        start = sent = len(path)
        logprobs: list[float] = []
        limit = min(sampling.max_tokens, self.capabilities.max_tokens - start)
        version = self.version
        # A known id needs no memory here: the same seed gives the same tokens again.
        stop = self._stops.setdefault(request.id, asyncio.Event())

        def delta(reason: Any = None, stop_id: int | None = None) -> Delta:
            nonlocal sent
            first, sent = sent, len(path)
            return Delta(
                token_ids=np.array(path[first:], np.int32),
                logprobs=np.array(logprobs[first - start :], np.float32),
                policy_version=version,
                finish_reason=reason,
                stop=stop_id,
                num_prefilled_tokens=start if first == start else 0,
            )

        try:
            while True:
                await asyncio.sleep(0)
                await self._may_run.wait()
                if stop.is_set():
                    yield delta("abort")
                    return
                if version != self.version:  # the tokens so far are a segment of their own
                    yield delta("weight_update")
                    version = self.version
                chosen, logprob = self._draw(path[-1], len(path), request)
                path.append(chosen)
                logprobs.append(logprob)
                if chosen in sampling.stop_ids:  # the model chose it: it is kept, and trained
                    yield delta("stop", chosen)
                    return
                if len(path) - start == limit:
                    yield delta("length")
                    return
                if request.stream:
                    yield delta()
        finally:
            self._stops.pop(request.id, None)

    def _check(self, request: Request) -> None:
        ids, limits = request.prompt_ids, self.capabilities
        where = f"request {request.id}"
        if self._is_asleep:
            raise EngineError(f"{where}: the engine sleeps; wake it first.")
        if not len(ids) or ids.min() < 0 or ids.max() >= limits.vocab_size:
            raise EngineError(f"{where}: expected ids in 0..{limits.vocab_size - 1}.")
        if len(ids) >= limits.max_tokens:
            raise EngineError(f"{where}: {len(ids)} ids leave no room of {limits.max_tokens}.")

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
        scale = temperature if distribution == "tempered" else 1.0
        pairs = pairwise(token_ids)
        scores = [self._logprobs(int(before), scale)[int(id_)] for before, id_ in pairs]
        values = np.array([np.nan, *scores], np.float32)
        values[:first] = np.nan
        return Scores(logprobs=values, policy_version=self.version)

    async def abort(self, request_id: str) -> None:
        if request_id in self._stops:
            self._stops[request_id].set()

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        self._may_run.set()

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        if not isinstance(source, Mapping) or "logits" not in source:
            raise EngineError("expected the named tensor `logits`.")
        self._logits, self.version = np.asarray(source["logits"]), version

    async def sleep(self) -> None:
        self._is_asleep = True

    async def wake(self) -> None:
        self._is_asleep = False

    async def close(self) -> None:
        for request_id in list(self._stops):
            await self.abort(request_id)


def _recorded_temperature(sampling: SamplingParams) -> float:
    """Temperature of the recorded log-probs; greedy requests record the model's."""
    is_tempered = sampling.distribution == "tempered" and sampling.temperature > 0
    return sampling.temperature if is_tempered else 1.0


def random_logits(vocab_size: int = 64, *, seed: int = 0) -> np.ndarray:
    """[V, V] float32."""
    return np.random.default_rng(seed).normal(size=(vocab_size, vocab_size)).astype(np.float32)


async def prove() -> None:
    from check_engine import check_engine  # a file beside this one

    report = await check_engine(
        BigramEngine(random_logits()),
        prompt_ids=[3, 1, 4],
        weights={"logits": random_logits(seed=1)},
    )
    print("kept:", ", ".join(report.passed))
    for name, reason in report.skipped.items():
        print(f"not claimed: {name} ({reason})")


if __name__ == "__main__":
    asyncio.run(prove())
