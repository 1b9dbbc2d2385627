"""Tokens per processor second of the embedded engine against vLLM and transformers.

Same random weights and prompts, batches of 1, 8 and 64 replies of 64 new tokens each behind prompts
of 32, temperature 1, end tokens off, one thread, each engine in a process of its own, in turn. All
record the log-prob of every token. The embedded engine runs stock ops (contract=none) and, in a row
of its own, the contract's ops; so does Lockstep's decoder inside vLLM. transformers runs its
continuous batching. Each figure is the best processor time of a whole batch, after a batch to warm
up.

    .venv-vllm/bin/python benchmarks/engine_vs_vllm.py [--json] [--rounds N] [--only TEXT]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

import numpy as np
import torch

BATCHES = (1, 8, 64)
PROMPT_TOKENS, NEW_TOKENS = 32, 64
DTYPES = ("float32", "bfloat16")
FLOORS = {"float32": 1.0, "bfloat16": 0.8}
"""How many times vLLM's speed the embedded engine is to have."""

COMMON = {
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TINY = COMMON | {
    "vocab_size": 561, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.15,
    "tie_word_embeddings": True,
}  # fmt: skip
TEN_MILLION = COMMON | {
    "vocab_size": 4096, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "initializer_range": 0.08, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny qwen3": ("Qwen3", TINY | {"intermediate_size": 128}),
    "10M qwen3": ("Qwen3", TEN_MILLION | {"num_hidden_layers": 6, "intermediate_size": 1536}),
    "10M gpt_oss": (
        "GptOss",
        TEN_MILLION | {
            "num_hidden_layers": 4, "intermediate_size": 256, "num_local_experts": 8,
            "num_experts_per_tok": 2, "sliding_window": 64,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 256, "truncate": False,
            },
        },
    ),
}  # fmt: skip
SIDES = ("embedded", "embedded contract", "vllm", "vllm, our decoder", "transformers")

Generate = Callable[[np.ndarray], None]
"""[requests, tokens] prompts -> NEW_TOKENS each, sampled."""


def save(name: str, directory: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**shape)
    getattr(transformers, f"{kind}ForCausalLM")._from_config(config).save_pretrained(directory)


# -- the sides --------------------------------------------------------------------------------


def embedded(directory: Path, dtype: str, *, is_under_contract: bool) -> Generate:
    from lockstep.engines.config import EmbeddedConfig
    from lockstep.engines.embedded.engine import EmbeddedEngine
    from lockstep.models.hf_io import load_checkpoint
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.ops.selftest import prove
    from lockstep.types import Request, SamplingParams

    if is_under_contract:
        ask_for_reproducible_gemm()
    model = load_checkpoint(directory, dtype=getattr(torch, dtype))
    if is_under_contract:
        proof = prove(model)
        if not proof.is_kept:
            raise SystemExit(f"the contract cannot be kept: {proof.failure}")
        model.ops = proof.ops
    engine = EmbeddedEngine(model, EmbeddedConfig(prefix_cache=False))
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    num_runs = 0

    async def reply(name: str, ids: np.ndarray, seed: int) -> None:
        request = Request(id=name, prompt_ids=ids, sampling=sampling, seed=seed)
        async for delta in engine.generate(request):
            assert len(delta.token_ids) == NEW_TOKENS, "no end token, no early end"

    async def all_of(prompts: np.ndarray) -> None:
        await asyncio.gather(*(reply(f"{num_runs}/{i}", ids, i) for i, ids in enumerate(prompts)))

    def generate(prompts: np.ndarray) -> None:
        nonlocal num_runs
        num_runs += 1
        asyncio.run(all_of(prompts.astype(np.int32)))

    return generate


def vllm(directory: Path, dtype: str, *, is_ours: bool) -> Generate:
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {}
    if is_ours:
        from lockstep.engines.vllm import plugin

        plugin.register()
        os.environ |= plugin.ENVIRONMENT
        settings = {name.replace("-", "_"): text for name, text in plugin.SETTINGS.items()}
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


def continuous_batching(directory: Path, dtype: str) -> Generate:
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    sampling = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    batching = ContinuousBatchingConfig(
        num_blocks=512, block_size=32, max_batch_tokens=2048, return_logprobs=True
    )

    def generate(prompts: np.ndarray) -> None:
        found = model.generate_batch(
            prompts.tolist(), generation_config=sampling, continuous_batching_config=batching,
            progress_bar=False,
        )  # fmt: skip
        lengths = [len(output.generated_tokens) for output in found.values()]
        assert lengths == [NEW_TOKENS] * len(prompts), f"no end token, no early end: {lengths}"

    return generate


def make(side: str, directory: Path, dtype: str) -> Generate:
    if side.startswith("vllm"):
        return vllm(directory, dtype, is_ours=side != "vllm")
    if side == "transformers":
        return continuous_batching(directory, dtype)
    return embedded(directory, dtype, is_under_contract=side == "embedded contract")


def measure(side: str, directory: Path, dtype: str, rounds: int) -> dict[str, float]:
    """Tokens per processor second, for each batch."""
    generate = make(side, directory, dtype)
    torch.set_num_threads(1)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    found: dict[str, float] = {}
    for batch in BATCHES:
        seconds = []
        for _ in range(rounds + 1):
            prompts = rng.integers(0, vocab_size, (batch, PROMPT_TOKENS))
            began = time.process_time()
            generate(prompts)
            seconds.append(time.process_time() - began)
        found[str(batch)] = batch * NEW_TOKENS / min(seconds[1:])
    return found


# -- the table --------------------------------------------------------------------------------


def in_process_of_its_own(
    side: str, directory: Path, dtype: str, rounds: int
) -> dict[str, float] | str:
    """The result of `measure`, or the reason for its failure."""
    command = [sys.executable, __file__, "--measure", side, str(directory), dtype, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each batch")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        side, directory, dtype, rounds = options.measure
        print(json.dumps(measure(side, Path(directory), dtype, int(rounds))))
        return
    name = Path(__file__).stem
    if find_spec("vllm") is None:
        print(json.dumps({"name": name, "skipped": "no vLLM here; see `make test-vllm`"}))
        return
    cases = []
    for model in [name for name in MODELS if options.only in name]:
        with tempfile.TemporaryDirectory() as directory:
            save(model, Path(directory))
            for dtype in DTYPES:
                found = {
                    side: in_process_of_its_own(side, Path(directory), dtype, options.rounds)
                    for side in SIDES
                }
                cases.append({"model": model, "dtype": dtype, **found})
                if not options.json:
                    show(cases[-1])
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}" for package in ("transformers", "torch")
    )
    parts = [
        part_of(f"{name} {dtype}", [c for c in cases if c["dtype"] == dtype], versions)
        for dtype in DTYPES
    ]
    print(json.dumps({"name": name, "parts": parts, "cases": cases}))


def show(case: dict[str, Any]) -> None:
    print(f"{case['model']}, {case['dtype']}: tokens per processor second (times vLLM's)")
    for side in SIDES:
        found, peer = case[side], case["vllm"]
        if isinstance(found, str):
            print(f"  {side:18} did not run: {found}")
            continue
        cells = [
            f"batch {batch:>2} {found[batch]:8,.0f}"
            + ("" if isinstance(peer, str) else f" ({found[batch] / peer[batch]:5.2f})")
            for batch in map(str, BATCHES)
        ]
        print(f"  {side:18} " + "   ".join(cells), flush=True)


def part_of(name: str, cases: list[dict[str, Any]], versions: str) -> dict[str, Any]:
    """A row of `make bench`: geometric means, and the least ratio of a model and batch."""
    for case in cases:
        for side in ("embedded", "vllm"):
            if isinstance(case[side], str):
                raise SystemExit(f"{case['model']}, {case['dtype']}: {side}: {case[side]}")
    pairs = [
        (case["embedded"][batch], case["vllm"][batch])
        for case in cases
        for batch in map(str, BATCHES)
    ]
    ours, peer = (
        math.exp(sum(map(math.log, values)) / len(pairs)) for values in zip(*pairs, strict=True)
    )
    least = min(a / b for a, b in pairs)
    dtype = cases[0]["dtype"]
    return {
        "name": name,
        "ours": round(ours),
        "peer": round(peer),
        "unit": "sampled tokens/processor second",
        "ratio": round(ours / peer, 2),
        "better": "higher",
        "how": f"geometric mean over {len(cases)} models and batches of {BATCHES}; the least of "
        f"the {len(pairs)} ratios is {least:.2f}, asked for is {FLOORS[dtype]}; {versions}",
    }


if __name__ == "__main__":
    main()
