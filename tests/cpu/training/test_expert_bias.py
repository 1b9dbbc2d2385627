"""The bias by which experts are chosen follows their load: trainer.expert_bias_rate."""

import asyncio
import json
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
from quickstarts import AT_END, SHORT, run_with, steps_of
from tiny_training import HF_CONFIGS, assert_same_bits, make_rows, make_trainer, snapshot

from lockstep.doctor.diagnose import diagnose
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import hf_tensors, load_checkpoint, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.moe import Router, Routing
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.sync.publisher import Publisher
from lockstep.training.expert_load import balance_experts, load_metrics

LOSS = make_loss(Reinforce())
RATE = 0.25  # a power of two: sums of it are exact


def biases(model):
    """[L, E] float32, copied."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return torch.stack([router.choice_bias.detach().clone() for router in routers])


def counts_of(trainer, rows):
    """[L, E] tokens given to each expert, row by row."""
    counts = np.zeros((2, 8))
    for row in rows:
        (batch,) = trainer.pack([row])
        routing = Routing(replay_TLA=batch.routes)
        trainer.model(batch.ids, batch.positions, batch.context, routing)
        chosen = routing.stacked()
        counts += [np.bincount(chosen[:, layer].flatten(), minlength=8) for layer in range(2)]
    return counts


def moved(counts):
    return torch.from_numpy(RATE * np.sign(counts.mean(1, keepdims=True) - counts)).float()


def make_balanced(tmp_path, **settings):
    given = {"expert_bias_rate": RATE, "max_tokens_per_microbatch": 60, **settings}
    return make_trainer(tmp_path, "glm4_moe", **given)


def some_rows(seed=0):
    return make_rows([23, 30, 41], seed=seed)


def test_the_bias_moves_by_the_rate_towards_an_even_load(tmp_path):
    model = make_trainer(tmp_path, "glm4_moe").model
    before = biases(model)
    load = torch.tensor([[7.0, 1, 4, 4, 4, 4, 4, 4], [32, 0, 0, 0, 0, 0, 0, 0]])
    balance_experts(model, load.double(), rate=0.25)
    wanted = torch.tensor([[-0.25, 0.25, 0, 0, 0, 0, 0, 0], [-0.25] + 7 * [0.25]])
    assert torch.equal(biases(model), before + wanted)


def test_an_update_counts_the_tokens_of_all_its_calls_and_micro_batches(tmp_path):
    trainer = make_balanced(tmp_path)
    rows, more = some_rows(), some_rows(seed=1)
    before, counts = biases(trainer.model), counts_of(trainer, rows)
    metrics = trainer.forward_backward(rows, LOSS)
    assert metrics["moe/load_max"] == load_metrics(counts)["moe/load_max"]
    trainer.forward_backward(more, LOSS)
    counts += counts_of(trainer, more)
    assert torch.equal(biases(trainer.model), before)
    trainer.optim_step()
    after = before + moved(counts)
    assert torch.equal(biases(trainer.model), after) and not torch.equal(after, before)
    counts = counts_of(trainer, more)  # of the next update alone
    trainer.forward_backward(more, LOSS)
    trainer.optim_step()
    assert torch.equal(biases(trainer.model), after + moved(counts))


def test_the_load_evens_out(tmp_path):
    trainer = make_balanced(
        tmp_path, expert_bias_rate=0.02, lr=1e-3, max_tokens_per_microbatch=1024
    )
    loads = []
    for seed in range(30):
        metrics = trainer.forward_backward(make_rows([40] * 16, seed=seed), LOSS)
        trainer.optim_step()
        loads.append(metrics["moe/load_max"])
    # Measured: 2.1 and 1.2; at rate 0 both are 2.2 or more.
    assert np.mean(loads[:5]) > 1.8 and np.mean(loads[-5:]) < 1.4


def test_a_skipped_update_changes_no_bias_and_its_load_is_forgotten(tmp_path):
    trainer = make_balanced(tmp_path)
    rows = some_rows()
    before = biases(trainer.model)
    rows[2].columns["advantages"][:] = np.inf
    trainer.forward_backward(rows, LOSS)
    trainer.optim_step()
    assert trainer.last_skip and torch.equal(biases(trainer.model), before)
    counts = counts_of(trainer, rows[:1])
    trainer.forward_backward(rows[:1], LOSS)
    trainer.optim_step()
    assert torch.equal(biases(trainer.model), before + moved(counts))


def test_the_load_of_a_replay_is_that_of_the_replayed_experts(tmp_path):
    trainer = make_balanced(tmp_path, routing_replay="rollout")
    rows = some_rows()
    for row in rows:  # all tokens to the experts 2 and 5
        row.set("routed_experts", np.tile(np.array([2, 5], np.int16), (len(row), 2, 1)))
    before = biases(trainer.model)
    trainer.forward_backward(rows, LOSS)
    trainer.optim_step()
    wanted = before + RATE
    wanted[:, [2, 5]] = before[:, [2, 5]] - RATE
    assert torch.equal(biases(trainer.model), wanted)


def test_a_resumed_trainer_goes_on_with_the_same_bits(tmp_path):
    trainer = make_balanced(tmp_path / "one")
    rows = some_rows()
    trainer.forward_backward(rows, LOSS)
    trainer.optim_step()
    trainer.save(tmp_path / "saved")
    other = make_balanced(tmp_path / "two", seed=1)
    other.load(tmp_path / "saved")
    for each in (trainer, other):
        each.forward_backward(rows, LOSS)
        each.optim_step()
    assert_same_bits(snapshot(trainer), snapshot(other))


def test_a_bias_that_a_checkpoint_has_in_two_bytes_is_saved_in_four_once_it_moved(tmp_path):
    model = make_trainer(tmp_path / "like", "glm4_moe").model.bfloat16()
    for router in (m for m in model.modules() if isinstance(m, Router)):
        router.choice_bias.data = torch.arange(8) / 4
    save_checkpoint(model, tmp_path / "it", like=tmp_path / "like")  # all in bfloat16
    model = load_checkpoint(tmp_path / "it", dtype=torch.bfloat16)
    save_checkpoint(model, tmp_path / "same", like=tmp_path / "it")
    weights = "model.safetensors"
    assert (tmp_path / "same" / weights).read_bytes() == (tmp_path / "it" / weights).read_bytes()
    balance_experts(model, torch.arange(16.0).view(2, 8), rate=1e-3)
    save_checkpoint(model, tmp_path / "moved", like=tmp_path / "it")
    again = load_checkpoint(tmp_path / "moved", dtype=torch.bfloat16)
    assert torch.equal(biases(again), biases(model))


def test_an_engines_copy_in_this_process_gets_the_bias_with_each_sync(tmp_path):
    trainer = make_balanced(tmp_path)
    copied = deepcopy(trainer.model).requires_grad_(False)
    publisher = Publisher(EmbeddedEngine(copied, EmbeddedConfig()), trainer, copied)

    async def run():
        for _ in range(3):
            trainer.forward_backward(some_rows(), LOSS)
            trainer.optim_step()
            before = biases(copied)
            await publisher.publish(trainer.version)
            assert publisher.has_copy and not torch.equal(biases(copied), before)
            assert torch.equal(biases(copied), biases(trainer.model))

    asyncio.run(run())


def test_a_bfloat16_model_tells_workers_that_its_bias_has_four_bytes(tmp_path):
    model = make_trainer(tmp_path, "glm4_moe").model.bfloat16()
    for name, outline in hf_tensors(model).outlines().items():
        is_bias = name.endswith("e_score_correction_bias")
        assert outline.dtype == (torch.float32 if is_bias else torch.bfloat16), name


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gpt_oss", {}, r"expert_bias_rate=0\.25.*\(gpt_oss\).*\b0\b"),
        ("qwen3", {}, r"\(qwen3\)"),
        ("glm4_moe", {"lora": {"rank": 2}}, "lora trains, saves and sends an adapter alone"),
    ],
)
def test_a_model_whose_bias_cannot_be_moved_is_refused(tmp_path, kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, kind, expert_bias_rate=RATE, **settings)


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A checkpoint with random weights and a shipped tokenizer."""
    source, like = locate_model("tiny-qwen3"), tmp_path_factory.mktemp("like")
    for name in ("tokenizer.json", "renderer.json"):
        shutil.copy(source / name, like)
    shape = {"vocab_size": 550, "max_position_embeddings": 512, "eos_token_id": 543}
    hf = {**HF_CONFIGS["glm4_moe"], **shape}
    (like / "config.json").write_text(json.dumps(hf))
    model = Decoder(ModelConfig.from_hf(hf))
    model.init_weights(std=0.2, seed=0)
    save_checkpoint(model, like.with_name("glm"), like=like)
    return like.with_name("glm")


def run_of(path, model, *overrides, resume=False):
    words = (*SHORT, *AT_END, f"model={model}", "groups_per_step=3", "checkpoint.every=1")
    own = ("contract=true-on-policy", "trainer.expert_bias_rate=0.02", *overrides)
    return run_with(path, *words, *own, resume=resume)


@pytest.mark.parametrize(
    "settings",
    [[], ["trainer.routing_replay=rollout", "trainer.updates_per_batch=2"], ["dtype=bfloat16"]],
    ids=["plain", "replayed", "bfloat16"],
)
def test_no_token_differs_while_the_bias_moves(tmp_path, glm, settings):
    run = run_of(tmp_path / "run", glm, "steps=3", *settings)
    for row in steps_of(run):
        assert row["mismatch/compared_tokens"] > 100 and row["mismatch/unequal_tokens"] == 0
        assert row["train/skipped_updates"] == 0 and row["moe/load_max"] > 1
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*3/**/policy")
    moves = biases(load_checkpoint(saved)) - biases(load_checkpoint(glm))
    num_updates = 6 if "trainer.updates_per_batch=2" in settings else 3
    assert 0.02 <= moves.abs().max() <= 0.02 * num_updates + 1e-6
    assert [cause.name for cause, _ in diagnose(run.path, model="own").causes] == []


def test_a_resumed_run_has_the_bias_of_one_that_had_not_stopped(tmp_path, glm):
    whole = run_of(tmp_path / "whole", glm, "steps=3")
    run_of(tmp_path / "cut", glm, "steps=2")
    cut = run_of(tmp_path / "cut", glm, "steps=3", resume=True)
    of = {k for k in steps_of(whole)[-1] if k.startswith(("train/", "moe/", "mismatch/"))}
    last, again = ({k: steps_of(run)[-1][k] for k in of} for run in (whole, cut))
    assert of and json.dumps(last, sort_keys=True) == json.dumps(again, sort_keys=True)
