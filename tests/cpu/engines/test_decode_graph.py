"""Decode as a graph against decode step by step: the same bits, in Triton's interpreter.

Its capture is "run the body again", over the very tensors that a CUDA graph would read and write.
"""

import asyncio
import importlib.util

import numpy as np
import pytest
import torch
from engine_models import VOCAB, ask, make_model, prompt, request

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.decode_graph import MAX_RULES, graph_size
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.ops.context import decode_capacity, plan_work

if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here: tests/gpu", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined
    from lockstep.ops.cuda import CudaOps

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"  # numpy's, of 0 / 0 in rows of a tile that are not stored
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and where one is launched


class Rerun:
    """A capture that counts, and whose replay runs the body again."""

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def __call__(self, body):
        self.num_captures += 1

        def replay():
            self.num_replays += 1
            body()

        return replay


def make_engines(kind="qwen3", **settings):
    """(engine that runs eagerly, engine with graphs, its capture), over weights of equal values."""
    defaults = {"page_size": 8, "kv_cache_tokens": 256, "max_num_sequences": 6}
    config = EmbeddedConfig(**(defaults | {"max_step_tokens": 24} | settings))
    capture, engines = Rerun(), []
    for of_engine in (None, capture):
        model = make_model(kind)
        model.ops = CudaOps()
        engines.append(EmbeddedEngine(model, config, capture=of_engine))
    return *engines, capture


async def play(engine, schedule, *, updates=()):
    """Asks each (turns of the loop to wait, request); new weights after these many turns."""

    async def one(wait, asked):
        for _ in range(wait):
            await asyncio.sleep(0)
        return [delta async for delta in engine.generate(asked)]

    async def update():
        for turn in range(max(updates, default=-1) + 1):
            await asyncio.sleep(0)
            if turn in updates:
                with torch.no_grad():
                    for weight in engine._shared.parameters():
                        weight.mul_(1.01)
                await engine.load_weights(None, version=turn)

    replies, _ = await asyncio.gather(
        asyncio.gather(*(one(wait, asked) for wait, asked in schedule)), update()
    )
    return replies


def drawn(deltas):
    """Everything that a reply says of its tokens."""
    return (
        np.concatenate([d.token_ids for d in deltas]).tolist(),
        np.concatenate([d.logprobs for d in deltas]).view(np.int32).tolist(),
        [(d.policy_version, d.finish_reason, len(d.token_ids)) for d in deltas],
        [d.routed_experts.tolist() for d in deltas if d.routed_experts is not None],
    )


def random_schedule(rng, *, num_requests, is_routed, is_mixed):
    shared = prompt(20, seed=int(rng.integers(100)))
    schedule = []
    for i in range(num_requests):
        own = prompt(int(rng.integers(1, 30)), seed=1000 + i)
        ids = np.concatenate([shared[: int(rng.integers(0, 21))], own])
        sampling = {"max_tokens": int(rng.integers(1, 14)), "record_routes": is_routed}
        if rng.integers(2):
            sampling["stop_ids"] = (int(rng.integers(VOCAB)), int(rng.integers(VOCAB)))
        if is_mixed:
            sampling |= [{}, {"temperature": 0.0}, {"top_p": 0.8, "top_k": 20}][rng.integers(3)]
        else:
            sampling |= {"temperature": 0.7, "top_p": 0.9}
        schedule.append((int(rng.integers(30)), request(f"r{i}", ids, seed=i, **sampling)))
    return schedule


@pytest.mark.parametrize(
    ("kind", "seed", "is_mixed"),
    [("qwen3", 0, False), ("qwen3", 1, True), ("gpt_oss", 2, False), ("gpt_oss", 3, True)],
)
def test_a_graph_draws_the_same_tokens_to_the_bit_over_random_schedules(kind, seed, is_mixed):
    eager, graphed, capture = make_engines(kind, kv_cache_tokens=96)
    found = []
    for engine in (eager, graphed):
        rng = np.random.default_rng(seed)
        schedule = random_schedule(
            rng, num_requests=10, is_routed=kind == "gpt_oss", is_mixed=is_mixed
        )
        found.append([drawn(r) for r in asyncio.run(play(engine, schedule, updates=(9, 21)))])
    assert found[0] == found[1]
    assert graphed.stats == eager.stats
    assert graphed.stats["preemptions"] > 0 and graphed.stats["cached_tokens"] > 0
    assert capture.num_replays > 20
