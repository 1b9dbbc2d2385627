"""Grading of final answers: finding the answer in a reply, and comparing it with the expected one.

Numbers are compared exactly, as fractions, and nothing is evaluated: `10**10**10` is not a number.
These functions take any text of any length, never raise, and run in linear time: an answer has at
most `MAX_ANSWER_CHARS`. Other answers (expressions, sets, tuples) are compared by math-verify in a
child process with limits on time and memory.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from lockstep.children import Child, serve
from lockstep.errors import ChildError
from lockstep.system import limit_process
from lockstep.tables import tables_beside

Form = Literal["boxed", "hashes", "tag", "answer_line", "last_number"]
"""Place of the final answer in a reply. boxed: in the last `\\boxed{}`. hashes: after the last
`####`, to the end of its line (GSM8K). tag: in the last `<answer>...</answer>`. answer_line: after
the last `Answer:`, to the end of its line (DAPO). last_number: the last number of the reply."""

MAX_ANSWER_CHARS = 1000
"""Longest answer in characters; the longest of MATH-500 has 159."""
MAX_EXPONENT = 1000
"""Largest exponent of scientific notation: `1e999999999` would have a gigabyte of digits."""
MEMORY_BYTES = 2 << 30
"""Memory of the child process."""
LIMIT_SECONDS = 5.0
"""Seconds for one comparison by math-verify. A slower one counts as wrong."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Result of grading one reply."""

    answer: str
    """Text of the answer, stripped; "" if none was found."""
    has_form: bool
    """True if the answer was found in the requested form."""
    is_correct: bool


def grade(reply: str, expected: Fraction, *, form: Form, lenient: bool = False) -> Grade:
    """Grades the answer in `reply` against the number `expected`.

    lenient: take the last number of a reply that has no answer in the requested `form`.

    >>> grade("6 + 6 = 12\\n#### $12.00", Fraction(12), form="hashes")
    Grade(answer='$12.00', has_form=True, is_correct=True)
    >>> grade("It is 12.", Fraction(12), form="boxed")
    Grade(answer='', has_form=False, is_correct=False)
    >>> grade("It is 12.", Fraction(12), form="boxed", lenient=True)
    Grade(answer='12', has_form=False, is_correct=True)
    """
    answer, has_form = find_answer(reply, form=form, lenient=lenient)
    return Grade(answer, has_form, parse_number(answer) == expected)


def find_answer(reply: str, *, form: Form, lenient: bool = False) -> tuple[str, bool]:
    """(text of the answer, whether it has the `form`); ("", False) if there is no answer.

    The last occurrence counts. A reply that was cut within its last `\\boxed{` or `<answer>` has no
    answer, even if an earlier one is complete.
    """
    found = _FINDERS[form](reply)
    if found is not None and found.strip() and len(found) <= MAX_ANSWER_CHARS:
        return found.strip(), True
    if lenient and (number := _last_number(reply)) is not None:
        return number, False
    return "", False


async def grade_reply(
    reply: str, expected: str, *, form: Form, lenient: bool = False, comparer: Child
) -> Grade:
    """Grades the answer in `reply` against `expected`, in bounded time.

    comparer: a child of `math_verify_child`, asked only if `expected` is not a number.
    """
    number = parse_number(expected)
    if number is not None:
        return grade(reply, number, form=form, lenient=lenient)
    answer, has_form = find_answer(reply, form=form, lenient=lenient)
    is_correct = bool(answer) and await asyncio.to_thread(are_equal, comparer, expected, answer)
    return Grade(answer, has_form, is_correct)


# ---------------------------------------------------------------------------------------------
# math-verify
# ---------------------------------------------------------------------------------------------


def why_ungradable(answer: str) -> str:
    """Why replies cannot be compared with `answer`; "" if they can."""
    if parse_number(answer) is not None or find_spec("math_verify"):
        return ""
    return (
        "it is not one number; expressions, sets and tuples are compared by math-verify, which "
        "`pip install 'lockstep-rl[math]'` installs"
    )


def math_verify_child() -> Child:
    """A child process for `are_equal`, started by the first comparison."""
    return Child.of_module(__name__, name="math-verify")


def main() -> None:
    """Runs in the child: math-verify hands an answer to sympy, which may take minutes and gigabytes
    on a short text."""
    limit_process(AS=MEMORY_BYTES)
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    def compare(expected: str, answer: str) -> dict[str, Any]:
        # Its own time limits are signals that only Python code notices; the parent has a real one.
        read: Any = parse
        boxed = (f"\\boxed{{{text}}}" for text in (expected, answer))
        gold, found = (read(text, parsing_timeout=None) for text in boxed)
        return {"is_equal": bool(verify(gold, found, timeout_seconds=None))}

    serve(compare)


def are_equal(
    comparer: Child, expected: str, answer: str, *, seconds: float = LIMIT_SECONDS
) -> bool:
    """True if math-verify finds two expressions equal. False if it cannot read one of them, or
    exceeds its time or memory."""
    try:
        request = {"expected": expected, "answer": answer}
        return comparer.ask(request, seconds=seconds)["is_equal"]
    except ChildError:
        return False


# ---------------------------------------------------------------------------------------------
# Finding the answer
# ---------------------------------------------------------------------------------------------


def _boxed(reply: str) -> str | None:
    at = reply.rfind("\\boxed{")
    if at < 0:
        return None
    begin = at + len("\\boxed{")
    depth = 1
    for i in range(begin, min(len(reply), begin + MAX_ANSWER_CHARS + 1)):
        depth += (reply[i] == "{") - (reply[i] == "}")
        if not depth:
            return reply[begin:i]
    return None


def _tag(reply: str) -> str | None:
    begin = reply.rfind("<answer>")
    end = reply.rfind("</answer>")
    return reply[begin + len("<answer>") : end] if 0 <= begin < end else None


def _line_after(mark: re.Pattern[str], reply: str) -> str | None:
    """The rest of the line after the last match."""
    ends = [match.end() for match in mark.finditer(reply)]
    return reply[ends[-1] :].partition("\n")[0] if ends else None


def _last_number(reply: str) -> str | None:
    found = _SOME_NUMBER.findall(reply[-MAX_ANSWER_CHARS:])
    return found[-1] if found else None


_ANSWER_LINE = re.compile(r"answer[ *]{0,4}:[ *]{0,4}", re.IGNORECASE)
_SOME_NUMBER = re.compile(
    r"(?<![\w.])[-\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,400})(?:\.[0-9]{1,400})?"
    r"(?:/[0-9]{1,400})?"
)
_FINDERS = {
    "boxed": _boxed,
    "hashes": partial(_line_after, re.compile("####(?!#)")),
    "tag": _tag,
    "answer_line": partial(_line_after, _ANSWER_LINE),
    "last_number": _last_number,
}

# ---------------------------------------------------------------------------------------------
# Reading a number
# ---------------------------------------------------------------------------------------------

_UNSIGNED = r"(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]*)?|[0-9]+\.?[0-9]*|\.[0-9]+)"
_NUMBER = re.compile(rf"(?P<value>{_UNSIGNED})(?:[eE](?P<exponent>[-+]?[0-9]{{1,9}}))?")
_TIMES_TEN = re.compile(
    rf"(?P<value>{_UNSIGNED}) ?(?:\\times|\\cdot|\*|x|\u00d7) ?10(?:\^|\*\*)\{{?"
    r"(?P<exponent>[-+]?[0-9]{1,9})\}?"
)
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_FRACTION = re.compile(rf"(?:(?P<whole>[0-9]+) )?(?P<above>{_INTEGER}) ?/ ?(?P<below>{_INTEGER})")
_FRAC = re.compile(
    r"(?P<whole>[0-9]*) ?\\[dt]?frac ?"
    r"(?:\{ ?(?P<above>-?[0-9]+) ?\}|(?P<above1>[0-9])) ?"
    r"(?:\{ ?(?P<below>[0-9]+) ?\}|(?P<below1>[0-9]))"
)
_NOTHING = re.compile(
    r"\\[!;, ()\[\]]|\\left|\\right|\\displaystyle|\\mathbf|\\mathrm(?=\{[-0-9])|\{\}|\\?\$"
    r"|[`\u00a0\u200b]"
)
"""Marks without meaning for a number: spaces, bold, dollar signs of mathematics or of money."""
_CURRENCY = re.compile(r"^(?:US|USD|EUR|GBP|Rs\.?)? ?[\u20ac\u00a3\u00a5\u20b9]? ?(?=[-+0-9.\\])")
_NAMED = re.compile(r"^[^=]*=")
_TEXT_UNIT = re.compile(
    r"\\(?:text|mathrm|textbf|mbox|operatorname) ?\{ ?([^{}]*)\}(?:\^\{?[23]\}?)?$"
)
_PERCENT = re.compile(r"(?<=[0-9.}]) ?%")
_CIRCLE = re.compile(r"(?:\^ ?\{? ?\\circ ?\}?|\\degree|\u00b0) ?[CF]?$")
_UNIT = re.compile(r"(?<=[0-9.}]) ?([A-Za-z][A-Za-z/ .-]*)(?:\^\{?[23]\}?|[\u00b2\u00b3])?$")
_TABLES = tables_beside(__file__)
_GLUED_UNITS = frozenset(_TABLES["glued_units"].split())
_MULTIPLIERS: dict[str, int] = _TABLES["multipliers"]
_NO_UNITS = frozenset(_TABLES["no_units"].split())


def parse_number(text: str) -> Fraction | None:
    """The exact value of `text`; None if it is not written as one number.

    Read: signs, thousands separators (a comma or a space between groups of three), decimals,
    `1.5e3`, `1.5 \\times 10^3`, `3/4`, `\\frac{3}{4}`, `2\\frac34` and `2 3/4` (mixed), "2
    million". Ignored: `$` and other currencies, `\\text{...}`, words after the number, %, degrees,
    everything before `=`, a final full stop. 25% is 25: percent is a unit, as in GSM8K.

    >>> parse_number("x = -1,234.50"), parse_number("\\\\frac{6}{8}"), parse_number("12 apples")
    (Fraction(-2469, 2), Fraction(3, 4), Fraction(12, 1))
    >>> parse_number("12x"), parse_number("1,23"), parse_number("10**10**10")
    (None, None, None)
    """
    if len(text) > MAX_ANSWER_CHARS or not any("0" <= c <= "9" for c in text):
        return None
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\%", "%")
    text = " ".join(_NOTHING.sub(" ", text.replace("\\!", "")).split()).strip("* ")
    while text[:7] == "\\boxed{" and text[-1:] == "}":
        text = text[7:-1].strip()
    text, factor = _without_units(_NAMED.sub("", text[text.rfind("=") :] if "=" in text else text))
    while text[:1] in ("(", "{") and text[-1:] in (")", "}"):
        text = text[1:-1].strip()
    sign = 1
    if text[:1] in ("-", "+"):
        sign = -1 if text[0] == "-" else 1
        text = text[1:].strip()
    text = _CURRENCY.sub("", text)
    value = _unsigned(text)
    return None if value is None else sign * factor * value


def _without_units(text: str) -> tuple[str, int]:
    """(text of the number, factor of the word after it, such as 1000 for thousand)."""
    text = text.strip().rstrip(".,;: ")
    text = _TEXT_UNIT.sub(lambda m: " " + m[1].strip(), text).rstrip(" .")
    text = " ".join(_CIRCLE.sub("", _PERCENT.sub(" ", text)).split())
    text = _CURRENCY.sub("", text.removesuffix("\u20ac").rstrip())
    match = _UNIT.search(text)
    if match is None:
        return text, 1
    words = match[1].lower().split()
    is_glued = text[match.start() : match.start() + 1] != " "
    if is_glued or len(match[1].strip()) == 1:
        known = match[1].strip(" .") in _GLUED_UNITS
        return (text[: match.start()], 1) if known else (text, 1)
    factor = _MULTIPLIERS.get(words[0], 1)
    rest = words[1:] if factor > 1 else words
    if any(word.strip(".-") in _NO_UNITS or word in _MULTIPLIERS for word in rest):
        return text, 1
    return text[: match.start()].rstrip(), factor


def _unsigned(text: str) -> Fraction | None:
    if match := _NUMBER.fullmatch(text) or _TIMES_TEN.fullmatch(text):
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        digits = match["value"].replace(",", "").replace(" ", "").rstrip(".")
        return Fraction(digits) * Fraction(10) ** exponent
    if match := _FRACTION.fullmatch(text) or _FRAC.fullmatch(text):
        groups = match.groupdict()
        above = int((groups["above"] or groups.get("above1") or "").replace(",", ""))
        below = int((groups["below"] or groups.get("below1") or "").replace(",", ""))
        whole = int(groups["whole"] or 0)
        if not below or (whole and above < 0):
            return None
        return whole + Fraction(above, below)
    return None
