"""Memory of one process that trains a long row, if several processes share the row (Ulysses).

Four layers of gpt-oss' kind (width 512, 8 query and 2 key heads, 8 experts, a window of 128 in
every other layer), float32, one row of 8k tokens, `Decoder.score` forward and backward without
activation checkpointing, by 1, 2 and 4 gloo processes of one thread. The peer is one process.

MiB are each process' peak above its memory before (the peak is reset by /proc/self/clear_refs),
less the gradients, which have the same size on each; the largest process counts. "Held" are the
bytes that are kept for backward, without the weights: activations, whatever the allocator does.
Weights are not sharded here. Bits are compared as well: the log-probs of every token over the
invariant ops, by 1 process and by each number.

    python benchmarks/sequence_parallel.py [--tokens T] [--sizes N ...]
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from measuring import MIB, Row, main, models_of, require_proc, row, usage

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from lockstep.models import sequence_parallel
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps, ask_for_reproducible_gemm

CONFIG = models_of("sequence_parallel")["gpt_oss"]
COMPARED_TOKENS = 512  # whose bits are compared: the invariant ops are slow on a long row


def score(model: Decoder, num_tokens: int, group: Any) -> torch.Tensor:
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, CONFIG["vocab_size"], num_tokens + 1))
    places, context = torch.arange(num_tokens), PackedContext.of([num_tokens])
    whole = model if group is None else sequence_parallel.SplitModel(model, group)
    return whole.score(ids[:-1], places, context, predictors_N=places, targets_N=ids[1:])[0]


def work(rank: int, size: int, num_tokens: int, directory: str) -> None:
    """One process: its MiB and seconds, and its log-probs over the invariant ops, into a file."""
    torch.set_num_threads(1)
    ask_for_reproducible_gemm()
    group = None
    if size > 1:
        store = dist.FileStore(f"{directory}/store-{size}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        group = dist.group.WORLD
    model = Decoder(ModelConfig.from_hf(CONFIG), ops=InvariantOps())
    model.init_weights(std=0.05, seed=0)
    with torch.no_grad():
        logprobs = score(model, COMPARED_TOKENS, group)
    model.ops = Ops()
    score(model, 256, group).sum().backward()  # loads the libraries' code
    model.zero_grad()
    if size > 1:
        dist.barrier()
    held = {weight.data_ptr(): 0 for weight in model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        held.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = score(model, num_tokens, group).sum()
        loss.backward()

    found: dict[str, Any] = usage(run)
    found["held"] = sum(held.values()) / MIB
    found["mib"] -= sum(p.numel() * 4 for p in model.parameters()) / MIB  # gradients
    torch.save(found | {"logprobs": logprobs}, f"{directory}/{size}-{rank}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(size: int, num_tokens: int, directory: str) -> list[dict[str, Any]]:
    torch.multiprocessing.start_processes(
        work, args=(size, num_tokens, directory), nprocs=size, start_method="spawn"
    )
    return [torch.load(f"{directory}/{size}-{rank}.pt") for rank in range(size)]


def compare(*, tokens: int = 8192, sizes: tuple[int, ...] = (2, 4)) -> Iterator[Row]:
    require_proc()
    with tempfile.TemporaryDirectory() as directory:
        (alone,) = measure(1, tokens, directory)
        for size in sizes:
            found = measure(size, tokens, directory)
            most = {key: max(f[key] for f in found) for key in ("mib", "seconds", "held")}
            unequal = max(int((f["logprobs"] != alone["logprobs"]).sum()) for f in found)
            held = most["held"] / alone["held"]
            seconds = f"{most['seconds']:.1f} CPU seconds each against {alone['seconds']:.1f}"
            how = f"{tokens} tokens, peak of each of {size} processes against one; {seconds}; "
            how += f"held for backward {held:.3f} of one's; {unequal} unequal log-probs"
            name, both = f"sequence_parallel, {size} processes", (most["mib"], alone["mib"])
            yield row(name, *both, "MiB", how=how, held=held)


if __name__ == "__main__":
    main(compare, short={"tokens": 2048, "sizes": (2,)})
