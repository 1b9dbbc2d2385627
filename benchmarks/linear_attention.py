"""The gated delta rule against transformers' torch forms, side by side in one process.

    OMP_NUM_THREADS=1 python benchmarks/linear_attention.py

Training: forward and backward of one row of 16,384 tokens, 4 value heads of 128 (a model 512 wide),
against `torch_chunk_gated_delta_rule`, in CPU seconds and in peak memory (each in a process of its
own). Decode: a step of 1, 8 and 64 sequences, the mean over the 64 places of a chunk, against
`torch_recurrent_gated_delta_rule`, both with a state that stays where it is. In all of them ours
are the invariant ops of the contract. Cost of training grows with the tokens, of a decode step with
the sequences.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from measuring import peak_mib, row_of, show
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule as their_chunks,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_recurrent_gated_delta_rule as their_step,
)

from lockstep.ops.chunks import States, StateStep
from lockstep.ops.context import PackedContext, PagedContext
from lockstep.ops.contract import CHUNK
from lockstep.ops.invariant import InvariantOps

G, H, K, V = 2, 4, 128, 128
BATCHES = (1, 8, 64)


def inputs(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*sizes, *shape, generator=generator)

    return [draw(G, K), draw(G, K), draw(H, V), -draw(H).abs() * 0.1, draw(H).sigmoid()]


def train(is_ours: bool, num_tokens: int) -> None:
    parts = [x.requires_grad_() for x in inputs(num_tokens)]
    if is_ours:
        out = InvariantOps().delta_rule(*parts, 0, PackedContext.of([num_tokens]))
    else:
        batch = [x[None] for x in parts]
        out, _ = their_chunks(*batch, use_qk_l2norm_in_kernel=True)
    out.sum().backward()


def cpu_seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def decode_seconds(is_ours: bool, batch: int) -> float:
    """CPU seconds of a step, the mean over a chunk."""
    tokens = [inputs(batch) for _ in range(CHUNK)]
    if not is_ours:
        state = torch.zeros(batch, H, K, V)

        def run() -> None:
            nonlocal state
            for token in tokens:
                parts = [x[:, None] for x in token]
                _, state = their_step(
                    *parts,
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )

        with torch.inference_mode():
            return cpu_seconds(run) / CHUNK
    ops, empty = InvariantOps(), torch.empty(0)
    tail = (1, 1)
    states = States.zeros(1, batch, heads=(G, H), widths=(K, V), tail=tail, dtype=torch.float32)
    slots = np.random.default_rng(0).permutation(batch)
    steps = [
        StateStep.of(states, slots, at := np.full(batch, place), at + 1, num_rows=batch)
        for place in range(CHUNK)
    ]
    for step in steps:  # once per step of the engine, for all layers
        step.places((G, H))

    def run_ours() -> None:
        for token, step in zip(tokens, steps, strict=True):
            ops.delta_rule(*token, 0, PagedContext(empty, empty, empty, states=step))

    with torch.inference_mode():
        return cpu_seconds(run_ours) / CHUNK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="stdout has the JSON line alone anyway")
    args = parser.parse_args()
    parts: list[dict[str, Any]] = []
    if args.memory:
        before = peak_mib()
        train(args.memory == "ours", args.tokens)
        print(peak_mib() - before)
        return
    rounds = range(args.rounds)
    taken = [[cpu_seconds(lambda side=side: train(side, args.tokens)) for side in (True, False)]
             for _ in rounds]  # fmt: skip
    ours, theirs = (median(side) for side in zip(*taken, strict=True))
    trained = f"linear attention, forward and backward of {args.tokens:,} tokens"
    parts.append(row_of(trained, ours, theirs, "CPU s", how="against transformers"))
    command = [sys.executable, __file__, "--tokens", str(args.tokens), "--memory"]
    ours, theirs = (
        float(subprocess.run([*command, side], check=True, capture_output=True, text=True).stdout)
        for side in ("ours", "theirs")
    )
    parts.append(row_of(f"{trained}, peak memory", ours, theirs, "MiB", how="against transformers"))
    for batch in BATCHES:
        taken = [[decode_seconds(side, batch) for side in (True, False)] for _ in rounds]
        ours, theirs = (1e3 * median(side) for side in zip(*taken, strict=True))
        decoded = f"linear attention, decode of {batch} sequences"
        parts.append(row_of(decoded, ours, theirs, "ms", how="against transformers"))
    show("linear_attention", parts)


if __name__ == "__main__":
    main()
