"""Kinds of tasks as one setting: their source, and the environment that plays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, GroupScorer
from lockstep.agent.harness import Harness
from lockstep.agent.tasks import TaskSource
from lockstep.types import Message, Task

Split = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Base of every kind of task. A subclass is a choice of the setting `task`, by its tag.

    Everything is made on demand: reading a config touches no file. `check` is called before a model
    is loaded, and reports what is wrong with the user's data.
    """

    def check(self) -> None:
        """Raises DataError or ConfigError for errors that can be found without a model."""

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """The stream of one split. The two splits share no task."""
        raise NotImplementedError

    def first_tasks(self, *, split: Split, seed: int) -> list[Task]:
        """Returns the tasks whose prompts are tried before a model is loaded: the first ones of the
        split."""
        return self.tasks(split=split, seed=seed).take(1)

    def environment(self, task: Task, agent: AgentConfig) -> Environment | Harness:
        """Makes the environment for one episode of `task`, or a harness if an agent plays the
        episode over HTTP."""
        raise NotImplementedError

    def group_scorer(self, task: Task) -> GroupScorer | None:
        """Returns the scorer of the task's whole group; None scores each episode alone."""
        return None

    def label(self, task: Task) -> str:
        """A kind of task to report apart in evaluations ("2-hop"); "" for none."""
        return ""

    async def close(self) -> None:
        """Ends resources that the episodes shared, such as the processes of a sandbox. Called once,
        after the last episode; the config may be used again."""


@dataclass(frozen=True, kw_only=True)
class DialogueConfig:
    """Base of every source of training dialogues that is a program, not a file. A subclass is a
    choice of the setting `data` of `lockstep sft`, by its tag."""

    def stages(self, seed: int) -> Sequence[DialogueStage]:
        """The stages of the training, in order. Their shares add up to 1."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueStage:
    """Dialogues for one part of a supervised training."""

    share: float
    """Share of the steps."""
    dialogues: Sequence[Sequence[Message]]
    word_weights: Mapping[str, float]
    """Loss weight of words in replies; others have 1."""
