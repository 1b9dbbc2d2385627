"""Runs whose engine samples in processes of its own: the runs of the engine inside, bit for bit."""

import pytest

from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.foundation import check_config
from lockstep.loop import train
from lockstep.recipes import find_recipe
from lockstep.store.run import load_run

SMALL = (
    "steps=2", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=2",
    "evaluation.greedy=false", "contract=true-on-policy", "trainer.measure_after_every=0",
)  # fmt: skip


def run(path, *settings):
    train(resolve(find_recipe("quickstart"), (*SMALL, *settings)), out=path, view="json")
    return load_run(path)


def figures(run):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in run.metrics]


def test_a_run_sampled_by_another_process_is_the_run_of_one_under_the_contract(tmp_path):
    inside = run(tmp_path / "inside")
    beside = run(tmp_path / "beside", "engine.replicas=1")
    assert figures(beside) == figures(inside)
    steps = [row for row in beside.metrics if "mismatch/unequal_tokens" in row]
    assert len(steps) == 2
    assert all(row["mismatch/unequal_tokens"] == 0 for row in steps)
    assert (tmp_path / "beside" / "logs" / "engine-0.log").read_text() == ""


def test_a_fault_of_the_engine_inside_is_refused_for_engines_of_other_processes():
    config = resolve(
        find_recipe("quickstart"),
        ("fault=kernel_noise", "fault.std=0.1", "engine.replicas=1"),
    )
    with pytest.raises(ConfigError, match=r"engine\.replicas=1 samples in others"):
        check_config(config)
