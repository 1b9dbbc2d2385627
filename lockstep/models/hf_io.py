"""Hugging Face checkpoints in and out: config.json, safetensors, tokenizer files.

The decoder fuses projections that Hugging Face keeps apart. The map below says, for each of our
parameters, which of theirs it is made of; loading and saving walk it in opposite directions, so
that what is loaded is saved back with the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import merged

Tensor = torch.Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "renderer.json",
)
"""Files beside the weights that travel with a checkpoint. renderer.json is ours: the settings of
the renderer that the model was trained with."""


@dataclass(frozen=True, slots=True)
class Source:
    """The Hugging Face tensors that one of our parameters is made of."""

    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    """Rows of each, where several are laid one after another."""
    load: Callable[[Tensor], Tensor] = lambda x: x
    save: Callable[[Tensor], Tensor] = lambda x: x


def _deinterleave(x: Tensor) -> Tensor:
    """gpt-oss alternates gate and up along the last dim; the decoder lays gate, then up."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def _interleave(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.stack([gate, up], -1).flatten(-2)


def parameter_sources(config: ModelConfig) -> dict[str, Source]:
    """Our parameter name -> where it comes from, for every parameter of the decoder."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out = {"embedding": Source(("model.embed_tokens.weight",))}
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        out[f"{ours}.input_norm"] = Source((f"{theirs}.input_layernorm.weight",))
        out[f"{ours}.post_attention_norm"] = Source((f"{theirs}.post_attention_layernorm.weight",))
        for part in ("weight", "bias") if c.has_attention_bias else ("weight",):
            out[f"{ours}.attention.qkv_proj.{part}"] = Source(
                tuple(f"{attention}.{x}_proj.{part}" for x in "qkv"), (q, kv, kv)
            )
            out[f"{ours}.attention.o_proj.{part}"] = Source((f"{attention}.o_proj.{part}",))
        if c.has_qk_norm:
            out[f"{ours}.attention.q_norm"] = Source((f"{attention}.q_norm.weight",))
            out[f"{ours}.attention.k_norm"] = Source((f"{attention}.k_norm.weight",))
        if c.has_sinks:
            out[f"{ours}.attention.sinks"] = Source((f"{attention}.sinks",))
        if c.is_moe:
            experts = f"{mlp}.experts"
            out[f"{ours}.mlp.router.weight"] = Source((f"{mlp}.router.weight",))
            out[f"{ours}.mlp.router.bias"] = Source((f"{mlp}.router.bias",))
            out[f"{ours}.mlp.gate_up_proj"] = Source(
                (f"{experts}.gate_up_proj",),
                load=lambda x: _deinterleave(x).transpose(1, 2),
                save=lambda x: _interleave(x.transpose(1, 2)),
            )
            out[f"{ours}.mlp.gate_up_bias"] = Source(
                (f"{experts}.gate_up_proj_bias",), load=_deinterleave, save=_interleave
            )
            out[f"{ours}.mlp.down_proj"] = Source(
                (f"{experts}.down_proj",),
                load=lambda x: x.transpose(1, 2),
                save=lambda x: x.transpose(1, 2),
            )
            out[f"{ours}.mlp.down_bias"] = Source((f"{experts}.down_proj_bias",))
        else:
            out[f"{ours}.mlp.gate_up_proj.weight"] = Source(
                (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), (c.intermediate_size,) * 2
            )
            out[f"{ours}.mlp.down_proj.weight"] = Source((f"{mlp}.down_proj.weight",))
    out["final_norm"] = Source(("model.norm.weight",))
    if not c.tie_embeddings:
        out["untied_head"] = Source(("lm_head.weight",))
    return out


def load_checkpoint(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder with the weights of a Hugging Face checkpoint directory.

    Raises CheckpointError naming every tensor that is missing, extra or misshapen, not the first.
    """
    config = ModelConfig.from_directory(directory)
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype).to_empty(device=device)
    load_weights(model, read_tensors(directory), where=str(directory))
    return model


def read_tensors(directory: str | Path) -> dict[str, Callable[[], Tensor]]:
    """name -> a function that reads that tensor, over one file or the shards of an index."""
    root = Path(directory)
    if (root / INDEX).is_file():
        files = sorted(set(json.loads((root / INDEX).read_text())["weight_map"].values()))
    elif (root / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        raise CheckpointError(f"{root} holds neither {WEIGHTS} nor {INDEX}.")
    out: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        try:
            handle = safe_open(str(root / file), framework="pt")
        except Exception as error:
            raise CheckpointError(
                f"{root / file} cannot be read ({error}). A torn copy?"
            ) from error
        for name in handle.keys():  # noqa: SIM118  a safetensors handle is not a mapping
            out[name] = lambda handle=handle, name=name: handle.get_tensor(name)
    return out


def load_weights(model: Decoder, tensors: dict[str, Callable[[], Tensor]], *, where: str) -> None:
    """Copies Hugging Face tensors into the model's own memory, one at a time."""
    sources = parameter_sources(model.config)
    known = {name for source in sources.values() for name in source.names}
    ignored = {"lm_head.weight"} if model.config.tie_embeddings else set()
    problems = [f"missing {name}" for name in sorted(known - set(tensors))]
    problems += [f"unexpected {name}" for name in sorted(set(tensors) - known - ignored)]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for ours, source in sources.items():
            if any(name not in tensors for name in source.names):
                continue
            parameter = parameters[ours]
            theirs = source.load(torch.cat([tensors[name]() for name in source.names]))
            if theirs.shape != parameter.shape:
                problems.append(
                    f"{' + '.join(source.names)}: expected {list(parameter.shape)}, "
                    f"found {list(theirs.shape)}"
                )
                continue
            parameter.copy_(theirs)
    if problems:
        raise CheckpointError(
            f"{where} does not fit its config ({model.config.architecture}): {'; '.join(problems)}."
        )


def hf_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) for every parameter, in the order of the model; with its adapter
    merged into them, if it has one."""
    parameters = dict(model.named_parameters())
    for ours, source in parameter_sources(model.config).items():
        value = source.save(merged(model, ours, parameters[ours].detach()))
        parts = value.split(source.sizes) if source.sizes else (value,)
        yield from zip(source.names, parts, strict=True)


def save_checkpoint(
    model: Decoder,
    directory: str | Path,
    *,
    like: str | Path,
    dtype: torch.dtype | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
    config_changes: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights in Hugging Face's names, with config and tokenizer files copied from `like`.

    extra_tensors: written beside the decoder's, as they are: a head of another kind.
    config_changes: keys of config.json that differ from those of `like`.
    The directory appears whole or not at all: it is written beside and renamed.
    """
    target = Path(directory)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tensors = {
        name: tensor.to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in hf_tensors(model)
    }
    for name, tensor in (extra_tensors or {}).items():
        tensors[name] = tensor.cpu().contiguous()
    save_file(tensors, str(beside / WEIGHTS), metadata={"format": "pt"})
    (beside / WEIGHTS).chmod(0o644)  # safetensors writes it for its owner alone
    config = json.loads((Path(like) / "config.json").read_text())
    config |= config_changes or {}
    config["dtype"] = str(dtype or model.embedding.dtype).removeprefix("torch.")
    (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if (Path(like) / name).is_file():
            shutil.copyfile(Path(like) / name, beside / name)
    if target.exists():
        shutil.rmtree(target)
    os.replace(beside, target)
