"""One critic over 2 gloo processes: rows dealt, tokens cut, blocks sharded, and both."""

import shutil

import numpy as np
import pytest
import torch
from cpu.training.tiny_training import make_rows
from critic_ranks import LAYOUTS, LENGTHS, make_arm, script, work
from processes import assert_close, run_ranks
from run_rows import rows_of

from lockstep.cli import OK, main

FLOAT32 = 2e-5  # of the largest: sums of some hundred terms in another order


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("critic")


@pytest.fixture(scope="module")
def alone(place):
    return script(make_arm(place / "alone"), place / "alone")


@pytest.fixture(scope="module")
def found(place, alone):
    """(sequence, is_sharded) -> what each rank found."""
    ranks = run_ranks(work, place, world=2)
    return {layout: [of_rank[layout] for of_rank in ranks] for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_the_values_and_the_gradient_of_one_process(found, alone, layout):
    for of_rank in found[layout]:
        for a, b in zip(of_rank["values"], alone["values"], strict=True):
            np.testing.assert_allclose(a, b, atol=FLOAT32)
        np.testing.assert_allclose(of_rank["ends"], alone["ends"], atol=FLOAT32)
        assert of_rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
        assert_close(of_rank["gradients"], alone["gradients"], FLOAT32, smallest=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_updates_and_what_they_report_are_those_of_one_process(found, alone, layout):
    for of_rank in found[layout]:
        assert of_rank["updates"] == found[layout][0]["updates"], "every rank reports the same"
        for left, right in zip(of_rank["updates"], alone["updates"], strict=True):
            assert left == pytest.approx(right, rel=2e-3, abs=2e-5)
        assert of_rank["skipped"] == alone["skipped"] == 2.0
        for a, b in zip(of_rank["after"], alone["after"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_ranks_saved_goes_on_with_ranks_and_with_one_process(found, place, layout, tmp_path):
    sequence, is_sharded = layout
    critic = make_arm(tmp_path, seed=7)
    critic.load(place / f"{sequence}-{is_sharded}" / "saved")
    values = critic.values(make_rows(LENGTHS))
    for of_rank in found[layout]:
        for name in ("reloaded", "begun"):
            for after, again in zip(of_rank["after"], of_rank[name], strict=True):
                np.testing.assert_array_equal(after, again)
        for a, b in zip(values, of_rank["after"], strict=True):
            np.testing.assert_allclose(a, b, atol=FLOAT32)
    assert torch.isfinite(critic.model.value_head).all()


def test_a_run_over_two_processes_reports_and_resumes_as_one_of_its_own(tmp_path):
    words = [
        "train", "quickstart-ppo", "model=tiny-qwen3", "groups_per_step=4", "critic.clip=0.1",
        "evaluation.num_tasks=2", "evaluation.at_start=false", "checkpoint.every=1", "steps=2",
        "contract=none",
    ]  # fmt: skip
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main([*words, f"out={alone}"]) == OK
    assert main([*words, "parallel.processes=2", f"out={both}"]) == OK
    expected, found = (metrics_of(path) for path in (alone, both))
    for name in ("critic/loss", "critic/explained_variance", "critic/grad_norm", "train/grad_norm"):
        # the first step's: the second samples from weights that differ in their last bits
        assert found[0][name] == pytest.approx(expected[0][name], rel=1e-3, abs=1e-5), name
    assert len(found) == 2
    shutil.rmtree(both / "checkpoints" / "step-000002")
    assert main(["train", str(both), "resume=true"]) == OK
    assert metrics_of(both) == found
    assert (both / "checkpoints" / "step-000002" / "critic" / "optimizer.safetensors").is_file()


def metrics_of(path):
    return [row for row in rows_of(path) if "critic/loss" in row]
