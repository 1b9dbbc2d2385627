"""Mistral's format on a byte tokenizer. Equality with mistral-common: tests/parity."""

from dataclasses import replace

import pytest
from full_counts import PROOF
from hypothesis import given, settings
from written_turns import any_ids, ids_of

from lockstep.errors import RendererError
from lockstep.renderers.config import MistralConfig
from lockstep.renderers.mistral import LATER_TOKEN, MISTRAL_TOKENS, V7_TOKENS, MistralRenderer
from lockstep.testing.renderers import TOOLS, check_renderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

TOKENIZER = byte_tokenizer(control_tokens=(*MISTRAL_TOKENS, *V7_TOKENS))
V7 = MistralRenderer(TOKENIZER)
V3 = MistralRenderer(byte_tokenizer(control_tokens=MISTRAL_TOKENS))
FIND = ToolCall(name="find", arguments='{"q": "x"}', id="abcDEF123")
CALL = Message(role="assistant", tool_calls=(FIND,))
REPLY = Message(role="tool", name="find", content='Be"la', tool_call_id="abcDEF123")
USER = Message(role="user", content=" Who?\n")
SYSTEM = Message(role="system", content="Hi.")
CALL_TEXT = '{"name": "find", "arguments": {"q": "x"}, "id": "abcDEF123"}'


def shown(renderer, ids):
    return renderer.tokenizer.decode(ids)


@pytest.mark.parametrize("renderer", [V3, V7], ids=["v3", "v7"])
def test_all_invariants_hold(renderer):
    check_renderer(renderer, has_thinking=False)
    untold = MistralConfig(tools_in_prompt=False)
    check_renderer(MistralRenderer(renderer.tokenizer, untold), has_thinking=False)


def test_a_dialogue_is_written_and_extended_in_version_7():
    developer = replace(SYSTEM, role="developer")
    assert shown(V7, V7.render([developer, USER])) == (
        "<s>[SYSTEM_PROMPT]Hi.[/SYSTEM_PROMPT][INST] Who?\n[/INST]"
    )
    turn = V7.render_reply(replace(CALL, content="I look."))
    assert shown(V7, turn) == f"I look.[TOOL_CALLS][{CALL_TEXT}]</s>"
    other = replace(REPLY, content="", tool_call_id="")
    assert shown(V7, V7.extend(turn, [REPLY, other])) == (
        '[TOOL_RESULTS]abcDEF123[TOOL_CONTENT]Be"la[/TOOL_RESULTS]'
        "[TOOL_RESULTS]000000001[TOOL_CONTENT][/TOOL_RESULTS]"
    )
    later = replace(SYSTEM, content="Be brief.")
    assert shown(V7, V7.extend(turn, [later, USER])) == (
        "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST] Who?\n[/INST]"
    )


def test_a_dialogue_is_written_and_extended_in_version_3():
    assert shown(V3, V3.render([SYSTEM, USER, USER])) == (
        "<s>[INST]Hi.\n\n Who?\n\n\n Who?\n[/INST]"
    )
    turn = V3.render_reply(CALL)
    numbers = replace(REPLY, content='{"a":[1,2]}')
    assert shown(V3, V3.extend(turn, [REPLY, numbers, replace(REPLY, content="")])) == (
        '[TOOL_RESULTS]{"content": "Be\\"la", "call_id": "abcDEF123"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": {"a": [1, 2]}, "call_id": "abcDEF123"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": {}, "call_id": "abcDEF123"}[/TOOL_RESULTS]'
    )
    assert shown(V3, V3.extend(turn, [SYSTEM, USER])) == "[INST]Hi.\n\n Who?\n[/INST]"
    assert shown(V3, V3.extend(turn, [REPLY, SYSTEM])).endswith("[/TOOL_RESULTS][INST]Hi.[/INST]")


@pytest.mark.parametrize("renderer", [V3, V7], ids=["v3", "v7"])
def test_tools_stand_before_the_last_user_or_at_the_end(renderer):
    ids = renderer.render([USER, Message(role="assistant", content="Bela. "), USER], TOOLS)
    before, _, rest = shown(renderer, ids).partition("[AVAILABLE_TOOLS]")
    assert before == "<s>[INST] Who?\n[/INST]Bela.</s>"
    listed, _, after = rest.partition("[/AVAILABLE_TOOLS]")
    assert listed.startswith('[{"type": "function", "function": {"name": "find"')
    assert after == "[INST] Who?\n[/INST]"
    alone = shown(renderer, renderer.render([SYSTEM], TOOLS))
    assert alone.count("[AVAILABLE_TOOLS]") == 1 and "Hi." in alone


WORDS = Message(role="assistant", content="I look.")
OTHER = ToolCall(name="g", arguments="[ ]")
GOOD = {
    "Bela.</s>": Message(role="assistant", content="Bela."),
    "</s>": Message(role="assistant"),
    f"[TOOL_CALLS][{CALL_TEXT}]</s>": CALL,
    f'I look.[TOOL_CALLS] [ {CALL_TEXT} ,\n{{"name": "g","arguments": [ ]}}]</s>': replace(
        WORDS, tool_calls=(FIND, OTHER)
    ),
    '[TOOL_CALLS][{"id": "1", "arguments":{"q":1e3},"name": "f"}]</s>': Message(
        role="assistant", tool_calls=(ToolCall(name="f", arguments='{"q":1e3}', id="1"),)
    ),
    f"[{CALL_TEXT}]</s>": Message(role="assistant", content=f"[{CALL_TEXT}]"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_turn_is_read_with_the_arguments_as_the_model_wrote_them(text):
    assert V7.parse(ids_of(TOKENIZER, text)) == GOOD[text]


BAD = {
    "": "the turn is empty",
    "Be": "the turn was cut off",
    '[TOOL_CALLS][{"name": "f"': "the turn was cut off",
    '[TOOL_CALLS][{"name": "f"</s>': "a call is not JSON",
    "x[TOOL_CALLS]</s>": "a call is not JSON",
    "x[TOOL_CALLS][]</s>": "a call is missing",
    f"[TOOL_CALLS]{CALL_TEXT}</s>": "calls are not a JSON list",
    f"[TOOL_CALLS][{CALL_TEXT},]</s>": "a call is not JSON",
    f"[TOOL_CALLS][{CALL_TEXT}] So.</s>": "a call is not JSON",
    '[TOOL_CALLS][{"name": 1, "arguments": {}}]</s>': "name is not a printable text",
    '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": 1}]</s>': "id is not a text",
    '[TOOL_CALLS][{"name": "f", "parameters": {}}]</s>': 'not an object of "name" and "arguments"',
    "a[TOOL_CALLS]b[TOOL_CALLS]c</s>": "[TOOL_CALLS] is out of place",
    "a[INST]b</s>": "[INST] is out of place",
    "a</s>b</s>": "</s> is out of place",
}


@pytest.mark.parametrize("text", BAD)
def test_a_malformed_turn_says_why_and_keeps_its_text(text):
    read = V7.parse(ids_of(TOKENIZER, text))
    assert BAD[text] in read.parse_error
    assert (read.content, read.tool_calls) == (text.removesuffix("</s>"), ())


def test_a_call_that_was_complete_when_the_turn_was_cut_off_counts():
    read = V7.parse(ids_of(TOKENIZER, f"[TOOL_CALLS][{CALL_TEXT}]"))
    assert read.tool_calls == (FIND,) and read.parse_error == "the turn was cut off"
    assert shown(V7, V7.extend(ids_of(TOKENIZER, "Be"), [USER])).startswith("</s>[INST]")


@pytest.mark.parametrize("calls", [(), (FIND,), (FIND, OTHER)], ids=["none", "one", "two"])
@pytest.mark.parametrize("content", ["", "I look. "])
def test_a_reply_is_read_back(calls, content):
    message = Message(role="assistant", content=content, tool_calls=calls)
    assert V7.parse(V7.render_reply(message)) == message


def test_the_version_is_what_the_tokens_say_and_other_ones_are_refused():
    chosen = MistralRenderer(TOKENIZER, MistralConfig(variant="v3"))
    assert shown(chosen, chosen.render([SYSTEM, USER])) == shown(V3, V3.render([SYSTEM, USER]))
    with pytest.raises(RendererError, match=r"\[SYSTEM_PROMPT\], \[/SYS"):
        MistralRenderer(V3.tokenizer, MistralConfig(variant="v7"))
    later = byte_tokenizer(control_tokens=(*MISTRAL_TOKENS, *V7_TOKENS, LATER_TOKEN))
    with pytest.raises(RendererError, match=r"\[ARGS\].*renderer=jinja"):
        MistralRenderer(later)
    with pytest.raises(RendererError) as caught:
        MistralRenderer(byte_tokenizer())
    assert all(name in str(caught.value) for name in MISTRAL_TOKENS)
    with pytest.raises(RendererError, match="format of mistral has no place for it"):
        V7.render_reply(Message(role="assistant", thinking="Hm."))


@settings(max_examples=10_000 if PROOF else 300, deadline=None)
@given(ids=any_ids(TOKENIZER, f"[{CALL_TEXT}]", '[{"name": "f"', ","))
def test_parse_never_raises_and_keeps_every_word(ids):
    read = V7.parse(ids)
    kept = read.content + "".join(call.name + call.arguments for call in read.tool_calls)
    assert kept.count("\u4e2d") >= TOKENIZER.decode(ids).count("\u4e2d")
