"""Demonstrations of word problems and chains, with and without mistakes: what a tiny model first
learns from.

The demonstrator knows the solution and makes mistakes on purpose. Reinforcement learning then has
to find out which of the habits pay.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, fields, replace

from lockstep.agent.environment import first_messages
from lockstep.agent.task_config import DialogueConfig
from lockstep.config import require
from lockstep.envs.math.problems import Made, Operation, chain, word_problem
from lockstep.types import Message, ToolCall

STEPS_INSTRUCTIONS = "Work it out."
TOOL_INSTRUCTIONS = "Use python."
HEAD_INSTRUCTIONS = "Answer at once."
"""Developer messages that the tiny model knows: for word problems, for chains with the tool, for
chains without it."""

TOOL_NAME = "python"
FAILED_CODE = "error"
"""Result of a call whose code failed: a tiny model is told no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Probability of each mistake, drawn independently."""

    # Word problems.
    uses_distractor: float = 0.4
    """The number of the other person is added too, if there is one."""
    wrong_sign: float = 0.15
    """Per step: adds instead of subtracting, or the reverse."""
    slip: float = 0.1
    """Per step: a digit of the result is wrong."""
    drops_last_step: float = 0.2
    """The solution ends one step early."""
    # Chains.
    from_head: float = 0.3
    """The answer comes without the tool. It is right here; a model cannot know it."""
    broken_code: float = 0.2
    """Per step: code that does not parse comes before the proper code."""
    wrong_operation: float = 0.15
    """Per step: another operation."""
    wrong_branch: float = 0.25
    """The number of the other case is taken, if there are two."""
    stops_early: float = 0.35
    """The result of the first step is the answer."""
    # Both.
    bare_answer: float = 0.15
    """The answer lacks the mark that the grader looks for."""


NOISY = Noise()
CLEAN = Noise(**{field.name: 0.0 for field in fields(Noise)})


def demonstrate_steps(made: Made, rng: random.Random, noise: Noise) -> list[Message]:
    """A word problem with its steps written out, one per line."""
    steps = list(made.steps)
    if made.unused and rng.random() < noise.uses_distractor:
        at = rng.randint(0, len(steps))
        before = steps[at - 1].result if at else steps[0].left
        steps.insert(at, Operation(before, "+", made.unused[0]))
    if rng.random() < noise.drops_last_step:
        steps.pop()
    have = made.steps[0].left
    lines: list[str] = []
    for step in steps:
        sign = step.sign
        if rng.random() < noise.wrong_sign:
            sign = "-" if sign == "+" else "+"
        done = Operation(have, sign, step.right)
        have = done.result
        if rng.random() < noise.slip:
            have += rng.choice((-10, -2, -1, 1, 2, 10))
        lines.append(f"{done.code}={have}")
    lines.append(_answer(have, rng, noise))
    return [
        *first_messages(made.question, instructions=STEPS_INSTRUCTIONS),
        Message(role="assistant", content="\n".join(lines)),
    ]


def demonstrate_calls(made: Made, rng: random.Random, noise: Noise) -> list[Message]:
    """A chain with one call per step. Results are those of the sandbox."""
    dialogue = first_messages(made.question, instructions=TOOL_INSTRUCTIONS)
    if rng.random() < noise.from_head:
        return [*dialogue, Message(role="assistant", content=_answer(int(made.answer), rng, noise))]
    steps = list(made.steps)
    if made.unused and rng.random() < noise.wrong_branch:
        steps[1] = replace(steps[1], right=made.unused[0])
    if rng.random() < noise.stops_early:
        steps.pop()
    have = made.steps[0].left
    for step in steps:
        sign = step.sign
        if rng.random() < noise.wrong_operation:
            sign = rng.choice([other for other in "+-*" if other != sign])
        done = Operation(have, sign, step.right)
        if rng.random() < noise.broken_code:
            broken = rng.choice(
                (f"{done.code})", f"{done.left}{done.right}{sign}", f"{done.code}=")
            )
            dialogue += _called(broken, FAILED_CODE)
        have = done.result
        dialogue += _called(done.code, str(have))
    return [*dialogue, Message(role="assistant", content=_answer(have, rng, noise))]


def demonstrate_head(made: Made) -> list[Message]:
    """A chain answered without the tool, with the true answer."""
    return [
        *first_messages(made.question, instructions=HEAD_INSTRUCTIONS),
        Message(role="assistant", content=f"#### {made.answer}"),
    ]


def _called(code: str, result: str) -> list[Message]:
    call = ToolCall(name=TOOL_NAME, arguments=json.dumps({"code": code}))
    return [
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", name=TOOL_NAME, content=result),
    ]


def _answer(number: int, rng: random.Random, noise: Noise) -> str:
    return str(number) if rng.random() < noise.bare_answer else f"#### {number}"


@dataclass(frozen=True, kw_only=True)
class MathDemonstrationsConfig(DialogueConfig):
    """Word problems and chains, in equal parts: a stage without mistakes, in which the model learns
    steps and copying, then a stage with them."""

    head_share: float = 0.1
    """Share of the chains that is answered without the tool."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "", head_share=(0 <= self.head_share <= 1, "in [0, 1]"))

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        noise = NOISY if is_noisy else CLEAN
        if rng.random() < 0.5:
            return demonstrate_steps(word_problem(rng), rng, noise)
        made = chain(rng)
        if rng.random() < self.head_share:
            return demonstrate_head(made)
        return demonstrate_calls(made, rng, noise)
