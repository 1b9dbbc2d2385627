"""Prompts that are not what the engine was sent, or not what the template writes."""

import sys
from pathlib import Path

import numpy as np
import pytest
from cpu.doctor.checks.text_dumps import looked, played, policy, rows_of

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.context import DroppedSeparator, Padding, opening_of
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.wrong_template import (
    UnlikeTemplate,
    WrongTemplate,
    describe,
    tools_in,
    undeclared_tool,
)
from lockstep.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parents[5] / "docs" / "proof"))

from doctor_faults import DroppedSeparators, PaddedRows
from doctor_faults import WrongTemplate as Fault

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


def answers(change=lambda prompt: prompt, *, gap=0.0, noise=0.0, messages=True):
    """(renderer, rows) of eight questions with four equal answers each, the trainer `gap` nats off
    on each token, with noise that is new each time; their prompts changed by `change`."""
    renderer, _ = played("chatml", rows=0)
    asked = [Message(role="system", content="Be brief.")]
    ids, mask, dialogues = [], [], []
    for number in range(32):
        user = Message(role="user", content=f"What is job {number // 4}?")
        answer = Message(role="assistant", content=f"Job {number // 4} is a nurse or a pilot.")
        prompt, reply = change(renderer.render([*asked, user])), renderer.render_reply(answer)
        ids.append([*prompt, *reply])
        mask.append([False] * len(prompt) + [True] * len(reply))
        dialogues.append((*asked, user, answer))
    trained = np.concatenate(mask)
    rollout = np.where(trained, np.float32(-0.7), np.float32(np.nan))
    drawn = np.random.default_rng(0).normal(0.0, 1.0, len(rollout)).astype(np.float32)
    rows = Rows(
        row_ids=tuple(f"r{number}" for number in range(32)),
        offsets=np.cumsum([0, *map(len, ids)]),
        token_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=trained,
        rollout_logprobs=rollout,
        trainer_logprobs=rollout - np.float32(gap) + np.float32(noise) * drawn,
        messages=tuple(dialogues) if messages else None,
    )
    return renderer, rows


def unlike(renderer, rows):
    return looked([UnlikeTemplate], rows, renderer)[1]["template/unlike_template"]


SMALL = 0.015
"""Nats whose k2, 1.1e-4, is between what a beginning needs and what another prompt does."""


@pytest.mark.parametrize(
    ("change", "how", "verdict"),
    [
        (lambda prompt: prompt[1:], {"gap": SMALL}, "differs"),
        (lambda prompt: [prompt[-1], *prompt], {"gap": SMALL}, "differs"),
        (lambda prompt: prompt[1:], {"noise": SMALL}, "information"),
        (lambda prompt: prompt[1:], {}, "information"),
        (lambda prompt: [*prompt[:9], *prompt[10:]], {"gap": SMALL}, "information"),
        (lambda prompt: [*prompt[:9], *prompt[10:]], {"gap": 2 * SMALL}, "differs"),
        (lambda prompt: prompt, {"gap": 2 * SMALL}, "consistent"),
    ],
    ids=["lost", "added", "noise", "no gap", "elsewhere", "elsewhere and larger", "as written"],
)
def test_a_small_gap_that_repeats_is_of_a_beginning_that_is_lost_or_added(change, how, verdict):
    assert unlike(*answers(change, **how)).verdict == verdict


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ("<think>\n\n</think>\n\n", "differs"),
        ("<think>\n", "differs"),
        ("Sure: ", "consistent"),  # words that the program begins the reply with
    ],
)
def test_a_thought_after_the_opening_is_of_another_template_and_words_are_not(more, verdict):
    renderer, _ = played("chatml", rows=0)
    for extra in (renderer.tokenizer.encode(more), encoded_with_controls(renderer, more)):
        made = lambda prompt, extra=extra: [*prompt, *extra]  # noqa: E731
        assert unlike(*answers(made, gap=0.2)).verdict == verdict
        quiet = unlike(*answers(made)).verdict
        assert quiet == ("information" if verdict == "differs" else verdict)


def encoded_with_controls(renderer, text):
    """As a template's text is encoded: names of control tokens are these."""
    tokenizer, out = renderer.tokenizer, []
    names = {tokenizer.control_name(id_): id_ for id_ in tokenizer.control_ids}
    while text:
        name = next((name for name in names if text.startswith(name)), "")
        out += [names[name]] if name else tokenizer.encode(text[0])
        text = text[len(name or text[0]) :]
    return out


def calling(prompts, *, messages=True, arguments='{"q": "job"}'):
    """(setting, rows) of replies that call find(q) after these prompts."""
    renderer, _ = played("chatml", rows=0)
    call = ToolCall(name="find", arguments=arguments)
    answer = Message(role="assistant", tool_calls=(call,))
    reply, ids, mask, dialogues = renderer.render_reply(answer), [], [], []
    for words in prompts:
        user = Message(role="user", content=words)
        prompt = renderer.render([user])
        ids.append([*prompt, *reply])
        mask.append([False] * len(prompt) + [True] * len(reply))
        dialogues.append((user, answer))
    rows = Rows(
        row_ids=tuple(f"r{number}" for number in range(len(ids))),
        offsets=np.cumsum([0, *map(len, ids)]),
        token_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=np.concatenate(mask),
        messages=tuple(dialogues) if messages else None,
    )
    return Setting(tokenizer=renderer.tokenizer, renderer=renderer), rows


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize(
    ("prompts", "name"),
    [
        (["Who is it?", "And where?"], "find"),
        (["Please find it.", "And where?"], "find"),  # the name is a word, but no argument's
        (["Who is it?", "Tools: find(q)"], ""),  # one declaration is enough
    ],
)
def test_a_tool_is_undeclared_if_no_prompt_has_its_name_and_arguments(prompts, name, messages):
    setting, rows = calling(prompts, messages=messages)
    assert undeclared_tool(rows, setting) == name


def test_no_tool_is_undeclared_without_calls_or_without_a_renderer():
    setting, rows = calling(["Who is it?"])
    assert undeclared_tool(rows, Setting()) == ""
    _, others = answers()
    assert undeclared_tool(others, setting) == ""
    for arguments in ("{no json", "5", "[1]"):  # what a model may write in the place of an object
        setting, rows = calling(["Who is it?"], arguments=arguments)
        assert undeclared_tool(rows, setting) == ""


@pytest.mark.parametrize("messages", [True, False])
def test_calls_of_a_tool_that_no_prompt_declares_name_the_template_where_the_sides_disagree(
    messages,
):
    renderer, episodes = played("chatml", rows=16)
    rows = rows_of(episodes, messages=messages)
    finding = unlike(renderer, rows)
    assert finding.verdict == "information" and "nothing of the tool 'find'" in finding.measured
    moved = rows.with_(rollout_logprobs=(rows.rollout - np.float32(0.3)).astype(np.float32))
    finding = unlike(renderer, moved)
    assert (finding.verdict, finding.cause) == ("differs", "wrong_template")
    assert "16 of 16 prompts" in finding.measured and "'find'" in finding.measured
    sent = tuple((np.array([1], np.int32),) for _ in episodes)
    assert unlike(renderer, moved.with_(engine_prompt_ids=sent)).verdict != "differs"


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
