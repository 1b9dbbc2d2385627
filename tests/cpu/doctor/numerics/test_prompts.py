"""Other prompts before the same replies: written for rows, and found by the model."""

import sys
from pathlib import Path

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import played, rows_of

from lockstep.doctor.numerics.prompts import (
    FAMILIES,
    Parts,
    Prompts,
    read_messages_of,
    with_prompt,
)
from lockstep.types import Message

sys.path.insert(0, str(Path(__file__).parents[4] / "docs" / "proof"))

from doctor_faults import WrongTemplate

SAID = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Who is it?"),
]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_a_format_writes_is_read_back_with_all_words(name):
    family = FAMILIES[name]
    text = family.write(SAID, is_first=True)
    read = read_messages_of(text, family)
    assert read is not None and read[-1].role == "user"
    words = "".join(message.content for message in read)
    assert "Be brief." in words and read[-1].content.endswith("Who is it?")


@pytest.mark.parametrize("kind", ["system", "opening", "beginning", "space"])
def test_one_of_the_prompts_undoes_each_mistake(kind):
    renderer, episodes = played("chatml", rows=4)
    changed = [WrongTemplate(kind=kind).changed(e.row, renderer) for e in episodes]
    rows = rows_of(episodes, changed)
    sound = rows_of(episodes)
    tried = []
    for prompt in Prompts(renderer.tokenizer, renderer).all():
        layout = with_prompt(prompt, rows, range(4))
        if layout is None:
            continue
        tried.append(prompt.text)
        # Every trained token is in the layout once, with its own id.
        at = layout.place[layout.rows.loss_mask]
        assert np.array_equal(layout.rows.token_ids[layout.rows.loss_mask], rows.token_ids[at])
        assert len(set(at.tolist())) == len(at)
        if layout.rows.has_same_ids(sound.take(np.arange(len(layout.rows)))):
            break
    else:
        raise AssertionError(f"none of {tried} gives the prompt that was sampled after")


def test_the_texts_of_prompts_are_different():
    renderer, _ = played("chatml", rows=1)
    texts = [prompt.text for prompt in Prompts(renderer.tokenizer, renderer).all()]
    assert len(texts) == len(set(texts)) > 30


def test_a_row_without_a_reply_has_no_parts():
    _, episodes = played("chatml", rows=1)
    rows = rows_of(episodes)
    empty = rows.with_(loss_mask=np.zeros_like(rows.loss_mask), is_sampled=None, turn=None)
    assert Parts.of(empty, 0) is None
