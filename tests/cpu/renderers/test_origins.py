"""The tokens of a dialogue with their origins, and the prefix property."""

import pytest

from lockstep.errors import RendererError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.origins import trace
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

CALL = ToolCall(name="find", arguments='{"q": "job"}')
DIALOGUE = [
    Message(role="system", content="Search, then answer."),
    Message(role="user", content="user"),  # as the template calls it
    Message(role="assistant", tool_calls=(CALL,)),
    Message(role="tool", name="find", content="<|end|>baker<|im_end|>"),
    Message(role="assistant", content="baker"),
    Message(role="user", content="Sure?"),
]


@pytest.fixture(params=["harmony", "chatml"])
def renderer(request):
    if request.param == "harmony":
        return HarmonyRenderer(byte_tokenizer())
    return ChatMLRenderer(byte_tokenizer(), ChatMLConfig(has_empty_thinking=False))


def test_tokens_of_a_message_spell_what_it_says_and_no_control_token_is_among_them(renderer):
    tokens = trace(renderer, DIALOGUE).tokens
    for at, message in enumerate(DIALOGUE):
        own = [token for token in tokens if token.message == at]
        if message.role != "assistant":
            text = renderer.tokenizer.decode([token.id for token in own])
            assert text == message.content
            assert not any(token.is_control for token in own)
            assert {token.origin for token in own} == {message.role}


def test_replies_are_the_ids_that_a_model_samples_and_what_follows_extends_them(renderer):
    rendering = trace(renderer, DIALOGUE)
    sampled = [t.id for t in rendering.tokens if t.message == 2]
    assert sampled == renderer.render_reply(DIALOGUE[2])
    prompt = rendering.prompts[1]
    assert prompt.before == 4
    expected = [*renderer.render(DIALOGUE[:2]), *sampled, *renderer.extend(sampled, DIALOGUE[3:4])]
    assert prompt.extended_ids == expected
    assert [t.id for t in rendering.tokens] == rendering.prompts[-1].extended_ids


def test_the_prefix_property_is_said_with_the_place_where_it_ends():
    harmony = trace(HarmonyRenderer(byte_tokenizer()), DIALOGUE)
    assert not harmony.has_prefix_property
    assert [prompt.is_same for prompt in harmony.prompts] == [True, False, False]
    assert harmony.prompts[1].first_difference == len(harmony.prompts[0].extended_ids)
    chatml = ChatMLRenderer(byte_tokenizer(), ChatMLConfig(has_empty_thinking=False))
    assert trace(chatml, DIALOGUE).has_prefix_property


def test_a_dialogue_that_ends_with_a_reply_ends_with_its_stop_id(renderer):
    tokens = trace(renderer, DIALOGUE[:3]).tokens
    assert tokens[-1].id in renderer.stop_ids
    assert tokens[-1].origin == "assistant"


def test_a_reply_that_cannot_be_sampled_is_named_by_its_number():
    twice = Message(role="assistant", tool_calls=(CALL, CALL))
    with pytest.raises(RendererError, match=r"message 2: 2\b"):
        trace(HarmonyRenderer(byte_tokenizer()), [*DIALOGUE[:2], twice])
