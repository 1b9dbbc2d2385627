"""Settings of the correction of the gap between sampler and trainer. No torch.

A `Correction` sets the policy of the objective's ratio (`anchor`), the weight of each token
(`level`, `bound`, `limits`, `normalize`), the rejected tokens (`reject`) and the divisor of the
loss. The literature's names are constructors: `Correction.tis()`, `Correction.mis()`, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from lockstep.config import ABOVE_0, Checked, at_least
from lockstep.errors import ConfigError

Anchor = Literal["rollout", "recomputed", "on_policy"]
Level = Literal["none", "token", "sequence", "geometric"]
Bound = Literal["truncate", "clip", "mask"]
Stat = Literal["ratio", "k1", "k2", "k3", "prob_diff", "old_prob"]
Aggregation = Literal["token", "sum", "mean", "max", "level"]
Denominator = Literal["original", "kept"]

BY_LEVEL: Mapping[Level, tuple[Aggregation, float, float]] = {
    "none": ("token", 0.5, 2.0),
    "token": ("token", 0.5, 2.0),
    "sequence": ("sum", 0.5, 2.0),
    "geometric": ("mean", 0.999, 1.001),
}
"""Level -> the aggregation that a rule with aggregation=level gets, and its default bounds.
[0.5, 2] is of slime's mis.yaml. No usable batch has a geometric mean outside of it, so that level
has verl's bounds for geometric means (`rs_threshold` of its presets, 0.9.1)."""
UNSIGNED: tuple[Stat, ...] = ("k2", "k3", "prob_diff")
"""Statistics that are never below 0, so that a low bound means nothing."""


def _refuse(where: str, *claims: tuple[bool, str]) -> None:
    for is_wrong, text in claims:
        if is_wrong:
            raise ConfigError(f"{where}{text}")


@dataclass(frozen=True, kw_only=True)
class Rule(Checked):
    """Rejects tokens or sequences from training if their statistic lies outside [low, high].

    Every rule is evaluated on the original mask, and a token is rejected if any rule rejects it. So
    their order does not matter.

    >>> Rule(stat="k3", high=0.1).name, Rule.veto_ratio(1e-4).name
    ('token_k3', 'veto_ratio')
    """

    stat: Stat
    """ratio: trainer / rollout. k1: rollout - trainer, nats; k2: half its square; k3: ratio - 1 -
    log ratio. prob_diff: |p_trainer - p_rollout|. old_prob: p_trainer, before the update."""
    aggregation: Aggregation = "token"
    """token: each token by itself. The others reject whole sequences. sum, mean: over the sequence;
    for a ratio in log space (product and geometric mean). max: the sequence's worst token, on
    either side (a veto). level: token, sum or mean, as `correction.level` says; bounds of a ratio
    that are open then follow the level too."""
    low: float | None = None
    high: float | None = None
    only_negative_advantage: bool = False
    """Reject only tokens whose advantage is below 0."""
    label: str = ""
    """Name of the rule in metrics; empty derives one from the above."""

    PRESETS: ClassVar[Mapping[str, Callable[[], Rule]]]
    """Constructors by name: `correction.reject=["veto_ratio"]` on the command line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high, stat = self.low, self.high, self.stat
        given = [b for b in (low, high) if b is not None]
        found = f"found low={low}, high={high}"
        is_empty = not given and (stat, self.aggregation) != ("ratio", "level")
        is_unsigned = stat in UNSIGNED and (low is not None or min(given, default=0) < 0)
        is_swapped = len(given) > 1 and not given[0] < given[1]
        is_averaged = stat == "old_prob" and self.aggregation in ("sum", "mean")
        is_no_prob = stat == "old_prob" and not all(0 <= b <= 1 for b in given)
        is_no_ratio = stat == "ratio" and min(given, default=1) <= 0
        _refuse(
            f"correction rule {self.name}",
            (is_empty, " has no bound: give low, high or both; it would reject nothing."),
            (any(map(math.isnan, given)), f": a bound is not a number, {found}."),
            (is_swapped, f": low must be below high, {found}. Swapped?"),
            (is_unsigned, f": {stat} is never below 0, {found}. Give high alone, at least 0."),
            (is_no_prob, f": bounds of a probability are from 0 to 1, {found}. Logs?"),
            (is_no_ratio, f": bounds of a ratio are above 0, {found}. Its log is minus k1."),
            (
                is_averaged,
                f": aggregation={self.aggregation} of probabilities hides the worst. Use token or "
                "max.",
            ),
        )

    def at(self, level: Level) -> Rule:
        """The rule with its aggregation and its open bounds, in a correction of this level."""
        if self.aggregation != "level":
            return self
        aggregation, low, high = BY_LEVEL[level]
        if self.low is not None or self.high is not None:
            low, high = self.low, self.high
        return replace(self, aggregation=aggregation, low=low, high=high)

    @property
    def name(self) -> str:
        """NAME of the metric `correction/rejected_by/NAME`."""
        if self.label:
            return self.label
        return f"{'sequence_' * self.is_sequence}{self.aggregation}_{self.stat}"

    @property
    def is_sequence(self) -> bool:
        """True if it rejects whole sequences."""
        return self.aggregation != "token"

    @property
    def needs_worst_token(self) -> bool:
        """True if a single token can reject its sequence."""
        return self.aggregation == "max"

    @property
    def rejects_impossible(self) -> bool:
        """True if a token of probability 0 under the trainer (ratio 0, infinite divergence) rejects
        its sequence. The token itself is rejected anyway, as not finite."""
        bound = self.low if self.stat in ("ratio", "old_prob") else self.high
        return self.needs_worst_token and self.stat != "prob_diff" and bound is not None

    @classmethod
    def veto_prob(cls, floor: float = 1e-6) -> Rule:
        """Rejects a sequence if any of its tokens is less probable than this under the trainer's
        policy before the update (the veto of the slime authors' text)."""
        return cls(stat="old_prob", aggregation="max", low=floor, label="veto_prob")

    @classmethod
    def veto_ratio(cls, floor: float = 1e-4) -> Rule:
        """Rejects a sequence if the ratio of any of its tokens is below this (the veto of slime's
        code, `rs_veto_threshold`)."""
        return cls(stat="ratio", aggregation="max", low=floor, label="veto_ratio")

    @classmethod
    def opsm(cls, delta: float = 1e-4) -> Rule:
        """Off-policy sequence masking: rejects tokens of negative advantage in sequences whose mean
        k1 is above delta (DeepSeek-V3.2, section 3.1; slime's `--use-opsm`)."""
        return cls(
            stat="k1", aggregation="mean", high=delta, only_negative_advantage=True, label="opsm"
        )


Rule.PRESETS = {name: getattr(Rule, name) for name in ("veto_ratio", "veto_prob", "opsm")}


@dataclass(frozen=True, kw_only=True)
class Correction(Checked):
    """The correction of the gap between the sampling policy and the trained policy.

    Throughout, "old" is the trainer's policy before the first update of the batch, and "behaviour"
    is the sampling policy, by its recorded log-probs. The weight of a token is old / behaviour.
    """

    anchor: Anchor = "rollout"
    """Denominator of the objective's ratio. rollout: the behaviour itself (bypass; the ratio
    corrects the gap too, one forward per step). recomputed: old, from a forward of its own
    (decoupled; the weight corrects the gap). on_policy: the policy in training itself, so that the
    ratio is exactly 1 and nothing is clipped (one update per batch, equal policy version)."""
    rescorings: Annotated[int, at_least(0)] = 0
    """Times that the engine that sampled scores each token again: the mean probability is then the
    behaviour's (8 is usual). 0 takes the log-probs that were recorded while sampling."""
    level: Level = "none"
    """Ratio that is the weight. token: the token's own. sequence: the product over the sequence,
    unbiased and of huge variance. geometric: its geometric mean, which does not grow with length.
    none: no weight."""
    bound: Bound = "truncate"
    """Treatment of weights outside `limits`. truncate: cut at the upper one. clip: cut at both.
    mask: the tokens are not trained on (IcePop)."""
    limits: tuple[float, float] = (0.0, 2.0)
    """Lower and upper limit of a weight; truncate has no lower one (0)."""
    normalize: bool | None = None
    """Divide the bounded weights by their mean over the kept tokens of the whole batch, so that the
    step size stays. None: on for sequence and geometric."""
    reject: tuple[Rule, ...] = ()
    """Rules that reject tokens or sequences."""
    denominator: Denominator = "original"
    """Divisor of a mean in the loss: all sampled tokens (rejecting shrinks the step), or the kept
    ones (rejecting leaves it)."""
    kl_penalty_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of a penalty on KL(sampler || trainer). 0 is off; 0.01 is usual."""
    kl_penalty_form: Literal["loss", "advantage"] = "loss"
    """loss: k3 is added to each token's loss, which pulls the trainer back to the sampler.
    advantage: mean(k1) - k1 is added to each token's advantage. It makes tokens rarer that the
    sampler finds likelier than the trainer does. This can lower the KL if both share weights; a
    fixed sampler does not follow, so the trainer moves away from it."""
    kl_penalty_clip: Annotated[float | None, ABOVE_0] = None
    """Largest |k1| that counts in the penalty. With kl_penalty_form=loss, tokens beyond pull like
    one at the bound."""

    PRESETS: ClassVar[Mapping[str, Callable[[], Correction]]]
    """Constructors by name, for `correction=NAME` on the command line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (low, high), level, anchor = self.limits, self.level, self.anchor
        limits, has_weights = f".limits={low:g},{high:g}", level != "none"
        is_beside_1 = low > 1 or (has_weights and high < 1)
        is_twice = has_weights and anchor == "rollout"
        is_unread = self.rescorings > 0 and self.is_idle
        is_idle_normalize = bool(self.normalize) and not has_weights
        is_cut_below = has_weights and self.bound == "truncate" and low != 0
        names = [rule.name for rule in self.rules]
        _refuse(
            "correction",
            (not 0 <= low < high, f"{limits}: expected 0 <= lower < upper. Swapped?"),
            (is_beside_1, f"{limits}: a weight of 1, of equal policies, must lie between them."),
            (is_cut_below, f"{limits}: bound=truncate has no lower limit; clip and mask have one."),
            (is_twice, f": level={level} with anchor=rollout counts trainer / rollout twice."),
            (is_idle_normalize, ".normalize=true: level=none has no weight. Set level=token."),
            (is_unread, f".rescorings are never read with anchor={anchor} and no level."),
            (len(set(names)) < len(names), f".reject: give one of {names} a label of its own."),
        )

    # -- derived from the settings ----------------------------------------------------------------

    @property
    def rules(self) -> tuple[Rule, ...]:
        """`reject`, at this level."""
        return tuple(rule.at(self.level) for rule in self.reject)

    @property
    def behaviour(self) -> str:
        """Column of the behaviour's log-probs."""
        return "averaged_logprobs" if self.rescorings else "rollout_logprobs"

    @property
    def is_normalized(self) -> bool:
        """True if weights are divided by their mean."""
        is_by_row = self.level in ("sequence", "geometric")
        return is_by_row if self.normalize is None else self.normalize

    @property
    def changes_tokens(self) -> bool:
        """True if any token gets a weight, a penalty or is rejected by a rule."""
        return self.level != "none" or bool(self.reject) or self.kl_penalty_coef > 0

    @property
    def changes_advantages(self) -> bool:
        """True if the KL penalty is in the advantages."""
        return self.kl_penalty_coef > 0 and self.kl_penalty_form == "advantage"

    @property
    def changes_loss(self) -> bool:
        """True if the KL penalty is a term of the loss."""
        return self.kl_penalty_coef > 0 and self.kl_penalty_form == "loss"

    @property
    def is_idle(self) -> bool:
        """True if the behaviour's log-probs are never read."""
        return self.anchor != "rollout" and not self.changes_tokens

    @property
    def needs_whole_batch(self) -> bool:
        """True if a token's weight or advantage depends on other rows, so that all rows must be
        seen before any is trained."""
        return self.is_normalized or self.changes_advantages or self.denominator == "kept"

    def needs_forward(self, *, num_updates: int) -> bool:
        """True if the trainer must run over the batch once before its first update."""
        return (
            self.anchor == "recomputed"
            or self.needs_whole_batch
            or (num_updates > 1 and self.changes_tokens)
        )

    def check_updates(self, num_updates: int) -> None:
        """Raises ConfigError if a batch cannot be trained in this many updates."""
        if self.anchor == "on_policy" and num_updates > 1:
            raise ConfigError(
                f"correction.anchor=on_policy with trainer.updates_per_batch={num_updates}: after "
                "the first update the policy differs from the sampler; a ratio fixed at 1 hides "
                "that. Use updates_per_batch=1, or anchor=recomputed."
            )

    # -- presets ----------------------------------------------------------------------------------

    @classmethod
    def bypass(cls) -> Correction:
        """The sampler's log-probs as the old ones: PPO's own ratio corrects the gap."""
        return cls(anchor="rollout")

    @classmethod
    def decoupled(cls, upper: float = 5.0) -> Correction:
        """Decoupled PPO (Hilton et al. 2022; AReaL): the clip is around the trainer's own policy
        before the update, the sampler is corrected for by a weight; three policies."""
        return cls(anchor="recomputed", level="token", limits=(0.0, upper))

    @classmethod
    def tis(cls, upper: float = 2.0, *, level: Level = "token") -> Correction:
        """Truncated importance sampling (Yao et al. 2025): weights cut at `upper`."""
        return cls(anchor="recomputed", level=level, limits=(0.0, upper))

    @classmethod
    def mis(
        cls,
        low: float | None = None,
        high: float | None = None,
        *,
        level: Level = "token",
        veto: float = 1e-4,
    ) -> Correction:
        """Masked importance sampling (slime; Liu et al. 2025): weights cut at `high` (2), tokens
        (or sequences, by the level) outside [low, high] rejected, a sequence with a ratio below
        `veto` rejected, and the weights normalised over the batch. Open bounds: `BY_LEVEL`."""
        ratio = Rule(stat="ratio", aggregation="level", low=low, high=high)
        return cls(
            anchor="recomputed",
            level=level,
            limits=(0.0, high or 2.0),
            normalize=True,
            reject=(ratio, Rule.veto_ratio(veto)),
        )

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> Correction:
        """IcePop (Ling team 2025): ratios as weights, and tokens outside [low, high] left out."""
        return cls(anchor="recomputed", level="token", bound="mask", limits=(low, high))

    @classmethod
    def geometric_mask(cls, low: float = 0.99, high: float = 1.01) -> Correction:
        """Rejects sequences whose geometric mean ratio lies outside [low, high] (Liu et al. 2025,
        part 3); kept ones have no weight."""
        return cls(
            anchor="recomputed",
            reject=(Rule(stat="ratio", aggregation="mean", low=low, high=high),),
        )

    @classmethod
    def on_policy(cls) -> Correction:
        """The ratio is exactly 1: noise between two forwards cannot clip anything."""
        return cls(anchor="on_policy")

    @classmethod
    def averaged(cls, n: int = 8) -> Correction:
        """The behaviour's probability averaged over n re-scorings by the engine that sampled
        (KwaiKAT 2025), as the old policy of the objective."""
        return cls(anchor="rollout", rescorings=n)


_PRESETS = "bypass decoupled tis mis icepop geometric_mask on_policy averaged"
Correction.PRESETS = {name: getattr(Correction, name) for name in _PRESETS.split()}
