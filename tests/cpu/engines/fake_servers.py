"""Servers in this process that really sample: the embedded engine behind the protocol of another.

They answer as the real ones do (docs/engines.md says where that is taken from), on a port of
loopback that the system chooses, from an event loop of their own: clients also block.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from aiohttp import web
from engine_models import VOCAB, make_engine, make_model
from loopback import LoopbackServer

from lockstep.engines.base import EngineContext
from lockstep.errors import EngineError

JSON = web.RequestKey("json", dict)


def context(model=None, **changes):
    return EngineContext(
        **(
            {
                "model": model, "token_bytes": [b"x"] * VOCAB, "directory": Path("CHECKPOINT"),
                "vocab_size": VOCAB, "max_tokens": 200, "dtype": "float32",
            } | changes
        )
    )  # fmt: skip


class FakeServer(LoopbackServer):
    """A server over an embedded engine, while the `with` lasts. Subclasses add routes."""

    def __init__(self, model=None, **settings):
        self.model = model or make_model()
        self.engine_settings = settings
        self.asked = Counter()
        self.bodies = []
        """Every JSON that came, as (path, body)."""

    def app(self):
        self.engine = make_engine(self.model, **self.engine_settings)
        app = web.Application(middlewares=[self._note], client_max_size=1 << 30)
        app.add_routes(self.routes())
        return app

    @web.middleware
    async def _note(self, request, handler):
        self.asked[request.path] += 1
        try:
            if request.can_read_body:
                body = request[JSON] = await request.json()
                self.bodies.append((request.path, body))
            return await handler(request)
        except EngineError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)

    def routes(self):
        raise NotImplementedError


async def events(request, parts):
    """Server-sent events, as they come."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    async for part in parts:
        await answer.write(b"data: " + json.dumps(part).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer
