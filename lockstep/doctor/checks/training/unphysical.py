"""Figures of training that cannot stand beside each other: every rule, with its threshold, in one
table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.doctor.checks.base import Check
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows

Columns = Mapping[str, Float64Array]
"""Metric -> [S] its value by step, NaN where a step has none."""

ROUNDING = 1.001
"""Room for figures that were rounded, or are of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What cannot be, for so many steps in a row."""

    name: str
    says: str
    """What is wrong where it holds, in words."""
    metrics: tuple[str, ...]
    holds: Callable[[Columns], BoolArray]
    """[S] by step; steps that lack one of `metrics` never count."""
    steps: int = 1
    verdict: Literal["differs", "information"] = "differs"
    reason: str
    """Of the threshold."""


def _steady(values: Float64Array, share: float, size: int) -> BoolArray:
    """[S] whether the last `size` values lie within `share` of their mean."""
    out = np.zeros(len(values), np.bool_)
    for i in range(size - 1, len(values)):
        window = values[i - size + 1 : i + 1]
        out[i] = np.ptp(window) <= share * abs(float(window.mean()))
    return out


def _still(values: Float64Array) -> BoolArray:
    """[S] whether a value is that of the step before, to the bit."""
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
        reason="a mean of squares is at least the square of the mean: they are of other tokens",
    ),
    Rule(
        name="k2_above_largest",
        says="k2 is above half the square of the largest difference",
        metrics=(K2, "mismatch/max_abs_diff"),
        holds=lambda c: c[K2] > ROUNDING * c["mismatch/max_abs_diff"] ** 2 / 2 + 1e-12,
        reason="a mean is at most the largest: they are of other tokens",
    ),
    Rule(
        name="shares",
        says="a share lies outside of 0 to 1",
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
        reason="a count over another count: they are of other tokens",
    ),
    Rule(
        name="unchanged_outputs",
        says="the gap is critical, while perplexity and length of replies stand still",
        metrics=(K3, "perplexity", "response_length/mean"),
        holds=lambda c: (
            (c[K3] > 0.1)
            & _steady(c["perplexity"], 0.05, WINDOW)
            & _steady(c["response_length/mean"], 0.05, WINDOW)
        ),
        reason="a policy 0.1 nats away in five steps writes other texts; rows that are not what "
        "was sampled do not change them",
    ),
    Rule(
        name="all_clipped",
        says="nearly all tokens are clipped",
        metrics=("train/clip_fraction",),
        holds=lambda c: c["train/clip_fraction"] > 0.9,
        steps=WINDOW,
        reason="an update of a usual learning rate clips below 0.3; of ratios that are not ratios "
        "of one token all are outside",
    ),
    Rule(
        name="none_clipped",
        says="no token is clipped, and ratios are as large as e^2",
        metrics=("train/clip_fraction", "train/log_ratio_abs_max"),
        holds=lambda c: (c["train/clip_fraction"] == 0) & (c["train/log_ratio_abs_max"] > 2.0),
        steps=WINDOW,
        verdict="information",
        reason="any clip range in use ends below e^0.5; but the token may have had the other sign "
        "of advantage in each step",
    ),
    Rule(
        name="ratio_of_one",
        says="all ratios are 1 exactly, and the gap to the sampler is not 0",
        metrics=("train/log_ratio_abs_max", K2),
        holds=lambda c: (c["train/log_ratio_abs_max"] == 0) & (c[K2] > 1e-8),
        verdict="information",
        reason="the loss compares the trainer with itself: whatever the sampler's log-probs are, "
        "it does not see them. On purpose where old log-probs are computed anew",
    ),
    Rule(
        name="flat_reward",
        says="the reward is the same to the bit in every step, and the loss jumps",
        metrics=("reward/mean", "reward/std", "train/loss"),
        holds=lambda c: _still(c["reward/mean"]) & (c["reward/std"] > 0) & ~_still(c["train/loss"]),
        steps=WINDOW,
        reason="rewards that differ within a step have another mean in the next one: they are not "
        "of these episodes",
    ),
    Rule(
        name="no_gradient",
        says="advantages differ from 0, and the gradient is 0",
        metrics=("train/grad_norm", "advantage/max_abs"),
        holds=lambda c: (c["train/grad_norm"] == 0) & (c["advantage/max_abs"] > 0),
        steps=3,
        reason="nothing is trained: a mask that is empty, frozen or detached weights; three steps, "
        "for one may have had all of its tokens clipped or rejected",
    ),
    Rule(
        name="still_version",
        says="the weights that sample are of one version, and updates are made",
        metrics=("policy_version", "train/grad_norm", "train/lr"),
        holds=lambda c: (
            _still(c["policy_version"]) & (c["train/grad_norm"] > 0) & (c["train/lr"] > 0)
        ),
        steps=WINDOW,
        reason="longer than any staleness in use: the weights are not handed over",
    ),
    Rule(
        name="update_without_effect",
        says="the gap is the same to the bit before and after the update",
        metrics=(K2, "mismatch_after/k2", "train/grad_norm", "train/lr"),
        holds=lambda c: (
            (c[K2] == c["mismatch_after/k2"])
            & (c[K2] > 0)
            & (c["train/grad_norm"] > 0)
            & (c["train/lr"] > 0)
        ),
        reason="an update moves every log-prob by more than a float: what is measured is not what "
        "is trained",
    ),
)


class Unphysical(Check):
    """Every rule, over the steps that metrics are there of."""

    name = "training/unphysical"
    claim = "the figures of training can stand beside each other"
    cause = "unphysical"
    needs = ("step_metrics",)

    def look(self, rows: Rows) -> None:
        """It reads no rows."""

    def conclude(self) -> Finding:
        steps, columns = columns_of(self.setting.step_metrics)
        fired: list[tuple[Rule, Sequence[int]]] = []
        tried = 0
        for rule in RULES:
            if not all(name in columns for name in rule.metrics):
                continue
            tried += 1
            if at := longest_run(rule, columns):
                fired.append((rule, [steps[i] for i in at]))
        figures: dict[str, float] = {"steps": len(steps), "rules_tried": tried}
        figures |= {rule.name: float(len(at)) for rule, at in fired}
        if not fired:
            told = f"{tried} rules hold over {len(steps)} steps"
            return self.found("consistent", told, **figures)
        told = "; ".join(f"{rule.says} (steps {at[0]} to {at[-1]})" for rule, at in fired)
        is_wrong = any(rule.verdict == "differs" for rule, _ in fired)
        return self.found("differs" if is_wrong else "information", told, **figures)


def columns_of(
    metrics: Sequence[Mapping[str, Any]],
) -> tuple[list[int], dict[str, Float64Array]]:
    """(steps, metric -> its values) of rows that were trained on."""
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
    """The places of the longest run of steps of which the rule holds, if it is long enough."""
    with np.errstate(invalid="ignore"):
        holds = rule.holds(columns)
        for name in rule.metrics:
            holds = holds & ~np.isnan(columns[name])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], holds.astype(np.int8), [0]])))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    begin, end = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    return range(begin, end) if end - begin >= rule.steps else None
