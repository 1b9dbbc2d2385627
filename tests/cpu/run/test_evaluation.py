"""mean@k and pass@k: known values, and intervals that cluster by task."""

from types import SimpleNamespace

import pytest
from quickstarts import quickstart_with

import lockstep
from lockstep.agent.task_config import TaskConfig
from lockstep.errors import ConfigError, DataError
from lockstep.run.episodes import evaluation_metrics, with_interval
from lockstep.run_config import EvaluationConfig, EvaluationSet
from lockstep.store.run import load_run
from lockstep.types import Group, Task, Trajectory

HOPS = ("evaluation.sets.hops.task=docsearch", "evaluation.sets.hops.task.two_hop_share=1")
SMALL = (
    "steps=1", "groups_per_step=1", "group_size=2", "agent.max_turn_tokens=8", "contract=none",
    "evaluation.num_tasks=2", "evaluation.at_start=false", "checkpoint.every=0",
)  # fmt: skip


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
    evaluation = EvaluationConfig(num_samples=len(groups[0].trajectories), success_reward=1.0)
    config = SimpleNamespace(
        evaluation=evaluation, task=SimpleNamespace(label=lambda task: task.id[0])
    )
    return evaluation_metrics(groups, config, name="sampled")


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


# -- several sets --------------------------------------------------------------------------------


def test_each_set_has_its_own_tasks_and_sampling(tmp_path):
    sets = (
        *HOPS, "evaluation.sets.hops.num_tasks=3", "evaluation.sets.hops.num_samples=2",
        "evaluation.sets.hops.temperature=0.5", "evaluation.sets.calm.temperature=0",
        "evaluation.sets.calm.num_tasks=1",
    )  # fmt: skip
    config = quickstart_with(*SMALL, *sets)
    run = load_run(lockstep.train(config, out=tmp_path / "run"))
    figures = {name for row in run.metrics for name in row if name.startswith("eval/")}
    assert {"eval/sampled/mean@1", "eval/greedy/mean@1", "eval/calm/mean@1"} <= figures
    assert {"eval/hops/mean@2", "eval/hops/pass@2", "eval/hops/reward/2-hop"} <= figures
    assert "eval/hops/reward/1-hop" not in figures
    assert {*run.splits()} == {"train", "sampled", "greedy", "hops", "calm"}
    [step] = run.steps(split="hops")
    played = {
        name: [r.task.id for r in run.trajectories(step, split=name)] for name in run.splits()
    }
    assert len(played["hops"]) == 6 and len({*played["hops"]}) == 3
    assert played["calm"] == played["greedy"][:1] and {*played["greedy"]} == {*played["sampled"]}


def test_a_set_of_tasks_is_checked_before_the_run(tmp_path):
    settings = [*SMALL, *HOPS, "evaluation.sets.hops.task.docs=nowhere"]
    with pytest.raises((ConfigError, DataError), match="nowhere"):
        lockstep.train(quickstart_with(*settings), out=tmp_path / "run")


class _TwoSeats(TaskConfig):
    SEATS = ("first", "second")


def test_a_set_has_no_seats():
    with pytest.raises(ConfigError, match="SEATS=first,second: only the task that is trained"):
        EvaluationSet(task=_TwoSeats())
