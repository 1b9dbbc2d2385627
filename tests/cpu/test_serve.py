"""`lockstep serve` as a user starts it."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import refusal
from quickstarts import quickstart_with

from lockstep.cli import main
from lockstep.config import to_dict
from lockstep.errors import ConfigError, LockstepError, RunError
from lockstep.model_server import BackgroundServer, SessionStore, find_served
from lockstep.models.locate import locate_model
from lockstep.run_config import ServeConfig
from lockstep.store.run import RunDirectory, load_run
from lockstep.types import Trajectory

KEY = "sesame-of-the-test"


def post(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def test_a_model_is_served_until_ctrl_c_and_what_agents_did_is_stored(tmp_path: Path):
    out = tmp_path / "served"
    words = ["serve", "tiny-qwen3", "--json", "--out", str(out), "agent.max_turn_tokens=16",
             "--key", KEY]  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", *words],
        stdout=subprocess.PIPE,
        env={**os.environ, "LOCKSTEP_KEY": ""},
        text=True,
    )
    assert server.stdout is not None
    try:
        begun = json.loads(server.stdout.readline())
        assert begun["url"].startswith("http://127.0.0.1:")
        assert (begun["model"], begun["max_tokens"]) == ("tiny-qwen3", 1024)
        made = post(f"{begun['url']}/sessions", {"task": {"id": "greet"}})
        user = {"role": "user", "content": "Where was Bela born?"}
        body = {"model": "tiny-qwen3", "messages": [user]}
        post(f"{made['openai_base_url']}/chat/completions", body)
        post(f"{begun['url']}/sessions/{made['id']}/reward", {"reward": 0.5})
        post(f"{begun['url']}/sessions/{made['id']}/finish")
        post(f"{begun['openai_base_url']}/chat/completions", body)  # of the shared session
        for _ in range(2):  # an impatient second Ctrl-C loses nothing
            server.send_signal(signal.SIGINT)
            time.sleep(0.05)
        rest = server.stdout.read()
        assert server.wait(30) == 0
    finally:
        server.kill()
    ended = json.loads(rest.splitlines()[-1])
    assert (ended["requests"], ended["failed"], ended["stored"]) == (2, 0, 2)
    records = list(load_run(out).trajectories())
    assert [record.trajectory.status for record in records] == ["finished", "finished"]
    assert records[0].task.id == "greet"
    assert list(records[0].trajectory.rewards.values()) == [0.5]
    assert main(["report", str(out)]) == 0
    stored = [path for path in out.rglob("*") if path.is_file()]
    assert stored and not any(KEY.encode() in path.read_bytes() for path in stored)


def test_sessions_that_the_disk_does_not_take_wait_and_are_tried_again(tmp_path: Path):
    def made(name: str) -> Any:
        trajectory = Trajectory(id=name)
        prompt = trajectory.observe([1, 2])
        trajectory.record([3], logprobs=[-0.5], parent=prompt, prompt_ids=[1, 2])
        return SimpleNamespace(trajectory=trajectory)

    store = SessionStore(tmp_path / "run")
    store.open({"model": "m"})
    store.add(made("a"))
    store.add(SimpleNamespace(trajectory=Trajectory(id="asked for nothing")))  # type: ignore
    (tmp_path / "run" / "trajectories").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="1 finished"):
        store.write()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "trajectories")
    store.add(made("b"))
    store.write()
    store.write()
    assert store.num_stored == 2
    store.close()
    stored = [record.trajectory.id for record in load_run(tmp_path / "run").trajectories()]
    assert stored == ["a", "b"]


def test_a_start_that_is_refused_leaves_no_run_behind(tmp_path: Path, capsys: Any):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for word in (f"gateway.port={port}", "max_tokens=9999"):
            refusal("serve", "tiny-qwen3", word, "--out", tmp_path / "run", capsys=capsys)
            assert not (tmp_path / "run").exists()


def test_a_session_whose_end_was_answered_outlives_the_server(tmp_path: Path):
    out = tmp_path / "served"
    words = ["serve", "tiny-qwen3", "agent.max_turn_tokens=8", "--out", str(out), "--json"]
    server = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        begun = json.loads(server.stdout.readline())
        sessions = [post(f"{begun['url']}/sessions", {}) for _ in range(3)]
        for session in sessions:
            body = {"model": begun["model"], "messages": [{"role": "user", "content": "hi"}]}
            post(f"{session['openai_base_url']}/chat/completions", body)
        with ThreadPoolExecutor(3) as clients:
            list(
                clients.map(
                    lambda s: post(f"{begun['url']}/sessions/{s['id']}/finish", {}), sessions
                )
            )
    finally:
        server.kill()
        server.wait(30)
    assert len(list(load_run(out).trajectories())) == 3


def test_the_curl_command_of_the_docs_gets_a_reply():
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
    command = re.search(r"^curl .*?\n```", page, re.S | re.M)
    assert command is not None
    with BackgroundServer("tiny-qwen3", "agent.max_turn_tokens=8") as server:
        words = shlex.split(command[0].removesuffix("```").replace("\\\n", " "))
        words = [word.replace("http://127.0.0.1:8000", server.url) for word in words]
        done = subprocess.run([*words, "-s"], capture_output=True, check=True)
        assert json.loads(done.stdout)["object"] == "chat.completion"


def test_a_run_is_served_with_its_checkpoint_and_its_sampling(tmp_path: Path):
    config = quickstart_with(
        "model=tiny-qwen3", "agent.temperature=0.7", "agent.max_turn_tokens=33", "max_tokens=99"
    )
    run = tmp_path / "run"
    with RunDirectory.create(run, to_dict(config)):
        pass
    for step in (2, 4):
        policy = run / "checkpoints" / f"step-{step:06d}" / "policy"
        shutil.copytree(locate_model("tiny-qwen3"), policy)
        manifest = {"format_version": 1, "step": step, "metric": 1.0 / step, "files": {}}
        (policy.parent / "manifest.json").write_text(json.dumps(manifest))
    best, fourth = find_served(str(run), ["agent.top_p=0.5"]), find_served(f"{run}@4", [])
    assert (best.version, best.config.agent.top_p, best.config.agent.temperature) == (2, 0.5, 0.7)
    assert (fourth.version, fourth.config.agent.max_turn_tokens, fourth.config.max_tokens) == (
        4,
        33,
        99,
    )
    assert fourth.weights == run / "checkpoints" / "step-000004" / "policy"
    with pytest.raises(LockstepError, match="3"):
        find_served(f"{run}@3", [])


def test_settings_of_a_model():
    config = find_served("tiny-qwen3", ["gateway.port=8000", "agent.top_k=5"]).config
    assert (config.max_tokens, config.gateway.port, config.agent.top_k) == (1024, 8000, 5)
    assert find_served("tiny-qwen3", ["max_tokens=99"]).config.max_tokens == 99


def test_a_server_in_the_background_tells_what_was_wrong_and_closes_twice(monkeypatch: Any):
    with pytest.raises(ConfigError, match="LOCKSTEP_KEY"):
        BackgroundServer("tiny-qwen3", "gateway.host=0.0.0.0")
    with BackgroundServer("tiny-qwen3", "agent.max_turn_tokens=8") as server:
        assert post(f"{server.url}/sessions")["model"] == "tiny-qwen3"
        server.close()


@pytest.mark.parametrize(
    "words, text",
    [
        (["serve"], "which model?"),
        (["serve", "no-such-model"], "no-such-model"),
        (["serve", "tiny-qwen3", "temperatur=1"], "Did you mean 'agent.temperature=1'?"),
        (["serve", "tiny-qwen3", "agent.temperature=-1"], "temperature=-1"),
        (["serve", "tiny-qwen3", "fallback=true"], "engine=embedded runs the decoder"),
        (["serve", "tiny-qwen3", "--port", "99999"], "gateway.port=99999"),
        (["serve", "tiny-qwen3", "--host", "0.0.0.0"], "LOCKSTEP_KEY"),
    ],
    ids=[
        "no-model", "unknown-model", "unknown-key", "bad-value", "fallback", "bad-port", "no-key",
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_at_once(
    words: list[str], text: str, capsys: Any, monkeypatch: Any, tmp_path: Path
):
    monkeypatch.delenv("LOCKSTEP_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir()), "without --out nothing is kept"


def test_help_lists_every_setting_and_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "tiny-qwen3", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "gateway.max_body_bytes=" in printed and "turn_seconds=" in printed
    assert main(["serve", "tiny-qwen3", "--dry-run", "--port", "8000"]) == 0
    assert '"port": 8000' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="turn_seconds"):
        ServeConfig(turn_seconds=0)
