"""Groups that teach, in whole runs: silent groups are replaced, and nothing is lost on the way."""

from dataclasses import dataclass, replace

import pytest
from quickstarts import quickstart_with
from run_rows import rows_of

from lockstep.cli import main
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.errors import RolloutError
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.training.rows import punish_length, without_over_long
from lockstep.types import Group, Sample, Task, Trajectory

SMALL = (
    "steps=4", "groups_per_step=3", "group_size=2", "evaluation=none", "checkpoint.every=0",
    "signal.max_extra_tasks=4", "task.retrieval_weight=0", "task.format_penalty_weight=0",
)  # fmt: skip


def config(*settings):
    return quickstart_with(*SMALL, *settings)


def figures_of(path):
    """Without health, whose windows begin with a run."""
    return [{k: v for k, v in r.items() if not k.startswith("health/")} for r in rows_of(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two rewards of 0 or 1 seldom differ: most groups are replaced, and not all can be."""
    return train(config(), out=tmp_path_factory.mktemp("runs") / "whole", view="json").path


def test_silent_groups_are_replaced_counted_and_kept(whole):
    rows = load_run(whole).metrics
    assert sum(row["signal/replaced"] for row in rows) > 4
    for row in rows:
        assert row["episodes/total"] == 6, "the batch that trains has the size that was asked for"
        assert row["signal/missing"] == row["episodes/without_signal"]
        assert not row["signal/missing"] or row["signal/replaced"] == 4
        assert row["tokens/sampled"] > row["tokens/replaced"] > 0 or not row["signal/replaced"]
    stored = [record.trajectory for record in load_run(whole).trajectories()]
    replaced = sum(int(row["signal/replaced"]) for row in rows)
    assert len(stored) == 4 * 6 + 2 * replaced, "what was sampled in vain is in the run too"
    assert len({t.id for t in stored}) == len(stored)


def test_a_run_that_is_resumed_replaces_the_same_groups(whole, tmp_path):
    path = tmp_path / "run"
    train(config("steps=2", "trainer.schedule=constant"), out=path, view="json")
    first = figures_of(path)
    constant = train(config("trainer.schedule=constant"), out=tmp_path / "all", view="json").path
    onward = train(
        config("trainer.schedule=constant"), out=tmp_path / "on", start=(path, 2), view="json"
    ).path
    assert first + figures_of(onward) == figures_of(constant)


def test_a_shortage_is_said_once_and_stops_the_run_if_asked_to(tmp_path, capsys):
    settings = ["signal.max_extra_tasks=1", "task.max_calls=1", "stop_on=shortage"]
    code = main(["train", "quickstart", *SMALL, *settings, f"out={tmp_path / 'run'}"])
    out = capsys.readouterr().out
    assert code == 3
    ((row,), said) = load_run(tmp_path / "run").metrics, " ".join(out.split())
    shown = f"{row['signal/missing']:.0f} of 3 groups have no signal and are trained as they are, "
    assert said.count(f"{shown}after {row['signal/replaced']:.0f} others without one") == 1
    assert "groups had no signal after 1 more tasks (stop_on=shortage)" in " ".join(out.split())
    assert len(rows_of(tmp_path / "run")) == 1
    assert list(load_run(tmp_path / "run").checkpoints()) == [1]


@dataclass(frozen=True, kw_only=True)
class OftenBroken(DocSearchConfig):
    """Every episode of three tasks in four breaks, so that their groups have no signal."""

    TAG = "often-broken"

    def environment(self, task, agent):
        environment = super().environment(task, agent)
        if int(task.payload["world_seed"]) % 4:
            environment.step = no_index
        return environment


async def no_index(message):
    raise OSError("the index is not there")


def test_replaced_groups_count_among_the_failures_that_stop_a_run(tmp_path):
    broken = replace(
        config("signal.max_extra_tasks=40"), task=OftenBroken(retrieval_weight=0, two_hop_share=0.5)
    )
    with pytest.raises(RolloutError, match="the index is not there"):
        train(broken, out=tmp_path / "run", view="json")
    stored = [record.trajectory for record in load_run(tmp_path / "run").trajectories()]
    assert sum(t.status == "failed" for t in stored) > len(stored) / 2


def test_a_run_may_go_on_in_the_other_order(tmp_path):
    path = train(config("steps=1", "signal.order=expected"), out=tmp_path / "a", view="json").path
    plain = train(config("steps=2"), out=tmp_path / "b", start=(path, 1), view="json").path
    again = config("steps=3", "signal.order=expected")
    onward = train(again, out=tmp_path / "c", start=(plain, 2), view="json").path
    assert [row["step"] for run in (path, plain, onward) for row in rows_of(run)] == [0, 1, 2]


def test_tasks_by_expected_signal_go_on_where_a_run_ended(tmp_path):
    settings = ("signal.order=expected", "signal.max_extra_tasks=0", "trainer.schedule=constant")
    whole = train(config(*settings), out=tmp_path / "whole", view="json").path
    path = train(config(*settings, "steps=2"), out=tmp_path / "run", view="json").path
    onward = train(config(*settings), out=tmp_path / "on", start=(path, 2), view="json").path
    assert figures_of(path) + figures_of(onward) == figures_of(whole)
    assert [row["signal/known_tasks"] for row in rows_of(whole)] == [3, 6, 9, 12]


def episode(name, length, status="finished"):
    trajectory = Trajectory(id=name, status=status)
    leaf = trajectory.record(
        [7] * (length - 2), logprobs=[-1.0] * (length - 2), parent=trajectory.observe([1, 2]),
        prompt_ids=[1, 2],
    )  # fmt: skip
    trajectory.rewards[leaf] = 1.0
    return trajectory


@pytest.mark.parametrize(
    ("length", "reward"), [(60, 1.0), (80, 1.0), (90, 0.5), (95, 0.25), (100, 0.0)]
)
def test_a_reward_falls_over_the_last_tokens_before_the_longest_row(length, reward):
    """DAPO, equation 13, with a maximum of 100 and a cache of 20."""
    trajectory = episode("t", length)
    punish_length(trajectory, max_tokens=100, width=20)
    assert trajectory.reward == pytest.approx(reward)
    assert trajectory.reward_parts["length_penalty"] == pytest.approx(1 - reward)


def test_episodes_that_a_budget_cut_are_left_out_by_row():
    episodes = [episode("a", 10), episode("b", 10, "truncated")]
    rows: list[Sample] = [row for t in episodes for row in t.rows()]
    group = Group(task=Task(id="t"), trajectories=episodes)
    kept, number = without_over_long(rows, [group])
    assert [row.id for row in kept] == ["a/1"] and number == 1.0


def test_over_long_episodes_count_in_the_baseline_and_are_not_trained(tmp_path):
    settings = ("signal.max_extra_tasks=0", "max_tokens=70", "steps=2")
    trained = train(config(*settings), out=tmp_path / "all", view="json").path
    dropped = train(
        config(*settings, "signal.over_long=drop", "signal.length_penalty_tokens=30"),
        out=tmp_path / "some", view="json",
    ).path  # fmt: skip
    first, other = rows_of(trained)[0], rows_of(dropped)[0]
    assert first["episodes/truncated"] == other["episodes/truncated"] > 0
    assert other["signal/over_long_rows"] == other["episodes/truncated"]
    assert other["training/rows"] == first["training/rows"] - other["signal/over_long_rows"]
    assert other["reward/mean"] < first["reward/mean"]
    assert other["reward/length_penalty"] > 0
