"""Generated worlds of 30 one-sentence facts.

Six people each have a friend, a boss, a city, a pet and a job. Each task has a new world, so the
only way to an answer is to search and to copy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from lockstep.tables import tables_beside

_TABLES = tables_beside(__file__)
NAMES = tuple(_TABLES["names"].split())
LINKS = ("friend", "boss")
"""Relations whose value is another person: the first hop of a two-hop question."""
VALUES = {relation: tuple(words.split()) for relation, words in _TABLES["values"].items()}
"""Relations that questions ask for, and their values."""

PEOPLE_PER_WORLD = 6
NO_RESULTS = "no results"

ENTITY_WORDS = frozenset((*NAMES, *(value for values in VALUES.values() for value in values)))
"""Words that a model must copy; supervised training gives them more weight."""


@dataclass(frozen=True, slots=True)
class WorldFact:
    """One chunk: "The city of Bela is Oslo."""

    name: str
    relation: str
    value: str

    @property
    def text(self) -> str:
        return f"The {self.relation} of {self.name} is {self.value}."


@dataclass(frozen=True, slots=True)
class World:
    """Facts and one question about them."""

    facts: tuple[WorldFact, ...]
    """Facts in random order, which breaks ties of a search."""
    question: str
    path: tuple[WorldFact, ...]
    """One fact, or two; then the first names the person of the second. The value of the last is the
    answer."""

    @classmethod
    def generate(cls, rng: random.Random, *, two_hop_share: float = 0.5) -> World:
        """Draws a world from `rng`."""
        names = rng.sample(NAMES, PEOPLE_PER_WORLD)
        facts: dict[tuple[str, str], WorldFact] = {}
        for name in names:
            others = [other for other in names if other != name]
            for link in LINKS:
                facts[name, link] = WorldFact(name, link, rng.choice(others))
            for relation, values in VALUES.items():
                facts[name, relation] = WorldFact(name, relation, rng.choice(values))
        order = list(facts.values())
        rng.shuffle(order)
        name, relation = rng.choice(names), rng.choice(tuple(VALUES))
        if rng.random() < two_hop_share:
            first = facts[name, rng.choice(LINKS)]
            path = (first, facts[first.value, relation])
            question = f"What is the {relation} of the {first.relation} of {name}?"
        else:
            path = (facts[name, relation],)
            question = f"What is the {relation} of {name}?"
        return cls(facts=tuple(order), question=question, path=path)

    @property
    def answer(self) -> str:
        return self.path[-1].value

    @property
    def hops(self) -> int:
        return len(self.path)

    def search(self, keywords: Sequence[str], *, num_results: int = 2) -> list[WorldFact]:
        """The first of the facts that match the most keywords; [] if no keyword matches. A keyword
        matches a fact if it equals its name, relation or value."""
        overlaps = [
            sum(keyword in (fact.name, fact.relation, fact.value) for keyword in keywords)
            for fact in self.facts
        ]
        best = max(overlaps)
        if not best:
            return []
        found = (fact for fact, num in zip(self.facts, overlaps, strict=True) if num == best)
        return list(islice(found, num_results))


@lru_cache(maxsize=1024)
def world_of(seed: int, two_hop_share: float) -> World:
    """The world of a task seed. Cached, since all episodes of a group share it."""
    return World.generate(random.Random(seed), two_hop_share=two_hop_share)
