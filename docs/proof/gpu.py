"""What a GPU computes, whether the contract holds there, and how fast it is: `make gpu PART=truth`.

python docs/proof/gpu.py truth        # kernels against float64, the self-test, races: 8 minutes
python docs/proof/gpu.py contract     # sampler against trainer, equal updates, memory: 8 minutes
python docs/proof/gpu.py speed        # beside stock torch and transformers: 8 minutes
python docs/proof/gpu.py truth --only attention --small --device cpu   # to try a case anywhere

For one GPU with 80 GB or more and no network: weights are drawn on the device. Each case runs in a
process of its own with a limit, the most valuable first, and prints one JSON line. What is done is
in docs/proof/gpu.json, with the machine; a case that is there as "ok" for the same commit is left
out with --resume. Exit code 1 if a case fails, 2 if there is no GPU to run on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_models import MODELS as CONFIGS
from gpu_models import config_of

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext, PagedContext, to_device
from lockstep.ops.selftest import prove
from lockstep.types import Request, SamplingParams

ROOT = Path(__file__).parents[2]
PART_SECONDS = 480
OUT = ROOT / "docs" / "proof" / "gpu.json"
MODELS = ("Qwen3-0.6B", "Qwen3-8B", "gpt-oss-20b", "Qwen3-30B-A3B", "Llama-3.1-8B")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Where:
    """The machine that a case runs on. small: shapes that any machine takes, for a try."""

    device: torch.device
    small: bool

    def pick(self, full: Any, small: Any) -> Any:
        return small if self.small else full

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Case:
    part: str
    seconds: int
    run: Callable[[Where], Figures]


CASES: dict[str, Case] = {}
"""In the order of their value."""


def case(part: str, label: str, /, *, seconds: int, **settings: Any) -> Callable[..., Any]:
    def register(function: Callable[..., Figures]) -> Callable[..., Figures]:
        CASES[label] = Case(part, seconds, lambda where: function(where, **settings))
        return function

    return register


def expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(what)


# -- models ---------------------------------------------------------------------------------------

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 512,
}


def shape_of(name: str, num_layers: int, where: Where) -> ModelConfig:
    if not where.small:
        return config_of(name, num_layers=num_layers)
    config = CONFIGS[name] | TINY | {"num_hidden_layers": 1, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "num_local_experts" in config:
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if "num_experts" in config:
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return ModelConfig.from_hf(config)


def make_model(config: ModelConfig, where: Where, *, ops: Ops | None = None) -> Decoder:
    """Random weights, drawn on the device; norms, biases and sinks too."""
    torch.manual_seed(0)
    torch.set_default_dtype(where.dtype)
    with where.device:
        model = Decoder(config, ops=ops)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm", "bias", "sinks")):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.requires_grad_(False)


def own_ops(where: Where) -> Ops:
    """Those of the contract on this device."""
    if where.device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        from lockstep.ops.invariant import InvariantOps

        return InvariantOps()
    from lockstep.ops.cuda import CudaOps

    return CudaOps()


# -- truth ----------------------------------------------------------------------------------------


def self_test(where: Where, *, name: str) -> Figures:
    model = make_model(shape_of(name, 1, where), where)
    proof = prove(model, ops=own_ops(where))
    expect(proof.is_kept, proof.failure)
    library = getattr(proof.ops, "library", {})
    return {
        "checks": proof.num_checks,
        "seconds of it": round(proof.seconds, 1),
        "gemm": proof.ops.describe_gemm(where.dtype),
        "cuBLAS takes": {"x".join(map(str, key[1])): list(rows) for key, rows in library.items()},
    }


for _name in MODELS:
    case("truth", f"self-test of {_name}", seconds=90, name=_name)(self_test)


@case("truth", "tests/gpu", seconds=240)
def tests_gpu(where: Where) -> Figures:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    # 5: no test was collected, where there is no GPU
    expect(done.returncode in ((0, 5) if where.small else (0,)), done.stdout[-2000:])
    return {"said": done.stdout.strip().splitlines()[-1:]}


@case("truth", "attention against float64", seconds=120)
def attention(where: Where) -> Figures:
    """Output and every gradient; a relative error of the whole tensor."""
    worst: dict[str, float] = {}
    ops, lengths = own_ops(where), where.pick([700, 1, 77, 1200], [40, 1, 9])
    limit = 1e-5 if where.dtype == torch.float32 else 2e-2
    widths = where.pick((64, 128, 256), (16,))
    for width in widths:
        for window in (None, 128):
            generator = torch.Generator(where.device).manual_seed(width)

            def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(*shape, generator=generator, device=where.device).to(where.dtype)

            T = sum(lengths)
            inputs = [draw(T, heads, width) for heads in (8, 2, 2)] + [draw(8)]
            grad = draw(T, 8, width)
            leaves = [x.clone().requires_grad_() for x in inputs]
            spec = AttentionSpec(leaves[3], window, width**-0.5)
            context = PackedContext.of(lengths, device=where.device)
            out = ops.attention(leaves[0], leaves[1], leaves[2], spec, context)
            out.backward(grad)
            exact = [x.double().requires_grad_() for x in inputs]
            wanted = _formula(*exact, window=window, lengths=lengths)
            wanted.backward(grad.double())
            found = [out, *(x.grad for x in leaves)]
            names = ("output", "dQ", "dK", "dV", "dsinks")
            for label, a, b in zip(names, found, [wanted, *(x.grad for x in exact)], strict=True):
                error = float((a.double() - b).norm() / b.norm())
                worst[label] = max(worst.get(label, 0.0), error)
    expect(max(worst.values()) < limit, f"{worst}, more than {limit}")
    return {"worst relative error": worst}


def _formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    *,
    window: int | None,
    lengths: list[int],
) -> torch.Tensor:
    """Attention by its definition, one row after another."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outs = []
    for rows in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        q_row, k_row, v_row = (x.transpose(0, 1) for x in rows)
        scores = q_row @ k_row.transpose(1, 2) * q.shape[2] ** -0.5
        age = torch.arange(len(rows[0]), device=q.device)
        age = age[:, None] - age
        hidden = (age < 0) | (age >= (window or len(age)))
        column = sinks[:, None, None].expand(-1, len(age), 1)
        probs = torch.cat([scores.masked_fill(hidden, -torch.inf), column], -1).softmax(-1)
        outs.append((probs[..., :-1] @ v_row).transpose(0, 1))
    return torch.cat(outs)


class ExactOps(Ops):
    """Stock ops with attention by its definition: Triton's kernel has no float64."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, context: Any
    ) -> torch.Tensor:
        sinks = q.new_full((q.shape[1],), -torch.inf) if spec.sinks is None else spec.sinks
        return _formula(q, k, v, sinks, window=spec.window, lengths=context.lengths.tolist())


@case("truth", "layers against float64", seconds=120)
def layers(where: Where) -> Figures:
    """Logits and gradients of whole models: our kernels against stock ops in float64, next
    to stock ops in the same dtype. Ours may be at most twice as far away."""
    out: Figures = {}
    for name in ("Qwen3-0.6B", "gpt-oss-20b"):
        config = shape_of(name, 1, where)
        model = make_model(config, where, ops=own_ops(where)).requires_grad_(True)
        T = where.pick(300, 20)
        ids = torch.randint(0, config.vocab_size, (T,), device=where.device)
        errors = {}
        exact = Decoder(config, ops=ExactOps()).to(where.device, torch.float64)
        exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
        wanted = _scored(exact, ids)
        for label, ops in (("ours", model.ops), ("stock", Ops())):
            model.ops = ops
            found = _scored(model, ids)
            errors[label] = max(
                float((a.double() - b).norm() / b.norm().clamp(min=1e-12))
                for a, b in zip(found, wanted, strict=True)
            )
        expect(errors["ours"] <= 2 * errors["stock"] + 1e-6, f"{name}: {errors}")
        out[name] = errors
    return out


def _scored(model: Decoder, ids: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs, and the gradients of their sum for every parameter."""
    model.zero_grad()
    places = torch.arange(len(ids) - 1, device=ids.device)
    context = PackedContext.of([len(ids)], device=ids.device)
    positions = torch.arange(len(ids), device=ids.device)
    logprobs, _ = model.score(ids, positions, context, predictors_N=places, targets_N=ids[1:])
    logprobs.sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logprobs.detach(), *grads]


@case("truth", "poisoned memory", seconds=60)
def poisoned(where: Where) -> Figures:
    """What a kernel does not write, or reads without right, is NaN."""
    config = shape_of("Qwen3-8B", 1, where)
    model = make_model(config, where, ops=own_ops(where))
    ids = torch.randint(0, config.vocab_size, (where.pick(1111, 30),), device=where.device)
    before = _decoded(model, ids, where)
    poison = [
        torch.full((size,), float("nan"), device=where.device)
        for size in where.pick([1 << 28, *[1 << 20] * 64, *[1 << 12] * 256], [1 << 12] * 8)
    ]
    where.wait()
    del poison
    after = _decoded(model, ids, where)
    expect(bool(torch.isfinite(after).all()), "a number that is not finite was read")
    expect(torch.equal(before, after), "the numbers depend on what was in memory")
    return {"tokens": len(ids)}


def _decoded(model: Decoder, ids: torch.Tensor, where: Where) -> torch.Tensor:
    """Hidden states of a row in chunks and single tokens, through pages."""
    c, size, T = model.config, 16, len(ids)
    shape = (c.num_layers, c.num_kv_heads, -(-T // size) + 1, size, c.head_dim)
    keys, values = torch.zeros(2, *shape, dtype=where.dtype, device=where.device)
    table = np.arange(1, shape[2])[None]
    stops = [*range(T // 2, T - 4, T // 5 + 1), *range(T - 4, T + 1)]
    parts, start = [], 0
    num_heads = c.num_heads if model.ops.reads_work(where.device) else None
    for stop in stops:
        context = PagedContext.of(keys, values, table, [start], [stop], num_heads=num_heads)
        positions = torch.arange(start, stop, device=where.device)
        with torch.inference_mode():
            parts.append(model(ids[start:stop], positions, context))
        start = stop
    return torch.cat(parts)


@case("truth", "repeats", seconds=60)
def repeats(where: Where) -> Figures:
    """A decode step of few rows, whose splits are combined by the program that ends last, many
    times: a race would show as other bits."""
    config = shape_of("Qwen3-8B", 1, where)
    model = make_model(config, where, ops=own_ops(where))
    ids = torch.randint(0, config.vocab_size, (where.pick(9000, 40),), device=where.device)
    first, count = _decoded(model, ids, where), where.pick(200, 2)
    for _ in range(count):
        expect(torch.equal(first, _decoded(model, ids, where)), "two runs have other bits")
    return {"runs": count}


# -- contract -------------------------------------------------------------------------------------


def _cli(where: Where, *settings: str, out: Path) -> list[Figures]:
    """Metrics of each step of a run."""
    device = f"device={where.device.type}"
    command = [sys.executable, "-m", "lockstep.cli", "train", "quickstart", f"out={out}", device]
    done = subprocess.run(
        [*command, *settings], capture_output=True, text=True, check=False, cwd=ROOT
    )
    expect(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def quickstart(where: Where, *, model: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        steps = where.pick(25, 1)
        small = where.pick((), ("groups_per_step=2", "group_size=2", "evaluation.at_start=false"))
        rows = _cli(
            where,
            f"model={model}",
            "dtype=bfloat16",
            "contract=true-on-policy",
            f"steps={steps}",
            *small,
            out=Path(folder) / "run",
        )
    unequal = sum(row.get("mismatch/unequal_tokens", 0) for row in rows)
    expect(unequal == 0, f"{unequal} unequal tokens")
    return {"steps": steps, "unequal tokens": unequal, "reward": rows[-1].get("reward/mean")}


for _name in ("tiny-gpt-oss", "tiny-qwen3"):
    case("contract", f"quickstart of {_name} in bfloat16", seconds=150, model=_name)(quickstart)


def schedules(where: Where, *, name: str) -> Figures:
    """Random requests through the engine, with chunks, common beginnings and preemption, and the
    trainer's forward over the same tokens."""
    config = shape_of(name, 2, where)
    model = make_model(config, where, ops=own_ops(where))
    settings = where.pick(
        {"max_num_sequences": 64, "max_step_tokens": 2048, "kv_cache_tokens": 1 << 16},
        {"max_num_sequences": 4, "max_step_tokens": 16, "kv_cache_tokens": 256, "page_size": 8},
    )
    engine, rng = EmbeddedEngine(model, EmbeddedConfig(**settings)), np.random.default_rng(0)
    wanted, longest = where.pick((60_000, 900), (60, 20))
    shared = rng.integers(0, config.vocab_size, longest)

    async def ask(number: int) -> tuple[np.ndarray, np.ndarray]:
        own = rng.integers(0, config.vocab_size, int(rng.integers(1, longest)))
        prompt = np.concatenate([shared[: int(rng.integers(0, longest))], own]).astype(np.int32)
        sampling = SamplingParams(max_tokens=int(rng.integers(1, longest)))
        await asyncio.sleep(float(rng.random()) * where.pick(2.0, 0.0))
        request = Request(id=f"{number}", prompt_ids=prompt, sampling=sampling, seed=number)
        deltas = [delta async for delta in engine.generate(request)]
        ids = np.concatenate([prompt, *(delta.token_ids for delta in deltas)])
        return ids, np.concatenate([delta.logprobs for delta in deltas])

    async def play() -> list[tuple[np.ndarray, np.ndarray]]:
        count = max(2, 2 * wanted // longest)
        return await asyncio.gather(*(ask(number) for number in range(count)))

    unequal = compared = 0
    for ids, recorded in asyncio.run(play()):
        tensor = to_device(ids.astype(np.int64), where.device)
        places = torch.arange(len(ids) - len(recorded) - 1, len(ids) - 1, device=where.device)
        with torch.no_grad():
            logprobs, _ = model.score(
                tensor,
                torch.arange(len(ids), device=where.device),
                PackedContext.of([len(ids)], device=where.device),
                predictors_N=places,
                targets_N=tensor[places + 1],
            )
        unequal += int((logprobs.cpu().numpy() != recorded).sum())
        compared += len(recorded)
    expect(unequal == 0, f"{unequal} of {compared} tokens are unequal")
    return {"tokens": compared, "unequal": unequal}


for _name in ("Qwen3-8B", "gpt-oss-20b"):
    case("contract", f"random schedules on {_name}'s layers", seconds=120, name=_name)(schedules)


@case("contract", "equal updates and resume", seconds=150)
def updates(where: Where) -> Figures:
    """Two runs, and one that is killed after its first checkpoint and continued, end in the same
    bits."""
    settings = ["groups_per_step=4", "group_size=4", "evaluation.at_start=false", "dtype=bfloat16"]
    settings += ["steps=4", "checkpoint.every=1"]
    ends: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for label in ("one", "two", "resumed"):
            out = Path(folder) / label
            if label == "resumed":
                _kill_after_a_checkpoint(where, settings, out)
            _cli(where, *settings, *(["resume=true"] if label == "resumed" else []), out=out)
            found = sorted(out.glob("checkpoints/*/policy/*.safetensors"))
            expect(bool(found), f"no weights below {out}")
            ends[label] = found[-1].read_bytes()
    expect(ends["one"] == ends["two"], "two equal runs end in other weights")
    expect(ends["one"] == ends["resumed"], "a resumed run ends in other weights")
    return {"bytes compared": len(ends["one"])}


def _kill_after_a_checkpoint(where: Where, settings: list[str], out: Path) -> None:
    command = [sys.executable, "-m", "lockstep.cli", "train", "quickstart", f"out={out}"]
    command += [f"device={where.device.type}", *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while process.poll() is None:
            if list(out.glob("checkpoints/step-*/manifest.json")):
                process.kill()
            time.sleep(0.05)


@case("contract", "predicted and real memory", seconds=90)
def memory(where: Where) -> Figures:
    """The peak of an update of Qwen3-0.6B on one row of 8192 tokens against `memory`'s plan."""
    from lockstep.memory import PlanFacts, plan_memory
    from lockstep.training.config import TrainerConfig

    config = shape_of("Qwen3-0.6B", 28, where)
    model = make_model(config, where, ops=own_ops(where)).requires_grad_(True)
    T = where.pick(8192, 40)
    trainer = TrainerConfig(max_tokens_per_microbatch=T)
    dtype = str(where.dtype).removeprefix("torch.")
    plan = plan_memory(
        PlanFacts(model=config, dtype=dtype, device="cuda", trainer=trainer, max_update_tokens=T)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        _scored(model, torch.randint(0, config.vocab_size, (T,), device=where.device))
        optimizer.step()
    where.wait()
    peak = torch.cuda.max_memory_allocated() if where.device.type == "cuda" else 0
    return {"predicted GiB": plan.num_bytes / 2**30, "real GiB, without masters": peak / 2**30}


# -- speed ----------------------------------------------------------------------------------------


def _time(where: Where, function: Callable[[], Any], *, repeats: int) -> float:
    """Median seconds of a call."""
    for _ in range(2):
        function()
    seconds = []
    for _ in range(repeats):
        where.wait()
        began = time.perf_counter()
        function()
        where.wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _bandwidth(where: Where) -> float:
    """Bytes a second of reading and writing memory."""
    source = torch.empty(where.pick(1 << 32, 1 << 20), dtype=torch.uint8, device=where.device)
    target = torch.empty_like(source)
    return 2 * len(source) / _time(where, lambda: target.copy_(source), repeats=5)


def decode(where: Where, *, name: str, num_layers: int) -> Figures:
    """Milliseconds of a step through the engine's graph, next to the floor (weights and keys read
    once) and to a graph of stock torch."""
    config = shape_of(name, num_layers, where)
    model = make_model(config, where, ops=own_ops(where))
    out: Figures = {}
    grid = [(1, 1024), (64, 1024), (1, 8192), (8, 1024), (64, 8192), (1, 32768), (256, 1024)]
    rate = _bandwidth(where)
    for rows, length in where.pick(grid, [(2, 24)]):
        step = _engine_step(model, rows, length, where)
        ours = _time(where, step, repeats=where.pick(20, 1))
        entry = {"ms": ours * 1e3}
        if not config.is_moe:
            floor = (_weight_bytes(model) + _key_bytes(config, rows, length, where)) / rate
            entry["share of the floor's speed"] = floor / ours
            stock = _stock_decode(model, rows, length, where)
            entry["stock ms"] = _time(where, stock, repeats=where.pick(20, 1)) * 1e3
        out[f"{rows} x {length}"] = {key: round(value, 3) for key, value in entry.items()}
    return {"GB a second": round(rate / 1e9), **out}


case("speed", "decode of Qwen3-8B", seconds=180, name="Qwen3-8B", num_layers=36)(decode)
case("speed", "decode of gpt-oss-20b", seconds=90, name="gpt-oss-20b", num_layers=24)(decode)


def _weight_bytes(model: Decoder) -> int:
    used = [p for name, p in model.named_parameters() if name != "embedding"]
    return sum(p.numel() * p.element_size() for p in used)


def _key_bytes(config: ModelConfig, rows: int, length: int, where: Where) -> int:
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * where.dtype.itemsize
    return rows * length * per_token


def _engine_step(model: Decoder, rows: int, length: int, where: Where) -> Callable[[], None]:
    page = where.pick(128, 8)
    tokens = rows * (length + 2 * page)
    config = EmbeddedConfig(
        max_num_sequences=rows,
        max_step_tokens=where.pick(8192, 64),
        kv_cache_tokens=-(-tokens // page) * page,
        page_size=page,
        prefix_cache=False,
    )
    engine = EmbeddedEngine(model, config)

    async def fill() -> None:
        async def ask(number: int) -> None:
            prompt = np.random.default_rng(number).integers(
                0, 60, length - 64 if length > 64 else 4
            )
            sampling = SamplingParams(max_tokens=where.pick(64 + page, 12))
            request = Request(
                id=f"{number}", prompt_ids=prompt.astype(np.int32), sampling=sampling, seed=number
            )
            async for _ in engine.generate(request):
                pass

        tasks = [asyncio.create_task(ask(number)) for number in range(rows)]
        await asyncio.sleep(0)
        if engine._driver is not None:
            engine._driver.cancel()
        while engine._rows.num < rows:
            engine.step()
        for task in tasks:
            task.cancel()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        # The requests stay in the engine: their waiters are cancelled after the loop has ended.
        original = engine._end
        engine._end = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
        loop.run_until_complete(fill())
        engine._end = original
    return engine.step


def _stock_decode(model: Decoder, rows: int, length: int, where: Where) -> Callable[[], Any]:
    """The same layers of cuBLAS products and torch's own attention, in a CUDA graph."""
    c = model.config
    H, G, D = c.num_heads, c.num_kv_heads, c.head_dim
    x = torch.randn(rows, c.hidden_size, device=where.device).to(where.dtype)
    shape = (c.num_layers, rows, G, length, D)
    keys, values = (torch.randn(shape, device=where.device).to(where.dtype) for _ in range(2))

    def step() -> torch.Tensor:
        h = x
        for layer, block in enumerate(model.layers):
            at: Any = block
            normed = F.rms_norm(h, h.shape[-1:], at.input_norm, 1e-6)
            qkv = F.linear(normed, at.attention.qkv_proj.weight).view(rows, -1, D)
            q = qkv[:, :H, None]
            keys[layer, :, :, -1:] = qkv[:, H : H + G, None]
            values[layer, :, :, -1:] = qkv[:, H + G :, None]
            out = F.scaled_dot_product_attention(q, keys[layer], values[layer], enable_gqa=True)
            h = h + F.linear(out.flatten(1), at.attention.o_proj.weight)
            normed = F.rms_norm(h, h.shape[-1:], at.post_attention_norm, 1e-6)
            gate, up = F.linear(normed, at.mlp.gate_up_proj.weight).chunk(2, -1)
            h = h + F.linear(F.silu(gate) * up, at.mlp.down_proj.weight)
        logits = F.linear(F.rms_norm(h, h.shape[-1:], model.final_norm, 1e-6), model.head)
        return torch.log_softmax(logits.float(), -1).argmax(-1)

    with torch.inference_mode():
        if where.device.type != "cuda":
            return torch.inference_mode()(step)
        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return graph.replay


@case("speed", "training of Qwen3-0.6B by part", seconds=120)
def training(where: Where) -> Figures:
    """Forward and backward of one row, with our ops under the contract, with stock ops, and by
    transformers with its SDPA attention."""
    config = shape_of("Qwen3-0.6B", 28, where)
    model = make_model(config, where, ops=own_ops(where)).requires_grad_(True)
    prove(model, ops=model.ops)  # finds where cuBLAS may compute
    out: Figures = {}
    for T in where.pick((2048, 8192, 16384), (24,)):
        ids = torch.randint(0, config.vocab_size, (T,), device=where.device)
        entry: Figures = {}
        for label, ops in (("contract", model.ops), ("stock", Ops())):
            mine, model.ops = model.ops, ops
            entry[f"{label} ms"] = (
                _time(where, lambda ids=ids: _scored(model, ids), repeats=3) * 1e3
            )
            with torch.no_grad():
                context = PackedContext.of([T], device=where.device)
                at = torch.arange(T, device=where.device)
                forward = lambda ids=ids, at=at, context=context: model(ids, at, context)  # noqa: E731
                entry[f"{label} forward ms"] = _time(where, forward, repeats=3) * 1e3
            model.ops = mine
        entry["contract / stock"] = entry["contract ms"] / entry["stock ms"]
        entry["transformers ms"] = _transformers(config, ids, where) * 1e3
        out[f"{T} tokens"] = {key: round(value, 2) for key, value in entry.items()}
    return out


def _transformers(config: ModelConfig, ids: torch.Tensor, where: Where) -> float:
    import transformers

    theirs = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_embeddings,
    )
    torch.set_default_dtype(where.dtype)
    with where.device:
        model = transformers.Qwen3ForCausalLM(theirs)
    torch.set_default_dtype(torch.float32)

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids[None], labels=ids[None]).loss.backward()

    return _time(where, step, repeats=3)


@case("speed", "LoRA step on gpt-oss-20b", seconds=120)
def lora_step(where: Where) -> Figures:
    config = shape_of("gpt-oss-20b", 24, where)
    model = make_model(config, where, ops=own_ops(where))
    add_adapter(model, lora_shape(LoraConfig(rank=16), config), seed=0)
    model.recomputes_blocks = True
    T = where.pick(8192, 24)
    ids = torch.randint(0, config.vocab_size, (T,), device=where.device)
    seconds = _time(where, lambda: _scored(model, ids), repeats=3)
    return {"tokens": T, "ms": round(seconds * 1e3, 1), "tokens a second": round(T / seconds)}


# -- running --------------------------------------------------------------------------------------


def run_case(name: str, where: Where) -> Figures:
    """A case in this process."""
    began = time.perf_counter()
    try:
        found, status = CASES[name].run(where), "ok"
    except AssertionError as error:
        found, status = {"why": str(error)}, "failed"
    return {"case": name, "status": status, "seconds": time.perf_counter() - began, **found}


def play(name: str, options: list[str], *, seconds: float) -> Figures:
    """A case in a process of its own, for at most so many seconds."""
    command = [sys.executable, __file__, CASES[name].part, "--case", name, *options]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"case": name, "status": "timed out", "seconds": time.perf_counter() - began}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    why = (done.stderr or done.stdout).strip()[-2000:]
    return {"case": name, "status": "crashed", "seconds": time.perf_counter() - began, "why": why}


def machine(where: Where) -> Figures:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    name = platform.processor() or platform.machine()
    if where.device.type == "cuda":
        name = torch.cuda.get_device_name()
    return {
        "device": name,
        "torch": torch.__version__,
        "commit": head.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("truth", "contract", "speed"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--small", action="store_true", help="shapes that any machine takes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", action="store_true", help="leave out what is done already")
    parser.add_argument("--seconds", type=float, default=PART_SECONDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    where = Where(torch.device(asked.device), asked.small)
    if where.device.type == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU; --small --device cpu tries the cases without one.")
        return 2
    if asked.case:
        print(json.dumps(run_case(asked.case, where)))
        return 0
    done = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    here, known = machine(where), done.get(asked.part, {})
    kept = known.get("cases", []) if asked.resume and known.get("machine") == here else []
    entries = {entry["case"]: entry for entry in kept if entry["status"] == "ok"}
    options = ["--device", asked.device, *(["--small"] if asked.small else [])]
    ends = time.monotonic() + asked.seconds
    for name in _chosen(asked.part, asked.only):
        if name in entries:
            continue
        left = ends - time.monotonic()
        entry: Figures = {"case": name, "status": "no time"}
        if left > 5:
            entry = play(name, options, seconds=min(left, CASES[name].seconds))
        print(json.dumps(entry), flush=True)
        entries[name] = entry
        done[asked.part] = {"machine": here, "cases": list(entries.values())}
        asked.out.write_text(json.dumps(done, indent=1) + "\n")
    bad = [name for name, entry in entries.items() if entry["status"] != "ok"]
    others = f": not {', '.join(bad)}" if bad else ""
    print(f"{len(entries) - len(bad)} of {len(entries)} cases ok{others}")
    return int(bool(bad))


def _chosen(part: str, only: str) -> Iterator[str]:
    yield from (name for name, of in CASES.items() if of.part == part and only in name)


if __name__ == "__main__":
    sys.exit(main())
