"""An HTTP server of one or several APIs: its address, its connections, the bodies it reads."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import urlsplit

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.exchange import Refusal
from lockstep.config import LOOPBACK, cannot_listen
from lockstep.errors import ConfigError, MissingExtraError
from lockstep.system import max_open_files

try:
    from aiohttp import web
except ImportError:  # pragma: no cover
    raise MissingExtraError.of("aiohttp", extra="http", needed_for="the gateway") from None

STYLE = Path(__file__).with_name("page.css").read_text("utf-8")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard address -> the address at which this machine reaches itself."""
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before other work is done."""

HEAD_BYTES = 512
"""Bytes that are kept of a body that is too large, to recognize its sender."""

NOTES: ContextVar[dict[str, Any]] = ContextVar("NOTES")
"""Entries that a site adds to the log's line of the request that it answers."""
LOGGER = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Decoder = Callable[[bytes, int], bytes]
"""Undoes a Content-Encoding, up to a number of bytes. Raises ValueError."""


def unpack_zlib(raw: bytes, limit: int) -> bytes:
    try:
        return zlib.decompressobj(47).decompress(raw, limit)  # 47: gzip or zlib, by the header
    except zlib.error as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One API of a server."""

    routes: Sequence[web.RouteDef]
    refuse: Callable[[Exception, web.Request], web.Response]
    """Writes the answer for an error of a handler, or for a path that is not there."""
    is_open: bool
    """Something is there without a key, so only this machine may ask."""
    section: Callable[[], str]
    """Writes its part of the page at `/` (`page.section`)."""
    prefix: str = "/"
    """Beginning of its paths. The site with the longest fitting prefix answers."""
    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    """Further encodings of bodies than gzip and deflate."""


def route_of(request: web.Request) -> str:
    """The method and the form of the path, without a session's name."""
    resource = request.match_info.route.resource
    return f"{request.method} {request.path[:120] if resource is None else resource.canonical}"


class BodyTooLarge(Refusal):
    """A body that was not read to its end (413). head: its beginning, unpacked."""

    def __init__(self, limit: int, head: bytes) -> None:
        text = f"the body is larger than gateway.max_body_bytes={limit}, packed or unpacked."
        super().__init__(413, "body_too_large", text)
        self.head = head


class Listener:
    """Serves the sites that were added, from `start` to `close`."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._sites: list[Site] = []
        self._decoders: dict[str, Decoder] = {
            "identity": lambda raw, limit: raw,
            "gzip": unpack_zlib,
            "deflate": unpack_zlib,
        }
        self._runner: web.AppRunner | None = None
        self._socket: asyncio.Server | None = None
        self._busy: set[asyncio.BaseProtocol] = set()
        """Connections with a request in progress."""
        self._port = config.port
        self._log: TextIO | None = None

    def add(self, site: Site) -> None:
        """Before the start."""
        self._sites.append(site)
        self._sites.sort(key=lambda each: -len(each.prefix))
        self._decoders |= site.decoders

    async def start(self) -> None:
        """Raises ConfigError if the address cannot be taken, or the certificate not be read."""
        config, (secured, self._log) = self.config, open_files(self.config)
        app = web.Application(middlewares=[self._answer_safely])
        app.add_routes([web.get("/", self._page)])
        for site in self._sites:
            app.add_routes(site.routes)
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
                make, config.host, config.port, backlog=ACCEPTED_AT_ONCE, ssl=secured
            )
        except (OSError, UnicodeError) as error:
            await runner.cleanup()
            where = f"gateway.host={config.host} gateway.port={config.port}"
            raise cannot_listen(error, where) from error
        self._runner = runner
        self._port = self._socket.sockets[0].getsockname()[1]

    async def _page(self, request: web.Request) -> web.Response:
        text = landing_page(site.section() for site in reversed(self._sites))
        return web.Response(text=text, content_type="text/html")

    def _connection(self, server: web.Server) -> asyncio.Protocol:
        """Makes the protocol of a new connection. If there are too many, the connection that is
        idle for longest makes room."""
        limit = self.config.max_connections
        if (num_files := max_open_files()) is not None:
            limit = min(limit, max(16, num_files - 4 * ACCEPTED_AT_ONCE))
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
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, or https, as reached from this machine."""
        host = ANY_ADDRESS.get(self.config.host, self.config.host)
        scheme = "https" if self.config.certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"

    @web.middleware
    async def _answer_safely(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns every error into an answer."""
        self._busy.add(request.protocol)
        begun, response = time.monotonic(), cast("web.StreamResponse | None", None)
        NOTES.set({})
        fitting = (each for each in self._sites if request.path.startswith(each.prefix))
        site = next(fitting, self._sites[-1])
        try:
            if site.is_open:
                _check_origin(request)
            response = await handler(request)
            return response
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            response = site.refuse(error, request)
            if response.status == 503:
                response.headers["Retry-After"] = "1"
            if response.status in (408, 413):  # the rest of the body is not read
                response.force_close()
            return response
        finally:
            self._busy.discard(request.protocol)
            self._note(request, response, time.monotonic() - begun)

    def _note(
        self, request: web.Request, response: web.StreamResponse | None, seconds: float
    ) -> None:
        """Adds a line to the log. A status of 499 is a client that left."""
        if self._log is None:
            return
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "route": route_of(request),
            "status": 499 if response is None else response.status,
            "milliseconds": round(1000 * seconds, 1),
            **NOTES.get(),
        }
        try:
            self._log.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk ends the log, not the server
            LOGGER.error("gateway.log=%s ends here: %s", self.config.log, error)
            self._log = None

    async def read(self, request: web.Request, *, content_type: str) -> bytes:
        """Reads a body of a type, unpacked. Raises Refusal (400, 408, 415), BodyTooLarge."""
        if request.content_type != content_type:
            text = f"the body must be {content_type}, found {request.content_type}."
            raise Refusal(415, "not_json" if "json" in content_type else "wrong_type", text)
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if (decode := self._decoders.get(encoding)) is None:
            text = f"Content-Encoding {encoding[:40]!r} is not known; expected one of "
            raise Refusal(415, "unknown_encoding", f"{text}{', '.join(self._decoders)}.")
        raw, is_whole = await self._receive(request)
        limit = self.config.max_body_bytes
        try:
            found = decode(raw, limit + 1 if is_whole else HEAD_BYTES)
        except ValueError as error:
            if not is_whole:  # cut where it cannot be read
                raise BodyTooLarge(limit, b"") from None
            text = f"the body cannot be read as {encoding}: {error}."
            raise Refusal(400, "unreadable_body", text) from None
        if not is_whole or len(found) > limit:
            raise BodyTooLarge(limit, found[:HEAD_BYTES])
        return found

    async def _receive(self, request: web.Request) -> tuple[bytes, bool]:
        """The bytes of a body and True, or the first of a body that is too large and False."""
        limit, size = self.config.max_body_bytes, request.content_length or 0
        raw, seconds = bytearray(), self.config.read_seconds
        try:
            async with asyncio.timeout(seconds if size <= limit else min(1.0, seconds)):
                while part := await request.content.readany():
                    raw += part
                    if max(len(raw), size) > limit:
                        return bytes(raw), False
        except TimeoutError:
            if size > limit:
                return bytes(raw), False
            text = f"the body did not arrive within {seconds:g} s."
            raise Refusal(408, "slow_client", text) from None
        except web.RequestPayloadError as error:  # its framing is broken
            raise Refusal(400, "unreadable_body", f"the body cannot be read: {error}.") from None
        return bytes(raw), True


def open_files(config: GatewayConfig) -> tuple[ssl.SSLContext | None, TextIO | None]:
    """(certificate or None, log or None) of a gateway. Raises ConfigError."""
    secured = None
    if config.certificate:
        secured = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # An empty password: a key that needs one fails, instead of asking in the terminal.
            secured.load_cert_chain(config.certificate[0], config.certificate[-1], password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"gateway.certificate={','.join(config.certificate)}: {error.strerror or error}. "
                "Expected the files of a certificate and of its private key, both as "
                "PEM, the key without a password."
            ) from error
    try:
        log = Path(config.log).expanduser().open("a", buffering=1) if config.log else None
    except OSError as error:
        raise ConfigError(
            f"gateway.log={config.log} cannot be written: {error.strerror}. Expected a file in a "
            "directory that exists."
        ) from error
    return secured, log


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


# -- the page at / --------------------------------------------------------------------------------


def section(
    title: str,
    *,
    addresses: Mapping[str, str],
    counts: Mapping[str, int],
    errors: Iterable[str] = (),
) -> str:
    """The part of one API."""
    lines = "".join(f"<li>{escape(error)}</li>" for error in errors)
    return (
        f"<h1>{escape(title)}</h1><h2>Addresses</h2>{_table(addresses, 'code')}"
        f"<h2>Since the start</h2>{_table(counts, 'span')}"
        + (f"<h2>Last errors</h2><ul>{lines}</ul>" if lines else "")
    )


def landing_page(sections: Iterable[str]) -> str:
    """Loads nothing, and itself again every 5 seconds."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" '
        'content="5"><meta name="viewport" content="width=device-width">'
        f"<title>lockstep serve</title><style>{STYLE}</style>{''.join(sections)}</html>"
    )


def _table(rows: Mapping[str, object], tag: str) -> str:
    cells = (
        f"<tr><td>{escape(name)}</td><td><{tag}>{escape(str(value))}</{tag}></td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"
