"""Judges a mismatch between sampler and trainer: normal for this set-up, or worth stopping for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Architecture = Literal["dense", "moe"]
Level = Literal["unmeasured", "ok", "notice", "warning", "critical"]

WARNING_LIMIT = 0.01
CRITICAL_LIMIT = 0.1
"""Limits on max(|k1|, k2, k3). Above the first the gradient is visibly off-policy; above the second
runs collapse. k1 alone nearly cancels when log-probs are shifted by a token: k2 and k3 do not."""

ONE_PROCESS_BAND = (0.0, 1e-11)
"""k3 where sampler and trainer are one process over one set of ops: float32 noise at most."""
DENSE_BAND = (1e-5, 1e-3)
"""k3 of a dense model across two engines."""
MOE_BAND = (1e-3, 1e-1)
"""k3 of a mixture of experts across two engines: a router near a tie flips some tokens."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The verdict on one row of metrics."""

    level: Level
    """ok: nothing to do. notice: below the limits, and above what is normal for this set-up."""
    value: float
    """max(|k1|, k2, k3); NaN if unmeasured."""
    text: str
    """One line with the value, the normal values, and the next step if it is not normal."""


def mismatch(metrics: Mapping[str, Any]) -> float:
    """max(|k1|, k2, k3) of a metrics row; NaN if one of them is missing or not a number."""
    k1, k2, k3 = (metrics.get(f"mismatch/{name}", math.nan) for name in ("k1", "k2", "k3"))
    return math.nan if math.isnan(k1 + k2 + k3) else max(abs(k1), k2, k3)


def normal_band(architecture: Architecture, *, is_one_process: bool) -> tuple[float, float]:
    """The k3 that is normal: (low, high)."""
    if is_one_process:
        return ONE_PROCESS_BAND
    return MOE_BAND if architecture == "moe" else DENSE_BAND


def mismatch_alarm(
    metrics: Mapping[str, Any], architecture: Architecture, *, is_one_process: bool = False
) -> Alarm:
    """Judges a metrics row's mismatch before the update; that of the worst, where seats have
    policies of their own.

    is_one_process: sampler and trainer run in one process over the same ops (the embedded engine).

    >>> row = {"mismatch/k1": 0.001, "mismatch/k2": 1.18, "mismatch/k3": 676.0}
    >>> mismatch_alarm(row, "dense").level  # log-probs shifted by one token: k1 looks harmless
    'critical'
    """
    alarms: list[Alarm] = []
    for seat, row in policy_rows(metrics).items():
        alarm = _judged(row, architecture, is_one_process=is_one_process)
        alarms.append(replace(alarm, text=f"{seat}: {alarm.text}") if seat else alarm)
    return max(alarms, key=lambda alarm: get_args(Level).index(alarm.level))


def policy_rows(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The row of the run's policy, under "", and that of each seat with a policy of its own.

    >>> policy_rows({"step": 3, "policy/second/train/lr": 0.1})["second"]
    {'train/lr': 0.1}
    """
    rows: dict[str, dict[str, Any]] = {"": dict(metrics)}
    for name, value in metrics.items():
        if name.startswith("policy/"):
            _, seat, of_seat = name.split("/", 2)
            rows.setdefault(seat, {})[of_seat] = value
    return rows


def _judged(
    metrics: Mapping[str, Any], architecture: Architecture, *, is_one_process: bool
) -> Alarm:
    value, num_broken = mismatch(metrics), metrics.get("mismatch/nonfinite_tokens", 0)
    is_measured = "mismatch/k3" in metrics and metrics.get("mismatch/compared_tokens") != 0
    if num_broken > 0 or (is_measured and not math.isfinite(value)):
        text = f"mismatch: {num_broken:g} tokens without a finite log-prob; none is trained on."
        return Alarm("critical", value, text)
    if not is_measured:
        return Alarm("unmeasured", math.nan, "mismatch: not measured in this step.")
    high = normal_band(architecture, is_one_process=is_one_process)[1]
    where = "in one process" if is_one_process else f"for {architecture} across engines"
    normal = f"normal {where}: k3 up to {high:.0e}"
    age = metrics.get("staleness/max", 0)
    if age > 0:  # the policy itself has moved: no band says by how much
        high = math.inf
        normal = f"tokens are up to {age:g} update(s) old; mismatch/by_age/0 is the numerics alone"
    shown = f"mismatch {value:.2g}"
    if value > CRITICAL_LIMIT:
        advice = "Training on it is likely to collapse: stop, and look at the report."
        return Alarm("critical", value, f"{shown} is above {CRITICAL_LIMIT:g} ({normal}). {advice}")
    if value > WARNING_LIMIT:
        advice = "The report's trajectories, sorted by mismatch, show where."
        return Alarm("warning", value, f"{shown} is above {WARNING_LIMIT:g} ({normal}). {advice}")
    is_normal = metrics["mismatch/k3"] <= high
    return Alarm("ok" if is_normal else "notice", value, f"{shown} ({normal}).")
