"""Advantages: equal rewards are nothing, and leaves do not multiply a trajectory."""

import numpy as np
import pytest
from conftest import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.advantages import centered, leaf_advantages
from lockstep.objectives.config import GRPO, AdvantageConfig, BatchBaseline

EXAMPLES = settings(max_examples=1000 if PROOF else 100, deadline=None)
rewards = st.floats(-10, 10)


def test_a_group_is_centred_and_divided_by_its_deviation():
    values = np.array([1.0, 0.0, 0.5, 0.25])
    found = centered(values, normalize_std=True, eps=1e-6)
    np.testing.assert_allclose(found, (values - values.mean()) / (values.std(ddof=1) + 1e-6))
    np.testing.assert_allclose(centered(values, normalize_std=False), values - values.mean())


@EXAMPLES
@given(rewards, st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exact_zeros(reward, count, normalize):
    found = centered([reward] * count, normalize_std=normalize)
    assert found.tolist() == [0.0] * count


@EXAMPLES
@given(st.lists(rewards, max_size=9), st.booleans())
def test_advantages_are_finite_and_sum_to_zero(values, normalize):
    found = centered(values, normalize_std=normalize)
    assert np.isfinite(found).all()
    assert abs(found.sum()) < 1e-6
    if normalize:
        assert np.abs(found).max(initial=0) <= np.sqrt(max(len(values), 1))


@EXAMPLES
@given(st.lists(rewards, min_size=2, max_size=6), st.integers(2, 5), st.booleans())
def test_leaves_that_agree_count_as_one(values, copies, normalize):
    plain = centered(values, normalize_std=normalize)
    leaves = [values[0]] * copies + values[1:]
    owners = [0] * copies + list(range(1, len(values)))
    split = centered(leaves, trajectories=owners, normalize_std=normalize)
    np.testing.assert_allclose(split[:copies], plain[0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(split[copies:], plain[1:], rtol=1e-6, atol=1e-9)


def test_leaves_share_their_trajectorys_weight():
    found = centered([1.0, 0.0, 1.0, 0.0], trajectories=[7, 7, 8, 9], normalize_std=False)
    # trajectory means 0.5, 1, 0: the baseline is 0.5
    assert found.tolist() == [0.5, -0.5, 0.5, -0.5]


def test_one_trajectory_has_nothing_to_be_compared_with():
    assert centered([1.0, 0.0], trajectories=[3, 3], normalize_std=True).tolist() == [0.0, 0.0]
    assert centered([], normalize_std=True).tolist() == []
    with pytest.raises(AlignmentError, match="2 rewards, but the trajectories of 1"):
        centered([1.0, 0.0], trajectories=[3], normalize_std=True)


def test_the_baseline_is_the_groups_or_the_batchs():
    values, groups = np.array([1.0, 0.0, 4.0, 4.0]), np.array([0, 0, 1, 1])
    each = {"trajectories": np.arange(4), "groups": groups}
    of_group = leaf_advantages(GRPO(normalize_std=False), values, **each)
    assert of_group.tolist() == [0.5, -0.5, 0.0, 0.0]
    of_batch = leaf_advantages(BatchBaseline(), values, **each)
    assert of_batch.tolist() == [-1.25, -2.25, 1.75, 1.75]
    scaled = leaf_advantages(BatchBaseline(normalize_std=True), values, **each)
    np.testing.assert_allclose(scaled, of_batch / values.std(ddof=1), rtol=1e-5)


def test_an_advantage_of_ones_own_joins_by_its_config():
    class Mine(AdvantageConfig):
        pass

    with pytest.raises(ConfigError, match="no advantage for a Mine"):
        leaf_advantages(Mine(), np.zeros(1), trajectories=np.zeros(1), groups=np.zeros(1))


def test_a_group_of_one_with_a_group_baseline_is_refused_before_anything_runs():
    GRPO().check_group_size(2)
    BatchBaseline().check_group_size(1)
    with pytest.raises(ConfigError, match="group_size=1 with advantage=grpo"):
        GRPO().check_group_size(1)
    for kind in (GRPO, BatchBaseline):
        with pytest.raises(ConfigError, match=r"advantage\.eps=0"):
            kind(eps=0.0)
