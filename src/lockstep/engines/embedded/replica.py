"""The embedded engine in processes of its own: the same decoder over the same ops, other memory."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.engines.base import EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.worker_engine import WorkerEngine
from lockstep.launch.workers import WorkerProcess
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.ops.base import Ops
from lockstep.ops.invariant import ask_for_reproducible_gemm
from lockstep.system import keep_freed_memory


def make_replica(model: Decoder, config: EmbeddedConfig, context: EngineContext) -> WorkerEngine:
    """An engine in a process of its own, with the weights that the run started from.

    model: the trainer's. The worker makes its ops anew with the same rules; its self-test holds
    there too: the fingerprint, which includes a fixed computation, is compared.
    """
    scratch = context.scratch or Path(tempfile.mkdtemp(prefix="lockstep-"))
    gpu = context.gpus[context.replica : context.replica + 1]
    start = partial(
        WorkerProcess,
        "lockstep.engines.worker_engine:serve",
        name=f"engine {context.replica}",
        log=scratch / "engine.log",
        environment={"CUDA_VISIBLE_DEVICES": gpu[0]} if gpu else {},
    )
    make = partial(
        make_here,
        config,
        directory=str(context.directory),
        token_bytes=list(context.token_bytes),
        control_ids=sorted(context.control_ids),
        dtype=context.dtype if config.dtype == "same" else config.dtype,
        vocab_size=context.vocab_size,
        device=model.embedding.device.type,
        threads=torch.get_num_threads(),
        ops=model.ops,
    )
    return WorkerEngine(
        start,
        make,
        newest=context.newest,
        device=model.embedding.device,
        restarts=config.restarts,
        on_wait=context.on_wait,
    )


def make_here(
    config: EmbeddedConfig,
    *,
    directory: str,
    dtype: str,
    vocab_size: int,
    device: str,
    threads: int,
    ops: Ops,
    **tokens: Any,
) -> EmbeddedEngine:
    """The engine of a worker, which sees one GPU only. tokens: arguments of `EmbeddedEngine`."""
    if ops.name == "invariant":
        ask_for_reproducible_gemm()  # where the trainer's environment is not this one's
    keep_freed_memory()
    torch.set_num_threads(threads)
    model = load_checkpoint(
        directory, dtype=getattr(torch, dtype), device=device, ops=ops, vocab_size=vocab_size
    )
    model.requires_grad_(False)
    return EmbeddedEngine(model, config, is_shared=False, **tokens)
