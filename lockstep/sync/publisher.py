"""Hands the trainer's weights to the engine, in the form that the engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.engines.base import Engine
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import hf_tensors
from lockstep.models.sharding import copy_whole


@dataclass(slots=True)
class Publisher:
    """The way from one trained model to one engine."""

    engine: Engine
    trained: Decoder
    sampled: Decoder
    """What an engine in this process runs: the trained model itself, unless that is sharded or
    trained while the engine samples."""
    kv: Literal["drop", "keep"] = "drop"
    """What becomes of the keys and values of requests that are under way."""
    is_copied: bool = False
    """`sampled` has had all weights of a trained model that is another one."""

    async def publish(self, version: int) -> None:
        """The engine runs the trainer's weights from here on: a version number where it shares
        them, all tensors where it does not."""
        is_shared = self.engine.capabilities.shares_weights
        if self.kv == "keep":
            await self.engine.pause()
        try:
            if is_shared and self.sampled.embedding is not self.trained.embedding:
                # No await from here to the load: no step samples with weights of two versions.
                copy_whole(self.trained, self.sampled, is_trained_only=self.is_copied)
                self.is_copied = True
            source = None if is_shared else dict(hf_tensors(self.trained))
            await self.engine.load_weights(source, version=version)
        finally:
            if self.kv == "keep":
                await self.engine.resume(kv="keep")
