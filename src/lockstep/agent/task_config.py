"""The settings `task` and `data`: kinds of tasks, and of demonstrations that come before them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, GroupScorer, first_messages
from lockstep.agent.harness import Harness
from lockstep.agent.match import Match
from lockstep.agent.tasks import TaskSource
from lockstep.config import Checked, at_least
from lockstep.types import Message, Task

Split = Literal["train", "eval"]
IN_PROCESS = "in this process: a call that holds Python's lock cannot be ended at its limit"


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Checked):
    """Base of every kind of task. A subclass is a choice of the setting `task`, by its tag.

    Everything is made on demand: reading a config touches no file. `check` is called before a model
    is loaded, and reports mistakes in the user's data.
    """

    SEATS: ClassVar[tuple[str, ...]] = ()
    """Seats of a match, for `seats.NAME`; none where one policy plays alone."""

    def check(self) -> None:
        """Raises DataError or ConfigError for errors that can be found without a model."""

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """The stream of one split. The two splits share no task."""
        raise NotImplementedError

    def first_tasks(self, *, split: Split, seed: int) -> list[Task]:
        """Returns the tasks whose prompts are tried before a model is loaded: the first ones of the
        split."""
        return self.tasks(split=split, seed=seed).take(1)

    def opening(self, task: Task) -> Sequence[Message] | None:
        """The messages before the first reply; None if only an environment knows them."""
        return None

    def notes(self) -> list[str]:
        """Sentences about the data for the plan of a run."""
        return []

    def environment(self, task: Task, agent: AgentConfig) -> Environment | Harness:
        """Makes the environment for one episode of `task`, or a harness if an agent plays the
        episode over HTTP."""
        raise NotImplementedError

    def match(self, task: Task, agent: AgentConfig) -> Match:
        """Makes one match of `task`, in place of an environment: for kinds with SEATS."""
        raise NotImplementedError

    def group_scorer(self, task: Task) -> GroupScorer | None:
        """Returns the scorer of the task's whole group; None scores each episode alone."""
        return None

    def label(self, task: Task) -> str:
        """A kind of task to report apart in evaluations ("2-hop"); "" for none."""
        return ""

    @property
    def limits_notice(self) -> str:
        """Says at the start of a run which limits cannot hold; "" where all can."""
        return "" if type(self).__module__.startswith("lockstep.") else IN_PROCESS

    async def close(self) -> None:
        """Ends resources that the episodes shared, such as the processes of a sandbox. Called once,
        after the last episode; the config may be used again."""


@dataclass(frozen=True, kw_only=True)
class AskedTasks(TaskConfig):
    """Base of task kinds whose episodes begin with a developer message and a question."""

    IS_BASE: ClassVar[bool] = True

    instructions: str | None = None
    """Developer message. none: the kind's own, if it has one, which says how to answer. Empty: no
    message."""

    def asked(self, question: str | Sequence[Message], *, own: str = "") -> list[Message]:
        """The messages before the first reply. own: the developer message that `instructions`
        replaces."""
        given = own if self.instructions is None else self.instructions
        return first_messages(question, instructions=given)


CLEAN_SHARE = 0.75
"""Share of the steps and dialogues that the stage without mistakes has."""


@dataclass(frozen=True, kw_only=True)
class DialogueConfig(Checked):
    """Base of demonstrations that a program writes, for supervised training in two stages: without
    mistakes, then with some. A subclass is a choice of the setting `data` of `lockstep sft`, by its
    tag, and gives `demonstrate`.

    The first stage teaches the format and the skill. The second leaves something to improve for
    reinforcement learning.
    """

    num_dialogues: Annotated[int, at_least(2)] = 40000
    """Dialogues in both stages, each about a task of its own."""

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        """One dialogue about a task drawn from `rng`. is_noisy: with mistakes."""
        raise NotImplementedError

    def clean_word_weights(self) -> dict[str, float]:
        """Loss weights of words in the stage without mistakes."""
        return {}

    def stages(self, seed: int) -> Sequence[DialogueStage]:
        """The stages of the training, in order. Their shares add up to 1."""
        rng = random.Random(seed)
        num_clean = round(self.num_dialogues * CLEAN_SHARE)
        stages: list[DialogueStage] = []
        for share, count, is_noisy in (
            (CLEAN_SHARE, num_clean, False),
            (1 - CLEAN_SHARE, self.num_dialogues - num_clean, True),
        ):
            dialogues = [self.demonstrate(rng, is_noisy=is_noisy) for _ in range(count)]
            weights = {} if is_noisy else self.clean_word_weights()
            stages.append(DialogueStage(share=share, dialogues=dialogues, word_weights=weights))
        return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueStage:
    """Dialogues for one part of a supervised training."""

    share: float
    """Share of the steps."""
    dialogues: Sequence[Sequence[Message]]
    word_weights: Mapping[str, float]
    """Loss weight of words in replies; others have 1."""
