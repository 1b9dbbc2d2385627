"""One stored trajectory again: found by any of its names, shown whole, scored to the bit."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from lockstep.cli import BAD_INPUT, FAILED, OK, main
from lockstep.doctor.replay import find, parse_target, score
from lockstep.errors import ConfigError, RunError
from lockstep.store.config import LastConfig, RecordConfig
from lockstep.store.run import RunDirectory, load_run
from lockstep.types import Group, Message, Task, Trajectory

SMALL = ["groups_per_step=1", "group_size=2", "evaluation.num_tasks=1", "checkpoint.keep_last=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps under the contract, the checkpoint of the first let go."""
    path = tmp_path_factory.mktemp("replay") / "run"
    assert main(["train", "quickstart", "steps=2", *SMALL, f"out={path}"]) == OK
    return path


def first_id(run, step=0):
    return next(run.summaries(step))[0].id


def text_of(capsys, *words):
    code = main(["replay", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


# -- scoring ------------------------------------------------------------------------------------


def test_under_the_contract_every_log_prob_of_both_sides_comes_back_to_the_bit(run, capsys):
    code, out, _ = text_of(capsys, f"{run}#{first_id(load_run(run))}", "--score")
    assert code == OK
    assert re.search(r"the trainer's log-probs: all \d+ came back, bit for bit", out)
    assert re.search(r"the sampler's log-probs: all \d+ came back, bit for bit", out)
    assert "which the run began from" in out
    assert "others were drawn" not in out


def test_an_evaluation_is_replayed_with_the_checkpoint_that_played_it(run):
    stored = load_run(run)
    *_, (summary, _) = stored.summaries(split="greedy")
    replay = find(run, summary.id)
    scores = score(replay)
    assert replay.split == "greedy" and "checkpoint step-000002" in scores.weights
    found = replay.comparison("engine")
    assert found["compared_tokens"] == replay.row.num_trained and not found["unequal_tokens"]
    assert found["drawn_otherwise_tokens"] == 0
    assert replay.comparison("trainer")["compared_tokens"] == 0, "evaluations are not trained"
    assert replay.comes_back is True


def test_a_log_prob_that_does_not_come_back_is_named_and_breaks_the_contract(run, capsys):
    replay = find(run, first_id(load_run(run)))
    score(replay)
    place = int(np.flatnonzero(replay.row.loss_mask)[3])
    replay.row.columns["rollout_logprobs"] = replay.row.columns["rollout_logprobs"].copy()
    replay.row.columns["rollout_logprobs"][place] -= 0.25
    found = replay.comparison("engine")
    assert (found["unequal_tokens"], found["first_unequal_token"]) == (1, place)
    assert found["max_abs_diff"] == pytest.approx(0.25, rel=1e-5)
    assert replay.comes_back is False
    drawn = replay.scores.engine_ids.copy()
    drawn[place] += 1
    replay.scores = replace(replay.scores, engine_ids=drawn)
    assert replay.comparison("engine")["first_drawn_otherwise"] == place


def test_weights_that_are_gone_are_said_and_another_checkpoint_can_be_taken(run, capsys):
    name = first_id(load_run(run), step=1)
    code, _, err = text_of(capsys, f"{run}#{name}", "--score")
    assert code == BAD_INPUT
    assert "version 1" in err and "@2 (version 2)" in err and "checkpoint.keep_last" in err
    code, out, _ = text_of(capsys, f"{run}@2#{name}", "--json")
    assert code == OK
    said = json.loads(out)["scores"]
    assert said["version"] == 2 and said["comes_back"] is None
    assert said["trainer"]["other_version_tokens"] > 0
    code, _, err = text_of(capsys, f"{run}@7#{name}")
    assert code == BAD_INPUT and "no checkpoint of step 7; it has 2" in err


def test_the_json_is_the_stored_trajectory_with_what_it_was_scored_with(run, capsys):
    name = first_id(load_run(run))
    _, out, _ = text_of(capsys, f"{run}#{name}", "--json")
    said = json.loads(out)
    record = load_run(run).find(name)
    assert said["id"] == name and "scores" not in said
    assert [s["token_ids"] for s in said["segments"]] == [
        s.token_ids.tolist() for s in record.trajectory.segments
    ]


# -- finding and showing ------------------------------------------------------------------------


def forest(name, *, text="hello"):
    out = Trajectory(id=name, task_id="task", status="finished")
    asked = Message(role="user", content=text)
    prompt = out.observe([1, 2, 3], messages=[asked])
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
            task = Task(id="world/7")
            run.write_trajectories(step, [Group(task=task, trajectories=played)])
    return tmp_path / "run"


def test_a_trajectory_is_found_by_id_row_number_and_the_end_of_an_id(stored):
    for name in ("train/4/world/7/1", "4/world/7/1", "3"):
        replay = find(stored, name)
        assert replay.record.trajectory.id == "train/4/world/7/1" and replay.leaf == 1
    assert find(stored, "train/4/world/7/1/2").leaf == 2
    assert find(stored, "0").record.trajectory.id == "train/3/world/7/0"


def test_an_unknown_name_says_what_was_meant_or_why_it_is_gone(stored):
    for name, text in (
        ("train/4/world/7/8", "Did you mean 'train/4/world/7/"),
        ("train/1/world/7/0", r"stored are steps 3 to 4, 4 in all \(record.keep\)"),
        ("train/4/world/7/1/9", r"no leaf 9; it has 1, 2"),
        ("world/7/1", "holds no trajectory 'world/7/1'"),
        ("99", "holds no trajectory '99'"),
        ("", "holds no trajectory ''"),
    ):
        with pytest.raises(RunError, match=text):
            find(stored, name)


def test_what_names_no_trajectory_is_a_bad_input(stored, tmp_path, capsys):
    with pytest.raises(ConfigError, match="expected RUN#ID"):
        parse_target("runs/first")
    assert parse_target("a@b#x/1") == (tmp_path.__class__("a@b"), None, "x/1")
    assert parse_target("a@3#x#y")[1:] == (3, "x#y")
    assert text_of(capsys, stored)[0] == BAD_INPUT
    code, _, err = text_of(capsys, f"{tmp_path / 'none'}#0")
    assert code == BAD_INPUT and "is not a run directory" in err
    with RunDirectory.create(tmp_path / "empty", {"recipe": "x"}):
        pass
    code, _, err = text_of(capsys, f"{tmp_path / 'empty'}#0")
    assert code == BAD_INPUT and "holds no trajectory" in err
    code, _, err = text_of(capsys, f"{stored}#0", "--score")
    assert code in (BAD_INPUT, FAILED) and err


def test_hostile_text_is_shown_as_its_escape(tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", {"recipe": "x", "model": ""}) as run:
        t = forest("train/0/a/0", text="one\x1b[2J\ntwo\r\u202e[bold red]")
        run.write_trajectories(0, [Group(task=Task(id="a"), trajectories=[t])])
    code, out, _ = text_of(capsys, f"{tmp_path / 'run'}#0", "--tokens")
    assert code == OK and "\x1b" not in out and "\\x1b[2J" in out and "[bold red]" in out
    assert "leaf 1; others: 2" in out and "lockstep replay" in out
