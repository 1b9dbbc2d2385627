"""Llama 3 on a byte tokenizer. Equality with its chat template: tests/parity."""

from dataclasses import replace

import pytest
from full_counts import PROOF
from hypothesis import given, settings
from written_turns import any_ids, ids_of

from lockstep.errors import RendererError
from lockstep.renderers.config import Llama3Config
from lockstep.renderers.llama3 import LLAMA3_TOKENS, Llama3Renderer
from lockstep.testing.renderers import TOOLS, check_renderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

TOKENIZER = byte_tokenizer(control_tokens=LLAMA3_TOKENS)
RENDERER = Llama3Renderer(TOKENIZER)
FIND = ToolCall(name="find", arguments='{"q": "x"}')
CALL = Message(role="assistant", tool_calls=(FIND,))
REPLY = Message(role="tool", name="find", content='Be"la')
USER = Message(role="user", content=" Who?\n")
CALL_TEXT = '{"name": "find", "parameters": {"q": "x"}}'


def shown(ids):
    """With the header tokens written short."""
    text = TOKENIZER.decode(ids)
    return text.replace("<|start_header_id|>", "[").replace("<|end_header_id|>\n\n", "]")


@pytest.mark.parametrize(
    "config",
    [
        Llama3Config(),
        Llama3Config(current_date="", tools_in_prompt=False, tool_replies="text"),
        Llama3Config(tools_in_user_message=False),
    ],
    ids=["template", "llama 3.0", "tools in the system message"],
)
def test_all_invariants_hold(config):
    check_renderer(Llama3Renderer(TOKENIZER, config), has_thinking=False)


def test_a_dialogue_is_written_and_extended():
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    assert shown(RENDERER.render([Message(role="developer", content=" Hi. "), USER])) == (
        f"<|begin_of_text|>[system]{dates}Hi.<|eot_id|>[user]Who?<|eot_id|>[assistant]"
    )
    turn = RENDERER.render_reply(CALL)
    assert shown(turn) == f"{CALL_TEXT}<|eot_id|>"
    assert shown(RENDERER.extend(turn, [REPLY, replace(REPLY, content="")])) == (
        '[ipython]"Be\\"la"<|eot_id|>[ipython]""<|eot_id|>[assistant]'
    )
    later = Message(role="system", content="Be brief.")
    assert shown(RENDERER.extend(turn, [later, USER])) == (
        "[system]Be brief.<|eot_id|>[user]Who?<|eot_id|>[assistant]"
    )


def test_tools_stand_in_the_first_user_message_or_in_the_system_message():
    system, user = shown(RENDERER.render([USER], TOOLS)).split("[user]")
    assert "Environment: ipython" in system and '"name": "find"' in user
    inside = Llama3Renderer(TOKENIZER, Llama3Config(tools_in_user_message=False))
    system, user = shown(inside.render([USER], TOOLS)).split("[user]")
    assert '"name": "find"' in system and user == "Who?<|eot_id|>[assistant]"
    with pytest.raises(RendererError, match="first user message"):
        RENDERER.render([Message(role="system", content="x")], TOOLS)
    with pytest.raises(RendererError, match="found assistant"):
        RENDERER.render([CALL], TOOLS)


def test_the_dates_can_be_set_and_left_out_together():
    text = shown(Llama3Renderer(TOKENIZER, Llama3Config(current_date="1 Jan 2030")).render([USER]))
    assert "Knowledge Date: December 2023\nToday Date: 1 Jan 2030\n" in text
    without = Llama3Renderer(TOKENIZER, Llama3Config(current_date=""))
    assert shown(without.render([USER])).startswith("<|begin_of_text|>[user]")


WORDS = Message(role="assistant", content="I look.")
OTHER = ToolCall(name="g", arguments="[ ]")
GOOD = {
    "Bela.<|eot_id|>": Message(role="assistant", content="Bela."),
    "<|eot_id|>": Message(role="assistant"),
    "Bela.<|end_of_text|>": Message(role="assistant", content="Bela."),
    f"{CALL_TEXT}<|eot_id|>": CALL,
    f"\n {CALL_TEXT}\n<|eom_id|>": CALL,
    f"<|python_tag|>{CALL_TEXT}<|eom_id|>": CALL,
    '{"type": "function", "name": "f", "parameters":{"q":1e3}}<|eot_id|>': Message(
        role="assistant", tool_calls=(ToolCall(name="f", arguments='{"q":1e3}'),)
    ),
    f'I look.<|python_tag|>{CALL_TEXT}; {{"name": "g", "parameters": [ ]}}<|eom_id|>': replace(
        WORDS, tool_calls=(FIND, OTHER)
    ),
    '{"name": "Bela", "age": 3}<|eot_id|>': Message(
        role="assistant", content='{"name": "Bela", "age": 3}'
    ),
    '{"q": <|eot_id|>': Message(role="assistant", content='{"q": '),
    f"So: {CALL_TEXT}<|eot_id|>": Message(role="assistant", content=f"So: {CALL_TEXT}"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_turn_is_read_with_the_arguments_as_the_model_wrote_them(text):
    assert RENDERER.parse(ids_of(TOKENIZER, text)) == GOOD[text]


BAD = {
    "": "the turn is empty",
    "Be": "the turn was cut off",
    '{"name": "f", "parameters": {': "the turn was cut off",
    '{"name": "f", "parameters": {<|eot_id|>': "a call is not JSON",
    "<|python_tag|>print(1)<|eom_id|>": "a call is not JSON",
    "x<|python_tag|><|eom_id|>": "a call is missing",
    f"<|python_tag|>{CALL_TEXT} {CALL_TEXT}<|eom_id|>": "stands between calls that is not ;",
    '<|python_tag|>{"name": 1, "parameters": {}}<|eom_id|>': "name is not a printable text",
    "<|python_tag|>[]<|eom_id|>": 'not an object of "name" and "parameters"',
    "a<|python_tag|>b<|python_tag|>c<|eom_id|>": "<|python_tag|> is out of place",
    "a<|eot_id|>b<|eot_id|>": "<|eot_id|> is out of place",
    "Bela.<|eom_id|>": "<|eom_id|> ends a turn that calls nothing",
}


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_turn_says_why_and_keeps_its_text(text):
    read = RENDERER.parse(ids_of(TOKENIZER, text))
    assert BAD[text] in read.parse_error
    for stop in ("<|eot_id|>", "<|eom_id|>"):
        text = text.removesuffix(stop)
    assert (read.content, read.tool_calls) == (text, ())


def test_a_call_that_was_complete_when_the_turn_was_cut_off_counts():
    read = RENDERER.parse(ids_of(TOKENIZER, CALL_TEXT))
    assert read.tool_calls == (FIND,) and read.parse_error == "the turn was cut off"


@pytest.mark.parametrize("calls", [(FIND,), (FIND, OTHER)], ids=["one", "two"])
@pytest.mark.parametrize("content", ["", "I look."])
def test_a_reply_is_read_back(calls, content):
    message = Message(role="assistant", content=content, tool_calls=calls)
    assert RENDERER.parse(RENDERER.render_reply(message)) == message


UNREADABLE = {
    "words that are a call": Message(role="assistant", content=CALL_TEXT),
    "arguments that are no JSON": Message(
        role="assistant", tool_calls=(ToolCall(name="f", arguments="{"),)
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_reply_that_would_be_read_as_another_is_refused(what):
    with pytest.raises(RendererError, match="another message"):
        RENDERER.render_reply(UNREADABLE[what])


def test_thinking_and_messages_in_the_wrong_place_are_refused():
    with pytest.raises(RendererError, match="llama3"):
        RENDERER.render_reply(Message(role="assistant", thinking="Hm."))
    with pytest.raises(RendererError, match="extend was given an assistant message"):
        RENDERER.extend([], [CALL])
    with pytest.raises(RendererError, match="not a user's"):
        RENDERER.render_reply(USER)


@pytest.mark.parametrize("text", ["", "Be", "<|python_tag|>{", "Bela.<|eot_id|>", "<|eom_id|>"])
def test_a_turn_that_was_cut_off_is_closed_where_it_stands(text):
    close = "" if text.endswith(("<|eot_id|>", "<|eom_id|>")) else "<|eot_id|>"
    assert shown(RENDERER.extend(ids_of(TOKENIZER, text), [USER])) == (
        close + "[user]Who?<|eot_id|>[assistant]"
    )


def test_a_tokenizer_without_the_control_tokens_is_refused_with_all_their_names():
    with pytest.raises(RendererError) as caught:
        Llama3Renderer(byte_tokenizer())
    for name in LLAMA3_TOKENS:
        assert name in str(caught.value).partition("It has")[0]


@settings(max_examples=10_000 if PROOF else 300, deadline=None)
@given(ids=any_ids(TOKENIZER, CALL_TEXT, '{"name": "f"', ";"))
def test_parse_never_raises_and_keeps_every_word(ids):
    read = RENDERER.parse(ids)
    kept = read.content + "".join(call.name + call.arguments for call in read.tool_calls)
    assert kept.count("\u4e2d") >= TOKENIZER.decode(ids).count("\u4e2d")
    assert not RENDERER.forgets([USER])
    assert RENDERER.without_thinking(ids) == ids
