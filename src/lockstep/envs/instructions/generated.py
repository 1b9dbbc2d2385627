"""Generated prompts: a request, and instructions that do not contradict each other.

There are two worlds: `full`, with all kinds of instructions, for a model that knows English; and
`small`, with nine kinds and 28 words, for a model that is trained on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.envs.instructions.checkers import (
    AT_LEAST,
    KINDS,
    LANGUAGES,
    LESS_THAN,
    SCRIPTS,
    instruction,
)

WorldName = Literal["small", "full"]

_SMALL_WORDS = """
bird boat cloud fire garden house lamp moon river road snow stone storm tree wind wolf calls
falls grows rests shines sings turns waits old red still warm
"""
_FULL_WORDS = """
amber bridge candle compass copper desert engine festival forest glacier harbour helmet island
journey kitchen ladder lantern library market meadow mirror mountain museum notebook ocean
orchard painter pepper pocket railway river saddle sailor shadow signal silver station summer
tailor teacher theatre thunder timber tunnel valley village violin weather window winter
"""
SMALL_WORDS, FULL_WORDS = _SMALL_WORDS.split(), _FULL_WORDS.split()
SMALL_ENDINGS = ("the end.", "all is well.", "good night.")
FULL_ENDINGS = (
    "Any other questions?",
    "That is all I can say.",
    "Let me know what you think.",
    "Is there anything else I can help with?",
    "And so it ended.",
)
_TOPICS = (
    "a letter to a neighbour about {}; a short story about {}; a poem about {}; an "
    "advertisement for {}; a speech about {}; a review of a book about {}; a blog post about "
    "{}; a summary of what is known about {}; a dialogue about {}; instructions for a visitor "
    "who asks about {}"
)
TOPICS = tuple(_TOPICS.split("; "))
_THINGS = (
    "a lost key; the history of bread; an old railway; a garden in winter; the night train; a "
    "broken clock; learning to swim; the first snow; a house by the sea; a quiet town; the "
    "price of apples; a school play; the art of waiting; two rivals; a long walk"
)
THINGS = tuple(_THINGS.split("; "))

_LENGTH, _FORMAT, _CASE = "length_constraints:", "detectable_format:", "change_case:"
SMALL_KINDS = (
    "keywords:existence",
    "keywords:forbidden_words",
    f"{_LENGTH}number_words",
    f"{_LENGTH}number_sentences",
    f"{_FORMAT}number_bullet_lists",
    f"{_CASE}english_lowercase",
    "punctuation:no_comma",
    "startend:end_checker",
    "startend:quotation",
)

_ALONE = frozenset({f"{_FORMAT}constrained_response"})
_ONLY_WITH = {
    f"{_FORMAT}json_format": {"keywords:existence", "keywords:forbidden_words"},
    "combination:two_responses": {"keywords:existence", "keywords:forbidden_words"},
    "combination:repeat_prompt": {
        "keywords:existence",
        "keywords:frequency",
        "startend:end_checker",
        f"{_LENGTH}number_words",
    },
    "language:response_language": {
        "punctuation:no_comma",
        f"{_LENGTH}number_paragraphs",
        "startend:quotation",
        f"{_FORMAT}number_highlighted_sections",
    },
}
"""Kinds that go together with these others only."""

_NEVER_TOGETHER = (
    {f"{_CASE}english_lowercase", f"{_CASE}english_capital", f"{_CASE}capital_word_frequency"},
    {f"{_CASE}english_lowercase", f"{_FORMAT}multiple_sections"},
    {f"{_CASE}english_capital", f"{_FORMAT}multiple_sections"},
    {f"{_CASE}capital_word_frequency", f"{_FORMAT}multiple_sections"},
    {f"{_LENGTH}number_paragraphs", f"{_LENGTH}nth_paragraph_first_word"},
    {f"{_FORMAT}multiple_sections", f"{_LENGTH}nth_paragraph_first_word"},
    {f"{_FORMAT}number_bullet_lists", f"{_LENGTH}nth_paragraph_first_word"},
    {f"{_FORMAT}number_bullet_lists", f"{_LENGTH}number_paragraphs"},
    {f"{_FORMAT}number_bullet_lists", f"{_LENGTH}number_sentences"},
    {f"{_FORMAT}number_bullet_lists", f"{_FORMAT}multiple_sections"},
    {f"{_FORMAT}title", f"{_LENGTH}nth_paragraph_first_word"},
)
"""Sets of kinds. A prompt has at most one kind of each set."""


def are_compatible(kinds: Sequence[str]) -> bool:
    """True if a reply can follow instructions of all these kinds, with arguments drawn by
    `PromptWorld.arguments`."""
    chosen = set(kinds)
    if len(chosen) != len(kinds) or (chosen & _ALONE and len(chosen) > 1):
        return False
    if any(len(chosen & group) > 1 for group in _NEVER_TOGETHER):
        return False
    return all(chosen - {kind} <= _ONLY_WITH[kind] for kind in chosen & set(_ONLY_WITH))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWorld:
    """Words and kinds of instructions that prompts are made of."""

    words: Sequence[str]
    endings: Sequence[str]
    kinds: Sequence[str]
    is_small: bool

    @classmethod
    def named(cls, name: WorldName) -> PromptWorld:
        if name == "small":
            return cls(words=SMALL_WORDS, endings=SMALL_ENDINGS, kinds=SMALL_KINDS, is_small=True)
        return cls(words=FULL_WORDS, endings=FULL_ENDINGS, kinds=tuple(KINDS), is_small=False)

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
        given = [
            {"id": kind, "arguments": self.arguments(kind, rng, words, request)} for kind in kinds
        ]
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

    def arguments(
        self, kind: str, rng: random.Random, words: list[str], request: str
    ) -> dict[str, Any]:
        """Arguments of an instruction. Removes the words that it uses from `words`."""
        small = self.is_small

        def some(low: int, high: int) -> list[str]:
            return [words.pop() for _ in range(rng.randint(low, high))]

        if kind == "keywords:existence":
            return {"keywords": sorted(some(1, 2))}
        if kind == "keywords:forbidden_words":
            return {"forbidden_words": sorted(some(1, 2) if small else some(2, 4))}
        if kind == "keywords:frequency":
            relation = rng.choice((LESS_THAN, AT_LEAST))
            return {"keyword": words.pop(), "frequency": rng.randint(2, 4), "relation": relation}
        if kind == "keywords:letter_frequency":
            letter = rng.choice("aeiost")
            return {"letter": letter, "let_frequency": rng.randint(3, 12), "let_relation": AT_LEAST}
        if kind == "language:response_language":
            return {"language": rng.choice([code for code in SCRIPTS if code in LANGUAGES])}
        if kind == f"{_LENGTH}number_words":
            relation, unit = rng.choice((LESS_THAN, AT_LEAST)), 1 if small else 10
            least, most = ((10, 14), (6, 12)) if small else ((30, 40), (5, 20))
            low, high = least if relation == LESS_THAN else most
            return {"num_words": unit * rng.randint(low, high), "relation": relation}
        if kind == f"{_LENGTH}number_sentences":
            relation = rng.choice((LESS_THAN, AT_LEAST))
            low, high = ((3, 4) if small else (12, 20)) if relation == LESS_THAN else (2, 4)
            return {"num_sentences": rng.randint(low, high), "relation": relation}
        if kind == f"{_LENGTH}number_paragraphs":
            return {"num_paragraphs": rng.randint(2, 4)}
        if kind == f"{_LENGTH}nth_paragraph_first_word":
            count = rng.randint(2, 4)
            nth = rng.randint(1, count)
            return {"num_paragraphs": count, "nth_paragraph": nth, "first_word": words.pop()}
        if kind == "detectable_content:number_placeholders":
            return {"num_placeholders": rng.randint(1, 4)}
        if kind == "detectable_content:postscript":
            return {"postscript_marker": rng.choice(("P.S.", "P.P.S"))}
        if kind == f"{_FORMAT}number_bullet_lists":
            return {"num_bullets": rng.randint(1, 3) if small else rng.randint(2, 5)}
        if kind == f"{_FORMAT}number_highlighted_sections":
            return {"num_highlights": rng.randint(1, 3)}
        if kind == f"{_FORMAT}multiple_sections":
            spliter = rng.choice(("Section", "SECTION"))
            return {"section_spliter": spliter, "num_sections": rng.randint(2, 4)}
        if kind == "combination:repeat_prompt":
            return {"prompt_to_repeat": request}
        if kind == "startend:end_checker":
            return {"end_phrase": rng.choice(self.endings)}
        if kind == f"{_CASE}capital_word_frequency":
            relation = rng.choice((LESS_THAN, AT_LEAST))
            return {"capital_frequency": rng.randint(2, 5), "capital_relation": relation}
        return {}
