"""The critic: a decoder's blocks with a head of one value in place of the vocabulary.

On disk it is Hugging Face's `...ForSequenceClassification` with one label: the decoder's tensors
and `score.weight`. A critic can start from a reward model of that form.

# T tokens  D model width  N states
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_weights, read_tensors, save_checkpoint
from lockstep.models.shapes import HEAD
from lockstep.models.sharding import shard
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext, take_rows

Tensor = torch.Tensor

SCORE = "score.weight"


class ValueModel(nn.Module):
    """Predicts the value after each token. Made with random blocks and a head of zeros."""

    def __init__(self, config: ModelConfig, *, ops: Ops | None = None) -> None:
        super().__init__()
        # Tied: a head over the vocabulary would be a parameter that nothing reads.
        self.body = Decoder(replace(config, tie_embeddings=True), ops=ops)
        self.value_head = nn.Parameter(torch.zeros(1, config.hidden_size))

    @property
    def config(self) -> ModelConfig:
        return self.body.config

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, context: PackedContext, *, states_N: Tensor
    ) -> Tensor:
        """ids, positions [T] int64 -> [N] float32: the value after each of `states_N`, places in T.

        A value depends only on the row's tokens up to and including its place.
        """
        hidden_TD = self.body(ids_T, positions_T, context)
        # The head is always float32: with 8 bits, values before and after a token would be equal.
        hidden_ND = take_rows(hidden_TD, states_N).float()
        return self.body.ops.linear(hidden_ND, self.value_head)[:, 0]


def load_value_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mesh: DeviceMesh | None = None,
    ops: Ops | None = None,
) -> ValueModel:
    """A critic with the blocks of a Hugging Face checkpoint directory.

    Its head is the checkpoint's `score.weight`, if that is [1, D]; without one all values are 0.
    mesh: the ranks that the blocks' parameters are spread over; the head is whole on each.
    Raises CheckpointError listing every tensor that is missing, extra or misshapen.
    """
    with torch.device("meta"):
        model = ValueModel(ModelConfig.from_directory(directory), ops=ops)
    model.body.to(dtype)  # the head stays float32
    if mesh is not None:
        shard(model.body, mesh)
    model = model.to_empty(device=device)
    load_value_weights(model, directory)
    return model


def load_value_weights(model: ValueModel, directory: str | Path) -> None:
    """Copies a checkpoint's tensors into the model's own memory; without a head there, values are
    0. Raises CheckpointError as `load_value_model` does."""
    tensors = read_tensors(directory)
    tensors.pop(HEAD, None)
    stored = tensors.pop(SCORE, None)
    shape = list(model.value_head.shape)
    score = torch.zeros(shape) if stored is None else stored.read()
    if list(score.shape) != shape:
        raise CheckpointError(
            f"{directory}: {SCORE} has the shape {list(score.shape)}; a critic's is {shape}, one "
            "label. Is this a classifier instead of a reward model?"
        )
    load_weights(model.body, tensors, where=str(directory))
    with torch.no_grad():
        model.value_head.copy_(score)


def save_value_model(
    model: ValueModel, directory: str | Path, *, like: str | Path, is_writer: bool = True
) -> None:
    """Writes it as `...ForSequenceClassification`, config and tokenizer files as in `like`.

    is_writer: False on the ranks that only take part in gathering a sharded model.
    """
    source = json.loads((Path(like) / "config.json").read_text())
    names = source.get("architectures") or []
    save_checkpoint(
        model.body,
        directory,
        like=like,
        is_writer=is_writer,
        extra_tensors={SCORE: model.value_head.detach()},
        config_changes={
            "architectures": [
                name.replace("ForCausalLM", "ForSequenceClassification") for name in names
            ],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
            "tie_word_embeddings": True,
        },
    )
