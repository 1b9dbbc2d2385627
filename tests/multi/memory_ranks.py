"""What a rank does with sharded weights and blocks that are recomputed."""

from pathlib import Path

import torch.distributed as dist
from cpu.training.tiny_training import make_rows
from processes import ranks_maker, state_of
from trainer_ranks import make_arm

from lockstep.models.sharding import full_tensor
from lockstep.objectives.config import PPOClip

LENGTHS = (9, 40, 33, 12)
WIDE = {"hidden_size": 96, "intermediate_size": 80, "head_dim": 24}  # matrices of 8-bit size
KIND = "gpt_oss"


def script(directory, ranks=None, **settings):
    """(weights, optimizer state) after two updates, whole; they are saved in `directory`."""
    is_sharded = ranks is not None
    trainer = make_arm(directory, KIND, ranks=ranks, is_sharded=is_sharded, hf=WIDE, **settings)
    for seed in range(2):
        trainer.update(make_rows(LENGTHS, seed=seed), PPOClip())
        assert not trainer.last_skip, trainer.last_skip
    trainer.save(Path(directory) / "saved")
    if ranks is not None:
        dist.barrier()
    weights = {n: full_tensor(p.detach()).clone() for n, p in trainer.model.named_parameters()}
    return weights, state_of(trainer)


def work(rank, directory):
    ranks = ranks_maker(rank, directory)()
    out = {}
    for recompute in ("none", "blocks"):
        out[recompute] = script(Path(directory) / recompute, ranks, recompute=recompute)
    return out
