"""Runs whose engine samples in processes of its own: the runs of the engine inside, bit for bit."""

import os
import signal
import subprocess
import sys
import time

import pytest
from quickstarts import quickstart_with

from lockstep.errors import ConfigError
from lockstep.run.preflight import preflight
from lockstep.run.train import train
from lockstep.store.metrics import read_rows
from lockstep.store.run import load_run
from lockstep.testing.faults import injected
from lockstep.testing.faults.sides import KernelNoise

SMALL = (
    "steps=2", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=2",
    "evaluation.greedy=false", "contract=true-on-policy", "trainer.measure_after_every=0",
)  # fmt: skip


CACHED = {"tokens/cached", "tokens/prefilled", "episode/cached"}  # each engine has a cache


def run(path, *settings):
    train(quickstart_with(*SMALL, *settings), out=path, view="json")
    return load_run(path)


def figures(run):
    """What does not depend on where the engine is."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "engine/", "sync/")) and name not in CACHED
        }
        for row in run.metrics
    ]


def test_a_run_sampled_by_two_other_processes_is_the_run_of_one_under_the_contract(tmp_path):
    inside = run(tmp_path / "inside")
    beside = run(tmp_path / "beside", "engine.replicas=2")
    assert figures(beside) == figures(inside)
    steps = [row for row in beside.metrics if "mismatch/unequal_tokens" in row]
    assert len(steps) == 2
    assert all(row["mismatch/unequal_tokens"] == 0 for row in steps)
    assert all(row["sync/level"] >= 2 for row in steps), "seen to run what it was sent"
    assert (tmp_path / "beside" / "engine-0" / "engine.log").read_text() == ""


def test_a_fault_of_the_engine_inside_is_refused_for_engines_of_other_processes():
    config = quickstart_with("engine.replicas=1")
    with injected(KernelNoise(std=0.1)), pytest.raises(ConfigError, match=r"engine\.replicas=0"):
        preflight(config)


def test_each_of_two_ranks_samples_with_its_own_part_of_the_engines(tmp_path):
    inside = run(tmp_path / "inside")
    found = run(tmp_path / "run", "parallel.processes=2", "engine.replicas=3")
    steps = [row for row in found.metrics if "mismatch/unequal_tokens" in row]
    assert len(steps) == 2
    assert all(row["mismatch/unequal_tokens"] == 0 for row in steps)
    assert steps[0]["reward/mean"] == inside.metrics[1]["reward/mean"]
    logs = sorted(str(log.relative_to(found.path)) for log in found.path.rglob("engine.log"))
    assert logs == [
        "engine-0/engine.log",
        "rank-1/engine-0/engine.log",
        "rank-1/engine-1/engine.log",
    ]


def test_an_engine_that_is_killed_comes_back_and_the_run_goes_on(tmp_path):
    path = tmp_path / "run"
    command = [
        sys.executable, "-m", "lockstep.cli", "train", "quickstart", *SMALL, "steps=500",
        "evaluation.at_start=false", "engine.replicas=2", "engine.pool.frozen_seconds=6",
        f"out={path}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(path, process, lambda row: row["step"] >= 0)
        workers = children_of(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        returned = wait_for(path, process, lambda row: row.get("engine/returned_replicas"))
        later = wait_for(path, process, lambda row: row["step"] > returned["step"] + 1)
        assert later["mismatch/unequal_tokens"] == 0
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "was ended by SIGKILL" in output and "is back, with version" in output
    finally:
        process.kill()
        process.communicate()
    rows = load_run(path).metrics
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(rows[-1]["step"] + 1))
    assert sum(row.get("engine/lost_replicas", 0) for row in rows) == 1
    assert not any(is_running(pid) for pid in workers)


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(child) for child in listed.read().split()]


def is_running(pid):
    return os.path.exists(f"/proc/{pid}")


def wait_for(path, process, is_wanted):
    """The first row of metrics.jsonl that is wanted."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        for row in read_rows(path / "metrics.jsonl"):
            if is_wanted(row):
                return row
        time.sleep(0.1)
    raise AssertionError(f"no such row; exit code {process.poll()}: {process.stderr.read()}")
