"""Cost of each pair of precisions, the trainer's dtype and the sampler's, on the quickstart.

    python benchmarks/precision.py [--steps N] [--model NAME] [--only TRAINER/SAMPLER] [--json]

Each pair is a run of its own (`lockstep train quickstart dtype=... engine.dtype=...`), one after
the other, without a correction, so that the reward shows the effect of the gap. Seconds are the
steps' time per sampled token, without the first step. The ratio divides the seconds of float32 on
both sides by the pair's: above 1 the pair is faster. A CPU without 16-bit arithmetic computes in
float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

PAIRS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "bfloat16"),
)


def run(trainer: str, sampler: str, *, steps: int, model: str, folder: Path) -> dict[str, Any]:
    """One pair: what its steps reported."""
    path = folder / f"{trainer}-{sampler}"
    words = [
        f"model={model}", f"steps={steps}", f"dtype={trainer}", f"engine.dtype={sampler}",
        "correction=bypass", "evaluation.num_tasks=32", "evaluation.at_start=false",
        "checkpoint.every=0", f"out={path}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "lockstep.cli", "train", "quickstart", *words, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    late = rows[1:]
    return {
        "trainer": trainer,
        "sampler": sampler,
        "contract": json.loads((path / "environment.json").read_text())["contract"],
        "unequal": sum(r["mismatch/unequal_tokens"] for r in rows)
        / sum(r["mismatch/compared_tokens"] for r in rows),
        "k3": mean(r["mismatch/k3"] for r in rows),
        "largest": max(r["mismatch/max_abs_diff"] for r in rows),
        "reward": mean(r["reward/mean"] for r in rows[-10:]),
        "overflows": sum(r.get("train/overflows", 0.0) for r in rows),
        "sample_ms": 1e3 * median(r["time/sample_seconds"] / r["tokens/sampled"] for r in late),
        "train_ms": 1e3 * median(r["time/train_seconds"] / r["tokens/sampled"] for r in late),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--only", action="append", help="TRAINER/SAMPLER")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pairs = [p for p in PAIRS if not args.only or "/".join(p) in args.only]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for trainer, sampler in pairs:
            settings = {"steps": args.steps, "model": args.model, "folder": Path(folder)}
            found.append(run(trainer, sampler, **settings))
            print(_line(found[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
    base = found[0]
    parts = [
        {
            "name": f"precision {r['trainer']}/{r['sampler']}",
            "ours": r["sample_ms"] + r["train_ms"],
            "peer": base["sample_ms"] + base["train_ms"],
            "unit": "ms per token",
            "ratio": (base["sample_ms"] + base["train_ms"]) / (r["sample_ms"] + r["train_ms"]),
            "better": "higher",
            "how": f"quickstart, {args.model}, {args.steps} steps",
            **r,
        }
        for r in found
    ]
    print(json.dumps({"name": "precision", "parts": parts}))


def _line(r: dict[str, Any]) -> str:
    return (
        f"{r['trainer']:>8} / {r['sampler']:<8}  {r['contract']:<14}  unequal {r['unequal']:6.1%}  "
        f"k3 {r['k3']:.1e}  largest {r['largest']:.2g}  reward {r['reward']:.3f}  sample "
        f"{r['sample_ms']:.2f} ms  train {r['train_ms']:.2f} ms  overflows {r['overflows']:.0f}"
    )


if __name__ == "__main__":
    main()
