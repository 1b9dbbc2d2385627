"""The task kind `questions`: the user's tasks from a file, scored by the setting `scorer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.scoring import ExactScorer, ScorerConfig
from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import ListSource, TaskSource, read_tasks
from lockstep.agent.tools import ToolEnvironment, ToolLimits
from lockstep.envs.data_files import split_files
from lockstep.errors import ConfigError
from lockstep.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class _TaskFile(TaskConfig):
    """Base of task kinds that read the user's file."""

    path: str = ""
    """JSONL with a task per line: {"id", "question"} or {"id", "messages"}, and the keys that the
    scorer reads (`answer`, ...)."""
    eval_path: str = ""
    """JSONL of the same form for evaluation. Empty: eval_share of `path` is held out."""
    eval_share: float = 0.1
    """Share of `path` that is held out, chosen by id."""
    instructions: str = ""
    """Developer message before a question. Empty: none."""
    scorer: ScorerConfig = field(default_factory=ExactScorer)
    """Scorer of an episode."""

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            raise ConfigError(f"eval_share={self.eval_share} must lie in (0, 1).")

    def check(self) -> None:
        self.scorer.check()
        for tasks in self._tasks.values():
            for task in tasks:
                self.scorer.check_task(task)

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Training: reshuffled in each epoch. Evaluation: once, in the file's order."""
        return ListSource.of_split(self._tasks[split], split=split, seed=seed, name=self.path)

    def label(self, task: Task) -> str:
        """The key `label` of the task's line."""
        return str(task.payload.get("label", ""))

    async def close(self) -> None:
        await self.scorer.close()

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        if not self.path:
            raise ConfigError("path is empty: give the tasks, task.path=FILE.jsonl.")
        return split_files(self.path, self.eval_path, self.eval_share, read=read_tasks)


@dataclass(frozen=True, kw_only=True)
class QuestionsConfig(_TaskFile):
    """Questions from a file, answered in one reply without tools."""

    TAG: ClassVar[str] = "questions"

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return QuestionEnvironment(task, self.scorer, instructions=self.instructions)


class QuestionEnvironment(ToolEnvironment):
    """One task of a file. Subclasses may set `tools`."""

    def __init__(
        self,
        task: Task,
        scorer: ScorerConfig,
        *,
        instructions: str = "",
        limits: ToolLimits | None = None,
    ) -> None:
        self.task, self.scorer, self.instructions = task, scorer, instructions
        self.limits = limits or ToolLimits()
        self.dialogue: list[Message] = []
        self._score: Score | None = None

    async def reset(self) -> Sequence[Message]:
        payload = self.task.payload
        if "messages" in payload:
            self.dialogue = [Message.from_dict(each) for each in payload["messages"]]
        else:
            self.dialogue = [Message(role="user", content=payload["question"])]
        if self.instructions:
            self.dialogue.insert(0, Message(role="developer", content=self.instructions))
        return tuple(self.dialogue)

    async def step(self, message: Message) -> Observation:
        observation = await super().step(message)
        self.dialogue += [message, *observation.messages]
        if not observation.done:
            return observation
        self._score, counters = await self.scorer.score(self.task, self.answer, self.dialogue)
        return Observation(done=True, metrics={**observation.metrics, **counters})

    async def score(self) -> Score:
        if self._score is None:  # a budget ended the episode early
            self._score, _ = await self.scorer.score(self.task, None, self.dialogue)
        return self._score
