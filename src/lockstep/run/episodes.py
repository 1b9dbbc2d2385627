"""Episodes of tasks as a run's settings say, for training, evaluation and the doctor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from lockstep.agent.buffer import gather_groups, own_tasks
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.loop import (
    EpisodeSlots,
    RolloutOptions,
    collect,
    sampling_of,
    training_sampling,
)
from lockstep.agent.match_loop import collect_matches
from lockstep.agent.rescoring import Rescorer
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import Budget, Policy
from lockstep.launch.ranks import Ranks
from lockstep.observe.live import View
from lockstep.run.build import Parts
from lockstep.run.prompts import FirstPrompts
from lockstep.run.step_metrics import check_failures
from lockstep.run_config import Config
from lockstep.types import Group, SamplingParams, Task, Trajectory

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
    if is_rescored and correction.rescorings:
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


# -- tests of the policy ---------------------------------------------------------------------------


Z95 = 1.959964  # two-sided 95 % of a normal distribution

FIRST = -1
"""Place in the queue: evaluations come before episodes for training, as the run waits for them."""


@dataclass(slots=True)
class Tester:
    """Plays the same held-out tasks each time: sampled, greedily, and those of further sets."""

    config: Config
    parts: Parts
    view: View
    gateway: RunGateway
    ranks: Ranks | None = None
    """The processes that share the tasks."""
    slots: EpisodeSlots | None = None
    """Limit that is shared with the episodes sampled for training."""
    arms: dict[str, tuple[Config, list[Task]]] = field(default_factory=dict, init=False)
    """Name -> the settings of an arm, and its tasks."""

    def __post_init__(self) -> None:
        for name, config in self.config.tested.items():
            tasks = self.arms["sampled"][1] if name == "greedy" else None
            if tasks is None:
                source = FirstPrompts(config, self.parts.renderer).tasks("eval")
                tasks = source.take(config.evaluation.num_tasks)
            self.arms[name] = config, tasks

    @property
    def criterion(self) -> str:
        """The metric that the best checkpoint is chosen by."""
        return f"eval/sampled/mean@{self.config.evaluation.num_samples}"

    async def test(self) -> tuple[dict[str, float], dict[str, list[Group]]]:
        """The metrics, and the groups of each arm by its name; nothing with evaluation=none."""
        metrics: dict[str, float] = {}
        played: dict[str, list[Group]] = {}
        for name, (config, tasks) in self.arms.items():
            if not tasks:
                continue
            groups = await self._play(name, config, tasks)
            check_failures(groups, config.max_failed_share, where=f"evaluation ({name})")
            for arm, of_arm in _by_seat(groups, name).items():
                metrics |= evaluation_metrics(of_arm, config, name=arm)
            played[name] = [part for group in groups for part in group.by_seat()]
        return metrics, played

    async def _play(self, name: str, config: Config, tasks: Sequence[Task]) -> list[Group]:
        """The groups of one arm. The draws depend on (seed, name, task, sample). So two evaluations
        of one policy are equal, and evaluations of two policies are paired."""
        num_samples, done = config.evaluation.num_samples, count(1)
        own_temperature, total = config.evaluation.temperature, len(tasks) * num_samples
        temperature = config.agent.temperature if own_temperature is None else own_temperature
        own = await play_tasks(
            config,
            self.parts,
            own_tasks(self.ranks, tasks),
            group_size=num_samples,
            sampling=replace(sampling_of(config.agent), temperature=temperature),
            split=name,
            slots=self.slots or EpisodeSlots(config.agent.max_in_flight),
            order=lambda: FIRST,
            gateway=self.gateway.open,
            on_progress=lambda _: self.view.phase(f"evaluating ({name})", next(done), total),
        )
        return gather_groups(self.ranks, tasks, own)


def _by_seat(groups: Sequence[Group], name: str) -> dict[str, list[Group]]:
    """NAME -> the groups without the trajectories of other policies; NAME/SEAT -> the groups of
    each seat, if there are seats. Tasks without a trajectory are left out."""
    out: dict[str, list[Group]] = {}
    for group in groups:
        parts: dict[str, list[Trajectory]] = {}
        for trajectory in group.trajectories:
            if not trajectory.policy:
                parts.setdefault(name, []).append(trajectory)
            if trajectory.seat:
                parts.setdefault(f"{name}/{trajectory.seat}", []).append(trajectory)
        for part, played in parts.items():
            out.setdefault(part, []).append(Group(task=group.task, trajectories=played))
    return dict(sorted(out.items()))


def evaluation_metrics(groups: Sequence[Group], config: Config, *, name: str) -> dict[str, float]:
    """`eval/NAME...` of groups of k = num_samples episodes: mean@k and pass@k over the tasks.

    A failed episode counts with reward 0 and is counted under eval/NAME/failed: leaving it out
    would reward a policy for crashing its tools.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    rewards = [[0.0 if t.status == "failed" else t.reward for t in g.trajectories] for g in groups]
    prefix, k = f"eval/{name}", config.evaluation.num_samples
    passed = [float(max(of_task) >= config.evaluation.success_reward) for of_task in rewards]
    metrics = with_interval(f"{prefix}/mean@{k}", [float(np.mean(r)) for r in rewards])
    metrics |= with_interval(f"{prefix}/pass@{k}", passed, bounds=(0.0, 1.0))
    num_failed = sum(t.status == "failed" for t in trajectories)
    metrics[f"{prefix}/failed"] = num_failed / len(trajectories)
    parts: dict[str, list[float]] = defaultdict(list)
    labels: dict[str, list[float]] = defaultdict(list)
    for group, values in zip(groups, rewards, strict=True):
        of_task = config.task.label(group.task)
        for each in dict.fromkeys((group.task.source, of_task)):
            if each:
                labels[each] += values
        for trajectory in group.trajectories:
            for part, value in trajectory.reward_parts.items():
                parts[part].append(value)
                if of_task:
                    parts[f"{part}/{of_task}"].append(value)
    metrics |= {f"{prefix}/reward/{k}": float(np.mean(v)) for k, v in sorted(labels.items())}
    return metrics | {f"{prefix}/{k}": float(np.mean(v)) for k, v in sorted(parts.items())}


def with_interval(
    name: str, per_task: Sequence[float], *, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, float]:
    """The mean over tasks, with its 95 % interval under NAME/low and NAME/high.

    The interval is mean +- 1.96 standard errors over tasks, so that k samples of one task count as
    one observation of it; one task has no interval. bounds: the range of the quantity.
    """
    values = np.asarray(per_task, np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return {name: mean}
    margin = Z95 * float(values.std(ddof=1)) / math.sqrt(len(values))
    low, high = max(mean - margin, bounds[0]), min(mean + margin, bounds[1])
    return {name: mean, f"{name}/low": low, f"{name}/high": high}
