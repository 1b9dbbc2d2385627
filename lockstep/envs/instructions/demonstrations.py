"""Demonstrations of instruction following: nonsense of known words in the right form.

The writer also proves that generated instructions do not contradict each other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from lockstep.envs.demonstrations import _Demonstrations
from lockstep.envs.instructions.checkers import LESS_THAN, OPTIONS, Instruction, instruction
from lockstep.envs.instructions.generated import World
from lockstep.envs.instructions.text import count_words
from lockstep.errors import ConfigError
from lockstep.types import Message

MAX_TRIES = 60
"""Drafts of one reply. A draft that misses is rare; this many in a row mean a contradiction."""

_FOREIGN = {
    "bn": "আমি ভাত খাই",
    "gu": "હું ઘરે જાઉં છું",
    "he": "אני הולך הביתה",
    "ja": "私はうちへ帰ります",
    "kn": "ನಾನು ಮನೆಗೆ ಹೋಗುತ್ತೇನೆ",
    "ko": "나는 집에 간다",
    "ml": "ഞാൻ വീട്ടിലേക്ക് പോകുന്നു",
    "pa": "ਮੈਂ ਘਰ ਜਾਂਦਾ ਹਾਂ",
    "ta": "நான் வீட்டிற்கு செல்கிறேன்",
    "te": "నేను ఇంటికి వెళ్తాను",
    "th": "ฉันกลับบ้าน",
    "zh": "我回家",
}


def reply(instructions: Sequence[Instruction], rng: random.Random, words: Sequence[str]) -> str:
    """A text of `words` that follows all the instructions. Raises ValueError if they contradict
    each other."""
    for _ in range(MAX_TRIES):
        text = _Draft({each.id: each.arguments for each in instructions}, rng, words).text()
        if all(each.follows(text) for each in instructions):
            return text
    asked = [(each.id, dict(each.arguments)) for each in instructions]
    raise ValueError(f"no reply follows all of {asked}")


@dataclass
class _Draft:
    asked: Mapping[str, Mapping[str, Any]]
    rng: random.Random
    words: Sequence[str]

    def text(self) -> str:
        asked, rng = self.asked, self.rng
        if "detectable_format:constrained_response" in asked:
            return rng.choice(OPTIONS)
        if language := self._given("language:response_language", "language"):
            body = self._join([_FOREIGN.get(language, "A text") for _ in range(self._paragraphs())])
            body += " " + " ".join("*" + _FOREIGN.get(language, "A text") + "*" for _ in range(3))
            return self._wrapped(body)
        if "detectable_format:json_format" in asked:
            return json.dumps({"text": " ".join(self._words(4))})
        if "combination:two_responses" in asked:
            return f"{' '.join(self._words(3))}\n******\n{' '.join(self._words(4))}"
        return self._wrapped(self._cased(self._body()))

    def _given(self, kind: str, name: str, default: Any = None) -> Any:
        return self.asked.get(kind, {}).get(name, default)

    def _bounded(self, kind: str, name: str, usual: tuple[int, int], room: int) -> int:
        """A count within the bound of the instruction of this kind; without one, within `usual`.
        room: count that other parts of the reply take."""
        bound = self._given(kind, name)
        if bound is None:
            return self.rng.randint(*usual)
        if self._given(kind, "relation") == LESS_THAN:
            return self.rng.randint(1, max(1, min(bound - 1 - room, usual[1])))
        return max(1, bound - room) + self.rng.randint(0, 2)

    def _words(self, count: int) -> list[str]:
        asked, rng = self.asked, self.rng
        forbidden = set(self._given("keywords:forbidden_words", "forbidden_words", ()))
        rare = self._given("keywords:frequency", "keyword")
        usable = [word for word in self.words if word not in forbidden and word != rare]
        keywords = self._given("keywords:existence", "keywords", ())
        first = list(keywords)
        if rare and self._given("keywords:frequency", "relation") != LESS_THAN:
            first += [rare] * self._given("keywords:frequency", "frequency")
        rest: list[str] = []
        if "keywords:letter_frequency" in asked:
            given = asked["keywords:letter_frequency"]
            rest.append(given["letter"] * given["let_frequency"])
        if "change_case:capital_word_frequency" in asked:
            given = asked["change_case:capital_word_frequency"]
            if given["capital_relation"] != LESS_THAN:
                rest += [rng.choice(usable).upper() for _ in range(given["capital_frequency"])]
        for kind, name, form in (
            ("detectable_content:number_placeholders", "num_placeholders", "[{}]"),
            ("detectable_format:number_highlighted_sections", "num_highlights", "*{}*"),
        ):
            rest += [form.format(rng.choice(usable)) for _ in range(self._given(kind, name, 0))]
        # Keywords repeat: a small model learns sooner to copy what it sees often.
        for _ in range(count - len(first) - len(rest)):
            rest.append(rng.choice(keywords if keywords and rng.random() < 0.5 else usable))
        rng.shuffle(rest)
        return [*rest[:1], *first, *rest[1:]]

    def _paragraphs(self) -> int:
        count = self._given("length_constraints:number_paragraphs", "num_paragraphs", 1)
        return self._given("length_constraints:nth_paragraph_first_word", "num_paragraphs", count)

    def _join(self, paragraphs: Sequence[str]) -> str:
        is_ruled = "length_constraints:number_paragraphs" in self.asked
        return ("\n***\n" if is_ruled else "\n\n").join(paragraphs)

    def _body(self) -> str:
        asked, rng = self.asked, self.rng
        ending = self._given("startend:end_checker", "end_phrase", "")
        marker = self._given("detectable_content:postscript", "postscript_marker", "")
        num_bullets = self._given("detectable_format:number_bullet_lists", "num_bullets", 0)
        num_sections = self._given("detectable_format:multiple_sections", "num_sections", 0)
        num_paragraphs = self._paragraphs()
        extra_words = count_words(ending) + (3 if marker else 0) + 2 * num_sections
        is_long = asked.keys() & {"length_constraints:number_words"} and len(self.words) > 30
        num_sentences = max(
            self._bounded(
                "length_constraints:number_sentences", "num_sentences", (1, 3), bool(ending)
            ),
            num_bullets,
            num_sections,
            num_paragraphs,
        )
        num_words = max(
            self._bounded(
                "length_constraints:number_words",
                "num_words",
                (2 * num_sentences, 4 * num_sentences + (40 if is_long else 0)),
                extra_words,
            ),
            num_sentences,
        )
        words = self._words(num_words)
        pieces = [self._sentence(part) for part in _deal(words, num_sentences)]
        if num_bullets:
            rest = pieces[num_bullets:]
            pieces = [f"* {piece}" for piece in pieces[:num_bullets]]
            pieces[-1] = " ".join([pieces[-1], *rest])
        for number in range(num_sections):
            name = self._given("detectable_format:multiple_sections", "section_spliter")
            pieces[number] = f"{name} {number + 1}\n{pieces[number]}"
        gap = "\n" if num_bullets or num_sections else " "
        paragraphs = [gap.join(part) for part in _deal(pieces, num_paragraphs)]
        if first := self._given("length_constraints:nth_paragraph_first_word", "first_word"):
            nth = asked["length_constraints:nth_paragraph_first_word"]["nth_paragraph"] - 1
            paragraphs[nth] = f"{first.capitalize()} {paragraphs[nth]}"
        body = self._join(paragraphs)
        if "detectable_format:title" in asked:
            body = f"<<{rng.choice(self.words).capitalize()}>>\n{body}"
        if request := self._given("combination:repeat_prompt", "prompt_to_repeat"):
            body = f"{request}\n{body}"
        if marker:
            body += f"\n{marker} {self._words(1)[0]}."
        if ending:
            body += f" {ending[0].upper()}{ending[1:]}"
        return body

    def _sentence(self, words: Sequence[str]) -> str:
        words = list(words)
        has_comma = "punctuation:no_comma" not in self.asked and self.rng.random() < 0.5
        if has_comma and len(words) > 2:
            words[self.rng.randrange(len(words) - 1)] += ","
        first = words[0]
        return " ".join([first[0].upper() + first[1:], *words[1:]]) + "."

    def _cased(self, text: str) -> str:
        if "change_case:english_lowercase" in self.asked:
            return text.lower()
        if "change_case:english_capital" in self.asked:
            return text.upper()
        return text

    def _wrapped(self, text: str) -> str:
        if "startend:quotation" not in self.asked:
            return text
        # A bullet point begins its line: the mark cannot stand before it.
        lead = "\n" if text.startswith("*") else ""
        return f'"{lead}{text}"'


def _deal(found: Sequence[str], count: int) -> list[Sequence[str]]:
    """The sequence in `count` parts, in order, with sizes that differ by at most one."""
    borders = [round(i * len(found) / count) for i in range(count + 1)]
    return [found[a:b] for a, b in pairwise(borders)]


@dataclass(frozen=True, kw_only=True)
class InstructionDemonstrationsConfig(_Demonstrations):
    """Prompts of the small world with replies: a stage in which every instruction is followed, then
    one in which some are ignored on purpose."""

    TAG: ClassVar[str] = "instruction_demonstrations"

    overlooked: float = 0.5
    """Probability that an instruction is ignored, in the second stage."""
    num_instructions: tuple[int, int] = (1, 3)
    """Least and most instructions in a prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.overlooked <= 1:
            raise ConfigError(f"overlooked={self.overlooked} must lie in [0, 1].")

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
