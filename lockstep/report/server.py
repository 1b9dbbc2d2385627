"""Rows on demand: a page and its data over HTTP, for those that do not fit into a file.

Read only, standard library only, for one person at one machine. It answers its own name alone, so
that no page of somebody else's can read it by a name that leads here (DNS rebinding), and it sends
nothing that another origin may read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from lockstep.errors import LockstepError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TIMEOUT_SECONDS = 30.0
"""Of a connection that sends nothing."""


class Rows(Protocol):
    """What is served. Every method may be called from several threads, one at a time."""

    def page(self) -> str:
        """The HTML that asks for the rest."""
        ...

    def list(self, query: Mapping[str, str]) -> dict[str, Any]:
        """One page of rows, without their tokens. Raises ValueError for a query that means
        nothing."""
        ...

    def read(self, number: int, query: Mapping[str, str]) -> dict[str, Any] | None:
        """One row, or as much of it as can be shown; None if there is no such number."""
        ...


class RowServer(ThreadingHTTPServer):
    """Serves `rows` until `shutdown`. port: 0 takes a free one; see `url`."""

    daemon_threads = True

    def __init__(self, rows: Rows, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.rows = rows
        self.reading = threading.Lock()
        """Held while rows are read: files and caches are not for two at a time."""
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}/"

    @property
    def is_local(self) -> bool:
        return str(self.server_address[0]) in LOOPBACK


class _Handler(BaseHTTPRequestHandler):
    server: RowServer
    timeout = TIMEOUT_SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.is_local and _host(self.headers.get("Host", "")) not in LOOPBACK:
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "this server answers localhost only"})
            return
        place = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(place.query).items()}
        try:
            with self.server.reading:
                self._answer(place.path, query)
        except ValueError as error:
            if isinstance(error, LockstepError):
                self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})
            else:
                self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except (LockstepError, OSError) as error:
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        rows = self.server.rows
        if path == "/":
            self._send(HTTPStatus.OK, rows.page().encode(), "text/html; charset=utf-8")
        elif path == "/rows":
            self._send_json(HTTPStatus.OK, rows.list(query))
        elif path.startswith("/row/"):
            name = path.removeprefix("/row/")
            is_number = name.isascii() and name.isdigit() and len(name) < 19
            found = rows.read(int(name), query) if is_number else None
            if found is None:
                self._send_json(HTTPStatus.NOT_FOUND, {"error": f"there is no row {name[:40]!r}"})
            else:
                self._send_json(HTTPStatus.OK, found)
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is nothing at this address"})

    def _send_json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content, allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for whoever started it."""


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] or header
