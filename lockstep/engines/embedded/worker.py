"""The embedded engine in processes of its own: the same decoder over the same ops, other memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.engines.base import Capabilities, EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.worker.engine import WorkerEngine
from lockstep.engines.worker.serving import serve
from lockstep.engines.worker.weights import SharedWeights, TornWeightsError
from lockstep.errors import CapabilityError, ConfigError, EngineError
from lockstep.launch.workers import Line, start_worker
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import check_tensors, load_checkpoint, load_weights, read_tensors
from lockstep.ops import api, plain
from lockstep.ops.invariant import InvariantOps, Rules

WORK = "lockstep.engines.embedded.worker:work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker makes its engine of."""

    config: EmbeddedConfig
    directory: str
    token_bytes: list[bytes]
    dtype: str
    device: str
    """cpu or cuda: then the only one that it sees."""
    threads: int
    ops: str
    """The backend of the trainer's process."""
    rules: Rules | None
    """Its rules, where it has any."""
    weights_fd: int
    """Where weights on their way stand (`SharedWeights`)."""


class OwnWeightsEngine(EmbeddedEngine):
    """Over a decoder that nobody else has: new weights are written into it."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, weight_sources=("tensors", "directory"))

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Named tensors or a checkpoint directory. Raises CheckpointError, before anything is
        changed, for those that do not fit; TornWeightsError if they cannot be read to their end."""
        if source is None:
            raise EngineError("load_weights: expected named tensors or a directory, found None.")
        if isinstance(source, Mapping):
            tensors, where = source, "load_weights"
        else:
            tensors, where = read_tensors(source), str(source)
        check_tensors(self._model, tensors, where=where)
        try:
            load_weights(self._model, tensors, where=where)
        except Exception as error:
            raise TornWeightsError(
                f"{where}: version {version} was half loaded: {error}"
            ) from error
        await super().load_weights(None, version=version)


class Replicas:
    """Starts the processes of one run's engine, and starts one again that has died."""

    def __init__(self, config: EmbeddedConfig, context: EngineContext) -> None:
        model = context.model
        if not isinstance(model, Decoder):
            raise CapabilityError(
                f"engine embedded runs the decoder, and cannot run a {type(model).__name__}: "
                "choose an engine of another kind."
            )
        backend = api.active_backend()
        self._weights = SharedWeights()
        self._order = Order(
            config=config,
            directory=str(context.directory),
            token_bytes=list(context.token_bytes),
            dtype=context.dtype if config.dtype == "same" else config.dtype,
            device=model.embedding.device.type,
            threads=torch.get_num_threads(),
            ops=backend.name,
            rules=backend.rules if isinstance(backend, InvariantOps) else None,
            weights_fd=self._weights.fd,
        )
        self._logs = Path(context.scratch or tempfile.mkdtemp(prefix="lockstep-")) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._places = _places(self._order.device, config.replicas)
        self._on_wait = context.on_wait

    def start(self, index: int) -> WorkerEngine:
        """One of them, at once: `WorkerEngine.wait_until_ready` comes before its first use. It has
        the weights that the run began from."""
        worker = start_worker(
            WORK,
            name=f"engine {index}",
            log=self._logs / f"engine-{index}.log",
            environment=self._places[index],
            pass_fds=(self._weights.fd,),
        )
        return WorkerEngine(worker, self._order, weights=self._weights)

    def start_all(self) -> list[WorkerEngine]:
        """All of them, once they answer; none is left if one of them cannot start."""
        engines = [self.start(index) for index in range(len(self._places))]
        try:
            for engine in engines:
                engine.begin()
            for engine in engines:
                engine.wait_until_ready(self._on_wait)
        except BaseException:
            for engine in engines:
                engine.kill()
            raise
        return engines


def _places(device: str, count: int) -> list[dict[str, str]]:
    """What the environment of each replica is told of the GPU that it takes."""
    if device != "cuda":
        return [{}] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if taken + count > len(gpus):
        raise ConfigError(
            f"engine.replicas={count}: each takes a GPU of its own beside the trainer's {taken}, "
            f"and there are {len(gpus)}. Lower engine.replicas; 0 samples on the trainer's."
        )
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[taken : taken + count]]


# -- in the worker --------------------------------------------------------------------------------


def work(line: Line) -> None:
    """The worker's function: see `serving.serve`."""
    serve(line, _make)


def _make(order: Order) -> EmbeddedEngine:
    torch.set_num_threads(order.threads)
    model = load_checkpoint(
        order.directory, dtype=getattr(torch, order.dtype), device=order.device
    ).requires_grad_(False)
    api.use_backend(_backend(order))
    return OwnWeightsEngine(model, order.config, token_bytes=order.token_bytes)


def _backend(order: Order) -> api.Backend:
    """The trainer's, made anew: its self-test's findings hold here too, as the fingerprint tells
    (a fixed computation is part of it)."""
    if order.ops == "invariant":
        return InvariantOps(order.rules)
    if order.ops == "cuda":
        from lockstep.ops.cuda import CudaOps

        return CudaOps()
    return plain
