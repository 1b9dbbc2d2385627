"""A loss of your own: GSPO, whose ratio belongs to a whole row and not to a token.

    lockstep train quickstart --plugin my_loss objective=gspo steps=2 out=runs/gspo

A loss sees the trained tokens of whole rows, and gives one value per token. How rows are packed and
how values become one number is the trainer's, so that it can change neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import LossFn, TokenBatch, TokenLoss, make_loss


@dataclass(frozen=True, kw_only=True)
class GSPO(PPOClip):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071), eq. 5.

    From PPOClip come `clip` and `old_policy`, and with it the column `old_logprobs`.
    """

    clip: tuple[float, float] = (3e-4, 4e-4)
    """How far the ratio of a row may go below and above 1: it is a mean, so it moves little."""


@make_loss.register
def _(config: GSPO) -> LossFn:
    low, high = 1 - config.clip[0], 1 + config.clip[1]

    def gspo(tokens: TokenBatch) -> TokenLoss:
        log_ratio = tokens.logprobs - tokens.column("old_logprobs")
        sums = log_ratio.new_zeros(tokens.num_rows).index_add(0, tokens.row, log_ratio)
        ratio = (sums / torch.bincount(tokens.row, minlength=tokens.num_rows)).exp()[tokens.row]
        advantages = tokens.column("advantages")
        loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        is_clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
        return TokenLoss(loss, mean={"clip_fraction": is_clipped})

    return gspo
