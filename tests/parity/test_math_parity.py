"""The verifier of final answers, against those of verl, reasoning-gym and math-verify.

Where they differ, the difference is listed with its reason: DIFFERENCES is the whole list.
"""

import asyncio
import importlib.util
import random
import re
from importlib.util import find_spec
from operator import itemgetter

import pytest

from lockstep.envs.math.grading import Form, are_equal, grade_reply, math_verify_child, parse_number

needs_math_verify = pytest.mark.skipif(
    not find_spec("math_verify"),
    reason="math-verify is not installed: pip install 'lockstep-rl[math]'",
)


CHILD = math_verify_child()


def ours(reply: str, expected: str, form: Form) -> bool:
    return asyncio.run(grade_reply(reply, expected, form=form, comparer=CHILD)).is_correct


def written(rng: random.Random) -> tuple[str, str]:
    """(an answer as a model writes it, the expected integer): right, nearly right, or wrong."""
    number = rng.choice((rng.randint(-20, 120), rng.randint(-(10**6), 10**6)))
    shown = number if rng.random() < 0.6 else number + rng.choice((-1, 1, 10))
    text = rng.choice((f"{shown}", f"{shown:,}", f"{shown}."))
    return text, str(number)


def load_verl(name: str):
    """One file of verl's rewards, without its package, which imports libraries of GPUs."""
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not installed")
    path = f"{found.submodule_search_locations[0]}/utils/reward_score/{name}.py"
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DIFFERENCES = {
    "gsm8k": [
        # (reply, expected, verl says, we say): verl compares text after taking commas out.
        ("#### 72.", "72", False, True),
        ("#### 72.00", "72", False, True),
        ("####72", "72", False, True),
        ("#### $72", "72", False, True),
        ("#### 7,2", "72", True, False),
        ("#### 72 or 73", "72", True, False),
        ("#### 72" + " " * 300, "72", False, True),
    ],
    "math_dapo": [
        ("Answer: 34.0", "34", False, True),
        ("Answer: \\frac{68}{2}", "34", False, True),
        ("Answer: 34.", "34", False, True),
        ("Answer: \\(34\\)", "34", False, True),
        ("Answer: 3,4", "34", True, False),
        ("Answer: 34 square ways", "34", True, True),
        ("\\boxed{34}", "34", True, False),  # verl falls back to the other form
    ],
}


PEERS = {
    # Before the answer, our name of the form, verl's verdict, replies that only we read: verl
    # compares text, with a full stop at the end, and for DAPO a comma in a number below zero.
    "gsm8k": ("####", "hashes", bool, r"\.$"),
    "math_dapo": ("Answer:", "answer_line", itemgetter("acc"), r"\.$|-"),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_reply_is_graded_as_verl_grades_it_but_for_what_is_listed(name):
    before, form, verdict, unread = PEERS[name]
    score, rng = load_verl(name).compute_score, random.Random(0)
    for _ in range(2000):
        answer, expected = written(rng)
        reply = f"Work.\n{before} {answer}"
        is_same = verdict(score(reply, expected)) == ours(reply, expected, form)
        assert is_same or re.search(unread, reply), reply
    for reply, expected, theirs, we in DIFFERENCES[name]:
        assert verdict(score(reply, expected)) is theirs, reply
        assert ours(reply, expected, form) is we, reply


def test_answers_of_reasoning_gym_are_right_and_others_wrong():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "gsm_symbolic", "basic_arithmetic"):
        dataset = reasoning_gym.create_dataset(name, size=100, seed=1)
        for entry in dataset:
            answer = entry["answer"]
            assert parse_number(answer) is not None, (name, answer)
            for tried in (answer, f"{answer}1", f"{parse_number(answer)}"):
                theirs = dataset.score_answer(tried, entry) == 1.0
                assert ours(f"\\boxed{{{tried}}}", answer, "boxed") is theirs, (name, tried, answer)


@needs_math_verify
def test_numbers_are_those_of_math_verify_but_for_what_is_listed():
    from math_verify import parse, verify

    same = [
        ("1/2", "0.5"), ("\\frac{3}{4}", "0.75"), ("1,234", "1234"), ("-5", "-5"), ("12", "13"),
        ("\\frac{1}{3}", "0.3"), ("2\\frac{3}{4}", "2.75"), ("5 \\text{ cm}", "5"),
        ("90^\\circ", "90"), ("x = 5", "5"), ("1.5 \\times 10^3", "1500"), ("\\$12.00", "12"),
    ]  # fmt: skip
    # 0.333333 is 1/3 to math-verify (six digits), 25% is 1/4 as well as 25.
    different = [
        ("0.333333", "\\frac{1}{3}", True, False),
        ("25\\%", "0.25", True, False),
        ("2 million", "2000000", False, True),
    ]

    def theirs(answer: str, expected: str) -> bool:
        return verify(parse(f"\\boxed{{{expected}}}"), parse(f"\\boxed{{{answer}}}"))

    for answer, expected in same:
        found = theirs(answer, expected)
        assert ours(f"\\boxed{{{answer}}}", expected, "boxed") is found, (answer, expected, found)
    for answer, expected, they, we in different:
        assert theirs(answer, expected) is they, (answer, expected)
        assert ours(f"\\boxed{{{answer}}}", expected, "boxed") is we, (answer, expected)


@needs_math_verify
@pytest.mark.parametrize(
    ("expected", "answer", "is_equal"),
    [
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("(3, \\frac{\\pi}{2})", "(3, \\pi/2)", True),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("\\sqrt{8}", "3", False),
        ("\\sqrt{8}", "", False),
        ("\\sqrt{8}", "\\frac{", False),
    ],
)
def test_expressions_sets_and_tuples_are_compared_by_math_verify(expected, answer, is_equal):
    assert ours(f"\\boxed{{{answer}}}", expected, "boxed") is is_equal


@needs_math_verify
def test_an_answer_that_hangs_or_fills_the_memory_is_wrong_and_the_next_one_is_graded():
    child = math_verify_child()
    try:
        for hostile in ("10^{10^{10^{10}}}", "9" * 900 + "!", "\\sqrt{" * 150 + "}" * 150):
            assert not are_equal(child, "\\sqrt{2}", hostile, seconds=2.0)
            assert are_equal(child, "\\sqrt{8}", "2\\sqrt{2}")
    finally:
        child.close()
