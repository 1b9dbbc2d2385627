"""The same seed is the same run, bit for bit: twice, on two threads, and across a kill.

What is compared: every metric but `time/*`, the tokens and log-probs that were recorded, and the
last checkpoint's weights and optimizer state. Interrupts that a run answers: tests/cpu/test_cli.py.
"""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from full_counts import PROOF
from run_rows import rows_of

from lockstep.cli import OK, main
from lockstep.ops.context import take_rows
from lockstep.store.run import load_run

SMALL = [
    "train", "quickstart", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=4",
    "evaluation.at_start=false", "checkpoint.every=2",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("process_settings")


def run(path, *words):
    assert main([*SMALL, *words, f"out={path}"]) == OK
    return path


def num_rows(path):
    """Whole rows of metrics, of a run that may be writing another."""
    file = path / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def state_of(path):
    """File name -> bytes, of the last checkpoint's tensors."""
    last = max((path / "checkpoints").iterdir())
    found = {str(p.relative_to(last)): p.read_bytes() for p in last.rglob("*.safetensors")}
    assert set(found) == {"policy/model.safetensors", "optimizer.safetensors"}
    return found


def tokens_of(path, num_steps):
    """(trajectory, ids, log-probs) of every segment that was trained on."""
    return [
        (record.trajectory.id, segment.token_ids.tolist(), segment.logprobs)
        for step in range(num_steps)
        for record in load_run(path).trajectories(step)
        for segment in record.trajectory.segments
    ]


def assert_same_run(left, right, *, num_steps):
    assert rows_of(left) == rows_of(right)
    assert state_of(left) == state_of(right)
    found, wanted = tokens_of(left, num_steps), tokens_of(right, num_steps)
    assert len(wanted) > 20
    for (name, ids, logprobs), (name_, ids_, logprobs_) in zip(found, wanted, strict=True):
        assert (name, ids) == (name_, ids_)
        np.testing.assert_array_equal(logprobs, logprobs_)


@pytest.mark.parametrize(
    "words",
    [
        ["threads=1"],
        ["threads=2", "group_size=8"],
        ["threads=2", "model=tiny-qwen3", "dtype=bfloat16"],
    ],
    ids=" ".join,
)
def test_the_same_seed_is_the_same_run(tmp_path, words):
    first, again = (run(tmp_path / name, "steps=3", *words) for name in ("first", "again"))
    assert_same_run(first, again, num_steps=3)


def test_another_seed_is_another_run(tmp_path):
    first, other = (run(tmp_path / f"{seed}", "steps=1", f"seed={seed}") for seed in (0, 1))
    assert rows_of(first) != rows_of(other)
    assert state_of(first) != state_of(other)


@pytest.mark.parametrize("threads", [1, 2] if PROOF else [1])
def test_a_killed_run_resumes_and_ends_as_if_it_had_never_stopped(tmp_path, threads):
    """SIGKILL at a moment of the clock's choosing: nothing is told, and nothing is written."""
    words, num_steps = [f"threads={threads}", "steps=6"], 6
    whole, cut = run(tmp_path / "whole", *words), tmp_path / "cut"
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", *SMALL, *words, f"out={cut}"],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        # Past a checkpoint, and past a step that is not in it.
        if num_rows(cut) >= 3:
            break
        time.sleep(0.005)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    num_logged = num_rows(cut)
    assert 3 <= num_logged < len(rows_of(whole))
    assert main(["train", str(cut), "resume=true"]) == OK
    assert_same_run(cut, whole, num_steps=num_steps)


def test_the_gradient_of_gathered_rows_is_the_same_each_time_on_two_threads():
    """Rows that begin alike gather theirs in the tokens they share. Under plain indexing each run
    of this size differs from the one before."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 4, 16, generator=generator, requires_grad=True)
    index = torch.arange(150).expand(16, -1)
    weight = torch.randn(16, 150, 4, 16, generator=generator)
    torch.set_num_threads(2)
    found = [torch.autograd.grad((take_rows(x, index) * weight).sum(), x)[0] for _ in range(20)]
    assert torch.equal(take_rows(x, index), x[index])
    assert all(torch.equal(grad, found[0]) for grad in found)
    torch.testing.assert_close(found[0], weight.sum(0))  # 16 terms of order 1
