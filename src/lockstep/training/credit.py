"""Credit of single turns: from rewards of leaves and turns to one advantage per sampled segment.

A turn is one reply of the model: one segment, or several where new weights came in its middle. It
is named by the first of them. What several leaves share has the mean over the leaves below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import Any

import numpy as np

from lockstep.objectives.advantages import leaf_advantages, numbered
from lockstep.objectives.config import AdvantageConfig, CreditConfig
from lockstep.types import Group, Trajectory

Key = tuple[int, int]
"""(number of a trajectory among the scored, segment)"""
BySegment = Mapping[Key, Any]
"""Segment -> its value, or [its tokens] values."""
Scored = Sequence[tuple[int, Trajectory]]
"""(number of its group, trajectory) of each trajectory with a reward and without failure."""

WHOLE = -1
"""Replaces the number of a segment: the trajectory, with all of its leaves."""


def segment_advantages(
    scored: Scored, advantage: AdvantageConfig, credit: CreditConfig
) -> dict[Key, float]:
    """Advantage of every sampled segment above a rewarded leaf.

        A_k = episode_weight A + turn_weight C(G_k) + branch_weight (V_k - V_k-1)
              + process_weight P_k

    A is the advantage of the leaf in its group. G_k is the return from turn k on. C compares it
    with the returns of the turns that `credit.compare` names, by the same rule as A. V_k is the
    mean of A over the leaves below turn k, V_-1 the mean over the whole trajectory: without
    branches, the difference is exactly 0. P_k is made of turns' own rewards r: r_k by default,
    C(r_k) with process=turn, the discounted sum of C(r_k), C(r_k+1), ... with process=group; with
    process=return the rewards are in A and G instead.

    Sources: C over equal observations is GiGPO (Feng et al. 2025, arXiv 2505.10978), with every
    episode once in the baseline of A. C(r_k) is MT-GRPO (Zeng et al. 2025, arXiv 2505.11821), its
    sum the process supervision of GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.3). V_k -
    V_k-1 is the local advantage of TreeRL (Hou et al. 2025, arXiv 2506.11902, eq. 3) and A its
    global one; TreeRL divides both by the root of the number of leaves, since it trains a shared
    turn once per leaf, and here it is trained once. C over equal paths compares siblings as TreeRPO
    does (Yang et al. 2025, arXiv 2506.05183). Guard: tests/cpu/training/test_credit.py.
    """
    paths = _paths(scored)
    in_return = credit.process_weight if credit.process == "return" else 0.0
    at_leaves = leaf_advantages(
        advantage,
        np.array([path.reward + in_return * sum(path.own) for path in paths], np.float64),
        trajectories=np.array([path.number for path in paths]),
        groups=np.array([path.group for path in paths]),
    )
    of_episode = means_over_leaves(
        ((path.number, i), value)
        for path, value in zip(paths, at_leaves.tolist(), strict=True)
        for i in (WHOLE, *(i for turn in path.turns for i in turn))
    )
    terms = _turn_terms(paths, advantage, credit, of_episode, in_return)
    as_it_is = credit.process_weight if credit.process == "added" else 0.0
    return {
        (path.number, i): credit.episode_weight * of_episode[path.number, i]
        + as_it_is * (path.trajectory.segments[i].reward or 0.0)
        + sum(weight * values[name] for weight, values in terms)
        for path in paths
        for name, turn in zip(path.names, path.turns, strict=True)
        for i in turn
    }


def credit_metrics(groups: Sequence[Group], credit: CreditConfig) -> dict[str, float]:
    """Number of turns that the settings compare; nothing by default."""
    paths = _paths(scored_trajectories(groups))
    found: dict[str, float] = {}
    if paths and credit.compare != "episode":
        alike = _alike(paths, credit.compare)
        owners = {(alike[turn], _owner(turn, credit.compare)) for turn in alike}
        sizes = Counter(common for common, _ in owners)
        peers = [sizes[common] > 1 for common in alike.values()]
        found["credit/compared_share"] = float(np.mean(peers))
    if paths and credit.process != "added":
        given = _by_turn(paths, lambda path: path.is_rewarded)
        found["credit/rewarded_share"] = float(np.mean(list(given.values())))
    return found


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """The sum of each reward and of gamma times the sum after it.

    >>> discounted([1.0, 0.0, 4.0], 0.5)
    [2.0, 2.0, 4.0]
    """
    sums, after = list[float](), 0.0
    for reward in reversed(rewards):
        after = reward + gamma * after
        sums.append(after)
    return sums[::-1]


def scored_trajectories(groups: Sequence[Group]) -> Scored:
    """Trajectories that count in a baseline."""
    return [
        (index, trajectory)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.status != "failed" and trajectory.rewards and not trajectory.policy
    ]


def sampled_path(trajectory: Trajectory, leaf: int) -> list[int]:
    return [i for i in trajectory.path(leaf) if trajectory.segments[i].is_sampled]


def means_over_leaves(found: Iterable[tuple[Key, Any]]) -> dict[Key, Any]:
    """Segment -> the mean of all that is found for it, over the rewarded leaves below it."""
    by_segment: dict[Key, list[Any]] = {}
    for key, value in found:
        by_segment.setdefault(key, []).append(value)
    return {key: np.mean(values, axis=0) for key, values in by_segment.items()}


# -- mechanism ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Path:
    """The turns above one rewarded leaf."""

    group: int
    number: int
    trajectory: Trajectory
    reward: float
    turns: Sequence[Sequence[int]]
    """Segments of each turn."""

    @property
    def names(self) -> list[Key]:
        return [(self.number, turn[0]) for turn in self.turns]

    @property
    def own(self) -> list[float]:
        """The turns' own rewards; 0.0 where none was given."""
        return [sum(self.trajectory.segments[i].reward or 0.0 for i in turn) for turn in self.turns]

    @property
    def is_rewarded(self) -> list[bool]:
        segments = self.trajectory.segments
        return [any(segments[i].reward is not None for i in turn) for turn in self.turns]

    def returns(self, own_weight: float, gamma: float) -> list[float]:
        rewards = [own_weight * reward for reward in self.own]
        return discounted([*rewards[:-1], rewards[-1] + self.reward] if rewards else [], gamma)


def _paths(scored: Scored) -> list[_Path]:
    out: list[_Path] = []
    for number, (group, trajectory) in enumerate(scored):
        for leaf, reward in trajectory.rewards.items():
            sampled = sampled_path(trajectory, leaf)
            parts = groupby(sampled, key=lambda i, t=trajectory: t.segments[i].turn)
            out.append(_Path(group, number, trajectory, reward, [[*part] for _, part in parts]))
    return out


def _turn_terms(
    paths: Sequence[_Path],
    advantage: AdvantageConfig,
    credit: CreditConfig,
    of_episode: Mapping[Key, float],
    in_return: float,
) -> list[tuple[float, Mapping[Key, float]]]:
    """(weight, turn -> value) of each term that turns have beside the advantage of their
    episode."""
    terms: list[tuple[float, Mapping[Key, float]]] = []
    if credit.compare != "episode":
        returns = _by_turn(paths, lambda path: path.returns(in_return, credit.gamma))
        terms.append((credit.turn_weight, _compared(advantage, paths, returns, credit.compare)))
    if credit.branch_weight:
        parted = {
            turn: of_episode[turn] - of_episode[before]
            for path in paths
            for before, turn in pairwise([(path.number, WHOLE), *path.names])
        }
        terms.append((credit.branch_weight, parted))
    if credit.process in ("turn", "group"):
        one = own = _compared(
            advantage, paths, _by_turn(paths, lambda path: path.own), credit.process
        )
        if credit.process == "group":
            own = _by_turn(
                paths, lambda path: discounted([one[t] for t in path.names], credit.gamma)
            )
        terms.append((credit.process_weight, own))
    return terms


def _by_turn(
    paths: Sequence[_Path], values_of: Callable[[_Path], Sequence[float]]
) -> dict[Key, float]:
    """Turn -> the mean of its values over the leaves below it."""
    return means_over_leaves(
        pair for path in paths for pair in zip(path.names, values_of(path), strict=True)
    )


def _compared(
    advantage: AdvantageConfig, paths: Sequence[_Path], values: Mapping[Key, float], common: str
) -> dict[Key, float]:
    """The advantage of each turn's value among the values of its compared turns."""
    alike = _alike(paths, common)
    found = leaf_advantages(
        advantage,
        np.array(list(values.values()), np.float64),
        trajectories=numbered(_owner(turn, common) for turn in values),
        groups=numbered(alike[turn] for turn in values),
    )
    return dict(zip(values, found.tolist(), strict=True))


def _alike(paths: Sequence[_Path], common: str) -> dict[Key, Hashable]:
    """Turn -> a key that the turns it is compared with have too; no two groups share one."""

    def common_of(path: _Path, at: int) -> Hashable:
        trajectory, before = path.trajectory, path.trajectory.segments[path.turns[at][0]].parent
        if common == "group":
            return path.group
        if common == "turn":
            return path.group, at
        if common == "path" or before is None:
            return path.group, trajectory.path_ids(before).tobytes()
        segments = [trajectory.segments[i] for i in reversed(trajectory.path(before))]
        observed = [*takewhile(lambda segment: not segment.is_sampled, segments)]
        return path.group, b"".join(segment.token_ids.tobytes() for segment in reversed(observed))

    return {name: common_of(path, at) for path in paths for at, name in enumerate(path.names)}


def _owner(turn: Key, common: str) -> Hashable:
    """The unit of the baseline: among turns of one number the episode, with all its branches;
    elsewhere each turn by itself, as in GiGPO."""
    return turn[0] if common == "turn" else turn
