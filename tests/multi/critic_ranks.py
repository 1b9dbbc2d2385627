"""What a critic does on each rank of the tests, and on one process: the same script for both."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch.distributed as dist
from cpu.training.tiny_training import make_critic, make_rows
from processes import ranks_maker

from lockstep.models.critic import load_value_model
from lockstep.models.sharding import shard, whole_like
from lockstep.training.config import CriticConfig
from lockstep.training.critic import Critic

LENGTHS = (9, 40, 33, 12, 27, 21, 14)
LAYOUTS = [(1, False), (2, False), (1, True), (2, True)]
"""(sequence, is sharded) of each arm."""


def make_arm(directory, *, ranks=None, is_sharded=False, seed=0):
    settings = {"lr": 1e-2, "grad_clip": 0.5, "updates_per_batch": 2, "clip": 0.1}
    found = make_critic(Path(directory), "gpt_oss", seed=seed, budget=64, **settings)
    if ranks is None:
        return found
    if is_sharded:
        shard(found.model.body, ranks.mesh())
    return Critic(found.model, CriticConfig(**settings), found.config, like=found.like, ranks=ranks)


def script(critic, directory):
    """All that is compared, of one critic."""
    rows = make_rows(LENGTHS)
    out = {"values": critic.values(rows), "ends": critic.values_at_end(rows)}
    noise = np.random.default_rng(1)
    for row in rows:
        row.set("returns", noise.standard_normal(len(row)).astype(np.float32))
    out["metrics"] = critic.forward_backward(rows)
    if critic.ranks is not None:
        critic.optimizer.sum_gradients(critic.ranks)
    parameters = critic.optimizer.parameters
    out["gradients"] = {
        name: whole_like(gradient, parameters[name]).clone()
        for name, gradient in critic.optimizer.gradients().items()
    }
    critic.optimizer.zero_gradients()
    out["updates"] = [critic.update(rows) for _ in range(2)]
    poisoned = copy.deepcopy(rows)
    poisoned[5].columns["returns"][:] = np.nan
    out["skipped"] = critic.update(poisoned)["critic/skipped_updates"]
    critic.save(Path(directory) / "saved")
    if critic.ranks is not None:
        dist.barrier()
    out["after"] = critic.values(rows)
    return out


def work(rank, directory):
    """Everything that one rank does in all tests."""
    make_ranks, out = ranks_maker(rank, directory), {}
    for sequence, is_sharded in LAYOUTS:
        ranks = make_ranks(sequence)
        at = Path(directory) / f"{rank}-{sequence}-{is_sharded}"
        critic = make_arm(at, ranks=ranks, is_sharded=is_sharded)
        place_of_all = Path(directory) / f"{sequence}-{is_sharded}"
        out[sequence, is_sharded] = script(critic, place_of_all)
        again = make_arm(at, ranks=ranks, is_sharded=is_sharded, seed=5)
        again.load(place_of_all / "saved")
        out[sequence, is_sharded]["reloaded"] = again.values(make_rows(LENGTHS))
        saved = place_of_all / "saved" / "model"
        model = load_value_model(saved, mesh=ranks.mesh() if is_sharded else None)
        first = Critic(model, CriticConfig(), again.config, like=saved, ranks=ranks)
        out[sequence, is_sharded]["begun"] = first.values(make_rows(LENGTHS))
    return out
