"""Sampling ahead on two processes, each with its own engine and its share of every batch."""

from quickstarts import quickstart_with

from lockstep.run.train import train
from lockstep.store.run import load_run


def test_two_processes_sample_ahead_and_train_every_batch_once(tmp_path):
    settings = (
        "steps=4", "max_staleness=1", "groups_per_step=3", "group_size=2", "parallel.processes=2",
        "evaluation.num_tasks=1", "evaluation.greedy=false", "evaluation.every=2",
        "checkpoint.every=2", "parallel.timeout_seconds=100",
    )  # fmt: skip
    config = quickstart_with(*settings)
    outcome = train(config, out=tmp_path / "run", view="json")
    assert outcome.status == "done"
    run, source = load_run(outcome.path), config.task.tasks(split="train", seed=config.seed)
    rows = [r for r in run.metrics if "train/loss" in r]
    assert [r["staleness/max"] for r in rows] == [0, 1, 1, 1]
    for row in rows:
        groups = run.groups(row["step"])
        assert [g.task.id for g in groups] == [t.id for t in source.take(3)]
        assert row["training/rows"] == sum(len(g.trajectories) for g in groups) == 6
        versions = {
            s.policy_version
            for g in groups
            for t in g.trajectories
            for s in t.segments
            if s.is_sampled
        }
        assert versions <= {max(row["step"] - 1, 0), row["step"]}
        fresh = row.get("mismatch/by_age/0/max_abs_diff", 0.0)
        assert fresh < 1e-4, "each engine has its own copy of what was gathered"
    assert sum("eval/sampled/mean@1" in r for r in run.metrics) == 3
    assert max(run.checkpoints()) == 4
