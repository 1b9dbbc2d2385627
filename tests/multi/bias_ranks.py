"""What a trainer that balances experts does on each rank, and on one process: the same script."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from cpu.training.tiny_training import make_rows, make_trainer
from processes import ranks_maker

from lockstep.models.moe import Router
from lockstep.models.sharding import copy_whole, full_tensor, shard
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.training.trainer import Trainer

LENGTHS = (9, 40, 33, 12, 27)


def make_balanced(directory, *, ranks=None, is_sharded=False):
    found = make_trainer(
        Path(directory), "glm4_moe", expert_bias_rate=0.25, max_tokens_per_microbatch=64
    )
    if is_sharded:
        shard(found.model, ranks.mesh())
    return Trainer(found.model, found.config, like=found.like, ranks=ranks)


def script(trainer, directory):
    """The biases after each of two updates, the load that was reported, and what is saved."""
    out = {"biases": [biases(trainer.model)], "load": []}
    for seed in range(2):
        metrics = trainer.forward_backward(make_rows(LENGTHS, seed=seed), make_loss(Reinforce()))
        trainer.optim_step()
        out["biases"].append(biases(trainer.model))
        out["load"].append({k: v for k, v in metrics.items() if k.startswith("moe/")})
    trainer.save(Path(directory) / "saved")
    if trainer.ranks is not None:
        dist.barrier()
    sampled = make_balanced(Path(directory) / "sampled").model
    copy_whole(trainer.model, sampled)
    out["copied"] = biases(sampled)
    return out


def biases(model):
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return torch.stack([full_tensor(router.choice_bias.detach()).clone() for router in routers])


def work(rank, directory):
    """is_sharded -> what this rank found."""
    ranks = ranks_maker(rank, directory)()
    out = {}
    for is_sharded in (False, True):
        at = Path(directory) / f"ranks-{rank}-{is_sharded}"
        shared = Path(directory) / f"ranks-{is_sharded}"
        out[is_sharded] = script(make_balanced(at, ranks=ranks, is_sharded=is_sharded), shared)
    return out
