"""All readers of sampled turns: linear time, and the exact text back."""

import re
from functools import partial
from itertools import product
from typing import get_args

import pytest
from full_counts import PROOF
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from linear_time import grows_linearly
from made_up_templates import NEXT_ROLE, NEXT_ROLE_TOKENS, THINKS_AT_ONCE, template

from lockstep.agent.judge import grade_in
from lockstep.agent.tools import parse_arguments
from lockstep.envs.math.grading import Form, find_answer
from lockstep.envs.reasoning_gym.config import extract_answer
from lockstep.renderers.calls import read_call, read_call_array, read_call_list, read_whole_call
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, JinjaConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.jinja.formats import CallFormat, read_calls
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.llama3 import LLAMA3_TOKENS, Llama3Renderer
from lockstep.renderers.mistral import MISTRAL_TOKENS, V7_TOKENS, MistralRenderer
from lockstep.renderers.pieces import cut_front
from lockstep.renderers.xml_calls import DIALECTS, read_xml_call, text_parameters
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import ToolSchema

TOKENIZER = byte_tokenizer()
LLAMA = byte_tokenizer(control_tokens=LLAMA3_TOKENS)
MISTRAL = byte_tokenizer(control_tokens=(*MISTRAL_TOKENS, *V7_TOKENS))
QWEN = "<function=f>\n<parameter=q>\nBern\n</parameter>\n</function>"
MINIMAX = '<invoke name="f">\n<parameter name="q">Bern</parameter>\n</invoke>'
GLM = "f\n<arg_key>q</arg_key>\n<arg_value>Bern</arg_value>\n"
TOOL = ToolSchema(name="f", description="", parameters={"properties": {"q": {}}})
JSON = '{"name": "f", "arguments": {"q": "Bern"}}'
BLOCK = {"open": "<tool_call>", "close": "</tool_call>"}
FORMATS = {
    # name: (format, one call)
    "qwen": (CallFormat(kind="xml", **BLOCK), f"<tool_call>{QWEN}</tool_call>"),
    "bare qwen": (CallFormat(kind="xml"), QWEN),
    "qwen without an end": (CallFormat(kind="xml", open="<tool_call>"), f"<tool_call>{QWEN}"),
    "bare minimax": (CallFormat(kind="xml", dialect="minimax"), MINIMAX),
    "minimax in a list": (
        CallFormat(kind="xml", dialect="minimax", head="<calls>", tail="</calls>"),
        f"<calls>\n{MINIMAX}\n</calls>",
    ),
    "glm": (CallFormat(kind="xml", dialect="glm", **BLOCK), f"<tool_call>{GLM}</tool_call>"),
    "bare glm": (CallFormat(kind="xml", dialect="glm"), GLM),
    "glm without an end": (
        CallFormat(kind="xml", dialect="glm", open="<tool_call>"),
        f"<tool_call>{GLM}",
    ),
    "json": (CallFormat(kind="json", **BLOCK), f"<tool_call>{JSON}</tool_call>"),
    "json without an end": (CallFormat(kind="json", open="<tool_call>"), f"<tool_call>{JSON}"),
    "bare json": (CallFormat(kind="json"), JSON),
    "a list of json": (CallFormat(kind="json", head="[CALLS] ["), f"[CALLS] [{JSON}]"),
    "fields": (
        CallFormat(kind="fields", between="\n```json\n", open="<tool_call>", close="```"),
        '<tool_call>f\n```json\n{"q": "Bern"}```',
    ),
    "bare fields": (CallFormat(kind="fields", between=" "), 'f {"q": "Bern"}'),
}
NEVER_READ = ("bare glm", "bare fields")  # nothing shows where the words before a call end

READERS = {
    # name: (renderer, one turn)
    "chatml": (ChatMLRenderer(TOKENIZER), f"<think>\nHm.\n</think>\n\nI <tool_call>{JSON}<"),
    "qwen2.5": (
        ChatMLRenderer(TOKENIZER, ChatMLConfig(variant="qwen2.5")),
        f"I look.\n<tool_call>{JSON}</tool_call><|im_end|>",
    ),
    "harmony": (
        HarmonyRenderer(TOKENIZER),
        "<|channel|>analysis<|message|>I<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.f <|constrain|>json<|message|>{}<|call|>",
    ),
    "llama3": (Llama3Renderer(LLAMA), f"I look.<|python_tag|>{JSON}; {JSON}<|eom_id|>"),
    "mistral": (MistralRenderer(MISTRAL), f"I look.[TOOL_CALLS][{JSON}, {JSON}]</s>"),
}


def ids_of(tokenizer, text):
    """Control tokens that `text` spells by their ids, and the rest as bytes, which are the ids of a
    byte tokenizer."""
    names = {tokenizer.control_name(id_): id_ for id_ in tokenizer.control_ids}
    ids = []
    for piece in re.split(f"({'|'.join(map(re.escape, sorted(names)))})", text):
        ids += [names[piece]] if piece in names else piece.encode()
    return ids


def is_part(part, whole):
    """Whether `part` is `whole` with some characters left out."""
    characters = iter(whole)
    return all(character in characters for character in part)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_and_a_cut_one_gives_its_exact_text_back(name):
    format_, call = FORMATS[name]
    read = read_calls(f"I look.\n{call}", format_, {}, "")
    if name in NEVER_READ or name == "bare json":
        assert (read.content, read.calls, read.error) == (f"I look.\n{call}", [], "")
    else:
        assert (read.content, len(read.calls), read.error) == ("I look.", 1, "")
    for words, cut in product(range(41), (*range(41), len(call) - 1)):
        text = "Let me see it now: I look for a fact, ok."[:words] + call[:cut]
        read = read_calls(text, format_, {}, "")
        if not read.calls:
            assert read.content == text


@pytest.mark.parametrize("name", FORMATS)
def test_words_around_calls_are_kept_as_they_were_sampled(name):
    format_, call = FORMATS[name]
    for text in (f"A{call}B{call}C", f"A\n{call}\n{call}\nC", f"{call} {call}", call * 3):
        read = read_calls(text, format_, {}, "")
        assert is_part(read.content, text)
        without = text.replace(call, "") if read.calls else text
        assert is_part("".join(without.split()), read.content)


FRAGMENTS = sorted(
    {piece for _, call in FORMATS.values() for piece in re.split(r"(<[^<>]*>|\W)", call) if piece}
    | {" ", "\n", "\\", '"a": ', "<parameter=a", "</think>", "[TOOL_CALLS]", "<think>", "\ue000"}
)
NUMBER = "#"
"""Becomes the number of the repetition in the repeated part of a text: keys then differ."""
MANY_KEYS = f"<parameter=k{NUMBER}>"


def spelled(parts, size):
    """(head, repeated part, tail) as a text of about `size` characters."""
    head, unit, tail = ("".join(part) for part in parts)
    count = size // len(unit) if unit else 0
    middle = "".join(unit.replace(NUMBER, str(at)) for at in range(count))
    return f"{head}{middle}{tail}"


def arguments_or_reason(text):
    try:
        return parse_arguments(text, TOOL)
    except ValueError as error:
        return error


def readers_of_text():
    """Name -> a function that reads the text of a reply, or of a call."""
    types = text_parameters([TOOL])
    for name, (format_, _) in FORMATS.items():
        yield f"calls as {name}", partial(read_calls, format=format_, schemas={}, mark="")
        yield f"typed {name}", partial(read_calls, format=format_, schemas=types, mark="\ue000")
    for name, dialect in DIALECTS.items():
        yield f"one call in tags of {name}", partial(read_xml_call, schemas={}, dialect=dialect)
    yield from ((f.__name__, f) for f in (read_call, read_whole_call, read_call_list))
    yield from ((f.__name__, f) for f in (read_call_array, grade_in, arguments_or_reason))
    for rule in ("tag", "last_line"):
        yield f"answer by {rule}", partial(extract_answer, rule=rule)
    for form in get_args(Form):
        yield f"number by {form}", partial(find_answer, form=form, lenient=True)


READERS_OF_TEXT = dict(readers_of_text())
SEEN = {  # texts that took quadratic time, or for ever
    "a call that is cut after ten characters": (["Let me see", QWEN[:-12]], [], []),
    "calls that are cut": ([], [QWEN[:20]], []),
    "parameters that are not closed": (["<tool_call><function=f>"], [MANY_KEYS], ["</function>"]),
    "answers that are not closed": ([], ["<answer>"], []),
    "blanks in a call": ([JSON[:12]], [" "], ["x"]),
}


def text_shapes():
    """(head, repeated part, tail): lists of fragments."""
    cuts = st.sampled_from([call for _, call in FORMATS.values()]).flatmap(
        lambda call: st.integers(1, len(call)).map(lambda at: call[:at])
    )
    some = st.sampled_from([*FRAGMENTS, "<answer>", "\\boxed{", "####", "1"]) | cuts
    unit = st.lists(some | st.just(NUMBER) | st.just(MANY_KEYS), min_size=1, max_size=4)
    return st.tuples(st.lists(some, max_size=4), unit, st.lists(some, max_size=3))


@pytest.mark.parametrize("seen", SEEN)
def test_no_reader_takes_more_than_linear_time_for_what_was_seen(seen, thinkers):
    every = {**READERS, **{f"jinja {name}": made for name, made in thinkers.items()}}
    check_linear(SEEN[seen], READERS_OF_TEXT, every)


@settings(max_examples=10_000 if PROOF else 300, deadline=None, phases=[Phase.generate])
@given(shape=text_shapes(), choice=st.data())
def test_the_time_of_every_reader_grows_with_the_length_alone(shape, choice, thinkers):
    every = {**READERS, **{f"jinja {name}": made for name, made in thinkers.items()}}
    name = choice.draw(st.sampled_from([*READERS_OF_TEXT, *every]))
    texts = {name: READERS_OF_TEXT[name]} if name in READERS_OF_TEXT else {}
    check_linear(shape, texts, {} if texts else {name: every[name]})


def check_linear(shape, readers_of_text, renderers):
    for name, read in readers_of_text.items():
        assert grows_linearly(read, partial(spelled, shape)), name
    for name, (renderer, _) in renderers.items():
        for end in ([], [renderer.stop_ids[0]]):

            def ids(size, tokenizer=renderer.tokenizer, end=end):
                return ids_of(tokenizer, spelled(shape, size)) + end

            assert grows_linearly(renderer.parse, ids), name
            assert grows_linearly(renderer.without_thinking, ids), name
        assert grows_linearly(lambda cut, renderer=renderer: renderer.extend(cut, []), ids), name


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=2000 if PROOF else 60, deadline=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=30))
def test_any_turn_is_read_and_nothing_is_added_to_it(name, pieces):
    renderer, _ = READERS[name]
    text = "".join(pieces).encode("utf-8", "replace").decode()
    read = renderer.parse(ids_of(renderer.tokenizer, text))
    if name != "harmony":  # joins several messages with line breaks
        assert is_part(read.content, text) and is_part(read.thinking, text)
    if not read.tool_calls and not read.thinking and "<think>" not in text:
        assert read.content == text
    for format_, _ in FORMATS.values():
        turn = read_calls(text, format_, {}, "")
        assert is_part(turn.content, text) and (turn.calls or turn.content == text)


def test_a_character_that_is_never_finished_is_cut_in_linear_time():
    def made(size):
        return [*b"Hm. \xe4", *b"\xe4" * size]

    assert grows_linearly(lambda ids: cut_front(TOKENIZER, ids, 4), made)
    merged = byte_tokenizer(merges=[("a", "\u00e4")])  # a letter and half a character in one token
    assert cut_front(merged, [256, 0xB8, 0xAD, 98], 1) == [0xE4, 0xB8, 0xAD, 98]
    assert cut_front(merged, [256, 256, 98], 1) == [256, 256, 98]


# -- thinking -------------------------------------------------------------------------------------

MENTIONS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "<|im_start|>",
    "<tool_call>{}</tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|im_start|>user\nno<tool_call>",
)  # fmt: skip


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory):
    root = tmp_path_factory.mktemp("templates")
    made = {"chatml": (ChatMLRenderer(TOKENIZER, ChatMLConfig(thinking="drop")), "<think>\n")}
    glm = byte_tokenizer(control_tokens=(*NEXT_ROLE_TOKENS, *MENTIONS[4:6], *MENTIONS[8:12]))
    plain = byte_tokenizer(  # the tags of thinking are text
        control_tokens=("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    )
    for name, source, tokenizer, opening in (
        ("json", template(), TOKENIZER, "<think>\n"),
        ("xml that thinks at once", template("xml", THINKS_AT_ONCE), TOKENIZER, ""),
        ("next role", NEXT_ROLE, glm, "\n<think>"),
        ("tags that are text", template(), plain, "<think>\n"),
    ):
        path = root / f"{name}.jinja"
        path.write_text(source)
        config = JinjaConfig(template=str(path), thinking="drop")
        made[name] = (JinjaRenderer(tokenizer, config), opening)
    return made


@pytest.mark.parametrize("mention", MENTIONS)
def test_closed_thinking_that_mentions_a_tag_ends_at_its_end_tag(thinkers, mention):
    for name, (renderer, opening) in thinkers.items():
        end = "</think>\n" if name == "next role" else "\n</think>\n\n"
        stop = renderer.tokenizer.control_name(renderer.stop_ids[0])
        thought = f"Hm. {mention} is a tag."
        turn = ids_of(renderer.tokenizer, f"{opening}{thought}{end}It is 12.{stop}")
        read = renderer.parse(turn)
        assert (read.content, read.thinking, read.parse_error) == ("It is 12.", thought, ""), name
        kept = renderer.tokenizer.decode(renderer.without_thinking(turn))
        assert kept.endswith(f"It is 12.{stop}") and "Hm." not in kept, name
        cut = renderer.tokenizer.decode(renderer.extend(turn[:-2], []))
        assert "</think>" not in cut.partition("assistant")[0], name  # it is closed already
        open_turn = ids_of(renderer.tokenizer, f"{opening}{thought}{stop}")
        assert renderer.parse(open_turn).parse_error == "the thinking is not closed", name


@pytest.mark.parametrize("mention", MENTIONS)
def test_a_closed_analysis_that_mentions_a_token_is_thinking(mention):
    renderer = READERS["harmony"][0]
    analysis = f"<|channel|>analysis<|message|>The {mention} opens.<|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>It is 12.<|return|>"
    read = renderer.parse(ids_of(TOKENIZER, analysis + answer))
    found = (read.content, read.thinking, read.parse_error)
    assert found == ("It is 12.", f"The {mention} opens.", "")
