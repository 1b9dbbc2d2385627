"""What an agent is trained on, as one setting: where tasks come from, and what they are played in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, GroupScorer
from lockstep.agent.tasks import TaskSource
from lockstep.types import Task

Split = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Base of every kind of task. A subclass is a choice of the setting `task`, by its tag.

    Everything is made on demand: reading a config touches no file. `check` is called before a model
    is loaded, and says what is wrong with the user's data then.
    """

    def check(self) -> None:
        """Raises DataError or ConfigError for what can be known without a model."""

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """The stream of one split. The two splits share no task."""
        raise NotImplementedError

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        """A fresh environment for one episode of `task`."""
        raise NotImplementedError

    def group_scorer(self) -> GroupScorer | None:
        """How episodes of one group are scored against each other; None scores each alone."""
        return None
