"""`lockstep report --serve`: reports of runs that may still be training, over HTTP.

GET /                       the runs, with their state; /runs.json the same as JSON
GET /run/KEY/               the report of one run, whose page asks for
GET /run/KEY/figures.json   its curves and headlines; ?seen=VERSION: only if they changed
GET /run/KEY/search.json    ?text=WORDS: trajectories out of all that are stored

Only reads: a run is not disturbed by being looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from lockstep.errors import LockstepError, RunError
from lockstep.observe.metrics import is_step_row
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.report.document import (
    NUM_TOKENS,
    NUM_TRAJECTORIES,
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

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ReportServer(ThreadingHTTPServer):
    """Serves the runs at `paths`: run directories, or directories of runs, which may come and go.

    tokenizer_of: the tokenizer of a stored config; where it fails, ids are shown. recipe_of: see
    `write_report`. port: 0 takes a free one. Raises RunError if a path does not exist.
    """

    daemon_threads = True

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        host: str,
        port: int,
        tokenizer_of: Callable[[Mapping[str, Any]], Tokenizer],
        recipe_of: Callable[[Run], Mapping[str, Any] | None],
    ) -> None:
        for path in paths:
            if not path.is_dir():
                raise RunError(f"{path} is no directory: expected a run, or a directory of runs.")
        self._paths, self._tokenizer_of, self._recipe_of = paths, tokenizer_of, recipe_of
        self._rows: dict[Path, tuple[str, dict[str, Any]]] = {}
        self._is_local = host in _LOOPBACK
        super().__init__((host, port), _Answer)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}/"

    def trusts(self, host: str) -> bool:
        """Whether a request to this Host may be answered: on the loopback address a page of
        another site could otherwise read the runs under a name that it points here."""
        name = urlsplit(f"//{host}").hostname or ""
        return not self._is_local or name in _LOOPBACK

    def answer(self, target: str) -> tuple[str, str]:
        """(content type, body) of a request. LookupError if nothing is there."""
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.path in ("/", "/runs.json"):
            rows = {"runs": [self._row(key, run) for key, run in self._runs().items()]}
            if parts.path == "/":
                places = ", ".join(map(str, self._paths))
                return "text/html", render_page({"title": places, "groups": [], **rows}, RUNS)
            return "application/json", dump(rows)
        words = [unquote(word) for word in parts.path.split("/")]
        if len(words) != 4 or words[1] != "run":
            raise LookupError(parts.path)
        run = self._runs()[words[2]]
        match words[3]:
            case "":
                return "text/html", render_page(self._report(run), LIVE)
            case "figures.json":
                return "application/json", dump(self._figures(run, query.get("seen", "")))
            case "search.json":
                return "application/json", dump(self._search(run, query.get("text", "")))
        raise LookupError(parts.path)

    def _runs(self) -> dict[str, Run]:
        """Key of the URL -> run: its path below the one that was given."""
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
        document = build_document(
            [run],
            tokenizers=[self._tokenizer(run)],
            recipes=[self._recipe_of(run)],
            title=run.name,
            num_trajectories=NUM_TRAJECTORIES,
            num_tokens=NUM_TOKENS,
        )
        return {**document, "live": live}

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

    def do_GET(self) -> None:
        try:
            if not self.server.trusts(self.headers.get("Host", "")):
                raise PermissionError("this server answers to localhost alone; see --host.")
            kind, body = self.server.answer(self.path)
            status = HTTPStatus.OK
        except LookupError:
            status, kind, body = HTTPStatus.NOT_FOUND, "text/plain", "There is no such page or run."
        except PermissionError as error:
            status, kind, body = HTTPStatus.FORBIDDEN, "text/plain", str(error)
        except (LockstepError, OSError) as error:
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error)
        sent = body.encode()
        with contextlib.suppress(ConnectionError):  # the reader left
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(sent)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
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
    alarm = worst_alarm(fresh)
    return {
        "status": status,
        "recipe": fresh.config.get("name", ""),
        "step": steps[-1] if steps else None,
        "num_steps": num_steps,
        "reward": _last(fresh, "reward/mean"),
        "k3": _last(fresh, "mismatch/k3"),
        "level": alarm.level,
        "verdict": ", ".join(causes) or ("consistent" if examined else ""),
        "started_at": fresh.environment.get("started_at", ""),
    }


def _last(run: Run, name: str) -> Any:
    values = run.values(name)
    return encode_number(values[-1]) if values else None
