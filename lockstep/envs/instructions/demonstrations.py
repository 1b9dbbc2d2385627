"""Demonstrations of instruction following: nonsense of known words in the right form.

The writer also proves that instructions of the small world do not contradict each other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from lockstep.agent.task_config import DialogueConfig
from lockstep.config import require
from lockstep.envs.instructions.checkers import LESS_THAN, Instruction, count_words, instruction
from lockstep.envs.instructions.generated import World
from lockstep.types import Message

Asked = Mapping[str, Mapping[str, Any]]
"""Kind of instruction -> its arguments."""

MAX_TRIES = 60
"""Drafts of one reply. A draft that misses is rare; this many in a row mean a contradiction."""


def reply(instructions: Sequence[Instruction], rng: random.Random, words: Sequence[str]) -> str:
    """A text of `words` that follows all the instructions, of kinds of the small world. Raises
    ValueError if they contradict each other."""
    asked = {each.id: each.arguments for each in instructions}
    for _ in range(MAX_TRIES):
        text = _draft(asked, rng, words)
        if all(each.follows(text) for each in instructions):
            return text
    raise ValueError(f"no reply follows all of {[(kind, dict(asked[kind])) for kind in asked]}")


def _draft(asked: Asked, rng: random.Random, words: Sequence[str]) -> str:
    ending = asked.get("startend:end_checker", {}).get("end_phrase", "")
    num_bullets = asked.get("detectable_format:number_bullet_lists", {}).get("num_bullets", 0)
    given = asked.get("length_constraints:number_sentences", {})
    found = _bounded(rng, given, "num_sentences", (1, 3), room=bool(ending))
    num_sentences = max(found, num_bullets, 1)
    given = asked.get("length_constraints:number_words", {})
    usual = (2 * num_sentences, 4 * num_sentences)
    found = _bounded(rng, given, "num_words", usual, room=count_words(ending))
    chosen = _words(asked, rng, words, max(found, num_sentences))
    has_commas = "punctuation:no_comma" not in asked
    pieces = [_sentence(part, rng, has_commas) for part in _deal(chosen, num_sentences)]
    if num_bullets:
        rest = pieces[num_bullets:]
        pieces = [f"* {piece}" for piece in pieces[:num_bullets]]
        pieces[-1] = " ".join([pieces[-1], *rest])
    text = ("\n" if num_bullets else " ").join(pieces)
    if ending:
        text += f" {ending[0].upper()}{ending[1:]}"
    if "change_case:english_lowercase" in asked:
        text = text.lower()
    if "startend:quotation" not in asked:
        return text
    # A bullet point begins its line: the mark cannot stand before it.
    return f'"\n{text}"' if num_bullets else f'"{text}"'


def _bounded(
    rng: random.Random, given: Mapping[str, Any], name: str, usual: tuple[int, int], *, room: int
) -> int:
    """A count within the bound of an instruction; without one, within `usual`. room: count that
    other parts of the reply take."""
    if not given:
        return rng.randint(*usual)
    if given["relation"] == LESS_THAN:
        return rng.randint(1, max(1, min(given[name] - 1 - room, usual[1])))
    return max(1, given[name] - room) + rng.randint(0, 2)


def _words(asked: Asked, rng: random.Random, words: Sequence[str], count: int) -> list[str]:
    forbidden = asked.get("keywords:forbidden_words", {}).get("forbidden_words", ())
    usable = [word for word in words if word not in forbidden]
    keywords = asked.get("keywords:existence", {}).get("keywords", ())
    rest: list[str] = []
    # Keywords repeat: a small model learns sooner to copy what it sees often.
    for _ in range(count - len(keywords)):
        rest.append(rng.choice(keywords if keywords and rng.random() < 0.5 else usable))
    rng.shuffle(rest)
    return [*rest[:1], *keywords, *rest[1:]]


def _sentence(words: Sequence[str], rng: random.Random, has_commas: bool) -> str:
    out = list(words)
    if has_commas and rng.random() < 0.5 and len(out) > 2:
        out[rng.randrange(len(out) - 1)] += ","
    return " ".join([out[0][0].upper() + out[0][1:], *out[1:]]) + "."


def _deal(found: Sequence[str], count: int) -> list[Sequence[str]]:
    """The sequence in `count` parts, in order, with sizes that differ by at most one."""
    borders = [round(i * len(found) / count) for i in range(count + 1)]
    return [found[a:b] for a, b in pairwise(borders)]


@dataclass(frozen=True, kw_only=True)
class InstructionDemonstrationsConfig(DialogueConfig):
    """Prompts of the small world with replies: a stage in which every instruction is followed, then
    one in which some are ignored on purpose."""

    TAG: ClassVar[str] = "instruction_demonstrations"

    overlooked: float = 0.5
    """Probability that an instruction is ignored, in the second stage."""
    num_instructions: tuple[int, int] = (1, 3)
    """Least and most instructions in a prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "", overlooked=(0 <= self.overlooked <= 1, "in [0, 1]"))

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        world = World.named("small")
        (turn,) = world.turns(rng, num_instructions=self.num_instructions, num_turns=1)
        overlooked = self.overlooked if is_noisy else 0.0
        kept = [
            instruction(given["id"], given["arguments"])
            for given in turn["instructions"]
            if rng.random() >= overlooked
        ]
        return [
            Message(role="user", content=turn["prompt"]),
            Message(role="assistant", content=reply(kept, rng, world.words)),
        ]
