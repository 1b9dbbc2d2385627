"""Generated prompts: a request, and instructions that do not contradict each other.

There are two worlds: `full`, with all kinds of instructions, for a model that knows English; and
`small`, with nine kinds and 28 words, for a model that is trained on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.envs.instructions.checkers import KINDS, LANGUAGES, SCRIPTS, instruction
from lockstep.tables import tables_beside

WorldName = Literal["small", "full"]

_TABLES = tables_beside(__file__)
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
