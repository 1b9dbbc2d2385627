"""A rank that ends or hangs, wherever it does: the others end in bounded time and name it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from full_counts import PROOF
from running import is_running

SCRIPT = Path(__file__).parent / "broken_ranks.py"
GONE = {
    "exit": "ended with exit code 3",
    "exit_0": "ended with exit code 0",
    "kill": "was ended by SIGKILL (by hand, or by the system for want of memory)",
    "abort": "was ended by SIGABRT",
    "watchdog": "The failed call: rank 1 in NCCL ALLREDUCE.",
    "raise": "list index out of range",
    "system_exit": "no more",
}
ENDS = [
    ("import", "exit"),
    ("init", "kill"),
    ("first", "exit_0"),
    ("later", "raise"),
    ("later", "watchdog"),
    *[(where, how) for where in ("import", "init", "first", "later") for how in GONE if PROOF],
]


def start(where, how, seconds):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), where, how, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children_of(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def wait_until(holds, seconds):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    assert holds()


@pytest.mark.parametrize("where, how", ENDS)
def test_a_rank_that_ends_early_ends_the_run_with_a_line_that_says_how(where, how):
    process = start(where, how, 600)
    said, errors = process.communicate(timeout=90)
    assert process.returncode == 2, errors
    assert "rank 1 " in said and said.startswith("RankError: ")
    assert GONE[how] in said


@pytest.mark.parametrize("where", ["import", *["init", "first", "later"] * PROOF])
def test_a_rank_that_hangs_ends_the_run_at_the_limit_of_waits(where):
    process = start(where, "hang", 8)
    said, errors = process.communicate(timeout=90)
    assert process.returncode == 2, errors
    assert said.startswith("RankError: ")
    if where == "import":
        assert "rank 1 did not come" in said or "parallel.timeout_seconds" in said
    else:
        assert "rank 0 in all_gather_object" in said and "parallel.timeout_seconds" in said


@pytest.mark.parametrize("where, number", [("import", 1), *[("init", 1), ("first", 2)] * PROOF])
def test_sigterm_ends_a_run_that_waits_for_a_rank_that_hangs(where, number):
    """Once while the ranks meet; twice afterwards, where once asks for a checkpoint."""
    process = start(where, "hang", 600)
    wait_until(lambda: len(children_of(process.pid)) > 1, 60)
    others = children_of(process.pid)
    time.sleep(10 if PROOF else 3)
    for _ in range(number):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    process.communicate(timeout=60)
    assert process.returncode in (2, 130)
    wait_until(lambda: not any(map(is_running, others)), 10)


def test_the_ranks_of_a_killed_run_end_too():
    process = start("first", "hang", 600)
    wait_until(lambda: len(children_of(process.pid)) > 1, 60)
    others = children_of(process.pid)
    time.sleep(3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, others)), 20)
