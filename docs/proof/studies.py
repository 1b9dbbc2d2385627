"""The studies of docs/studies.md: what a mismatch does to learning, and a correction to it.

    python docs/proof/studies.py                      everything (`make studies`)
    python docs/proof/studies.py fork --seeds 8       one study, seeds 0 to 7
    python docs/proof/studies.py --jobs 2             runs at a time, each on one thread
    python docs/proof/studies.py sinks --arms ignored ...  some arms alone
    python docs/proof/studies.py --draw               the plots again, from studies.json

A study is conditions (what is wrong) times arms (what is done about it) times seeds; studies.toml
lists them. Each is a run of the quickstart's agent, in build/studies/STUDY/CONDITION/ARM/seed-N.
Its figures go into studies.json as soon as it ends. A run whose command is in that file is not run
again: interrupt this at will, commit what is finished, and go on elsewhere. An arm whose settings
change is run anew, and its old seeds are dropped. Each study has a plot in docs/studies/. No
seconds are reported, so the figures do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from threading import Lock
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display is needed
from matplotlib import pyplot
from run import HERE, ROOT, configured, expanded, host, lockstep, rounded, rows_of, today

RUNS = ROOT / "build" / "studies"
PLOTS = ROOT / "docs" / "studies"
RESULTS = HERE / "studies.json"

Words = tuple[str, ...]

COLLAPSE_STEPS = 10
COLLAPSE_DROP = 0.25
"""A run collapses at the first step at which the mean reward of the last COLLAPSE_STEPS steps lies
COLLAPSE_DROP below the best such mean before, or below the reward of the first step, which the
model had before any update: so a run that never learns and falls collapses too. Such a mean of ten
times 64 episodes moves by some 0.02 by chance, and of 1.3 between the least and the largest reward,
a fifth is no dip any more."""

HELD_OUT = "eval/sampled/mean@1"

WINDOWS = {
    "all": slice(None), "first": slice(1), "first_10": slice(10), "last_10": slice(-10, None),
    "last_100": slice(-100, None), "steps_200_300": slice(200, 300),
}  # fmt: skip
"""Table of figures -> the steps that they are the means of."""

SMOOTHING = 5
"""Steps of the running mean in the plots, and steps between two of their points: a step has 64
episodes, and its mean reward is noisy."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Conditions times arms, and what is drawn of them."""

    title: str
    settings: Words
    """Of every run."""
    conditions: Mapping[str, Words]
    """By name: what is wrong."""
    arms: Mapping[str, Words]
    """By name: what is done about it."""
    curves: Words
    """Metrics that are drawn, and kept with the figures."""
    columns: Words
    """Figures in the columns of its table."""
    recipe: str = "quickstart"
    model: str = ""
    """Supervised recipe whose model is made first, as a small gpt-oss; empty: a shipped model."""
    plugin: str = ""
    """File with the recipes of the model and of the runs."""
    contract: str = "none"
    parent: Words = ()
    """Settings of the run that is forked; none: the runs begin at the shipped model."""
    fork_step: int = 0
    """Its step at which the others begin."""
    teacher: Words = ()
    """Settings of the run of the quickstart whose policy teaches the arms that distil."""
    num_seeds: int = 3
    """From 0, of the plan; a table says where fewer have been run."""

    @classmethod
    def read(cls, *, usual_arms: str = "", **fields: Any) -> Study:
        """usual_arms: the name of arms of several studies. fields: a study's table."""
        arms = PLAN["arms"].get(usual_arms, {}) | fields.get("arms", {})
        for name in ("settings", "curves", "columns", "parent", "teacher"):
            fields[name] = words_of(fields.get(name, ""))
        return cls(**fields | {"conditions": each_of(fields["conditions"]), "arms": each_of(arms)})


def words_of(text: str) -> Words:
    """The words of a text of studies.toml."""
    return expanded(text, PLAN["words"])


def each_of(texts: Mapping[str, str]) -> dict[str, Words]:
    return {name: words_of(text) for name, text in texts.items()}


PLAN = tomllib.loads((HERE / "studies.toml").read_text())
STUDIES = {name: Study.read(**table) for name, table in PLAN["studies"].items()}


# -- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """One `lockstep train`."""

    words: tuple[str, ...]
    path: Path

    @property
    def command(self) -> str:
        return " ".join(["lockstep", *self.words])

    @property
    def has_ended(self) -> bool:
        """Whether its directory holds a whole run of this very command."""
        end = self.path / "end.json"
        return end.exists() and json.loads(end.read_text())["command"] == self.command

    def complete(self) -> None:
        """Runs it to its end, on one thread. Raises CalledProcessError for one that fails, which is
        no result: it has fewer steps than the others."""
        if self.has_ended:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        lockstep(*self.words, f"out={self.path}")
        end = {"command": self.command}
        (self.path / "end.json").write_text(json.dumps(end, indent=2) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """What it logged. behaviour/k3 is that of the log-probs which stand for the sampler's."""
        rows = rows_of(self.path)
        for row in rows:
            for name in ("mismatch_averaged/k3", "mismatch/k3"):
                if name in row:
                    row.setdefault("behaviour/k3", row[name])
        return rows


def directory(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in name)


def model_of(name: str) -> Run:
    """The supervised run whose model the runs of a study begin with."""
    study = STUDIES[name]
    kind, name = ((), "") if study.plugin else (words_of("@gpt-oss"), "-gpt-oss")
    words = ("sft", study.model, "--plugin", study.plugin or "examples/tiny_models.py", *kind)
    return Run(words=words, path=RUNS / "models" / f"{study.model}{name}")


def teacher_of(name: str) -> Run:
    words = ("train", "quickstart", "contract=none", *STUDIES[name].teacher)
    return Run(words=words, path=RUNS / name / "teacher")


def parent_of(name: str, seed: int) -> Run:
    words = ("train", "quickstart", "contract=none", *STUDIES[name].parent, f"seed={seed}")
    return Run(words=words, path=RUNS / name / "parent" / f"seed-{seed}")


def run_of(name: str, condition: str, arm: str, seed: int) -> Run:
    study = STUDIES[name]
    start = (study.recipe, *(("--plugin", study.plugin) if study.plugin else ()))
    if study.parent:
        start = (f"from={parent_of(name, seed).path.relative_to(ROOT)}@{study.fork_step}",)
    if study.model:
        start = (*start, f"model={model_of(name).path.relative_to(ROOT)}/model")
    settings = (*study.settings, *study.conditions[condition], *study.arms[arm])
    if any(word.startswith("distill.") for word in study.arms[arm]):
        teacher = teacher_of(name).path.relative_to(ROOT)
        settings = (f"distill.teacher.model={teacher}", *settings)
    if not study.parent:
        settings = (*settings, f"contract={study.contract}", f"seed={seed}")
    path = RUNS / name / directory(condition) / directory(arm) / f"seed-{seed}"
    return Run(words=("train", *start, *settings), path=path)


def run_all(
    name: str, conditions: Sequence[str], arms: Sequence[str], seeds: Sequence[int], jobs: int
) -> None:
    """Runs what the results do not hold yet, seed by seed, and stores each run as it ends."""
    print(f"== {name}", flush=True)
    study = STUDIES[name]
    lock = Lock()

    if study.model:
        model_of(name).complete()
    if study.teacher:
        teacher_of(name).complete()

    def one(condition: str, arm: str, seed: int) -> None:
        if study.parent:
            with lock:  # the runs of a seed fork the same one
                parent_of(name, seed).complete()
        run = run_of(name, condition, arm, seed)
        run.complete()
        found = figures_of(run) | (match_rates(run) if name == "tokens" else {})
        found |= {"date": today(), "curves": curves_of(run)}
        with lock:
            store(name, condition, arm, seed, found)
        print(f"{name}: {condition}, {arm}, seed {seed}: {found['reward_last_10']:.3f}", flush=True)

    results = read_results()
    missing = [
        (condition, arm, seed)
        for seed in seeds
        for condition in conditions
        for arm in arms
        if str(seed) not in stored(results, name, condition, arm)["seeds"]
    ]
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(one, *each) for each in missing]:
            done.result()


# -- results --------------------------------------------------------------------------------------


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"studies": {}}


def template(name: str, condition: str, arm: str) -> str:
    """The command of an arm, with SEED for the number."""
    command = run_of(name, condition, arm, 0).command
    return command.replace("seed=0", "seed=SEED").replace("seed-0", "seed-SEED")


def stored(results: Mapping[str, Any], name: str, condition: str, arm: str) -> dict[str, Any]:
    """{"command", "seeds": seed -> figures} of an arm; without seeds if its settings are others
    now."""
    found = results["studies"].get(name, {}).get("conditions", {})
    command = template(name, condition, arm)
    kept = found.get(condition, {}).get(arm, {})
    return kept if kept.get("command") == command else {"command": command, "seeds": {}}


def store(name: str, condition: str, arm: str, seed: int, found: Mapping[str, Any]) -> None:
    """Puts one run into the results, and leaves out arms that the study no longer has."""
    study, results = STUDIES[name], read_results()
    conditions = {
        each: {other: stored(results, name, each, other) for other in study.arms}
        for each in study.conditions
    }
    seeds = conditions[condition][arm]["seeds"] | {str(seed): found}
    conditions[condition][arm]["seeds"] = dict(sorted(seeds.items(), key=lambda s: int(s[0])))
    results["studies"][name] = {
        "command": f"python docs/proof/studies.py {name}",
        "host": host(),
        "plot": f"docs/studies/{name}.png",
        "title": study.title,
        "num_seeds": study.num_seeds,
        "conditions": conditions,
    }
    text = json.dumps(rounded(results, 4), indent=1)
    # A curve in a line: the file has a thousand of them.
    text = re.sub(r"\[([^\[\]{}\"]*)\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    RESULTS.write_text(text + "\n")


# -- figures --------------------------------------------------------------------------------------


def tokens_to(rows: Sequence[Mapping[str, Any]], reward: float) -> float | None:
    """Tokens that had been sampled for training when the held-out reward first was that high. None
    if it never was, or if only the end was tested."""
    tested = [(at, row[HELD_OUT]) for at, row in enumerate(rows) if HELD_OUT in row]
    reached = [at for at, found in tested if found >= reward]
    if len(tested) < 2 or not reached:
        return None
    return sum(row.get("tokens/sampled", 0) for row in rows[: reached[0] + 1])


def figures_of(run: Run) -> dict[str, Any]:
    """The scalars of one run. Means are over all of its steps where no step is named."""
    rows = run.rows()
    steps = [row for row in rows if "reward/mean" in row]
    tests = [row for row in rows if HELD_OUT in row]
    collapsed = collapse_step([row["reward/mean"] for row in steps])

    def over(name: str, part: slice = slice(None)) -> float | None:
        values = [row[name] for row in steps[part] if name in row]
        return mean(values) if values else None

    tens = [over("reward/mean", slice(at, at + 10)) for at in range(0, len(steps), 10)]
    means = {
        figure: over(metric, part)
        for window, part in WINDOWS.items()
        for figure, metric in PLAN["figures"][window].items()
    }
    return means | {
        **{name: max(row[of] for row in steps) for name, of in PLAN["figures"]["largest"].items()},
        "steps": len(steps),
        "skipped_updates": steps[-1]["train/skipped_updates"],
        "reward_worst_10": min(value for value in tens if value is not None),
        "held_out_sampled": tests[-1][HELD_OUT] if tests else None,
        "held_out_greedy": tests[-1].get("eval/greedy/mean@1") if tests else None,
        "tokens_to_80": tokens_to(rows, 0.8),
        "tokens_to_90": tokens_to(rows, 0.9),
        "tokens_sampled": sum(row["tokens/sampled"] for row in steps),
        "trained_share": sum(r["tokens/trained"] for r in steps)
        / sum(r["tokens/sampled"] for r in steps),
        "collapses": float(collapsed is not None),
        "collapse_step": collapsed,
    }


def collapse_step(rewards: Sequence[float]) -> int | None:
    """The step at which a run collapses, by the definition above; None if it does not."""
    size = COLLAPSE_STEPS
    means = [mean(rewards[at - size + 1 : at + 1]) for at in range(size - 1, len(rewards))]
    best = rewards[0]
    for at, value in enumerate(means, start=size - 1):
        best = max(best, value)
        if value < best - COLLAPSE_DROP:
            return at
    return None


def curves_of(run: Run) -> dict[str, list[list[float]]]:
    """Metric -> [step, running mean] every SMOOTHING steps, of what the study draws."""
    steps = [row for row in run.rows() if "reward/mean" in row]
    study = STUDIES[run.path.relative_to(RUNS).parts[0]]
    out = {}
    for metric in study.curves:
        # Nothing is rejected where nothing says how much.
        default = 0.0 if metric == "correction/rejected_share" else None
        points = [(row["step"], row.get(metric, default)) for row in steps]
        points = [(step, value) for step, value in points if value is not None]
        values = [abs(value) if metric in LOGARITHMIC else value for _, value in points]
        out[metric] = [
            [points[at][0], mean(values[max(0, at - SMOOTHING + 1) : at + 1])]
            for at in range(SMOOTHING - 1, len(points), SMOOTHING)
        ]
    return out


def match_rates(run: Run) -> dict[str, float]:
    """Share of the sampled ids that stand, in the row that is trained, at their own place among the
    sampled ones: of the first and of the last step. A fault of the rows is made again from the
    trajectories, which are kept as they were sampled."""
    from lockstep.run.preflight import read_model_files
    from lockstep.store.run import load_run
    from lockstep.testing.faults import Faults, split_faults
    from lockstep.training.rows import rows_for_training

    stored = load_run(run.path)
    settings, faults = split_faults(run.words[2:])
    config = configured(*settings)
    renderer = read_model_files(config).renderer
    out: dict[str, float] = {}
    for label, step in (("first", 0), ("last", config.steps - 1)):
        sampled = rows_for_training(stored.groups(step), config.advantage)
        # The ids that a fault makes do not depend on log-probs, so any will do.
        trained = Faults(faults).change_rows(
            sampled, renderer, lambda rows: [row.columns["rollout_logprobs"] for row in rows]
        )
        pairs = [
            (a.token_ids[a.loss_mask], b.token_ids[b.loss_mask])
            for a, b in zip(sampled, trained, strict=True)
        ]
        same = sum(int((a[: len(b)] == b[: len(a)]).sum()) for a, b in pairs)
        out[f"match_rate_{label}"] = same / sum(len(a) for a, _ in pairs)
    return out


# -- plots ----------------------------------------------------------------------------------------

LOGARITHMIC = PLAN["labels"]["logarithmic"]
LABELS = PLAN["labels"]["linear"] | LOGARITHMIC
COLOURS = (  # told apart by the colour-blind
    "#0072b2", "#e69f00", "#009e73", "#cc3311", "#7a5195", "#56b4e9", "#999999", "#000000",
    "#b8860b",
)  # fmt: skip


def draw(name: str) -> Path | None:
    """A row of panels per condition and a line per arm; with one arm, a line per condition. None
    where a run has no curves: it was stored before they were, and the plot is left as it is."""
    study, results = STUDIES[name], read_results()
    found = {
        condition: {arm: stored(results, name, condition, arm)["seeds"] for arm in study.arms}
        for condition in study.conditions
    }
    runs = [run for arms in found.values() for seeds in arms.values() for run in seeds.values()]
    if not runs or not all("curves" in run for run in runs):
        return None
    rows = (
        found
        if len(study.arms) > 1
        else {"": {c: next(iter(a.values())) for c, a in found.items()}}
    )
    width = len(study.curves)
    figure, axes = pyplot.subplots(
        len(rows),
        width,
        figsize=(3.1 * width, 2.4 * len(rows) + 0.7),
        squeeze=False,
        layout="constrained",
    )
    for (title, lines), row in zip(rows.items(), axes, strict=True):
        for metric, panel in zip(study.curves, row, strict=True):
            for (label, seeds), colour in zip(lines.items(), COLOURS, strict=False):
                draw_arm(panel, [run["curves"][metric] for run in seeds.values()], label, colour)
            panel.set_title(title, fontsize=8)
            panel.set_ylabel(LABELS[metric], fontsize=8)
            panel.set_xlabel("step", fontsize=8)
            panel.tick_params(which="both", labelsize=7)
            panel.grid(alpha=0.25, linewidth=0.5)
            points = [
                value
                for seeds in lines.values()
                for run in seeds.values()
                for _, value in run["curves"][metric]
            ]
            if metric in LOGARITHMIC and any(points):  # all are 0 under the contract
                panel.set_yscale("log")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.png"
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    pyplot.close(figure)
    return path


def draw_arm(
    panel: Any, seeds: Sequence[Sequence[Sequence[float]]], label: str, colour: str
) -> None:
    """A thin line per seed, and their mean over the steps that every seed reached."""
    if not seeds:
        return
    lines = [dict(points) for points in seeds]
    for line in lines:
        panel.plot(list(line), list(line.values()), color=colour, alpha=0.35, linewidth=0.7)
    common = [step for step in lines[0] if all(step in line for line in lines)]
    means = [mean(line[step] for line in lines) for step in common]
    panel.plot(common, means, color=colour, linewidth=1.6, label=label)


# -- the command ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", nargs="*", choices=[*STUDIES, []], help="none: all")
    parser.add_argument("--arms", nargs="+", help="some arms alone")
    parser.add_argument("--conditions", nargs="+", help="some conditions alone")
    parser.add_argument("--seeds", type=int, help="how many, from 0; usually as the study says")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--draw", action="store_true", help="run nothing: the plots again")
    options = parser.parse_args()
    for name in options.study or STUDIES:
        study = STUDIES[name]
        arms = options.arms or list(study.arms)
        conditions = options.conditions or list(study.conditions)
        if unknown := {*arms, *conditions} - {*study.arms, *study.conditions}:
            known = ", ".join([*study.conditions, *study.arms])
            parser.error(f"{name} has no {', '.join(unknown)}; it has {known}")
        if not options.draw:
            seeds = range(options.seeds or study.num_seeds)
            run_all(name, conditions, arms, seeds, options.jobs)
        if draw(name) is None:
            print(f"{name}: its plot stays as it is, for some of its runs have no curves")


if __name__ == "__main__":
    main()
