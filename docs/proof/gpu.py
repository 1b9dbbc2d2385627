"""A GPU's first day: what it computes, whether the contract holds there, and how fast it is.

make gpu-day                          # installs, then all parts: at most 40 minutes on one card
python docs/proof/gpu.py              # all parts; with --resume those that are not done
python docs/proof/gpu.py truth        # kernels against float64, the self-test, races
python docs/proof/gpu.py contract     # KL 0 of whole runs, equal updates, memory
python docs/proof/gpu.py vllm         # vLLM beside the trainer on the same card
python docs/proof/gpu.py speed        # sampling beside vLLM, training beside stock ops
python docs/proof/gpu.py truth --only attention --small --device cpu   # to try a case anywhere

For one GPU with 80 GB and no network; a case that needs more than its card has is left out. Weights
are drawn on the device. Each case runs in a process of its own with a limit, the most valuable
first, and prints one JSON line. What is done is in docs/proof/gpu.json, with the machine; a case
that is there for the same commit is not repeated with --resume. Exit code 1 if a case fails, 2 if
there is no GPU to run on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import MODELS as CONFIGS
from run import ROOT, cpu_name, rows_of, today

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from attention_formula import reference_attention

from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import EmbeddedConfig, VllmConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.registry import make_engine
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext, PagedContext
from lockstep.ops.selftest import prove
from lockstep.ops.transfer import to_device
from lockstep.types import Request, SamplingParams

PARTS = {"truth": 480, "contract": 600, "vllm": 480, "speed": 780}
"""Part -> its limit in seconds; 39 minutes together."""
OUT = Path(__file__).with_suffix(".json")
DEPTHS = {"Qwen3-0.6B": 28, "Qwen3-8B": 36, "gpt-oss-20b": 24}

Figures = dict[str, Any]
said_by = partial(subprocess.run, capture_output=True, text=True, check=False, cwd=ROOT)
"""Runs a command to its end, and keeps what it prints."""


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


GOOD = ("ok", "left out")


def expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(what)


class LeftOut(Exception):
    """Why this machine cannot run a case."""


def need_room(where: Where, num_bytes: float) -> None:
    """Raises LeftOut if the card has less free memory, with a tenth for workspaces."""
    if where.device.type == "cuda" and num_bytes > 0.9 * (free := torch.cuda.mem_get_info()[0]):
        raise LeftOut(f"needs {num_bytes / 2**30:.0f} GiB, and {free / 2**30:.0f} are free")


# -- models ---------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 61,
    "max_position_embeddings": 512,
}  # fmt: skip
"""Sizes that take the place of a model's own with --small."""


def shape_of(name: str, num_layers: int, where: Where) -> ModelConfig:
    # The least has a layer of each kind.
    num_layers = max(where.pick(num_layers, 1), CONFIGS[name].get("full_attention_interval", 1))
    small = {key: value for key, value in SMALL.items() if key in CONFIGS[name]}
    config = CONFIGS[name] | where.pick({}, small)
    return ModelConfig.from_hf(config | {"num_hidden_layers": num_layers})


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


def tests_gpu(where: Where) -> Figures:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = said_by(command)
    # 5: no test was collected, where there is no GPU
    expect(done.returncode in ((0, 5) if where.small else (0,)), done.stdout[-2000:])
    return {"said": done.stdout.strip().splitlines()[-1:]}


class ExactOps(Ops):
    """Stock ops with attention by its definition: Triton's kernel has no float64."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, context: Any
    ) -> torch.Tensor:
        return reference_attention(
            q, k, v, sinks_H=spec.sinks, window=spec.window, scale=spec.scale,
            lengths=context.lengths.tolist(),
        )  # fmt: skip


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
    logprobs = _logprobs(model, ids, 1)
    logprobs.sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logprobs.detach(), *grads]


def _logprobs(model: Decoder, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Log-probs of a row's ids from this place on, by the trainer's forward."""
    positions = torch.arange(len(ids), device=ids.device)
    context, places = PackedContext.of([len(ids)], device=ids.device), positions[first - 1 : -1]
    targets = ids[first:]
    return model.score(ids, positions, context, predictors_N=places, targets_N=targets)[0]


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


def _command(where: Where, *settings: str, out: Path, recipe: str = "quickstart") -> list[str]:
    command = [sys.executable, "-m", "lockstep.cli", "train", recipe, f"out={out}"]
    return [*command, f"device={where.device.type}", "evaluation.at_start=false", *settings]


def _cli(where: Where, *settings: str, **words: Any) -> list[Figures]:
    """Metrics of each step of a run."""
    done = said_by(_command(where, *settings, **words))
    expect(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
    return rows_of(words["out"])


def checkpoint(where: Where, name: str, folder: Path) -> Path:
    """Random weights at the widths of a model, with the tokenizer of a shipped one."""
    like, out = locate_model("tiny-qwen3"), folder / name
    stored = json.loads((like / "config.json").read_text())
    changes = CONFIGS[name] | {"num_hidden_layers": DEPTHS[name]}
    changes = where.pick(changes, {}) | {"vocab_size": stored["vocab_size"]}
    model = make_model(ModelConfig.from_hf(stored | changes), where)
    save_checkpoint(model, out, like=like, config_changes=changes)
    return out


def run(
    where: Where, *, settings: Sequence[str] = (), recipe: str, model: str, is_equal: bool
) -> Figures:
    """A short run. is_equal: sampler and trainer must have the same bits for every token."""
    steps, batch = where.pick(5, 1), where.pick(4, 2)
    if is_equal:
        settings = (*settings, "contract=true-on-policy")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = checkpoint(where, model, folder) if model in CONFIGS else model
        rows = _cli(
            where, f"model={path}", "dtype=bfloat16", f"steps={steps}", f"groups_per_step={batch}",
            f"group_size={batch}", *settings, out=folder / "run", recipe=recipe,
        )  # fmt: skip
    found: Figures = {"steps": steps}
    if is_equal:
        key = "mismatch/unequal_tokens"
        counts = [row[key] for row in rows if key in row]
        expect(len(counts) == steps and not sum(counts), f"unequal tokens of each step: {counts}")
        found["unequal tokens"] = sum(counts)
    shown = ("time/step_seconds", "time/sync_seconds", "sync/bytes", "sync/level")
    return found | {name: row[name] for row in rows for name in shown if name in row}


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
        with torch.no_grad():
            logprobs = _logprobs(model, tensor, len(ids) - len(recorded))
        unequal += int((logprobs.cpu().numpy() != recorded).sum())
        compared += len(recorded)
    expect(unequal == 0, f"{unequal} of {compared} tokens are unequal")
    return {"tokens": compared, "unequal": unequal}


def updates(where: Where) -> Figures:
    """Two runs, and one that is killed after its first checkpoint and continued, end in the same
    bits."""
    settings = ["groups_per_step=4", "group_size=4", "dtype=bfloat16", "steps=4"]
    settings += ["checkpoint.every=1"]
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
    command = _command(where, *settings, out=out)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while process.poll() is None:
            if list(out.glob("checkpoints/step-*/manifest.json")):
                process.kill()
            time.sleep(0.05)


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


# -- vLLM beside the trainer ----------------------------------------------------------------------


def vllm_python(where: Where) -> str:
    """The interpreter of `make gpu-day`'s environment of vLLM."""
    python = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
    if where.device.type != "cuda" or not python.exists():
        raise LeftOut(f"needs a GPU, and {python.relative_to(ROOT)}: make gpu-day installs it")
    return str(python)


def turns(where: Where, *, is_equal: bool) -> Figures:
    """A run that hands the card over at every step: vLLM sleeps while the trainer trains, gets the
    weights from the other process, and wakes."""
    settings = ("engine=vllm", f"engine.python={vllm_python(where)}", "engine.share_device=true")
    decoder = "lockstep" if is_equal else "vllm"
    settings = (*settings, f"engine.decoder={decoder}", "sync.qualify=on")
    return run(where, settings=settings, recipe="quickstart", model="Qwen3-0.6B", is_equal=is_equal)


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


def speed(
    where: Where, make: Callable[[], Engine], batches: Sequence[int], vocab_size: int
) -> Figures:
    """Tokens a second of each batch: prompts of 1,024 tokens and replies of 256, all at once."""
    length, wanted = where.pick((1024, 256), (12, 4))

    async def play(engine: Engine, rows: int) -> float:
        rng, began = np.random.default_rng(rows), time.perf_counter()

        async def ask(number: int, prompt: np.ndarray) -> None:
            sampling = SamplingParams(max_tokens=wanted)
            asked = Request(id=f"{began}/{number}", prompt_ids=prompt, sampling=sampling, seed=1)
            async for _ in engine.generate(asked):
                pass

        prompts = rng.integers(0, vocab_size, (rows, length)).astype(np.int32)
        await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
        return rows * wanted / (time.perf_counter() - began)

    async def measure() -> Figures:
        engine, found = make(), {}
        try:
            for rows in batches:
                await play(engine, rows)  # compiles, and captures graphs
                found[f"tokens a second, {rows} rows"] = round(await play(engine, rows))
        finally:
            await engine.close()
        return found

    return asyncio.run(measure())


BATCHES = (1, 64, 256)


def sampling(where: Where, *, name: str, rows: int) -> Figures:
    """Ours, under the contract, through the engine's graphs."""
    config = shape_of(name, DEPTHS[name], where)
    tokens = rows * where.pick(1536, 128)
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * where.dtype.itemsize
    weights = num_elements(decoder_shapes(config)) * where.dtype.itemsize
    need_room(where, weights + keys * tokens)
    model = make_model(config, where, ops=own_ops(where))
    settings = EmbeddedConfig(
        max_num_sequences=rows, max_step_tokens=8192, kv_cache_tokens=tokens, prefix_cache=False
    )
    return speed(where, lambda: EmbeddedEngine(model, settings), [rows], config.vocab_size)


def vllm_sampling(where: Where, *, name: str) -> Figures:
    """vLLM's own model of the same widths, with random weights of its own."""
    settings = CONFIGS[name] | {"num_hidden_layers": DEPTHS[name]}
    settings["architectures"] = ["Qwen3ForCausalLM"]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(settings))
        context = EngineContext(
            model=None, token_bytes=(), directory=Path(place), vocab_size=settings["vocab_size"],
            max_tokens=1536, dtype="bfloat16", scratch=Path(place),
        )  # fmt: skip
        config = VllmConfig(
            python=vllm_python(where), decoder="vllm", max_num_sequences=max(BATCHES),
            prefix_cache=False, args=("--load-format=dummy",),
        )  # fmt: skip
        return speed(where, lambda: make_engine(config, context), BATCHES, context.vocab_size)


def training(where: Where, *, name: str, tokens: int, rank: int = 0) -> Figures:
    """Forward and backward of one row, with our ops under the contract and with stock ops; of all
    weights, or of an adapter."""
    config, T = shape_of(name, DEPTHS[name], where), where.pick(tokens, 24)
    weights = where.dtype.itemsize * num_elements(decoder_shapes(config))
    need_room(where, weights if rank else 2 * weights)
    model = make_model(config, where, ops=own_ops(where)).requires_grad_(not rank)
    if rank:
        add_adapter(model, lora_shape(LoraConfig(rank=rank), config), seed=0)
    model.recomputes_blocks = name != "Qwen3-0.6B"
    prove(model, ops=model.ops)  # finds where cuBLAS may compute
    ids = torch.randint(0, config.vocab_size, (T,), device=where.device)
    found: Figures = {"tokens": T}
    for label, ops in (("contract", model.ops), ("stock", Ops())):
        model.ops = ops
        found[f"{label} ms"] = _time(where, lambda: _scored(model, ids), repeats=3) * 1e3
    return found | {"contract / stock": found["contract ms"] / found["stock ms"]}


CASES = {
    label: Case(part, table.pop("seconds"), partial(globals()[table.pop("run")], **table))
    for part, cases in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    for label, table in cases.items()
}
"""In the order of their value."""


# -- running --------------------------------------------------------------------------------------


def run_case(name: str, where: Where) -> Figures:
    """A case in this process."""
    began = time.perf_counter()
    try:
        found, status = CASES[name].run(where), "ok"
    except AssertionError as error:
        found, status = {"why": str(error)}, "failed"
    except (LeftOut, torch.OutOfMemoryError) as error:
        found, status = {"why": str(error)}, "left out"
    return {"case": name, "status": status, "seconds": time.perf_counter() - began, **found}


def play(name: str, options: list[str], *, seconds: float) -> Figures:
    """A case in a process of its own, for at most so many seconds."""
    command = [sys.executable, __file__, CASES[name].part, "--case", name, *options]
    began = time.perf_counter()
    try:
        done = said_by(command, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"case": name, "status": "timed out", "seconds": time.perf_counter() - began}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    why = (done.stderr or done.stdout).strip()[-2000:]
    return {"case": name, "status": "crashed", "seconds": time.perf_counter() - began, "why": why}


def machine(where: Where) -> Figures:
    head = said_by(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    name = torch.cuda.get_device_name() if where.device.type == "cuda" else cpu_name()
    return {"device": name, "torch": torch.__version__, "commit": head, "date": today()}


def table(done: Figures) -> Iterator[str]:
    """What is known, as rows of Markdown."""
    yield "| part | case | result | figures | card |"
    yield "|---|---|---|---|---|"
    for part, of_part in done.items():
        for entry in of_part["cases"]:
            hidden = ("case", "status", "seconds", "why")
            figures = {name: value for name, value in entry.items() if name not in hidden}
            said = ", ".join(f"{name} {value}" for name, value in figures.items())
            said = said or str(entry.get("why", ""))[:200]
            cells = (part, entry["case"], entry["status"], said, of_part["machine"]["device"])
            yield f"| {' | '.join(cells)} |".replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--small", action="store_true", help="shapes that any machine takes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", action="store_true", help="leave out what is done already")
    parser.add_argument("--seconds", type=float, help="limit of a part, in place of its own")
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
    options = ["--device", asked.device, *(["--small"] if asked.small else [])]
    bad = 0
    for part in asked.parts or PARTS:
        here, known = machine(where), done.get(part, {})
        kept = known.get("cases", []) if asked.resume and known.get("machine") == here else []
        entries = {entry["case"]: entry for entry in kept if entry["status"] in GOOD}
        ends = time.monotonic() + (PARTS[part] if asked.seconds is None else asked.seconds)
        for name, of in CASES.items():
            if of.part != part or asked.only not in name or name in entries:
                continue
            left = ends - time.monotonic()
            entry: Figures = {"case": name, "status": "no time"}
            if left > 5:
                entry = play(name, options, seconds=min(left, of.seconds))
            print(json.dumps(entry), flush=True)
            entries[name] = entry
            done[part] = {"machine": here, "cases": list(entries.values())}
            asked.out.write_text(json.dumps(done, indent=1) + "\n")
        failed = [name for name, entry in entries.items() if entry["status"] not in GOOD]
        others = f": not {', '.join(failed)}" if failed else ""
        print(f"{part}: {len(entries) - len(failed)} of {len(entries)} cases ok{others}")
        bad += len(failed)
    print(*table(done), sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
