"""What a decode step and a training micro-batch ask of a GPU, found without one.

PYTHONPATH=docs/proof python tests/gpu_host/figures.py MODEL CHIP [--dtype float32] [--no-kernels]

A script: it changes torch and Triton for the whole process. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from compiled import resources
from gpu_models import config_of
from stub_gpu import DEVICE, Counts, StubGpu, stub_gpu

from lockstep.correction.config import Correction
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.batch import PendingDraws
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.adapters import decoder_over
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.objectives.config import CISPO, DPPO, GSPO, ObjectiveConfig, PPOClip, Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.context import AttentionSpec, PackedContext
from lockstep.ops.contract import Fingerprint
from lockstep.ops.cuda import CudaOps
from lockstep.training.config import TrainerConfig
from lockstep.training.correcting import TokenJudge, loss_weights
from lockstep.training.totals import Totals
from lockstep.training.trainer import Trainer
from lockstep.types import Request, Sample, SamplingParams

STEPS = 4
ROWS = 64


class Capture:
    """Stands in for CUDA graphs: a replay runs the body again, and is counted."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, body: Any) -> Any:
        self.num_captures += 1
        body()

        def replay() -> None:
            self.num_replays += 1
            body()

        return replay


def make_model(name: str, num_layers: int, dtype: torch.dtype) -> Decoder:
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return Decoder(config_of(name, num_layers=num_layers), ops=CudaOps())
    finally:
        torch.set_default_dtype(torch.float32)


def decode(
    gpu: StubGpu,
    name: str,
    num_layers: int,
    dtype: torch.dtype,
    *,
    adapters: tuple[str, ...] = ("",),
    **rules: float,
) -> dict[str, Any]:
    """Per batch (1 row, 64 equal ones, 64 ragged ones): counts of a step. adapters: of the rows, in
    turn; rules: of the draws."""
    capture = Capture()
    settings = {"max_num_sequences": ROWS, "page_size": 128}
    config = EmbeddedConfig(**settings, max_step_tokens=1 << 18, kv_cache_tokens=1 << 19)
    mark = Fingerprint(ops="cuda", dtype="bfloat16", device="cuda")
    with patch("lockstep.engines.embedded.engine.fingerprint", lambda *_: mark):
        model = make_model(name, num_layers, dtype).requires_grad_(False)
        engine = EmbeddedEngine(model, config, make_capture=lambda: capture)
    for adapter in filter(None, adapters):
        adapted = decoder_over(model)
        shape = lora_shape(LoraConfig(targets=("attention",)), model.config)
        add_adapter(adapted, shape, seed=0)
        with patch("lockstep.engines.embedded.engine.adapter_failure", lambda *_, **__: ""):
            asyncio.run(engine.load_adapter(adapter, adapted, version=1))
    reads = 0

    def wait(draws: PendingDraws) -> tuple[Any, Any]:
        nonlocal reads
        reads += 1
        num_rows = len(draws.ids_on_device)
        return np.zeros(num_rows, np.int64), np.full(num_rows, -1.0, np.float32)

    async def ask(number: int, length: int) -> None:
        sampling = SamplingParams(max_tokens=5000, **rules)
        ids = np.zeros(length, np.int32) + number  # no common beginnings
        asked = Request(
            id=f"{number}", prompt_ids=ids, sampling=sampling, seed=number,
            adapter=adapters[number % len(adapters)],
        )  # fmt: skip
        async for _ in engine.generate(asked):
            pass

    async def play(lengths: list[int], first: int) -> dict[str, Any]:
        tasks = [asyncio.create_task(ask(first + i, n)) for i, n in enumerate(lengths)]
        await asyncio.sleep(0)
        if engine._driver is not None:
            engine._driver.cancel()
        while engine._rows.num < len(lengths):
            engine.step()
        for _ in range(2):
            engine.step()
        before = capture.num_captures, capture.num_replays, reads, len(gpu.instances)
        with gpu.counting() as counts:
            for _ in range(STEPS):
                engine.step()
        after = capture.num_captures, capture.num_replays, reads, len(gpu.instances)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        changes = [b - a for a, b in zip(before, after, strict=True)]
        return {
            "captures": changes[0],
            "replays": changes[1] / STEPS,
            "syncs": changes[2] / STEPS,
            "recompilations": changes[3],
            **described(counts, STEPS),
        }

    rng = np.random.default_rng(0)
    ragged = rng.integers(20, 3500, ROWS).tolist()
    read_prompts = patch.object(EmbeddedEngine, "_score_chunks", lambda *_: [])  # a value is read
    with patch.object(PendingDraws, "wait", wait), read_prompts:
        out = {
            "1 row": asyncio.run(play([20], 0)),
            f"{ROWS} rows": asyncio.run(play([20] * ROWS, 1000)),
            f"{ROWS} ragged rows": asyncio.run(play(ragged, 2000)),
        }
    return out | {"captures": capture.num_captures}


def described(counts: Counts, steps: int = 1) -> dict[str, Any]:
    return {
        "launches": counts.num_launches / steps,
        "copies to the GPU": counts.to_device / steps,
        "copies to the host": counts.to_host / steps,
    }


def train(gpu: StubGpu, name: str, num_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """Counts of the trainer's own micro-batch, packing and loss included, after one of other
    lengths; the most of all objectives."""
    config = TrainerConfig(max_tokens_per_microbatch=1 << 14)
    trainer = Trainer(make_model(name, num_layers, dtype), config, like="unused")
    rng = np.random.default_rng(0)

    def rows(*lengths: int) -> list[Sample]:
        out: list[Sample] = []
        for number, length in enumerate(lengths):
            mask = np.arange(length) >= length // 3
            mask[-1] = number != 1  # this one's last token is not trained
            sample = Sample(
                id=f"{number}", token_ids=np.full(length, number, np.int32), loss_mask=mask
            )
            for column in ("rollout_logprobs", "advantages"):
                sample.set(column, -rng.random(length).astype(np.float32))
            sample.columns["rollout_logprobs"][-2] = np.nan  # was not recorded
            sample.set("policy_version", np.zeros(length, np.int32))
            out.append(sample)
        return out

    def run(objective: ObjectiveConfig, samples: list[Sample]) -> None:
        weights_of = loss_weights(samples, objective.aggregate)
        loss, num_trained = make_loss(objective), sum(map(len, samples))
        judge = TokenJudge(Correction.bypass(), version=0)
        totals = Totals(trainer.device, num_experts=trainer.model.config.num_experts)
        for batch in trainer.pack(samples):
            trainer._backward(loss, weights_of, judge, num_trained, True, batch, totals)

    out: dict[str, Any] = {}
    for objective in (PPOClip(), GSPO(), CISPO(), DPPO(), Reinforce()):
        run(objective, rows(1000, 2000, 1096))
        before = len(gpu.instances)
        with gpu.counting() as counts:
            run(objective, rows(77, 1302, 1999, 401))
        found = {"waits": counts.waits, "recompilations": len(gpu.instances) - before}
        found |= described(counts)
        out = {key: max(value, out.get(key, 0)) for key, value in found.items()}
    return out


def attention_backward(gpu: StubGpu, name: str) -> dict[str, Any]:
    """Launches of one layer's, on a row of 16k tokens, and the largest tensor that it makes, in
    multiples of the queries. Torch's flash backward counts as one."""
    c, T = config_of(name, num_layers=2), 1 << 14
    made = {"dtype": torch.bfloat16, "device": DEVICE, "requires_grad": True}
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    q, k, v = (torch.empty(T, n, c.head_dim, **made) for n in heads)
    sinks = torch.empty(c.num_heads, **made) if c.has_sinks else None
    spec = AttentionSpec(sinks, c.windows[0], 0.1)
    out = CudaOps().attention(q, k, v, spec, PackedContext.of([T], device=DEVICE))
    grad = torch.empty_like(out)
    gpu.largest = 0
    with gpu.counting() as counts:
        torch.autograd.grad(out, [q, k, v, *([] if sinks is None else [sinks])], grad)
    return {**described(counts), "largest": gpu.largest / q.numel()}


def kernels(gpu: StubGpu, capability: int) -> dict[str, Any]:
    """Kernel -> the most that any of its instances uses."""
    out: dict[str, dict[str, Any]] = defaultdict(lambda: {"instances": 0, "instructions": []})
    for kernel, bound, options in gpu.instances.values():
        entry, used = out[kernel.__name__], resources(kernel, bound, options, capability)
        entry["instances"] += 1
        entry["instructions"] = sorted({*entry["instructions"], *used.pop("instructions")})
        for name, value in used.items():
            entry[name] = max(value, entry.get(name, 0))
    return dict(sorted(out.items()))


def figures(name: str, chip: int, *, dtype: torch.dtype, has_kernels: bool) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch, stub_gpu(monkeypatch, chip=chip // 10) as gpu:
        steps = [decode(gpu, name, num_layers, dtype) for num_layers in (2, 3)]
        per_layer = {
            batch: steps[1][batch]["launches"] - steps[0][batch]["launches"]
            for batch in steps[0]
            if batch != "captures"
        }
        out = {"decode": steps[0], "launches per layer": per_layer}
        out["decode, top-p"] = decode(gpu, name, 2, dtype, top_p=0.9)
        out["decode, adapters"] = decode(gpu, name, 2, dtype, adapters=("a", "b"))
        if dtype == torch.bfloat16:
            out["training"] = train(gpu, name, 2, dtype)
            out["attention's backward"] = attention_backward(gpu, name)
    if has_kernels:
        out["kernels"] = kernels(gpu, chip)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("chip", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-kernels", action="store_true")
    asked = parser.parse_args()
    found = figures(
        asked.model, asked.chip, dtype=getattr(torch, asked.dtype), has_kernels=not asked.no_kernels
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
