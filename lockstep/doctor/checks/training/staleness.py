"""Whether the gap comes with the age of tokens, with the update, or grows under a still version.

# N tokens  R rows
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from lockstep.doctor.checks.attribution import gap_of, gap_of_all
from lockstep.doctor.checks.base import Check, Gap, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.types import Int64Array

MIN_K2 = 1e-8
"""Under it the two sides agree to float32, whatever the age."""
MIN_RATIO = 3.0
"""Of the gap of older tokens to that of age 0, from which on age is what makes it."""
MAX_AGE = 1 << 20
"""Beyond it a version is no count of updates."""

MIN_ROWS = 4
"""With an advantage of each sign."""
MIN_ERRORS = 5.0
"""Standard errors, over rows, by which the gap must follow the sign of the advantage."""
MIN_ERRORS_OF_EACH = 1.5
"""The same of either sign alone, in its own direction: what makes unlikely rows unlikelier moves
one sign only."""
MIN_DIRECTED = 0.35
"""Sum of d * sign(advantage) over the sum of |d|: an update of one step leaves 0.5 and more on our
models, other weights, noise and processing up to 0.3."""

MIN_STEPS = 3
MIN_GROWTH = 10.0
"""Of the last steps' k2 to the first one's."""
MIN_ORDER = 0.8
"""Rank correlation of a step's k2 with its number: growth, and not a few bad steps."""


class Stale(Check):
    """The gap by age: the trainer's version less the one that sampled the token."""

    name = "training/staleness"
    claim = "tokens were sampled by the weights that they are trained on"
    cause = "stale"
    needs = ("rollout_logprobs", "trainer_logprobs", "policy_version", "trainer_version")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._by_age: dict[int, Gap] = defaultdict(Gap)
        self._backwards = 0

    def look(self, rows: Rows) -> None:
        age, gap = ages(rows), rows.gap
        self._backwards += len(rows_going_back(rows))
        if not age.any():
            self._by_age[0].add(gap_of_all(rows))
            return
        compared = rows.compared
        age = age[compared]
        for number in np.unique(age).tolist():
            self._by_age[number].add(gap_of(gap[compared[age == number]]))
        old = compared[(age > self._allowed) | (age < 0)]
        for at in old[np.argsort(-np.abs(gap[old]), kind="stable")][:4].tolist():
            assert rows.policy_version is not None and rows.trainer_version is not None, "needs"
            row, begin = rows.where(at)
            trained = int(rows.trainer_version[rows.row_of[at]])
            note = f"sampled by version {rows.policy_version[at]}, trained on by version {trained}"
            self.show(abs(float(gap[at])), Evidence(row=row, begin=begin, end=begin + 1, note=note))

    @property
    def _allowed(self) -> int:
        return self.setting.max_staleness or 0

    def conclude(self) -> Finding:
        young, old, future = Gap(), Gap(), Gap()
        over = 0
        for age, gap in self._by_age.items():
            (young if age == 0 else old if age > 0 else future).add(gap)
            over += gap.tokens * (age > self._allowed)
        figures = {
            "tokens_age_0": float(young.tokens),
            "tokens_older": float(old.tokens),
            "max_age": float(max(self._by_age, default=0)),
            "k2_age_0": young.means()["k2"],
            "k2_older": old.means()["k2"],
            "rows_going_back": float(self._backwards),
        }
        if future.tokens:
            return self.found(
                "differs",
                f"{future.tokens} tokens say that they were sampled by weights newer than those "
                "that they are trained on",
                **figures,
            )
        if not old.tokens:
            return self.found("consistent", f"all of {young.tokens} tokens are of age 0", **figures)
        told = (
            f"{old.tokens} of {old.tokens + young.tokens} tokens are up to "
            f"{figures['max_age']:.0f} updates old; their k2 is {figures['k2_older']:.1e}"
        )
        if young.tokens:
            told += f", that of age 0 {figures['k2_age_0']:.1e}"
        if self._backwards:
            told += f"; in {self._backwards} rows a later turn was sampled by older weights"
        makes_it = figures["k2_older"] > max(MIN_K2, MIN_RATIO * figures["k2_age_0"])
        if makes_it and over:
            return self.found("differs", told, **figures)
        if makes_it:
            told += "; the run's settings allow that age"
        return self.found("information", told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """Older tokens as the trainer has them: all of their gap beyond that of age 0 is by age."""
        assert rows.rollout_logprobs is not None and rows.trainer_logprobs is not None, "needs"
        old = (ages(rows) != 0) & ~np.isnan(rows.gap)
        return rows.with_(
            rollout_logprobs=np.where(old, rows.trainer_logprobs, rows.rollout_logprobs)
        )


def ages(rows: Rows) -> Int64Array:
    """[N] updates between what sampled a token and what its row is trained on; 0 of what was not
    sampled. Not to be changed."""
    return rows.once("ages", lambda: _ages(rows))


def _ages(rows: Rows) -> Int64Array:
    assert rows.policy_version is not None and rows.trainer_version is not None, "the check's needs"
    age = rows.trainer_version[rows.row_of] - rows.policy_version
    age[rows.policy_version < 0] = 0
    return np.clip(age, -1, MAX_AGE)


def rows_going_back(rows: Rows) -> Int64Array:
    """Rows in which a token was sampled by older weights than one before it."""
    assert rows.policy_version is not None, "the check's needs"
    at = np.flatnonzero(rows.policy_version >= 0)
    row = rows.row_of[at]
    falls = (np.diff(rows.policy_version[at]) < 0) & (row[1:] == row[:-1])
    return np.unique(row[1:][falls])


class AfterUpdate(Check):
    """The sign of the gap beside the sign of the advantage."""

    name = "training/after_update"
    claim = "the trainer's log-probs do not know yet what the rows will teach"
    cause = "after_update"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._rows = {1: np.zeros(3), -1: np.zeros(3)}
        """By sign of the advantage: rows, and the sum and sum of squares of their mean d."""
        self._directed = self._whole = 0.0

    def look(self, rows: Rows) -> None:
        sign = signs(rows)
        if sign is None:
            return
        sign, at = sign[rows.compared], rows.compared
        at, sign = at[sign != 0], sign[sign != 0]
        d, row = rows.gap[at], rows.row_of[at]
        self._directed += float(d @ sign)
        self._whole += float(np.abs(d).sum())
        for s, sums in self._rows.items():
            of_sign = sign == s
            num = np.bincount(row[of_sign], minlength=len(rows))
            total = np.bincount(row[of_sign], d[of_sign], minlength=len(rows))
            mean = total[num > 0] / num[num > 0]
            sums += [len(mean), mean.sum(), mean @ mean]
        worst = np.argpartition(-d * sign, min(4, len(d) - 1))[:4] if len(d) else np.empty(0, int)
        for i in worst.tolist():
            name, begin = rows.where(int(at[i]))
            where = "above" if sign[i] > 0 else "below"
            note = f"advantage {where} 0, trainer - sampler {d[i]:+.4f}"
            self.show(
                float(d[i] * sign[i]), Evidence(row=name, begin=begin, end=begin + 1, note=note)
            )

    def conclude(self) -> Finding:
        if min(sums[0] for sums in self._rows.values()) < MIN_ROWS:
            return self.not_checkable(("advantages, or rewards by group, of both signs",))
        mean, error = {}, {}
        for s, (num, total, square) in self._rows.items():
            mean[s] = total / num
            error[s] = (max(square / num - mean[s] ** 2, 0.0) / max(num - 1, 1)) ** 0.5
        apart = (mean[1] - mean[-1]) / max((error[1] ** 2 + error[-1] ** 2) ** 0.5, 1e-300)
        directed = self._directed / max(self._whole, 1e-300)
        figures = {
            "mean_where_positive": float(mean[1]),
            "mean_where_negative": float(mean[-1]),
            "standard_errors": float(apart),
            "directed": directed,
        }
        told = (
            f"trainer - sampler is {mean[1]:+.1e} where the advantage is above 0 and "
            f"{mean[-1]:+.1e} where it is below, {apart:.1f} standard errors apart; "
            f"{directed:.0%} of the gap goes the way of the advantage"
        )
        follows = (
            apart >= MIN_ERRORS
            and mean[1] >= MIN_ERRORS_OF_EACH * error[1]
            and -mean[-1] >= MIN_ERRORS_OF_EACH * error[-1]
            and directed >= MIN_DIRECTED
        )
        return self.found("differs" if follows else "consistent", told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """An update moves every token of its rows."""
        assert rows.rollout_logprobs is not None and rows.trainer_logprobs is not None, "needs"
        return rows.with_(
            rollout_logprobs=np.where(
                np.isnan(rows.gap), rows.rollout_logprobs, rows.trainer_logprobs
            )
        )


def signs(rows: Rows) -> Float64Array | None:
    """[N] -1, 0 or 1: of the advantage, or of the reward less its group's mean; None without."""
    if rows.advantages is not None:
        return np.sign(np.nan_to_num(rows.advantages.astype(np.float64)))
    if rows.rewards is None or rows.groups is None:
        return None
    known = np.isfinite(rows.rewards)
    _, group = np.unique(
        np.stack([rows.groups, np.zeros_like(rows.groups) if rows.steps is None else rows.steps]),
        axis=1,
        return_inverse=True,
    )
    group = group.ravel()
    total = np.bincount(group[known], rows.rewards[known], minlength=len(rows))
    num = np.bincount(group[known], minlength=len(rows))
    apart = np.where(known, rows.rewards - total[group] / np.maximum(num[group], 1), 0.0)
    return np.sign(np.where(np.abs(apart) < 1e-9, 0.0, apart))[rows.row_of]


class StillVersion(Check):
    """The gap by step, of tokens that are said to be of age 0."""

    name = "training/growing_gap"
    claim = "the gap does not grow from step to step while tokens say that they are of age 0"
    cause = "other_weights"
    needs = ("rollout_logprobs", "trainer_logprobs", "steps")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._by_step: dict[int, Gap] = defaultdict(Gap)

    def look(self, rows: Rows) -> None:
        assert rows.steps is not None, "the check's needs"
        young = self._young(rows)
        at = rows.compared[young[rows.compared]]
        step, d = rows.steps[rows.row_of[at]], rows.gap[at]
        numbers = np.unique(rows.steps).tolist()
        for number in numbers:
            gap = gap_of(d if len(numbers) == 1 else d[step == number])
            if gap.tokens:
                self._by_step[number].add(gap)

    def _young(self, rows: Rows) -> BoolArray:
        if rows.policy_version is None or rows.trainer_version is None:
            return np.ones(rows.num_tokens, np.bool_)
        return ages(rows) == 0

    def conclude(self) -> Finding:
        steps = sorted(self._by_step)
        k2 = np.array([self._by_step[step].means()["k2"] for step in steps])
        if len(steps) < MIN_STEPS:
            return self.not_checkable((f"{MIN_STEPS} steps",))
        half = len(steps) // 2
        first, last = float(k2[0]), float(np.median(k2[half:]))
        order = float(np.corrcoef(np.arange(len(k2)), np.argsort(np.argsort(k2)))[0, 1])
        figures = {"steps": len(steps), "k2_first": first, "k2_last_half": last, "order": order}
        told = f"k2 is {first:.1e} in step {steps[0]} and {last:.1e} in the last half of them"
        from_nothing = first < MIN_K2 and float(k2[1:].min()) > 100 * MIN_K2
        grows = last > MIN_GROWTH * max(first, MIN_K2) and order >= MIN_ORDER
        is_wrong = from_nothing or (grows and len(steps) > MIN_STEPS)
        return self.found("differs" if is_wrong else "consistent", told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """The first step's gap is the two sides' own; what later ones have is the weights'."""
        assert rows.steps is not None and rows.rollout_logprobs is not None, "the check's needs"
        assert rows.trainer_logprobs is not None, "the check's needs"
        later = (rows.steps > min(self._by_step, default=0))[rows.row_of] & self._young(rows)
        later &= ~np.isnan(rows.gap)
        return rows.with_(
            rollout_logprobs=np.where(later, rows.trainer_logprobs, rows.rollout_logprobs)
        )
