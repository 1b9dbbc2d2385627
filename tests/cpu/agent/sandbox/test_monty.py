"""The default sandbox: what a program's text becomes, what a session keeps, what is left over."""

import ast
import asyncio
import json
import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agent.sandbox.base import ProgramResult, SandboxLimits
from lockstep.agent.sandbox.monty import MontyConfig, show_value
from lockstep.agent.sandbox.tool import python_tool
from lockstep.agent.tools import ToolRunner
from lockstep.errors import ConfigError, SandboxError
from lockstep.types import ToolCall


class _Forgetful(MontyConfig):
    max_session_mib = 1


pytest.importorskip("pydantic_monty", reason="the extra `sandbox` is not installed")

LIMITS = SandboxLimits(seconds=1.0, memory_mib=64)


def results(*programs: str, session: str = "", config: MontyConfig | None = None):
    async def play() -> list[ProgramResult]:
        sandbox = (config or MontyConfig(limits=LIMITS, workers=1)).open()
        try:
            return [await sandbox.run(code, session=session) for code in programs]
        finally:
            await sandbox.close()

    return asyncio.run(play())


def children() -> set[str]:
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {line for line in found.stdout.splitlines() if "monty" in line}


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("print('a')\n'b'", "a\n'b'"),
        ("x = [\n1,\n2\n]", ""),
        ("x = [\n1,\n2\n]\nx", "[1, 2]"),
        ("print(\n1,\n2\n)", "1 2"),
        ("f = lambda a, b: a + b\nf(\n1,\nb=2)", ""),  # b=2) is not taken for a statement
        ("'''a\nb'''", ""),
        ("y = \\\n3\ny", "3"),
        ("if True:\n    5", ""),
        ("1, 2", "(1, 2)"),
        ("None", ""),
        ("", ""),
        ("# nothing", ""),
        ("{'a': 1}  # what a dict\n# is\n", "{'a': 1}"),
        ("import asyncio\nawait asyncio.sleep(9)\n7", "7"),
    ],
)
def test_a_program_returns_what_it_printed_and_its_last_value(code, output):
    (result,) = results(code)
    assert (result.ending, result.output) == ("ok", output)


def test_the_part_that_shows_a_value_never_lands_inside_of_another_statement():
    for code in ("f(\na,\nb)", "x = '''\na\n'''", "x = [\na,\nb]", "f'''{\na}'''"):
        with pytest.raises(SyntaxError):
            compile(show_value(code)[0], "", "exec")


PIECES = [
    "a", "b", "1", "\n", "\n", "\n", "(", ")", "[", "]", "'''", '"""', "'", '"', "#", "\\", "\\\n",
    " ", "=", ",", ":", "if a:", "f'''", "{", "}", "lambda: ", ";", "\t", "\r", "\r\n", "+", "*",
    " for a in b", ".c", "def f():\n  ", "\n  b", "return ", "else:\n  a", "\f", ":=", "await ",
    "not ", "f'", "@d\n", "!r",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=500, deadline=None)
def test_showing_a_value_changes_no_program_that_is_one(code):
    """Against CPython's parser: what is still a program has the same statements."""
    shown, _ = show_value(code)
    try:
        changed = ast.parse(shown).body
    except (SyntaxError, ValueError):
        return
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return  # on several lines it is not run so; on one, it is a generator or the like
    if not shown:
        return
    *before, last = body
    assert [ast.dump(each) for each in changed[: len(before)]] == [ast.dump(b) for b in before]
    assigned = changed[len(before)]
    assert isinstance(last, ast.Expr) and isinstance(assigned, ast.Assign)
    assert isinstance(assigned.value, ast.List)
    assert [ast.dump(each) for each in assigned.value.elts] == [ast.dump(last.value)]


def test_a_line_that_is_indented_wrong_is_an_error_and_no_argument():
    (result,) = results("print(1)\nprint\n  (2)")
    assert result.ending == "error" and "2" not in result.output.splitlines()


def test_an_error_reads_as_python_words_it_with_the_programs_own_lines():
    (result,) = results("def f(x):\n    return 1 / x\n\nprint('a')\nf(0)")
    assert result.ending == "error"
    assert result.output == (
        "a\n"
        "Traceback (most recent call last):\n"
        '  File "program.py", line 5, in <module>\n'
        "    f(0)\n"
        '  File "program.py", line 2, in f\n'
        "    return 1 / x\n"
        "ZeroDivisionError: division by zero"
    )
    assert result.metrics == {"sandbox/programs": 1.0, "sandbox/error": 1.0}


def test_a_program_that_raises_while_it_runs_is_not_run_twice():
    (result,) = results("print('once')\neval('1 +')")
    assert result.output.count("once\n") == 1 and "SyntaxError" in result.output


def test_what_the_interpreter_lacks_reads_as_such():
    for code, words in (
        ("class A(int): pass", "this Python does not support class inheritance"),
        ("def f():\n    yield 1", "this Python does not support yield"),
        ("import numpy", "No module named 'numpy'"),
    ):
        (result,) = results(code)
        assert words in result.output and "monty" not in result.output


def test_a_value_that_was_shown_is_not_kept():
    small = _Forgetful(limits=LIMITS, workers=1)
    found = results("'a' * 2_000_000", "1", session="a", config=small)
    assert [r.ending for r in found] == ["output", "ok"]


def test_output_is_cut_before_the_error_that_follows_it():
    (result,) = results("print('a' * 20_000)\n1 / 0")
    assert len(result.output) <= LIMITS.output_chars
    assert result.is_truncated and result.ending == "error"
    assert "[output cut here]\nTraceback" in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero")


def test_what_cannot_be_a_program_is_told_and_not_run():
    for code, words in (
        ("x = '\ud800'", "half a character"),
        ("x = 1\0", "null bytes"),
        ("x" * 100_000, "at most 65536"),
    ):
        (result,) = results(code)
        assert result.ending == "error" and words in result.output


def test_a_session_keeps_its_variables_and_those_from_before_a_program_that_was_ended():
    found = results(
        "import random\nx = 5\ndef f(): return x",
        "x += 1\nf()",
        "while True: x += 1",
        "f()",
        "y = [0] * 10**9",
        "f()",
        session="a",
    )
    assert [r.ending for r in found] == ["ok", "ok", "timeout", "ok", "memory", "ok"]
    assert [found[i].output for i in (1, 3, 5)] == ["6", "6", "6"]


async def test_sessions_see_nothing_of_each_other_and_end():
    sandbox = MontyConfig(limits=LIMITS, workers=1).open()
    await sandbox.run("x = 1", session="a")
    found = [(await sandbox.run("x", session=name)).output for name in ("a", "b", "")]
    await sandbox.end_session("a")
    await sandbox.end_session("never seen")
    found.append((await sandbox.run("x", session="a")).output)
    await sandbox.close()
    first, *rest = found
    assert first == "1" and all("NameError" in text for text in rest)


def test_the_same_program_always_prints_the_same():
    code = "import random, datetime, time\nrandom.random(), datetime.datetime.now(), time.time()"
    assert results(code)[0].output == results(code)[0].output


async def test_waiting_for_a_place_is_not_counted_as_a_programs_time():
    sandbox = MontyConfig(limits=LIMITS, workers=1).open()
    spin = [sandbox.run("while True: pass") for _ in range(2)]
    found = await asyncio.gather(*spin, sandbox.run("1"))
    await sandbox.close()
    assert [r.ending for r in found] == ["timeout", "timeout", "ok"]


def test_nothing_is_left_after_close_and_a_closed_sandbox_starts_again():
    before = children()
    sandbox = MontyConfig(limits=SandboxLimits(seconds=60.0), workers=2).open()

    async def play(code: str) -> ProgramResult:
        running = asyncio.ensure_future(sandbox.run(code))
        waiting = [asyncio.ensure_future(sandbox.run("while True: pass")) for _ in range(3)]
        first = await running
        await asyncio.sleep(0.05)
        assert len(children() - before) == 2
        await sandbox.close()
        assert {(await each).ending for each in waiting} == {"crashed"}
        for _ in range(100):  # one that was killed may take a moment to be gone
            if children() == before:
                return first
            await asyncio.sleep(0.02)
        raise AssertionError(f"left: {children() - before}")

    for code in ("1", "2"):  # another event loop, too
        assert asyncio.run(play(code)).output == code


async def test_an_episode_that_is_given_up_ends_its_program():
    sandbox = MontyConfig(limits=SandboxLimits(seconds=60.0), workers=1).open()
    running = asyncio.ensure_future(sandbox.run("while True: pass"))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    found = await sandbox.run("'free'")
    await sandbox.close()
    assert found.output == "'free'"


def test_settings_that_cannot_be_are_refused():
    for wrong, words in (
        (lambda: SandboxLimits(seconds=0), "SandboxLimits.seconds=0"),
        (lambda: SandboxLimits(memory_mib=1), "SandboxLimits.memory_mib=1"),
        (lambda: MontyConfig(workers=0), "MontyConfig.workers=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            wrong()


def test_an_interpreter_that_does_not_start_fails_the_episode_and_not_the_program(monkeypatch):
    monkeypatch.setenv("MONTY_BIN", "/no/such/interpreter")

    async def play() -> None:
        sandbox = MontyConfig(limits=LIMITS, workers=1).open()
        call = ToolCall(name="python", arguments=json.dumps({"code": "1"}))
        try:
            await ToolRunner([python_tool(sandbox)]).run([call])
        finally:
            await sandbox.close()

    with pytest.raises(SandboxError, match="sandbox=monty"):
        asyncio.run(play())


async def test_the_python_tool_reads_as_a_tool_and_counts():
    sandbox = MontyConfig(limits=LIMITS, workers=1).open()
    tool = python_tool(sandbox, session="episode 1")
    codes = ("x = 2", "print(x * 21)", "import socket")
    calls = [ToolCall(name="python", arguments=json.dumps({"code": c})) for c in codes]
    found = await ToolRunner([tool]).run(calls)
    await sandbox.close()
    replies, counters = found
    assert tool.parameters["required"] == ["code"] and "inheritance" in tool.description
    assert [r.content.splitlines()[-1] for r in replies] == [
        "[no output]",
        "42",
        "ModuleNotFoundError: No module named 'socket'",
    ]
    assert counters == {"tool/calls": 3.0, "sandbox/programs": 3.0, "sandbox/refused": 1.0}
