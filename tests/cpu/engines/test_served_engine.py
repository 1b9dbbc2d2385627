"""What `ServedEngine` makes of a wire: the protocol kept, and every wrong answer named."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from check_engine import check_engine
from engine_models import deltas_of, make_engine, make_model, prompt, reply_of, request
from engine_wire import EngineWire, until

from lockstep.engines.ledger import equal_distributions
from lockstep.engines.served import ServedEngine
from lockstep.errors import CapabilityError, EngineError, ServerUnreachableError
from lockstep.models.hf_io import hf_tensors
from lockstep.types import SamplingParams


def served(model=None, **settings):
    wire = EngineWire(make_engine(model), **settings)
    return ServedEngine(wire), wire


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_a_served_engine_keeps_every_promise(kind):
    model = make_model(kind)
    engine, wire = served(model)
    weights = dict(hf_tensors(make_model(kind, seed=1)))
    report = asyncio.run(check_engine(engine, prompt_ids=[1, 2, 3, 4, 5], weights=weights))
    assert set(report.skipped) <= {"stop strings", "routed experts"}
    assert "resume drop_cache=True" in wire.told


@pytest.mark.parametrize("streams", [True, False])
def test_a_reply_over_a_load_is_two_segments_each_of_the_weights_that_sampled_it(streams):
    old, new = make_model(), make_model(seed=1)
    engine, wire = served(old, streams=streams)
    asked = request("a", prompt(9), max_tokens=100, stop_ids=())

    async def run():
        task = asyncio.ensure_future(deltas_of(engine, asked))
        await until(lambda: wire.engine.stats["sampled_tokens"] > 10)
        await engine.load_weights(dict(hf_tensors(new)), version=1)
        return await task

    first, second = asyncio.run(run())
    assert (first.finish_reason, first.policy_version) == ("weight_update", 0)
    assert (second.finish_reason, second.policy_version) == ("length", 1)
    assert len(first.token_ids) > 5 and len(first.token_ids) + len(second.token_ids) == 100
    assert [len(call.prompt_ids) for call in wire.calls] == [9, 9 + len(first.token_ids)]
    path = np.concatenate([asked.prompt_ids, first.token_ids, second.token_ids])

    async def scores(model):
        return (await make_engine(model).score(path, distribution="tempered")).logprobs

    by_old, by_new = asyncio.run(scores(old)), asyncio.run(scores(new))
    turn = 9 + len(first.token_ids)
    assert np.abs(by_old[9:turn] - first.logprobs).max() < 1e-4
    assert np.abs(by_new[turn:] - second.logprobs).max() < 1e-4
    assert np.abs(by_old[turn:] - second.logprobs).max() > 0.1


def test_what_is_left_of_a_reply_is_drawn_with_another_seed():
    engine, wire = served()

    async def run():
        task = asyncio.ensure_future(deltas_of(engine, request("a", prompt(9), max_tokens=60)))
        await until(lambda: wire.engine.stats["sampled_tokens"] > 5)
        await engine.pause()
        await engine.resume(kv="keep")
        return await task

    (delta,) = asyncio.run(run())
    assert len(delta.token_ids) == 60 and delta.finish_reason == "length"
    assert len({call.seed for call in wire.calls}) == len(wire.calls) == 2
    assert engine.stats["requests"] == 1 and engine.stats["sampled_tokens"] == 60


def test_a_call_that_a_paused_server_holds_is_cut_and_asked_for_again():
    engine, wire = served()
    end = wire.engine.abort

    async def late(call_id):  # the server took the pause before the call reached it
        if wire.told[-1] != "pause" or len(wire.told) > 1:
            await end(call_id)

    wire.engine.abort = late

    async def run():
        task = asyncio.ensure_future(deltas_of(engine, request("a", prompt(9), max_tokens=60)))
        await until(lambda: wire.calls)
        await engine.pause()
        assert not wire.running
        await engine.resume()
        return await task

    (delta,) = asyncio.run(run())
    assert len(delta.token_ids) == 60


def broken(change, **sampling):
    engine, wire = served(change=change)
    with pytest.raises(EngineError) as caught:
        asyncio.run(reply_of(engine, request("a", prompt(9), **sampling)))
    assert engine.stats["failed_requests"] == 1 and wire.running == {}
    return str(caught.value)


def cut(reason, size, chunk):
    """A chunk that ends for this reason has its first tokens alone."""
    if chunk.finish_reason != reason:
        return chunk
    return replace(chunk, token_ids=chunk.token_ids[:size], logprobs=chunk.logprobs[:size])


def test_another_prompt_than_was_sent_names_the_first_differing_token():
    text = broken(lambda c: replace(c, prompt_ids=[c.prompt_ids[0], 7777, *c.prompt_ids[2:]]))
    assert f"token 1 is 7777 and was sent as {int(prompt(9)[1])}" in text
    text = broken(lambda c: replace(c, prompt_ids=c.prompt_ids[:-2]))
    assert "9 prompt ids were sent" in text and "read 7" in text


def test_log_probs_that_cannot_be_are_refused():
    text = broken(lambda c: replace(c, logprobs=c.logprobs[1:]))
    assert "sent 12 ids and 11 log-probs" in text
    text = broken(lambda c: replace(c, logprobs=[*c.logprobs[:3], float("nan"), *c.logprobs[4:]]))
    assert "sampled token 3" in text and "nan" in text
    text = broken(lambda c: replace(c, logprobs=[0.9, *c.logprobs[1:]]))
    assert "expected a finite number <=" in text


def test_ids_outside_of_the_vocabulary_are_refused():
    text = broken(lambda c: replace(c, token_ids=[500, *c.token_ids[1:]]))
    assert "id 500" in text and "0..96" in text


def test_a_stop_id_that_the_server_leaves_out_is_refused_and_not_put_back():
    stop_ids = tuple(range(0, 97, 3))
    text = broken(partial(cut, "stop", -1), stop_ids=stop_ids, max_tokens=200)
    assert "the stop id is left out of the ids" in text and "[0, 3, 6" in text


def test_tokens_after_a_stop_id_are_refused():
    reply = asyncio.run(reply_of(served()[0], request("a", prompt(9), temperature=0.0)))
    ids, logprobs = (column.tolist() for column in reply)
    whole = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
    text = broken(lambda c: replace(c, **whole), temperature=0.0, stop_ids=(ids[2],))
    assert f"went on after the stop id {ids[2]} (token {ids.index(ids[2])})" in text


def test_a_reply_that_ends_early_or_twice_or_without_reason_is_refused():
    assert "ended after 4 of 12 tokens" in broken(partial(cut, "length", 4))
    assert "without a reason" in broken(lambda c: replace(c, finish_reason=None))
    assert "was not asked to" in broken(
        lambda c: replace(c, finish_reason="abort", token_ids=[3], logprobs=[-1.0])
    )


def test_lost_connections_are_taken_up_where_they_broke_and_counted():
    engine, wire = served(streams=True)
    generate, broke = wire.generate, []

    async def breaking(asked):
        count = 0
        async for chunk in generate(asked):
            yield chunk
            count += 1
            if count == 4 and len(broke) < 2:
                broke.append(len(asked.prompt_ids))
                raise ServerUnreachableError("the connection was lost")

    wire.generate = breaking
    ids, logprobs = asyncio.run(reply_of(engine, request("a", prompt(9))))
    assert len(ids) == len(logprobs) == 12
    assert engine.stats["retries"] == 2 and broke == [9, 13]
    path = np.concatenate([prompt(9), ids])
    scores = asyncio.run(make_engine().score(path)).logprobs[9:]
    assert np.abs(scores - logprobs).max() < 1e-4


def test_a_server_that_stays_away_fails_the_request():
    engine, wire = served()

    async def away(asked):
        raise ServerUnreachableError("not reachable")
        yield

    wire.generate = away
    with pytest.raises(ServerUnreachableError, match="not reachable"):
        asyncio.run(reply_of(engine, request("a", prompt(9))))
    assert engine.stats["retries"] == 2 and engine.stats["failed_requests"] == 1


def test_an_engine_whose_load_failed_answers_nothing_until_one_succeeds():
    engine, wire = served()
    weights = dict(hf_tensors(make_model(seed=1)))

    async def run():
        waiting = asyncio.ensure_future(deltas_of(engine, request("a", prompt(9), max_tokens=90)))
        await until(lambda: wire.running)
        wire.fails_load = True
        with pytest.raises(OSError, match="disk full"):
            await engine.load_weights(weights, version=1)
        with pytest.raises(EngineError, match=r"version 1\b"):
            await waiting
        with pytest.raises(EngineError, match="load them again"):
            await deltas_of(engine, request("b", prompt(9)))
        with pytest.raises(EngineError, match="load them again"):
            await engine.score(prompt(9))
        wire.fails_load = False
        await engine.load_weights(weights, version=2)
        return await deltas_of(engine, request("c", prompt(9)))

    (delta,) = asyncio.run(run())
    assert delta.policy_version == 2 and engine.version == 2


def test_log_probs_are_asked_for_by_number_and_not_by_name():
    engine, _ = served(distributions=("model",))
    asyncio.run(reply_of(engine, request("a", prompt(9), temperature=1.0)))
    asyncio.run(reply_of(engine, request("b", prompt(9), temperature=0.0)))
    with pytest.raises(CapabilityError, match=r"temperature=0.7"):
        asyncio.run(reply_of(engine, request("c", prompt(9), temperature=0.7)))
    with pytest.raises(CapabilityError, match="'sampled'"):
        asked = request("d", prompt(9), top_k=3, distribution="sampled")
        asyncio.run(reply_of(engine, asked))
    cut = SamplingParams(max_tokens=1, top_k=3, temperature=0.5, distribution="sampled")
    assert equal_distributions(cut) == {"sampled"}


def test_scores_survive_a_pause():
    engine, _ = served()

    async def run():
        await engine.pause()
        task = asyncio.ensure_future(engine.score(prompt(30)))
        await asyncio.sleep(0.01)
        assert not task.done()
        await engine.resume()
        return await task

    found = asyncio.run(run())
    assert np.isfinite(found.logprobs[1:]).all() and engine.stats["scored_tokens"] == 30


def test_a_run_whose_engine_takes_no_weights_is_refused():
    from lockstep.engines.registry import check_capabilities

    engine, _ = served()
    fixed, _ = served(distributions=("model",))
    fixed.wire.claims["weight_sources"] = ()
    context = SimpleNamespace(vocab_size=97, max_tokens=200)
    check_capabilities(engine, context, needs=["training"])
    check_capabilities(fixed, context)
    with pytest.raises(CapabilityError, match="takes no new weights"):
        check_capabilities(fixed, context, needs=["training"])
    with pytest.raises(CapabilityError, match=r"Set agent\.temperature=1"):
        check_capabilities(fixed, context, temperature=0.7)
