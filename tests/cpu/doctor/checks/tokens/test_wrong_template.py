"""Prompts that are not what the engine was sent, or not what the template writes."""

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import looked, played, policy, rows_of

from lockstep.doctor.checks.tokens.context import DroppedSeparator, Padding, opening_of
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.wrong_template import (
    UnlikeTemplate,
    WrongTemplate,
    describe,
    tools_in,
)
from lockstep.testing.faults.rows import DroppedSeparators, PaddedRows
from lockstep.testing.faults.rows import WrongTemplate as Fault

CHECKS = (WrongTemplate, UnlikeTemplate, Padding, DroppedSeparator, InjectedControl)
KINDS = ("system", "opening", "beginning", "space")


def dump(name, fault=None, *, engine=False, messages=False, share=1.0):
    renderer, episodes = played(name, rows=16)
    samples = [
        fault.changed(e.row, renderer) if fault and i < share * len(episodes) else e.row
        for i, e in enumerate(episodes)
    ]
    rows = rows_of(episodes, samples, engine=engine, messages=messages)
    if engine:
        sent = []
        for episode in episodes:
            turn, ids = episode.row.columns["turn"], episode.row.token_ids
            begins = [int(np.flatnonzero(turn == t)[0]) for t in range(turn.max() + 1)]
            sent.append(tuple(ids[:begin] for begin in begins))
        rows = rows.with_(engine_prompt_ids=tuple(sent))
    return renderer, rows


def causes(rows, renderer, checks=CHECKS):
    _, findings = looked(checks, rows, renderer)
    return {f.cause: f for f in findings.values() if f.verdict == "differs"}


@pytest.mark.parametrize("name", ["chatml", "harmony"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_prompt_that_was_not_sent_is_named_and_its_first_id_shown(name, kind, share):
    renderer, rows = dump(name, Fault(kind=kind), engine=True, share=share)
    found = causes(rows, renderer)
    assert list(found) == ["wrong_template"]
    finding = found["wrong_template"]
    assert finding.basis == "shown" and finding.check == "template/wrong_template"
    evidence = finding.evidence[0]
    row = rows.row_ids.index(evidence.row)
    ids, sent = rows.token_ids[rows.slices[row]], rows.engine_prompt_ids[row][0]
    assert np.array_equal(ids[: evidence.begin], sent[: evidence.begin])
    assert ids[evidence.begin] != sent[evidence.begin]


@pytest.mark.parametrize("name", ["chatml", "harmony"])
def test_prompts_as_they_were_sent_or_as_the_template_writes_them_are_consistent(name):
    for given in ({"engine": True}, {"messages": True}):
        renderer, rows = dump(name, **given)
        assert causes(rows, renderer) == {}


@pytest.mark.parametrize("fault", [PaddedRows(), PaddedRows(place="left"), DroppedSeparators()])
def test_padding_and_lost_separators_are_not_called_another_template(fault):
    renderer, rows = dump("chatml", None, engine=True)
    if isinstance(fault, PaddedRows):
        fault = PaddedRows(place=fault.place, token="<|im_start|>")
    renderer, rows = dump("chatml", fault, engine=True)
    assert "wrong_template" not in causes(rows, renderer)


def test_a_beginning_token_twice_needs_no_record_of_the_engine():
    renderer, rows = dump("harmony", Fault(kind="beginning"))
    found = causes(rows, renderer)
    assert found["wrong_template"].measured.endswith("<|start|> twice at its beginning")


@pytest.mark.parametrize("kind", ["system", "opening", "space"])
def test_messages_tell_another_prompt_only_where_the_two_sides_disagree(kind):
    renderer, rows = dump("chatml", Fault(kind=kind), messages=True)
    # The sampler read another prompt: its log-probs are not the trainer's from the reply on.
    first = rows.spans.begin[rows.spans.is_first]
    apart = np.zeros(rows.num_tokens, np.float32)
    apart[rows.within(first, first + 6)] = -1.5
    moved = rows.with_(rollout_logprobs=(rows.rollout + apart).astype(np.float32))
    found = causes(moved, renderer)
    assert list(found) == ["wrong_template"] and found["wrong_template"].basis == "fit"
    _, findings = looked(CHECKS, rows.with_(trainer_logprobs=rows.rollout), renderer)
    assert findings["template/unlike_template"].verdict == "information"


def test_the_opening_is_without_the_close_before_it():
    renderer, _ = played("chatml", rows=1)
    assert renderer.tokenizer.decode(opening_of(renderer)) == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        ([1, 2, 3], [1, 2, 3, 4, 5], "ids 4 5 is missing at its end"),
        ([9, 1, 2], [1, 2], "ids 9 is added at its beginning"),
        ([1, 1, 2], [1, 2], "ids 1 twice"),
        ([1, 7, 2], [1, 8, 2], "ids 8 became ids 7"),
    ],
)
def test_a_difference_is_told_in_words(found, expected, words):
    assert describe(np.array(found, np.int32), np.array(expected, np.int32), None) == words


def test_tools_are_read_from_a_prompt_in_any_form_of_json():
    one = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    two = '{"name": "g", "description": "G.", "parameters": {}}'
    text = f'words {{not json}} {one}\n{two} {{"name": "no tool"}}'
    assert [tool.name for tool in tools_in(text)] == ["f", "g"]


def test_the_made_policy_depends_on_what_is_before():
    assert policy([1, 2, 3])[2] != policy([4, 2, 3])[2]
