"""When a mismatch between sampler and trainer is worth stopping for, and what would be normal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    """One line that says the value, what is normal, and what to do if it is not."""


def mismatch(metrics: Mapping[str, Any], *, prefix: str = "mismatch") -> float:
    """max(|k1|, k2, k3) of a metrics row; NaN if one of them is missing or not a number."""
    values = [metrics.get(f"{prefix}/{name}", math.nan) for name in ("k1", "k2", "k3")]
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(abs(values[0]), values[1], values[2])


def normal_band(architecture: Architecture, *, is_one_process: bool) -> tuple[float, float]:
    """The k3 that is normal: (low, high)."""
    if is_one_process:
        return ONE_PROCESS_BAND
    return MOE_BAND if architecture == "moe" else DENSE_BAND


def mismatch_alarm(
    metrics: Mapping[str, Any], architecture: Architecture, *, is_one_process: bool = False
) -> Alarm:
    """Judges a metrics row's mismatch before the update.

    is_one_process: sampler and trainer run in one process over the same ops (the embedded engine).

    >>> row = {"mismatch/k1": 0.001, "mismatch/k2": 1.18, "mismatch/k3": 676.0}
    >>> mismatch_alarm(row, "dense").level  # log-probs shifted by one token: k1 looks harmless
    'critical'
    """
    nonfinite = metrics.get("mismatch/nonfinite_tokens", 0)
    value = mismatch(metrics)
    has_all = all(f"mismatch/{name}" in metrics for name in ("k1", "k2", "k3"))
    if nonfinite > 0 or (has_all and not math.isfinite(value)):
        return Alarm(
            "critical",
            value,
            f"mismatch: {nonfinite:g} tokens without a finite log-prob; nothing is "
            "trained on them.",
        )
    if not has_all or metrics.get("mismatch/compared_tokens") == 0:
        return Alarm("unmeasured", math.nan, "mismatch: not measured in this step.")
    low, high = normal_band(architecture, is_one_process=is_one_process)
    if is_one_process:
        setting = "in one process"
        normal = f"k3 up to {high:.0e}"
    else:
        setting = f"for {'MoE' if architecture == 'moe' else 'dense'} across engines"
        normal = f"k3 {low:.0e}..{high:.0e}"
    normal = f"normal {setting}: {normal}"
    age = metrics.get("staleness/max", 0)
    is_aged = age > 0 and not is_one_process
    if is_aged:  # the policy itself has moved: no band says by how much
        high = math.inf
        normal = f"tokens are up to {age:g} update(s) old; mismatch/by_age/0 is the numerics alone"
    k3 = metrics["mismatch/k3"]
    shown = f"mismatch {value:.2g}"
    if value > CRITICAL_LIMIT:
        return Alarm(
            "critical",
            value,
            f"{shown} is above {CRITICAL_LIMIT:g} ({normal}). Training on it is likely to "
            "collapse: stop, and look at the trajectories with the largest mismatch in the report.",
        )
    if value > WARNING_LIMIT:
        place = "though inside what is normal" if k3 <= high else "and above what is normal"
        return Alarm(
            "warning",
            value,
            f"{shown} is above {WARNING_LIMIT:g}{'' if is_aged else f', {place}'} ({normal}). The "
            "report's trajectories, sorted by mismatch, show where.",
        )
    if k3 > high:
        return Alarm(
            "notice",
            value,
            f"{shown} is below {WARNING_LIMIT:g}, and above what is normal ({normal}).",
        )
    return Alarm("ok", value, f"{shown} ({normal}).")
