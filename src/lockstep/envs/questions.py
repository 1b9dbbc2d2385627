"""The task kind `questions`: the user's tasks from a file, scored by the setting `scorer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.scoring import ExactScorer, ScorerConfig
from lockstep.agent.task_config import AskedTasks
from lockstep.agent.tools import ToolEnvironment, ToolLimits
from lockstep.dialogues import read_prompt
from lockstep.envs.data_files import FileTasks
from lockstep.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class _ScoredTasks(AskedTasks, FileTasks):
    """Base of task kinds that read the user's file and score with the setting `scorer`."""

    path: str = ""
    """JSONL with a task per line: {"id", "question"} or {"id", "messages"}, and the keys that the
    scorer reads (`answer`, ...)."""
    scorer: ScorerConfig = field(default_factory=ExactScorer)
    """Scorer of an episode."""

    def dialogue_of(self, task: Task) -> list[Message]:
        """The messages before the first reply."""
        asked = task.payload.get("messages")
        said = task.payload["question"] if asked is None else read_prompt(asked)
        return self.asked(said)

    def check(self) -> None:
        self.scorer.check()
        for task in [*self.splits["train"], *self.splits["eval"]]:
            self.scorer.check_task(task)

    async def close(self) -> None:
        await self.scorer.close()


@dataclass(frozen=True, kw_only=True)
class QuestionsConfig(_ScoredTasks):
    """Questions from a file, answered in one reply without tools."""

    TAG: ClassVar[str] = "questions"

    def opening(self, task: Task) -> Sequence[Message]:
        return self.dialogue_of(task)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return QuestionEnvironment(self, task, ToolLimits.of(agent))


class QuestionEnvironment(ToolEnvironment):
    """One task of a file. Subclasses may set `tools`."""

    def __init__(self, config: _ScoredTasks, task: Task, limits: ToolLimits) -> None:
        self.task, self.scorer, self.limits, self._config = task, config.scorer, limits, config
        self.dialogue: list[Message] = []
        self._score: Score | None = None

    async def reset(self) -> Sequence[Message]:
        self.dialogue = self._config.dialogue_of(self.task)
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
