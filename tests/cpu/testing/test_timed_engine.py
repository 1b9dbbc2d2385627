"""An engine whose steps take stated time, and what re-scoring costs over it."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.types import Request, SamplingParams

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import averaging
from timed_engine import TimedEngine, run_in_virtual_time


async def generate(engine, name="a", length=5):
    prompt_ids = np.arange(length, dtype=np.int32)
    request = Request(
        id=name, prompt_ids=prompt_ids, sampling=SamplingParams(max_tokens=9), affinity=name
    )
    return [delta async for delta in engine.generate(request)]


def test_a_reply_takes_a_step_for_each_token_and_the_first_computes_the_prompt():
    engine = TimedEngine(lambda request: [7, 8, 9], step_seconds=1.0, token_seconds=0.1)
    deltas, seconds = run_in_virtual_time(generate(engine))
    assert deltas[0].token_ids.tolist() == [7, 8, 9]
    assert seconds == pytest.approx(1.5 + 1.1 + 1.1) == engine.sample_seconds


def test_replies_share_steps():
    engine = TimedEngine(lambda request: [7, 8, 9], step_seconds=1.0, token_seconds=0.1)

    async def main():
        await asyncio.gather(generate(engine, "a"), generate(engine, "b"))

    assert run_in_virtual_time(main())[1] == pytest.approx(2.0 + 1.2 + 1.2)


def test_a_scoring_waits_until_nothing_is_sampled_and_reuses_the_prefix():
    engine = TimedEngine(lambda request: [7, 8, 9], step_seconds=1.0, token_seconds=0.1)

    async def main():
        await generate(engine, "a")  # leaves the keys of 7 ids
        now = asyncio.get_running_loop().time
        began = now()
        sampled = asyncio.create_task(generate(engine, "b"))
        await asyncio.sleep(0.5)
        found = await engine.score(np.arange(8, dtype=np.int32), first=5, affinity="a")
        assert sampled.done() and found.num_cached_tokens == 4
        assert now() - began == pytest.approx(3.7 + 1.3)  # ids 4, 5 and 6 are computed
        await engine.load_weights(None, version=1)
        await engine.score(np.arange(8, dtype=np.int32), first=5, affinity="a")
        assert now() - began == pytest.approx(3.7 + 1.3 + 1.7)

    run_in_virtual_time(main())
    assert engine.score_seconds == pytest.approx(1.3 + 1.7)


def test_waiting_for_nothing_is_an_error_and_does_not_hang():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        run_in_virtual_time(main())


@pytest.mark.parametrize("tool_seconds", [0.0, 1.0, 4.0])
def test_rescoring_adds_no_more_than_the_engine_was_not_idle(tool_seconds):
    """Issue: at most max(0.1 x its own work, work - idle), whatever share of the time is idle."""
    found = averaging.simulate(tool_seconds, num_tasks=4, group_size=4)
    assert found.work > 1
    assert found.added <= found.bound * (1 + 1e-9)  # the clock is a sum of floats
    if tool_seconds == 0:
        assert found.idle < 1e-9 and found.overlapped_share == 0
    if tool_seconds == 4.0:
        assert found.idle > found.work and found.overlapped_share > 0.9
