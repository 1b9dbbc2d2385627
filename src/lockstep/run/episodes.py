"""Episodes of tasks as a run's settings say, for training, evaluation and the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.agent.loop import EpisodeSlots, RolloutOptions, collect, training_sampling
from lockstep.agent.match_loop import collect_matches
from lockstep.agent.rescoring import Rescorer
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import Budget, Policy
from lockstep.run.build import Parts
from lockstep.run_config import Config
from lockstep.types import Group, SamplingParams, Task

RESCORINGS_IN_FLIGHT = 64
"""Turns that are scored again at the same time, while others are sampled."""


async def play_tasks(
    config: Config,
    parts: Parts,
    tasks: Sequence[Task],
    *,
    group_size: int | None = None,
    sampling: SamplingParams | None = None,
    budget: Budget | None = None,
    is_rescored: bool = False,
    **options: Any,
) -> list[Group]:
    """One group of scored episodes for each task. group_size, sampling, budget: None takes the
    run's. is_rescored: finished turns are scored again if the correction reads the average.
    options: fields of `RolloutOptions`. A group of matches has the trajectories of all seats."""
    agent, engine, correction = config.agent, parts.engine, config.chosen_correction
    if is_rescored and correction.behaviour == "averaged":
        options["rescorer"] = Rescorer(
            engine,
            num_scorings=correction.rescorings,
            temperature=agent.temperature,
            max_in_flight=RESCORINGS_IN_FLIGHT,
            seed=derive_seed(config.seed, "rescore", options.get("step", 0)),
        )
    usual = {"slots": EpisodeSlots(agent.max_in_flight), "group_scorer": config.task.group_scorer}
    is_replayed = config.trainer.routing_replay == "rollout"
    sampling = sampling or training_sampling(agent, engine.capabilities, record_routes=is_replayed)
    policy, task_config = Policy(engine, parts.renderer, sampling), config.task
    how: dict[str, Any] = {
        "group_size": config.group_size if group_size is None else group_size,
        "budget": budget or Budget.of(agent, max_tokens=config.max_tokens),
        "run_seed": config.seed,
        "options": RolloutOptions(**usual | options),
    }
    if not task_config.SEATS:
        return await collect(
            policy, lambda task: task_config.environment(task, agent), tasks, **how
        )
    seats = dict.fromkeys(task_config.SEATS, policy)
    for seat, own in parts.own.items():
        seats[seat] = replace(policy, engine=own.engine, name=seat)
    seats |= parts.seats
    return await collect_matches(seats, lambda task: task_config.match(task, agent), tasks, **how)
