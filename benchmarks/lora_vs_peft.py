"""One training step of a LoRA adapter, against PEFT on transformers, and against no adapter.

The log-probs of 2048 tokens in two rows, backward, and AdamW, in float32 on one thread: a mixture
of experts as gpt-oss has them (adapters on attention and experts) and a dense Qwen3 (on attention
and MLP), rank 8. Each side runs in processes of its own: a step to warm up, then a step that is
measured in CPU seconds. A second process measures the peak of memory above the model's weights and
the adapter; there the allocator gives back freed memory, so that the peak is of tensors. Both sides
start from one checkpoint and one adapter, and their losses are compared.

    python benchmarks/lora_vs_peft.py [--tokens N] [--only MODEL ...]

PEFT comes with `pip install 'lockstep-rl[parity]'`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import (
    CLEAR_REFS,
    MIB,
    CannotRun,
    Row,
    alone,
    main,
    models_of,
    require_proc,
    resident_bytes,
    row,
    seconds_of,
)

import torch

RANK = 8
MODELS = models_of("lora_vs_peft")
SIDES = ("ours", "peer", "full")
HOW = (
    "forward, backward and AdamW on two rows, float32, one thread, rank 8 on every projection; a "
    "process of its own, second step"
)


def create(directory: Path, model: str) -> None:
    """A checkpoint with random weights and an adapter on it, in PEFT's format."""
    from lockstep.models.config import ModelConfig
    from lockstep.models.decoder import Decoder
    from lockstep.models.hf_io import save_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.lora_config import LoraConfig, lora_shape
    from lockstep.models.peft_io import save_adapter

    like, base = directory / "like", directory / "base"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(MODELS[model]))
    decoder = Decoder(ModelConfig.from_hf(MODELS[model]))
    decoder.init_weights(seed=0)
    save_checkpoint(decoder, base, like=like)
    add_adapter(decoder, lora_shape(LoraConfig(rank=RANK), decoder.config), seed=0)
    save_adapter(decoder, directory / "adapter", base=base)


def our_loss(
    directory: Path, tokens: int, *, has_adapter: bool
) -> tuple[torch.nn.Module, Callable[[], Any]]:
    from lockstep.models.hf_io import load_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.peft_format import read_shape
    from lockstep.models.peft_io import load_adapter
    from lockstep.ops.context import PackedContext

    model = load_checkpoint(directory / "base")
    if has_adapter:
        add_adapter(model, read_shape(directory / "adapter", model.config), seed=0)
        load_adapter(model, directory / "adapter")
    ids = rows(tokens).flatten()
    positions = torch.arange(tokens).repeat(2)
    predictors = (positions < tokens - 1).nonzero()[:, 0]

    def loss() -> torch.Tensor:
        logprobs, _ = model.score(
            ids, positions, PackedContext.of([tokens] * 2),
            predictors_N=predictors, targets_N=ids[predictors + 1],
        )  # fmt: skip
        return -logprobs.mean()

    return model, loss


def peer_loss(directory: Path, tokens: int) -> tuple[torch.nn.Module, Callable[[], Any]]:
    import peft
    import transformers

    settings = transformers.AutoConfig.from_pretrained(directory / "base")
    attention = "eager" if settings.model_type == "gpt_oss" else "sdpa"
    base = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "base", dtype=torch.float32, attn_implementation=attention
    )
    model = peft.PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True)

    def loss() -> torch.Tensor:
        ids = rows(tokens)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return -logprobs.mean()

    return model, loss


def rows(tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(MODELS["qwen3"]["vocab_size"], (2, tokens), generator=generator)


def measure(side: str, place: str, tokens: int) -> dict[str, float]:
    """The second step of one side, in this process."""
    torch.set_num_threads(1)
    directory = Path(place)
    if side == "peer":
        model, loss_of = peer_loss(directory, tokens)
    else:
        model, loss_of = our_loss(directory, tokens, has_adapter=side == "ours")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    resting, losses = resident_bytes("VmRSS"), []

    def step() -> None:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))

    step()
    CLEAR_REFS.write_text("5")  # the peak is counted anew
    seconds = seconds_of(step)
    mib = (resident_bytes("VmHWM") - resting) / MIB
    return {"seconds": seconds, "mib": mib, "loss": losses[-1]}


def compare(*, tokens: int = 1024, only: tuple[str, ...] = tuple(MODELS)) -> Iterator[Row]:
    """tokens: of each of the two rows."""
    require_proc()
    if missing := [name for name in ("peft", "transformers") if find_spec(name) is None]:
        raise CannotRun(f"{' and '.join(missing)} missing: pip install 'lockstep-rl[parity]'")
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    for model in only:
        with tempfile.TemporaryDirectory() as scratch:
            create(Path(scratch), model)
            timed, sized = (
                [alone(measure, side, scratch, tokens, environment=variables) for side in SIDES]
                for variables in ({}, exact)
            )
        gap = abs(timed[0]["loss"] - timed[1]["loss"])
        if gap > 1e-4:
            raise SystemExit(f"{model}: the losses differ by {gap:.2g}: the sides are not the same")
        for found, key, unit in ((timed, "seconds", "CPU s"), (sized, "mib", "MiB, no weights")):
            ours, peer, full = (figures[key] for figures in found)
            how = f"{HOW}; our step without an adapter: {full:.3g}"
            yield row(f"LoRA against PEFT, {model}", ours, peer, unit, how=how)


if __name__ == "__main__":
    main(compare, short={"tokens": 256, "only": ("gpt-oss",)})
