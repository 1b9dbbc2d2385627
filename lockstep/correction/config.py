"""What is done about the gap between sampler and trainer. No torch.

A `Correction` says which policy the objective's ratio is taken to (`anchor`), what weighs each
token (`level`, `bound`, `limits`, `normalize`), what is left out (`reject`), and what the loss is
divided by. The literature's names are constructors: `Correction.tis()`, `Correction.mis()`, ...
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.config import check_choices
from lockstep.errors import ConfigError

Anchor = Literal["rollout", "recomputed", "on_policy"]
Behaviour = Literal["rollout", "averaged"]
Level = Literal["none", "token", "sequence", "geometric"]
Bound = Literal["truncate", "clip", "mask"]
Stat = Literal["ratio", "k1", "k2", "k3", "prob_diff", "old_prob"]
Aggregation = Literal["token", "sum", "mean", "max"]
Scope = Literal["token", "sequence"]
Denominator = Literal["original", "kept"]

IS_SIGNED: Mapping[Stat, bool] = {
    "ratio": True, "k1": True, "k2": False, "k3": False, "prob_diff": False, "old_prob": True,
}  # fmt: skip
"""Whether a low bound means anything: k2, k3 and the difference of probabilities are only ever too
large."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Tokens or sequences that are not trained on. Whatever lies outside [low, high] goes.

    Rules are evaluated on the original mask, each by itself, and what any of them names is
    rejected: their order does not matter.

    >>> Rule(stat="k3", high=0.1).name, Rule.veto_ratio(1e-4).name
    ('token_k3', 'veto_ratio')
    """

    stat: Stat
    """ratio: trainer / rollout. k1: rollout - trainer, nats; k2: half its square; k3: ratio - 1 -
    log ratio. prob_diff: |p_trainer - p_rollout|. old_prob: p_trainer, before the update."""
    aggregation: Aggregation = "token"
    """token: each token by itself. sum, mean: over the sequence, of the ratio in log space (their
    product and geometric mean). max: the sequence's worst token, on either side."""
    scope: Scope | None = None
    """What goes: the token, or its whole sequence. None is the token for aggregation=token and the
    sequence for the others; aggregation=token with scope=sequence is a veto, the same as max."""
    low: float | None = None
    high: float | None = None
    only_negative_advantage: bool = False
    """Reject only tokens whose advantage is below 0."""
    label: str = ""
    """The rule's name in metrics; empty makes one of the above."""

    def __post_init__(self) -> None:
        check_choices(self, "rule")
        where = f"correction rule {self.name}"
        if self.low is None and self.high is None:
            raise ConfigError(
                f"{where} has no bound: give low, high or both; it would reject nothing."
            )
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and math.isnan(bound):
                raise ConfigError(f"{where}: {name} is not a number.")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(
                f"{where}: low={self.low:g} must be below high={self.high:g}. The bounds are of "
                "what is kept. Swapped?"
            )
        if self.low is not None and not IS_SIGNED[self.stat]:
            raise ConfigError(
                f"{where}: low={self.low:g}, but {self.stat} is never below 0 and only ever too "
                "large. Give high alone; ratio and k1 take both."
            )
        if self.high is not None and self.high < 0 and not IS_SIGNED[self.stat]:
            raise ConfigError(
                f"{where}: high={self.high:g}, but {self.stat} is never below 0: it would reject "
                "every token."
            )
        given = [b for b in (self.low, self.high) if b is not None]
        if self.stat == "old_prob" and not all(0 <= b <= 1 for b in given):
            raise ConfigError(
                f"{where}: bounds of a probability are from 0 to 1, found low={self.low}, "
                f"high={self.high}. Logs?"
            )
        if self.stat == "ratio" and min(given) <= 0:
            raise ConfigError(
                f"{where}: bounds of a ratio are above 0, found low={self.low}, high={self.high}. "
                "The log of the ratio is minus k1."
            )
        if self.aggregation != "token" and self.scope == "token":
            raise ConfigError(
                f"{where}: aggregation={self.aggregation} speaks of a whole sequence, so it "
                "cannot reject single tokens. Use scope=sequence, or aggregation=token."
            )
        if self.stat == "old_prob" and self.aggregation in ("sum", "mean"):
            raise ConfigError(
                f"{where}: a {self.aggregation} of probabilities says nothing about the worst of "
                "them. Use aggregation=token or max."
            )

    @property
    def name(self) -> str:
        """In metrics: `correction/rejected_by/NAME`."""
        if self.label:
            return self.label
        scope = "sequence" if self.is_sequence else "token"
        parts = [scope, self.aggregation, self.stat]
        return "_".join(p for i, p in enumerate(parts) if i != 1 or p != "token")

    @property
    def is_sequence(self) -> bool:
        """Whether it rejects whole sequences."""
        return (self.scope or ("token" if self.aggregation == "token" else "sequence")) == (
            "sequence"
        )

    @property
    def needs_worst_token(self) -> bool:
        """Whether a sequence goes because of any one of its tokens."""
        return self.is_sequence and self.aggregation in ("token", "max")

    @property
    def rejects_impossible(self) -> bool:
        """Whether a sequence goes because of a token of probability 0 under the trainer, whose
        ratio is 0 and whose divergence is infinite: the token itself goes as not finite."""
        bound = self.low if self.stat in ("ratio", "old_prob") else self.high
        return self.needs_worst_token and self.stat != "prob_diff" and bound is not None

    @classmethod
    def veto_prob(cls, floor: float = 1e-6) -> Rule:
        """The whole sequence goes if any of its tokens has less probability than this under the
        trainer's policy before the update (the veto of the slime authors' text)."""
        return cls(stat="old_prob", scope="sequence", low=floor, label="veto_prob")

    @classmethod
    def veto_ratio(cls, floor: float = 1e-4) -> Rule:
        """The whole sequence goes if the ratio of any of its tokens is below this (the veto of
        slime's code, `rs_veto_threshold`)."""
        return cls(stat="ratio", scope="sequence", low=floor, label="veto_ratio")

    @classmethod
    def opsm(cls, delta: float = 1e-4) -> Rule:
        """Off-policy sequence masking: tokens of negative advantage go where the sequence's mean k1
        is above delta (DeepSeek-V3.2, section 3.1; slime's `--use-opsm`)."""
        return cls(
            stat="k1", aggregation="mean", high=delta, only_negative_advantage=True, label="opsm"
        )


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What is done about the gap between the policy that sampled and the one that is trained.

    Throughout, "old" is the trainer's policy before the first update of the batch, and "behaviour"
    the policy that sampled, as its log-probs say. The weight of a token is old / behaviour.
    """

    anchor: Anchor = "rollout"
    """Which policy the objective's ratio is taken to. rollout: the behaviour itself (bypass; the
    ratio corrects the gap too, one forward per step). recomputed: old, from a forward of its own
    (decoupled; the weight corrects the gap). on_policy: the policy in training itself, so that the
    ratio is exactly 1 and nothing can be clipped (one update per batch, equal policy version)."""
    behaviour: Behaviour = "rollout"
    """Which log-probs stand for the behaviour: those recorded while sampling, or the mean
    probability over re-scorings by the engine that sampled (`rescorings`)."""
    rescorings: int = 8
    """How often the engine re-scores what it sampled, with behaviour=averaged."""
    rescorings_in_flight: int = 64
    """Turns that are re-scored at the same time at most, beside what is still sampled."""
    average_sampling_pass: bool = False
    """Whether the log-prob recorded while sampling counts in the average too. It is one more, and a
    biased one: a token is drawn more often when noise favours it."""
    level: Level = "none"
    """What a weight is of. token: the token's own ratio. sequence: the product over the sequence,
    unbiased and of huge variance. geometric: its geometric mean, which does not grow with length.
    none: no weight."""
    bound: Bound = "truncate"
    """What happens outside `limits`. truncate: cut at the upper one. clip: at both. mask: not
    trained on (IcePop)."""
    limits: tuple[float, float] = (0.0, 2.0)
    """Lower and upper limit of a weight; truncate has no lower one (0)."""
    normalize: bool | None = None
    """Divide the weights by their mean over what is kept of the whole batch, after bounding, so
    that the step size stays. None: on for sequence and geometric."""
    reject: tuple[Rule, ...] = ()
    """What is left out."""
    denominator: Denominator = "original"
    """What a mean in the loss divides by: all sampled tokens (rejecting shrinks the step), or those
    that were kept (rejecting leaves it)."""
    kl_penalty_coef: float = 0.0
    """Adds coef * (mean(k1) - k1) to each token's advantage: pulls the trainer back to the sampler
    token by token, and moves nothing on average. 0 is off; 0.01 is usual."""
    kl_penalty_clip: float | None = None
    """Largest |k1| that counts in the penalty."""

    PRESETS: ClassVar[Mapping[str, Callable[[], Correction]]]
    """By name, for `correction=NAME` on the command line."""

    def __post_init__(self) -> None:
        low, high = self.limits
        where = "correction"
        check_choices(self, where)
        if not (0 <= low < high and high > 0):
            raise ConfigError(
                f"{where}.limits={low:g},{high:g}: expected 0 <= lower < upper. Swapped?"
            )
        if self.level != "none" and high < 1:
            raise ConfigError(
                f"{where}.limits={low:g},{high:g}: an upper limit below 1 would cut the weight of "
                "tokens on which sampler and trainer agree."
            )
        if low > 1:
            raise ConfigError(
                f"{where}.limits={low:g},{high:g}: a lower limit above 1 would touch the weight of "
                "tokens on which sampler and trainer agree."
            )
        if self.level != "none" and self.bound == "truncate" and low != 0:
            raise ConfigError(
                f"{where}.limits={low:g},{high:g} with bound=truncate: it cuts at the upper limit "
                "only, so the lower one must be 0. bound=clip cuts at both, bound=mask rejects."
            )
        if self.anchor == "rollout" and self.level != "none":
            raise ConfigError(
                f"{where}: anchor=rollout with level={self.level} counts the ratio trainer / "
                "rollout twice: the objective's ratio is taken to the sampler already, and the "
                "weight is the same ratio again. Choose anchor=recomputed or on_policy for weights,"
                " or level=none."
            )
        if self.normalize and self.level == "none":
            live = (
                " anchor=rollout is a live anchor: its ratio carries gradient inside the objective,"
                " and cannot be divided by a mean over the batch."
                if self.anchor == "rollout"
                else ""
            )
            raise ConfigError(
                f"{where}.normalize=true with level=none: there is no weight to normalise.{live}"
            )
        if self.behaviour == "averaged" and self.is_idle:
            raise ConfigError(
                f"{where}.behaviour=averaged with anchor={self.anchor} and nothing else: the "
                "averaged log-probs would be computed and never read. Use anchor=rollout, or a "
                "level."
            )
        for name in ("rescorings", "rescorings_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}.{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.kl_penalty_coef < math.inf:
            raise ConfigError(
                f"{where}.kl_penalty_coef={self.kl_penalty_coef} must be a finite number, at "
                "least 0; 0 is off."
            )
        if self.kl_penalty_clip is not None and not self.kl_penalty_clip > 0:
            raise ConfigError(
                f"{where}.kl_penalty_clip={self.kl_penalty_clip} must be above 0; none is off."
            )
        names = [rule.name for rule in self.reject]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"{where}.reject: rules need different names in the metrics, found {names}. Give "
                "one a label."
            )
        for text in self.warnings():
            warnings.warn(text, stacklevel=3)  # 2 is the dataclass's own __init__

    # -- what follows from the settings -----------------------------------------------------------

    @property
    def is_normalized(self) -> bool:
        """Whether weights are divided by their mean."""
        if self.normalize is None:
            return self.level in ("sequence", "geometric")
        return self.normalize

    @property
    def changes_tokens(self) -> bool:
        """Whether any token gets a weight, a penalty or is rejected by a rule."""
        return self.level != "none" or bool(self.reject) or self.kl_penalty_coef > 0

    @property
    def is_idle(self) -> bool:
        """Whether the behaviour's log-probs are not read at all."""
        return self.anchor != "rollout" and not self.changes_tokens

    @property
    def needs_whole_batch(self) -> bool:
        """Whether what happens to a token depends on other rows, so that all rows must be seen
        before any is trained."""
        return self.is_normalized or self.kl_penalty_coef > 0 or self.denominator == "kept"

    def needs_forward(self, *, num_updates: int) -> bool:
        """Whether the trainer must run over the batch once before its first update."""
        return (
            self.anchor == "recomputed"
            or self.needs_whole_batch
            or (num_updates > 1 and self.changes_tokens)
        )

    def warnings(self) -> list[str]:
        """What is allowed and seldom meant."""
        out: list[str] = []
        if self.level in ("sequence", "geometric") and self.normalize is False:
            out.append(
                f"correction.level={self.level} with normalize=false: the mean weight of a batch "
                "swings with its few sequences, and the step size with it. Leave normalize out, "
                "unless that is what you study."
            )
        return out

    def check_updates(self, num_updates: int) -> None:
        """Raises ConfigError if a batch cannot be trained in this many updates."""
        if self.anchor == "on_policy" and num_updates > 1:
            raise ConfigError(
                f"correction.anchor=on_policy with trainer.updates_per_batch={num_updates}: after "
                "the first update the policy is no longer the one that sampled, and a ratio fixed "
                "at 1 would hide it. Use updates_per_batch=1, or anchor=recomputed."
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
        cls, low: float = 0.5, high: float = 2.0, *, level: Level = "token", veto: float = 1e-4
    ) -> Correction:
        """Masked importance sampling (slime; Liu et al. 2025): weights cut at `high`, tokens (or
        sequences) outside [low, high] rejected, a sequence with a ratio below `veto` rejected, and
        the weights normalised over the batch."""
        aggregation: Aggregation = {"sequence": "sum", "geometric": "mean"}.get(level, "token")  # pyright: ignore[reportAssignmentType]
        return cls(
            anchor="recomputed",
            level=level,
            limits=(0.0, high),
            normalize=True,
            reject=(
                Rule(stat="ratio", aggregation=aggregation, low=low, high=high),
                Rule.veto_ratio(veto),
            ),
        )

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> Correction:
        """IcePop (Ling team 2025): weights as they are, and tokens outside [low, high] left out."""
        return cls(anchor="recomputed", level="token", bound="mask", limits=(low, high))

    @classmethod
    def geometric_mask(cls, low: float = 0.99, high: float = 1.01) -> Correction:
        """Whole sequences go whose geometric mean ratio lies outside [low, high] (Liu et al. 2025,
        part 3); what is kept is not weighed."""
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
        return cls(anchor="rollout", behaviour="averaged", rescorings=n)


Correction.PRESETS = {
    "bypass": Correction.bypass,
    "decoupled": Correction.decoupled,
    "tis": Correction.tis,
    "mis": Correction.mis,
    "icepop": Correction.icepop,
    "geometric_mask": Correction.geometric_mask,
    "on_policy": Correction.on_policy,
    "averaged": Correction.averaged,
}
