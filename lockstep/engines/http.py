"""JSON over HTTP to one server: what went wrong says whether to wait, to ask another or to give up.

Three kinds of failure are kept apart, since each asks for something else: the server cannot be
reached (it is down: another replica may answer), it took the request and says nothing (it hangs:
another may answer, but this one may still be busy with the request), and it answered that it will
not (the request or a setting is wrong: no replica will).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lockstep.errors import (
    ConfigError,
    EngineError,
    MissingExtraError,
    ServerRefusedError,
    ServerSilentError,
    ServerUnreachableError,
)

CONNECT_SECONDS = 10.0
"""Until a connection stands. A machine that is up takes or refuses one at once; longer is a
firewall, or an address that nobody has."""

KEEP_SECONDS = 2.0
"""That a connection nobody uses is kept. Servers close theirs after five, and a request that is
sent on one at that moment is lost: a pause at the end of a training step would be."""

PROBE_SECONDS = 5.0
"""How long one look whether a server is up may take."""

MAX_MESSAGE = 400
"""Characters of a server's own message that are repeated: some answer with a whole page."""


class HttpClient:
    """Requests to one server. Made anywhere; a session is opened in each event loop that asks.

    name: of the engine, for messages. how_started: the command that starts such a server, for the
    message when there is none. request_seconds: without a byte, until the server counts as frozen.
    Connections are not limited: the server queues better than a client does.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        request_seconds: float = 600.0,
        api_key_env: str = "",
        how_started: str = "",
    ) -> None:
        self.url, self.name, self.request_seconds = url, name, request_seconds
        self._how_started = how_started
        self._headers: dict[str, str] = {}
        if api_key_env:
            key = os.environ.get(api_key_env)
            if not key:
                raise ConfigError(
                    f"engine.api_key_env={api_key_env}: the environment has no such variable, or "
                    "an empty one. Set it to the key of the server."
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._sessions: dict[asyncio.AbstractEventLoop, Any] = {}

    def __repr__(self) -> str:
        return f"HttpClient({self.url!r})"  # never the key

    # -- in the event loop --------------------------------------------------------------------

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, is_json: bool = True
    ) -> Any:
        """The JSON that the server answers to `body`; None for an empty answer. is_json=False: of
        a route that answers in words, which are dropped."""
        return await self._call("POST", path, body, is_json=is_json)

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The JSON of each server-sent event. Closing the iterator closes the connection, and with
        it servers end the request. Raises ServerUnreachableError if it breaks off before [DONE].
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

    async def close(self) -> None:
        """Closes the session of this event loop, and forgets those of loops that have ended."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()
        await self._forget_ended_loops()

    async def _forget_ended_loops(self) -> None:
        for loop in [loop for loop in self._sessions if loop.is_closed()]:
            await self._sessions.pop(loop).close()  # its sockets went with their loop

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
        """An answer whose status is good; every failure until its end as an error of ours."""
        import aiohttp

        where = self._where(method, path)
        sent = {} if body is None else {"json": body}
        session = await self._session()
        try:
            async with session.request(method, self.url + path, **sent) as answer:
                if answer.status >= 300:
                    raise _refusal(where, answer.status, await answer.read())
                yield answer
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise ServerUnreachableError(
                f"{where}: not reachable ({_reason(error)}).{self._advice()}"
            ) from error
        except TimeoutError as error:  # of sock_read
            raise ServerSilentError(
                f"{where}: the connection stands and nothing came for {self.request_seconds:g} s "
                "(engine.request_seconds): frozen, or too slow for its load. See its log."
            ) from error
        except aiohttp.ClientError as error:
            raise ServerUnreachableError(
                f"{where}: the connection was lost ({_reason(error)}): the server ended? See its "
                "log."
            ) from error

    async def _session(self) -> Any:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            try:
                import aiohttp
            except ImportError:
                raise MissingExtraError.of(
                    "aiohttp", extra="http", needed_for=f"engine {self.name}"
                ) from None
            await self._forget_ended_loops()
            session = self._sessions[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=self.request_seconds
                ),
                headers=self._headers,
                json_serialize=_compact,
            )
        return session

    # -- before there is one ------------------------------------------------------------------

    def call_now(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        is_post: bool = False,
    ) -> Any:
        """A blocking request, for the few that are asked before the event loop runs: a POST where
        there is a body, or is_post."""
        sent = None if body is None else _compact(body).encode()
        if sent is None and is_post:
            sent = b""
        where = self._where("GET" if sent is None else "POST", path)
        request = urllib.request.Request(self.url + path, data=sent, headers=dict(self._headers))
        if body is not None:
            request.add_header("Content-Type", "application/json")
        # Without proxies, as in the event loop: an engine is a machine of one's own.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        seconds = self.request_seconds if seconds is None else seconds
        try:
            with opener.open(request, timeout=seconds) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise _refusal(where, error.code, error.read()) from None
        except TimeoutError as error:
            raise ServerSilentError(f"{where}: no answer within {seconds:g} s.") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise ServerSilentError(f"{where}: no answer within {seconds:g} s.") from error
            raise ServerUnreachableError(
                f"{where}: not reachable ({_reason(error.reason)}).{self._advice()}"
            ) from error
        except OSError as error:
            raise ServerUnreachableError(
                f"{where}: the connection was lost ({_reason(error)})."
            ) from error
        return _parsed(where, content) if content.strip() else None

    def wait_until_up(
        self,
        path: str,
        start_seconds: float,
        on_wait: Callable[[str], None] = lambda text: None,
        is_alive: Callable[[], str] = lambda: "",
    ) -> Any:
        """Asks for `path` until it is answered with a good status, and returns that answer.

        is_alive: of a server that we started: "" while its process runs, else why it ended; there
        is no point in waiting for one that is gone. Raises ServerUnreachableError, which says how
        long was waited, what was found last and how such a server is started.
        """
        started = time.monotonic()
        pause, told = 0.1, ""
        while True:
            try:
                return self.call_now(path, seconds=min(PROBE_SECONDS, start_seconds))
            except ServerRefusedError as error:
                if error.status in (401, 403):
                    raise ServerRefusedError(
                        f"{error} Name the environment variable that holds its key with "
                        "engine.api_key_env=VARIABLE.",
                        status=error.status,
                    ) from None
                found = error  # 404 and 503 are how many say that they are not ready
            except (ServerUnreachableError, ServerSilentError) as error:
                found = error
            waited = time.monotonic() - started
            if reason := is_alive():
                raise ServerUnreachableError(f"engine {self.name} at {self.url}: {reason}")
            if waited + pause > start_seconds:
                raise ServerUnreachableError(
                    f"engine {self.name} at {self.url}: no answer to {path} within {waited:.0f} s "
                    f"(engine.start_seconds={start_seconds:g}). The last attempt: {found}"
                    f"{'' if self._advice() in str(found) else self._advice()}"
                ) from found
            text = f"waiting for engine {self.name} at {self.url} ({waited:.0f} s)"
            if text != told:
                on_wait(text)
                told = text
            time.sleep(pause)
            pause = min(2.0, pause * 1.5)

    def _where(self, method: str, path: str) -> str:
        return f"engine {self.name}: {method} {self.url}{path}"

    def _advice(self) -> str:
        if not self._how_started:
            return ""
        return f" Is the server up? It is started with: {self._how_started}"


def _compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


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
    """The sentence inside an error's JSON: OpenAI's, FastAPI's and SGLang's shapes."""
    found = answer
    for name in ("error", "message", "detail", "msg"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shortened(found if isinstance(found, str) else json.dumps(found))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return (
        text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ... ({len(text)} characters)"
    )


def _reason(error: object) -> str:
    text = str(error)
    return text if text else type(error).__name__
