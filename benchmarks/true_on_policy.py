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

    python benchmarks/true_on_policy.py [--rounds N] [--threads N ...] [--only FIGURE ...]
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from measuring import Row, Side, answer_lines, command_of, in_turn, main, models_of, row
from measuring.rows import row_to_train
from measuring.sampling import reply_to, requests_of

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
from lockstep.ops.invariant import ask_for_reproducible_gemm
from lockstep.ops.paged import PagedKernel, paged_attention
from lockstep.ops.selftest import prove
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

Tensor = torch.Tensor

SHAPES = models_of("true_on_policy")
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
            q, k, v, spec, context, PagedKernel(attend, KEY_QUANTUM, KEY_QUANTUM)
        )


class Bench:
    """The model of a measuring process, with its engines and its trainer."""

    def __init__(
        self, backends: dict[str, Ops], clock: Callable[[], float], kind: str, dtype: str
    ) -> None:
        self._clock = clock
        model = Decoder(ModelConfig.from_hf(SHAPES[kind]))
        model.init_weights(std=0.05, seed=0)
        self._model = model.to(getattr(torch, dtype))
        self._backends = backends or {"": prove(self._model).ops}
        self._trainer = Trainer(self._model, TrainerConfig(lr=1e-6), like=Path("."))
        self._engines: dict[str, EmbeddedEngine] = {}
        self._rng = np.random.default_rng(0)
        self._prompts = self._rng.integers(0, 16384, (64, DECODE_PROMPT))
        lengths = self._rng.integers(TRAIN_TOKENS - 50, TRAIN_TOKENS + 51, TRAIN_ROWS)
        self._rows = [
            sample_of(f"row/{i}", ids[:100], ids[100:], np.full(n - 100, -9.0))
            for i, n in enumerate(lengths)
            for ids in [self._rng.integers(0, 16384, n)]
        ]

    def measure(self, figure: str, variant: str) -> dict[str, Any]:
        """Seconds of one round, and the number of its tokens."""
        attention = variant.partition("+")[2]
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

    def _run(
        self, engine: EmbeddedEngine, prompts: np.ndarray, num_tokens: int
    ) -> tuple[list[tuple[float, int, int]], list[Any]]:
        """(seconds, tokens sampled, tokens prefilled) of each step, and the replies."""
        steps: list[tuple[float, int, int]] = []
        replies: list[Any] = []
        requests = requests_of(prompts, num_tokens)

        async def watch() -> None:
            # The engine gives the loop a turn after every step: each step is seen by itself.
            tasks = [asyncio.create_task(reply_to(engine, r)) for r in requests]
            before, began = counts(engine), self._clock()
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                after, ended = counts(engine), self._clock()
                if after[0] != before[0]:
                    steps.append((ended - began, after[1] - before[1], after[2] - before[2]))
                before, began = after, ended
            replies.extend([await task for task in tasks])

        asyncio.run(watch())
        return steps, replies

    def _train(self) -> float:
        for sample in self._rows:
            sample.set("old_logprobs", sample.columns["rollout_logprobs"])
        started = self._clock()
        self._trainer.forward_backward(self._rows, make_loss(PPOClip()))
        seconds = self._clock() - started
        self._trainer.optimizer.zero_gradients()
        return seconds

    def _step(self, engine: EmbeddedEngine, correction: Correction) -> dict[str, Any]:
        prompts = self._rng.integers(0, 16384, (STEP_TASKS, STEP_PROMPT)).repeat(STEP_GROUP, 0)
        started = self._clock()
        _, replies = self._run(engine, prompts, STEP_REPLY)
        samples = [
            sample_of(f"episode/{i}", prompt, reply.token_ids, reply.logprobs)
            for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]
        metrics = self._trainer.update(samples, PPOClip(), correction)
        asyncio.run(engine.load_weights(None, version=self._trainer.version))
        return {
            "seconds": self._clock() - started,
            "tokens": STEP_TASKS * STEP_GROUP * STEP_REPLY,
            "unequal": metrics["mismatch/unequal_tokens"],
            "compared": metrics["mismatch/compared_tokens"],
        }


def counts(engine: EmbeddedEngine) -> tuple[int, int, int]:
    return engine.stats["steps"], engine.stats["sampled_tokens"], engine.stats["prefilled_tokens"]


def sample_of(name: str, prompt: np.ndarray, reply: np.ndarray, logprobs: np.ndarray) -> Sample:
    """A row with an advantage of its own, the same on both sides."""
    ids = np.concatenate([prompt, reply])
    mask = np.arange(len(ids)) >= len(prompt)
    advantage = np.sin(len(name) + int(name.partition("/")[2]))
    return row_to_train(name, ids, mask, rollout_logprobs=logprobs, advantages=advantage)


def run_side(name: str, kind: str, dtype: str, threads: int, clock: str) -> None:
    """A measurement for each line on stdin."""
    backends: dict[str, Ops] = {"": Ops(), "flash": FlashAttention()}
    if name == "ours":
        ask_for_reproducible_gemm()
        backends = {}  # those of the self-test
    torch.set_num_threads(threads)
    bench = Bench(backends, CLOCKS[clock], kind, dtype)
    answer_lines(lambda job: bench.measure(*job))


# -- side by side ----------------------------------------------------------------------------------


def measure(ours: Side, plain: Side, figure: str, rounds: int, fastest: str) -> dict[str, Any]:
    """variant -> rounds of a figure; ours is "ours". The plain side is measured in each variant.

    A round before the others is for warm-up and does not count; steps are so long that they need
    none. fastest: the variant that decoded 64 requests fastest, or "" if that was not measured.
    """
    is_step = figure.startswith("step")
    variants = VARIANTS if figure in PAGED else VARIANTS[:1]
    if is_step:
        variants = (fastest,) if fastest else ("resident", "resident+flash")
        rounds = min(rounds, 2)
    our_job = ("step-bypass" if is_step else figure, "resident")
    sides = {"ours": partial(ours.ask, our_job)}
    sides |= {variant: partial(plain.ask, (figure, variant)) for variant in variants}
    found = in_turn(rounds + (not is_step), sides)
    return {name: taken[not is_step :] for name, taken in found.items()}


def figures_of(
    kind: str, dtype: str, threads: int, figures: tuple[str, ...], rounds: int, clock: str
) -> Iterator[Row]:
    """Every figure of one model."""
    fastest = ""
    with ExitStack() as stack:
        ours, plain = (
            stack.enter_context(
                Side(
                    command_of(run_side, name, kind, dtype, threads, clock),
                    environment={"OMP_NUM_THREADS": str(threads)},
                )
            )
            for name in ("ours", "plain")
        )
        for figure in figures:
            found = measure(ours, plain, figure, rounds, fastest)
            seconds = {name: min(r["seconds"] for r in taken) for name, taken in found.items()}
            our_rounds, best = found["ours"], seconds.pop("ours")
            variant = min(seconds, key=lambda name: seconds[name])
            fastest = variant if figure == "decode-64" else fastest
            title, limits = FIGURES[figure]
            speeds = [our_rounds[0]["tokens"] / taken for taken in (best, seconds[variant])]
            how = (
                f"{title}; {threads} thread(s), {clock} time, plain in its fastest variant, "
                f"{variant}; cost {best / seconds[variant]:.2f} of at most {limits[dtype]:.2f}; "
                f"{speeds[0]:,.0f} tokens/s, plain {speeds[1]:,.0f}"
            )
            if "unequal" in our_rounds[0]:
                unequal, compared = (sum(r[x] for r in our_rounds) for x in ("unequal", "compared"))
                how += f"; {unequal:.0f} of {compared:.0f} tokens unequal"
            name = f"true_on_policy/{figure}/{kind}/{dtype}"
            yield row(name, 1e3 * best, 1e3 * seconds[variant], "ms", how=how)


def compare(
    *,
    rounds: int = 3,
    threads: tuple[int, ...] = (2,),
    only: tuple[str, ...] = tuple(FIGURES),
    model: tuple[str, ...] = tuple(SHAPES),
    dtype: tuple[str, ...] = DTYPES,
    clock: str = "wall",
) -> Iterator[Row]:
    """clock: "cpu" on a busy machine."""
    os.environ.pop("MKL_CBWR", None)
    for num_threads, kind, of in product(threads, model, dtype):
        yield from figures_of(kind, of, num_threads, only, rounds, clock)


if __name__ == "__main__":
    short = {"rounds": 1, "only": ("decode-8", "train"), "model": ("qwen3",), "dtype": ("float32",)}
    main(compare, short=short)
