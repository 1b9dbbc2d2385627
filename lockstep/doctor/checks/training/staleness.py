"""Does the gap come with the age of tokens, or with the update?

# N tokens  R rows
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from lockstep.doctor.checks.attribution import Gap, add_by
from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows, largest
from lockstep.types import Int64Array

MIN_K2 = 1e-8
"""Below it the two sides agree to float32, at any age."""
MIN_RATIO = 3.0
"""Ratio of the gap at age > 0 to the gap at age 0; above this, age is the cause."""
MAX_AGE = 1 << 20
"""Larger versions are no count of updates."""

MIN_ROWS = 4
"""Rows that are needed with an advantage of each sign."""
MIN_ERRORS = 5.0
"""Standard errors, over rows, by which the gap must follow the sign of the advantage."""
MIN_ERRORS_OF_EACH = 1.5
"""The same for either sign alone: a cause that makes unlikely rows unlikelier moves one sign."""
MIN_MOVED = 1e-6
"""Mean size of the gap. Below it are float32's roundings: of a policy that is nearly sure, they
follow its advantages by chance."""
MIN_DIRECTED = 0.35
"""Sum of d * sign(advantage) over the sum of |d|: an update of one step leaves 0.5 and more on our
models; other weights, noise and processing up to 0.3."""

NUM_SHOWN = 4
"""Tokens of one chunk that are offered as evidence."""


class Stale(Check):
    """The gap by age: the trainer's version minus the version that sampled the token."""

    name = "training/staleness"
    basis = "shown"
    claim = "tokens were sampled by the weights that they are trained on"
    cause = "stale"
    needs = ("rollout_logprobs", "trainer_logprobs", "policy_version", "trainer_version")

    def begin(self) -> None:
        self._by_age: dict[int, Gap] = defaultdict(Gap)

    def look(self, rows: Rows) -> None:
        gap, compared = rows.gap, rows.compared
        age = ages(rows)[compared]
        add_by(self._by_age, age, gap[compared])
        old = compared[(age > (self.setting.max_staleness or 0)) | (age < 0)]
        for at in old[largest(np.abs(gap[old]), NUM_SHOWN)].tolist():
            assert rows.policy_version is not None and rows.trainer_version is not None, "needs"
            trained = int(rows.trainer_version[rows.row_of[at]])
            note = f"sampled by version {rows.policy_version[at]}, trained on by version {trained}"
            self.show(abs(float(gap[at])), rows, at, at + 1, note)

    def conclude(self) -> Finding:
        young, old, future = Gap(), Gap(), Gap()
        over = 0
        for age, gap in self._by_age.items():
            (young if age == 0 else old if age > 0 else future).add(gap)
            over += gap.tokens * (age > (self.setting.max_staleness or 0))
        k2_young, k2_old = young.means()["k2"], old.means()["k2"]
        max_age = max(self._by_age, default=0)
        self.count(tokens_age_0=young.tokens, tokens_older=old.tokens, max_age=max_age)
        figures = {"k2_age_0": k2_young, "k2_older": k2_old}
        if future.tokens:
            told = f"{future.tokens} tokens are of newer weights than those that train on them"
            return self.differs(told, **figures)
        if not old.tokens:
            return self.consistent(f"all of {young.tokens} tokens are of age 0", **figures)
        told = (
            f"{old.tokens} of {old.tokens + young.tokens} tokens are up to {max_age} updates old; "
            f"their k2 is {k2_old:.1e}"
        )
        if young.tokens:
            told += f", that of age 0 {k2_young:.1e}"
        is_cause = k2_old > max(MIN_K2, MIN_RATIO * k2_young)
        if is_cause and not over:
            told += "; the run's settings allow that age"
        return self.found("differs" if is_cause and over else "information", told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """Older tokens as the trainer has them: their gap is the age's."""
        return rows.agreeing(ages(rows) != 0)


def ages(rows: Rows) -> Int64Array:
    """[N] updates from the weights that sampled a token to those that it is trained on; 0 where not
    sampled."""
    assert rows.policy_version is not None and rows.trainer_version is not None, "the check's needs"
    age = rows.trainer_version[rows.row_of] - rows.policy_version
    age[rows.policy_version < 0] = 0
    return np.clip(age, -1, MAX_AGE)


class AfterUpdate(Check):
    """Compares the sign of the gap with the sign of the advantage."""

    name = "training/after_update"
    basis = "fit"
    claim = "the trainer's log-probs are those before the update on the rows"
    cause = "after_update"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def begin(self) -> None:
        self._rows = {1: np.zeros(3), -1: np.zeros(3)}
        """Sign of the advantage -> rows, and the sum and sum of squares of their mean d."""
        self._directed = self._whole = 0.0
        self._num_tokens = 0

    def look(self, rows: Rows) -> None:
        sign = signs(rows)
        if sign is None:
            return
        at = rows.compared[sign[rows.compared] != 0]
        sign, d = sign[at], rows.gap[at]
        self._directed += float(d @ sign)
        self._whole += float(np.abs(d).sum())
        self._num_tokens += len(d)
        for s, sums in self._rows.items():
            of_sign = sign == s
            num = rows.row_sums(at[of_sign])
            mean = rows.row_sums(at[of_sign], d[of_sign])[num > 0] / num[num > 0]
            sums += [len(mean), mean.sum(), mean @ mean]
        worst = np.argpartition(-d * sign, min(NUM_SHOWN, len(d) - 1)) if len(d) else at[:0]
        for i in worst[:NUM_SHOWN].tolist():
            where = "above" if sign[i] > 0 else "below"
            note = f"advantage {where} 0, trainer - sampler {d[i]:+.4f}"
            self.show(float(d[i] * sign[i]), rows, int(at[i]), int(at[i]) + 1, note)

    def conclude(self) -> Finding:
        num, total, square = np.array([self._rows[1], self._rows[-1]]).T
        if num.min() < MIN_ROWS:
            return self.not_checkable("advantages, or rewards by group, of both signs")
        mean = total / num
        error = np.sqrt(np.maximum(square / num - mean**2, 0.0) / np.maximum(num - 1, 1))
        apart = float((mean[0] - mean[1]) / max(np.hypot(*error), 1e-300))
        directed = self._directed / max(self._whole, 1e-300)
        told = (
            f"trainer - sampler is {mean[0]:+.1e} where the advantage is above 0 and "
            f"{mean[1]:+.1e} where it is below, {apart:.1f} standard errors apart; "
            f"{directed:.0%} of the gap has the sign of the advantage"
        )
        follows = (
            apart >= MIN_ERRORS
            and (mean * [1, -1] >= MIN_ERRORS_OF_EACH * error).all()
            and directed >= MIN_DIRECTED
            and self._whole >= MIN_MOVED * self._num_tokens
        )
        return self.found(
            "differs" if follows else "consistent",
            told,
            mean_where_positive=float(mean[0]),
            mean_where_negative=float(mean[1]),
            standard_errors=apart,
            directed=directed,
        )

    def repair(self, rows: Rows) -> Rows:
        """An update moves every token of its rows, so that all of the gap is its."""
        return rows.agreeing(rows.loss_mask)


def signs(rows: Rows) -> Float64Array | None:
    """[N] sign of the advantage, or of the reward minus its group's mean; None without either."""
    if rows.advantages is not None:
        return np.sign(np.nan_to_num(rows.advantages.astype(np.float64)))
    if rows.rewards is None or rows.groups is None:
        return None
    known = np.isfinite(rows.rewards)
    group = groups_of(rows)
    total = np.bincount(group[known], rows.rewards[known], minlength=len(rows))
    num = np.bincount(group[known], minlength=len(rows))
    apart = np.where(known, rows.rewards - total[group] / np.maximum(num[group], 1), 0.0)
    return np.sign(np.where(np.abs(apart) < 1e-9, 0.0, apart))[rows.row_of]


def groups_of(rows: Rows) -> Int64Array:
    """[R] number below R of the rows' group in its step; one of its own where it is not known."""
    if rows.groups is None:
        return np.arange(len(rows))
    steps = np.zeros_like(rows.groups) if rows.steps is None else rows.steps
    _, group = np.unique(np.stack([rows.groups, steps]), axis=1, return_inverse=True)
    return group.ravel()
