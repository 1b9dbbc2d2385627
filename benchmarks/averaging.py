"""Cost of averaged log-probs: the quickstart's step with correction=averaged (eight re-scorings, no
recompute) beside correction.anchor=recomputed, which runs the trainer over the batch once more.

Processor seconds per step, from fresh processes of 3 and of 13 steps, the difference over 10; the
best of the rounds. In one process only tools leave the engine idle, so this is the price without
the gain of overlapping.

    python benchmarks/averaging.py [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"

NAME = "averaging"
REAL = {
    "averaged": ("correction=averaged",),
    "recomputed": ("correction.anchor=recomputed",),
    "rollout": ("correction=bypass",),
}


def seconds_of(arm: str, steps: int) -> float:
    """Processor seconds of a whole run of the quickstart."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-m", "lockstep.cli", "train", "quickstart"),
                *(f"steps={steps}", "evaluation.at_start=false", "evaluation.num_tasks=1"),
                *("contract=none", "checkpoint.every=0", *REAL[arm]),
                *("--json", f"out={Path(scratch) / 'run'}"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def real(rounds: int) -> list[dict[str, Any]]:
    found = {
        arm: min((seconds_of(arm, 13) - seconds_of(arm, 3)) / 10 for _ in range(rounds))
        for arm in REAL
    }
    for arm, seconds in found.items():
        print(f"quickstart, {arm}: {seconds:.3f} processor seconds a step", file=sys.stderr)
    return [
        {
            "name": f"{NAME}, quickstart",
            "ours": found["averaged"],
            "peer": found["recomputed"],
            "unit": "s/step",
            "ratio": found["recomputed"] / found["averaged"],
            "better": "lower",
            "how": f"processor seconds; neither re-scored nor recomputed: {found['rollout']:.3f}",
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=2, help="of the real runs")
    options = parser.parse_args()
    parts = real(options.rounds)
    if options.json:
        print(json.dumps({"name": NAME, "parts": parts}))


if __name__ == "__main__":
    main()
