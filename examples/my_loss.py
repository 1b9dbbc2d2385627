"""A loss of your own: SAPO, which fades a token's gradient out where PPO cuts it off.

    lockstep train quickstart --plugin my_loss objective=sapo steps=2 out=runs/sapo

A loss sees the trained tokens of whole rows, and gives one value per token. How rows are packed and
how values become one number is the trainer's, so that it can change neither. The settings of every
objective (aggregation, entropy bonus, KL to a reference) come with the base class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.errors import ConfigError
from lockstep.objectives.config import ObjectiveConfig
from lockstep.objectives.losses import LossFn, TokenBatch, TokenLoss, make_policy_loss


@dataclass(frozen=True, kw_only=True)
class SAPO(ObjectiveConfig):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347)."""

    has_ratio: ClassVar[bool] = True

    temperatures: tuple[float, float] = (1.0, 1.05)
    """Speed of the fade as a token's ratio leaves 1: with a positive advantage, and with a negative
    one. Higher is faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.temperatures) > 0:
            raise ConfigError(f"objective.temperatures={self.temperatures} must be above 0.")


@make_policy_loss.register
def _(config: SAPO) -> LossFn:
    positive, negative = config.temperatures

    def sapo(tokens: TokenBatch) -> TokenLoss:
        ratio = (tokens.logprobs - tokens.column("old_logprobs")).exp()
        advantages = tokens.column("advantages")
        temperature = torch.where(advantages > 0, positive, negative)
        # 4 / temperature: the gate's slope at ratio 1 is 1, whatever the temperature
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        return TokenLoss(-gate * advantages, mean={"ratio_mean": ratio.detach()})

    return sapo
