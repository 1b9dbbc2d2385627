"""Final answers: where they are found, which number they are, and texts that are made to hurt."""

import asyncio
from fractions import Fraction
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.envs.math.config import FORM_INSTRUCTIONS
from lockstep.envs.math.grading import (
    MAX_ANSWER_CHARS,
    Grade,
    find_answer,
    grade,
    grade_reply,
    math_verify_child,
    parse_number,
    why_ungradable,
)

NUMBERS = {
    "12": 12, "-5": -5, "\u22125": -5, "- 5": -5, "+5": 5, "007": 7, ".5": "1/2", "5.": 5,
    "3.50": "7/2", "1,234": 1234, "1,234,567.5": "2469135/2", "1 234 567": 1234567,
    "1\\,000": 1000, "10{,}000": 10000, "1e5": 100000, "1.5 \\times 10^3": 1500, "5 * 10^3": 5000,
    "2\u00d710^{-2}": "1/50", "3/4": "3/4", "-6/8": "-3/4", "2 3/4": "11/4", "\\frac{3}{4}": "3/4",
    "\\dfrac34": "3/4", "-\\frac{1}{2}": "-1/2", "\\frac{-1}{2}": "-1/2", "2\\frac{3}{4}": "11/4",
    "$12.00": 12, "\\$1,234": 1234, "-$5": -5, "$-5$": -5, "\u20ac5": 5, "5 \u20ac": 5, "USD 5": 5,
    "25%": 25, "25\\%": 25, "70% of them": 70, "12 apples": 12, "5 dollars": 5, "5cm": 5,
    "5 cm^2": 5, "5\\text{ cm}^2": 5, "5 \\text{ cm}": 5, "18 miles per hour": 18, "5 m/s": 5,
    "90^\\circ": 90, "90\u00b0": 90, "2 million dollars": 2_000_000, "$5 million": 5_000_000,
    "x=5": 5, "3+4=7": 7, "x = 5.": 5, "**42**": 42, "\\boxed{7}": 7, "(5)": 5, "{5}": 5,
    "\\text{5}": 5, "\\mathbf{5}": 5, "72\r": 72, "\\(34\\)": 34, "\\[34\\]": 34,
}  # fmt: skip
NO_NUMBERS = (
    "", "-", "x", "1,23", "1,234,56", "12 34", "3, 4", "(3,4)", "10 and 12", "3 or 4", "12x",
    "12 x", "5 dozen", "2 hours and 5 minutes", "2^3", "10^{10}", "10**10**10", "\\sqrt{4}",
    "3\\pi", "3 pi", "4:30", "1/0", "\\frac{1}{0}", "1e999999999", "1_000", "--5", "1.2.3",
    "\u0663", "nan", "inf", "0x10", "10%5", "1" * (MAX_ANSWER_CHARS + 1),
)  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_read_exactly_however_it_is_written(text):
    assert parse_number(text) == Fraction(NUMBERS[text])


@pytest.mark.parametrize("text", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_what_is_not_written_as_one_number_is_none(text):
    assert parse_number(text) is None


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**12))
def test_a_fraction_survives_being_written(above, below):
    sign = "-" if above < 0 else ""
    assert parse_number(f"{above}/{below}") == Fraction(above, below)
    assert parse_number(f"{sign}\\frac{{{abs(above)}}}{{{below}}}") == Fraction(above, below)
    assert parse_number(f"{above:,}") == above


@pytest.mark.parametrize(
    ("reply", "form", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}} or \\boxed{3}", "boxed", "3"),
        ("\\boxed{ \\frac{1}{2} }", "boxed", "\\frac{1}{2}"),
        ("\\boxed{3}, no: \\boxed{4", "boxed", ""),
        ("#### 1\n#### 72 apples\nbye", "hashes", "72 apples"),
        ("#### 1\n####\n72", "hashes", ""),
        ("<answer>1</answer> <answer> 2 </answer>", "tag", "2"),
        ("<answer>1</answer> <answer>2", "tag", ""),
        ("Answer: 1\n**Answer:** $34$\nRight.", "answer_line", "$34$"),
        ("3 pens and 1,234.50 coins, -7/2 of them.", "last_number", "-7/2"),
        ("none", "last_number", ""),
    ],
)
def test_the_last_place_of_the_form_counts_and_an_open_one_is_no_answer(reply, form, answer):
    assert find_answer(reply, form=form) == (answer, bool(answer))


def test_leniency_takes_the_last_number_and_says_that_the_form_is_missing():
    assert grade("It is 12.", Fraction(12), form="boxed") == Grade("", False, False)
    lenient = grade("It is 12.", Fraction(12), form="boxed", lenient=True)
    assert lenient == Grade("12", False, True)
    marked = grade("It is 12. \\boxed{x}", Fraction(12), form="boxed", lenient=True)
    assert marked == Grade("x", True, False)


HOSTILE = {
    "digits": "9" * 10**6, "commas": "1," * 10**5, "spaces": " " * 10**6 + "1",
    "equals": "=" * 10**5, "parentheses": "(" * 10**5 + "1" + ")" * 10**5, "braces": "{" * 10**5,
    "frac": "\\frac" * 10**5,
    "tower": "10**10**10", "exponent": "1e999999999", "boxes": "\\boxed{" * 10**5 + "1",
    "answers": "answer " * 10**5, "tags": "<answer>" * 10**5, "units": "1" + "a " * 400,
    "text": "\\text{" * 10**5, "letters": "1" + "a" * 900 + "!", "stars": "Answer" + "*" * 10**6,
    "nulls": "\0" * 1000 + "1", "surrogate": "\ud800" * 1000 + "1", "numbers": "1/" * 10**5,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_graded_without_an_error_or_a_quadratic_search(name):
    text = HOSTILE[name]
    for form in FORM_INSTRUCTIONS:
        for reply in (text, f"#### {text}", f"\\boxed{{{text}}}", f"<answer>{text}</answer>",
                      f"Answer: {text}"):  # fmt: skip
            grade(reply, Fraction(7), form=form, lenient=True)


@given(st.text(max_size=200), st.sampled_from([*FORM_INSTRUCTIONS]), st.booleans())
@settings(max_examples=200)
def test_no_text_raises(text, form, lenient):
    grade(text, Fraction(1), form=form, lenient=lenient)
    parse_number(text)


def test_an_answer_that_is_no_number_needs_math_verify():
    why = why_ungradable("\\sqrt{2}")
    assert why_ungradable("1,000") == ""
    assert not why if find_spec("math_verify") else "lockstep-rl[math]" in why


def test_numbers_are_graded_without_a_worker():
    reply = "It is \\boxed{\\frac{2}{4}}."
    verdict = asyncio.run(grade_reply(reply, "0.5", form="boxed", comparer=math_verify_child()))
    assert verdict == Grade("\\frac{2}{4}", True, True)
