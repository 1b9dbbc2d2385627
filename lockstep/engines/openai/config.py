"""Settings of servers that speak OpenAI's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.engines.config import ServedConfig
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OpenAIConfig(ServedConfig):
    """Any server whose /v1/completions takes token ids and returns those that it sampled. Its
    weights never change: it evaluates, and cannot train. See docs/engines.md."""

    TAG: ClassVar[str] = "openai"

    served_model: str = ""
    """The name that requests give the model; empty takes the only one that the server has."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if not self.urls:
            raise ConfigError(
                "engine=openai needs a server: engine.urls=http://HOST:PORT, without /v1. "
                "docs/engines.md says how to start one."
            )
