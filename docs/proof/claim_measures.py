"""What `make claims-quick` measures: one function per experiment of a minute or less.

Each returns its figures by name; claims.py says what they are compared with. The runs are short
ones of the quickstart's agent, in this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import investigation
import numpy as np
import torch
from doctor_faults import with_dropout
from scipy import stats
from studies import BASELINE, REPORTED_NOISE

from lockstep import measure_noise
from lockstep.config import resolve
from lockstep.correction.averaging import average_logprobs
from lockstep.correction.config import Correction
from lockstep.correction.weighing import correct
from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext
from lockstep.recipes import find_recipe
from lockstep.renderers.anew import rendered_anew, turns_of
from lockstep.renderers.registry import make_renderer
from lockstep.run.build import build
from lockstep.run.preflight import preflight, read_model_files
from lockstep.run.train import train
from lockstep.run_config import Config
from lockstep.store.run import Run, load_run
from lockstep.testing.faults import injected, split_faults
from lockstep.types import Sample, Trajectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "benchmarks"))
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
SEEDS = (0, 1, 2)
Figures = dict[str, float]
Tensor = torch.Tensor


# -- short runs ------------------------------------------------------------------------------------


def config_of(*settings: str) -> Config:
    return resolve(find_recipe("quickstart"), ["evaluation=none", "checkpoint.every=0", *settings])


@contextmanager
def run_of(*words: str) -> Iterator[Run]:
    """A short quickstart with these settings and faults."""
    settings, faults = split_faults(words)
    with tempfile.TemporaryDirectory() as scratch, injected(*faults):
        yield load_run(train(config_of(*settings), out=Path(scratch) / "run", view="json").path)


def steps_of(*words: str) -> list[dict[str, Any]]:
    """The metrics of each step."""
    with run_of(*words) as run:
        return [row for row in run.metrics if "reward/mean" in row]


def over_seeds(name: str, *words: str, last: int = 1) -> float:
    """Mean of a metric over three seeds and the last steps of each."""
    runs = [steps_of(*words, f"seed={seed}") for seed in SEEDS]
    return mean(row[name] for run in runs for row in run[-last:])


def trajectories_of(model: str) -> list[Trajectory]:
    """The episodes of one step, 64 of each seed."""
    found = []
    for seed in SEEDS:
        with run_of(f"model={model}", "steps=1", f"seed={seed}") as run:
            found += [t for group in run.groups(0) for t in group.trajectories]
    return found


def rows_of(*words: str) -> tuple[list[Sample], list[Tensor]]:
    """Rows of one step, and the trainer's log-prob of each of their tokens."""
    settings, faults = split_faults(words)
    config = config_of("steps=1", "contract=none", *settings)
    with injected(*faults), tempfile.TemporaryDirectory() as scratch:
        run = load_run(train(config, out=Path(scratch) / "run", view="json").path)
        rows = [t.row(leaf) for g in run.groups(0) for t in g.trajectories for leaf in t.rewards]
        parts = build(config, preflight(config))
        logprobs = parts.trainer.forward(rows, column=None)
    return rows, [torch.from_numpy(each) for each in logprobs]


# -- the report on Tinker --------------------------------------------------------------------------


def published_program() -> Figures:
    """The program of the report, with our model and engine, and Lockstep's own rows."""
    found = [investigation.investigate("tiny-gpt-oss", seed) for seed in SEEDS]
    before = [each["by messages, as published"] for each in found]
    anew = [each["rungs"]["several turns, rendered anew"] for each in found]
    after = [each["rungs"]["the training path"] for each in found]
    single = [each["rungs"]["one turn"] for each in found]
    return {
        "k1_before": mean(row["k1"] for row in before),
        "k2_before": mean(row["k2"] for row in before),
        "match_before": mean(row["match"] for row in before),
        "k1_anew": mean(row["k1"] for row in anew),
        "k1_one_turn": mean(abs(row["k1"]) for row in single),
        "k1_after": mean(abs(row["k1"]) for row in after),
        "k2_after": mean(row["k2"] for row in after),
        "match_after": mean(row["match"] for row in after),
    }


def forced_share() -> Figures:
    return {model: over_seeds("mismatch/forced_share", f"model={model}", "steps=1")
            for model in MODELS}  # fmt: skip


def two_renderers() -> Figures:
    """Prompts and whole dialogues by our renderer and by a template that formats strings."""
    config = config_of("model=tiny-gpt-oss")
    ours = read_model_files(config).renderer
    template = config_of(
        "model=tiny-gpt-oss", "renderer=jinja", f"renderer.template={HERE / 'harmony.jinja'}"
    ).renderer
    theirs = make_renderer(template, ours.tokenizer)
    equal = total = 0
    for trajectory in trajectories_of("tiny-gpt-oss"):
        messages = [m for segment in trajectory.segments for m in segment.messages]
        if any(message.parse_error for message in messages):
            continue  # there is no one way to write a malformed reply again
        for end in range(2, len(messages)):
            if messages[end].role == "assistant":
                total += 1
                before = messages[:end]
                equal += ours.render(before, ()) == theirs.render(before, ())
    return {"equal": equal, "dialogues": total}


def update_of(*words: str) -> Figures:
    """KL between sampler and trainer before and after the updates of a step."""
    words = (*words, "steps=6", "trainer.measure_after_every=1", "trainer.schedule=constant")
    runs = [steps_of("model=tiny-gpt-oss", *words, f"seed={seed}") for seed in SEEDS]
    rows = [row for run in runs for row in run]
    return {
        "before": mean(row["mismatch/k1"] for row in rows),
        "after": mean(row["mismatch_after/k1"] for row in rows),
    }


def pre_and_post_update() -> Figures:
    healthy, broken = update_of(), update_of("--fault=ignored_sinks", *BASELINE)
    return {f"{name}_{when}": each[when] for name, each in (("healthy", healthy), ("sinks", broken))
            for when in ("before", "after")}  # fmt: skip


def dropout_at_protocol_tokens() -> Figures:
    """The largest gaps of a trainer with dropout: how many are at control tokens, and how many
    tokens are control tokens at all."""
    config = config_of("model=tiny-gpt-oss", "steps=1", "contract=none")
    parts = build(config, preflight(config))
    control = parts.renderer.tokenizer.control_ids
    among, base = [], []
    for seed in SEEDS:
        with run_of("model=tiny-gpt-oss", "steps=1", "contract=none", f"seed={seed}") as run:
            rows = [t.row(i) for g in run.groups(0) for t in g.trajectories for i in t.rewards]
        sound = np.concatenate(parts.trainer.forward(rows, column=None))
        trained = parts.trainer.model
        parts.trainer.model = with_dropout(trained, 0.1, seed=seed)
        dropped = np.concatenate(parts.trainer.forward(rows, column=None))
        parts.trainer.model = trained
        ids = np.concatenate([row.token_ids for row in rows])
        mask = np.concatenate([row.loss_mask for row in rows])
        gap = np.abs(sound - dropped)[mask]
        is_control = np.isin(ids[mask], list(control))
        largest = np.argsort(-gap)[: max(1, len(gap) // 100)]
        among.append(float(is_control[largest].mean()))
        base.append(float(is_control.mean()))
    return {"among_largest": mean(among), "of_all": mean(base)}


# -- slime -----------------------------------------------------------------------------------------


def half_precision() -> Figures:
    """k3 of a sampler in bfloat16 against a trainer in float32."""
    words = ("engine.dtype=bfloat16", "contract=none", "steps=3")
    return {model: over_seeds("mismatch/k3", f"model={model}", *words, last=3) for model in MODELS}


def contract() -> Figures:
    """A run under the contract: k3, and tokens whose two log-probs differ in a bit."""
    rows = [row for model in MODELS for row in steps_of(f"model={model}", "steps=5")]
    return {
        "k3": max(row["mismatch/k3"] for row in rows),
        "unequal": sum(row["mismatch/unequal_tokens"] for row in rows),
        "compared": sum(row["mismatch/compared_tokens"] for row in rows),
    }


def normalisation() -> Figures:
    """Standard deviation, over batches of 16 rows, of the mean weight per token; kernel noise of a
    k3 near 0.02. Normalised weights have the mean 1 by definition."""
    rows, logprobs = rows_of(
        "model=tiny-qwen3", "groups_per_step=64", "--fault=kernel_noise,std=0.5"
    )
    out: Figures = {}
    for level in ("token", "sequence", "geometric"):
        means = {True: [], False: []}
        for at in range(0, len(rows) - 15, 16):
            for is_normalised in means:
                means[is_normalised].append(
                    mean_weight(rows[at : at + 16], logprobs[at : at + 16], level, is_normalised)
                )
        out[f"{level}_spread"] = pstdev(means[False])
        out[f"{level}_normalised"] = pstdev(means[True])
    return out


def mean_weight(
    rows: Sequence[Sample], logprobs: Sequence[Tensor], level: Any, is_normalised: bool
) -> float:
    width = max(len(row) for row in rows)
    new, old = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for at, (row, each) in enumerate(zip(rows, logprobs, strict=True)):
        kept = torch.from_numpy(row.loss_mask)
        mask[at, : len(row)] = kept
        new[at, : len(row)] = torch.where(kept, each, 0.0)
        recorded = torch.from_numpy(row.columns["rollout_logprobs"])
        old[at, : len(row)] = torch.where(kept, recorded, 0.0)
    correction = Correction(
        anchor="recomputed", level=level, limits=(0.0, 100.0), normalize=is_normalised
    )
    return float(correct(new, old, correction, layout=mask).weights[mask].mean())


def saved_forward() -> Figures:
    """Share of the tokens that the trainer runs once more for old log-probs, and the seconds of
    its training, the best of 24 steps: recomputed, and the sampler's. One update per batch."""
    common = ("model=tiny-qwen3", "contract=none", "steps=8")
    out: Figures = {}
    for name, words in (("recomputed", BASELINE), ("bypass", ("correction=bypass",))):
        rows = [row for seed in SEEDS for row in steps_of(*common, *words, f"seed={seed}")]
        out[f"{name}_seconds"] = min(row["time/train_seconds"] for row in rows)
        again, sampled = (
            sum(row[f"tokens/{n}"] for row in rows) for n in ("recomputed", "sampled")
        )
        out[f"{name}_share"] = again / sampled
    return out


# -- KwaiKAT ---------------------------------------------------------------------------------------


def averaging() -> Figures:
    """Variance of a log-prob averaged over eight scorings, relative to that of one, under the
    noise of a large mixture: of 64 scorings, in eights."""
    noise = 0.03 * torch.randn(64, 20_000, generator=torch.Generator().manual_seed(0))
    scorings = -1.5 + noise
    eights = torch.stack([average_logprobs(part).logprobs for part in scorings.split(8)])
    return {"ratio": float(eights.double().var(0).mean() / scorings.double().var(0).mean())}


def cache_hits() -> Figures:
    words = ("model=tiny-gpt-oss", "contract=none", "correction=averaged", "steps=2")
    rows = steps_of(*words, *REPORTED_NOISE)
    return {"share": mean(row["noise/cache_hit_share"] for row in rows),
            "scorings": mean(row["noise/rescorings"] for row in rows)}  # fmt: skip


def noise_of_engines() -> Figures:
    """What the sampler's repeated scorings of the same tokens differ by, float32 and bfloat16."""
    out: Figures = {}
    for dtype in ("same", "bfloat16"):
        for model in MODELS:
            found = measure_noise(
                config_of(f"model={model}", "contract=none", f"engine.dtype={dtype}")
            )
            out[f"{model}_{dtype}_diff"] = found["diff"]
            out[f"{model}_{dtype}_var"] = found["var_rollout"]
    return out


def benchmark(name: str, *words: str) -> list[dict[str, Any]]:
    """The rows of a benchmark."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])["parts"]


def cost_of_determinism() -> Figures:
    """Share of a decode step's processor time that stock ops need of that under the contract:
    gpt-oss' layers, hidden 512, float32, 8 and 64 requests (`benchmarks/true_on_policy.py`)."""
    only = ("--only", "decode-8", "decode-64", "--model", "gpt_oss", "--dtype", "float32")
    how = ("--clock", "cpu", "--threads", "1", "--rounds", "2")
    rows = benchmark("true_on_policy", *only, *how)
    return {row["name"].split("/")[1]: row["peer"] / row["ours"] for row in rows}


def beside_an_idle_engine() -> Figures:
    """Seconds of a step beside an engine that waits for tools, and the interval of 95 % of their
    ratio, by Welch's test of the logs of four steps each: `benchmarks/averaging.py`."""
    (row,) = benchmark("averaging", "--rounds", "1", "--only", "idle")
    logs = (np.log(row["steps"][arm]) for arm in ("averaged", "recomputed"))
    interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    low, high = float(np.exp(interval.low)), float(np.exp(interval.high))
    return {"averaged": row["ours"], "recomputed": row["peer"], "low": low, "high": high}


# -- the retrospective on GPT-OSS ------------------------------------------------------------------


def substitution() -> Figures:
    """Share of clipped tokens where two forwards of the trainer differ by noise of its experts: old
    log-probs from a forward of their own, the same without the noise, and the ratio set to 1."""
    common = ("model=tiny-gpt-oss", "contract=none", "steps=4")
    noise = "--fault=sampling_noise,trainer_std=0.3"
    scored = ("correction.anchor=recomputed", "trainer.updates_per_batch=2")
    one = "correction.anchor=on_policy"
    return {
        "recomputed": over_seeds("train/clip_fraction", *common, noise, *scored, last=4),
        "without_noise": over_seeds("train/clip_fraction", *common, *scored, last=4),
        "substituted": over_seeds("train/clip_fraction", *common, noise, one, last=4),
    }


def sinks_formula() -> Figures:
    """Largest difference, in float64, of our attention with sinks and its gradients from the
    formula of the article: a softmax over the scores and the sink, whose column is dropped."""
    g = torch.Generator().manual_seed(0)
    tokens, heads, width = 24, 4, 8
    q, k, v = (torch.randn(tokens, heads, width, generator=g, dtype=torch.float64) for _ in "qkv")
    sinks = torch.randn(heads, generator=g, dtype=torch.float64)
    out_grad = torch.randn(tokens, heads, width, generator=g, dtype=torch.float64)
    scale = width**-0.5

    def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        is_later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, float("-inf"))
        column = sinks[:, None, None].expand(heads, tokens, 1)
        probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", probs, v)

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        spec = AttentionSpec(sinks=sinks, window=None, scale=scale)
        return Ops().attention(q, k, v, spec, PackedContext.of([tokens]))

    found = []
    for attend in (formula, ours):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out = attend(*inputs)
        found.append([out, *torch.autograd.grad(out, inputs, out_grad)])
    gaps = [float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True)]
    return {"forward": gaps[0], "backward": max(gaps[1:-1]), "sink_gradient": gaps[-1]}


# -- token in, token out ---------------------------------------------------------------------------


def round_trips() -> Figures:
    """Sampled turns that a tokenizer spells otherwise, and texts that come back as they were."""
    changed = turns = texts = kept = 0
    for model in MODELS:
        tokenizer = read_model_files(config_of(f"model={model}")).renderer.tokenizer
        for trajectory in trajectories_of(model):
            for segment in trajectory.segments:
                if segment.is_sampled:
                    # Control tokens are not text; what lies between them is.
                    ids = [i for i in segment.token_ids.tolist() if i not in tokenizer.control_ids]
                    text = tokenizer.decode(ids)
                    again = tokenizer.encode(text)
                    turns, changed = turns + 1, changed + (again != ids)
                    texts, kept = texts + 1, kept + (tokenizer.decode(again) == text)
    return {"changed": changed / turns, "texts_kept": kept / texts, "turns": turns}


def histories() -> Figures:
    """Dialogues whose messages, rendered as a whole, are not the ids that were sampled; turns that
    stand at their place, by how many came before; and the same of Lockstep's own rows. By the
    dense model: its format leaves more in place."""
    config = config_of("model=tiny-qwen3")
    renderer = read_model_files(config).renderer
    stands: dict[int, list[float]] = {}
    differs = dialogues = concatenates = trained_observations = 0
    for trajectory in trajectories_of("tiny-qwen3"):
        leaf = len(trajectory.segments) - 1
        turns = turns_of(trajectory, leaf)
        if len(turns) < 2:
            continue
        row, kept = rendered_anew(turns, renderer)
        path = trajectory.path_ids(leaf)
        dialogues += 1
        differs += not np.array_equal(row.token_ids, path)
        for number, (turn, same) in enumerate(zip(turns[:-1], kept[:-1], strict=True)):
            stands.setdefault(number, []).append(same / len(turn.token_ids))
        own = trajectory.row(leaf)
        concatenates += np.array_equal(own.token_ids, path)
        sampled = np.concatenate(
            [np.full(len(s), s.is_sampled) for s in (trajectory.segments[i] for i in
                                                     trajectory.path(leaf))]
        )  # fmt: skip
        trained_observations += int((own.loss_mask & ~sampled).sum())
    return {
        "differs": differs / dialogues,
        "first_turn_stands": mean(stands[0]),
        "second_turn_stands": mean(stands[1]),
        "ours_equal": concatenates / dialogues,
        "observed_tokens_trained": trained_observations,
        "dialogues": dialogues,
    }


# -- memory ----------------------------------------------------------------------------------------


def memory_of_experts() -> Figures:
    """MiB at the peak of 4,096 tokens through gpt-oss' 32 experts of width 512, without gradient:
    ours, and every token through every expert, as transformers did without gradient."""
    from measuring import used_by

    from moe import ACTIVE, EXPERTS, WIDTH, make_layer

    _, ours = make_layer("plain")
    g = torch.Generator().manual_seed(0)
    x_TD = torch.randn(4096, WIDTH, generator=g)
    up_EDW = torch.randn(EXPERTS, WIDTH, 2 * WIDTH, generator=g) * 0.02
    down_EWD = torch.randn(EXPERTS, WIDTH, WIDTH, generator=g) * 0.02

    def repeated(x_TD: Tensor) -> Tensor:
        copies_ETD = x_TD.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH)
        gate, up = (copies_ETD @ up_EDW).chunk(2, -1)
        out_ETD = (torch.nn.functional.silu(gate) * up) @ down_EWD
        weights_ET = torch.zeros(EXPERTS, len(x_TD)).index_fill_(0, torch.arange(ACTIVE), 0.25)
        return (out_ETD * weights_ET[..., None]).sum(0)

    found = {}
    for name, run in (("ours", ours), ("repeated", repeated)):
        with torch.no_grad():
            run(x_TD[:8])  # loads what a first call loads
            found[name] = used_by(lambda run=run: run(x_TD))[1]
    return found


def sequence_parallel() -> Figures:
    """Peak of each of two and four processes, relative to one: 4,096 tokens, four layers."""
    two, four = benchmark("sequence_parallel", "--tokens", "4096")
    return {"two": two["ours"] / two["peer"], "four": four["ours"] / four["peer"]}
