"""The gated delta rule against transformers' torch forms, side by side in one process.

    python benchmarks/linear_attention.py

Training: forward and backward of one row of 16,384 tokens, 4 value heads of 128 (a model 512 wide),
against `torch_chunk_gated_delta_rule`, in CPU seconds and in peak memory (each in a process of its
own). Decode: a step of 1, 8 and 64 sequences, the mean over the 64 places of a chunk, against
`torch_recurrent_gated_delta_rule`, both with a state that stays where it is. In all of them ours
are the invariant ops of the contract. Cost of training grows with the tokens, of a decode step with
the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from measuring import Row, alone, in_turn, main, peak_mib, row, seconds_of

import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as peer

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
        out, _ = peer.torch_chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True)
    out.sum().backward()


def peak_of(is_ours: bool, num_tokens: int) -> float:
    before = peak_mib()
    train(is_ours, num_tokens)
    return peak_mib() - before


def decode_seconds(is_ours: bool, batch: int) -> float:
    """CPU seconds of a step, the mean over a chunk."""
    tokens = [inputs(batch) for _ in range(CHUNK)]
    if not is_ours:
        state = torch.zeros(batch, H, K, V)

        def run() -> None:
            nonlocal state
            for token in tokens:
                _, state = peer.torch_recurrent_gated_delta_rule(
                    *(x[:, None] for x in token),
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )

        with torch.inference_mode():
            return seconds_of(run) / CHUNK
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
        return seconds_of(run_ours) / CHUNK


def compare(*, tokens: int = 16384, rounds: int = 3) -> Iterator[Row]:
    how = "against transformers"
    trained = f"linear attention, forward and backward of {tokens:,} tokens"
    sides = {str(side): partial(seconds_of, partial(train, side, tokens)) for side in (True, False)}
    yield row(trained, *map(median, in_turn(rounds, sides).values()), "CPU s", how=how)
    peaks = [alone(peak_of, is_ours, tokens) for is_ours in (True, False)]
    yield row(f"{trained}, peak memory", *peaks, "MiB", how=how)
    for batch in BATCHES:
        sides = {str(side): partial(decode_seconds, side, batch) for side in (True, False)}
        ours, theirs = (1e3 * median(taken) for taken in in_turn(rounds, sides).values())
        yield row(f"linear attention, decode of {batch} sequences", ours, theirs, "ms", how=how)


if __name__ == "__main__":
    main(compare, short={"tokens": 4096, "rounds": 1})
