"""The recipes' learning curves: each recipe, three seeds, one run after another, on one thread.

    python docs/proof/tasks.py              every recipe, about two minutes a run on a quiet core
    python docs/proof/tasks.py math retool  some of them; the others' figures stay
    python docs/proof/tasks.py --plot       only draws docs/tasks/RECIPE.png again

Writes tasks.json beside this file: commands, host, minutes, held-out reward before and after with
its intervals, what the recipe is measured at besides, and the curve. Nothing is compared with a
bound here: the figures are printed, missed ones too.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from run import HERE, ROOT, SEEDS, host, lockstep, rows_of, save, today, tokens_of

JSON = HERE / "tasks.json"
PLOTS = ROOT / "docs" / "tasks"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What of a recipe is measured: a table of tasks.toml, which explains the fields."""

    means: Mapping[str, str] = field(default_factory=dict)
    held_out: Mapping[str, str] = field(default_factory=dict)
    played_again: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)


RECIPES = {
    name: Recipe(**table)
    for name, table in tomllib.loads(JSON.with_suffix(".toml").read_text()).items()
}


def measure(name: str, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """What is known of one recipe after each of its runs."""
    runs: dict[str, Any] = {}
    others: dict[str, Any] = {}
    all_words = {f"seed {seed}": (f"seed={seed}",) for seed in SEEDS}
    all_words |= {
        other: (f"seed={SEEDS[0]}", *words.split()) for other, words in recipe.also.items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        for number, (label, words) in enumerate(all_words.items()):
            found = run(name, recipe, words, Path(scratch) / f"{number}")
            (others if label in recipe.also else runs)[label] = found
            print(f"{name} {label}:", brief(found), flush=True)
            yield summary(runs, others)


def summary(runs: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Over the seeds."""
    before = [r["held_out_reward"]["sampled"][0] for r in runs.values()]
    after = [r["held_out_reward"]["sampled"][1] for r in runs.values()]
    return {
        "date": today(),
        "host": host(),
        "rise": round(mean(a["mean"] for a in after) - mean(b["mean"] for b in before), 3),
        "smallest_rise_of_a_seed": round(
            min(a["mean"] - b["mean"] for a, b in zip(after, before, strict=True)), 3
        ),
        "intervals_apart": min(a["low"] for a in after) > max(b["high"] for b in before),
        "runs": runs,
        "other_runs": others,
    }


def run(name: str, recipe: Recipe, more: tuple[str, ...], out: Path) -> dict[str, Any]:
    """One training, and what its model is measured at besides."""
    words = ["train", name, *more]
    began, cpu_began = time.perf_counter(), cpu_seconds()
    lockstep(*words, f"out={out}")
    seconds, seconds_of_cpu = time.perf_counter() - began, cpu_seconds() - cpu_began
    rows = rows_of(out)
    steps = [r for r in rows if "reward/mean" in r]
    tests = [r for r in rows if "eval/sampled/mean@1" in r]
    ends = (tests[0], tests[-1])
    again = {}
    for how, text in recipe.played_again.items():
        settings = text.split()
        if not set(settings) <= set(more):
            found = json.loads(lockstep("eval", f"{out}@{len(steps)}", *settings))["metrics"]
            again[how] = {
                "command": " ".join([f"lockstep eval RUN@{len(steps)}", *settings]),
                "sampled": estimate(found, "sampled"),
                "greedy": estimate(found, "greedy"),
            }
    return {
        "command": "lockstep " + " ".join(words),
        "minutes": round(seconds / 60, 2),
        "cpu_minutes": round(seconds_of_cpu / 60, 2),
        "steps": len(steps),
        "held_out_tasks": json.loads((out / "config.json").read_text())["evaluation"]["num_tasks"],
        "held_out_reward": {
            how: [estimate(test, how) for test in ends] for how in ("sampled", "greedy")
        },
        "held_out": {
            figure: [round(test[metric], 3) for test in ends]
            for figure, metric in recipe.held_out.items()
        },
        "first_and_last_10": {
            "reward": first_and_last(steps, "reward/mean"),
            **{figure: first_and_last(steps, metric) for figure, metric in recipe.means.items()},
        },
        "played_again": again,
        **tokens_of(steps),
        "reward_curve": [round(s["reward/mean"], 3) for s in steps],
    }


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def estimate(metrics: Mapping[str, float], how: str) -> dict[str, float]:
    """A mean of one held-out task each, with its 95 % interval."""
    name = f"eval/{how}/mean@1"
    names = {"mean": name, "low": f"{name}/low", "high": f"{name}/high"}
    return {key: round(metrics[metric], 3) for key, metric in names.items()}


def first_and_last(steps: list[dict[str, float]], metric: str) -> list[float]:
    """Means over the first ten steps and the last ten. A counter that a step lacks is 0 there."""
    values = [step.get(metric, 0.0) for step in steps]
    return [round(mean(values[:10]), 3), round(mean(values[-10:]), 3)]


def brief(found: Mapping[str, Any]) -> str:
    left_out = ("reward_curve", "command")
    return json.dumps({k: v for k, v in found.items() if k not in left_out})


def plot(name: str, found: Mapping[str, Any]) -> None:
    """docs/tasks/NAME.png: the reward of training steps, and the held-out reward at both ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), dpi=110)
    lines = {**found["runs"], **found["other_runs"]}
    for number, (label, line) in enumerate(lines.items()):
        curve = line["reward_curve"]
        smooth = [mean(curve[max(0, i - 4) : i + 1]) for i in range(len(curve))]
        is_other = label in found["other_runs"]
        axes.plot(smooth, color=f"C{number}", lw=1.3, ls=":" if is_other else "-", label=label)
        for at, test in zip((0, len(curve)), line["held_out_reward"]["sampled"], strict=True):
            axes.errorbar(
                at, test["mean"], [[test["mean"] - test["low"]], [test["high"] - test["mean"]]],
                color=f"C{number}", marker="o", ms=4, capsize=3,
            )  # fmt: skip
    axes.set(
        xlabel="step", ylabel="reward (mean of 5 steps)", ylim=(min(0, *axes.get_ylim()), 1.02),
        title=f"{name}: training; points are held-out tasks, sampled, with 95 % intervals",
    )  # fmt: skip
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    PLOTS.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(PLOTS / f"{name}.png", metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    known = json.loads(JSON.read_text()) if JSON.exists() else {"recipes": {}}
    is_plot_only = "--plot" in sys.argv[1:]
    names = [word for word in sys.argv[1:] if word != "--plot"] or list(RECIPES)
    for name in names:
        if not is_plot_only:
            print(f"== {name}", flush=True)
            for found in measure(name, RECIPES[name]):
                known["recipes"][name] = found
                save(JSON.stem, known)
        if name in known["recipes"]:
            plot(name, known["recipes"][name])


if __name__ == "__main__":
    main()
