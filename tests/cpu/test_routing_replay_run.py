"""Runs with routing replay: equal bits where sampler and trainer agree, and what it takes away
where they do not."""

from dataclasses import dataclass

import pytest
from quickstarts import AT_END, SHORT, quickstart_with, run_with

from lockstep.config import resolve
from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.recipes import find_supervised_recipe
from lockstep.run.preflight import plan, preflight
from lockstep.store.run import load_run

SMALL = (*SHORT, *AT_END, "steps=2", "evaluation.num_tasks=1", "seed=3", "trainer.warmup_updates=0")


def rows_of(path, *overrides):
    """The metrics of both steps."""
    return [row for row in run_with(path, *SMALL, *overrides).metrics if "mismatch/k3" in row]


def test_under_the_contract_replay_is_the_identity(tmp_path):
    runs = {
        replay: rows_of(
            tmp_path / replay, "contract=true-on-policy", f"trainer.routing_replay={replay}"
        )
        for replay in ("none", "rollout", "recompute")
    }
    for replay in ("rollout", "recompute"):
        for row, without in zip(runs[replay], runs["none"], strict=True):
            for name in ("train/loss", "train/grad_norm", "train/entropy", "reward/mean"):
                assert row[name] == without[name], name
            assert row["mismatch/unequal_tokens"] == row["mismatch/k3"] == 0
            assert row["routing/replayed_share"] == 1 and row["routing/differing_share"] == 0
            assert "routing/replayed_share" not in without


def test_replay_takes_the_flips_of_a_noisy_router_away(tmp_path):
    fault = ["--fault=router_noise,std=0.12", "groups_per_step=8", "group_size=8"]
    without = rows_of(tmp_path / "none", *fault)
    replayed = rows_of(tmp_path / "rollout", *fault, "trainer.routing_replay=rollout")
    assert replayed[0]["mismatch/compared_tokens"] == without[0]["mismatch/compared_tokens"]
    assert all(row["routing/differing_share"] > 0.01 for row in replayed)
    # What stays is the noise of the weights; whole experts more or less are gone. The k3 of a few
    # thousand tokens is made by single ones, the first percentile is not: 0.55 to 0.75 of it stays.
    low = [sum(row["mismatch/log_ratio_p1"] for row in rows) for rows in (replayed, without)]
    assert 0 > low[0] > 0.85 * low[1]
    # They are stored with the trajectories, as they were sampled.
    (record, *_) = load_run(tmp_path / "rollout").trajectories(0)
    t = record.trajectory
    assert {s.routed_experts.dtype.name for s in t.segments} == {"uint8"}
    (leaf,) = t.leaves()
    assert t.num_routed(leaf) == len(t.path_ids(leaf)) - 1


@dataclass(frozen=True, kw_only=True)
class NoRoutes(EngineConfig):
    """An engine of a user's own that says nothing of routes."""


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model=tiny-qwen3", "trainer.routing_replay=rollout"], r"\(qwen3\)"),
        (["model=tiny-qwen3", "trainer.routing_replay=recompute"], r"\(qwen3\)"),
        (
            ["engine=no_routes", "trainer.routing_replay=rollout"],
            r"engine=no_routes.*trainer\.routing_replay=recompute",
        ),
    ],
)
def test_replay_of_what_cannot_be_is_refused_before_a_model_is_loaded(overrides, text):
    with pytest.raises(ConfigError, match=text):
        preflight(quickstart_with(*overrides))


def test_supervised_training_has_no_routes_to_replay():
    with pytest.raises(ConfigError, match="in supervised training nothing was sampled"):
        resolve(find_supervised_recipe("sft"), ["trainer.routing_replay=rollout"])


def test_the_plan_says_whether_a_replay_needs_a_second_pass():
    def update(replay):
        config = quickstart_with(f"trainer.routing_replay={replay}")
        (line,) = [text for text in plan(config, preflight(config)) if text.startswith("update")]
        return line

    assert "two-pass" not in update("rollout")
    assert "two-pass" in update("recompute")
