"""Demonstrations of document search in generated worlds, with and without mistakes.

The demonstrator knows the world and makes mistakes on purpose. Reinforcement learning then has to
find out which of the habits pay.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, fields

from lockstep.agent.environment import first_messages
from lockstep.agent.task_config import DialogueConfig
from lockstep.envs.docsearch.config import INVALID_CALL, TOOL_NAME, DocSearchConfig, world_problem
from lockstep.envs.docsearch.worlds import ENTITY_WORDS, NAMES, NO_RESULTS, VALUES, World
from lockstep.types import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Probability of each mistake, drawn independently."""

    missing_relation: float = 0.20
    """The query has the name alone; the answer is then unknown."""
    wrong_name: float = 0.25
    """The query has a random name; the answer is then unknown."""
    broken_json: float = 0.15
    """A call whose JSON does not close its list comes before the proper one."""
    forgets_second_hop: float = 0.50
    """In a two-hop question, the value of the first hop is given as the answer."""
    random_answer: float = 0.20
    """The answer is a random value of the relation, although the right one was read."""


NOISY = Noise()
CLEAN = Noise(**{field.name: 0.0 for field in fields(Noise)})


def demonstration(
    world: World, rng: random.Random, noise: Noise = NOISY, config: DocSearchConfig | None = None
) -> list[Message]:
    """One dialogue: developer, user, calls with their results, and the answer.

    Results are those of the environment, word for word. If the last allowed call was made, the
    dialogue ends with it and has no answer. The same rng state gives the same dialogue.
    """
    config = config or DocSearchConfig()
    problem = world_problem(world, config)
    dialogue = first_messages(world.question, instructions=config.instructions)
    num_calls = 0

    def call(arguments: str, result: str) -> None:
        nonlocal num_calls
        num_calls += 1
        made = ToolCall(name=TOOL_NAME, arguments=arguments)
        dialogue.append(Message(role="assistant", tool_calls=(made,)))
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


def _arguments(*keywords: str) -> str:
    return json.dumps({"keywords": list(keywords)})


@dataclass(frozen=True, kw_only=True)
class SearchDemonstrationsConfig(DialogueConfig):
    """Document search in generated worlds: a stage without mistakes, in which copying from results
    is learnt, then a stage with them."""

    num_dialogues: int = 16000
    """Dialogues in both stages, each about a world of its own."""
    entity_weight: float = 3.0
    """Loss weight of names and values in the stage without mistakes."""

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        return demonstration(World.generate(rng), rng, NOISY if is_noisy else CLEAN)

    def clean_word_weights(self) -> dict[str, float]:
        return dict.fromkeys(sorted(ENTITY_WORDS), self.entity_weight)
