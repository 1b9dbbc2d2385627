"""From the settings of an SGLang server to the engine."""

from __future__ import annotations

from lockstep.engines.base import EngineContext
from lockstep.engines.http import HttpClient
from lockstep.engines.lease import Lease
from lockstep.engines.served import ServedEngine
from lockstep.engines.sglang.config import SGLangConfig
from lockstep.engines.sglang.wire import SGLangWire, read_facts

HOW_STARTED = (
    "python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init (docs/sglang.md)"
)


def sglang_engine(config: SGLangConfig, context: EngineContext) -> ServedEngine:
    """Waits until the server answers, and finds out what it can do."""
    client = HttpClient(
        config.urls[0],
        name="sglang",
        request_seconds=config.request_seconds,
        api_key_env=config.api_key_env,
        how_started=HOW_STARTED,
    )
    client.wait_until_up("/health", config.start_seconds, context.on_wait)
    facts = read_facts(client, context, deterministic=config.deterministic)
    wire = SGLangWire(client, facts, context, uses_ipc=config.weights == "ipc")
    lease = Lease(context.run, server=client.url, take_over=config.take_over)
    return ServedEngine(wire, lease=lease)
