"""Cost of each pair of precisions, the trainer's dtype and the sampler's, on the quickstart.

    python benchmarks/precision.py [--steps N] [--model NAME] [--only TRAINER/SAMPLER ...]

Each pair is a run of its own (`lockstep train quickstart dtype=... engine.dtype=...`), one after
the other, without a correction, so that the reward shows the effect of the gap. Seconds are the
steps' time per sampled token, without the first step. The ratio divides the seconds of the first
pair, float32 on both sides, by the pair's: above 1 the pair is faster. A CPU without 16-bit
arithmetic computes in float32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from measuring import Row, alone, listed, main, note, row
from measuring.runs import steps_of, train_quickstart

PAIRS = (
    "float32/float32",
    "float32/bfloat16",
    "float32/float16",
    "bfloat16/bfloat16",
    "bfloat16/float32",
    "float16/float16",
    "float16/bfloat16",
)
"""Dtypes of the trainer and of the sampler."""


def run(pair: str, *, steps: int, model: str) -> dict[str, Any]:
    """What the steps of a pair reported."""
    trainer, _, sampler = pair.partition("/")
    settings = [
        f"model={model}", f"steps={steps}", f"dtype={trainer}", f"engine.dtype={sampler}",
        "correction=bypass", "evaluation.num_tasks=32",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        alone(train_quickstart, settings, str(path))
        rows = steps_of(path)
        contract = json.loads((path / "environment.json").read_text())["contract"]
    late = rows[1:]
    return {
        "contract": contract,
        "unequal": sum(r["mismatch/unequal_tokens"] for r in rows)
        / sum(r["mismatch/compared_tokens"] for r in rows),
        "k3": mean(r["mismatch/k3"] for r in rows),
        "largest": max(r["mismatch/max_abs_diff"] for r in rows),
        "reward": mean(r["reward/mean"] for r in rows[-10:]),
        "overflows": sum(r.get("train/overflows", 0.0) for r in rows),
        "sample_ms": 1e3 * median(r["time/sample_seconds"] / r["tokens/sampled"] for r in late),
        "train_ms": 1e3 * median(r["time/train_seconds"] / r["tokens/sampled"] for r in late),
    }


def compare(
    *, steps: int = 60, model: str = "tiny-qwen3", only: tuple[str, ...] = PAIRS
) -> Iterator[Row]:
    how, base = f"quickstart, {model}, {steps} steps", 0.0
    for pair in only:
        found = run(pair, steps=steps, model=model)
        note(f"{pair:<18}  {listed(found)}")
        milliseconds = found["sample_ms"] + found["train_ms"]
        base = base or milliseconds
        yield row(f"precision {pair}", milliseconds, base, "ms per token", how=how, **found)


if __name__ == "__main__":
    short = {"steps": 8, "only": ("float32/float32", "float32/bfloat16", "bfloat16/bfloat16")}
    main(compare, short=short)
