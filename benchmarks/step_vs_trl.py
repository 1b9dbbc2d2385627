"""A whole reinforcement-learning step against TRL's GRPOTrainer with tools.

    python benchmarks/step_vs_trl.py [--json] [--steps 12] [--model tiny-qwen3] [--trl JSON]

One step of the quickstart: sample 8 tasks x 8 episodes over several turns with the search tool,
score them, update once. Same weights, tokenizer, token format, tasks in the same order, turns and
tokens at most, temperature, objective, optimizer settings and reward function on both sides. Each
side is a process of its own with one thread, and they take turns step by step, so that a change in
the machine's load meets both; the median over the counted steps.

What differs: a turn whose header cannot be read ends an episode in TRL, and is answered with an
error here; our time includes writing the trajectories to disk and measuring the mismatch; TRL
computes no log-probs while it samples.

TRL is installed into .cache/trl-venv on the first run; nothing else is changed. Exit code 3 says
that the peer could not be installed or run: the reason is printed, and is in the JSON line as
{"name", "skipped"}. --trl takes fields of its GRPOConfig, to try other settings of the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
VENV = ROOT / ".cache" / "trl-venv"
NAME = "rl-step-vs-trl"
RECIPE = "quickstart"
PEER_NAME = "TRL"
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
WARMUP_STEPS = 3
CANNOT_RUN = 3
READY = "READY"
"""Printed by a side before each step; it goes on when a line comes on its stdin."""
SIDE_SECONDS = 600  # both take about a minute on a quiet core; past this the machine is too busy

REQUIREMENTS = (
    "trl==1.16.0", "transformers==5.23.0", "datasets==5.2.0", "accelerate==1.15.0", "jmespath",
    "rich",
)  # fmt: skip
"""TRL's environments need transformers 5.13 or newer. The figures in the docs were measured with
these versions; another version is another peer."""

HOW = (
    "median seconds per step (sample 64 episodes with tools, score, update), one thread each, step "
    "by step in turn; TRL with transformers generate, the fastest of its settings that were tried"
)


class PeerUnavailable(Exception):
    """Why the peer cannot be measured here."""


class SideFailed(Exception):
    """A side ended without a result: its name and its last words."""


# -- our side --------------------------------------------------------------------------------------


def run_ours(overrides: list[str]) -> dict[str, Any]:
    """Steps of the training loop itself: everything between two steps is in the time, the record of
    the trajectories and metrics included."""
    from lockstep.config import resolve, to_dict
    from lockstep.observe.live import open_view
    from lockstep.observe.loggers import Loggers
    from lockstep.recipes import find_recipe
    from lockstep.run.build import build
    from lockstep.run.preflight import preflight
    from lockstep.run.steps import one_step
    from lockstep.run.training_run import TrainingRun
    from lockstep.store.run import RunDirectory

    config = resolve(find_recipe(RECIPE), overrides)
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
        "versions": {"lockstep": version("lockstep-rl"), "torch": version("torch")},
    }


# -- the peer --------------------------------------------------------------------------------------


def install_peer() -> Path:
    """The Python of TRL's own environment, made on first use."""
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

    def __init__(self, name: str, command: list[str], stderr_path: Path) -> None:
        """Starts it, and returns when it stands before its first step. Raises SideFailed."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
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
        self._timer = threading.Timer(SIDE_SECONDS, self._process.kill)
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
            return SideFailed(self._name, f"killed, or no result within {SIDE_SECONDS} s")
        last_words = last_line(self._stderr_path.read_text())
        return SideFailed(self._name, f"exit code {code}: {last_words}")


def run_in_turn(commands: dict[str, list[str]], num_steps: int) -> dict[str, dict[str, Any]]:
    """All sides, step by step in turn. Raises SideFailed."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, command in commands.items():
            sides[name] = Side(name, command, Path(directory) / name)
            stack.callback(sides[name].close)
        for _ in range(num_steps - 1):
            for side in sides.values():
                side.step()
        return {name: side.last_step() for name, side in sides.items()}


def compare(model: str, *, num_steps: int, peer_python: Path, peer_options: str) -> dict[str, Any]:
    """Runs both sides on one model. Prints the figures."""
    total = WARMUP_STEPS + num_steps
    overrides = [
        f"model={model}", f"steps={total}", "threads=1", "device=cpu", "trainer.schedule=constant",
    ]  # fmt: skip
    commands = {
        PEER_NAME: [str(peer_python), str(PEER), RECIPE, *overrides, "--paced"],
        "ours": [sys.executable, __file__, "--side", *overrides],
    }
    commands[PEER_NAME] += ["--trl", peer_options]
    try:
        sides = run_in_turn(commands, total)
    except SideFailed as error:
        name, reason = error.args
        if name == PEER_NAME:
            raise PeerUnavailable(f"TRL failed on {model}: {reason}") from error
        raise
    found = {name: summary(side["steps"]) for name, side in sides.items()}
    note(f"\n{model}: {num_steps} steps after {WARMUP_STEPS} for warm-up")
    for name, figures in found.items():
        note(
            f"  {name:5} {figures['seconds']:.3f} s/step wall, {figures['cpu_seconds']:.3f} s CPU "
            f"(wall {figures['min_seconds']:.3f} to {figures['max_seconds']:.3f}); "
            f"{figures['tokens_per_episode']:.1f} tokens sampled per episode; reward "
            f"{figures['reward_first']:.3f} in the first {WARMUP_STEPS} steps, "
            f"{figures['reward_last']:.3f} in the last {WARMUP_STEPS}"
        )
    ours, peer = found["ours"], found[PEER_NAME]
    note(
        f"  ratio {peer['seconds'] / ours['seconds']:.2f} of wall, "
        f"{peer['cpu_seconds'] / ours['cpu_seconds']:.2f} of CPU; ours: "
        f"{ours['sample_seconds']:.3f} s sampling, {ours['train_seconds']:.3f} s training"
    )
    return {
        "name": f"{NAME}/{model}",
        "ours": round(ours["seconds"], 4),
        "peer": round(peer["seconds"], 4),
        "unit": "s/step",
        "ratio": round(peer["seconds"] / ours["seconds"], 3),
        "better": "lower",
        "how": HOW,
        "cpu_ratio": round(peer["cpu_seconds"] / ours["cpu_seconds"], 3),
        "sides": found,
        "versions": sides[PEER_NAME]["versions"] | sides["ours"]["versions"],
    }


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the counted steps; rewards of the first and the last steps of all."""
    counted = steps[WARMUP_STEPS:]
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
        "reward_first": statistics.mean(step["reward"] for step in steps[:WARMUP_STEPS]),
        "reward_last": statistics.mean(step["reward"] for step in steps[-WARMUP_STEPS:]),
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
    parser.add_argument("--model", action="append", choices=MODELS, help="default: both")
    parser.add_argument("--trl", default="{}", metavar="JSON", help="GRPOConfig fields of the peer")
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_ours(options.side)))
        return 0
    if options.steps < 1:
        parser.error(f"--steps={options.steps} must be at least 1")
    try:
        peer_python = install_peer()
        parts = [
            compare(
                model,
                num_steps=options.steps,
                peer_python=peer_python,
                peer_options=options.trl,
            )
            for model in options.model or MODELS
        ]
    except PeerUnavailable as error:
        note(f"cannot run: {error}")
        print(json.dumps({"name": NAME, "skipped": str(error)}))
        return CANNOT_RUN
    least = min(parts, key=lambda part: part["ratio"])
    keys = ("ours", "peer", "unit", "ratio", "better")
    line = {"name": NAME, **{key: least[key] for key in keys}}
    line["how"] = f"{HOW}; the model with the smaller ratio ({least['name'].partition('/')[2]})"
    print(json.dumps({**line, "parts": parts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
