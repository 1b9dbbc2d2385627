"""Which side is noisy, and which is only different, without a model.

# N tokens  M tokens that occur again after the same ids  G groups of these
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.contexts import Contexts, contexts_of
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.checks.values.precision import MIN_SHARE_NOISY, Marks
from lockstep.observe.alarms import DENSE_BAND, MOE_BAND
from lockstep.types import FORCED_LOGPROB, Int64Array

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
    """Sums over unforced tokens that occur again after the same ids, and variances made of them.

    `add` adds those of another chunk or step. Variances are of one log-prob, in nats^2. Those of
    the trainer and of the gap are NaN if there are no trainer's log-probs.

    >>> both = Noise(tokens=4, groups=2, within_rollout=2e-4, within_trainer=0.0, square_gap=4e-4)
    >>> both.freedom, both.var_rollout, both.mean_square_gap
    (2, 0.0001, 0.0001)
    """

    tokens: int = 0
    groups: int = 0
    """Groups of equal tokens after equal ids."""
    within_rollout: float = 0.0
    """Sum of squares about each group's mean."""
    within_trainer: float = 0.0
    varying_rollout: int = 0
    """Groups that vary by more than FLOAT32_STD."""
    varying_trainer: int = 0
    typical_rollout: float = 0.0
    """`within_rollout` of the TYPICAL share of groups that vary least."""
    typical_trainer: float = 0.0
    typical_freedom: int = 0
    square_gap: float = 0.0
    """Sum of d^2."""
    square_bias: float = 0.0
    """Sum, over tokens, of the squared mean d of their group, less what noise adds to it."""

    def add(self, other: Noise) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the variances."""
        return self.tokens - self.groups

    @property
    def var_rollout(self) -> float:
        return self.within_rollout / max(self.freedom, 1)

    @property
    def var_trainer(self) -> float:
        return self.within_trainer / max(self.freedom, 1)

    def typical_of(self, within: float) -> float:
        """Variance of the groups that vary least. within: a `typical_...` sum."""
        return within / max(self.typical_freedom, 1)

    @property
    def mean_square_gap(self) -> float:
        """Mean of d^2 over these tokens: var_rollout + var_trainer + mean_square_bias, where the
        noises of the two sides are independent."""
        return self.square_gap / max(self.tokens, 1)

    @property
    def mean_square_bias(self) -> float:
        """`mean_square_gap` without noise; an unbiased estimate, so it may be below 0."""
        return self.square_bias / max(self.tokens, 1)

    def figures(self) -> dict[str, float]:
        return {
            "repeated_tokens": float(self.tokens),
            "different_tokens": float(self.groups),
            "var_rollout": self.var_rollout,
            "var_trainer": self.var_trainer,
            "mean_square_gap": self.mean_square_gap,
            "mean_square_bias": self.mean_square_bias,
        }


def noise_of(rows: Rows) -> Noise:
    """The noise of one chunk; must not be changed. Needs `rollout_logprobs`; forced tokens are left
    out, for they cannot vary."""
    return rows.once("noise", lambda: _noise_of(rows))


def _noise_of(rows: Rows) -> Noise:
    contexts = contexts_of(rows)
    values = rows.rollout[contexts.repeated].astype(np.float64)
    unforced = _mean(contexts, values) < FORCED_LOGPROB
    size = contexts.size[unforced]
    out = Noise(tokens=int(size.sum()), groups=len(size))
    within = _within(contexts, values)[unforced]
    out.within_rollout = float(within.sum())
    out.varying_rollout = int((within > FLOAT32_STD**2 * (size - 1)).sum())
    out.typical_rollout, out.typical_freedom = _typical(within, size)
    if rows.trainer_logprobs is None:
        out.within_trainer = out.square_gap = out.square_bias = np.nan
        return out
    trainer = rows.trainer_logprobs[contexts.repeated].astype(np.float64)
    within = _within(contexts, trainer)[unforced]
    out.within_trainer = float(within.sum())
    out.varying_trainer = int((within > FLOAT32_STD**2 * (size - 1)).sum())
    out.typical_trainer, _ = _typical(within, size)
    d = trainer - values
    square = np.bincount(contexts.group, d * d, minlength=len(contexts.size))
    out.square_gap = float(square[unforced].sum())
    of_noise = _within(contexts, d)[unforced] / (size - 1)
    out.square_bias = float((size * _mean(contexts, d)[unforced] ** 2 - of_noise).sum())
    return out


def _num_unforced(rows: Rows) -> int:
    with np.errstate(invalid="ignore"):
        return int(np.count_nonzero(rows.loss_mask & (rows.rollout < FORCED_LOGPROB)))


def _mean(contexts: Contexts, values: Float64Array) -> Float64Array:
    """[G] mean of each group. values: [M]."""
    return np.bincount(contexts.group, values, minlength=len(contexts.size)) / contexts.size


def _within(contexts: Contexts, values: Float64Array) -> Float64Array:
    """[G] sum of squares about the mean of each group. values: [M]."""
    apart = values - _mean(contexts, values)[contexts.group]
    total = np.bincount(contexts.group, apart * apart, minlength=len(contexts.size))
    return total.astype(np.float64)


def _typical(within: Float64Array, size: Int64Array) -> tuple[float, int]:
    """(sum of squares, degrees of freedom) of the TYPICAL share of groups that vary least."""
    order = np.argsort(within / (size - 1), kind="stable")[: int(np.ceil(TYPICAL * len(size)))]
    return float(within[order].sum()), int((size[order] - 1).sum())


class _Repeated(Check):
    """Base: the noise of one side, by tokens that occur again after the same ids."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.who = self.name.partition("/")[2]
        self.noise = Noise()
        self._marks = Marks()
        self._square = 0.0
        """Sum of d^2 over all compared tokens."""

    def look(self, rows: Rows) -> None:
        self.noise.add(noise_of(rows))
        side = rows.rollout if self.who == "sampler" else rows.trainer
        d = rows.gap[rows.compared]
        self._square += float(d @ d)
        self.counts["unforced"] += rows.once("unforced", lambda: _num_unforced(rows))
        self._marks.add(rows, side, temperature=self.setting.temperature)
        contexts = contexts_of(rows)
        values = side[contexts.repeated].astype(np.float64)
        spread = np.sqrt(_within(contexts, values) / (contexts.size - 1))
        begin = np.cumsum(contexts.size) - contexts.size
        largest = np.flatnonzero(spread > FLOAT32_STD)
        if len(largest) > NUM_SHOWN:
            least = np.partition(spread[largest], -NUM_SHOWN)[-NUM_SHOWN]
            largest = largest[spread[largest] >= least]
        for g in largest[np.argsort(-spread[largest], kind="stable")][:NUM_SHOWN].tolist():
            places = contexts.repeated[begin[g] : begin[g] + contexts.size[g]]
            told = ", ".join(f"{v:.4f}" for v in side[places[:NUM_SHOWN]].tolist())
            more = ", ..." if len(places) > NUM_SHOWN else ""
            note = f"the same token after the same ids, {len(places)} times: {told}{more}"
            self.show(float(spread[g]), rows, int(places[0]), int(places[0]) + 1, note)

    def conclude(self) -> Finding:
        noise, figures = self.noise, self.noise.figures()
        if noise.freedom < MIN_FREEDOM:
            return self.not_checkable("several rows of one prompt in one step")
        is_sampler = self.who == "sampler"
        varying = noise.varying_rollout if is_sampler else noise.varying_trainer
        typical = noise.typical_of(noise.typical_rollout if is_sampler else noise.typical_trainer)
        variance = self._variance
        told = (
            f"{noise.tokens} tokens occur more than once after the same ids: the {self.who}'s "
            f"log-prob of one varies by {variance**0.5:.1e} nats"
        )
        if not variance > FLOAT32_STD**2 or varying < MIN_VARYING * noise.groups:
            return self.consistent(told, **figures)
        share = 1.0  # of an unknown gap
        if noise.mean_square_gap > 0:
            share = min(variance / noise.mean_square_gap, 1.0)
            told += (
                f", {share:.0%} of the mean square gap there; a bias that is the same each time "
                f"makes {max(noise.mean_square_bias, 0.0) / noise.mean_square_gap:.0%}"
            )
        is_small = share < MIN_SHARE
        if noise.mean_square_gap > 0 and typical < MIN_SHARE * noise.mean_square_gap:
            is_small = True
            told += (
                f". But {TYPICAL:.0%} of them vary by only {typical**0.5:.1e} nats: the gap is not "
                "made by noise"
            )
        if self._square > 0 and variance * self.counts["unforced"] < MIN_SHARE * self._square:
            is_small = True
            told += ". As much noise on every token is a small part of the whole gap"
        if bits := self._marks.name(min_share=MIN_SHARE_NOISY):
            is_small = True
            told += f". Its logits are rounded to {bits}, which makes as much"
        elif self._is_between_engines and variance / 2 < self._normal_k2:
            is_small = True
            told += ". That is normal between two engines"
        return self.found("information" if is_small else "differs", told, **figures, share=share)

    @property
    def _variance(self) -> float:
        return self.noise.var_rollout if self.who == "sampler" else self.noise.var_trainer

    @property
    def _is_between_engines(self) -> bool:
        """True if some noise is normal: between two engines, not in one process with one set of
        ops. A dump that does not name its trainer is not Lockstep's."""
        return self.setting.is_one_process is False or self.setting.trainer != "lockstep"

    @property
    def _normal_k2(self) -> float:
        return (MOE_BAND if self.setting.is_moe else DENSE_BAND)[1]

    def repair(self, rows: Rows) -> Rows:
        """Noise is everywhere: the gap of every token that is within its size is explained."""
        if rows.trainer_logprobs is None or rows.rollout_logprobs is None:
            return rows
        return rows.agreeing(np.abs(rows.gap) <= NUM_STDS * self._variance**0.5)


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
