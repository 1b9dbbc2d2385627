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
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError
from lockstep.ops.contract import TRUE_ON_POLICY
from lockstep.run.build import choose_numerics, load_model
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


def open_base(config: ServeConfig, name: str, model: str) -> tuple[Base, dict[str, Any]]:
    """(a base model with its engine, facts for the environment.json of the runs over it)."""
    from lockstep.engines.embedded.engine import EmbeddedEngine
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.tinker.backend import BaseModel
    from lockstep.tinker.embedded import Base

    engine = config.engine
    if not isinstance(engine, EmbeddedConfig) or config.fallback:
        raise ConfigError(
            "api=tinker trains and samples in one process: engine=embedded, without fallback."
        )
    if config.contract != "none":
        ask_for_reproducible_gemm()
    own = replace(config, model=model)
    model_files = read_model_files(own)
    decoder = load_model(own, model_files).requires_grad_(False)
    numerics = choose_numerics(config.contract, decoder)
    make = partial(
        EmbeddedEngine,
        config=engine,
        token_bytes=model_files.renderer.tokenizer.all_token_bytes(),
    )
    info = BaseModel(
        name=name,
        architecture=model_files.model.architecture,
        vocab_size=model_files.model.vocab_size,
        max_tokens=min(config.max_tokens, model_files.model.max_positions),
        stop_ids=model_files.renderer.stop_ids,
    )
    base = Base(
        info=info,
        directory=model_files.directory,
        decoder=decoder,
        engine=make(decoder),
        make_engine=partial(make, is_shared=False),
    )
    facts = {
        "architecture": model_files.model.architecture,
        "family": model_files.model.family,
        "is_one_process": True,
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
            bases[name] = open_base(config, name, model)
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
