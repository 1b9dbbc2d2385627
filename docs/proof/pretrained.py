"""What a pretrained model learns here: SmolLM2-135M-Instruct. Its page is docs/tasks.md.

    python docs/proof/pretrained.py                        all parts
    python docs/proof/pretrained.py calculator --seeds 0   one part, one seed

Parts: calculator and search (demonstrations, then RL with a tool; search has several turns), sums
(RL alone, without a tool), equal (the tokens of other number formats and of all weights), faults
(single faults of the published program), story (the whole program, and the noise of other
numerics; its last rows need `make .venv-vllm/.installed`), replies (encoded again).
Needs `lockstep fetch smollm2-135m`. Writes pretrained.json and docs/tasks/pretrained.png after each
run; what is not measured again stays.
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
import tomllib
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from claim_measures import reencoded
from investigation import by_messages
from run import HERE, ROOT, expanded, host, lockstep, rows_of, save, today, tokens_of

from lockstep import measure_noise
from lockstep.doctor.ladder import climb
from lockstep.recipes import configure
from lockstep.run.build import build
from lockstep.run.preflight import preflight, read_model_files
from lockstep.run_config import Config
from lockstep.store.run import load_run
from lockstep.testing.faults import injected, split_faults

JSON = HERE / "pretrained.json"
PLAN = tomllib.loads(JSON.with_suffix(".toml").read_text())
PROGRAMS = {"calculator": "calculator.py", "search": "document_search.py"}
"""Part -> the example that writes its tasks and demonstrations."""
FAULTS = ("retokenized_rows", "rerendered_history", "dropped_final_tokens", "shifted_logprobs")
NUM_SEEDS = {"equal": 1, "faults": 1, "story": 1, "replies": 5}
SCORINGS = (4, 16)
"""Scorings of the sampler that are averaged. One is the log-prob that it recorded."""
EPISODES = 8


def words_of(text: str) -> list[str]:
    """The words of a text of pretrained.toml."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    return [
        word.replace("EXAMPLES", str(ROOT / "examples")).replace("VLLM", str(python))
        for word in expanded(text, PLAN["words"])
    ]


def run(text: str, place: Path, seed: int) -> dict[str, Any]:
    """Curve, tokens and minutes of one command of the page."""
    words = [*words_of(text), f"seed={seed}"]
    lockstep(*words, cwd=place)
    return describe(words, place / words[-2].removeprefix("out="))


def describe(words: list[str], path: Path) -> dict[str, Any]:
    """What a run's own files say. words: its command."""
    rows = rows_of(path)
    steps = sum("reward/mean" in row for row in rows)
    return {
        "command": "lockstep " + " ".join(words).replace(f"{ROOT}/", ""),
        "minutes": round(max(row.get("time/elapsed_seconds", 0) for row in rows) / 60, 1),
        "held_out": {
            str(min(row["step"] + 1, steps)): [
                round(row[f"eval/{how}/mean@1"], 3) for how in ("sampled", "greedy")
            ]
            for row in rows
            if "eval/greedy/mean@1" in row
        },
        "reward": [round(row["reward/mean"], 3) for row in rows if "reward/mean" in row],
        "loss": [round(row["train/loss"], 4) for row in rows if "perplexity" in row],
        **tokens_of(rows),
    }


def play(part: str, seed: int, place: Path) -> dict[str, Any]:
    """The runs of a part, in order: the base model, then demonstrations, then RL."""
    if part in PROGRAMS:
        example(part, place)
    return {name: run(text, place, seed) for name, text in PLAN[part].items()}


def example(part: str, place: Path) -> None:
    """Writes the tasks of a part."""
    subprocess.run([sys.executable, ROOT / "examples" / PROGRAMS[part]], cwd=place, check=True)


def teach(seed: int, place: Path) -> None:
    """The calculator's demonstrations, and the model that learned them."""
    example("calculator", place)
    run(PLAN["calculator"]["demonstrations"], place, seed)


def story(seed: int, place: Path) -> dict[str, Any]:
    """k1, k2 of each rung of `doctor --ladder` and of the published program; the noise table."""
    os.chdir(place)
    teach(seed, place)

    def config(*settings: str) -> Config:
        taught = words_of("model=taught @task groups_per_step=2 group_size=4")
        return configure("custom", overrides=[*taught, f"seed={seed}", *settings])

    stock = config("contract=none")
    rungs = {rung.name: rung.gap.means() for rung in climb(stock, num_episodes=EPISODES).rungs}
    print(rungs, flush=True)
    rungs["by messages, as published"] = asyncio.run(
        by_messages(stock, build(stock, preflight(stock)), EPISODES)
    )
    print(rungs["by messages, as published"], flush=True)
    noise: dict[str, Any] = {}
    for (name, settings), scorings in product(PLAN["noise"].items(), SCORINGS):
        others, faults = split_faults(words_of(settings))
        began = time.perf_counter()
        with injected(*faults):
            measured = measure_noise(config(*others), num_scorings=scorings)
        seconds = round(time.perf_counter() - began, 1)
        noise.setdefault(name, {})[str(scorings)] = {**measured, "seconds": seconds}
        print(name, scorings, noise[name][str(scorings)], flush=True)
    return {"rungs": rungs, "noise": noise}


def replies(seed: int, place: Path) -> dict[str, Any]:
    """How many replies of the published model are encoded to other ids than were sampled."""
    found = run(PLAN["replies"], place, seed)
    played = [t for group in load_run(place / "replies").groups(0) for t in group.trajectories]
    model = configure("custom", overrides=[*words_of("@sums"), "model=smollm2-135m"])
    return found | reencoded(played, read_model_files(model).renderer.tokenizer)


def faults(seed: int, place: Path) -> dict[str, Any]:
    """k1 and k2 of the first step under single faults of the published program."""
    teach(seed, place)
    settings = (
        "train custom model=taught @task groups_per_step=4 group_size=4 steps=1 evaluation=none "
        f"contract=none --plugin={HERE}/doctor_faults.py lora.rank=16"
    )
    out: dict[str, Any] = {}
    for fault in FAULTS:
        out[fault] = run(f"{settings} --fault={fault} out={fault}", place, seed)
        row = next(row for row in rows_of(place / fault) if "mismatch/k1" in row)
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
    names = ("calculator", "search", "sums", "equal")
    parts = {name: partial(play, name) for name in names}
    parts |= {"faults": faults, "story": story, "replies": replies}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts))
    parser.add_argument("--seeds", nargs="*", type=int, help="none: as many as the part has")
    options = parser.parse_args()
    for part in options.parts:
        for seed in options.seeds or range(NUM_SEEDS.get(part, 3)):
            with tempfile.TemporaryDirectory() as place:
                measured = parts[part](seed, Path(place))
            found = json.loads(JSON.read_text()) if JSON.is_file() else {}
            measured |= {"host": host(), "date": today()}
            found.setdefault(part, {})[str(seed)] = measured
            save(JSON.stem, found)
            plot(found)
            print(part, seed, json.dumps(measured)[:2000], flush=True)


if __name__ == "__main__":
    main()
