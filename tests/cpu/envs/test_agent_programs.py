"""Finished agents as tasks: programs that ask over HTTP, and agents that connect."""

import asyncio
import json
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from playing import all_groups

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Score
from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.scoring import ExactScorer, ScorerConfig
from lockstep.envs.programs.config import AgentProgramConfig, ConnectConfig
from lockstep.envs.programs.program import score_of
from lockstep.errors import ConfigError, DataError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, Task

RENDERER = ChatMLRenderer(byte_tokenizer(), ChatMLConfig())
HEADER = """
import json, os, sys, urllib.error, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json",
               "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=20))

def ask(text):
    body = {"model": os.environ["LOCKSTEP_MODEL"], "messages": [{"role": "user", "content": text}]}
    reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return reply["choices"][0]["message"]["content"]

task = json.loads(os.environ["LOCKSTEP_TASK"])
"""


def says(text):
    ids = RENDERER.render_reply(Message(role="assistant", content=text))
    return FakeEngine(lambda request: ids)


def play(config, tasks, *, agents=None, group_size=1, **settings):
    """The trajectories of one episode for each task; agents: run beside, given the address."""
    agent = AgentConfig(**{"max_seconds": 20.0, **settings})
    notes: list[str] = []
    gateway = RunGateway(GatewayConfig(), RENDERER, model="m", note=notes.append)

    async def main():
        beside = None
        try:
            if agents is not None:
                beside = asyncio.create_task(agents((await gateway.open()).url))
            return await all_groups(
                says("four"), RENDERER, lambda task: config.environment(task, agent), tasks,
                group_size=group_size, config=agent, max_tokens=4096, gateway=gateway.open,
            )  # fmt: skip
        finally:
            if beside is not None:
                beside.cancel()
            await gateway.close()

    groups = asyncio.run(main())
    assert len(notes) == 1 and notes[0].startswith("gateway: agents find the model m at http://127")
    return [t for group in groups for t in group.trajectories]


def program(tmp_path, body, **settings) -> AgentProgramConfig:
    path = tmp_path / "my_agent.py"
    path.write_text(HEADER + textwrap.dedent(body))
    return AgentProgramConfig(command=f"python {path}", **settings)


TASK = Task(id="t", payload={"question": "2 + 2", "answer": "four"})


def test_a_program_is_rewarded_by_the_last_line_that_it_prints(tmp_path):
    config = program(tmp_path, 'print("I think:", ask(task["question"]))\nprint(0.5)')
    (trajectory,) = play(config, [TASK])
    assert trajectory.status == "finished" and trajectory.reward == 0.5
    assert trajectory.segments[0].messages[0].content == "2 + 2"


def test_a_program_posts_its_reward_or_prints_it_with_parts(tmp_path):
    posts = 'post(os.environ["LOCKSTEP_SESSION_URL"] + "/reward", {"reward": 0.25})'
    (trajectory,) = play(program(tmp_path, f'ask("a")\n{posts}\nprint("bye")'), [TASK])
    assert trajectory.reward == 0.25
    prints = 'print(json.dumps({"reward": 1, "parts": {"right": 1}}))'
    (trajectory,) = play(program(tmp_path, f'ask("a")\n{prints}'), [TASK])
    assert trajectory.reward == 1.0 and trajectory.reward_parts == {"right": 1.0}


def test_a_scorer_reads_what_a_program_printed(tmp_path):
    config = program(tmp_path, 'print(ask(task["question"]))', scorer=ExactScorer())
    (trajectory,) = play(config, [TASK])
    assert trajectory.reward == 1.0 and trajectory.reward_parts["correctness"] == 1.0


@dataclass(frozen=True, kw_only=True)
class Counts(ScorerConfig):
    async def score(self, task, answer, dialogue):
        return Score(reward=0.0), {"scorer/calls": 1.0}


def test_what_a_scorer_counts_is_in_the_trajectory(tmp_path):
    (trajectory,) = play(program(tmp_path, 'ask("a")', scorer=Counts()), [TASK])
    assert trajectory.metrics["scorer/calls"] == 1


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('ask("a")\nprint("no number")', "no reward: the last line of the program's output is no"),
        ('ask("a")\nprint("no number")', "It printed: no number"),
        ('ask("a")\nsys.exit("out of cheese")', "status 1: out of cheese"),
        ('ask("a")\nos.kill(os.getpid(), 9)', "signal SIGKILL"),
        ("print(1)", "the agent asked for no turn"),
        ('ask("a")\nprint("NaN")', "expected a finite number"),
        ('ask("a")\nprint("1e999")', "reward is inf; expected a finite number"),
        (
            """ask("a")\nprint('{"reward": 1, "parts": {"a": "b"}}')""",
            "parts.a is 'b'; expected a finite number",
        ),
    ],
    ids=["no reward", "its output", "status", "signal", "no turn", "nan", "huge", "parts"],
)
def test_a_program_that_goes_wrong_fails_its_episode_and_says_why(tmp_path, body, error):
    (trajectory,) = play(program(tmp_path, body), [TASK])
    assert trajectory.status == "failed" and error in trajectory.error


@pytest.mark.parametrize(
    ("body", "scorer", "reward", "parts"),
    [
        ('for n in range(9): ask("w" * 900 * n)', None, 0, {}),
        ('print(0.75)\nfor n in range(9): ask("w" * 900 * n)', None, 0, {}),
        ('post(os.environ["LOCKSTEP_SESSION_URL"] + "/reward", {"reward": 0.25})\n'
         'for n in range(9): ask("w" * 900 * n)', None, 0.25, {}),
        ('print("four")\nfor n in range(9): ask("w" * 900 * n)', ExactScorer(), 0,
         {"correctness": 0, "answered": 0}),
        ('try:\n    for n in range(9): ask("w" * 900 * n)\nexcept Exception: print(0.5)',
         None, 0.5, {}),
        ('try:\n    for n in range(9): ask("w" * 900 * n)\nexcept Exception: print("four")',
         ExactScorer(), 1, {"correctness": 1, "answered": 1}),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_program_that_dies_of_the_context_limit_is_truncated(
    tmp_path, body, scorer, reward, parts
):
    (trajectory,) = play(program(tmp_path, body, scorer=scorer), [TASK])
    assert trajectory.status == "truncated", trajectory.error
    assert trajectory.error.startswith("max_tokens: the next turn would begin at token")
    assert trajectory.reward == reward and trajectory.reward_parts == parts


LEAVES = """
    import subprocess, time
    ask("a")
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(__file__ + ".left", "w").write(str(left.pid))
"""


def has_ended(pid_file):
    """Waits at most 60 s for the end of the process whose id is in the file."""
    process = Path("/proc", pid_file.read_text(), "stat")
    for _ in range(600):
        if not process.exists() or ") Z " in process.read_text():
            return True
        time.sleep(0.1)
    return False


def test_a_program_that_is_late_is_killed_with_all_that_it_started(tmp_path):
    body = (
        LEAVES
        + """
    print("waiting", flush=True)
    time.sleep(600)
    """
    )
    (trajectory,) = play(program(tmp_path, body), [TASK], max_seconds=3.0)
    assert trajectory.status == "failed"
    assert "took longer than 3 s (agent.max_seconds). It printed: waiting" in trajectory.error
    assert has_ended(tmp_path / "my_agent.py.left")


def test_what_left_the_programs_group_ends_with_the_program_too(tmp_path):
    body = """
    import time
    ask("a")
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            sys.stdout.close()
            time.sleep(600)
        os.write(writes, str(pid).encode())
        os._exit(0)
    open(__file__ + ".left", "wb").write(os.read(reads, 99))
    print(0.5)
    """
    (trajectory,) = play(program(tmp_path, body), [TASK])
    assert list(trajectory.rewards.values()) == [0.5]
    assert has_ended(tmp_path / "my_agent.py.left")


def test_a_program_whose_child_holds_its_output_open_is_rewarded_at_its_own_end(tmp_path):
    (trajectory,) = play(program(tmp_path, LEAVES + "    print(0.5)"), [TASK])
    assert (trajectory.status, trajectory.reward) == ("finished", 0.5), trajectory.error
    assert has_ended(tmp_path / "my_agent.py.left"), "what it left behind is ended"


def test_a_program_does_not_see_the_users_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "7")
    monkeypatch.setenv("MY_SETTING", "5")
    body = """
    ask("a")
    known = {name: float(os.environ.get(name) or 0) for name in ("HUB_TOKEN", "MY_SETTING")}
    print(json.dumps({"reward": float("PATH" in os.environ), "parts": known}))
    """
    (trajectory,) = play(program(tmp_path, body), [TASK])
    assert trajectory.reward == 1
    assert trajectory.reward_parts == {"HUB_TOKEN": 0.0, "MY_SETTING": 0.0}
    (trajectory,) = play(program(tmp_path, body, pass_variables=("MY_SETTING",)), [TASK])
    assert trajectory.reward_parts == {"HUB_TOKEN": 0.0, "MY_SETTING": 5.0}
    with pytest.raises(ConfigError, match="pass_variables: NO_SUCH"):
        program(tmp_path, body, pass_variables=("NO_SUCH",)).check()


def test_a_program_cannot_list_reward_or_end_the_sessions_of_others(tmp_path):
    body = """
        gateway = os.environ["LOCKSTEP_SESSION_URL"].rpartition("/")[0]
        def refused(url, body=None, key=""):
            data = None if body is None else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            try:
                urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20)
            except urllib.error.HTTPError as error:
                return error.code in (401, 403)
        ask("what?")
        own = os.environ["OPENAI_API_KEY"]
        tries = [refused(gateway), refused(gateway, key=own), refused(gateway, {}),
                 refused(gateway + "/other/reward", {"reward": 1}, own),
                 refused(os.environ["LOCKSTEP_SESSION_URL"] + "/finish", {})]
        parts = {str(i): float(bool(t)) for i, t in enumerate(tries)}
        print(json.dumps({"reward": float(all(tries)), "parts": parts}))
    """
    (trajectory,) = play(program(tmp_path, body), [Task(id="a")])
    assert list(trajectory.reward_parts.values()) == [1.0] * 5
    assert set(trajectory.rewards.values()) == {1.0}


def test_a_score_replaces_whatever_the_agent_posted(tmp_path):
    body = """
    ask("a")
    ask("a")
    post(os.environ["LOCKSTEP_SESSION_URL"] + "/reward",
         {"reward": 1000, "leaf": 1, "parts": {"own": 1}})
    post(os.environ["LOCKSTEP_SESSION_URL"] + "/reward", {"reward": 1000})
    print("five")
    """
    (trajectory,) = play(program(tmp_path, body, scorer=ExactScorer()), [TASK])
    assert set(trajectory.rewards.values()) == {0.0} and "own" not in trajectory.reward_parts
    assert not any(segment.reward for segment in trajectory.segments)
    assert trajectory.metrics["gateway/ignored_rewards"] == 2


def test_tasks_of_a_file_are_any_objects_and_a_share_is_held_out(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"repo": n, "id": f"r{n}"}) for n in range(40)))
    config = AgentProgramConfig(command=f"{sys.executable} x.py", path=str(path))
    config.check()
    held_out = {task.id for task in config.tasks(split="eval", seed=0)}
    trained = {task.id for task in config.tasks(split="train", seed=0).take(40)}
    assert held_out and not held_out & trained
    path.write_text('{"id": 1}\n{"id": 1}\n')
    with pytest.raises(DataError, match=r"tasks\.jsonl:2.*id '1'.*line 1\b"):
        replace(config).check()
    endless = AgentProgramConfig(command="python x.py").tasks(split="train", seed=0)
    assert next(endless).payload.keys() == {"seed"}


def test_the_last_line_is_a_reward_if_it_is_a_number_or_says_so():
    assert score_of("") is None and score_of("true") is None and score_of('{"a": 1}') is None
    assert score_of("noise\n-1.5").reward == -1.5


def test_agents_that_connect_claim_tasks_over_http_until_the_run_ends():
    aiohttp = pytest.importorskip("aiohttp")

    async def worker(url):
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.post(f"{url}/claim", json={"wait_seconds": 5}) as response:
                    if response.status == 410:  # the run is over
                        return
                    if response.status == 204:
                        continue
                    claimed = await response.json()
                keys = {"Authorization": f"Bearer {claimed['api_key']}"}
                text = claimed["task"]["payload"]["question"]
                body = {"model": claimed["model"], "messages": [{"role": "user", "content": text}]}
                asked = f"{claimed['openai_base_url']}/chat/completions"
                async with http.post(asked, json=body, headers=keys) as response:
                    said = (await response.json())["choices"][0]["message"]["content"]
                end = f"{url}/sessions/{claimed['id']}"
                reward = {"reward": float(said == "four")}
                async with http.post(f"{end}/reward", json=reward, headers=keys) as response:
                    assert response.status == 200
                async with http.post(f"{end}/finish", json={}, headers=keys) as response:
                    assert response.status == 200

    async def two_workers(url):
        await asyncio.gather(worker(url), worker(url))

    found = play(ConnectConfig(), [TASK], agents=two_workers, group_size=4)
    assert [t.status for t in found] == ["finished"] * 4
    assert [t.reward for t in found] == [1.0] * 4


def test_a_model_is_trained_by_an_unmodified_openai_client(tmp_path):
    pytest.importorskip("openai")
    from lockstep.recipes import find_recipe
    from lockstep.run.train import train
    from lockstep.run_config import EvaluationConfig

    path = tmp_path / "agent.py"
    path.write_text(
        textwrap.dedent("""
        import os
        from openai import OpenAI

        client, messages = OpenAI(), []
        for question in ("Say a word.", "And one more."):
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(
                model=os.environ["LOCKSTEP_MODEL"], messages=messages, max_tokens=8, temperature=0.5
            )
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        print(len(set(messages[-1]["content"])) / 16)
        """)
    )
    config = replace(
        find_recipe("agent"),
        task=AgentProgramConfig(command=f"python {path}"),
        steps=3,
        groups_per_step=1,
        group_size=2,
        contract="none",
        evaluation=EvaluationConfig(num_tasks=1, greedy=False, at_start=False),
    )
    outcome = train(config, out=tmp_path / "run", view="json")
    assert outcome.status == "done"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [row for row in rows if "episodes/total" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["episodes/failed"] == 0 and row["episodes/turns_mean"] == 2
        assert row["training/rows"] == 2 and row["mismatch/max_abs_diff"] < 1e-4  # float32
        assert row["episode/gateway/ignored/temperature"] == 2  # the run's rules
