"""The 25 verifiable instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), checked.

    short = instruction(
        "length_constraints:number_words", {"num_words": 20, "relation": "less than"}
    )
    short.follows("A few words.")  # True

Ids, arguments and verdicts equal the published data set and its checkers, except where
docs/tasks.md lists a difference. No reply raises; each is checked in time linear in its length.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

from lockstep.config import did_you_mean
from lockstep.errors import DataError, require_package
from lockstep.tables import tables_beside

_TABLES = tables_beside(__file__)
_WORD = re.compile(r"\w+")


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


# -- sentences -------------------------------------------------------------------------------------
#
# A sentence ends with . ? or ! before white space, as in the Punkt algorithm (Kiss and Strunk 2006,
# the tokenizer behind the published scores), with its rules for abbreviations, initials and
# ellipses. Two tables replace Punkt's learnt ones.

_ABBREVIATIONS = frozenset(_TABLES["abbreviations"].split())
_STARTERS = frozenset(_TABLES["starters"].split())
_ENDS = frozenset(".?!")
_CLOSERS = "\"')]}*_\u2019\u201d\u00bb"
_OPENERS = "\"'([{*_`\u2018\u201c\u00ab"
_TOKEN = re.compile(r"\S+")
_ELLIPSIS = re.compile(r"\.\.+$")
_INITIAL = re.compile(r"^(?:[^\W\d_]\.)+$")
_NUMBER = re.compile(r"^-?[\d.,]*\d\.$")


def sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space around them."""
    out: list[str] = []
    begin = 0
    tokens = list(_TOKEN.finditer(text))
    for at, token in enumerate(tokens):
        following = tokens[at + 1].group() if at + 1 < len(tokens) else ""
        if not following or _ends_sentence(token.group(), following):
            out.append(text[begin : token.end()].strip())
            begin = token.end()
    return [sentence for sentence in out if sentence]


def _ends_sentence(token: str, following: str) -> bool:
    core = token.rstrip(_CLOSERS)
    if not core or core[-1] not in _ENDS:
        return False
    if core[-1] != ".":
        return True
    word = following.lstrip(_OPENERS)
    starts = word[:1].isupper() and word.strip(".,;:!?" + _CLOSERS).lower() in _STARTERS
    core = core.lstrip(_OPENERS)
    if _ELLIPSIS.search(core):
        return starts
    if _INITIAL.match(core):
        return starts and core != "I."
    if _NUMBER.match(core):
        return not word[:1].islower()
    if core[:-1].lower().rpartition("-")[2] in _ABBREVIATIONS:
        return starts
    return True


# -- capital words ---------------------------------------------------------------------------------

_TREEBANK = [(re.compile(pattern), replaced) for pattern, replaced in _TABLES["treebank"]]


def count_capital_words(text: str) -> int:
    """Number of words in capitals, with the word borders of Penn Treebank: a hyphen or a slash
    joins one word, and a contraction is two ("DON'T" is DO and N'T)."""
    count = 0
    for sentence in sentences(text):
        if sentence == sentence.lower():
            continue
        spaced = " " + " ".join(sentence.split()) + " "
        for pattern, replacement in _TREEBANK:
            spaced = pattern.sub(replacement, spaced)
        count += sum(word.isupper() for word in spaced.split())
    return count


# -- languages -------------------------------------------------------------------------------------

LANGUAGES: dict[str, str] = _TABLES["languages"]
"""Languages that an instruction may ask for: ISO 639-1 code -> name."""
SCRIPTS: dict[str, Sequence[str]] = _TABLES["scripts"]
"""Languages with a script of their own among LANGUAGES."""

MAX_LETTERS = 4000  # enough to see the script; a later change is not seen


def is_in_script(text: str, scripts: Sequence[str], *, share: float = 0.8) -> bool:
    """True if at least `share` of the first letters are of these scripts. False without letters."""
    letters = islice(filter(str.isalpha, text), MAX_LETTERS)
    found = Counter(re.split("[ -]", unicodedata.name(char, ""))[0] for char in letters)
    # Syllables separate Japanese from Chinese.
    if "HIRAGANA" in scripts and not (found["HIRAGANA"] + found["KATAKANA"]):
        return False
    return bool(found) and sum(found[script] for script in scripts) >= share * found.total()


MAX_DETECTED_CHARS = 20_000
"""Characters that langdetect reads: its time grows with the text, and the language shows early."""


def require_langdetect() -> None:
    """Raises MissingExtraError if the package is not installed."""
    require_package("langdetect", extra="instructions", needed_for="task.detector=langdetect")


def detected_language(text: str) -> str | None:
    """ISO 639-1 code by the package langdetect, `zh` for both kinds of Chinese; None for a text
    without letters. The same text always has the same result."""
    require_langdetect()
    import langdetect  # pyright: ignore[reportMissingImports]

    langdetect.DetectorFactory.seed = 0  # it draws at random
    try:
        return langdetect.detect(text[:MAX_DETECTED_CHARS]).partition("-")[0]
    except langdetect.LangDetectException:
        return None


Detector = Literal["script", "langdetect"]

LESS_THAN, AT_LEAST = RELATIONS = ("less than", "at least")
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Replies that `detectable_format:constrained_response` accepts."""

Given = Mapping[str, Any]
"""Arguments of an instruction, and its `detector`."""
Check = Callable[[str, Given], bool]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of instruction."""

    check: Check
    """(text, arguments) -> True if the text follows the instruction."""
    sentence: str
    """Sentence that asks for it, with all arguments in braces."""

    @property
    def arguments(self) -> list[str]:
        """Names of its arguments."""
        return re.findall(r"{(\w+)}", self.sentence)


KINDS: dict[str, Kind] = {}
"""Kinds by the ids of the published data set, in the order of the functions below."""


def kind(instruction_id: str) -> Callable[[Check], Check]:
    """Makes the function below it the check of a kind. checkers.toml has the kind's sentence."""

    def add(check: Check) -> Check:
        KINDS[instruction_id] = Kind(check, _TABLES["sentences"][instruction_id])
        return check

    return add


@dataclass(frozen=True, slots=True)
class Instruction:
    """One constraint on a reply. Made by `instruction`."""

    id: str
    arguments: Mapping[str, Any]
    detector: Detector = "script"

    def follows(self, text: str) -> bool:
        """True if the reply as it is follows the instruction. An empty reply follows nothing."""
        if not text.strip():
            return False
        return KINDS[self.id].check(text, {**self.arguments, "detector": self.detector})

    def follows_loosely(self, text: str) -> bool:
        """True if one of eight versions of the reply follows it: all, without the first line,
        without the last, without both, and each of these without asterisks."""
        return any(self.follows(version) for version in loose_versions(text))

    @property
    def description(self) -> str:
        """The sentence that asks for it."""
        shown = {k: ", ".join(v) if isinstance(v, tuple) else v for k, v in self.arguments.items()}
        if "language" in shown:
            shown["language"] = LANGUAGES[shown["language"]]
        return KINDS[self.id].sentence.format(**shown)


def loose_versions(text: str) -> list[str]:
    lines = text.split("\n")
    parts = (lines[1:], lines[:-1], lines[1:-1])
    whole = [text, *("\n".join(part).strip() for part in parts)]
    return list(dict.fromkeys([*whole, *(version.replace("*", "") for version in whole)]))


def instruction(
    instruction_id: str, arguments: Mapping[str, Any], *, detector: Detector = "script"
) -> Instruction:
    """An instruction with checked arguments. Arguments that are None count as not given: published
    records have all arguments of all kinds.

    Raises DataError for an unknown id, and for missing, unknown or wrong arguments.
    """
    kind = KINDS.get(instruction_id)
    if kind is None:
        hint = did_you_mean(instruction_id, KINDS)
        raise DataError(f"no instruction is called {instruction_id!r}.{hint}")
    if not isinstance(arguments, Mapping):
        raise DataError(f"{instruction_id}: arguments must be an object: {arguments!r}.")
    given = {name: value for name, value in arguments.items() if value is not None}
    if unknown := sorted(set(given) - set(kind.arguments)):
        expected = ", ".join(kind.arguments) or "none"
        raise DataError(f"{instruction_id} has no argument {unknown[0]!r}; it takes: {expected}.")
    checked: dict[str, Any] = {}
    for name in kind.arguments:
        if name not in given:
            raise DataError(f"{instruction_id} needs the argument {name!r}.")
        try:
            checked[name] = ARGUMENTS.get(name, _count)(given[name])
        except ValueError as error:
            text = f"{instruction_id}: {name}={given[name]!r} must be {error}."
            raise DataError(text) from error
    if checked.get("nth_paragraph", 0) > checked.get("num_paragraphs", 0):
        raise DataError(
            f"{instruction_id}: nth_paragraph={checked['nth_paragraph']} of "
            f"{checked['num_paragraphs']} paragraphs."
        )
    language = checked.get("language", "")
    if language and detector == "script" and language not in SCRIPTS and language != "en":
        raise DataError(
            f"{instruction_id}: its script alone does not tell {LANGUAGES[language]} from "
            "other languages. Set task.detector=langdetect (extra `instructions`), or leave such "
            "tasks out with task.bad_rows=drop."
        )
    return Instruction(instruction_id, checked, detector)


# -- arguments -------------------------------------------------------------------------------------


def _count(value: Any, least: int = 0) -> int:
    # JSON writers with one column for all records turn 3 into 3.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"a whole number, at least {least}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text that is not empty")
    return value.strip()


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
        raise ValueError("a list of texts, at least one")
    return tuple(sorted({_text(each) for each in value}))


def _relation(value: Any) -> str:
    if value not in RELATIONS:
        raise ValueError(" or ".join(map(repr, RELATIONS)))
    return value


def _language(value: Any) -> str:
    code = _text(value).partition("-")[0].lower()
    if code not in LANGUAGES:
        raise ValueError(f"one of {', '.join(LANGUAGES)}")
    return code


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("keywords", "forbidden_words"), _texts),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _relation),
    **dict.fromkeys(
        ("keyword", "first_word", "postscript_marker", "section_spliter", "end_phrase"), _text
    ),
    "prompt_to_repeat": _text,
    "letter": lambda value: _text(value).lower(),  # in some scripts several characters
    "language": _language,
    "nth_paragraph": partial(_count, least=1),
}
"""name of an argument -> function that returns its checked value, or raises ValueError with the
expected form. Other arguments are counts."""


def _holds(found: int, relation: str, bound: int) -> bool:
    return found < bound if relation == LESS_THAN else found >= bound


# -- keywords --------------------------------------------------------------------------------------


@kind("keywords:existence")
def _existence(text: str, given: Given) -> bool:
    return all(re.search(re.escape(w), text, re.IGNORECASE) for w in given["keywords"])


@kind("keywords:frequency")
def _frequency(text: str, given: Given) -> bool:
    found = re.findall(re.escape(given["keyword"]), text, re.IGNORECASE)
    return _holds(len(found), given["relation"], given["frequency"])


@kind("keywords:forbidden_words")
def _no_forbidden_words(text: str, given: Given) -> bool:
    return not any(
        re.search(rf"(?<!\w){re.escape(w)}(?!\w)", text, re.IGNORECASE)
        for w in given["forbidden_words"]
    )


@kind("keywords:letter_frequency")
def _letter_frequency(text: str, given: Given) -> bool:
    found = text.lower().count(given["letter"])
    return _holds(found, given["let_relation"], given["let_frequency"])


# -- language --------------------------------------------------------------------------------------


def _is_in(language: str, text: str, detector: Detector) -> bool:
    if detector == "langdetect":
        return detected_language(text) == language
    if language == "en":  # all that the script can say
        return all(char.isascii() for char in text if char.isalpha())
    return is_in_script(text, SCRIPTS[language])


@kind("language:response_language")
def _response_language(text: str, given: Given) -> bool:
    return _is_in(given["language"], text, given["detector"])


# -- lengths ---------------------------------------------------------------------------------------


@kind("length_constraints:number_sentences")
def _number_sentences(text: str, given: Given) -> bool:
    return _holds(len(sentences(text)), given["relation"], given["num_sentences"])


@kind("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, given: Given) -> bool:
    paragraphs = text.split("***")
    inner = paragraphs[1:-1]
    if not all(paragraph.strip() for paragraph in inner):
        return False
    found = sum(bool(p.strip()) for p in (paragraphs[0], paragraphs[-1])[: len(paragraphs)])
    return len(inner) + found == given["num_paragraphs"]


@kind("length_constraints:number_words")
def _number_words(text: str, given: Given) -> bool:
    return _holds(count_words(text), given["relation"], given["num_words"])


_FIRST_WORD_ENDS = re.compile(r"[.,?!'\"]")


@kind("length_constraints:nth_paragraph_first_word")
def _nth_paragraph_first_word(text: str, given: Given) -> bool:
    paragraphs = text.split("\n\n")
    num_paragraphs = sum(bool(p.strip()) for p in paragraphs)
    nth = given["nth_paragraph"]
    if num_paragraphs != given["num_paragraphs"] or nth > num_paragraphs:
        return False
    words = paragraphs[nth - 1].split(maxsplit=1)
    if not words:
        return False
    first = words[0].lstrip("'").lstrip('"')
    return _FIRST_WORD_ENDS.split(first, maxsplit=1)[0].lower() == given["first_word"].lower()


# -- content and format ----------------------------------------------------------------------------


@kind("detectable_content:number_placeholders")
def _number_placeholders(text: str, given: Given) -> bool:
    found = re.findall(r"\[[^\n\[\]]*\]", text)
    return len(found) >= given["num_placeholders"]


@kind("detectable_content:postscript")
def _postscript(text: str, given: Given) -> bool:
    text, marker = text.lower(), given["postscript_marker"]
    if marker == "P.P.S":
        return re.search(r"p\.\s?p\.\s?s", text) is not None
    if marker == "P.S.":
        return re.search(r"p\.\s?s\.", text) is not None
    return marker.lower() in text


@kind("detectable_format:number_bullet_lists")
def _number_bullet_lists(text: str, given: Given) -> bool:
    lines = [line.lstrip() for line in text.split("\n")]
    found = sum(line.startswith("-") for line in lines)
    at = 0
    while at < len(lines):
        line = lines[at]
        if line == "*" and at + 1 < len(lines):
            found += 1
            at += 1  # the line after a lone asterisk is its text
        elif line.startswith("*") and line[1:2] not in ("", "*"):
            found += 1
        at += 1
    return found == given["num_bullets"]


@kind("detectable_format:constrained_response")
def _constrained_response(text: str, _: Given) -> bool:
    return any(option in text for option in OPTIONS)


@kind("detectable_format:number_highlighted_sections")
def _number_highlighted_sections(text: str, given: Given) -> bool:
    found = sum(bool(h.strip("*").strip()) for h in re.findall(r"\*[^\n*]*\*", text))
    found += sum(bool(h[2:-2].strip()) for h in re.findall(r"\*\*[^\n*]*\*\*", text))
    return found >= given["num_highlights"]


@kind("detectable_format:multiple_sections")
def _multiple_sections(text: str, given: Given) -> bool:
    found = re.findall(rf"{re.escape(given['section_spliter'])}\s?\d+", text)
    return len(found) >= given["num_sections"]


_FENCES = ("```json", "```Json", "```JSON", "```")


@kind("detectable_format:json_format")
def _json_format(text: str, _: Given) -> bool:
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@kind("detectable_format:title")
def _title(text: str, _: Given) -> bool:
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end - 2 and line[begin : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


# -- combination, start and end --------------------------------------------------------------------


@kind("combination:two_responses")
def _two_responses(text: str, _: Given) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if not all(parts[1:-1]):
        return False
    found = [part for part in parts if part]
    return len(found) == 2 and found[0] != found[1]


@kind("combination:repeat_prompt")
def _repeat_prompt(text: str, given: Given) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].lower())


@kind("startend:end_checker")
def _end_checker(text: str, given: Given) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].lower())


@kind("startend:quotation")
def _quotation(text: str, _: Given) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# -- case and punctuation --------------------------------------------------------------------------


@kind("change_case:capital_word_frequency")
def _capital_word_frequency(text: str, given: Given) -> bool:
    found = count_capital_words(text)
    return _holds(found, given["capital_relation"], given["capital_frequency"])


@kind("change_case:english_capital")
def _english_capital(text: str, given: Given) -> bool:
    return text.isupper() and _is_in("en", text, given["detector"])


@kind("change_case:english_lowercase")
def _english_lowercase(text: str, given: Given) -> bool:
    return text.islower() and _is_in("en", text, given["detector"])


@kind("punctuation:no_comma")
def _no_comma(text: str, _: Given) -> bool:
    return "," not in text


# -- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Results of a reply for each instruction of a prompt, in the prompt's order."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]

    @classmethod
    def of(cls, instructions: Sequence[Instruction], text: str) -> Verdict:
        strict = tuple(each.follows(text) for each in instructions)
        return cls(strict, tuple(each.follows_loosely(text) for each in instructions))

    def scores(self) -> dict[str, float]:
        """prompt_strict, prompt_loose: 1 if all are followed, else 0. instruction_strict,
        instruction_loose: share of instructions that are followed."""
        out: dict[str, float] = {}
        for mode, followed in (("strict", self.strict), ("loose", self.loose)):
            out[f"prompt_{mode}"] = float(all(followed))
            out[f"instruction_{mode}"] = sum(followed) / len(followed)
        return out
