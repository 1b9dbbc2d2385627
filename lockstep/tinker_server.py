"""`lockstep serve --api tinker`: base models, the backend over them, and the server of its API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import to_dict
from lockstep.engines.config import EmbeddedConfig, VllmConfig
from lockstep.errors import CapabilityError, ConfigError
from lockstep.ops.contract import TRUE_ON_POLICY
from lockstep.run.build import choose_numerics, engine_gpus, load_model, with_engine
from lockstep.run.preflight import read_model_files
from lockstep.run_config import ServeConfig
from lockstep.store.run import default_run_path

if TYPE_CHECKING:
    from lockstep.tinker.embedded import Base
    from lockstep.tinker.server import TinkerServer

KEY_PREFIX = "tml-"
"""Begins every key that the client sends; it refuses others by itself."""


def base_names(config: ServeConfig) -> dict[str, str]:
    """Name that clients use -> model, as the settings tell."""
    if config.tinker.models:
        return dict(entry.split("=", 1) for entry in config.tinker.models)
    return {config.model.rstrip("/").rpartition("/")[2]: config.model}


def check_engine(config: ServeConfig) -> None:
    """Raises ConfigError for settings with which the engine could not sample what is trained."""
    engine = config.engine
    for holds, text in (
        (not config.fallback, "fallback=true: only the decoder is trained. Leave it out"),
        (
            not engine.share_device,
            "engine.share_device=true: the engine samples while models train, and cannot sleep "
            "meanwhile. Leave it out",
        ),
        (
            not isinstance(engine, VllmConfig) or engine.urls or engine.max_adapter_rank,
            "vLLM takes adapters up to the rank that it was started for. Set "
            "engine.max_adapter_rank=32, or the largest rank that clients ask for",
        ),
    ):
        if not holds:
            raise ConfigError(f"api=tinker: {text}.")


async def open_base(
    config: ServeConfig, name: str, model: str, *, place: Path, note: Callable[[str], None]
) -> tuple[Base, dict[str, Any]]:
    """(a base model with its engine, facts for the environment.json of the runs over it). place:
    for logs of the engine, and weights on their way. note: told what the engine waits for."""
    from lockstep.engines.base import EngineContext
    from lockstep.engines.embedded.engine import EmbeddedEngine
    from lockstep.engines.registry import check_capabilities, open_engine
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.tinker.backend import BaseModel
    from lockstep.tinker.embedded import Base
    from lockstep.tinker.outside import OutsideEngine

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
        max_tokens=min(config.max_tokens, model_files.model.max_positions),
        stop_ids=model_files.renderer.stop_ids,
    )
    base_of = partial(Base, info=info, directory=model_files.directory, decoder=decoder)
    if isinstance(config.engine, EmbeddedConfig) and not config.engine.replicas:
        tokens = tokenizer.all_token_bytes()
        make = partial(EmbeddedEngine, config=config.engine, token_bytes=tokens)
        base = base_of(engine=make(decoder), make_engine=partial(make, is_shared=False))
    else:
        context = EngineContext(
            model=decoder,
            token_bytes=tokenizer.all_token_bytes(),
            directory=model_files.directory,
            vocab_size=info.vocab_size,
            max_tokens=info.max_tokens,
            dtype=config.dtype,
            seed=config.seed,
            run=f"{config.name}-{name}",
            scratch=place,
            on_wait=note,
            gpus=engine_gpus(config.engine, 0, 1, decoder.embedding.device),
        )
        engine = await asyncio.to_thread(open_engine, config.engine, context)
        try:
            check_capabilities(engine, vocab_size=info.vocab_size, max_tokens=info.max_tokens)
            if not engine.capabilities.has_adapters:
                raise CapabilityError(
                    f"engine {engine.capabilities.name} takes no adapters by name, which is how "
                    "samplers reach it. Start its server with --enable-lora."
                )
            if numerics.is_kept:
                numerics = with_engine(config.contract, engine, numerics, decoder)
            outside = OutsideEngine(
                engine,
                decoder,
                model_files.directory,
                left_out=tokenizer.control_ids,
                max_tokens=info.max_tokens,
            )
            how = await outside.qualify(place / "sent")
            note(f"{name}: {engine.capabilities.name} samples: {how}")
        except BaseException:
            await engine.close()
            raise
        base = base_of(engine=engine, outside=outside)
    facts = {
        "architecture": model_files.model.architecture,
        "family": model_files.model.family,
        "is_one_process": base.outside is None,
        "contract": TRUE_ON_POLICY if numerics.is_kept else "none",
        "numerics": numerics.line,
        "fingerprint": asdict(numerics.fingerprint),
        "processes": 1,
    }
    return base, facts


@contextlib.asynccontextmanager
async def opened(
    config: ServeConfig, *, key: str, out: Path, note: Callable[[str], None]
) -> AsyncIterator[TinkerServer]:
    """Runs the server inside the block. Journal, checkpoints and run directories are in `out`;
    another server over the same directory goes on with what this one has accepted. note: gets lines
    for a person."""
    from lockstep.tinker.embedded import EmbeddedBackend
    from lockstep.tinker.record import RunRecords
    from lockstep.tinker.server import TinkerServer
    from lockstep.tinker.service import TinkerService

    config.gateway.check_key(key)
    async with contextlib.AsyncExitStack() as stack:
        bases, models = {}, base_names(config)
        for name, model in models.items():
            place = out / "engine" / name
            bases[name] = await open_base(config, name, model, place=place, note=note)
            note(f"{name}: {bases[name][1]['numerics']}")
        backend = EmbeddedBackend([base for base, _ in bases.values()], config.trainer)
        stack.push_async_callback(backend.close)
        stored = to_dict(config)
        records = RunRecords(
            out / "runs",
            bases=backend.base_models,
            configs={name: {**stored, "model": model} for name, model in models.items()},
            facts={name: facts for name, (_, facts) in bases.items()},
            write=note,
        )
        service = TinkerService(backend, out, config.tinker, records=records)
        stack.push_async_callback(service.close)
        await service.start()
        server = TinkerServer(service, config=config.gateway, key=key)
        stack.push_async_callback(server.close)
        await server.start()
        yield server


def serve(config: ServeConfig, *, key: str, out: str | Path | None, is_json: bool) -> None:
    """Serves until Ctrl-C, which is its ordinary end."""
    place = Path(out) if out is not None else default_run_path("tinker")
    key = key and (key if key.startswith(KEY_PREFIX) else KEY_PREFIX + key)

    def note(text: str) -> None:
        if not is_json:
            print(text, file=sys.stderr, flush=True)

    async def run() -> None:
        async with opened(config, key=key, out=place, note=note) as server:
            names = list(base_names(config))
            if is_json:
                found = {"url": server.url, "models": names, "out": str(place)}
                print(json.dumps(found | {"needs_key": bool(key)}), flush=True)
            else:
                shown = "the key that you gave, after tml-" if key else "tml-local"
                print(f"{server.url} serves {', '.join(names)} by Tinker's API; Ctrl-C ends it")
                print(f"  export TINKER_BASE_URL={server.url} TINKER_API_KEY={shown}")
                print(f"  runs, checkpoints and the journal are in {place}", flush=True)
            await asyncio.Event().wait()

    asyncio.run(run())
