"""The noise table: how far trainer and sampler are apart, and each from itself, over several passes
of the same tokens.

Company changes between the passes of the engine (`agent.rescoring`), as it does in a run; those of
the trainer are alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.correction.config import Correction
from lockstep.errors import ConfigError
from lockstep.launch.config import ParallelConfig
from lockstep.objectives.config import GRPO
from lockstep.recipes import find_config
from lockstep.run.build import build
from lockstep.run.episodes import play_tasks
from lockstep.run.preflight import preflight
from lockstep.run.prompts import FirstPrompts
from lockstep.run.step_metrics import check_failures
from lockstep.run.steps import play_over
from lockstep.run_config import Config
from lockstep.training.averaging import by_scorings
from lockstep.training.rows import rows_for_training
from lockstep.types import Float32Array

Tensor = torch.Tensor

NUM_PASSES = 4
"""Passes of the trainer: its kernels repeat themselves, or differ from the second pass on."""


def measure_noise(
    config: Config | str | Path,
    *,
    weights: Path | None = None,
    num_scorings: int = 16,
    **settings: Any,
) -> dict[str, float]:
    """Plays the first batch of a recipe, scores its tokens several times on both sides, and returns
    the figures of `two_sides`: of log-probs, of probabilities as `prob_...`, and `num_tokens`.

    config, settings: as for `lockstep.train`. weights: a checkpoint in place of the model's own.
    num_scorings: passes of the sampler. Raises ConfigError before a model is loaded, EngineError
    for an engine that scores nothing.

    >>> measure_noise("quickstart", model="tiny-qwen3", engine="vllm")   # doctest: +SKIP
    """
    if not isinstance(config, Config):
        config = find_config(config, settings)
    if num_scorings < 2:
        raise ConfigError(f"scorings={num_scorings}: a variance needs 2 or more.")
    correction = Correction.averaged(num_scorings)
    config = replace(config, parallel=ParallelConfig(), correction=correction)
    parts = build(config, preflight(config, is_training=False), weights=weights, is_training=False)
    tasks = FirstPrompts(config, parts.renderer).tasks("train").take(config.groups_per_step)
    play = partial(play_tasks, config, parts, tasks, is_rescored=True)
    groups = play_over(config, parts, lambda _, gateway: play(gateway=gateway.open))
    check_failures(groups, config.max_failed_share, where="the noise table")
    rows = rows_for_training(groups, GRPO())
    by_count = by_scorings(rows, groups)
    pieces = by_count[max(by_count)]

    def column(name: str) -> list[Float32Array]:
        return [row.columns[name][tokens] for row, tokens, _ in pieces]

    passes: list[list[Float32Array]] = []
    for _ in range(NUM_PASSES):
        parts.trainer.forward(rows, column="logprobs")
        passes.append(column("logprobs"))
    scored = list(zip(*(scorings for *_, scorings in pieces), strict=True))
    sides = [
        torch.from_numpy(np.stack([np.concatenate(one) for one in side]))
        for side in (passes, scored, [column("rollout_logprobs")])
    ]
    probs = two_sides(*(side.exp() for side in sides))
    named = {f"prob_{name}": value for name, value in probs.items()}
    return two_sides(*sides) | named | {"num_tokens": sides[-1].numel()}


def two_sides(trained: Tensor, scored: Tensor, recorded: Tensor) -> dict[str, float]:
    """Means over tokens: `diff` of |mean of the trainer's passes - mean of the sampler's|,
    `single_diff` of |first pass - recorded|, `var_rollout` and `var_train` of the variances.

    trained, scored: [passes, T] of each side. recorded: [1, T], of the pass that sampled. All
    float32; their sums in float64 are exact, so 0 means equal bits.
    """
    trained, scored, recorded = trained.double(), scored.double(), recorded.double()
    return {
        "diff": float((trained.mean(0) - scored.mean(0)).abs().mean()),
        "single_diff": float((trained[:1] - recorded).abs().mean()),
        "var_rollout": float(scored.var(0, unbiased=True).mean()),
        "var_train": float(trained.var(0, unbiased=True).mean()),
    }
