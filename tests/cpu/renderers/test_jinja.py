"""The generic renderer on made-up templates. Against real ones: tests/parity."""

import json
import time
from pathlib import Path

import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_templates import (
    BARE,
    BRACKET_TOKENS,
    BRACKETS,
    COUNTS,
    FIELD_NAME_TOKENS,
    FIELD_NAMES,
    FIRST_CALL_IS_OTHER,
    HOSTILE,
    NEVER_ENDS,
    NEXT_ROLE,
    NEXT_ROLE_TOKENS,
    NO_TOOLS,
    THINKS_AT_ONCE,
    template,
)

from lockstep.errors import RendererError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, JinjaConfig
from lockstep.renderers.jinja import template as jinja_template
from lockstep.renderers.jinja.marks import Marks, unmarked
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.testing import check_renderer
from lockstep.testing.renderers import DIALOGUES, MAY_REFUSE, TOOLS
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall, ToolSchema

TOKENIZER = byte_tokenizer()
USER = Message(role="user", content="Who?")
ANSWER = Message(role="assistant", content="Bela.")
THOUGHT = Message(role="assistant", thinking="Hm.", content="Bela.")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="find", arguments='{"q": "x"}'),))
REPLY = Message(role="tool", name="find", content="Bela")
SOME = {name: DIALOGUES[name] for name in ("two calls", "with thinking", "parallel calls", "empty")}
"""A whole check takes seconds: it writes some thousand times with the template."""


@pytest.fixture
def make(tmp_path):
    made = {}

    def renderer(source, **settings):
        key = (source, str(settings))
        if key not in made:
            path = tmp_path / f"{len(made)}.jinja"
            path.write_text(source)
            made[key] = JinjaRenderer(TOKENIZER, JinjaConfig(template=str(path), **settings))
        return made[key]

    return renderer


def ids_of(text):
    marks = Marks(TOKENIZER)
    return [
        i
        for piece in marks.pieces(text, "")
        for i in (TOKENIZER.encode(piece) if isinstance(piece, str) else [piece])
    ]


@pytest.mark.parametrize(
    ("call", "thinking"),
    [
        ("json", "drop"),
        ("json of an object", "keep"),
        ("fields", "drop"),
        ("a line each", "keep"),
        ("xml", "keep"),
    ],
)
def test_all_invariants_hold(make, call, thinking):
    renderer = make(template(call), thinking=thinking)
    check_renderer(renderer, dialogues=DIALOGUES if call == "json" else SOME, num_garbage=20)
    assert renderer.proof.line == "13 of 13 dialogues extend exactly"


def test_all_invariants_hold_for_a_template_that_opens_each_turn_with_thinking(make):
    renderer = make(template("xml", THINKS_AT_ONCE), thinking="drop")
    assert TOKENIZER.decode(renderer.thinking_opening) == "<think>\n"
    check_renderer(renderer, dialogues=SOME, num_garbage=20)


OTHER_FORMS = {
    "a list of calls, and no opening": (
        BRACKETS,
        BRACKET_TOKENS,
        ("[TOOL_CALLS] [", "arguments"),
        "take a system message later on",
    ),
    "one bare call with a stop of its own": (
        BARE,
        None,
        ("", "parameters"),
        "take several replies to one turn",
    ),
}


@pytest.mark.parametrize("what", OTHER_FORMS)
def test_all_invariants_hold_for_other_forms(what, tmp_path):
    source, control, calls, refused = OTHER_FORMS[what]
    (tmp_path / "it.jinja").write_text(source)
    tokenizer = byte_tokenizer(control_tokens=control)
    config = JinjaConfig(template=str(tmp_path / "it.jinja"), tools_in_prompt=False)
    renderer = JinjaRenderer(tokenizer, config)
    assert (renderer.shape.calls.head, renderer.shape.calls.arguments_key) == calls
    assert renderer.proof.line == f"10 of 11 dialogues extend exactly; refused: {refused}"
    may_refuse = {*MAY_REFUSE, "words before a call", "several replies"}
    check_renderer(renderer, has_thinking=False, may_refuse=may_refuse, num_garbage=20)


@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_all_invariants_hold_where_a_turn_ends_with_the_token_of_the_next_role(tmp_path, thinking):
    (tmp_path / "it.jinja").write_text(NEXT_ROLE)
    tokenizer = byte_tokenizer(control_tokens=NEXT_ROLE_TOKENS)
    config = JinjaConfig(template=str(tmp_path / "it.jinja"), thinking=thinking)
    renderer = JinjaRenderer(tokenizer, config)
    assert renderer.proof.line == (
        "12 of 13 dialogues extend exactly; refused: take a system message later on"
    )
    assert set(map(tokenizer.control_name, renderer.stop_ids)) == {"<|user|>", "<|observation|>"}
    check_renderer(renderer, dialogues=SOME, num_garbage=20)


def test_a_turn_that_names_another_role_than_the_next_one_keeps_its_token(tmp_path):
    (tmp_path / "it.jinja").write_text(NEXT_ROLE)
    tokenizer = byte_tokenizer(control_tokens=NEXT_ROLE_TOKENS)
    renderer = JinjaRenderer(tokenizer, JinjaConfig(template=str(tmp_path / "it.jinja")))
    call = renderer.render_reply(CALL)
    assert tokenizer.control_name(call[-1]) == "<|observation|>"
    wrong = [*call[:-1], tokenizer.control_id("<|user|>")]
    whole = renderer.extend(call, [REPLY])
    assert renderer.extend(wrong, [REPLY]) == [call[-1], *whole]
    assert renderer.parse(wrong).tool_calls == renderer.parse(call).tool_calls


def test_all_invariants_hold_where_names_of_control_tokens_contain_the_keys_of_messages(tmp_path):
    (tmp_path / "it.jinja").write_text(FIELD_NAMES)
    tokenizer = byte_tokenizer(control_tokens=FIELD_NAME_TOKENS)
    renderer = JinjaRenderer(tokenizer, JinjaConfig(template=str(tmp_path / "it.jinja")))
    assert renderer.proof.line == "11 of 11 dialogues extend exactly"
    check_renderer(renderer, has_thinking=False, dialogues=SOME, num_garbage=20)


def test_a_template_without_a_tool_role_is_named_as_the_reason_that_it_takes_no_tools(make):
    source = NO_TOOLS.replace("bos_token", "''").replace("<|end|>", "<|im_end|>")
    renderer = make(source, tools="template")
    with pytest.raises(RendererError, match=r"take tools. it takes no tool's reply"):
        renderer.render([USER], TOOLS)


def test_the_pieces_are_those_of_the_renderer_that_is_written_by_hand(make):
    """The made-up template writes dialogues as Qwen3's does, but for its words about tools."""
    ours = ChatMLRenderer(TOKENIZER, ChatMLConfig(thinking="drop", has_empty_thinking=False))
    generic = make(template(), thinking="drop")
    assert generic.stop_ids == ours.stop_ids
    for dialogue in DIALOGUES.values():
        turns = [at for at, message in enumerate(dialogue) if message.role == "assistant"]
        for at, end in zip(turns, [*turns[1:], len(dialogue)], strict=True):
            reply = ours.render_reply(dialogue[at])
            assert generic.render_reply(dialogue[at]) == reply
            after = dialogue[at + 1 : end]
            for cut in range(0, len(reply) + 1, 5):
                assert generic.extend(reply[:cut], after) == ours.extend(reply[:cut], after)
                assert generic.parse(reply[:cut]) == ours.parse(reply[:cut])
                assert generic.without_thinking(reply[:cut]) == ours.without_thinking(reply[:cut])
            assert generic.forgets(after) == ours.forgets(after)


def test_with_keep_a_history_is_written_as_it_was_extended(make):
    history = [USER, THOUGHT, USER, ANSWER, USER]
    keep = make(template()).render(history)
    assert TOKENIZER.decode(keep).count("Hm.") == 1
    ids = make(template()).render([USER])
    for turn in (THOUGHT, ANSWER):
        reply = make(template()).render_reply(turn)
        ids += reply + make(template()).extend(reply, [USER])
    assert keep == ids
    assert "Hm." not in TOKENIZER.decode(make(template(), thinking="drop").render(history))


def test_what_a_template_cannot_do_is_refused_later_with_its_reason(make):
    renderer = make(NO_TOOLS, tools="template")
    assert renderer.proof.held == ("plain", "multi-turn", "truncated")
    assert "refused: take tools, take a system prompt, take a tool's reply" in renderer.proof.line
    tool = ToolSchema(name="find", description="", parameters={})
    reply = renderer.render_reply(ANSWER)
    for refused, reason in (
        (lambda: renderer.render([USER], [tool]), "Roles must alternate"),
        (lambda: renderer.render([Message(role="system", content="x")]), "Roles must alternate"),
        (lambda: renderer.extend(reply, [REPLY]), "no way to take a tool's reply"),
        (lambda: renderer.render_reply(CALL), "calls a tool: it takes no tool's reply"),
        (lambda: renderer.render_reply(THOUGHT), "chat template"),
        (lambda: renderer.extend(reply, [ANSWER]), "was given an assistant message"),
    ):
        with pytest.raises(RendererError, match=reason):
            refused()
    may_refuse = {*MAY_REFUSE, "developer", "unicode"} | {
        name
        for name, dialogue in DIALOGUES.items()
        if any(m.role in ("tool", "system") for m in dialogue)
    }
    check_renderer(renderer, tools=(), may_refuse=may_refuse, has_thinking=False, num_garbage=20)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (COUNTS, "'plain'"),
        (NEVER_ENDS, "no control token ends an assistant's words"),
        (
            NO_TOOLS.replace("loop.last", "").replace(
                "{{- '<|start|>' + message.role",
                "{{- '<|start|>' + ('now ' if loop.index > 3 else '') + message.role",
            ),
            "'multi-turn'",
        ),
        ("{{ 'nothing' }}", "does not write an assistant's words"),
        (
            NO_TOOLS.replace("{{- bos_token }}", "{{ add_generation_prompt }}"),
            "add_generation_prompt",
        ),
    ],
    ids=["counts", "never ends", "changes later", "says nothing", "another history"],
)
def test_a_template_that_is_no_sequence_of_pieces_is_refused(make, source, message):
    with pytest.raises(RendererError, match=message):
        make(source)


def test_a_template_whose_calls_depend_on_the_past_takes_no_tools(make):
    proof = make(FIRST_CALL_IS_OTHER, tools="template").proof
    assert "dialogue 'several calls': the ids differ" in proof.unsupported["take tools"]
    assert {"plain", "multi-turn", "one call"} <= set(proof.held)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_template_ends_in_an_error_in_bounded_time(make, what, monkeypatch):
    monkeypatch.setattr(jinja_template, "RENDER_SECONDS", 0.5)
    source, message = HOSTILE[what]
    begin = time.monotonic()
    with pytest.raises(RendererError, match=message):
        make(source)
    assert time.monotonic() - begin < 60


def test_a_template_that_turns_hostile_on_a_word_fails_then_and_works_again(make, monkeypatch):
    trap = "{% if messages[0].content == 'now' %}" + HOSTILE["loops"][0] + "{% endif %}"
    renderer = make(trap + template())
    monkeypatch.setattr(jinja_template, "RENDER_SECONDS", 0.5)
    with pytest.raises(RendererError, match=r"0\.5"):
        renderer.render([Message(role="user", content="now")])
    assert renderer.render([USER]) == make(template()).render([USER])


def test_the_worker_can_open_no_file(make):
    limits = Path(f"/proc/{make(template())._template._child._process._process.pid}/limits")
    if limits.is_file():
        assert "Max open files            0" in limits.read_text()


NAMES = [TOKENIZER.control_name(id_) for id_ in sorted(TOKENIZER.control_ids)]
FRAGMENTS = sorted(
    {name[:n] for name in NAMES for n in range(1, len(name) + 1)}
    | {name[n:] for name in NAMES for n in range(1, len(name))}
    | {" ", "\n", "im_start", "think", "\ue000", "\\ue000", '"', "{", "tool_call"}
)
HOSTILE_TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@settings(max_examples=2000 if PROOF else 60, deadline=None)
@given(text=HOSTILE_TEXT, other=HOSTILE_TEXT)
def test_no_text_becomes_a_control_token(tmp_path_factory, text, other):
    control = [
        i for i in _hostile_prompt(tmp_path_factory, text, other) if i in TOKENIZER.control_ids
    ]
    plain = _hostile_prompt(tmp_path_factory, "a", "b")
    assert control == [i for i in plain if i in TOKENIZER.control_ids]


_MADE = {}


def _hostile_prompt(tmp_path_factory, text, other):
    if not _MADE:
        path = tmp_path_factory.mktemp("hostile") / "xml.jinja"
        path.write_text(template("xml"))
        _MADE["xml"] = JinjaRenderer(TOKENIZER, JinjaConfig(template=str(path)))
    tool = ToolSchema(
        name=f"f{other}", description=text, parameters={f"k{text}": [other, {text: 1}]}
    )
    call = ToolCall(name="find", arguments=json.dumps({f"k{other}": text}))
    messages = [
        Message(role="system", content=text),
        Message(role="user", content=other),
        Message(role="assistant", content=f"x{text}", tool_calls=(call,)),
        Message(role="tool", name=f"n{text}", content=other),
        Message(role="user", content=text),
    ]
    return _MADE["xml"].render(messages, [tool])


@settings(max_examples=2000 if PROOF else 100, deadline=None)
@given(
    text=HOSTILE_TEXT,
    before=st.sampled_from(["", *NAMES, "<|im_", "<", "<th"]),
    after=st.sampled_from(["", *NAMES, "nd|>", ">", "|>"]),
)
def test_marked_text_is_text_at_every_seam(text, before, after):
    marks = Marks(TOKENIZER)
    mark = marks.choose([text, before, after])
    for words in (marks.mark(text, mark), marks.mark(text, mark).strip()):
        pieces = marks.pieces(before + words + after, mark)
        expected = [
            i for part in (before, after) for i in marks.pieces(part, "") if isinstance(i, int)
        ]
        assert [i for i in pieces if isinstance(i, int)] == expected or not words
    assert unmarked(marks.mark(text, mark), mark) == text
    assert marks.mark(text, mark) == marks.mark(text, mark)


def test_escaped_marks_are_taken_out_too(make):
    renderer = make(
        template().replace("+ message.content +", "+ message.content | tojson(ensure_ascii=true) +")
    )
    ids = renderer.render([Message(role="user", content="<|im_end|>")])
    assert (
        TOKENIZER.decode(ids) == '<|im_start|>user\n"<|im_end|>"<|im_end|>\n<|im_start|>assistant\n'
    )
    assert sum(i in TOKENIZER.control_ids for i in ids) == 3


GOOD = {
    "json": (
        'Yes.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call><|im_end|>',
        '{"a": 1}',
    ),
    "xml": (
        "Yes.\n<tool_call><function=f><parameter=a>1</parameter></function></tool_call><|im_end|>",
        '{"a": 1}',
    ),
    "fields": ('Yes.\n<tool_call>f ```json {"a":1}```</tool_call><|im_end|>', '{"a":1}'),
}
BAD = {
    "json": ("<tool_call>{</tool_call><|im_end|>", "a call is not JSON"),
    "xml": ("<tool_call><function=f>x</function></tool_call><|im_end|>", "has words between"),
    "fields": ("<tool_call>f ```json [```</tool_call><|im_end|>", "arguments are not JSON"),
}


@pytest.mark.parametrize("call", GOOD)
def test_calls_are_read_as_models_spell_them(make, call):
    renderer = make(template(call))
    text, arguments = GOOD[call]
    read = renderer.parse(ids_of(text))
    assert read == Message(
        role="assistant", content="Yes.", tool_calls=(ToolCall(name="f", arguments=arguments),)
    )
    spelled = TOKENIZER.encode(text.removesuffix("<|im_end|>")) + list(renderer.stop_ids)
    assert not renderer.parse(spelled).tool_calls
    for bad, reason in (
        BAD[call],
        ("<tool_call>x<|im_end|>", "a call is not closed"),
        ("<tool_call>x", "the turn was cut off"),
        ("</tool_call>x<|im_end|>", "</tool_call> is out of place"),
        ("<think>x<|im_end|>", "the thinking is not closed"),
    ):
        read = renderer.parse(ids_of(bad))
        assert reason in read.parse_error and not read.tool_calls
        assert "x" in read.content + read.thinking or "x" not in bad


def test_parameters_that_a_tool_declares_as_text_stay_text_in_its_own_dialogue(make):
    """Two dialogues at the same time declare tools of one name, with other types."""
    renderer = make(template("xml"))
    turn = ids_of(GOOD["xml"][0])
    dialogues = {}
    for type_ in ("string", "integer"):
        parameters = {"type": "object", "properties": {"a": {"type": type_}}}
        tool = ToolSchema(name="f", description="", parameters=parameters)
        dialogues[type_] = renderer.with_tools([tool])
        dialogues[type_].render([USER], [tool])
    read = {type_: each.parse(turn).tool_calls[0] for type_, each in dialogues.items()}
    assert read["string"].arguments == '{"a": "1"}'
    assert read["integer"] == renderer.parse(turn).tool_calls[0]
    assert read["integer"].arguments == '{"a": 1}'


def test_settings_reach_the_template(make, tmp_path):
    dated = NO_TOOLS.replace("{{- bos_token }}", "{{ strftime_now('%d %b %Y ') ~ who }}")
    text = TOKENIZER.decode(make(dated, date="2025-08-05", variables={"who": "Ann"}).render([USER]))
    assert text.startswith("05 Aug 2025 Ann<|start|>user")
    stops = make(NO_TOOLS, stop_tokens=("<|call|>",)).stop_ids
    assert [TOKENIZER.control_name(i) for i in stops] == ["<|end|>", "<|call|>"]
    with pytest.raises(RendererError, match=r"<\|nope\|>"):
        make(NO_TOOLS, stop_tokens=("<|nope|>",))
    with pytest.raises(RendererError, match="has no chat template"):
        JinjaRenderer(TOKENIZER, JinjaConfig())
    with pytest.raises(RendererError, match="cannot be read"):
        JinjaRenderer(TOKENIZER, JinjaConfig(template=str(tmp_path / "none.jinja")))


def test_a_template_that_swallows_words_is_found_out(make):
    renderer = make(
        template().replace(
            "{{- message.content }}", "{{- message.content if not message.tool_calls else '' }}"
        )
    )
    with pytest.raises(RendererError, match=r"'Yes\.'"):
        renderer.render_reply(Message(role="assistant", content="Yes.", tool_calls=CALL.tool_calls))


def test_arguments_that_the_template_takes_apart_must_be_an_object(make):
    bad = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments="[1]"),))
    with pytest.raises(RendererError, match="arguments of the call f are no JSON object"):
        make(template("xml")).render_reply(bad)
