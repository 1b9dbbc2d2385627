"""Advantages of episodes from their rewards. torch float64, on the device of the rewards.

A reward belongs to a leaf, a baseline to trajectories: an episode with many leaves (retries,
sub-agents, compactions) counts once, its leaves sharing its weight. Advantages of tokens from a
critic's values are in `objectives/token_advantages.py`.

# L leaves
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction.arrays import takes_arrays
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.config import GRPO, RLOO, AdvantageConfig, ReinforcePlusPlus

Tensor = torch.Tensor
Numbers = Sequence[float] | npt.NDArray[Any] | Tensor
Names = Sequence[Hashable] | npt.NDArray[Any] | Tensor

EPS = 1e-6
"""Added to a standard deviation: verl's number; TRL has 1e-4. Rewards of 0 and 1 differ by more."""


@takes_arrays
def centered(
    rewards: Numbers,
    *,
    trajectories: Names | None = None,
    groups: Names | None = None,
    normalize_std: bool,
) -> Any:
    """Rewards of leaves minus their mean, over each group.

    rewards: [L], of the leaves. trajectories: [L], the trajectory of each leaf; None: each its own.
    groups: [L], the group of each leaf, by numbers or texts; None: all one. Mean and standard
    deviation (divided by n - 1) count every trajectory once. Equal rewards, and fewer than two
    trajectories, give zeros. An array gives an array, a tensor a tensor.

    >>> centered([1.0, 0.0, 0.0, 0.0], normalize_std=False).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    values, owner, group = _leaves(rewards, trajectories, groups)
    weight = 1 / _over(owner, torch.ones_like(values))
    mean = _over(group, values * weight) / _over(group, weight)
    out = torch.where(_is_level(values, weight, group), 0.0, values - mean)
    return out / (_deviation(out, weight, group) + EPS) if normalize_std else out


@takes_arrays
def leave_one_out(
    rewards: Numbers, *, trajectories: Names | None = None, groups: Names | None = None
) -> Any:
    """Rewards of leaves minus the mean of all other trajectories, over each group.

    Arguments as of `centered`. A trajectory's own leaves are not in its baseline, so the baseline
    does not depend on its own reward. Source: Kool et al. 2019; as RLOO, Ahmadian et al. 2024
    (arXiv 2402.14740), section 3.3.

    >>> leave_one_out([1.0, 0.0, 0.5]).tolist()
    [0.75, -0.75, 0.0]
    """
    values, owner, group = _leaves(rewards, trajectories, groups)
    leaves = _over(owner, torch.ones_like(values))
    own = _over(owner, values) / leaves
    others = _over(group, own / leaves) - own
    count = _over(group, 1 / leaves).round()
    is_level = _is_level(values, 1 / leaves, group)
    return torch.where(is_level, 0.0, values - others / (count - 1).clamp(min=1))


@singledispatch
def leaf_advantages(
    config: AdvantageConfig, rewards: Any, *, trajectories: Any, groups: Any
) -> Any:
    """[L] float64: the advantage of every leaf of a batch, by the type of `config`.

    rewards: [L] finite. trajectories: [L], unique over the batch. groups: [L]. Tensors or numpy
    arrays, as is the result. Failed trajectories are left out by the caller. A type of your own is
    registered with leaf_advantages.register.
    """
    raise ConfigError(
        f"no advantage for a {type(config).__name__}; register one with "
        "leaf_advantages.register (--plugin)."
    )


@leaf_advantages.register
def _(config: GRPO, rewards: Any, **of_leaf: Any) -> Any:
    return centered(rewards, normalize_std=config.normalize_std, **of_leaf)


@leaf_advantages.register
def _(config: RLOO, rewards: Any, **of_leaf: Any) -> Any:
    return leave_one_out(rewards, **of_leaf)


@leaf_advantages.register
@takes_arrays
def _(config: ReinforcePlusPlus, rewards: Any, *, trajectories: Any, groups: Any) -> Any:
    if config.baseline == "batch":
        return centered(rewards, trajectories=trajectories, normalize_std=config.normalize_std)
    out = centered(rewards, trajectories=trajectories, groups=groups, normalize_std=False)
    # Group means are 0 already, so the batch's is: only the deviation is the batch's to give.
    _, owner, batch = _leaves(out, trajectories, None)
    return out / (_deviation(out, 1 / _over(owner, torch.ones_like(out)), batch) + EPS)


# -- mechanism ------------------------------------------------------------------------------------


def _leaves(
    rewards: Numbers, trajectories: Names | None, groups: Names | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[L] each: rewards, float64; numbers of the trajectories, other ones in each group; of the
    groups. An episode is in several groups where its turns are compared."""
    values = torch.as_tensor(rewards).double()
    if values.ndim != 1:
        raise AlignmentError(
            f"the rewards have the shape {list(values.shape)}; expected one per leaf, "
            f"[{values.numel()}], with the group of each: groups=..."
        )
    found = list[Tensor]()
    for name, given in (("groups", groups), ("trajectories", trajectories)):
        if given is None:
            given = torch.arange(len(values)) * (name == "trajectories")
        names = given if isinstance(given, Tensor) else torch.from_numpy(numbered(given))
        if names.shape != values.shape:
            raise AlignmentError(f"{len(values)} rewards, but the {name} of {len(names)} leaves.")
        found.append(_numbered(names.to(values.device)))
    group, owner = found
    return values, group * len(values) + owner, group


def numbered(names: Iterable[Hashable]) -> Any:
    """[n] int64: equal names have equal numbers."""
    numbers = dict[Hashable, int]()
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _over(names: Tensor, values: Tensor, how: str = "sum") -> Tensor:
    """[L]: at each leaf, the sum ("max", "min") over the leaves of its name; the same bits on
    every run, and no wait for a GPU."""
    if not len(values):
        return values
    order, first = names.argsort(stable=True), _numbered(names)
    lengths = torch.zeros_like(first).scatter_add_(0, first, torch.ones_like(first))
    return torch.segment_reduce(values[order], how, lengths=lengths, unsafe=True)[first]


def _numbered(names: Tensor) -> Tensor:
    """[L] int64 below L: equal for equal names alone."""
    return torch.searchsorted(names.sort().values, names)


def _is_level(values: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """[L] bool: groups with nothing to compare. Equal rewards are compared, not subtracted: the
    mean of three 0.1 is not 0.1, and dividing that difference by EPS would make it an advantage."""
    is_equal = _over(group, values, "max") == _over(group, values, "min")
    return is_equal | (_over(group, weight).round() < 2)


def _deviation(centred: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """[L]: standard deviation over the trajectories of each leaf's group (divided by n - 1).
    weight: [L], 1 / number of leaves of the trajectory."""
    count = _over(group, weight).round()
    return (_over(group, weight * centred.square()) / (count - 1).clamp(min=1)).sqrt()
