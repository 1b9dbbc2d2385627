"""Which side is noisy, and which is only different, without any model.

# N tokens  M tokens that stand more than once after the same ids  G of these that differ
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.contexts import Contexts
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.checks.values.precision import MIN_SHARE_NOISY, Marks
from lockstep.observe.alarms import DENSE_BAND, MOE_BAND
from lockstep.types import FORCED_LOGPROB, Float32Array, Int64Array

FLOAT32_STD = 1e-4
"""Standard deviation in nats up to which a side counts as computing the same thing each time: in
float32 another batch moves a log-prob by 1e-6, and what is exact but for a few tokens by less."""
MIN_FREEDOM = 16
"""Unforced tokens beyond the first of their kind that a variance is taken from: it is then known to
a third of its size."""
MIN_VARYING = 0.5
"""Share of the repeated tokens that must vary. Noise of a computation is on all of them; a defect
of some rows makes some of them vary."""
MIN_SHARE = 0.05
"""Share of the gap on repeated tokens that noise must make to be a cause of it."""
TYPICAL = 0.9
"""Share of the repeated tokens, those that vary least, that must be as noisy as the gap is large:
a few that vary by nats are those of a defect, and say nothing of the others' noise."""
NUM_STDS = 8.0
"""Standard deviations of the mean token's noise that a token's gap may have: unsure tokens have a
few times the mean's."""


@dataclass(slots=True)
class Noise:
    """Sums over unforced tokens that stand more than once after the same ids, and what follows.

    Sums of several chunks, or steps, are added up with `add`. Variances are in nats^2, of one
    log-prob. The trainer's, and all of the gap, are NaN where it has none.

    >>> both = Noise(tokens=4, groups=2, within_rollout=2e-4, within_trainer=0.0, square_gap=4e-4)
    >>> both.freedom, both.var_rollout, both.mean_square_gap
    (2, 0.0001, 0.0001)
    """

    tokens: int = 0
    groups: int = 0
    """Different ones of these tokens."""
    within_rollout: float = 0.0
    """Sum of squares about each group's mean."""
    within_trainer: float = 0.0
    varying_rollout: int = 0
    """Groups that vary by more than FLOAT32_STD."""
    varying_trainer: int = 0
    typical_rollout: float = 0.0
    """As `within_rollout`, of the TYPICAL share of the groups that vary least."""
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
        """Variance of the groups that vary least. within: `typical_rollout`, `typical_trainer`."""
        return within / max(self.typical_freedom, 1)

    @property
    def mean_square_gap(self) -> float:
        """Mean of d^2 over these tokens: var_rollout + var_trainer + mean_square_bias, where the
        noises of the two sides are independent."""
        return self.square_gap / max(self.tokens, 1)

    @property
    def mean_square_bias(self) -> float:
        """What `mean_square_gap` would be without noise; unbiased, so it may fall below 0."""
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
    """The noise of one chunk, not to be changed. Needs `rollout_logprobs`; tokens that are as good
    as forced are left out: there is nothing to vary."""
    return rows.once("noise", lambda: _noise_of(rows))


def _noise_of(rows: Rows) -> Noise:
    contexts, rollout = rows.contexts, rows.rollout_logprobs
    assert rollout is not None, "the caller's check of needs"
    values = rollout[contexts.repeated].astype(np.float64)
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
    assert rows.rollout_logprobs is not None, "asked only where there are some"
    with np.errstate(invalid="ignore"):
        return int(np.count_nonzero(rows.loss_mask & (rows.rollout_logprobs < FORCED_LOGPROB)))


def _mean(contexts: Contexts, values: Float64Array) -> Float64Array:
    """[G] of each group. values: [M]."""
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
    """Base: the noise of one side."""

    who = ""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.noise = Noise()
        self._marks = Marks()
        self._unforced, self._square = 0, 0.0
        """Compared tokens that are not as good as forced, and the sum of d^2 of all."""

    def look(self, rows: Rows) -> None:
        self.noise.add(noise_of(rows))
        side = self._side(rows)
        d = rows.gap[rows.compared]
        self._square += float(d @ d)
        if rows.rollout_logprobs is not None:
            self._unforced += rows.once("unforced", lambda: _num_unforced(rows))
        self._marks.add(rows, side, temperature=self.setting.temperature)
        contexts = rows.contexts
        values = side[contexts.repeated].astype(np.float64)
        spread = np.sqrt(_within(contexts, values) / (contexts.size - 1))
        begin = np.cumsum(contexts.size) - contexts.size
        largest = np.flatnonzero(spread > FLOAT32_STD)
        if len(largest) > 4:
            largest = largest[spread[largest] >= np.partition(spread[largest], -4)[-4]]
        for g in largest[np.argsort(-spread[largest], kind="stable")][:4].tolist():
            places = contexts.repeated[begin[g] : begin[g] + contexts.size[g]]
            row, at = rows.where(int(places[0]))
            told = ", ".join(f"{v:.4f}" for v in side[places[:4]].tolist())
            self.show(
                float(spread[g]),
                Evidence(
                    row=row,
                    begin=at,
                    end=at + 1,
                    note=f"the same token after the same ids, {len(places)} times: {told}"
                    f"{', ...' if len(places) > 4 else ''}",
                ),
            )

    def _side(self, rows: Rows) -> Float32Array:
        raise NotImplementedError

    def _judge(self, variance: float, varying: int, typical: float) -> Finding:
        noise, figures = self.noise, self.noise.figures()
        if noise.freedom < MIN_FREEDOM:
            return self.not_checkable(("several rows of one prompt in one step",))
        told = (
            f"{noise.tokens} tokens stand more than once after the same ids: the {self.who}'s "
            f"log-prob of one varies by {variance**0.5:.1e} nats"
        )
        if not variance > FLOAT32_STD**2 or varying < MIN_VARYING * noise.groups:
            return self.found("consistent", told, **figures)
        share = 1.0  # of a gap that is not known
        if noise.mean_square_gap > 0:
            share = min(variance / noise.mean_square_gap, 1.0)
            told += (
                f", {share:.0%} of the mean square gap there; a bias that is the same each time "
                f"makes {max(noise.mean_square_bias, 0.0) / noise.mean_square_gap:.0%}"
            )
        is_small = share < MIN_SHARE
        if noise.mean_square_gap > 0 and noise.typical_of(typical) < (
            MIN_SHARE * noise.mean_square_gap
        ):
            is_small = True
            told += (
                f". But {TYPICAL:.0%} of them vary by "
                f"{noise.typical_of(typical) ** 0.5:.1e} nats only: it is not noise that makes the "
                "gap"
            )
        if self._square > 0 and variance * self._unforced < MIN_SHARE * self._square:
            is_small = True
            told += ". As much noise on every token is a small part of the gap of all of them"
        if bits := self._marks.name(min_share=MIN_SHARE_NOISY):
            is_small = True
            told += f". Its logits are rounded to {bits}, which makes as much"
        elif self._is_between_engines and variance / 2 < self._normal_k2:
            is_small = True
            told += ". That is normal between two engines"
        return self.found("information" if is_small else "differs", told, **figures, share=share)

    @property
    def _is_between_engines(self) -> bool:
        """Whether some noise is the weather: two engines, not one process over one set of ops. A
        dump that does not say who wrote it is not Lockstep's."""
        return self.setting.is_one_process is False or self.setting.trainer != "lockstep"

    @property
    def _normal_k2(self) -> float:
        return (MOE_BAND if self.setting.is_moe else DENSE_BAND)[1]

    def repair(self, rows: Rows) -> Rows:
        """Noise has no place of its own: what is left of the gap is within it, up to the tokens
        that it is too large for."""
        if rows.trainer_logprobs is None or rows.rollout_logprobs is None:
            return rows
        bound = NUM_STDS * self._std()
        explained = np.abs(rows.gap) <= bound  # False of NaN
        return rows.with_(
            rollout_logprobs=np.where(explained, rows.trainer_logprobs, rows.rollout_logprobs)
        )

    def _std(self) -> float:
        raise NotImplementedError


class NoisySampler(_Repeated):
    """The sampler's log-prob of one token after one prefix, each time that it was drawn."""

    name = "noise/sampler"
    claim = "the sampler gives the same token after the same ids the same log-prob"
    cause = "kernel_noise"
    needs = ("rollout_logprobs",)
    who = "sampler"

    def _side(self, rows: Rows) -> Float32Array:
        assert rows.rollout_logprobs is not None, "the check's needs"
        return rows.rollout_logprobs

    def conclude(self) -> Finding:
        return self._judge(
            self.noise.var_rollout, self.noise.varying_rollout, self.noise.typical_rollout
        )

    def _std(self) -> float:
        return self.noise.var_rollout**0.5


class NoisyTrainer(_Repeated):
    """The trainer's log-prob of one token after one prefix, in each row that has it."""

    name = "noise/trainer"
    claim = "the trainer gives the same token after the same ids the same log-prob"
    cause = "dropout"
    needs = ("rollout_logprobs", "trainer_logprobs")
    who = "trainer"

    def _side(self, rows: Rows) -> Float32Array:
        assert rows.trainer_logprobs is not None, "the check's needs"
        return rows.trainer_logprobs

    def conclude(self) -> Finding:
        return self._judge(
            self.noise.var_trainer, self.noise.varying_trainer, self.noise.typical_trainer
        )

    def _std(self) -> float:
        return self.noise.var_trainer**0.5
