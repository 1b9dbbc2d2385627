"""The task kind `mixture`: several tasks in one run, drawn by weight."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, GroupScorer
from lockstep.agent.harness import Harness
from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import MixtureSource, TaskSource, derive_seed
from lockstep.config import did_you_mean
from lockstep.errors import ConfigError, located
from lockstep.types import Message, Task

PART_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names of parts are parts of settings (task.parts.NAME) and metrics (reward/source/NAME)."""


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(TaskConfig):
    """Several tasks in one run. Each task is drawn from a part, with a probability proportional to
    the part's weight.

    All parts share the agent's budgets. Rewards of a part are logged as reward/source/NAME, and
    held-out ones as eval/.../reward/NAME.
    """

    parts: Mapping[str, TaskConfig] = field(default_factory=dict)
    """name -> task: task.parts.sums=reasoning-gym task.parts.sums.dataset=chain_sum."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """name -> relative frequency of the part: task.weights.sums=0.5. Default: 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts:
            raise ConfigError(
                "mixture: it has no part. Name one or more, each of a kind: task.parts.NAME=KIND."
            )
        for name, part in self.parts.items():
            if not PART_NAME.fullmatch(name):
                rule = "must consist of letters, digits, - and _"
                raise ConfigError(f"mixture: the part name {name!r} {rule}.")
            if isinstance(part, MixtureConfig):
                raise ConfigError(f"mixture: the part {name!r} is a mixture itself.")
            if part.SEATS:
                raise ConfigError(
                    f"mixture: the part {name!r} is played from the seats {', '.join(part.SEATS)}, "
                    "and a mixture's tasks by one policy. Train it in a run of its own."
                )
        for name, weight in self.weights.items():
            place = f"mixture: weights.{name}"
            if name not in self.parts:
                hint = f"{did_you_mean(name, self.parts)} weights.{name}=none takes it out."
                raise ConfigError(f"{place} belongs to no part.{hint}")
            if not 0 < weight < math.inf:
                hint = f"Set parts.{name}=none to leave the part out."
                raise ConfigError(f"{place}={weight} must be above 0 and finite. {hint}")

    def check(self) -> None:
        for name, part in self.parts.items():
            with located(f"task.parts.{name}"):
                part.check()

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """The part of a task depends on (seed, split, number of tasks before it). Each part has its
        own seed, so two parts of one kind draw different tasks."""
        sources = {
            name: part.tasks(split=split, seed=derive_seed("part", name, seed))
            for name, part in self.parts.items()
        }
        weights = {name: self.weights.get(name, 1.0) for name in self.parts}
        return MixtureSource(sources, weights=weights, seed=derive_seed("mixture", split, seed))

    def first_tasks(self, *, split: Split, seed: int) -> list[Task]:
        """The first tasks of each part, since their prompts differ."""
        firsts: list[Task] = []
        for name, part in self.parts.items():
            with located(f"task.parts.{name}"):
                own = part.first_tasks(split=split, seed=derive_seed("part", name, seed))
                if not own:
                    raise ConfigError(f"it has no task for the split {split!r}.")
            firsts += [replace(task, source=name) for task in own]
        return firsts

    def opening(self, task: Task) -> Sequence[Message] | None:
        return self.parts[task.source].opening(task)

    def notes(self) -> list[str]:
        return [f"{name}: {note}" for name, part in self.parts.items() for note in part.notes()]

    def environment(self, task: Task, agent: AgentConfig) -> Environment | Harness:
        return self.parts[task.source].environment(task, agent)

    def group_scorer(self, task: Task) -> GroupScorer | None:
        return self.parts[task.source].group_scorer(task)

    def label(self, task: Task) -> str:
        """PART/LABEL, if the part has labels; otherwise ""."""
        inner = self.parts[task.source].label(task)
        return f"{task.source}/{inner}" if inner else ""

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self.parts.values()))
