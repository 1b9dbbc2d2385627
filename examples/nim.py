"""A game of two seats: a policy learns Nim by playing itself, and is tested against a frozen one.

    lockstep sft nim-model --plugin examples/nim.py out=build/nim-model
    lockstep train nim --plugin examples/nim.py out=runs/nim
    lockstep eval runs/nim --plugin examples/nim.py seats.second=frozen \\
        seats.second.model=build/nim-model/model

The players take one, two or three stones in turn, and who takes the last one wins. To leave a
multiple of four wins. The model to begin with moves at random, and sometimes against the rules,
which loses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Score
from lockstep.agent.match import Ask, Match
from lockstep.agent.task_config import DialogueConfig, Split, TaskConfig
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.recipes import recipe
from lockstep.recipes.registry import supervised_recipe
from lockstep.renderers.config import ChatMLConfig
from lockstep.run_config import Config, EvaluationConfig, SFTConfig, SupervisedConfig
from lockstep.training.config import TrainerConfig
from lockstep.types import Message, Task

MOVES = (1, 2, 3)
MOST_STONES = 12
SEATS = ("first", "second")


def position(num_stones: int) -> Message:
    return Message(role="user", content=f"{num_stones} stones")


class Nim(Match):
    """One game. `winner` is a seat once it is over."""

    def __init__(self, num_stones: int) -> None:
        self.num_stones = num_stones
        self.num_moves = 0
        self.is_legal = True
        self.winner = ""

    async def play(self, ask: Ask) -> None:
        mover, waiting = SEATS
        while self.num_stones:
            reply = await ask(mover, [position(self.num_stones)])
            taken = reply.content.strip()
            self.is_legal = taken in map(str, MOVES) and int(taken) <= self.num_stones
            if not self.is_legal:
                break
            self.num_stones -= int(taken)
            self.num_moves += 1
            mover, waiting = waiting, mover
        self.winner = waiting  # the one who moved last, or whose opponent broke the rules

    async def score(self) -> dict[str, Score]:
        parts = {"moves": float(self.num_moves), "legal": float(self.is_legal)}
        return {seat: Score(reward=float(self.winner == seat), parts=parts) for seat in SEATS}


@dataclass(frozen=True, kw_only=True)
class NimConfig(TaskConfig):
    """Games of Nim. The reward of a seat is 1 if it wins."""

    TAG: ClassVar[str] = "nim"
    SEATS: ClassVar[tuple[str, ...]] = SEATS

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        def make(task_seed: int, index: int) -> Task:
            stones = random.Random(task_seed).randint(MOVES[-1] + 1, MOST_STONES)
            return Task(id=f"nim-{task_seed:016x}", payload={"stones": stones})

        return GeneratedSource(make, seed=seed, split=split)

    def match(self, task: Task, agent: AgentConfig) -> Nim:
        return Nim(task.payload["stones"])


@dataclass(frozen=True, kw_only=True)
class NimDemonstrationsConfig(DialogueConfig):
    """Games of a seat against nobody in particular, by chance. With mistakes: some moves take more
    than there is."""

    TAG: ClassVar[str] = "nim"

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        left, dialogue = rng.randint(1, MOST_STONES), list[Message]()
        while left > 0:
            taken = rng.choice([move for move in MOVES if move <= left])
            if is_noisy and rng.random() < 0.1:
                taken = rng.choice((*MOVES, 4))
            dialogue += [position(left), Message(role="assistant", content=str(taken))]
            left -= taken + rng.choice(MOVES)
        return dialogue


@supervised_recipe
def nim_model() -> SupervisedConfig:
    """A tiny dense model that moves stones at random: half a minute on one core."""
    return SupervisedConfig(
        name="nim-model",
        create="qwen3",
        data=NimDemonstrationsConfig(num_dialogues=4000),
        renderer=ChatMLConfig(tools_in_prompt=False, has_empty_thinking=False),
        sft=SFTConfig(steps=200, rows_per_step=32, observed_weight=0.05),
        trainer=TrainerConfig(lr=4e-3, warmup_updates=20, schedule="linear", min_lr_share=0.05),
        max_tokens=128,
    )


@recipe
def nim() -> Config:
    """A tiny model learns Nim by playing itself: two minutes on one core."""
    return Config(
        name="nim",
        model="build/nim-model/model",
        task=NimConfig(),
        steps=100,
        max_tokens=128,
        groups_per_step=8,
        group_size=8,
        agent=AgentConfig(max_turns=MOST_STONES, max_turn_tokens=8),
        trainer=TrainerConfig(lr=1e-3, warmup_updates=5, schedule="linear", min_lr_share=0.05),
        evaluation=EvaluationConfig(num_tasks=64),
    )
