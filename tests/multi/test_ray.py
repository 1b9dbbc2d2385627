"""Runs on a Ray cluster of this machine: two processes that train, an engine beside each."""

import os
import signal
import threading
import time

import pytest
from quickstarts import quickstart_with

from lockstep.errors import ConfigError, RankError
from lockstep.launch.config import RayPlacement
from lockstep.run.train import train
from lockstep.store.metrics import read_rows
from lockstep.store.run import load_run

ray = pytest.importorskip("ray", reason="placement=ray needs the extra `ray`")

SMALL = (
    "steps=500", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=2",
    "evaluation.greedy=false", "evaluation.at_start=false", "contract=true-on-policy",
    "trainer.measure_after_every=0", "parallel.processes=2", "placement=ray",
)  # fmt: skip


MARK, MARKED = "LOCKSTEP_TEST_CLUSTER", f"{os.getpid()}"


@pytest.fixture(scope="module")
def cluster():
    os.environ[MARK] = MARKED  # the cluster's processes, and those that they start, inherit it
    ray.init(
        num_cpus=4, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False,
        configure_logging=False,
    )  # fmt: skip
    yield
    ray.shutdown()
    del os.environ[MARK]


def processes_of(work):
    """The processes of this cluster that run such a worker."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as line, open(f"/proc/{name}/environ") as variables:
                words = line.read().split("\0")
                is_own = f"{MARK}={MARKED}" in variables.read().split("\0")
        except OSError:
            continue
        if is_own and work in words and "lockstep.launch.workers" in " ".join(words):
            found.append(int(name))
    return sorted(found)


def after(path, is_wanted, act):
    """Acts, in a thread, once a row of the run's metrics is wanted."""

    def watch():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if any(map(is_wanted, read_rows(path / "metrics.jsonl"))):
                break
            time.sleep(0.1)
        act()  # also when nothing came: the run must end

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


EAGER = ("engine.pool.frozen_seconds=6",)
ENGINES, RANKS = "lockstep.engines.worker_engine:serve", "lockstep.launch.ray:run_rank"


def test_a_run_outlives_a_killed_engine_and_ends_with_ctrl_c(cluster, tmp_path, capfd):
    path = tmp_path / "run"
    config = quickstart_with(*SMALL, "engine.replicas=2", *EAGER)
    killed = []

    def kill():
        killed.extend([processes_of(ENGINES)[0], len(load_run(path).metrics)])
        os.kill(killed[0], signal.SIGKILL)

    after(path, lambda row: row["step"] >= 0, kill)
    after(
        path, lambda row: killed and row["step"] > killed[1] + 1,  # its rank has no other engine
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )  # fmt: skip
    outcome = train(config, out=path)
    assert outcome.status == "interrupted"
    run = load_run(path)
    rows = [row for row in run.metrics if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row["mismatch/unequal_tokens"] == 0 for row in rows)
    assert list(run.checkpoints()) == [len(rows)]
    assert run.environment["processes"] == 2
    shown = capfd.readouterr()
    assert "step   0/500" in shown.out, "what rank 0 prints appears here"
    assert sum(row.get("engine/restarts", 0) for row in rows) == 1
    assert not processes_of(ENGINES) and not processes_of(RANKS)


def test_a_killed_rank_ends_the_run_and_is_named(cluster, tmp_path):
    path = tmp_path / "run"

    def kill():
        for pid in processes_of(RANKS):
            with open(f"/proc/{pid}/environ") as found:
                if "\0RANK=1\0" in found.read():
                    os.kill(pid, signal.SIGKILL)

    after(path, lambda row: row["step"] >= 0, kill)
    with pytest.raises(RankError, match=r"rank 1\b.*[\d.]+.*rank 1\b.*\d+"):
        train(quickstart_with(*SMALL), out=path, view="json")
    assert not processes_of(RANKS)
    assert len(load_run(path).metrics) >= 1
    deadline = time.monotonic() + 30
    while ray.available_resources()["CPU"] < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 4, "its places are given back"


def test_a_cluster_without_room_says_what_it_has(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(RayPlacement, "wait_seconds", 1.0)
    config = quickstart_with(*SMALL, "threads=64")
    with pytest.raises(ConfigError, match=r"64.*\b1\b.*{'CPU': 4\b"):
        train(config, out=tmp_path / "run", view="json")
    assert not (tmp_path / "run").exists()
