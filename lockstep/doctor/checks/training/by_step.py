"""How does the gap change from step to step: with the weights, without an update, or by a resume?

k2 of each step is that of its rows, over tokens of age 0; where the rows have too few steps, it is
the metric `mismatch/k2`.

# N tokens  S steps
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np

from lockstep.doctor.checks.attribution import Gap, add_by
from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.doctor.checks.training.metric_names import known_metrics
from lockstep.doctor.checks.training.staleness import ages

MIN_K2 = 1e-8
"""k2 below which the two sides agree to float32."""
MIN_STEPS = 3
"""Steps that a growing gap needs."""
MIN_GROWTH = 10.0
"""Ratio of the last steps' k2 to the first one's."""
MIN_ORDER = 0.8
"""Rank correlation of k2 with the step: growth, and not a few bad steps."""
MIN_JUMP_SHARE = 0.8
"""Share of the growth of log k2 that one step must make for it to be a jump."""

MIN_SIDE = 3
"""Steps before and after a resume that are compared: fewer show no level."""
MAX_SPREAD = 3.0
"""Ratio of the largest to the smallest k2 on one side of a resume: a level, and no growth. A few
thousand tokens of a step give k2 to a fifth; heavy tails make a factor of 2."""
MAX_REGULAR = 1.5
"""A distance between two steps above this multiple of the usual one is a gap in the numbers."""


class _BySteps(Check):
    """Base: sums of the gap by step."""

    def begin(self) -> None:
        self._by_step: dict[int, Gap] = defaultdict(Gap)

    def look(self, rows: Rows) -> None:
        if rows.steps is None:
            return
        at = rows.compared[self._young(rows)[rows.compared]]
        add_by(self._by_step, rows.steps[rows.row_of[at]], rows.gap[at])

    def _young(self, rows: Rows) -> BoolArray:
        """[N] tokens of age 0."""
        if rows.policy_version is None or rows.trainer_version is None:
            return np.ones(rows.num_tokens, np.bool_)
        return ages(rows) == 0

    def _k2(self, among: set[int] | None = None, *, least: int = MIN_STEPS) -> dict[int, float]:
        """Step -> k2, in order. among: these steps only. The metrics' if rows have less than
        `least` of these steps."""
        of_rows = {step: gap.means()["k2"] for step, gap in self._by_step.items()}
        of_metrics = {
            int(row.get("step", i)): float(row["mismatch/k2"])
            for i, row in enumerate(known_metrics(self.setting.step_metrics))
            if np.isfinite(row.get("mismatch/k2", np.nan))
        }
        chosen = [
            {s: k2 for s, k2 in sorted(of.items()) if among is None or s in among}
            for of in (of_rows, of_metrics)
        ]
        return chosen[0] if len(chosen[0]) >= least else chosen[1]

    def _agreeing_from(self, rows: Rows, first: int, last: float = np.inf) -> Rows:
        """`rows` in which the tokens of age 0 of these steps agree."""
        if rows.steps is None or rows.rollout_logprobs is None or rows.trainer_logprobs is None:
            return rows
        is_hit = (rows.steps >= first) & (rows.steps <= last)
        return rows.agreeing(is_hit[rows.row_of] & self._young(rows))


def _growth(k2: Float64Array) -> tuple[float, float, float, bool]:
    """(first, median of the last half, rank correlation with the step, whether it grows).

    >>> _growth(np.array([1e-4, 2e-4, 1e-3, 2e-3, 4e-3]))[3], _growth(np.full(5, 1e-3))[3]
    (True, False)
    """
    first, last = float(k2[0]), float(np.median(k2[len(k2) // 2 :]))
    order = float(np.corrcoef(np.arange(len(k2)), np.argsort(np.argsort(k2)))[0, 1])
    from_nothing = first < MIN_K2 and float(k2[1:].min()) > 100 * MIN_K2
    grows = last > MIN_GROWTH * max(first, MIN_K2) and order >= MIN_ORDER
    return first, last, order, from_nothing or (grows and len(k2) > MIN_STEPS)


class AfterResume(_BySteps):
    """The level of k2 before and after each resume."""

    name = "training/after_resume"
    basis = "fit"
    claim = "the gap after a resume is that before it"
    cause = "after_resume"

    def begin(self) -> None:
        super().begin()
        self._begin = self._end = 0

    def conclude(self) -> Finding:
        k2 = self._k2(least=2 * MIN_SIDE)
        points = self._points(list(k2))
        if not points:
            return self.not_checkable(measured="no resume is known, nor a gap in the step numbers")
        worst = 0.0, "", 0
        for step, why in points.items():
            before = np.array([v for s, v in k2.items() if s < step])[-2 * MIN_SIDE :]
            after = np.array([v for s, v in k2.items() if s >= step])
            if min(len(before), len(after)) < MIN_SIDE:
                continue
            jump = float(after.min() / max(before.max(), MIN_K2))
            levels = [side.max() / max(side.min(), MIN_K2) for side in (before, after)]
            if jump > max(worst[0], MIN_GROWTH) and max(levels) < min(MAX_SPREAD, jump):
                told = (
                    f"k2 is at most {before.max():.1e} before step {step} and at least "
                    f"{after.min():.1e} from it on: {why}"
                )
                worst = jump, told, step
        if worst[1]:
            self._begin = worst[2]
            return self.differs(worst[1], step=self._begin, jump=worst[0])
        steps = ", ".join(map(str, list(points)[:4]))
        return self.consistent(f"k2 keeps its level at step {steps}")

    def _points(self, of_rows: list[int]) -> dict[int, str]:
        """Step -> why training may have been resumed there."""
        out = dict.fromkeys(self.setting.resumes, "the run was resumed there")
        logged = [int(row["step"]) for row in self.setting.step_metrics if "step" in row]
        for before, step in pairwise(logged):
            if step <= before:
                out.setdefault(step, f"the step numbers go back there, from {before}")
        if not self.setting.resumes:
            apart = Counter(b - a for a, b in pairwise(of_rows))
            usual = apart.most_common(1)[0][0] if apart else 0
            for before, step in pairwise(of_rows):
                if step - before > MAX_REGULAR * usual:
                    out.setdefault(step, f"the steps after {before} are missing before it")
        return out

    def repair(self, rows: Rows) -> Rows:
        """The gap of the steps from the resume on is its."""
        return self._agreeing_from(rows, self._begin) if self._begin else rows


class IdleGrowth(_BySteps):
    """k2 in steps that do not change the weights."""

    name = "training/idle_growth"
    basis = "fit"
    claim = "the gap does not grow while the weights stay as they are"
    cause = "grows_without_learning"
    needs = ("step_metrics",)

    def begin(self) -> None:
        super().begin()
        self._first = self._last = -1

    def conclude(self) -> Finding:
        idle, why = self._idle()
        k2 = self._k2(set(idle))
        if len(k2) <= MIN_STEPS:
            return self.not_checkable(measured="the learning rate is 0 in no four steps")
        first, last, order, grows = _growth(np.array(list(k2.values())))
        steps = list(k2)
        told = (
            f"{why} in steps {steps[0]} to {steps[-1]}, and k2 is {first:.1e} in the first of them "
            f"and {last:.1e} in their last half"
        )
        if not grows:
            return self.consistent(told, k2_first=first, k2_last_half=last, order=order)
        self._first, self._last = steps[1], steps[-1]
        return self.differs(told, k2_first=first, k2_last_half=last, order=order)

    def _idle(self) -> tuple[list[int], str]:
        """(steps under the same weights, why they are the same): the longest run of steps with the
        learning rate 0, or all of them from the first on with the gradient 0. Later a gradient of 0
        is no proof: the optimizer's momentum still moves weights."""
        rows = known_metrics(self.setting.step_metrics)
        best: list[int] = []
        run: list[int] = []
        without: list[int] = []
        has_gradient = False
        for i, row in enumerate(rows):
            step = int(row.get("step", i))
            lr = row.get("train/lr")
            run = [*run, step] if lr == 0 else []
            best = max(best, run, key=len)
            has_gradient |= row.get("train/grad_norm") != 0
            without += [] if has_gradient else [step]
        if len(without) > len(best):
            return without, "the gradient is 0"
        return best, "the learning rate is 0"

    def repair(self, rows: Rows) -> Rows:
        """The gap of the steps after the first of them is that of another state."""
        if self._first < 0:
            return rows
        return self._agreeing_from(rows, self._first, self._last)


class GrowingGap(_BySteps):
    """The gap by step, over tokens of age 0."""

    name = "training/growing_gap"
    basis = "fit"
    claim = "the gap of tokens of age 0 does not grow from step to step"
    cause = "other_weights"
    needs = ("rollout_logprobs", "trainer_logprobs", "steps")

    def conclude(self) -> Finding:
        steps = sorted(self._by_step)
        k2 = np.array([self._by_step[step].means()["k2"] for step in steps])
        if len(steps) < MIN_STEPS:
            return self.not_checkable(f"{MIN_STEPS} steps")
        first, last, order, grows = _growth(k2)
        told = f"k2 is {first:.1e} in step {steps[0]} and {last:.1e} in the last half of the steps"
        if grows:
            rise = np.diff(np.log(np.maximum(k2, MIN_K2)))
            jump = int(np.argmax(rise))
            if rise[jump] > MIN_JUMP_SHARE * rise.sum():
                told += f"; it jumps at step {steps[jump + 1]}, and keeps its level"
            told += ". Rows do not tell weights from another state that is kept between steps"
        figures = {"k2_first": first, "k2_last_half": last, "order": order}
        return self.found("differs" if grows else "consistent", told, steps=len(steps), **figures)

    def repair(self, rows: Rows) -> Rows:
        """The first step's gap stays; what later ones have more is the weights'."""
        return self._agreeing_from(rows, min(self._by_step, default=0) + 1)
