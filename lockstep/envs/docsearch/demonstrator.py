"""An imperfect demonstrator for worlds: dialogues that a model is first trained on, supervised.

It knows the world, and does the right thing only part of the time, on purpose: what reinforcement
learning then has to do is to find out which of its habits pay.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.envs.docsearch.environment import INVALID_CALL, TOOL_NAME, world_problem
from lockstep.envs.docsearch.worlds import NAMES, NO_RESULTS, VALUES, World
from lockstep.types import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How often the demonstrator goes wrong: probabilities, each drawn on its own."""

    missing_relation: float = 0.20
    """A query with the name alone; no answer is known then."""
    wrong_name: float = 0.25
    """A query with a random name; no answer is known then."""
    broken_json: float = 0.15
    """A call whose JSON does not close its list, before the proper one."""
    forgets_second_hop: float = 0.50
    """Of a two-hop question, the first hop's value is given as the answer."""
    random_answer: float = 0.20
    """Any value of the relation that was asked for, although the right one was read."""


NOISY = Noise()
CLEAN = Noise(
    missing_relation=0.0, wrong_name=0.0, broken_json=0.0, forgets_second_hop=0.0, random_answer=0.0
)


def demonstration(
    world: World,
    rng: random.Random,
    noisy: bool = True,
    *,
    noise: Noise | None = None,
    config: DocSearchConfig | None = None,
) -> list[Message]:
    """One whole dialogue: developer, user, then calls with their results, and the answer.

    Results are those that the environment would give, word for word. Ends with a call, and no
    answer, if the last call allowed was that; or else with the answer.
    noisy: `NOISY` or `CLEAN`, unless `noise` is given. The same rng state gives the same dialogue.
    """
    noise = noise or (NOISY if noisy else CLEAN)
    config = config or DocSearchConfig()
    problem = world_problem(world, config)
    dialogue = [
        Message(role="developer", content=config.instructions),
        Message(role="user", content=world.question),
    ]
    num_calls = 0

    def call(arguments: str, result: str) -> None:
        nonlocal num_calls
        num_calls += 1
        dialogue.append(_call(arguments))
        if num_calls < config.max_calls:
            dialogue.append(Message(role="tool", name=TOOL_NAME, content=result))

    def search(*keywords: str) -> None:
        chunks = problem.search(keywords)
        result = problem.separator.join(text for _, text in chunks) or NO_RESULTS
        call(_arguments(*keywords), result)

    known: str | None = None
    for hop, fact in enumerate(world.path):
        if hop and rng.random() < noise.forgets_second_hop:
            break
        if rng.random() < noise.broken_json:
            call(_arguments(fact.name, fact.relation).replace("]}", "}"), INVALID_CALL)
        slip = rng.random()
        known = None
        if slip < noise.missing_relation:
            search(fact.name)
        elif slip < noise.missing_relation + noise.wrong_name:
            search(rng.choice(NAMES), fact.relation)
        else:
            search(fact.name, fact.relation)
            known = fact.value
        if known is None:
            break
    if known is None or rng.random() < noise.random_answer:
        known = rng.choice(VALUES[world.path[-1].relation])
    if num_calls < config.max_calls:
        dialogue.append(Message(role="assistant", content=known))
    return dialogue


def oracle(world: World) -> list[Message]:
    """The assistant's turns when everything is done right: a call per hop, then the answer."""
    calls = [_call(_arguments(fact.name, fact.relation)) for fact in world.path]
    return [*calls, Message(role="assistant", content=world.answer)]


def _arguments(*keywords: str) -> str:
    return json.dumps({"keywords": list(keywords)})


def _call(arguments: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(name=TOOL_NAME, arguments=arguments),))
