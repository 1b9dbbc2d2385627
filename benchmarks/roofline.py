"""Generation of a pretrained model against what one core can multiply and read.

The bound of a step is the larger of two times: its products at the speed of float32 or bfloat16
products of size 2,048, and its weights at the speed at which 512 MiB are read, both measured in
the same run, before and after. Keys, sampling and Python are not in the bound: their share is what
the ratio lacks. A decode step is the difference of replies of 33 tokens and of one, behind prompts
of 96 that are in the cache, by 32; prefill is 8 prompts of 512 tokens. One thread, best of the
rounds.

    python benchmarks/roofline.py [--rounds N] [--model NAME] [--only DTYPE] [--batches N ...]
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from measuring import Row, main, note, row, seconds_of
from measuring.sampling import requests_of, sample

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model

SIZE, READ_BYTES = 2048, 1 << 29
STEPS, PROMPT_TOKENS, PREFILL = 32, 96, (8, 512)


def machine(dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """(products per second, each a multiplication and an addition; bytes read per second)."""
    x, w = (torch.randn(SIZE, SIZE).to(dtype) for _ in "xw")
    memory = torch.ones(READ_BYTES // 4)
    best = [
        min(seconds_of(run, time.process_time) for _ in range(rounds + 1))
        for run in (lambda: F.linear(x, w), memory.sum)
    ]
    return SIZE**3 / best[0], READ_BYTES / best[1]


def compare(
    *,
    rounds: int = 5,
    model: str = "smollm2-135m",
    only: tuple[str, ...] = ("float32", "bfloat16"),
    batches: tuple[int, ...] = (1, 8, 64, 256),
) -> Iterator[Row]:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    for name in only:
        dtype = getattr(torch, name)
        decoder = load_checkpoint(locate_model(model)).to(dtype)
        num_sequences = max(*batches, PREFILL[0])
        tokens = num_sequences * (PROMPT_TOKENS + STEPS + 32)
        engine = EmbeddedEngine(
            decoder, EmbeddedConfig(max_num_sequences=num_sequences, kv_cache_tokens=tokens)
        )

        def seconds(ids: np.ndarray, limit: int, engine: EmbeddedEngine = engine) -> float:
            asked = requests_of(ids, limit)
            return seconds_of(lambda: sample(engine, asked), time.process_time)

        speed, found = [machine(dtype, rounds)], {}
        cases = [(f"decode, {n} requests", n, PROMPT_TOKENS, STEPS) for n in batches]
        cases.append(("prefill", *PREFILL, 0))
        seconds(rng.integers(0, 1000, (1, PROMPT_TOKENS)), 1)  # packs weights
        for _ in range(rounds):
            for what, num, length, steps in cases:
                ids = rng.integers(0, 1000, (num, length))
                taken = seconds(ids, 1)  # from now on the prompts are in the cache
                if steps:
                    taken = (seconds(ids, 1 + steps) - seconds(ids, 1)) / steps
                found[what] = min(taken, found.get(what, taken))
        speed.append(machine(dtype, rounds))
        products, read = map(max, zip(*speed, strict=True))
        note(f"{name}: {2e-9 * products:.0f} GFLOP/s, {1e-9 * read:.1f} GB/s")
        head = decoder.head.numel()
        of_layers = sum(p.numel() for p in decoder.layers.parameters())
        for what, num, length, steps in cases:
            fed = num * (1 if steps else length)
            multiplied = fed * of_layers + num * head
            bound = max(multiplied / products, (of_layers + head) * dtype.itemsize / read)
            how = f"{2e-9 * products:.0f} GFLOP/s, {1e-9 * read:.1f} GB/s, 1 thread"
            both = fed / found[what], fed / bound
            yield row(f"roofline, {name}, {what}", *both, "tokens/s", better="higher", how=how)


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "batches": (1, 64)})
