"""The HTTP server of Tinker's API, whose paths are under /api/v1.

The status of an error decides the reaction of the client: it raises at once for 400 to 422, and
asks again for 408, 429 and 503.
"""

from __future__ import annotations

import hmac
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from operator import attrgetter
from typing import Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.listener import BodyTooLarge, Listener, Site, section, web
from lockstep.agent.gateway.reading import Value, parsed
from lockstep.tables import tables_beside
from lockstep.tinker.futures import Reply
from lockstep.tinker.requests import TinkerError, not_found
from lockstep.tinker.service import TinkerService
from lockstep.tinker.wire import PROTOBUF, unpack_zstd
from lockstep.tinker_config import client_key

LOGGER = logging.getLogger(__name__)

PREFIX = "/api/v1"
ROUTES: dict[str, dict[str, Any]] = tables_beside(__file__, "routes.toml")

Answer = Callable[..., Any]
"""(body, variable parts of the path by name) -> JSON or a Reply, perhaps awaitable."""


class TinkerServer:
    """Serves `service` at `listener`; both are started and closed by their owner.

    key: clients send it as TINKER_API_KEY, with `tml-` before it if it does not begin so; "" lets
    in the users of this machine.
    """

    def __init__(self, service: TinkerService, *, key: str = "", listener: Listener) -> None:
        listener.config.check_key(key)
        self._service, self._listener = service, listener
        self._key = client_key(key).encode()
        site = Site(
            prefix=PREFIX,
            section=self._section,
            routes=self._routes(),
            refuse=refuse,
            is_open=not key,
            decoders={"zstd": unpack_zstd},
        )
        listener.add(site)

    def _section(self) -> str:
        key = "the server's key" if self._key else "tml-, and anything behind it"
        return section(
            ", ".join(self._service.bases),
            addresses={"TINKER_BASE_URL": self._listener.url, "TINKER_API_KEY": key},
            counts=self._service.counts(),
        )

    def _routes(self) -> list[web.RouteDef]:
        handlers: dict[str, Callable[..., Any]] = {}
        for route, found in ROUTES["served"].items():
            answer = attrgetter(found)(self._service) if isinstance(found, str) else _always(found)
            handlers[route] = partial(self._answer, answer)
        for route, use in ROUTES["hosted_only"].items():
            handlers[route] = partial(self._hosted_only, use)
        handlers["POST forward_backward"] = self._forward_backward
        return [
            web.route(method, f"{PREFIX}/{path}", handler)
            for route, handler in handlers.items()
            for method, _, path in [route.partition(" ")]
        ]

    async def _answer(self, answer: Answer, request: web.Request) -> web.Response:
        self._check_key(request)
        if request.method in ("POST", "PUT"):
            raw = await self._listener.read(request, content_type="application/json")
            body = Value(await parsed(raw))
        else:
            query = request.query.items()
            body = Value({name: int(value) for name, value in query if value.isdecimal()})
        found = answer(body, **request.match_info)
        if isinstance(found, Awaitable):
            found = await found
        if not isinstance(found, Reply):
            return web.json_response(found)
        return web.Response(body=found.body, status=found.status, content_type=found.content_type)

    async def _hosted_only(self, use: str, request: web.Request) -> web.Response:
        self._check_key(request)
        raise not_found(f"{request.path} is for {use}, which the hosted service alone has.")

    async def _forward_backward(self, request: web.Request) -> web.Response:
        self._check_key(request)
        models = self._service.models
        try:
            raw = await self._listener.read(request, content_type=PROTOBUF)
        except BodyTooLarge as refusal:
            error = TinkerError(f"{refusal} Send fewer or shorter datums.", status=413)
            models.refuse_forward_backward(refusal.head, error)
            raise error from None
        return web.json_response(models.forward_backward(raw))

    def _check_key(self, request: web.Request) -> None:
        """Raises TinkerError (401)."""
        given = request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape")
        if self._key and not hmac.compare_digest(given, self._key):
            found = "another one came" if given else "none came"
            raise TinkerError(
                f"this server needs its key in X-API-Key, and {found}. Set TINKER_API_KEY to the "
                "key that the server printed at its start.",
                status=401,
            )


def refuse(error: Exception, request: web.Request) -> web.Response:
    """Writes the answer for an error."""
    match error:
        case Refusal():
            status, text = error.status, str(error)
        case web.HTTPException():
            text = f"{request.method} {request.path[:200]}: {error.reason}. "
            status, text = error.status, f"{text}Tinker's API is served under {PREFIX}."
        case sqlite3.OperationalError():  # a full disk: clients try again for minutes
            LOGGER.error("%s: the journal cannot be written: %s", request.path, error)
            status, text = 503, f"the journal cannot be written ({error})."
        case _:
            LOGGER.error("%s %s", request.method, request.path, exc_info=error)
            # A 500 would be tried again for ever.
            status, text = 400, f"{type(error).__name__} in the server; its log has the place."
    return web.json_response({"detail": text}, status=status)


def _always(found: dict[str, Any]) -> Answer:
    return lambda body: found
