"""Where first replies begin, by the template alone: rows that know their mask and nothing else."""

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import looked, make_renderer, words_tokenizer

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.context import opening_of
from lockstep.doctor.checks.tokens.masks import AfterStop, Boundary, ObservationTrained
from lockstep.types import Message

RENDERER = make_renderer("chatml", words_tokenizer())
CHECKS = (ObservationTrained, AfterStop, Boundary)
USER = Message(role="user", content="Which one of them was it, and why?")


def reply(text):
    return list(RENDERER.render_reply(Message(role="assistant", content=text)))


def rows_of(dialogues):
    """Rows of pieces (ids, whether they are trained)."""
    ids = [[id_ for part, _ in pieces for id_ in part] for pieces in dialogues]
    mask = [[is_on for part, is_on in pieces for _ in part] for pieces in dialogues]
    return Rows(
        row_ids=tuple(f"r{number}" for number in range(len(ids))),
        offsets=np.cumsum([0, *map(len, ids)]),
        token_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=np.concatenate(mask).astype(np.bool_),
    )


def begun(firsts, *, has_later=False, num_rows=16):
    """Rows whose first replies are trained from behind the words `firsts`, in turn; with a later
    reply that is trained from its opening on, if asked."""
    out = []
    for number in range(num_rows):
        words = RENDERER.tokenizer.encode(firsts[number % len(firsts)])
        rest = reply(f"{number} is the answer")
        pieces = [(RENDERER.render([USER]), False), (words, False), (rest, True)]
        if has_later:
            pieces.append((RENDERER.extend([*words, *rest], [USER]), False))
            pieces.append((reply(f"{number} again"), True))
        out.append(pieces)
    return rows_of(out)


def verdicts(rows):
    _, findings = looked(CHECKS, rows, RENDERER)
    return {name: finding.verdict for name, finding in findings.items()}, findings


@pytest.mark.parametrize(
    ("firsts", "has_later", "verdict"),
    [
        (["It ", "He ", "We ", "Ah "], False, "differs"),
        (["It ", "He "], True, "differs"),
        (["It ", "He "], False, "consistent"),  # a program that writes one or the other
        (["It "], True, "consistent"),
        (["It "], False, "consistent"),
        ([""], True, "consistent"),
    ],
)
def test_first_replies_that_begin_late_with_several_texts_before_are_a_border_at_the_wrong_place(
    firsts, has_later, verdict
):
    found, findings = verdicts(begun(firsts, has_later=has_later))
    assert found["tokens/boundary"] == verdict
    assert found["tokens/observation_trained"] == found["tokens/after_stop"] == "consistent"
    if verdict == "differs":
        finding = findings["tokens/boundary"]
        assert (finding.cause, finding.basis) == ("boundary", "fit")
        assert f"16 of 16 first replies begin {len(firsts[0])} tokens after" in finding.measured
        assert f"with {len(firsts)} texts between" in finding.measured


def test_replies_that_begin_late_by_many_distances_have_no_border_in_common():
    found, _ = verdicts(begun(["I", "He", "Not", "Some", "Maybe", "Surely"]))
    assert found["tokens/boundary"] == "consistent"


def test_replies_after_prompts_that_lost_their_opening_are_not_observations():
    opening = opening_of(RENDERER)
    history = [USER, Message(role="assistant", content="The first."), USER]

    def dialogue(number, size):
        prompt = RENDERER.render(history)
        assert tuple(prompt[-len(opening) :]) == opening
        return [(prompt[: len(prompt) - size], False), (reply(f"{number} is the answer"), True)]

    for size in (0, len(opening)):
        rows = rows_of([dialogue(number, size) for number in range(16)])
        found, _ = verdicts(rows)
        assert found["tokens/observation_trained"] == "consistent"

    # With the opening, the words of a user are told from the reply's.
    whole = rows_of([dialogue(number, 0) for number in range(16)])
    first = whole.spans.begin
    early = whole.with_(loss_mask=whole.loss_mask | whole.within(first - 40, first))
    assert verdicts(early)[0]["tokens/observation_trained"] == "differs"
