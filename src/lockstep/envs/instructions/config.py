"""The task kind `instructions`: its settings and its episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.config import Interval, require
from lockstep.envs.data_files import FileTasks
from lockstep.envs.instructions.checkers import (
    Detector,
    Instruction,
    Verdict,
    instruction,
    require_langdetect,
)
from lockstep.envs.instructions.generated import PromptWorld, WorldName
from lockstep.envs.instructions.published import BadRows, read_published
from lockstep.errors import ConfigError
from lockstep.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class InstructionsConfig(FileTasks):
    """Prompts with instructions that a program checks: the 25 kinds of IFEval.

    reward = (share followed + (1 if all are followed)) / 2, mean over the turns
    """

    TAG: ClassVar[str] = "instructions"
    may_hold_out_all: ClassVar[bool] = True

    path: str = ""
    """IFEval or Multi-IF as published: a .jsonl, .csv or .parquet file, or google/IFEval or
    facebook/Multi-IF of the Hugging Face hub. Empty: endless generated prompts."""
    world: WorldName = "full"
    """World of generated prompts. full: for a model that understands English. small: nine kinds and
    28 words, for a tiny model."""
    num_instructions: tuple[int, int] = (1, 3)
    """Least and most instructions in the first turn of a generated prompt."""
    num_turns: Annotated[int, Interval("[1, 3]")] = 1
    """Turns of a generated prompt. Each further one adds an instruction and asks again."""
    mode: Literal["strict", "loose"] = "strict"
    """Verdicts that the reward counts. loose: ignoring asterisks and one extra line at the
    beginning and at the end. Both are reported."""
    turn_rewards: bool = False
    """Give each turn its own reward, in addition to the episode's."""
    detector: Detector = "script"
    """Detection of a reply's language. script: by its letters, which takes ASCII letters for
    English and cannot tell Spanish from French. langdetect: by the package behind the published
    scores (extra `instructions`)."""
    bad_rows: BadRows = "error"
    """error: refuse a file with a record whose instructions cannot be checked (malformed, unknown
    kind, undetectable language) or whose key came before. drop: leave such records out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.num_instructions
        is_range = 1 <= low <= high <= 4
        require(self, num_instructions=(is_range, "(least, most), from 1 to 4"))

    def check(self) -> None:
        if self.detector == "langdetect":
            require_langdetect()
        super().check()

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        made = partial(instruction, detector=self.detector)
        turns = [
            (turn["prompt"], [made(each["id"], each["arguments"]) for each in turn["instructions"]])
            for turn in task.payload["turns"]
        ]
        if len(turns) > agent.max_turns:
            raise ConfigError(
                f"task {task.id} has {len(turns)} turns; agent.max_turns={agent.max_turns} would "
                "end it before the last one."
            )
        return InstructionsEnvironment(turns, self)

    def label(self, task: Task) -> str:
        """Language of a task of Multi-IF; for others, the number of instructions in the last
        turn."""
        if language := task.payload.get("language"):
            return str(language)
        count = len(task.payload["turns"][-1]["instructions"])
        return f"{count}-instruction" + ("s" if count > 1 else "")

    def _make(self, seed: int, index: int) -> Task:
        turns = PromptWorld.named(self.world).turns(
            random.Random(seed), num_instructions=self.num_instructions, num_turns=self.num_turns
        )
        return Task(id=f"instructions-{seed:016x}", payload={"turns": turns})

    def _read(self, path: str) -> list[Task]:
        return read_published(path, detector=self.detector, bad_rows=self.bad_rows)


class InstructionsEnvironment(Environment):
    """Answers each of the user's turns, one after the other.

    The reward is the mean over the turns; one without a reply counts 0. Score parts, also means
    over the turns: `prompt_strict`, `instruction_strict`, `prompt_loose`, `instruction_loose`.
    """

    def __init__(
        self, turns: Sequence[tuple[str, Sequence[Instruction]]], config: InstructionsConfig
    ) -> None:
        """turns: (prompt, instructions for the reply to it)."""
        self._turns, self._config = turns, config
        self.verdicts: list[Verdict] = []
        """Verdicts about the replies so far."""

    async def reset(self) -> Sequence[Message]:
        return (Message(role="user", content=self._turns[0][0]),)

    async def step(self, message: Message) -> Observation:
        # An unreadable reply and a tool call have no text that could follow anything.
        is_reply = not message.parse_error and not message.tool_calls
        _, instructions = self._turns[len(self.verdicts)]
        self.verdicts.append(Verdict.of(instructions, message.content if is_reply else ""))
        if len(self.verdicts) == len(self._turns):
            return Observation(done=True)
        prompt, _ = self._turns[len(self.verdicts)]
        return Observation(messages=(Message(role="user", content=prompt),))

    async def score(self) -> Score:
        num_turns, config = len(self._turns), self._config
        missing = [Verdict.of(asked, "") for _, asked in self._turns[len(self.verdicts) :]]
        scores = [verdict.scores() for verdict in (*self.verdicts, *missing)]
        names = (f"instruction_{config.mode}", f"prompt_{config.mode}")
        given = scores[: len(self.verdicts)]
        rewards = [sum(each[name] / 2 for name in names) / num_turns for each in given]
        return Score(
            reward=sum(rewards),
            parts={name: sum(s[name] for s in scores) / num_turns for name in scores[0]},
            turn_rewards=dict(enumerate(rewards)) if config.turn_rewards else {},
        )
