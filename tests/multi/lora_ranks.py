"""What a trainer of an adapter does on each rank, and on one process: the same script for both."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from cpu.training.tiny_training import fill_adapter, make_rows, make_trainer
from processes import ranks_maker
from trainer_ranks import gradients_of

from lockstep.correction.config import Correction
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.models.sharding import local_part, shard
from lockstep.objectives.config import PPOClip, Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.training.trainer import Trainer

LENGTHS = (9, 40, 33, 12, 27)
KIND = "gpt_oss"


def make_adapted(directory, *, ranks=None):
    """The model's own weights are sharded first; the adapter that is put on it is not."""
    base = make_trainer(Path(directory), KIND, lr=1e-2, max_tokens_per_microbatch=64)
    model = base.model
    if ranks is not None:
        shard(model, ranks.mesh())
    add_adapter(model, lora_shape(LoraConfig(rank=3), model.config), seed=0)
    fill_adapter(model, seed=1)
    return Trainer(model, base.config, like=base.like, ranks=ranks)


def script(trainer, directory):
    rows = make_rows(LENGTHS)
    for row, logprobs in zip(rows, trainer.forward(rows, column=None), strict=True):
        row.set("rollout_logprobs", logprobs)
    trainer.forward_backward(rows, make_loss(Reinforce()))
    trainer._gradient_norm()
    gradients = gradients_of(trainer)
    trainer.optimizer.zero_gradients()
    trainer._passes.clear()
    metrics = trainer.update(rows, PPOClip(kl_coef=0.1), Correction.bypass())
    trainer.save(Path(directory) / "saved")
    if trainer.ranks is not None:
        dist.barrier()
    own = [p for n, p in trainer.model.named_parameters() if "lora" not in n]
    return {
        "gradients": gradients,
        "metrics": metrics,
        "reference": [row.columns["reference_logprobs"] for row in rows],
        "num_local": sum(local_part(p.detach()).numel() for p in own),
    }


def work(rank, directory):
    ranks = ranks_maker(rank, directory)()
    at = Path(directory) / "ranks"
    return script(make_adapted(at, ranks=ranks), at)
