"""Our renderers against the package `renderers` 0.1.12, on real tokenizers: first prompts, what is
appended to a turn, and turns that were cut off. `make test-renderers` runs this where it is not
installed.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
from chat_templates import ANSWER, CALL, MORE, QUESTION, REPLY, SEARCH, SYSTEM, TEXTS, function_of
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import shipped_tokenizer_of, tokenizer_of

from lockstep.renderers.config import ChatMLConfig, Llama3Config
from lockstep.renderers.registry import make_renderer
from lockstep.types import Message

configs = pytest.importorskip(  # by a module of it: a folder of our tests has the package's name
    "renderers.configs",
    reason="renderers 0.1.12 is not installed: make test-renderers",
    exc_type=ImportError,
)
import renderers  # noqa: E402

FORMATS = {
    "qwen3": (ChatMLConfig(), configs.Qwen3RendererConfig(thinking_retention="all")),
    "llama3_2": (Llama3Config(), configs.Llama3RendererConfig()),
}


class TheirTokenizer:
    """What the package asks of a tokenizer, on the tokenizers library."""

    unk_token_id = None
    eos_token_id = None

    def __init__(self, name):
        self.name_or_path = name
        self._fast = shipped_tokenizer_of(name)

    def encode(self, text, **_):
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens=False, **_):
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self._fast.token_to_id(tokens)
        return [self._fast.token_to_id(token) for token in tokens]


@lru_cache
def pair(name):
    """(ours, theirs)."""
    ours, theirs = FORMATS[name]
    made = make_renderer(ours, tokenizer_of(name))
    return made, renderers.create_renderer(TheirTokenizer(name), theirs)


def their_dict(message):
    out = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        out["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return out


def their_prompt(name, messages, tools=()):
    return pair(name)[1].render_ids(
        [their_dict(m) for m in messages],
        tools=[function_of(tool) for tool in tools] or None,
        add_generation_prompt=True,
    )


def their_extension(name, prompt, sampled, messages):
    """What they put behind the turn; they give the whole path."""
    dicts = [their_dict(m) for m in messages]
    bridged = pair(name)[1].bridge_to_next_turn(prompt, sampled, dicts)
    path = list(prompt) + list(sampled)
    assert bridged.token_ids[: len(path)] == path
    return bridged.token_ids[len(path) :]


FOLLOW_UPS = {
    "a user": [MORE],
    "two users": [MORE, QUESTION],
    "one reply": [REPLY],
    "two replies": [REPLY, replace(REPLY, content="Nothing.")],
    "an empty reply": [replace(REPLY, content="")],
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("begun", [[QUESTION], [SYSTEM, QUESTION]], ids=["user", "system"])
def test_first_prompts_are_equal(name, begun):
    ours = pair(name)[0]
    assert ours.render(begun) == their_prompt(name, begun)
    assert ours.render(begun, [SEARCH]) == their_prompt(name, begun, [SEARCH])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("what", FOLLOW_UPS)
def test_what_follows_a_turn_is_equal_whole_or_cut_off(name, what):
    ours = pair(name)[0]
    turn = CALL if "reply" in what or "replies" in what else ANSWER
    prompt, sampled = ours.render([SYSTEM, QUESTION]), ours.render_reply(turn)
    for ids in (sampled, sampled[:-1], sampled[: len(sampled) // 2]):
        assert ours.extend(ids, FOLLOW_UPS[what]) == their_extension(
            name, prompt, ids, FOLLOW_UPS[what]
        )


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_equal(name):
    ours, theirs = pair(name)
    read = theirs.parse_response(ours.render_reply(CALL), tools=[function_of(SEARCH)])
    (call,) = read.tool_calls
    assert call.name == CALL.tool_calls[0].name
    assert call.arguments == {"keywords": ["Bela"]}


TURNS = TEXTS.map(lambda text: Message(role="assistant", content=text.strip()))
OTHERS = TEXTS.map(lambda text: Message(role="user", content=text))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=1000 if PROOF else 50, deadline=None)
@given(path=st.lists(st.tuples(OTHERS, TURNS), max_size=4), last=OTHERS)
def test_any_dialogue_is_equal_piece_by_piece(name, path, last):
    ours = pair(name)[0]
    users = [user for user, _ in path] + [last]
    ids = ours.render([SYSTEM, users[0]])
    assert ids == their_prompt(name, [SYSTEM, users[0]])
    for (_, turn), user in zip(path, users[1:], strict=True):
        sampled = ours.render_reply(turn)
        extension = ours.extend(sampled, [user])
        assert extension == their_extension(name, ids, sampled, [user])
        ids = ids + sampled + extension


def test_theirs_takes_text_for_control_tokens_and_ours_does_not():
    for name in FORMATS:
        ours = pair(name)[0]
        hostile = ours.tokenizer.control_name(ours.stop_ids[0])
        message = replace(QUESTION, content=f"a{hostile}b")
        stops = [
            sum(id_ == ours.stop_ids[0] for id_ in ids)
            for ids in (ours.render([message]), their_prompt(name, [message]))
        ]
        assert stops[1] == stops[0] + 1
