"""Decode as a graph against decode step by step: the same bits, in Triton's interpreter.

Its capture is "run the body again", over the very tensors that a CUDA graph would read and write.
"""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import interpreted_kernels  # noqa: F401  before the kernels
import numpy as np
import pytest
import torch
from engine_models import VOCAB, make_model, packed_logprobs, prompt, request
from full_counts import PROOF

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.decode_graph import MAX_RULES, graph_size
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.adapters import decoder_over
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.ops.context import decode_capacity, plan_work
from lockstep.ops.contract import CHUNK
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


def make_engines(kind="qwen3", *, max_positions=256, addresses=None, **settings):
    """(engine that runs eagerly, engine with graphs, its capture), over weights of equal values."""
    defaults = {"page_size": 8, "kv_cache_tokens": 256, "max_num_sequences": 6}
    config = EmbeddedConfig(**(defaults | {"max_step_tokens": 24} | settings))
    capture, engines = Rerun(), []
    for make_capture in (None, lambda: capture):
        model = make_model(kind, max_positions=max_positions)
        model.ops = CudaOps()
        engine = EmbeddedEngine(model, config, make_capture=make_capture, addresses=addresses)
        engines.append(engine)
    return *engines, capture


async def play(engine, schedule):
    """Asks each (turns of the loop to wait, request)."""

    async def one(wait, asked):
        for _ in range(wait):
            await asyncio.sleep(0)
        return [delta async for delta in engine.generate(asked)]

    return await asyncio.gather(*(one(wait, asked) for wait, asked in schedule))


async def update(engine, *, turn, factor):
    """Other weights, in place, after this many turns of the loop."""
    for _ in range(turn):
        await asyncio.sleep(0)
    with torch.no_grad():
        for weight in engine._shared.parameters():
            weight.mul_(factor)
    await engine.load_weights(None, version=1)


def drawn(deltas):
    """Everything that a reply says of its tokens."""
    return (
        np.concatenate([d.token_ids for d in deltas]).tolist(),
        np.concatenate([d.logprobs for d in deltas]).view(np.int32).tolist(),
        [(d.policy_version, d.finish_reason, len(d.token_ids)) for d in deltas],
        [d.routed_experts.tolist() for d in deltas if d.routed_experts is not None],
    )


SCHEDULES = [("gpt_oss", 8, True), ("latent", 9, False), ("hybrid", 10, False)]
if PROOF:
    SCHEDULES += [(kind, 10 + i, i % 2 == 0) for i in range(6) for kind in ("qwen3", "gpt_oss")]


def random_schedule(rng, *, is_routed, is_mixed):
    shared = prompt(12, seed=int(rng.integers(100)))
    schedule = []
    for i in range(4 if PROOF else 2):
        own = prompt(int(rng.integers(1, 12)), seed=1000 + i)
        ids = np.concatenate([shared[: int(rng.integers(0, 13))], own])
        sampling = {"max_tokens": int(rng.integers(2, 7)), "record_routes": is_routed}
        if rng.integers(2):
            sampling["stop_ids"] = tuple(rng.integers(0, VOCAB, 3).tolist())
        if is_mixed:
            sampling |= [{}, {"temperature": 0.0}, {"top_p": 0.8, "top_k": 20}][rng.integers(3)]
        else:
            sampling |= {"temperature": 0.7, "top_p": 0.9}
        schedule.append((int(rng.integers(4)), request(f"r{i}", ids, seed=i, **sampling)))
    return schedule


@pytest.mark.parametrize(("kind", "seed", "is_mixed"), SCHEDULES)
def test_a_graph_draws_the_same_tokens_to_the_bit_over_random_schedules(kind, seed, is_mixed):
    eager, graphed, capture = make_engines(kind, kv_cache_tokens=32)
    found = []
    for engine in (eager, graphed):
        schedule = random_schedule(
            np.random.default_rng(seed), is_routed=kind == "gpt_oss", is_mixed=is_mixed
        )
        found.append([drawn(r) for r in asyncio.run(play(engine, schedule))])
    assert found[0] == found[1]
    if (kind, seed, is_mixed) == SCHEDULES[0]:
        assert graphed.stats["preemptions"] > 0 and graphed.stats["cached_tokens"] > 0
        assert capture.num_replays > 5


async def test_tokens_on_either_side_of_an_update_have_the_bits_of_their_weights():
    _, engine, capture = make_engines()
    asked = [request(str(i), prompt(7, seed=i), seed=i, max_tokens=6) for i in range(2)]
    replies, _ = await asyncio.gather(
        play(engine, [(0, each) for each in asked]), update(engine, turn=4, factor=1.1)
    )
    of_version = {1: engine._shared, 0: make_model()}
    of_version[0].ops = engine._shared.ops
    for each, deltas in zip(asked, replies, strict=True):
        assert [delta.policy_version for delta in deltas] == [0, 1]
        ids = each.prompt_ids
        for delta in deltas:
            start, ids = len(ids), np.concatenate([ids, delta.token_ids])
            wanted = packed_logprobs(of_version[delta.policy_version], ids)[start:]
            assert np.array_equal(delta.logprobs, wanted)
    assert capture.num_captures == 1, "weights are written in place"


async def test_the_next_step_begins_before_the_tokens_of_one_are_handled():
    _, engine, capture = make_engines()

    asked = request("a", prompt(5), max_tokens=4, stream=True)
    counts = [capture.num_replays async for _ in engine.generate(asked)]
    assert counts == [1, 2, 3, 3], "the prefill draws the first"


def test_an_abort_and_a_pause_between_two_steps_change_no_token_of_the_others():
    eager, engine, _ = make_engines()
    asked = [request(str(i), prompt(5, seed=i), seed=i, max_tokens=6) for i in range(2)]

    async def interrupted():
        replies = asyncio.ensure_future(play(engine, [(0, each) for each in asked]))
        while engine.stats["sampled_tokens"] < 4:
            await asyncio.sleep(0)
        await engine.abort("0")
        await engine.pause()
        await engine.resume(kv="keep")
        return await replies

    aborted, whole = asyncio.run(interrupted())
    assert aborted[-1].finish_reason == "abort"
    assert drawn(whole) == drawn(*asyncio.run(play(eager, [(0, asked[1])])))


@pytest.mark.skipif(not PROOF, reason="make proof: long rows take the interpreter a while")
def test_a_row_of_several_splits_decodes_to_the_same_bits_in_a_graph():
    found = []
    for engine in make_engines(max_positions=1024, kv_cache_tokens=1024, max_step_tokens=512)[:2]:
        long = request("long", prompt(511), max_tokens=3)
        short = request("short", prompt(5), max_tokens=3)
        found.append([drawn(r) for r in asyncio.run(play(engine, [(0, long), (1, short)]))])
    assert found[0] == found[1]


def test_a_size_and_a_rule_are_captured_once_and_replayed_in_every_step():
    _, engine, capture = make_engines()
    pair = [(0, request(str(i), prompt(9, seed=i), seed=i, max_tokens=3)) for i in range(2)]
    alone = [(0, request("a", prompt(9, seed=2), max_tokens=3))]
    colder = [(0, request("b", prompt(9, seed=3), max_tokens=3, temperature=0.5))]

    found = []
    for schedule in (pair, alone, colder):
        asyncio.run(play(engine, schedule))
        found.append((capture.num_captures, capture.num_replays))
    assert found == [(1, 2), (2, 4), (3, 6)], "each prefill draws the first token"


async def test_memory_that_is_allocated_again_is_captured_again():
    _, engine, capture = make_engines()
    alike = [(0, request(name, prompt(9), seed=1, max_tokens=3)) for name in ("before", "after")]
    before = await play(engine, alike[:1])
    await engine.sleep()
    await engine.wake()
    after = await play(engine, alike[1:])
    assert drawn(*before) == drawn(*after)
    assert capture.num_captures == 2


class Addresses:
    """Fills the memory that is given back with NaN, as another process would with what it likes."""

    def __init__(self):
        self.calls, self.tensors = [], []

    def region(self, num_bytes):
        return nullcontext(self.calls.append(num_bytes))

    def free(self):
        self.calls.append("free")
        for tensor in self.tensors:
            tensor.view(torch.uint8).fill_(255)

    def take(self):
        self.calls.append("take")


@pytest.mark.parametrize("kind", ["gpt_oss", "latent", "hybrid"])
async def test_memory_whose_addresses_stay_is_zeroed_and_its_graphs_are_replayed(kind):
    addresses = Addresses()
    _, engine, capture = make_engines(kind, addresses=addresses, kv_cache_tokens=32)
    alike = [(0, request(name, prompt(9), seed=1, max_tokens=3)) for name in ("before", "after")]
    before = await play(engine, alike[:1])
    cache, captured = engine._cache, capture.num_captures
    addresses.tensors = cache._tensors()
    places = [tensor.data_ptr() for tensor in addresses.tensors]
    await engine.sleep()
    await engine.wake()
    after = await play(engine, alike[1:])
    assert drawn(*before) == drawn(*after)
    assert capture.num_captures == captured
    assert places == [tensor.data_ptr() for tensor in cache._tensors()]
    assert sum(tensor.nbytes for tensor in addresses.tensors) <= addresses.calls[0]
    await engine.close()
    assert addresses.calls[-3:] == ["free", "take", "free"]


def test_rules_beyond_the_first_few_draw_behind_a_graph_that_they_share():
    eager, engine, capture = make_engines()
    for i in range(MAX_RULES + 1):
        asked = [(0, request(str(i), prompt(9), max_tokens=2, temperature=1.0 + i))]
        found = drawn(*asyncio.run(play(engine, asked)))
    assert found == drawn(*asyncio.run(play(eager, asked)))
    assert capture.num_captures == MAX_RULES + 1


def test_rows_of_several_adapters_have_a_graph_which_is_captured_anew_when_one_is_added():
    found, (*engines, capture) = [], make_engines()
    for engine in engines:
        turn = count()

        def adapter(rank, seed, engine=engine):
            adapted = decoder_over(engine._shared)
            lora = LoraConfig(
                rank=rank, targets=("*.o_proj",)
            )  # few shapes, which are tested first
            add_adapter(adapted, lora_shape(lora, adapted.config), seed=seed)
            adapted.layers[0].attention.o_proj.lora.B[0].data.fill_(0.1 + seed)
            return adapted

        def ask(*names, engine=engine, turn=turn):
            asked = [
                replace(request(f"{next(turn)}", prompt(9, seed=i), max_tokens=5), adapter=name)
                for i, name in enumerate(names)
            ]
            return asyncio.run(play(engine, [(0, each) for each in asked]))

        asyncio.run(engine.load_adapter("a", adapter(2, 0), version=1))
        asyncio.run(engine.load_adapter("b", adapter(4 if PROOF else 2, 1), version=1))
        replies = ask("a", "", "b", "a")
        num_captures = capture.num_captures
        asyncio.run(engine.load_adapter("a", adapter(2, 2), version=2))  # in the place of the first
        replies += ask("a", "", "b", "a")
        assert capture.num_captures == num_captures
        asyncio.run(engine.load_adapter("c", adapter(2, 3), version=1))
        replies += ask("a", "", "b", "c")
        found.append([drawn(reply) for reply in replies])
    assert found[0] == found[1]
    changed = [a != b for a, b in zip(found[0][:4], found[0][4:8], strict=True)]
    assert changed == [True, False, False, True]
    assert capture.num_captures > num_captures > 0 and capture.num_replays > 10


def test_rows_with_states_pass_borders_of_chunks_in_a_graph():
    found, (*engines, capture) = [], make_engines("hybrid", kv_cache_tokens=512)
    for engine in engines:
        asked = [request(f"{n}", prompt(n, seed=n), seed=n, max_tokens=8) for n in (58, 60, 60)]
        asked[2] = replace(asked[2], id="other", seed=1)
        replies = asyncio.run(play(engine, [(0, each) for each in asked]))
        ids = np.concatenate([asked[0].prompt_ids, *(d.token_ids for d in replies[0])])
        goes_on = request("next", np.append(ids, 3), max_tokens=3)
        replies += asyncio.run(play(engine, [(0, goes_on)]))
        found.append([drawn(reply) for reply in replies])
        assert engine.stats["cached_tokens"] >= CHUNK
    assert found[0] == found[1]
    assert capture.num_replays > 8 and capture.num_captures >= 3  # none, one, two rows at a border


def test_sizes_of_graphs_are_powers_of_two_and_then_eights():
    assert [graph_size(n, 27) for n in range(1, 28)] == [
        *(1, 2, 4, 4, 8, 8, 8, 8),
        *[16] * 8,
        *[24] * 8,
        *[27] * 3,
    ]


def test_the_work_of_any_batch_fits_the_tensors_of_its_graph():
    rng = np.random.default_rng(0)
    for _ in range(400):
        heads = [(8, 2), (16, 16), (64, 8), (128, 1)][rng.integers(4)]
        num_rows, num_programs = int(rng.integers(1, 40)), int(rng.integers(1, 300))
        longest = int(rng.integers(1, 20_000))
        lengths = rng.integers(1, longest + 1, num_rows)
        items, num_slots = plan_work(
            np.ones(num_rows, np.int64), lengths, heads=heads, num_programs=num_programs
        )
        most = decode_capacity(num_rows, longest, heads=heads, num_programs=num_programs)
        assert len(items) <= most[0] and num_slots <= most[1]
