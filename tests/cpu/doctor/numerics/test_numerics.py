"""What the doctor says with the model at hand: each cause put into one side by itself."""

import numpy as np
import pytest
from sampled_rows import ArrayDump, noisy, replayed_values, routed, sampled_rows, scored

from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.numerics.compare import MAX_WITHIN, variance_within

MOE, DENSE = "tiny-gpt-oss", "tiny-qwen3"


def diagnosed(model, rollout, trainer, *, facts=None, **settings):
    rows = sampled_rows(model).with_(rollout_logprobs=rollout, trainer_logprobs=trainer)
    return diagnose(ArrayDump(rows, facts), **{"model": model, **settings})


def causes(diagnosis):
    return [cause.name for cause, _ in diagnosis.causes]


def finding(diagnosis, name):
    return next(f for f in diagnosis.examination.findings if f.check == name)


def mixed(model, share, changed):
    """`changed` in this share of the rows, the model in the others."""
    rows = sampled_rows(model)
    is_hit = np.arange(len(rows)) < share * len(rows)
    return np.where(is_hit[rows.row_of], changed, scored(model))


@pytest.mark.parametrize("model", [MOE, DENSE])
def test_two_sides_that_compute_the_model_are_consistent(model):
    found = diagnosed(model, scored(model), scored(model))
    assert causes(found) == []
    assert "agrees with the model" in finding(found, "numerics/other_weights").measured


@pytest.mark.parametrize("model", [MOE, DENSE])
@pytest.mark.parametrize("is_sampler", [True, False])
def test_a_pair_of_precisions_is_information_and_no_cause(model, is_sampler):
    pair = (scored(model, "bfloat16"), scored(model))
    found = diagnosed(model, *(pair if is_sampler else pair[::-1]))
    assert causes(found) == []
    assert finding(found, "numerics/precision").verdict == "information"


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize(
    ("variant", "cause"),
    [("without_sinks", "ignored_sinks"), ("without_windows", "ignored_window")],
)
@pytest.mark.parametrize("is_sampler", [True, False])
def test_what_attention_ignores_is_named_with_its_side(variant, cause, share, is_sampler):
    changed = mixed(MOE, share, scored(MOE, variant))
    pair = (changed, scored(MOE)) if is_sampler else (scored(MOE), changed)
    found = diagnosed(MOE, *pair)
    assert causes(found) == [cause]
    [(_, named)] = found.causes
    assert f"what the {'sampler' if is_sampler else 'trainer'} has" in named.measured
    assert found.examination.shares[0].k2 > 0.99
    assert named.evidence


def test_a_variant_and_a_pair_of_precisions_are_told_apart():
    found = diagnosed(MOE, scored(MOE, "bfloat16"), scored(MOE, "without_sinks"))
    assert causes(found) == ["ignored_sinks"]
    assert finding(found, "numerics/precision").verdict == "information"


def test_two_causes_on_two_sides_are_both_named_with_their_shares():
    found = diagnosed(MOE, noisy(MOE, 0.12), scored(MOE, "without_sinks"))
    assert set(causes(found)) == {"ignored_sinks", "kernel_noise"}
    alone = {
        "kernel_noise": diagnosed(MOE, noisy(MOE, 0.12), scored(MOE)),
        "ignored_sinks": diagnosed(MOE, scored(MOE), scored(MOE, "without_sinks")),
    }
    k2 = {name: d.examination.gap.means()["k2"] for name, d in alone.items()}
    for share in found.examination.shares:
        assert share.k2 == pytest.approx(k2[share.cause] / sum(k2.values()), abs=0.2)


@pytest.mark.parametrize("model", [MOE, DENSE])
@pytest.mark.parametrize("std", [0.12, 0.4])
def test_noise_of_the_sampler_is_kernel_noise(model, std):
    assert causes(diagnosed(model, noisy(model, std), scored(model))) == ["kernel_noise"]


@pytest.mark.parametrize("model", [MOE, DENSE])
def test_noise_as_small_as_that_of_another_precision_is_no_cause(model):
    found = diagnosed(model, noisy(model, 0.01), scored(model))
    assert causes(found) == []
    assert finding(found, "numerics/precision").verdict == "information"


@pytest.mark.parametrize("model", [MOE, DENSE])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_noise_of_the_trainer_is_dropout(model, share):
    found = diagnosed(model, scored(model), scored(model, "dropout", share=share))
    assert causes(found) == ["dropout"]


def test_noisy_routers_are_told_by_where_they_change_log_probs():
    found = diagnosed(MOE, scored(MOE, "routers", std=0.3), scored(MOE))
    assert causes(found) == ["routing_flips"]


def test_log_probs_after_temperature_are_named_from_the_full_logits():
    found = diagnosed(
        DENSE, scored(DENSE, "", temperature=0.7), scored(DENSE), facts=Facts(temperature=0.7)
    )
    assert causes(found) == ["processed"]


def test_without_the_trainers_log_probs_the_models_stand_for_them():
    found = diagnosed(DENSE, noisy(DENSE, 0.2), None)
    assert causes(found) == ["kernel_noise"]
    assert found.examination.gap.tokens
    shifted = np.nan_to_num(np.roll(scored(DENSE), -1), nan=-1.0)
    assert causes(diagnosed(DENSE, shifted, None)) == ["shifted"]


def test_rows_that_neither_side_computed_with_the_model_are_said_to_be_of_another():
    other = mixed(DENSE, 0.6, noisy(DENSE, 0.5))
    found = diagnosed(DENSE, other, other)
    assert causes(found) == []
    weights = finding(found, "numerics/other_weights")
    assert weights.verdict == "information"
    assert "neither side" in weights.measured


def test_without_a_model_its_checks_say_what_they_need():
    rows = sampled_rows(DENSE).with_(rollout_logprobs=scored(DENSE), trainer_logprobs=scored(DENSE))
    found = diagnose(ArrayDump(rows))
    assert finding(found, "numerics/kernel_noise").lacks == ("model",)


def test_the_sample_is_the_same_for_a_seed_and_within_its_bound():
    from lockstep.doctor.numerics.rescore import Rescoring
    from lockstep.doctor.numerics.weights import weights_at_hand

    rows = sampled_rows(DENSE).with_(rollout_logprobs=scored(DENSE), trainer_logprobs=scored(DENSE))
    dump = ArrayDump(rows)
    kept = []
    for seed in (3, 3, 4):
        rescoring = Rescoring(weights=weights_at_hand(dump, DENSE), max_tokens=600, seed=seed)
        rescoring.prepare(dump.chunks)
        [sample] = rescoring.sample()
        assert sample.num_tokens <= 600
        kept.append(sample.row_ids)
    assert kept[0] == kept[1] != kept[2]


def test_what_repeats_is_other_weights_and_what_does_not_is_noise():
    rows = sampled_rows(DENSE)
    spread = np.ones(rows.num_tokens)
    rng = np.random.default_rng(0)
    of_id = rng.standard_normal(1000)[rows.token_ids % 1000]
    of_chance = rng.standard_normal(rows.num_tokens)
    for is_shared in (True, False):
        repeated = variance_within(rows, of_id, spread, is_shared=is_shared)
        chance = variance_within(rows, of_chance, spread, is_shared=is_shared)
        assert repeated < 0.1
        assert chance > MAX_WITHIN


def test_noise_that_rows_with_one_beginning_share_does_not_count_as_repeated():
    """The trainer computes a common beginning once: its dropout there is one draw."""
    one = sampled_rows(DENSE).take([0])
    rows = type(one).joined([one] * 6)
    d = np.tile(np.random.default_rng(0).standard_normal(one.num_tokens), 6)
    spread = np.ones(rows.num_tokens)
    assert not variance_within(rows, d, spread, is_shared=True) <= MAX_WITHIN
    assert variance_within(rows, d, spread, is_shared=False) < 0.01


def test_recorded_routes_tell_what_replay_would_remove():
    rows, routes = sampled_rows(MOE), routed(MOE)
    flipped = replayed_values(MOE, routes)
    assert np.nanmean((flipped - scored(MOE)) ** 2) > 1e-4
    dump = ArrayDump(
        rows.with_(rollout_logprobs=flipped, trainer_logprobs=scored(MOE), routed_experts=routes)
    )
    found = diagnose(dump, model=MOE)
    assert causes(found) == ["routing_flips"]
    assert (
        "replaying the sampler's routes removes 100%"
        in finding(found, "numerics/routing_flips").measured
    )
    assert found.examination.shares[0].k2 > 0.99


def test_a_trainer_that_replays_the_routes_agrees_with_the_replayed_model():
    rows, routes = sampled_rows(MOE), routed(MOE)
    flipped = replayed_values(MOE, routes)
    both = rows.with_(rollout_logprobs=flipped, trainer_logprobs=flipped, routed_experts=routes)
    assert causes(diagnose(ArrayDump(both), model=MOE)) == []
