"""Tinker's API of `lockstep serve`: base models, the backend over them, and the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.engines.config import EmbeddedConfig, VllmConfig
from lockstep.errors import CapabilityError, ConfigError
from lockstep.run.build import (
    Numerics,
    choose_numerics,
    engine_context,
    gpus_here,
    load_model,
    with_engine,
)
from lockstep.run.preflight import ModelFiles, read_model_files
from lockstep.run_config import ServeConfig

if TYPE_CHECKING:
    from lockstep.agent.gateway.listener import Listener
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.models.decoder import Decoder
    from lockstep.tinker.embedded import Base, OutsideEngine

CACHE_SHARE = 0.25
"""Share of a GPU's free memory for the cache of an engine in this process: training and samplers of
whole models need the rest (a guess until measured)."""


def base_names(config: ServeConfig) -> dict[str, str]:
    """Name that clients use -> model, from the settings."""
    if config.tinker.models:
        return dict(entry.split("=", 1) for entry in config.tinker.models)
    return {config.model.rstrip("/").rpartition("/")[2]: config.model}


def check_engine(config: ServeConfig) -> None:
    """Raises ConfigError if the engine could not sample the trained weights with these settings."""
    engine = config.engine
    if config.fallback:
        raise ConfigError("api=tinker: fallback=true: only the decoder is trained. Leave it out.")
    if engine.share_device:
        raise ConfigError(
            "api=tinker: engine.share_device=true: the engine samples while models train, and "
            "cannot sleep meanwhile. Leave it out."
        )
    if isinstance(engine, VllmConfig) and not (engine.urls or engine.max_adapter_rank):
        raise ConfigError(
            "api=tinker: vLLM takes adapters up to the rank that it was started for. Set "
            "engine.max_adapter_rank=32, or the largest rank that clients ask for."
        )


async def open_base(
    config: ServeConfig, name: str, model: str, *, place: Path, note: Callable[[str], None]
) -> Base:
    """Loads a base model, and opens its engine. place: for logs of the engine, and weights on their
    way. note: receives lines about what the engine waits for."""
    from lockstep.engines.embedded.engine import EmbeddedEngine, sized
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.tinker.embedded import Base
    from lockstep.tinker.requests import BaseModel

    check_engine(config)
    if config.contract != "none":
        ask_for_reproducible_gemm()
    own = replace(config, model=model)
    model_files = read_model_files(own)
    decoder = load_model(own, model_files).requires_grad_(False)
    numerics = choose_numerics(config.contract, decoder)
    tokenizer = model_files.renderer.tokenizer
    info = BaseModel(
        name=name,
        architecture=model_files.model.architecture,
        vocab_size=model_files.model.vocab_size,
        max_tokens=config.max_tokens,
        stop_ids=model_files.renderer.stop_ids,
    )
    make_engine = outside = None
    if isinstance(config.engine, EmbeddedConfig) and not config.engine.replicas:
        make = partial(
            EmbeddedEngine,
            config=sized(config.engine, decoder, share=CACHE_SHARE, longest=info.max_tokens),
            token_bytes=tokenizer.all_token_bytes(),
            control_ids=tokenizer.control_ids,
        )
        engine, make_engine = make(decoder), partial(make, is_shared=False)
    else:
        context = engine_context(
            own,
            model_files,
            decoder,
            run=f"{config.name}-{name}",
            scratch=place,
            on_wait=note,
            gpus=gpus_here(config.engine, 0, 1, decoder.embedding.device),
        )
        engine, outside, numerics, line = await _open_outside(
            config, context, decoder, model_files, numerics, place=place
        )
        note(f"{name}: {line}")
    facts = {"is_one_process": outside is None, "processes": 1, **numerics.facts()}
    return Base(
        info=info,
        config=own,
        model_files=model_files,
        decoder=decoder,
        engine=engine,
        facts=model_files.facts() | facts,
        make_engine=make_engine,
        outside=outside,
    )


async def _open_outside(
    config: ServeConfig,
    context: EngineContext,
    decoder: Decoder,
    model_files: ModelFiles,
    numerics: Numerics,
    *,
    place: Path,
) -> tuple[Engine, OutsideEngine, Numerics, str]:
    """An engine with weights of its own, tested with an adapter; the numerics of both sides; and a
    line for a person."""
    from lockstep.engines.registry import check_capabilities, open_engine
    from lockstep.tinker.embedded import OutsideEngine

    engine = await asyncio.to_thread(open_engine, config.engine, context)
    name = engine.capabilities.name
    try:
        vocab_size, max_tokens = model_files.model.vocab_size, config.max_tokens
        check_capabilities(engine, vocab_size=vocab_size, max_tokens=max_tokens)
        if not engine.capabilities.has_adapters:
            raise CapabilityError(
                f"engine {name} takes no adapters by name, which is how samplers reach it. Start "
                "its server with --enable-lora."
            )
        if numerics.is_kept:
            numerics = with_engine(config.contract, engine, numerics, decoder)
        left_out = model_files.renderer.tokenizer.control_ids
        outside = OutsideEngine(
            engine, decoder, model_files.directory, left_out=left_out, max_tokens=max_tokens
        )
        how = await outside.qualify(place / "sent")
    except BaseException:
        await engine.close()
        raise
    return engine, outside, numerics, f"{name} samples: {how}"


async def open_bases(
    config: ServeConfig, *, out: Path, note: Callable[[str], None]
) -> dict[str, Base]:
    """The base models by the names that clients use; what receives them closes their engines. note:
    gets lines for a person."""
    found: dict[str, Base] = {}
    try:
        for name, model in base_names(config).items():
            found[name] = await open_base(
                config, name, model, place=out / "engine" / name, note=note
            )
            note(f"{name}: {found[name].facts['numerics']}")
    except BaseException:
        for each in found.values():
            await each.engine.close()
        raise
    return found


@contextlib.asynccontextmanager
async def opened(
    config: ServeConfig,
    bases: Mapping[str, Base],
    *,
    key: str,
    out: Path,
    note: Callable[[str], None],
    listener: Listener,
) -> AsyncIterator[None]:
    """Has the API ready inside the block, where the listener is to be started. Journal, checkpoints
    and run directories are in `out`; another server over the same directory goes on with what this
    one has accepted."""
    from lockstep.tinker.embedded import EmbeddedBackend
    from lockstep.tinker.record import open_record
    from lockstep.tinker.server import TinkerServer
    from lockstep.tinker.service import TinkerService

    async with contextlib.AsyncExitStack() as stack:
        backend = EmbeddedBackend([*bases.values()], config.trainer)
        stack.push_async_callback(backend.close)
        records = partial(open_record, root=out / "runs", bases=bases, write=note)
        service = TinkerService(backend, out, config.tinker, open_record=records)
        stack.push_async_callback(service.close)
        await service.start()
        TinkerServer(service, key=key, listener=listener)
        yield
