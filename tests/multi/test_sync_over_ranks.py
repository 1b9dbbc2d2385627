"""Weights of a sharded model to the engines of two ranks: gathered in step, verified on each."""

import pytest
from processes import run_ranks
from sync_ranks import on_rank


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(on_rank, tmp_path_factory.mktemp("sync"), world=2)


@pytest.mark.parametrize("form", ["tensors", "directory"])
def test_each_ranks_engine_runs_the_whole_of_a_sharded_model(found, form):
    for of_rank in found:
        row = of_rank[form]
        assert (row["error"], row["is_same"], row["is_restored"]) == ("", True, True)
        assert row["level"] == "qualified"
        assert row["metrics"][1]["sync/probe_gap"] < 1e-4


def test_weights_that_one_ranks_engine_keeps_are_refused_on_both(found):
    for of_rank in found:
        row = of_rank["rank 1 keeps its sinks"]
        assert "old values of sinks" in row["error"]
        assert row["is_restored"]


def test_a_load_that_fails_on_one_rank_leaves_none_waiting(found):
    first, second = (of_rank["rank 1 breaks"] for of_rank in found)
    assert first["error"].startswith("rank 1: sync: engine embedded did not take version -1")
    assert "out of memory at model.layers.1.self_attn.sinks" in second["error"]
    assert first["is_restored"] and second["is_restored"]
