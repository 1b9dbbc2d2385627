"""Harmony on a byte tokenizer. Equality with openai-harmony: tests/parity."""

import json
from pathlib import Path

import numpy as np
import pytest
import written_turns
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RendererError
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HARMONY_TOKENS, HarmonyRenderer
from lockstep.testing.renderers import DIALOGUES, TOOLS, check_renderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

TOKENIZER = byte_tokenizer()
COMPACT = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
RENDERER = HarmonyRenderer(TOKENIZER, COMPACT)
CALL = Message(role="assistant", tool_calls=(ToolCall(name="find", arguments='{"q": "x"}'),))
REPLY = Message(role="tool", name="find", content="Bela")


def ids_of(text):
    return written_turns.ids_of(TOKENIZER, text)


def parsed(text, renderer=RENDERER):
    return renderer.parse(ids_of(text))


@pytest.mark.parametrize(
    "config",
    [COMPACT, HarmonyConfig(), HarmonyConfig(thinking="drop", developer_heading=False)],
    ids=["compact", "gpt-oss", "drop"],
)
def test_all_invariants_hold(config):
    check_renderer(HarmonyRenderer(TOKENIZER, config))


def test_compact_prompt_is_the_developers_words_the_users_words_and_an_opening():
    developer = Message(role="developer", content="Search, then answer.")
    ids = RENDERER.render([developer, Message(role="user", content="Who?")], TOOLS)
    assert TOKENIZER.decode(ids) == (
        "<|start|>developer<|message|>Search, then answer.<|end|>"
        "<|start|>user<|message|>Who?<|end|><|start|>assistant"
    )


def test_tool_reply_goes_from_the_function_to_the_assistant():
    sampled = RENDERER.render_reply(CALL)
    assert TOKENIZER.decode(RENDERER.extend(sampled, [REPLY])) == (
        "<|start|>functions.find to=assistant<|channel|>commentary<|message|>Bela<|end|>"
        "<|start|>assistant"
    )
    assert RENDERER.extend(np.array(sampled, dtype=np.int32), [REPLY]) == RENDERER.extend(
        sampled, [REPLY]
    )


GOOD, BAD, BAD_CALLS, CLOSES = json.loads(Path(__file__).with_suffix(".json").read_text()).values()
"""What is sampled -> the arguments of its call; (error, content, thinking); the error; what closes
it."""


@pytest.mark.parametrize("text", GOOD)
def test_a_call_is_read_however_its_header_is_spelled(text):
    assert parsed(text) == Message(
        role="assistant", tool_calls=(ToolCall(name="find", arguments=GOOD[text]),)
    )


def test_several_messages_of_one_turn_are_read_into_one():
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        " to=functions.find<|channel|>commentary<|message|>{}<|call|>"
    )
    assert parsed(text) == Message(
        role="assistant",
        thinking="One.\nTwo.",
        content="I look.",
        tool_calls=(ToolCall(name="find", arguments="{}"),),
    )


A = "<|channel|>analysis<|message|>Hm.<|end|>"
F = "<|channel|>final<|message|>Bela.<|return|>"


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_turn_says_why_and_keeps_its_text(text):
    error, content, thinking = BAD[text]
    read = parsed(text)
    assert error in read.parse_error
    assert (read.content, read.thinking, read.tool_calls) == (content, thinking, ())


@pytest.mark.parametrize("text", BAD_CALLS)
def test_a_malformed_call_is_no_call(text):
    read = parsed(text)
    assert BAD_CALLS[text] in read.parse_error
    assert read.tool_calls == () and read.content == text


@pytest.mark.parametrize("text", CLOSES)
def test_a_turn_that_was_cut_off_is_closed_where_it_stands(text):
    ids = RENDERER.extend(ids_of(text), [Message(role="user", content="Go on.")])
    assert TOKENIZER.decode(ids) == (
        CLOSES[text] + "<|start|>user<|message|>Go on.<|end|><|start|>assistant"
    )


def test_a_turn_cut_inside_a_character_keeps_its_bytes_and_is_closed():
    sampled = ids_of("<|channel|>final<|message|>") + TOKENIZER.encode("\u4e2d")[:2]
    assert RENDERER.extend(sampled, [])[0] == TOKENIZER.control_id("<|end|>")
    assert RENDERER.parse(sampled).content == "\ufffd"


# -- stopping, and what cannot be written ------------------------------------------------------


def test_a_turn_ends_with_call_or_return_and_on_request_with_end():
    call, end, done = (TOKENIZER.control_id(f"<|{name}|>") for name in ("call", "end", "return"))
    assert RENDERER.stop_ids == (call, done)
    renderer = HarmonyRenderer(TOKENIZER, HarmonyConfig(stop_at_end=True))
    assert renderer.stop_ids == (call, done, end)
    assert parsed("<|channel|>final<|message|>Bela.<|end|>", renderer).parse_error == ""
    assert "tokens follow" in parsed(A + "<|start|>assistant" + F, renderer).parse_error
    with pytest.raises(RendererError, match=r"stop_at_end.*\b2\b"):
        renderer.render_reply(Message(role="assistant", thinking="Hm.", content="Bela."))
    simple = {"full cycle": DIALOGUES["full cycle"], "unicode": DIALOGUES["unicode"]}
    check_renderer(renderer, has_thinking=False, dialogues=simple)


def test_two_calls_are_history_but_never_one_sampled_turn():
    twice = Message(role="assistant", tool_calls=CALL.tool_calls * 2)
    assert TOKENIZER.decode(RENDERER.render([twice])).count("<|call|>") == 2
    with pytest.raises(RendererError, match="2 calls in one message"):
        RENDERER.render_reply(twice)


def test_messages_in_the_wrong_place_are_refused():
    with pytest.raises(RendererError, match="extend was given an assistant message"):
        RENDERER.extend([], [CALL])
    with pytest.raises(RendererError, match="not a tool's"):
        RENDERER.render_reply(REPLY)


def test_a_tokenizer_without_the_control_tokens_is_refused_with_all_their_names():
    with pytest.raises(RendererError) as caught:
        HarmonyRenderer(byte_tokenizer(control_tokens=["<|start|>", "<|end|>"]), COMPACT)
    for name in HARMONY_TOKENS:
        is_missing = name not in ("<|start|>", "<|end|>")
        assert (name in str(caught.value).partition("It has")[0]) == is_missing


# -- any ids ----------------------------------------------------------------------------------

CONTROL = st.sampled_from(sorted(TOKENIZER.control_ids))
WORDS = st.sampled_from([" to=functions.f", "final", "analysis", "assistant", "json", "\u4e2d"])
RUNS = st.one_of(
    CONTROL.map(lambda id_: [id_]),
    WORDS.map(TOKENIZER.encode),
    st.lists(st.integers(-2, TOKENIZER.vocab_size + 2), max_size=3),
)
ANY_IDS = st.lists(RUNS, max_size=15).map(lambda runs: [id_ for run in runs for id_ in run])


@settings(max_examples=10_000 if PROOF else 300, deadline=None)
@given(ids=ANY_IDS)
def test_parse_never_raises_and_extend_always_leaves_the_turn_closed(ids):
    read = RENDERER.parse(ids)
    assert read.role == "assistant"
    path = ids + RENDERER.extend(ids, [])
    closers = [TOKENIZER.control_id(f"<|{name}|>") for name in ("end", "call", "return")]
    opening = RENDERER.extend(ids_of(F), [])
    assert path[-len(opening) :] == opening and path[-len(opening) - 1] in closers


@settings(max_examples=5000 if PROOF else 200, deadline=None)
@given(ids=ANY_IDS)
def test_what_is_malformed_keeps_every_word_of_every_message(ids):
    read = RENDERER.parse(ids)
    kept = "\n".join([read.content, read.thinking, *(c.arguments for c in read.tool_calls)])
    message = TOKENIZER.control_id("<|message|>")
    for at, id_ in enumerate(ids):
        if id_ != message:
            continue
        body = ids[at + 1 :]
        end = next((n for n, i in enumerate(body) if i in TOKENIZER.control_ids), len(body))
        assert TOKENIZER.decode(body[:end]) in kept


def test_work_grows_linearly_over_128_turns():
    tokenizer = byte_tokenizer()
    renderer = HarmonyRenderer(tokenizer, COMPACT)
    renderer.render([Message(role="user", content="Who?")])
    sampled = renderer.render_reply(CALL)
    costs = []
    for _ in range(128):
        before = tokenizer.num_encoded
        renderer.extend(sampled, [REPLY])
        costs.append(tokenizer.num_encoded - before)
    text = "functions.find to=assistant" + "commentary" + "Bela" + "assistant"
    assert costs == [len(text)] * 128


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("turn", "kept"),
    [
        (ANALYSIS + "<|channel|>final<|message|>B.<|return|>", None),
        (ANALYSIS * 2 + " to=functions.find<|channel|>commentary<|message|>{}<|call|>", None),
        (
            "<|channel|>commentary<|message|>A<|end|><|start|>assistant" + ANALYSIS + "<|channel|>",
            "<|channel|>commentary<|message|>A<|end|><|start|>assistant<|channel|>",
        ),
        ("<|channel|>analysis<|message|>Hm", ""),
        ("<|channel|>analysis", "<|channel|>analysis"),
        ("Bela", "Bela"),
        ("", ""),
    ],
)
def test_a_turn_without_its_analysis_keeps_the_other_ids(turn, kept):
    kept = turn.replace(ANALYSIS, "") if kept is None else kept
    ids = RENDERER.without_thinking(ids_of(turn))
    assert TOKENIZER.decode(ids) == kept and ids == ids_of(kept)
    assert RENDERER.without_thinking(ids) == ids
