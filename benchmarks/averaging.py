"""Cost of averaged log-probs: the quickstart's step with correction=averaged (eight re-scorings, no
recompute) beside correction.anchor=recomputed, which runs the trainer over the batch once more.

"quickstart": processor seconds per step, from fresh processes of 3 and of 13 steps, the difference
over 10; the best of the rounds. In one process only tools leave the engine idle, so this is the
price without the gain of overlapping.

"idle engine": seconds on the clock per step, where the engine has a process of its own and waits:
every tool call takes 0 to 2 seconds, 32 episodes a step. The model has 10 million parameters: the
shipped one, whose experts are widened by zeros, so that it acts as that one does. Runs in turn; the
median of the steps after the first two of each.

    python benchmarks/averaging.py [--json] [--rounds N] [--only quickstart|idle]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"


import torch
from safetensors.torch import load_file, save_file

from lockstep.agent.tasks import derive_seed
from lockstep.config import resolve
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.models.locate import locate_model
from lockstep.recipes import find_recipe
from lockstep.run.train import train
from lockstep.store.run import load_run

NAME = "averaging"
WIDTH = 6400
"""Width of an expert, for 10 million parameters."""
LONGEST = 2.0
"""Seconds of the slowest tool call."""
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


# -- beside an engine that waits -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SlowSearchConfig(DocSearchConfig):
    """Document search whose tool takes its time."""

    def environment(self, task: Any, *given: Any) -> Any:
        environment = super().environment(task, *given)
        step, calls = environment.step, iter(range(1000))

        async def slow(message: Any) -> Any:
            if message.tool_calls:
                drawn = derive_seed(0, task.id, next(calls)) / 2**63
                await asyncio.sleep(LONGEST * drawn)
            return await step(message)

        environment.step = slow
        return environment


def widened(folder: Path) -> Path:
    """The shipped model with experts of WIDTH: new units have weights of 0."""
    shipped = locate_model("tiny-gpt-oss")
    shutil.copytree(shipped, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        kind = name.rpartition(".")[2]
        if kind in ("gate_up_proj", "gate_up_proj_bias"):
            missing = (0, 2 * WIDTH - tensor.shape[-1])
        elif kind == "down_proj":
            missing = (0, 0, 0, WIDTH - tensor.shape[-2])
        else:
            continue
        tensors[name] = torch.nn.functional.pad(tensor, missing).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def idle(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        model = widened(Path(scratch) / "model")
        steps: dict[str, list[dict[str, Any]]] = {arm: [] for arm in REAL}
        for number in range(rounds):
            for arm, words in REAL.items():
                size = ["steps=6", "groups_per_step=4", f"model={model}", f"seed={number}"]
                how = ["engine.replicas=1", "contract=none"]
                quiet = ["evaluation=none", "checkpoint.every=0"]
                config = resolve(find_recipe("quickstart"), [*size, *how, *quiet, *words])
                config = replace(config, task=SlowSearchConfig())
                run = train(config, out=Path(scratch) / f"{arm}-{number}", view="json").path
                steps[arm] += [r for r in load_run(run).metrics if "time/step_seconds" in r][2:]
    seconds = {arm: median(row["time/step_seconds"] for row in rows) for arm, rows in steps.items()}
    share = median(r["time/sample_seconds"] / r["time/step_seconds"] for r in steps["recomputed"])
    for arm, found in seconds.items():
        print(f"idle engine, {arm}: {found:.2f} s a step", file=sys.stderr)
    return [
        {
            "name": f"{NAME}, idle engine",
            "ours": seconds["averaged"],
            "peer": seconds["recomputed"],
            "unit": "s/step",
            "ratio": seconds["recomputed"] / seconds["averaged"],
            "better": "lower",
            "steps": {
                arm: [row["time/step_seconds"] for row in steps[arm]]
                for arm in ("averaged", "recomputed")
            },
            "how": f"on the clock; neither: {seconds['rollout']:.2f}; {share:.0%} is sampling",
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=2, help="of the real runs")
    parser.add_argument("--only", choices=["quickstart", "idle"])
    options = parser.parse_args()
    parts = [] if options.only == "idle" else real(options.rounds)
    parts += [] if options.only == "quickstart" else idle(options.rounds)
    if options.json:
        print(json.dumps({"name": NAME, "parts": parts}))


if __name__ == "__main__":
    main()
