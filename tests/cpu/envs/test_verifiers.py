"""Environments of verifiers, played in a process of their own against an endpoint of ours.

The real package runs where LOCKSTEP_VERIFIERS names the Python of an environment that has verifiers
0.4.0: `make test-verifiers`.
"""

import asyncio
import contextlib
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from aiohttp import web
from quickstarts import quickstart_with

from lockstep.agent.harness import Endpoint
from lockstep.envs.verifiers.config import VerifiersConfig
from lockstep.errors import ConfigError, DataError, ToolServerError

PYTHON = os.environ.get("LOCKSTEP_VERIFIERS", "")
needs_verifiers = pytest.mark.skipif(
    not PYTHON, reason="LOCKSTEP_VERIFIERS names no Python with verifiers 0.4 (make test-verifiers)"
)


@contextlib.contextmanager
def model_server(answer):
    """A chat endpoint that says `answer(question)`; its `keys` are those that clients came with."""
    keys = []

    async def complete(request):
        keys.append(request.headers.get("Authorization"))
        body = await request.json()
        said = answer(body["messages"][-1]["content"])
        if said is None:
            return web.json_response({"error": {"message": "no such model"}}, status=400)
        return web.json_response(
            {
                "id": "1", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": [
                    {"index": 0, "finish_reason": "stop",
                     "message": {"role": "assistant", "content": said}}
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )  # fmt: skip

    async def start():
        app = web.Application()
        app.router.add_post("/s/1/v1/chat/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/s/1"
        endpoint = Endpoint(
            base_url=url,
            api_key="session-key",
            model="policy",
            session_id="1",
            session_url=url.replace("/s/", "/sessions/"),
            offer=asyncio.Event().wait,  # nobody claims it
        )
        yield endpoint, keys
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def right(question):
    return str(int(re.findall(r"\d+", question)[0]) + 1)


@pytest.fixture(scope="module")
def guess():
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = VerifiersConfig(
        taskset="guess-taskset",
        settings={"num": 30},
        agent={"runtime": {"type": "subprocess"}},
        python=PYTHON,
    )
    try:
        config.check()
        yield config
    finally:
        config._child.close()
        monkeypatch.undo()


def play(config, endpoint, count=1):
    tasks = config.tasks(split="train", seed=0).take(count)

    async def episodes():
        return await asyncio.gather(
            *(config.environment(task, None).run(task, endpoint) for task in tasks)
        )

    return asyncio.run(episodes())


@needs_verifiers
def test_an_episode_is_rewarded_by_its_rubric(guess):
    with model_server(right) as (endpoint, keys):
        (score,) = play(guess, endpoint)
    assert score.reward == pytest.approx(1.1)
    assert dict(score.parts) == {"correct": 1.0, "brief": 1.0}
    assert keys == ["Bearer session-key"]


@needs_verifiers
def test_episodes_run_beside_each_other(guess):
    with model_server(lambda question: "I do not know, and say so at length.") as (endpoint, keys):
        scores = play(guess, endpoint, count=6)
    assert [s.reward for s in scores] == [0.0] * 6
    assert len(keys) == 6


@needs_verifiers
def test_an_episode_that_verifiers_calls_failed_fails(guess):
    with (
        model_server(lambda question: None) as (endpoint, _),
        pytest.raises(ToolServerError, match=r"verifiers: .*no such model"),
    ):
        play(guess, endpoint)


@needs_verifiers
def test_splits_share_no_task(guess):
    train = guess.tasks(split="train", seed=0).take(len(guess._tasks["train"]))
    held_out = guess.tasks(split="eval", seed=0).take(100)
    questions = [{t.payload["question"] for t in tasks} for tasks in (train, held_out)]
    assert len(questions[0] | questions[1]) == 30
    assert not questions[0] & questions[1]


@needs_verifiers
def test_a_process_that_ended_is_started_again(guess):
    guess._open()
    guess._child.close()
    with model_server(right) as (endpoint, _):
        assert play(guess, endpoint)[0].reward == pytest.approx(1.1)


@needs_verifiers
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"taskset": "no-such-taskset"}, ConfigError, "'no-such-taskset'"),
        ({"settings": {"nmu": 3}}, ConfigError, "nmu"),
        ({"harness": "bash"}, ConfigError, "the program of agent runs the model's code"),
        ({"settings": {"num": 1}}, DataError, r"\b1\b.*eval_share=0.1"),
    ],
    ids=["taskset", "setting", "code", "few"],
)
def test_what_cannot_be_played_is_refused_before_a_model_is_loaded(
    settings, error, message, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = VerifiersConfig(
        **{"taskset": "guess-taskset", "runtime": "subprocess", "python": PYTHON} | settings
    )
    try:
        with pytest.raises(error, match=message):
            config.check()
    finally:
        config._child.close()


def test_a_python_without_verifiers_is_told_what_to_install(tmp_path):
    empty = VerifiersConfig(taskset="x", python=sys.executable)
    with pytest.raises(ConfigError, match=r"has no verifiers\. Install it there|has verifiers"):
        empty.check()
    gone = VerifiersConfig(taskset="x", python=str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="cannot be started"):
        gone.check()


def test_settings_are_given_on_the_command_line():
    task = quickstart_with("task=verifiers", "task.taskset=gsm8k-v1", "task.settings.split=train",
        "task.agent.max_turns=8", "task.harness=null").task  # fmt: skip
    assert task.settings == {"split": "train"}
    assert task._child._opening["environment"] == {
        "id": "",
        "taskset": {"id": "gsm8k-v1", "split": "train"},
        "agent": {"max_turns": 8, "runtime": {"type": "docker"}, "harness": {"id": "null"}},
    }
