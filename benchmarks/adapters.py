"""Eight adapters over one base model, sampled together against one adapter after the other.

tiny-gpt-oss, LoRA of rank 16 on every projection, float32, one thread. Each adapter answers its own
prompts of 32 tokens with 96. Together, a step of the embedded engine decodes rows of all eight; in
turn, it decodes rows of one. Both draw the same tokens, which is checked under the ops that keep
the contract. A round is the wall time of all replies; the best of several rounds counts, and the
two sides take turns.

Memory is counted for one further adapter: in training with its gradients and AdamW's moments, in
the engine as the resident memory of 64 more adapters.

    python benchmarks/adapters.py [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"

import numpy as np
import torch
from measuring import MIB, can_measure, resident_bytes

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.adapters import decoder_over
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps, ask_for_reproducible_gemm
from lockstep.types import Request, SamplingParams

NAME = "adapters"
MODEL, RANK, NUM_ADAPTERS = "tiny-gpt-oss", 16, 8
PROMPT_TOKENS, REPLY_TOKENS = 32, 96
SEQUENCES = (2, 16)
NUM_MORE = 64
OPS = ("plain", "invariant")
HOW = (
    f"{NUM_ADAPTERS} adapters of rank {RANK} on {MODEL}, replies of {REPLY_TOKENS} tokens, "
    "float32, one thread; peer: the same engine, one adapter after the other"
)


def make_base(ops: str) -> Decoder:
    if ops == "invariant":
        ask_for_reproducible_gemm()
    return load_checkpoint(locate_model(MODEL), ops=InvariantOps() if ops == "invariant" else Ops())


def adapted(base: Decoder, seed: int) -> Decoder:
    model = decoder_over(base)
    add_adapter(model, lora_shape(LoraConfig(rank=RANK), base.config), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.05)
    return model


class Bench:
    """One engine with all adapters."""

    def __init__(self, ops: str) -> None:
        base = make_base(ops)
        self.vocab_size = base.config.vocab_size
        self.engine = EmbeddedEngine(base, EmbeddedConfig(max_num_sequences=256))
        for number in range(NUM_ADAPTERS):
            model = adapted(base, number)
            asyncio.run(self.engine.load_adapter(str(number), model, version=0))
        self.num_rounds = 0

    def round(self, num_sequences: int) -> tuple[float, float]:
        """Seconds (together, in turn)."""
        self.num_rounds += 1
        groups = [self._requests(n, num_sequences) for n in range(NUM_ADAPTERS)]
        together, drawn = self._seconds([[r for group in groups for r in group]], "together")
        in_turn, again = self._seconds(groups, "in turn")
        if isinstance(self.engine._model.ops, InvariantOps) and drawn != again:
            raise SystemExit("the two sides drew other tokens: this machine breaks the contract")
        return together, in_turn

    def _requests(self, adapter: int, num_sequences: int) -> list[Request]:
        rng = np.random.default_rng([self.num_rounds, adapter])
        return [
            Request(
                id=f"{self.num_rounds}/{adapter}/{i}",
                prompt_ids=rng.integers(0, self.vocab_size, PROMPT_TOKENS).astype(np.int32),
                sampling=SamplingParams(max_tokens=REPLY_TOKENS),
                seed=i,
                adapter=str(adapter),
            )
            for i in range(num_sequences)
        ]

    def _seconds(self, groups: list[list[Request]], side: str) -> tuple[float, list[list[int]]]:
        async def reply(request: Request) -> list[int]:
            asked = Request(**{**vars_of(request), "id": f"{request.id}/{side}"})
            return [int(i) async for delta in self.engine.generate(asked) for i in delta.token_ids]

        async def run() -> list[list[int]]:
            return [r for group in groups for r in await asyncio.gather(*map(reply, group))]

        asyncio.run(self.engine.load_weights(None, version=0))  # drops the cache
        began = time.perf_counter()
        found = asyncio.run(run())
        return time.perf_counter() - began, found


def vars_of(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in type(request).__slots__}


def mib_per_adapter() -> tuple[float, float, float]:
    """(in training, in the engine, of the adapter's tensors alone)."""
    base = make_base("plain")
    engine = EmbeddedEngine(base, EmbeddedConfig())

    def train(number: int) -> tuple[Decoder, torch.optim.Optimizer]:
        model = adapted(base, number)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        return model, optimizer

    kept = [train(number) for number in range(4)]
    size = sum(p.numel() * 4 for p in kept[0][0].parameters() if p.requires_grad) / MIB
    asyncio.run(engine.load_adapter("first", kept[0][0], version=0))
    held = resident()
    kept += [train(number) for number in range(NUM_MORE)]
    in_training = (resident() - held) / MIB / NUM_MORE
    held = resident()
    for number, (model, _) in enumerate(kept[:NUM_MORE]):
        asyncio.run(engine.load_adapter(str(number), model, version=0))
    return in_training, (resident() - held) / MIB / NUM_MORE, size


def resident() -> int:
    gc.collect()
    return resident_bytes("VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: list[dict[str, Any]] = []
    for ops in OPS:
        bench = Bench(ops)
        for num_sequences in SEQUENCES:
            rounds = [bench.round(num_sequences) for _ in range(options.rounds + 1)][1:]
            num_tokens = NUM_ADAPTERS * num_sequences * REPLY_TOKENS
            ours, peer = (num_tokens / min(side) for side in zip(*rounds, strict=True))
            parts.append(
                {
                    "name": f"{NAME}, {num_sequences} sequences each, {ops} ops",
                    "ours": round(ours), "peer": round(peer), "unit": "tokens/s",
                    "ratio": round(ours / peer, 2), "better": "higher", "how": HOW,
                }
            )  # fmt: skip
            print(
                f"{ops} ops, {num_sequences} sequences each: {ours:.0f} tokens/s together, "
                f"{peer:.0f} in turn: {ours / peer:.2f}x",
                file=sys.stderr,
            )
    if can_measure():
        in_training, in_engine, size = mib_per_adapter()
        print(
            f"a further adapter of {size:.2f} MiB takes {in_training:.2f} MiB in training "
            f"and {in_engine:.2f} in the engine",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps({**parts[0], "parts": parts}))


if __name__ == "__main__":
    main()
