"""Cost of equality of sampler and trainer: the invariant backend against the plain one.

A decoder of hidden size 512, 4 layers and 16384 ids, as Qwen3 (dense) and as gpt-oss (8 experts,
sinks, a window on every other layer), in float32 and bfloat16, with random weights. Measured: a
decode step of the embedded engine at a context of about 300 with 1, 8 and 64 requests; the step
that prefills 512 tokens; forward and backward over 8 packed rows of about 300; and a whole step of
reinforcement learning (episodes sampled, one update), where the true on-policy side takes the
rollout's log-probs as the old ones and the plain side either does so too (bypass) or computes them
again (decoupled PPO).

Each side is a process of its own, since MKL's settings hold for a process. They take turns, so that
a change in the machine's load meets both. The plain side decodes and prefills with keys in pages
and in one piece, with its own attention and with torch's flash kernel: the fastest counts. Times
are wall time, the best over the rounds, since other load only adds time. --clock cpu counts the
processor time of all threads instead: for a machine that others use.

    python benchmarks/true_on_policy.py [--json] [--rounds N] [--threads N ...] [--only FIGURE ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from lockstep.correction.config import Correction
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss
from lockstep.ops.base import KEY_QUANTUM, Ops
from lockstep.ops.context import AttentionSpec, PagedContext
from lockstep.ops.invariant import InvariantOps, ask_for_reproducible_gemm
from lockstep.ops.paged import paged_attention
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Request, Sample, SamplingParams

NAME = "true_on_policy"
Tensor = torch.Tensor
Kind = Literal["qwen3", "gpt_oss"]

COMMON: dict[str, Any] = {
    "vocab_size": 16384, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 1024, "tie_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": COMMON | {
        "num_kv_heads": 4, "intermediate_size": 1536, "windows": (None,) * 4, "has_qk_norm": True,
    },
    "gpt_oss": COMMON | {
        "num_kv_heads": 2, "intermediate_size": 512, "windows": (128, None) * 2, "has_sinks": True,
        "has_attention_bias": True, "num_experts": 8, "num_active_experts": 2, "swiglu_limit": 7.0,
        "has_router_bias": True, "has_expert_bias": True,
    },
}  # fmt: skip
DTYPES = ("float32", "bfloat16")

DECODE_PROMPT, DECODE_STEPS = 284, 33  # the mean context of the steps is 300
PREFILL_TOKENS = 512
TRAIN_ROWS, TRAIN_TOKENS = 8, 300
STEP_TASKS, STEP_GROUP, STEP_PROMPT, STEP_REPLY = 4, 4, 172, 128

FIGURES: dict[str, tuple[str, dict[str, float]]] = {
    "decode-1": ("decode step, 1 request", {"float32": 1.7, "bfloat16": 1.4}),
    "decode-8": ("decode step, 8 requests", {"float32": 1.3, "bfloat16": 1.2}),
    "decode-64": ("decode step, 64 requests", {"float32": 1.15, "bfloat16": 1.1}),
    "prefill": ("prefill of 512 tokens", dict.fromkeys(DTYPES, 1.1)),
    "train": ("forward and backward, 8 rows of about 300", dict.fromkeys(DTYPES, 1.1)),
    "step-decoupled": ("RL step against decoupled PPO", dict.fromkeys(DTYPES, 1.0)),
    "step-bypass": ("RL step against bypass", dict.fromkeys(DTYPES, 1.15)),
}
"""Name -> (description, largest allowed multiple of the plain side's time)."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PAGED = ("decode-1", "decode-8", "decode-64", "prefill")
VARIANTS = ("resident", "pages", "resident+flash", "pages+flash")
"""Variants of the plain engine: place of the keys, and attention."""


# -- one side --------------------------------------------------------------------------------------


class FlashAttention(Ops):
    """Stock ops with torch's flash kernel over the paged cache too."""

    def _paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PagedContext
    ) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
            q, k, v, mask = (x[:, None] for x in (q, k, v, mask.to(q.dtype)))
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, attn_mask=mask, scale=spec.scale
            )
            if sinks is not None:  # adds a term to the softmax's sum, without a value
                share = torch.sigmoid(lse[..., None] - sinks[:, None])
                out = out * share.to(out.dtype)
            return out[:, 0]

        return paged_attention(
            q,
            k,
            v,
            spec=spec,
            context=context,
            attend=attend,
            key_block=KEY_QUANTUM,
            key_quantum=KEY_QUANTUM,
        )


class Side:
    """The model of a measuring process, one at a time, with its engines and its trainer."""

    def __init__(self, backends: dict[str, Ops], clock: Callable[[], float]) -> None:
        self._backends, self._clock = backends, clock
        self._made: tuple[str, str] | None = None
        self._num_requests = 0

    def measure(self, kind: str, dtype: str, figure: str, variant: str) -> dict[str, Any]:
        """Seconds of one round, and what else is to be told."""
        attention = variant.partition("+")[2]
        if self._made != (kind, dtype):
            self._make(kind, dtype)
        self._model.ops = self._backends[attention]
        if figure == "train":
            return {"seconds": self._train(), "tokens": sum(len(s) for s in self._rows)}
        config = EmbeddedConfig(resident_rows=variant.startswith("resident"))
        if variant not in self._engines:
            self._engines[variant] = EmbeddedEngine(self._model, config)
        engine = self._engines[variant]
        if figure == "prefill":
            prompts = self._rng.integers(0, 16384, (3, PREFILL_TOKENS))
            steps = [s for p in prompts for s in self._run(engine, p[None], 1)[0]]
            found = [seconds for seconds, sampled, fed in steps if fed == PREFILL_TOKENS]
            return {"seconds": min(found), "tokens": PREFILL_TOKENS}
        if figure.startswith("decode"):
            batch = int(figure.partition("-")[2])
            steps, _ = self._run(engine, self._prompts[:batch], DECODE_STEPS)
            found = [seconds for seconds, sampled, fed in steps if sampled == batch and not fed]
            return {"seconds": min(found), "tokens": batch}
        return self._step(engine, Correction.PRESETS[figure.partition("-")[2]]())

    def _make(self, kind: str, dtype: str) -> None:
        config = ModelConfig(architecture=kind, **SHAPES[kind])  # pyright: ignore[reportArgumentType]
        model = Decoder(config)
        model.init_weights(std=0.05, seed=0)
        self._model = model.to(getattr(torch, dtype))
        settings = TrainerConfig(lr=1e-6)
        self._trainer = Trainer(self._model, settings, like=Path("."))
        self._engines: dict[str, EmbeddedEngine] = {}
        self._rng = np.random.default_rng(0)
        self._prompts = self._rng.integers(0, 16384, (64, DECODE_PROMPT))
        lengths = self._rng.integers(TRAIN_TOKENS - 50, TRAIN_TOKENS + 51, TRAIN_ROWS)
        self._rows = [
            sample_of(f"row/{i}", ids[:100], ids[100:], np.full(n - 100, -9.0))
            for i, n in enumerate(lengths)
            for ids in [self._rng.integers(0, 16384, n)]
        ]
        self._made = (kind, dtype)

    def _run(
        self, engine: EmbeddedEngine, prompts: np.ndarray, num_tokens: int
    ) -> tuple[list[tuple[float, int, int]], list[Any]]:
        """(seconds, tokens sampled, tokens prefilled) of each step, and the replies."""
        steps: list[tuple[float, int, int]] = []
        replies: list[Any] = [None] * len(prompts)
        self._num_requests += 1

        async def reply(number: int) -> None:
            request = Request(
                id=f"{self._num_requests}/{number}",
                prompt_ids=prompts[number].astype(np.int32),
                sampling=SamplingParams(max_tokens=num_tokens, temperature=1.0),
                seed=number,
            )
            replies[number] = [delta async for delta in engine.generate(request)][-1]

        async def watch() -> None:
            # The engine gives the loop a turn after every step: each step is seen by itself.
            tasks = [asyncio.create_task(reply(i)) for i in range(len(prompts))]
            before, began = counts(engine), self._clock()
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                after, ended = counts(engine), self._clock()
                if after[0] != before[0]:
                    steps.append((ended - began, after[1] - before[1], after[2] - before[2]))
                before, began = after, ended
            await asyncio.gather(*tasks)

        asyncio.run(watch())
        return steps, replies

    def _train(self) -> float:
        for row in self._rows:
            row.set("old_logprobs", row.columns["rollout_logprobs"])
        started = self._clock()
        self._trainer.forward_backward(self._rows, make_loss(PPOClip()))
        seconds = self._clock() - started
        self._trainer.optimizer.zero_gradients()
        return seconds

    def _step(self, engine: EmbeddedEngine, correction: Correction) -> dict[str, Any]:
        prompts = self._rng.integers(0, 16384, (STEP_TASKS, STEP_PROMPT)).repeat(STEP_GROUP, 0)
        started = self._clock()
        _, replies = self._run(engine, prompts, STEP_REPLY)
        sampled = self._clock() - started
        samples = [
            sample_of(f"episode/{i}", prompt, reply.token_ids, reply.logprobs)
            for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]
        metrics = self._trainer.update(samples, PPOClip(), correction)
        asyncio.run(engine.load_weights(None, version=self._trainer.version))
        return {
            "seconds": self._clock() - started,
            "sample_seconds": sampled,
            "tokens": STEP_TASKS * STEP_GROUP * STEP_REPLY,
            "unequal": metrics["mismatch/unequal_tokens"],
            "compared": metrics["mismatch/compared_tokens"],
        }


def counts(engine: EmbeddedEngine) -> tuple[int, int, int]:
    return engine.stats["steps"], engine.stats["sampled_tokens"], engine.stats["prefilled_tokens"]


def sample_of(name: str, prompt: np.ndarray, reply: np.ndarray, logprobs: np.ndarray) -> Sample:
    """A row with an advantage of its own, the same on both sides."""
    mask = np.arange(len(prompt) + len(reply)) >= len(prompt)
    column = np.full(len(mask), np.nan, np.float32)
    column[mask] = logprobs
    advantage = np.float32(np.sin(len(name) + int(name.partition("/")[2])))
    return Sample(
        id=name,
        token_ids=np.concatenate([prompt, reply]).astype(np.int32),
        loss_mask=mask,
        columns={
            "rollout_logprobs": column,
            "advantages": np.where(mask, advantage, 0).astype(np.float32),
        },
    )


def run_side(name: str, clock: str) -> None:
    """Answers jobs, a line of JSON each, until its input ends."""
    backends: dict[str, Ops] = {"": Ops(), "flash": FlashAttention()}
    if name == "ours":
        backends = {"": InvariantOps()}
    side = Side(backends, CLOCKS[clock])
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(side.measure(**json.loads(line))), flush=True)


# -- side by side ----------------------------------------------------------------------------------


class Process:
    """A side in a process of its own."""

    def __init__(self, name: str, threads: int, clock: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
        command = [
            sys.executable, __file__, "--side", name, "--threads", str(threads), "--clock", clock
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self._answer()

    def measure(self, **job: str) -> dict[str, Any]:
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened as a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{NAME}: a side ended early, exit code {self._process.wait()}.")
        return json.loads(line)


def jobs_of(figure: str, fastest: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Our function for a figure, and the plain side's functions: the fastest counts.

    fastest: the variant that decoded 64 requests fastest, or nothing if that was not measured.
    """
    variants = VARIANTS if figure in PAGED else VARIANTS[:1]
    if figure.startswith("step"):
        variants = (fastest,) if fastest else ("resident", "resident+flash")
    ours = "step-bypass" if figure.startswith("step") else figure
    return (
        {"figure": ours, "variant": "resident"},
        [{"figure": figure, "variant": variant} for variant in variants],
    )


def compare(
    ours: Process, peer: Process, kind: str, dtype: str, figures: list[str], rounds: int
) -> Iterator[dict[str, Any]]:
    """Each figure of one model. A round before the others is for warm-up and does not count; steps
    are so long that they need none."""
    fastest = ""
    for figure in figures:
        our_job, peer_jobs = jobs_of(figure, fastest)
        is_long = figure.startswith("step")
        our_rounds: list[dict[str, Any]] = []
        peer_rounds: dict[str, list[float]] = {job["variant"]: [] for job in peer_jobs}
        for turn in range(is_long, min(rounds, 2) + 1 if is_long else rounds + 1):
            found = ours.measure(kind=kind, dtype=dtype, **our_job)
            if turn:
                our_rounds.append(found)
            for job in peer_jobs:
                seconds = peer.measure(kind=kind, dtype=dtype, **job)["seconds"]
                if turn:
                    peer_rounds[job["variant"]].append(seconds)
        variant = min(peer_rounds, key=lambda name: min(peer_rounds[name]))
        if figure == "decode-64":
            fastest = variant
        best, theirs = min(r["seconds"] for r in our_rounds), min(peer_rounds[variant])
        case = {
            "figure": figure,
            "model": kind,
            "dtype": dtype,
            "seconds": best,
            "plain_seconds": theirs,
            "cost": round(best / theirs, 3),
            "limit": FIGURES[figure][1][dtype],
            "tokens_per_second": round(our_rounds[0]["tokens"] / best),
            "plain_tokens_per_second": round(our_rounds[0]["tokens"] / theirs),
            "plain": variant,
        }
        if "unequal" in our_rounds[0]:
            case["unequal_tokens"] = int(sum(r["unequal"] for r in our_rounds))
            case["compared_tokens"] = int(sum(r["compared"] for r in our_rounds))
        yield case


def parts_of(cases: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    """A row per figure and dtype: the case that costs most."""
    parts = []
    for figure, (title, _) in FIGURES.items():
        for dtype in DTYPES:
            found = [c for c in cases if (c["figure"], c["dtype"]) == (figure, dtype)]
            if not found:
                continue
            worst = max(found, key=lambda case: case["cost"])
            parts.append(
                {
                    "name": f"{NAME}/{figure}/{dtype}",
                    "ours": round(1000 * worst["seconds"], 3),
                    "peer": round(1000 * worst["plain_seconds"], 3),
                    "unit": "ms",
                    "ratio": round(worst["plain_seconds"] / worst["seconds"], 3),
                    "better": "lower",
                    "how": f"{title}; {worst['model']}, {worst['threads']} thread(s); {how}",
                }
            )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side that count")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--model", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: busy machine")
    parser.add_argument("--side", choices=["ours", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == "ours":
            ask_for_reproducible_gemm()
        torch.set_num_threads(options.threads[0])
        run_side(options.side, options.clock)
        return
    cases: list[dict[str, Any]] = []
    for threads in options.threads:
        with ExitStack() as stack:
            ours, peer = (Process(name, threads, options.clock) for name in ("ours", "plain"))
            stack.callback(ours.close)
            stack.callback(peer.close)
            for kind in options.model:
                for dtype in options.dtype:
                    for case in compare(ours, peer, kind, dtype, options.only, options.rounds):
                        cases.append(case | {"threads": threads})
                        if not options.json:
                            print(line_of(cases[-1]), flush=True)
    how = (
        f"the dearest of models and thread counts, best of {options.rounds} rounds in turn, "
        f"{options.clock} time"
    )
    parts = parts_of(cases, how)
    print(json.dumps({**min(parts, key=lambda part: part["ratio"]), "name": NAME,
                      "parts": parts, "cases": cases}))  # fmt: skip


def line_of(case: dict[str, Any]) -> str:
    text = (
        f"{case['model']:8} {case['dtype']:9} {case['threads']} thread(s) "
        f"{case['figure']:15} {1000 * case['seconds']:9.2f} ms, plain "
        f"{1000 * case['plain_seconds']:9.2f} ms ({case['plain']}), cost {case['cost']:.2f} of at "
        f"most {case['limit']:.2f}; {case['tokens_per_second']:,} tokens/s, plain "
        f"{case['plain_tokens_per_second']:,}"
    )
    if "compared_tokens" in case:
        text += f"; {case['unequal_tokens']} of {case['compared_tokens']} tokens unequal"
    return text


if __name__ == "__main__":
    main()
