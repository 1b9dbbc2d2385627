"""A training pass over rows that begin alike, against the same rows without sharing.

    python benchmarks/shared_trees.py [--repeats 3] [--only group]

Three shapes of a batch, for a Qwen3 of 2 layers and width 512 in float32, on one thread:

    group     16 replies of 256 tokens to one prompt of 2,048
    session   12 turns of 96 sampled and 96 read tokens, and 4 branches of 3 turns each that leave
              it after turns 3, 6, 9 and 11: 5 rows
    tau2      12 calls of a customer service agent. The first prompt is 4,000 tokens of instructions
              and tools; later prompts add 80 tokens after the customer spoke, or 200 after a tool
              answered, the kept part of the reply before included. A reply has 230 tokens. Its
              thinking is missing from the next prompt, so each call is a row that branches off:
              59,640 tokens, 8,240 distinct

The model for tau2 is a published session of tau2-bench (its leaderboard: airline, Claude Sonnet
4.5, task 12). That session has ten calls. In its model's tokens, prompts grow from 5,718 to 9,035
and replies have 151 to 672. Here a token counts 0.7, tools answer more briefly, and there are two
calls more. AReaL-DTA (arXiv 2602.00482) trains such trees.

A pass is the forward and backward of all rows, of the sampled tokens' log-probs. The sides:

    ours        the trainer
    apart       the trainer, with another first token in each row: nothing can be shared
    verl        transformers' model over rows without padding, one after another in a micro-batch
                (verl's use_remove_padding), log-probs at all positions
    TRL         transformers' model over padded rows, log-probs of the sampled part alone (TRL's
                logits_to_keep)

A micro-batch holds the tokens of 1 or 2 longest rows (ours: 2 or 4). Each side has the faster of
both sizes, in tau2 the smaller one. The multiplications of a pass are counted too. Sides are
processes of their own that take turns; time is the median of all turns in processor seconds,
memory the largest peak above the memory before. --scale divides the tokens of a prompt, reply or
turn. No GPU kernel of the peers runs here: the sides differ in the tokens that they compute, by
torch's attention on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median

from measuring import Row, alone, in_turn, main, models_of, note, require_proc, row, usage
from measuring.rows import row_to_train

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps
from lockstep.training.config import TrainerConfig
from lockstep.training.forest import share_beginnings
from lockstep.training.trainer import Trainer

HF = models_of("shared_trees")["qwen3"]
VOCAB = HF["vocab_size"]
SIDES = ("ours", "apart", "ours, contract", "apart, contract", "verl", "TRL")

TrainRow = tuple[np.ndarray, np.ndarray]
"""(ids [T] int32, which of them were sampled [T] bool)."""


def branch(
    rng: np.random.Generator, trunk: np.ndarray, num_shared: int, num_own: int, *, half: int = 0
) -> TrainRow:
    """A row that leaves the trunk. Its own tokens were sampled; with `half`, every other half turn.

    As in the rows of a trajectory, a sampled token is trained in the first row that has it.
    """
    ids = np.r_[trunk[:num_shared], rng.integers(1, VOCAB, num_own)].astype(np.int32)
    place = np.arange(len(ids))
    return ids, (place >= num_shared) & (place // half % 2 == 1 if half else True)


def group(scale: int) -> list[TrainRow]:
    rng, size = np.random.default_rng(0), 2048 // scale
    prompt = rng.integers(1, VOCAB, size)
    return [branch(rng, prompt, size, 256 // scale) for _ in range(16)]


def session(scale: int) -> list[TrainRow]:
    rng, half = np.random.default_rng(0), 96 // scale
    trunk = branch(rng, np.empty(0), 0, 24 * half, half=half)
    places = (6 * half * n for n in (1, 2, 3))
    return [trunk, *(branch(rng, trunk[0], n, 6 * half, half=half) for n in (*places, 22 * half))]


def tau2(scale: int) -> list[TrainRow]:
    rng, prompts = np.random.default_rng(0), np.cumsum([4000, *[80, 200] * 5, 80]) // scale
    trunk = rng.integers(1, VOCAB, prompts[-1])
    return [branch(rng, trunk, size, 230 // scale) for size in prompts]


SHAPES = {shape.__name__: shape for shape in (group, session, tau2)}


def apart(rows: Sequence[TrainRow]) -> list[TrainRow]:
    return [(np.r_[np.int32(n), ids[1:]], mask) for n, (ids, mask) in enumerate(rows, start=1)]


def num_products(rows: Sequence[TrainRow]) -> float:
    """Multiplications that a pass needs: of the layers' weights, attention and the head."""
    inputs = [ids[: mask.nonzero()[0][-1]] for ids, mask in rows]
    num_keys, width = share_beginnings(inputs)[2] + 1, HF["hidden_size"]
    heads = HF["num_attention_heads"] * HF["head_dim"]
    all_heads = 2 * heads + 2 * HF["num_key_value_heads"] * HF["head_dim"]
    of_layers = 3 * width * (all_heads + 3 * HF["intermediate_size"]) * len(num_keys)
    of_head = 3 * width * VOCAB * sum(mask.sum() for _, mask in rows)
    return HF["num_hidden_layers"] * (of_layers + 7 * heads * num_keys.sum()) + of_head


def pass_of_ours(rows: Sequence[TrainRow], ops: Ops, num_rows: int) -> Callable[[], object]:
    model = Decoder(ModelConfig.from_hf(HF), ops=ops)
    model.init_weights(std=0.02, seed=0)
    budget = num_rows * max(len(ids) for ids, _ in rows)
    trainer = Trainer(model, TrainerConfig(max_tokens_per_microbatch=budget), like="unused")
    samples = [
        row_to_train(str(number), ids, mask, advantages=1.0)
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
        rows = apart(rows)
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
        for size in ((2, 4) if "ours" in side else (1, 2))[: 1 if shape == "tau2" else 2]
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
    sides: tuple[str, ...] = SIDES,
) -> Iterator[Row]:
    require_proc()
    for shape in only:
        rows = SHAPES[shape](scale)
        note(f"{shape}: {len(rows)} rows, {sum(len(ids) for ids, _ in rows)} tokens")
        counted = num_products(rows) / num_products(apart(rows))
        found = figures_of(shape, repeats, scale, sides)
        for other, (at, unit) in product(found, enumerate(("CPU s", "MiB"))):
            side = other.replace("apart", "ours") if "apart" in other else "ours"
            if not other.startswith("ours") and side in found:
                yield row(f"shared-trees: {shape}, {side} against {other}", found[side][at],
                          found[other][at], unit, how="forward and backward, hidden 512, one "
                          f"thread; multiplications are {counted:.3f} of those apart")  # fmt: skip


if __name__ == "__main__":
    short = {"repeats": 1, "only": ("group",), "scale": 8, "sides": ("ours", "apart", "verl")}
    main(compare, short=short)
