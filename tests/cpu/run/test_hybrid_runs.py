"""Runs of a hybrid of linear attention: the contract, checkpoints, adapters, the doctor."""

import json

import pytest
from quickstarts import run_with, steps_of

from lockstep.doctor.diagnose import diagnose

SMALL = [
    "model=tiny-qwen3-next", "groups_per_step=3", "group_size=4", "evaluation.num_tasks=2",
    "evaluation.num_samples=1", "evaluation.at_start=false", "checkpoint.every=1",
    "contract=true-on-policy",
]  # fmt: skip


def run_of(path, *overrides, resume=False):
    return run_with(path, *SMALL, *overrides, resume=resume)


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.recompute=blocks", "trainer.routing_replay=rollout"],
        ["lora.rank=4", "dtype=bfloat16"],
        ["engine.page_size=16", "engine.kv_cache_tokens=288"],
    ],
    ids=["recomputed and replayed", "an adapter in bfloat16", "preempted"],
)
def test_no_token_differs_and_the_doctor_finds_nothing(tmp_path, settings):
    run = run_of(tmp_path / "run", "steps=2", *settings)
    steps = steps_of(run)
    assert len(steps) == 2
    is_scarce = any("kv_cache_tokens" in word for word in settings)
    assert (sum(row["engine/preemptions"] for row in steps) > 0) == is_scarce
    for row in steps:
        assert row["mismatch/compared_tokens"] > 100 and row["mismatch/unequal_tokens"] == 0
    assert [cause.name for cause, _ in diagnose(run.path, model="own").causes] == []


def test_a_resumed_run_is_the_one_that_had_not_stopped(tmp_path):
    whole = run_of(tmp_path / "whole", "steps=3")
    run_of(tmp_path / "cut", "steps=2")
    cut = run_of(tmp_path / "cut", "steps=3", resume=True)
    of = {k for k in steps_of(whole)[-1] if k.startswith(("train/loss", "reward", "mismatch/"))}
    last, again = ({k: steps_of(run)[-1][k] for k in of} for run in (whole, cut))
    assert of and json.dumps(last, sort_keys=True) == json.dumps(again, sort_keys=True)
