"""What a trainer does on each rank of the tests, and on one process: the same script for both."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from cpu.training.tiny_training import KINDS, OTHER_LAYERS, make_rows, make_trainer
from processes import ranks_maker, state_of

from lockstep.correction.config import Correction
from lockstep.models.sharding import local_part, shard, whole_like
from lockstep.objectives.config import PPOClip, Reinforce
from lockstep.objectives.losses import TokenLoss, make_loss
from lockstep.training.replay import COLUMN
from lockstep.training.trainer import Trainer

LENGTHS = (9, 40, 33, 12, 27, 21, 14)
SETTINGS = {"lr": 1e-2, "max_tokens_per_microbatch": 64, "grad_clip": 0.5}

REPLAYS = ("rollout", "recompute")
LAYOUTS = {2: [(1, False), (2, False), (1, True), (2, True)], 4: [(2, True)]}
"""Processes -> (sequence, is sharded) of each arm."""
KINDS_OF = {2: KINDS, 4: ("gpt_oss",)}


def kinds_of(world, *layout):
    return (*KINDS_OF[world], *(OTHER_LAYERS if (world, *layout) == (2, 1, True) else ()))


ARMS = [
    (world, *layout, kind)
    for world, layouts in LAYOUTS.items()
    for layout in layouts
    for kind in kinds_of(world, *layout)
]


def make_arm(directory, kind, *, ranks=None, is_sharded=False, hf=(), **settings):
    hf = {"num_attention_heads": 4, **dict(hf)}
    found = make_trainer(Path(directory), kind, hf=hf, **{**SETTINGS, **settings})
    if ranks is None:
        return found
    if is_sharded:
        shard(found.model, ranks.mesh())
    return Trainer(found.model, found.config, like=found.like, ranks=ranks)


def gradients_of(trainer):
    """name -> whole float32 gradient."""
    gradients = trainer.optimizer.gradients()
    return {
        name: whole_like(gradient, trainer.optimizer.parameters[name]).clone()
        for name, gradient in gradients.items()
    }


def script(trainer, directory):
    """All that is compared, of one trainer."""
    rows = make_rows(LENGTHS)
    out = {"forward": trainer.forward(rows, column=None)}
    noise = np.random.default_rng(1)
    for row, logprobs in zip(rows, out["forward"], strict=True):
        moved = logprobs + 0.3 * noise.standard_normal(len(row))
        row.set("rollout_logprobs", np.minimum(moved, 0).astype(np.float32))
    out["num_local"] = sum(local_part(p.detach()).numel() for p in trainer.model.parameters())
    metrics = trainer.forward_backward(rows, make_loss(Reinforce()), column="logprobs")
    out["loss"] = metrics["train/loss"]
    out["norm"] = trainer._gradient_norm()
    out["gradients"] = gradients_of(trainer)
    trainer.optimizer.zero_gradients()
    trainer._passes.clear()
    out["measured"] = trainer.measure(rows).to_metrics()
    corrections = [Correction.bypass(), Correction.mis(0.3, 3.0)]
    out["updates"] = [trainer.update(rows, PPOClip(), c) for c in corrections]
    out["columns"] = [copy.deepcopy(row.columns) for row in rows]
    out["after"] = trainer.forward(rows, column=None)
    trainer.save(Path(directory) / "saved")
    if trainer.ranks is not None:
        dist.barrier()
    out["state"] = state_of(trainer)
    out |= bad_updates(trainer, rows)
    if trainer.model.config.routed_layers:
        out["replays"] = {replay: replay_once(trainer, replay) for replay in REPLAYS}
    return out


def replay_once(trainer, replay):
    """Metrics of an update by random routes, or by those of a forward before two; and the routes
    that are replayed."""
    rows, rng = make_rows(LENGTHS, seed=6), np.random.default_rng(6)
    model = trainer.model.config
    experts = np.arange(model.num_experts)
    for row in rows:
        shape = (len(row), len(model.routed_layers), 1)
        routes = rng.permuted(np.tile(experts, shape), axis=-1)[..., : model.num_active_experts]
        row.set("routed_experts", routes.astype(np.int16))
    num_updates = 2 if replay == "recompute" else 1
    trainer.config = replace(trainer.config, routing_replay=replay, updates_per_batch=num_updates)
    metrics = trainer.update(rows, PPOClip(), Correction.bypass())
    return {"metrics": metrics, "routes": [row.columns[COLUMN[replay]] for row in rows]}


def bad_updates(trainer, rows):
    """What is said of a row whose loss is not finite, of one whose gradient is not, and of a batch
    without a trained token."""
    said = {}
    poisoned = copy.deepcopy(rows)
    poisoned[5].columns["advantages"][:] = np.inf
    trainer.update(poisoned, Reinforce(), Correction.bypass())
    said["bad loss"] = trainer.last_skip
    trainer.forward_backward(poisoned, infinite_slope)
    trainer.optim_step()
    said["bad gradient"] = trainer.last_skip
    for row in poisoned:
        row.loss_mask = np.zeros_like(row.loss_mask)
    trainer.update(poisoned, Reinforce(), Correction.bypass())
    said["nothing"] = trainer.last_skip
    return said


def infinite_slope(tokens):
    """A finite loss whose gradient is not, where an advantage is not finite."""
    slope = torch.where(tokens.columns["advantages"].isfinite(), 1.0, float("inf"))
    return TokenLoss(loss=_Slope.apply(tokens.logprobs, slope))


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(slope)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def work(rank, directory):
    """Everything that one rank does in all tests."""
    make_ranks, out = ranks_maker(rank, directory), {}
    world = dist.get_world_size()
    for sequence, is_sharded in LAYOUTS[world]:
        ranks = make_ranks(sequence)
        for kind in kinds_of(world, sequence, is_sharded):
            at = Path(directory) / f"{kind}-{sequence}-{is_sharded}"
            trainer = make_arm(at, kind, ranks=ranks, is_sharded=is_sharded)
            out[sequence, is_sharded, kind] = script(trainer, at)
            out[sequence, is_sharded, kind]["reloaded"] = reload(directory, kind, ranks, is_sharded)
    return out


def reload(directory, kind, ranks=None, is_sharded=False):
    """The weights and the optimizer after a load of what ONE process has saved, and one update."""
    source = Path(directory) / f"alone-{kind}"
    trainer = make_arm(source / "again", kind, ranks=ranks, is_sharded=is_sharded, seed=5)
    trainer.load(source / "saved")
    state = state_of(trainer)
    metrics = trainer.update(make_rows(LENGTHS, seed=4), PPOClip(), Correction.bypass())
    return {"state": state, "metrics": metrics, "version": trainer.version}
