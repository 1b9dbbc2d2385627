"""Environments of OpenEnv: their protocol, spoken by a small server here and by the real package.

The real one runs where LOCKSTEP_OPENENV names the Python of an environment that has openenv 0.10.0:
`make test-openenv`.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web
from loopback import LoopbackServer
from playing import play_turns
from quickstarts import quickstart_with

from lockstep.agent.config import AgentConfig
from lockstep.envs.openenv import OpenEnvConfig
from lockstep.errors import ConfigError, ServerUnreachableError, ToolServerError
from lockstep.types import Message, Task, ToolCall

AGENT = AgentConfig()
SCHEMA = {
    "title": "Guess", "description": "One guess at the number.", "type": "object",
    "properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}},
    "required": ["number"], "additionalProperties": False,
}  # fmt: skip


class GuessServer(LoopbackServer):
    """What openenv_server.py does, by hand, with ways to go wrong. `kind` names one."""

    def __init__(self, kind="", sessions=64, schema=SCHEMA):
        self.kind, self.sessions, self.schema = kind, sessions, schema
        self.num_open = 0

    def app(self):
        app = web.Application()
        app.router.add_get("/ws", self.serve)
        app.router.add_get("/schema", self.describe)
        return app

    async def describe(self, request):
        return web.json_response({"action": self.schema, "observation": {}, "state": {}})

    async def serve(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)

        async def error(code, message, **more):
            await socket.send_json(
                {"type": "error", "data": {"message": message, "code": code, **more}}
            )

        if self.num_open >= self.sessions:
            await error("CAPACITY_REACHED", "Server at capacity: 1/1 sessions active")
            await socket.close()
            return socket
        self.num_open += 1
        number = guesses = 0
        try:
            async for message in socket:
                if message.type != WSMsgType.TEXT:
                    break
                sent = json.loads(message.data)
                text, done, reward = "", False, None
                if sent["type"] == "reset":
                    number = sent["data"]["seed"] % 9 + 1
                    text = f"Level {sent['data'].get('level', 1)}: guess from 1 to 9."
                    if self.kind == "reset":
                        await error("EXECUTION_ERROR", "no board")
                        continue
                elif self.kind == "hang":
                    await asyncio.sleep(60)
                elif self.kind == "die":
                    await socket.close()
                    break
                elif self.kind == "garbage":
                    await socket.send_str("{}")
                    continue
                elif sent["data"]["number"] > 9:
                    await error("EXECUTION_ERROR", "the number is at most 9")
                    continue
                else:
                    guesses += 1
                    guess = sent["data"]["number"]
                    text = "right" if guess == number else "higher" if guess < number else "lower"
                    done = guess == number or guesses == 3
                    reward = 1.0 if guess == number else -0.1
                    if self.kind == "nan":
                        reward = float("nan")
                    if self.kind == "flood":
                        text = "x" * 1_000_000
                observation = {"metadata": {}, "text": text}
                data = {"observation": observation, "reward": reward, "done": done}
                await socket.send_json({"type": "observation", "data": data})
        finally:
            self.num_open -= 1
        return socket


@contextlib.contextmanager
def real_server():
    python = os.environ.get("LOCKSTEP_OPENENV")
    if not python:
        pytest.skip("LOCKSTEP_OPENENV names no Python with openenv 0.10.0 (make test-openenv)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("openenv_server.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen([python, script, str(port), "2"], env=environment)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        assert process.poll() is None, "the server of OpenEnv ended; what it said is above"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["protocol", "openenv"])
def url(request):
    if request.param == "openenv":
        with real_server() as real:
            yield real
    else:
        with GuessServer(sessions=2) as made:
            yield made.url


def guess(*numbers):
    calls = tuple(
        ToolCall(name="act", arguments=json.dumps({"number": n}), id=f"{i}")
        for i, n in enumerate(numbers)
    )
    return Message(role="assistant", tool_calls=calls)


def play(config, seed, *turns):
    """(reward, counters, what the model read, whether it ended)."""
    found = play_turns(config.environment(Task(id="t", payload={"seed": seed}), AGENT), turns)
    counters = Counter()
    for observation in found.observations:
        counters.update(observation.metrics)
    done = bool(turns) and found.observations[-1].done
    return found.score.reward, dict(counters), [m.content for m in found.messages], done


def test_an_episode_is_played_by_calls_of_one_tool(url):
    config = OpenEnvConfig(url=url, observation_field="text", reset={"level": 3})
    config.check()
    (tool,) = config.environment(Task(id="t", payload={"seed": 0}), AGENT).tools
    assert (tool.name, tool.description) == ("act", "One guess at the number.")
    assert list(tool.parameters["properties"]) == ["number"]
    reward, counters, read, done = play(config, 4, guess(2), guess(7), guess(5))
    assert read == ["Level 3: guess from 1 to 9.", "higher", "lower"]
    assert reward == pytest.approx(0.8)
    assert (counters, done) == ({"tool/calls": 3}, True)
    config = OpenEnvConfig(url=url, reward="last", observation_field="text")
    assert play(config, 4, guess(2), guess(5))[0] == 1.0


def test_an_observation_is_shown_whole_as_json(url):
    read = play(OpenEnvConfig(url=url, instructions="Play."), 4, guess(2))[2]
    assert read == ["Play.", '{"text": "Level 1: guess from 1 to 9."}', '{"text": "higher"}']


def test_an_action_that_the_server_refuses_is_an_observation(url):
    config = OpenEnvConfig(url=url, observation_field="text")
    reward, counters, read, done = play(config, 4, guess(77), guess("x"), guess(5))
    assert read[1:] == [
        "error: the number is at most 9", "error: number must be integer, found string",
    ]  # fmt: skip
    assert counters == {"tool/calls": 3, "openenv/refused": 1, "tool/invalid_arguments": 1}
    assert (reward, done) == (1.0, True)


def test_several_calls_in_one_turn_are_steps_in_order(url):
    reward, counters, _, done = play(
        OpenEnvConfig(url=url, observation_field="text"), 4, guess(1, 5, 5)
    )
    assert (reward, counters, done) == (pytest.approx(0.9), {"tool/calls": 2}, True)


async def test_episodes_wait_for_a_session_that_is_free(url):
    config = OpenEnvConfig(url=url, observation_field="text")

    async def one(seed):
        environment = config.environment(Task(id="t", payload={"seed": seed}), AGENT)
        try:
            await environment.reset()
            await asyncio.sleep(0.1)
            await environment.step(guess(seed % 9 + 1))
            return (await environment.score()).reward
        finally:
            await environment.close()

    assert (await asyncio.gather(*(one(seed) for seed in range(5)))) == [1.0] * 5


def test_a_reply_without_a_call_ends_the_episode(url):
    reward, counters, _, done = play(
        OpenEnvConfig(url=url), 4, Message(role="assistant", content="No idea.")
    )
    assert (reward, counters, done) == (0.0, {"openenv/gave_up": 1}, True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reset", "no board"),
        ("hang", r"0\.3"),
        ("die", "the connection ended at step"),
        ("garbage", "step.*'{}'"),
        ("nan", "the reward nan is not a number"),
    ],
)
def test_a_server_that_fails_fails_the_episode(kind, message):
    with GuessServer(kind) as server, pytest.raises(ToolServerError, match=message):
        play(OpenEnvConfig(url=server.url, step_seconds=0.3), 4, guess(1))


def test_an_observation_of_megabytes_is_cut():
    with GuessServer("flood") as server:
        text = play(OpenEnvConfig(url=server.url, observation_field="text"), 4, guess(1))[2][1]
    assert text.endswith("[cut: 1000000 characters in all]")
    assert len(text) < 10_000


class _Hasty(OpenEnvConfig):
    queue_seconds = 0.1


def test_a_server_without_a_free_session_is_named():
    with (
        GuessServer(sessions=0) as server,
        pytest.raises(ToolServerError, match=r"no session was free for 0\.1 s"),
    ):
        play(_Hasty(url=server.url), 4)


TEXT = {"type": "object", "properties": {"metadata": {}, "text": {"type": "string"}, "n": {}}}


@pytest.mark.parametrize(
    ("schema", "settings", "message"),
    [
        ({"properties": 3}, {}, "#/properties"),
        (None, {}, "has no schema of actions"),
        (TEXT, {"action_field": "tex"}, "'text'"),
        (TEXT | {"required": ["text", "n"]}, {"action_field": "text"}, "must have n too"),
    ],
    ids=range(4),
)
def test_a_server_that_cannot_be_used_is_refused_at_start(schema, settings, message):
    with (
        GuessServer(schema=schema) as server,
        pytest.raises((ConfigError, ToolServerError), match=message),
    ):
        OpenEnvConfig(url=server.url, **settings).check()


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ServerUnreachableError, match=r"GET http://127\.0\.0\.1:9/schema"):
        OpenEnvConfig(url="http://127.0.0.1:9").check()
    with pytest.raises(ConfigError, match="url is empty"):
        OpenEnvConfig().check()


def test_splits_draw_different_seeds_and_are_resumed_exactly():
    config = quickstart_with("task=openenv", "task.url=http://h", "task.reset.level=3").task
    assert config.reset == {"level": 3}
    seeds = {
        split: {t.payload["seed"] for t in config.tasks(split=split, seed=0).take(200)}
        for split in ("train", "eval")
    }
    assert not seeds["train"] & seeds["eval"]
    source = config.tasks(split="train", seed=0)
    source.take(3)
    again = config.tasks(split="train", seed=0)
    again.load_state_dict(source.state_dict())
    assert again.take(3) == source.take(3)
