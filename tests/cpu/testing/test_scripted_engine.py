"""FakeEngine keeps the promises of the protocol that it stands in for."""

import asyncio

import numpy as np
import pytest
from playing import steps_of

from lockstep.engines.base import Engine
from lockstep.errors import EngineError
from lockstep.testing.engines import FakeEngine, fake_logprob
from lockstep.types import Request, SamplingParams

REPLY = [10, 11, 12, 13, 2, 14]


def request(name: str = "a", *, prompt=(5, 6, 7), max_tokens: int = 16, stream: bool = False):
    return Request(
        id=name,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, stop_ids=(2,)),
        stream=stream,
    )


async def deltas_of(engine, one):
    return [delta async for delta in engine.generate(one)]


def ids(deltas) -> list[int]:
    return [int(id_) for delta in deltas for id_ in delta.token_ids]


def test_a_reply_ends_with_its_stop_id_and_has_its_own_log_probs():
    engine = FakeEngine(lambda _: REPLY)
    assert isinstance(engine, Engine)
    (delta,) = asyncio.run(deltas_of(engine, request()))
    assert ids([delta]) == REPLY[:5] and (delta.finish_reason, delta.stop) == ("stop", 2)
    expected = [fake_logprob(id_, 3 + at) for at, id_ in enumerate(REPLY[:5])]
    np.testing.assert_allclose(delta.logprobs, expected, rtol=1e-6)
    scores = asyncio.run(engine.score(np.array([5, 6, 7, *REPLY[:5]], np.int32))).logprobs
    assert np.isnan(scores[0])
    np.testing.assert_array_equal(scores[3:], delta.logprobs)


def test_a_reply_without_room_for_its_stop_id_ends_by_length():
    (delta,) = asyncio.run(deltas_of(FakeEngine(lambda _: REPLY), request(max_tokens=4)))
    assert ids([delta]) == REPLY[:4] and (delta.finish_reason, delta.stop) == ("length", None)


def test_a_stream_gives_the_same_reply_token_by_token():
    deltas = asyncio.run(deltas_of(FakeEngine(lambda _: REPLY), request(stream=True)))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 5 and ids(deltas) == REPLY[:5]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["stop"]


async def test_a_known_id_is_answered_again_and_never_sampled_twice():
    engine = FakeEngine(lambda _: REPLY, tokens_per_step=1)
    both = await asyncio.gather(*(deltas_of(engine, request()) for _ in range(2)))
    first, second, third = [*both, await deltas_of(engine, request())]
    assert ids(first) == ids(second) == ids(third) and len(engine.requests) == 1


async def test_an_abort_hands_over_what_was_sampled_so_far():
    engine = FakeEngine(lambda _: REPLY, tokens_per_step=1)
    job = asyncio.create_task(deltas_of(engine, request()))
    await steps_of(engine)
    await engine.abort("a")
    await engine.abort("unknown")
    deltas = await job
    assert deltas[-1].finish_reason == "abort" and ids(deltas) == REPLY[: len(ids(deltas))]
    assert 1 <= len(ids(deltas)) < 5


async def test_a_paused_engine_waits_and_then_goes_on_under_the_weights_it_was_given():
    engine = FakeEngine(lambda _: REPLY, tokens_per_step=2)
    job = asyncio.create_task(deltas_of(engine, request()))
    await steps_of(engine)
    await engine.pause()
    await asyncio.sleep(0.03)
    waited = not job.done()
    await engine.load_weights(None, version=3)
    await engine.resume()
    deltas = await job
    assert waited and ids(deltas) == REPLY[:5]
    assert [(d.finish_reason, d.policy_version) for d in deltas] == [
        ("weight_update", 0),
        ("stop", 3),
    ]


@pytest.mark.parametrize("prompt", [(), (5, 99), (5,) * 20])
def test_a_prompt_that_cannot_be_sampled_from_is_an_error(prompt):
    engine = FakeEngine(lambda _: REPLY, vocab_size=50, max_tokens=20)
    with pytest.raises(EngineError, match="request a"):
        asyncio.run(deltas_of(engine, request(prompt=prompt)))


async def test_a_sleeping_engine_refuses():
    engine = FakeEngine(lambda _: REPLY)

    await engine.sleep()
    with pytest.raises(EngineError, match="sleeps"):
        await deltas_of(engine, request())
    await engine.wake()
    assert ids(await deltas_of(engine, request())) == REPLY[:5]
