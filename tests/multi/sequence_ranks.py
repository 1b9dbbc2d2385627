"""What each rank of the sequence-parallel tests computes, and the same on one process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lockstep.models import sequence_parallel
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.moe import Routing
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext, Support
from lockstep.ops.invariant import InvariantOps
from lockstep.ops.split import SplitContext
from lockstep.training.forest import share_beginnings
from lockstep.types import Ragged

WORLD = 4
SIZES = (2, 4)

_CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())

BATCHES = {
    "packed": (5, 40, 41, 12, 23),
    "alike": (30, 30, 30, 26),  # rows that begin alike
    "one row": (67,),
    "tiny": (3,),  # fewer tokens than four ranks have
}
_WITH_KEYS = ("qwen3", "gpt_oss")
CASES = [
    *product(_WITH_KEYS, (1, 2, 8), ("packed",), ("float64",)),
    *product(_WITH_KEYS, (2,), ("alike", "one row", "tiny"), ("float64",)),
    *product(_WITH_KEYS, (1, 2, 8), ("packed", "alike", "tiny"), ("invariant",)),
    *product(("deepseek_v3",), (1,), ("packed", "tiny"), ("float64", "invariant")),
    *product(("olmo3", "gemma3_text"), (2,), ("packed",), ("float64", "invariant")),
    ("glm4_moe", 2, "packed", "invariant"),  # its router is float32 in a model of any dtype
    ("gpt_oss", 2, "packed", "replay"),
    ("qwen3", 2, "packed", "support"),
]
"""(architecture, key heads, batch, numerics and what else is handed over)."""


def make_model(kind, num_kv_heads, dtype):
    source = {**_CONFIGS["common"], **_CONFIGS["kinds"][kind], "num_key_value_heads": num_kv_heads}
    model = Decoder(ModelConfig.from_hf(source))
    model.init_weights(std=0.3, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm", "bias", "sinks")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def make_batch(name, what):
    """Ids, positions and context of rows, what is trained of them, and what else `score` takes."""
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 97, n).astype(np.int32) for n in BATCHES[name]]
    if name == "alike":
        for row in rows[1:]:
            row[:20] = rows[0][:20]
    index, ids, positions = share_beginnings(rows)
    predictors = np.concatenate([at[len(at) // 3 :] for at in index])
    num_tokens, num_trained = len(ids), len(predictors)
    batch = {
        "ids_T": torch.from_numpy(ids).long(),
        "positions_T": torch.from_numpy(positions),
        "context": PackedContext.of_rows(index),
        "predictors_N": torch.from_numpy(predictors),
        "targets_N": torch.from_numpy(rng.integers(0, 97, num_trained)),
        "temperature": 0.9,
    }
    if what == "replay":
        routes = rng.permuted(np.tile(np.arange(4), (num_tokens, 2, 1)), axis=-1)[..., :2]
        known = torch.from_numpy(rng.random(num_tokens) < 0.8)
        batch["routing"] = Routing(replay_TLA=torch.from_numpy(routes.copy()), is_known_T=known)
    if what == "support":
        kept = [
            np.unique([*rng.integers(0, 97, 5), target]) if i % 3 else []
            for i, target in enumerate(batch["targets_N"].tolist())
        ]
        batch["support"] = Support.of(Ragged.of(kept))
    return batch


def run(case, group=None):
    """Log-probs, entropy, logits and whole gradients of one case; over a group, in pieces."""
    kind, num_kv_heads, name, what = case
    is_invariant = what == "invariant"
    model = make_model(kind, num_kv_heads, torch.float32 if is_invariant else torch.float64)
    model.ops = InvariantOps() if is_invariant else Ops()
    batch = make_batch(name, what)
    score = model.score
    if group is not None:
        score = sequence_parallel.SplitModel(model, group).score
    logprobs, entropy = score(**batch)
    generator = torch.Generator().manual_seed(3)
    slopes = torch.randn(2, len(logprobs), generator=generator)
    (slopes * torch.stack([logprobs, entropy])).sum().backward()
    found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    found["gradients"] = take_gradients(model, group)
    if (routing := batch.get("routing")) is not None:
        found["chosen"] = routing.stacked()
        found["differing"] = torch.stack(list(routing.differing.values()))
    # The head computes in float32 whatever the model does: float64 ends at the logits.
    ids, positions, context = batch["ids_T"], batch["positions_T"], batch["context"]
    slopes_TV = torch.randn(len(ids), 97, generator=generator, dtype=torch.float64)
    if group is None:
        logits = found["logits"] = model.logits(model(ids, positions, context))
        (slopes_TV * logits).sum().backward()
    else:
        split = SplitContext.of(context, len(ids), group)
        logits = model.logits(model(split.take(ids), split.take(positions), split))
        counts = torch.arange(split.start, split.stop) < len(ids)
        (counts[:, None] * split.take(slopes_TV) * logits).sum().backward()
        found["logits"] = split.gather(logits.detach())
    found["logits"] = found["logits"].detach()
    return found | {"gradients_of_logits": take_gradients(model, group)}


def take_gradients(model, group):
    """name -> whole gradient, which the model then has no more."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
    return gradients


def work(rank, directory):
    """Everything that one rank does in all tests."""
    groups = {
        size: [dist.new_group(list(range(at, at + size))) for at in range(0, WORLD, size)]
        for size in SIZES
    }
    return {(size, case): run(case, groups[size][rank // size]) for size in SIZES for case in CASES}
