"""The embedded engine in processes of its own: the same decoder over the same ops, other memory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lockstep.engines.base import EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.worker_engine import WorkerEngine
from lockstep.engines.worker_host import serve
from lockstep.errors import CapabilityError
from lockstep.launch.workers import Line, start_worker
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.ops.base import Ops
from lockstep.ops.invariant import ask_for_reproducible_gemm


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Description of the engine that a worker makes."""

    config: EmbeddedConfig
    directory: str
    token_bytes: list[bytes]
    dtype: str
    device: str
    """cpu or cuda; a worker sees one GPU only."""
    threads: int
    ops: Ops
    """The trainer's ops, made anew in the worker with the same rules. Its self-test holds there
    too: the fingerprint, which includes a fixed computation, is compared."""


def make_replica(config: EmbeddedConfig, context: EngineContext) -> WorkerEngine:
    """An engine in a process of its own, with the weights that the run started from."""
    model = context.model
    if not isinstance(model, Decoder):
        raise CapabilityError(
            f"engine embedded runs the decoder, and cannot run a {type(model).__name__}: choose an "
            "engine of another kind."
        )
    order = Order(
        config=config,
        directory=str(context.directory),
        token_bytes=list(context.token_bytes),
        dtype=context.dtype if config.dtype == "same" else config.dtype,
        device=model.embedding.device.type,
        threads=torch.get_num_threads(),
        ops=model.ops,
    )
    scratch = context.scratch or Path(tempfile.mkdtemp(prefix="lockstep-"))
    name, gpu = f"engine {context.replica}", context.gpus[context.replica : context.replica + 1]
    start = partial(
        start_worker,
        "lockstep.engines.embedded.replica:work",
        name=name,
        log=scratch / "engine.log",
        environment={"CUDA_VISIBLE_DEVICES": gpu[0]} if gpu else {},
    )
    return WorkerEngine(
        start,
        order,
        newest=context.newest,
        device=model.embedding.device,
        restarts=config.restarts,
        on_wait=context.on_wait,
    )


# -- in the worker --------------------------------------------------------------------------------


def work(line: Line) -> None:
    """The worker's function: see `worker_host.serve`."""
    serve(line, _make)


def _make(order: Order) -> EmbeddedEngine:
    if order.ops.name == "invariant":
        ask_for_reproducible_gemm()  # where the trainer's environment is not this one's
    torch.set_num_threads(order.threads)
    model = load_checkpoint(
        order.directory, dtype=getattr(torch, order.dtype), device=order.device, ops=order.ops
    ).requires_grad_(False)
    return EmbeddedEngine(model, order.config, token_bytes=order.token_bytes, is_shared=False)
