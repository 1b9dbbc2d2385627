"""From the settings of an OpenAI-compatible server to the engine."""

from __future__ import annotations

from lockstep.engines.base import EngineContext
from lockstep.engines.http import HttpClient
from lockstep.engines.openai.config import OpenAIConfig
from lockstep.engines.openai.wire import HOW_STARTED, OpenAIWire, read_facts
from lockstep.engines.served import ServedEngine


def openai_engine(config: OpenAIConfig, context: EngineContext) -> ServedEngine:
    """Waits until the server answers, and finds out what it can do."""
    client = HttpClient(
        config.urls[0],
        name="openai",
        request_seconds=config.request_seconds,
        api_key_env=config.api_key_env,
        how_started=HOW_STARTED,
    )
    client.wait_until_up("/v1/models", config.start_seconds, context.on_wait)
    return ServedEngine(
        OpenAIWire(client, read_facts(client, config.served_model, context), context)
    )
