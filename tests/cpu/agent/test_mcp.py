"""Tools of MCP servers, honest and lying, over stdio and HTTP."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("mcp") is None:
    pytest.skip("mcp is not installed (extra `mcp`)", allow_module_level=True)

from lockstep.agent.mcp import ServerAddress, ToolServer
from lockstep.agent.tools import ToolLimits, ToolRunner
from lockstep.errors import ConfigError, ToolServerError
from lockstep.types import ToolCall

SERVERS = Path(__file__).with_name("mcp_servers.py")


def command(*arguments):
    return f"{sys.executable} {SERVERS} {' '.join(map(str, arguments))}"


@contextlib.contextmanager
def server(*arguments, url="", **settings):
    address = ServerAddress(url=url) if url else ServerAddress(command=command(*arguments))
    made = ToolServer(address, **{"start_seconds": 60.0, **settings})
    try:
        yield made
    finally:
        asyncio.run(made.close())


@pytest.fixture(scope="module")
def honest():
    with server("honest") as made:
        yield made


def call(made, name, arguments="{}", *, seconds=60.0, chars=200):
    """(text, counters) of one call, in an event loop of its own as a training step has."""

    async def run():
        tools = await made.tools(call_seconds=seconds)
        runner = ToolRunner(tools, ToolLimits(output_chars=chars))
        replies, counters = await runner.run([ToolCall(name=name, arguments=arguments)])
        return replies[0].content, counters

    text, counters = asyncio.run(run())
    assert counters.pop("tool/calls") == 1
    return text, counters


def test_tools_are_told_as_the_server_describes_them(honest):
    add = next(t for t in asyncio.run(honest.tools()) if t.name == "add")
    assert add.description == "Adds two numbers."
    assert add.parameters["properties"]["a"]["type"] == "integer"


@pytest.mark.parametrize(
    ("name", "arguments", "text", "counters"),
    [
        ("add", '{"a": 2, "b": 3}', "5", {}),
        ("find", '{"places": [{"street": "Elm", "number": 3}]}', "near: Elm 3", {}),
        (
            "add", '{"a": "2", "b": 3}', "error: a must be integer, found string",
            {"tool/invalid_arguments": 1},
        ),
        (
            "find", '{"places": [{"street": "Elm", "number": "3"}]}',
            "error: places[0].number must be integer, found string",
            {"tool/invalid_arguments": 1},
        ),
        (
            "find", '{"places": [], "mode": "fra"}',
            'error: mode must be one of ["near", "far"], found "fra"',
            {"tool/invalid_arguments": 1},
        ),
        ("fail", "{}", "error: Error executing tool fail", {"tool/errors": 1}),
        ("paint", "{}", "[image, image/png, 300 bytes: not shown]", {"mcp/omitted_parts": 1}),
        (
            "flood", "{}", "x" * 167 + "\n[cut: 3000000 characters in all]", {"tool/truncated": 1}
        ),
    ],
    ids=["add", "nested", "wrong", "wrong-nested", "wrong-enum", "raises", "image", "megabytes"],
)  # fmt: skip
def test_a_call_becomes_text_and_counters(honest, name, arguments, text, counters):
    assert call(honest, name, arguments) == (text, counters)


def test_a_call_that_hangs_is_given_up_and_the_server_stays(honest):
    text, counters = call(honest, "hang", seconds=0.3)
    assert (text, counters) == ("error: hang took longer than 0.3 s", {"tool/timeouts": 1})
    assert call(honest, "add", '{"a": 2, "b": 3}') == ("5", {})
    assert honest.num_starts == 1


def test_nested_types_of_a_server_reach_the_prompt(honest):
    find = next(t for t in asyncio.run(honest.tools()) if t.name == "find")
    assert find.parameters["properties"]["places"]["items"]["properties"] == {
        "street": {"type": "string"},
        "number": {"type": "integer"},
    }


def test_a_server_that_pours_out_a_line_without_an_end_is_ended():
    with server("plain") as made:
        assert call(made, "pour", seconds=0.3)[1] == {"tool/timeouts": 1}
        assert call(made, "add", '{"a": 1, "b": 1}') == ("2", {})
        assert made.num_starts == 2


def test_a_server_that_dies_in_a_call_is_started_again():
    with server("plain") as made:
        text, counters = call(made, "die")
        assert text.startswith("error: the tool's server went away during the call")
        assert counters == {"tool/errors": 1, "mcp/lost": 1}
        assert call(made, "add", '{"a": 1, "b": 1}') == ("2", {})  # `tools` has started it
        assert made.num_starts == 2


def test_a_server_that_dies_within_an_episode_is_started_by_the_next_call():
    async def episode(made):
        runner = ToolRunner(await made.tools())
        calls = [ToolCall(name=n, arguments=a) for n, a in (("die", "{}"), ("pid", "{}"))]
        return await runner.run(calls)

    with server("plain") as made:
        replies, counters = asyncio.run(episode(made))
    assert replies[1].content.isdigit()
    assert counters["mcp/restarts"] == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "offers no tool"),
        ("twice", r"'t'.*\b2\b"),
        ("name", r"the tool 'a b\\n<|im_start|>' has a name that calls cannot carry"),
        ("type", r"#/properties/a/type: 5\b"),
        ("array", "'object'"),
        ("ref", r"\$ref '#/\$defs/no'"),
        ("far", r"\$ref 'http://h/s'"),
        ("long", "200.*16384"),
        ("many", "256"),
        ("broken", "cannot find its key"),
    ],
)
def test_a_server_that_no_tool_can_be_made_of_is_refused_at_start(kind, message):
    with server(kind) as made, pytest.raises(ToolServerError, match=message):
        asyncio.run(made.tools())


def test_tools_can_be_chosen_by_name():
    with server("many", only=("t3", "t7")) as made:
        assert [t.name for t in asyncio.run(made.tools())] == ["t3", "t7"]
    with (
        server("result", only=("tt",)) as made,
        pytest.raises(ConfigError, match=r"has no tool 'tt'\. (Known: t|Did you mean 't')"),
    ):
        asyncio.run(made.tools())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("result", "error: RuntimeError: Invalid structured content returned by tool t"),
        ("garbage", "error: ValidationError: 1 validation error for CallToolResult"),
    ],
)
def test_a_result_that_breaks_the_servers_word_is_an_observation(kind, text):
    with server(kind) as made:
        said, counters = call(made, "t")
        assert said.startswith(text)
        assert counters.pop("tool/errors") == 1
        assert not counters.keys() - {"tool/truncated"}


def test_a_server_that_comes_back_with_other_tools_is_not_used(tmp_path):
    with server("changes", tmp_path / "starts") as made:
        assert "went away" in call(made, "t1")[0]
        with pytest.raises(ToolServerError, match=r"\['t1'\].*\['t2'\]"):
            asyncio.run(made.tools())


def test_a_server_that_says_nothing_is_given_up():
    with (
        server("silent", start_seconds=0.5) as made,
        pytest.raises(ToolServerError, match=r"start_seconds=0\.5"),
    ):
        asyncio.run(made.tools())


def test_a_program_or_url_that_is_not_there_is_named():
    for address, message in (
        (ServerAddress(command="no-such-program"), "'no-such-program'"),
        (ServerAddress(url="http://127.0.0.1:9/mcp"), "Is it running"),
    ):
        with pytest.raises(ToolServerError, match=message):
            asyncio.run(ToolServer(address).tools())


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_NO_SUCH", raising=False)
    with pytest.raises(ConfigError, match="LOCKSTEP_NO_SUCH"):
        ServerAddress(command="x", pass_variables=("LOCKSTEP_NO_SUCH",)).variables()


def test_a_server_over_http_is_used_alike():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SERVERS, "honest", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        with server(url=f"http://127.0.0.1:{port}/mcp") as made:
            assert call(made, "add", '{"a": 2, "b": 3}') == ("5", {})
            text, counters = call(made, "die")
            assert text.startswith("error: the tool's server went away")
            assert counters["mcp/lost"] == 1
            with pytest.raises(ToolServerError, match="/mcp"):
                asyncio.run(made.tools())
    finally:
        process.kill()
        process.wait()


DAEMON = """
import json, os, subprocess, sys, time
wild = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", wild], env={})
if sys.argv[1] == "daemon" and os.fork():
    os._exit(0)
os.setsid() if sys.argv[1] == "daemon" else None
print(os.getpid(), file=sys.stderr, flush=True)
tools = [{"name": "pid", "inputSchema": {"type": "object"}}]
answers = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "d", "version": "1"},
    },
    "tools/list": {"tools": tools},
    "tools/call": {"content": [{"type": "text", "text": str(os.getpid())}]},
}
for line in sys.stdin:
    call = json.loads(line)
    if "id" in call:
        known = {"result": answers.get(call["method"])}
        reply = known if known["result"] else {"error": {"code": -32601, "message": "unknown"}}
        print(json.dumps({"jsonrpc": "2.0", "id": call["id"], **reply}), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells who started a daemon")
@pytest.mark.parametrize("kind", ["daemon", "plain"])
async def test_a_server_that_leaves_its_session_and_its_daemons_end_with_the_connection(
    kind, tmp_path
):
    script = tmp_path / "wild_server.py"
    script.write_text(DAEMON)

    def left():
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{name}/cmdline").read_bytes()
                found += [name] * (
                    str(script).encode() in text or b"os.setsid(); os.fork()" in text
                )
        return found

    server = ToolServer(ServerAddress(command=f"python {script} {kind}"))
    (entry,) = await server.tools()
    assert int((await entry.function()).text) > 0
    assert len(left()) >= 2
    await server.close()
    assert left() == []
