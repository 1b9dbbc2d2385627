"""Scorers of finished dialogues, as a setting that several tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.agent.environment import Score
from lockstep.config import Checked
from lockstep.errors import DataError
from lockstep.types import Message, Task

Scored = tuple[Score, dict[str, float]]
"""(score, counters of the episode)."""


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(Checked):
    """Base of every way to score. A subclass is a choice of the setting `task.scorer`, by its tag;
    a module given with --plugin adds its own."""

    def check(self) -> None:
        """Raises ConfigError for errors that can be found without a model."""

    def check_task(self, task: Task) -> None:
        """Raises DataError for a task that lacks the data to score by."""

    async def score(self, task: Task, answer: str | None, dialogue: Sequence[Message]) -> Scored:
        """answer: the text of the turn that ended the episode, None if a budget did. dialogue: all
        messages, the answer included.

        An exception fails the episode: it is stored with its reason, and never trained.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Frees the resources of scoring. Called after the last episode; the scorer may be used
        again."""


@dataclass(frozen=True, kw_only=True)
class ExactScorer(ScorerConfig):
    """1 if the answer is the task's `answer`, or one of its `answers`; else 0. White space and case
    do not matter."""

    TAG: ClassVar[str] = "exact"

    def check_task(self, task: Task) -> None:
        if not accepted_answers(task):
            raise DataError(
                f"task {task.id}: has no `answer` (text or a number) and no `answers` (a list of "
                "them), which scorer=exact compares with."
            )

    async def score(self, task: Task, answer: str | None, dialogue: Sequence[Message]) -> Scored:
        accepted = set(map(_normal, accepted_answers(task)))
        is_correct = float(answer is not None and _normal(answer) in accepted)
        parts = {"correctness": is_correct, "answered": float(answer is not None)}
        return Score(reward=is_correct, parts=parts), {}


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()


def accepted_answers(task: Task) -> list[str]:
    """`answer` or `answers` of the task's line, as text."""
    found: Any = task.payload.get("answers", task.payload.get("answer"))
    listed = found if isinstance(found, list) else [found]
    return [str(each) for each in listed if isinstance(each, str | int | float)]
