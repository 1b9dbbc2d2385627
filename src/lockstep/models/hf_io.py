"""Hugging Face checkpoints in and out: config.json, safetensors, tokenizer files.

The decoder fuses projections that Hugging Face keeps apart: each of their tensors is a view of one
of our parameters (`shapes.decoder_layout`). Loading writes to that view and saving reads from it,
so that a checkpoint is saved back with the same bytes, and neither needs more room than the model
and a block.

`hf_tensors`, `save_checkpoint` and `load_into` take the type of model as their case: a model of
another kind registers its own (`models.fallback`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, singledispatch
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import read_json
from lockstep.errors import CheckpointError, printable
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import merged
from lockstep.models.shapes import (
    CHOICE_BIAS,
    EMBEDDING,
    HEAD,
    HFPiece,
    ParameterLayout,
    decoder_layout,
    named,
)
from lockstep.models.sharding import full_tensor, is_sharded, local_part, mesh_of, part_like, shard
from lockstep.models.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    Outgoing,
    StoredTensor,
    blocks_of,
    read_header,
    rows_of,
    write_tensors,
)
from lockstep.ops.base import Ops

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
    "LICENSE",
)
"""Files that are copied with a checkpoint's weights. renderer.json is written by Lockstep: settings
of the renderer that the model was trained with."""

M = TypeVar("M", bound=torch.nn.Module)

MAX_SHARD_BYTES = 5 << 30
"""Largest weight file, where the files of the checkpoint `like` cannot be reproduced."""
MAX_NAMED = 20  # tensors named per kind of misfit; the message counts the rest
_FLOATS = ("F64", "F32", "F16", "BF16")


# -- loading --------------------------------------------------------------------------------------


def load_checkpoint(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mesh: DeviceMesh | None = None,
    ops: Ops | None = None,
    vocab_size: int | None = None,
) -> Decoder:
    """A decoder with the weights of a Hugging Face checkpoint directory.

    mesh: the ranks that the parameters are spread over; each keeps only its own part.
    vocab_size: as for `ModelConfig.with_vocabulary`.
    Takes no more memory than the model (this rank's part, and one parameter) and a block
    (`tensor_file.BLOCK_BYTES`). Raises CheckpointError naming every tensor that is missing, extra
    or misshapen.
    """
    config = ModelConfig.from_directory(directory).with_vocabulary(vocab_size)
    tensors = read_tensors(directory)
    with torch.device("meta"):
        model = Decoder(config, ops=ops)
    check_tensors(model, tensors, where=str(directory))
    model = model.to(dtype)
    if mesh is not None:
        shard(model, mesh)
    model = materialize(model, device)
    load_weights(model, tensors, where=str(directory))
    return model


def materialize(model: M, device: torch.device | str) -> M:
    """A model of the meta device, on this one, its parameters not yet filled."""
    if any(map(is_sharded, model.parameters())):
        return model.to_empty(device=device)
    for module in model.modules():  # `to_empty` would import sympy first, for a third of a second
        for name, p in list(module.named_parameters(recurse=False)):
            empty = torch.empty(p.shape, dtype=p.dtype, device=device)
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=p.requires_grad))
    return model


def read_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """name -> tensor in its file, over one file or the shards of an index.

    Raises CheckpointError if there are no weights, or two sets of them. Another CheckpointError
    lists every missing or torn file, and every tensor that is missing in the index's file.
    """
    root, index = Path(directory), Path(directory) / INDEX
    has_index, has_file = index.is_file(), (root / WEIGHTS).is_file()
    if has_index and has_file:
        raise CheckpointError(
            f"{root} holds {WEIGHTS} and {INDEX}: two sets of weights. Remove the older set."
        )
    if not has_index and not has_file:
        raise CheckpointError(f"{root} holds neither {WEIGHTS} nor {INDEX}.")
    files, placed = [WEIGHTS], None
    if has_index:
        placed = read_json(index, CheckpointError).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{index} has no weight_map. A torn copy?")
        for file in placed.values():
            if not isinstance(file, str) or "/" in file:
                raise CheckpointError(f"{index} names {file!r:.80}: expected a file beside it.")
        files = sorted(set(placed.values()))
    problems: list[str] = []
    out: dict[str, StoredTensor] = {}
    there = {path.name for path in root.iterdir() if path.is_file()}
    for file in files:
        if file not in there:
            problems.append(f"{index} names {file}, which is not there")
            continue
        try:
            found = read_header(root / file)
        except CheckpointError as error:
            problems.append(str(error).removesuffix("."))
            continue
        if placed is not None:
            problems += [
                f"{file} holds {name}, which {INDEX} has in {placed.get(name, 'no file')}"
                for name in found
                if placed.get(name) != file
            ]
        out |= found
    if not problems and placed is not None:
        problems = [f"{placed[n]} does not hold {n}" for n in sorted(set(placed) - set(out))]
    if problems:
        raise CheckpointError(printable("; ".join(p[:400] for p in _first(problems))) + ".")
    return out


def check_tensors(
    model: Decoder, tensors: Mapping[str, Tensor | StoredTensor], *, where: str
) -> None:
    """Raises CheckpointError that lists the tensors which do not fit the model: missing,
    unexpected, of another shape, or of a dtype that cannot be read."""
    config = model.config
    if isinstance(tensors, HFTensors):
        tensors = tensors.outlines()
    known = {name for name in tensors if _is_extra(name, config)}
    if config.tie_embeddings:
        known.add(HEAD)
    misfits: dict[str, list[str]] = {k: [] for k in ("missing", "misshapen", "unreadable")}
    for parameter in _layout_of(config, tensors).values():
        for piece in parameter.pieces:
            parts = _parts(piece, tensors)
            known |= parts.keys()
            for name, shape in parts.items():
                found = tensors.get(name)
                if found is None:
                    misfits["missing"].append(name)
                    continue
                if tuple(found.shape) != shape:
                    misfits["misshapen"].append(
                        f"{name} (expected {list(shape)}, found {list(found.shape)})"
                    )
                readable = _FLOATS if name == piece.name else ("U8",)
                if _dtype_name(found) not in readable:
                    misfits["unreadable"].append(
                        f"{name} (expected {' or '.join(readable)}, found {_dtype_name(found)}; "
                        "of quantised weights, only MXFP4 of gpt_oss can be read)"
                    )
    misfits["unexpected"] = sorted(set(tensors) - known)
    refuse_misfits(misfits, what=f"{where} does not fit its config ({config.architecture})")


def refuse_misfits(misfits: Mapping[str, list[str]], *, what: str) -> None:
    """Raises CheckpointError if there are any. misfits: kind -> tensors, in words. what: beginning
    of the message."""
    texts = [
        f"{k} ({len(names)}): {', '.join(_first(names))}" for k, names in misfits.items() if names
    ]
    if texts:
        raise CheckpointError(f"{what}: {'; '.join(texts)}.")


def _is_extra(name: str, config: ModelConfig) -> bool:
    """True if a checkpoint keeps a tensor as it is: in layers after the last, or in an image
    tower."""
    if name.startswith(config.extra_tensors):
        return True
    found = re.match(r"model\.layers\.(\d+)\.", name)
    first = config.num_layers
    return found is not None and first <= int(found[1]) < first + config.num_extra_layers


def decoder_like(
    model: Decoder, tensors: Mapping[str, Any], *, where: str, dtype: torch.dtype | None = None
) -> Decoder:
    """A decoder without gradients, with these weights and the shapes, ops and device of `model`.

    dtype: None takes the dtype of `model`. Raises CheckpointError as `load_weights` does.
    """
    with torch.device("meta"):
        made = Decoder(model.config, ops=model.ops)
    made = materialize(made.to(dtype or model.embedding.dtype), model.embedding.device)
    load_weights(made, tensors, where=where)
    return made.requires_grad_(False)


def copy_decoder(model: Decoder, *, dtype: torch.dtype | None = None) -> Decoder:
    """`decoder_like` with the weights of `model` itself, its adapter merged into them."""
    return decoder_like(model, dict(hf_tensors(model)), where="a copy of the model", dtype=dtype)


def load_weights(
    model: Decoder, tensors: Mapping[str, Tensor | StoredTensor], *, where: str
) -> None:
    """Copies Hugging Face tensors into the model's own memory, a block at a time.

    Raises CheckpointError, before anything is changed, for tensors that do not fit.
    """
    check_tensors(model, tensors, where=where)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for ours, layout in _layout_of(model.config, tensors).items():
            parameter = out = parameters[ours].detach()
            if mesh_of(parameter) is not None:
                out = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for piece in layout.pieces:
                _load_piece(piece, piece.view(out), tensors)
            if ours == "embedding" and model.config.tie_embeddings and HEAD in tensors:
                _check_tied(tensors[HEAD], out, where)
            if out is not parameter:
                local_part(parameter).copy_(part_like(out, parameter))


@singledispatch
def load_into(model: Decoder, directory: str | Path) -> None:
    """Copies a checkpoint's weights into a model that stays where it is.

    Raises CheckpointError, before anything is changed, for tensors that do not fit.
    """
    load_weights(model, read_tensors(directory), where=str(directory))


def _layout_of(config: ModelConfig, tensors: Mapping[str, Any]) -> dict[str, ParameterLayout]:
    """`decoder_layout`, where the checkpoint has one tensor for all experts in place of one for
    each: Qwen3.5 is published so. It is saved with one for each, as transformers does."""
    out = decoder_layout(config)
    for name, layout in out.items():
        joined = f"{config.prefix}{name.replace('.mlp.', '.mlp.experts.')}"
        if len(layout.pieces) > 1 and len(layout.shape) == 3 and joined in tensors:
            out[name] = ParameterLayout(layout.shape, (HFPiece(joined, layout.shape, lambda x: x),))
    return out


def _load_piece(piece: HFPiece, out: Tensor, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
    source = tensors.get(piece.name)
    if isinstance(source, StoredTensor):
        source.copy_to(out)
    elif source is not None:
        out.copy_(source.reshape(out.shape))
    else:
        blocks, scales = (tensors[name] for name in _parts(piece, tensors))
        # Packed rows are outputs where the tensor's are inputs: [E, out, in] into [E, in, out].
        out = out.movedim(1, -1)
        for expert in range(len(out)):
            rows = slice(expert, expert + 1)
            values = dequantize_mxfp4(rows_of(blocks, rows), rows_of(scales, rows))
            out[rows].copy_(values.view(out[rows].shape))


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., G, 16] uint8, scales [..., G] uint8 -> [..., G * 32] bfloat16, exactly.

    A byte holds two numbers of 4 bits (sign, 2 of exponent, 1 of mantissa), the low half first; 32
    numbers share the scale 2 ** (scales - 127). A product has two significant bits and at least
    2 ** -128 of size: bfloat16 has room for each of them.
    Source: OCP Microscaling Formats v1.0.  Guard: tests/parity/test_mxfp4_parity.py
    """
    # Four times the values and a quarter of the scale, which is 2 ** 126 at most: never infinite.
    magnitudes = torch.tensor([0.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0])
    values = torch.cat([magnitudes, -magnitudes]).bfloat16()
    byte = torch.arange(256)
    # Both halves of a byte are one word of 32 bits, so that a byte costs one look-up.
    words = torch.stack([values[byte & 15], values[byte >> 4]], -1).view(torch.int32)[:, 0]
    words = words.to(blocks.device).index_select(0, blocks.flatten().int())
    quarter = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 129)
    scaled = words.view(blocks.shape).view(torch.bfloat16) * quarter.bfloat16()[..., None]
    return scaled.flatten(-2)


def _parts(piece: HFPiece, tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """name -> shape of the tensors that `piece` is read from: itself, or blocks and scales of
    experts that are packed in MXFP4."""
    blocks, scales = f"{piece.name}_blocks", f"{piece.name}_scales"
    if piece.name in tensors or not (blocks in tensors or scales in tensors):
        return {piece.name: piece.shape}
    num_experts, num_in, num_out = piece.shape
    groups = (num_experts, num_out, num_in // 32)
    return {blocks: (*groups, 16), scales: groups}


def _check_tied(head: Tensor | StoredTensor, embedding: Tensor, where: str) -> None:
    """Raises CheckpointError if the head in the file differs from the embedding it is tied to."""
    for rows in blocks_of(len(embedding), embedding.nbytes):
        if not torch.equal(rows_of(head, rows).to(embedding), embedding[rows]):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true, and {HEAD} differs from "
                f"{EMBEDDING}. Set it to false in config.json, or remove the head."
            )


def _dtype_name(found: Tensor | StoredTensor) -> str:
    if isinstance(found, StoredTensor):
        return found.dtype_name
    return DTYPE_NAMES.get(found.dtype, str(found.dtype).removeprefix("torch."))


def _first(texts: list[str]) -> list[str]:
    more = len(texts) - MAX_NAMED
    return texts if more <= 0 else [*texts[:MAX_NAMED], f"and {more} more"]


# -- saving ---------------------------------------------------------------------------------------


class HFTensors(Mapping[str, Tensor]):
    """A decoder's weights by Hugging Face's names, in the order of the model, with its adapter
    merged in.

    A tensor is made on access and may be a view of the model's own memory: copy it to keep it. So
    handing a model over tensor by tensor copies no more than a parameter or two at a time. A
    sharded model is gathered parameter by parameter: all ranks access the same names in the same
    order.
    """

    def __init__(self, model: Decoder, *, num_kept: int = 1) -> None:
        """num_kept: parameters that are kept while their tensors come in turn."""
        self._model, self._num_kept = model, num_kept
        self._parameters = dict(model.named_parameters())
        self._places = {
            piece.name: (ours, piece)
            for ours, layout in decoder_layout(model.config).items()
            for piece in layout.pieces
        }
        self._values: dict[str, Tensor] = {}

    def view(self, name: str) -> Tensor:
        """The numbers of a tensor, in order: `piece.view` of its parameter."""
        ours, piece = self._places[name]
        if ours not in self._values:
            while len(self._values) >= self._num_kept:
                self._values.pop(next(iter(self._values)))
            weight = full_tensor(self._parameters[ours].detach())
            self._values[ours] = merged(self._model, ours, weight)
        return piece.view(self._values[ours])

    def __getitem__(self, name: str) -> Tensor:
        return self.view(name).reshape(self._places[name][1].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def finish(self) -> None:
        """Gathers all tensors after the one accessed last: for a rank whose engine has failed while
        the others continue."""
        names = list(self._places)
        last = next(reversed(self._values), None)
        done = [at for at, name in enumerate(names) if self._places[name][0] == last]
        for name in names[max(done, default=-1) + 1 :]:
            self[name]

    def outlines(self) -> dict[str, Tensor]:
        """The same names with tensors of the same shapes and dtypes, without memory."""
        return {
            name: torch.empty(piece.shape, dtype=self._parameters[ours].dtype, device="meta")
            for name, (ours, piece) in self._places.items()
        }


@singledispatch
def hf_tensors(model: Decoder) -> Mapping[str, Tensor]:
    """The model's weights by Hugging Face's names: see `HFTensors`."""
    return HFTensors(model)


@singledispatch
def save_checkpoint(
    model: Decoder,
    directory: str | Path,
    *,
    like: str | Path,
    dtype: torch.dtype | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
    config_changes: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    is_writer: bool = True,
) -> None:
    """Writes weights in Hugging Face's names, with config and tokenizer files copied from `like`.

    Each tensor goes to the same file as in `like`; if the two do not hold the same tensors (`like`
    has no weights, or packed ones), files have at most `max_shard_bytes`. dtype: None is the
    model's. Weights that were packed are written unpacked, and config.json then has no
    quantization_config. An adapter is merged in. extra_tensors: written unchanged with the
    decoder's, such as another head. config_changes: keys of config.json to change.

    The directory appears whole or not at all: it is written under another name, then renamed. Takes
    no more memory than a block of one tensor, or two parameters with an adapter or a sharded model,
    whose ranks all call this. is_writer: False on ranks that only help to gather.
    """
    dtype = dtype or model.embedding.dtype
    source = HFTensors(model, num_kept=2)  # in a file, a layer's experts alternate between two
    has_weights = any((Path(like) / name).is_file() for name in (WEIGHTS, INDEX))
    before = read_tensors(like) if has_weights else {}
    tensors = _outgoing(model, source, before, extra_tensors or {}, dtype=dtype)
    placed = {name: stored.path.name for name, stored in before.items()}
    tied = {HEAD} if model.config.tie_embeddings else set[str]()
    if placed.keys() - tied != tensors.keys():  # the files of `like` hold others
        placed = split_state_dict_into_shards_factory(
            tensors,  # in the order of the model
            get_storage_size=lambda tensor: tensor.num_bytes,
            filename_pattern=WEIGHTS.replace(".", "{suffix}.", 1),
            max_shard_size=max_shard_bytes,
        ).tensor_to_filename
    if HEAD in placed and HEAD not in tensors:
        embedding = partial(source.view, named(model.config, EMBEDDING))
        tensors[HEAD] = Outgoing(HEAD, tuple(model.embedding.shape), dtype, embedding)
    files = {
        file: [t for name, t in tensors.items() if placed[name] == file]
        for file in sorted(set(placed.values()))
    }
    if not is_writer:
        for file, of_file in files.items():
            write_tensors(Path(directory) / file, of_file, is_writer=False)
        return
    with replacing(directory) as beside:
        for file, of_file in files.items():
            write_tensors(beside / file, of_file)
        if set(placed.values()) != {WEIGHTS}:
            index = {
                "metadata": {"total_size": sum(t.num_bytes for t in tensors.values())},
                "weight_map": dict(sorted(placed.items())),
            }
            (beside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        config = _config_like(like, config_changes or {}, dtype=dtype)
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(like, beside)


def _config_like(
    like: str | Path, changes: Mapping[str, Any], *, dtype: torch.dtype
) -> dict[str, Any]:
    """The config.json of `like`, changed, for unpacked weights of this dtype."""
    config = {**read_json(Path(like) / "config.json", CheckpointError), **changes}
    config.pop("quantization_config", None)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return config | {key: str(dtype).removeprefix("torch.")}


def _outgoing(
    model: Decoder,
    source: HFTensors,
    before: Mapping[str, StoredTensor],
    extra_tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
) -> dict[str, Outgoing]:
    """Name -> tensor to write: the model's, the ones of `before` that the decoder does not run, and
    the extra ones."""
    tensors = {
        name: Outgoing(name, tuple(outline.shape), dtype, partial(source.view, name))
        for name, outline in source.outlines().items()
    }
    for name, stored in before.items():
        if name.endswith(CHOICE_BIAS) and name in tensors:
            kept, bias = DTYPES[stored.dtype_name], source.view(name)
            is_exact = torch.equal(bias.to(kept).to(bias.dtype), bias)  # it may have been moved
            tensors[name] = replace(tensors[name], dtype=kept if is_exact else bias.dtype)
        elif _is_extra(name, model.config):
            tensors[name] = Outgoing(name, stored.shape, DTYPES[stored.dtype_name], stored.read)
    for name, extra in extra_tensors.items():
        tensors[name] = Outgoing(name, tuple(extra.shape), extra.dtype, lambda extra=extra: extra)
    return tensors


@contextmanager
def replacing(directory: str | Path) -> Generator[Path]:
    """A temporary directory that replaces `directory` at the end of the block."""
    target = Path(directory)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    if target.exists():
        shutil.rmtree(target)
    os.replace(beside, target)


def copy_companions(like: str | Path, directory: Path) -> None:
    """Copies the tokenizer's files and the other COMPANIONS."""
    for name in COMPANIONS:
        if (Path(like) / name).is_file():
            shutil.copyfile(Path(like) / name, directory / name)
