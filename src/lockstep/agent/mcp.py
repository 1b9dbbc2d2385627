"""Tools of an MCP server, through the official SDK (the extra `mcp`).

A server is another program. It may die, hang, answer with megabytes or describe its tools wrongly.
What can be seen at the start is refused there; everything else becomes text that the model reads,
and a counter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from lockstep.agent.json_schema import schema_problem, simplified
from lockstep.agent.tools import Tool, ToolFailure, ToolOutput
from lockstep.config import did_you_mean
from lockstep.errors import ConfigError, LockstepError, ToolServerError, require_package
from lockstep.launch.background import STOP_SECONDS, in_background
from lockstep.launch.workers import kept

# Many servers log to their output; the SDK must not print a traceback for each line.
logging.getLogger("mcp").addHandler(logging.NullHandler())

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that formats of tool calls can carry."""
MAX_CHARS = 16_384
"""Characters of a tool's description and schema together; every prompt contains them."""
MAX_TOOLS = 256
PING_SECONDS = 5.0
"""Seconds within which a server that was too slow for a call must answer another request, unless
calls have less."""
TAIL_BYTES = 500


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Address of an MCP server: a command to start, or a URL."""

    command: str = ""
    """Command of a process that speaks over its standard input and output. Split as a shell would,
    but no shell runs it; `python` is the interpreter that runs Lockstep."""
    url: str = ""
    """URL of a running server (streamable HTTP)."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables that the command gets besides the usual ones such as PATH and HOME. It
    sees no others, so none of your keys."""
    token_variable: str = ""
    """Environment variable with the bearer token for the URL."""

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"command={self.command!r}: {error}.") from None
        both = f"command={self.command!r} url={self.url!r}"
        for is_wrong, text in (
            (bool(self.command) == bool(self.url), f"give a command or a url, one of them: {both}"),
            (self.url and not re.match(r"https?://", self.url), f"{both} must begin with http://"),
            (self.url and self.pass_variables, "pass_variables is for a command, not for a url"),
            (self.command and self.token_variable, "token_variable is for a url"),
            (self.command and not words, f"{both} names no program"),
        ):
            if is_wrong:
                raise ConfigError(f"MCP server: {text}.")

    def __str__(self) -> str:
        return f"the MCP server {(self.command or self.url)!r}"

    def variables(self) -> dict[str, str]:
        """Returns the named environment variables. Raises ConfigError for a variable that is not
        set."""
        names = [*self.pass_variables, *filter(None, (self.token_variable,))]
        for name in names:
            if name not in os.environ:
                raise ConfigError(f"{self}: the environment variable {name} is not set.")
        return {name: os.environ[name] for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """A session with a server."""

    client: asyncio.Future[Any]
    """The SDK's client, once the server has told its tools; else the reason why it has not."""
    task: asyncio.Task[None]
    """Runs as long as the connection; cancelling it ends both."""


class ToolServer:
    """One MCP server and its tools. Used from any event loop; started on first use, and again
    after it died.

    The first start decides the tools. A server that comes back with other tools is not used again,
    because the model was told of the first ones.
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        only: Sequence[str] = (),
        start_seconds: float = 30.0,
        offered: Offered | None = None,
    ) -> None:
        """only: names of the tools to take; empty takes all. offered: the tools of the first start,
        shared by several servers with one address; filled by the first of them that starts."""
        self.address = address
        self._only, self._start_seconds = tuple(only), start_seconds
        self._offered: Offered = {} if offered is None else offered
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        """Held while the server is started or tried; used in the background loop alone."""
        self.num_starts = 0

    async def tools(self, *, call_seconds: float = 30.0) -> tuple[Tool, ...]:
        """Starts the server if it does not run, and returns its tools. call_seconds: limit of each
        call; a restart before it has start_seconds of its own. Calls count mcp/restarts (it was
        started again), mcp/lost (it went away in the middle of a call) and mcp/omitted_parts
        (images, audio, ...).

        Raises ToolServerError if it cannot be started or offers something unusable.
        """
        await in_background(self._connected({}))
        return self.known_tools(call_seconds=call_seconds)

    def known_tools(self, *, call_seconds: float = 30.0) -> tuple[Tool, ...]:
        """The tools of the first start; none before it."""
        return tuple(
            Tool(
                name=name,
                description=description,
                parameters=parameters,
                function=partial(self._call, name, call_seconds),
                bounds_itself=True,
                parallel=is_read_only,
            )
            for name, (description, parameters, is_read_only) in self._offered.items()
        )

    async def close(self) -> None:
        """Ends the connection, and the process if it was started here."""
        if self._connection is not None:
            await in_background(self._disconnect())

    async def _call(self, _name: str, _seconds: float, /, **arguments: Any) -> ToolOutput:
        return await in_background(self._call_there(_name, _seconds, arguments))

    # -- in the background loop -------------------------------------------------------------------

    async def _call_there(self, name: str, seconds: float, arguments: dict[str, Any]) -> ToolOutput:
        counters: dict[str, float] = {}
        try:
            connection = await self._connected(counters)
        except ToolServerError as error:
            raise ToolFailure(str(error), metrics=counters) from error
        clock = asyncio.timeout(seconds)
        try:
            async with clock:
                result = await connection.client.result().call_tool(name, arguments)
        except Exception as error:
            is_alive = await self._is_alive(connection, min(PING_SECONDS, seconds))
            if clock.expired():
                text = f"{name} took longer than {seconds:g} s"
                raise ToolFailure(text, outcome="timeouts", metrics=counters) from error
            text = _words(error)
            if not is_alive:
                counters["mcp/lost"] = 1.0
                text = f"the tool's server went away during the call ({text})"
            raise ToolFailure(text, metrics=counters) from error
        text, num_omitted = _text_of(result)
        if num_omitted:
            counters["mcp/omitted_parts"] = float(num_omitted)
        if result.is_error:
            raise ToolFailure(text or "the tool failed without a word", metrics=counters)
        return ToolOutput(text=text, metrics=counters)

    async def _is_alive(self, connection: _Connection, seconds: float) -> bool:
        """True if the server answers within `seconds`. If not, it is ended before another call
        waits for it."""
        async with self._lock:
            if self._connection is not connection:  # another call found it silent
                return False
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.client.result().list_tools(), seconds)
                return True
            await self._disconnect()
            return False

    async def _connected(self, counters: dict[str, float]) -> _Connection:
        async with self._lock:
            connection = self._connection
            if connection is None or connection.task.done():
                if self.num_starts:
                    counters["mcp/restarts"] = 1.0
                self.num_starts += 1
                client = asyncio.get_running_loop().create_future()
                connection = _Connection(client, asyncio.create_task(self._connect(client)))
                self._connection = connection
            # A caller that is cancelled leaves the start to the next one.
            await asyncio.shield(connection.client)
            return connection

    async def _connect(self, opened: asyncio.Future[Any]) -> None:
        """Opens the connection and holds it until the task is cancelled: the SDK wants its context
        left by the task that entered it."""
        clock = asyncio.timeout(self._start_seconds)
        # Its error output must not fill the terminal, and says why it did not start.
        with tempfile.TemporaryFile("w+") as printed:
            try:
                async with clock, _client_of(self.address, printed) as client:
                    self._admit(await _listed(client))
                    clock.reschedule(None)
                    opened.set_result(client)
                    await asyncio.Event().wait()
            except BaseException as error:
                if opened.done():  # the calls that this breaks off fail by themselves
                    return
                cause = _first_cause(error)
                if not isinstance(cause, LockstepError):
                    what = f"could not be reached or spoken to ({_words(cause)})"
                    if clock.expired():
                        what = f"did not answer within start_seconds={self._start_seconds:g}"
                    text = f"{self.address} {what}. {_hint(self.address)}"
                    tail = _tail(printed)
                    cause = ToolServerError(f"{text} It printed: {tail}" if tail else text)
                opened.set_exception(cause)

    def _admit(self, listed: Sequence[Any]) -> None:
        """Keeps the tools of the first start. Raises ToolServerError if these are others."""
        offered, before = check_offer(listed, self.address, self._only), self._offered
        if not before:
            before.update(offered)
        elif before != offered:
            names = f"{sorted(before)} then, {sorted(offered)} now, or with other schemas"
            raise ToolServerError(f"{self.address} offers other tools than at the start: {names}.")

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            for _ in range(2):  # the second time ends a farewell that hangs
                connection.task.cancel()
                await asyncio.wait({connection.task}, timeout=STOP_SECONDS)


@contextlib.asynccontextmanager
async def _client_of(address: ServerAddress, errors: TextIO) -> AsyncIterator[Any]:
    """Connects the SDK's client. errors: takes the error output of a command."""
    require_package("mcp", extra="mcp", needed_for="an MCP server")
    import httpx2
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    variables = address.variables()
    async with contextlib.AsyncExitStack() as stack:
        if address.url:
            token = variables.get(address.token_variable)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            # trust_env: a proxy of the environment must not see requests to this server.
            client = httpx2.AsyncClient(headers=headers, timeout=None, trust_env=False)
            http = await stack.enter_async_context(client)
            transport = streamable_http_client(address.url, http_client=http)
        else:
            command = shlex.split(address.command)
            command[0] = sys.executable if command[0] == "python" else command[0]
            if sys.platform == "linux" and shutil.which(command[0]):
                # Without a grace period: the SDK has closed the server's input and waited.
                command = kept(command)
            parameters = StdioServerParameters(
                command=command[0],
                args=command[1:],
                env=variables,
                encoding_error_handler="replace",
            )
            transport = stdio_client(parameters, errlog=errors)
        yield await stack.enter_async_context(Client(transport, cache=None))


def _tail(printed: TextIO) -> str:
    start = max(0, os.fstat(printed.fileno()).st_size - TAIL_BYTES)
    return os.pread(printed.fileno(), TAIL_BYTES, start).decode("utf-8", "replace").strip()


# -- the tools of a server ------------------------------------------------------------------------

Offered = dict[str, tuple[str, dict[str, Any], bool]]
"""Name -> (description, schema of the arguments, whether the server says that it only reads: calls
of one turn then run at once)."""


async def _listed(client: Any) -> list[Any]:
    """All pages of a server's tools, but not many more than MAX_TOOLS."""
    tools: list[Any] = []
    cursor: str | None = ""
    while cursor is not None and len(tools) <= MAX_TOOLS:
        page = await client.list_tools(cursor=cursor or None)
        tools += page.tools
        cursor = page.next_cursor or None
    return tools


def check_offer(listed: Sequence[Any], address: ServerAddress, only: Sequence[str]) -> Offered:
    """Returns the tools. Raises ToolServerError for a tool that the model cannot be told about, or
    whose arguments could not be checked."""
    names = [each.name for each in listed]
    for name in only:
        if name not in names:
            raise ConfigError(f"{address} has no tool {name!r}.{did_you_mean(name, names)}")
    taken = [each for each in listed if not only or each.name in only]
    if not taken or len(taken) > MAX_TOOLS:
        count = "no tool" if not taken else f"more than {MAX_TOOLS} tools; name some in only=..."
        raise ToolServerError(f"{address} offers {count}.")
    offered: Offered = {}
    for each in taken:
        schema, description = each.input_schema, (each.description or "").strip()
        size = len(description) + len(json.dumps(schema))
        problem = "" if size > MAX_CHARS else schema_problem(schema)
        num_offers = names.count(each.name)
        for is_wrong, text in (
            (not TOOL_NAME.fullmatch(each.name), "has a name that calls cannot carry"),
            (num_offers > 1, f"is offered {num_offers} times"),
            (problem, f"has a schema that is none: {problem}"),
            (size > MAX_CHARS, f"is described in {size} characters, more than {MAX_CHARS}"),
        ):
            if is_wrong:
                raise ToolServerError(f"{address}: the tool {each.name[:80]!r} {text}.")
        is_read_only = bool(getattr(each.annotations, "read_only_hint", False))
        offered[each.name] = (description, simplified(schema), is_read_only)
    return offered


def _text_of(result: Any) -> tuple[str, int]:
    """Returns (text for the model, number of parts that are no text and are only named in it)."""
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
            media = held.mime_type or "of no known type"
            parts.append(f"[{kind}, {media}, {size} bytes: not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts), num_omitted


def _hint(address: ServerAddress) -> str:
    if address.url:
        return "Is it running, and does the path end as it must (often /mcp)?"
    return f"Does {shlex.split(address.command)[0]!r} start in a terminal, and speak MCP?"


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words(error: BaseException) -> str:
    """The first cause in a group of them, in words."""
    error = _first_cause(error)
    text = " ".join(str(error).partition("For further information visit")[0].split())
    return f"{type(error).__name__}: {text}".removesuffix(": ")
