"""The health line in real runs: what eats the learning is said wherever a run is shown."""

import json
import sys

import pytest

import lockstep
from lockstep.agent.config import AgentConfig
from lockstep.recipes import custom_config
from lockstep.run.step_metrics import health_metrics
from lockstep.store.run import load_run
from lockstep.types import Group, Message, Task, ToolCall, Trajectory

TASKS = [{"question": f"Where is the cellar of house {n}?", "answer": n} for n in range(24)]
SMALL = {
    "model": "tiny-qwen3", "tasks": TASKS, "steps": 2, "groups_per_step": 2, "group_size": 8,
    "evaluation": "none", "checkpoint": {"every": 0}, "record": {"loggers": ["trackio"]},
}  # fmt: skip


TRACKIO = """
rows = []
class Run:
    def log(self, numbers, step):
        rows.append(numbers)
    def finish(self):
        pass
def init(**settings):
    return Run()
"""


@pytest.fixture(autouse=True)
def tracked(tmp_path, monkeypatch):
    """The rows that a tracker gets."""
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("trackio", None)


def get_document_chunks(keywords: list[str]) -> str:
    raise ConnectionError(f"no index for {keywords}")


def weather(city: str) -> str:
    return "sunny"


def zero(episode):
    return 0.0


class Sometimes:
    """A reward that raises in one of eight episodes."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, episode):
        self.num_calls += 1
        if self.num_calls % 8 == 2:  # not in the trial before the run
            return {}["gold"]
        return float(self.num_calls % 3)


RUNS = {
    "a tool that always fails, one reward, a rate for large models": (
        {"tools": [get_document_chunks], "reward": zero, "trainer": {"lr": 1e-6}},
        {
            "tool_failing": "100 % of the calls of get_document_chunks failed, for example: error: "
            "ConnectionError: no index for",
            "same_reward": "32 of 32 episodes were in steps where all got one reward, 0 at last",
            "lr_low": "trainer.lr=1e-06 is 0.001 times the usual for this model and method. "
            "Set trainer.lr=0.001.",
        },
    ),
    "cut turns, and a reward that raises": (
        {"reward": Sometimes(), "agent": {"max_turn_tokens": 2}},
        {
            "failed": "4 of 32 episodes failed and were not trained on, for example: "
            "environment.score: KeyError: 'gold' (test_health_runs.py:",
            "cut_by_max_turn_tokens": "32 of 32 episodes had a turn cut by agent.max_turn_tokens=2."
            " Set agent.max_turn_tokens=4.",
        },
    ),
    "a tool that the prompt does not show": (
        {"tools": [weather], "reward": lambda episode: len(episode.answer) % 3},
        {
            "tool_hidden": "the prompt that the model reads does not contain weather, and "
            "nothing calls it. Set renderer.tools_in_prompt=true"
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_eats_the_learning_is_said_on_the_console_in_metrics_trackers_report_and_summary(
    name, tmp_path, capsys
):
    changed, expected = RUNS[name]
    outcome = lockstep.train(custom_config(**SMALL, **changed), out=tmp_path / "run")
    printed, rows = capsys.readouterr().out, load_run(outcome).metrics
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    shown = [each["text"] for each in report["runs"][0]["health"]]
    tracked = sys.modules["trackio"].rows
    for trigger, text in expected.items():
        assert rows[-1][f"health/{trigger}"] == 1
        assert tracked[-1][f"health/{trigger}"] == 1
        assert text in tracked[-1]["health/line"], "the sentences of all triggers that hold"
        assert f"warning: {text}" in printed, "in full, at the step where it begins"
        plain = text.partition(", for example")[0]
        for place in (shown, outcome.summary["health"], printed.splitlines()):
            assert any(f": {plain}" in line for line in place)
    first = next(row["health/line"] for row in tracked if "health/line" in row)
    assert first == expected.get("lr_low", "ok"), "no other trigger holds after one step"
    assert not any("health/line" in row for row in rows), "metrics.jsonl has numbers"
    assert "  health: " in next(line for line in printed.splitlines() if "step 1/2" in line)


def played(*texts, offered=("search",), **fields):
    """An episode whose tool answered so."""
    trajectory = Trajectory(id=f"t/{len(texts)}", **fields)
    trajectory.metrics = {f"tool/offered/{name}": 1.0 for name in offered}
    for turn, text in enumerate(texts):
        call = Message(
            role="assistant", content="", tool_calls=(ToolCall(id="", name="search", arguments=""),)
        )
        at = trajectory.observe([1]) if not turn else len(trajectory.segments) - 1
        ids = trajectory.path_ids(at)
        leaf = trajectory.record([5], logprobs=[-1.0], parent=at, prompt_ids=ids, messages=(call,))
        if text is not None:
            answer = Message(role="tool", content=text, name="search")
            trajectory.observe([6], parent=leaf, messages=(answer,))
    return trajectory


def counted(*trajectories, text="Use search, please.", agent=None):
    group = Group(task=Task(id="t"), trajectories=list(trajectories))
    return health_metrics([group], agent or AgentConfig(), compares=True, decode=lambda ids: text)


def test_episodes_that_never_began_are_counted_and_hide_no_tool():
    dead = [Trajectory(id=f"t/{n}", status="failed", error="no server") for n in range(3)]
    row, reasons = counted(*dead)
    assert reasons == {"failed": "no server"} and not any(name.startswith("tool/") for name in row)
    unread = Trajectory(id="t/4", status="failed", error="the prompt has 900 tokens")
    unread.metrics["tool/offered/search"] = 1.0
    row, _ = counted(*dead, unread, text="")
    assert row["tool/offered/search"] == 1 and "tool/hidden/search" not in row


def test_calls_answers_and_failures_are_counted_for_each_tool():
    found, reasons = counted(
        played("found", "Error: gone"), played("error: no route", None), played(None)
    )
    kinds = ("offered", "calls", "answered", "failed")
    assert [found[f"tool/{kind}/search"] for kind in kinds] == [3, 5, 3, 2]
    assert reasons["tool_failing"] == "error: no route" and "tool/hidden/search" not in found


@pytest.mark.parametrize(("text", "is_hidden"), [
    ("functions.search(query)", False), ("search", False), ("research it", True),
    ("Search for it", True), ("search_all", True), ("", True),
])  # fmt: skip
def test_a_tool_that_nobody_calls_is_hidden_where_the_prompt_lacks_its_name(text, is_hidden):
    episode = Trajectory(id="t/1")
    episode.observe([1, 2])
    episode.metrics["tool/offered/search"] = 1.0
    found, _ = counted(episode, text=text)
    assert found.get("tool/hidden/search", 0) == is_hidden


@pytest.mark.parametrize(("error", "status", "limit"), [
    ("max_tokens: all 64 are used", "truncated", "max_tokens"),
    ("max_turns: 8 turns are over", "truncated", "max_turns"),
    ("max_seconds: 60 s are over", "truncated", "max_seconds"),
    ("max_turn_tokens: turn 0 was cut at 9 tokens", "truncated", "max_turn_tokens"),
    ("harness.run: took longer than 60 s (agent.max_seconds)", "truncated", "max_seconds"),
    ("max_tokens: no room", "failed", ""),
    ("environment.close: OSError: gone", "finished", ""),
])  # fmt: skip
def test_the_limit_that_cut_an_episode_is_counted(error, status, limit):
    found, _ = counted(Trajectory(id="t/1", status=status, error=error))
    cut = {name for name, value in found.items() if name.startswith("episodes/cut/") and value}
    assert cut == ({f"episodes/cut/{limit}"} if limit else set())
