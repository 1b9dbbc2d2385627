"""How much better than expected: advantages of episodes from their rewards. numpy float64.

A reward belongs to a leaf, a baseline to trajectories: an episode with many leaves (retries,
sub-agents, compactions) counts once, its leaves sharing its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.config import GRPO, AdvantageConfig, BatchBaseline

Float64Array = npt.NDArray[np.float64]


def centered(
    rewards: Sequence[float] | npt.NDArray[Any],
    *,
    trajectories: Sequence[int] | npt.NDArray[Any] | None = None,
    normalize_std: bool,
    eps: float = 1e-6,
) -> Float64Array:
    """Rewards of leaves minus their mean, over one group or one batch.

    rewards: [L] of the leaves. trajectories: [L], whose leaf each is; None makes each its own. The
    mean, and the standard deviation (n - 1 below it), count every trajectory once. Equal rewards,
    and fewer than two trajectories, give zeros.

    >>> centered([1.0, 0.0, 0.0, 0.0], normalize_std=False).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    values = np.asarray(rewards, np.float64).reshape(-1)
    owner = np.arange(len(values)) if trajectories is None else np.asarray(trajectories)
    if owner.shape != values.shape:
        raise AlignmentError(f"{len(values)} rewards, but the trajectories of {len(owner)} leaves.")
    _, owner = np.unique(owner, return_inverse=True)
    leaves = np.bincount(owner)
    # Equal rewards are compared, not subtracted: the mean of three 0.1 is not 0.1, and dividing
    # that difference by eps would make it an advantage.
    if len(leaves) < 2 or values.max() == values.min():
        return np.zeros_like(values)
    weight = 1.0 / leaves[owner]
    out = values - np.average(values, weights=weight)
    if normalize_std:
        variance = float((weight * out**2).sum()) / (len(leaves) - 1)
        out = out / (np.sqrt(variance) + eps)
    return out


@singledispatch
def leaf_advantages(
    config: AdvantageConfig,
    rewards: Float64Array,
    *,
    trajectories: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
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
def _(
    config: GRPO,
    rewards: Float64Array,
    *,
    trajectories: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
) -> Float64Array:
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        inside = groups == group
        out[inside] = centered(
            rewards[inside],
            trajectories=trajectories[inside],
            normalize_std=config.normalize_std,
            eps=config.eps,
        )
    return out


@leaf_advantages.register
def _(
    config: BatchBaseline,
    rewards: Float64Array,
    *,
    trajectories: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
) -> Float64Array:
    return centered(
        rewards, trajectories=trajectories, normalize_std=config.normalize_std, eps=config.eps
    )
