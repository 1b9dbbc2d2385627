"""An example of a user's own documents: the handbook of a town that does not exist.

    python -m lockstep.envs.docsearch.example town
    lockstep train docsearch task.docs=town/docs task.questions=town/questions.jsonl

Over 600 chunks and 480 questions, the same for the same seed. No model can have memorized them.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FIRST_NAMES = (
    "Ada", "Bram", "Celia", "Dario", "Edda", "Fergus", "Greta", "Hamish", "Ines", "Joris",
    "Katja", "Lorenz", "Maud", "Nils", "Odile", "Piers", "Quentin", "Rhona", "Silas", "Thea",
    "Ulla", "Viggo", "Wanda", "Xenia", "Yorick", "Zelda",
)  # fmt: skip
_LAST_NAMES = (
    "Abelard", "Birkwood", "Castellan", "Dunmore", "Eskildsen", "Farthing", "Galloway", "Hartmoor",
    "Ingleby", "Jessop", "Kestrel", "Lindqvist", "Marchbanks", "Northcote", "Ollerton", "Pemberly",
    "Quillfeather", "Ravenscar", "Stanhope", "Thistleton", "Underhill", "Vandermeer", "Winslade",
    "Yarborough",
)  # fmt: skip
_STREETS = tuple(
    f"{first} {kind}"
    for first in ("Copper", "Heron", "Lantern", "Miller", "Orchard", "Quarry", "Saddler", "Willow")
    for kind in ("Lane", "Street", "Row")
)
_TRADES = (
    "bakery", "bindery", "chandlery", "dairy", "foundry", "glassworks", "hat shop", "inn",
    "joinery", "kiln", "laundry", "mill", "nursery", "pottery", "ropewalk", "tannery",
)  # fmt: skip
_SIGNS = (
    "Anchor", "Beehive", "Compass", "Dovecote", "Ember", "Foxglove", "Gauntlet", "Hourglass",
)  # fmt: skip
_PETS = ("cat", "dog", "goat", "goose", "hare", "magpie", "pony", "tortoise")
_PET_NAMES = (
    "Basil", "Clover", "Domino", "Fidget", "Ginger", "Juniper", "Marble", "Nettle", "Pepper",
    "Rollo", "Saffron", "Tansy",
)  # fmt: skip
_INSTRUMENTS = ("accordion", "bassoon", "cello", "dulcimer", "fiddle", "flute", "harp", "viola")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
NUM_RESIDENTS = 480


@dataclass(frozen=True, slots=True)
class Passage:
    """One section of a document: sentences that questions are about, and others."""

    document: str
    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"## {self.title}\n\n{' '.join(self.sentences)}\n"


def make_example(seed: int = 0) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """(file name -> text of the document, records of questions.jsonl). Depends on `seed` alone."""
    rng = random.Random(seed)
    shops = [f"the {sign} {trade}" for sign in _SIGNS for trade in _TRADES]
    street_of = {shop: rng.choice(_STREETS) for shop in shops}
    founded = {shop: str(rng.randrange(1610, 1930)) for shop in shops}
    passages = [_shop_passage(shop, street_of[shop], founded[shop], rng) for shop in shops]
    people = [f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES]
    questions: list[dict[str, Any]] = []
    for number, person in enumerate(rng.sample(people, NUM_RESIDENTS)):
        shop = rng.choice(shops)
        passage = _resident_passage(person, shop, _STREETS[number % len(_STREETS)], rng)
        passages.append(passage)
        questions.append(_question(number, person, shop, passage, street_of[shop], founded[shop]))
    documents: dict[str, str] = {}
    for passage in passages:
        opening = f"# {passage.document.removesuffix('.md').replace('-', ' ').capitalize()}\n"
        documents.setdefault(passage.document, opening)
        documents[passage.document] += "\n" + passage.text
    return dict(sorted(documents.items())), questions


def write_example(folder: str | Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Writes `folder/docs` and `folder/questions.jsonl` and returns both paths."""
    documents, questions = make_example(seed)
    docs, lines = Path(folder) / "docs", Path(folder) / "questions.jsonl"
    docs.mkdir(parents=True, exist_ok=True)
    for name, text in documents.items():
        (docs / name).write_text(text, encoding="utf-8")
    lines.write_text("".join(json.dumps(q) + "\n" for q in questions), encoding="utf-8")
    return docs, lines


def _where(shop: str, street: str) -> str:
    return f"You find {shop} in {street}."


def _since(shop: str, year: str) -> str:
    return f"It has stood there since {year}, says the plaque of {shop}."


def _works(person: str, shop: str) -> str:
    return f"{person} earns a living at {shop}."


def _question(
    number: int, person: str, shop: str, passage: Passage, street: str, year: str
) -> dict[str, Any]:
    """One question about a resident. Every second one needs the passage of the workplace too."""
    works = {"document": passage.document, "quote": _works(person, shop)}
    shop_document = _shop_document(shop)
    match number % 4:
        case 0:
            text, answer, gold = f"Where does {person} work?", shop, [works]
        case 1:
            text = f"In which street is the place where {person} works?"
            answer = street
            gold = [works, {"document": shop_document, "quote": _where(shop, street)}]
        case 2:
            pet = passage.sentences[3]
            text, answer = f"What is the name of {person}'s pet?", pet.split()[-1].rstrip(".")
            gold = [{"document": passage.document, "quote": pet}]
        case _:
            text, answer = f"Since which year has the place where {person} works stood?", year
            gold = [works, {"document": shop_document, "quote": _since(shop, year)}]
    return {
        "id": f"town-{number:03d}",
        "question": text,
        "answer": answer,
        "gold": gold,
        "label": f"{len(gold)}-hop",
    }


def _shop_document(shop: str) -> str:
    return f"trades-{shop.split(' ', 2)[2].replace(' ', '-')}.md"


def _shop_passage(shop: str, street: str, year: str, rng: random.Random) -> Passage:
    opening, closing = rng.randrange(6, 11), rng.randrange(15, 21)
    return Passage(
        document=_shop_document(shop),
        title=shop.removeprefix("the ").capitalize(),
        sentences=(
            _where(shop, street),
            _since(shop, year),
            f"The doors open at {opening} and close at {closing}, except on {rng.choice(_DAYS)}.",
            f"Apprentices are taken on every {rng.choice(_MONTHS)}.",
            f"A stuffed {rng.choice(_PETS)} in the window brings luck, or so the owners claim.",
        ),
    )


def _resident_passage(person: str, shop: str, street: str, rng: random.Random) -> Passage:
    pet = rng.choice(_PETS)
    return Passage(
        document=f"residents-{street.lower().replace(' ', '-')}.md",
        title=person,
        sentences=(
            f"{person} lives at number {rng.randrange(1, 90)}.",
            _works(person, shop),
            f"On {rng.choice(_DAYS)} evenings the neighbours hear {person} play the "
            f"{rng.choice(_INSTRUMENTS)}.",
            f"The {pet} that sleeps on the doorstep of {person} is called "
            f"{rng.choice(_PET_NAMES)}.",
            f"The garden is open to visitors in {rng.choice(_MONTHS)}.",
        ),
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m lockstep.envs.docsearch.example FOLDER", file=sys.stderr)
        return 2
    docs, questions = write_example(arguments[0])
    print(f"task.docs={docs} task.questions={questions}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
