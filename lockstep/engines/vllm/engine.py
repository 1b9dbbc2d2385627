"""From vLLM's settings to one engine: attached, started, or in this process."""

from __future__ import annotations

from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import VllmConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.lease import Lease
from lockstep.engines.served import ServedEngine
from lockstep.engines.vllm.http_wire import VllmWire, read_facts
from lockstep.engines.vllm.started import VllmServer

HOW_STARTED = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --skip-tokenizer-init --enable-scale-out "
    "--enable-prompt-tokens-details --logprobs-mode=processed_logprobs "
    "--generation-config=vllm --scheduling-policy=priority (docs/vllm.md)"
)


def make_vllm_engine(config: VllmConfig, context: EngineContext) -> Engine:
    """Waits until the server answers. One replica: the first of engine.urls, or one that is
    started here and ends with `close`."""
    if config.in_process:
        from lockstep.engines.vllm.local import make_local_engine

        return make_local_engine(config, context)
    if config.urls:
        client = HttpClient(
            config.urls[0],
            name="vllm",
            request_seconds=config.request_seconds,
            api_key_env=config.api_key_env,
            how_started=HOW_STARTED,
        )
        client.wait_until_up("/health", config.start_seconds, context.on_wait)
        lease = Lease(context.run, server=client.url, take_over=config.take_over)
        return ServedEngine(VllmWire(client, read_facts(client, context), context), lease=lease)
    server = VllmServer(config, context)
    try:
        server.wait(context.on_wait)
        facts = read_facts(server.client, context)
        lease = Lease(context.run, server=server.client.url)
        return ServedEngine(VllmWire(server.client, facts, context, server=server), lease=lease)
    except BaseException:  # Ctrl-C while it loads leaves no server either
        server.close()
        raise
