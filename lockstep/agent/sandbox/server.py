"""An HTTP server that runs programs for `lockstep.agent.sandbox.remote`, whose protocol it serves.

Needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections import OrderedDict
from types import TracebackType
from typing import Any

from aiohttp import web

from lockstep.agent.sandbox.base import ProgramResult, Sandbox
from lockstep.errors import ConfigError, SandboxError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY_BYTES = 1024 * 1024
"""Largest request: far more than the longest program."""
REMEMBERED = 4096
"""Answers that the server keeps for retries."""


class SandboxServer:
    """Serves `sandbox` over HTTP. The caller closes the sandbox.

    port: 0 takes a free one, which `url` then names. key: required from clients; without one the
    server listens on this machine alone.

    >>> async def demo():
    ...     async with SandboxServer(MontyConfig().open(), port=0) as server:
    ...         return server.url
    """

    def __init__(
        self, sandbox: Sandbox, *, host: str = "127.0.0.1", port: int = 8400, key: str = ""
    ) -> None:
        if host not in LOOPBACK and not key:
            raise ConfigError(
                f"SandboxServer(host={host!r}): anybody who reaches it runs programs on this "
                "machine. Give a key, or stay on 127.0.0.1."
            )
        self._sandbox = sandbox
        self._host, self._port, self._key = host, port, key
        self._runner: web.AppRunner | None = None
        self._answers: OrderedDict[str, asyncio.Task[ProgramResult]] = OrderedDict()

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    async def __aenter__(self) -> SandboxServer:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_post("/run", self._run)
        app.router.add_delete("/sessions/{session:.*}", self._end_session)
        app.router.add_get("/", self._describe)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"SandboxServer: {self.url} cannot be bound: {error}.") from error
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._runner is not None, "entered"
        await self._runner.cleanup()
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)
        self._answers.clear()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            return web.json_response({"error": "the key is wrong or missing"}, status=401)
        return await handler(request)

    async def _run(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            code, session = body["code"], body.get("session", "")
            if not isinstance(code, str) or not isinstance(session, str):
                raise TypeError("code and session must be text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f'expected {{"code": str, "session": str}}: {type(error).__name__}: {error}'
            return web.json_response({"error": text}, status=400)
        known = request.headers.get("Idempotency-Key", "") or secrets.token_hex(16)
        task = self._answers.get(known)
        if task is None:
            task = asyncio.ensure_future(self._sandbox.run(code, session=session))
            self._answers[known] = task
            while len(self._answers) > REMEMBERED and next(iter(self._answers.values())).done():
                self._answers.popitem(last=False)
        try:
            # Goes on if the client disconnects: it asks again for the result.
            result = await asyncio.shield(task)
        except SandboxError as error:
            self._answers.pop(known, None)
            return web.json_response({"error": str(error)}, status=503)
        return web.json_response(
            {
                "output": result.output,
                "ending": result.ending,
                "is_truncated": result.is_truncated,
                "seconds": result.seconds,
            }
        )

    async def _end_session(self, request: web.Request) -> web.Response:
        await self._sandbox.end_session(request.match_info["session"])
        return web.Response(status=204)

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response({"dialect": self._sandbox.dialect})
