"""Sampling while the trainer trains against sampling and training in turn: the same steps.

    python benchmarks/async_vs_sync.py [--steps N] [--repeats N] [--replicas 0|1] [--json]

Each arm is a run of the quickstart in a process of its own, with stock ops or under the contract,
and with the same correction: the same tasks, episodes and updates, and with --replicas 1 (the
default) an engine in a process beside the trainer's, in the synchronous arm too. Arms are run in
turn, --repeats times; seconds are of the whole loop without its evaluations, the median of the
repeats. Also with tools that take a while, 0.1 s in the mean with a long tail, as tools do: then
episodes wait, and not processors.
Without two free processors the figures without such tools mean nothing. The processor times show
whether they were free: the trainer's and the sampler's add up to the synchronous run's seconds.

Ratios: the synchronous run's seconds to the asynchronous one's, above 1 asynchrony is faster; and
the seconds under the contract to those without, the median and the range over the pairs of one
seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from lockstep.agent.tasks import derive_seed
from lockstep.envs.docsearch.config import DocSearchConfig

STALENESS = (0, 1, 2)
CONTRACTS = ("none", "true-on-policy")


@dataclass(frozen=True, kw_only=True)
class SlowSearchConfig(DocSearchConfig):
    """Document search whose every answer takes a while."""

    mean_seconds: float = 0.1
    """Mean time of one call; exponentially distributed."""

    def environment(self, task, agent):
        made = super().environment(task, agent)
        answer, num_calls = made.step, 0

        async def step(message):
            nonlocal num_calls
            num_calls += 1
            draw = derive_seed("tool", task.id, num_calls, str(message.content)) / 2**63
            await asyncio.sleep(-self.mean_seconds * math.log(max(draw, 1e-9)))
            return await answer(message)

        made.step = step
        return made


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run."""

    max_staleness: int
    tool_seconds: float
    steps: int
    replicas: int
    correction: str
    contract: str
    seed: int = 0


def run_arm(arm: Arm, path: Path) -> None:
    """Trains one arm. Runs in a process of its own."""
    from lockstep.config import resolve
    from lockstep.recipes import find_recipe
    from lockstep.run.train import train

    settings = (
        f"steps={arm.steps}", f"max_staleness={arm.max_staleness}", f"seed={arm.seed}",
        f"engine.replicas={arm.replicas}", f"correction={arm.correction}",
        f"contract={arm.contract}",
        "evaluation.num_tasks=64", "evaluation.at_start=false", "checkpoint.every=0",
        "trainer.measure_after_every=0",
    )  # fmt: skip
    config = resolve(find_recipe("quickstart"), settings)
    if arm.tool_seconds:
        config = replace(config, task=SlowSearchConfig(mean_seconds=arm.tool_seconds))
    train(config, out=path, view="json")
    used = {
        "trainer_cpu": resource.getrusage(resource.RUSAGE_SELF),
        "sampler_cpu": resource.getrusage(resource.RUSAGE_CHILDREN),
    }
    (path / "cpu.json").write_text(
        json.dumps({name: found.ru_utime + found.ru_stime for name, found in used.items()})
    )


def measure(arm: Arm) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        command = [sys.executable, __file__, "--arm", json.dumps(asdict(arm)), "--out", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        cpu = json.loads((path / "cpu.json").read_text())
    rows = [row for row in lines if "train/loss" in row]
    late = rows[1:]  # the first step starts everything, and has nothing to overlap with

    def average(name: str) -> float:
        return mean(row.get(name, 0.0) for row in late)

    return {
        **asdict(arm),
        **cpu,
        "seconds": sum(row["time/step_seconds"] for row in rows),
        "sample": average("time/sample_seconds"),
        "wait": average("time/wait_seconds"),
        "train": average("time/train_seconds"),
        "idle": sum(row["time/idle_seconds"] for row in late)
        / sum(row["time/step_seconds"] for row in late),
        "reward": mean(row["reward/mean"] for row in rows[-10:]),
        "greedy": lines[-1]["eval/greedy/mean@1"],
        "age": average("staleness/mean"),
        "oldest": max(row["staleness/max"] for row in rows),
        "mixed": average("staleness/mixed_rows") / average("training/rows"),
        "k3": average("mismatch/k3"),
        "compared": sum(of_age_0(row, "compared_tokens") for row in rows),
        "unequal": sum(of_age_0(row, "unequal_tokens") for row in rows),
        "ess": average("mismatch/ess"),
        "rejected": average("correction/rejected_share"),
    }


def of_age_0(row: dict[str, Any], figure: str) -> float:
    """A step's figure of tokens of the version in training: all of them where none is older."""
    is_split = any(name.startswith("mismatch/by_age/") for name in row)
    return row.get(f"mismatch/by_age/0/{figure}", 0.0 if is_split else row[f"mismatch/{figure}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="0: engine and trainer share one")
    parser.add_argument("--correction", default="mis")
    parser.add_argument("--tool-seconds", type=float, action="append", help="default: 0 and 0.1")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run_arm(Arm(**json.loads(args.arm)), Path(args.out))
        return
    shown = sys.stderr if args.json else sys.stdout
    parts: list[dict[str, Any]] = []
    for tool_seconds in args.tool_seconds or (0.0, 0.1):
        found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        for seed in range(args.repeats):
            for ahead, contract in product(STALENESS, CONTRACTS):
                arm = Arm(
                    max_staleness=ahead, tool_seconds=tool_seconds, steps=args.steps,
                    replicas=args.replicas, correction=args.correction, contract=contract,
                    seed=seed,
                )  # fmt: skip
                found[ahead, contract].append(measure(arm))
                print(_line(found[ahead, contract][-1]), file=shown, flush=True)
        how = f"quickstart, {args.steps} steps"
        for (ahead, contract), runs in found.items():
            where = f"max_staleness={ahead}, contract={contract}, tools {tool_seconds:g} s"
            seconds = median(run["seconds"] for run in runs)
            if ahead:
                peers = found[0, contract]
                base = median(run["seconds"] for run in peers)
                parts.append(
                    {
                        "name": where, "ours": seconds, "peer": base, "unit": "s",
                        "ratio": base / seconds, "better": "higher",
                        "how": f"{how}, against max_staleness=0", "runs": runs, "peer_runs": peers,
                    }
                )  # fmt: skip
                print(f"{where}: {base / seconds:.2f}x of 0", file=shown, flush=True)
            if contract != "none":
                pairs = zip(runs, found[ahead, "none"], strict=True)
                ratios = sorted(run["seconds"] / other["seconds"] for run, other in pairs)
                parts.append(
                    {
                        "name": f"{where}, time", "ratio": median(ratios), "better": "lower",
                        "how": f"{how}, against contract=none, pairs of a seed", "ratios": ratios,
                    }
                )  # fmt: skip
                print(
                    f"{where}: {median(ratios):.2f}x of the time without "
                    f"({ratios[0]:.2f} to {ratios[-1]:.2f}); {sum(r['unequal'] for r in runs):.0f} "
                    f"unequal of {sum(r['compared'] for r in runs):.0f} tokens of age 0",
                    file=shown,
                    flush=True,
                )
    print(json.dumps({"name": "async_vs_sync", "parts": parts}))


def _line(r: dict[str, Any]) -> str:
    return (
        f"tools {r['tool_seconds']:g} s  max_staleness={r['max_staleness']}  {r['contract']}  "
        f"seed {r['seed']}  "
        f"{r['seconds']:6.1f} s (processor: trainer {r['trainer_cpu']:.1f}, sampler "
        f"{r['sampler_cpu']:.1f})  sample {r['sample']:.2f}  wait {r['wait']:.2f}  train "
        f"{r['train']:.2f}  idle {r['idle']:.0%}  reward {r['reward']:.3f}  greedy "
        f"{r['greedy']:.3f}  age {r['age']:.2f} (max {r['oldest']:.0f})  mixed {r['mixed']:.0%}  "
        f"k3 {r['k3']:.1e}  ess {r['ess']:.3f}  rejected {r['rejected']:.1%}"
    )


if __name__ == "__main__":
    main()
