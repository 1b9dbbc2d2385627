"""Our ChatML, variant=qwen2.5, against the chat template that Qwen2.5 ships, on its tokenizer."""

import json
from dataclasses import replace
from functools import lru_cache

import pytest
from chat_templates import (
    ANSWER,
    CALL,
    MORE,
    OTHERS,
    QUESTION,
    REPLY,
    SEARCH,
    SYSTEM,
    TEXTS,
    check_pieces,
    shipped_ids,
    template_text,
    their_dict,
)
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import tokenizer_of

from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.renderers import check_renderer
from lockstep.types import Message, ToolCall

TWO = replace(CALL, content="I search.", tool_calls=CALL.tool_calls * 2)
DIALOGUES = {
    "simple": [SYSTEM, QUESTION],
    "no system": [QUESTION],
    "empty system": [replace(SYSTEM, content=""), QUESTION],
    "full cycle": [SYSTEM, QUESTION, CALL, REPLY, ANSWER, MORE],
    "two calls, two replies": [QUESTION, TWO, REPLY, replace(REPLY, content="")],
    "replies, then a user": [QUESTION, TWO, REPLY, REPLY, MORE],
    "later system": [QUESTION, ANSWER, SYSTEM, MORE],
    "no user": [SYSTEM, ANSWER],
}


@lru_cache
def renderer():
    return ChatMLRenderer(tokenizer_of("qwen2_5"), ChatMLConfig(variant="qwen2.5"))


def their_ids(messages, tools=()):
    dicts = [their_dict(m) for m in messages]
    return shipped_ids("qwen2_5", template_text("qwen2_5", dicts, tools))


@pytest.mark.parametrize("tools", [(), (SEARCH,), (SEARCH, SEARCH)], ids=["0", "1", "2"])
@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_first_prompt_equals_the_template(dialogue, tools):
    assert renderer().render(DIALOGUES[dialogue], tools) == their_ids(DIALOGUES[dialogue], tools)


CALLS = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers()), max_size=2).map(
    lambda arguments: ToolCall(name="f", arguments=json.dumps(arguments, ensure_ascii=False))
)
TURNS = st.builds(
    lambda content, calls: Message(role="assistant", content=content, tool_calls=tuple(calls)),
    # A line break at the beginning would merge with the opening's, which a model never sees.
    TEXTS.map(str.strip),
    st.lists(CALLS, max_size=2),
)


@settings(max_examples=3000 if PROOF else 100, deadline=None)
@given(
    begun=st.lists(OTHERS, min_size=1, max_size=3),
    path=st.lists(st.tuples(TURNS, st.lists(OTHERS, min_size=1, max_size=3)), max_size=4),
    has_tools=st.booleans(),
)
def test_any_dialogue_equals_the_template_written_whole_and_piece_by_piece(begun, path, has_tools):
    tools = (SEARCH,) if has_tools else ()
    check_pieces(renderer(), begun, path, tools, their_ids)


def test_all_invariants_hold_on_the_real_tokenizer():
    check_renderer(renderer(), has_thinking=False)
