"""One path through a stored trajectory, as a row."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from lockstep.errors import RunError
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import Float32Array, Int32Array, Sample, Trajectory


def first_leaf(record: TrajectoryRecord) -> int:
    """The first rewarded leaf of a trajectory, else its last one. RunError if it has no token."""
    trajectory = record.trajectory
    leaves = trajectory.leaves()
    if not leaves:
        raise RunError(f"trajectory {trajectory.id} has no tokens: {trajectory.error or 'empty'}.")
    return next((i for i in leaves if i in trajectory.rewards), leaves[-1])


def trainer_logprobs(record: TrajectoryRecord, leaf: int) -> Float32Array:
    """[T] the trainer's log-probs along the path to `leaf`; NaN where there are none."""
    trajectory = record.trajectory
    stored = {i: record.trainer_logprobs[i] for i in trajectory.path(leaf)}
    return np.concatenate(
        [
            np.full(len(trajectory.segments[i]), np.nan, np.float32) if values is None else values
            for i, values in stored.items()
        ]
    )


def prompt_length(sample: Sample) -> int:
    """Tokens before the first sampled one."""
    is_sampled = sample.columns["turn"] >= 0
    return int(np.argmax(is_sampled)) if is_sampled.any() else len(sample)


def replies(trajectory: Trajectory, leaf: int) -> tuple[Int32Array, ...]:
    """The ids that the engine returned on the path to `leaf`, turn by turn. A turn during which the
    weights changed has two segments, and is one reply."""
    segments = [trajectory.segments[i] for i in trajectory.path(leaf)]
    sampled = [segment for segment in segments if segment.is_sampled]
    return tuple(
        np.concatenate([segment.token_ids for segment in turn])
        for _, turn in groupby(sampled, key=lambda segment: segment.turn)
    )
