"""The gateway of a run: started when the first agent needs it, closed with the run."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.renderers.base import Renderer

if TYPE_CHECKING:
    from lockstep.agent.gateway.server import GatewayServer

KEY_VARIABLE = "LOCKSTEP_KEY"


class RunGateway:
    """`open` starts a server over a registry of its own, once; `close` ends both.

    >>> gateway = RunGateway(GatewayConfig(), renderer, model="tiny-qwen3")    # doctest: +SKIP
    >>> groups = await collect(..., gateway=gateway.open)                      # doctest: +SKIP
    """

    def __init__(
        self,
        config: GatewayConfig,
        renderer: Renderer,
        *,
        model: str,
        rank: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """rank: index among several processes, each with its own server on the next port. note:
        receives a line with the address."""
        if config.port and rank:
            config = replace(config, port=config.port + rank)
        self._config, self._renderer, self._model, self._note = config, renderer, model, note
        self._opening: asyncio.Task[GatewayServer] | None = None

    async def open(self) -> GatewayServer:
        """Raises MissingExtraError without aiohttp, ConfigError if it cannot listen."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._start())
        return await asyncio.shield(self._opening)

    async def _start(self) -> GatewayServer:
        from lockstep.agent.gateway.server import GatewayServer

        given = os.environ.get(KEY_VARIABLE, "")
        self._config.check_key(given)
        server = GatewayServer(
            SessionRegistry(max_sessions=sys.maxsize),  # agent.max_in_flight limits the episodes
            renderer=self._renderer,
            model=self._model,
            config=self._config,
            # Without a key every program could act in the sessions of the others.
            key=given or secrets.token_urlsafe(32),
            claims_need_key=bool(given),
        )
        await server.start()
        self._note(f"gateway: agents find the model {self._model} at {server.url}")
        return server

    async def close(self) -> None:
        if self._opening is None:
            return
        (server,) = await asyncio.gather(self._opening, return_exceptions=True)
        self._opening = None
        if not isinstance(server, BaseException):
            await server.sessions.close()
            await server.close()
