"""What is maximised: the loss on tokens, and the advantage that stands behind it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import ConfigError

Aggregate = Literal["token_mean", "sequence_mean", "fixed_length"]
OldPolicy = Literal["rollout", "recomputed"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Base of the losses. A subclass is a choice of the setting, by its tag."""

    aggregate: Aggregate = "token_mean"
    """How token losses become one: token_mean weighs every trained token of the whole batch alike,
    sequence_mean every row alike, fixed_length divides each row's sum by `fixed_length` and takes
    the mean over rows (Dr. GRPO). Micro-batches never change the result."""
    fixed_length: int = 0
    """Tokens that fixed_length divides by; needed there, and nowhere else."""

    def __post_init__(self) -> None:
        if (self.aggregate == "fixed_length") != (self.fixed_length > 0):
            raise ConfigError(
                f"objective.aggregate={self.aggregate} with fixed_length={self.fixed_length}: "
                "fixed_length is the number of tokens that a row's sum is divided by; it must be "
                "above 0 with aggregate=fixed_length, and 0 otherwise."
            )


@dataclass(frozen=True, kw_only=True)
class PPOClip(ObjectiveConfig):
    """The clipped surrogate of PPO (Schulman et al. 2017)."""

    clip: tuple[float, float] = (0.2, 0.2)
    """How far the ratio to the old policy may go below and above 1 before a token stops pushing."""
    old_policy: OldPolicy = "rollout"
    """Whose log-probs are the old ones: the sampler's as recorded (one forward per step), or those
    of a forward by the trainer before the first update of the batch."""

    def __post_init__(self) -> None:
        ObjectiveConfig.__post_init__(self)
        low, high = self.clip
        if not (0 < low < 1 and 0 < high < math.inf):
            raise ConfigError(
                f"objective.clip={low},{high}: expected a distance below 1, in (0, 1), and one "
                "above 1, a number over 0; 0.2,0.28 keeps the ratio in [0.8, 1.28]."
            )


@dataclass(frozen=True, kw_only=True)
class Reinforce(ObjectiveConfig):
    """-advantage * log-prob, as if the sampler were the trainer (Williams 1992)."""


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(ObjectiveConfig):
    """REINFORCE with each token weighed by its ratio to the old policy."""

    max_ratio: float = 2.0
    """The weight is cut here: variance for bias. 1e9 never cuts."""
    old_policy: OldPolicy = "rollout"
    """Whose log-probs are the old ones: the sampler's as recorded, or those of a forward by the
    trainer before the first update of the batch."""

    def __post_init__(self) -> None:
        ObjectiveConfig.__post_init__(self)
        if not self.max_ratio >= 1:
            raise ConfigError(
                f"objective.max_ratio={self.max_ratio} must be at least 1: a smaller cut would "
                "weigh down tokens whose two log-probs are equal."
            )


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Base of the advantages. A subclass is a choice of the setting, by its tag."""

    def check_group_size(self, group_size: int) -> None:
        """Raises ConfigError if groups of this size give no signal."""


@dataclass(frozen=True, kw_only=True)
class GRPO(AdvantageConfig):
    """Reward minus the mean of its group (Shao et al. 2024)."""

    normalize_std: bool = True
    """Divide by the group's standard deviation. Off is Dr. GRPO (Liu et al. 2025): easy and hard
    tasks then weigh by how much their rewards differ."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"advantage.eps={self.eps} must be a finite number above 0.")

    def check_group_size(self, group_size: int) -> None:
        if group_size < 2:
            raise ConfigError(
                f"group_size={group_size} with advantage=grpo: the baseline is the mean of the "
                "group, so every advantage would be 0. Use group_size=2 or more, or "
                "advantage=batch_baseline."
            )


@dataclass(frozen=True, kw_only=True)
class BatchBaseline(AdvantageConfig):
    """Reward minus the mean of the whole batch."""

    normalize_std: bool = False
    """Divide by the batch's standard deviation."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"advantage.eps={self.eps} must be a finite number above 0.")
