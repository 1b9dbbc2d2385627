"""Episodes of finished agents: a session each, rewarded by what their harness returns or posts."""

import asyncio
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.renderers.made_up_templates import THINKS_AT_ONCE, template
from gateway_sessions import RENDERER, Agent, check, said, turns, user
from playing import all_groups

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.agent.harness import Endpoint, Harness
from lockstep.renderers.config import ChatMLConfig, JinjaConfig
from lockstep.renderers.registry import make_renderer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, Task

REGISTRIES: list[SessionRegistry] = []
"""The newest is that of the episodes under way."""


async def gateway() -> Any:
    return SimpleNamespace(sessions=REGISTRIES[-1], url="http://test", model="m")


class Plays(Harness):
    """Calls `script(agent, session)`, which returns a score, None or raises."""

    def __init__(self, script) -> None:
        self.script, self.num_closed = script, 0

    async def run(self, task: Task, endpoint: Endpoint) -> Score | None:
        assert endpoint.base_url == f"http://test/s/{endpoint.session_id}"
        assert endpoint.session_url == f"http://test/sessions/{endpoint.session_id}"
        session = REGISTRIES[-1].get(endpoint.session_id)
        assert REGISTRIES[-1].of_key(endpoint.api_key) is session
        return await self.script(Agent(session))

    async def close(self) -> None:
        self.num_closed += 1


def play(
    make,
    *,
    engine=None,
    num_tasks=1,
    group_size=1,
    renderer=RENDERER,
    max_tokens=100_000,
    **settings,
):
    engine = engine or FakeEngine(turns(said("hello"), renderer=renderer))
    REGISTRIES.append(SessionRegistry())
    made = []

    def factory(task):
        made.append(make() if callable(make) and not isinstance(make, Harness) else make)
        return made[-1]

    groups = asyncio.run(
        all_groups(
            engine, renderer, factory, [Task(id=f"t{n}") for n in range(num_tasks)],
            group_size=group_size, config=AgentConfig(**settings), max_tokens=max_tokens,
            gateway=gateway,
        )
    )  # fmt: skip
    found = [t for group in groups for t in group.trajectories]
    for trajectory in found:
        check(trajectory, engine)
    assert not REGISTRIES[-1].all()
    return found, made, engine


def test_a_harness_episode_is_a_trajectory_with_its_score():
    async def script(agent):
        await agent.ask(user("a"))
        await agent.ask(user("b"))
        return Score(reward=0.5, parts={"right": 1.0}, turn_rewards={0: 0.25})

    found, made, engine = play(lambda: Plays(script), group_size=2)
    assert [t.id for t in found] == ["train/0/t0/0", "train/0/t0/1"]
    for trajectory in found:
        assert trajectory.status == "finished" and trajectory.reward == 0.5
        assert trajectory.reward_parts == {"right": 1.0} and trajectory.num_turns == 2
        assert [s.reward for s in trajectory.segments if s.is_sampled] == [0.25, None]
        assert trajectory.metrics["seconds"] >= 0
    assert [harness.num_closed for harness in made] == [1, 1]
    first, second = {r.seed for r in engine.requests[::2]}, {r.seed for r in engine.requests[1::2]}
    assert len(first | second) == 4  # each sample draws its own


def test_a_posted_reward_is_the_score():
    async def script(agent):
        await agent.ask(user("a"))
        await agent.session.set_reward(0.75, parts={"p": 1.0})

    (trajectory,), _, _ = play(lambda: Plays(script))
    assert trajectory.reward == 0.75 and trajectory.reward_parts == {"p": 1.0}


def test_a_harness_score_is_the_only_reward():
    async def script(agent):
        first = await agent.ask(user("a"))
        await agent.ask(user("b"))
        await agent.session.set_reward(1000.0, parts={"own": 1.0}, leaf=first.leaf)
        await agent.session.set_reward(1000.0, parts={})
        await agent.session.finish()
        return Score(reward=0.0)

    (trajectory,), _, _ = play(lambda: Plays(script))
    assert list(trajectory.rewards.values()) == [0.0] and not trajectory.reward_parts
    assert not any(s.reward for s in trajectory.segments)
    assert trajectory.metrics["gateway/ignored_rewards"] == 2


async def returns_nothing(agent):
    await agent.ask(user("a"))


async def raises(agent):
    await agent.ask(user("a"))
    raise RuntimeError("the browser crashed")


async def returns_nan(agent):
    await agent.ask(user("a"))
    return Score(reward=math.nan)


async def asks_nothing(agent):
    return Score(reward=1.0)


async def is_late(agent):
    await agent.ask(user("a"))
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (returns_nothing, "no reward: the harness returned None"),
        (raises, "harness.run: RuntimeError: the browser crashed (test_harness_episodes.py:"),
        (returns_nan, "harness.run: reward is nan; expected a finite number"),
        (asks_nothing, "the agent asked for no turn"),
        (is_late, "harness.run: took longer than 0.5 s"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_episode_without_a_reward_fails_with_its_reason(script, error):
    limits = {"max_seconds": 0.5} if script is is_late else {}
    (trajectory,), (harness,), _ = play(lambda: Plays(script), **limits)
    assert trajectory.status == "failed" and error in trajectory.error
    assert not trajectory.rewards and harness.num_closed == 1


LIMITS = {
    "max_tokens": {"max_tokens": 150},
    "max_turns": {"max_turns": 2},
    "max_turn_tokens": {"max_turn_tokens": 3},
    "max_seconds": {"max_seconds": 0.3},
}
ENDS = {
    "raises": lambda: (_ for _ in ()).throw(KeyError("choices")),
    "exits": lambda: sys.exit(1),
    "gives up": lambda: None,
}


@pytest.mark.parametrize(
    ("end", "has_posted"),
    [("raises", False), ("raises", True), ("exits", False), ("exits", True), ("gives up", False)],
)
@pytest.mark.parametrize("limit", LIMITS)
def test_an_agent_that_a_limit_of_the_run_ended_is_truncated_and_scored(limit, end, has_posted):
    async def script(agent):
        if has_posted:
            await agent.session.set_reward(0.25, parts={})
        try:
            for _ in range(50):
                reply = await agent.ask(user("w" * 20))
                if reply.finish_reason != "stop":
                    raise ValueError("not a whole reply")
        except (Refusal, ValueError):
            return ENDS[end]()

    slow = {"tokens_per_step": 1, "step_seconds": 0.02} if limit == "max_seconds" else {}
    engine = FakeEngine(turns(said("hello")), **slow)
    (trajectory,), _, _ = play(lambda: Plays(script), engine=engine, **LIMITS[limit])
    assert trajectory.status == "truncated", trajectory.error
    assert trajectory.error.startswith((f"{limit}: ", "harness.run: took longer than 0.3 s"))
    assert trajectory.num_turns >= 1 and trajectory.reward == (0.25 if has_posted else 0.0)


@pytest.mark.parametrize("case", ["own limit", "goes on", "engine", "own error", "bad score"])
def test_an_agent_that_fails_of_itself_is_not_truncated(case):
    async def script(agent):
        await agent.ask(user("a"), max_tokens=2 if case == "own limit" else None)
        if case == "goes on":
            with pytest.raises(Refusal):
                await agent.ask(user("w" * 500))
            agent.messages = [user("w")]
            await agent.ask()
        if case in ("own error", "bad score"):
            with pytest.raises(Refusal):
                await agent.ask(user("w" * 500))
        if case == "own error":
            await agent.session.finish(error="the shop was closed")
        if case == "bad score":
            return Score(reward=math.nan)
        raise RuntimeError("the browser crashed")

    (trajectory,), _, _ = play(lambda: Plays(script), max_tokens=200)
    assert trajectory.status == "failed" and not trajectory.rewards


def test_an_agent_that_is_late_but_has_posted_is_truncated():
    async def script(agent):
        await agent.ask(user("a"))
        await agent.session.set_reward(1.0, parts={})
        await asyncio.sleep(30)

    (trajectory,), _, _ = play(lambda: Plays(script), max_seconds=0.5)
    assert trajectory.status == "truncated" and trajectory.reward == 1.0
    assert "took longer than 0.5 s" in trajectory.error


def test_a_harness_without_a_gateway_says_what_is_missing():
    engine = FakeEngine(turns(said("x")))
    (group,) = asyncio.run(
        all_groups(engine, RENDERER, lambda task: Plays(returns_nothing), [Task(id="t")])
    )
    assert "nothing here starts a gateway" in group.trajectories[0].error


class Connects(Harness):
    wait_seconds = 5.0

    async def run(self, task, endpoint):
        await endpoint.offer()


def test_agents_that_connect_claim_episodes_and_feed_them():
    async def agents():
        for _ in range(4):
            session, task = await REGISTRIES[-1].claim()
            await Agent(session).ask(user(task.id))
            await session.set_reward(float(task.id[1:]), parts={})
            await session.finish()

    def make():
        if not started:
            started.append(asyncio.ensure_future(agents()))
        return Connects()

    started = []
    found, _, _ = play(make, num_tasks=2, group_size=2)
    assert [t.reward for t in found] == [0.0, 0.0, 1.0, 1.0]
    assert [t.status for t in found] == ["finished"] * 4


def test_an_episode_that_nobody_claims_fails():
    harness = Connects()
    harness.wait_seconds = 0.05
    (trajectory,), _, _ = play(harness)
    assert "no agent claimed the episode within 0.05 s" in trajectory.error


def test_a_score_of_a_group_is_for_harnesses_too():
    async def script(agent):
        await agent.ask(user("a"))

    REGISTRIES.append(SessionRegistry())

    def scores(those):
        return [Score(reward=float(n)) for n in range(len(those))]

    (group,) = asyncio.run(
        all_groups(
            FakeEngine(turns(said("x"))), RENDERER, lambda task: Plays(script), [Task(id="t")],
            group_size=3, gateway=gateway, group_scorer=lambda task: scores,
        )
    )  # fmt: skip
    assert group.rewards == [0.0, 1.0, 2.0]


# -- the environment loop forks too -------------------------------------------------------------


class AsksTwice(Environment):
    """A user who speaks again after the first answer."""

    def __init__(self) -> None:
        self.num_steps = 0

    async def reset(self) -> Sequence[Message]:
        return [user("first")]

    async def step(self, message: Message) -> Observation:
        self.num_steps += 1
        if self.num_steps == 3:
            return Observation(done=True)
        return Observation(messages=[user(f"question {self.num_steps}")])

    async def score(self) -> Score:
        return Score(reward=1.0, turn_rewards={0: 0.1, 2: 0.3})


@pytest.mark.parametrize("is_opened", [False, True], ids=["chatml", "opens with <think>"])
def test_an_environments_user_forks_the_path_when_thinking_is_dropped(is_opened, tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_text(template(source=THINKS_AT_ONCE))
    config = (
        JinjaConfig(template=str(path), thinking="drop")
        if is_opened
        else ChatMLConfig(thinking="drop")
    )
    renderer = make_renderer(config, byte_tokenizer())
    answers = (said("one", thinking="t1"), said("two", thinking="t2"), said("three"))
    engine = FakeEngine(turns(*answers, renderer=renderer))
    (trajectory,), _, _ = play(AsksTwice, engine=engine, renderer=renderer)
    assert trajectory.status == "finished" and trajectory.num_turns == 3
    assert [s.reason for s in trajectory.segments if s.reason] == ["dropped_thinking"] * 2
    assert trajectory.metrics["branches/dropped_thinking"] == 2
    assert list(trajectory.rewards.values()) == [1.0] * 3
    own = [s.reward for s in trajectory.segments if s.is_sampled]
    assert own == [0.1, None, 0.3]
    last = trajectory.segments[trajectory.leaves()[-1]]
    rendered = renderer.render(
        [user("first"), said("one", thinking="t1"), user("question 1"),
         said("two", thinking="t2"), user("question 2")]
    )  # fmt: skip
    assert trajectory.path_ids(last.parent).tolist() == rendered


def test_refusals_reach_the_agent_and_not_the_run():
    async def script(agent):
        await agent.ask(user("a"))
        with pytest.raises(Refusal, match="max_turns"):
            await agent.ask(user("b"))
        return Score(reward=1.0)

    (trajectory,), _, _ = play(lambda: Plays(script), max_turns=1)
    assert trajectory.status == "truncated" and trajectory.reward == 1.0


def test_an_agent_that_ends_its_session_with_an_error_fails_its_episode():
    async def script(agent):
        await agent.ask(user("a"))
        await agent.session.finish(error="the shop was closed")
        await asyncio.sleep(30)

    (trajectory,), _, _ = play(lambda: Plays(script), max_seconds=0.5)
    assert (trajectory.status, trajectory.error) == ("failed", "the shop was closed")
