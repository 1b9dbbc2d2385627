"""One stored trajectory: found by any of its names, and shown whole."""

import json
import re

import pytest

from lockstep.cli import BAD_INPUT, OK, main
from lockstep.doctor.replay import find
from lockstep.errors import ConfigError, RunError
from lockstep.store.config import LastConfig, RecordConfig
from lockstep.store.run import RunDirectory, load_run
from lockstep.types import Group, Message, Task, Trajectory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One step under the contract."""
    path = tmp_path_factory.mktemp("replay") / "run"
    small = ["groups_per_step=1", "group_size=2", "evaluation.num_tasks=1"]
    assert main(["train", "quickstart", "steps=1", *small, f"out={path}"]) == OK
    return path


def text_of(capsys, *words):
    code = main(["replay", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


def test_the_json_is_the_stored_trajectory(stored, capsys):
    name = "train/4/world/7/1"
    _, out, _ = text_of(capsys, f"{stored}#{name}", "--json")
    said = json.loads(out)
    record = load_run(stored).find(name)
    assert (said["id"], said["leaf"], said["run"]) == (name, 1, str(stored))
    assert [s["token_ids"] for s in said["segments"]] == [
        s.token_ids.tolist() for s in record.trajectory.segments
    ]


def test_the_tokens_of_a_turn_are_listed_with_the_log_probs_of_both_sides(run, capsys):
    summary = next(load_run(run).summaries(0))
    code, out, _ = text_of(capsys, f"{run}#{summary.id}", "--tokens")
    assert code == OK and "turn 1, sampled by version 0" in out
    row = load_run(run).find(summary.id).trajectory.row(find(f"{run}#{summary.id}").leaf)
    for place in row.loss_mask.nonzero()[0]:
        value = row.columns["rollout_logprobs"][place]
        if abs(value) > 1e-3:
            assert re.search(rf"\n{place} .* {value:.4f} +{value:.4f} +\+0\b", out)


def forest(name, *, text="hello"):
    out = Trajectory(id=name, task_id="task", status="finished")
    prompt = out.observe([1, 2, 3], messages=[Message(role="user", content=text)])
    a = out.record([4, 5], logprobs=[-0.5, -0.25], parent=prompt, prompt_ids=[1, 2, 3])
    b = out.record([6], logprobs=[-1.0], parent=prompt, prompt_ids=[1, 2, 3], reason="retry")
    out.rewards = {a: 1.0, b: 0.0}
    return out


@pytest.fixture
def stored(tmp_path):
    """Steps 3 and 4 of a run without a model; those before them were let go."""
    record = RecordConfig(keep=LastConfig(steps=2))
    config = {"recipe": "x", "model": "none", "record": {"keep": {"type": "last", "steps": 2}}}
    with RunDirectory.create(tmp_path / "run", config, record=record) as run:
        for step in range(5):
            played = [forest(f"train/{step}/world/7/{i}") for i in range(2)]
            run.write_trajectories(step, [Group(task=Task(id="world/7"), trajectories=played)])
    return tmp_path / "run"


def test_a_trajectory_is_found_by_id_row_number_and_the_end_of_an_id(stored):
    for name in ("train/4/world/7/1", "4/world/7/1", "3"):
        replay = find(f"{stored}#{name}")
        assert replay.record.trajectory.id == "train/4/world/7/1" and replay.leaf == 1
    assert find(f"{stored}#train/4/world/7/1/2").leaf == 2
    assert find(f"{stored}#0").record.trajectory.id == "train/3/world/7/0"


def test_an_unknown_name_says_what_was_meant_or_why_it_is_gone(stored):
    for name, text in (
        ("train/4/world/7/8", "'train/4/world/7/"),
        ("train/1/world/7/0", r"\b3\b.*4, 4\b.*\(record.keep\)"),
        ("train/4/world/7/1/9", r"\b9\b.*1, 2\b"),
        ("world/7/1", "'world/7/1'"),
        ("99", "'99'"),
        ("", "holds no trajectory ''"),
    ):
        with pytest.raises(RunError, match=text):
            find(f"{stored}#{name}")


def test_what_names_no_trajectory_is_a_bad_input(stored, tmp_path, capsys):
    with pytest.raises(ConfigError, match="RUN#ID"):
        find("runs/first")
    assert text_of(capsys, stored)[0] == BAD_INPUT
    code, _, err = text_of(capsys, f"{tmp_path / 'none'}#0")
    assert code == BAD_INPUT and "is not a run directory" in err
    with RunDirectory.create(tmp_path / "empty", {"recipe": "x"}):
        pass
    code, _, err = text_of(capsys, f"{tmp_path / 'empty'}#0")
    assert code == BAD_INPUT and "holds no trajectory" in err


def test_hostile_text_is_shown_as_its_escape(tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", {"recipe": "x", "model": ""}) as run:
        t = forest("train/0/a/0", text="one\x1b[2J\ntwo\r\u202e[bold red]")
        run.write_trajectories(0, [Group(task=Task(id="a"), trajectories=[t])])
    code, out, _ = text_of(capsys, f"{tmp_path / 'run'}#0", "--tokens")
    assert code == OK and "\x1b" not in out and "\\x1b[2J" in out and "[bold red]" in out
    assert "leaf 1; others: 2" in out
