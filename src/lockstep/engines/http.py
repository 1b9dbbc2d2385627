"""JSON over HTTP to one server, with errors that show whether to wait, ask another or give up.

There are three kinds of failure, since each needs another reaction. The server cannot be reached:
another replica may answer. It took the request and is silent: another replica may answer, but this
one may still be busy with it. It refused: the request or a setting is wrong, and every replica
would refuse.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.errors import (
    ConfigError,
    EngineError,
    ServerRefusedError,
    ServerSilentError,
    ServerUnreachableError,
    require_package,
)

CONNECT_SECONDS = 10.0
"""Limit for opening a connection. A machine that is up takes or refuses one at once; a firewall or
an unused address does neither."""

REPORT_SECONDS = 15.0
"""Interval of the messages about a server that does not answer yet."""

_compact = partial(json.dumps, separators=(",", ":"), allow_nan=False)

WAIT_SECONDS = 0.2
"""Wait between two checks whether a server is up."""

PROBE_SECONDS = 5.0
"""Limit of one check whether a server is up."""

MAX_MESSAGE = 400
"""Characters of a server's message that an error repeats: some answer with a whole page."""


class HttpClient:
    """Requests to one server, from any event loop: each has a connection of its own.

    name: of the engine, for messages. how_started: command that starts such a server, for messages.
    request_seconds: the server counts as frozen after this time without a byte. max_connections:
    0 has no limit, because a server queues better than a client.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        request_seconds: float = 600.0,
        api_key_env: str = "",
        how_started: str = "",
        max_connections: int = 0,
    ) -> None:
        self.url, self.name, self.request_seconds = url, name, request_seconds
        self._limit = max_connections or sys.maxsize
        advice = f" Is the server up? It is started with: {how_started}"
        self._advice = advice if how_started else ""
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = WeakKeyDictionary()
        self._headers: dict[str, str] = {}
        if api_key_env:
            if not (key := os.environ.get(api_key_env)):
                raise ConfigError(
                    f"the environment variable {api_key_env} is not set, or empty. Set it to the "
                    f"key of the server {url}."
                )
            self._headers["Authorization"] = f"Bearer {key}"

    def __repr__(self) -> str:
        return f"HttpClient({self.url!r})"  # never the key

    # -- in the event loop --------------------------------------------------------------------

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, is_json: bool = True
    ) -> Any:
        """The JSON answer to `body`; None for an empty answer. is_json=False: the route answers in
        words, which are dropped."""
        return await self._call("POST", path, body, is_json=is_json)

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The JSON of each server-sent event. Closing the iterator closes the connection, and the
        server ends the request. Raises ServerUnreachableError if it breaks off before [DONE].
        """
        where = self._where("POST", path)
        async with self._answer("POST", path, body) as answer:
            rest, is_whole = b"", False
            async for part in answer.content.iter_any():  # aiohttp's own lines end at 128 KiB
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue  # names of events, comments that keep the connection open
                    text = line[len(b"data:") :].strip()
                    if text == b"[DONE]":
                        is_whole = True  # read on, so that the connection can be used again
                        continue
                    event = _parsed(where, text)
                    if isinstance(event, dict) and event.get("error"):
                        raise ServerRefusedError(
                            f"{where}: an error within the stream: {_message_in(event)}"
                        )
                    yield event
        if not is_whole:
            raise ServerUnreachableError(f"{where}: the stream broke off before its end.")

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, is_json: bool = True
    ) -> Any:
        async with self._answer(method, path, body) as answer:
            content = await answer.read()
        if not is_json or not content.strip():
            return None
        return _parsed(self._where(method, path), content)

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[Any]:
        """An answer with a good status. Raises the errors of this module, also while it is read."""
        require_package("aiohttp", extra="http", needed_for=f"engine {self.name}")
        import aiohttp

        where = self._where(method, path)
        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=self.request_seconds
        )
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
        try:
            async with (
                slots,
                aiohttp.ClientSession(
                    timeout=limits, headers=self._headers, json_serialize=_compact
                ) as session,
                session.request(method, self.url + path, json=body) as answer,
            ):
                if answer.status >= 300:
                    raise _refusal(where, answer.status, await answer.read())
                yield answer
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise ServerUnreachableError(
                f"{where}: not reachable ({_reason(error)}).{self._advice}"
            ) from error
        except TimeoutError as error:  # of sock_read
            raise ServerSilentError(
                f"{where}: the connection is open and nothing came for {self.request_seconds:g} s "
                "(engine.request_seconds): frozen, or too slow for its load. See its log."
            ) from error
        except aiohttp.ClientError as error:
            raise ServerUnreachableError(
                f"{where}: the connection was lost ({_reason(error)}): the server ended? See its "
                "log."
            ) from error

    # -- before there is one ------------------------------------------------------------------

    def call_now(
        self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> Any:
        """A blocking request, for questions before the event loop runs: a POST if there is a body.
        Works beside a running loop too."""
        method = "GET" if body is None else "POST"
        seconds = self.request_seconds if seconds is None else seconds

        async def call() -> Any:
            try:
                async with asyncio.timeout(seconds):
                    return await self._call(method, path, body)
            except TimeoutError as error:
                raise ServerSilentError(
                    f"{self._where(method, path)}: no answer within {seconds:g} s."
                ) from error

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, call()).result()

    def wait_until_up(
        self,
        path: str,
        start_seconds: float,
        on_wait: Callable[[str], None] = lambda text: None,
        is_alive: Callable[[], str] = lambda: "",
    ) -> Any:
        """Asks for `path` until the answer has a good status, and returns that answer.

        is_alive: for a server that the run started: "" while its process runs, then why it ended.
        Raises ServerUnreachableError, which says how long the wait was, what the last attempt found
        and how such a server is started.
        """
        started = reported_at = time.monotonic()
        while True:
            try:
                return self.call_now(path, seconds=min(PROBE_SECONDS, start_seconds))
            except ServerRefusedError as error:
                if error.status in (401, 403):
                    advice = "Name the variable that holds its key: engine.api_key_env=VARIABLE."
                    raise ServerRefusedError(f"{error} {advice}", status=error.status) from None
                found = error  # 404 and 503 are how many say that they are not ready
            except (ServerUnreachableError, ServerSilentError) as error:
                found = error
            waited = time.monotonic() - started
            if reason := is_alive():
                raise ServerUnreachableError(f"engine {self.name} at {self.url}: {reason}")
            if reported_at <= time.monotonic():
                reported_at += REPORT_SECONDS
                on_wait(f"waiting for engine {self.name} at {self.url} ({waited:.0f} s)")
            if waited + WAIT_SECONDS > start_seconds:
                advice = "" if self._advice in str(found) else self._advice
                raise ServerUnreachableError(
                    f"engine {self.name} at {self.url}: no answer to {path} within {waited:.0f} s "
                    f"(engine.start_seconds={start_seconds:g}). The last attempt: {found}{advice}"
                ) from found
            time.sleep(WAIT_SECONDS)

    def _where(self, method: str, path: str) -> str:
        return f"engine {self.name}: {method} {self.url}{path}"


def _parsed(where: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise EngineError(
            f"{where}: the answer is not JSON ({error}): "
            f"{_shortened(content.decode(errors='replace'))!r}. Another kind of server at this "
            "address?"
        ) from error


def _refusal(where: str, status: int, content: bytes) -> ServerRefusedError:
    try:
        text = _message_in(json.loads(content))
    except ValueError:
        text = _shortened(content.decode(errors="replace")) or "no message"
    return ServerRefusedError(f"{where}: answered {status}: {text}", status=status)


def _message_in(answer: Any) -> str:
    """The sentence inside an error's JSON, in the shapes of OpenAI, FastAPI and SGLang."""
    found = answer
    for name in ("error", "message", "detail", "msg"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shortened(found if isinstance(found, str) else json.dumps(found))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= MAX_MESSAGE:
        return text
    return f"{text[:MAX_MESSAGE]} ... ({len(text)} characters)"


def _reason(error: object) -> str:
    return str(getattr(error, "os_error", error)) or type(error).__name__
