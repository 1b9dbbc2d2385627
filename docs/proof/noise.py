"""The noise table: how far trainer and sampler are apart, and each from itself.

    python docs/proof/noise.py                 the rows below, a few seconds each
    python docs/proof/noise.py WORDS ...       one row: settings of the quickstart, as for lockstep

A row is the quickstart's first batch, 8 x 8 episodes of three seeds: each sampled turn is scored 16
times by the engine in company that changes (`Rescorer`, as in a run), and 4 times by the trainer.
Without words the rows are written to noise.json beside this file; docs/correction.md shows them. An
engine that needs another interpreter is asked in that one, with its words:

    .venv-vllm/bin/python docs/proof/noise.py engine=vllm engine.local=true
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from run import host
from studies import REPORTED_NOISE, TEN_TIMES

from lockstep.agent.loop import Budget, collect, training_sampling
from lockstep.agent.rescoring import Rescorer
from lockstep.config import resolve
from lockstep.recipes import find_recipe
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.testing.faults import injected, split_faults
from lockstep.training.rows import rows_for_training
from lockstep.types import Group

HERE = Path(__file__).parent
RESULTS = HERE / "noise.json"
SEEDS = (0, 1, 2)
NUM_ROLLOUT, NUM_TRAIN = 16, 4

ROWS = {
    "embedded, true-on-policy": (),
    "embedded, stock ops": ("contract=none",),
    "embedded, sampler in bfloat16": ("contract=none", "engine.dtype=bfloat16"),
    "embedded, kernel noise 0.035": ("--fault=kernel_noise,std=0.035"),
    "embedded, router noise 0.1": ("--fault=router_noise,std=0.1"),
    "embedded, noise of a large mixture": REPORTED_NOISE,
    "embedded, three times that": (
        "--fault=sampling_noise,router_std=0.36,bias=0.084,trainer_std=1.5e-3",
    ),
    "embedded, ten times that": TEN_TIMES,
    "tiny-qwen3, embedded, stock ops": ("model=tiny-qwen3", "contract=none"),
    "tiny-qwen3, embedded, sampler in bfloat16": (
        "model=tiny-qwen3",
        "contract=none",
        "engine.dtype=bfloat16",
    ),
    "tiny-qwen3, embedded, kernel noise 0.008": (
        "model=tiny-qwen3",
        "--fault=kernel_noise,std=0.008",
    ),
}
"""Name -> settings; of tiny-gpt-oss where it does not say otherwise."""


def measure(words: tuple[str, ...], seed: int) -> dict[str, float]:
    """The figures of one batch: of log-probs, and of probabilities as `prob_...`."""
    settings, faults = split_faults([f"seed={seed}", *words])
    config = resolve(find_recipe("quickstart"), settings)
    with injected(*(replace(fault, seed=seed) for fault in faults)):  # other offsets per id
        parts = build(config, preflight(config))

    async def sample() -> list[Group]:
        await parts.publisher.publish(0)
        try:
            return await collect(
                parts.engine,
                parts.renderer,
                lambda task: config.task.environment(task, config.agent),
                config.task.tasks(split="train", seed=seed).take(8),
                group_size=8,
                sampling=training_sampling(config.agent, parts.engine.capabilities),
                budget=Budget.of(config.agent, max_tokens=config.max_tokens),
                run_seed=seed,
                rescorer=Rescorer(
                    parts.engine,
                    num_scorings=NUM_ROLLOUT,
                    temperature=config.agent.temperature,
                    seed=seed,
                ),
            )
        finally:
            await parts.engine.close()

    groups = asyncio.run(sample())
    rows = rows_for_training(groups, config.advantage)
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    rollout: list[list[np.ndarray]] = [[] for _ in range(NUM_ROLLOUT)]
    for row in rows:
        name, _, leaf = row.id.rpartition("/")
        looks = trajectories[name].rescorings
        assert looks is not None, "every episode that is trained was scored"
        for index in trajectories[name].path(int(leaf)):
            for number, values in enumerate(looks.logprobs.get(index, ())):
                rollout[number].append(values)
    scored = torch.from_numpy(np.stack([np.concatenate(values) for values in rollout]))
    trained = torch.from_numpy(
        np.stack(
            [
                np.concatenate([v[~np.isnan(v)] for v in parts.trainer.forward(rows, column=None)])
                for _ in range(NUM_TRAIN)
            ]
        )
    )
    recorded = torch.from_numpy(
        np.concatenate([row.columns["rollout_logprobs"][row.loss_mask] for row in rows])
    )
    figures = noise_table(trained, scored)
    figures["single_diff"] = float((trained[0] - recorded).abs().mean())
    of_probs = noise_table(trained.exp(), scored.exp())
    figures |= {f"prob_{name}": value for name, value in of_probs.items() if name != "num_tokens"}
    return figures


def noise_table(trained: torch.Tensor, scored: torch.Tensor) -> dict[str, float]:
    """How far two sides are apart, and each from itself; [scorings, tokens] of both."""
    keep = torch.isfinite(trained).all(0) & torch.isfinite(scored).all(0)
    left, right = trained[:, keep].double(), scored[:, keep].double()
    return {
        "diff": float((left.mean(0) - right.mean(0)).abs().mean()),
        "var_rollout": float(right.var(0, unbiased=True).mean()),
        "var_train": float(left.var(0, unbiased=True).mean()),
        "num_tokens": int(keep.sum()),
    }


def row_of(words: tuple[str, ...]) -> dict[str, Any]:
    """The mean over the seeds of each figure, and all of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all .* scorings are equal")
        seeds = [measure(words, seed) for seed in SEEDS]
    means = {name: mean(found[name] for found in seeds) for name in seeds[0]}
    return {"settings": list(words), **means, "seeds": seeds}


def show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:42} diff {row['diff']:.2g} (one pass of each {row['single_diff']:.2g})  "
        f"var rollout {row['var_rollout']:.2g}  var train {row['var_train']:.2g}  "
        f"of probabilities: {row['prob_diff']:.2g}, {row['prob_var_rollout']:.2g}, "
        f"{row['prob_var_train']:.2g}",
        flush=True,
    )


def main() -> None:
    if words := tuple(sys.argv[1:]):
        show(" ".join(words), row_of(words))
        return
    rows: dict[str, Any] = {}
    for name, settings in ROWS.items():
        rows[name] = row_of(settings)
        show(name, rows[name])
    document = {
        "command": "python docs/proof/noise.py",
        "date": datetime.now(UTC).date().isoformat(),
        "host": host(),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(rounded(document), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Floats to three significant digits."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
