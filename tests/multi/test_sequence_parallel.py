"""Ulysses over 2 and 4 gloo processes: the numbers of one process, and its gradients."""

from functools import cache

import pytest
import torch
from processes import run_ranks
from sequence_ranks import CASES, SIZES, WORLD, run, work

EVERY = [(size, case) for size in SIZES for case in CASES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), world=WORLD)


@cache
def alone(case):
    return run(case)


def name(value):
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("size", "case"), EVERY, ids=name)
def test_ranks_that_share_the_tokens_compute_what_one_computes(ranks, size, case):
    expected, is_invariant = alone(case), case[-1] == "invariant"
    # float64 sums in another order over some dozens of terms, a few units in the last place
    rtol, atol = (0, 0) if is_invariant else (1e-13, 1e-13)
    for found in (of_rank[size, case] for of_rank in ranks):
        for key in ("logits", "logprobs", "entropy"):
            torch.testing.assert_close(found[key], expected[key], rtol=rtol, atol=atol)
        if "chosen" in expected:
            assert torch.equal(found["chosen"], expected["chosen"])
            assert torch.equal(found["differing"], expected["differing"])


@pytest.mark.parametrize(("size", "case"), EVERY, ids=name)
def test_the_sum_of_the_ranks_gradients_is_that_of_one(ranks, size, case):
    assert any(n.endswith("sinks") for n in alone(case)["gradients"]) == (case[0] == "gpt_oss")
    # Sums in another order. The head's part of a gradient is summed in float32 in any case.
    limits = {"gradients": 2e-6, "gradients_of_logits": 1e-12}
    if case[-1] == "invariant":
        limits["gradients_of_logits"] = 2e-5
    for found in (of_rank[size, case] for of_rank in ranks):
        for key, limit in limits.items():
            for parameter, gradient in alone(case)[key].items():
                scale = gradient.abs().max()
                assert scale > 0, parameter
                gap = float((found[key][parameter] - gradient).abs().max() / scale)
                assert gap <= limit, (key, parameter, gap)
