"""Which side is noisy, and which is only different, without a model.

# N tokens  M tokens that occur again after the same ids  G groups of these
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows, largest, once_per_chunk
from lockstep.doctor.checks.values.precision import MIN_SHARE_NOISY, Marks, contexts_of
from lockstep.observe.alarms import DENSE_BAND, MOE_BAND
from lockstep.types import FORCED_LOGPROB

FLOAT32_STD = 1e-4
"""Standard deviation in nats up to which a side is deterministic: in float32 another batch moves a
log-prob by 1e-6."""
MIN_FREEDOM = 16
"""Degrees of freedom that a variance needs, to be known to a third of its size."""
MIN_VARYING = 0.5
"""Share of the groups that must vary. Noise of a computation is on all of them; a defect of some
rows makes some of them vary."""
MIN_SHARE = 0.05
"""Share of the gap on repeated tokens that noise must make to be its cause."""
TYPICAL = 0.9
"""Share of the groups, those that vary least, whose noise must be as large as the gap: a few groups
that vary by nats belong to a defect, and say nothing about the noise of the others."""
NUM_STDS = 8.0
"""Standard deviations of the mean token's noise that a token's gap may have: the noise of unsure
tokens is a few times the mean."""
NUM_SHOWN = 4
"""Groups of one chunk that are offered as evidence, and log-probs that are shown of each."""


@dataclass(slots=True)
class Noise:
    """Sums over one side's unforced tokens that occur again after the same ids.

    `add` adds those of another chunk or step. Variances are of one log-prob, in nats^2.

    >>> both = Noise(tokens=4, groups=2, within=2e-4, square_gap=4e-4)
    >>> both.freedom, both.variance, both.mean_square_gap
    (2, 0.0001, 0.0001)
    """

    tokens: int = 0
    groups: int = 0
    """Groups of equal tokens after equal ids."""
    within: float = 0.0
    """Sum of squares about each group's mean."""
    varying: int = 0
    """Groups that vary by more than FLOAT32_STD."""
    typical: float = 0.0
    """`within` of the TYPICAL share of groups that vary least."""
    typical_freedom: int = 0
    square_gap: float = 0.0
    """Sum of d^2; NaN without the trainer's log-probs."""

    def add(self, other: Noise) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the variance."""
        return self.tokens - self.groups

    @property
    def variance(self) -> float:
        return self.within / max(self.freedom, 1)

    @property
    def typical_variance(self) -> float:
        """Variance of the groups that vary least."""
        return self.typical / max(self.typical_freedom, 1)

    @property
    def mean_square_gap(self) -> float:
        """Mean of d^2 over these tokens."""
        return self.square_gap / max(self.tokens, 1)


@once_per_chunk
def noise_of(rows: Rows, who: str) -> Noise:
    """The noise of one side, sampler or trainer, in one chunk, found once. Needs
    `rollout_logprobs`; forced tokens are left out, for they cannot vary."""
    contexts = contexts_of(rows)
    rollout = rows.rollout[contexts.repeated].astype(np.float64)
    unforced = contexts.means(rollout) < FORCED_LOGPROB
    size = contexts.size[unforced]
    within = _within(rows, who)[unforced]
    num_least = int(np.ceil(TYPICAL * len(size)))
    least = np.argpartition(within / (size - 1), num_least - 1)[:num_least] if num_least else []
    out = Noise(
        tokens=int(size.sum()),
        groups=len(size),
        within=float(within.sum()),
        varying=int((within > FLOAT32_STD**2 * (size - 1)).sum()),
        typical=float(within[least].sum()),
        typical_freedom=int((size[least] - 1).sum()),
    )
    if rows.trainer_logprobs is None:
        out.square_gap = np.nan
        return out
    d = rows.trainer_logprobs[contexts.repeated].astype(np.float64) - rollout
    square = np.bincount(contexts.group, d * d, minlength=len(contexts.size))
    out.square_gap = float(square[unforced].sum())
    return out


@once_per_chunk
def _within(rows: Rows, who: str) -> Float64Array:
    """[G] sum of squares of one side's log-probs about the mean of each group."""
    contexts = contexts_of(rows)
    values = rows.side(who)[contexts.repeated].astype(np.float64)
    apart = values - contexts.means(values)[contexts.group]
    total = np.bincount(contexts.group, apart * apart, minlength=len(contexts.size))
    return total.astype(np.float64)


class _Repeated(Check):
    """Base: the noise of one side, by tokens that occur again after the same ids."""

    basis = "fit"

    def begin(self) -> None:
        self.who = self.name.partition("/")[2]
        self._noise = Noise()
        self._marks = Marks()
        self._square = 0.0
        """Sum of d^2 over all compared tokens."""

    def look(self, rows: Rows) -> None:
        side = rows.side(self.who)
        self._noise.add(noise_of(rows, self.who))
        self._marks.add(rows, side, temperature=self.setting.temperature)
        d = rows.gap[rows.compared]
        self._square += float(d @ d)
        with np.errstate(invalid="ignore"):
            self.count(unforced=rows.loss_mask & (rows.rollout < FORCED_LOGPROB))
        contexts = contexts_of(rows)
        spread = np.sqrt(_within(rows, self.who) / (contexts.size - 1))
        begin = np.cumsum(contexts.size) - contexts.size
        varying = np.flatnonzero(spread > FLOAT32_STD)
        for g in varying[largest(spread[varying], NUM_SHOWN)].tolist():
            places = contexts.repeated[begin[g] : begin[g] + contexts.size[g]]
            told = ", ".join(f"{v:.4f}" for v in side[places[:NUM_SHOWN]].tolist())
            more = ", ..." if len(places) > NUM_SHOWN else ""
            note = f"the same token after the same ids, {len(places)} times: {told}{more}"
            self.show(float(spread[g]), rows, int(places[0]), int(places[0]) + 1, note)

    def conclude(self) -> Finding:
        noise, variance = self._noise, self._noise.variance
        if noise.freedom < MIN_FREEDOM:
            return self.not_checkable("several rows of one prompt in one step")
        gap = noise.mean_square_gap
        share = min(variance / gap, 1.0) if gap > 0 else 1.0  # of an unknown gap
        figures = {
            "repeated_tokens": float(noise.tokens),
            "different_tokens": float(noise.groups),
            "variance": variance,
            "mean_square_gap": gap,
            "share": share,
        }
        told = (
            f"{noise.tokens} tokens occur more than once after the same ids: the {self.who}'s "
            f"log-prob of one varies by {variance**0.5:.1e} nats"
        )
        if not variance > FLOAT32_STD**2 or noise.varying < MIN_VARYING * noise.groups:
            return self.consistent(told, **figures)
        if gap > 0:
            told += f", {share:.0%} of the mean square gap there"
        reasons: list[str] = []
        if gap > 0 and noise.typical_variance < MIN_SHARE * gap:
            typical = f"{TYPICAL:.0%} of them vary by only {noise.typical_variance**0.5:.1e} nats"
            reasons.append(f". But {typical}: the gap is not made by noise")
        if self._square > 0 and variance * self.counts["unforced"] < MIN_SHARE * self._square:
            reasons.append(". As much noise on every token is a small part of the whole gap")
        if bits := self._marks.name(min_share=MIN_SHARE_NOISY):
            reasons.append(f". Its logits are rounded to {bits}, which makes as much")
        # A dump that does not name its trainer is not Lockstep's: two engines made it.
        elif self.setting.is_one_process is False or self.setting.trainer != "lockstep":
            _, normal_k2 = MOE_BAND if self.setting.is_moe else DENSE_BAND
            if variance / 2 < normal_k2:
                reasons.append(". That is normal between two engines")
        is_small = share < MIN_SHARE or bool(reasons)
        told += "".join(reasons)
        return self.found("information" if is_small else "differs", told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """Noise is everywhere: the gap of every token that is within its size is explained."""
        if rows.trainer_logprobs is None or rows.rollout_logprobs is None:
            return rows
        return rows.agreeing(np.abs(rows.gap) <= NUM_STDS * self._noise.variance**0.5)


class NoisySampler(_Repeated):
    """The sampler's log-prob of one token after one prefix, each time that it was drawn."""

    name = "noise/sampler"
    claim = "the sampler gives the same token after the same ids the same log-prob"
    cause = "kernel_noise"
    needs = ("rollout_logprobs",)


class NoisyTrainer(_Repeated):
    """The trainer's log-prob of one token after one prefix, in each row that has it."""

    name = "noise/trainer"
    claim = "the trainer gives the same token after the same ids the same log-prob"
    cause = "dropout"
    needs = ("rollout_logprobs", "trainer_logprobs")
