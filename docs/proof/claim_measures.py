"""What `make claims-quick` measures: one function per experiment of a minute or less.

A function with a parameter `seed` is run once for each of SEEDS, any other once. It returns its
figures by name; claims.toml says what they are compared with. The runs are short ones of the
quickstart's agent, in this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import investigation
import numpy as np
import torch
from doctor_faults import with_dropout
from run import HERE, ROOT, configured
from studies import words_of

from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext
from lockstep.renderers.base import Renderer
from lockstep.renderers.origins import rendered_anew, turns_of
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.build import build
from lockstep.run.preflight import preflight, read_model_files
from lockstep.run.train import train
from lockstep.run_config import Config
from lockstep.store.run import Run, load_run
from lockstep.testing.faults import injected, split_faults
from lockstep.types import Trajectory

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests")]
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
SEEDS = range(5)
Figures = dict[str, float]
Tensor = torch.Tensor


# -- short runs ------------------------------------------------------------------------------------


def config_of(*settings: str) -> Config:
    return configured("evaluation=none", "checkpoint.every=0", *settings)


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


def mean_of(name: str, *words: str) -> float:
    """Mean of a metric over the steps of a run."""
    return mean(row[name] for row in steps_of(*words))


@lru_cache(maxsize=len(SEEDS) * len(MODELS))
def first_step(model: str, seed: int) -> tuple[list[Trajectory], dict[str, Any]]:
    """(64 episodes, metrics) of a step under the contract."""
    with run_of(f"model={model}", "steps=1", f"seed={seed}") as run:
        found = [t for group in run.groups(0) for t in group.trajectories]
        return found, next(row for row in run.metrics if "reward/mean" in row)


def renderer_of(model: str) -> Renderer:
    return read_model_files(config_of(f"model={model}")).renderer


# -- the report on Tinker --------------------------------------------------------------------------


def published_program(seed: int) -> Figures:
    """The program of the report, with our model and engine, and Lockstep's own rows."""
    rungs = investigation.investigate("tiny-gpt-oss", seed)["rungs"]
    before, after = rungs["by messages, as published"], rungs["the training path"]
    return {
        "k1_before": before["k1"],
        "k2_before": before["k2"],
        "match_before": before["match"],
        "k1_anew": rungs["several turns, rendered anew"]["k1"],
        "k1_one_turn": abs(rungs["one turn"]["k1"]),
        "k1_after": abs(after["k1"]),
        "k2_after": after["k2"],
    }


def forced_share(seed: int) -> Figures:
    return {model: first_step(model, seed)[1]["mismatch/forced_share"] for model in MODELS}


def two_renderers(seed: int) -> Figures:
    """Share of prompts that our renderer and a template that formats strings write alike."""
    config = config_of("model=tiny-gpt-oss")
    ours = read_model_files(config).renderer
    template = config_of(
        "model=tiny-gpt-oss",
        "renderer=jinja",
        "renderer.tools=template",  # else calls are text, for this template writes no schemas
        f"renderer.template={HERE / 'harmony.jinja'}",
    ).renderer
    theirs = make_renderer(template, ours.tokenizer)
    equal = []
    for trajectory in first_step("tiny-gpt-oss", seed)[0]:
        messages = [m for segment in trajectory.segments for m in segment.messages]
        if any(m.parse_error or (m.content and m.tool_calls) for m in messages):
            continue  # a malformed reply has no one form; the template has none for words and calls
        for end in range(2, len(messages)):
            if messages[end].role == "assistant":
                before = messages[:end]
                equal.append(ours.render(before, ()) == theirs.render(before, ()))
    return {"equal": mean(equal), "prompts": len(equal)}


def pre_and_post_update(seed: int) -> Figures:
    """|k1| between sampler and trainer before and after an update, with sinks ignored."""
    words = ("model=tiny-gpt-oss", "steps=2", "trainer.measure_after_every=1", f"seed={seed}")
    rows = steps_of(
        *words, "trainer.schedule=constant", "--fault=ignored_sinks", *words_of("@baseline")
    )
    return {
        name: mean(abs(row[f"{metric}/k1"]) for row in rows)
        for name, metric in (("before", "mismatch"), ("after", "mismatch_after"))
    }


def dropout_at_protocol_tokens(seed: int) -> Figures:
    """Control tokens, as a share of the largest 1 % of the gaps that a trainer with dropout has,
    and of all sampled tokens."""
    config = config_of("model=tiny-gpt-oss", "steps=1", "contract=none")
    trainer = build(config, model_files := preflight(config)).trainer
    rows = [t.row(leaf) for t in first_step("tiny-gpt-oss", seed)[0] for leaf in t.rewards]
    sound = np.concatenate(trainer.forward(rows, column=None))
    trainer.model = with_dropout(trainer.model, 0.1, seed=seed)
    dropped = np.concatenate(trainer.forward(rows, column=None))
    mask = np.concatenate([row.loss_mask for row in rows])
    ids = np.concatenate([row.token_ids for row in rows])[mask]
    is_control = np.isin(ids, list(model_files.renderer.tokenizer.control_ids))
    largest = np.argsort(-np.abs(sound - dropped)[mask])[: max(1, len(ids) // 100)]
    return {"largest": float(is_control[largest].mean()), "all": float(is_control.mean())}


# -- slime -----------------------------------------------------------------------------------------


def half_precision(seed: int) -> Figures:
    """k3 of a sampler in bfloat16 against a trainer in float32."""
    words = ("engine.dtype=bfloat16", "contract=none", "steps=1", f"seed={seed}")
    return {model: mean_of("mismatch/k3", f"model={model}", *words) for model in MODELS}


def contract(seed: int) -> Figures:
    """Tokens of a step whose two log-probs differ in a bit, under the contract."""
    steps = [first_step(model, seed)[1] for model in MODELS]
    return {
        name: sum(step[f"mismatch/{name}_tokens"] for step in steps)
        for name in ("unequal", "compared")
    }


def saved_forward(seed: int) -> Figures:
    """Seconds of the processor for an update of a batch: with old log-probs by a forward of its
    own, and with the sampler's."""
    config = config_of("model=tiny-qwen3", "steps=1", "contract=none")
    rows = [t.row(leaf) for t in first_step("tiny-qwen3", seed)[0] for leaf in t.rewards]
    for row in rows:
        row.set("advantages", np.where(row.loss_mask, np.float32(1), np.float32(0)))
    trainer = build(config, preflight(config)).trainer
    out: Figures = {}
    for name, words in (
        ("recomputed", words_of("@baseline")),
        ("recorded", ("correction=bypass",)),
    ):
        correction = config_of(*words).correction
        seconds = []
        for _ in range(4):
            begun = process_time()
            trainer.update(rows, config.objective, correction)
            seconds.append(process_time() - begun)
        out[name] = min(seconds)
    return out


# -- KwaiKAT ---------------------------------------------------------------------------------------


def cache_hits(seed: int) -> Figures:
    """Share of the prefixes of re-scorings that the embedded engine finds in its cache."""
    words = ("model=tiny-gpt-oss", "contract=none", "correction=averaged", "steps=1")
    return {
        "share": mean_of("noise/cache_hit_share", *words, *words_of("@as-reported"), f"seed={seed}")
    }


def benchmark(name: str, *words: str) -> list[dict[str, Any]]:
    """The rows of a benchmark."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])["parts"]


def beside_an_idle_engine() -> Figures:
    """Seconds of a step beside an engine that waits for tools: `benchmarks/averaging.py`."""
    (row,) = benchmark("averaging", "--rounds", "1")
    return row["steps"]


# -- the retrospective on GPT-OSS ------------------------------------------------------------------


def sinks_formula() -> Figures:
    """Largest difference, in float64, of our attention with sinks and its gradients from the
    formula of the article: a softmax over the scores and the sink, whose column is dropped."""
    from attention_formula import reference_attention

    g = torch.Generator().manual_seed(0)
    tokens, heads, width = 24, 4, 8
    q, k, v = (torch.randn(tokens, heads, width, generator=g, dtype=torch.float64) for _ in "qkv")
    sinks = torch.randn(heads, generator=g, dtype=torch.float64)
    out_grad = torch.randn(tokens, heads, width, generator=g, dtype=torch.float64)
    scale = width**-0.5

    def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return reference_attention(
            q, k, v, sinks_H=sinks, window=None, scale=scale, lengths=[tokens]
        )

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


def reencoded(trajectories: Iterable[Trajectory], tokenizer: Tokenizer) -> Figures:
    """Shares of sampled turns whose ids are other ones, and the same, after decoding and encoding,
    and of texts that come back."""
    changed, kept = [], []
    for segment in (each for trajectory in trajectories for each in trajectory.segments):
        if segment.is_sampled:
            # Control tokens are not text; what lies between them is.
            ids = [i for i in segment.token_ids.tolist() if i not in tokenizer.control_ids]
            text = tokenizer.decode(ids)
            again = tokenizer.encode(text)
            changed.append(again != ids)
            kept.append(tokenizer.decode(again) == text)
    return {"changed": mean(changed), "same": 1 - mean(changed), "texts_kept": mean(kept)}


def round_trips(seed: int) -> Figures:
    """Of the first step of both tiny models."""
    each = [reencoded(first_step(model, seed)[0], renderer_of(model).tokenizer) for model in MODELS]
    return {name: mean(figures[name] for figures in each) for name in each[0]}


def histories(seed: int) -> Figures:
    """Share of dialogues whose messages, rendered as a whole, differ from the sampled ids; and of
    dialogues with three turns or more, the share of a turn's ids that stay at their index, by the
    number of the turn."""
    out: Figures = {}
    for model in MODELS:
        renderer = renderer_of(model)
        differs, in_place = [], []
        for trajectory in first_step(model, seed)[0]:
            leaf = len(trajectory.segments) - 1
            turns = turns_of(trajectory, leaf)
            if len(turns) < 2:
                continue
            rendered = rendered_anew(turns, renderer)[0].token_ids
            differs.append(not np.array_equal(rendered, trajectory.path_ids(leaf)))
            shares, begin = [], 0
            for segment in (trajectory.segments[index] for index in trajectory.path(leaf)):
                end = begin + len(segment.token_ids)
                if segment.is_sampled:
                    there = rendered[begin:end]
                    same = (there == segment.token_ids[: len(there)]).sum()
                    shares.append(float(same / len(segment.token_ids)))
                begin = end
            if len(turns) > 2:
                in_place.append(shares[:3])
        out[f"{model}_differs"] = mean(differs)
        for number, shares in enumerate(zip(*in_place, strict=True), start=1):
            out[f"{model}_turn_{number}"] = mean(shares)
    return out


# -- memory ----------------------------------------------------------------------------------------


def memory_of_experts(seed: int) -> Figures:
    """MiB at the peak of 4,096 tokens through gpt-oss' 32 experts of width 512, without gradient:
    ours, and every token through every expert, as transformers did without gradient."""
    from measuring import usage

    from moe import ACTIVE, EXPERTS, WIDTH, make_layer

    _, ours = make_layer("plain")
    g = torch.Generator().manual_seed(seed)
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
            found[name] = usage(lambda run=run: run(x_TD))["mib"]
    return found


def sequence_parallel() -> Figures:
    """Bytes that each of two and four processes holds for backward, relative to one: 4,096 tokens,
    four layers. A count: an allocator's peak varies by a tenth."""
    two, four = benchmark("sequence_parallel", "--tokens", "4096")
    return {"two": two["held"], "four": four["held"]}
