"""The policy in training: the same numbers however a batch is cut, and no update from a bad one."""

import dataclasses
import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from tiny_training import (
    KINDS,
    VOCAB,
    assert_same_bits,
    make_rows,
    make_trainer,
    set_rollout,
    snapshot,
)

from lockstep.errors import AlignmentError, ConfigError, TokenError
from lockstep.objectives.config import CISPO, DPPO, GSPO, PPOClip, Reinforce
from lockstep.objectives.losses import TokenLoss, make_loss, reinforce
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps
from lockstep.run_config import SupervisedConfig
from lockstep.training.config import SFTConfig, TrainerConfig
from lockstep.training.optimizer import is_decayed, lr_share
from lockstep.training.trainer import Trainer

LENGTHS = [9, 31, 14, 22, 40, 12]


def policy_gradient(tokens):
    return reinforce(tokens.logprobs, tokens.columns["advantages"])


def gradients(trainer, rows, **options):
    return gradients_of_calls(trainer, [rows], **options)


def gradients_of_calls(trainer, calls, loss=policy_gradient, **options):
    trainer.optimizer.zero_gradients()
    for rows in calls:
        trainer.forward_backward(rows, loss, **options)
    return torch.cat([g.flatten().double() for g in trainer.optimizer.gradients().values()])


def relative(a, b):
    return float((a - b).norm() / b.norm())


# -- log-probs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_log_probs_of_each_row_alone(tmp_path, kind):
    trainer, rows = make_trainer(tmp_path, kind), make_rows(LENGTHS)
    together = trainer.forward(rows)
    for row, packed in zip(rows, together, strict=True):
        (alone,) = trainer.forward([row], column=None)
        # float32, sums of 48 terms at most: 1e-6 relative of values around 5
        np.testing.assert_allclose(packed, alone, atol=1e-5)
        assert (np.isnan(packed) == ~row.loss_mask).all()
        assert row.columns["old_logprobs"] is packed


def make_alike(beginnings=(20, 8, 0, 31, 12)):
    """Rows that begin as the first one does, up to a place each, trained tokens included."""
    rows = make_rows([40, *[25] * len(beginnings)])
    for row, alike in zip(rows[1:], beginnings, strict=True):
        ids = row.token_ids.copy()
        ids[:alike] = rows[0].token_ids[: min(alike, len(ids))]
        row.token_ids = ids
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_beginnings_that_are_computed_once_change_neither_log_probs_nor_gradient(tmp_path, kind):
    """Against each row in a call of its own, where nothing can be shared."""
    rows, trainer = make_alike(), make_trainer(tmp_path, kind)
    (batch,) = trainer.pack(rows)
    assert len(batch.ids) < sum(int(r.loss_mask.nonzero()[0][-1]) for r in rows) - 60
    compare_with_rows_alone(trainer, rows)


def compare_with_rows_alone(trainer, rows):
    together = trainer.forward(rows, column=None)
    for row, found in zip(rows, together, strict=True):
        (alone,) = trainer.forward([row], column=None)
        if isinstance(trainer.model.ops, InvariantOps):
            assert np.array_equal(found, alone, equal_nan=True)
        else:
            np.testing.assert_allclose(found, alone, atol=1e-5)
    calls, total = [[row] for row in rows], sum(row.num_trained for row in rows)
    alone = gradients_of_calls(trainer, calls, denominator=total)
    assert relative(gradients(trainer, rows), alone) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_advantages_are_0_get_no_backward_and_the_gradient_is_the_same(tmp_path, kind):
    rows, trainer, seen = make_rows(LENGTHS), make_trainer(tmp_path, kind), []

    def noted(tokens):
        seen.append((bool(tokens.columns["advantages"].any()), tokens.logprobs.requires_grad))
        return policy_gradient(tokens)

    for row in rows[::2]:
        row.columns["advantages"][:] = 0
    found = gradients(trainer, rows, loss=noted, skips_silent=True)
    assert relative(found, gradients(trainer, rows)) < 1e-6
    assert sorted(seen) == [(False, False), (True, True)]
    # Without any advantage the optimizer still gets its gradients, of 0.
    assert not gradients(trainer, rows[::2], skips_silent=True).any()


@pytest.mark.parametrize("config", [PPOClip, GSPO, CISPO, DPPO, Reinforce])
def test_a_loss_is_silent_at_0_if_it_is_a_multiple_of_the_advantage_alone(config):
    of_a_user = type("Other", (config,), {})  # it may add anything
    assert config().is_silent_at_zero
    for more in (config(entropy_coef=0.01), config(kl_coef=0.01), of_a_user()):
        assert not more.is_silent_at_zero


def make_tree():
    """A session of turns with branches, its beginnings as rows too, and a group: rows of up to 450
    tokens that share up to 340, which attention reads once."""
    rows = make_rows([450, 450, 400, 350, 340, 200, 190, 180])
    for first, second, alike in [(0, 1, 340), (0, 2, 330), (0, 3, 150), (0, 4, 340), (5, 6, 140),
                                 (5, 7, 140)]:  # fmt: skip
        ids = rows[second].token_ids.copy()
        ids[:alike] = rows[first].token_ids[:alike]
        rows[second].token_ids = ids
    return rows


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}}, {"recompute": "blocks"}], ids=str)
@pytest.mark.parametrize("budget", [450, 900, 4096])
@pytest.mark.parametrize("ops", [Ops(), InvariantOps()], ids=["stock", "invariant"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_that_are_trained_once_equal_their_rows_alone(tmp_path, kind, ops, budget, settings):
    """Dense and a mixture with sinks and windows, whole and split by the budget."""
    trainer = make_trainer(
        tmp_path, kind, ops=ops, max_tokens_per_microbatch=budget,
        hf={"max_position_embeddings": 512}, **settings,
    )  # fmt: skip
    # Larger ones are chaotic over long rows: each arm is then 1e-6 to 6e-6 from float64's gradient.
    trainer.model.init_weights(std=0.05, seed=0)
    rows = make_tree()
    read = sum(int(row.loss_mask.nonzero()[0][-1]) for row in rows)
    sizes = [len(batch.ids) for batch in trainer.pack(rows)]
    assert max(sizes) <= budget and (sum(sizes) < read / 2 or budget == 450)
    compare_with_rows_alone(trainer, rows)


@pytest.mark.parametrize("budget", [40, 64, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_microbatches_gives_the_same_log_probs_and_gradient(tmp_path, kind, budget):
    rows = make_rows(LENGTHS)
    whole = make_trainer(tmp_path, kind)
    split = make_trainer(tmp_path, kind, max_tokens_per_microbatch=budget)
    for a, b in zip(split.forward(rows), whole.forward(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for aggregate in ("token_mean", "sequence_mean", 7):
        parts = gradients(split, rows, aggregate=aggregate)
        assert relative(parts, gradients(whole, rows, aggregate=aggregate)) < 1e-6


def test_a_neighbours_ids_change_no_bit_of_a_row(tmp_path):
    trainer = make_trainer(tmp_path, "qwen3")
    rows = make_rows(LENGTHS)
    before = trainer.forward(rows, column=None)
    for row in rows[1:]:
        row.token_ids = (row.token_ids + 7) % VOCAB
    after = trainer.forward(rows, column=None)
    assert np.array_equal(before[0], after[0], equal_nan=True)
    assert not np.array_equal(before[1], after[1], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_from_a_row_into_its_neighbours(tmp_path, kind):
    # An untied head: the embedding's gradient is then zero at every id that the row cannot see.
    trainer = make_trainer(tmp_path, kind, hf={"tie_word_embeddings": False})
    rows = make_rows([20, 20, 20])
    for i, row in enumerate(rows):
        row.token_ids = (row.token_ids % 20 + 20 * i).astype(np.int32)
        if i != 1:
            row.set("advantages", np.zeros_like(row.columns["advantages"]))
    trainer.forward_backward(rows, policy_gradient)
    seen = trainer.optimizer.gradients()["embedding"].abs().sum(1) > 0
    assert seen[20:40].any() and not seen[:20].any() and not seen[40:].any()


def test_forward_and_the_training_forward_give_the_same_bits(tmp_path):
    for kind in KINDS:
        trainer = make_trainer(tmp_path, kind, max_tokens_per_microbatch=64)
        rows = set_rollout(trainer, make_rows(LENGTHS))
        metrics = trainer.update(rows, PPOClip())
        assert metrics["mismatch/unequal_tokens"] == 0
        assert metrics["mismatch/compared_tokens"] == sum(r.num_trained for r in rows)
        assert metrics["train/ratio_max"] == 1.0 and metrics["train/clip_fraction"] == 0.0
        assert metrics["train/approx_kl"] == 0.0 and "train/approx_kl/0" not in metrics
        after = trainer.measure(rows).to_metrics("mismatch_after", by_part=False)
        assert after["mismatch_after/max_abs_diff"] > 1e-3


def test_the_temperature_is_that_of_the_recorded_distribution(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows([12])
    (batch,) = trainer.pack(rows)
    with torch.no_grad():
        logits = trainer.model.logits(trainer.model(batch.ids, batch.positions, batch.context))
    trainer.temperature = 0.5
    expected = torch.log_softmax(logits[batch.predictors] / 0.5, -1)
    expected = expected.gather(1, batch.targets[:, None])[:, 0].numpy()
    (found,) = trainer.forward(rows)
    np.testing.assert_allclose(found[rows[0].loss_mask], expected, atol=1e-5)


def test_a_temperature_of_zero_is_refused(tmp_path):
    model = make_trainer(tmp_path).model
    with pytest.raises(ConfigError, match=r"temperature=0.0"):
        Trainer(model, TrainerConfig(), like=tmp_path, temperature=0.0)


# -- the loss of a batch --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_aggregates_are_what_their_names_say(tmp_path, kind):
    trainer, rows = make_trainer(tmp_path, kind, max_tokens_per_microbatch=48), make_rows(LENGTHS)
    sums = [
        float(-(r.columns["advantages"] * lp)[r.loss_mask].sum(dtype=np.float64))
        for r, lp in zip(rows, trainer.forward(rows), strict=True)
    ]
    counts = [r.num_trained for r in rows]
    expected = {
        ("token_mean", None): sum(sums) / sum(counts),
        ("token_mean", 10.0): sum(sums) / 10.0,
        ("sequence_mean", None): np.mean([s / c for s, c in zip(sums, counts, strict=True)]),
        (5, None): np.mean(sums) / 5,
    }
    for (aggregate, denominator), value in expected.items():
        metrics = trainer.forward_backward(
            rows, policy_gradient, aggregate=aggregate, denominator=denominator
        )
        assert metrics["train/loss"] == pytest.approx(value, rel=1e-5)
    assert metrics["tokens/trained"] == sum(counts)


def test_two_calls_add_up_to_the_batch_of_both(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows(LENGTHS)
    whole = gradients(trainer, rows)
    count = sum(r.num_trained for r in rows)
    halves = gradients_of_calls(trainer, [rows[:2], rows[2:]], denominator=count)
    assert relative(halves, whole) < 1e-6


def test_metrics_of_a_split_batch_are_those_of_the_whole(tmp_path):
    rows = make_rows(LENGTHS)
    for row in rows:
        row.set("old_logprobs", row.columns["rollout_logprobs"])
    found = [
        make_trainer(tmp_path, max_tokens_per_microbatch=budget).forward_backward(
            rows, make_loss(PPOClip())
        )
        for budget in (40, 4096)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0]["train/clip_fraction"] > 0


def test_several_updates_keep_the_old_policy_and_report_the_mismatch_before_the_first(tmp_path):
    trainer = make_trainer(tmp_path, updates_per_batch=3)
    rows = set_rollout(trainer, make_rows(LENGTHS))
    metrics = trainer.update(rows, PPOClip())
    assert metrics["mismatch/max_abs_diff"] == 0.0
    assert metrics["train/log_ratio_abs_max"] > 0  # of the second and third update
    by_update = [metrics[f"train/approx_kl/{number}"] for number in range(3)]
    assert by_update[0] == 0.0 and all(by_update[1:])
    assert metrics["train/approx_kl"] == pytest.approx(sum(by_update) / 3)
    assert metrics["tokens/trained"] == sum(r.num_trained for r in rows)
    assert trainer.num_updates == trainer.version == 3


@pytest.mark.parametrize("objective", [PPOClip(), GSPO(), CISPO(), DPPO(), Reinforce()])
def test_every_objective_raises_the_log_probs_of_what_was_good(tmp_path, objective):
    trainer = make_trainer(tmp_path)
    rows = set_rollout(trainer, make_rows(LENGTHS))
    before = [np.nansum(r.columns["rollout_logprobs"]) for r in rows]
    for row in rows:
        sign = 1.0 if row is rows[0] else -1.0
        row.set("advantages", np.where(row.loss_mask, sign, 0).astype(np.float32))
    trainer.update(rows, objective)
    after = [np.nansum(x) for x in trainer.forward(rows)]
    assert after[0] > before[0]
    assert sum(after[1:]) < sum(before[1:])


def test_a_loss_that_is_not_one_value_per_token_is_refused(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows([9])
    with pytest.raises(AlignmentError, match="one per token"):
        trainer.forward_backward(rows, lambda tokens: TokenLoss(tokens.logprobs.mean()))


def test_a_missing_column_is_named(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows([9])
    with pytest.raises(AlignmentError, match="'old_logprobs'"):
        trainer.forward_backward(rows, make_loss(PPOClip()))
    del rows[0].columns["rollout_logprobs"]
    with pytest.raises(AlignmentError, match=r"t0/0.*rollout_logprobs"):
        trainer.update(rows, PPOClip())
    with pytest.raises(AlignmentError, match="nothing to compare"):
        trainer.measure(rows)


def test_rows_that_the_model_cannot_read_are_named(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows([9, 10])
    rows[1].token_ids[4] = VOCAB
    with pytest.raises(TokenError, match=f"t1/0: token 4 .*id {VOCAB}"):
        trainer.forward(rows)
    with pytest.raises(TokenError, match=r"129.*128"):
        trainer.forward(make_rows([129]))


# -- skipped updates ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_not_finite_changes_nothing_and_names_its_row(tmp_path, kind, caplog):
    trainer, rows = make_trainer(tmp_path, kind), make_rows(LENGTHS)
    set_rollout(trainer, rows)
    trainer.update(rows, PPOClip())  # so that there are moments to spoil
    before = snapshot(trainer)
    at = int(np.flatnonzero(rows[3].loss_mask)[2])
    rows[3].columns["advantages"][at] = np.nan
    with caplog.at_level(logging.WARNING):
        metrics = trainer.update(rows, PPOClip())
    assert metrics["train/skipped_updates"] == 1.0
    assert f"t3/0 (row 3, token {at}: nan)" in trainer.last_skip
    assert trainer.last_skip in caplog.text
    assert_same_bits(snapshot(trainer), before)
    assert (trainer.num_updates, trainer.num_skipped, trainer.version) == (2, 1, 1)
    rows[3].columns["advantages"][at] = 0.5
    assert trainer.update(rows, PPOClip())["train/skipped_updates"] == 0.0
    assert trainer.last_skip == "" and trainer.version == 2


def test_a_skipped_update_leaves_no_trace_in_the_next(tmp_path):
    rows, bad = make_rows(LENGTHS), make_rows([12, 9])
    bad[1].columns["advantages"][:] = np.inf
    trainers = [make_trainer(tmp_path) for _ in range(2)]
    trainers[0].update(bad, Reinforce())
    for trainer in trainers:
        trainer.update(rows, Reinforce())
    assert_same_bits(snapshot(trainers[0]), snapshot(trainers[1]))


def test_a_gradient_that_is_not_finite_is_traced_to_its_rows(tmp_path):
    trainer, rows = make_trainer(tmp_path, max_tokens_per_microbatch=64), make_rows(LENGTHS)
    for i, row in enumerate(rows):
        row.set("advantages", np.full(len(row), float(i in (1, 4)), np.float32))

    def infinite_slope(tokens):  # the square root of 0: finite, with an infinite gradient
        at_zero = tokens.logprobs - tokens.logprobs.detach()
        is_bad = tokens.columns["advantages"] > 0
        return TokenLoss(torch.where(is_bad, at_zero, 1.0 + at_zero).abs().sqrt())

    before = snapshot(trainer)
    trainer.forward_backward(rows, infinite_slope)
    metrics = trainer.optim_step()
    assert metrics["train/skipped_updates"] == 1.0
    assert "t1/0 (row 1), t4/0 (row 4)" in trainer.last_skip
    assert_same_bits(snapshot(trainer), before)


def test_broken_weights_are_called_that(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows([12, 9])
    trainer.forward_backward(rows, policy_gradient)
    with torch.no_grad():
        trainer.model.final_norm[0] = float("nan")
        trainer.optimizer.gradients()["final_norm"][0] = float("nan")
    trainer.optim_step()
    assert "the weights are not" in trainer.last_skip


def test_a_batch_with_nothing_to_train_is_no_update(tmp_path):
    trainer, rows = make_trainer(tmp_path), make_rows([12])
    rows[0].loss_mask[:] = False
    before = snapshot(trainer)
    for batch in (rows, []):
        metrics = trainer.update(batch, Reinforce())
        assert metrics["train/skipped_updates"] == 1.0
        assert "no token was trained" in trainer.last_skip
    assert_same_bits(snapshot(trainer), before)


# -- the optimizer --------------------------------------------------------------------------------


def test_parameters_are_updated_in_their_own_memory(tmp_path):
    for dtype in (None, torch.bfloat16):
        trainer, rows = make_trainer(tmp_path, dtype=dtype), make_rows(LENGTHS)
        places = [p.data_ptr() for p in trainer.model.parameters()]
        before = snapshot(trainer)
        trainer.update(rows, Reinforce())
        assert places == [p.data_ptr() for p in trainer.model.parameters()]
        assert not torch.equal(before["embedding"], trainer.model.embedding)


def test_low_precision_weights_have_float32_masters(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.bfloat16, lr=1e-6, max_tokens_per_microbatch=64)
    rows = make_rows(LENGTHS)
    start = {n: m.detach().clone() for n, m in trainer.optimizer.masters.items()}
    for _ in range(5):
        trainer.update(rows, Reinforce())
    moved = 0
    for name, master in trainer.optimizer.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(trainer.optimizer.parameters[name], master.bfloat16())
        moved += int((master != start[name]).sum())
    # five updates of 1e-6 are below bfloat16's last bit almost everywhere: only masters move
    assert moved > 0.9 * sum(m.numel() for m in start.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_that_is_let_go_takes_its_model_with_it(tmp_path, dtype):
    """A server makes and ends many, each with masters and moments."""
    trainer = make_trainer(tmp_path, dtype=dtype)
    trainer.update(make_rows(LENGTHS), Reinforce())
    kept = weakref.ref(trainer.optimizer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_the_update_is_adamw_with_the_norm_clipped(tmp_path):
    trainer = make_trainer(tmp_path, grad_clip=0.01, weight_decay=0.1)
    rows = make_rows(LENGTHS)
    before = snapshot(trainer)
    trainer.forward_backward(rows, policy_gradient)
    grads = {n: g.double().clone() for n, g in trainer.optimizer.gradients().items()}
    norm = float(torch.cat([g.flatten() for g in grads.values()]).norm())
    metrics = trainer.optim_step()
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5) and norm > 0.01
    for name, grad in grads.items():
        grad = grad * 0.01 / norm
        # the first step: both moments are the gradient's own, so the step is its sign, almost
        decay = 1 - 1e-2 * 0.1 * is_decayed(name)
        expected = before[name].double() * decay - 1e-2 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(
            dict(trainer.model.named_parameters())[name].double(), expected, rtol=1e-5, atol=1e-6
        )


def test_norms_biases_and_sinks_are_not_decayed(tmp_path):
    model = make_trainer(tmp_path, "gpt_oss").model
    names = {name: is_decayed(name) for name, _ in model.named_parameters()}
    assert not names["layers.0.attention.sinks"]
    assert not names["layers.0.mlp.gate_up_bias"] and not names["layers.1.mlp.router.bias"]
    assert not names["layers.0.input_norm"] and not names["final_norm"]
    assert names["layers.0.mlp.gate_up_proj"] and names["embedding"]
    assert not is_decayed("layers.0.attention.q_norm")


@pytest.mark.parametrize(
    ("is_it", "names"),
    [
        (False, "attention.A_log attention.dt_bias attention.value_norm attention.kv_a_norm"),
        (False, "mlp.router.choice_bias mlp_output_norm mlp.down_bias attention.q_norm"),
        (False, "input_layernorm.weight self_attn.q_norm.weight norm.weight mixer.D ln_1.weight"),
        (False, "linear_attn.norm.weight ln_f.weight norm1.weight self_attn.q_proj.bias"),
        (True, "attention.conv_weight mlp.shared_gate.weight attention.kv_b_proj.weight"),
        (True, "attention.q_proj.lora.A mlp.down_lora.B value_head embedding untied_head"),
        (True, "mlp.router.weight norm_proj.weight attention.in_proj.weight"),
    ],
)
def test_rates_of_a_recurrence_and_transformers_names_are_told_apart_too(is_it, names):
    found = {name: is_decayed(f"layers.0.{name}") for name in names.split()}
    assert found == dict.fromkeys(found, is_it)


def test_schedules_rise_and_fall_as_they_say():
    base = TrainerConfig(warmup_updates=4, min_lr_share=0.1)
    shares = [lr_share(i, base, total_updates=None) for i in (0, 1, 3, 4, 1000)]
    assert shares == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = dataclasses.replace(base, schedule="linear")
    assert lr_share(4, linear, total_updates=104) == 1.0
    assert lr_share(54, linear, total_updates=104) == pytest.approx(0.55)
    assert lr_share(104, linear, total_updates=104) == pytest.approx(0.1)
    cosine = dataclasses.replace(base, schedule="cosine")
    assert lr_share(54, cosine, total_updates=104) == pytest.approx(0.55)
    assert lr_share(29, cosine, total_updates=104) == pytest.approx(0.1 + 0.9 * (1 + 0.5**0.5) / 2)
    assert lr_share(500, cosine, total_updates=104) == pytest.approx(0.1)


def test_a_falling_schedule_needs_the_runs_length(tmp_path):
    with pytest.raises(ConfigError, match="schedule=linear"):
        make_trainer(tmp_path, schedule="linear")


def test_the_schedule_reaches_the_metrics(tmp_path):
    trainer = make_trainer(tmp_path, schedule="linear", warmup_updates=1, total_updates=3)
    rows = make_rows([12])
    rates = [trainer.update(rows, Reinforce())["train/lr"] for _ in range(3)]
    assert rates == pytest.approx([1e-2, 1e-2, 0.5e-2])


def test_a_budget_that_no_row_fits_is_refused_with_both_numbers():
    trainer = TrainerConfig(max_tokens_per_microbatch=512)
    SupervisedConfig(sft=SFTConfig(path="a.jsonl"), trainer=trainer, max_tokens=512)
    with pytest.raises(ConfigError, match=r"max_tokens=600.*microbatch=512"):
        SupervisedConfig(sft=SFTConfig(path="a.jsonl"), trainer=trainer, max_tokens=600)
