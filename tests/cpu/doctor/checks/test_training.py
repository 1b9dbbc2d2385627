"""What the checks of training say of ages, of updates, and of figures that cannot be."""

import numpy as np
import pytest
import torch
from made_rows import noisy, policy_rows

from lockstep.doctor.checks.base import Finding, Setting
from lockstep.doctor.checks.examine import Examination, Stage, all_stages, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.training.unphysical import RULES

EXACT = policy_rows(sampler=noisy(1e-6))
NUM_ROWS, SIZE = len(EXACT), 28


def examined(rows: Rows, **setting) -> Examination:
    has = frozenset(
        name
        for name in (
            "rollout_logprobs", "trainer_logprobs", "policy_version", "trainer_version",
            "advantages", "rewards", "groups", "steps",
        )
        if getattr(rows, name) is not None
    )  # fmt: skip
    return examine(
        lambda: [rows], [Stage(checks=all_stages()["training"])], Setting(**setting), has=has
    )


def finding(rows: Rows, check: str, **setting) -> Finding:
    return next(f for f in examined(rows, **setting).findings if f.check == check)


def moved(rows: Rows, by) -> Rows:
    """`rows` with the trainer's log-probs moved by [N]."""
    return rows.with_(trainer_logprobs=(rows.trainer_logprobs + by).astype(np.float32))


def aged(ages, gap=0.3) -> Rows:
    """Rows of version 5, whose tokens are of these ages by row, the older ones apart by `gap`."""
    ages = np.repeat(np.resize(ages, NUM_ROWS), SIZE)
    noise = np.random.default_rng(0).normal(0, gap, len(ages)) * (ages != 0)
    version = np.where(EXACT.loss_mask, 5 - ages, -1).astype(np.int32)
    return moved(EXACT, noise).with_(policy_version=version, trainer_version=np.full(NUM_ROWS, 5))


def test_tokens_of_age_0_are_consistent():
    assert finding(aged([0]), "training/staleness").verdict == "consistent"


def test_a_gap_that_comes_with_age_is_staleness():
    out = examined(aged([0, 1, 2]))
    told = next(f for f in out.findings if f.check == "training/staleness")
    assert told.verdict == "differs" and told.figures["max_age"] == 2
    assert "sampled by version" in told.evidence[0].note
    assert [s.cause for s in out.shares] == ["stale"] and out.shares[0].k2 > 0.999


def test_an_age_that_the_settings_allow_is_information():
    assert finding(aged([0, 1]), "training/staleness", max_staleness=1).verdict == "information"


def test_an_age_without_a_gap_is_information():
    assert finding(aged([0, 1], gap=0.0), "training/staleness").verdict == "information"


def test_versions_of_the_future_differ():
    told = finding(aged([0, -1]), "training/staleness")
    assert told.verdict == "differs" and "newer" in told.measured


def updated(strength, noise=0.0, seed=0, columns=("advantages",)) -> Rows:
    """Rows with advantages whose trainer has learned from them already."""
    rng = np.random.default_rng(seed)
    advantage = np.repeat(rng.choice([-1.0, 1.0], NUM_ROWS), SIZE)
    learned = strength * advantage * rng.exponential(1.0, len(advantage))
    rows = moved(EXACT, learned + noise * rng.normal(0, 1.0, len(advantage)))
    known = {
        "advantages": advantage.astype(np.float32),
        "rewards": (advantage[::SIZE] + 1) / 2,
    }
    return rows.with_(**{name: known[name] for name in columns})


@pytest.mark.parametrize("columns", [("advantages",), ("rewards",)])
@pytest.mark.parametrize(("strength", "noise"), [(0.01, 0.0), (0.1, 0.1)])
def test_log_probs_that_know_the_advantage_are_of_after_the_update(strength, noise, columns):
    out = examined(updated(strength, noise, columns=columns))
    told = next(f for f in out.findings if f.check == "training/after_update")
    assert told.verdict == "differs"
    assert out.shares[0].cause == "after_update" and out.shares[0].k2 > 0.99


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_know_the_advantage(seed):
    told = finding(updated(0.0, 0.1, seed), "training/after_update")
    assert told.verdict == "consistent"


@pytest.mark.parametrize(("size", "verdict"), [(1e-8, "consistent"), (1e-5, "differs")])
def test_roundings_of_a_policy_that_is_sure_are_no_update(size, verdict):
    """Near 0 a log-prob has digits below 1e-8: a healthy run's gap of 1e-8 can follow the sign."""
    rows = updated(0.3)
    sure = np.where(EXACT.loss_mask, -1e-4, np.nan).astype(np.float32)
    sign = np.sign(rows.trainer_logprobs.astype(float) - EXACT.rollout_logprobs)
    moved_by = size * (sign + np.random.default_rng(0).normal(0, 0.3, len(sure)))
    rows = rows.with_(rollout_logprobs=sure, trainer_logprobs=(sure + moved_by).astype(np.float32))
    assert finding(rows, "training/after_update").verdict == verdict


def test_a_gap_that_makes_bad_rows_unlikelier_alone_is_no_update():
    rows = updated(0.0)
    worse = -0.1 * (rows.advantages < 0) * np.random.default_rng(1).exponential(1, len(rows.gap))
    assert finding(moved(rows, worse), "training/after_update").verdict == "consistent"


def test_without_an_advantage_of_either_sign_it_cannot_be_checked():
    rows = updated(0.1).with_(advantages=np.ones(NUM_ROWS * SIZE, np.float32))
    assert finding(rows, "training/after_update").verdict == "not_checkable"


def stepped(sizes) -> Rows:
    """As many rows of each step, whose gaps have these sizes by step."""
    step = np.sort(np.resize(np.arange(len(sizes)), NUM_ROWS))
    noise = np.random.default_rng(0).normal(0, 1, NUM_ROWS * SIZE)
    return moved(EXACT, np.array(sizes)[np.repeat(step, SIZE)] * noise).with_(steps=step)


@pytest.mark.parametrize("sizes", [[0, 0.1, 0.1, 0.1], [0.01, 0.05, 0.1, 0.2, 0.3], [0, 0.1, 0.2]])
def test_a_gap_that_grows_while_ages_are_0_is_of_other_weights(sizes):
    out = examined(stepped(sizes))
    assert [s.cause for s in out.shares] == ["other_weights"]


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0.1, 0.1, 0.1, 0.1], [0.3, 0.01, 0.2, 0.1, 0.05]])
def test_a_gap_that_is_there_from_the_first_step_is_not(sizes):
    assert finding(stepped(sizes), "training/growing_gap").verdict == "consistent"


def test_a_gap_that_jumps_once_says_the_step():
    told = finding(stepped([0, 0.1, 0.1, 0.1]), "training/growing_gap")
    assert "it jumps at step 1" in told.measured and "another state" in told.measured


LEVELS = [0.001] * 4 + [0.1] * 4
"""Sizes of the gap before and after a resume at step 4."""


def metrics_of(steps, **figures):
    """One row of metrics per step. figures: step -> value of `train/...`."""
    return tuple(
        {"step": step, **{f"train/{name}": of(step) for name, of in figures.items()}}
        for step in steps
    )


def test_a_jump_at_a_resume_is_of_the_resume_and_not_of_growth():
    out = examined(stepped(LEVELS), resumes=(4,))
    assert [s.cause for s in out.shares] == ["after_resume"] and out.shares[0].k2 > 0.99
    told = next(f for f in out.findings if f.check == "training/after_resume")
    assert told.figures["step"] == 4 and "the run was resumed there" in told.measured


def test_a_jump_where_the_logged_steps_go_back_is_of_a_resume():
    logged = [{"step": step, "reward": 0.5} for step in [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]]
    told = finding(stepped(LEVELS), "training/after_resume", step_metrics=logged)
    assert told.verdict == "differs" and "go back there, from 5" in told.measured


def test_a_jump_after_missing_steps_is_of_a_resume():
    rows = stepped(LEVELS)
    rows = rows.with_(steps=rows.steps + 5 * (rows.steps >= 4))
    told = finding(rows, "training/after_resume")
    assert told.verdict == "differs" and "steps after 3 are missing" in told.measured


@pytest.mark.parametrize(
    ("sizes", "resumes"),
    [
        (LEVELS, ()),
        (LEVELS, (2,)),
        (LEVELS, (6,)),
        ([0.1] * 8, (4,)),
        ([0.1] * 4 + [0.2] * 4, (4,)),
        ([0.001, 0.002, 0.004, 0.008, 0.02, 0.04, 0.1, 0.2], (4,)),
        ([0.001] * 4 + [0.1, 0.001, 0.1, 0.001], (4,)),
    ],
)
def test_a_level_that_stays_or_changes_elsewhere_is_not_of_the_resume(sizes, resumes):
    told = finding(stepped(sizes), "training/after_resume", resumes=resumes)
    assert told.verdict in ("consistent", "not_checkable")


@pytest.mark.parametrize("figures", [{"lr": lambda _: 0.0}, {"grad_norm": lambda _: 0.0}])
def test_a_gap_that_grows_without_an_update_is_not_of_weights(figures):
    rows = stepped([0.01, 0.05, 0.1, 0.2, 0.3])
    out = examined(rows, step_metrics=metrics_of(range(5), **figures))
    assert [s.cause for s in out.shares] == ["grows_without_learning"]
    assert out.shares[0].k2 > 0.99


def test_the_metrics_show_it_where_the_rows_have_one_step():
    grown = tuple(
        {"actor/lr": 0.0, "step": step, "mismatch/k2": 1e-4 * 3**step} for step in range(6)
    )
    assert finding(EXACT, "training/idle_growth", step_metrics=grown).verdict == "differs"


@pytest.mark.parametrize(
    ("sizes", "figures"),
    [
        ([0.01, 0.05, 0.1, 0.2, 0.3], {"lr": lambda _: 1e-6}),
        ([0.01, 0.05, 0.1, 0.2, 0.3], {"lr": lambda step: 1e-6 * (step > 0)}),
        ([0.01, 0.05, 0.1, 0.2, 0.3], {"grad_norm": lambda step: float(step == 0)}),
        ([0.1] * 5, {"lr": lambda _: 0.0}),
    ],
)
def test_growth_with_an_update_and_a_level_without_one_are_not_it(sizes, figures):
    told = finding(
        stepped(sizes), "training/idle_growth", step_metrics=metrics_of(range(5), **figures)
    )
    assert told.verdict in ("consistent", "not_checkable")


HEALTHY_STEP = {
    "mismatch/k1": 1e-4, "mismatch/k2": 4e-5, "mismatch/k3": 4e-5, "mismatch/max_abs_diff": 0.1,
    "mismatch/ess": 0.999, "mismatch/forced_share": 0.3, "mismatch_after/k2": 1e-3,
    "train/clip_fraction": 0.05, "train/log_ratio_abs_max": 0.8, "train/loss": 0.01,
    "train/grad_norm": 0.3, "train/lr": 1e-3, "advantage/max_abs": 2.0, "perplexity": 1.5,
    "response_length/mean": 20.0, "reward/mean": 0.4, "reward/std": 0.3, "policy_version": 0,
}  # fmt: skip


def steps_of(num=8, **changed):
    """Rows of metrics whose figures move as those of a run do; `changed` ones are as given."""
    rng = np.random.default_rng(0)
    rows = []
    for step in range(num):
        row = {k: v * float(1 + 0.1 * rng.random()) for k, v in HEALTHY_STEP.items()}
        row |= {"step": step, "policy_version": step, "mismatch/ess": 0.999, "train/lr": 1e-3}
        rows.append(row | {k: v(step) if callable(v) else v for k, v in changed.items()})
    return tuple(rows)


def unphysical(num=8, **changed) -> Finding:
    return finding(EXACT, "training/unphysical", step_metrics=steps_of(num, **changed))


def test_the_figures_of_a_healthy_run_stand_beside_each_other():
    told = unphysical()
    assert told.verdict == "consistent" and told.figures["steps"] == 8


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("negative_k3", {"mismatch/k3": -1e-3}),
        ("k2_below_k1", {"mismatch/k1": 0.5}),
        ("k2_above_largest", {"mismatch/max_abs_diff": 1e-4}),
        ("clip_fraction", {"train/clip_fraction": 1.7}),
        ("ess", {"mismatch/ess": -0.1}),
        (
            "unchanged_outputs",
            {"mismatch/k3": 4.0, "perplexity": 1.5, "response_length/mean": 20.0},
        ),
        ("all_clipped", {"train/clip_fraction": 0.97}),
        ("flat_reward", {"reward/mean": 0.25}),
        ("unclipped_gap", {"mismatch/k3": 2.0, "train/clip_fraction": 0.0}),
        ("unclipped_update", {"train/approx_kl": 2.0, "train/clip_fraction": 0.0}),
        ("no_gradient", {"train/grad_norm": 0.0}),
        ("still_version", {"policy_version": 1}),
        ("update_without_effect", {"mismatch_after/k2": 4e-5, "mismatch/k2": 4e-5}),
    ],
)
def test_figures_that_cannot_be_are_named_with_their_steps(rule, changed):
    told = unphysical(num=24, **changed)
    assert rule in told.figures and "steps" in told.measured
    assert told.verdict == "differs"


def jittering(step):
    return 0.1 + 0.01 * float(np.sin(step))


@pytest.mark.parametrize(
    ("rule", "figures"),
    [
        ("all_clipped", {"actor/ppo_kl": 2, "actor/pg_clipfrac": 0.99}),
        ("all_clipped", {"clip_ratio/region_mean": 0.99}),
        ("all_clipped", {"policy/clipfrac_avg": 0.99}),
        ("all_clipped", {"train/clip_fraction": np.float32(0.99)}),
        ("all_clipped", {"train/clip_fraction": torch.tensor(0.99)}),
        ("all_clipped", {"train/pg_clipfrac": 0.99}),
        ("unclipped_update", {"actor/ppo_kl": 2, "actor/pg_clipfrac": 0.0}),
        ("unclipped_update", {"train/ppo_kl": 2, "train/pg_clipfrac": 0.0}),
        ("unclipped_gap", {"rollout_corr/k3_kl": 2, "actor/pg_clipfrac": 0.0}),
        ("negative_k3", {"rollout_corr/k3_kl": -1e-3}),
        ("flat_reward", {"critic/rewards/mean": 0.5, "actor/pg_loss": jittering}),
        ("flat_reward", {"critic/score/mean": 0.5, "actor/pg_loss": jittering}),
        ("flat_reward", {"objective/scores": 0.5, "loss/policy_avg": jittering}),
        ("flat_reward", {"reward": 0.5, "reward_std": 0.3, "loss": jittering}),
        ("flat_reward", {"rollout/raw_reward": 0.5, "train/loss": jittering}),
    ],
)
def test_the_figures_of_other_programs_are_read_by_their_names(rule, figures):
    rows = [{n: v(i) if callable(v) else v for n, v in figures.items()} for i in range(40)]
    told = finding(EXACT, "training/unphysical", step_metrics=rows)
    assert told.verdict == "differs" and rule in told.figures


@pytest.mark.parametrize(
    "figures",
    [
        {"actor/ppo_kl": 1e-3, "actor/pg_clipfrac": 0.02, "actor/pg_loss": jittering},
        {"critic/rewards/mean": 0.0, "actor/pg_loss": jittering},
        {"reward": jittering, "reward_std": 0.3, "loss": jittering, "kl": 2.0},
        {"train/ppo_kl": 0.0, "train/pg_clipfrac": 0.0, "train/loss": 0.0},
    ],
)
def test_the_figures_of_healthy_runs_of_other_programs_break_no_rule(figures):
    rows = [{n: v(i) if callable(v) else v for n, v in figures.items()} for i in range(40)]
    assert finding(EXACT, "training/unphysical", step_metrics=rows).verdict == "consistent"


def test_figures_of_which_no_rule_reads_any_are_said_to_be_unchecked():
    told = finding(EXACT, "training/unphysical", step_metrics=[{"val/accuracy": 0.5}] * 9)
    assert told.verdict == "not_checkable"
    assert "Found: val/accuracy; read are mismatch/k1 (or rollout_corr/kl)" in told.measured


def test_rules_have_names_of_their_own():
    assert len({rule.name for rule in RULES}) == len(RULES) == 14
