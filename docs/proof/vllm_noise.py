"""How far vLLM's log-probs are from the trainer's and from its own: docs/proof/vllm_noise.json.

Random models of some ten million parameters with a sharpened head, sampled by vLLM in this process
at temperature 1. Parity: 64 replies of 128 tokens against the trainer's forward, in the same dtype.
Decode noise: the same seeds again in batches of 1 and 2; tokens are compared as long as the replies
are the same. Rescoring: 8 of the rows scored in 8 companies each; bias is what was decoded minus
the mean of that.

    .venv-vllm/bin/python docs/proof/vllm_noise.py [qwen3 qwen3_moe gpt_oss]
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import VllmConfig
from lockstep.engines.registry import make_engine
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.ops.context import PackedContext
from lockstep.types import Request, SamplingParams

OUT = Path(__file__).with_suffix(".json")
NUM_REPLIES, NEW_TOKENS, PROMPT_TOKENS = 64, 128, 32
NUM_LOOKED_AT, NUM_SCORES = 8, 8

CONFIGS = json.loads(OUT.with_name("vllm_noise_models.json").read_text())
VOCAB_SIZE = 4096


def make_checkpoint(kind: str, directory: Path) -> Path:
    seed = directory / "seed"
    seed.mkdir()
    (seed / "config.json").write_text(json.dumps(CONFIGS[kind]))
    model = Decoder(ModelConfig.from_directory(seed))
    model.init_weights(std=0.08, seed=0)
    with torch.no_grad():
        model.head.mul_(2.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    save_checkpoint(model, directory / "model", like=seed)
    return directory / "model"


def make_vllm(directory: Path, dtype: str) -> Engine:
    context = EngineContext(
        model=None, token_bytes=(), directory=directory, vocab_size=VOCAB_SIZE,
        max_tokens=PROMPT_TOKENS + NEW_TOKENS, dtype=dtype,
    )  # fmt: skip
    config = VllmConfig(
        in_process=True, kv_cache_gib=0.25, prefix_cache=False, max_num_sequences=NUM_REPLIES
    )
    return make_engine(config, context)


async def replies(
    engine: Engine, prompts: np.ndarray, batch: int, numbers: range
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, log-probs) of each numbered prompt, `batch` of them at a time."""

    async def one(number: int) -> tuple[np.ndarray, np.ndarray]:
        request = Request(
            id=f"{batch}/{number}", prompt_ids=prompts[number], seed=number,
            sampling=SamplingParams(max_tokens=NEW_TOKENS),
        )  # fmt: skip
        (delta,) = [delta async for delta in engine.generate(request)]
        return delta.token_ids, delta.logprobs

    found = []
    for at in range(0, len(numbers), batch):
        found += await asyncio.gather(*map(one, numbers[at : at + batch]))
    return found


async def scores(engine: Engine, rows: np.ndarray) -> np.ndarray:
    """[NUM_SCORES, rows, NEW_TOKENS]: each time in another order and in other companies."""
    rng = np.random.default_rng(1)
    found = np.empty((NUM_SCORES, len(rows), NEW_TOKENS))
    for turn in range(NUM_SCORES):
        order = rng.permutation(len(rows))
        company = (1, 2, 3, 4, 8)[turn % 5]
        for at in range(0, len(rows), company):
            group = order[at : at + company]
            for i, score in zip(
                group, await asyncio.gather(*(engine.score(rows[i]) for i in group)), strict=True
            ):
                found[turn, i] = score.logprobs[PROMPT_TOKENS:]
    return found


def trainer_logprobs(model: Decoder, rows: np.ndarray) -> np.ndarray:
    """[rows, NEW_TOKENS]."""
    found = []
    for row in torch.from_numpy(rows.astype(np.int64)):
        places = torch.arange(PROMPT_TOKENS, len(row))
        with torch.no_grad():
            values, _ = model.score(
                row, torch.arange(len(row)), PackedContext.of([len(row)]),
                predictors_N=places - 1, targets_N=row[places],
            )  # fmt: skip
        found.append(values.float().numpy())
    return np.stack(found).astype(np.float64)


def gap(d: np.ndarray) -> dict[str, float]:
    """Of log-prob differences, sampler minus trainer: k1, k2, k3 and the spread."""
    return {
        "tokens": d.size,
        "k1": float(d.mean()),
        "k2": float((d * d).mean() / 2),
        "k3": float((np.exp(-d) - 1 + d).mean()),
        "rms": math.sqrt(float((d * d).mean())),
        "max": float(np.abs(d).max()),
        "share_unequal": float((d != 0).mean()),
        "share_above_0.01": float((np.abs(d) > 0.01).mean()),
    }


def same_prefix(
    first: list[tuple[np.ndarray, np.ndarray]], second: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Differences of log-probs up to where two replies of the same seed part."""
    parts = []
    for (ids, logprobs), (others, theirs) in zip(first, second, strict=True):
        differs = np.flatnonzero(ids != others)
        stop = int(differs[0]) if differs.size else len(ids)
        parts.append(logprobs[:stop].astype(np.float64) - theirs[:stop])
    return np.concatenate(parts)


async def measure(engine: Engine, model: Decoder) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (NUM_REPLIES, PROMPT_TOKENS)
    prompts = rng.integers(0, VOCAB_SIZE, shape).astype(np.int32)
    everyone = range(NUM_REPLIES)
    together = await replies(engine, prompts, NUM_REPLIES, everyone)
    rows = np.concatenate([prompts, np.stack([ids for ids, _ in together])], 1)
    decoded = np.stack([logprobs for _, logprobs in together]).astype(np.float64)
    found: dict[str, Any] = {"against_trainer": gap(decoded - trainer_logprobs(model, rows))}
    looked_at = range(NUM_LOOKED_AT)
    for batch in (1, 2):
        again = await replies(engine, prompts, batch, looked_at)
        key = f"decode_batch_{batch}_against_{NUM_REPLIES}"
        found[key] = gap(same_prefix(again, together[:NUM_LOOKED_AT]))
        found[key]["same_replies"] = sum(
            np.array_equal(a, b)
            for (a, _), (b, _) in zip(again, together[:NUM_LOOKED_AT], strict=True)
        )
    scored = await scores(engine, rows[:NUM_LOOKED_AT])
    found["rescoring"] = {
        "scores": NUM_SCORES,
        "tokens": scored[0].size,
        "variance_mean": float(scored.var(0, ddof=1).mean()),
        "variance_max": float(scored.var(0, ddof=1).max()),
    }
    found["decode_minus_rescored"] = gap(decoded[:NUM_LOOKED_AT] - scored.mean(0))
    await engine.close()
    return found


def main() -> None:
    kinds = sys.argv[1:] or list(CONFIGS)
    report = json.loads(OUT.read_text()) if OUT.exists() else {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            path = make_checkpoint(kind, Path(directory))
            for dtype in ("float32", "bfloat16"):
                model = load_checkpoint(path, dtype=getattr(torch, dtype))
                found = asyncio.run(measure(make_vllm(path, dtype), model))
                report[f"{kind} {dtype}"] = found
                OUT.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
                print(kind, dtype, json.dumps(found))


if __name__ == "__main__":
    main()
