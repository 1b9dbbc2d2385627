"""Typed functions as tools: schemas, argument checks, and calls that cannot break the run."""

import asyncio
import json
import random
import sys
import threading
import time
from typing import Annotated, Any, Dict, List, Literal  # noqa: UP035

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agent.environment import Score
from lockstep.agent.tools import ToolEnvironment, ToolLimits, ToolRunner, parse_arguments, tool
from lockstep.errors import ConfigError
from lockstep.types import Message, ToolCall, ToolSchema


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments))


def run(tools, calls, **limits):
    return asyncio.run(ToolRunner(tools, ToolLimits(**limits)).run(calls))


# -- schemas ----------------------------------------------------------------------------------


def test_a_signature_and_its_docstring_become_a_json_schema():
    @tool
    def book(
        city: str,
        nights: int,
        price: float = 80.0,
        breakfast: bool = False,
        guests: list[str] | None = None,
        extras: dict[str, int] | None = None,
        room: Literal["single", "double"] = "double",
        note: Annotated[str, "Read by the hotel."] = "",
    ) -> str:
        """Books a room.

        At most one per call.

        Args:
            city: Where to stay,
                in English.
            nights (int): How long.

        Returns:
            A number.
        """
        return ""

    assert book.name == "book"
    assert book.description == "Books a room.\n\nAt most one per call."
    assert book.parameters["required"] == ["city", "nights"]
    assert book.parameters["properties"] == {
        "city": {"type": "string", "description": "Where to stay, in English."},
        "nights": {"type": "integer", "description": "How long."},
        "price": {"type": "number", "default": 80.0},
        "breakfast": {"type": "boolean", "default": False},
        "guests": {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "extras": {
            "oneOf": [
                {"type": "object", "additionalProperties": {"type": "integer"}},
                {"type": "null"},
            ]
        },
        "room": {"type": "string", "enum": ["single", "double"], "default": "double"},
        "note": {"type": "string", "description": "Read by the hotel.", "default": ""},
    }
    assert isinstance(book, ToolSchema)


def test_plain_unions_become_a_list_of_types():
    @tool
    def f(a: int | str, c: List, d: Dict, b: bool | None = None) -> None: ...  # noqa: UP006

    assert f.parameters["properties"] == {
        "a": {"type": ["integer", "string"]},
        "b": {"type": ["boolean", "null"]},
        "c": {"type": "array", "items": {}},
        "d": {"type": "object", "additionalProperties": {}},
    }


def test_methods_and_callable_objects_are_tools_without_their_self():
    class Shelf:
        def find(self, word: str) -> str:
            """Finds."""
            return f"found {word}"

        def __call__(self, word: str) -> str:
            """Calls."""
            return f"called {word}"

    bound, instance = tool(Shelf().find), tool(Shelf(), name="shelf")
    assert list(bound.parameters["properties"]) == list(instance.parameters["properties"])
    assert (bound.description, instance.description) == ("Finds.", "Calls.")
    replies, _ = run([bound, instance], [call("find", word="a"), call("shelf", word="b")])
    assert [reply.content for reply in replies] == ["found a", "called b"]


def untyped(a): ...
def starred(*a: int): ...
def positional(a: int, /): ...
def exotic(a: set[int]): ...
def keyed(a: dict[int, str]): ...
def mixed(a: Literal["a", 1]): ...
def unresolved(a: "Missing"): ...  # type: ignore[name-defined]  # noqa: F821
def undumpable(a: int = object()): ...  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (untyped, "'a'"),
        (starred, "name every parameter"),
        (positional, "called by keyword"),
        (exotic, "has no JSON schema here"),
        (keyed, "JSON objects have text keys"),
        (mixed, "of one plain type"),
        (unresolved, "cannot be resolved"),
        (undumpable, "default is not JSON"),
    ],
)
def test_a_signature_that_json_cannot_carry_is_refused(function, text):
    with pytest.raises(ConfigError, match=text) as caught:
        tool(function)
    assert function.__name__ in str(caught.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="share a name"):
        ToolRunner([tool(starless, name="x"), tool(starless, name="x")])


def starless(a: int) -> int:
    return a


# -- arguments --------------------------------------------------------------------------------


@tool
def typed(
    a: int,
    b: float = 1.0,
    c: list[int] | str | None = None,
    d: dict[str, bool] | None = None,
    e: Literal["x", "y"] = "x",
) -> str:
    return repr((a, b, c, d, e))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1', "not valid JSON"),
        ("[1]", "must be a JSON object, found array"),
        ("{}", "'a'"),
        ('{"a": "1"}', "a must be integer"),
        ('{"a": 1.5}', "a must be integer"),
        ('{"a": true}', "a must be integer"),
        ('{"a": NaN}', "NaN.*JSON"),
        ('{"a": 1, "z": 2}', "'z'"),
        ('{"a": 1, "b": null}', r"\bb must be number"),
        ('{"a": 1, "c": [1, "2"]}', r"c\[1\]"),
        ('{"a": 1, "d": {"k": 0}}', "d.k"),
        ('{"a": 1, "e": "z"}', "e must be one of"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_explained_to_the_model(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_arguments(text, typed)


def test_a_whole_number_is_accepted_in_either_form_and_nothing_else_is_converted():
    assert repr(parse_arguments('{"a": 1e2, "b": 3.0}', typed)) == "{'a': 100, 'b': 3.0}"
    assert parse_arguments('{"a": 1, "b": 2, "c": null}', typed) == {"a": 1, "b": 2, "c": None}
    assert parse_arguments('{"a": 1, "c": "text"}', typed)["c"] == "text"
    anything = ToolSchema(name="f", description="", parameters={"properties": {"a": True}})
    assert parse_arguments('{"a": 1.0}', anything) == {"a": 1.0}


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abcde"), inner),
    max_leaves=8,
).map(json.dumps))  # fmt: skip
def test_whatever_the_model_writes_gets_a_reply(text):
    (reply,), counters = run([typed], [ToolCall(name="typed", arguments=text)])
    assert reply.content and counters["tool/calls"] == 1
    assert reply.content.startswith("error: ") == ("tool/invalid_arguments" in counters)


# -- calls ------------------------------------------------------------------------------------


@tool
def hangs(seconds: float) -> str:
    time.sleep(seconds)
    return "woke up"


@tool
async def hangs_and_will_not_be_cancelled() -> str:
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return "never read"


@tool
def raises() -> str:
    raise KeyError("no such row")


@tool
async def exits() -> str:
    sys.exit(3)


@tool
async def cancels_itself() -> str:
    raise asyncio.CancelledError


@tool
def babbles() -> str:
    return "x" * 5_000_000


def test_a_tool_that_hangs_is_given_up_in_time():
    (reply,), counters = run([hangs], [call("hangs", seconds=60.0)], timeout_seconds=0.05)
    assert reply.content == "error: hangs took longer than 0.05 s"
    assert counters == {"tool/calls": 1, "tool/timeouts": 1}


async def test_a_coroutine_that_swallows_its_cancellation_is_given_up_too():
    runner = ToolRunner([hangs_and_will_not_be_cancelled], ToolLimits(timeout_seconds=0.05))
    _, counters = await runner.run([call("hangs_and_will_not_be_cancelled")])
    assert counters["tool/timeouts"] == 1


async def test_hanging_tools_do_not_keep_others_waiting_and_leave_only_daemons():
    runner = ToolRunner([hangs], ToolLimits(timeout_seconds=0.1))
    stuck = [runner.call(call("hangs", seconds=0.8)) for _ in range(100)]
    *stuck, quick = await asyncio.gather(*stuck, runner.call(call("hangs", seconds=0.0)))
    assert quick[0].text == "woke up"
    assert {outcome for _, outcome in stuck} == {"timeouts"}
    left = [t for t in threading.enumerate() if t.name == "lockstep-tool"]
    assert all(thread.daemon for thread in left)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (raises, "error: KeyError: 'no such row'"),
        (exits, "error: SystemExit: 3"),
        (cancels_itself, "error: the tool cancelled itself"),
    ],
)
def test_a_tool_that_raises_becomes_an_observation(entry, text):
    (reply,), counters = run([entry], [call(entry.name)])
    assert reply.content == text
    assert counters == {"tool/calls": 1, "tool/errors": 1}


def test_a_coroutine_behind_a_plain_function_is_awaited():
    async def look() -> str:
        return "sunny"

    (reply,), counters = run([tool(lambda: look(), name="look")], [call("look")])
    assert (reply.content, counters) == ("sunny", {"tool/calls": 1})


def test_megabytes_are_cut_with_a_notice():
    (reply,), counters = run([babbles], [call("babbles")], output_chars=100)
    assert len(reply.content) == 100
    assert reply.content.endswith("[cut: 5000000 characters in all]")
    assert counters == {"tool/calls": 1, "tool/truncated": 1}


def test_an_unknown_tool_is_answered_by_its_own_name():
    (reply,), counters = run([raises], [ToolCall(name="n" * 500, arguments="", id="7")])
    assert len(reply.name) == 64 and reply.tool_call_id == "7"
    assert "unknown tool" in reply.content and "raises" in reply.content
    assert counters == {"tool/calls": 1, "tool/unknown": 1}


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ({"a": [1, "\u00e9"]}, '{"a": [1, "\u00e9"]}'),
        (b"\xff bytes", "\ufffd bytes"),
        ({1, 2}, "{1, 2}"),
        ("half \ud83d", "half ?"),
    ],
)
def test_any_output_becomes_text_that_can_be_encoded(output, text):
    def give() -> object:
        return output

    (reply,), _ = run([tool(give)], [call("give")])
    assert reply.content == text
    reply.content.encode()


def test_an_instant_tool_runs_on_the_loop_and_a_plain_one_does_not():
    def where() -> str:
        return threading.current_thread().name

    tools = [tool(where, name="instant", is_instant=True), tool(where, name="threaded")]
    replies, _ = run(tools, [call("instant"), call("threaded")])
    assert [reply.content for reply in replies] == ["MainThread", "lockstep-tool"]


class Notes:
    """Sleeps less the higher the number, and keeps the order in which calls end."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def note(self, number: int) -> str:
        await asyncio.sleep(0.5 / number)
        self.seen.append(number)
        return str(number)

    def plain(self, number: int) -> str:
        time.sleep(0.5 / number)
        self.seen.append(number)
        return str(number)


@pytest.mark.parametrize("name", ["note", "plain"])
@pytest.mark.parametrize(
    ("parallel", "seen"), [(True, [3, 2, 1]), (False, [1, 2, 3]), (None, [1, 2, 3])]
)
def test_calls_of_one_turn_run_at_once_unless_the_tool_says_otherwise(name, parallel, seen):
    notes = Notes()
    entry = tool(getattr(notes, name), parallel=parallel)
    replies, counters = run([entry], [call(name, number=n) for n in (1, 2, 3)])
    assert notes.seen == seen and [reply.content for reply in replies] == ["1", "2", "3"]
    assert counters == {"tool/calls": 3}


def test_a_tool_that_runs_alone_waits_for_the_calls_before_it_and_keeps_those_after_it_waiting():
    notes = Notes()
    tools = [tool(notes.note, name="beside", parallel=True), tool(notes.note, name="alone")]
    names = ["beside"] * 2 + ["alone"] + ["beside"] * 2
    run(tools, [call(name, number=n) for n, name in enumerate(names, 1)])
    assert notes.seen == [2, 1, 3, 5, 4]


def test_each_call_of_a_turn_has_the_whole_limit_and_the_same_draws_however_they_interleave():
    def drawn(pauses):
        @tool
        async def draw(at: int) -> str:
            await asyncio.sleep(pauses[at])
            return str(random.random())

        random.seed(5)
        replies, _ = run([draw], [call("draw", at=at) for at in range(3)], timeout_seconds=5.0)
        return [reply.content for reply in replies]

    assert drawn([0.0, 0.02, 0.04]) == drawn([0.04, 0.0, 0.02])
    began = time.monotonic()
    found = run([tool(time_out)], [call("time_out")] * 20, timeout_seconds=0.3)[1]
    assert found["tool/timeouts"] == 20 and time.monotonic() - began < 20 * 0.3


async def time_out() -> str:
    await asyncio.sleep(30)
    return ""


# -- an environment made of tools -------------------------------------------------------------


class Sums(ToolEnvironment):
    async def reset(self):
        @tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        self.tools = (add,)
        return [Message(role="user", content="2 + 3?")]

    async def score(self):
        return Score(reward=float(self.answer == "5"))


async def test_a_user_gives_tools_reset_and_score_only():
    sums = Sums()
    await sums.reset()
    first = await sums.step(Message(role="assistant", tool_calls=(call("add", a=2, b=3),)))
    broken = await sums.step(Message(role="assistant", content="?", parse_error="no channel"))
    last = await sums.step(Message(role="assistant", content="5"))
    score = await sums.score()
    assert [m.content for m in first.messages] == ["5"] and not first.done
    assert first.metrics == {"tool/calls": 1}
    assert "no channel" in broken.messages[0].content and not broken.done
    assert last.done and score.reward == 1.0
