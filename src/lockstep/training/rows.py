"""Makes training rows from scored episodes: each sampled token once, with its advantage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from lockstep.correction.layout import Layout
from lockstep.errors import ConfigError, DataError
from lockstep.objectives.config import GAE, AdvantageConfig, CreditConfig
from lockstep.objectives.token_advantages import gae, whiten
from lockstep.training.credit import (
    BySegment,
    Scored,
    means_over_leaves,
    sampled_path,
    scored_trajectories,
    segment_advantages,
)
from lockstep.training.critic import Critic
from lockstep.types import Group, Ragged, Sample, Trajectory

OverStale = Literal["correct", "drop"]
"""Treatment of rows with a token over the age limit: trained like any other, by the correction, or
left out."""
NumberedRow = tuple[int, Sample]
"""(number of the row's trajectory among the scored ones, the row)."""


def rows_for_training(
    groups: Sequence[Group],
    advantage: AdvantageConfig,
    *,
    control_ids: Collection[int] = (),
    critic: Critic | None = None,
    credit: CreditConfig | None = None,
) -> list[Sample]:
    """The rows of a batch, with `advantages` and `token_kind` filled and `group` set.

    control_ids: the tokenizer's; `token_kind` separates them from text. critic: needed by
    advantages that compare with values; `values` and `returns` are then filled too. credit: how
    turns share the advantage of their episode, without a critic; None is CreditConfig().

    Trajectories that failed, have no reward or belong to other policies are left out, of the
    baseline too. A sampled segment that several leaves share is trained in one row, with the mean
    advantage of its leaves. A segment's own reward is, with a critic, given at the segment's last
    token, like the leaf's. Without one it counts as credit.process says; by default it is added to
    the advantage of its tokens as it is, neither centred nor divided.

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
    scored = scored_trajectories(groups)
    for _, trajectory in scored:
        _check_rewards(trajectory)
    rows = _labelled_rows(scored, np.array(sorted(control_ids), np.int32))
    if not rows:
        return []
    if isinstance(advantage, GAE):
        if critic is None:
            raise ConfigError("advantage=gae needs a critic: rows_for_training(critic=...).")
        _fill_by_values(rows, [t for _, t in scored], advantage, critic)
    else:
        found = segment_advantages(scored, advantage, credit or CreditConfig())
        _fill(rows, "advantages", found)
    return [sample for _, sample in rows]


def sort_by_age(
    rows: Sequence[Sample], *, version: int, limit: int, over_stale: OverStale
) -> tuple[list[Sample], dict[str, float]]:
    """The rows to train, and `staleness/...` of all rows.

    A token's age is counted in updates: the version in training minus its sampler's version.
    version: of the policy in training. limit: largest age of a trained token that is not
    over-stale. A row that is left out has still counted in the baseline of its group.
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


def punish_length(trajectory: Trajectory, *, max_tokens: int, width: int) -> None:
    """Lowers the reward of each leaf whose path comes within `width` tokens of `max_tokens`: by up
    to 1, in proportion. The part `length_penalty` of the reward is the largest of them.

    Source: soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), over
    the tokens of the whole path.

    >>> episode = Trajectory(id="a", status="finished")
    >>> leaf = episode.record(
    ...     [7] * 8, logprobs=[-0.1] * 8, parent=episode.observe([1, 2]), prompt_ids=[1, 2])
    >>> episode.rewards[leaf] = 1.0
    >>> punish_length(episode, max_tokens=12, width=4)    # 10 tokens: half of the way
    >>> episode.rewards, episode.reward_parts
    ({1: 0.5}, {'length_penalty': 0.5})
    """
    largest = 0.0
    for leaf in trajectory.rewards:
        beyond = len(trajectory.path_ids(leaf)) - (max_tokens - width)
        penalty = min(max(beyond / width, 0.0), 1.0)
        trajectory.rewards[leaf] -= penalty
        largest = max(largest, penalty)
    if trajectory.rewards:
        trajectory.reward_parts = {**trajectory.reward_parts, "length_penalty": largest}


def without_over_long(
    rows: Sequence[Sample], groups: Sequence[Group]
) -> tuple[list[Sample], float]:
    """(rows of episodes that no budget cut off, number of the others). They have all counted in the
    baselines of their groups.

    Source: overlong filtering of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4).
    """
    cut = {t.id for group in groups for t in group.trajectories if t.status == "truncated"}
    kept = [row for row in rows if row.id.rpartition("/")[0] not in cut]
    return kept, float(len(rows) - len(kept))


def _labelled_rows(scored: Scored, control_ids: npt.NDArray[np.int32]) -> list[NumberedRow]:
    """The rows without advantages. All have equal columns: a support, if one row has it."""
    rows: list[NumberedRow] = []
    for number, (index, trajectory) in enumerate(scored):
        for sample in trajectory.rows():
            sample.set("token_kind", np.isin(sample.token_ids, control_ids).astype(np.int32))
            sample.group = index
            rows.append((number, sample))
    if any("support" in sample.ragged for _, sample in rows):
        for sample in (each for _, each in rows if "support" not in each.ragged):
            sample.set("support", Ragged.empty(len(sample)))
    return rows


def _fill(rows: Sequence[NumberedRow], name: str, of_segment: BySegment) -> None:
    """Sets a column from the trajectories' segments; 0.0 where a row trains nothing."""
    for number, sample in rows:
        column = np.zeros(len(sample), np.float32)
        for i, tokens in sample.segments.items():
            column[tokens] = of_segment[number, i]
        sample.set(name, column)


# -- one advantage for each token, by a critic -----------------------------------------------------


def _fill_by_values(
    rows: Sequence[NumberedRow], trajectories: Sequence[Trajectory], advantage: GAE, critic: Critic
) -> None:
    """Fills `values`, `advantages` and `returns`, by GAE along the path of every rewarded leaf.

    A token that several leaves share has the mean of both over their paths: its continuations
    differ, and its worth is their average.
    """
    samples = [sample for _, sample in rows]
    paths = [
        (number, leaf, path)
        for number, trajectory in enumerate(trajectories)
        for leaf in trajectory.rewards
        if (path := sampled_path(trajectory, leaf))
    ]
    keys = [(number, i) for number, _, path in paths for i in path]
    sizes = [len(trajectories[number].segments[i]) for number, i in keys]
    rewards = [_rewards_along(trajectories[number], leaf, path) for number, leaf, path in paths]
    values = {
        (number, i): of_row[tokens]
        for (number, sample), of_row in zip(rows, critic.values(samples), strict=True)
        for i, tokens in sample.segments.items()
    }
    along_paths = np.concatenate([values[key] for key in keys])
    bootstrap = None
    if advantage.bootstrap_truncated:
        bootstrap = _values_at_cuts(paths, trajectories, critic)
    estimate = partial(
        gae,
        np.concatenate(rewards),
        along_paths.astype(np.float64),
        Layout.packed([len(of_path) for of_path in rewards]),
        gamma=advantage.gamma,
        bootstrap=bootstrap,
    )
    advantages, returns = estimate(lam=advantage.lam)
    if advantage.critic_lam is not None:
        _, returns = estimate(lam=advantage.critic_lam)
    for name, of_token in (("advantages", advantages), ("returns", returns)):
        parts = np.split(of_token, np.cumsum(sizes)[:-1])
        _fill(rows, name, means_over_leaves(zip(keys, parts, strict=True)))
    if advantage.whiten:
        layout = Layout.packed([sample.num_trained for sample in samples])
        given = np.concatenate([s.columns["advantages"][s.loss_mask] for s in samples])
        whitened = whiten(given, layout)
        for sample, part in zip(samples, np.split(whitened, layout.offsets[1:-1]), strict=True):
            sample.columns["advantages"][sample.loss_mask] = part


def _rewards_along(
    trajectory: Trajectory, leaf: int, path: Sequence[int]
) -> npt.NDArray[np.float64]:
    """[tokens of the path's segments]: the rewards, each given after its token."""
    segments = [trajectory.segments[i] for i in path]
    ends = np.cumsum([len(segment) for segment in segments])
    rewards = np.zeros(ends[-1])
    rewards[ends - 1] = [segment.reward or 0.0 for segment in segments]
    rewards[-1] += trajectory.rewards[leaf]
    return rewards


def _values_at_cuts(
    paths: Sequence[tuple[int, int, list[int]]], trajectories: Sequence[Trajectory], critic: Critic
) -> npt.NDArray[np.float64]:
    """[paths]: the value behind the newest leaf of each truncated trajectory; 0.0 elsewhere."""
    out = np.zeros(len(paths))
    ends: dict[int, Sample] = {}
    for at, (number, leaf, _) in enumerate(paths):
        trajectory = trajectories[number]
        if trajectory.status == "truncated" and leaf == max(trajectory.rewards):
            ends[at] = trajectory.row(leaf)
    if ends:
        out[list(ends)] = critic.values_at_end(list(ends.values()))
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
