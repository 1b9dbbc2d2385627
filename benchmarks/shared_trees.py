"""A training pass over rows that begin alike, against the same rows without sharing.

    python benchmarks/shared_trees.py [--json] [--repeats 3] [--only group]

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

Each side has the fastest micro-batch of the tried sizes. Sides are processes of their own that take
turns; time is the median of all turns in processor seconds, memory the largest peak above the
memory before. No GPU kernel of the peers runs here: the sides differ in the tokens that they
compute, by torch's attention on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from measuring import can_measure, used_by

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

HF = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
VOCAB = 2048
SIDES = {
    "ours": (4096, 8192),
    "apart": (2816, 10240),
    "ours, contract": (4096, 8192),
    "apart, contract": (2816, 10240),
    "verl": (1, 2),
    "TRL": (1, 2),
}
"""Side -> sizes of its micro-batches: largest number of tokens, or of rows (peers)."""
GOALS = {"group": 0.35, "session": 0.5}

Row = tuple[np.ndarray, np.ndarray]
"""(ids [T] int32, which of them were sampled [T] bool)."""


def group() -> list[Row]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, VOCAB, 2048)
    mask = np.arange(2048 + 256) >= 2048
    return [(np.r_[prompt, rng.integers(1, VOCAB, 256)].astype(np.int32), mask) for _ in range(16)]


def session() -> list[Row]:
    rng = np.random.default_rng(0)

    def turns(count: int) -> np.ndarray:
        return rng.integers(1, VOCAB, 192 * count)

    trunk = turns(12)
    rows: list[Row] = []
    for num_shared in (0, 3, 6, 9, 11):
        ids = np.r_[trunk[: 192 * num_shared], turns(3)] if rows else trunk
        place = np.arange(len(ids))
        # As in the rows of a trajectory, a sampled token is trained in the first row that has it.
        rows.append((ids.astype(np.int32), (place // 96 % 2 == 1) & (place >= 192 * num_shared)))
    return rows


SHAPES: dict[str, Callable[[], list[Row]]] = {"group": group, "session": session}


def pass_of_ours(rows: Sequence[Row], ops: Ops, budget: int) -> Callable[[], object]:
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


def pass_of_peer(rows: Sequence[Row], num_rows: int, *, is_padded: bool) -> Callable[[], object]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**HF, attn_implementation="sdpa"))

    def of_padded(chosen: Sequence[Row]) -> torch.Tensor:
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
        mask = torch.zeros(len(chosen), longest, dtype=torch.bool)
        for at, (row, is_sampled) in enumerate(chosen):
            ids[at, : len(row)] = torch.from_numpy(row)
            mask[at, : len(row)] = torch.from_numpy(is_sampled)
        is_real = None if len({len(row) for row, _ in chosen}) == 1 else (ids > 0).long()
        first = int(mask.any(0).nonzero()[0])
        logits = model(ids, attention_mask=is_real, logits_to_keep=longest - first + 1).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]
        return logprobs[mask[:, first:]]

    def of_packed(chosen: Sequence[Row]) -> torch.Tensor:
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


def measure(side: str, shape: str, size: int) -> dict[str, float]:
    """Times one pass after another to warm up. Runs in a process of its own."""
    rows = SHAPES[shape]()
    if side.startswith("apart"):
        rows = [(np.r_[np.int32(n), ids[1:]], mask) for n, (ids, mask) in enumerate(rows, start=1)]
    if side in ("verl", "TRL"):
        run = pass_of_peer(rows, size, is_padded=side == "TRL")
    else:
        run = pass_of_ours(rows, InvariantOps() if "contract" in side else Ops(), size)
    run()
    seconds, mib = used_by(run)
    return {"seconds": seconds, "mib": mib}


def ask(side: str, shape: str, size: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--measure", side, shape, str(size)]
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(words, env={**os.environ, **quiet}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} on {shape} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(shape: str, repeats: int) -> dict[str, dict[str, float]]:
    """side -> its median seconds, largest peak and micro-batch."""
    best: dict[str, int] = {}
    for side, sizes in SIDES.items():
        tried = {size: ask(side, shape, size)["seconds"] for size in sizes}
        best[side] = min(tried, key=lambda size: tried[size])
        print(f"{shape}: {side}: {tried}", file=sys.stderr)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            found[side].append(ask(side, shape, best[side]))
    return {
        side: {
            "seconds": statistics.median(x["seconds"] for x in of_side),
            "mib": max(x["mib"] for x in of_side),
            "size": best[side],
        }
        for side, of_side in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    told = parser.parse_args()
    torch.set_num_threads(1)
    if told.measure:
        side, shape, size = told.measure
        print(json.dumps(measure(side, shape, int(size))))
        return
    if not can_measure():
        print(json.dumps({"name": "shared-trees", "skipped": "memory is measured on Linux only"}))
        return
    parts: list[dict[str, Any]] = []
    for shape in [told.only] if told.only else SHAPES:
        found = compare(shape, told.repeats)
        rows = SHAPES[shape]()
        print(f"{shape}: {len(rows)} rows, {sum(len(ids) for ids, _ in rows)} tokens")
        for side, figures in found.items():
            print(
                f"  {side:16} {figures['seconds']:7.2f} s {figures['mib']:7.0f} MiB   "
                f"micro-batch {figures['size']:.0f}"
            )
        for other, side in (
            ("apart", "ours"), ("apart, contract", "ours, contract"), ("verl", "ours"),
            ("TRL", "ours"),
        ):  # fmt: skip
            ours, theirs = found[side], found[other]
            share = ours["seconds"] / theirs["seconds"]
            memory = ours["mib"] / theirs["mib"]
            print(f"  {side} / {other}: {share:.2f} of the time, {memory:.2f} of the memory")
            parts.append(
                {
                    "name": f"shared-trees: {shape}, {side} against {other}",
                    "ours": ours["seconds"], "peer": theirs["seconds"], "unit": "s",
                    "ratio": theirs["seconds"] / ours["seconds"], "better": "lower",
                    "memory_ratio": memory, "goal": GOALS[shape],
                    "how": "processor seconds of forward and backward, hidden 512, one thread",
                }
            )  # fmt: skip
    if told.json:
        print(json.dumps({"name": "shared-trees", "parts": parts}))


if __name__ == "__main__":
    main()
