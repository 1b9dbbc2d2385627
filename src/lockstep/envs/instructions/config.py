"""The task kind `instructions`: its settings, its episodes and its tasks.

Tasks are read from files in the published form, or generated: a request, and instructions that do
not contradict each other. There are two worlds of generated prompts: `full`, with all kinds of
instructions, for a model that knows English; and `small`, with nine kinds and 28 words, for a model
that is trained on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.config import Interval, require
from lockstep.dialogues import parsed_json
from lockstep.envs.data_files import FileTasks
from lockstep.envs.instructions.checkers import (
    KINDS,
    LANGUAGES,
    SCRIPTS,
    Detector,
    Instruction,
    Verdict,
    instruction,
    require_langdetect,
)
from lockstep.errors import ConfigError, DataError
from lockstep.store.tables import data_files, read_rows
from lockstep.tables import tables_beside
from lockstep.types import Message, Task

WorldName = Literal["small", "full"]
BadRows = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class InstructionsConfig(FileTasks):
    """Prompts with instructions that a program checks: the 25 kinds of IFEval.

    reward = (share followed + (1 if all are followed)) / 2, mean over the turns
    """

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


# -- files in the published form of IFEval and Multi-IF --------------------------------------------

MAX_TURNS = 16


def read_published(
    path: str, *, detector: Detector = "script", bad_rows: BadRows = "error"
) -> list[Task]:
    """The tasks of files in the form of IFEval (`prompt`, `instruction_id_list`, `kwargs`) or of
    Multi-IF (`turn_1_prompt`, `turn_1_instruction_id_list`, `turn_1_kwargs`, `turn_2_...`).

    bad_rows: "drop" leaves out records with instructions that cannot be checked, and records with a
    repeated key; otherwise the first such record raises DataError, `path:line` first.
    """
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    rows = [(file, *row) for file in data_files(path) for row in read_rows(file)]
    for number, (file, where, record) in enumerate(rows, start=1):
        try:
            task = _task(record, detector=detector, name=f"{file.stem}-{number}")
            if task.id in tasks:
                raise DataError(f"the key {task.id!r} is at {places[task.id]} too.")
        except DataError as error:
            if bad_rows == "drop":
                continue
            hint = "" if "task.bad_rows" in str(error) else " task.bad_rows=drop leaves it out."
            raise DataError(f"{where}: {error}{hint}") from error
        tasks[task.id], places[task.id] = task, where
    if not tasks:
        raise DataError(f"{path}: none of its {len(rows)} records is a task.")
    return list(tasks.values())


def _task(record: Mapping[str, Any], *, detector: Detector, name: str) -> Task:
    """One record as a task with checked instructions. name: its id if it has no key."""
    turns = _turns(record)
    for number, turn in enumerate(turns):
        if not turn["instructions"]:
            raise DataError(f"turn {number + 1} has no instruction to check.")
        for given in turn["instructions"]:
            instruction(given["id"], given["arguments"], detector=detector)
    language = str(record.get("language") or "")
    key = record.get("key")
    task_id = name if key in (None, "") else f"{key} {language}".strip()
    return Task(id=task_id, payload={"turns": turns, "language": language})


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "prompt" in record:
        return [_turn(record, "")]
    prefixes = [f"turn_{number}_" for number in range(1, MAX_TURNS + 1)]
    # A dialogue of fewer turns has none, or "None".
    given = takewhile(lambda p: record.get(f"{p}prompt") not in (None, "", "None"), prefixes)
    turns = [_turn(record, prefix) for prefix in given]
    if not turns:
        raise DataError(
            f"expected the fields prompt, instruction_id_list and kwargs (IFEval), or "
            f"turn_1_prompt and so on (Multi-IF); found {sorted(map(str, record))}."
        )
    return turns


def _turn(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    names = ("prompt", "instruction_id_list", "kwargs")
    fields = {name: record.get(prefix + name) for name in names}
    prompt = fields["prompt"]
    if prefix:  # Multi-IF has it as a message
        message = parsed_json(prompt, f"{prefix}prompt")
        prompt = message.get("content") if isinstance(message, dict) else message
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{prefix}prompt must be text that is not empty, found {prompt!r}.")
    ids = parsed_json(fields["instruction_id_list"], f"{prefix}instruction_id_list")
    arguments = parsed_json(fields["kwargs"], f"{prefix}kwargs")
    if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
        raise DataError(
            f"{prefix}instruction_id_list and {prefix}kwargs must be lists of the same length, "
            f"found {ids!r:.80} and {arguments!r:.80}."
        )
    instructions = []
    for instruction_id, given in zip(ids, arguments, strict=True):
        found = parsed_json(given, f"{prefix}kwargs") if given else {}
        if not isinstance(found, dict) or not isinstance(instruction_id, str):
            raise DataError(f"{instruction_id!r} with {prefix}kwargs {found!r:.80}.")
        filled = {name: value for name, value in found.items() if value is not None}
        instructions.append({"id": instruction_id, "arguments": filled})
    return {"prompt": prompt, "instructions": instructions}


# -- generated prompts -----------------------------------------------------------------------------

_TABLES = tables_beside(__file__, "generated.toml")
TOPICS, THINGS = _TABLES["topics"].split("; "), _TABLES["things"].split("; ")
_ONLY_WITH: dict[str, set[str]] = {kind: set(w) for kind, w in _TABLES["only_with"].items()}


def are_compatible(kinds: Sequence[str]) -> bool:
    """True if a reply can follow instructions of all these kinds, with arguments drawn by
    `PromptWorld`."""
    chosen = set(kinds)
    if len(chosen) != len(kinds) or (chosen & {*_TABLES["alone"]} and len(chosen) > 1):
        return False
    if any(len(chosen & {*group}) > 1 for group in _TABLES["never_together"]):
        return False
    return all(chosen - {kind} <= _ONLY_WITH[kind] for kind in chosen & set(_ONLY_WITH))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWorld:
    """Words and kinds of instructions that prompts are made of."""

    words: Sequence[str]
    kinds: Sequence[str]
    arguments: Mapping[str, Mapping[str, Any]]
    """Kind -> name of an argument -> what it is drawn from: see `generated.toml`."""
    is_small: bool

    @classmethod
    def named(cls, name: WorldName) -> PromptWorld:
        table = _TABLES["worlds"][name]
        return cls(
            words=table["words"].split(),
            kinds=table.get("kinds", tuple(KINDS)),
            arguments={**_TABLES["arguments"], **table["arguments"]},
            is_small=name == "small",
        )

    def turns(
        self, rng: random.Random, *, num_instructions: tuple[int, int], num_turns: int
    ) -> list[dict[str, Any]]:
        """The turns of one task, as in its payload. Each turn after the first adds an instruction
        and asks for the text again."""
        count = rng.randint(*num_instructions) + num_turns - 1
        kinds = self._choose(rng, count)
        # Words of their own for each instruction: what one demands, another cannot forbid.
        words = rng.sample(self.words, len(self.words))
        request = "Write."
        if not self.is_small:
            request = f"Write {rng.choice(TOPICS).format(rng.choice(THINGS))}."
        given = [{"id": kind, "arguments": self._draw(kind, rng, words, request)} for kind in kinds]
        texts = [instruction(each["id"], each["arguments"]).description for each in given]
        turns: list[dict[str, Any]] = []
        for number in range(num_turns):
            num_known = max(0, len(kinds) - num_turns + 1 + number)
            if number == 0:
                asked = " ".join([request, *texts[:num_known]])
            else:
                asked = f"Write it again. {texts[num_known - 1]}"
            turns.append({"prompt": asked, "instructions": given[:num_known]})
        return turns

    def _choose(self, rng: random.Random, count: int) -> list[str]:
        """`count` compatible kinds, in random order."""
        chosen: list[str] = []
        for kind in rng.sample(list(self.kinds), len(self.kinds)):
            if len(chosen) < count and are_compatible([*chosen, kind]):
                chosen.append(kind)
        if len(chosen) < count:  # the first one excludes the others
            return self._choose(rng, count)
        return chosen

    def _draw(
        self, kind: str, rng: random.Random, words: list[str], request: str
    ) -> dict[str, Any]:
        """Arguments of an instruction. Removes the words that it uses from `words`."""
        if kind == "language:response_language":
            return {"language": rng.choice([code for code in SCRIPTS if code in LANGUAGES])}
        found: dict[str, Any] = {}
        for name, of in self.arguments.get(kind, {}).items():
            if isinstance(of, Mapping):
                of = of[found["relation"]]
            match of:
                case "{word}":
                    found[name] = words.pop()
                case "{request}":
                    found[name] = request
                case str():
                    found[name] = of
                case [str(), *_]:
                    found[name] = rng.choice(of)
                case [low, high, *unit]:
                    found[name] = rng.randint(low, high) * (unit[0] if unit else 1)
            if name in ("keywords", "forbidden_words"):
                found[name] = sorted(words.pop() for _ in range(found[name]))
        if kind == "length_constraints:nth_paragraph_first_word":
            found["nth_paragraph"] = rng.randint(1, found["num_paragraphs"])
        return found
