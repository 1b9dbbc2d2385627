"""What a pretrained model learns here: SmolLM2-135M-Instruct. Its page is docs/tasks.md.

    python docs/proof/pretrained.py                        all parts
    python docs/proof/pretrained.py calculator --seeds 0   one part, one seed

Parts: calculator and search (demonstrations, then RL with a tool; search has several turns), sums
(RL alone, without a tool), equal (the tokens of other number formats and of all weights), faults
(single faults of the published program), story (the whole program, and the noise of other
numerics; its last rows need `make .venv-vllm/.installed`). Needs `lockstep fetch smollm2-135m`.
Writes pretrained.json and docs/tasks/pretrained.png after each run; what is not measured again
stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from investigation import by_messages
from run import HERE, LOCKSTEP, ROOT, host

from lockstep import measure_noise
from lockstep.doctor.ladder import climb
from lockstep.recipes import configure
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.run_config import Config
from lockstep.testing.faults import injected, split_faults

JSON = HERE / "pretrained.json"
MODEL = "smollm2-135m"
PROGRAM = ROOT / "examples" / "calculator.py"
SEARCHES = ROOT / "examples" / "document_search.py"
TASK = [
    f"task.tools={PROGRAM}:calculator", f"task.reward={PROGRAM}:reward", "task.path=tasks.jsonl",
    "max_tokens=640", "agent.max_turns=3", "agent.max_turn_tokens=64",
]  # fmt: skip
DEMONSTRATIONS = ["sft.path=demonstrations.jsonl", "sft.steps=8", "lora.rank=16", "max_tokens=640"]
RL = [
    "lora.rank=16", "trainer.lr=2e-4", "trainer.warmup_updates=3", "steps=16",
    "evaluation.every=4", "evaluation.num_tasks=64",
]  # fmt: skip
FEW = [
    "lora.rank=16", "steps=1", "groups_per_step=1", "group_size=2", "evaluation.num_tasks=64",
]  # fmt: skip
SUMS = [
    f"task.path={ROOT}/examples/sums.py:tasks", f"task.reward={ROOT}/examples/sums.py:reward",
    "lora.rank=16", "trainer.lr=5e-4", "trainer.warmup_updates=0", "max_tokens=128",
    "agent.max_turn_tokens=48", "steps=20", "evaluation.every=10",
]  # fmt: skip
LONG = ["max_tokens=256", "agent.max_turn_tokens=128", "steps=4", "evaluation.num_tasks=2"]
FORMS = {
    "all weights, float32": ["trainer.lr=1e-6"],
    "all weights, bfloat16": ["trainer.lr=1e-6", "dtype=bfloat16"],
    "LoRA, bfloat16": ["trainer.lr=1e-5", "lora.rank=16", "dtype=bfloat16"],
}
VLLM = ("contract=none", "engine=vllm", "engine.decoder=vllm", "engine.kv_cache_gib=1",
        f"engine.python={ROOT}/.venv-vllm/bin/python")  # fmt: skip
NUMERICS = {
    "the contract": (),
    "stock ops": ("contract=none",),
    "sampler in bfloat16": ("contract=none", "engine.dtype=bfloat16"),
    "sampler's weights in int8": ("contract=none", "--fault=quantised_rollout"),
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": (*VLLM, "engine.dtype=bfloat16"),
}
FAULTS = ("retokenized_rows", "rerendered_history", "dropped_final_tokens", "shifted_logprobs")
SCORINGS = (4, 16)
"""Scorings of the sampler that are averaged. One is the log-prob that it recorded."""
EPISODES = 8
SEARCH = [
    "max_tokens=768", "agent.max_turn_tokens=64", *RL[:3], "steps=10", "evaluation.every=5",
    "evaluation.num_tasks=64",
]  # fmt: skip


def run(words: list[str], place: Path, seed: int) -> dict[str, Any]:
    """Curve, tokens and minutes of one command of the page."""
    words = [*words, f"seed={seed}"]
    command = [*LOCKSTEP, words[0], "--json", *words[1:]]
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    return describe(words, place / words[-2].removeprefix("out="))


def describe(words: list[str], path: Path) -> dict[str, Any]:
    """What a run's own files say. words: its command."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = sum("reward/mean" in row for row in rows)
    return {
        "command": "lockstep " + " ".join(words).replace(f"{ROOT}/", ""),
        "minutes": round(
            max(row["time/elapsed_seconds"] for row in rows if "time/elapsed_seconds" in row) / 60,
            1,
        ),
        "held_out": {
            str(min(row["step"] + 1, steps)): [
                round(row[f"eval/{how}/mean@1"], 3) for how in ("sampled", "greedy")
            ]
            for row in rows
            if "eval/greedy/mean@1" in row
        },
        "reward": [round(row["reward/mean"], 3) for row in rows if "reward/mean" in row],
        "loss": [round(row["train/loss"], 4) for row in rows if "perplexity" in row],
        "unequal_tokens": int(sum(row.get("mismatch/unequal_tokens", 0) for row in rows)),
        "compared_tokens": int(sum(row.get("mismatch/compared_tokens", 0) for row in rows)),
    }


def calculator(seed: int, place: Path) -> dict[str, Any]:
    """The base model, then demonstrations, then RL."""
    subprocess.run([sys.executable, PROGRAM], cwd=place, check=True)
    base = run(["train", "custom", f"model={MODEL}", *TASK, *FEW, "out=base"], place, seed)
    taught = run(["sft", f"model={MODEL}", *DEMONSTRATIONS, "out=taught"], place, seed)
    learned = run(["train", "custom", "model=taught", *TASK, *RL, "out=learned"], place, seed)
    return {"base": base, "demonstrations": taught, "rl": learned}


def search(seed: int, place: Path) -> dict[str, Any]:
    """The same for document search over several turns."""
    subprocess.run([sys.executable, SEARCHES], cwd=place, check=True)
    play = ["train", "docsearch"]
    taught = [f"model={MODEL}", "sft.path=searches.jsonl", "sft.steps=8", *SEARCH[:1], *RL[:1]]
    return {
        "base": run([*play, f"model={MODEL}", *SEARCH[:2], *FEW, "out=base"], place, seed),
        "demonstrations": run(["sft", *taught, "out=taught"], place, seed),
        "rl": run([*play, "model=taught", *SEARCH, "out=learned"], place, seed),
    }


def sums(seed: int, place: Path) -> dict[str, Any]:
    return {"rl": run(["train", "custom", f"model={MODEL}", *SUMS, "out=sums"], place, seed)}


def equal(seed: int, place: Path) -> dict[str, Any]:
    """The tokens of long replies in each form of training: all weights or LoRA, each format."""
    form = [f"model={MODEL}", *SUMS[:2], *LONG]
    return {
        name: run(["train", "custom", *form, *settings, f"out={number}"], place, seed)
        for number, (name, settings) in enumerate(FORMS.items())
    }


def story(seed: int, place: Path) -> dict[str, Any]:
    """k1, k2 of each rung of `doctor --ladder` and of the published program; the noise table."""
    os.chdir(place)
    subprocess.run([sys.executable, PROGRAM], check=True)
    run(["sft", f"model={MODEL}", *DEMONSTRATIONS, "out=taught"], place, seed)

    def config(*settings: str) -> Config:
        small = ["groups_per_step=2", "group_size=4", f"seed={seed}"]
        return configure("custom", overrides=["model=taught", *TASK, *small, *settings])

    stock = config("contract=none")
    rungs = {rung.name: rung.gap.means() for rung in climb(stock, num_episodes=EPISODES).rungs}
    print(rungs, flush=True)
    rungs["by messages, as published"] = asyncio.run(
        by_messages(stock, build(stock, preflight(stock)), EPISODES)
    )
    print(rungs["by messages, as published"], flush=True)
    noise: dict[str, Any] = {}
    for (name, settings), scorings in product(NUMERICS.items(), SCORINGS):
        others, faults = split_faults(list(settings))
        began = time.perf_counter()
        with injected(*faults):
            measured = measure_noise(config(*others), num_scorings=scorings)
        seconds = round(time.perf_counter() - began, 1)
        noise.setdefault(name, {})[str(scorings)] = {**measured, "seconds": seconds}
        print(name, scorings, noise[name][str(scorings)], flush=True)
    return {"rungs": rungs, "noise": noise}


def faults(seed: int, place: Path) -> dict[str, Any]:
    """k1 and k2 of the first step under single faults of the published program."""
    subprocess.run([sys.executable, PROGRAM], cwd=place, check=True)
    run(["sft", f"model={MODEL}", *DEMONSTRATIONS, "out=taught"], place, seed)
    small = ["groups_per_step=4", "group_size=4", "steps=1", "evaluation=none", "contract=none",
             f"--plugin={HERE}/doctor_faults.py"]  # fmt: skip
    out: dict[str, Any] = {}
    for fault in FAULTS:
        words = ["model=taught", *TASK, *small, "lora.rank=16", f"--fault={fault}", f"out={fault}"]
        out[fault] = run(["train", "custom", *words], place, seed)
        rows = (place / fault / "metrics.jsonl").read_text().splitlines()
        row = next(row for row in map(json.loads, rows) if "mismatch/k1" in row)
        out[fault] |= {name: row[f"mismatch/{name}"] for name in ("k1", "k2")}
    return out


def plot(found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    for axis, part in zip(axes, ("calculator", "search", "sums"), strict=True):
        for seed, runs in sorted(found.get(part, {}).items()):
            tests = runs["rl"]["held_out"]
            steps, greedy = map(int, tests), [greedy for _, greedy in tests.values()]
            axis.plot(list(steps), greedy, marker="o", label=f"seed {seed}")
        axis.set(title=part, xlabel="step", ylabel="held out, greedy", ylim=(0, 1))
        if found.get(part):
            axis.legend()
    plt.tight_layout()
    plt.savefig(ROOT / "docs" / "tasks" / "pretrained.png", dpi=110)


def main() -> None:
    parts = {"calculator": calculator, "search": search, "sums": sums}
    parts |= {"equal": equal, "faults": faults, "story": story}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    for part in options.parts:
        for seed in options.seeds[:1] if part in ("equal", "faults", "story") else options.seeds:
            with tempfile.TemporaryDirectory() as place:
                measured = parts[part](seed, Path(place))
            found = json.loads(JSON.read_text()) if JSON.is_file() else {}
            date = datetime.now(UTC).date().isoformat()
            measured |= {"host": host(), "date": date}
            found.setdefault(part, {})[str(seed)] = measured
            JSON.write_text(json.dumps(found, indent=1) + "\n")
            plot(found)
            print(part, seed, json.dumps(measured)[:2000], flush=True)


if __name__ == "__main__":
    main()
