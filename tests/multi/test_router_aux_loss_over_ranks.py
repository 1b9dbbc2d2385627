"""The routers' load-balancing loss over two processes: the value and gradient of one."""

import pytest
from aux_ranks import ARMS, script, work
from processes import assert_close, run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(figures of one process, figures of each of two)."""
    directory = tmp_path_factory.mktemp("aux")
    return script(directory / "alone"), run_ranks(work, directory, world=2)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_the_ranks_have_the_loss_and_the_gradient_of_one_process(found, arm):
    (metrics, gradients), ranks = found
    for figures, of_rank in (rank[arm] for rank in ranks):
        assert figures == pytest.approx(metrics, rel=1e-6)
        assert_close(of_rank, gradients, 1e-5)  # float32 sums in another order
