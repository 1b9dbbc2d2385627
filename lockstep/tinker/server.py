"""The HTTP routes of Tinker's API, under /api/v1.

Every error has the status at which the client does what is right: one of 400 to 422 makes it raise
at once, 408, 429 and 503 make it ask again.
"""

from __future__ import annotations

import hmac
import json
import logging
import sqlite3
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.listener import BodyTooLarge, Listener, Site
from lockstep.agent.gateway.page import section
from lockstep.agent.gateway.reading import Value, beside, parse_body
from lockstep.errors import MissingExtraError
from lockstep.tinker.requests import TinkerError, not_found
from lockstep.tinker.service import TinkerService
from lockstep.tinker.wire import PROTOBUF, unpack_zstd
from lockstep.tinker_config import client_key

try:
    from aiohttp import web
except ImportError:  # pragma: no cover
    raise MissingExtraError.of("aiohttp", extra="tinker", needed_for="Tinker's API") from None

LOGGER = logging.getLogger(__name__)

PREFIX = "/api/v1"
_CHECKPOINT = "training_runs/{model_id}/checkpoints/{segment}/{name}"
HOSTED_ONLY: Mapping[str, str] = tomllib.loads(
    Path(__file__).with_name("hosted_only.toml").read_text("utf-8")
)
"""Routes that the hosted service alone has. Answered with 404 and the name: a client would repeat
for five minutes what got 501."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        service = self._service
        posts: dict[str, Callable[..., Any]] = {
            "client/config": lambda body: service.client_config(),
            "client/dynamic_config": lambda body: {"sample_cancel_enabled": True},
            "telemetry": lambda body: {"status": "accepted"},
            "create_session": service.create_session,
            "session_heartbeat": service.heartbeat,
            "sessions/{session_id}/finish": service.finish_session,
            "create_model": service.create_model,
            "get_info": service.get_info,
            "optim_step": service.optim_step,
            "save_weights": service.save_weights,
            "load_weights": service.load_weights,
            "save_weights_for_sampler": service.save_weights_for_sampler,
            "save_weights_external": service.save_weights_external,
            "unload_model": service.unload_model,
            "create_custom_loss": service.create_custom_loss,
            "create_sampling_session": service.create_sampling_session,
            "asample": service.sample,
            "cancel_future": service.cancel,
            "retrieve_futures": service.retrieve_many,
            "weights_info": service.weights_info,
        }
        run = "training_runs/{id}"
        gets: dict[str, Callable[[web.Request], dict[str, Any]]] = {
            "healthz": lambda request: {"status": "ok"},
            "get_server_capabilities": lambda request: service.capabilities(),
            "sessions": lambda request: service.sessions(),
            "sessions/{id}": lambda request: service.session(request.match_info["id"]),
            "samplers/{id}": lambda request: service.sampler(request.match_info["id"]),
            "training_runs": lambda request: service.training_runs(**_page(request)),
            "checkpoints": lambda request: service.checkpoints(None, **_page(request)),
            run: lambda request: service.training_run(request.match_info["id"]),
            f"{run}/checkpoints": lambda request: service.checkpoints(request.match_info["id"]),
        }
        delete = self._get(lambda request: service.delete_checkpoint(**request.match_info))
        at = f"{PREFIX}/".__add__
        return [
            web.post(at("forward_backward"), self._checked(self._forward_backward)),
            web.post(at("retrieve_future"), self._checked(self._retrieve)),
            web.delete(at(_CHECKPOINT), delete),
            web.put(at(f"{_CHECKPOINT}/ttl"), self._post(service.set_ttl)),
            *(web.post(at(path), self._post(answer)) for path, answer in posts.items()),
            *(web.get(at(path), self._get(answer)) for path, answer in gets.items()),
            *(
                web.route(method, at(path), self._get(_hosted_only(about)))
                for route, about in HOSTED_ONLY.items()
                for method, path in [route.split()]
            ),
        ]

    # -- kinds of routes --------------------------------------------------------------------------

    def _checked(self, handler: Handler) -> Handler:
        """Lets in requests with the key. Raises TinkerError (401)."""

        async def checked(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape")
            if self._key and not hmac.compare_digest(given, self._key):
                found = "another one came" if given else "none came"
                raise TinkerError(
                    f"this server needs its key in X-API-Key, and {found}. Set TINKER_API_KEY to "
                    "what the server printed at its start.",
                    status=401,
                )
            return await handler(request)

        return checked

    def _post(self, answer: Callable[..., Any]) -> Handler:
        """answer: takes the body, and the variable parts of the path by name."""

        async def post(request: web.Request) -> web.StreamResponse:
            found = answer(await self._body(request), **request.match_info)
            return web.json_response(await found if isinstance(found, Awaitable) else found)

        return self._checked(post)

    def _get(self, answer: Callable[[web.Request], dict[str, Any]]) -> Handler:
        async def get(request: web.Request) -> web.StreamResponse:
            return web.json_response(answer(request))

        return self._checked(get)

    async def _body(self, request: web.Request) -> Value:
        raw = await self._listener.read(request, content_type="application/json")
        return Value(await beside(raw, lambda: parse_body(raw)))

    # -- single routes ----------------------------------------------------------------------------

    async def _forward_backward(self, request: web.Request) -> web.StreamResponse:
        try:
            raw = await self._listener.read(request, content_type=PROTOBUF)
        except BodyTooLarge as refusal:
            error = TinkerError(f"{refusal} Send fewer or shorter datums.", status=413)
            self._service.refuse_forward_backward(refusal.head, error)
            raise error from None
        return web.json_response(self._service.forward_backward(raw))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        reply = await self._service.retrieve(await self._body(request))
        return web.Response(body=reply.body, status=reply.status, content_type=reply.content_type)


def refuse(error: Exception, request: web.Request) -> web.Response:
    """Writes the answer for an error."""
    match error:
        case TinkerError() | Refusal():
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
    response = web.json_response({"detail": text}, status=status)
    if status == 503:
        response.headers["Retry-After"] = "1"
    if status in (408, 413):  # the rest of the body is not read
        response.force_close()
    return response


def _hosted_only(about: str) -> Callable[[web.Request], dict[str, Any]]:
    def answer(request: web.Request) -> dict[str, Any]:
        raise not_found(f"{request.path} is for {about}, which the hosted service alone has.")

    return answer


def _page(request: web.Request) -> dict[str, int]:
    """limit and offset of a listing."""
    query = {name: value for name, value in request.query.items() if value.isdecimal()}
    limit = Value(json.loads(query.get("limit", "20")), "limit").integer(1, 10**6)
    offset = Value(json.loads(query.get("offset", "0")), "offset").integer(0)
    return {"limit": limit or 20, "offset": offset or 0}
