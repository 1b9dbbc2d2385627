"""The embedded engine hands back the experts that each position went to, to those who ask."""

import asyncio

import numpy as np
import pytest
import torch
from engine_models import VOCAB, ask, deltas_of, make_engine, make_model, prompt, request
from tiny_configs import tiny_config

from lockstep.errors import CapabilityError, EngineError
from lockstep.models.decoder import Decoder
from lockstep.models.moe import Routing
from lockstep.ops.context import PackedContext
from lockstep.types import Request, SamplingParams


def chosen(model, ids):
    """[T, layers, active]: the experts that one forward over the whole row chooses."""
    row, routing = torch.from_numpy(np.asarray(ids, np.int64)), Routing()
    with torch.no_grad():
        model(row, torch.arange(len(row)), PackedContext.of([len(row)]), routing)
    return routing.stacked().numpy()


def asking(name, ids, *, routes_from=0, stream=False, seed=0, priority=0, **sampling):
    sampling = SamplingParams(**{"max_tokens": 12, "record_routes": True, **sampling})
    return Request(
        id=name,
        prompt_ids=np.asarray(ids, np.int32),
        sampling=sampling,
        seed=seed,
        priority=priority,
        stream=stream,
        routes_from=routes_from,
    )


def assert_routes(model, asked, deltas):
    """What the deltas say, one after another, is what a fresh forward chooses: from `routes_from`
    on, at every position but the last."""
    ids = np.concatenate([asked.prompt_ids, *(d.token_ids for d in deltas)])
    found = np.concatenate([d.routed_experts for d in deltas])
    assert found.dtype == np.uint8
    assert np.array_equal(found, chosen(model, ids)[asked.routes_from : -1])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_step_tokens": 16},  # prompts are prefilled in chunks
        {"page_size": 8, "prefix_cache": False},
        {"resident_rows": False, "max_num_sequences": 3},
    ],
)
def test_routes_are_those_of_a_fresh_forward_in_any_company(settings):
    model = make_model("gpt_oss")
    engine = make_engine(model, **settings)
    lengths = [(5, 1), (40, 12), (33, 30), (17, 7), (64, 2), (1, 20)]
    requests = [
        asking(f"r{i}", prompt(size, seed=i), seed=i, max_tokens=limit, stream=i % 2 == 1)
        for i, (size, limit) in enumerate(lengths)
    ]

    async def run():
        return await asyncio.gather(*(deltas_of(engine, r) for r in requests))

    for asked, deltas in zip(requests, asyncio.run(run()), strict=True):
        assert_routes(model, asked, deltas)


def test_the_next_turn_is_handed_the_boundary_and_what_is_new():
    model = make_model("gpt_oss")
    engine, path = make_engine(model), prompt(21)
    for turn in range(4):
        asked = asking(f"t{turn}", path, seed=turn, routes_from=max(len(path) - 7, 0))
        (delta,) = ask(engine, asked)
        assert delta.num_cached_tokens > 0 or turn == 0
        assert_routes(model, asked, [delta])
        path = np.concatenate([path, delta.token_ids, prompt(6, seed=turn)])


def test_a_prefix_from_the_cache_has_the_routes_of_who_computed_it():
    model = make_model("gpt_oss")
    engine, ids = make_engine(model), prompt(37)
    ask(engine, asking("first", ids))
    # Within a page, so that a copy of it is gone on with.
    for size in (37, 20, 35):
        asked = asking(f"again-{size}", [*ids[:size], 5, 6], seed=size)
        (delta,) = ask(engine, asked)
        assert delta.num_cached_tokens == size
        assert_routes(model, asked, [delta])


def test_what_was_cached_before_anybody_asked_is_computed_again():
    model = make_model("gpt_oss")
    engine, ids = make_engine(model), prompt(37)
    (plain,) = ask(engine, request("plain", ids))
    assert plain.routed_experts is None and engine._cache.routes is None
    asked = asking("asks", ids)
    (delta,) = ask(engine, asked)
    assert delta.num_cached_tokens == 0
    assert_routes(model, asked, [delta])
    assert np.array_equal(delta.token_ids, plain.token_ids)
    assert np.array_equal(delta.logprobs, plain.logprobs), "asking changes no bit"


def test_a_request_that_asks_beside_one_that_does_not():
    model = make_model("gpt_oss")
    engine, ids = make_engine(model), prompt(37)
    asked, late = asking("asks", ids, max_tokens=30), asking("late", [*ids, 3], max_tokens=9)

    async def run():
        plain = asyncio.ensure_future(deltas_of(engine, request("plain", ids, max_tokens=40)))
        while engine._rows.num == 0 or engine._rows.counts[0] < 5:
            await asyncio.sleep(0)
        first = await deltas_of(engine, asked)
        return await plain, first, await deltas_of(engine, late)

    plain, first, second = asyncio.run(run())
    assert plain[-1].routed_experts is None and second[0].num_cached_tokens >= 37
    assert_routes(model, asked, first)
    assert_routes(model, late, second)


def test_routes_survive_preemption():
    model = make_model("gpt_oss")
    engine = make_engine(model, page_size=8, kv_cache_tokens=96, max_num_sequences=6)
    requests = [
        asking(f"r{i}", prompt(12, seed=i), seed=i, max_tokens=60, stream=i == 2) for i in range(5)
    ]

    async def run():
        return await asyncio.gather(*(deltas_of(engine, r) for r in requests))

    replies = asyncio.run(run())
    assert engine.stats["preemptions"] > 0
    for asked, deltas in zip(requests, replies, strict=True):
        assert_routes(model, asked, deltas)


def shake(model):
    """Other routers, so that other experts are chosen."""
    with torch.no_grad():
        for block in model.layers:
            block.mlp.router.weight.neg_()


def interrupted(engine, asked, between, *, after=6):
    """The deltas of a request, with `between` called when it has sampled some tokens."""

    async def run():
        running = asyncio.ensure_future(deltas_of(engine, asked))
        while engine._rows.num == 0 or engine._rows.counts[0] < after:
            await asyncio.sleep(0)
        await between()
        return await running

    return asyncio.run(run())


def test_keys_computed_again_do_not_change_what_a_token_was_sampled_by():
    model = make_model("gpt_oss")
    engine, asked = make_engine(model), asking("a", prompt(20), max_tokens=20)
    before = {}

    async def between():
        await engine.pause()
        before["ids"] = engine._rows.sampled_ids[0, : engine._rows.counts[0]].copy()
        path = np.concatenate([asked.prompt_ids, before["ids"]])
        before["routes"] = chosen(model, path)
        shake(model)  # in the place of kernels that round otherwise in another batch
        await engine.resume(kv="drop")

    (delta,) = interrupted(engine, asked, between)
    known = len(before["routes"]) - 1
    assert np.array_equal(delta.routed_experts[:known], before["routes"][:known])
    after = chosen(model, [*asked.prompt_ids, *delta.token_ids])
    assert np.array_equal(delta.routed_experts[known:], after[known:-1])


@pytest.mark.parametrize("kv", ["drop", "keep", None])
def test_each_side_of_a_weight_update_has_the_routes_of_its_own_weights(kv):
    model = make_model("gpt_oss")
    engine, asked = make_engine(model), asking("a", prompt(20), max_tokens=20)
    old = {}

    async def between():
        if kv:
            await engine.pause()
        num = int(engine._rows.counts[0])
        path = [*asked.prompt_ids, *engine._rows.sampled_ids[0, :num]]
        old["routes"] = chosen(model, path)
        shake(model)
        await engine.load_weights(None, version=1)
        if kv:
            await engine.resume(kv=kv)

    first, second = interrupted(engine, asked, between)
    assert (first.finish_reason, second.finish_reason) == ("weight_update", "length")
    assert np.array_equal(first.routed_experts, old["routes"][:-1])
    # The boundary: the last id of the first segment is read by the weights of the second.
    assert len(second.routed_experts) == len(second.token_ids)
    if kv != "keep":
        new = chosen(model, [*asked.prompt_ids, *first.token_ids, *second.token_ids])
        assert np.array_equal(second.routed_experts, new[len(first.routed_experts) : -1])


def test_what_old_weights_prefilled_before_the_first_token_is_not_handed_out():
    model = make_model("gpt_oss")
    engine = make_engine(model, max_step_tokens=16)
    asked = asking("a", prompt(60))

    async def run():
        running = asyncio.ensure_future(deltas_of(engine, asked))
        while not engine._scheduler.prefilling or not engine._scheduler.prefilling[0].num_computed:
            await asyncio.sleep(0)
        await engine.pause()
        shake(model)
        await engine.load_weights(None, version=1)
        await engine.resume(kv="drop")
        return await running

    deltas = asyncio.run(run())
    assert [d.policy_version for d in deltas] == [1]
    assert_routes(model, asked, deltas)


def test_an_aborted_reply_has_the_routes_of_its_tokens_and_none_without_tokens():
    model = make_model("gpt_oss")
    engine = make_engine(model)
    asked = asking("a", prompt(20), max_tokens=60)
    deltas = interrupted(engine, asked, lambda: engine.abort("a"))
    assert deltas[-1].finish_reason == "abort"
    assert_routes(model, asked, deltas)

    async def asleep():
        running = asyncio.ensure_future(deltas_of(engine, asking("b", prompt(9), max_tokens=60)))
        while engine._rows.num == 0 or engine._rows.counts[0] < 3:
            await asyncio.sleep(0)
        await engine.sleep()
        await engine.abort("b")
        return await running

    slept = asyncio.run(asleep())
    assert_routes(model, asking("b", prompt(9)), slept)

    async def unread():
        await engine.wake()
        await engine.pause()
        running = asyncio.ensure_future(deltas_of(engine, asking("c", prompt(9))))
        await asyncio.sleep(0)
        await engine.abort("c")
        return await running

    (last,) = asyncio.run(unread())
    assert last.routed_experts.shape == (0, 2, 2) and not len(last.token_ids)


def test_more_than_256_experts_are_kept_in_two_bytes():
    config = tiny_config(
        "gpt_oss", vocab_size=VOCAB, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        max_positions=64, intermediate_size=4, windows=(None,), num_experts=300,
        num_active_experts=3, has_sinks=False, has_attention_bias=False,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(std=0.4, seed=0)
    asked = asking("a", prompt(20), max_tokens=20)
    (delta,) = ask(make_engine(model), asked)
    assert delta.routed_experts.dtype == np.int16 and delta.routed_experts.max() > 255
    ids = np.concatenate([asked.prompt_ids, delta.token_ids])
    assert np.array_equal(delta.routed_experts, chosen(model, ids)[:-1])


def test_requests_for_routes_that_cannot_be_are_refused():
    with pytest.raises(CapabilityError, match="routed experts"):
        ask(make_engine(), asking("a", prompt(5)))
    engine = make_engine(make_model("gpt_oss"))
    assert engine.capabilities.has_routed_experts
    with pytest.raises(EngineError, match=r"routes_from=6.*\b5\b"):
        ask(engine, asking("a", prompt(5), routes_from=6))
