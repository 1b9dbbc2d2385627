"""Nothing that foreign code does ends or hangs a run: it fails its own episode, with the reason."""

import asyncio
import contextlib
import math
import time

import pytest
from test_agent_loop import CALL, Looks, calls_then_answers, gather, play

from lockstep.agent.environment import Observation, Score
from lockstep.agent.guard import CANCEL_SECONDS, ForeignExit, TookTooLong, guarded
from lockstep.agent.harness import Harness
from lockstep.testing.engines import FakeEngine
from lockstep.types import Message, Task


async def raises_cancelled(*_):
    raise asyncio.CancelledError


async def cancels_itself(*_):
    asyncio.current_task().cancel()
    await asyncio.sleep(10)


async def exits(*_):
    raise SystemExit(3)


async def is_closed(*_):
    raise GeneratorExit


def exits_at_once(*_):
    raise SystemExit(3)


BAD = {
    "raises_cancelled": (raises_cancelled, "CancelledError"),
    "cancels_itself": (cancels_itself, "CancelledError"),
    "exits": (exits, "SystemExit: 3"),
    "is_closed": (is_closed, "GeneratorExit"),
    "exits_at_once": (exits_at_once, "SystemExit: 3"),
}


def broken(method, hook):
    environment = Looks()
    setattr(environment, method, hook)
    return environment


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("method", ["reset", "step", "score"])
def test_a_hook_that_raises_what_is_no_exception_fails_its_episode(method, name):
    hook, text = BAD[name]
    trajectory = play(FakeEngine(calls_then_answers(1)), broken(method, hook))
    assert trajectory.status == "failed"
    assert trajectory.error.startswith(f"environment.{method}: {text}")


def test_a_factory_that_exits_fails_its_episode():
    def make(task):
        raise SystemExit("no licence")

    (group,) = gather(FakeEngine(calls_then_answers(1)), make, [Task(id="a")], group_size=1)
    (trajectory,) = group.trajectories
    assert trajectory.status == "failed" and "SystemExit: no licence" in trajectory.error


@pytest.mark.parametrize("name", BAD)
def test_one_cancelled_episode_leaves_its_group_the_rewards(name):
    made = []

    def make(task):
        made.append(broken("step", BAD[name][0]) if not made else Looks())
        return made[-1]

    (group,) = gather(
        FakeEngine(calls_then_answers(1)), make, [Task(id="a")], group_size=3,
        group_scorer=lambda task: lambda those: [Score(reward=1.0)] * len(those),
    )  # fmt: skip
    assert [t.status for t in group.trajectories] == ["failed", "finished", "finished"]
    assert [t.reward for t in group.trajectories[1:]] == [1.0, 1.0]


@pytest.mark.parametrize("name", BAD)
def test_a_group_scorer_that_raises_what_is_no_exception_fails_its_group(name):
    hook, text = BAD[name]
    (group,) = gather(
        FakeEngine(calls_then_answers(1)),
        lambda task: Looks(),
        [Task(id="a")],
        group_scorer=lambda task: hook,
    )
    assert all(text in t.error and t.status == "failed" for t in group.trajectories)


def test_what_an_engine_cancels_fails_its_episode():
    class Cancels(FakeEngine):
        async def _sample(self, request):
            raise asyncio.CancelledError
            yield

    trajectory = play(Cancels(calls_then_answers(1)), Looks())
    assert trajectory.status == "failed" and "engine.generate: CancelledError" in trajectory.error


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (Score(reward=1.0, parts=None), "parts is None; expected a mapping"),
        (Score(reward=1.0, parts={0.5: 1.0}), "parts has the key 0.5; expected text"),
        (Score(reward=1.0, parts={"a": 1.0, "mean@1": 1.0}), "parts.mean@1 has the name of"),
        (Score(reward=10**400), "reward is too large for a float"),
        (Score(reward=1.0, parts={"a": 10**5000}), "parts.a is too large for a float"),
        (Score(reward=1j), "reward is 1j; expected a finite number"),
        (Score(reward=1.0, turn_rewards=None), "turn_rewards is None; expected a mapping"),
        (Score(reward=1.0, turn_rewards={0.0: 1.0}), "turn_rewards has turn 0.0"),
        (Score(reward=1.0, turn_rewards={0: -(10**400)}), "turn_rewards[0] is too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_nonsensical_score_fails_its_episode(score, text):
    class Scores(Looks):
        async def score(self):
            return score

    (group,) = gather(
        FakeEngine(calls_then_answers(1)), lambda task: Scores(), [Task(id="a")], group_size=1
    )
    (trajectory,) = group.trajectories
    assert trajectory.status == "failed" and text in trajectory.error, trajectory.error


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (None, "returned None; expected an Observation"),
        (Observation(metrics={0.5: 1.0}), "metrics has the key 0.5"),
        (Observation(metrics={"a": 10**400}), "metrics.a is too large"),
        (Observation(metrics={"a": math.nan}), "metrics.a is nan"),
        (Observation(messages="text"), "returned 'text'; expected a list of messages"),
        (
            lambda: Observation(messages=[Message(role="user", content=5)]),
            "message content must be text, found int. (test_guard.py:",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_nonsensical_observation_fails_its_episode(observation, text):
    class Steps(Looks):
        async def step(self, message):
            return observation() if callable(observation) else observation

    trajectory = play(FakeEngine(lambda request: CALL), Steps())
    assert trajectory.status == "failed" and text in trajectory.error, trajectory.error


async def will_not_be_cancelled(*_):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)


@pytest.mark.parametrize("method", ["reset", "step", "score"])
def test_a_hook_that_swallows_its_cancellation_does_not_hang_the_run(method):
    began = time.monotonic()
    environment = broken(method, will_not_be_cancelled)
    trajectory = play(FakeEngine(calls_then_answers(1)), environment, max_seconds=0.5)
    assert time.monotonic() - began < CANCEL_SECONDS + 20  # 30 s if it were waited for
    assert f"environment.{method}: TimeoutError: took longer than 0.5 s" in trajectory.error
    assert environment.num_closed == 1


# -- the guard itself -----------------------------------------------------------------------------


async def test_a_late_hook_cleans_up_and_its_own_time_limits_still_work():
    cleaned = []

    async def has_limits():
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(30)
        except TimeoutError:
            cleaned.append("own limit")
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("clean")

    with pytest.raises(TookTooLong, match=r"0.1 s \(agent.x\)"):
        await guarded(has_limits, seconds=0.1, setting="agent.x")
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # no cancellation is left over
    with pytest.raises(TimeoutError) as own:
        await guarded(raises_timeout, seconds=1.0)
    assert not isinstance(own.value, TookTooLong)
    assert cleaned == ["own limit", "clean"]


async def raises_timeout():
    raise TimeoutError("the server is slow")


async def test_cancelling_the_caller_cancels_the_hook_and_comes_through():
    ended = []

    async def hook():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    task = asyncio.create_task(guarded(hook, seconds=20))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled() and ended == [True]


async def test_a_hook_that_cancels_its_task_and_returns_leaves_nothing_pending():
    async def hook():
        asyncio.current_task().cancel()
        return 5

    assert await guarded(hook, seconds=1) == 5
    await asyncio.sleep(0)
    with pytest.raises(ForeignExit, match="CancelledError"):
        await guarded(cancels_itself, seconds=1)
    await asyncio.sleep(0)


def test_hooks_may_be_plain_functions_and_nest():
    async def outer():
        with pytest.raises(TookTooLong):
            await guarded(lambda: asyncio.sleep(30), seconds=0.01)
        return await guarded(lambda: 1, seconds=1) + 1

    assert asyncio.run(guarded(outer, seconds=5)) == 2


async def test_a_harness_that_exits_fails_its_episode():
    class Exits(Harness):
        async def run(self, task, endpoint):
            raise SystemExit(1)

    with pytest.raises(ForeignExit, match="SystemExit: 1"):
        await guarded(lambda: Exits().run(None, None))
