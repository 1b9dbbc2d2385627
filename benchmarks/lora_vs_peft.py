"""One training step of a LoRA adapter, against PEFT on transformers, and against no adapter.

The log-probs of 2048 tokens in two rows, backward, and AdamW, in float32 on one thread: a mixture
of experts as gpt-oss has them (adapters on attention and experts) and a dense Qwen3 (on attention
and MLP), rank 8. Each side runs in processes of its own: a step to warm up, then a step that is
measured in CPU seconds. A second process measures the peak of memory above the model's weights and
the adapter; there the allocator gives back freed memory, so that the peak is of tensors. Both sides
start from one checkpoint and one adapter, and their losses are compared.

    python benchmarks/lora_vs_peft.py [--json]

PEFT comes with `pip install 'lockstep-rl[parity]'`; exit code 3 says that it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

NAME = "lora-vs-peft"
CANNOT_RUN = 3
LENGTHS = (1024, 1024)
RANK = 8
SHAPE = {
    "vocab_size": 1024, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        **SHAPE, "model_type": "gpt_oss", "intermediate_size": 512, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    },
    "qwen3": {
        **SHAPE, "model_type": "qwen3", "intermediate_size": 1536, "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
    },
}  # fmt: skip
SIDES = ("ours", "peer", "full")
HOW = (
    "step of 2048 tokens in two rows, forward, backward and AdamW, float32, one thread, rank 8 on "
    "every projection; a process of its own, second step"
)


def create(directory: Path, model: str) -> None:
    """A checkpoint with random weights and an adapter on it, in PEFT's form."""
    from lockstep.models.config import ModelConfig
    from lockstep.models.decoder import Decoder
    from lockstep.models.hf_io import save_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.lora_config import LoraConfig, lora_shape
    from lockstep.models.peft_io import save_adapter

    base = directory / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(MODELS[model]))
    decoder = Decoder(ModelConfig.from_hf(MODELS[model]))
    decoder.init_weights(seed=0)
    save_checkpoint(decoder, directory / "filled", like=base)
    base.joinpath("config.json").unlink()
    base.rmdir()
    (directory / "filled").rename(base)
    add_adapter(decoder, lora_shape(LoraConfig(rank=RANK), decoder.config), seed=0)
    save_adapter(decoder, directory / "adapter", base=base)


def our_loss(directory: Path, *, has_adapter: bool) -> tuple[torch.nn.Module, Callable[[], Any]]:
    from lockstep.models.hf_io import load_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.peft_format import read_shape
    from lockstep.models.peft_io import load_adapter
    from lockstep.ops.context import PackedContext

    model = load_checkpoint(directory / "base")
    if has_adapter:
        add_adapter(model, read_shape(directory / "adapter", model.config), seed=0)
        load_adapter(model, directory / "adapter")
    ids = torch.cat(rows())
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    is_last = torch.cat([torch.arange(n) == n - 1 for n in LENGTHS])
    predictors = (~is_last).nonzero()[:, 0]

    def loss() -> torch.Tensor:
        logprobs, _ = model.score(
            ids, positions, PackedContext.of(list(LENGTHS)),
            predictors_N=predictors, targets_N=ids[predictors + 1],
        )  # fmt: skip
        return -logprobs.mean()

    return model, loss


def peer_loss(directory: Path) -> tuple[torch.nn.Module, Callable[[], Any]]:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "base", dtype=torch.float32, attn_implementation="eager"
        if json.loads((directory / "base" / "config.json").read_text())["model_type"] == "gpt_oss"
        else "sdpa",
    )  # fmt: skip
    model = peft.PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True)

    def loss() -> torch.Tensor:
        ids = torch.stack(rows())
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return -logprobs.mean()

    return model, loss


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(SHAPE["vocab_size"], (n,), generator=generator) for n in LENGTHS]


def measure(side: str, directory: Path) -> dict[str, float]:
    """The second step of one side, in this process."""
    torch.set_num_threads(1)
    if side == "peer":
        model, loss_of = peer_loss(directory)
    else:
        model, loss_of = our_loss(directory, has_adapter=side == "ours")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    resting, seconds, losses = resident_bytes("VmRSS"), 0.0, []
    for number in range(2):
        if number:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        began = cpu_seconds()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = cpu_seconds() - began
        losses.append(float(loss.detach()))
    return {
        "seconds": seconds, "mib": (resident_bytes("VmHWM") - resting) / 2**20,
        "loss": losses[-1], "trained": sum(p.numel() for p in trained),
    }  # fmt: skip


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this benchmark needs Linux.")


def compare() -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for model in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            create(Path(scratch), model)
            found = {side: in_children(side, scratch) for side in SIDES}
        ours, peer, full = (found[side] for side in SIDES)
        gap = abs(ours["loss"] - peer["loss"])
        if gap > 1e-4:
            raise SystemExit(f"{model}: the losses differ by {gap:.2g}: the sides are not the same")
        for key, unit in (("seconds", "CPU s"), ("mib", "MiB beyond the model")):
            against = f"our step without an adapter: {full[key]:.3g}"
            parts.append(
                {
                    "name": f"{NAME}, {model}", "ours": round(ours[key], 3),
                    "peer": round(peer[key], 3), "unit": unit,
                    "ratio": round(peer[key] / ours[key], 2), "better": "lower",
                    "how": f"{HOW}; {against}",
                }
            )  # fmt: skip
            print(f"{model}: {unit}: {found_text(found, key)}", file=sys.stderr)
    return {**parts[0], "parts": parts}


def found_text(found: dict[str, dict[str, float]], key: str) -> str:
    return ", ".join(f"{side} {values[key]:.3g}" for side, values in found.items())


def in_children(side: str, directory: str) -> dict[str, float]:
    timed = in_child(side, directory)
    exact = in_child(side, directory, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0")
    return {**timed, "mib": exact["mib"]}


def in_child(side: str, directory: str, **environment: str) -> dict[str, float]:
    words = [sys.executable, __file__, "--side", side, "--at", directory]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [--json]")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.at)))
        return 0
    missing = [name for name in ("peft", "transformers") if find_spec(name) is None]
    if missing:
        reason = f"{' and '.join(missing)} missing: pip install 'lockstep-rl[parity]'"
        print(reason, file=sys.stderr)
        print(json.dumps({"name": NAME, "skipped": reason}))
        return CANNOT_RUN
    print(json.dumps(compare()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
