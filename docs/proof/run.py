"""`make proof`: runs what the README claims, in full, and writes what came out beside this file.

    python docs/proof/run.py                 everything (about two hours on two quiet cores)
    python docs/proof/run.py quickstart      one part

Each part writes NAME.json: the commands, the host, the date and the figures. Nothing is compared
with a bound here: the figures are printed, missed ones too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby, product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedules import Arm

    from lockstep.run_config import Config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cpu")]
SEEDS = (0, 1, 2)
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
SHIPPED = dict.fromkeys(MODELS, "quickstart") | {"tiny-math": "math"}
"""Each model that comes with the package, and a recipe that it is played with."""
HELD_OUT = {
    "held_out_sampled": "eval/sampled/mean@1", "held_out_greedy": "eval/greedy/mean@1",
    "two_hop_correct_sampled": "eval/sampled/correctness/2-hop",
}  # fmt: skip
CONTRACTS = ((), ("contract=none",))  # the recipe's default, and without


def quickstart() -> dict[str, Any]:
    """Each shipped model, three seeds, with the contract and without: what it learns, how fast, and
    how far the two sides part."""
    commands, runs = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (model, seed, contract) in enumerate(product(MODELS, SEEDS, CONTRACTS)):
            words = ["train", "quickstart", f"model={model}", f"seed={seed}", *contract]
            commands.append("lockstep " + " ".join(words))
            out = Path(scratch) / str(number)
            lockstep(*words, f"out={out}")
            name = " ".join([model, "seed", str(seed), *contract])
            runs[name] = describe_run(out)
            print(f"{name}:", json.dumps(runs[name]), flush=True)
    return {"commands": commands, "figures": runs}


def describe_run(path: Path) -> dict[str, Any]:
    rows = rows_of(path)
    steps = [r for r in rows if "reward/mean" in r]
    tests = [r for r in rows if "eval/sampled/mean@1" in r]
    rewards = [r["reward/mean"] for r in steps]
    ends = (tests[0], tests[-1])
    return {
        "reward_step_0": round(rewards[0], 3),
        "reward_last_10": round(mean(rewards[-10:]), 3),
        **{name: [round(t[metric], 3) for t in ends] for name, metric in HELD_OUT.items()},
        "training_seconds": round(steps[-1]["time/elapsed_seconds"], 1),
        "k3_worst": max(r["mismatch/k3"] for r in steps),
        "max_abs_diff_worst": max(r["mismatch/max_abs_diff"] for r in steps),
        **tokens_of(steps),
    }


def models() -> dict[str, Any]:
    """The shipped models: rebuilt from random weights, and what they are."""
    figures: dict[str, Any] = {}
    commands = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in SHIPPED:
            out = Path(scratch) / model
            words = ["sft", model, "--plugin", "examples/tiny_models.py"]
            commands.append("lockstep " + " ".join(words))
            began = time.perf_counter()
            lockstep(*words, f"out={out}")
            seconds = time.perf_counter() - began
            shipped = ROOT / "src" / "lockstep" / "models" / "shipped" / model
            weights = "model.safetensors"
            figures[model] = {
                "rebuild_seconds": round(seconds, 1),
                "rebuilt_equal": (out / "model" / weights).read_bytes()
                == (shipped / weights).read_bytes(),
                "bytes": sum(f.stat().st_size for f in shipped.iterdir()),
                **describe_model(model),
            }
            print(model, json.dumps(figures[model]), flush=True)
    return {"commands": commands, "figures": figures}


def describe_model(model: str) -> dict[str, Any]:
    """Sinks' share of attention; share of sampled turns that a tokenizer would spell otherwise."""
    import torch

    from lockstep.ops import packed
    from lockstep.ops.base import Ops
    from lockstep.ops.context import PackedContext
    from lockstep.run.build import load_model
    from lockstep.run.preflight import read_model_files
    from lockstep.store.run import load_run

    config = configured(f"model={model}", recipe=SHIPPED[model])
    model_files = read_model_files(config)
    decoder = load_model(config, model_files)
    tokenizer = model_files.renderer.tokenizer
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        words = ["train", SHIPPED[model], f"model={model}", "steps=1", "evaluation.num_tasks=1"]
        lockstep(*words, f"out={out}")
        trajectories = [t for g in load_run(out).groups(0) for t in g.trajectories]
    turns = [s.token_ids.tolist() for t in trajectories for s in t.segments if s.is_sampled]

    def spell_again(ids: list[int]) -> list[int]:
        out: list[int] = []
        for is_control, part in groupby(ids, tokenizer.control_ids.__contains__):
            of_one_kind = list(part)
            out += of_one_kind if is_control else tokenizer.encode(tokenizer.decode(of_one_kind))
        return out

    rows = [t.path_ids(len(t.segments) - 1) for t in trajectories]
    ids = torch.tensor([i for row in rows for i in row.tolist()])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    shares: list[float] = []

    class Shares(Ops):
        def _packed_attention(self, q, k, v, spec, context):
            out, lse = packed.attend(q, k, v, spec, context)
            if spec.sinks is not None:
                shares.append(float(torch.exp(spec.sinks - lse).mean()))
            return out

    decoder.ops = Shares()
    with torch.no_grad():
        decoder(ids, positions, PackedContext.of([len(row) for row in rows]))
    return {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "turns_spelt_otherwise": round(mean(spell_again(t) != t for t in turns), 3),
        "sinks_share_of_attention": [round(min(shares), 3), round(max(shares), 3)]
        if shares
        else None,
    }


def equality() -> dict[str, Any]:
    """Random schedules through engine and trainer: tokens compared, and those that differ; the same
    on stock ops, as the control."""
    import conftest  # noqa: F401  what is set before torch starts
    from schedules import control_arms, proof_arms

    figures = {str(arm): compared(arm) for arm in (*proof_arms(), *control_arms())}
    return {"commands": ["python docs/proof/run.py equality"], "figures": totals(figures)}


def families() -> dict[str, Any]:
    """The same with 50,000 tokens and more of each family and dtype, and of adapters of those whose
    layers are not plain attention. Goes on where it stopped."""
    import conftest  # noqa: F401  what is set before torch starts
    from schedules import FAMILIES, MODELS, control_arms, family_arms, lora_arms

    stored = HERE / "families.json"
    figures = json.loads(stored.read_text())["figures"]["arms"] if stored.exists() else {}
    result: dict[str, Any] = {"commands": ["python docs/proof/run.py families"]}
    adapted = [replace(a, seeds=tuple(range(20))) for a in lora_arms() if a.model not in MODELS]
    controls = [arm for arm in control_arms() if arm.model in FAMILIES]
    for arm in (*family_arms(num_seeds=20), *adapted, *controls):
        if str(arm) not in figures:
            figures[str(arm)] = compared(arm)
            result["figures"] = totals(figures)
            store("families", result)
    return result | {"figures": totals(figures)}


def compared(arm: Arm) -> dict[str, Any]:
    from schedules import backend_for, compare

    proof = backend_for(arm.model, arm.dtype)
    if not (proof.is_kept or arm.is_plain):
        return {"declined": proof.failure}
    found = compare(arm)
    figures = {
        "compared_tokens": found.compared, "unequal_tokens": found.unequal,
        "max_abs_diff": found.max_abs_diff, "preemptions": found.preemptions,
        "is_control": arm.is_plain,
    }  # fmt: skip
    print(f"{arm}:", json.dumps(figures), flush=True)
    return figures


def totals(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of arms, and their sums without the controls."""
    proofs = [arm for arm in arms.values() if not arm.get("is_control", True)]
    names = ("compared_tokens", "unequal_tokens")
    return {name: sum(arm[name] for arm in proofs) for name in names} | {"arms": arms}


PARTS = {
    "equality": equality, "families": families, "quickstart": quickstart, "models": models,
}  # fmt: skip


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        result = PARTS[name]()
        store(name, {"seconds": round(time.perf_counter() - began, 1), **result})


# -- what all proofs share -------------------------------------------------------------------------


def lockstep(*words: str, cwd: Path = ROOT) -> str:
    """The last line that `lockstep WORDS --json` prints. Raises CalledProcessError."""
    command = [sys.executable, "-m", "lockstep.cli", words[0], "--json", *words[1:]]
    done = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def configured(*settings: str, recipe: str = "quickstart") -> Config:
    """The settings of a recipe with these in place of its own."""
    from lockstep.config import resolve
    from lockstep.recipes import find_recipe

    return resolve(find_recipe(recipe), settings)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """What a run logged."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tokens_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens whose two log-probs were compared, and those where they differ, over all rows."""
    names = ("unequal_tokens", "compared_tokens")
    return {name: int(sum(row.get(f"mismatch/{name}", 0) for row in rows)) for name in names}


def expanded(text: str, named: Mapping[str, str]) -> tuple[str, ...]:
    """The words of a text, with the words of NAME in place of @NAME.

    >>> expanded("steps=3 @quiet", {"quiet": "evaluation=none"})
    ('steps=3', 'evaluation=none')
    """
    found = (
        expanded(named[word[1:]], named) if word.startswith("@") else (word,)
        for word in text.split()
    )
    return tuple(word for words in found for word in words)


def store(name: str, result: dict[str, Any]) -> None:
    save(name, {"part": name, "date": today(), "host": host(), **result})


def save(name: str, document: Mapping[str, Any]) -> None:
    """Writes NAME.json beside this file."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (HERE / f"{name}.json").write_text(text + "\n", "utf-8")


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def stamp(command: str) -> dict[str, Any]:
    """How, when and on what figures were measured."""
    return {"command": command, "date": today(), "host": host()}


def rounded(value: Any, digits: int) -> Any:
    """Floats to so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, list) else value


def host() -> dict[str, Any]:
    """What figures were measured on."""
    return {
        "cpu": cpu_name(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if shutil.which("uname") else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
