"""Log-probs of a processed distribution are told from noise and from other weights, by rows."""

import numpy as np
import pytest
from made_rows import best_of, bfloat16, noisy, nucleus, policy_rows, tempered

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Examination, Stage, all_stages, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.values.processed import MIN_LOG_MASS, Processing

HAS = frozenset({"rollout_logprobs", "trainer_logprobs"})


def examined(rows: Rows, setting: Setting | None = None) -> Examination:
    stages = [Stage(checks=checks) for checks in all_stages().values()]
    return examine(lambda: [rows], stages, setting or Setting(trainer="lockstep"), has=HAS)


def causes(rows: Rows) -> list[str]:
    return [f.cause for f in examined(rows).findings if f.verdict == "differs"]


def told(rows: Rows) -> str:
    found = next(f for f in examined(rows).findings if f.check == "values/processed")
    return found.measured if found.verdict == "differs" else ""


def mixed(one: Rows, other: Rows, num_rows: int) -> Rows:
    """The first rows of one and the others of the other: other groups of the same policy."""
    parts = (one.take(np.arange(num_rows)), other.take(np.arange(num_rows, len(other))))
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "trainer_logprobs")
    }
    return Rows(row_ids=other.row_ids, offsets=other.offsets, **joined)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.9, 1.2, 1.5])
@pytest.mark.parametrize("size", [8, 1])
def test_a_temperature_of_the_sampler_alone_is_named(temperature, size):
    rows = policy_rows(sampler=tempered(temperature), size=size, groups=64 // size)
    assert causes(rows) == ["processed"]
    ratio = next(f for f in examined(rows).findings if f.cause == "processed").figures
    assert ratio["temperature_ratio"] == pytest.approx(temperature, abs=0.03)
    assert examined(rows).shares[0].k2 > 0.95


def test_a_temperature_of_the_trainer_alone_is_named():
    rows = policy_rows(trainer=tempered(0.7))
    assert causes(rows) == ["processed"]
    assert "1.43 times the trainer's" in told(rows)


@pytest.mark.parametrize("cut", [nucleus(0.9), nucleus(0.5), best_of(3)])
@pytest.mark.parametrize("size", [8, 1])
def test_kept_tokens_that_only_the_sampler_renormalised_over_are_named(cut, size):
    rows = policy_rows(sampler=cut, size=size, groups=64 // size)
    assert causes(rows) == ["processed"]
    assert "renormalised over the kept tokens" in told(rows)
    assert examined(rows).shares[0].k2 > 0.999


def test_the_mass_that_was_kept_is_said():
    assert "at least 0.9 of the mass" in told(policy_rows(sampler=nucleus(0.9)))


@pytest.mark.parametrize("who", [1, -1])
def test_a_truncation_explains_gaps_up_to_the_mass_that_it_may_drop(who):
    sampler, gaps = np.full(4, -9.0), np.array([0.5, 2.9, 3.5, 6.0])
    trainer = sampler - who * gaps
    left = Processing(truncated=who).left_over(sampler, trainer)
    assert left == pytest.approx(who * np.maximum(gaps + MIN_LOG_MASS, 0.0))
    assert np.exp(MIN_LOG_MASS) == pytest.approx(0.05)
    other_way = Processing(truncated=-who).left_over(sampler, trainer)
    assert other_way == pytest.approx(who * gaps)


@pytest.mark.parametrize(("nats", "is_named"), [(2.9, True), (4.0, False), (8.0, False)])
@pytest.mark.parametrize("size", [8, 1])
def test_gaps_that_would_keep_less_than_a_twentieth_of_the_mass_are_no_truncation(
    nats, is_named, size
):
    rows = policy_rows(size=size, groups=64 // size)
    apart = rows.with_(trainer_logprobs=rows.rollout - np.float32(nats))
    assert bool(told(apart)) == is_named


def test_both_at_once_are_named():
    def both(logits, rng):
        return nucleus(0.9)(logits / 0.7, rng)

    assert causes(policy_rows(sampler=both)) == ["processed"]


@pytest.mark.parametrize("processing", [tempered(0.7), nucleus(0.8)])
def test_some_rows_are_enough_and_the_others_stay_as_they_are(processing):
    rows = mixed(policy_rows(sampler=processing), policy_rows(sampler=noisy(1e-6)), 16)
    out = examined(rows)
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["processed"]
    assert out.shares[0].k2 > 0.9


@pytest.mark.parametrize("processing", [tempered(0.7), nucleus(0.8)])
def test_it_is_told_under_the_noise_of_sixteen_bits(processing):
    rows = policy_rows(sampler=lambda z, rng: processing(bfloat16(z, rng), rng))
    assert causes(rows) == ["processed"]


def test_beside_noise_both_are_told():
    rows = policy_rows(sampler=lambda z, rng: z / 0.7 + rng.normal(0, 0.03, len(z)))
    assert causes(rows) == ["processed", "kernel_noise"]


@pytest.mark.parametrize("size", [8, 1])
@pytest.mark.parametrize("scale", [0.02, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_other_weights_are_not_taken_for_it(scale, seed, size):
    offsets = np.random.default_rng(seed).normal(0, scale, (7, 40))

    def other(logits, _):  # another policy: its offsets hang on the place
        return logits + offsets[int(abs(logits[0] * 1e6)) % 7]

    assert "processed" not in causes(
        policy_rows(trainer=other, size=size, groups=64 // size, seed=seed)
    )


@pytest.mark.parametrize("size", [8, 1])
@pytest.mark.parametrize("std", [0.02, 0.3, 1.0, 3.0])
def test_noise_of_any_size_is_not_taken_for_it(std, size):
    for side in ("sampler", "trainer"):
        rows = policy_rows(**{side: noisy(std)}, size=size, groups=64 // size)
        assert "processed" not in causes(rows)
