"""Episodes of tasks as a run's settings say, for training, evaluation and the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.agent.loop import Budget, EpisodeSlots, collect, training_sampling
from lockstep.agent.match_loop import SeatPolicy, collect_matches
from lockstep.agent.rescoring import Rescorer
from lockstep.agent.tasks import derive_seed
from lockstep.run.build import Parts
from lockstep.run_config import Config
from lockstep.types import Group, Task


async def play_tasks(
    config: Config,
    parts: Parts,
    tasks: Sequence[Task],
    *,
    step: int = 0,
    is_rescored: bool = False,
    **options: Any,
) -> list[Group]:
    """One group of scored episodes for each task. is_rescored: finished turns are scored again if
    the correction reads the average. options: see `collect`; they replace the defaults. A group of
    matches has the trajectories of all seats."""
    agent, engine, correction = config.agent, parts.engine, config.chosen_correction
    is_replayed = config.trainer.routing_replay == "rollout"
    usual: dict[str, Any] = {
        "group_size": config.group_size,
        "sampling": training_sampling(agent, engine.capabilities, record_routes=is_replayed),
        "budget": Budget.of(agent, max_tokens=config.max_tokens),
        "run_seed": config.seed,
        "step": step,
        "slots": EpisodeSlots(agent.max_in_flight),
        "group_scorer": config.task.group_scorer,
    }
    if is_rescored and correction.behaviour == "averaged":
        usual["rescorer"] = Rescorer(
            engine,
            num_scorings=correction.rescorings,
            temperature=agent.temperature,
            max_in_flight=correction.rescorings_in_flight,
            seed=derive_seed(config.seed, "rescore", step),
        )
    task_config, how = config.task, usual | options
    if task_config.SEATS:
        trained = SeatPolicy(engine=engine, renderer=parts.renderer, sampling=how.pop("sampling"))
        seats = dict.fromkeys(task_config.SEATS, trained)
        for seat, own in parts.own.items():
            seats[seat] = replace(trained, engine=own.engine, name=seat)
        seats |= parts.seats
        for name in ("gateway", "group_scorer"):  # of environments and agents
            how.pop(name, None)
        return await collect_matches(
            seats, lambda task: task_config.match(task, agent), tasks, **how
        )
    return await collect(
        engine, parts.renderer, lambda task: task_config.environment(task, agent), tasks, **how
    )
