"""ChatML on a byte tokenizer. Equality with the Qwen3 template: tests/parity."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import written_turns
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RendererError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.renderers import check_renderer
from lockstep.testing.tokenizers import CHATML_TOKENS, byte_tokenizer
from lockstep.types import Message, ToolCall

TOKENIZER = byte_tokenizer()
RENDERER = ChatMLRenderer(TOKENIZER)
CALL = Message(role="assistant", tool_calls=(ToolCall(name="find", arguments='{"q": "x"}'),))
REPLY = Message(role="tool", name="find", content="Bela")
USER = Message(role="user", content="Who?")


def ids_of(text):
    return written_turns.ids_of(TOKENIZER, text)


def parsed(text):
    return RENDERER.parse(ids_of(text))


@pytest.mark.parametrize(
    "config",
    [
        ChatMLConfig(),
        ChatMLConfig(has_empty_thinking=False, tools_in_prompt=False),
        ChatMLConfig(thinking="drop"),
    ],
    ids=["qwen3", "tiny", "drop"],
)
def test_all_invariants_hold(config):
    check_renderer(ChatMLRenderer(TOKENIZER, config))


def test_all_invariants_hold_without_thinking():
    check_renderer(
        ChatMLRenderer(TOKENIZER, ChatMLConfig(enable_thinking=False)), has_thinking=False
    )


def test_the_line_break_behind_the_turn_and_the_replies_of_one_turn_are_observed_together():
    sampled = RENDERER.render_reply(CALL)
    assert TOKENIZER.decode(sampled) == (
        "<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call><|im_end|>'
    )
    assert TOKENIZER.decode(RENDERER.extend(sampled, [REPLY, REPLY])) == (
        "\n<|im_start|>user\n<tool_response>\nBela\n</tool_response>"
        "\n<tool_response>\nBela\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    array = np.array(sampled, dtype=np.int32)
    assert RENDERER.extend(array, [REPLY]) == RENDERER.extend(sampled, [REPLY])
    assert RENDERER.parse(array) == CALL


def test_without_thinking_every_turn_opens_with_a_closed_block():
    renderer = ChatMLRenderer(TOKENIZER, ChatMLConfig(enable_thinking=False))
    opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert TOKENIZER.decode(renderer.render([USER])).endswith(opening)
    reply = renderer.render_reply(replace(CALL, content="I look."))
    assert TOKENIZER.decode(reply).startswith("I look.\n<tool_call>")
    assert TOKENIZER.decode(renderer.extend(reply, [USER])).endswith(opening)
    with pytest.raises(RendererError, match="enable_thinking=False"):
        renderer.render_reply(Message(role="assistant", thinking="Hm."))


def test_thinking_of_a_given_history_is_kept_or_dropped_as_the_config_says():
    history = [USER, Message(role="assistant", thinking="Hm.", content="Bela."), USER]
    for policy, count in (("keep", 1), ("drop", 0)):
        renderer = ChatMLRenderer(TOKENIZER, ChatMLConfig(thinking=policy))
        assert TOKENIZER.decode(renderer.render(history)).count("Hm.") == count


GOOD = {
    "Bela.<|im_end|>": Message(role="assistant", content="Bela."),
    "<|im_end|>": Message(role="assistant"),
    "<think>\nHm.\n</think>\n\nBela.<|im_end|>": Message(
        role="assistant", thinking="Hm.", content="Bela."
    ),
    "<think>Hm.</think>Bela.<|im_end|>": Message(role="assistant", thinking="Hm.", content="Bela."),
    "<think>\n\n\n</think>\n\n\nB<|im_end|>": Message(
        role="assistant", thinking="\n", content="\nB"
    ),
    '<tool_call>{"arguments":{"q":1e3} , "name":"f"}</tool_call><|im_end|>': Message(
        role="assistant", tool_calls=(ToolCall(name="f", arguments='{"q":1e3}'),)
    ),
    'I\n\n<tool_call>\n{"name": "f", "arguments": "\\u00e9"}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": [ ]}\n</tool_call><|im_end|>': Message(
        role="assistant",
        content="I\n",
        tool_calls=(ToolCall(name="f", arguments='"\\u00e9"'), ToolCall(name="g", arguments="[ ]")),
    ),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_turn_is_read_with_the_arguments_as_the_model_wrote_them(text):
    assert parsed(text) == GOOD[text]


def call(text):
    return f"<tool_call>{text}</tool_call>"


BAD, CLOSES = json.loads(Path(__file__).with_suffix(".json").read_text()).values()
"""What is sampled -> (error, content, thinking); what closes it."""
BAD[call("[" * 100_000) + "<|im_end|>"] = ("not JSON", call("[" * 100_000), "")


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40])
def test_a_malformed_turn_says_why_and_keeps_its_text(text):
    error, content, thinking = BAD[text]
    read = parsed(text)
    assert error in read.parse_error
    assert (read.content, read.thinking, read.tool_calls) == (content, thinking, ())


def test_tags_spelled_in_pieces_are_text():
    ids = TOKENIZER.encode(call('{"name": "f", "arguments": {}}')) + ids_of("<|im_end|>")
    read = RENDERER.parse(ids)
    assert read.content == call('{"name": "f", "arguments": {}}')
    assert read.tool_calls == () and read.parse_error == ""


@pytest.mark.parametrize("text", CLOSES)
def test_a_turn_that_was_cut_off_is_closed_where_it_stands(text):
    assert TOKENIZER.decode(RENDERER.extend(ids_of(text), [USER])) == (
        CLOSES[text] + "\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_in_the_wrong_place_are_refused():
    with pytest.raises(RendererError, match="extend was given an assistant message"):
        RENDERER.extend([], [CALL])
    with pytest.raises(RendererError, match="not a user's"):
        RENDERER.render_reply(USER)


def test_a_tokenizer_without_the_control_tokens_is_refused_with_all_their_names():
    with pytest.raises(RendererError) as caught:
        ChatMLRenderer(byte_tokenizer(control_tokens=["<|im_start|>", "<|im_end|>"]))
    for name in CHATML_TOKENS[2:]:
        assert name in str(caught.value).partition("It has")[0]


RUNS = st.one_of(
    st.sampled_from(sorted(TOKENIZER.control_ids)).map(lambda id_: [id_]),
    st.sampled_from(["\n", "\n\n", "x", "\u4e2d", '{"name": "f", "arguments": {}}']).map(
        TOKENIZER.encode
    ),
    st.lists(st.integers(-2, TOKENIZER.vocab_size + 2), max_size=3),
)
ANY_IDS = st.lists(RUNS, max_size=15).map(lambda runs: [id_ for run in runs for id_ in run])


@settings(max_examples=10_000 if PROOF else 300, deadline=None)
@given(ids=ANY_IDS)
def test_parse_never_raises_and_keeps_every_word(ids):
    read = RENDERER.parse(ids)
    kept = "".join([read.content, read.thinking, *[c.name + c.arguments for c in read.tool_calls]])
    for letter in "xz\u4e2d":  # in no control token's name, and no word of a call
        assert kept.count(letter) >= TOKENIZER.decode(ids).count(letter)


@settings(max_examples=3000 if PROOF else 200, deadline=None)
@given(ids=ANY_IDS)
def test_extend_always_leaves_the_turn_closed(ids):
    end, think, think_end = (TOKENIZER.control_id(n) for n in ("<|im_end|>", "<think>", "</think>"))
    path = ids + RENDERER.extend(ids, [])
    tail = RENDERER.extend([end], [])
    assert path[-len(tail) :] == tail
    closed = path[: -len(tail)]
    assert closed[-1] == end
    if think in ids and ids[-1:] != [end]:
        assert max(i for i, t in enumerate(closed) if t == think) < max(
            (i for i, t in enumerate(closed) if t == think_end), default=-1
        )


# -- Qwen2.5 ---------------------------------------------------------------------------------------


def qwen25():
    """Its tokenizer has tokens for calls, and none for thinking and tool replies."""
    tokens = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    return ChatMLRenderer(byte_tokenizer(control_tokens=tokens), ChatMLConfig(variant="qwen2.5"))


def test_qwen25_is_written_as_its_template_writes_it():
    renderer = qwen25()
    begun = renderer.render([USER])
    assert renderer.tokenizer.decode(begun) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    turn = renderer.render_reply(CALL)
    assert renderer.parse(turn) == CALL
    assert renderer.tokenizer.decode(turn + renderer.extend(turn, [REPLY])) == (
        '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nBela\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "You are Qwen" not in renderer.tokenizer.decode(
        renderer.render([Message(role="system", content="Search."), USER])
    )


def test_qwen25_keeps_what_a_renderer_promises_and_refuses_thinking():
    check_renderer(qwen25(), has_thinking=False)
    with pytest.raises(RendererError, match=r"variant=qwen2\.5"):
        qwen25().render_reply(Message(role="assistant", thinking="Hm.", content="It is."))


@pytest.mark.parametrize(
    ("turn", "kept"),
    [
        ("<think>\nHm.\n</think>\n\nBela.<|im_end|>", "Bela.<|im_end|>"),
        ("<think>\nHm.\n</think>Bela.<|im_end|>", "Bela.<|im_end|>"),
        ("<think>\nHm.\n</think>\n\n<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
        ("<think>\nHm.", ""),
        ("<think>\nHm.<|im_end|>", "<|im_end|>"),
        ("<think>\nHm.<tool_call></think>Bela.<|im_end|>", "Bela.<|im_end|>"),
        ("Bela.<think></think><|im_end|>", "Bela.<think></think><|im_end|>"),
        ("", ""),
    ],
)
def test_a_turn_without_its_thinking_keeps_the_other_ids(turn, kept):
    ids = RENDERER.without_thinking(ids_of(turn))
    assert ids == ids_of(kept)
    assert RENDERER.without_thinking(ids) == ids


def test_a_token_that_the_cut_divides_is_written_again_and_a_half_character_is_not():
    tokenizer = byte_tokenizer(merges=[("\u010a", "\u010a"), ("\u010a\u010a", "\u00c3")])
    renderer = ChatMLRenderer(tokenizer)
    block = [tokenizer.control_id("<think>"), tokenizer.control_id("</think>")]
    merged = tokenizer.vocab_size - len(tokenizer.control_ids) - 1  # "\n\n" and half a character
    assert renderer.without_thinking([*block, merged, 0xA9]) == [0xC3, 0xA9]
    assert renderer.without_thinking([*block, merged, 65]) == [merged, 65]


def test_only_the_policy_drop_forgets_and_only_when_a_user_speaks():
    reply = Message(role="tool", name="find", content="Bela")
    wrapped = Message(role="user", content="<tool_response>Bela</tool_response>")
    drop = ChatMLRenderer(TOKENIZER, ChatMLConfig(thinking="drop"))
    assert drop.forgets([reply, USER]) and not drop.forgets([reply, wrapped])
    assert not RENDERER.forgets([USER])
    silent = ChatMLRenderer(TOKENIZER, ChatMLConfig(enable_thinking=False))
    assert TOKENIZER.decode(silent.thinking_opening) == "<think>\n\n</think>\n\n"
    assert RENDERER.thinking_opening == ()
