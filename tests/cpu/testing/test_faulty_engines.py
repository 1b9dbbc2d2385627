"""The faults of the sampler on the shipped models, and every fault in a run.

A change that is injected must be of the size that was asked for, and nothing else may change: the
trainer's numbers and its parameters, the sampler without the fault.
"""

import asyncio
import shutil
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from quickstarts import quickstart_with, run_with
from run_rows import without_time

from lockstep.agent.loop import Budget, collect, sampling_of
from lockstep.agent.turns import Policy
from lockstep.errors import ConfigError, EngineError
from lockstep.models.hf_io import hf_tensors
from lockstep.objectives.config import PPOClip
from lockstep.observe.alarms import mismatch_alarm
from lockstep.ops.context import PackedContext
from lockstep.run.build import Parts, build
from lockstep.run.preflight import preflight
from lockstep.store.run import load_run
from lockstep.testing.faults import injected, split_faults
from lockstep.training.rows import rows_for_training

MODELS = ("tiny-gpt-oss", "tiny-qwen3")


@dataclass
class Step:
    """The sampled half of one training step."""

    parts: Parts
    groups: list
    rows: list

    @property
    def trajectories(self):
        return [t for g in self.groups for t in g.trajectories]

    def measure(self):
        return self.parts.trainer.measure(self.rows).to_metrics()

    def sampled(self):
        """All ids and log-probs as bytes."""
        return [
            (s.token_ids.tobytes(), s.logprobs.tobytes())
            for t in self.trajectories
            for s in t.segments
            if s.is_sampled
        ]


def play(*overrides, num_tasks=4, version=0):
    # Stock ops with and without a fault, so that nothing else differs.
    settings, faults = split_faults(["seed=3", "contract=none", *overrides])
    config = quickstart_with(*settings)
    with injected(*faults):
        parts = build(config, preflight(config))

    async def sample():
        await sync(parts, version)
        return await collect(
            Policy(parts.engine, parts.renderer, sampling_of(config.agent)),
            lambda task: config.task.environment(task, config.agent),
            config.task.tasks(split="train", seed=config.seed).take(num_tasks),
            group_size=8,
            budget=Budget.of(config.agent, max_tokens=config.max_tokens),
            run_seed=config.seed,
        )

    groups = asyncio.run(sample())
    return Step(parts, groups, rows_for_training(groups, config.advantage))


async def sync(parts, version):
    source = None if parts.engine.capabilities.shares_weights else dict(hf_tensors(parts.model))
    await parts.engine.load_weights(source, version=version)


@cache
def sound(model):
    return play(f"model={model}")


def rescore(engine, rows, times):
    """[times, N] log-probs of the trained tokens, each time by the engine anew."""

    async def run():
        return [
            np.concatenate([(await engine.score(r.token_ids)).logprobs[r.loss_mask] for r in rows])
            for _ in range(times)
        ]

    return np.array(asyncio.run(run()), np.float64)


def trained(rows, column):
    return np.concatenate([row.columns[column][row.loss_mask] for row in rows])


# -- kernel noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kernel_noise", "router_noise"])
def test_noise_of_size_zero_is_no_fault_bit_for_bit(fault):
    faulty = play(f"--fault={fault},std=0")
    assert faulty.sampled() == sound("tiny-gpt-oss").sampled()
    again = rescore(faulty.parts.engine, faulty.rows[:2], 1)
    assert (again == rescore(sound("tiny-gpt-oss").parts.engine, faulty.rows[:2], 1)).all()


@pytest.mark.parametrize("model", MODELS)
def test_the_variance_of_rescored_logprobs_is_that_of_the_noise(model):
    """To first order log p moves by n_a - sum_j p_j n_j, n ~ N(0, std^2) per logit: its variance is
    std^2 ((1 - p_a)^2 + sum_{j != a} p_j^2)."""
    std, times = 0.01, 20
    step = play(f"model={model}", f"--fault=kernel_noise,std={std}", num_tasks=1)
    expected = []
    for row in step.rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        with torch.no_grad():
            decoder = step.parts.model
            hidden = decoder(ids, torch.arange(len(ids)), PackedContext.of([len(ids)]))
            probs = decoder.ops.log_softmax(decoder.logits(hidden)).exp().double().numpy()
        places = np.flatnonzero(row.loss_mask)
        before = probs[places - 1]
        chosen = before[np.arange(len(places)), row.token_ids[places]]
        expected.append((1 - chosen) ** 2 + (before**2).sum(1) - chosen**2)
    expected = std**2 * np.concatenate(expected)
    found = rescore(step.parts.engine, step.rows, times)
    # The sum of estimates v_i with 19 degrees of freedom each has a standard error of
    # sqrt(2 / 19 sum v_i^2); 5 of them, and 2 % for the second order.
    error = np.sqrt(2 / (times - 1) * (expected**2).sum()) / expected.sum()
    assert error < 0.1
    assert found.var(0, ddof=1).sum() == pytest.approx(expected.sum(), rel=5 * error + 0.02)
    gap = trained(step.rows, "rollout_logprobs") - found.mean(0)
    assert 0.3 < gap.var() / expected.mean() < 3  # what was recorded while sampling is as noisy


def test_noise_repeats_with_the_run_and_differs_between_draws_versions_and_seeds():
    words = ["--fault=kernel_noise,std=0.05"]
    first, again = play(*words), play(*words)
    assert first.sampled() == again.sampled()
    rows = first.rows[:1]
    one, two = rescore(first.parts.engine, rows, 2)
    assert (one != two).mean() > 0.9
    assert (one != trained(rows, "rollout_logprobs")).mean() > 0.9
    assert (rescore(again.parts.engine, rows, 2) == [one, two]).all()
    assert play(*words, version=1).sampled() != first.sampled()
    assert play("--fault=kernel_noise,std=0.05,seed=1").sampled() != first.sampled()


def test_noise_does_not_depend_on_what_was_sampled_before_the_last_sync():
    step = play("--fault=kernel_noise,std=0.05")
    rows, engine = step.rows[:1], step.parts.engine
    asyncio.run(sync(step.parts, 5))
    early = rescore(engine, rows, 2)
    rescore(engine, rows, 3)
    asyncio.run(sync(step.parts, 5))
    assert (rescore(engine, rows, 2) == early).all()


def test_a_bias_stays_the_same_when_scores_are_averaged():
    step = play("--fault=kernel_noise,std=0,bias=0.02")
    found = rescore(step.parts.engine, step.rows[:4], 2)
    assert (found[0] == found[1]).all()
    exact = np.concatenate([v[~np.isnan(v)] for v in step.parts.trainer.forward(step.rows[:4])])
    assert 1e-3 < np.abs(found[0] - exact).mean() < 2e-2


def test_noise_grows_with_the_version_that_the_engine_is_given():
    words = ["--fault=kernel_noise,std=0.001,growth=0.001,growth_from=4"]
    early, late = (play(*words, version=v).measure()["mismatch/k2"] for v in (4, 13))
    assert 30 < late / early < 300  # ten times the deviation: a hundred times its square


def test_noise_is_on_the_trainers_own_parameters_and_leaves_them_and_its_numbers_alone():
    clean = sound("tiny-gpt-oss")
    for kind in ("kernel_noise", "router_noise"):
        step = play(f"--fault={kind},std=0.1")
        engine, model = step.parts.engine, step.parts.model
        assert engine.capabilities.shares_weights
        mine = dict(engine._model.named_parameters())
        assert all(mine[name] is p for name, p in model.named_parameters())
        for ours, theirs in zip(
            step.parts.trainer.forward(clean.rows, column=None),
            clean.parts.trainer.forward(clean.rows, column=None),
            strict=True,
        ):
            assert np.array_equal(ours, theirs, equal_nan=True)
        with pytest.raises(EngineError, match="noise is on the trainer's own decoder; expected No"):
            asyncio.run(engine.load_weights(dict(hf_tensors(model)), version=1))


# -- router noise ----------------------------------------------------------------------------------


def test_router_noise_moves_few_tokens_far():
    """What tells a router from a kernel: the largest gap against the mean one."""
    router = play("--fault=router_noise,std=0.1", num_tasks=8)
    kernel = play("--fault=kernel_noise,std=0.03", num_tasks=8)
    tails = []
    for step in (router, kernel):
        step.parts.trainer.measure(step.rows, column="logprobs")
        gap = np.abs(trained(step.rows, "logprobs") - trained(step.rows, "rollout_logprobs"))
        assert 3e-3 < gap.mean() < 2e-2
        tails.append((gap**4).mean() / (gap**2).mean() ** 2)
    assert tails[0] > 3 * tails[1]


@pytest.mark.parametrize(
    ("words", "gap", "variance"),
    [
        (["model=tiny-qwen3", "--fault=kernel_noise,std=0.008"], 0.002, 1e-5),
        (["--fault=router_noise,std=0.1"], 0.008, 1e-3),
    ],
)
def test_the_sizes_that_are_told_of_large_models_can_be_reached(words, gap, variance):
    """Of a dense model and of a mixture of experts; within a factor of 3 and of 10, since few
    tokens at a router's tie make most of the second variance."""
    step = play(*words, num_tasks=8)
    exact = [v[~np.isnan(v)] for v in step.parts.trainer.forward(step.rows, column=None)]
    recorded = trained(step.rows, "rollout_logprobs")
    assert gap / 3 < np.abs(np.concatenate(exact) - recorded).mean() < gap * 3
    scores = rescore(step.parts.engine, step.rows, 4)
    assert variance / 10 < scores.var(0, ddof=1).mean() < variance * 10


# -- noise on both sides ---------------------------------------------------------------------------


def test_noise_on_both_sides_has_the_sizes_that_are_told_of_a_large_mixture():
    """Difference of the means, variance in the sampler, variance in the trainer. Few tokens make
    most of the variances: within a factor of 2, 10 and 10."""
    step = play(
        "--fault=sampling_noise,router_std=0.12,bias=0.028,trainer_std=5e-4", num_tasks=8,
    )  # fmt: skip
    rollout = rescore(step.parts.engine, step.rows, 16)
    trainer = np.array(
        [
            np.concatenate(
                [v[~np.isnan(v)] for v in step.parts.trainer.forward(step.rows, column=None)]
            )
            for _ in range(4)
        ],
        np.float64,
    )
    assert 0.004 < np.abs(trainer.mean(0) - rollout.mean(0, dtype=np.float64)).mean() < 0.016
    assert 1e-4 < rollout.var(0, ddof=1, dtype=np.float64).mean() < 1e-2
    assert 1e-8 < trainer.var(0, ddof=1).mean() < 1e-6


def test_noise_in_the_trainer_goes_with_its_gradients_and_is_new_each_time():
    step = play("--fault=sampling_noise,trainer_std=1e-3", num_tasks=1)
    trainer, model = step.parts.trainer, step.parts.model
    assert dict(trainer.model.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True))
    one, two = (np.concatenate(trainer.forward(step.rows, column=None)) for _ in range(2))
    assert 0 < np.nanmax(np.abs(one - two)) < 0.1
    assert trainer.update(step.rows, PPOClip())["train/grad_norm"] > 0
    # Nothing is added in the sampler, which is the shared model itself.
    assert step.sampled() == play("--fault=sampling_noise", num_tasks=1).sampled()


# -- stale weights ---------------------------------------------------------------------------------


def test_stale_weights_are_those_of_lag_versions_ago():
    step = play("--fault=stale_weights,lag=2")
    model, rows = step.parts.model, step.rows[:1]
    exact, found, shown = [], [], []
    for version in range(5):
        asyncio.run(sync(step.parts, version))
        exact.append(step.parts.trainer.forward(rows, column=None)[0][rows[0].loss_mask])
        found.append(rescore(step.parts.engine, rows, 1)[0])
        shown.append(step.parts.engine.version)
        with torch.no_grad():
            model.final_norm.mul_(1.05)
    assert shown == [0, 0, 0, 1, 2]
    for version, ran in enumerate(shown):
        assert np.abs(found[version] - exact[ran]).max() < 1e-4
    assert np.abs(exact[0] - exact[1]).max() > 1e-2


# -- in a run --------------------------------------------------------------------------------------

SMALL = ["seed=3", "steps=1", "groups_per_step=2", "evaluation.num_tasks=2", "checkpoint.every=1",
         "evaluation.greedy=false"]  # fmt: skip


def run(path, *overrides, resume=False):
    return run_with(path, *SMALL, *overrides, resume=resume).metrics


@pytest.mark.parametrize(
    ("overrides", "k1", "k2"),
    [
        (["--fault=kernel_noise,std=0.03"], (0, 1e-2), (1e-5, 1e-3)),
        (["--fault=router_noise,std=0.1"], (0, 1e-1), (1e-5, 1e-1)),
        (["--fault=retokenized_rows"], (1e-3, 1), (1e-1, 10)),
        (["--fault=retokenized_rows,logprobs=recomputed"], (0, 1e-6), (0, 1e-11)),
        (["--fault=shifted_logprobs"], (0, 1e-2), (1e-1, 10)),
        (["--fault=ignored_sinks"], (1e-4, 1), (1e-4, 1)),
        (["--fault=detached_sinks"], (0, 1e-6), (0, 1e-11)),
        (["--fault=dropped_final_tokens,count=2"], (0, 1e-6), (0, 1e-11)),
    ],
)
def test_a_run_goes_on_with_the_fault_and_its_mismatch_shows(tmp_path, overrides, k1, k2):
    _, row, _ = run(tmp_path / "run", *overrides)
    assert k1[0] <= abs(row["mismatch/k1"]) <= k1[1]
    assert k2[0] <= row["mismatch/k2"] <= k2[1]
    assert row["train/skipped_updates"] == 0
    assert row["mismatch/nonfinite_tokens"] == 0
    lost = ("--fault=retokenized_rows", "--fault=dropped_final_tokens")
    has_lost_tokens = overrides[0].startswith(lost)
    assert (row["tokens/trained"] < row["tokens/sampled"]) == has_lost_tokens
    stored = load_run(tmp_path / "run")
    (fault,) = stored.environment["faults"]
    assert fault["type"] == overrides[0].removeprefix("--fault=").partition(",")[0]
    assert all(t.trajectory.num_sampled_tokens for t in stored.trajectories(0))
    # One process over one set of ops: nothing that is injected counts as normal there.
    assert stored.environment["is_one_process"] is True
    is_seen = mismatch_alarm(row, "moe", is_one_process=True).level != "ok"
    assert is_seen == (k2[0] > 0)


@pytest.mark.parametrize(
    ("is_honest", "versions"), [("true", [0, 0, 0, 1]), ("false", [0, 1, 2, 3])]
)
def test_stale_weights_show_by_age_or_by_the_mismatch_alone(tmp_path, is_honest, versions):
    words = [f"--fault=stale_weights,lag=2,is_honest={is_honest}", "steps=4"]
    rows = run(tmp_path / "run", *words, "trainer.warmup_updates=0", "evaluation.at_start=false")
    steps = [row for row in rows if "mismatch/k3" in row]
    assert [row["policy_version"] for row in steps] == versions
    assert steps[0]["mismatch/k3"] < 1e-11
    assert min(row["mismatch/k3"] for row in steps[1:]) > 1e-9


def test_a_run_with_growing_noise_resumes_to_the_same_bits(tmp_path):
    """The evaluations between the steps draw noise too, and a resumed run does not repeat them."""
    words = ["--fault=kernel_noise,std=0.01,growth=0.01", "steps=3"]
    whole = run(tmp_path / "whole", *words, "evaluation.every=1")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{step:06d}")
    with pytest.raises(ConfigError, match="kernel_noise"):
        run(tmp_path / "cut", words[1], "evaluation.every=1", resume=True)
    resumed = run(tmp_path / "cut", *words, "evaluation.every=1", resume=True)
    assert without_time(resumed) == without_time(whole)
    k2 = [row["mismatch/k2"] for row in whole if "mismatch/k2" in row]
    assert k2[2] > 3 * k2[0]
