"""Eight adapters over one base model, sampled together against one adapter after the other.

tiny-gpt-oss, LoRA of rank 16 on every projection, float32, one thread. Each adapter answers its own
prompts of 32 tokens with 96. Together, a step of the embedded engine decodes rows of all eight; in
turn, it decodes rows of one. Both draw the same tokens, which is checked under the ops that keep
the contract. A round is the wall time of all replies; the best of several rounds counts, and the
two sides take turns.

Memory is counted for one further adapter: in training with its gradients and AdamW's moments, in
the engine as the resident memory of 64 more adapters.

    python benchmarks/adapters.py [--rounds N]
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator

from measuring import CLEAR_REFS, MIB, Row, alone, main, note, resident_bytes, row
from measuring.sampling import ops_of, requests_of, sample

import numpy as np
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.adapters import decoder_over
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape

MODEL, RANK, NUM_ADAPTERS = "tiny-gpt-oss", 16, 8
PROMPT_TOKENS, REPLY_TOKENS = 32, 96
NUM_MORE = 64
OPS = ("plain", "invariant")
HOW = (
    f"{NUM_ADAPTERS} adapters of rank {RANK} on {MODEL}, replies of {REPLY_TOKENS} tokens, "
    "float32, one thread; peer: the same engine, one adapter after the other"
)


def make_base(ops: str) -> Decoder:
    return load_checkpoint(locate_model(MODEL), ops=ops_of(ops))


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
        self.is_under_contract = ops == "invariant"
        for number in range(NUM_ADAPTERS):
            model = adapted(base, number)
            asyncio.run(self.engine.load_adapter(str(number), model, version=0))
        self.num_rounds = 0

    def round(self, num_sequences: int) -> tuple[float, float]:
        """Seconds (together, in turn)."""
        self.num_rounds += 1
        together, drawn = self._seconds("together", num_sequences)
        in_turn, again = self._seconds("in turn", num_sequences)
        if self.is_under_contract and drawn != again:
            raise SystemExit("the two sides drew other tokens: this machine breaks the contract")
        return together, in_turn

    def _seconds(self, side: str, num_sequences: int) -> tuple[float, list[list[int]]]:
        groups = []
        for adapter in range(NUM_ADAPTERS):
            rng = np.random.default_rng([self.num_rounds, adapter])
            prompts = rng.integers(0, self.vocab_size, (num_sequences, PROMPT_TOKENS))
            groups.append(requests_of(prompts, REPLY_TOKENS, adapter=str(adapter)))
        if side == "together":
            groups = [[request for group in groups for request in group]]
        asyncio.run(self.engine.load_weights(None, version=0))  # drops the cache
        began = time.perf_counter()
        replies = [reply for group in groups for reply in sample(self.engine, group)]
        return time.perf_counter() - began, [reply.token_ids.tolist() for reply in replies]


def tokens_per_second(ops: str, num_sequences: int, rounds: int) -> tuple[float, float]:
    """(together, in turn), the best of the rounds after one to warm up."""
    torch.set_num_threads(1)
    bench = Bench(ops)
    taken = [bench.round(num_sequences) for _ in range(rounds + 1)][1:]
    num_tokens = NUM_ADAPTERS * num_sequences * REPLY_TOKENS
    together, in_turn = (num_tokens / min(side) for side in zip(*taken, strict=True))
    return together, in_turn


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


def compare(
    *, rounds: int = 5, sequences: tuple[int, ...] = (2, 16), only: tuple[str, ...] = OPS
) -> Iterator[Row]:
    """only: some ops."""
    for ops in only:
        for num_sequences in sequences:
            ours, peer = alone(tokens_per_second, ops, num_sequences, rounds)
            name = f"adapters, {num_sequences} sequences each, {ops} ops"
            yield row(name, ours, peer, "tokens/s", better="higher", how=HOW)
    if CLEAR_REFS.exists():
        exact = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system
        in_training, in_engine, size = alone(mib_per_adapter, environment=exact)
        note(
            f"a further adapter of {size:.2f} MiB takes {in_training:.2f} MiB in training "
            f"and {in_engine:.2f} in the engine"
        )


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "sequences": (2,), "only": ("plain",)})
