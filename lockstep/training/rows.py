"""From scored episodes to training rows: each sampled token once, with its advantage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lockstep.errors import DataError
from lockstep.objectives.advantages import leaf_advantages
from lockstep.objectives.config import AdvantageConfig
from lockstep.types import Group, Sample, Trajectory


def rows_for_training(
    groups: Sequence[Group], advantage: AdvantageConfig, *, control_ids: Collection[int] = ()
) -> list[Sample]:
    """The rows of a batch, with `advantages` and `token_kind` filled and `group` set.

    control_ids: the tokenizer's, which `token_kind` tells from text.

    Failed trajectories and those without a reward are left out, of the baseline too. A sampled
    segment that several leaves share is trained in one row, with the mean advantage of its leaves.
    A segment's own reward (a turn's) is added to the advantage of its tokens as it is: neither
    centred nor divided, so 0 says nothing and 0.1 moves these tokens by a tenth of a deviation.

    Raises DataError naming the trajectory if a reward is not finite.
    """
    scored = [
        (index, trajectory)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.status != "failed" and trajectory.rewards
    ]
    leaves = [
        (number, index, leaf, reward)
        for number, (index, trajectory) in enumerate(scored)
        for leaf, reward in _finite_rewards(trajectory).items()
    ]
    if not leaves:
        return []
    numbers, indices, _, rewards = (np.array(x) for x in zip(*leaves, strict=True))
    advantages = leaf_advantages(
        advantage, rewards.astype(np.float64), trajectories=numbers, groups=indices
    )
    control = np.array(sorted(control_ids), np.int32)
    by_leaf: list[dict[int, float]] = [{} for _ in scored]
    for (number, _, leaf, _), value in zip(leaves, advantages, strict=True):
        by_leaf[number][leaf] = float(value)
    rows: list[Sample] = []
    for (index, trajectory), of_leaf in zip(scored, by_leaf, strict=True):
        of_segment = segment_advantages(trajectory, of_leaf)
        for leaf, owned, sample in trajectory.rows():
            path = trajectory.path(leaf)
            sample.set(
                "advantages",
                np.concatenate(
                    [
                        np.full(
                            len(trajectory.segments[i]),
                            of_segment[i] if i in owned else 0.0,
                            np.float32,
                        )
                        for i in path
                    ]
                ),
            )
            sample.set("token_kind", np.isin(sample.token_ids, control).astype(np.int32))
            sample.group = index
            rows.append(sample)
    return rows


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
