"""The trainer's two plans: judged in the training forward itself, or over the whole batch first."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from quickstarts import quickstart_with
from tiny_training import assert_same_bits, make_rows, make_trainer, set_rollout, snapshot

from lockstep.correction import Correction, Layout, Rule, correct, kl
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.config import GSPO, PPOClip, Reinforce
from lockstep.objectives.losses import make_loss, supervised_loss
from lockstep.run.train import train

LENGTHS = [9, 31, 14, 22, 40, 12]
NAN = math.nan


def make_case(path, *, noise=0.5, version=0, **config):
    """(trainer, rows): the rollout's log-probs are the trainer's, and noise."""
    trainer = make_trainer(path, max_tokens_per_microbatch=64, **config)
    rows = set_rollout(trainer, make_rows(LENGTHS))
    g = np.random.default_rng(1)
    for row in rows:
        moved = row.columns["rollout_logprobs"] + noise * g.standard_normal(len(row))
        row.set("rollout_logprobs", np.minimum(moved, 0).astype(np.float32))
        row.set("policy_version", np.where(row.loss_mask, version, -1).astype(np.int32))
        row.set("turn", np.where(row.loss_mask, 0, -1).astype(np.int32))
    assert len(list(trainer.pack(rows))) > 1
    return trainer, rows


def at_trained(rows, name):
    return torch.from_numpy(np.concatenate([r.columns[name][r.loss_mask] for r in rows]))


def set_trained(rows, name, values):
    """Sets a column from [N] values of the trained tokens."""
    ends = np.cumsum([r.num_trained for r in rows])[:-1]
    for row, of_row in zip(rows, np.split(values.numpy(), ends), strict=True):
        column = np.full(len(row), NAN, np.float32)
        column[row.loss_mask] = of_row
        row.set(name, column)


def layout_of(rows):
    return Layout.packed([r.num_trained for r in rows])


def gradient(trainer):
    return torch.cat([g.flatten().double() for g in trainer.optimizer.gradients().values()])


# -- one pass and two -----------------------------------------------------------------------------

RULES = (Rule(stat="k3", high=0.3), Rule(stat="ratio", aggregation="mean", low=0.7, high=1.4))


def unnormalised(**settings):
    """Weights of sequences that need no other row."""
    return Correction(anchor="on_policy", normalize=False, **settings)


ONE_PASS = {
    "bypass": Correction.bypass(),
    "rules": Correction(reject=RULES),
    "opsm": Correction(reject=(Rule.opsm(-0.05),)),
    "on_policy": Correction.on_policy(),
    "token": Correction(anchor="on_policy", level="token"),
    "icepop": Correction(anchor="on_policy", level="token", bound="mask", limits=(0.7, 1.4)),
    "sequence": unnormalised(level="sequence", limits=(0.0, 3.0)),
    "geometric": unnormalised(level="geometric", limits=(0.0, 1.3), reject=RULES),
    "averaged": dataclasses.replace(Correction.averaged(), reject=RULES),
}  # fmt: skip


@pytest.mark.parametrize("objective", [PPOClip(), GSPO()], ids=["ppo", "gspo"])
@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_gives_the_bits_of_two(tmp_path, name, objective):
    correction = ONE_PASS[name]
    assert not correction.needs_forward(num_updates=1)
    (one, one_rows), (two, two_rows) = make_case(tmp_path), make_case(tmp_path)
    if name == "averaged":
        for rows in (one_rows, two_rows):
            set_trained(rows, "averaged_logprobs", at_trained(rows, "rollout_logprobs") - 0.1)
    metrics = one.update(one_rows, objective, correction)
    weighed = two.weigh(two.score(two_rows), correction)
    rows, reports = weighed.rows, weighed.metrics
    rejected = (at_trained(rows, "importance_weights") == 0).sum()
    assert bool(rejected) == bool(correction.reject or correction.bound == "mask")
    again = two.forward_backward(weighed, make_loss(objective), aggregate=objective.aggregate)
    again |= two.optim_step() | reports
    assert_same_bits(snapshot(one), snapshot(two))
    for key in again:
        # sums over micro-batches and over the whole, float64
        assert metrics[key] == pytest.approx(again[key], rel=1e-9, abs=1e-9), key
    assert metrics["tokens/trained"] == sum(r.num_trained for r in rows) - int(rejected)
    assert np.array_equal(
        one_rows[1].columns["logprobs"], two_rows[1].columns["old_logprobs"], equal_nan=True
    )


def test_the_default_is_the_loss_on_the_rollouts_log_probs_as_it_stands(tmp_path):
    (plain, plain_rows), (default, rows) = make_case(tmp_path), make_case(tmp_path)
    for row in plain_rows:
        row.set("old_logprobs", row.columns["rollout_logprobs"])
    metrics = plain.forward_backward(plain_rows, make_loss(PPOClip())) | plain.optim_step()
    found = default.update(rows, PPOClip())
    assert_same_bits(snapshot(plain), snapshot(default))
    assert found["train/loss"] == metrics["train/loss"]
    assert found["train/log_ratio_abs_max"] > 0.5, "the ratio is to the rollout"


def test_a_recomputed_anchor_is_the_policy_before_the_update(tmp_path):
    trainer, rows = make_case(tmp_path)
    metrics = trainer.update(rows, PPOClip(), Correction(anchor="recomputed"))
    assert metrics["train/ratio_max"] == 1.0 and metrics["train/log_ratio_abs_max"] == 0.0
    assert metrics["mismatch/k2"] > 0.05, "the gap is reported all the same"
    same, rows = make_case(tmp_path)
    same.update(rows, PPOClip(), Correction.on_policy())
    assert_same_bits(snapshot(trainer), snapshot(same))


def test_without_log_probs_of_a_sampler_a_recomputed_anchor_is_enough(tmp_path):
    trainer, rows = make_case(tmp_path)
    for row in rows:
        del row.columns["rollout_logprobs"]
    metrics = trainer.update(rows, PPOClip(), Correction(anchor="recomputed"))
    assert metrics["train/ratio_max"] == 1.0
    assert not [name for name in metrics if name.startswith("mismatch")]


def test_weights_multiply_the_loss_of_their_tokens(tmp_path):
    correction = Correction.mis(0.9, 1.1, level="geometric")
    (weighing, rows), (plain, plain_rows) = make_case(tmp_path), make_case(tmp_path)
    weighed = weighing.weigh(weighing.score(rows), correction)
    found = weighing.forward_backward(weighed, make_loss(Reinforce()))
    plain.forward(plain_rows)
    weights = correct(
        at_trained(plain_rows, "old_logprobs"), at_trained(plain_rows, "rollout_logprobs"),
        correction, layout=layout_of(plain_rows),
    ).weights  # fmt: skip
    assert torch.equal(at_trained(rows, "importance_weights"), weights)
    assert 0 < int((weights == 0).sum()) < len(weights) and len(weights.unique()) > 2
    set_trained(plain_rows, "advantages", at_trained(plain_rows, "advantages") * weights)
    expected = plain.forward_backward(plain_rows, make_loss(Reinforce()))
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
    # products of three float32 numbers in another order
    left, right = gradient(weighing), gradient(plain)
    assert float((left - right).norm()) < 1e-5 * float(right.norm())


def test_weights_of_an_earlier_update_are_not_taken_for_those_of_this_one(tmp_path):
    (again, rows), (fresh, fresh_rows) = make_case(tmp_path), make_case(tmp_path)
    again.weigh(again.score(rows), Correction.mis(0.9, 1.1))
    again.update(rows, PPOClip(), Correction.bypass())
    fresh.update(fresh_rows, PPOClip(), Correction.bypass())
    assert_same_bits(snapshot(again), snapshot(fresh))


# -- rejected tokens ------------------------------------------------------------------------------


def spoil(rows, **values):
    """One trained token of row 1 gets these values; returns its index."""
    place = int(rows[1].loss_mask.nonzero()[0][2])
    for name, value in values.items():
        rows[1].columns[name][place] = value
    return place


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("correction", [Correction.bypass(), Correction.tis(), Correction.mis()])
def test_nothing_of_a_rejected_token_reaches_the_gradient(tmp_path, correction, garbage):
    found = []
    for advantage in (0.0, garbage):
        trainer, rows = make_case(tmp_path)
        spoil(rows, rollout_logprobs=NAN, advantages=advantage)
        metrics = trainer.update(rows, PPOClip(), correction)
        assert metrics["mismatch/nonfinite_tokens"] == 1
        assert metrics["tokens/trained"] < sum(r.num_trained for r in rows)
        assert metrics["train/skipped_updates"] == 0 and math.isfinite(metrics["train/loss"])
        found.append(snapshot(trainer))
    assert_same_bits(*found)


def test_a_rejected_token_counts_as_one_of_no_loss(tmp_path):
    trainer, rows = make_case(tmp_path)
    spoil(rows, rollout_logprobs=NAN)
    metrics = trainer.forward_backward(
        rows, make_loss(Reinforce()), correction=Correction(reject=(Rule.veto_ratio(1e-9),))
    )
    other, other_rows = make_case(tmp_path)
    spoil(other_rows, advantages=0.0)
    expected = other.forward_backward(other_rows, make_loss(Reinforce()))
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-6)
    # the same sums without a term that is 0
    left, right = gradient(trainer), gradient(other)
    assert float((left - right).norm()) < 1e-6 * float(right.norm())


@pytest.mark.parametrize("anchor", ["rollout", "recomputed"])
def test_an_update_without_a_kept_token_is_skipped_and_says_why(tmp_path, anchor):
    trainer, rows = make_case(tmp_path)
    before = snapshot(trainer)
    nothing = Correction(anchor=anchor, reject=(Rule(stat="k2", aggregation="max", high=0.0),))
    metrics = trainer.update(rows, PPOClip(), nothing)
    assert metrics["train/skipped_updates"] == 1 and metrics["tokens/trained"] == 0
    assert "all rejected" in trainer.last_skip and trainer.version == 0
    assert metrics["correction/rejected_share"] == 1.0
    assert_same_bits(snapshot(trainer), before)


# -- denominators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", 7])
def test_a_loss_is_divided_by_all_tokens_or_by_those_that_are_kept(
    tmp_path, aggregate, denominator
):
    trainer, rows = make_case(tmp_path)
    whole = Rule(stat="ratio", aggregation="sum", low=0.5)
    rules = (Rule(stat="k3", high=0.1), whole)
    correction = Correction(anchor="recomputed", reject=rules, denominator=denominator)
    objective = Reinforce(aggregate=aggregate)
    old = torch.from_numpy(np.concatenate([
        x[r.loss_mask] for x, r in zip(trainer.forward(rows, column=None), rows, strict=True)
    ]))  # fmt: skip
    losses = -(old * at_trained(rows, "advantages")).double()
    metrics = trainer.update(rows, objective, correction)
    keep = at_trained(rows, "importance_weights") > 0
    sizes = [r.num_trained for r in rows]
    kept = [int(part.sum()) for part in keep.split(sizes)]
    assert 0 in kept and any(0 < k < n for k, n in zip(kept, sizes, strict=True))
    counts = kept if denominator == "kept" else sizes
    num_rows = sum(n > 0 for n in counts)
    sums = [float(part.sum()) for part in (losses * keep).split(sizes)]
    expected = {
        "token_mean": sum(sums) / sum(counts),
        "sequence_mean": sum(s / max(n, 1) for s, n in zip(sums, counts, strict=True)) / num_rows,
        7: sum(sums) / 7 / num_rows,
    }[aggregate]  # fmt: skip
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("correction", [
    Correction.bypass(), Correction.on_policy(), Correction(anchor="recomputed")
])  # fmt: skip
def test_tokens_that_are_not_finite_are_not_kept_whatever_the_correction(tmp_path, correction):
    losses = []
    for denominator in ("original", "kept"):
        trainer, rows = make_case(tmp_path)
        spoil(rows, rollout_logprobs=NAN)
        chosen = dataclasses.replace(correction, denominator=denominator)
        losses.append(trainer.update(rows, PPOClip(), chosen)["train/loss"])
    count = sum(r.num_trained for r in rows)
    assert losses[1] == pytest.approx(losses[0] * count / (count - 1), rel=1e-5)


def test_without_log_probs_of_a_sampler_every_token_is_kept(tmp_path):
    found = []
    for denominator in ("original", "kept"):
        trainer, rows = make_case(tmp_path)
        for row in rows:
            del row.columns["rollout_logprobs"]
        correction = Correction(anchor="recomputed", denominator=denominator)
        trainer.update(rows, PPOClip(), correction)
        found.append(snapshot(trainer))
    assert_same_bits(*found)


@pytest.mark.parametrize("correction", [
    Correction.mis(),
    Correction(denominator="kept"),
    Correction(kl_penalty_coef=0.1, kl_penalty_form="advantage"),
])  # fmt: skip
def test_one_call_cannot_apply_what_depends_on_the_whole_batch(tmp_path, correction):
    trainer, rows = make_case(tmp_path)
    with pytest.raises(ConfigError, match=r"Trainer\.update"):
        trainer.forward_backward(rows, make_loss(PPOClip()), correction=correction)


# -- the KL penalty -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.4])
def test_the_penalty_is_an_update_with_adjusted_advantages(tmp_path, clip):
    correction = Correction(kl_penalty_coef=0.3, kl_penalty_form="advantage", kl_penalty_clip=clip)
    (penalised, rows), (adjusted, other_rows) = make_case(tmp_path), make_case(tmp_path)
    before = at_trained(rows, "advantages")
    penalised.update(rows, PPOClip(), correction)
    assert torch.equal(at_trained(rows, "advantages"), before), "the column is what was scored"
    adjusted.forward(other_rows)
    new, old = at_trained(other_rows, "old_logprobs"), at_trained(other_rows, "rollout_logprobs")
    set_trained(other_rows, "advantages", before + kl.penalty(new, old, coef=0.3, clip=clip))
    adjusted.update(other_rows, PPOClip())
    assert_same_bits(snapshot(penalised), snapshot(adjusted))
    plain, rows = make_case(tmp_path)
    plain.update(rows, PPOClip())
    assert not torch.equal(plain.model.embedding, penalised.model.embedding)


def test_a_penalty_needs_advantages(tmp_path):
    trainer, rows = make_case(tmp_path)
    for row in rows:
        del row.columns["advantages"]
    correction = Correction(kl_penalty_coef=0.1, kl_penalty_form="advantage")
    with pytest.raises(AlignmentError, match=r"t0/0.*kl_penalty_coef=0\.1"):
        trainer.update(rows, PPOClip(), correction)


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("settings", [{}, {"reject": RULES}, {"anchor": "recomputed"}])
def test_the_penalty_in_the_loss_is_a_term_of_each_kept_token(tmp_path, clip, settings):
    plain = Correction(**settings)
    correction = dataclasses.replace(
        plain, kl_penalty_form="loss", kl_penalty_coef=0.3, kl_penalty_clip=clip
    )
    (penalised, rows), (by_hand, other_rows) = make_case(tmp_path), make_case(tmp_path)
    metrics = penalised.update(rows, PPOClip(), correction)

    def loss(tokens):
        out, rollout = make_loss(PPOClip())(tokens), tokens.columns["rollout_logprobs"]
        return dataclasses.replace(
            out, regularizer=kl.pull(tokens.logprobs, rollout, coef=0.3, clip=clip)
        )

    if settings.get("anchor") == "recomputed":
        by_hand.forward(other_rows)
    found = by_hand.forward_backward(other_rows, loss, correction=plain) | by_hand.optim_step()
    assert_same_bits(snapshot(penalised), snapshot(by_hand))
    assert metrics["train/loss"] == pytest.approx(found["train/loss"], rel=1e-9)


def test_the_penalty_in_the_loss_reads_the_sampler_and_no_advantages(tmp_path):
    correction = Correction(kl_penalty_form="loss", kl_penalty_coef=0.1)
    trainer, rows = make_case(tmp_path)
    for row in rows:
        row.columns["weights"] = row.loss_mask.astype(np.float32)
        del row.columns["advantages"]
    trainer.forward_backward(rows, supervised_loss, correction=correction)
    for row in rows:
        del row.columns["rollout_logprobs"]
    with pytest.raises(AlignmentError, match="'rollout_logprobs'"):
        trainer.forward_backward(rows, supervised_loss, correction=correction)


def test_without_a_coefficient_the_penalty_in_the_loss_is_off(tmp_path):
    (plain, rows), (off, other_rows) = make_case(tmp_path), make_case(tmp_path)
    plain.update(rows, PPOClip())
    off.update(other_rows, PPOClip(), Correction(kl_penalty_form="loss"))
    assert_same_bits(snapshot(plain), snapshot(off))


# -- several updates ------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", [
    Correction.bypass(), Correction.tis(), Correction.mis(), Correction(reject=RULES)
])  # fmt: skip
def test_the_weights_of_all_updates_are_of_the_policy_before_the_first(tmp_path, correction):
    trainer, rows = make_case(tmp_path, updates_per_batch=3)
    before = trainer.forward(rows, column=None)
    metrics = trainer.update(rows, PPOClip(), correction)
    assert trainer.version == 3
    old = np.concatenate([x[r.loss_mask] for x, r in zip(before, rows, strict=True)])
    assert np.array_equal(at_trained(rows, "old_logprobs").numpy(), old)
    expected = correct(
        torch.from_numpy(old), at_trained(rows, "rollout_logprobs"), correction,
        layout=layout_of(rows),
    )  # fmt: skip
    assert torch.equal(at_trained(rows, "importance_weights"), expected.weights)
    reported = expected.to_metrics()
    for name in ("mismatch/k1", "mismatch/k3", "mismatch/max_abs_diff"):
        assert metrics[name] == pytest.approx(reported[name], rel=1e-9), name
    assert metrics["tokens/trained"] == int(expected.keep.sum())
    # later updates move away from the old policy, the weight stays
    assert metrics["train/log_ratio_abs_max"] > 0


def test_an_update_on_its_own_share_is_that_share_with_the_weights_of_the_whole(tmp_path):
    correction = Correction.mis()
    (together, rows), (apart, other_rows) = (
        make_case(tmp_path, updates_per_batch=2), make_case(tmp_path, updates_per_batch=2)
    )  # fmt: skip
    together.update(rows, PPOClip(), correction)
    weighed = apart.weigh(apart.score(other_rows), correction)
    for first in (0, 1):
        share = dataclasses.replace(weighed, rows=weighed.rows[first::2])
        apart.forward_backward(share, make_loss(PPOClip()))
        apart.optim_step()
    assert_same_bits(snapshot(together), snapshot(apart))


# -- on-policy ------------------------------------------------------------------------------------


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped_whatever_the_sampler_said(tmp_path):
    trainer, rows = make_case(tmp_path, noise=3.0)
    metrics = trainer.update(rows, PPOClip(), Correction.on_policy())
    assert metrics["train/ratio_max"] == metrics["train/ratio_mean"] == 1.0
    assert metrics["train/clip_fraction"] == 0.0 and metrics["mismatch/max_abs_diff"] > 1


def test_on_policy_refuses_rows_of_another_version(tmp_path):
    trainer, rows = make_case(tmp_path)
    trainer.update(rows, PPOClip(), Correction.on_policy())
    text = r"t0/0 has tokens of policy version 0; .*on_policy needs rows that version 1.*recomputed"
    with pytest.raises(AlignmentError, match=text):
        trainer.update(rows, PPOClip(), Correction.on_policy())
    for row in rows:
        row.set("policy_version", np.where(row.loss_mask, 1, -1).astype(np.int32))
    spoil(rows, policy_version=0)
    with pytest.raises(AlignmentError, match=r"t1/0.*version 0\b"):
        trainer.update(rows, PPOClip(), Correction.on_policy())
    for row in rows:
        del row.columns["policy_version"]
    with pytest.raises(AlignmentError, match=r"t0/0.*policy_version"):
        trainer.update(rows, PPOClip(), Correction.on_policy())


def test_on_policy_refuses_several_updates_of_a_batch(tmp_path):
    trainer, rows = make_case(tmp_path, updates_per_batch=2)
    with pytest.raises(ConfigError, match=r"on_policy.*trainer\.updates_per_batch=2"):
        trainer.update(rows, PPOClip(), Correction.on_policy())
    assert trainer.version == 0


def test_staleness_is_reported_by_age(tmp_path):
    trainer, rows = make_case(tmp_path)
    trainer.num_updates = 3
    for i, row in enumerate(rows):
        row.set("policy_version", np.where(row.loss_mask, 3 - i % 2, -1).astype(np.int32))
    for correction in (Correction.bypass(), Correction.tis()):
        found = trainer.measure(rows).to_metrics()
        metrics = trainer.update([copy.deepcopy(r) for r in rows], PPOClip(), correction)
        trainer, _ = make_case(tmp_path)
        trainer.num_updates = 3
        for age, chosen in (("0", rows[0::2]), ("1", rows[1::2])):
            count = sum(r.num_trained for r in chosen)
            for name in ("k1", "k3"):
                key = f"mismatch/by_age/{age}/{name}"
                assert metrics[key] == pytest.approx(found[key], rel=1e-9)
            assert metrics[f"mismatch/by_age/{age}/compared_tokens"] == count


# -- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "column"),
    [(Correction.bypass(), "rollout_logprobs"), (Correction.tis(), "rollout_logprobs"),
     (Correction.averaged(), "averaged_logprobs")],
)  # fmt: skip
def test_a_missing_column_is_named_with_the_row_and_who_reads_it(tmp_path, correction, column):
    trainer, rows = make_case(tmp_path)
    for row in rows:
        if column == "averaged_logprobs":
            row.set(column, row.columns["rollout_logprobs"])
    del rows[2].columns[column]
    text = rf"t2/0 has no {column}, which correction\.anchor={correction.anchor} with level="
    with pytest.raises(AlignmentError, match=text):
        trainer.update(rows, PPOClip(), correction)


# -- averaged behaviour ---------------------------------------------------------------------------


def test_the_update_takes_the_averaged_column_for_the_sampler_in_one_pass(tmp_path):
    trainer, rows = make_case(tmp_path)
    sampled = at_trained(rows, "rollout_logprobs")
    exact = [x[r.loss_mask] for x, r in zip(trainer.forward(rows, column=None), rows, strict=True)]
    set_trained(rows, "averaged_logprobs", torch.from_numpy(np.concatenate(exact)))
    metrics = trainer.update(rows, PPOClip(), Correction.averaged(2))
    assert torch.equal(at_trained(rows, "rollout_logprobs"), sampled), "never overwritten"
    assert metrics["tokens/recomputed"] == 0, "the trainer does not score the batch before it"
    assert metrics["train/log_ratio_abs_max"] < 1e-4, "the ratio is to the average"
    assert metrics["mismatch_averaged/k2"] < 1e-9 < 0.05 < metrics["mismatch/k2"]


@pytest.mark.filterwarnings("ignore:all .* scorings are equal")
def test_a_run_with_averaged_behaviour_reports_both_gaps_and_the_noise(tmp_path):
    overrides = [
        "steps=1", "groups_per_step=2", "group_size=2", "evaluation.num_tasks=1",
        "evaluation.num_samples=1", "evaluation.at_start=false", "correction=averaged",
        "correction.rescorings=2",
    ]  # fmt: skip
    config = quickstart_with(*overrides)
    train(config, out=tmp_path / "run", view="json")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row = next(r for r in map(json.loads, lines) if "mismatch/k3" in r)
    assert row["noise/rescorings"] == 2 and row["noise/var_rollout"] == 0
    assert row["mismatch_averaged/compared_tokens"] == row["mismatch/compared_tokens"] > 20
    assert row["mismatch_averaged/k3"] <= 1e-9
    assert row["tokens/recomputed"] == row["noise/fallback_tokens"] == 0
    assert row["noise/cache_hit_share"] > 0.9
    assert 0 <= row["time/rescore_seconds"] <= row["time/sample_seconds"]


# -- a reference policy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "correction", [Correction.bypass(), Correction.mis(), Correction.on_policy()]
)
def test_a_reference_pulls_the_policy_towards_itself(tmp_path, correction):
    reference = make_trainer(tmp_path, seed=7).model
    distances = []
    for kl_coef in (0.0, 5.0):
        trainer, rows = make_case(tmp_path, lr=1e-3)
        trainer.reference = reference
        expected = trainer.forward(rows, column=None, model=reference)
        frozen = [p.clone() for p in reference.parameters()]
        metrics = trainer.update(rows, PPOClip(kl_coef=kl_coef), correction)
        assert all(torch.equal(a, b) for a, b in zip(frozen, reference.parameters(), strict=True))
        if kl_coef:
            for row, of_row in zip(rows, expected, strict=True):
                assert np.array_equal(row.columns["reference_logprobs"], of_row, equal_nan=True)
            assert metrics["train/reference_kl"] > 0
        after = trainer.forward(rows, column=None)
        gap = [np.nansum(np.square(a - e)) for a, e in zip(after, expected, strict=True)]
        distances.append(sum(gap))
    assert distances[1] < distances[0]


def test_the_weights_of_the_correction_leave_the_reference_term_alone(tmp_path):
    """With advantages of 0 there is nothing but the regularizer, and no weight changes it."""
    found = []
    for upper in (2.0, 1.0):
        trainer, rows = make_case(tmp_path)
        trainer.reference = make_trainer(tmp_path, seed=7).model
        for row in rows:
            row.set("advantages", np.zeros(len(row), np.float32))
        trainer.update(rows, Reinforce(kl_coef=1.0, kl_estimator="k2"), Correction.tis(upper))
        found.append(snapshot(trainer))
    assert_same_bits(*found)


def test_a_reference_term_without_a_reference_says_what_to_give(tmp_path):
    trainer, rows = make_case(tmp_path)
    with pytest.raises(ConfigError, match=r"objective\.kl_coef.*Trainer\.reference"):
        trainer.update(rows, PPOClip(kl_coef=0.1))
