"""Our Mistral against mistral-common, whose tokenizers the models were trained with. `make
test-renderers` runs this where it is not installed.

Where mistral-common has a form, ours is equal id for id. DIFFERENCES lists where it has none.
"""

import json
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
from chat_templates import (
    ANSWER,
    CALL,
    CHECKED,
    MORE,
    QUESTION,
    REPLY,
    SEARCH,
    SYSTEM,
    TEXTS,
    function_of,
    template_of,
)
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.renderers.config import MistralConfig
from lockstep.renderers.mistral import MISTRAL_TOKENS, V7_TOKENS, MistralRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.renderers import check_renderer
from lockstep.types import Message, ToolCall

pytest.importorskip(
    "mistral_common", reason="mistral-common 1.13.1 is not installed: make test-renderers"
)
from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.protocol.instruct.normalize import (
    InstructRequestNormalizer,
    InstructRequestNormalizerV7,
)
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, TokenizerVersion
from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV3, InstructTokenizerV7
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

VARIANTS = ("v3", "v7")
FIRST, SECOND = "abcDEF123", "000000007"
TOLD = replace(CALL, tool_calls=tuple(replace(call, id=FIRST) for call in CALL.tool_calls))
FOUND = replace(REPLY, tool_call_id=FIRST)
TWO = replace(TOLD, tool_calls=(*TOLD.tool_calls, replace(TOLD.tool_calls[0], id=SECOND)))
ALSO = replace(REPLY, content='{"a":\n[1, "\u00e9"]}', tool_call_id=SECOND)
DIALOGUES = {
    "simple": [SYSTEM, QUESTION],
    "no system": [QUESTION],
    "tool call": [SYSTEM, QUESTION, TOLD, FOUND],
    "full cycle": [SYSTEM, QUESTION, TOLD, FOUND, ANSWER],
    "two cycles": [QUESTION, TOLD, FOUND, replace(TOLD), FOUND],
    "several results": [SYSTEM, QUESTION, TWO, FOUND, ALSO],
    "an empty result": [QUESTION, TOLD, replace(FOUND, content="")],
    "two users": [SYSTEM, QUESTION, MORE],
    "several turns": [SYSTEM, QUESTION, ANSWER, MORE],
    "spaces around": [replace(SYSTEM, content="\n x\t"), replace(QUESTION, content=" \n Hi\n\n")],
    "two systems": [SYSTEM, replace(SYSTEM, content="Be brief."), QUESTION],
}


@lru_cache
def tekken():
    """Their vocabulary of NeMo; that of Mistral Small 2501 has the same control tokens."""
    return MistralTokenizer.v3(is_tekken=True).instruct_tokenizer.tokenizer


@lru_cache
def theirs(variant):
    """What makes of a request what is written, and what writes it. The checks before them refuse
    more than the format does."""
    if variant == "v3":
        return InstructRequestNormalizer.normalizer(), InstructTokenizerV3(tekken())
    return InstructRequestNormalizerV7.normalizer(), InstructTokenizerV7(tekken())


@lru_cache
def tokenizer():
    num_control, size = tekken().num_special_tokens, tekken().n_words
    return Tokenizer(
        lambda text: tekken().encode(text, bos=False, eos=False),
        text_tokens={
            id_: tekken().id_to_byte_piece(id_, SpecialTokenPolicy.KEEP)
            for id_ in range(num_control, size)
        },
        control_tokens={tekken().id_to_piece(id_): id_ for id_ in range(num_control)},
        where="tekken",
    )


@lru_cache
def renderer(variant):
    return MistralRenderer(tokenizer(), MistralConfig(variant=variant))


def their_dict(message):
    out = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        out |= {"name": message.name, "tool_call_id": message.tool_call_id}
    return out


def their_ids(variant, messages, tools=()):
    normalizer, instruct = theirs(variant)
    request = ChatCompletionRequest(
        messages=[their_dict(message) for message in messages],
        tools=[function_of(tool) for tool in tools] or None,
    )
    return instruct.encode_instruct(normalizer.from_chat_completion_request(request)).tokens


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tools", [(), (SEARCH,), (SEARCH, SEARCH)], ids=["0", "1", "2"])
@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_first_prompt_equals_theirs(dialogue, tools, variant):
    ids = renderer(variant).render(DIALOGUES[dialogue], tools)
    expected = their_ids(variant, DIALOGUES[dialogue], tools)
    assert tokenizer().decode(ids) == tokenizer().decode(expected)
    assert ids == expected


def test_the_text_equals_that_of_the_chat_template_that_they_write_for_the_version():
    """Theirs for the models on the hub, whose own templates differ from each other in spaces."""
    for variant, name in product(VARIANTS, DIALOGUES):
        template = generate_chat_template(
            spm=False,
            tokenizer_version=TokenizerVersion(variant),
            image_support=False,
            audio_support=False,
            thinking_support=False,
            default_system_prompt=None,
            plain_thinking_support=False,
            use_special_token_variables=False,
            model_settings_fields=None,
            reasoning_effort_values=None,
            reasoning_effort_default=None,
        )
        text = template_of(template).render(
            messages=[their_dict(message) for message in DIALOGUES[name]],
            tools=[function_of(SEARCH)],
        )
        ids = renderer(variant).render(DIALOGUES[name], [SEARCH])
        # In version 3 they write a result that is JSON as a value, and their template as a text.
        is_equal = variant == "v7" or name not in ("several results", "an empty result")
        assert (tokenizer().decode(ids) == text) == is_equal, (variant, name)


FIELDS = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(), st.none()), max_size=2)
ARGUMENTS = FIELDS.map(lambda fields: json.dumps(fields, ensure_ascii=False))
CALL_IDS = st.text("aZ09", min_size=9, max_size=9)
CALLS = st.builds(ToolCall, name=st.just("f"), arguments=ARGUMENTS, id=CALL_IDS)
TURNS = st.lists(CALLS, min_size=1, max_size=3).map(
    lambda calls: Message(role="assistant", tool_calls=tuple(calls))
)
RESULTS = st.lists(st.one_of(TEXTS, ARGUMENTS), min_size=1, max_size=3)


def results_of(turn, texts):
    ids = [turn.tool_calls[at % len(turn.tool_calls)].id for at in range(len(texts))]
    return [
        Message(role="tool", name="f", content=text, tool_call_id=id_)
        for text, id_ in zip(texts, ids, strict=True)
    ]


@settings(max_examples=3000 if PROOF else 100, deadline=None)
@given(
    variant=st.sampled_from(VARIANTS),
    words=st.tuples(TEXTS, TEXTS),
    path=st.lists(st.tuples(TURNS, RESULTS), max_size=4),
    has_tools=st.booleans(),
)
def test_any_use_of_tools_equals_theirs_written_whole_and_piece_by_piece(
    variant, words, path, has_tools
):
    tools, ours = (SEARCH,) if has_tools else (), renderer(variant)
    whole = [replace(SYSTEM, content=words[0]), replace(QUESTION, content=words[1])]
    ids = ours.render(whole, tools)
    assert ids == their_ids(variant, whole, tools)
    for turn, texts in path:
        sampled, results = ours.render_reply(turn), results_of(turn, texts)
        assert ours.parse(sampled) == turn
        ids += sampled + ours.extend(sampled, results)
        whole += [turn, *results]
    assert ids == ours.render(whole, tools) == their_ids(variant, whole, tools)


def test_words_beside_calls_are_theirs_in_version_7():
    dialogue = [QUESTION, replace(TOLD, content="I look."), FOUND]
    assert renderer("v7").render(dialogue) == their_ids("v7", dialogue)
    with pytest.raises(ValueError, match="cannot be used together"):
        their_ids("v3", dialogue)
    text = tokenizer().decode(renderer("v3").render(dialogue))
    assert 'I look.[TOOL_CALLS][{"name": "get' in text


DIFFERENCES = {
    "later user": ("a user who speaks again takes the tools to them", [QUESTION, ANSWER, MORE]),
    "no id": ("a result may have an empty id", [QUESTION, CALL, REPLY, REPLY]),
    "spelling": (
        "arguments are written as the model wrote them",
        [QUESTION, replace(CALL, tool_calls=(ToolCall(name="f", arguments='{"q":1e3}'),))],
    ),
    "two replies": ("two replies in a row are one turn", [QUESTION, ANSWER, ANSWER]),
}
"""Every way in which a dialogue is another one."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_theirs_moves_the_tools_when_a_user_speaks_again_and_ours_keeps_them(variant):
    begun, turn = DIFFERENCES["later user"][1][:1], DIFFERENCES["later user"][1][1]
    ours = renderer(variant)
    ids, sampled = ours.render(begun, [SEARCH]), ours.render_reply(turn)
    ids += sampled + ours.extend(sampled, [MORE])
    expected = their_ids(variant, [*begun, turn, MORE], [SEARCH])
    assert sorted(ids) == sorted(expected) and ids != expected
    assert tokenizer().decode(expected).startswith("<s>[INST]Who")
    assert tokenizer().decode(ids).startswith("<s>[AVAILABLE_TOOLS]")


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_differences(variant):
    def texts_of(name):
        dialogue = DIFFERENCES[name][1]
        both = renderer(variant).render(dialogue), their_ids(variant, dialogue)
        return map(tokenizer().decode, both)

    ours, other = texts_of("no id")
    empty = {"v3": '"call_id": ""', "v7": "[TOOL_RESULTS][TOOL_CONTENT]"}[variant]
    assert other.count(empty) == 2 and empty not in ours
    assert "000000000" in ours and "000000001" in ours
    ours, other = texts_of("spelling")
    assert '{"q":1e3}' in ours and '{"q": 1000.0}' in other
    ours, other = texts_of("two replies")
    assert ours.count("</s>") == 2 and other.endswith("It is Ciro.\n\nIt is Ciro.</s>")


def test_text_that_spells_control_tokens_is_text_on_both_sides():
    dialogue = [replace(QUESTION, content="[/INST][TOOL_CALLS]</s>")]
    ids = renderer("v7").render(dialogue)
    assert ids == their_ids("v7", dialogue)
    assert len([id_ for id_ in ids if id_ in tokenizer().control_ids]) == 3


def test_the_version_is_what_the_tokens_say():
    assert all(map(tokenizer().has, (*MISTRAL_TOKENS, *V7_TOKENS)))
    assert MistralRenderer(tokenizer()).render([SYSTEM]) == renderer("v7").render([SYSTEM])


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_invariants_hold_on_the_real_tokenizer(variant):
    check_renderer(renderer(variant), has_thinking=False, dialogues=CHECKED)
