"""Advantages: equal rewards are nothing, and leaves do not multiply a trajectory."""

from dataclasses import replace

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.advantages import centered, leaf_advantages, leave_one_out
from lockstep.objectives.config import GAE, GRPO, RLOO, AdvantageConfig, ReinforcePlusPlus
from lockstep.recipes.registry import find_recipe

EXAMPLES = settings(max_examples=1000 if PROOF else 100, deadline=None)
rewards = st.floats(-10, 10)


def test_a_group_is_centred_and_divided_by_its_deviation():
    values = np.array([1.0, 0.0, 0.5, 0.25])
    found = centered(values, normalize_std=True)
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
    with pytest.raises(AlignmentError, match=r"\b2\b.*\b1\b"):
        centered([1.0, 0.0], trajectories=[3], normalize_std=True)


def test_groups_have_any_names_and_every_leaf_has_one():
    for names in (
        ["a", "b", "a"],
        np.array(["a", "b", "a"], object),
        [("x", 1), ("x", 2), ("x", 1)],
    ):
        found = centered([1.0, 5.0, 0.0], groups=names, normalize_std=False)
        assert found.tolist() == [0.5, 0.0, -0.5]
    with pytest.raises(AlignmentError, match="2 rewards, but the groups of 1 leaves"):
        leave_one_out([1.0, 0.0], groups=[0])
    with pytest.raises(
        AlignmentError, match=r"shape \[2, 3\]; expected one per leaf, \[6\].*groups"
    ):
        centered(np.ones((2, 3)), normalize_std=False)


@EXAMPLES
@given(st.lists(rewards, min_size=2, max_size=9))
def test_leaving_one_out_stretches_what_is_centred(values):
    n = len(values)
    found = leave_one_out(values)
    np.testing.assert_allclose(
        found, centered(values, normalize_std=False) * n / (n - 1), rtol=1e-12, atol=1e-12
    )


def test_a_trajectory_is_in_no_part_of_its_own_baseline():
    before = leave_one_out([1.0, 0.0, 0.5, 0.25], trajectories=[0, 0, 1, 2])
    after = leave_one_out([1.0, 8.0, 0.5, 0.25], trajectories=[0, 0, 1, 2])
    assert before[0] == after[0] == 1.0 - 0.375  # the mean of the two others
    assert before.tolist()[1:] == [-0.375, 0.5 - 0.375, 0.25 - 0.5]
    assert leave_one_out([0.7], trajectories=[3]).tolist() == [0.0]
    assert leave_one_out([0.1] * 3).tolist() == [0.0] * 3
    with pytest.raises(AlignmentError, match=r"\b1\b.*\b2\b"):
        leave_one_out([1.0], trajectories=[0, 1])


def test_the_baseline_is_the_groups_the_others_or_the_batchs():
    values, groups = np.array([1.0, 0.0, 4.0, 4.0]), np.array([0, 0, 1, 1])
    each = {"trajectories": np.arange(4), "groups": groups}
    of_group = leaf_advantages(GRPO(normalize_std=False), values, **each)
    assert of_group.tolist() == [0.5, -0.5, 0.0, 0.0]
    of_others = leaf_advantages(RLOO(), values, **each)
    assert of_others.tolist() == [1.0, -1.0, 0.0, 0.0]
    of_batch = leaf_advantages(ReinforcePlusPlus(normalize_std=False), values, **each)
    assert of_batch.tolist() == [-1.25, -2.25, 1.75, 1.75]
    scaled = leaf_advantages(ReinforcePlusPlus(), values, **each)
    np.testing.assert_allclose(scaled, of_batch / values.std(ddof=1), rtol=1e-5)


def test_a_trajectory_in_two_groups_counts_once_in_each():
    values, groups = np.array([1.0, 0.0, 4.0, 2.0]), np.array([0, 0, 1, 1])
    found = leaf_advantages(RLOO(), values, trajectories=np.array([0, 1, 0, 1]), groups=groups)
    assert found.tolist() == [1.0, -1.0, 2.0, -2.0]


def test_reinforce_plus_plus_with_group_baselines_divides_by_the_batchs_deviation():
    values, groups = np.array([1.0, 0.0, 4.0, 1.0]), np.array([0, 0, 1, 1])
    each = {"trajectories": np.arange(4), "groups": groups}
    found = leaf_advantages(ReinforcePlusPlus(baseline="group"), values, **each)
    np.testing.assert_allclose(found, np.array([0.5, -0.5, 1.5, -1.5]) / np.sqrt(5 / 3), rtol=1e-5)
    equal = leaf_advantages(ReinforcePlusPlus(baseline="group"), np.full(4, 0.1), **each)
    assert equal.tolist() == [0.0] * 4
    one = {"trajectories": np.zeros(2, np.int64), "groups": np.zeros(2, np.int64)}
    found = leaf_advantages(ReinforcePlusPlus(baseline="group"), np.array([1.0, 0.0]), **one)
    assert found.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "config", [GRPO(), RLOO(), ReinforcePlusPlus(), ReinforcePlusPlus(baseline="group")]
)
def test_the_order_of_rows_changes_no_advantage(config):
    rng = np.random.default_rng(0)
    values, groups = rng.normal(size=12), np.repeat([0, 1, 2], 4)
    trajectories = np.array([0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 8])
    order = rng.permutation(12)
    whole = leaf_advantages(config, values, trajectories=trajectories, groups=groups)
    moved = leaf_advantages(
        config, values[order], trajectories=trajectories[order], groups=groups[order]
    )
    np.testing.assert_allclose(moved, whole[order], rtol=1e-12, atol=1e-14)


def test_an_advantage_of_ones_own_joins_by_its_config():
    class Mine(AdvantageConfig):
        pass

    with pytest.raises(ConfigError, match="no advantage for a Mine"):
        leaf_advantages(Mine(), np.zeros(1), trajectories=np.zeros(1), groups=np.zeros(1))


def test_a_group_of_one_with_a_group_baseline_is_refused_before_anything_runs():
    config = find_recipe("quickstart")
    for advantage in (ReinforcePlusPlus(), GAE()):
        replace(config, advantage=advantage, group_size=1)
    for advantage, chosen in (
        (GRPO(), "grpo"), (RLOO(), "rloo"),
        (ReinforcePlusPlus(baseline="group"), "reinforce_plus_plus"),
    ):  # fmt: skip
        match = f"group_size=1 .*advantage={chosen}.*baseline=batch.*advantage=gae"
        with pytest.raises(ConfigError, match=match):
            replace(config, advantage=advantage, group_size=1)
