"""Statistics of training that contradict each other: one table of rules with their thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.doctor.checks.base import Check
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows

Columns = Mapping[str, Float64Array]
"""Metric -> [S] its value at each step, NaN where there is none."""

ROUNDING = 1.001
"""Tolerance for figures that were rounded, or computed in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A contradiction, in so many consecutive steps."""

    name: str
    says: str
    """The contradiction, in words."""
    metrics: tuple[str, ...]
    holds: Callable[[Columns], BoolArray]
    """Columns -> [S] True where a step contradicts itself; a step without a metric never does."""
    steps: int = 1
    verdict: Literal["differs", "information"] = "differs"
    reason: str
    """Why the threshold cannot be crossed."""


def _steady(values: Float64Array, share: float, size: int) -> BoolArray:
    """[S] True where the range of the last `size` values is within `share` of their mean."""
    out = np.zeros(len(values), np.bool_)
    for i in range(size - 1, len(values)):
        window = values[i - size + 1 : i + 1]
        out[i] = np.ptp(window) <= share * abs(float(window.mean()))
    return out


def _still(values: Float64Array) -> BoolArray:
    """[S] True where a value is bitwise that of the step before."""
    out = np.zeros(len(values), np.bool_)
    out[1:] = values[1:] == values[:-1]
    return out


K1, K2, K3 = "mismatch/k1", "mismatch/k2", "mismatch/k3"
WINDOW = 5

RULES: tuple[Rule, ...] = (
    Rule(
        name="negative_k3",
        says="k3 is below 0",
        metrics=(K3,),
        holds=lambda c: c[K3] < -1e-7,
        reason="exp(d) - 1 - d is never below 0; float32 makes -1e-8 of it",
    ),
    Rule(
        name="k2_below_k1",
        says="k2 is below k1^2 / 2",
        metrics=(K1, K2),
        holds=lambda c: c[K2] * ROUNDING + 1e-12 < c[K1] ** 2 / 2,
        reason="a mean of squares is at least the square of the mean: they are of different tokens",
    ),
    Rule(
        name="k2_above_largest",
        says="k2 is above half the square of the largest difference",
        metrics=(K2, "mismatch/max_abs_diff"),
        holds=lambda c: c[K2] > ROUNDING * c["mismatch/max_abs_diff"] ** 2 / 2 + 1e-12,
        reason="a mean is at most the largest value: the two are of different tokens",
    ),
    Rule(
        name="shares",
        says="a share is outside of 0 to 1",
        metrics=(),
        holds=lambda c: np.any(
            [
                (c[name] < 0) | (c[name] > ROUNDING)
                for name in ("train/clip_fraction", "mismatch/forced_share", "mismatch/ess")
                if name in c
            ]
            or [np.zeros(len(next(iter(c.values()), ())), np.bool_)],
            axis=0,
        ),
        reason="a part is at most the whole: the two counts are of different tokens",
    ),
    Rule(
        name="unchanged_outputs",
        says="the gap is critical, but perplexity and length of replies do not change",
        metrics=(K3, "perplexity", "response_length/mean"),
        holds=lambda c: (
            (c[K3] > 0.1)
            & _steady(c["perplexity"], 0.05, WINDOW)
            & _steady(c["response_length/mean"], 0.05, WINDOW)
        ),
        reason="a policy that is 0.1 nats away within five steps writes other texts; rows that are "
        "not what was sampled leave them as they are",
    ),
    Rule(
        name="all_clipped",
        says="nearly all tokens are clipped",
        metrics=("train/clip_fraction",),
        holds=lambda c: c["train/clip_fraction"] > 0.9,
        steps=WINDOW,
        reason="an update with a usual learning rate clips less than 0.3 of the tokens; ratios "
        "between different tokens are all outside",
    ),
    Rule(
        name="none_clipped",
        says="no token is clipped, but ratios are as large as e^2",
        metrics=("train/clip_fraction", "train/log_ratio_abs_max"),
        holds=lambda c: (c["train/clip_fraction"] == 0) & (c["train/log_ratio_abs_max"] > 2.0),
        steps=WINDOW,
        verdict="information",
        reason="any clip range in use ends below e^0.5; but in each step the token may have had "
        "the other sign of advantage",
    ),
    Rule(
        name="ratio_of_one",
        says="all ratios are exactly 1, but the gap to the sampler is not 0",
        metrics=("train/log_ratio_abs_max", K2),
        holds=lambda c: (c["train/log_ratio_abs_max"] == 0) & (c[K2] > 1e-8),
        verdict="information",
        reason="the loss compares the trainer with itself and never sees the sampler's log-probs; "
        "on purpose where old log-probs are recomputed",
    ),
    Rule(
        name="flat_reward",
        says="the reward is bitwise the same in every step, but the loss changes",
        metrics=("reward/mean", "reward/std", "train/loss"),
        holds=lambda c: _still(c["reward/mean"]) & (c["reward/std"] > 0) & ~_still(c["train/loss"]),
        steps=WINDOW,
        reason="rewards that differ within a step have another mean in the next: they are not "
        "those of these episodes",
    ),
    Rule(
        name="no_gradient",
        says="advantages are not 0, but the gradient is",
        metrics=("train/grad_norm", "advantage/max_abs"),
        holds=lambda c: (c["train/grad_norm"] == 0) & (c["advantage/max_abs"] > 0),
        steps=3,
        reason="nothing is trained: the mask is empty, or weights are frozen or detached; three "
        "steps, for in one all tokens may have been clipped or rejected",
    ),
    Rule(
        name="still_version",
        says="the sampler's weights stay at one version, but updates are made",
        metrics=("policy_version", "train/grad_norm", "train/lr"),
        holds=lambda c: (
            _still(c["policy_version"]) & (c["train/grad_norm"] > 0) & (c["train/lr"] > 0)
        ),
        steps=WINDOW,
        reason="longer than any staleness in use: the weights are not synced",
    ),
    Rule(
        name="update_without_effect",
        says="the gap is bitwise the same before and after the update",
        metrics=(K2, "mismatch_after/k2", "train/grad_norm", "train/lr"),
        holds=lambda c: (
            (c[K2] == c["mismatch_after/k2"])
            & (c[K2] > 0)
            & (c["train/grad_norm"] > 0)
            & (c["train/lr"] > 0)
        ),
        reason="an update moves every log-prob by more than float rounding: what is measured is "
        "not what is trained",
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
        steps, columns = columns_of(self.setting.step_metrics)
        tried = [rule for rule in RULES if all(name in columns for name in rule.metrics)]
        fired = [(rule, at) for rule in tried if (at := longest_run(rule, columns))]
        figures: dict[str, float] = {"steps": len(steps), "rules_tried": len(tried)}
        figures |= {rule.name: float(len(at)) for rule, at in fired}
        if not fired:
            return self.consistent(f"{len(tried)} rules hold over {len(steps)} steps", **figures)
        told = "; ".join(
            f"{rule.says} (steps {steps[at[0]]} to {steps[at[-1]]})" for rule, at in fired
        )
        is_wrong = any(rule.verdict == "differs" for rule, _ in fired)
        return self.found("differs" if is_wrong else "information", told, **figures)


def columns_of(
    metrics: Sequence[Mapping[str, Any]],
) -> tuple[list[int], dict[str, Float64Array]]:
    """(steps, metric -> its values) of the rows that have a training step."""
    rows = [row for row in metrics if "train/loss" in row or K2 in row]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {
        name: np.array(
            [float(v) if isinstance(v := row.get(name), int | float) else np.nan for row in rows]
        )
        for name in names
    }
    return [int(row.get("step", i)) for i, row in enumerate(rows)], columns


def longest_run(rule: Rule, columns: Columns) -> range | None:
    """Indices of the longest run of steps that the rule holds in; None if it is too short."""
    with np.errstate(invalid="ignore"):
        holds = rule.holds(columns)
        for name in rule.metrics:
            holds = holds & ~np.isnan(columns[name])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], holds.astype(np.int8), [0]])))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    begin, end = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    return range(begin, end) if end - begin >= rule.steps else None
