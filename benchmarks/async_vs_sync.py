"""Sampling while the trainer trains against sampling and training in turn: the same steps.

    python benchmarks/async_vs_sync.py [--steps N] [--repeats N] [--replicas 0|1]

Each arm is a run of the quickstart in a process of its own, with stock ops or under the contract,
and with the same correction: the same tasks, episodes and updates, and with --replicas 1 (the
default) an engine in a process beside the trainer's, in the synchronous arm too. Arms are run in
turn, --repeats times; seconds are of the whole loop, the median of the repeats. Also with tools
that take a while, 0.1 s in the mean with a long tail, as tools do: then episodes wait, and not
processors.
Without two free processors the figures without such tools mean nothing. The processor times show
whether they were free: the trainer's and the sampler's add up to the synchronous run's seconds.

Ratios: the synchronous run's seconds to the asynchronous one's, above 1 asynchrony is faster; and
the seconds without the contract to those under it, of the medians. The text beside them has the
range over the pairs of one seed.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from measuring import Row, alone, listed, main, note, row
from measuring.runs import steps_of, train_quickstart

CONTRACTS = ("none", "true-on-policy")


def measure(settings: list[str], tool_seconds: float) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        used = alone(train_quickstart, settings, str(path), tool_seconds)
        rows = steps_of(path)
    late = rows[1:]  # the first step starts everything, and has nothing to overlap with

    def average(name: str) -> float:
        return mean(row.get(name, 0.0) for row in late)

    return {
        **used,
        "seconds": sum(row["time/step_seconds"] for row in rows),
        "sample": average("time/sample_seconds"),
        "wait": average("time/wait_seconds"),
        "train": average("time/train_seconds"),
        "reward": mean(row["reward/mean"] for row in rows[-10:]),
        "age": average("staleness/mean"),
        "k3": average("mismatch/k3"),
        "compared": sum(of_age_0(row, "compared_tokens") for row in rows),
        "unequal": sum(of_age_0(row, "unequal_tokens") for row in rows),
        "rejected": average("correction/rejected_share"),
    }


def of_age_0(row: dict[str, Any], figure: str) -> float:
    """A step's figure of tokens of the version in training: all of them where none is older."""
    is_split = any(name.startswith("mismatch/by_age/") for name in row)
    return row.get(f"mismatch/by_age/0/{figure}", 0.0 if is_split else row[f"mismatch/{figure}"])


def compare(
    *,
    steps: int = 40,
    repeats: int = 2,
    replicas: int = 1,
    correction: str = "mis",
    tool_seconds: tuple[float, ...] = (0.0, 0.1),
    staleness: tuple[int, ...] = (0, 1, 2),
) -> Iterator[Row]:
    how = f"quickstart, {steps} steps"
    common = [f"steps={steps}", f"engine.replicas={replicas}", f"correction={correction}",
              "evaluation=none", "trainer.measure_after_every=0"]  # fmt: skip
    for waits in tool_seconds:
        found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        for seed, ahead, contract in product(range(repeats), staleness, CONTRACTS):
            arm = [f"max_staleness={ahead}", f"contract={contract}", f"seed={seed}"]
            found[ahead, contract].append(measure([*common, *arm], waits))
            note(f"tools {waits:g} s  {'  '.join(arm)}  {listed(found[ahead, contract][-1])}")
        medians = {arm: median(run["seconds"] for run in runs) for arm, runs in found.items()}
        for (ahead, contract), runs in found.items():
            where = f"max_staleness={ahead}, contract={contract}, tools {waits:g} s"
            if ahead:
                yield row(where, medians[ahead, contract], medians[0, contract], "s",
                          how=f"{how}, against max_staleness=0", runs=runs,
                          peer_runs=found[0, contract])  # fmt: skip
            if contract != "none":
                pairs = zip(runs, found[ahead, "none"], strict=True)
                ratios = sorted(run["seconds"] / other["seconds"] for run, other in pairs)
                unequal, compared = (sum(r[x] for r in runs) for x in ("unequal", "compared"))
                text = (
                    f"{how}, against contract=none: {median(ratios):.2f}x the time, pairs of a "
                    f"seed {ratios[0]:.2f} to {ratios[-1]:.2f}; {unequal:.0f} unequal of "
                    f"{compared:.0f} tokens of age 0"
                )
                both = (medians[ahead, name] for name in (contract, "none"))
                yield row(f"{where}, time", *both, "s", how=text)


if __name__ == "__main__":
    short = {"steps": 8, "repeats": 1, "tool_seconds": (0.1,), "staleness": (0, 1)}
    main(compare, short=short)
