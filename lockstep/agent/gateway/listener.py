"""An HTTP server of given routes: its address, its connections, the bodies it reads."""

from __future__ import annotations

import asyncio
import errno
import resource
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import cast
from urllib.parse import urlsplit

from lockstep.agent.gateway.config import LOOPBACK, GatewayConfig
from lockstep.agent.gateway.exchange import Refusal
from lockstep.errors import ConfigError, MissingExtraError

try:
    from aiohttp import web
except ImportError:  # pragma: no cover
    raise MissingExtraError.of("aiohttp", extra="http", needed_for="the gateway") from None

ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before other work is done."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Decoder = Callable[[bytes, int], bytes]
"""Undoes a Content-Encoding, up to a number of bytes. Raises ValueError."""


def unpack_zlib(raw: bytes, limit: int) -> bytes:
    try:
        return zlib.decompressobj(47).decompress(raw, limit)  # 47: gzip or zlib, by the header
    except zlib.error as error:
        raise ValueError(str(error)) from None


class Listener:
    """Listens from `start` to `close`.

    refuse: writes the answer for an error of a handler. is_open: something is there without a key,
    so only this machine may ask. decoders: further encodings of bodies than gzip and deflate.
    """

    def __init__(
        self,
        config: GatewayConfig,
        routes: Sequence[web.RouteDef],
        *,
        refuse: Callable[[Exception, web.Request], web.Response],
        is_open: bool,
        decoders: Mapping[str, Decoder] | None = None,
    ) -> None:
        self._config, self._routes, self._refuse = config, routes, refuse
        self._is_open = is_open
        self._decoders = {"gzip": unpack_zlib, "deflate": unpack_zlib, **(decoders or {})}
        self._runner: web.AppRunner | None = None
        self._socket: asyncio.Server | None = None
        self._busy: set[asyncio.BaseProtocol] = set()
        """Connections with a request in progress."""
        self._port = config.port

    async def start(self) -> None:
        """Raises ConfigError if the address cannot be taken."""
        config = self._config
        app = web.Application(
            client_max_size=config.max_body_bytes, middlewares=[self._answer_safely]
        )
        app.add_routes(self._routes)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=5.0,
            handler_cancellation=True,
            keepalive_timeout=config.read_seconds,  # also of headers that never end
            auto_decompress=False,  # `read` does it, with more encodings
        )
        await runner.setup()
        make = partial(self._connection, cast(web.Server, runner.server))
        try:
            self._socket = await asyncio.get_running_loop().create_server(
                make, config.host, config.port, backlog=ACCEPTED_AT_ONCE
            )
        except OSError as error:
            await runner.cleanup()
            hint = " port=0 takes a free one." if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(
                f"gateway.host={config.host} gateway.port={config.port}: "
                f"{error.strerror or error}.{hint}"
            ) from error
        self._runner = runner
        self._port = self._socket.sockets[0].getsockname()[1]

    def _connection(self, server: web.Server) -> asyncio.Protocol:
        """Makes the protocol of a new connection. If there are too many, the one that has waited
        longest without a request makes room."""
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = min(self._config.max_connections, max(16, num_files - 4 * ACCEPTED_AT_ONCE))
        there = [each for each in server.connections if each.transport is not None]
        waiting = [each for each in there if each not in self._busy]
        if len(there) >= limit and waiting:
            waiting[0].force_close()
        return server()

    def stop_listening(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def close(self) -> None:
        """Ends all connections. May be called twice."""
        self.stop_listening()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, as reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @web.middleware
    async def _answer_safely(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns every error into an answer."""
        self._busy.add(request.protocol)
        try:
            if self._is_open:
                _check_origin(request)
            return await handler(request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            return self._refuse(error, request)
        finally:
            self._busy.discard(request.protocol)

    async def read(self, request: web.Request, *, content_type: str) -> bytes:
        """Reads a body of a type, unpacked. Raises Refusal (400, 408, 413, 415)."""
        if request.content_type != content_type:
            text = f"the body must be {content_type}, found {request.content_type}."
            raise Refusal(
                415, "not_json" if content_type == "application/json" else "wrong_type", text
            )
        limit = self._config.max_body_bytes
        try:
            async with asyncio.timeout(self._config.read_seconds):
                raw = await request.read()
        except TimeoutError:
            text = f"the body did not arrive within {self._config.read_seconds:g} s."
            raise Refusal(408, "slow_client", text) from None
        except web.RequestPayloadError as error:  # its framing is broken
            raise Refusal(400, "unreadable_body", f"the body cannot be read: {error}.") from None
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding == "identity":
            return raw
        decode = self._decoders.get(encoding)
        if decode is None:
            text = f"Content-Encoding {encoding[:40]!r} is not known; expected one of "
            raise Refusal(415, "unknown_encoding", f"{text}{', '.join(self._decoders)}.")
        try:
            found = decode(raw, limit + 1)
        except ValueError as error:
            text = f"the body cannot be read as {encoding}: {error}."
            raise Refusal(400, "unreadable_body", text) from None
        if len(found) > limit:
            text = f"the body is larger than gateway.max_body_bytes={limit}, unpacked."
            raise Refusal(413, "body_too_large", text)
        return found


def _check_origin(request: web.Request) -> None:
    """Keeps out pages of a browser on this machine, where no key does."""
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin", "")
    for name in (host and f"//{host}", origin):
        try:
            found = urlsplit(name).hostname or name
        except ValueError:
            found = name
        if name and found not in LOOPBACK:
            text = f"this server has no key and answers this machine alone, not {found[:80]!r}."
            raise Refusal(403, "foreign_origin", f"{text} Start it with a key (LOCKSTEP_KEY).")
