"""The sampler and the trainer of a run, loaded again in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from lockstep.launch.config import ParallelConfig
from lockstep.run.build import Parts, build
from lockstep.run.preflight import preflight
from lockstep.run_config import Config


def rebuild(config: Config, weights: Path | None = None) -> tuple[Config, Parts]:
    """(the settings for one process, the loaded parts). weights: None takes the config's own.

    Raises as `preflight` does before a model is loaded.
    """
    config = replace(config, parallel=ParallelConfig())
    model_files = preflight(config, is_training=False)
    return config, build(config, model_files, weights=weights, is_training=False)


@asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[None]:
    """In the block the engine runs the trainer's weights; it is closed at the end."""
    try:
        if parts.publisher is not None:
            await parts.publisher.publish(parts.trainer.version)
        yield
    finally:
        await parts.engine.close()
        if parts.publisher is not None:
            parts.publisher.close()
