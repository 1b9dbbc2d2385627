"""Tools of an MCP server, through the official SDK (the extra `mcp`).

A server is another program. It may die, hang, answer with megabytes or lie about its tools: what
can be seen at start is refused there, and all else is text that the model reads, and a counter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import math
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TypeVar

from lockstep.agent.json_schema import schema_problem, simplified
from lockstep.agent.tools import Tool, ToolFailure, ToolOutput
from lockstep.config import did_you_mean
from lockstep.errors import ConfigError, MissingExtraError, ToolServerError

T = TypeVar("T")

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that formats of tool calls can carry."""
MAX_DESCRIPTION_CHARS = 16_384
"""Characters of a tool's description and schema together; every prompt contains them."""
MAX_TOOLS = 256
STOP_SECONDS = 10.0
TAIL_BYTES = 500


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Address of an MCP server: a command to start, or a URL."""

    command: str = ""
    """Started as a process, spoken to over its standard input and output. Split as a shell would,
    but no shell runs it; `python` is the interpreter that runs Lockstep."""
    url: str = ""
    """URL of a running server (streamable HTTP)."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables that the command gets beside PATH, HOME and the like. Others it does
    not see: keys of yours among them."""
    token_variable: str = ""
    """Environment variable with the bearer token that the URL asks for."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                "an MCP server is given by its command or its url, one of them: "
                f"command={self.command!r} url={self.url!r}."
            )
        if self.url and not re.match(r"https?://", self.url):
            raise ConfigError(f"url={self.url!r} must begin with http:// or https://.")
        if self.url and self.pass_variables:
            raise ConfigError("pass_variables is for a command, and there is a url.")
        if self.command and self.token_variable:
            raise ConfigError("token_variable is for a url. Use pass_variables.")
        try:
            is_empty = bool(self.command) and not shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command={self.command!r}: {error}.") from None
        if is_empty:
            raise ConfigError(f"command={self.command!r} names no program.")

    def __str__(self) -> str:
        return f"the MCP server {(self.command or self.url)!r}"

    def variables(self) -> dict[str, str]:
        """The named environment variables. ConfigError for one that is not set."""
        names = self.pass_variables + ((self.token_variable,) if self.token_variable else ())
        for name in names:
            if name not in os.environ:
                raise ConfigError(f"{self}: the environment variable {name} is not set.")
        return {name: os.environ[name] for name in names}


class ToolServer:
    """One MCP server and its tools. Used from any event loop; started on first use, and again after
    it died.

    The tools are those of the first start. A server that comes back with other tools is not used
    again, because the model was told of the first ones.
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        only: Sequence[str] = (),
        start_seconds: float = 30.0,
        ping_seconds: float = 5.0,
        expected: Sequence[Tool] | None = None,
    ) -> None:
        """only: names of the tools to take; empty takes all. ping_seconds: time within which a
        server that was too slow for a call must answer a ping, or is ended. expected: the tools
        that it must offer, if another start of it is known."""
        self.address = address
        self._only, self._start_seconds = tuple(only), start_seconds
        self._ping_seconds = ping_seconds
        self._expected = None if expected is None else _digest_of(expected)
        self._connection: _Connection | None = None
        self._lock: asyncio.Lock | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self.num_starts = 0

    async def tools(self, *, call_seconds: float = 30.0) -> tuple[Tool, ...]:
        """Its tools, each call of which may take call_seconds; a restart before it has
        start_seconds of its own. Their calls count mcp/restarts (it was started again), mcp/lost
        (it went away in the middle of a call) and mcp/omitted_parts (images and the like).

        Raises ToolServerError if it cannot be started or offers what no tool can be made of.
        """
        return self._as_tools(await _in_background(self._connected({})), call_seconds)

    def tools_now(self, *, call_seconds: float = 30.0) -> tuple[Tool, ...]:
        """`tools`, for a caller that cannot await."""
        work = asyncio.run_coroutine_threadsafe(self._connected({}), _background_loop())
        return self._as_tools(work.result(), call_seconds)

    def _as_tools(self, connection: _Connection, call_seconds: float) -> tuple[Tool, ...]:
        return tuple(
            Tool(
                name=offered["name"],
                description=offered["description"],
                parameters=offered["parameters"],
                function=partial(self._call, offered["name"], call_seconds),
                bounds_itself=True,
            )
            for offered in connection.offered
        )

    async def close(self) -> None:
        """Ends the connection, and the process if it was started here."""
        await _in_background(self._disconnect())

    def close_now(self) -> None:
        """`close`, for a caller that cannot await."""
        asyncio.run_coroutine_threadsafe(self._disconnect(), _background_loop()).result()

    # -- calls ------------------------------------------------------------------------------------

    async def _call(self, _name: str, _seconds: float, /, **arguments: Any) -> ToolOutput:
        return await _in_background(self._call_there(_name, _seconds, arguments))

    async def _call_there(self, name: str, seconds: float, arguments: dict[str, Any]) -> ToolOutput:
        counters: dict[str, float] = {}
        try:
            connection = await self._connected(counters)
        except ToolServerError as error:
            raise ToolFailure(str(error), metrics=counters) from error
        call = asyncio.ensure_future(connection.client.call_tool(name, arguments))
        try:
            # The connection's end is watched beside the call: waiting for an answer that cannot
            # come any more would make a death look like a slow tool.
            done, _ = await asyncio.wait(
                {call, connection.task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._settle(connection)
                raise ToolFailure(
                    f"{name} took longer than {seconds:g} s", outcome="timeouts", metrics=counters
                )
            if not call.done():
                raise ToolServerError("the connection ended")
            result = call.result()
        except asyncio.CancelledError:
            self._settle(connection)
            raise
        except ToolFailure:
            raise
        except Exception as error:
            if await self._is_alive(connection):
                raise ToolFailure(_words(error), metrics=counters) from error
            counters["mcp/lost"] = 1.0
            if self._connection is connection:  # and nobody has started it again
                await self._disconnect()
            raise ToolFailure(
                f"the tool's server went away during the call ({_words(error)})", metrics=counters
            ) from error
        finally:
            call.cancel()
        text, num_omitted = _text_of(result)
        if num_omitted:
            counters["mcp/omitted_parts"] = float(num_omitted)
        if result.is_error:
            raise ToolFailure(text or "the tool failed without a word", metrics=counters)
        return ToolOutput(text=text, metrics=counters)

    def _settle(self, connection: _Connection) -> None:
        """After a call that was given up: ends a server that answers nothing any more, before
        another call waits for it, and before one that floods the connection fills the memory."""

        async def settle() -> None:
            async with self._guard():
                is_current = self._connection is connection
                if is_current and not await self._is_alive(connection):
                    await self._disconnect()

        task = asyncio.create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _is_alive(self, connection: _Connection) -> bool:
        if connection.task.done():
            return False
        try:
            await asyncio.wait_for(
                connection.client.list_tools(cache_mode="bypass"), self._ping_seconds
            )
        except Exception:
            return False
        return not connection.task.done()

    # -- the connection ---------------------------------------------------------------------------

    async def _connected(self, counters: dict[str, float]) -> _Connection:
        async with self._guard():
            if self._connection is None or self._connection.task.done():
                if self.num_starts:
                    counters["mcp/restarts"] = 1.0
                await self._connect()
            assert self._connection is not None
            return self._connection

    def _guard(self) -> asyncio.Lock:
        """Held by whoever starts or ends the server. Made in the loop that it belongs to."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _connect(self) -> None:
        connection = await _Connection.open(self.address, self._start_seconds)
        self.num_starts += 1
        self._connection = connection
        try:
            offered = check_offer(connection.listed, self.address, self._only)
            digest = _digest(offered)
            if self._expected is not None and digest != self._expected:
                before, after = (sorted(json.loads(each)) for each in (self._expected, digest))
                raise ToolServerError(
                    f"{self.address} offers other tools than at the start: "
                    + (
                        f"{before} then, {after} now."
                        if before != after
                        else "their schemas differ."
                    )
                )
        except BaseException:
            await self._disconnect()
            raise
        self._expected, connection.offered = digest, offered

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Connection:
    """A session with a server. Its context is entered and left in one task, as the SDK needs."""

    def __init__(self) -> None:
        self.client: Any = None
        self.listed: list[Any] = []
        self.offered: list[dict[str, Any]] = []
        self.task: asyncio.Task[None]
        self.is_ready = False
        self.printed = ""
        """The end of what a process wrote to its standard error, once it is over."""
        self._is_over = asyncio.Event()
        self._errors: Any = None

    @classmethod
    async def open(cls, address: ServerAddress, start_seconds: float) -> _Connection:
        connection = cls()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection.task = asyncio.create_task(connection._run(address, ready))
        try:
            done, _ = await asyncio.wait(
                {ready, connection.task},
                timeout=start_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            connection.task.cancel()
            raise
        if ready.done():
            connection.is_ready = True
            return connection
        what = f"did not answer within start_seconds={start_seconds:g}"
        if done:
            what = f"could not be reached or spoken to ({_words(connection.task.exception())})"
        await connection.close()
        printed = f" It printed: {connection.printed}" if connection.printed else ""
        raise ToolServerError(f"{address} {what}. {_hint(address)}{printed}")

    async def _run(self, address: ServerAddress, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            transport = await self._transport(address, stack)
            self.client = await stack.enter_async_context(Client(transport, cache=None))
            cursor: str | None = None
            while True:
                page = await self.client.list_tools(cursor=cursor)
                self.listed += page.tools
                cursor = page.next_cursor
                if not cursor or len(self.listed) > MAX_TOOLS:
                    break
            ready.set_result(None)
            await self._is_over.wait()

    async def _transport(self, address: ServerAddress, stack: contextlib.AsyncExitStack) -> Any:
        variables = address.variables()
        if address.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            headers = {}
            if address.token_variable:
                headers["Authorization"] = f"Bearer {variables[address.token_variable]}"
            # trust_env: a proxy of the environment must not see what is meant for this server.
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, timeout=None, trust_env=False)
            )
            return streamable_http_client(address.url, http_client=http)
        from mcp import StdioServerParameters, stdio_client

        # What it prints must not fill the terminal, and says why it did not start.
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  the stack closes it
        self._errors = stack.enter_context(errors)
        stack.callback(self._keep_tail)
        program, *arguments = shlex.split(address.command)
        return stdio_client(
            StdioServerParameters(
                command=sys.executable if program == "python" else program,
                args=arguments,
                env=variables,
                encoding_error_handler="replace",
            ),
            errlog=self._errors,
        )

    def _keep_tail(self) -> None:
        """Keeps the end of the process's error output before the file is gone."""
        if self._errors is not None and not self._errors.closed:
            number = self._errors.fileno()
            start = max(0, os.fstat(number).st_size - TAIL_BYTES)
            self.printed = os.pread(number, TAIL_BYTES, start).decode("utf-8", "replace").strip()

    async def close(self) -> None:
        self._is_over.set()
        done, _ = await asyncio.wait({self.task}, timeout=STOP_SECONDS if self.is_ready else 0.0)
        if not done:
            self.task.cancel()
            done, _ = await asyncio.wait({self.task}, timeout=STOP_SECONDS)
        if done and not self.task.cancelled():
            self.task.exception()  # retrieved: whoever waited got it


# -- what a server offers -------------------------------------------------------------------------


def check_offer(
    listed: Sequence[Any], address: ServerAddress, only: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the tools as name, description and parameters. Raises ToolServerError for a tool that
    the model cannot be told about, or whose arguments could not be checked."""
    names = [each.name for each in listed]
    if not names:
        raise ToolServerError(f"{address} offers no tool.")
    for name in only:
        if name not in names:
            raise ConfigError(f"{address} has no tool {name!r}.{did_you_mean(name, names)}")
    taken = [each for each in listed if not only or each.name in only]
    hint = "Name the tools to take with only=..., or mend the server."
    if len(taken) > MAX_TOOLS:
        raise ToolServerError(f"{address} offers more than {MAX_TOOLS} tools. {hint}")
    offered: list[dict[str, Any]] = []
    for each in taken:
        where = f"{address}: the tool {each.name[:80]!r}"
        if not TOOL_NAME.fullmatch(each.name):
            raise ToolServerError(
                f"{where} has a name that calls cannot carry: expected 1 to 64 letters, digits, "
                f"'_', '-' or '.'. {hint}"
            )
        if names.count(each.name) > 1:
            raise ToolServerError(f"{where} is offered {names.count(each.name)} times.")
        schema = each.input_schema
        if problem := schema_problem(schema):
            raise ToolServerError(f"{where} has a schema that is none: {problem}. {hint}")
        description = (each.description or "").strip()
        size = len(description) + len(json.dumps(schema))
        if size > MAX_DESCRIPTION_CHARS:
            raise ToolServerError(
                f"{where} is described in {size} characters, more than {MAX_DESCRIPTION_CHARS}: "
                f"every prompt would contain them. {hint}"
            )
        offered.append(
            {"name": each.name, "description": description, "parameters": simplified(schema)}
        )
    return offered


def _digest(offered: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({each["name"]: each for each in offered}, sort_keys=True)


def _digest_of(tools: Sequence[Tool]) -> str:
    return _digest(
        [
            {"name": t.name, "description": t.description, "parameters": dict(t.parameters)}
            for t in tools
        ]
    )


def _text_of(result: Any) -> tuple[str, int]:
    """(what the model reads of a result, parts that are no text and were named in their place)."""
    parts: list[str] = []
    num_omitted = 0
    for part in result.content:
        kind = part.type
        if kind == "text":
            parts.append(part.text)
        elif kind == "resource" and hasattr(part.resource, "text"):
            parts.append(part.resource.text)
        elif kind == "resource_link":
            parts.append(f"[resource {part.name}: {part.uri}]")
        else:
            num_omitted += 1
            held = part.resource if kind == "resource" else part
            size = math.ceil(len(getattr(held, "data", None) or getattr(held, "blob", "")) * 3 / 4)
            parts.append(
                f"[{kind}, {held.mime_type or 'of no known type'}, {size} bytes: not shown]"
            )
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts), num_omitted


def _hint(address: ServerAddress) -> str:
    if address.url:
        return "Is it running, and does the path end as it must (often /mcp)?"
    program = shlex.split(address.command)[0]
    return (
        f"Does {program!r} start in a terminal? It must speak MCP over standard input and output."
    )


def _words(error: BaseException | None) -> str:
    """The first cause in a group of them, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).partition("For further information visit")[0].split())
    return f"{type(error).__name__}: {text}".removesuffix(": ")


# -- where connections live -----------------------------------------------------------------------


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own: a connection outlives the event loop of a training step, and
    the SDK ties it to the one that it was opened in."""
    if find_spec("mcp") is None:
        raise MissingExtraError.of("mcp", extra="mcp", needed_for="an MCP server")
    # A server that prints what is no message (many log there) must not print tracebacks of the SDK.
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lockstep-mcp", daemon=True)
    thread.start()

    def stop() -> None:
        async def end_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=STOP_SECONDS) if others else None

        with contextlib.suppress(Exception):  # the interpreter is ending: there is no one to tell
            asyncio.run_coroutine_threadsafe(end_all(), loop).result(STOP_SECONDS)
        loop.call_soon_threadsafe(loop.stop)

    atexit.register(stop)
    return loop


async def _in_background(work: Awaitable[T]) -> T:
    future = asyncio.run_coroutine_threadsafe(work, _background_loop())  # type: ignore[arg-type]
    return await asyncio.wrap_future(future)
