"""Checkpoints: continued bit for bit, whole or refused, the right ones kept."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_training import KINDS, assert_same_bits, make_rows, make_trainer, snapshot

from lockstep.errors import CheckpointError
from lockstep.models.hf_io import load_checkpoint
from lockstep.objectives.config import Reinforce
from lockstep.training.checkpoint import CheckpointStore, verify
from lockstep.training.config import CheckpointConfig

OPTIONS = {"schedule": "cosine", "warmup_updates": 2, "total_updates": 12, "weight_decay": 0.1}


def train(trainer, updates, *, seed=0):
    out = []
    for i in range(updates):
        out.append(trainer.update(make_rows([9, 20, 14], seed=100 * seed + i), Reinforce()))
    return out


@pytest.fixture
def store(tmp_path):
    """A store with checkpoints of steps 10, 20 and 30, and a trainer to write more."""
    trainer = make_trainer(tmp_path / "model")
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep_last=3))
    for step in (10, 20, 30):
        train(trainer, 1, seed=step)
        store.save(step, trainer, {"step": step})
    return store, trainer


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_continues_with_the_same_bits(tmp_path, kind, dtype):
    straight = make_trainer(tmp_path / "model", kind, dtype=dtype, **OPTIONS)
    train(straight, 4)
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(4, straight, {"tasks": {"epoch": 1, "index": 7}, "unfinished": []})
    resumed = make_trainer(tmp_path / "model", kind, dtype=dtype, seed=9, **OPTIONS)
    assert store.load(path, resumed) == {"tasks": {"epoch": 1, "index": 7}, "unfinished": []}
    assert_same_bits(snapshot(resumed), snapshot(straight))
    assert (resumed.num_updates, resumed.version) == (4, 4)
    assert train(resumed, 3, seed=1) == train(straight, 3, seed=1)
    assert_same_bits(snapshot(resumed), snapshot(straight))


def test_weights_alone_start_a_run_with_a_fresh_optimizer(tmp_path, store):
    saved, trainer = store
    fresh = make_trainer(tmp_path / "model", seed=5)
    train(fresh, 1)
    saved.load(saved.at(30), fresh, weights_only=True)
    assert torch.equal(fresh.model.embedding, trainer.model.embedding)
    assert (fresh.num_updates, fresh.version) == (0, 0)
    assert not {t.name: t.view() for t in fresh.optimizer.state_tensors()}


def test_the_policy_of_a_checkpoint_is_a_hugging_face_directory(store):
    saved, trainer = store
    model = load_checkpoint(saved.at(30) / "policy")
    assert torch.equal(model.embedding, trainer.model.embedding)


def damage(path, how):
    victim = path / "optimizer.safetensors"
    content = bytearray(victim.read_bytes())
    if how == "truncated":
        victim.write_bytes(content[: len(content) // 2])
    elif how == "one byte flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how == "a file missing":
        victim.unlink()
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "half a manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text[: len(text) // 2])
    elif how == "an empty directory":
        shutil.rmtree(path)
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "optimizer.safetensors"),
        ("one byte flipped", "optimizer.safetensors"),
        ("a file missing", "optimizer.safetensors"),
        ("no manifest", "manifest.json"),
        ("half a manifest", "manifest.json"),
        ("an empty directory", "manifest.json"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(store, caplog, how, message):
    saved, trainer = store
    assert saved.latest() == saved.at(30)
    damage(saved.at(30), how)
    with caplog.at_level(logging.WARNING):
        assert saved.latest() == saved.at(20)
    assert "step-000030" in caplog.text and "Passed over" in caplog.text
    with pytest.raises(CheckpointError, match=message):
        saved.load(saved.at(30), trainer)
    damage(saved.at(20), how)
    damage(saved.at(10), how)
    assert saved.latest() is None


def test_every_problem_of_a_torn_checkpoint_is_listed(store):
    saved, _ = store
    (saved.at(30) / "policy" / "config.json").write_text("{}")
    (saved.at(30) / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"\b2\b.*trainer\.json"):
        verify(saved.at(30))


def test_a_torn_checkpoint_never_pushes_out_a_good_one(store):
    saved, trainer = store
    damage(saved.at(20), "truncated")
    damage(saved.at(30), "a file missing")
    CheckpointStore(saved.root, CheckpointConfig(keep_last=2)).save(40, trainer, {})
    assert saved.steps() == [10, 40]


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    trainer = make_trainer(tmp_path / "model")
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep_last=2))
    assert store.latest() is None and store.best() is None and store.steps() == []
    for step, metric in ((1, 0.2), (2, 0.9), (3, None), (4, 0.4), (5, float("nan"))):
        store.save(step, trainer, {}, metric=metric)
    assert store.steps() == [2, 4, 5]
    assert store.best() == store.at(2)
    store.save(6, trainer, {}, metric=0.9)
    assert store.steps() == [5, 6]  # of two that are equally good, the newer is the best
    assert [p.name for p in sorted(store.root.iterdir())] == ["step-000005", "step-000006"]
    with pytest.raises(CheckpointError, match=r"step 2\b.*5, 6\b"):
        store.at(2)


def test_a_step_written_again_replaces_the_former(store):
    saved, trainer = store
    train(trainer, 1)
    path = saved.save(30, trainer, {"again": True})
    assert saved.load(path, trainer) == {"again": True}


def test_a_kill_between_the_two_renames_of_a_replacement_loses_no_checkpoint(store, monkeypatch):
    saved, trainer = store
    rename = os.replace

    def dies(old, new):
        if Path(new) == saved.root / "step-000030":
            raise KeyboardInterrupt
        rename(old, new)

    only = CheckpointStore(saved.root, CheckpointConfig(keep_last=1))
    monkeypatch.setattr("lockstep.training.checkpoint.os.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        only.save(30, trainer, {"again": True})
    monkeypatch.undo()
    assert only.latest() == only.at(30) == saved.root / ".step-000030.replaced"
    only.save(31, trainer, {})
    assert only.steps() == [31] and only.at(31).name == "step-000031"
    assert [path.name for path in saved.root.iterdir()] == ["step-000031"]


def test_what_a_killed_write_left_is_not_a_checkpoint(store):
    saved, trainer = store
    shutil.copytree(saved.at(30), saved.root / ".step-000040.partial")
    assert saved.latest() == saved.at(30)
    saved.save(50, trainer, {})
    assert not list(saved.root.glob(".step-*"))


def test_another_models_checkpoint_is_refused_with_every_difference(tmp_path, store):
    saved, _ = store
    for kind, hf, differences in (
        ("gpt_oss", {}, ("architecture is qwen3 there and gpt_oss here", "num_experts is 0 there")),
        ("qwen3", {"hidden_size": 16, "num_hidden_layers": 1}, ("hidden_size is 32", "num_layers")),
    ):
        other = make_trainer(tmp_path / kind, kind, hf=hf)
        before = snapshot(other)
        with pytest.raises(CheckpointError) as caught:
            saved.load(saved.at(30), other)
        assert all(text in str(caught.value) for text in differences)
        assert_same_bits(snapshot(other), before)


def test_an_optimizer_state_of_other_parameters_is_refused_with_all_of_them(tmp_path, store):
    _, trainer = store
    other = make_trainer(tmp_path / "model")
    train(other, 1)
    before = snapshot(other)
    tensors = {t.name: t.view() for t in trainer.optimizer.state_tensors()}
    del tensors["exp_avg/final_norm"]
    tensors["exp_avg/embedding"] = tensors["exp_avg/embedding"][:3]
    with pytest.raises(CheckpointError, match=r"exp_avg/final_norm.*avg/embedding"):
        other.optimizer.load_state_tensors(tensors, where="here")
    assert_same_bits(snapshot(other), before)


def test_a_state_that_is_not_json_is_refused_and_leaves_no_checkpoint(store):
    saved, trainer = store
    for state in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(CheckpointError, match=r"step 40.*JSON"):
            saved.save(40, trainer, state)
    assert saved.latest() == saved.at(30)


def test_a_later_format_is_refused_by_number(store):
    saved, _ = store
    path = saved.at(30) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(CheckpointError, match="99"):
        verify(saved.at(30))
