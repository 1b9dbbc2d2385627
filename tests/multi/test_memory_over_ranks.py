"""Sharded weights with what else saves memory: recomputed blocks, moments of 8 bits."""

import pytest
import torch
from memory_ranks import KIND, WIDE, script, work
from processes import run_ranks
from trainer_ranks import make_arm


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def found(place):
    """(bits, recompute) -> what each rank found."""
    ranks = run_ranks(work, place, world=2)
    return {key: [of_rank[key] for of_rank in ranks] for key in ranks[0]}


@pytest.mark.parametrize("bits", [32, 8])
def test_recomputed_blocks_leave_the_bits_of_sharded_training_alone(found, bits):
    for plain, again in zip(found[bits, "none"], found[bits, "blocks"], strict=True):
        for left, right in zip(plain, again, strict=True):
            assert set(left) == set(right)
            for name in left:
                assert torch.equal(left[name], right[name]), name


def test_moments_of_8_bits_are_those_of_one_process_wherever_they_are_cut(found, tmp_path):
    weights, state = script(tmp_path, optimizer_bits=8)
    for of_rank_weights, of_rank_state in found[8, "none"]:
        for name, values in weights.items():
            # Sums in another order turn a code here and there: two updates of lr 0.01.
            assert (of_rank_weights[name] - values).abs().max() < 2e-3, name
        assert set(of_rank_state) == set(state)
        for name, values in state.items():
            if name.startswith(("exp_avg_codes", "exp_avg_sq_codes")):
                gap = (of_rank_state[name].int() - values.int()).abs()
                assert (gap > 1).float().mean() < 0.01, name
    assert any(name.startswith("exp_avg_codes") for name in state)


def test_codes_that_ranks_have_saved_go_on_in_one_process(found, place, tmp_path):
    trainer = make_arm(tmp_path, KIND, hf=WIDE, seed=7, optimizer_bits=8)
    trainer.load(place / "8-none" / "saved")
    state = trainer.optimizer.state_tensors()
    for name, values in found[8, "none"][0][1].items():
        assert torch.equal(state[name], values), name
