"""Settings of the objective: the loss on tokens, and the advantage that it weighs. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, get_args

from lockstep.config import Checked, Interval, at_least, require
from lockstep.errors import ConfigError

Aggregate = int | Literal["token_mean", "sequence_mean"]
AGGREGATES = "token_mean, sequence_mean, or tokens above 0"
KLEstimator = Literal["k2", "k3", "unbiased"]
Divergence = Literal["tv", "kl"]
KLOrder = Literal["reverse", "forward"]
"""KL(student || teacher), or KL(teacher || student)."""
Compare = Literal["episode", "turn", "path", "observation"]
ProcessRewards = Literal["added", "turn", "group", "return"]

USUAL_DIVERGENCE: dict[Divergence, float] = {"tv": 0.2, "kl": 0.05}


def is_aggregate(how: object) -> bool:
    """True for one of `AGGREGATES`."""
    if isinstance(how, Real) and not isinstance(how, bool):
        return 0 < float(how) < math.inf
    return how in ("token_mean", "sequence_mean")


def check_kind(name: str, kind: object, kinds: Any) -> None:
    """Raises ConfigError unless `kind` is one of a Literal's values."""
    if kind not in get_args(kinds):
        raise ConfigError(f"{name}={kind!r} must be one of {', '.join(get_args(kinds))}.")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Checked):
    """Base of the losses. Each subclass is a choice of the setting `objective`."""

    has_ratio: ClassVar[bool] = False
    """True if the loss contains the ratio to the old policy (column `old_logprobs`). A correction
    by a ratio to the same policy would count it twice."""

    aggregate: Aggregate = "token_mean"
    """Sum of token losses into one. token_mean weighs every trained token of the whole batch alike,
    sequence_mean every row alike; a number of tokens divides each row's sum by it and takes the
    mean over rows (Dr. GRPO). Micro-batches never change the result."""
    entropy_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the entropy bonus: -entropy_coef * entropy is added at each trained token.
    Above 0 keeps the policy from becoming sure too early."""
    kl_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of KL(policy || reference) in the loss; 0 needs no reference."""
    reference: Literal["start", "base"] = "start"
    """Policy of that KL. start: the weights that training starts from, including from=RUN and
    lora.path. base: `model` as it is, without an adapter."""
    kl_estimator: KLEstimator = "unbiased"
    """Estimator of that KL from the sampled tokens. unbiased: k3 times the ratio to the old policy;
    its gradient is the gradient of the KL (DeepSeek-V3.2). k2: half the square of the log ratio;
    right too while the old policy is the policy. k3: GRPO's; as a loss it has the gradient of
    KL(reference || policy). k1 is no choice: as a loss its mean gradient is 0."""

    @property
    def is_silent_at_zero(self) -> bool:
        """True if a token whose advantage is 0 has no gradient: a loss of this module, which is a
        multiple of the advantage, without a bonus or a penalty beside it."""
        is_multiple = type(self) in (PPOClip, GSPO, CISPO, DPPO, Reinforce)
        return is_multiple and not self.entropy_coef and not self.kl_coef

    @property
    def reads_old_logprobs(self) -> bool:
        """True if the loss or its regularizer reads the column `old_logprobs`."""
        return self.has_ratio or (self.kl_coef > 0 and self.kl_estimator == "unbiased")

    @property
    def reads_reference_logprobs(self) -> bool:
        """True if the regularizer reads the column `reference_logprobs`."""
        return self.kl_coef > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, aggregate=(is_aggregate(self.aggregate), AGGREGATES))


@dataclass(frozen=True, kw_only=True)
class _Clipped(ObjectiveConfig):
    """Base of the losses with a bounded ratio."""

    has_ratio: ClassVar[bool] = True
    below: ClassVar[Interval] = Interval("(0, 1)")
    """The distances below 1 that make sense."""

    clip: tuple[float, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.clip
        if self.below.expected(low) or not 0 < high < math.inf:
            raise ConfigError(
                f"objective.clip={low},{high}: expected a distance below 1, in {self.below.text}, "
                "and one above 1, a finite number over 0; 0.2,0.28 keeps the ratio in [0.8, 1.28]."
            )


@dataclass(frozen=True, kw_only=True)
class PPOClip(_Clipped):
    """The clipped surrogate of PPO (Schulman et al. 2017)."""

    clip: tuple[float, float] = (0.2, 0.2)
    """Distance below and above 1. A token has no gradient if its ratio to the old policy is further
    away."""
    dual_clip: Annotated[float | None, Interval("(1, inf)")] = None
    """Ratio above which tokens of negative advantage have no gradient (Ye et al. 2020; 3 is usual).
    Unset, their gradient grows with the ratio, without bound."""


@dataclass(frozen=True, kw_only=True)
class GSPO(_Clipped):
    """PPO's clip on the mean ratio of a whole row (Zheng et al. 2025)."""

    aggregate: Aggregate = "sequence_mean"
    """Weight of rows and tokens in the loss; the ratio is a row's, and so is the default weight."""
    clip: tuple[float, float] = (3e-4, 4e-4)
    """Distance below and above 1 where the row's ratio is clipped. Small, since a mean moves
    little."""


@dataclass(frozen=True, kw_only=True)
class CISPO(_Clipped):
    """REINFORCE with each token weighed by its bounded ratio to the old policy (MiniMax-M1)."""

    below: ClassVar[Interval] = Interval("(0, 1]")

    clip: tuple[float, float] = (1.0, 1.0)
    """Distance below and above 1 where the weight is cut. A token beyond keeps its gradient, with
    the bound as its weight. 1 below means no lower bound, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class DPPO(ObjectiveConfig):
    """A trust region on probabilities, not on their ratio (Qi et al. 2026).

    Its authors take the sampler as the old policy: correction.anchor=rollout.
    """

    has_ratio: ClassVar[bool] = True

    divergence: Divergence = "tv"
    """Measure of how far a token's probability has moved: tv is the absolute difference, kl the KL
    of the choice "this token or any other"."""
    max_divergence: tuple[float, float] | None = None
    """Largest divergence of a token with a gradient: for tokens that became less likely, and for
    tokens that became likelier. Unset: 0.2,0.2 for tv, 0.05,0.05 for kl."""
    max_ratio: ClassVar[float] = 20.0
    """Upper limit of the ratio that weighs a token. Low limits cost more than they save."""

    @property
    def bounds(self) -> tuple[float, float]:
        """`max_divergence`, or the usual bounds of the divergence."""
        usual = USUAL_DIVERGENCE[self.divergence]
        return self.max_divergence or (usual, usual)

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = 1.0 if self.divergence == "tv" else math.inf
        is_bound = all(0 < bound <= largest and bound < math.inf for bound in self.bounds)
        expected = "two finite numbers above 0, and at most 1 with divergence=tv"
        require(self, max_divergence=(is_bound, expected))


@dataclass(frozen=True, kw_only=True)
class Reinforce(ObjectiveConfig):
    """-advantage * log-prob, as if the sampler were the trainer (Williams 1992)."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(Checked):
    """Base of the advantages. Each subclass is a choice of the setting `advantage`."""

    needs_critic: ClassVar[bool] = False
    """True if it compares with a critic's values instead of other episodes."""

    compares_in_group: ClassVar[bool] = False
    """True if a trajectory is compared with its group."""


@dataclass(frozen=True, kw_only=True)
class _Normalized(AdvantageConfig):
    """Base of the advantages that are divided by a deviation."""

    normalize_std: bool = True
    """Divide by the standard deviation: grpo by the group's, reinforce_plus_plus by the batch's.
    grpo without it is Dr. GRPO (Liu et al. 2025): tasks then weigh by how much their rewards
    differ. reinforce_plus_plus without it, and with baseline=batch, is REINFORCE with the batch's
    mean as its baseline."""


@dataclass(frozen=True, kw_only=True)
class GRPO(_Normalized):
    """Reward minus the mean of its group (Shao et al. 2024)."""

    compares_in_group: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RLOO(AdvantageConfig):
    """Reward minus the mean of the group's other trajectories (Ahmadian et al. 2024).

    A trajectory is not in its own baseline, so the gradient is unbiased; with n of them it is
    n / (n - 1) times GRPO's without the deviation.
    """

    compares_in_group: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(_Normalized):
    """Reward minus a mean, divided by the deviation over the whole batch (Hu et al. 2025).

    Every trajectory counts once, however long it is.
    """

    baseline: Literal["batch", "group"] = "batch"
    """Mean to subtract: the batch's, or the mean of the trajectory's group
    (REINFORCE++-baseline)."""

    @property
    def compares_in_group(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.baseline == "group"


@dataclass(frozen=True, kw_only=True)
class GAE(AdvantageConfig):
    """Generalised advantage estimates over a critic's values (Schulman et al. 2016).

    Every token has its own; no episode is compared with another: group_size=1 is enough.
    """

    needs_critic: ClassVar[bool] = True

    gamma: Annotated[float, Interval("[0, 1]")] = 1.0
    """Discount of a reward per sampled token. Below 1, long episodes learn little from their end:
    0.99 over 500 tokens leaves 0.7 percent."""
    lam: Annotated[float, Interval("[0, 1]")] = 1.0
    """Weight of the observed return against the critic's next value: 1 takes the return, 0 the next
    value. Lower has less noise and more of the critic's errors; over n tokens lam^n is left."""
    critic_lam: Annotated[float | None, Interval("[0, 1]")] = None
    """lam of the returns that the critic learns. With lam below 1, critic_lam=1 still carries the
    end of an episode to its first tokens (decoupled GAE, VC-PPO, Yuan et al. 2025). Unset: lam."""
    whiten: bool = True
    """Subtract the mean over the batch's tokens from the advantages, and divide by the standard
    deviation."""
    bootstrap_truncated: bool = False
    """Add the critic's value of the state at the cut to episodes that a budget ended, as if they
    went on. Off, the budget is part of the task, and the episode ends there."""


@dataclass(frozen=True, kw_only=True)
class CreditConfig(Checked):
    """Credit of single turns, beside the advantage of the episode that they belong to.

    Turns are compared by the rule of `advantage`, with other turns in place of other episodes. A
    return is the sum of rewards from a turn on; the episode's reward is given at its last turn.
    """

    compare: Compare = "episode"
    """Turns of the group whose returns are compared. episode: none; a turn has the advantage of its
    episode. turn: turns with the same number. path: turns that began after the same tokens.
    observation: turns that began after the same observation, whatever was before it (GiGPO, Feng et
    al. 2025). A turn without a peer has 0."""
    turn_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of that comparison beside the advantage of the episode: omega of GiGPO."""
    episode_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of the advantage of the episode. 0 leaves the turns' own advantages alone."""
    gamma: Annotated[float, Interval("(0, 1]")] = 1.0
    """Discount of a reward per turn, in (0, 1]: a reward three turns later counts gamma^3."""
    process: ProcessRewards = "added"
    """Use of turns' own rewards. added: added as they are to the advantage of their turn. turn:
    compared with rewards of the same turn in the group (MT-GRPO, Zeng et al. 2025). group: compared
    with the rewards of all turns of the group, and summed up from each turn on (process supervision
    of GRPO, Shao et al. 2024). return: as part of the returns and of the episode's reward."""
    process_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of turns' own rewards, relative to the episode's reward. 0 with process=added ignores
    them."""
    branch_weight: Annotated[float, at_least(0)] = 0.0
    """A turn that leads to several rewarded leaves has the mean of their advantages, and this times
    the difference from the mean at the turn before it, where the branches parted (local advantage
    of TreeRL, Hou et al. 2025, which takes 1)."""
