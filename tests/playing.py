"""Plays environments: with an engine through the agent loop, or with turns that are written."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import Budget, RolloutOptions, collect, run_episode, sampling_of
from lockstep.agent.turns import Policy
from lockstep.types import Group, Message, Task, Trajectory


async def steps_of(engine, number=1):
    """Waits until the `FakeEngine` has made `number` steps."""
    while engine.num_steps < number:
        await asyncio.sleep(0)


async def one_episode(
    engine, renderer, environment, *, config=None, sampling=None, max_tokens=100_000, **budget
) -> Trajectory:
    """budget: fields that differ from the budget of the settings."""
    config = config or AgentConfig()
    return await run_episode(
        engine, renderer, environment, Task(id="task"), trajectory_id="t", seed=1,
        sampling=sampling or sampling_of(config),
        budget=replace(Budget.of(config, max_tokens=max_tokens), **budget),
    )  # fmt: skip


async def all_groups(
    engine,
    renderer,
    make_environment,
    tasks,
    *,
    group_size=1,
    config=None,
    sampling=None,
    max_tokens=100_000,
    **options,
) -> list[Group]:
    """options: of the rollout."""
    config = config or AgentConfig()
    return await collect(
        Policy(engine, renderer, sampling or sampling_of(config)), make_environment, tasks,
        group_size=group_size, budget=Budget.of(config, max_tokens=max_tokens), run_seed=0,
        options=RolloutOptions(**options),
    )  # fmt: skip


@dataclass
class Played:
    """An episode of written turns."""

    messages: list[Message]
    """All that the model read."""
    observations: list[Observation]
    score: Score


def play_turns(environment: Environment, turns: Sequence[Any], *, ends: bool = False) -> Played:
    """ends: leaves out turns after the environment's end."""

    async def episode() -> Played:
        observations = []
        try:
            messages = [*await environment.reset()]
            for turn in turns:
                observations.append(await environment.step(turn))
                messages += observations[-1].messages
                if ends and observations[-1].done:
                    break
            return Played(messages, observations, await environment.score())
        finally:
            await environment.close()

    return asyncio.run(episode())
