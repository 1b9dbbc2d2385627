"""An HTTP server that runs programs for `lockstep.agent.sandbox.remote`, whose protocol it serves.

Needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from lockstep.agent.sandbox.base import ProgramResult, Sandbox
from lockstep.errors import ConfigError, SandboxError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY_BYTES = 1024 * 1024
"""Largest request: far more than the longest program."""
REMEMBERED = 4096
"""Answers that the server keeps for retries."""


@asynccontextmanager
async def sandbox_server(
    sandbox: Sandbox, *, host: str = "127.0.0.1", port: int = 8400, key: str = ""
) -> AsyncIterator[str]:
    """Serves `sandbox` over HTTP; the value is the URL. The caller closes the sandbox.

    port: 0 takes a free one. key: required from clients; without one the server listens on this
    machine alone.

    >>> async def demo():
    ...     async with sandbox_server(MontyConfig().open(), port=0) as url:
    ...         return url
    """
    if host not in LOOPBACK and not key:
        raise ConfigError(
            f"sandbox_server(host={host!r}): anybody who reaches it runs programs on this machine. "
            "Give a key, or stay on 127.0.0.1."
        )
    running: OrderedDict[str, asyncio.Task[ProgramResult]] = OrderedDict()

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            return web.json_response({"error": "the key is wrong or missing"}, status=401)
        return await handler(request)

    async def run(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            code, session = body["code"], body.get("session", "")
            if not isinstance(code, str) or not isinstance(session, str):
                raise TypeError("code and session must be text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f'expected {{"code": str, "session": str}}: {type(error).__name__}: {error}'
            return web.json_response({"error": text}, status=400)
        number = request.headers.get("Idempotency-Key", "") or secrets.token_hex(16)
        if number not in running:
            running[number] = asyncio.ensure_future(sandbox.run(code, session=session))
            while len(running) > REMEMBERED and next(iter(running.values())).done():
                running.popitem(last=False)
        try:
            # Goes on if the client disconnects: it asks again for the result.
            result = await asyncio.shield(running[number])
        except SandboxError as error:
            running.pop(number, None)
            return web.json_response({"error": str(error)}, status=503)
        answer = dataclasses.asdict(result)
        answer.pop("metrics")
        return web.json_response(answer)

    async def end_session(request: web.Request) -> web.Response:
        await sandbox.end_session(request.match_info["session"])
        return web.Response(status=204)

    async def describe(_: web.Request) -> web.Response:
        return web.json_response({"dialect": sandbox.dialect})

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guarded])
    app.router.add_post("/run", run)
    app.router.add_delete("/sessions/{session:.*}", end_session)
    app.router.add_get("/", describe)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"sandbox_server: {host}:{port} cannot be bound: {error}.") from error
        yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
