"""The faults of what the two sides compute, each in a run of its own."""

import sys
from pathlib import Path

import numpy as np
import pytest
from quickstarts import run_with

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))

import doctor_faults  # noqa: F401  its faults are known to --fault

SMALL = (
    "steps=2", "groups_per_step=2", "group_size=4", "evaluation.at_start=false",
    "evaluation.num_tasks=1", "trainer.warmup_updates=0", "seed=3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("--fault=ignored_window",), 0),
        (("--fault=active_dropout",), 0),
        (("--fault=processed_logprobs,temperature=0.5",), 0),
        (("--fault=processed_logprobs,top_p=0.8",), 0),
        (("--fault=unmerged_adapter", "lora.rank=4"), 1),
        (("--fault=trained_observations,logprobs=filler",), 0),
        (("--fault=padding_attended",), 0),
    ],
)
def test_the_mismatch_of_the_run_shows_it(words, step, tmp_path):
    rows = {row["step"]: row for row in run_with(tmp_path / "run", *SMALL, *words).metrics}
    # The window is longer than most rows here; without a fault it is 1e-13.
    assert rows[step]["mismatch/k2"] > 1e-11
    if step:
        assert rows[0]["mismatch/k2"] < 1e-9


def test_log_probs_that_are_taken_after_the_update_are_what_is_recorded(tmp_path):
    run = run_with(tmp_path / "run", *SMALL, "--fault=scored_after_update")
    assert all(row["mismatch/k2"] < 1e-9 for row in run.metrics if "mismatch/k2" in row)
    record = next(iter(run.trajectories()))
    pairs = [
        (segment.logprobs, values)
        for segment, values in zip(record.trajectory.segments, record.trainer_logprobs, strict=True)
        if values is not None
    ]
    assert max(float(np.abs(a - b).max()) for a, b in pairs) > 1e-3
