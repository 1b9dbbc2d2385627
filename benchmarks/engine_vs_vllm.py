"""Tokens per processor second of the embedded engine against vLLM.

Same random weights and prompts, batches of 1, 8 and 64 replies of 64 new tokens each behind prompts
of 32, temperature 1, end tokens off, one thread, each engine in a process of its own, in turn. All
record the log-prob of every token. The embedded engine runs stock ops (contract=none) and, in a row
of its own, the contract's ops; so does Lockstep's decoder inside vLLM. Each figure is the best
processor time of a whole batch, after a batch to warm up.

    PYTHONPATH=src .venv-vllm/bin/python benchmarks/engine_vs_vllm.py [--rounds N] [--only MODEL ..]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from measuring import CannotRun, Row, SideFailed, alone, main, models_of, note, row, seconds_of

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

import numpy as np
import torch

BATCHES = (1, 8, 64)
PROMPT_TOKENS, NEW_TOKENS = 32, 64
DTYPES = ("float32", "bfloat16")
FLOORS = {"float32": 1.0, "bfloat16": 0.8}
"""How many times vLLM's speed the embedded engine is to have."""

MODELS = models_of("engine_vs_vllm")
SIDES = ("embedded", "embedded contract", "vllm", "vllm, our decoder")

Generate = Callable[[np.ndarray], None]
"""[requests, tokens] prompts -> NEW_TOKENS each, sampled."""


def save(name: str, directory: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODELS[name])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


# -- the sides --------------------------------------------------------------------------------


def embedded(directory: Path, dtype: str, *, is_under_contract: bool) -> Generate:
    from measuring.sampling import requests_of, sample

    from lockstep.engines.config import EmbeddedConfig
    from lockstep.engines.embedded.engine import EmbeddedEngine
    from lockstep.models.hf_io import load_checkpoint
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.ops.selftest import prove

    if is_under_contract:
        ask_for_reproducible_gemm()
    model = load_checkpoint(directory, dtype=getattr(torch, dtype))
    if is_under_contract:
        proof = prove(model)
        if not proof.is_kept:
            raise SystemExit(f"the contract cannot be kept: {proof.failure}")
        model.ops = proof.ops
    engine = EmbeddedEngine(model, EmbeddedConfig(prefix_cache=False))

    def generate(prompts: np.ndarray) -> None:
        replies = sample(engine, requests_of(prompts, NEW_TOKENS))
        assert all(len(r.token_ids) == NEW_TOKENS for r in replies), "no end token, no early end"

    return generate


def vllm(directory: Path, dtype: str, *, is_ours: bool) -> Generate:
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {}
    if is_ours:
        from lockstep.engines.vllm import plugin

        plugin.register()
        os.environ |= plugin.environment_of("decoder")
        arguments = plugin.arguments_of("decoder")
        settings = {k.replace("-", "_"): v for k, v in arguments.items() if v is not True}
        settings["hf_overrides"] = json.loads(settings["hf_overrides"])
        settings["logits_processors"] = [settings["logits_processors"]]
        settings["async_scheduling"] = False
    engine = LLM(
        model=str(directory), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS, max_num_seqs=max(BATCHES),
        enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20,
        **settings,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=1.0, top_k=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0,
        detokenize=False,
    )  # fmt: skip

    def generate(prompts: np.ndarray) -> None:
        asked = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
        for output in engine.generate(asked, sampling, use_tqdm=False):
            assert len(output.outputs[0].token_ids) == NEW_TOKENS, "no end token, no early end"

    return generate


def make(side: str, directory: Path, dtype: str) -> Generate:
    if side.startswith("vllm"):
        return vllm(directory, dtype, is_ours=side != "vllm")
    return embedded(directory, dtype, is_under_contract=side == "embedded contract")


def measure(side: str, place: str, dtype: str, rounds: int) -> list[float]:
    """Tokens per processor second, for each batch."""
    directory = Path(place)
    generate = make(side, directory, dtype)
    torch.set_num_threads(1)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    found: list[float] = []
    for batch in BATCHES:
        prompts = rng.integers(0, vocab_size, (rounds + 1, batch, PROMPT_TOKENS))
        seconds = [seconds_of(partial(generate, of_a_round)) for of_a_round in prompts]
        found.append(batch * NEW_TOKENS / min(seconds[1:]))
    return found


def speeds_of(name: str, dtype: str, rounds: int) -> tuple[list[float], list[float]]:
    """(embedded, vLLM) of each batch. Prints all sides: one that fails is left out."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        save(name, Path(directory))
        for side in SIDES:
            try:
                found[side] = alone(measure, side, directory, dtype, rounds)
            except SideFailed as error:
                if side in ("embedded", "vllm"):
                    raise
                note(f"  {side:18} did not run: {str(error).splitlines()[-1]}")
    note(f"{name}, {dtype}: tokens per processor second (times vLLM's)")
    for side, speeds in found.items():
        cells = (
            f"batch {batch:>2} {speed:8,.0f} ({speed / peer:5.2f})"
            for batch, speed, peer in zip(BATCHES, speeds, found["vllm"], strict=True)
        )
        note(f"  {side:18} {'   '.join(cells)}")
    return found["embedded"], found["vllm"]


def compare(*, rounds: int = 3, only: tuple[str, ...] = tuple(MODELS)) -> Iterator[Row]:
    if find_spec("vllm") is None:
        raise CannotRun("no vLLM here; see `make test-vllm`")
    packages = ("transformers", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    sides: dict[str, list[tuple[list[float], list[float]]]] = {dtype: [] for dtype in DTYPES}
    for name, dtype in product(only, DTYPES):
        sides[dtype].append(speeds_of(name, dtype, rounds))
    for dtype, found in sides.items():
        ours, peer = (list(chain(*of_side)) for of_side in zip(*found, strict=True))
        least = min(a / b for a, b in zip(ours, peer, strict=True))
        how = (
            f"geometric mean over {len(only)} models and batches of {BATCHES}; the least ratio is "
            f"{least:.2f}, asked for is {FLOORS[dtype]}; {versions}"
        )
        yield row(f"engine_vs_vllm {dtype}", geometric_mean(ours), geometric_mean(peer),
                  "sampled tokens/processor second", better="higher", how=how)  # fmt: skip


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "only": ("tiny qwen3",)})
