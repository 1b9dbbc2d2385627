"""Peak memory and CPU time of loading and saving a checkpoint, against `transformers`.

Random models of about 400 MB in shards of about 100 MB. Each figure is of a fresh process: the
kernel's high-water mark of its resident memory (VmHWM, pages of mapped files included) above the
memory before, as a multiple of the model's bytes in memory. The model itself is 1.0; each of its
pages is read once, since a mapped file takes no memory before. transformers' figures include its
imports during loading.

    python benchmarks/load_checkpoint.py [--json] [--megabytes N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import MIB, can_measure, used_by

COMMON = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 8192, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 512,
    "sliding_window": 128,
}  # fmt: skip
QWEN3 = {**COMMON, "model_type": "qwen3", "intermediate_size": 2048}
GPT_OSS = {**COMMON, **EXPERTS, "model_type": "gpt_oss", "attention_bias": True}
QWEN3_MOE = {**COMMON, **EXPERTS, "model_type": "qwen3_moe", "moe_intermediate_size": 512}
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "qwen3 float32": (QWEN3, "float32", False),
    "qwen3_moe bfloat16": (QWEN3_MOE, "bfloat16", False),
    "gpt_oss bfloat16": (GPT_OSS, "bfloat16", False),
    "gpt_oss MXFP4 to bfloat16": (GPT_OSS, "bfloat16", True),
}
LIMIT = 1.2
"""Largest multiple of the model that loading may take, as the docs promise."""


def make(directory: Path, shape: dict[str, Any], dtype: str, num_bytes: int, is_packed: bool):
    """A checkpoint with enough layers to fill `num_bytes` in memory."""
    import torch

    from lockstep.models import hf_io
    from lockstep.models.config import ModelConfig
    from lockstep.models.decoder import Decoder
    from lockstep.models.tensor_file import Outgoing, write_tensors

    def config_of(num_layers: int) -> ModelConfig:
        return ModelConfig.from_hf({**shape, "num_hidden_layers": num_layers})

    def size_of(num_layers: int) -> int:
        with torch.device("meta"):
            model = Decoder(config_of(num_layers))
        itemsize = getattr(torch, dtype).itemsize
        return sum(p.numel() for p in model.parameters()) * itemsize

    first = size_of(1)
    num_layers = max(1, round((num_bytes - first) / (size_of(2) - first)) + 1)
    source = {**shape, "num_hidden_layers": num_layers, "dtype": dtype}
    like = directory / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(source))
    model = Decoder(config_of(num_layers)).to(getattr(torch, dtype))
    hf_io.save_checkpoint(model, directory / "it", like=like, max_shard_bytes=num_bytes // 4)
    if not is_packed:
        return
    for path in sorted((directory / "it").glob("*.safetensors")):
        path.unlink()
    (directory / "it" / hf_io.INDEX).unlink(missing_ok=True)
    tensors: list[Outgoing] = []
    for name, tensor in hf_io.hf_tensors(model).items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            tensors.append(Outgoing(name, tuple(tensor.shape), tensor.dtype, lambda t=tensor: t))
            continue
        experts, inputs, outputs = tensor.shape
        for part, tail in (("blocks", (16,)), ("scales", ())):
            shape_ = (experts, outputs, inputs // 32, *tail)
            values = torch.randint(118, 126, shape_, dtype=torch.uint8)
            tensors.append(Outgoing(f"{name}_{part}", shape_, torch.uint8, lambda t=values: t))
    write_tensors(directory / "it" / hf_io.WEIGHTS, tensors)
    source["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "it" / "config.json").write_text(json.dumps(source))


def measure(side: str, directory: Path, dtype: str, is_packed: bool) -> dict[str, float]:
    """Loads, then saves. Runs in a process of its own."""
    import torch

    if side == "ours":
        from lockstep.models.hf_io import load_checkpoint, save_checkpoint

        def load() -> Any:
            return load_checkpoint(directory, dtype=getattr(torch, dtype))

        def save(model: Any) -> None:
            save_checkpoint(model, directory.with_name("ours"), like=directory)
    else:
        import transformers
        from transformers import AutoModelForCausalLM

        def load() -> Any:
            settings: dict[str, Any] = {}
            if is_packed:
                quantization = transformers.Mxfp4Config(dequantize=True)
                settings["quantization_config"] = quantization
            return AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), **settings
            )

        def save(model: Any) -> None:
            model.save_pretrained(directory.with_name("theirs"), max_shard_size="100MB")

    torch.ones(64, 64) @ torch.ones(64, 64)  # what torch itself sets up once
    out: dict[str, float] = {}
    model = None

    def load_whole() -> None:
        nonlocal model
        model = load()
        for parameter in model.parameters():  # pages of a mapped file come when they are read
            parameter.detach().view(-1)[:: 4096 // parameter.itemsize].sum()

    for name, run in (("load", load_whole), ("save", lambda: save(model))):
        seconds, mib = used_by(run)
        out |= {f"{name}_bytes": mib * MIB, f"{name}_seconds": seconds}
    assert model is not None
    out["model_bytes"] = sum(p.nbytes for p in model.parameters())
    return out


def compare(name: str, num_bytes: int, say: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        run_alone("make", scratch, name, str(num_bytes))
        found = {side: json.loads(run_alone(side, scratch, name)) for side in ("ours", "peer")}
    row: dict[str, Any] = {"model": name}
    for side, figures in found.items():
        size = figures["model_bytes"]
        row |= {
            f"{side}_load": round(figures["load_bytes"] / size, 3),
            f"{side}_save": round(figures["save_bytes"] / size, 3),
            f"{side}_load_seconds": round(figures["load_seconds"], 2),
            f"{side}_save_seconds": round(figures["save_seconds"], 2),
        }
    row["model_megabytes"] = round(found["ours"]["model_bytes"] / 1e6)
    if say:
        print(
            f"{name:26} {row['model_megabytes']} MB  load {row['ours_load']:.2f} of the model in "
            f"{row['ours_load_seconds']:.1f} CPU s (transformers {row['peer_load']:.2f} in "
            f"{row['peer_load_seconds']:.1f})  save +{row['ours_save']:.2f} in "
            f"{row['ours_save_seconds']:.1f} (+{row['peer_save']:.2f} in "
            f"{row['peer_save_seconds']:.1f})",
            flush=True,
        )
    return row


def run_alone(what: str, *words: str) -> str:
    """Runs this file in a fresh process. Returns its last line."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, *words],
        check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "TQDM_DISABLE": "1"},
    )  # fmt: skip
    return (done.stdout.splitlines() or [""])[-1]


def child(what: str, scratch: str, name: str, num_bytes: str = "0") -> None:
    shape, dtype, is_packed = CASES[name]
    if what == "make":
        make(Path(scratch), shape, dtype, int(num_bytes), is_packed)
    else:
        print(json.dumps(measure(what, Path(scratch) / "it", dtype, is_packed)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line, say no more")
    parser.add_argument("--megabytes", type=int, default=400, help="size of the models")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    if not can_measure():
        print(json.dumps({"name": "load_checkpoint", "skipped": "needs Linux's /proc"}))
        return None
    rows = [compare(name, options.megabytes * 10**6, not options.json) for name in CASES]
    worst = {side: max(row[f"{side}_load"] for row in rows) for side in ("ours", "peer")}
    summary = {
        "name": "load_checkpoint",
        "ours": worst["ours"],
        "peer": worst["peer"],
        "unit": "x the model",
        "ratio": round(worst["peer"] / worst["ours"], 2),
        "better": "lower",
        "how": f"peak memory of loading, worst of {len(rows)} models of {options.megabytes} MB; at "
        f"most {LIMIT} is promised",
        "cases": rows,
    }
    print(json.dumps(summary))
    return None


if __name__ == "__main__":
    main()
