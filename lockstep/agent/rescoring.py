"""Re-scores what was sampled, several times over, by the engine that sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lockstep.correction.averaging import average_logprobs
from lockstep.engines.base import Engine
from lockstep.types import Float32Array, Sample

Metrics = dict[str, float]


async def rescore(
    engine: Engine,
    rows: Sequence[Sample],
    *,
    num_scorings: int,
    temperature: float,
    average_sampling_pass: bool = False,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Metrics:
    """Fills the column `averaged_logprobs` of `rows`; returns the `noise/...` of the engine.

    Each round scores every row once, all at the same time and in an order of its own, so that a row
    meets others each time: what depends on the batch differs between rounds. The engine must still
    run the weights that sampled. Cost: num_scorings prefills of every row.
    """
    draw = np.random.default_rng(seed)
    rounds: list[list[Float32Array]] = []
    done, total = 0, num_scorings * len(rows)

    async def score(row: Sample) -> Float32Array:
        nonlocal done
        found = await engine.score(
            row.token_ids, distribution="tempered", temperature=temperature, priority=1
        )
        done += 1
        if on_progress is not None:
            on_progress(done, total)
        return found.logprobs

    for _ in range(num_scorings):
        order = draw.permutation(len(rows))
        found = await asyncio.gather(*(score(rows[i]) for i in order))
        scores: list[Float32Array] = [np.empty(0, np.float32)] * len(rows)
        for i, of_row in zip(order, found, strict=True):
            scores[i] = of_row
        rounds.append(scores)
    if not rows:
        return {}
    trained = [row.loss_mask for row in rows]
    stacked = torch.stack(
        [
            torch.from_numpy(np.concatenate([s[m] for s, m in zip(scores, trained, strict=True)]))
            for scores in rounds
        ]
    )
    sampled = torch.from_numpy(
        np.concatenate([r.columns["rollout_logprobs"][r.loss_mask] for r in rows])
    )
    averaged = average_logprobs(
        stacked, rollout_logprobs=sampled, average_sampling_pass=average_sampling_pass
    )
    parts = np.split(averaged.logprobs.numpy(), np.cumsum([m.sum() for m in trained])[:-1])
    for row, mask, values in zip(rows, trained, parts, strict=True):
        column = np.full(len(row), np.nan, np.float32)
        column[mask] = values
        row.set("averaged_logprobs", column)
    metrics: Metrics = {"noise/rescorings": float(num_scorings)}
    if averaged.sampling_bias is not None:
        metrics["noise/sampling_bias"] = float(averaged.sampling_bias.nanmean())
    if num_scorings > 1:
        metrics["noise/var_rollout"] = float(averaged.variance.nanmean())
    return metrics
