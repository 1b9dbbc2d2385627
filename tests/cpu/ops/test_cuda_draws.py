"""The draws of a GPU in Triton's interpreter: which id, and that other rows do not matter."""

import interpreted_kernels  # noqa: F401  before the kernels
import numpy as np
import pytest
import torch

from lockstep.ops import cuda_draws
from lockstep.ops.base import Ops


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and where one is launched


def make_probs(rows, vocabulary, *, seed=0):
    """Exact sums: multiples of 2^-20, of which a third are 0."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 8, (rows, vocabulary)) * (rng.random((rows, vocabulary)) > 0.3)
    return torch.from_numpy((counts * 2.0**-20).astype(np.float32))


@pytest.mark.parametrize("vocabulary", [1, 97, 4096, 9000])
def test_a_draw_is_the_first_id_whose_cumulative_probability_exceeds_its_share(vocabulary):
    probs = make_probs(7, vocabulary)
    probs[:, -1] += 2.0**-20  # a row has a sum
    uniform = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1 - 2.0**-24])
    assert torch.equal(cuda_draws.draw(probs, uniform), Ops().draw(probs, uniform))


def test_an_id_of_probability_0_is_never_drawn():
    probs = torch.rand(40, 5000, generator=torch.Generator().manual_seed(0))
    probs[:, 3000:] = 0.0
    ids = cuda_draws.draw(probs, torch.full((40,), 1 - 2.0**-24))
    assert (probs.gather(1, ids) > 0).all()


def test_a_row_that_is_not_a_number_draws_some_id():
    ids = cuda_draws.draw(torch.full((1, 50), float("nan")), torch.tensor([0.5]))
    assert 0 <= int(ids) < 50


def test_the_nucleus_ends_where_the_share_is_reached():
    probs = make_probs(6, 5000).sort(descending=True)[0]
    top_p = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
    assert torch.equal(cuda_draws.nucleus(probs, top_p), Ops().nucleus(probs, top_p))


def test_draws_of_a_row_do_not_depend_on_the_other_rows():
    probs = torch.rand(9, 6000, generator=torch.Generator().manual_seed(0)).sort(descending=True)[0]
    uniform, top_p = torch.rand(9), torch.rand(9)
    ids, kept = cuda_draws.draw(probs, uniform), cuda_draws.nucleus(probs, top_p)
    for i in range(9):
        row = slice(i, i + 1)
        assert torch.equal(cuda_draws.draw(probs[row], uniform[row]), ids[row])
        assert torch.equal(cuda_draws.nucleus(probs[row], top_p[row]), kept[row])
