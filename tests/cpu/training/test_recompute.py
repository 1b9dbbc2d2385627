"""Blocks that are computed again in backward: the same bits, and less that is kept until then."""

import numpy as np
import pytest
import torch
from tiny_training import KINDS, assert_same_bits, make_critic, make_rows, make_trainer, snapshot

from lockstep.models.moe import Routing
from lockstep.objectives.config import PPOClip
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps

BACKENDS = {"plain": Ops(), "invariant": InvariantOps()}
LENGTHS = [9, 31, 14, 22, 40, 12]


def kept_bytes(trainer, batch, routing=None):
    """What autograd holds between a forward and its backward, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = trainer.model.score(
            batch.ids, batch.positions, batch.context,
            predictors_N=batch.predictors, targets_N=batch.targets, routing=routing,
        )  # fmt: skip
        return out, sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_give_the_same_log_probs_gradients_and_weights(
    tmp_path, kind, backend, dtype
):
    found = []
    for recompute in ("none", "blocks"):
        trainer = make_trainer(
            tmp_path, kind, dtype=dtype, recompute=recompute, max_tokens_per_microbatch=70,
            updates_per_batch=2, ops=BACKENDS[backend],
        )  # fmt: skip
        rows = make_rows(LENGTHS)
        metrics = [trainer.update(rows, PPOClip()) for _ in range(2)]
        found.append((metrics, [row.columns["logprobs"] for row in rows], snapshot(trainer)))
    (metrics, logprobs, kept), (metrics_again, logprobs_again, kept_again) = found
    assert metrics == metrics_again
    for a, b in zip(logprobs, logprobs_again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same_bits(kept, kept_again)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_each_block_begins_with_is_kept(tmp_path, kind):
    sizes = []
    for recompute in ("none", "blocks"):
        trainer = make_trainer(
            tmp_path,
            kind,
            recompute=recompute,
            hf={"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8},
        )
        (batch,) = trainer.pack(make_rows(LENGTHS))
        sizes.append(kept_bytes(trainer, batch)[1])
    assert sizes[1] < sizes[0] / 4


def test_replayed_routes_are_read_again_and_their_gradient_is_the_same(tmp_path):
    gradients, chosen = [], []
    for recompute in ("none", "blocks"):
        trainer = make_trainer(tmp_path, "gpt_oss", recompute=recompute)
        (batch,) = trainer.pack(make_rows(LENGTHS))
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(len(batch.ids), 2, 4, generator=generator)
        routing = Routing(
            replay_TLA=scores.topk(2, -1)[1],
            is_known_T=torch.rand(len(batch.ids), generator=generator) < 0.7,
        )
        (logprobs, _), _ = kept_bytes(trainer, batch, routing)
        logprobs.sum().backward()
        gradients.append([p.grad for p in trainer.model.parameters()])
        chosen.append(routing.stacked())
    assert torch.equal(*chosen)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_critic_recomputes_its_blocks_to_the_same_bits(tmp_path):
    found = []
    for recompute in ("none", "blocks"):
        critic = make_critic(tmp_path, "gpt_oss", trainer={"recompute": recompute})
        assert critic.model.body.recomputes_blocks == (recompute == "blocks")
        rows = make_rows(LENGTHS)
        critic.values(rows)
        for row in rows:
            row.set("returns", np.where(row.loss_mask, 1.0, 0.0).astype(np.float32))
        critic.update(rows)
        found.append({n: p.detach().clone() for n, p in critic.model.named_parameters()})
    assert_same_bits(*found)


def test_a_forward_without_gradient_runs_each_block_once(tmp_path):
    trainer = make_trainer(tmp_path, recompute="blocks")
    runs = []
    for block in trainer.model.layers:
        block.get_submodule("attention").register_forward_hook(lambda *_: runs.append(1))
    trainer.forward(make_rows([20]))
    assert len(runs) == 2
    trainer.update(make_rows([20]), PPOClip())
    assert len(runs) == 2 + 4
