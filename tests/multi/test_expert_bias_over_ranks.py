"""The bias of experts over two processes: each rank moves it by the load of all rows."""

import pytest
import torch
from bias_ranks import biases, make_balanced, script, work
from processes import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(what one process finds, what each of two finds, where they saved)."""
    directory = tmp_path_factory.mktemp("bias")
    alone = script(make_balanced(directory / "alone"), directory / "alone")
    return alone, run_ranks(work, directory, world=2), directory


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_the_ranks_have_the_bias_of_one_process_and_send_and_save_it(found, tmp_path, is_sharded):
    alone, ranks, directory = found
    for of_rank in (rank[is_sharded] for rank in ranks):
        assert of_rank["load"] == alone["load"]
        for left, right in zip(of_rank["biases"], alone["biases"], strict=True):
            assert torch.equal(left, right)
        assert torch.equal(of_rank["copied"], alone["biases"][-1])
    trainer = make_balanced(tmp_path)
    trainer.load(directory / f"ranks-{is_sharded}" / "saved")
    assert torch.equal(biases(trainer.model), alone["biases"][-1])
    assert not torch.equal(alone["biases"][-1], alone["biases"][0])
