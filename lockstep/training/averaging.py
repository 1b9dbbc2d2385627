"""From re-scorings of episodes to the averaged log-probs of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.correction.averaging import average_logprobs
from lockstep.errors import EngineError
from lockstep.types import Float32Array, Group, Rescorings, Sample, Trajectory

Metrics = dict[str, float]


def average_rows(
    rows: Sequence[Sample], groups: Sequence[Group], *, average_sampling_pass: bool = False
) -> Metrics:
    """Fills the column `averaged_logprobs` of `rows` from the re-scorings of their trajectories;
    returns the `noise/...` of the engine, and how long it was waited for.

    A segment that no scoring is left of, because the weights had changed before or the engine gave
    none, keeps the log-probs that were recorded while it was sampled: nothing else is known of the
    weights that sampled it. Its tokens are counted (`noise/fallback_tokens`).
    Raises EngineError if the engine failed and not one scoring is there.
    """
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    pieces = [piece for row in rows for piece in _pieces_of(row, trajectories)]
    told = [t.rescorings for t in trajectories.values() if t.rescorings is not None]
    if pieces and not any(piece.scorings for piece in pieces):
        error = next((r.error for r in told if r.error), "")
        if error:
            raise EngineError(
                f"not one of {len(pieces)} sampled segments could be scored again, which "
                f"correction.behaviour=averaged needs. The first reason: {error}"
            )
    for row in rows:
        row.set("averaged_logprobs", np.full(len(row), np.nan, np.float32))
    variances: list[torch.Tensor] = []
    biases: list[torch.Tensor] = []
    num_looks = num_fallback = 0
    for count in sorted({len(piece.scorings) for piece in pieces}):
        alike = [piece for piece in pieces if len(piece.scorings) == count]
        sampled = np.concatenate([piece.recorded for piece in alike])
        values = sampled
        if count:
            averaged = average_logprobs(
                torch.from_numpy(
                    np.stack([np.concatenate([p.scorings[k] for p in alike]) for k in range(count)])
                ),
                rollout_logprobs=torch.from_numpy(sampled),
                average_sampling_pass=average_sampling_pass,
            )
            values = averaged.logprobs.numpy()
            variances.append(averaged.variance)
            if averaged.sampling_bias is not None:
                biases.append(averaged.sampling_bias)
        else:
            num_fallback += len(sampled)
        num_looks += count * len(sampled)
        ends = np.cumsum([len(piece.recorded) for piece in alike])[:-1]
        for piece, part in zip(alike, np.split(values, ends), strict=True):
            piece.row.columns["averaged_logprobs"][piece.start : piece.stop] = part
    return _metrics_of(told) | {
        "noise/rescorings": num_looks / max(sum(len(p.recorded) for p in pieces), 1),
        "noise/fallback_tokens": float(num_fallback),
        **_mean_of(variances, "noise/var_rollout"),
        **_mean_of(biases, "noise/sampling_bias"),
    }


@dataclass(slots=True, eq=False)
class _Piece:
    """A trained segment in its row."""

    row: Sample
    start: int
    stop: int
    recorded: Float32Array
    scorings: list[Float32Array]


def _pieces_of(row: Sample, trajectories: dict[str, Trajectory]) -> list[_Piece]:
    name, _, leaf = row.id.rpartition("/")
    trajectory = trajectories[name]
    found = {} if trajectory.rescorings is None else trajectory.rescorings.logprobs
    out: list[_Piece] = []
    start = 0
    for i in trajectory.path(int(leaf)):
        segment = trajectory.segments[i]
        stop = start + len(segment)
        if segment.logprobs is not None and len(segment) and row.loss_mask[start]:
            out.append(_Piece(row, start, stop, segment.logprobs, found.get(i, [])))
        start = stop
    return out


def _mean_of(values: Sequence[torch.Tensor], name: str) -> Metrics:
    every = torch.cat(list(values)) if values else torch.empty(0)
    known = every[~every.isnan()]
    return {name: float(known.mean())} if len(known) else {}


def _metrics_of(told: Sequence[Rescorings]) -> Metrics:
    num_scored, num_prefix = (
        sum(getattr(r, name) for r in told) for name in ("num_scored", "num_prefix_tokens")
    )
    out: Metrics = {
        "noise/stale_rescorings": float(sum(r.num_stale for r in told)),
        "noise/failed_rescorings": float(sum(r.num_failed for r in told)),
        "time/rescore_seconds": max((r.waited_seconds for r in told), default=0.0),
    }
    if num_prefix:
        out["noise/cache_hit_share"] = sum(r.num_cached_tokens for r in told) / num_prefix
    if num_scored:
        out["noise/overlapped_share"] = sum(r.num_overlapped for r in told) / num_scored
    return out
