"""What a sync does on each of two ranks over a sharded model."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from cpu.training.tiny_training import make_trainer
from processes import ranks_maker

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import hf_tensors
from lockstep.models.sharding import local_part, shard
from lockstep.sync.config import SyncConfig
from lockstep.sync.publisher import Publisher
from lockstep.training.trainer import Trainer

ENGINE = EmbeddedConfig(page_size=16, kv_cache_tokens=512, max_num_sequences=8, max_step_tokens=256)


class _SmallProbe(SyncConfig):
    num_probes, probe_tokens = 2, 24


class Copying(EmbeddedEngine):
    """An engine of one rank, with weights of its own."""

    def __init__(self, model: Decoder, source: str, *, is_deaf: bool, breaks_at: str = "") -> None:
        super().__init__(model, ENGINE, is_shared=False)
        self.source, self.is_deaf, self.breaks_at = source, is_deaf, breaks_at
        self.first: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self):
        return replace(super().capabilities, weight_sources=(self.source,))

    async def load_weights(self, source, *, version):
        if self.breaks_at:
            for name in source:
                if name == self.breaks_at:
                    raise EngineError(f"out of memory at {name}.")
                source[name]
        if self.is_deaf and not isinstance(source, str):
            new = {name: tensor.clone() for name, tensor in source.items()}
            self.first = self.first or new
            source = {n: self.first[n] if "sinks" in n else t for n, t in new.items()}
        await super().load_weights(source, version=version)


def on_rank(rank, directory):
    ranks = ranks_maker(rank, directory)()
    out = {}
    for name, source, deaf_rank, breaking_rank in (
        ("tensors", "tensors", None, None),
        ("directory", "directory", None, None),
        ("rank 1 keeps its sinks", "tensors", 1, None),
        ("rank 1 breaks", "tensors", None, 1),
    ):
        found = make_trainer(Path(directory) / str(rank), "gpt_oss")
        whole = make_trainer(Path(directory) / str(rank), "gpt_oss").model
        shard(found.model, ranks.mesh())
        trainer = Trainer(found.model, found.config, like=found.like, ranks=ranks)
        engine = Copying(
            whole, source, is_deaf=rank == deaf_rank,
            breaks_at="model.layers.1.self_attn.sinks" if rank == breaking_rank else "",
        )  # fmt: skip
        weights = Path(directory) / "weights" if rank == 0 else None
        publisher = Publisher(engine, trainer, whole, _SmallProbe(), place=weights, ranks=ranks)
        before = digest(trainer.model)
        out[name] = row = {"error": "", "level": "", "is_same": None}
        try:
            row["metrics"] = asyncio.run(publish(publisher))
            sent = hf_tensors(trainer.model)
            held = hf_tensors(engine._model)
            gathered = {name: tensor.clone() for name, tensor in sent.items()}  # all, on each rank
            row["is_same"] = all(torch.equal(gathered[n], held[n]) for n in held)
        except EngineError as error:
            row["error"] = str(error)
        row["level"] = publisher.level
        row["is_restored"] = digest(trainer.model) == before
        publisher.close()
    return out


async def publish(publisher):
    return [await publisher.publish(version) for version in (0, 1)]


def digest(model):
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(
            local_part(parameter.detach()).contiguous().view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()
