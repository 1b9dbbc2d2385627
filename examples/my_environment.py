"""An environment of your own: two typed tools, a task setting and a recipe.

    lockstep train warehouse --plugin my_environment steps=2 out=runs/warehouse

The agent is asked for the total price of some goods. It looks prices up, adds them, answers.
The shipped tiny models can use one tool only and cannot solve this; give a larger one by
`model=DIR`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.agent.tools import ToolEnvironment, ToolLimits, tool
from lockstep.recipes import recipe
from lockstep.run_config import Config, EvaluationConfig
from lockstep.training.config import TrainerConfig
from lockstep.types import Message, Task

FAILURES = ("tool/errors", "tool/timeouts", "tool/invalid_arguments", "tool/unknown")
"""Counters of failed calls in `ToolEnvironment`."""

PRICES = {"bolt": 2, "hinge": 5, "lamp": 19, "rope": 7, "saw": 23, "tile": 3}


@tool
def price(article: Annotated[str, "One article, in the singular."]) -> int:
    """Looks up the price of one article."""
    return PRICES[article]  # the model reads a KeyError; it is counted and does not end the run


@tool
def add(numbers: list[int]) -> int:
    """Adds whole numbers."""
    return sum(numbers)


class Warehouse(ToolEnvironment):
    """One question. `ToolEnvironment` runs the calls and keeps the text of the final turn."""

    tools = (price, add)

    def __init__(self, articles: list[str], limits: ToolLimits) -> None:
        self.articles, self.limits = articles, limits
        self.num_failed_calls = 0.0

    async def reset(self) -> list[Message]:
        wanted = " and ".join(self.articles)
        return [
            Message(role="developer", content="Answer with a number alone."),
            Message(role="user", content=f"What do {wanted} cost together?"),
        ]

    async def step(self, message: Message) -> Observation:
        observation = await super().step(message)
        self.num_failed_calls += sum(observation.metrics.get(name, 0) for name in FAILURES)
        return observation

    async def score(self) -> Score:
        total = sum(PRICES[article] for article in self.articles)
        is_correct = self.answer is not None and self.answer.strip() == str(total)
        penalty = min(1.0, 0.25 * self.num_failed_calls + 0.5 * (self.answer is None))
        return Score(
            reward=float(is_correct) - 0.2 * penalty,
            parts={"correctness": float(is_correct), "penalty": penalty},
        )


@dataclass(frozen=True, kw_only=True)
class WarehouseConfig(TaskConfig):
    """Questions about the prices of a warehouse. Its tag on the command line is `warehouse`."""

    num_articles: int = 2
    """Articles per question."""

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        def make(task_seed: int, index: int) -> Task:
            articles = random.Random(task_seed).sample(sorted(PRICES), self.num_articles)
            return Task(id=f"warehouse-{task_seed:016x}", payload={"articles": articles})

        return GeneratedSource(make, seed=seed, split=split)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        limits = ToolLimits(
            timeout_seconds=agent.tool_timeout_seconds, output_chars=agent.tool_output_chars
        )
        return Warehouse(list(task.payload["articles"]), limits)


@recipe
def warehouse() -> Config:
    """Prices of a warehouse: looked up, added, answered."""
    return Config(
        name="warehouse",
        model="tiny-gpt-oss",
        task=WarehouseConfig(),
        max_tokens=512,
        groups_per_step=4,
        group_size=4,
        agent=AgentConfig(max_turns=4, max_turn_tokens=48),
        trainer=TrainerConfig(lr=1e-4),
        evaluation=EvaluationConfig(num_tasks=16),
    )
