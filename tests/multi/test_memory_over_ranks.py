"""Sharded weights with recomputed blocks."""

import pytest
import torch
from memory_ranks import work
from processes import run_ranks


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def found(place):
    """recompute -> what each rank found."""
    ranks = run_ranks(work, place, world=2)
    return {key: [of_rank[key] for of_rank in ranks] for key in ranks[0]}


def test_recomputed_blocks_leave_the_bits_of_sharded_training_alone(found):
    for plain, again in zip(found["none"], found["blocks"], strict=True):
        for left, right in zip(plain, again, strict=True):
            assert set(left) == set(right)
            for name in left:
                assert torch.equal(left[name], right[name]), name
