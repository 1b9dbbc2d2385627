"""Whole runs over two processes: the same as one, resumed by one, interrupted, refused, broken."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from full_counts import PROOF
from quickstarts import quickstart_with

from lockstep.agent.buffer import deal_tasks
from lockstep.cli import main
from lockstep.config import from_dict
from lockstep.run.train import train
from lockstep.run_config import Config
from lockstep.store.metrics import read_rows
from lockstep.store.run import load_run
from lockstep.types import Task

SMALL = (
    "steps=2", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=3",
    "evaluation.greedy=false", "contract=true-on-policy", "trainer.measure_after_every=0",
)  # fmt: skip
ARMS = {"tokens and sharded": ("parallel.sequence=2", "trainer.recompute=blocks")}
if PROOF:
    ARMS |= {
        "sharded": (),
        "rows": ("parallel.shard=false",),
        "tokens": ("parallel.sequence=2", "parallel.shard=false"),
    }
ADDED = {"tokens/cached", "tokens/prefilled", "episode/cached"}  # each engine has a cache


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "alone"
    train(quickstart_with(*SMALL), out=path, view="json")
    return load_run(path)


def logprobs_of(run, step):
    """trajectory -> the log-probs that were recorded, of one step."""
    return {
        t.id: [s.logprobs for s in t.segments if s.is_sampled]
        for group in run.groups(step)
        for t in group.trajectories
    }


@pytest.mark.parametrize("arm", ARMS)
def test_two_processes_make_the_run_of_one(alone, arm, tmp_path):
    config = quickstart_with(*SMALL, "parallel.processes=2", *ARMS[arm])
    outcome = train(config, out=tmp_path / "run", view="json")
    found = load_run(outcome.path)
    assert outcome.status == "done" and found.environment["processes"] == 2
    assert len(found.metrics) == len(alone.metrics) == 4
    for left, right in zip(found.metrics, alone.metrics, strict=True):
        assert set(left) == set(right)
        if "mismatch/unequal_tokens" in left:
            assert left["mismatch/unequal_tokens"] == 0 < left["mismatch/compared_tokens"]
        for name, value in right.items():
            if isinstance(value, float | int) and name not in ADDED and name[:5] != "time/":
                assert left[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name
    before, expected = logprobs_of(found, 0), logprobs_of(alone, 0)
    assert list(before) == list(expected), "the groups stand in the order of the tasks"
    for name, parts in expected.items():
        for a, b in zip(before[name], parts, strict=True):
            np.testing.assert_array_equal(a, b)  # the first step: the same weights, the same bits


@pytest.mark.parametrize("signal", ["top_k", *(("sampled",) if PROOF else ())])
def test_a_teacher_tells_two_processes_what_it_tells_one(signal, tmp_path):
    """The teacher is whole on each; the student is spread over both."""
    settings = (
        *SMALL, "groups_per_step=4", "group_size=2", "distill.teacher.model=tiny-gpt-oss",
        f"distill.signal={signal}", "distill.reward_coef=1", "evaluation=none",
    )  # fmt: skip
    found = []
    for name, more in (("one", ()), ("two", ("parallel.processes=2",))):
        config = quickstart_with(*settings, *more)
        found.append(load_run(train(config, out=tmp_path / name, view="json").path).metrics)
    names = {"distill/kl", "train/loss", "train/grad_norm", "reward/mean"}
    names |= {"train/teacher_kl"} if signal == "top_k" else set()
    for one, two in zip(*found, strict=True):
        assert {n: two[n] for n in names} == pytest.approx(
            {n: one[n] for n in names}, rel=1e-3, abs=1e-6
        )
    assert abs(found[0][1]["distill/kl"]) > 1e-5, "an update by rewards makes another policy"


def test_two_processes_replace_the_silent_groups_that_one_replaces(tmp_path):
    settings = (
        *SMALL, "steps=3", "groups_per_step=3", "group_size=2", "evaluation=none",
        "signal.max_extra_tasks=5", "task.retrieval_weight=0", "task.format_penalty_weight=0",
    )  # fmt: skip
    found = []
    for name, more in (("one", ()), ("two", ("parallel.processes=2",))):
        config = quickstart_with(*settings, *more)
        found.append(load_run(train(config, out=tmp_path / name, view="json").path))
    names = {
        "signal/replaced", "signal/missing", "tokens/sampled", "tokens/replaced", "episodes/total",
        "reward/mean", "train/grad_norm", "mismatch/unequal_tokens",
    }  # fmt: skip
    for one, two in zip(*(run.metrics for run in found), strict=True):
        assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-4)
    assert sum(row["signal/replaced"] for row in found[0].metrics) > 2
    kept = [sorted(record.trajectory.id for record in run.trajectories()) for run in found]
    assert kept[0] == kept[1], "what was sampled in vain is stored once, whoever sampled it"


def test_a_task_that_comes_twice_stays_on_one_rank():
    tasks = [Task(id=name) for name in "abcabd"]
    assert deal_tasks(tasks, 2) == [[0, 2, 3], [1, 4, 5]]
    assert deal_tasks(tasks[:1], 3) == [[0], [], []]


# -- ends ---------------------------------------------------------------------------------------


def start(path, *settings, environment=None, **options):
    command = [sys.executable, "-m", "lockstep.cli", "train", "quickstart", *SMALL, *settings]
    return subprocess.Popen(
        [*command, f"out={path}"], text=True, env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def start_ranks(path, *settings_of_rank):
    """Two processes as a cluster would start them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [
        start(
            path, "parallel.timeout_seconds=60", *settings,
            environment={
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank, settings in enumerate(settings_of_rank)
    ]  # fmt: skip


def wait_for_rows(path, count, process):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if len(rows := list(read_rows(path / "metrics.jsonl"))) >= count:
            return rows
        time.sleep(0.1)
    raise AssertionError(f"no {count} rows; exit code {process.poll()}")


def test_ctrl_c_leaves_a_checkpoint_that_one_process_goes_on_from(tmp_path):
    path = tmp_path / "run"
    process = start(path, "steps=500", "parallel.processes=2", "evaluation.at_start=false")
    wait_for_rows(path, 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    rows = load_run(path).metrics
    last = rows[-1]["step"]
    assert list(load_run(path).checkpoints()) == [last + 1]
    assert main(["train", str(path), "resume=true", "parallel.processes=0", "--dry-run"]) == 0
    config = from_dict(Config, load_run(path).config)
    alone = replace(config, steps=last + 2, parallel=replace(config.parallel, processes=0))
    assert train(alone, out=path, resume=True, view="json").status == "done"
    resumed = load_run(path).metrics
    assert [row["step"] for row in resumed if "train/loss" in row] == list(range(last + 2))
    assert resumed[: len(rows)] == rows


def test_ranks_with_other_settings_end_with_one_error_that_names_them(tmp_path):
    ranks = start_ranks(tmp_path / "run", ("seed=1",), ("seed=2", "trainer.lr=0.5"))
    found = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    message = " ".join(found[0][1].split())
    assert "ranks disagree about the config: seed is 1 on rank 0 and 2 on rank 1; trainer.lr" in (
        message
    )
    assert found[1] == ("", ""), "rank 0 speaks for both"
    assert not (tmp_path / "run").exists()


def test_a_rank_that_dies_ends_the_others_with_one_error(tmp_path):
    path = tmp_path / "run"
    ranks = start_ranks(path, *[("steps=500", "evaluation.at_start=false")] * 2)
    wait_for_rows(path, 1, ranks[0])
    ranks[1].kill()
    _, errors = ranks[0].communicate(timeout=60)
    ranks[1].communicate()
    assert ranks[0].returncode == 2
    assert errors.count("RankError") == 1 and "gone without a word" in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(not PROOF, reason="make proof: it waits for longer than steps take")
def test_a_rank_that_freezes_is_found_in_a_time_that_the_steps_before_it_give(tmp_path):
    path = tmp_path / "run"
    settings = ("steps=500", "evaluation.at_start=false", "agent.max_seconds=5")
    ranks = start_ranks(path, *[(*settings, "parallel.timeout_seconds=1800")] * 2)
    wait_for_rows(path, 2, ranks[0])
    ranks[1].send_signal(signal.SIGSTOP)
    try:
        _, errors = ranks[0].communicate(timeout=200)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 2
    assert errors.count("RankError") == 1 and "did not answer within the limit" in errors
