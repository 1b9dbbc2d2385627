"""Saves and loads the weights that a run trains: the whole model, or its adapter in PEFT's form.

# E experts  R rank  K inputs  N outputs
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint, load_into, replacing, save_checkpoint
from lockstep.models.lora import ExpertLowRank, adapted, adapters_of, add_adapter
from lockstep.models.lora_config import AdapterSite, LoraShape
from lockstep.models.peft_format import (
    BASE,
    CONFIG,
    WEIGHTS,
    check_base,
    config_of,
    identity_of,
    read_shape,
    tensor_keys,
)
from lockstep.models.tensor_file import DTYPES, Outgoing, read_header, write_tensors
from lockstep.ops.invariant import ask_for_reproducible_gemm

Tensor = torch.Tensor


def save_policy(
    model: Decoder, directory: str | Path, *, like: str | Path, is_writer: bool = True
) -> None:
    """Writes the trained weights. like: directory of the model's config and tokenizer, and the base
    of an adapter. `directory` appears whole or not at all. is_writer: False on ranks that only help
    to gather a sharded model; an adapter is whole on each."""
    if model.lora is None:
        save_checkpoint(model, directory, like=like, is_writer=is_writer)
    elif is_writer:
        save_adapter(model, directory, base=like)


def check_policy(model: Decoder, directory: str | Path, *, like: str | Path) -> None:
    """Raises CheckpointError unless `directory` holds what `model` trains: a whole model, or an
    adapter of the same shape and of the base in `like`."""
    root = Path(directory)
    is_adapter = (root / CONFIG).is_file()
    if is_adapter and model.lora is None:
        raise CheckpointError(
            f"{root} holds an adapter, and this run trains the whole model. Set lora.path={root}, "
            "or merge it first: lockstep export RUN --hf DIR --merged."
        )
    if model.lora is None:
        return
    if not is_adapter:
        raise CheckpointError(
            f"{root} holds a whole model, and this run trains an adapter. To put the adapter on "
            f"that model set model={root}."
        )
    _read_same_shape(model, root)
    check_base(root, like)


def load_policy(model: Decoder, directory: str | Path) -> None:
    """Reads what `save_policy` wrote into the model's own memory. Call `check_policy` first."""
    if model.lora is None:
        load_into(model, directory)
    else:
        load_adapter(model, directory)


def save_adapter(model: Decoder, directory: str | Path, *, base: str | Path) -> None:
    """Writes the model's adapter in PEFT's form. base: directory of the model that it adapts."""
    shape = _shape(model)
    tensors = [
        Outgoing(name, tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)
        for name, tensor in peft_tensors(model)
    ]
    config, identity = config_of(shape, model.config, base), identity_of(shape, base)
    with replacing(directory) as beside:
        write_tensors(beside / WEIGHTS, tensors)
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (beside / BASE).write_text(json.dumps(identity, indent=2) + "\n")


def load_adapter(model: Decoder, directory: str | Path) -> None:
    """Copies an adapter's tensors into the model's adapter (`lora.add_adapter`).

    Raises CheckpointError listing everything that does not fit.
    """
    keys = tensor_keys(_read_same_shape(model, directory).sites)
    path = Path(directory) / WEIGHTS
    with safe_open(str(path), framework="pt") as file, torch.no_grad():
        for site, A, B in _factors(model):
            key_a, key_b = keys[site.name]
            theirs_a, theirs_b = file.get_tensor(key_a), file.get_tensor(key_b)
            if site.is_interleaved:
                theirs_b = theirs_b.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
            if site.num_experts:  # [E * R, K] and [N, R * E]
                theirs_a = theirs_a.view(site.num_experts, -1, site.inputs)
                theirs_b = theirs_b.reshape(site.outputs, -1, site.num_experts).permute(2, 0, 1)
            A.copy_(theirs_a)
            B.copy_(theirs_b)


def merge_adapter(adapter: Path, base: Path, directory: Path) -> None:
    """Writes the model in `base` with `adapter` in its weights: added in float32, then cast to the
    adapter's dtype, which is its run's. Raises CheckpointError for another base."""
    ask_for_reproducible_gemm()  # this product may be the first of a process that trains afterwards
    check_base(adapter, base)
    model = load_checkpoint(base)
    add_adapter(model, read_shape(adapter, model.config), seed=0)
    load_adapter(model, adapter)
    first = next(iter(read_header(adapter / WEIGHTS).values()))
    save_checkpoint(model, directory, like=base, dtype=DTYPES[first.dtype_name])


def read_adapter(directory: str | Path, config: ModelConfig) -> Decoder:
    """The adapter of `directory`, on a decoder that has no other weights (they are on the meta
    device)."""
    with torch.device("meta"):
        model = Decoder(config)
    add_adapter(model, read_shape(directory, config), seed=0)
    for adapter in adapters_of(model):
        adapter.to_empty(device="cpu")
    load_adapter(model, directory)
    return model


def peft_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, tensor) of every A and B, in the order of the model."""
    keys = tensor_keys(_shape(model).sites)
    for site, A, B in _factors(model):
        A, B = A.detach(), B.detach()
        if site.num_experts:
            A, B = A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)
        if site.is_interleaved:
            B = B.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        key_a, key_b = keys[site.name]
        yield key_a, A
        yield key_b, B


def _factors(model: Decoder) -> Iterator[tuple[AdapterSite, Tensor, Tensor]]:
    """(site, A [R, K], B [N, R]), with a leading dim of experts for experts: views of
    parameters."""
    for _, sites, adapter in adapted(model):
        for number, site in enumerate(sites):
            if isinstance(adapter, ExpertLowRank):
                yield site, adapter.A, adapter.B
            else:
                yield site, *adapter.factors(number)


def _read_same_shape(model: Decoder, directory: str | Path) -> LoraShape:
    """The shape of a stored adapter. Raises CheckpointError unless the model's adapter has it."""
    found, mine = read_shape(directory, model.config), _shape(model)
    if (found.sites, found.rank, found.scale) != (mine.sites, mine.rank, mine.scale):
        others = "; other projections are adapted" if found.describe() == mine.describe() else ""
        raise CheckpointError(
            f"{directory} holds an adapter of {found.describe()}; this model's is of "
            f"{mine.describe()}{others}."
        )
    return found


def _shape(model: Decoder) -> LoraShape:
    assert model.lora is not None, "the model has no adapter: `lora.add_adapter` puts one"
    return model.lora
