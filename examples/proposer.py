"""A task of two roles: a proposer writes questions, and a solver tries each of them four times.

    lockstep sft proposer-model --plugin examples/proposer.py out=build/proposer-model
    lockstep train proposer --plugin examples/proposer.py out=runs/proposer
    lockstep eval runs/proposer --plugin examples/proposer.py seats.proposer=frozen \\
        seats.proposer.model=build/proposer-model/model

A question is a sum of digits. The solver hears one after the other and says the last digit of the
sum so far; a wrong digit ends its try, so that long sums are harder. The proposer's reward is the
share of tries that fail, unless all fail or none does (Absolute Zero, Zhao et al. 2025, arXiv
2505.03335, equation 4): it is paid for questions that the solver can just answer. The solver is
paid for a whole sum. One policy plays both roles. The last command asks the questions of the model
that training began with, so that the solver is measured by one standard.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Score
from lockstep.agent.match import Ask, Match
from lockstep.agent.task_config import DialogueConfig, Split, TaskConfig
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.config import at_least
from lockstep.recipes import recipe
from lockstep.recipes.registry import supervised_recipe
from lockstep.renderers.config import ChatMLConfig
from lockstep.run_config import Config, EvaluationConfig, SFTConfig, SupervisedConfig
from lockstep.training.config import TrainerConfig
from lockstep.types import Message, Task

MOST_TERMS = 8
QUESTION = re.compile(rf"[1-9](\+[1-9]){{1,{MOST_TERMS - 1}}}")
REQUEST = Message(role="user", content="Write a sum.")


def turns(question: str) -> list[tuple[Message, str]]:
    """Each message to the solver, with the right reply.

    >>> [(heard.content, right) for heard, right in turns("3+4+9")]
    [('add 3', '3'), ('add 4', '7'), ('add 9', '6')]
    """
    terms = [int(term) for term in question.split("+")]
    return [
        (Message(role="user", content=f"add {term}"), str(total % 10))
        for term, total in zip(terms, accumulate(terms), strict=True)
    ]


class Proposal(Match):
    """One question, and several tries that do not see each other."""

    def __init__(self, num_solvers: int) -> None:
        self.num_solvers = num_solvers
        self.num_terms = 0
        self.is_right: list[bool] = []

    async def play(self, ask: Ask) -> None:
        question = (await ask("proposer", [REQUEST])).content.strip()
        if not QUESTION.fullmatch(question):
            return
        self.num_terms = question.count("+") + 1
        tries = (self.is_solved(ask, question, player) for player in range(self.num_solvers))
        self.is_right = await asyncio.gather(*tries)

    async def is_solved(self, ask: Ask, question: str, player: int) -> bool:
        for heard, right in turns(question):
            if (await ask("solver", [heard], player=player)).content.strip() != right:
                return False
        return True

    async def score(self) -> dict[str, Score | list[Score]]:
        rate = sum(self.is_right) / self.num_solvers
        parts = {"valid": float(bool(self.num_terms)), "terms": float(self.num_terms)}
        return {
            "proposer": Score(reward=1 - rate if 0 < rate < 1 else 0.0, parts=parts),
            "solver": [Score(reward=float(right)) for right in self.is_right],
        }


@dataclass(frozen=True, kw_only=True)
class ProposerConfig(TaskConfig):
    """Questions that the policy writes itself."""

    TAG: ClassVar[str] = "proposer"
    SEATS: ClassVar[tuple[str, ...]] = ("proposer", "solver")

    num_solvers: Annotated[int, at_least(2)] = 4
    """Tries at each question."""

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        def make(task_seed: int, index: int) -> Task:
            return Task(id=f"proposal-{task_seed:016x}")

        return GeneratedSource(make, seed=seed, split=split)

    def match(self, task: Task, agent: AgentConfig) -> Proposal:
        return Proposal(self.num_solvers)


@dataclass(frozen=True, kw_only=True)
class ProposerDemonstrationsConfig(DialogueConfig):
    """Questions, mostly short ones, and tries. With mistakes: sums that end in a plus, and wrong
    digits, so that long questions are rarely answered."""

    TAG: ClassVar[str] = "proposer"

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        proposes = rng.random() < 0.3
        shares = (6, 4, 2, 1, 1, 1, 1) if proposes else (1,) * (MOST_TERMS - 1)
        (num_terms,) = rng.choices(range(2, MOST_TERMS + 1), shares)
        question = "+".join(str(rng.randint(1, 9)) for _ in range(num_terms))
        if proposes:
            written = f"{question}+" if is_noisy and rng.random() < 0.2 else question
            return [REQUEST, Message(role="assistant", content=written)]
        dialogue = list[Message]()
        for heard, right in turns(question):
            said = str(rng.randint(0, 9)) if is_noisy and rng.random() < 0.2 else right
            dialogue += [heard, Message(role="assistant", content=said)]
            if said != right:
                break
        return dialogue


@supervised_recipe
def proposer_model() -> SupervisedConfig:
    """A tiny dense model that writes short sums, and errs in long ones: two minutes on one core."""
    return SupervisedConfig(
        name="proposer-model",
        create="qwen3",
        data=ProposerDemonstrationsConfig(num_dialogues=12000),
        renderer=ChatMLConfig(tools_in_prompt=False, has_empty_thinking=False),
        sft=SFTConfig(steps=500, rows_per_step=32, observed_weight=0.05),
        trainer=TrainerConfig(lr=4e-3, warmup_updates=50, schedule="linear", min_lr_share=0.05),
        max_tokens=256,
    )


@recipe
def proposer() -> Config:
    """A tiny model learns to write questions that it can just answer, and to answer them."""
    return Config(
        name="proposer",
        model="build/proposer-model/model",
        task=ProposerConfig(),
        steps=100,
        max_tokens=256,
        groups_per_step=4,
        group_size=8,
        agent=AgentConfig(max_turns=MOST_TERMS, max_turn_tokens=24),
        trainer=TrainerConfig(lr=5e-4, warmup_updates=5, schedule="linear", min_lr_share=0.05),
        evaluation=EvaluationConfig(num_tasks=64),
    )
