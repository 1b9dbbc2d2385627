"""The studies of docs/studies.md: what a mismatch does to learning, and a correction to it.

    python docs/proof/studies.py                      everything (`make studies`)
    python docs/proof/studies.py fork --seeds 8       one study, seeds 0 to 7
    python docs/proof/studies.py --jobs 2             runs at a time, each on one thread
    python docs/proof/studies.py sinks --arms ignored ...  some arms alone
    python docs/proof/studies.py --draw               the plots again, from studies.json

A study is conditions (what is wrong) times arms (what is done about it) times seeds. Each is a run
of the quickstart's agent, in build/studies/STUDY/CONDITION/ARM/seed-N. What a run found goes into
studies.json beside this file as soon as it ends. A run whose command is in that file is not run
again: interrupt this at will, commit what is finished, and go on elsewhere. An arm whose settings
change is run anew, and its old seeds are dropped. Each study has a
plot in docs/studies/. No seconds are reported, so the figures do not depend on what else the
machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from threading import Lock
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display is needed
from matplotlib import pyplot
from run import host, rounded

from lockstep.recipes.methods import METHODS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUNS = ROOT / "build" / "studies"
PLOTS = ROOT / "docs" / "studies"
RESULTS = HERE / "studies.json"

QUIET = ("evaluation.at_start=false", "evaluation.num_tasks=256", "checkpoint.every=0")
KEEP_LITTLE = ("record.keep=last", "record.keep.steps=1")

BASELINE = ("correction.anchor=recomputed",)
FOUR_ARMS = {
    "baseline": BASELINE,
    "token IS": ("correction=tis",),
    "IS + rejection": ("correction=mis", "correction.normalize=false"),
    "IS + rejection + normalisation": ("correction=mis",),
}
SINK_ARMS = {
    "correct": BASELINE,
    "ignored": ("--fault=ignored_sinks", *BASELINE),
    "ignored, attention frozen": (
        "--fault=ignored_sinks",
        "trainer.freeze=*.attention.*",
        *BASELINE,
    ),
    "ignored, sequence IS": (
        "--fault=ignored_sinks",
        "correction=tis",
        "correction.level=sequence",
    ),
}
FORK_STEP = 40

REPORTED_NOISE = ("--fault=sampling_noise,router_std=0.12,bias=0.028,trainer_std=5e-4",)
"""What KwaiKAT's table has of a mixture: the means of two log-probs 0.008 apart, a variance of
1e-3 in the sampler and of 1e-7 in the trainer. The variances are of few tokens near a tie and
differ threefold between batches; noise.py has what was found."""
THREE_TIMES = ("--fault=sampling_noise,router_std=0.4,bias=0.093,trainer_std=1.7e-3",)
TEN_TIMES = ("--fault=sampling_noise,router_std=1.2,bias=0.28,trainer_std=5e-3",)
"""The same faults at 3.3 and ten times their scale. The variance of log-probs grows faster, since
routers flip: in the runs of `collapse` it is 160 times the reported one."""
NOISE_AND_BIAS = ("--fault=sampling_noise,router_std=0.4,bias=0.093", "--fault=ignored_sinks")
"""The sampler's noise at 3.3 times its scale, and a trainer that computes another model."""

COLLAPSE_STEPS = 10
COLLAPSE_DROP = 0.25
"""A run collapses at the first step at which the mean reward of the last COLLAPSE_STEPS steps lies
COLLAPSE_DROP below the best such mean before, or below the reward of the first step, which the
model had before any update: so a run that never learns and falls collapses too. Such a mean of ten
times 64 episodes moves by some 0.02 by chance, and of 1.3 between the least and the largest reward,
a fifth is no dip any more."""

HELD_OUT = "eval/sampled/mean@1"

SMOOTHING = 5
"""Steps of the running mean in the plots, and steps between two of their points: a step has 64
episodes, and its mean reward is noisy."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Conditions times arms, and what is drawn of them."""

    title: str
    settings: tuple[str, ...]
    """Of every run."""
    conditions: Mapping[str, tuple[str, ...]]
    """By name: what is wrong."""
    arms: Mapping[str, tuple[str, ...]]
    """By name: what is done about it."""
    curves: tuple[str, ...]
    """Metrics that are drawn, and kept with the figures."""
    recipe: str = "quickstart"
    model: str = ""
    """Supervised recipe whose model is made first, as a small gpt-oss; empty: a shipped model."""
    plugin: str = ""
    """File with the recipes of the model and of the runs."""
    contract: str = "none"
    parent: tuple[str, ...] = ()
    """Settings of the run that is forked; none: the runs begin at the shipped model."""
    teacher: tuple[str, ...] = ()
    """Settings of the run of the quickstart whose policy teaches the arms that distil."""
    num_seeds: int = 3
    """From 0, of the plan; a table says where fewer have been run."""


DISTILLED = (
    "steps=60",
    "evaluation.every=5",
    "groups_per_step=16",
    "group_size=1",
    "trainer.lr=2e-3",
)
"""The recipe `distill`, but for its teacher."""

CHAINS = {"recipe": "chains", "plugin": "docs/proof/chains.py", "model": "chains-model"}

STUDIES = {
    "tokens": Study(
        title="rows that are not what was sampled",
        settings=("model=tiny-qwen3", "steps=60", *QUIET),
        conditions={
            "healthy": (),
            "shifted log-probs": ("--fault=shifted_logprobs",),
            "re-tokenised, log-probs by position": ("--fault=retokenized_rows",),
            "re-tokenised, log-probs recomputed": ("--fault=retokenized_rows,logprobs=recomputed",),
            "final tokens dropped": ("--fault=dropped_final_tokens",),
        },
        arms={"as by default": ()},
        curves=("reward/mean", "response_length/mean", "mismatch/k1", "mismatch/k2"),
    ),
    "corrections": Study(
        title="four arms, without and with an injected mismatch",
        settings=("model=tiny-qwen3", "steps=60", *QUIET, *KEEP_LITTLE),
        conditions={
            "no mismatch": (),
            "kernel noise 0.035": ("--fault=kernel_noise,std=0.035",),
            "kernel noise 0.5": ("--fault=kernel_noise,std=0.5",),
        },
        arms=FOUR_ARMS,
        curves=(
            "reward/mean",
            "response_length/mean",
            "mismatch/k3",
            "correction/rejected_share",
            "mismatch/ess",
        ),
    ),
    "fork": Study(
        title=f"a run that is forked at step {FORK_STEP}",
        settings=("steps=80", *QUIET, *KEEP_LITTLE),
        parent=(
            "model=tiny-gpt-oss",
            f"steps={FORK_STEP}",
            "trainer.schedule=constant",
            *BASELINE,
            *QUIET,
            *KEEP_LITTLE,
        ),
        conditions={
            "kernel noise that grows to 0.5": (
                f"--fault=kernel_noise,std=0.02,growth=0.012,growth_from={FORK_STEP}",
            ),
            "router noise 0.3": ("--fault=router_noise,std=0.3",),
            "lr x 3 and no fault": ("trainer.lr=3e-3",),
            "weights 4 updates old": ("--fault=stale_weights,lag=4",),
            "weights 4 updates old, lr x 3": (
                "--fault=stale_weights,lag=4",
                "trainer.lr=3e-3",
            ),
        },
        arms={"base": BASELINE, "MIS": ("correction=mis",)},
        num_seeds=5,  # equal runs part widely where they break down
        curves=("mismatch/k3", "reward/mean", "response_length/mean", "correction/rejected_share"),
    ),
    "moe": Study(
        title="a mixture of experts with a noisy router",
        settings=("model=tiny-gpt-oss", "steps=60", *QUIET, *KEEP_LITTLE),
        conditions={"router noise 0.1": ("--fault=router_noise,std=0.1",)},
        arms={
            "recomputed": BASELINE,
            "rollout": ("correction=bypass",),
            "TIS": ("correction=tis",),
            "MIS": ("correction=mis",),
            "averaged, n=8": ("correction=averaged",),
        },
        curves=("reward/mean", "response_length/mean", "mismatch/k3", "mismatch/ess"),
    ),
    "averaging": Study(
        title="five estimates of the old policy, under the noise of a large mixture of experts",
        settings=("model=tiny-gpt-oss", "steps=150", *QUIET, *KEEP_LITTLE),
        conditions={
            "noise as measured": REPORTED_NOISE,
            "ten times": TEN_TIMES,
        },
        arms={
            "averaged, n=8": ("correction=averaged",),
            "recomputed": BASELINE,
            "rollout": ("correction=bypass",),
            "TIS, 2": ("correction=tis",),
            "replay": (*BASELINE, "trainer.routing_replay=rollout"),
            "replay in part": (
                *BASELINE,
                "trainer.routing_replay=rollout",
                "trainer.partial_routes=true",
                "--fault=lost_routes,share=0.5",
            ),
            "TIS, 1.5": ("correction=tis", "correction.limits=0,1.5"),
            "TIS, 5": ("correction=tis", "correction.limits=0,5"),
        },
        curves=("reward/mean", "behaviour/k3", "mismatch/k3", "train/grad_norm", "train/entropy"),
    ),
    "sinks": Study(
        title="attention sinks that the trainer gets wrong",
        settings=("model=tiny-gpt-oss", "steps=150", *QUIET, *KEEP_LITTLE),
        conditions={"tiny-gpt-oss": ()},
        arms={
            **SINK_ARMS,
            "no gradient": ("--fault=detached_sinks", *BASELINE),
            "ignored, rollout": ("--fault=ignored_sinks", "correction=bypass"),
            "ignored, token TIS": ("--fault=ignored_sinks", "correction=tis"),
            "ignored, MIS": ("--fault=ignored_sinks", "correction=mis"),
            "correct, attention frozen": ("trainer.freeze=*.attention.*", *BASELINE),
        },
        curves=(
            "reward/mean",
            "train/grad_norm",
            "train/entropy",
            "mismatch/k3",
            "mismatch/log_ppl_abs_diff_max",
        ),
    ),
    **{
        f"sinks-{recipe}": Study(
            title=f"sinks that the trainer ignores, on the task {recipe}",
            recipe=recipe,
            model=model,
            settings=(*rate, "evaluation.at_start=false", "checkpoint.every=0", *KEEP_LITTLE),
            conditions={recipe: ()},
            arms={
                **SINK_ARMS,
                "ignored, token TIS": ("--fault=ignored_sinks", "correction=tis"),
            },
            curves=("reward/mean", "train/grad_norm", "train/entropy", "mismatch/k3"),
        )
        # At the recipes' own 1e-3, the sound trainer of this model forgets mathematics.
        for recipe, model, rate in (
            ("math", "tiny-math", ("trainer.lr=3e-4",)),
            ("retool", "tiny-math", ("trainer.lr=3e-4",)),
            ("instructions", "tiny-instructions", ()),
        )
    },
    "collapse": Study(
        title="noise of 3.3 times the reported scale, four updates per batch",
        settings=(
            "model=tiny-gpt-oss",
            "steps=120",
            "trainer.updates_per_batch=4",
            "trainer.schedule=constant",
            *QUIET,
            *KEEP_LITTLE,
        ),
        conditions={
            "noise scale 3.3": THREE_TIMES,
            "noise scale 3.3, sinks ignored": NOISE_AND_BIAS,
        },
        arms={
            "averaged, n=8": ("correction=averaged",),
            "TIS, 2": ("correction=tis",),
            "rollout": ("correction=bypass",),
            "recomputed": BASELINE,
            "replay": (*BASELINE, "trainer.routing_replay=rollout"),
            "MIS": ("correction=mis",),
            "TIS, 1.5": ("correction=tis", "correction.limits=0,1.5"),
            "TIS, 5": ("correction=tis", "correction.limits=0,5"),
        },
        num_seeds=5,
        curves=("reward/mean", "behaviour/k3", "mismatch/k3", "train/grad_norm", "train/entropy"),
    ),
    "growth": Study(
        title="answers that grow over three to six searches, with kernel noise 0.5",
        **CHAINS,
        settings=("steps=300", *QUIET, *KEEP_LITTLE),
        conditions={"kernel noise 0.5": ("--fault=kernel_noise,std=0.5",)},
        arms=FOUR_ARMS,
        curves=("reward/mean", "response_length/mean", "mismatch/k3", "train/entropy"),
    ),
    "thousand": Study(
        title="a thousand steps under the contract, on the same task",
        **CHAINS,
        settings=("steps=1000", *QUIET, *KEEP_LITTLE),
        conditions={"sound": ()},
        arms={"by default": ()},
        contract="auto",
        num_seeds=5,
        curves=("reward/mean", "response_length/mean", "mismatch/k3", "train/entropy"),
    ),
    "methods": Study(
        title="published methods at one and four updates per batch",
        settings=(
            "model=tiny-gpt-oss",
            "steps=100",
            "evaluation.at_start=false",
            "evaluation.every=10",
            "evaluation.num_tasks=128",
            "evaluation.greedy=false",
            "checkpoint.every=0",
            *KEEP_LITTLE,
        ),
        conditions={
            "1 update": (),
            "4 updates": ("trainer.updates_per_batch=4",),
        },
        arms={
            "by default": (),
            **{method: (f"method={method}",) for method in METHODS},
            "refill": ("signal.max_extra_tasks=16",),
        },
        curves=("reward/mean", "train/entropy", "train/clip_fraction", "train/grad_norm"),
    ),
    "credit": Study(
        title="credit of single turns, on questions of two hops",
        settings=(
            "model=tiny-gpt-oss",
            "steps=100",
            "task.two_hop_share=1",
            "evaluation.at_start=false",
            "evaluation.every=10",
            "evaluation.num_tasks=128",
            "evaluation.greedy=false",
            "checkpoint.every=0",
            *KEEP_LITTLE,
        ),
        conditions={"two hops": ()},
        arms={
            "by default": (),
            "same turn": ("credit.compare=turn",),
            "same turn, gamma 0.9": ("credit.compare=turn", "credit.gamma=0.9"),
            "same path": ("credit.compare=path",),
            "GiGPO": ("credit.compare=observation", "credit.gamma=0.95"),
            "own rewards added": ("task.turn_rewards=true",),
            "MT-GRPO": ("task.turn_rewards=true", "credit.process=turn"),
            "process supervision": ("task.turn_rewards=true", "credit.process=group"),
            "own rewards in the return": (
                "task.turn_rewards=true",
                "credit.process=return",
                "credit.compare=turn",
            ),
        },
        curves=("reward/mean", "train/entropy", "credit/compared_share", "train/grad_norm"),
    ),
    "distill": Study(
        title="a teacher's log-probs in place of rewards",
        settings=(
            "model=tiny-gpt-oss",
            "evaluation.at_start=false",
            "evaluation.num_tasks=256",
            "evaluation.greedy=false",
            "checkpoint.every=0",
            *KEEP_LITTLE,
        ),
        conditions={"quickstart": ()},
        arms={
            "rewards alone": ("steps=100", "evaluation.every=10"),
            **{
                f"teacher, {signal}": (*DISTILLED, f"distill.signal={signal}")
                for signal in ("sampled", "top_k", "full")
            },
            "teacher, top_k, and rewards": (
                *DISTILLED,
                "group_size=4",
                "groups_per_step=4",
                "distill.signal=top_k",
                "distill.reward_coef=1",
            ),
        },
        teacher=("seed=100", "evaluation.num_tasks=256", "evaluation.at_start=false"),
        curves=("reward/mean", "train/entropy", "distill/kl", "train/grad_norm"),
    ),
    "penalty": Study(
        title="a KL penalty under ignored sinks",
        settings=("model=tiny-gpt-oss", "steps=50", *QUIET, *KEEP_LITTLE, *BASELINE),
        conditions={"sinks ignored": ("--fault=ignored_sinks",)},
        arms={
            "none": (),
            **{
                f"{form}, {coef:g}": (
                    f"correction.kl_penalty_form={form}",
                    f"correction.kl_penalty_coef={coef:g}",
                )
                for form in ("advantage", "loss")
                for coef in (0.01, 0.3)
            },
            **{
                f"{form}, 0.3, clip 1": (
                    f"correction.kl_penalty_form={form}",
                    "correction.kl_penalty_coef=0.3",
                    "correction.kl_penalty_clip=1",
                )
                for form in ("advantage", "loss")
            },
        },
        num_seeds=5,
        curves=("reward/mean", "mismatch/k3", "train/grad_norm"),
    ),
    "renderers": Study(
        title="the same format by our renderer and by a template",
        settings=("model=tiny-gpt-oss", "steps=60", *QUIET, *KEEP_LITTLE),
        conditions={"quickstart": ()},
        arms={
            "harmony": (),
            "template": (
                "renderer=jinja",
                "renderer.tools=template",  # else calls are text: it writes no schemas
                "renderer.template=docs/proof/harmony.jinja",
                "renderer.variables.recipient_last=true",  # as the model samples it
            ),
        },
        curves=("reward/mean", "response_length/mean", "mismatch/k3"),
    ),
    "late": Study(
        title="a sampler in bfloat16, for 700 steps",
        settings=(
            "model=tiny-qwen3",
            "steps=700",
            "engine.dtype=bfloat16",
            "trainer.schedule=constant",
            *QUIET,
            *KEEP_LITTLE,
        ),
        conditions={"bfloat16 sampler": ()},
        arms={"recomputed": BASELINE},
        curves=("reward/mean", "response_length/mean", "mismatch/k3", "train/entropy"),
    ),
}


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
        """Runs it to its end. Raises RuntimeError for one that fails, which is no result: it has
        fewer steps than the others."""
        if self.has_ended:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "lockstep.cli", *self.words, "--json", f"out={self.path}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{self.command} failed:\n{done.stderr[-2000:]}")
        end = {"command": self.command}
        (self.path / "end.json").write_text(json.dumps(end, indent=2) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """What it logged. behaviour/k3 is that of the log-probs which stand for the sampler's."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:
            for name in ("mismatch_averaged/k3", "mismatch/k3"):
                if name in row:
                    row.setdefault("behaviour/k3", row[name])
        return rows


def directory(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in name)


GPT_OSS = (
    "create=gpt_oss",
    "renderer=harmony",
    "renderer.system_message=false",
    "renderer.developer_heading=false",
    "renderer.tools_in_prompt=false",
)
"""A small gpt-oss in place of a shipped dense model: the same dialogues and steps."""


def model_of(name: str) -> Run:
    """The supervised run whose model the runs of a study begin with."""
    study = STUDIES[name]
    if study.plugin:
        words = ("sft", study.model, "--plugin", study.plugin)
        return Run(words=words, path=RUNS / "models" / study.model)
    words = ("sft", study.model, "--plugin", "examples/tiny_models.py", *GPT_OSS)
    return Run(words=words, path=RUNS / "models" / f"{study.model}-gpt-oss")


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
        start = (f"from={parent_of(name, seed).path.relative_to(ROOT)}@{FORK_STEP}",)
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
        found |= {"date": datetime.now(UTC).date().isoformat(), "curves": curves_of(run)}
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
    largest = {
        name: max(row[f"mismatch/{name}"] for row in steps)
        for name in ("k3", "max_abs_diff", "log_ppl_abs_diff_max")
    }
    return {
        "steps": len(steps),
        "skipped_updates": steps[-1]["train/skipped_updates"],
        "reward_first_10": over("reward/mean", slice(10)),
        "reward_last_10": over("reward/mean", slice(-10, None)),
        "reward_worst_10": min(value for value in tens if value is not None),
        "held_out_sampled": tests[-1][HELD_OUT] if tests else None,
        "held_out_greedy": tests[-1].get("eval/greedy/mean@1") if tests else None,
        "tokens_to_80": tokens_to(rows, 0.8),
        "tokens_to_90": tokens_to(rows, 0.9),
        "tokens_sampled": sum(row["tokens/sampled"] for row in steps),
        "response_length_first_10": over("response_length/mean", slice(10)),
        "response_length_last_10": over("response_length/mean", slice(-10, None)),
        "forced_share_first": steps[0]["mismatch/forced_share"],
        "k1_first": steps[0]["mismatch/k1"],
        "k2_first": steps[0]["mismatch/k2"],
        "k3_first": steps[0]["mismatch/k3"],
        "k1_last_10": over("mismatch/k1", slice(-10, None)),
        "k2_last_10": over("mismatch/k2", slice(-10, None)),
        "k3_mean": over("mismatch/k3"),
        "k3_first_10": over("mismatch/k3", slice(10)),
        "k3_last_10": over("mismatch/k3", slice(-10, None)),
        "k3_steps_200_300": over("mismatch/k3", slice(200, 300)),
        "k3_last_100": over("mismatch/k3", slice(-100, None)),
        "k3_largest": largest["k3"],
        "max_abs_diff": largest["max_abs_diff"],
        "log_ppl_abs_diff_max": largest["log_ppl_abs_diff_max"],
        "log_ppl_abs_diff_max_last_10": over("mismatch/log_ppl_abs_diff_max", slice(-10, None)),
        "ess": over("mismatch/ess"),
        "ess_last_10": over("mismatch/ess", slice(-10, None)),
        "rejected_share": over("correction/rejected_share"),
        "rejected_share_last_10": over("correction/rejected_share", slice(-10, None)),
        "weight_mean": over("correction/weight_mean"),
        "grad_norm": over("train/grad_norm"),
        "grad_norm_last_10": over("train/grad_norm", slice(-10, None)),
        "grad_norm_largest": max(row["train/grad_norm"] for row in steps),
        "entropy_last_10": over("train/entropy", slice(-10, None)),
        "clip_fraction": over("train/clip_fraction"),
        "trained_share": sum(r["tokens/trained"] for r in steps)
        / sum(r["tokens/sampled"] for r in steps),
        "averaged_k3_mean": over("mismatch_averaged/k3"),
        "behaviour_k3_mean": over("behaviour/k3"),
        "behaviour_k3_last_10": over("behaviour/k3", slice(-10, None)),
        "behaviour_k3_largest": max(row["behaviour/k3"] for row in steps),
        "replayed_share": over("routing/replayed_share"),
        "collapses": float(collapsed is not None),
        "collapse_step": collapsed,
        "noise_var_rollout": over("noise/var_rollout"),
        "compared_share": over("credit/compared_share"),
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
    from lockstep.config import resolve
    from lockstep.recipes import find_recipe
    from lockstep.run.preflight import read_model_files
    from lockstep.store.run import load_run
    from lockstep.testing.faults import Faults, split_faults
    from lockstep.training.rows import rows_for_training

    stored = load_run(run.path)
    settings, faults = split_faults(run.words[2:])
    config = resolve(find_recipe("quickstart"), settings)
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

LABELS = {
    "reward/mean": "mean reward",
    "response_length/mean": "response, tokens",
    "mismatch/k1": "|k1|, nats",
    "mismatch/k2": "k2, nats squared",
    "mismatch/k3": "k3, nats",
    "behaviour/k3": "k3 of what stands\nfor the sampler, nats",
    "correction/rejected_share": "rejected share of tokens",
    "mismatch/ess": "effective sample size, share",
    "mismatch/log_ppl_abs_diff_max": "largest log-perplexity\ngap, nats",
    "train/grad_norm": "gradient norm",
    "train/entropy": "entropy, nats",
    "train/clip_fraction": "clipped share of tokens",
    "credit/compared_share": "share of turns\nwith a peer",
    "distill/kl": "KL from the teacher,\nnats",
}
LOGARITHMIC = (
    "mismatch/k1", "mismatch/k2", "mismatch/k3", "behaviour/k3", "mismatch/log_ppl_abs_diff_max",
    "train/grad_norm",
)  # fmt: skip
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
    parser.add_argument("study", nargs="*", help=f"some of {', '.join(STUDIES)}; none is all")
    parser.add_argument("--arms", nargs="+", help="some arms alone")
    parser.add_argument("--conditions", nargs="+", help="some conditions alone")
    parser.add_argument("--seeds", type=int, help="how many, from 0; usually as the study says")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--draw", action="store_true", help="run nothing: the plots again")
    options = parser.parse_args()
    if unknown := [name for name in options.study if name not in STUDIES]:
        parser.error(f"no study {', '.join(unknown)}; there are {', '.join(STUDIES)}")
    for name in options.study or STUDIES:
        study = STUDIES[name]
        arms = options.arms or list(study.arms)
        conditions = options.conditions or list(study.conditions)
        for kind, asked, known in (
            ("arm", arms, study.arms),
            ("condition", conditions, study.conditions),
        ):
            if unknown := [each for each in asked if each not in known]:
                parser.error(
                    f"{name} has no {kind} {', '.join(unknown)}; it has {', '.join(known)}"
                )
        if not options.draw:
            seeds = range(options.seeds or study.num_seeds)
            run_all(name, conditions, arms, seeds, options.jobs)
        if draw(name) is None:
            print(f"{name}: its plot stays as it is, for some of its runs have no curves")


if __name__ == "__main__":
    main()
