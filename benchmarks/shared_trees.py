"""A training pass over rows that begin alike, against the same rows without sharing.

    python benchmarks/shared_trees.py [--repeats 3] [--only group]

Two shapes of a batch, for a Qwen3 of 2 layers and width 512 in float32, on one thread:

    group     16 replies of 256 tokens to one prompt of 2,048
    session   12 turns of 96 sampled and 96 read tokens, and 4 branches of 3 turns each that leave
              it after turns 3, 6, 9 and 11: 5 rows

A pass is the forward and backward of all rows, of the sampled tokens' log-probs. The sides:

    ours        the trainer
    apart       the trainer, with another first token in each row: nothing can be shared
    verl        transformers' model over rows without padding, one after another in a micro-batch
                (verl's use_remove_padding), log-probs at all positions
    TRL         transformers' model over padded rows, log-probs of the sampled part alone (TRL's
                logits_to_keep)

Each side has the faster micro-batch of two sizes. Sides are processes of their own that take turns;
time is the median of all turns in processor seconds, memory the largest peak above the memory
before. --scale divides the tokens of a prompt, reply or turn. No GPU kernel of the peers runs here:
the sides differ in the tokens that they compute, by torch's attention on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median

from measuring import Row, alone, in_turn, main, models_of, note, require_proc, row, usage

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

HF = models_of("shared_trees")["qwen3"]
VOCAB = HF["vocab_size"]
SIDES = {
    "ours": (4096, 8192),
    "apart": (2816, 10240),
    "ours, contract": (4096, 8192),
    "apart, contract": (2816, 10240),
    "verl": (1, 2),
    "TRL": (1, 2),
}
"""Side -> sizes of its micro-batches: largest number of tokens, or of rows (peers)."""
PAIRS = (
    ("ours", "apart"),
    ("ours, contract", "apart, contract"),
    ("ours", "verl"),
    ("ours", "TRL"),
)
GOALS = {"group": 0.35, "session": 0.5}

TrainRow = tuple[np.ndarray, np.ndarray]
"""(ids [T] int32, which of them were sampled [T] bool)."""


def group(scale: int) -> list[TrainRow]:
    rng = np.random.default_rng(0)
    num_prompt, num_reply = 2048 // scale, 256 // scale
    prompt = rng.integers(1, VOCAB, num_prompt)
    mask = np.arange(num_prompt + num_reply) >= num_prompt
    replies = rng.integers(1, VOCAB, (16, num_reply))
    return [(np.r_[prompt, reply].astype(np.int32), mask) for reply in replies]


def session(scale: int) -> list[TrainRow]:
    rng, half = np.random.default_rng(0), 96 // scale

    def turns(count: int) -> np.ndarray:
        return rng.integers(1, VOCAB, 2 * half * count)

    trunk = turns(12)
    rows: list[TrainRow] = []
    for num_shared in (0, 3, 6, 9, 11):
        shared = 2 * half * num_shared
        ids = np.r_[trunk[:shared], turns(3)] if rows else trunk
        place = np.arange(len(ids))
        # As in the rows of a trajectory, a sampled token is trained in the first row that has it.
        rows.append((ids.astype(np.int32), (place // half % 2 == 1) & (place >= shared)))
    return rows


SHAPES: dict[str, Callable[[int], list[TrainRow]]] = {"group": group, "session": session}


def pass_of_ours(rows: Sequence[TrainRow], ops: Ops, budget: int) -> Callable[[], object]:
    model = Decoder(ModelConfig.from_hf(HF), ops=ops)
    model.init_weights(std=0.02, seed=0)
    config = TrainerConfig(max_tokens_per_microbatch=budget)
    trainer = Trainer(model, config, like="unused")
    samples = [
        Sample(
            id=str(number),
            token_ids=ids,
            loss_mask=mask,
            columns={"advantages": np.where(mask, 1.0, 0.0).astype(np.float32)},
        )
        for number, (ids, mask) in enumerate(rows)
    ]
    loss = make_loss(Reinforce())

    def run() -> None:
        trainer.forward_backward(samples, loss)
        trainer.optimizer.zero_gradients()

    return run


def pass_of_peer(
    rows: Sequence[TrainRow], num_rows: int, *, is_padded: bool
) -> Callable[[], object]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**HF, attn_implementation="sdpa"))

    def of_padded(chosen: Sequence[TrainRow]) -> torch.Tensor:
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
        mask = torch.zeros(len(chosen), longest, dtype=torch.bool)
        for at, (of_row, is_sampled) in enumerate(chosen):
            ids[at, : len(of_row)] = torch.from_numpy(of_row)
            mask[at, : len(of_row)] = torch.from_numpy(is_sampled)
        is_real = None if len({len(row) for row, _ in chosen}) == 1 else (ids > 0).long()
        first = int(mask.any(0).nonzero()[0])
        logits = model(ids, attention_mask=is_real, logits_to_keep=longest - first + 1).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]
        return logprobs[mask[:, first:]]

    def of_packed(chosen: Sequence[TrainRow]) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([row for row, _ in chosen])).long()[None]
        places = torch.cat([torch.arange(len(row)) for row, _ in chosen])[None]
        mask = torch.from_numpy(np.concatenate([is_sampled for _, is_sampled in chosen]))
        logits = model(ids, position_ids=places).logits[0]
        logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return logprobs[mask[1:]]

    def run() -> None:
        for at in range(0, len(rows), num_rows):
            score = of_padded if is_padded else of_packed
            (-score(rows[at : at + num_rows]).sum()).backward()
        model.zero_grad()

    return run


def measure(side: str, shape: str, scale: int, size: int) -> dict[str, float]:
    """Times one pass after another to warm up. Runs in a process of its own."""
    torch.set_num_threads(1)
    rows = SHAPES[shape](scale)
    if side.startswith("apart"):
        rows = [(np.r_[np.int32(n), ids[1:]], mask) for n, (ids, mask) in enumerate(rows, start=1)]
    if side in ("verl", "TRL"):
        run = pass_of_peer(rows, size, is_padded=side == "TRL")
    else:
        run = pass_of_ours(rows, InvariantOps() if "contract" in side else Ops(), size)
    run()
    return usage(run)


def figures_of(
    shape: str, repeats: int, scale: int, sides: Sequence[str]
) -> dict[str, list[float]]:
    """side -> its median seconds and its largest peak, with its faster micro-batch."""
    tried = {
        f"{side}: {size}": partial(alone, measure, side, shape, scale, size)
        for side in sides
        for size in SIDES[side]
    }
    found: dict[str, list[float]] = {}
    for name, runs in in_turn(repeats, tried).items():
        seconds, mib = median(run["seconds"] for run in runs), max(run["mib"] for run in runs)
        note(f"  {shape}, {name} in a micro-batch: {seconds:7.2f} s {mib:7.0f} MiB")
        side = name.partition(":")[0]
        found[side] = min(found.get(side, [seconds, mib]), [seconds, mib])
    return found


def compare(
    *,
    repeats: int = 3,
    only: tuple[str, ...] = tuple(SHAPES),
    scale: int = 1,
    sides: tuple[str, ...] = tuple(SIDES),
) -> Iterator[Row]:
    require_proc()
    for shape in only:
        rows = SHAPES[shape](scale)
        note(f"{shape}: {len(rows)} rows, {sum(len(ids) for ids, _ in rows)} tokens")
        found = figures_of(shape, repeats, scale, sides)
        for (side, other), (at, unit) in product(PAIRS, enumerate(("CPU s", "MiB"))):
            if side in found and other in found:
                yield row(f"shared-trees: {shape}, {side} against {other}", found[side][at],
                          found[other][at], unit, how="forward and backward, hidden 512, one "
                          f"thread; of the time, {GOALS[shape]} is the goal")  # fmt: skip


if __name__ == "__main__":
    short = {"repeats": 1, "only": ("group",), "scale": 8, "sides": ("ours", "apart", "verl")}
    main(compare, short=short)
