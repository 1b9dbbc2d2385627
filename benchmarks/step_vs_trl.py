"""A whole reinforcement-learning step against TRL's GRPOTrainer with tools.

    python benchmarks/step_vs_trl.py [--json] [--steps 12] [--model tiny-qwen3] [--trl JSON]
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

TRL is installed into .cache/trl-venv on the first run; nothing else is changed. With --packages DIR
it is imported from DIR, and the rest from this environment:

    pip install --target DIR --no-deps trl==1.16.0 datasets dill multiprocess xxhash pandas httpx \\
        pyarrow peft

Exit code 3 says that the peer could not be installed or run: the reason is printed, and is in the
JSON line as {"name", "skipped"}. --trl takes fields of its GRPOConfig, to try other settings of the
peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import can_measure, peak_mib

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
VENV = ROOT / ".cache" / "trl-venv"
NAME = "rl-step-vs-trl"
PEER_NAME = "TRL"
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
"""Models of the recipe quickstart. Every other one is trained on SUMS."""
SUMS = (
    f"task.reward={ROOT}/examples/sums.py:reward", f"task.path={ROOT}/examples/sums.py:tasks",
    "max_tokens=128", "groups_per_step=8", "group_size=8", "lora.rank=16", "trainer.lr=5e-4",
    "trainer.warmup_updates=0", "agent.max_turn_tokens=48", "evaluation.every=0",
)  # fmt: skip
"""Settings of examples/sums.py, over the recipe custom."""
WARMUP_STEPS = 3
CANNOT_RUN = 3
READY = "READY"
"""Printed by a side before each step; it goes on when a line comes on its stdin."""
SIDE_SECONDS = 900  # tiny models take about a minute on a quiet core
STEP_SECONDS = 300  # of a step of both sides; past these the machine is too busy

REQUIREMENTS = (
    "trl==1.16.0", "transformers==5.23.0", "datasets==5.2.0", "accelerate==1.15.0", "jmespath",
    "rich", "peft",
)  # fmt: skip
"""TRL's environments need transformers 5.13 or newer. The figures in the docs were measured with
these versions; another version is another peer."""

HOW = (
    "median seconds per step (sample 64 episodes with tools, score, update), one thread each, step "
    "by step in turn; TRL with transformers generate, the fastest of its settings that were tried"
)
SUMS_HOW = (
    "median seconds per step (sample sums without tools, score, update an adapter of rank 16), one "
    "thread each, step by step in turn; TRL with PEFT and transformers generate"
)


class PeerUnavailable(Exception):
    """Why the peer cannot be measured here."""


class SideFailed(Exception):
    """A side ended without a result: its name and its last words."""


# -- our side --------------------------------------------------------------------------------------


def run_ours(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Steps of the training loop itself: everything between two steps is in the time, the record of
    the trajectories and metrics included."""
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
    view = open_view(is_json=True)
    measured: list[dict[str, float]] = []

    async def play(run: TrainingRun) -> None:
        for _ in range(config.steps):
            print(READY, flush=True)
            sys.stdin.readline()
            wall, cpu = time.perf_counter(), time.process_time()
            row = await one_step(run)
            assert row is not None, "generated worlds do not end"
            episodes = row["episodes/total"]
            measured.append(
                {
                    "seconds": time.perf_counter() - wall,
                    "cpu_seconds": time.process_time() - cpu,
                    "sample_seconds": row["time/sample_seconds"],
                    "train_seconds": row["time/train_seconds"],
                    "reward": row["reward/mean"],
                    "tokens_per_episode": row["tokens/sampled"] / episodes,
                    "k3": row["mismatch/k3"],
                }
            )

    with TemporaryDirectory() as parent:
        path = Path(parent) / "run"
        loggers = Loggers((), run_path=path, project="", config={}, warn=note)
        with RunDirectory.create(path, to_dict(config), record=config.record) as directory:
            parts = build(config, model_files)
            run = TrainingRun(config, model_files, parts, path, directory, view, loggers)
            asyncio.run(play(run))
    return {
        "steps": measured,
        **({"peak_mib": peak_mib()} if can_measure() else {}),
        "versions": {"lockstep": version("lockstep-rl"), "torch": version("torch")},
    }


# -- the peer --------------------------------------------------------------------------------------


def install_peer(packages: str) -> Path:
    """The Python of TRL's own environment, made on first use. packages: a folder that has TRL for
    this Python."""
    if packages:
        return Path(sys.executable)
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    torch = f"torch=={version('torch').split('+')[0]}"
    # The folder is complete only if the last install wrote its stamp with these versions.
    stamp, wanted = VENV / "installed", "\n".join((torch, *REQUIREMENTS))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    note(f"installing TRL into {VENV.relative_to(ROOT)} (about 1.5 GB, a few minutes) ...")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # The CPU build of torch: both sides are measured on the CPU, and CUDA is gigabytes.
    cpu_build = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    shutil.rmtree(VENV, ignore_errors=True)
    for command in (
        [sys.executable, "-m", "venv", str(VENV)],
        [*pip, "--retries", "1", *cpu_build, torch, *REQUIREMENTS],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise PeerUnavailable(f"TRL cannot be installed: {error}") from error
        if done.returncode:
            raise PeerUnavailable(f"TRL cannot be installed: {last_line(done.stderr)}")
    stamp.write_text(wanted)
    return python


# -- side by side ----------------------------------------------------------------------------------


class Side:
    """One side as a process that waits for a line before each step."""

    def __init__(
        self,
        name: str,
        command: list[str],
        stderr_path: Path,
        *,
        packages: str = "",
        limit: float = SIDE_SECONDS,
    ) -> None:
        """Starts it, and returns before its first step. packages: a folder of further packages.
        limit: seconds until it is ended.

        Raises SideFailed.
        """
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), packages))),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._name, self._stderr_path = name, stderr_path
        with stderr_path.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        self._limit = limit
        self._timer = threading.Timer(limit, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        self._wait_for(lambda line: line == READY)

    def step(self) -> None:
        """One step; returns when the next one may begin."""
        self._go()
        self._wait_for(lambda line: line == READY)

    def last_step(self) -> dict[str, Any]:
        """The last step, and what the side then says about all of them."""
        self._go()
        said = self._wait_for(lambda line: line.startswith('{"steps":'))
        self._process.wait()
        return json.loads(said)

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()

    def _go(self) -> None:
        assert self._process.stdin is not None, "opened as a pipe"
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _wait_for(self, is_wanted: Callable[[str], bool]) -> str:
        assert self._process.stdout is not None, "opened as a pipe"
        for line in self._process.stdout:
            if is_wanted(line.strip()):
                return line
        raise self._failure()

    def _failure(self) -> SideFailed:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return SideFailed(self._name, f"killed, or no result within {self._limit:g} s")
        last_words = last_line(self._stderr_path.read_text())
        return SideFailed(self._name, f"exit code {code}: {last_words}")


def run_in_turn(
    commands: dict[str, list[str]], num_steps: int, *, packages: str = ""
) -> dict[str, dict[str, Any]]:
    """All sides, step by step in turn. packages: a folder of the peer's. Raises SideFailed."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, command in commands.items():
            more = packages if name == PEER_NAME else ""
            limit = SIDE_SECONDS + STEP_SECONDS * num_steps
            path = Path(directory) / name
            sides[name] = Side(name, command, path, packages=more, limit=limit)
            stack.callback(sides[name].close)
        for _ in range(num_steps - 1):
            for side in sides.values():
                side.step()
        return {name: side.last_step() for name, side in sides.items()}


def compare(model: str, *, peer_python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides on one model. Prints the figures."""
    total = options.warmup + options.steps
    recipe = "quickstart" if model in MODELS else "custom"
    overrides = [
        f"model={model}", f"steps={total}", "threads=1", "device=cpu", "trainer.schedule=constant",
        *(() if model in MODELS else SUMS), *options.set,
    ]  # fmt: skip
    commands = {
        PEER_NAME: [str(peer_python), str(PEER), recipe, *overrides, "--paced"],
        "ours": [sys.executable, __file__, "--side", recipe, *overrides],
    }
    commands[PEER_NAME] += ["--trl", options.trl]
    try:
        sides = run_in_turn(commands, total, packages=options.packages)
    except SideFailed as error:
        name, reason = error.args
        if name == PEER_NAME:
            raise PeerUnavailable(f"TRL failed on {model}: {reason}") from error
        raise
    found = {
        name: summary(side["steps"], options.warmup) | {"peak_mib": side.get("peak_mib", math.nan)}
        for name, side in sides.items()
    }
    note(f"\n{model}: {options.steps} steps after {options.warmup} for warm-up")
    for name, figures in found.items():
        note(
            f"  {name:5} {figures['seconds']:.3f} s/step wall, {figures['cpu_seconds']:.3f} s CPU "
            f"(wall {figures['min_seconds']:.3f} to {figures['max_seconds']:.3f}), at most "
            f"{figures['peak_mib']:,.0f} MiB; {figures['tokens_per_episode']:.1f} tokens sampled "
            f"per episode; reward {figures['reward_first']:.3f} in the first steps, "
            f"{figures['reward_last']:.3f} in the last"
        )
    ours, peer = found["ours"], found[PEER_NAME]
    pairs = zip(sides[PEER_NAME]["steps"], sides["ours"]["steps"], strict=True)
    ratios = [theirs["seconds"] / mine["seconds"] for theirs, mine in pairs][options.warmup :]
    note(
        f"  ratio {statistics.median(ratios):.2f} of wall, "
        f"{peer['cpu_seconds'] / ours['cpu_seconds']:.2f} of CPU, "
        f"{peer['peak_mib'] / ours['peak_mib']:.2f} of memory; ours: "
        f"{ours['sample_seconds']:.3f} s sampling, {ours['train_seconds']:.3f} s training"
    )
    return {
        "name": f"{NAME}/{Path(model).name}",
        "ours": round(ours["seconds"], 4),
        "peer": round(peer["seconds"], 4),
        "unit": "s/step",
        "ratio": round(statistics.median(ratios), 3),
        "better": "lower",
        "how": HOW if model in MODELS else SUMS_HOW,
        "cpu_ratio": round(peer["cpu_seconds"] / ours["cpu_seconds"], 3),
        "memory_ratio": round(peer["peak_mib"] / ours["peak_mib"], 3),
        "sides": found,
        "versions": sides[PEER_NAME]["versions"] | sides["ours"]["versions"],
    }


def summary(steps: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Medians over the counted steps; rewards of the first and the last steps of all."""
    counted = steps[warmup:]
    out = {
        name: statistics.median(step[name] for step in counted)
        for name in counted[0]
        if name.endswith("seconds")
    }
    walls = [step["seconds"] for step in counted]
    return out | {
        "min_seconds": min(walls),
        "max_seconds": max(walls),
        "tokens_per_episode": statistics.mean(step["tokens_per_episode"] for step in counted),
        "reward_first": statistics.mean(step["reward"] for step in steps[: warmup or 1]),
        "reward_last": statistics.mean(step["reward"] for step in steps[-(warmup or 1) :]),
    }


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no message"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--steps", type=int, default=12, help="counted steps per side and model")
    parser.add_argument("--warmup", type=int, default=WARMUP_STEPS, help="steps before these")
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="default: both tiny ones; else sums, LoRA"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="a setting of both sides, such as group_size=2")  # fmt: skip
    parser.add_argument("--packages", default="", metavar="DIR", help="folder that has TRL")
    parser.add_argument("--trl", default="{}", metavar="JSON", help="GRPOConfig fields of the peer")
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_ours(options.side[0], options.side[1:])))
        return 0
    if options.steps < 1 or options.warmup < 0:
        parser.error("--steps must be at least 1, and --warmup at least 0")
    try:
        peer_python = install_peer(options.packages)
        models = options.model or MODELS
        parts = [compare(model, peer_python=peer_python, options=options) for model in models]
    except PeerUnavailable as error:
        note(f"cannot run: {error}")
        print(json.dumps({"name": NAME, "skipped": str(error)}))
        return CANNOT_RUN
    least = min(parts, key=lambda part: part["ratio"])
    keys = ("ours", "peer", "unit", "ratio", "better")
    line = {"name": NAME, **{key: least[key] for key in keys}}
    line["how"] = (
        f"{least['how']}; the model with the smaller ratio ({least['name'].partition('/')[2]})"
    )
    print(json.dumps({**line, "parts": parts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
