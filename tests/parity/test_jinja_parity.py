"""The generic renderer on real chat templates: against transformers' way of rendering and encoding
them, and against our renderers that are written by hand."""

import json
from dataclasses import replace
from functools import lru_cache

import pytest
from chat_templates import CHECKED, SEARCH, TEXTS, shipped_ids, template_text
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import tokenizer_of

from lockstep.errors import RendererError
from lockstep.renderers.config import ChatMLConfig, JinjaConfig, Llama3Config
from lockstep.renderers.jinja.formats import CallFormat
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.registry import make_renderer
from lockstep.testing import check_renderer
from lockstep.testing.renderers import DIALOGUES, TOOLS
from lockstep.types import Message, ToolCall

HAND_WRITTEN = {
    "qwen3": ChatMLConfig(thinking="drop"),
    "qwen2_5": ChatMLConfig(variant="qwen2.5"),
    "llama3_2": Llama3Config(),
}
_TAKE_TOOLS = {
    "take tools", "take a tool's reply", "take several replies to one turn", "take an empty reply",
    "take a reply and a user's words",
}  # fmt: skip
HERMES = CallFormat(kind="json", open="<tool_call>", close="</tool_call>")
PROVED = {
    # dialogues that extend exactly, what is refused, how calls are written
    "qwen3": (13, set(), HERMES),
    "qwen2_5": (11, set(), HERMES),
    "llama3_2": (
        10, {"take several replies to one turn"},
        CallFormat(kind="json", arguments_key="parameters", is_single=True),
    ),
    # One call has no end of sentence, and whether the block of outputs was opened is remembered
    # over the whole dialogue; a system message moves to the front.
    "deepseek_v3": (
        4,
        {*_TAKE_TOOLS, "take a system message later on"},
        CallFormat(
            kind="fields",
            head="<\uff5ctool\u2581calls\u2581begin\uff5c>",
            open="<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>",
            between="\n```json\n",
            close="```",
        ),
    ),
    "gemma3": (4, {*_TAKE_TOOLS, "take a system message later on"}, None),
}  # fmt: skip


@lru_cache
def generic(name, thinking="drop", tools="template"):
    return JinjaRenderer(tokenizer_of(name), JinjaConfig(thinking=thinking, tools=tools))


@lru_cache
def by_hand(name):
    return make_renderer(HAND_WRITTEN[name], tokenizer_of(name))


@pytest.mark.parametrize("name", PROVED)
def test_what_is_proved_of_a_template_and_what_is_refused(name):
    num_held, refused, calls = PROVED[name]
    proof = generic(name).proof
    assert len(proof.held) == num_held
    assert set(proof.unsupported) == refused
    assert generic(name).shape.calls == calls
    for reason in proof.unsupported.values():
        assert "dialogue '" in reason or "refuses the dialogue" in reason


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_turn_ends_and_opens_as_in_the_renderer_that_is_written_by_hand(name):
    ours, hand = generic(name), by_hand(name)
    assert set(ours.stop_ids) <= set(hand.stop_ids)
    assert ours.thinking_opening == hand.thinking_opening
    assert ours.stop_ids[0] == hand.stop_ids[0] or name == "llama3_2"


SPELLED = ("two calls",)
"""Arguments in a spelling of the model's own: a template that takes them as objects writes its."""
BY_HAND_ONLY = {
    # The templates have no form for these; the renderers that are written by hand have one.
    "llama3_2": ("several replies", "parallel calls", "words before a call", "unicode"),
    "qwen3": ("unicode",),  # thinking's own line breaks at its edges
    "qwen2_5": (),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_dialogues_are_extended_as_by_the_renderer_that_is_written_by_hand(name):
    ours, hand = generic(name), by_hand(name)
    tools = () if "take tools" in ours.proof.unsupported else TOOLS
    num_compared = 0
    for what, dialogue in DIALOGUES.items():
        has_calls = any(m.role == "tool" or m.tool_calls for m in dialogue)
        is_system_later = any(m.role == "system" for m in dialogue[1:])
        if (
            what in (*BY_HAND_ONLY[name], *SPELLED)
            or (has_calls and not tools)
            or (is_system_later and "take a system message later on" in ours.proof.unsupported)
        ):
            continue
        if ours.shape.thinking is None:
            dialogue = [replace(m, thinking="") for m in dialogue]
        turns = [at for at, message in enumerate(dialogue) if message.role == "assistant"]
        assert ours.render(dialogue[: turns[0]], tools) == hand.render(dialogue[: turns[0]], tools)
        assert ours.render(dialogue, tools) == hand.render(dialogue, tools)
        for at, end in zip(turns, [*turns[1:], len(dialogue)], strict=True):
            after = dialogue[at + 1 : end]
            reply = hand.render_reply(dialogue[at])
            assert ours.render_reply(dialogue[at]) == reply
            assert ours.parse(reply) == hand.parse(reply)
            assert ours.without_thinking(reply) == hand.without_thinking(reply)
            assert ours.forgets(after) == hand.forgets(after)
            for turn in (reply, reply[:-1], reply[: len(reply) // 2], []):
                assert ours.extend(turn, after) == hand.extend(turn, after)
            num_compared += 1
    assert num_compared >= 3


ALTERNATING = st.lists(TEXTS, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1)


@pytest.mark.parametrize("name", PROVED)
@settings(max_examples=300 if PROOF else 25, deadline=None)
@given(texts=ALTERNATING, has_system=st.booleans())
def test_any_prompt_equals_what_transformers_makes_of_it(name, texts, has_system):
    roles = ("user", "assistant")
    messages = [Message(role=roles[at % 2], content=text) for at, text in enumerate(texts)]
    if has_system:
        messages.insert(0, Message(role="system", content="Be brief."))
    dicts = [{"role": m.role, "content": m.content} for m in messages]
    date = {"date_string": "26 Jul 2024"} if name == "llama3_2" else {}
    ids = generic(name).render(messages)
    assert ids == shipped_ids(name, template_text(name, dicts, **date))


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2"])
def test_a_prompt_with_tools_equals_what_transformers_makes_of_it(name):
    call = ToolCall(name=SEARCH.name, arguments='{"keywords": ["Bela"]}')
    messages = [
        Message(role="user", content="Who?"),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", name=SEARCH.name, content="Ciro\n"),
    ]
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    dicts = [
        {"role": "user", "content": "Who?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": SEARCH.name, "content": "Ciro\n"},
    ]
    date = {"date_string": "26 Jul 2024"} if name == "llama3_2" else {}
    text = template_text(name, dicts, [SEARCH], **date)
    assert generic(name).render(messages, [SEARCH]) == shipped_ids(name, text)


@pytest.mark.parametrize("name", PROVED)
@settings(max_examples=2000 if PROOF else 25, deadline=None)
@given(choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=5), cut=st.integers(0, 9))
def test_no_text_becomes_a_control_token(name, choices, cut):
    tokenizer = tokenizer_of(name)
    names = sorted(map(tokenizer.control_name, tokenizer.control_ids))
    text = "".join(names[at % len(names)] for at in choices)
    text = text[cut:] if cut % 2 else text[: len(text) - cut]
    found, plain = (
        [i for i in generic(name).render(messages) if i in tokenizer.control_ids]
        for messages in (
            [
                Message(role="system", content=words),
                Message(role="user", content=words),
                Message(role="assistant", content=words),
                Message(role="user", content=words),
            ]
            for words in (text, "-")
        )
    )
    assert found == plain


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_all_invariants_hold_on_real_tokenizers(name, thinking):
    renderer = generic(name, thinking)
    check_renderer(
        renderer,
        dialogues=CHECKED,
        has_thinking=renderer.shape.thinking is not None,
        num_garbage=20,
    )


def test_what_a_template_has_no_form_for_is_refused_and_not_written_wrong():
    words = Message(
        role="assistant", content="I search.", tool_calls=(ToolCall(name="f", arguments="{}"),)
    )
    with pytest.raises(RendererError, match=r"'I search\.'"):
        generic("llama3_2").render_reply(words)
    with pytest.raises(RendererError, match="leaves out a tool"):
        generic("deepseek_v3").render([Message(role="user", content="Hi")], [SEARCH])
    with pytest.raises(RendererError, match="Conversation roles must alternate"):
        generic("gemma3").render([Message(role="user", content="Hi")] * 2)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("deepseek_v3", "tools as text, schemas in the first system message, results in "),
        ("gemma3", "tools as text, schemas in the first system message, results in user turns"),
    ],
)
def test_a_template_whose_own_form_of_tools_is_not_exact_has_them_as_text(name, line):
    renderer = generic(name, tools="auto")
    assert renderer.tools_line.startswith(line) and "take tools" not in renderer.proof.unsupported
    check_renderer(renderer, dialogues=CHECKED, has_thinking=False, num_garbage=5)
