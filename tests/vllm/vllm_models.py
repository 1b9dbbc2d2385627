"""Checkpoints of small random models, and of the same models with every tensor moved, for the tests
against a real vLLM. Wide enough for it: its kernels want multiples of 32."""

import asyncio
import json
from pathlib import Path

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.ops.context import PackedContext

VOCAB = 384

LOOP = asyncio.new_event_loop()
"""One for all tests: an engine keeps its connections open, each in its loop."""


def run(awaitable):
    return LOOP.run_until_complete(awaitable)


CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""vLLM's Qwen2 has heads of hidden_size / heads, whatever head_dim says."""

HYBRIDS = sorted(kind for kind, config in CONFIGS.items() if "linear_key_head_dim" in config)
"""Kinds with linear attention, which vLLM runs on a CPU in bfloat16 only, with heads of 128 and
without a prefix cache: it asserts all three."""

DTYPES = [(kind, "float32") for kind in sorted(CONFIGS.keys() - set(HYBRIDS))]
DTYPES += [(kind, "bfloat16") for kind in sorted(CONFIGS)]
"""(kind, dtype) of what vLLM can run on a CPU."""


def is_hybrid(directory):
    return ModelConfig.from_directory(directory).linear is not None


def make_checkpoint(kind, directory, *, seed=0, std=0.12):
    """Writes a checkpoint of random weights, sinks and biases included; returns its directory.

    std: with 0.3 a rounding is multiplied by a thousand on its way, and no tolerance is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[kind]))
    model = Decoder(ModelConfig.from_directory(directory))
    model.init_weights(std=std, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0.0, std, generator=generator)
    return save_again(model, directory, like=directory)


def make_changed(directory, new, *, seed=1, scale=0.5):
    """Writes the checkpoint with every tensor moved by noise of `scale` times its own spread: an
    update that leaves one of them out is another model."""
    model = load_checkpoint(directory)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (scale * spread + 0.01))
    return save_again(model, new, like=directory)


def save_again(model, directory, *, like):
    filled = directory.with_name(directory.name + "-filled")
    save_checkpoint(model, filled, like=like)
    directory.mkdir(parents=True, exist_ok=True)
    for file in filled.iterdir():
        file.replace(directory / file.name)
    filled.rmdir()
    return directory


def trainer_logprobs(directory, ids, *, temperature=1.0):
    """[T] float64 log-prob of each id by the trainer's forward over the whole row; NaN at 0."""
    model = directory if isinstance(directory, Decoder) else load_checkpoint(directory)
    row = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.no_grad():
        hidden = model(row, torch.arange(len(row)), PackedContext.of([len(row)]))
        values, _ = model.log_probs(hidden[:-1], row[1:], temperature=temperature)
    return np.concatenate([[np.nan], values.numpy()])
