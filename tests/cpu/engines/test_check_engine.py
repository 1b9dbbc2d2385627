"""`check_engine` accepts the embedded engine, and names each promise that an engine breaks."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from check_engine import check_engine
from engine_models import VOCAB, make_engine, make_model

from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.hf_io import hf_tensors

TOKEN_BYTES = [bytes([97 + i % 26]) * (1 + i % 3) for i in range(VOCAB)]
PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_the_embedded_engine_keeps_every_promise(kind):
    engine = make_engine(make_model(kind), token_bytes=TOKEN_BYTES)
    report = asyncio.run(check_engine(engine, prompt_ids=PROMPT, token_bytes=TOKEN_BYTES))
    assert len(report.passed) + len(report.skipped) == 18
    assert set(report.skipped) == (set() if kind == "gpt_oss" else {"routed experts"})


def test_checks_that_cannot_run_are_reported_with_their_reason():
    engine = make_engine(prefix_cache=False)
    asyncio.run(engine.load_weights(dict(hf_tensors(make_model(seed=3))), version=1))
    report = asyncio.run(check_engine(engine, prompt_ids=PROMPT))
    assert set(report.skipped) == {"prefix cache", "stop strings", "weights", "routed experts"}
    assert "has_prefix_cache" in report.skipped["prefix cache"]


class Broken(EmbeddedEngine):
    """Breaks one promise: `fault` names it."""

    fault = ""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.asked = Counter()

    @property
    def capabilities(self):
        found = super().capabilities
        claims = {"has_prefix_cache": True} if self.fault == "prefix cache" else {}
        return replace(found, **claims)

    async def generate(self, request):
        changes = {}
        if self.fault == "seeds":
            changes = {"seed": request.seed + self.stats["requests"]}
        if self.fault == "many replies at once":
            other = request.prompt_ids.copy()
            other[0] += self.stats["requests"] % 3
            changes = {"prompt_ids": other}
        if self.fault == "repeated ids":
            self.asked[request.id] += 1
            again = self.asked[request.id]
            changes = {"id": f"{request.id}/{again}", "seed": request.seed + again}
        if self.fault == "streams":
            changes = {"stream": False}
        if self.fault == "bad requests":
            clipped = np.minimum(request.prompt_ids, VOCAB - 1)
            changes = {"prompt_ids": clipped}
        if changes:
            request = replace(request, **changes)
        async for delta in super().generate(request):
            if self.fault == "one reply":
                delta = replace(delta, logprobs=np.exp(delta.logprobs))
            if self.fault == "stop ids" and delta.finish_reason == "stop":
                delta = replace(delta, token_ids=delta.token_ids[:-1], logprobs=delta.logprobs[:-1])
            if self.fault == "distributions" and request.sampling.distribution == "sampled":
                delta = replace(delta, logprobs=delta.logprobs - 2)
            if self.fault == "support" and delta.support is not None:
                shifted = np.arange(len(delta.support)) - 1
                delta = replace(delta, support=delta.support.take(shifted % len(shifted)))
            if self.fault == "routed experts" and delta.routed_experts is not None:
                # What an engine hands out for a prefix that it found in its cache.
                delta = replace(delta, routed_experts=0 * delta.routed_experts)
            if self.fault == "stop strings" and isinstance(delta.stop, str):
                delta = replace(delta, stop=None)
            yield delta

    async def score(self, token_ids, **how):
        found = await super().score(token_ids, **how)
        if self.fault == "score":
            found = replace(found, logprobs=np.roll(found.logprobs, 1))
        return found

    async def abort(self, request_id):
        if self.fault != "abort":
            await super().abort(request_id)

    async def pause(self):
        if self.fault != "pause and resume":
            await super().pause()

    async def load_weights(self, source, *, version):
        if self.fault != "weights":
            await super().load_weights(source, version=version)

    async def sleep(self):
        if self.fault != "sleep and wake":
            await super().sleep()


@pytest.mark.parametrize(
    "fault",
    [
        "one reply", "many replies at once", "stop ids", "streams", "distributions", "seeds",
        "repeated ids", "score", "prefix cache", "stop strings", "bad requests", "abort",
        "pause and resume", "weights", "sleep and wake", "support",
        "routed experts",
    ],
)  # fmt: skip
def test_each_broken_promise_is_named(fault):
    model = make_model("gpt_oss" if fault == "routed experts" else "qwen3")
    whole = make_engine(model, token_bytes=TOKEN_BYTES, prefix_cache=fault != "prefix cache")
    engine = Broken(whole._shared, whole._config, token_bytes=TOKEN_BYTES)
    engine.fault = fault
    with pytest.raises(EngineError, match=f"check_engine: {fault}: "):
        asyncio.run(check_engine(engine, prompt_ids=PROMPT, token_bytes=TOKEN_BYTES))
