"""Tools of an MCP server, through the official SDK (the extra `mcp`).

A server is another program. It may die, hang, answer with megabytes or describe its tools wrongly.
What can be seen at the start is refused there; everything else becomes text that the model reads,
and a counter.
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
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
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
MAX_CHARS = 16_384
"""Characters of a tool's description and schema together; every prompt contains them."""
MAX_TOOLS = 256
STOP_SECONDS = 10.0
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
    """Environment variables that the command gets beside PATH, HOME and the like. It sees no
    others, your keys among them."""
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
        """Returns the named environment variables. Raises ConfigError for one that is not set."""
        names = [*self.pass_variables, *filter(None, (self.token_variable,))]
        for name in names:
            if name not in os.environ:
                raise ConfigError(f"{self}: the environment variable {name} is not set.")
        return {name: os.environ[name] for name in names}


class ToolServer:
    """One MCP server and its tools. Used from any event loop; started on first use, and again
    after it died.

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
        self._expected: Offered | None = None
        if expected is not None:
            self._expected = {t.name: (t.description, dict(t.parameters)) for t in expected}
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        """Held while the server is started or ended; used in the background loop alone."""
        self._settling: set[asyncio.Task[None]] = set()
        self.num_starts = 0

    async def tools(self, *, call_seconds: float = 30.0) -> tuple[Tool, ...]:
        """Returns its tools. call_seconds: limit of each call; a restart before it has
        start_seconds of its own. Calls count mcp/restarts (it was started again), mcp/lost (it went
        away in the middle of a call) and mcp/omitted_parts (images and the like).

        Raises ToolServerError if it cannot be started or offers something unusable.
        """
        return self._with_calls(await _from_background(self._connected({})), call_seconds)

    def tools_now(self) -> tuple[Tool, ...]:
        """`tools`, for a caller that cannot await."""
        return self._with_calls(_in_background(self._connected({})).result(), 30.0)

    def _with_calls(self, connection: _Connection, seconds: float) -> tuple[Tool, ...]:
        return tuple(
            Tool(
                name=name,
                description=description,
                parameters=parameters,
                function=partial(self._call, name, seconds),
                bounds_itself=True,
            )
            for name, (description, parameters) in connection.offered.items()
        )

    async def close(self) -> None:
        """Ends the connection, and the process if it was started here."""
        await _from_background(self._disconnect())

    def close_now(self) -> None:
        """`close`, for a caller that cannot await."""
        _in_background(self._disconnect()).result()

    # -- in the background loop -------------------------------------------------------------------

    async def _call(self, _name: str, _seconds: float, /, **arguments: Any) -> ToolOutput:
        return await _from_background(self._call_there(_name, _seconds, arguments))

    async def _call_there(self, name: str, seconds: float, arguments: dict[str, Any]) -> ToolOutput:
        counters: dict[str, float] = {}
        try:
            connection = await self._connected(counters)
        except ToolServerError as error:
            raise ToolFailure(str(error), metrics=counters) from error
        call = asyncio.ensure_future(connection.client.call_tool(name, arguments))
        try:
            # Watches the end of the connection too: a death must not look like a slow tool.
            done, _ = await asyncio.wait(
                {call, connection.task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                text = f"{name} took longer than {seconds:g} s"
                raise ToolFailure(text, outcome="timeouts", metrics=counters)
            if not call.done():
                raise ToolServerError("the connection ended")
            result = call.result()
        except (asyncio.CancelledError, ToolFailure):  # given up: does the server still answer?
            task = asyncio.create_task(self._settle(connection))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
            raise
        except Exception as error:
            if await self._is_alive(connection):
                raise ToolFailure(_words(error), metrics=counters) from error
            counters["mcp/lost"] = 1.0
            if self._connection is connection:  # nobody has started it again yet
                await self._disconnect()
            text = f"the tool's server went away during the call ({_words(error)})"
            raise ToolFailure(text, metrics=counters) from error
        finally:
            call.cancel()
        text, num_omitted = _text_of(result)
        if num_omitted:
            counters["mcp/omitted_parts"] = float(num_omitted)
        if result.is_error:
            raise ToolFailure(text or "the tool failed without a word", metrics=counters)
        return ToolOutput(text=text, metrics=counters)

    async def _settle(self, connection: _Connection) -> None:
        """Ends a server that answers nothing any more, before another call waits for it."""
        async with self._lock:
            if self._connection is connection and not await self._is_alive(connection):
                await self._disconnect()

    async def _is_alive(self, connection: _Connection) -> bool:
        if not connection.task.done():
            with contextlib.suppress(Exception):
                ping = connection.client.list_tools(cache_mode="bypass")
                await asyncio.wait_for(ping, self._ping_seconds)
                return not connection.task.done()
        return False

    async def _connected(self, counters: dict[str, float]) -> _Connection:
        async with self._lock:
            if self._connection is None or self._connection.task.done():
                if self.num_starts:
                    counters["mcp/restarts"] = 1.0
                self._connection = connection = _Connection(self.address)
                await connection.open(self._start_seconds)
                self.num_starts += 1
                try:
                    connection.offered = check_offer(connection.listed, self.address, self._only)
                    self._check_same(connection.offered)
                except BaseException:
                    await self._disconnect()
                    raise
            return self._connection

    def _check_same(self, offered: Offered) -> None:
        before = self._expected = offered if self._expected is None else self._expected
        if before != offered:
            names = f"{sorted(before)} then, {sorted(offered)} now, or with other schemas"
            raise ToolServerError(f"{self.address} offers other tools than at the start: {names}.")

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Connection:
    """A session with a server. Its context is entered and left in one task, as the SDK needs."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self.client: Any = None
        self.listed: list[Any] = []
        self.offered: Offered = {}
        self._ready = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()
        self._printed = ""
        """End of the process's error output, once it is over."""
        self.task = asyncio.create_task(self._run())

    async def open(self, seconds: float) -> None:
        try:
            await asyncio.wait(
                {self._ready, self.task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        if self._ready.done():
            return
        what = f"did not answer within start_seconds={seconds:g}"
        if self.task.done():
            what = f"could not be reached or spoken to ({_words(self.task.exception())})"
        await self.close()
        printed = f" It printed: {self._printed}" if self._printed else ""
        raise ToolServerError(f"{self._address} {what}. {_hint(self._address)}{printed}")

    async def _run(self) -> None:
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            transport = await self._transport(stack)
            self.client = await stack.enter_async_context(Client(transport, cache=None))
            cursor: str | None = ""
            while cursor is not None and len(self.listed) <= MAX_TOOLS:
                page = await self.client.list_tools(cursor=cursor or None)
                self.listed += page.tools
                cursor = page.next_cursor or None
            self._ready.set_result(None)
            await self._is_over.wait()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        address, variables = self._address, self._address.variables()
        if address.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            token = variables.get(address.token_variable)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            # trust_env: a proxy of the environment must not see what is meant for this server.
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, timeout=None, trust_env=False)
            )
            return streamable_http_client(address.url, http_client=http)
        from mcp import StdioServerParameters, stdio_client

        # Its error output must not fill the terminal, and says why it did not start.
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115

        def keep_tail() -> None:
            start = max(0, os.fstat(errors.fileno()).st_size - TAIL_BYTES)
            tail = os.pread(errors.fileno(), TAIL_BYTES, start)
            self._printed = tail.decode("utf-8", "replace").strip()

        stack.callback(keep_tail)
        program, *arguments = shlex.split(address.command)
        parameters = StdioServerParameters(
            command=sys.executable if program == "python" else program,
            args=arguments,
            env=variables,
            encoding_error_handler="replace",
        )
        return stdio_client(parameters, errlog=errors)

    async def close(self) -> None:
        self._is_over.set()
        seconds = STOP_SECONDS if self._ready.done() else 0.0
        done, _ = await asyncio.wait({self.task}, timeout=seconds)
        if not done:
            self.task.cancel()
            done, _ = await asyncio.wait({self.task}, timeout=STOP_SECONDS)
        if done and not self.task.cancelled():
            self.task.exception()  # retrieved: whoever waited got it


# -- the tools of a server ------------------------------------------------------------------------

Offered = dict[str, tuple[str, dict[str, Any]]]
"""Name -> (description, schema of the arguments)."""


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
        schema, problem = each.input_schema, schema_problem(each.input_schema)
        description = (each.description or "").strip()
        size = len(description) + len(json.dumps(schema))
        num_offers = names.count(each.name)
        for is_wrong, text in (
            (not TOOL_NAME.fullmatch(each.name), "has a name that calls cannot carry"),
            (num_offers > 1, f"is offered {num_offers} times"),
            (problem, f"has a schema that is none: {problem}"),
            (size > MAX_CHARS, f"is described in {size} characters, more than {MAX_CHARS}"),
        ):
            if is_wrong:
                raise ToolServerError(f"{address}: the tool {each.name[:80]!r} {text}.")
        offered[each.name] = (description, simplified(schema))
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
    # Many servers log to their output; the SDK must not print a traceback for each line.
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop, is_over = runner.get_loop(), asyncio.Event()

    def work() -> None:
        with runner:  # its end cancels all connections
            runner.run(is_over.wait())

    thread = threading.Thread(target=work, name="lockstep-mcp", daemon=True)
    thread.start()

    def stop() -> None:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(STOP_SECONDS)

    atexit.register(stop)
    return loop


def _in_background(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _background_loop())


async def _from_background(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(_in_background(work))
