"""A task kind `chains`: a question whose answer is three to six searches away.

    lockstep sft chains-model --plugin docs/proof/chains.py out=build/studies/models/chains-model
    lockstep train chains --plugin docs/proof/chains.py

The quickstart asks for one or two hops. Here a question names a person and up to six relations in
order: "Bela: friend, boss, rival, city?" Each relation needs a search of its own, and the whole
reward is for the last value. The demonstrations stop early, so the first answers are short and
mostly wrong; a policy that learns makes them longer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment
from lockstep.agent.task_config import DialogueConfig, Split, TaskConfig
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.agent.tools import ToolLimits
from lockstep.envs.docsearch.config import (
    TOOL_NAME,
    DocSearchConfig,
    DocSearchEnvironment,
    world_problem,
)
from lockstep.envs.docsearch.worlds import (
    ENTITY_WORDS,
    NAMES,
    PEOPLE_PER_WORLD,
    VALUES,
    World,
    WorldFact,
)
from lockstep.recipes import recipe
from lockstep.recipes.registry import supervised_recipe
from lockstep.renderers.config import HarmonyConfig
from lockstep.run_config import Config, EvaluationConfig, SFTConfig, SupervisedConfig
from lockstep.training.config import TrainerConfig
from lockstep.types import Message, Task, ToolCall

LINKS = ("friend", "boss", "rival", "tutor", "uncle")
LAST = "city"
"""The relation that every question ends with. The second layer of a tiny gpt-oss sees 64 tokens,
so it cannot look up in the question what it is asked for at the end of a long chain."""
HOPS = (3, 6)
"""(fewest, most) facts on the way to an answer."""

SEARCH = DocSearchConfig(
    instructions="Search, then answer.",
    max_calls=HOPS[1] + 2,
    num_results=1,
    retrieval_weight=0.0,
    correctness_weight=1.0,
    format_penalty_weight=0.0,
)


@cache
def chain(seed: int) -> World:
    """A world in which every person has every relation, and a question of three to six hops."""
    rng = random.Random(seed)
    names = rng.sample(NAMES, PEOPLE_PER_WORLD)
    facts = {}
    for name in names:
        for link in LINKS:
            others = [other for other in names if other != name]
            facts[name, link] = WorldFact(name, link, rng.choice(others))
        facts[name, LAST] = WorldFact(name, LAST, rng.choice(VALUES[LAST]))
    links = rng.sample(LINKS, rng.randint(*HOPS) - 1)
    relations = (*links, LAST)
    name, path = rng.choice(names), []
    question = f"{name}: {', '.join(relations)}?"
    for relation in relations:
        path.append(facts[name, relation])
        name = path[-1].value
    order = list(facts.values())
    rng.shuffle(order)
    return World(facts=tuple(order), question=question, path=tuple(path))


@dataclass(frozen=True, kw_only=True)
class ChainsConfig(TaskConfig):
    """Questions about generated worlds. The reward is 1 for the right value and 0 for another."""

    TAG: ClassVar[str] = "chains"

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        return GeneratedSource(_task, seed=seed, split=split)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        world = chain(task.payload["world_seed"])

        def search(keywords: Sequence[str]) -> list[tuple[str, str]]:
            """The fact that the keywords name, and none of which they name the value."""
            asked = set(keywords)
            return [(f.text, f.text) for f in world.facts if {f.name, f.relation} == asked]

        problem = replace(world_problem(world, SEARCH), search=search)
        return DocSearchEnvironment(problem, SEARCH, ToolLimits.of(agent))

    def label(self, task: Task) -> str:
        return f"{task.payload['hops']}-hop"


def _task(seed: int, index: int) -> Task:
    world = chain(seed)
    return Task(id=f"chain-{seed:016x}", payload={"world_seed": seed, "hops": world.hops})


STOPS_EARLY = 0.5
"""Probability, after each search but the last, that a demonstration with mistakes answers."""


@dataclass(frozen=True, kw_only=True)
class ChainDemonstrationsConfig(DialogueConfig):
    """A search for each relation, then the value. With mistakes: the answer comes too early."""

    TAG: ClassVar[str] = "chains"

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        world = chain(rng.getrandbits(48))
        dialogue = SEARCH.asked(world.question)
        value = ""
        for hop, fact in enumerate(world.path):
            if is_noisy and hop and rng.random() < STOPS_EARLY:
                break
            arguments = json.dumps({"keywords": [fact.name, fact.relation]})
            call = ToolCall(name=TOOL_NAME, arguments=arguments)
            dialogue.append(Message(role="assistant", tool_calls=(call,)))
            dialogue.append(Message(role="tool", name=TOOL_NAME, content=fact.text))
            value = fact.value
        dialogue.append(Message(role="assistant", content=value))
        return dialogue

    def clean_word_weights(self) -> dict[str, float]:
        return dict.fromkeys(sorted({*ENTITY_WORDS, *LINKS, *VALUES}), 3.0)


@supervised_recipe
def chains_model() -> SupervisedConfig:
    """A tiny gpt-oss that searches chains and mostly stops too early."""
    renderer = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
    return SupervisedConfig(
        name="chains-model",
        create="gpt_oss",
        data=ChainDemonstrationsConfig(num_dialogues=24000),
        renderer=renderer,
        sft=SFTConfig(steps=1600, rows_per_step=32, observed_weight=0.05),
        trainer=TrainerConfig(
            lr=4e-3, warmup_updates=50, schedule="linear", min_lr_share=0.05, betas=(0.9, 0.98)
        ),
        max_tokens=512,
    )


@recipe
def chains() -> Config:
    """A tiny model learns to follow a chain of facts to its end."""
    return Config(
        name="chains",
        model="build/studies/models/chains-model/model",
        task=ChainsConfig(),
        steps=300,
        max_tokens=512,
        groups_per_step=8,
        group_size=8,
        agent=AgentConfig(max_turns=9, max_turn_tokens=48),
        trainer=TrainerConfig(lr=5e-5, warmup_updates=5, schedule="constant"),
        evaluation=EvaluationConfig(num_tasks=256, at_start=False),
    )
