"""A trainer with the routers' load-balancing loss: one script for a rank and for one process."""

from __future__ import annotations

from pathlib import Path

from cpu.training.tiny_training import make_rows
from processes import ranks_maker
from trainer_ranks import gradients_of, make_arm

from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss

LENGTHS = (40, 33, 38)  # each row is a micro-batch; of two ranks, one gets a filler
ARMS = [
    (sequence, is_sharded, recompute)
    for sequence in (1, 2)
    for is_sharded in (False, True)
    for recompute in ("none", "blocks")
]


def script(directory, **settings):
    """(metric, gradients) of one call."""
    trainer = make_arm(
        directory, "gpt_oss", router_aux_loss_coef=2.0, max_tokens_per_microbatch=41, **settings
    )
    metrics = trainer.forward_backward(make_rows(LENGTHS), make_loss(Reinforce()))
    trainer._gradient_norm()
    figures = {name: metrics[name] for name in ("train/router_aux_loss", "train/loss")}
    return figures, gradients_of(trainer)


def work(rank, directory):
    """arm -> figures and gradients of this rank."""
    out = {}
    for number, (sequence, is_sharded, recompute) in enumerate(ARMS):
        ranks = ranks_maker(rank, directory, name=f"told-{number}")(sequence)
        at = Path(directory) / f"{rank}-{number}"
        out[sequence, is_sharded, recompute] = script(
            at, ranks=ranks, is_sharded=is_sharded, recompute=recompute
        )
    return out
