"""From the settings of an SGLang server to the engine."""

from __future__ import annotations

from lockstep.engines.base import EngineContext
from lockstep.engines.http import HttpClient
from lockstep.engines.served import ServedEngine
from lockstep.engines.sglang.config import SGLangConfig
from lockstep.engines.sglang.wire import SGLangWire, read_facts

HOW_STARTED = (
    "python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init (docs/sglang.md)"
)


class SGLangEngine(ServedEngine):
    """`Engine` over an SGLang server."""

    def __init__(self, wire: SGLangWire) -> None:
        super().__init__(wire)
        self.wire = wire

    async def check_lease(self) -> None:
        """Raises LeaseError if the server runs weights that this run has not loaded."""
        await self.wire.check_lease()


def sglang_engine(config: SGLangConfig, context: EngineContext) -> SGLangEngine:
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
    return SGLangEngine(SGLangWire(client, facts, context, uses_ipc=config.weights == "ipc"))
