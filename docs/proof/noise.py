"""The noise table of docs/correction.md: `lockstep noise quickstart SETTINGS`, mean of three seeds.

python docs/proof/noise.py      half a minute each; writes noise.json beside this file
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from run import configured, rounded, save, stamp
from studies import PLAN, each_of

from lockstep import measure_noise
from lockstep.testing.faults import injected, split_faults

SEEDS = (0, 1, 2)


def measured(words: tuple[str, ...], seed: int) -> dict[str, float]:
    """The figures of one seed, which also gives a fault other offsets per id."""
    settings, faults = split_faults([f"seed={seed}", *words])
    with injected(*(replace(fault, seed=seed) for fault in faults)):
        return measure_noise(configured(*settings))


def main() -> None:
    rows: dict[str, Any] = {}
    for name, words in each_of(PLAN["noise"]).items():
        seeds = [measured(words, seed) for seed in SEEDS]
        means = {figure: mean(found[figure] for found in seeds) for figure in seeds[0]}
        print(name, *(f"{figure} {value:.2g}" for figure, value in means.items()), flush=True)
        rows[name] = {"settings": list(words), **means, "seeds": seeds}
    document = {**stamp("python docs/proof/noise.py"), "rows": rows}
    save("noise", rounded(document, 3))


if __name__ == "__main__":
    main()
