"""From scored episodes to rows: every sampled token once, with the right advantage."""

import numpy as np
import pytest

from lockstep.errors import DataError
from lockstep.objectives.config import GRPO, RLOO, ReinforcePlusPlus
from lockstep.training.rows import rows_for_training
from lockstep.types import Group, Task, Trajectory

PLAIN = GRPO(normalize_std=False)


def episode(name, reward, *, status="finished"):
    """Prompt of 2, one sampled turn of 3."""
    t = Trajectory(id=name, status=status)
    prompt = t.observe([1, 2])
    leaf = t.record([3, 4, 5], logprobs=[-1.0] * 3, parent=prompt, prompt_ids=[1, 2])
    if reward is not None:
        t.rewards[leaf] = reward
    return t


def forked(name, rewards):
    """Prompt, a shared turn of 2, and one more turn of 1 per reward."""
    t = Trajectory(id=name, status="finished")
    prompt = t.observe([1, 2])
    shared = t.record([3, 4], logprobs=[-1.0] * 2, parent=prompt, prompt_ids=[1, 2])
    for i, reward in enumerate(rewards):
        reply = t.observe([9], parent=shared, reason="retry" if i else "")
        leaf = t.record([5 + i], logprobs=[-1.0], parent=reply, prompt_ids=[1, 2, 3, 4, 9])
        t.rewards[leaf] = reward
    return t


def group(*trajectories):
    return Group(task=Task(id="task"), trajectories=list(trajectories))


def test_each_row_has_the_advantage_of_its_trajectory_at_its_sampled_tokens():
    rows = rows_for_training(
        [group(episode("a", 1.0), episode("b", 0.0)), group(episode("c", 3.0), episode("d", 3.0))],
        PLAIN,
    )
    assert [r.id for r in rows] == ["a/1", "b/1", "c/1", "d/1"]
    assert [r.group for r in rows] == [0, 0, 1, 1]
    assert rows[0].columns["advantages"].tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert rows[1].columns["advantages"].tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert not rows[2].columns["advantages"].any()
    assert rows[0].columns["advantages"].dtype == np.float32


def test_failed_and_unscored_trajectories_touch_neither_rows_nor_baseline():
    with_failures = group(
        episode("a", 1.0), episode("x", 100.0, status="failed"), episode("b", 0.0),
        episode("y", None, status="truncated"),
    )  # fmt: skip
    for config in (PLAIN, GRPO(), RLOO(), ReinforcePlusPlus()):
        found = rows_for_training([with_failures], config)
        alone = rows_for_training([group(episode("a", 1.0), episode("b", 0.0))], config)
        assert [r.id for r in found] == [r.id for r in alone] == ["a/1", "b/1"]
        for f, a in zip(found, alone, strict=True):
            assert np.array_equal(f.columns["advantages"], a.columns["advantages"])
    assert rows_for_training([group(episode("x", 1.0, status="failed"))], PLAIN) == []
    assert rows_for_training([], PLAIN) == []


def test_a_shared_turn_is_trained_once_with_the_mean_of_its_leaves():
    rows = rows_for_training([group(forked("a", [1.0, 0.5]), episode("b", 0.25))], PLAIN)
    # the baseline is the mean over trajectories: (0.75 + 0.25) / 2
    first, second, other = rows
    assert first.columns["advantages"].tolist() == [0, 0, 0.25, 0.25, 0, 0.5]
    assert second.columns["advantages"].tolist() == [0, 0, 0, 0, 0, 0.0]
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert second.loss_mask.tolist() == [False] * 5 + [True]
    assert other.columns["advantages"].tolist() == [0, 0, -0.25, -0.25, -0.25]


def test_the_number_of_leaves_changes_no_other_advantage():
    for leaves in (1, 2, 7):
        rows = rows_for_training([group(forked("a", [1.0] * leaves), episode("b", 0.0))], GRPO())
        assert rows[0].columns["advantages"][2] == pytest.approx(0.5 / 0.5**0.5, rel=1e-5)
        assert rows[-1].columns["advantages"][2] == pytest.approx(-0.5 / 0.5**0.5, rel=1e-5)


def test_a_turns_own_reward_is_added_to_its_tokens_alone():
    t = forked("a", [1.0, 1.0])
    t.set_segment_reward(1, 0.125)
    rows = rows_for_training([group(t, episode("b", 0.0))], PLAIN)
    assert rows[0].columns["advantages"].tolist() == [0, 0, 0.625, 0.625, 0, 0.5]
    assert rows[1].columns["advantages"].tolist() == [0, 0, 0, 0, 0, 0.5]


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(DataError, match=r"trajectory b, leaf 1.*nan"):
        rows_for_training([group(episode("a", 1.0), episode("b", float("nan")))], PLAIN)
    t = episode("c", 1.0)
    t.set_segment_reward(1, float("inf"))
    with pytest.raises(DataError, match=r"trajectory c, segment 1.*inf"):
        rows_for_training([group(t)], PLAIN)
