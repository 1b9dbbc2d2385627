"""Statistics of training that contradict each other: one table of rules with their thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.doctor.checks.training.metric_names import THEIR_NAMES, known_metrics

ROUNDING = 1.001
"""Tolerance for figures that were rounded, or computed in float32."""
K1, K2, K3 = "mismatch/k1", "mismatch/k2", "mismatch/k3"
WINDOW = 5
"""Steps that a figure must repeat in."""
LONG_WINDOW = 20
"""The same for a mean reward: that of eight rewards of 0 or 1 repeats with a probability of at most
0.4, and 20 times in a row once in 90 million."""
FAR = 0.5
"""Mean log ratio, in nats, that leaves every clip range in use (0.1 to 0.4) with most tokens."""
LARGE_K3 = 1.0
"""k3 at which the typical ratio is above e."""


class Columns(dict[str, Float64Array]):
    """Metric -> [S] its value at each step, NaN where there is none. `asked` are the metrics that
    were read."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        super().__init__()
        rows = list(rows)
        self.num_steps = len(rows)
        self.asked = set[str]()
        for i, row in enumerate(rows):
            for name, value in row.items():
                if hasattr(value, "__float__") and np.ndim(value) == 0:
                    self.setdefault(name, np.full(len(rows), np.nan))[i] = float(value)

    def __getitem__(self, name: str) -> Float64Array:
        self.asked.add(name)
        return self.get(name, np.full(self.num_steps, np.nan))


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
    may_lack: frozenset[str] = frozenset()
    """Metrics that the rule reads and can do without."""

    def can_be_tried(self, columns: Columns) -> bool:
        """True if enough steps have all of its metrics."""
        columns.asked.clear()
        with np.errstate(invalid="ignore"):
            self.holds(columns)
        needed = columns.asked - self.may_lack
        has_all = np.ones(columns.num_steps, np.bool_)
        for name in needed:
            has_all &= ~np.isnan(columns[name])
        return bool(has_all.sum() >= self.steps)


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


def _updates(c: Columns) -> BoolArray:
    return (c["train/grad_norm"] > 0) & (c["train/lr"] > 0)


RULES: tuple[Rule, ...] = (
    # exp(d) - 1 - d is never below 0; float32 makes -1e-8 of it.
    Rule(name="negative_k3", says="k3 is below 0", holds=lambda c: c[K3] < -1e-7),
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
    # episodes. Where their spread is not logged, a mean of 0 or 1 may be of equal rewards, and the
    # loss of entropy or a reference.
    Rule(
        name="flat_reward",
        says="the mean reward is bitwise the same in every step, but the loss changes",
        holds=lambda c: (
            _still(c["reward/mean"])
            & ~_still(c["train/loss"])
            & ~np.isnan(c["train/loss"])
            & np.where(
                np.isnan(c["reward/std"]),
                ~np.isin(c["reward/mean"], (-1.0, 0.0, 1.0)),
                c["reward/std"] > 0,
            )
        ),
        steps=LONG_WINDOW,
        may_lack=frozenset({"reward/std"}),
    ),
    # Tokens this far away are outside of every clip range: the ratio that is clipped is not that
    # of these two sides.
    Rule(
        name="unclipped_gap",
        says="the two sides are far apart, but no token is clipped",
        holds=lambda c: (c[K3] > LARGE_K3) & (c["train/clip_fraction"] == 0),
        steps=WINDOW,
    ),
    Rule(
        name="unclipped_update",
        says="updates move the mean log-prob far, but no token is clipped",
        holds=lambda c: (np.abs(c["train/approx_kl"]) > FAR) & (c["train/clip_fraction"] == 0),
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
        named = known_metrics(self.setting.step_metrics)
        rows = [row for row in named if _READ & row.keys()]
        columns = Columns(rows)
        steps = [int(row.get("step", i)) for i, row in enumerate(rows)]
        tried = [rule for rule in RULES if rule.can_be_tried(columns)]
        fired = [(rule, at) for rule in tried if (at := longest_run(rule, columns))]
        self.count(steps=len(steps), rules=len(tried))
        if not tried:
            return self.not_checkable(measured=_untried(self.setting.step_metrics))
        if not fired:
            return self.consistent(
                f"none of {len(tried)} rules that can be tried is broken in {len(steps)} steps"
            )
        told = "; ".join(
            f"{rule.says} (steps {steps[at[0]]} to {steps[at[-1]]})" for rule, at in fired
        )
        return self.differs(told, **{rule.name: len(at) for rule, at in fired})


_READ = frozenset(THEIR_NAMES) | {K2}
"""Metrics that make a row one of a training step, and not of an evaluation."""


def _untried(rows: Iterable[Mapping[str, Any]]) -> str:
    """Why no rule could be tried, with the names that are there and some that would be read."""
    found = sorted({name for row in rows for name in row})
    shown = ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
    theirs = ", ".join(f"{ours} (or {', '.join(n)})" for ours, n in THEIR_NAMES.items())
    return (
        f"no rule could be tried: too few steps have the metrics of one. Found: {shown or 'none'}; "
        f"read are {theirs}"
    )


def longest_run(rule: Rule, columns: Columns) -> range | None:
    """Indices of the longest run of steps that the rule holds in; None if it is too short."""
    with np.errstate(invalid="ignore"):
        holds = rule.holds(columns)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], holds.astype(np.int8), [0]])))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    begin, end = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    return range(begin, end) if end - begin >= rule.steps else None
