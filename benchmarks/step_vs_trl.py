"""A whole reinforcement-learning step against TRL's GRPOTrainer with tools.

    python benchmarks/step_vs_trl.py [--steps 12] [--model tiny-qwen3] [--trl JSON]
    python benchmarks/step_vs_trl.py --model smollm2-135m --steps 5 --warmup 1

One step of the quickstart: sample 8 tasks x 8 episodes over several turns with the search tool,
score them, update once. Any other model, by name or directory, learns the sums of examples/sums.py
with LoRA of rank 16, against TRL with PEFT. Same weights, tokenizer, token format, tasks in the
same order, turns and tokens at most, temperature, objective, optimizer settings and reward function
on both sides. Each side is a process of its own with one thread, and they take turns step by step,
so that a change in the machine's load meets both. Reported: the median over the counted steps, the
median of the steps' ratios, and the most memory that each process held (VmHWM).

What differs: a turn whose header cannot be read ends an episode in TRL, and is answered with an
error here; our time includes writing the trajectories to disk and measuring the mismatch; TRL
computes no log-probs while it samples.

TRL comes from the folder that `make test-trainers` fills, or from --packages DIR. --trl takes
fields of its GRPOConfig, to try other settings of the peer. --set takes settings of both sides,
such as group_size=2, lora=null to train all weights, or the tool and tasks of
examples/calculator.py, for a model that was taught its demonstrations (docs/tasks.md).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from measuring import (
    ROOT,
    TRAINERS,
    CannotRun,
    Row,
    Side,
    SideFailed,
    answer_lines,
    command_of,
    main,
    note,
    peak_mib,
    row,
)

PEER = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
"""Models of the recipe quickstart. Every other one is trained on SUMS."""
SUMS = (
    f"task.reward={ROOT}/examples/sums.py:reward", f"task.path={ROOT}/examples/sums.py:tasks",
    "max_tokens=128", "groups_per_step=8", "group_size=8", "lora.rank=16", "trainer.lr=5e-4",
    "trainer.warmup_updates=0", "agent.max_turn_tokens=48", "evaluation.every=0",
)  # fmt: skip
"""Settings of examples/sums.py, over the recipe custom."""
SIDE_SECONDS = 900  # tiny models take about a minute on a quiet core
STEP_SECONDS = 300  # of a step of both sides; past these the machine is too busy

HOW = (
    "median seconds per step (sample 64 episodes with tools, score, update), one thread each, step "
    "by step in turn; TRL with transformers generate, the fastest of its settings that were tried"
)
SUMS_HOW = (
    "median seconds per step (sample, score, update an adapter of rank 16 or, with lora=null, all "
    "weights), one thread each, in turn; TRL with PEFT, transformers generate"
)


# -- our side --------------------------------------------------------------------------------------


def run_ours(recipe: str, overrides: list[str]) -> None:
    """A step of the training loop itself for each line on stdin: everything between two steps is in
    the time, the record of the trajectories and metrics included."""
    from lockstep.config import resolve, to_dict
    from lockstep.observe.live import open_view
    from lockstep.observe.loggers import Loggers
    from lockstep.recipes import find_recipe
    from lockstep.recipes.fitting import configure
    from lockstep.run.build import build
    from lockstep.run.preflight import preflight
    from lockstep.run.steps import one_step
    from lockstep.run.training_run import TrainingRun
    from lockstep.store.run import RunDirectory

    if recipe == "custom":
        config = configure(recipe, overrides=overrides)
    else:
        config = resolve(find_recipe(recipe), overrides)
    model_files = preflight(config)
    view = open_view("json")
    with TemporaryDirectory() as parent, asyncio.Runner() as loop:
        path = Path(parent) / "run"
        loggers = Loggers(config.record, run_path=path, config={}, warn=note)
        with RunDirectory.create(path, to_dict(config), record=config.record) as directory:
            parts = build(config, model_files)
            run = TrainingRun(config, parts, path, directory, view, loggers)

            def step(_: Any) -> dict[str, float]:
                wall, cpu = time.perf_counter(), time.process_time()
                found = loop.run(one_step(run))
                assert found is not None, "generated worlds do not end"
                return {
                    "seconds": time.perf_counter() - wall,
                    "cpu_seconds": time.process_time() - cpu,
                    "sample_seconds": found["time/sample_seconds"],
                    "train_seconds": found["time/train_seconds"],
                    "reward": found["reward/mean"],
                    "tokens_per_episode": found["tokens/sampled"] / found["episodes/total"],
                    "peak_mib": peak_mib(),
                }

            answer_lines(step)


# -- side by side ----------------------------------------------------------------------------------


def measure(
    model: str, total: int, packages: str, trl: str, more: Sequence[str]
) -> dict[str, list[dict[str, float]]]:
    """The steps of both sides."""
    recipe = "quickstart" if model in MODELS else "custom"
    overrides = [
        f"model={model}", f"steps={total}", "threads=1", "device=cpu", "trainer.schedule=constant",
        *(s for s in SUMS if model not in MODELS and (s[:5] != "lora." or "lora=null" not in more)),
        *more,
    ]  # fmt: skip
    commands = {
        "TRL": [sys.executable, str(PEER), recipe, *overrides, "--trl", trl],
        "ours": command_of(run_ours, recipe, overrides),
    }
    paths = {"ours": str(ROOT / "src"), "TRL": os.pathsep.join([str(ROOT / "src"), packages])}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    name = ""
    try:
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name, command in commands.items():
                variables = {"PYTHONPATH": paths[name].strip(os.pathsep), "HF_HUB_OFFLINE": "1",
                             "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
                limit = SIDE_SECONDS + STEP_SECONDS * total
                side = Side(command, limit=limit, environment=variables)
                sides[name] = stack.enter_context(side)
            for _ in range(total):
                for name, side in sides.items():
                    steps[name].append(side.ask())
    except SideFailed as error:
        if name == "TRL":
            raise CannotRun(f"TRL failed on {model}: {str(error)[-500:]}") from error
        raise
    return steps


def summary(name: str, steps: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Medians over the counted steps, and the peak of memory."""
    counted = steps[warmup:]
    found = {key: median(step[key] for step in counted) for key in counted[0]}
    walls = [step["seconds"] for step in counted]
    first, last = (mean(s["reward"] for s in part) for part in (steps[:3], steps[-3:]))
    note(
        f"  {name:5} {found['seconds']:.3f} s/step wall, {found['cpu_seconds']:.3f} s CPU (wall "
        f"{min(walls):.3f} to {max(walls):.3f}), at most {steps[-1]['peak_mib']:,.0f} MiB; "
        f"{mean(s['tokens_per_episode'] for s in counted):.1f} tokens sampled per episode; reward "
        f"{first:.3f} in the first steps, {last:.3f} in the last"
    )
    return found | {"peak_mib": steps[-1]["peak_mib"]}


def compare(
    *,
    steps: int = 12,
    warmup: int = 3,
    model: tuple[str, ...] = (),
    packages: str = str(TRAINERS),
    trl: str = "{}",
    set: tuple[str, ...] = (),
) -> Iterator[Row]:
    """model: both tiny ones without it. packages: a folder that has TRL."""
    if not (Path(packages) / "trl").is_dir():
        raise CannotRun(f"TRL is not in {packages}: `make test-trainers` installs it")
    for name in model or MODELS:
        note(f"{name}: {steps} steps after {warmup} for warm-up")
        found = measure(name, warmup + steps, packages, trl, set)
        ours, peer = (summary(side, found[side], warmup) for side in ("ours", "TRL"))
        pairs = zip(found["ours"][warmup:], found["TRL"][warmup:], strict=True)
        how = (
            f"{HOW if name in MODELS else SUMS_HOW}; median of the steps' ratios "
            f"{median(b['seconds'] / a['seconds'] for a, b in pairs):.2f}, of CPU "
            f"{peer['cpu_seconds'] / ours['cpu_seconds']:.2f}, of memory "
            f"{peer['peak_mib'] / ours['peak_mib']:.2f}; ours samples "
            f"{ours['sample_seconds']:.3f} s and trains {ours['train_seconds']:.3f} s"
        )
        title = f"rl-step-vs-trl/{Path(name).name}"
        yield row(title, ours["seconds"], peer["seconds"], "s/step", how=how)


if __name__ == "__main__":
    main(compare, short={"steps": 3, "warmup": 1, "model": ("tiny-qwen3",)})
