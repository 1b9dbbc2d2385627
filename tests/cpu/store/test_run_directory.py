"""A run directory: one writer, whole files, and a resume that loses nothing."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from store_samples import assert_same, groups, rows_with_trainer_values

from lockstep.config import resolve
from lockstep.errors import DataError, RunError
from lockstep.store.config import LastConfig, RecordConfig, SampleConfig
from lockstep.store.metrics import JsonlLogger, read_rows
from lockstep.store.run import RunDirectory, default_run_path, load_run
from lockstep.store.trajectories import read_row

CONFIG = {"recipe": "quickstart", "seed": 1, "optimizer": {"lr": 1e-3}}


def write_steps(run, steps, *, with_trajectories=True):
    for step in steps:
        if with_trajectories:
            written = groups(2, 1)
            run.write_trajectories(step, written, samples=rows_with_trainer_values(written))
        run.log({"step": step, "reward/mean": step / 10})


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    with RunDirectory.create(tmp_path / "run", CONFIG, facts={"fingerprint": "f"}) as writer:
        write_steps(writer, range(3))
        writer.write_trajectories(2, groups(1, 1), split="heldout-greedy")
        (tmp_path / "run/checkpoints/step-000002").mkdir()
        (tmp_path / "run/checkpoints/step-000003.partial").mkdir()
        writer.add_facts({"architecture": "moe"})
    run = load_run(tmp_path / "run")
    assert run.name == "run"
    assert run.config == CONFIG
    assert run.metrics[2] == {"step": 2, "reward/mean": 0.2}
    assert run.column("reward/mean") == ([0, 1, 2], [0.0, 0.1, 0.2])
    assert run.steps() == [0, 1, 2] and run.splits() == ["heldout-greedy", "train"]
    assert len(list(run.trajectories())) == 6
    assert_same(groups(2, 1), run.groups(1))
    assert_same(groups(1, 1), run.groups(2, split="heldout-greedy"))
    assert list(run.checkpoints()) == [2]
    environment = run.environment
    assert environment["fingerprint"] == "f" and environment["architecture"] == "moe"
    assert environment["pid"] == os.getpid() and environment["versions"]["numpy"] == np.__version__
    summary = next(run.summaries(1))
    assert_same(groups(2, 1)[0].trajectories[0], read_row(*summary.address).trajectory)
    assert run.find(summary.id).step == 2, "the latest of that id"


def test_a_missing_trajectory_or_step_is_named(tmp_path):
    with RunDirectory.create(tmp_path, CONFIG) as writer:
        write_steps(writer, [4])
    run = load_run(tmp_path)
    with pytest.raises(RunError, match=r"step 3\b.*4\.\.4"):
        list(run.trajectories(3))
    with pytest.raises(RunError, match="'nobody'"):
        run.find("nobody")


def test_metrics_rows_are_strict_json_and_keep_what_is_not_finite(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    row = {"step": 0, "a": math.inf, "b": -math.inf, "c": np.float32(0.5), "d": np.int64(3)}
    logger.log(row)
    logger.log({"step": 1, "a": math.nan})
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=pytest.fail)["a"] == "Infinity"
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert first == row and math.isnan(second["a"])


def test_a_metric_that_is_no_number_is_refused(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=r"'a'.*'high'"):
        logger.log({"step": 0, "a": "high"})
    with pytest.raises(DataError, match="`step`"):
        logger.log({"a": 1})
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []


def test_a_step_may_not_go_back(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log({"step": 5})
    logger.log({"step": 5, "eval/heldout/greedy/mean": 1.0})
    with pytest.raises(RunError, match=r"step 4\b.*step 5\b"):
        logger.log({"step": 4})
    logger.close()
    with pytest.raises(RunError, match=r"step 4\b.*step 5\b"):
        JsonlLogger(tmp_path / "metrics.jsonl").log({"step": 4})


def test_a_torn_last_line_is_cut_off_and_the_rest_stays(tmp_path):
    with RunDirectory.create(tmp_path, CONFIG) as writer:
        write_steps(writer, [0, 1], with_trajectories=False)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "rew')
    assert len(load_run(tmp_path).metrics) == 2, "a reader meets a run in mid-write"
    with RunDirectory.open(tmp_path) as writer:
        write_steps(writer, [2], with_trajectories=False)
    assert [row["step"] for row in load_run(tmp_path).metrics] == [0, 1, 2]
    assert len(load_run(tmp_path).environment["resumes"]) == 1


def test_damage_inside_the_metrics_names_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        list(read_rows(path))


def test_rewind_moves_later_rows_and_parts_aside(tmp_path):
    with RunDirectory.create(tmp_path, CONFIG) as writer:
        write_steps(writer, range(5))
        before = (tmp_path / "metrics.jsonl").read_bytes()
        place = writer.rewind(2)
        assert writer.rewind(2) is None, "nothing is later any more"
        write_steps(writer, [3])
    run = load_run(tmp_path)
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3] == run.steps()
    assert [row["step"] for row in read_rows(place / "metrics.jsonl")] == [3, 4]
    assert sorted(p.name for p in (place / "trajectories").iterdir()) == [
        "step-000003.parquet", "step-000004.parquet",
    ]  # fmt: skip
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    assert before.startswith(kept[: kept.rindex(b'{"step": 3')]), "earlier rows stay as they are"


def test_a_second_run_in_one_directory_is_refused(tmp_path):
    with (
        RunDirectory.create(tmp_path, CONFIG),
        pytest.raises(RunError, match=rf"in use by process {os.getpid()} "),
    ):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunError, match="holds a run already"):
        RunDirectory.create(tmp_path, CONFIG)
    RunDirectory.open(tmp_path).close()


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path):
    script = (
        "import sys, time\n"
        "from lockstep.store.run import RunDirectory\n"
        "run = RunDirectory.create(sys.argv[1], {})\n"
        "run.log({'step': 0})\n"
        "print('holding', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "holding\n"
        with pytest.raises(RunError, match=f"in use by process {child.pid} "):
            RunDirectory.open(tmp_path / "run")
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert f'"pid": {child.pid}' in (tmp_path / "run/lock").read_text()
    with RunDirectory.open(tmp_path / "run") as writer:
        writer.log({"step": 1})
    assert len(load_run(tmp_path / "run").metrics) == 2


def test_the_lock_of_another_host_is_respected(tmp_path):
    RunDirectory.create(tmp_path, CONFIG).close()
    (tmp_path / "lock").write_text('{"pid": 1, "host": "elsewhere", "since": "2001"}')
    with pytest.raises(RunError, match=r"\b1\b.*2001"):
        RunDirectory.open(tmp_path)
    (tmp_path / "lock").unlink()
    RunDirectory.open(tmp_path).close()


def test_a_start_that_was_killed_early_does_not_block_the_next(tmp_path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "environment.json").write_text("{}")
    RunDirectory.create(tmp_path, CONFIG).close()
    assert load_run(tmp_path).config == CONFIG


def test_a_directory_that_is_no_run_says_what_is_near(tmp_path):
    RunDirectory.create(tmp_path / "runs/demo", CONFIG).close()
    with pytest.raises(RunError, match=r"config.json"):
        load_run(tmp_path / "runs")
    with pytest.raises(RunError, match="does not exist"):
        load_run(tmp_path / "nowhere")


def test_a_run_of_a_later_format_is_refused(tmp_path):
    RunDirectory.create(tmp_path, CONFIG).close()
    environment = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps({**environment, "format_version": 99}))
    with pytest.raises(RunError, match="99"):
        load_run(tmp_path)


def test_keep_last_deletes_older_parts(tmp_path):
    record = RecordConfig(keep=LastConfig(steps=2))
    with RunDirectory.create(tmp_path, CONFIG, record=record) as writer:
        write_steps(writer, range(5))
    assert load_run(tmp_path).steps() == [3, 4]


def test_keep_sample_keeps_whole_groups_and_the_same_ones_again(tmp_path):
    record = RecordConfig(keep=SampleConfig(fraction=0.5))
    kept = []
    for name in ("a", "b"):
        with RunDirectory.create(tmp_path / name, CONFIG, record=record) as writer:
            written = groups(40, 2)
            writer.write_trajectories(0, written, samples=rows_with_trainer_values(written))
        kept.append([g.task.id for g in load_run(tmp_path / name).groups(0)])
        assert {len(g.trajectories) for g in load_run(tmp_path / name).groups(0)} == {2}
    assert kept[0] == kept[1]
    assert 10 <= len(kept[0]) <= 30


def test_a_split_name_cannot_leave_the_directory(tmp_path):
    with (
        RunDirectory.create(tmp_path, CONFIG) as writer,
        pytest.raises(RunError, match="must consist of letters"),
    ):
        writer.write_trajectories(0, groups(1, 1), split="../x")


def test_run_names_are_safe_and_never_collide(tmp_path):
    first = default_run_path("tiny gpt/oss", root=tmp_path)
    assert first.name.startswith("tiny-gpt-oss-") and first.parent == tmp_path
    paths = set()
    for _ in range(3):
        path = default_run_path("x", root=tmp_path)
        path.mkdir()
        paths.add(path)
    assert len(paths) == 3


def test_the_store_does_not_import_torch():
    check = "import sys, lockstep.store.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_keep_is_chosen_by_its_tag():
    config = resolve(RecordConfig(), ["keep=last", "keep.steps=3", "loggers=wandb,trackio"])
    assert config == RecordConfig(keep=LastConfig(steps=3), loggers=("wandb", "trackio"))
