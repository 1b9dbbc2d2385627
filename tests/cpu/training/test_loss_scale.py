"""Training in float16: gradients that are too small or too large for it are not lost."""

import numpy as np
import pytest
import torch
from tiny_training import (
    KINDS,
    assert_same_bits,
    make_critic,
    make_rows,
    make_trainer,
    set_rollout,
    snapshot,
)

from lockstep.objectives.config import PPOClip, Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.training.loss_scale import FIRST, GROWTH_UPDATES, LossScale

LENGTHS = [9, 31, 14, 22]


def gradients_of(trainer, rows):
    trainer.forward_backward(rows, make_loss(Reinforce()))
    scale = trainer.loss_scale.value
    return {name: g / scale for name, g in trainer.optimizer.gradients().items()}


def tiny_advantages(rows, factor):
    for row in rows:
        row.set("advantages", row.columns["advantages"] * np.float32(factor))
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_below_float16_are_those_of_float32(tmp_path, kind):
    """Advantages of 1e-7: without a factor nothing of them is left."""
    exact = make_trainer(tmp_path / "exact", kind)
    rows = tiny_advantages(set_rollout(exact, make_rows(LENGTHS)), 1e-7)
    wanted = gradients_of(exact, rows)
    assert exact.loss_scale.value == 1.0
    found = gradients_of(make_trainer(tmp_path / "half", kind, dtype=torch.float16), rows)
    flat = make_trainer(tmp_path / "flat", kind, dtype=torch.float16)
    flat.loss_scale = LossScale(1.0, is_dynamic=False)
    lost = gradients_of(flat, rows)

    def error(gradients):
        total = sum((gradients[n] - g).square().sum() for n, g in wanted.items())
        return float((total / sum(g.square().sum() for g in wanted.values())).sqrt())

    assert error(found) < 0.05  # of 11 bits, through two layers
    assert error(lost) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_halves_the_factor_and_loses_no_batch(tmp_path, kind):
    rows = set_rollout(make_trainer(tmp_path / "a", kind), make_rows(LENGTHS))
    settings = {"dtype": torch.float16, "lr": 1e-3}
    steady = make_trainer(tmp_path / "b", kind, **settings)
    found = steady.update(rows, PPOClip())
    scale = steady.loss_scale.value
    assert found["train/loss_scale"] == scale
    high = make_trainer(tmp_path / "c", kind, **settings)
    high.loss_scale.value = 2.0**24
    again = high.update(rows, PPOClip())
    assert again["train/skipped_updates"] == 0 and high.version == 1
    assert again["train/overflows"] > found["train/overflows"]
    assert high.loss_scale.value < 2.0**24
    # Under another power of two only what neither keeps may differ.
    assert again["train/grad_norm"] == pytest.approx(found["train/grad_norm"], rel=1e-2)
    assert again["train/loss"] == found["train/loss"]
    parameters = list(high.model.parameters())
    assert all(torch.isfinite(p).all() for p in parameters)


def test_an_overflow_under_a_fixed_factor_skips(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.float16)
    trainer.loss_scale = LossScale(2.0**24, is_dynamic=False)
    rows = set_rollout(trainer, make_rows(LENGTHS))
    metrics = trainer.update(rows, PPOClip())
    assert metrics["train/skipped_updates"] == 1 and trainer.version == 0


def test_a_factor_of_a_power_of_two_changes_no_bit_of_float32(tmp_path):
    plain, scaled = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    scaled.loss_scale = LossScale(64.0, is_dynamic=False)
    rows = set_rollout(plain, make_rows(LENGTHS))
    for trainer in (plain, scaled):
        trainer.update(rows, PPOClip())
    assert_same_bits(snapshot(plain), snapshot(scaled))


def test_the_factor_grows_after_a_while_and_survives_a_checkpoint(tmp_path):
    scale = LossScale.for_training(torch.float16)
    for _ in range(GROWTH_UPDATES):
        scale.made_update()
    assert (scale.value, scale.num_good) == (2 * FIRST, 0)
    assert LossScale.for_training(torch.bfloat16).value == 1.0

    trainer = make_trainer(tmp_path / "a", dtype=torch.float16)
    trainer.loss_scale.value, trainer.loss_scale.num_good = 32.0, 7
    trainer.save(tmp_path / "saved")
    again = make_trainer(tmp_path / "b", dtype=torch.float16)
    again.load(tmp_path / "saved")
    assert (again.loss_scale.value, again.loss_scale.num_good) == (32.0, 7)
    rows = set_rollout(trainer, make_rows(LENGTHS))
    for each in (trainer, again):
        each.update(rows, PPOClip())
    assert_same_bits(snapshot(trainer), snapshot(again))


def test_a_float16_critic_repeats_what_overflows(tmp_path):
    critic = make_critic(tmp_path, dtype=torch.float16)
    rows = make_rows(LENGTHS)
    critic.values(rows)
    for row in rows:
        row.set("returns", np.full(len(row), 500.0, np.float32))
    critic.loss_scale.value = 2.0**24
    metrics = critic.update(rows)
    assert metrics["critic/overflows"] > 0 and metrics["critic/skipped_updates"] == 0
    assert metrics["critic/loss_scale"] == critic.loss_scale.value < 2.0**24
