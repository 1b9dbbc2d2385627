"""mean@k and pass@k: known values, and intervals that cluster by task."""

import itertools
import math

import pytest

from lockstep.run.evaluation import Estimate, mean_at_k, pass_at_k


def test_mean_at_k_averages_each_task_first():
    estimate = mean_at_k([[0.0, 1.0], [1.0, 1.0]])
    assert estimate.mean == 0.75
    assert estimate.num_tasks == 2


def test_pass_at_k_equals_the_share_of_all_subsets():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(rewards, k))
        share = sum(max(s) >= 1.0 for s in subsets) / len(subsets)
        assert pass_at_k([rewards], k, success_reward=1.0).mean == pytest.approx(share)


def test_more_samples_of_one_task_do_not_narrow_the_interval():
    few = mean_at_k([[0.0], [1.0], [1.0], [0.0]])
    many = mean_at_k([[0.0] * 50, [1.0] * 50, [1.0] * 50, [0.0] * 50])
    assert (few.low, few.high) == (many.low, many.high)


def test_one_task_has_no_interval():
    estimate = Estimate.of([0.5])
    assert math.isnan(estimate.low)
    assert estimate.to_metrics("eval/x") == {"eval/x": 0.5}


def test_pass_at_k_with_too_few_samples_is_refused():
    with pytest.raises(ValueError, match=r"pass@3 needs at least 3 samples per task, found 2"):
        pass_at_k([[1.0, 0.0]], 3, success_reward=1.0)
