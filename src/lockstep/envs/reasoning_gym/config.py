"""The task kind `reasoning-gym`: its settings and its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Literal

from lockstep import errors
from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.task_config import AskedTasks, Split
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.children import Child
from lockstep.envs.data_files import HeldOutTasks
from lockstep.errors import ChildError, ChildRefusal, ChildTimeoutError, DataError, require_package
from lockstep.tables import tables_beside
from lockstep.types import Message, Task

START_SECONDS = 120.0
"""Seconds for the child process to import the package on a busy machine."""
DRAW_SECONDS = 120.0
"""Seconds to make one task. Most take a millisecond, a few (knight_swap) a second."""

AnswerRule = Literal["tag", "last_line", "whole"]

INSTRUCTIONS: dict[AnswerRule, str] = tables_beside(__file__)["instructions"]


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig(AskedTasks, HeldOutTasks):
    """A dataset of reasoning-gym: endless generated tasks, scored 0 to 1 by its own verifier.

    Needs the extra `reasoning-gym`.
    """

    TAG: ClassVar[str] = "reasoning-gym"

    dataset: str = "chain_sum"
    """Name of the dataset in reasoning-gym. For several, use task=mixture with a part for each."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the dataset, e.g. task.settings.max_terms=3. Unset ones keep its defaults."""
    level: int | None = None
    """Level of the dataset's curriculum, from 0; `settings` override it. none: no curriculum."""
    answer: AnswerRule = "tag"
    """Part of the reply that is the answer: the last <answer> tag, the last line that is not
    empty, or the whole reply."""
    verifier_seconds: ClassVar[float] = 10.0
    """Seconds to score one answer. A slower one scores 0 and is counted."""

    def check(self) -> None:
        self.ask("check", seconds=DRAW_SECONDS)

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Endless; a task depends on (seed, split, index) and the settings alone."""

        def make(task_seed: int, index: int) -> Task:
            try:
                wanted = {"seed": task_seed, "split": split, "eval_share": self.eval_share}
                drawn = self.ask("draw", seconds=DRAW_SECONDS, **wanted)
            except ChildError as error:
                raise DataError(f"dataset={self.dataset} cannot make a task: {error}.") from error
            return Task(id=f"{self.dataset}-{drawn['seed']:08x}", payload=drawn)

        return GeneratedSource(make, seed=seed, split=split)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return ReasoningGymEnvironment(self, task)

    def label(self, task: Task) -> str:
        """The dataset."""
        return self.dataset

    def ask(self, do: str, *, seconds: float, **arguments: Any) -> dict[str, Any]:
        """One request to the child process, about this dataset. Raises ChildRefusal for what
        reasoning-gym raises, ConfigError or DataError for settings that it cannot take."""
        request = {"dataset": self.dataset, "settings": dict(self.settings), "level": self.level}
        try:
            return shared_child().ask({"do": do, **request, **arguments}, seconds=seconds)
        except ChildRefusal as refusal:
            if refusal.kind in ("ConfigError", "DataError"):
                raise getattr(errors, refusal.kind)(str(refusal)) from None
            raise


@cache
def shared_child() -> Child:
    """The process that runs reasoning-gym for all tasks: the import is slow and large."""
    require_package("reasoning_gym", extra="reasoning-gym", needed_for="task=reasoning-gym")
    return Child.of_module(
        f"{__package__}.child",
        name="reasoning-gym",
        start_seconds=START_SECONDS,
        # The hash seed gives sets of text the same order in every process.
        environment={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )


class ReasoningGymEnvironment(Environment):
    """One question, one reply."""

    def __init__(self, config: ReasoningGymConfig, task: Task) -> None:
        self.config, self.task = config, task
        self.answer: str | None = None
        self.correctness = 0.0

    async def reset(self) -> list[Message]:
        question, own = self.task.payload["question"], INSTRUCTIONS[self.config.answer]
        return self.config.asked(question, own=own)

    async def step(self, message: Message) -> Observation:
        if not message.parse_error:
            self.answer = extract_answer(message.content, self.config.answer)
        if self.answer is None:
            # The verifier is not asked: some give a reply without an answer 0.01.
            return Observation(done=True, metrics={"verifier/unanswered": 1.0})
        ask = partial(self.config.ask, "score", seconds=self.config.verifier_seconds)
        seed = self.task.payload["seed"]
        try:
            reply = await asyncio.to_thread(ask, seed=seed, answer=self.answer)
        except ChildTimeoutError:
            return Observation(done=True, metrics={"verifier/timeouts": 1.0})
        except ChildRefusal:
            return Observation(done=True, metrics={"verifier/errors": 1.0})
        self.correctness = reply["score"]
        return Observation(done=True)

    async def score(self) -> Score:
        parts = {"correctness": self.correctness, "answered": float(self.answer is not None)}
        return Score(reward=self.correctness, parts=parts)


def extract_answer(text: str, rule: AnswerRule) -> str | None:
    """The answer in a reply, stripped; None if it is missing or empty.

    >>> extract_answer("so <answer>3</answer>, no: <answer> 4 </answer>.", "tag")
    '4'
    >>> extract_answer("2 + 2\\nis\\n4\\n", "last_line")
    '4'
    """
    if rule == "tag":
        closed = text.split("</answer>")[:-1]
        found = [part.partition("<answer>")[2] for part in closed if "<answer>" in part]
        text = found[-1] if found else ""
    elif rule == "last_line":
        text = text.strip().rpartition("\n")[2]
    return text.strip() or None
