"""The context that an engine of a test is made with."""

from pathlib import Path
from typing import Any

from lockstep.engines.base import EngineContext


def context_of(directory: Path, **changes: Any) -> EngineContext:
    settings = {"model": None, "token_bytes": (), "vocab_size": 550, "max_tokens": 256,
                "dtype": "float32"}  # fmt: skip
    return EngineContext(directory=directory, **settings | changes)
