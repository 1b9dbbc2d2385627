"""`lockstep report --serve`: reports of runs that may still be training, over HTTP.

GET /                       the runs, with their state; /runs.json the same as JSON
GET /run/KEY/               the report of one run, whose page asks for
GET /run/KEY/figures.json   its curves and headlines; ?seen=VERSION: only if they changed
GET /run/KEY/search.json    ?text=WORDS: trajectories out of all that are stored

Only reads: a run is not disturbed by being looked at.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from lockstep.config import LOOPBACK, cannot_listen, check_key
from lockstep.errors import LockstepError, RunError
from lockstep.observe.metrics import is_step_row
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.report.document import (
    REPORT,
    build_document,
    build_figures,
    dump,
    render_page,
    to_document,
    to_vocabulary,
    worst_alarm,
)
from lockstep.store.files import encode_number, is_locked
from lockstep.store.run import Run, find_runs
from lockstep.store.trajectories import read_row

MAX_FOUND = 50
"""Trajectories that one search returns, the latest first."""

LIVE = replace(REPORT, scripts=(*REPORT.scripts, "live.js"), is_served=True)
RUNS = replace(LIVE, page="runs.html", scripts=("base.js", "runs.js"), label="Lockstep runs")

READ_SECONDS = 20.0
"""Seconds that a reader may take to send its request, and again to take in the answer."""
MAX_CONNECTIONS = 64
"""Connections at a time. A further connection replaces the connection that has waited longest for
its request."""


class ReportServer(ThreadingHTTPServer):
    """Serves the runs at `paths`: run directories, or directories of runs, which may come and go.

    tokenizer_of: the tokenizer of a stored config; where it fails, ids are shown. recipe_of: see
    `write_report`. port: 0 takes a free one. key: the password that browsers ask for, or a bearer's
    token; "" lets in the users of this machine, and is refused for any other address. Raises
    RunError if a path does not exist, ConfigError if the address cannot be taken.
    """

    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        host: str,
        port: int,
        key: str = "",
        tokenizer_of: Callable[[Mapping[str, Any]], Tokenizer],
        recipe_of: Callable[[Run], Mapping[str, Any] | None],
    ) -> None:
        for path in paths:
            if not path.is_dir():
                raise RunError(f"{path} is no directory: expected a run, or a directory of runs.")
        self._paths, self._tokenizer_of, self._recipe_of = paths, tokenizer_of, recipe_of
        self._rows: dict[Path, tuple[str, dict[str, Any]]] = {}
        self._connections: dict[socket.socket, float] = {}
        """Open connections -> their start; inf once the request has arrived."""
        self._key = key.encode()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        check_key(key, host=host, where=f"--host {host}")
        try:
            super().__init__((host, port), _Answer)
        except (OSError, OverflowError, UnicodeError) as error:
            raise cannot_listen(error, f"--host {host} --port {port}") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}/"

    def refusal(self, headers: Message) -> tuple[HTTPStatus, str] | None:
        """The answer to a request without the key, or, where there is none, to a name of another
        site, whose pages could read the runs."""
        if not self._key:
            with contextlib.suppress(ValueError):
                if urlsplit(f"//{headers.get('Host', '')}").hostname in LOOPBACK:
                    return None
            return HTTPStatus.FORBIDDEN, "this server answers to localhost alone; see --host."
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        given, found = given.strip(), b""
        match scheme.lower():
            case "basic":
                with contextlib.suppress(ValueError):
                    found = base64.b64decode(given, validate=True).partition(b":")[2]
            case "bearer":
                found = given.encode("utf-8", "surrogateescape")
        if hmac.compare_digest(found, self._key):
            return None
        return HTTPStatus.UNAUTHORIZED, "this server needs its key, LOCKSTEP_KEY, as the password."

    def process_request(self, request: Any, client_address: Any) -> None:
        there = list(self._connections.items())
        if len(there) >= MAX_CONNECTIONS:
            slowest, begun = min(there, key=lambda connection: connection[1])
            self._cut(request if begun == math.inf else slowest)
        self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Twice a second: ends connections whose request does not come."""
        for each, begun in list(self._connections.items()):
            if time.monotonic() - begun > READ_SECONDS:
                self._cut(each)

    def _cut(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its thread reads the end, and closes it
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else the reader left
            super().handle_error(request, client_address)

    def has_come(self, request: socket.socket) -> None:
        """Its thread answers it."""
        self._connections[request] = math.inf

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def answer(self, target: str) -> tuple[str, str]:
        """(content type, body) of a request. LookupError if nothing is there."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        runs = self._runs()
        match [unquote(word) for word in parts.path.split("/")]:
            case ["", "" | "runs.json" as name]:
                rows = {"runs": [self._row(key, run) for key, run in runs.items()]}
                if name:
                    return "application/json", dump(rows)
                places = ", ".join(map(str, self._paths))
                return "text/html", render_page({"title": places, "groups": [], **rows}, RUNS)
            case ["", "run", key, ""]:
                return "text/html", render_page(self._report(runs[key]), LIVE)
            case ["", "run", key, "figures.json"]:
                return "application/json", dump(self._figures(runs[key], query.get("seen", "")))
            case ["", "run", key, "search.json"]:
                return "application/json", dump(self._search(runs[key], query.get("text", "")))
        raise LookupError(parts.path)

    def _runs(self) -> dict[str, Run]:
        """Key of the URL -> run. The key is the run's path below the given directory."""
        out: dict[str, Run] = {}
        for path in self._paths:
            for run in find_runs(path):
                key = run.name if run.path == path else run.path.relative_to(path).as_posix()
                out[key if key not in out else str(run.path)] = run
        return out

    def _row(self, key: str, run: Run) -> dict[str, Any]:
        """A run in the list of runs."""
        version = _version(run)
        stored, row = self._rows.get(run.path, ("", {}))
        if stored != version:
            try:
                row = {"key": key, "name": key, **_state(run)}
            except (LockstepError, OSError) as error:
                row = {"key": key, "name": key, "error": str(error)}
            self._rows[run.path] = version, row
        return row

    def _report(self, run: Run) -> dict[str, Any]:
        live = {"version": _version(run), **_state(run)}
        about = {"tokenizers": [self._tokenizer(run)], "recipes": [self._recipe_of(run)]}
        return {**build_document([run], **about), "live": live}

    def _figures(self, run: Run, seen: str) -> dict[str, Any]:
        # Taken before the rows are read: a row that comes meanwhile is asked for again.
        version = _version(run)
        if version == seen:
            return {}
        figures = build_figures([run], recipes=[self._recipe_of(run)])
        return {**figures, "live": {"version": version, **_state(run)}}

    def _search(self, run: Run, text: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        num_searched = 0
        is_whole = True
        for split, addresses, number in run.search(text) if text else ():
            num_searched += number
            room = MAX_FOUND - len(found)
            found += [
                to_document(read_row(*address), run=0, split=split, why=["found"])
                for address in addresses[:room]
            ]
            if not (is_whole := len(addresses) <= room):
                break
        ids = {i for each in found for segment in each["segments"] for i in segment["token_ids"]}
        return {
            "trajectories": found,
            "num_searched": num_searched,
            "is_whole": is_whole,
            "vocabulary": to_vocabulary(ids, self._tokenizer(run)),
        }

    def _tokenizer(self, run: Run) -> Tokenizer | None:
        with contextlib.suppress(LockstepError, OSError):
            return self._tokenizer_of(run.config)


class _Answer(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        self.server.has_come(self.connection)
        kind, refusal = "text/plain", self.server.refusal(self.headers)
        try:
            if refusal is None:
                kind, body = self.server.answer(self.path)
                refusal = HTTPStatus.OK, body
        except (LockstepError, OSError) as error:
            refusal = HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
        except (LookupError, ValueError):
            refusal = HTTPStatus.NOT_FOUND, "There is no such page or run."
        status, body = refusal
        sent = body.encode()
        with contextlib.suppress(ConnectionError, TimeoutError):  # the reader left
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(sent)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if status == HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
            self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a page asks every two seconds."""


def _version(run: Run) -> str:
    """Changes with every row, start and end of the run."""
    marks = [is_locked(run.path / "lock")]
    for name in ("metrics.jsonl", "environment.json"):
        with contextlib.suppress(OSError):
            at = (run.path / name).stat()
            marks += [at.st_mtime_ns, at.st_size]
    return "-".join(map(str, map(int, marks)))


def _state(run: Run) -> dict[str, Any]:
    """How far a run is, and how it does."""
    fresh = Run(run.path)
    steps = [row["step"] for row in fresh.metrics if is_step_row(row)]
    num_steps = fresh.config.get("steps") or (fresh.config.get("sft") or {}).get("steps")
    if is_locked(run.path / "lock"):
        status = "running"
    elif steps and num_steps and steps[-1] + 1 >= num_steps:
        status = "finished"
    else:
        status = "ended early" if num_steps else "ended"
    examined = [row for row in fresh.metrics if "doctor/rows" in row]
    counts = {"doctor/rows", "doctor/causes"}
    causes = dict.fromkeys(
        name.removeprefix("doctor/")
        for row in examined
        for name, value in row.items()
        if name.startswith("doctor/") and name not in counts and value > 0
    )
    return {
        "status": status,
        "recipe": fresh.config.get("name", ""),
        "step": steps[-1] if steps else None,
        "num_steps": num_steps,
        "reward": _last(fresh, "reward/mean"),
        "k3": _last(fresh, "mismatch/k3"),
        "level": worst_alarm(fresh).level,
        "verdict": ", ".join(causes) or ("consistent" if examined else ""),
        "started_at": fresh.environment.get("started_at", ""),
    }


def _last(run: Run, name: str) -> Any:
    values = run.values(name)
    return encode_number(values[-1]) if values else None
