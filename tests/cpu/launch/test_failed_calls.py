"""A lost rank is reported with the call that waited for it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.launch.ranks import Ranks

WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)


def explained(error):
    ranks = SimpleNamespace(rank=0, _stopped=dict)
    return Ranks.explain(ranks, error, "")


def test_an_error_of_nccl_names_its_rank_and_operation():
    text = explained(RuntimeError(WATCHDOG))
    assert text.startswith("rank 1 in NCCL ALLREDUCE: ") and "parallel.timeout_seconds" in text


def test_an_error_without_names_is_of_this_rank_in_the_call_that_raised_it():
    with pytest.raises(ValueError) as raised:
        dist.all_reduce(torch.zeros(1))  # there is no group
    assert explained(raised.value).startswith("rank 0 in all_reduce: ")
    assert explained(RuntimeError("gone")).startswith("rank 0 in a collective call: ")
