"""Generated problems: word problems, and chains of operations for a calculator.

They are small enough for a model of a hundred thousand parameters to learn in minutes, and need the
same skills as larger ones: choosing numbers, their order and the operations; and, for chains,
leaving the digits to a tool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lockstep.tables import tables_beside

Kind = Literal["word", "chain"]

_TABLES = tables_beside(__file__)
NAMES, THINGS = _TABLES["names"].split(), _TABLES["things"].split()
GAINS, LOSSES, DISTRACTORS = (_TABLES[name] for name in ("gains", "losses", "distractors"))
"""Sentences of a word problem. Distractors are irrelevant: numbers of another person."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One step: `left` `sign` `right` = `result`, which is the `left` of the next step."""

    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        if self.sign == "*":
            return self.left * self.right
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def code(self) -> str:
        """The step as a Python expression: "14+23"."""
        return f"{self.left}{self.sign}{self.right}"


@dataclass(frozen=True, slots=True)
class Made:
    """A generated problem, with the steps to its answer.

    >>> made = make_problem(1, "chain")
    >>> print(made.question)
    Take 238 times 83. If that is even add 968, if odd add 922. What is it?
    >>> [step.code for step in made.steps], made.answer, made.label
    (['238*83', '19754+968'], '20722', 'choice')
    """

    question: str
    steps: tuple[Operation, ...]
    label: str
    """Kind of the problem, reported separately: "2-step", "3-step", "chain" or "choice"."""
    unused: tuple[int, ...] = ()
    """Numbers of the question that no step needs: of a distractor, or of the other case."""

    @property
    def answer(self) -> str:
        return str(self.steps[-1].result)


@lru_cache(maxsize=1024)
def make_problem(seed: int, kind: Kind) -> Made:
    """The problem of a task seed. Cached, since all episodes of a group share it."""
    rng = random.Random(seed)
    return word_problem(rng) if kind == "word" else chain(rng)


def word_problem(rng: random.Random) -> Made:
    """Two or three steps that add or subtract a digit, with results below 60; half of the problems
    have an irrelevant number. The label counts the steps: "2-step"."""
    name, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)

    def say(templates: Sequence[str], number: int) -> str:
        return rng.choice(templates).format(name=name, other=other, things=things, number=number)

    have = rng.randint(5, 40)
    sentences = [f"{name} has {have} {things}."]
    steps: list[Operation] = []
    for _ in range(rng.choice((2, 3))):
        is_gain = have < 10 or (have < 41 and rng.random() < 0.5)
        number = rng.randint(2, 9)
        steps.append(Operation(have, "+" if is_gain else "-", number))
        have = steps[-1].result
        sentences.append(say(GAINS if is_gain else LOSSES, number))
    unused: tuple[int, ...] = ()
    if rng.random() < 0.5:
        unused = (rng.randint(2, 9),)
        sentences.insert(rng.randint(1, len(sentences)), say(DISTRACTORS, unused[0]))
    sentences.append(f"How many {things} does {name} have?")
    return Made(" ".join(sentences), tuple(steps), f"{len(steps)}-step", unused)


def chain(rng: random.Random) -> Made:
    """A product of three digits by two, then a second step with it. Label "chain": the step is
    given; "choice": it depends on whether the product is even."""
    first = Operation(rng.randint(101, 999), "*", rng.randint(11, 99))
    begin = f"Take {first.left} times {first.right}."
    one, two = rng.sample(range(101, 1000), 2)
    if rng.random() < 0.5:
        sign, verb = rng.choice((("+", "add"), ("-", "subtract")))
        second = Operation(first.result, sign, one)
        return Made(f"{begin} Then {verb} {one}. What is it?", (first, second), "chain")
    is_even = first.result % 2 == 0
    second = Operation(first.result, "+", one if is_even else two)
    asked = f"{begin} If that is even add {one}, if odd add {two}. What is it?"
    return Made(asked, (first, second), "choice", (two if is_even else one,))
