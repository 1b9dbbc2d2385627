"""Statistics of training that contradict each other: one table of rules with their thresholds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows

Columns = Mapping[str, Float64Array]
"""Metric -> [S] its value at each step, NaN where there is none."""

ROUNDING = 1.001
"""Tolerance for figures that were rounded, or computed in float32."""
K1, K2, K3 = "mismatch/k1", "mismatch/k2", "mismatch/k3"
WINDOW = 5
"""Steps that a figure must repeat in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A contradiction, in so many consecutive steps."""

    name: str
    says: str
    """The contradiction, in words."""
    holds: Callable[[Columns], BoolArray]
    """Columns -> [S] True where a step contradicts itself; a step without a metric never does:
    comparisons with NaN are False."""
    steps: int = 1


def _steady(values: Float64Array) -> BoolArray:
    """[S] True where the range of the last WINDOW values is within 5 % of their mean."""
    out = np.zeros(len(values), np.bool_)
    for i in range(WINDOW - 1, len(values)):
        window = values[i - WINDOW + 1 : i + 1]
        out[i] = np.ptp(window) <= 0.05 * abs(float(window.mean()))
    return out


def _still(values: Float64Array) -> BoolArray:
    """[S] True where a value is bitwise that of the step before."""
    return np.append(False, values[1:] == values[:-1])[: len(values)]


def _changes(values: Float64Array) -> BoolArray:
    return ~_still(values) & ~np.isnan(values)


def _updates(c: Columns) -> BoolArray:
    return (c["train/grad_norm"] > 0) & (c["train/lr"] > 0)


RULES: tuple[Rule, ...] = (
    # exp(d) - 1 - d is never below 0; float32 makes -1e-8 of it.
    Rule(
        name="negative_k3",
        says="k3 is below 0",
        holds=lambda c: c[K3] < -1e-7,
    ),
    # A mean of squares is at least the square of the mean: the two are of different tokens.
    Rule(
        name="k2_below_k1",
        says="k2 is below k1^2 / 2",
        holds=lambda c: c[K2] * ROUNDING + 1e-12 < c[K1] ** 2 / 2,
    ),
    # A mean is at most the largest value: the two are of different tokens.
    Rule(
        name="k2_above_largest",
        says="k2 is above half the square of the largest difference",
        holds=lambda c: c[K2] > ROUNDING * c["mismatch/max_abs_diff"] ** 2 / 2 + 1e-12,
    ),
    # A part is at most the whole: the two counts are of different tokens.
    *(
        Rule(
            name=share.rpartition("/")[2],
            says=f"{share} is outside of 0 to 1",
            holds=lambda c, share=share: (c[share] < 0) | (c[share] > ROUNDING),
        )
        for share in ("train/clip_fraction", "mismatch/forced_share", "mismatch/ess")
    ),
    # A policy that is 0.1 nats away within five steps writes other texts; rows that are not what
    # was sampled leave them as they are.
    Rule(
        name="unchanged_outputs",
        says="the gap is critical, but perplexity and length of replies do not change",
        holds=lambda c: (
            (c[K3] > 0.1) & _steady(c["perplexity"]) & _steady(c["response_length/mean"])
        ),
    ),
    # An update with a usual learning rate clips less than 0.3 of the tokens; ratios between
    # different tokens are all outside.
    Rule(
        name="all_clipped",
        says="nearly all tokens are clipped",
        holds=lambda c: c["train/clip_fraction"] > 0.9,
        steps=WINDOW,
    ),
    # Rewards that differ within a step have another mean in the next: they are not those of these
    # episodes.
    Rule(
        name="flat_reward",
        says="the reward is bitwise the same in every step, but the loss changes",
        holds=lambda c: (
            _still(c["reward/mean"]) & (c["reward/std"] > 0) & _changes(c["train/loss"])
        ),
        steps=WINDOW,
    ),
    # Nothing is trained: the mask is empty, or weights are frozen or detached. Three steps, for in
    # one all tokens may have been clipped or rejected.
    Rule(
        name="no_gradient",
        says="advantages are not 0, but the gradient is",
        holds=lambda c: (c["train/grad_norm"] == 0) & (c["advantage/max_abs"] > 0),
        steps=3,
    ),
    # Longer than any staleness in use: the weights are not synced.
    Rule(
        name="still_version",
        says="the sampler's weights stay at one version, but updates are made",
        holds=lambda c: _still(c["policy_version"]) & _updates(c),
        steps=WINDOW,
    ),
    # An update moves every log-prob by more than float rounding: what is measured is not what is
    # trained.
    Rule(
        name="update_without_effect",
        says="the gap is bitwise the same before and after the update",
        holds=lambda c: (c[K2] == c["mismatch_after/k2"]) & (c[K2] > 0) & _updates(c),
    ),
)


class Unphysical(Check):
    """Applies every rule to the steps that have its metrics."""

    name = "training/unphysical"
    claim = "the statistics of training do not contradict each other"
    cause = "unphysical"
    needs = ("step_metrics",)

    def look(self, rows: Rows) -> None:
        """Reads no rows."""

    def conclude(self) -> Finding:
        rows = [row for row in self.setting.step_metrics if "train/loss" in row or K2 in row]
        columns = defaultdict[str, Float64Array](lambda: np.full(len(rows), np.nan))
        for i, row in enumerate(rows):
            for name, value in row.items():
                if isinstance(value, int | float):
                    columns[name][i] = value
        steps = [int(row.get("step", i)) for i, row in enumerate(rows)]
        fired = [(rule, at) for rule in RULES if (at := longest_run(rule, columns))]
        self.count(steps=len(steps))
        if not fired:
            return self.consistent(f"no rule is broken in {len(steps)} steps")
        told = "; ".join(
            f"{rule.says} (steps {steps[at[0]]} to {steps[at[-1]]})" for rule, at in fired
        )
        return self.differs(told, **{rule.name: len(at) for rule, at in fired})


def longest_run(rule: Rule, columns: Columns) -> range | None:
    """Indices of the longest run of steps that the rule holds in; None if it is too short."""
    with np.errstate(invalid="ignore"):
        holds = rule.holds(columns)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], holds.astype(np.int8), [0]])))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    begin, end = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    return range(begin, end) if end - begin >= rule.steps else None
