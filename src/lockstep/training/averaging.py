"""Fills the column `averaged_logprobs` of rows from re-scorings of their episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.correction.averaging import average_logprobs
from lockstep.errors import EngineError
from lockstep.types import Float32Array, Group, Rescorings, Sample

Metrics = dict[str, float]


def average_rows(rows: Sequence[Sample], groups: Sequence[Group]) -> Metrics:
    """Fills the column `averaged_logprobs` of `rows` from the re-scorings of their trajectories;
    returns the engine's `noise/...` and the time spent waiting for it.

    A segment without a scoring keeps the log-probs recorded while it was sampled, and its tokens
    are counted in `noise/fallback_tokens`: the weights had changed before, or the engine gave none.
    """
    for row in rows:
        recorded = row.columns["rollout_logprobs"]
        row.set("averaged_logprobs", np.where(row.loss_mask, recorded, np.float32(np.nan)))
    by_count = by_scorings(rows, groups)
    variances: list[torch.Tensor] = []
    biases: list[torch.Tensor] = []
    num_fallback = sum(tokens.stop - tokens.start for _, tokens, _ in by_count.pop(0, []))
    num_scored, num_tokens = 0, num_fallback
    for count, pieces in sorted(by_count.items()):
        values = [row.columns["rollout_logprobs"][tokens] for row, tokens, _ in pieces]
        by_pass = zip(*(scorings for _, _, scorings in pieces), strict=True)
        averaged = average_logprobs(
            [torch.from_numpy(np.concatenate(of_pass)) for of_pass in by_pass],
            rollout_logprobs=torch.from_numpy(np.concatenate(values)),
        )
        parts = np.split(averaged.logprobs.numpy(), np.cumsum([len(part) for part in values])[:-1])
        for (row, tokens, _), part in zip(pieces, parts, strict=True):
            row.columns["averaged_logprobs"][tokens] = part
        num_tokens += len(averaged.logprobs)
        num_scored += count * len(averaged.logprobs)
        variances.append(averaged.variance)
        if averaged.sampling_bias is not None:
            biases.append(averaged.sampling_bias)
    found = [t.rescorings for group in groups for t in group.trajectories]
    return _metrics_of([r for r in found if r is not None]) | {
        "noise/rescorings": num_scored / max(num_tokens, 1),
        "noise/fallback_tokens": float(num_fallback),
        **_mean_of(variances, "noise/var_rollout"),
        **_mean_of(biases, "noise/sampling_bias"),
    }


def by_scorings(
    rows: Sequence[Sample], groups: Sequence[Group]
) -> dict[int, list[tuple[Sample, slice, list[Float32Array]]]]:
    """Number of scorings -> (row, tokens, scorings) of the trained segments with that number.

    Raises EngineError if the engine failed and not one scoring is there.
    """
    found = {t.id: t.rescorings for group in groups for t in group.trajectories}
    by_count: dict[int, list[tuple[Sample, slice, list[Float32Array]]]] = {}
    for row in rows:
        rescorings = found[row.id.rpartition("/")[0]]
        for i, tokens in row.segments.items():
            scorings = [] if rescorings is None else rescorings.logprobs.get(i, [])
            by_count.setdefault(len(scorings), []).append((row, tokens, scorings))
    error = next((r.error for r in found.values() if r is not None and r.error), "")
    if error and by_count and not any(by_count):
        raise EngineError(
            f"not one of {len(by_count[0])} sampled segments could be scored again, which "
            f"correction.rescorings needs. The first reason: {error}"
        )
    return by_count


def _mean_of(values: Sequence[torch.Tensor], name: str) -> Metrics:
    every = torch.cat(list(values)) if values else torch.empty(0)
    known = every[~every.isnan()]
    return {name: float(known.mean())} if len(known) else {}


def _metrics_of(found: Sequence[Rescorings]) -> Metrics:
    num_scored = sum(r.num_scored for r in found)
    num_prefix = sum(r.num_prefix_tokens for r in found)
    out: Metrics = {
        "noise/stale_rescorings": float(sum(r.num_stale for r in found)),
        "noise/failed_rescorings": float(sum(r.num_failed for r in found)),
        "time/rescore_seconds": max((r.waited_seconds for r in found), default=0.0),
    }
    if num_prefix:
        out["noise/cache_hit_share"] = sum(r.num_cached_tokens for r in found) / num_prefix
    if num_scored:
        out["noise/overlapped_share"] = sum(r.num_overlapped for r in found) / num_scored
    return out
