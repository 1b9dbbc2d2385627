"""Training an adapter: what moves, what is saved, what the reference is."""

import json
import shutil

import numpy as np
import pytest
import torch
from tiny_training import KINDS, assert_same_bits, make_rows, make_trainer, set_rollout, snapshot

from lockstep.errors import CheckpointError
from lockstep.models.lora_config import adapter_shapes
from lockstep.models.peft_format import BASE, CONFIG, WEIGHTS
from lockstep.models.shapes import num_elements
from lockstep.objectives.config import PPOClip, Reinforce
from lockstep.training.checkpoint import CheckpointStore

ROWS = [9, 20, 14]
LORA = {"rank": 3, "alpha": 6.0}


def train(trainer, updates, *, seed=0):
    for i in range(updates):
        trainer.update(make_rows(ROWS, seed=100 * seed + i), Reinforce())


def base_of(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_moves_the_adapter_and_nothing_else(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, lora=LORA)
    before = snapshot(trainer)
    train(trainer, 1)
    after = snapshot(trainer)
    for name in before:
        assert torch.equal(before[name], after[name]) == ("lora" not in name), name
    trained = sum(p.numel() for p in trainer.optimizer.parameters.values())
    assert trained == num_elements(adapter_shapes(trainer.model.lora))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_an_adapter_resumes_to_the_same_bits(tmp_path, kind, dtype):
    straight = make_trainer(tmp_path / "model", kind, dtype=dtype, lora=LORA)
    train(straight, 3)
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(3, straight, {})
    resumed = make_trainer(tmp_path / "model", kind, dtype=dtype, lora=LORA)
    train(resumed, 1, seed=7)
    store.load(path, resumed)
    assert_same_bits(snapshot(resumed), snapshot(straight))
    for trainer in (straight, resumed):
        train(trainer, 2, seed=1)
    assert_same_bits(snapshot(resumed), snapshot(straight))
    masters = [
        n
        for n in {t.name: t.view() for t in straight.optimizer.state_tensors()}
        if n.startswith("master/")
    ]
    assert bool(masters) == (dtype is not None) and all("lora" in n for n in masters)


def test_a_checkpoint_holds_the_adapter_and_whose_it_is(tmp_path):
    trainer = make_trainer(tmp_path / "model", lora=LORA)
    trainer.save(tmp_path / "saved")
    files = {p.name for p in (tmp_path / "saved" / "policy").iterdir()}
    assert files == {CONFIG, WEIGHTS, BASE}
    kept = json.loads((tmp_path / "saved" / "policy" / BASE).read_text())
    assert kept["name"] == str(tmp_path / "model") and len(kept["digest"]) == 64


def test_the_weights_of_an_adapter_start_a_run_with_a_fresh_optimizer(tmp_path):
    trainer = make_trainer(tmp_path, lora=LORA)
    train(trainer, 1)
    trainer.save(tmp_path / "saved")
    fresh = make_trainer(tmp_path, lora=LORA)
    fresh.load(tmp_path / "saved", weights_only=True)
    assert fresh.version == 0 and not {t.name: t.view() for t in fresh.optimizer.state_tensors()}
    adapters = {n: p for n, p in trainer.model.named_parameters() if "lora" in n}
    assert_same_bits(adapters, {n: fresh.model.get_parameter(n) for n in adapters})


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_model_with_the_adapter_switched_off(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, lora=LORA)
    rows = set_rollout(trainer, make_rows(ROWS))
    base = make_trainer(tmp_path, kind)
    base.model.load_state_dict(base_of(trainer))
    expected = base.forward(rows, column=None)
    metrics = trainer.update(rows, PPOClip(kl_coef=0.1))
    for row, of_row in zip(rows, expected, strict=True):
        assert np.array_equal(row.columns["reference_logprobs"], of_row, equal_nan=True)
    assert metrics["train/reference_kl"] > 0
    assert trainer.reference is None


def test_an_error_under_the_reference_leaves_the_adapter_on(tmp_path):
    trainer = make_trainer(tmp_path, lora=LORA)
    rows = make_rows(ROWS)
    before = trainer.forward(rows, column=None)
    broken = make_rows([12], vocab=1000)  # ids that the model has not
    with pytest.raises(ValueError, match="vocabulary"):
        trainer.update(set_rollout_of(rows + broken), PPOClip(kl_coef=0.1))
    for left, right in zip(before, trainer.forward(rows, column=None), strict=True):
        assert np.array_equal(left, right, equal_nan=True)


def set_rollout_of(rows):
    for row in rows:
        row.set("old_logprobs", row.columns["rollout_logprobs"])
    return rows


MISFITS = {
    "a whole model": (None, LORA, "holds a whole model.*set model="),
    "an adapter": (LORA, None, "holds an adapter.*lora.path="),
    "another rank": ({"rank": 4, "alpha": 6.0}, LORA, "of rank 4,.* model's is of rank 3,"),
    "other projections": (
        {**LORA, "targets": ("*.q_proj",)}, {**LORA, "targets": ("*.o_proj",)}, "other projections",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_checkpoint_of_another_kind_is_refused_and_nothing_changes(tmp_path, case):
    there, here, message = MISFITS[case]
    make_trainer(tmp_path, lora=there).save(tmp_path / "saved")
    trainer = make_trainer(tmp_path, lora=here, seed=3)
    before = snapshot(trainer)
    with pytest.raises(CheckpointError, match=message):
        trainer.load(tmp_path / "saved")
    assert_same_bits(before, snapshot(trainer))


def test_an_adapter_of_other_weights_is_refused(tmp_path):
    for name, seed in (("model", 0), ("other", 1)):
        make_trainer(tmp_path / name, seed=seed).save(tmp_path / f"{name}-saved")
        for file in (tmp_path / f"{name}-saved" / "policy").iterdir():
            shutil.copy(file, tmp_path / name)
    make_trainer(tmp_path / "model", lora=LORA).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"adapter of .*model"):
        make_trainer(tmp_path / "other", lora=LORA).load(tmp_path / "saved")
