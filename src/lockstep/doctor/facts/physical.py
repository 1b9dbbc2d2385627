"""Facts about the statistics of training: figures of one step that cannot be true together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.doctor.findings import FLOAT_NOISE, Finding, Setting
from lockstep.doctor.rows import BoolArray, Float64Array
from lockstep.tables import tables_beside

THEIR_NAMES: Mapping[str, Sequence[str]] = {
    ours: theirs.split() for ours, theirs in tables_beside(__file__, "metric_names.toml").items()
}
"""Our name of a metric -> the same figure in other programs."""
ROUNDING = 1.001
"""Tolerance for figures that were rounded, or computed in float32."""
STEPS = 5
"""Steps in a row that a rule about several steps must hold in."""
FAR = 1.0
"""A k2 in nats squared that no kernel explains: mixtures on two engines reach a k3 of 0.1."""
UNIFORM = 1000.0
"""A perplexity of no language model's own samples: their entropy is below 3 nats, log 20."""
FIRST_KL = "the first update of a step begins with a KL beyond float noise and the mismatch"
PHYSICAL = "facts/physical"
CLAIM = "the statistics of training do not contradict each other"


def known_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics, with our names added to the names of other programs; ours win.

    >>> known_metrics([{"actor/pg_clipfrac": 0.1, "step": 3}])[0]["train/clip_fraction"]
    0.1
    """
    return [
        {
            ours: row[name]
            for ours, theirs in THEIR_NAMES.items()
            for name in reversed(theirs)
            if name in row
        }
        | dict(row)
        for row in rows
    ]


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Float64Array:
    """[S] a metric's value at each step, NaN where there is none."""
    values: list[Any] = [row.get(name) for row in rows]
    return np.array(
        [float(v) if hasattr(v, "__float__") and not np.ndim(v) else np.nan for v in values]
    )


def _still(values: Float64Array) -> BoolArray:
    """[S] True where a value equals the value of the step before in every bit."""
    return np.append(False, values[1:] == values[:-1])[: len(values)]


def _stagnates(values: Float64Array) -> BoolArray:
    """[S] True where the mean of the last ten steps is no higher than the mean of the ten before,
    beyond two standard errors."""
    out = np.zeros(len(values), np.bool_)
    for end in range(4 * STEPS, len(values) + 1):
        halves = values[end - 4 * STEPS : end].reshape(2, -1)
        before, last = halves.mean(1)
        error = np.sqrt(halves.var(1, ddof=1).sum() / halves.shape[1])
        out[end - 1] = last - before <= 2 * error
    return out


def _rules(c: Callable[[str], Float64Array]) -> dict[int, dict[str, BoolArray]]:
    """Steps in a row that a rule takes -> contradiction in words -> [S] where it holds."""
    k1, k2, k3 = c("mismatch/k1"), c("mismatch/k2"), c("mismatch/k3")
    clipped, grad, loss = c("train/clip_fraction"), c("train/grad_norm"), c("train/loss")
    largest, first = c("mismatch/max_abs_diff"), np.abs(c("train/approx_kl/0"))
    reward, spread = c("reward/mean"), c("reward/std")
    updates = (grad > 0) & (c("train/lr") > 0)
    # Rewards that differ within a step have another mean in the next.
    varies = np.where(np.isnan(spread), ~np.isin(reward, (-1.0, 0.0, 1.0)), spread > 0)
    flat = _still(reward) & ~_still(loss) & ~np.isnan(loss) & varies
    stands = _still(c("policy_version")) & updates
    is_above = k2 > ROUNDING * largest**2 / 2 + 1e-12
    is_same = (k2 == c("mismatch_after/k2")) & (k2 > 0) & updates
    once = {
        "k3 is below 0": k3 < -1e-7,
        "k2 is below k1^2 / 2": k2 * ROUNDING + 1e-12 < k1**2 / 2,
        "k2 is above half the square of the largest difference": is_above,
        "the gap is bitwise the same before and after the update": is_same,
        # Old log-probs are the trainer's own, so nothing has moved; or they are the sampler's.
        FIRST_KL: first > FLOAT_NOISE + ROUNDING * np.abs(np.nan_to_num(k1)),
    }
    for name in ("train/clip_fraction", "mismatch/forced_share", "mismatch/ess"):
        once[f"{name} is outside of 0 to 1"] = (c(name) < 0) | (c(name) > ROUNDING)
    is_far, is_free = np.abs(c("train/approx_kl")) > 0.5, clipped == 0
    is_wild = is_far | (clipped > 0.3) | (k2 > 0.1)
    once["the mean reward does not rise in 20 steps of a wild KL or clip fraction"] = (
        _stagnates(reward) & is_wild
    )
    is_uniform = np.fmax(c("perplexity"), c("trainer_perplexity")) > UNIFORM
    lasting = {
        "k2 is beyond any two kernels: the rows hold other ids than were sampled": k2 > FAR,
        "the perplexity is a guess's: the rows hold other ids than were sampled": is_uniform,
        "nearly all tokens are clipped": clipped > 0.9,
        "the two sides are far apart, but no token is clipped": (k3 > 1) & is_free,
        "updates move the mean log-prob far, but no token is clipped": is_far & is_free,
        "the sampler's weights stay at one version, but updates are made": stands,
    }
    idle = {"advantages are not 0, but the gradient is": (grad == 0) & (c("advantage/max_abs") > 0)}
    still = {"the mean reward is bitwise the same, but the loss changes": flat}
    return {1: once, 3: idle, STEPS: lasting, 4 * STEPS: still}


def _longest(holds: BoolArray) -> tuple[int, int]:
    """(begin, end) of the longest run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], holds.astype(np.int8), [0]])))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return max(runs, key=lambda run: run[1] - run[0], default=(0, 0))


def contradictions(setting: Setting) -> Finding:
    """Contradictions in the metrics of steps."""
    named = known_metrics(setting.step_metrics)
    rows = [row for row in named if THEIR_NAMES.keys() & row.keys()]
    told = f"no rule is broken in {len(rows)} steps"
    finding = Finding(
        check=PHYSICAL, claim=CLAIM, verdict="consistent", measured=told, basis="shown"
    )
    if not rows:
        found = sorted({name for row in setting.step_metrics for name in row})
        told = f"no rule could be tried. Found: {', '.join(found[:6]) or 'none'}; read are "
        told += ", ".join(f"{ours} (or {', '.join(n)})" for ours, n in THEIR_NAMES.items())
        return replace(finding, verdict="not_checkable", measured=told, lacks=("step_metrics",))
    with np.errstate(invalid="ignore"):
        rules = _rules(lambda name: _column(rows, name))
    steps = [int(row.get("step", i)) for i, row in enumerate(rows)]
    fired = [
        f"{words} (steps {steps[at[0]]} to {steps[at[1] - 1]})"
        for least, found in rules.items()
        for words, holds in found.items()
        if (at := _longest(holds))[1] - at[0] >= least
    ]
    if not fired:
        return finding
    is_first = all(words.startswith(FIRST_KL) for words in fired)
    cause = "uneven_old_logprobs" if is_first else "unphysical"
    return replace(finding, verdict="differs", measured="; ".join(fired), cause=cause)
