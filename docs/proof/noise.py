"""The noise table of docs/correction.md: `lockstep noise quickstart SETTINGS`, mean of three seeds.

python docs/proof/noise.py      half a minute each; writes noise.json beside this file
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from run import rounded, stamp
from studies import REPORTED_NOISE, TEN_TIMES

from lockstep import measure_noise
from lockstep.config import resolve
from lockstep.recipes import find_recipe
from lockstep.testing.faults import injected, split_faults

RESULTS = Path(__file__).parent / "noise.json"
SEEDS = (0, 1, 2)

ROWS = {
    "embedded, true-on-policy": (),
    "embedded, stock ops": ("contract=none",),
    "embedded, sampler in bfloat16": ("contract=none", "engine.dtype=bfloat16"),
    "embedded, kernel noise 0.035": ("--fault=kernel_noise,std=0.035",),
    "embedded, router noise 0.1": ("--fault=router_noise,std=0.1",),
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


def measured(words: tuple[str, ...], seed: int) -> dict[str, float]:
    """The figures of one seed, which also gives a fault other offsets per id."""
    settings, faults = split_faults([f"seed={seed}", *words])
    with injected(*(replace(fault, seed=seed) for fault in faults)):
        return measure_noise(resolve(find_recipe("quickstart"), settings))


def main() -> None:
    rows: dict[str, Any] = {}
    for name, words in ROWS.items():
        seeds = [measured(words, seed) for seed in SEEDS]
        means = {figure: mean(found[figure] for found in seeds) for figure in seeds[0]}
        print(name, *(f"{figure} {value:.2g}" for figure, value in means.items()), flush=True)
        rows[name] = {"settings": list(words), **means, "seeds": seeds}
    document = {**stamp("python docs/proof/noise.py"), "rows": rows}
    RESULTS.write_text(json.dumps(rounded(document, 3), indent=1) + "\n")


if __name__ == "__main__":
    main()
