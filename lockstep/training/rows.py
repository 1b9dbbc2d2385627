"""From scored episodes to training rows: each sampled token once, with its advantage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction.layout import Layout
from lockstep.errors import ConfigError, DataError
from lockstep.objectives.advantages import leaf_advantages
from lockstep.objectives.config import GAE, AdvantageConfig
from lockstep.objectives.token_advantages import gae, whiten
from lockstep.types import Float32Array, Group, Sample, Trajectory


class ValueFunction(Protocol):
    """What says how much states are worth: `training.critic.Critic`."""

    def values(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """[T] float32 per sample: the value before each trained token; kept as `values`."""
        ...

    def values_at_end(self, samples: Sequence[Sample]) -> Float32Array:
        """[R] float32: the value after each sample's last token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A training row, and what it is made of."""

    sample: Sample
    trajectory: Trajectory
    number: int
    """Of the trajectory among those that are trained on."""
    leaf: int
    owned: set[int]

    def lay(self, of_segment: Mapping[int, float | Float32Array]) -> Float32Array:
        """[T]: what each segment that this row trains has for its tokens; 0.0 elsewhere."""
        segments = self.trajectory.segments
        out = [np.zeros(len(segments[i]), np.float32) for i in self.trajectory.path(self.leaf)]
        for i, column in zip(self.trajectory.path(self.leaf), out, strict=True):
            if i in self.owned:
                column[:] = of_segment[i]
        return np.concatenate(out)


def rows_for_training(
    groups: Sequence[Group],
    advantage: AdvantageConfig,
    *,
    control_ids: Collection[int] = (),
    critic: ValueFunction | None = None,
) -> list[Sample]:
    """The rows of a batch, with `advantages` and `token_kind` filled and `group` set.

    control_ids: the tokenizer's, which `token_kind` tells from text. critic: needed by the
    advantages that compare with values; `values` and `returns` are then filled, too.

    Failed trajectories and those without a reward are left out, of the baseline too. A sampled
    segment that several leaves share is trained in one row, with the mean advantage of its leaves.
    A segment's own reward (a turn's) is, with a critic, a reward like the leaf's: given at the
    segment's last token, for all tokens up to it. Without, it is added to the advantage of its
    tokens as it is: neither centred nor divided, so 0 says nothing and 0.1 moves these tokens by a
    tenth of a deviation.

    Raises DataError naming the trajectory if a reward is not finite, ConfigError without a critic
    where one is needed.
    """
    scored = [
        (index, trajectory)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.status != "failed" and trajectory.rewards
    ]
    rewards = [_finite_rewards(trajectory) for _, trajectory in scored]
    control = np.array(sorted(control_ids), np.int32)
    rows: list[_Row] = []
    for number, (index, trajectory) in enumerate(scored):
        for leaf, owned, sample in trajectory.rows():
            sample.set("token_kind", np.isin(sample.token_ids, control).astype(np.int32))
            sample.group = index
            rows.append(_Row(sample, trajectory, number, leaf, owned))
    if not rows:
        return []
    if isinstance(advantage, GAE):
        if critic is None:
            raise ConfigError("advantage=gae needs a critic: rows_for_training(critic=...).")
        _fill_by_values(rows, [t for _, t in scored], rewards, advantage, critic)
    else:
        _fill_by_leaves(rows, scored, rewards, advantage)
    return [row.sample for row in rows]


# -- one advantage for each leaf -------------------------------------------------------------------


def _fill_by_leaves(
    rows: Sequence[_Row],
    scored: Sequence[tuple[int, Trajectory]],
    rewards: Sequence[Mapping[int, float]],
    advantage: AdvantageConfig,
) -> None:
    leaves = [
        (number, index, leaf, reward)
        for number, (index, _) in enumerate(scored)
        for leaf, reward in rewards[number].items()
    ]
    numbers, indices, _, values = (np.array(x) for x in zip(*leaves, strict=True))
    advantages = leaf_advantages(
        advantage, values.astype(np.float64), trajectories=numbers, groups=indices
    )
    by_leaf: list[dict[int, float]] = [{} for _ in scored]
    for (number, _, leaf, _), value in zip(leaves, advantages, strict=True):
        by_leaf[number][leaf] = float(value)
    of_segment = [
        segment_advantages(trajectory, of_leaf)
        for (_, trajectory), of_leaf in zip(scored, by_leaf, strict=True)
    ]
    for row in rows:
        row.sample.set("advantages", row.lay(of_segment[row.number]))


def segment_advantages(trajectory: Trajectory, of_leaf: dict[int, float]) -> dict[int, float]:
    """segment -> mean advantage of the rewarded leaves below it, plus the segment's own reward.

    of_leaf: rewarded leaf -> advantage. Sampled segments without a rewarded leaf are left out.
    """
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


def _fill_by_values(
    rows: Sequence[_Row],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Mapping[int, float]],
    advantage: GAE,
    critic: ValueFunction,
) -> None:
    """`values`, `advantages` and `returns`, by GAE along the path of every rewarded leaf.

    A token that several leaves share has the mean over their paths, of both: what follows it
    differs, what it is worth is what follows on average.
    """
    paths = [
        _Path.of(number, trajectory, leaf, reward)
        for number, trajectory in enumerate(trajectories)
        for leaf, reward in rewards[number].items()
    ]
    paths = [path for path in paths if path.sampled]
    values = _values_of_segments(rows, critic.values([row.sample for row in rows]))
    layout = Layout.packed([path.num_tokens for path in paths])
    along_paths = np.concatenate([values[p.number, i] for p in paths for i in p.sampled])
    estimate = partial(
        gae,
        torch.from_numpy(np.concatenate([path.rewards for path in paths])),
        torch.from_numpy(along_paths).double(),
        layout,
        gamma=advantage.gamma,
        bootstrap=_values_at_cuts(paths, trajectories, critic)
        if advantage.bootstrap_truncated
        else None,
    )
    advantages, returns = estimate(lam=advantage.lam)
    if advantage.critic_lam is not None:
        _, returns = estimate(lam=advantage.critic_lam)
    for name, of_token in {"advantages": advantages, "returns": returns}.items():
        means = _means_over_paths(paths, of_token.numpy())
        for row in rows:
            row.sample.set(name, row.lay(means[row.number]))
    if advantage.whiten:
        _whiten([row.sample for row in rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """The sampled tokens from a root to a rewarded leaf, and when they were rewarded."""

    number: int
    leaf: int
    sampled: list[int]
    """The sampled segments, in order."""
    sizes: list[int]
    rewards: npt.NDArray[np.float64]
    """[tokens of the sampled segments]: each given after its token."""

    @classmethod
    def of(cls, number: int, trajectory: Trajectory, leaf: int, reward: float) -> _Path:
        segments = trajectory.segments
        sampled = [i for i in trajectory.path(leaf) if segments[i].is_sampled]
        sizes = [len(segments[i]) for i in sampled]
        rewards = np.zeros(sum(sizes))
        if sampled:
            rewards[np.cumsum(sizes) - 1] = [segments[i].reward or 0.0 for i in sampled]
            rewards[-1] += reward
        return cls(number, leaf, sampled, sizes, rewards)

    @property
    def num_tokens(self) -> int:
        return len(self.rewards)


def _values_of_segments(
    rows: Sequence[_Row], values: Sequence[Float32Array]
) -> dict[tuple[int, int], Float32Array]:
    """(trajectory, sampled segment) -> the values before its tokens; each is in one row."""
    out: dict[tuple[int, int], Float32Array] = {}
    for row, of_row in zip(rows, values, strict=True):
        path = row.trajectory.path(row.leaf)
        ends = np.cumsum([len(row.trajectory.segments[i]) for i in path])
        for i, part in zip(path, np.split(of_row, ends[:-1]), strict=True):
            if i in row.owned:
                out[row.number, i] = part
    return out


def _values_at_cuts(
    paths: Sequence[_Path], trajectories: Sequence[Trajectory], critic: ValueFunction
) -> torch.Tensor:
    """[paths]: the value behind the newest leaf of each truncated trajectory; 0.0 of the others."""
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
    sizes = [size for path in paths for size in path.sizes]
    parts = iter(np.split(of_token, np.cumsum(sizes)[:-1]))
    for path in paths:
        for i in path.sampled:
            found.setdefault((path.number, i), []).append(next(parts))
    out: list[dict[int, Float32Array]] = [{} for _ in range(paths[-1].number + 1)]
    for (number, i), columns in found.items():
        out[number][i] = np.mean(columns, axis=0).astype(np.float32)
    return out


def _whiten(samples: Sequence[Sample]) -> None:
    """Over all trained tokens of the batch, each once."""
    layout = Layout.packed([sample.num_trained for sample in samples])
    given = np.concatenate([s.columns["advantages"][s.loss_mask] for s in samples])
    parts = np.split(whiten(torch.from_numpy(given), layout).numpy(), layout.offsets[1:-1])
    for sample, part in zip(samples, parts, strict=True):
        column = np.zeros(len(sample), np.float32)
        column[sample.loss_mask] = part
        sample.set("advantages", column)


# -- mechanism -------------------------------------------------------------------------------------


def _finite_rewards(trajectory: Trajectory) -> dict[int, float]:
    leaves = set(trajectory.leaves())
    for leaf, reward in trajectory.rewards.items():
        if not np.isfinite(reward):
            raise DataError(
                f"trajectory {trajectory.id}, leaf {leaf}: the reward is {reward}; a reward must "
                "be finite. An episode that could not be scored has status 'failed'."
            )
    for index, segment in enumerate(trajectory.segments):
        if segment.reward is not None and not np.isfinite(segment.reward):
            raise DataError(
                f"trajectory {trajectory.id}, segment {index}: the reward is {segment.reward}; it "
                "must be finite."
            )
    return {leaf: reward for leaf, reward in trajectory.rewards.items() if leaf in leaves}
