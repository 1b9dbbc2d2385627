"""How good the policy is on tasks that it is not trained on: mean@k and pass@k with intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lockstep.agent.config import AgentConfig
from lockstep.agent.dealing import collect_over
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.loop import Budget, EpisodeSlots, OpenGateway, collect, sampling_of
from lockstep.agent.task_config import TaskConfig
from lockstep.engines.base import Engine
from lockstep.errors import DataError
from lockstep.launch.ranks import Ranks
from lockstep.observe.live import View
from lockstep.renderers.base import Renderer
from lockstep.run.build import Parts
from lockstep.run.step_metrics import check_failures
from lockstep.run_config import Config
from lockstep.types import Group, Task

Z95 = 1.959964  # two-sided 95 % of a normal distribution

FIRST = -1
"""Place in the queue: evaluations come before episodes for training, as the run waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks with its 95 % interval, clustered by task."""

    mean: float
    low: float
    high: float
    num_tasks: int

    @classmethod
    def of(cls, per_task: Sequence[float]) -> Estimate:
        """per_task: one value per task. The interval is mean +- 1.96 standard errors over tasks, so
        that k samples of one task count as one observation of it; one task has no interval."""
        values = np.asarray(per_task, np.float64)
        mean = float(values.mean())
        if len(values) < 2:
            return cls(mean=mean, low=math.nan, high=math.nan, num_tasks=len(values))
        margin = Z95 * float(values.std(ddof=1)) / math.sqrt(len(values))
        return cls(mean=mean, low=mean - margin, high=mean + margin, num_tasks=len(values))

    def to_metrics(self, name: str) -> dict[str, float]:
        out = {name: self.mean}
        if math.isfinite(self.low):
            out |= {f"{name}/low": self.low, f"{name}/high": self.high}
        return out


def mean_at_k(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean reward over tasks, each task's k samples averaged first."""
    return Estimate.of([float(np.mean(rewards)) for rewards in groups])


def pass_at_k(groups: Sequence[Sequence[float]], k: int, *, success_reward: float) -> Estimate:
    """Chance that at least one of k samples reaches `success_reward`.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) over n >= k samples with c successes.
    Source: Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    chances: list[float] = []
    for rewards in groups:
        n, c = len(rewards), sum(r >= success_reward for r in rewards)
        if n < k:
            raise ValueError(f"pass@{k} needs at least {k} samples per task, found {n}.")
        chances.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    found = Estimate.of(chances)
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


async def evaluate(
    engine: Engine,
    renderer: Renderer,
    task: TaskConfig,
    agent: AgentConfig,
    tasks: Sequence[Task],
    *,
    name: str,
    num_samples: int,
    temperature: float,
    max_tokens: int,
    run_seed: int,
    success_reward: float,
    on_progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
    slots: EpisodeSlots | None = None,
    gateway: OpenGateway | None = None,
) -> tuple[dict[str, float], list[Group]]:
    """Plays `tasks` num_samples times each and returns (metrics `eval/NAME...`, the episodes).

    A failed episode counts with reward 0 and is counted under eval/NAME/failed: leaving it out
    would reward a policy for crashing its tools. ranks: the processes that share the tasks. slots:
    shared with what is sampled meanwhile; None makes its own of agent.max_in_flight. gateway: see
    `collect`. The draws depend on (run_seed, name, task, sample), so two evaluations of one policy
    are equal, and those of two policies are paired.
    """
    total, done = len(tasks) * num_samples, 0

    def progress(_: object) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)

    play = partial(
        collect,
        engine,
        renderer,
        lambda each: task.environment(each, agent),
        group_size=num_samples,
        sampling=replace(sampling_of(agent), temperature=temperature),
        budget=Budget.of(agent, max_tokens=max_tokens),
        run_seed=run_seed,
        split=name,
        slots=slots or EpisodeSlots(agent.max_in_flight),
        order=lambda: FIRST,
        score_group=task.group_scorer(),
        gateway=gateway,
        on_progress=progress,
    )
    groups = await collect_over(ranks, tasks, play)
    trajectories = [t for g in groups for t in g.trajectories]

    def reward(trajectory) -> float:
        return 0.0 if trajectory.status == "failed" else trajectory.reward

    rewards = [[reward(t) for t in g.trajectories] for g in groups]
    prefix = f"eval/{name}"
    metrics = mean_at_k(rewards).to_metrics(f"{prefix}/mean@{num_samples}")
    metrics |= pass_at_k(rewards, num_samples, success_reward=success_reward).to_metrics(
        f"{prefix}/pass@{num_samples}"
    )
    metrics[f"{prefix}/failed"] = sum(t.status == "failed" for t in trajectories) / len(
        trajectories
    )
    parts: dict[str, list[float]] = defaultdict(list)
    labels: dict[str, list[float]] = defaultdict(list)
    for group, values in zip(groups, rewards, strict=True):
        label = task.label(group.task)
        for name in dict.fromkeys((group.task.source, label)):
            if name:
                labels[name] += values
        for trajectory in group.trajectories:
            for part, value in trajectory.reward_parts.items():
                parts[part].append(value)
                if label:
                    parts[f"{part}/{label}"].append(value)
    metrics |= {f"{prefix}/reward/{k}": float(np.mean(v)) for k, v in sorted(labels.items())}
    metrics |= {f"{prefix}/{k}": float(np.mean(v)) for k, v in sorted(parts.items())}
    return metrics, groups


@dataclass(slots=True)
class Tester:
    """Plays the same held-out tasks each time: sampled as in training, and greedily."""

    config: Config
    parts: Parts
    view: View
    gateway: RunGateway
    ranks: Ranks | None = None
    """The processes that share the tasks."""
    slots: EpisodeSlots | None = None
    """Limit that is shared with the episodes sampled for training."""
    tasks: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        source = config.task.tasks(split="eval", seed=config.seed)
        self.tasks = source.take(config.evaluation.num_tasks)
        if not self.tasks:
            raise DataError("the task source has no held-out task to evaluate on.")

    @property
    def criterion(self) -> str:
        """The metric that the best checkpoint is chosen by."""
        return f"eval/sampled/mean@{self.config.evaluation.num_samples}"

    async def test(self) -> tuple[dict[str, float], dict[str, list[Group]]]:
        """The metrics, and the groups of each arm by its name."""
        config = self.config
        arms = [("sampled", config.evaluation.num_samples, config.agent.temperature)]
        if config.evaluation.greedy:
            arms.append(("greedy", 1, 0.0))
        metrics: dict[str, float] = {}
        played: dict[str, list[Group]] = {}
        for name, num_samples, temperature in arms:
            found, played[name] = await evaluate(
                self.parts.engine,
                self.parts.renderer,
                config.task,
                config.agent,
                self.tasks,
                name=name,
                num_samples=num_samples,
                temperature=temperature,
                max_tokens=config.max_tokens,
                run_seed=config.seed,
                success_reward=config.evaluation.success_reward,
                on_progress=partial(self.view.phase, f"evaluating ({name})"),
                ranks=self.ranks,
                slots=self.slots,
                gateway=self.gateway.open,
            )
            check_failures(played[name], config.max_failed_share, where=f"evaluation ({name})")
            metrics |= found
        return metrics, played
