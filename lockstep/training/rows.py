"""From scored episodes to training rows: each sampled token once, with its advantage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction.layout import Layout
from lockstep.errors import ConfigError, DataError
from lockstep.objectives.advantages import leaf_advantages
from lockstep.objectives.config import GAE, AdvantageConfig
from lockstep.objectives.token_advantages import gae, whiten
from lockstep.training.critic import Critic
from lockstep.types import Float32Array, Group, Sample, Trajectory

OverStale = Literal["correct", "drop"]
"""Treatment of rows with a token over the age limit: trained like any other, by the correction, or
left out."""

BySegment = Mapping[int, float | Float32Array]
"""Segment of one trajectory -> its value, or [its tokens] values."""


def rows_for_training(
    groups: Sequence[Group],
    advantage: AdvantageConfig,
    *,
    control_ids: Collection[int] = (),
    critic: Critic | None = None,
) -> list[Sample]:
    """The rows of a batch, with `advantages` and `token_kind` filled and `group` set.

    control_ids: the tokenizer's, which `token_kind` tells from text. critic: needed by advantages
    that compare with values; `values` and `returns` are then filled too.

    Failed trajectories and those without a reward are left out, of the baseline too. A sampled
    segment that several leaves share is trained in one row, with the mean advantage of its leaves.
    A segment's own reward is, with a critic, given at the segment's last token, like the leaf's.
    Without one it is added to the advantage of its tokens as it is, neither centred nor divided.

    Raises DataError naming the trajectory if a reward is not finite, ConfigError without a critic
    where one is needed.

    >>> from lockstep.objectives.config import GRPO
    >>> from lockstep.types import Task
    >>> def episode(name, reward):
    ...     t = Trajectory(id=name, status="finished")
    ...     leaf = t.record(
    ...         [7, 8], logprobs=[-0.1, -0.2], parent=t.observe([1, 2]), prompt_ids=[1, 2]
    ...     )
    ...     t.rewards[leaf] = reward
    ...     return t
    >>> group = Group(task=Task(id="t"), trajectories=[episode("a", 1.0), episode("b", 0.0)])
    >>> for row in rows_for_training([group], GRPO(normalize_std=False)):
    ...     print(row.id, row.loss_mask.astype(int), row.columns["advantages"])
    a/1 [0 0 1 1] [0.  0.  0.5 0.5]
    b/1 [0 0 1 1] [ 0.   0.  -0.5 -0.5]
    """
    scored = [
        (index, trajectory)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.status != "failed" and trajectory.rewards
    ]
    for _, trajectory in scored:
        _check_rewards(trajectory)
    control = np.array(sorted(control_ids), np.int32)
    rows: list[tuple[int, Sample]] = []
    """(number of the trajectory among `scored`, its row)"""
    for number, (index, trajectory) in enumerate(scored):
        for sample in trajectory.rows():
            sample.set("token_kind", np.isin(sample.token_ids, control).astype(np.int32))
            sample.group = index
            rows.append((number, sample))
    if not rows:
        return []
    if isinstance(advantage, GAE):
        if critic is None:
            raise ConfigError("advantage=gae needs a critic: rows_for_training(critic=...).")
        _fill_by_values(rows, [t for _, t in scored], advantage, critic)
    else:
        _fill_by_leaves(rows, scored, advantage)
    return [sample for _, sample in rows]


def sort_by_age(
    rows: Sequence[Sample], *, version: int, limit: int, over_stale: OverStale
) -> tuple[list[Sample], dict[str, float]]:
    """The rows to train, and `staleness/...` of all rows.

    A token's age is counted in updates: the version in training minus the one that sampled it.
    version: the one in training. limit: largest age of a trained token that is not over-stale. A
    row that is left out has still counted in the baseline of its group.
    """
    ages = [version - row.columns["policy_version"][row.loss_mask] for row in rows]
    if not any(len(of_row) for of_row in ages):
        return list(rows), {}
    is_over = [bool(len(of_row)) and int(of_row.max()) > limit for of_row in ages]
    every = np.concatenate(ages)
    kept = list(rows)
    if over_stale == "drop":
        kept = [row for row, over in zip(rows, is_over, strict=True) if not over]
    mixed = sum(len(np.unique(of_row)) > 1 for of_row in ages)
    return kept, {
        "staleness/version": float(version),
        "staleness/mean": float(every.mean()),
        "staleness/max": float(every.max()),
        "staleness/mixed_rows": float(mixed),
        "staleness/over_rows": float(sum(is_over)),
        "staleness/dropped_rows": float(len(rows) - len(kept)),
    }


def _fill(rows: Sequence[tuple[int, Sample]], name: str, of_segment: Sequence[BySegment]) -> None:
    """Sets a column from the segments of each trajectory; 0.0 where a row trains nothing."""
    for number, sample in rows:
        column = np.zeros(len(sample), np.float32)
        for i, tokens in sample.segments.items():
            column[tokens] = of_segment[number][i]
        sample.set(name, column)


# -- one advantage for each leaf -------------------------------------------------------------------


def _fill_by_leaves(
    rows: Sequence[tuple[int, Sample]],
    scored: Sequence[tuple[int, Trajectory]],
    advantage: AdvantageConfig,
) -> None:
    leaves = [
        (number, index, leaf, reward)
        for number, (index, trajectory) in enumerate(scored)
        for leaf, reward in trajectory.rewards.items()
    ]
    numbers, indices, _, values = (np.array(x) for x in zip(*leaves, strict=True))
    advantages = leaf_advantages(
        advantage, values.astype(np.float64), trajectories=numbers, groups=indices
    )
    by_leaf: list[dict[int, float]] = [{} for _ in scored]
    for (number, _, leaf, _), value in zip(leaves, advantages, strict=True):
        by_leaf[number][leaf] = float(value)
    of_segment = [
        _segment_advantages(trajectory, of_leaf)
        for (_, trajectory), of_leaf in zip(scored, by_leaf, strict=True)
    ]
    _fill(rows, "advantages", of_segment)


def _segment_advantages(trajectory: Trajectory, of_leaf: Mapping[int, float]) -> BySegment:
    """segment -> mean advantage of the rewarded leaves below it, plus the segment's own reward."""
    below: dict[int, list[float]] = {}
    for leaf, value in of_leaf.items():
        for i in trajectory.path(leaf):
            if trajectory.segments[i].is_sampled:
                below.setdefault(i, []).append(value)
    return {
        i: float(np.mean(values)) + (trajectory.segments[i].reward or 0.0)
        for i, values in below.items()
    }


# -- one for each token, by a critic ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """The sampled tokens from a root to a rewarded leaf, and the rewards along them."""

    number: int
    leaf: int
    sizes: dict[int, int]
    """Sampled segment -> its tokens, in order."""
    rewards: npt.NDArray[np.float64]
    """[tokens of the sampled segments]: each given after its token."""

    @classmethod
    def of(cls, number: int, trajectory: Trajectory, leaf: int, reward: float) -> _Path:
        segments = trajectory.segments
        sizes = {i: len(segments[i]) for i in trajectory.path(leaf) if segments[i].is_sampled}
        rewards = np.zeros(sum(sizes.values()))
        if sizes:
            rewards[np.cumsum([*sizes.values()]) - 1] = [segments[i].reward or 0.0 for i in sizes]
            rewards[-1] += reward
        return cls(number, leaf, sizes, rewards)


def _fill_by_values(
    rows: Sequence[tuple[int, Sample]],
    trajectories: Sequence[Trajectory],
    advantage: GAE,
    critic: Critic,
) -> None:
    """Fills `values`, `advantages` and `returns`, by GAE along the path of every rewarded leaf.

    A token that several leaves share has the mean over their paths of both: what follows it
    differs, and it is worth what follows on average.
    """
    samples = [sample for _, sample in rows]
    paths = [
        _Path.of(number, trajectory, leaf, reward)
        for number, trajectory in enumerate(trajectories)
        for leaf, reward in trajectory.rewards.items()
    ]
    paths = [path for path in paths if path.sizes]
    values = {
        (number, i): of_row[tokens]
        for (number, sample), of_row in zip(rows, critic.values(samples), strict=True)
        for i, tokens in sample.segments.items()
    }
    along_paths = np.concatenate([values[p.number, i] for p in paths for i in p.sizes])
    bootstrap = None
    if advantage.bootstrap_truncated:
        bootstrap = _values_at_cuts(paths, trajectories, critic)
    estimate = partial(
        gae,
        torch.from_numpy(np.concatenate([path.rewards for path in paths])),
        torch.from_numpy(along_paths).double(),
        Layout.packed([len(path.rewards) for path in paths]),
        gamma=advantage.gamma,
        bootstrap=bootstrap,
    )
    advantages, returns = estimate(lam=advantage.lam)
    if advantage.critic_lam is not None:
        _, returns = estimate(lam=advantage.critic_lam)
    _fill(rows, "advantages", _means_over_paths(paths, advantages.numpy()))
    _fill(rows, "returns", _means_over_paths(paths, returns.numpy()))
    if advantage.whiten:
        layout = Layout.packed([sample.num_trained for sample in samples])
        given = np.concatenate([s.columns["advantages"][s.loss_mask] for s in samples])
        whitened = whiten(torch.from_numpy(given), layout).numpy()
        for sample, part in zip(samples, np.split(whitened, layout.offsets[1:-1]), strict=True):
            sample.columns["advantages"][sample.loss_mask] = part


def _values_at_cuts(
    paths: Sequence[_Path], trajectories: Sequence[Trajectory], critic: Critic
) -> torch.Tensor:
    """[paths]: the value behind the newest leaf of each truncated trajectory; 0.0 elsewhere."""
    out = torch.zeros(len(paths), dtype=torch.float64)
    cut = [
        at
        for at, path in enumerate(paths)
        if trajectories[path.number].status == "truncated"
        and path.leaf == max(trajectories[path.number].rewards)
    ]
    if cut:
        ends = [trajectories[paths[at].number].row(paths[at].leaf) for at in cut]
        out[cut] = torch.from_numpy(critic.values_at_end(ends)).double()
    return out


def _means_over_paths(
    paths: Sequence[_Path], of_token: npt.NDArray[np.float64]
) -> list[dict[int, Float32Array]]:
    """For each trajectory, segment -> [its tokens] the mean over the paths that go through it."""
    found: dict[tuple[int, int], list[npt.NDArray[np.float64]]] = {}
    sizes = [size for path in paths for size in path.sizes.values()]
    parts = iter(np.split(of_token, np.cumsum(sizes)[:-1]))
    for path in paths:
        for i in path.sizes:
            found.setdefault((path.number, i), []).append(next(parts))
    out: list[dict[int, Float32Array]] = [{} for _ in range(paths[-1].number + 1)]
    for (number, i), columns in found.items():
        out[number][i] = np.mean(columns, axis=0).astype(np.float32)
    return out


def _check_rewards(trajectory: Trajectory) -> None:
    """Raises DataError if a leaf's reward, or a segment's own, is not finite."""
    given = [(f"leaf {leaf}", reward) for leaf, reward in trajectory.rewards.items()]
    given += [
        (f"segment {i}", segment.reward)
        for i, segment in enumerate(trajectory.segments)
        if segment.reward is not None
    ]
    for where, reward in given:
        if not np.isfinite(reward):
            raise DataError(
                f"trajectory {trajectory.id}, {where}: the reward is {reward}; a reward must "
                "be finite. An episode that could not be scored has status 'failed'."
            )
