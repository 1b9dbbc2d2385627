"""mean@k and pass@k: known values, and intervals that cluster by task."""

import pytest

from lockstep.run.episodes import evaluation_metrics, with_interval
from lockstep.types import Group, Task, Trajectory


def group(name, *rewards):
    """None is a failed episode."""
    trajectories = []
    for reward in rewards:
        trajectory = Trajectory(id=name, status="failed" if reward is None else "finished")
        leaf = trajectory.observe([1])
        trajectory.rewards[leaf] = 9.0 if reward is None else reward
        trajectories.append(trajectory)
    return Group(task=Task(id=name), trajectories=trajectories)


def metrics_of(*groups):
    return evaluation_metrics(
        groups,
        num_samples=len(groups[0].trajectories),
        name="sampled",
        label=lambda task: task.id[0],
        success_reward=1.0,
    )


def test_mean_and_pass_at_k_average_each_task_first_and_a_failed_episode_counts_0():
    found = metrics_of(group("a1", 0.0, 1.0), group("a2", 1.0, 1.0), group("b1", 0.5, None))
    assert found["eval/sampled/mean@2"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert found["eval/sampled/pass@2"] == pytest.approx(2 / 3)
    assert found["eval/sampled/pass@2/high"] == 1.0, "no chance is above 1"
    assert found["eval/sampled/failed"] == pytest.approx(1 / 6)
    assert found["eval/sampled/reward/a"] == 0.75 and found["eval/sampled/reward/b"] == 0.25


def test_more_samples_of_one_task_do_not_narrow_the_interval():
    few = metrics_of(*(group(f"t{i}", r) for i, r in enumerate((0.0, 1.0, 1.0, 0.0))))
    many = metrics_of(*(group(f"t{i}", *[r] * 50) for i, r in enumerate((0.0, 1.0, 1.0, 0.0))))
    for bound in ("low", "high"):
        assert few[f"eval/sampled/mean@1/{bound}"] == many[f"eval/sampled/mean@50/{bound}"]


def test_one_task_has_no_interval():
    assert with_interval("eval/x", [0.5]) == {"eval/x": 0.5}
