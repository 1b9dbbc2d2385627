"""Peak memory and CPU time of loading a checkpoint, against `transformers`.

Random models of about 400 MB in shards of about 100 MB. Each figure is of a fresh process: the
kernel's high-water mark of its resident memory (VmHWM, pages of mapped files included) above the
memory before, as a multiple of the model's bytes in memory. The model itself is 1.0; each of its
pages is read once, since a mapped file takes no memory before. transformers' figures include its
imports during loading.

    python benchmarks/load_checkpoint.py [--megabytes N] [--only MODEL ...]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import MIB, Row, alone, main, models_of, note, require_proc, row, usage

MODELS = models_of("load_checkpoint")
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "qwen3 float32": (MODELS["qwen3"], "float32", False),
    "qwen3_moe bfloat16": (MODELS["qwen3_moe"], "bfloat16", False),
    "gpt_oss bfloat16": (MODELS["gpt_oss"], "bfloat16", False),
    "gpt_oss MXFP4 to bfloat16": (MODELS["gpt_oss"], "bfloat16", True),
}
SIDES = ("ours", "transformers")
LIMIT = 1.2
"""Largest multiple of the model that loading may take, as the docs promise."""


def make(place: str, name: str, num_bytes: int) -> None:
    """A checkpoint with enough layers to fill `num_bytes` in memory. Runs in its own process."""
    import torch

    from lockstep.models import hf_io
    from lockstep.models.config import ModelConfig
    from lockstep.models.decoder import Decoder
    from lockstep.models.tensor_file import Outgoing, write_tensors

    directory, (shape, dtype, is_packed) = Path(place), CASES[name]

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


def measure(side: str, place: str, name: str) -> dict[str, float]:
    """Peak memory of loading as a multiple of the model, and seconds. Runs in its own process."""
    import torch

    directory, (_, dtype, is_packed) = Path(place) / "it", CASES[name]
    settings: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if side == "ours":
        from lockstep.models.hf_io import load_checkpoint as load
    else:
        import transformers

        load = transformers.AutoModelForCausalLM.from_pretrained
        if is_packed:
            settings["quantization_config"] = transformers.Mxfp4Config(dequantize=True)

    torch.ones(64, 64) @ torch.ones(64, 64)  # what torch itself sets up once
    model = None

    def load_whole() -> None:
        nonlocal model
        model = load(directory, **settings)
        for parameter in model.parameters():  # pages of a mapped file come when they are read
            parameter.detach().view(-1)[:: 4096 // parameter.itemsize].sum()

    seconds, peak = usage(load_whole).values()
    assert model is not None
    return {"seconds": seconds, "load": peak * MIB / sum(p.nbytes for p in model.parameters())}


def compare(*, megabytes: int = 400, only: tuple[str, ...] = tuple(CASES)) -> Iterator[Row]:
    require_proc()
    how = f"peak memory of loading, models of {megabytes} MB; at most {LIMIT} is promised"
    for name in only:
        with tempfile.TemporaryDirectory() as scratch:
            alone(make, scratch, name, megabytes * 10**6)
            quiet = {"TQDM_DISABLE": "1"}
            found = [alone(measure, side, scratch, name, environment=quiet) for side in SIDES]
        for side, figures in zip(SIDES, found, strict=True):
            seconds = figures["seconds"]
            note(f"{name}, {side}: {figures['load']:.2f} of the model in {seconds:.1f} CPU s")
        ours, peer = (figures["load"] for figures in found)
        yield row(f"load_checkpoint, {name}", ours, peer, "x the model", how=how)


if __name__ == "__main__":
    main(compare, short={"megabytes": 100, "only": ("qwen3 float32", "gpt_oss MXFP4 to bfloat16")})
