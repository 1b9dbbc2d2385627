"""Advantages of episodes from their rewards. numpy float64.

A reward belongs to a leaf, a baseline to trajectories: an episode with many leaves (retries,
sub-agents, compactions) counts once, its leaves sharing its weight. Advantages of tokens from a
critic's values are in `objectives/token_advantages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.config import GRPO, RLOO, AdvantageConfig, ReinforcePlusPlus

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

EPS = 1e-6
"""Added to a standard deviation: verl's number; TRL has 1e-4. Rewards of 0 and 1 differ by more."""


def centered(
    rewards: Sequence[float] | npt.NDArray[Any],
    *,
    trajectories: Sequence[int] | npt.NDArray[Any] | None = None,
    normalize_std: bool,
) -> Float64Array:
    """Rewards of leaves minus their mean, over one group or one batch.

    rewards: [L], of the leaves. trajectories: [L], the trajectory of each leaf; None: each its own.
    Mean and standard deviation (divided by n - 1) count every trajectory once. Equal rewards,
    and fewer than two trajectories, give zeros.

    >>> centered([1.0, 0.0, 0.0, 0.0], normalize_std=False).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    values, owner, leaves = _leaves(rewards, trajectories)
    # Equal rewards are compared, not subtracted: the mean of three 0.1 is not 0.1, and dividing
    # that difference by EPS would make it an advantage.
    if len(leaves) < 2 or values.max() == values.min():
        return np.zeros_like(values)
    weight = 1.0 / leaves[owner]
    out = values - np.average(values, weights=weight)
    return out / (_deviation(out, weight) + EPS) if normalize_std else out


def leave_one_out(
    rewards: Sequence[float] | npt.NDArray[Any],
    *,
    trajectories: Sequence[int] | npt.NDArray[Any] | None = None,
) -> Float64Array:
    """Rewards of leaves minus the mean of all other trajectories, over one group.

    rewards, trajectories: as of `centered`. A trajectory's own leaves are not in its baseline, so
    the baseline does not depend on its own reward. Source: Kool et al. 2019; as RLOO,
    Ahmadian et al. 2024 (arXiv 2402.14740), section 3.3.

    >>> leave_one_out([1.0, 0.0, 0.5]).tolist()
    [0.75, -0.75, 0.0]
    """
    values, owner, leaves = _leaves(rewards, trajectories)
    if len(leaves) < 2 or values.max() == values.min():
        return np.zeros_like(values)
    means = np.bincount(owner, weights=values) / leaves
    others = (means.sum() - means) / (len(means) - 1)
    return values - others[owner]


@singledispatch
def leaf_advantages(
    config: AdvantageConfig,
    rewards: Float64Array,
    *,
    trajectories: Int64Array,
    groups: Int64Array,
) -> Float64Array:
    """[L] float64: the advantage of every leaf of a batch, by the type of `config`.

    rewards: [L] finite. trajectories: [L], unique over the batch. groups: [L]. Failed trajectories
    are left out by the caller. A type of your own is registered with leaf_advantages.register.
    """
    raise ConfigError(
        f"no advantage for a {type(config).__name__}; register one with "
        "leaf_advantages.register (--plugin)."
    )


@leaf_advantages.register
def _(config: GRPO, rewards: Float64Array, **of_leaf: Int64Array) -> Float64Array:
    compare = partial(centered, normalize_std=config.normalize_std)
    return _in_groups(compare, rewards, **of_leaf)


@leaf_advantages.register
def _(config: RLOO, rewards: Float64Array, **of_leaf: Int64Array) -> Float64Array:
    return _in_groups(leave_one_out, rewards, **of_leaf)


@leaf_advantages.register
def _(config: ReinforcePlusPlus, rewards: Float64Array, **of_leaf: Int64Array) -> Float64Array:
    trajectories = of_leaf["trajectories"]
    if config.baseline == "batch":
        return centered(rewards, trajectories=trajectories, normalize_std=config.normalize_std)
    compare = partial(centered, normalize_std=False)
    out = _in_groups(compare, rewards, **of_leaf)
    # Group means are 0 already, so the batch's is: only the deviation is the batch's to give.
    _, owner, leaves = _leaves(out, trajectories)
    return out / (_deviation(out, 1.0 / leaves[owner]) + EPS) if len(leaves) > 1 else out


def _leaves(
    rewards: Sequence[float] | npt.NDArray[Any],
    trajectories: Sequence[int] | npt.NDArray[Any] | None,
) -> tuple[Float64Array, Int64Array, Int64Array]:
    """(rewards [L], the trajectory of each leaf [L] counted from 0, leaves of each trajectory)."""
    values = np.asarray(rewards, np.float64).reshape(-1)
    owner = np.arange(len(values)) if trajectories is None else np.asarray(trajectories)
    if owner.shape != values.shape:
        raise AlignmentError(f"{len(values)} rewards, but the trajectories of {len(owner)} leaves.")
    _, owner = np.unique(owner, return_inverse=True)
    return values, owner, np.bincount(owner)


def _deviation(centred: Float64Array, weight: Float64Array) -> float:
    """Standard deviation over trajectories (divided by n - 1). weight: [L], 1 / number of leaves of
    the trajectory."""
    num_trajectories = round(float(weight.sum()))
    return float(np.sqrt((weight * centred**2).sum() / (num_trajectories - 1)))


def _in_groups(
    compare: Callable[..., Float64Array],
    rewards: Float64Array,
    *,
    trajectories: Int64Array,
    groups: Int64Array,
) -> Float64Array:
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        inside = groups == group
        out[inside] = compare(rewards[inside], trajectories=trajectories[inside])
    return out
