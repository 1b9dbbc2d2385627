"""The sandbox `monty`: a Python interpreter in Rust that has no way out.

It has no files, sockets or processes, so the host stays out of reach even if a program finds a bug.
It runs in processes of its own all the same, without this process's environment; a crashed process
is replaced.

Values leave it as text that `repr` made within the limits, never as objects: a few lines of code
can build a nested list that is small in memory and takes minutes and gigabytes to write down.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import shlex
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lockstep.agent.sandbox.base import Ending, ProgramResult, Sandbox, SandboxConfig
from lockstep.errors import SandboxError, require_package
from lockstep.tables import tables_beside

_TABLES = tables_beside(__file__)
DIALECT: str = _TABLES["dialect"]
GRACE_SECONDS = 0.5
"""Seconds for the interpreter to end a program at its limit, before its process is killed."""
CLOCK = datetime.datetime(2025, 1, 1)
"""Time that programs read. All clocks are frozen, so a program always prints the same."""
MAX_CHECKOUTS = 256
"""Programs that one process runs before it is replaced, which ends whatever they left behind."""
STATEMENT = re.compile(
    r"@|(?:assert|async|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|"
    r"import|nonlocal|pass|raise|return|try|while|with)\b"
)
"""Beginnings that no expression has."""
UNSUPPORTED = "The monty syntax parser does not yet support"
NUM_FRAMES = 5
"""Innermost calls of a traceback that the model reads."""
SOURCE_CHARS = 200
"""Characters of the source line that a traceback shows."""

OUTSIDE = frozenset(_TABLES["outside"])
"""Modules whose only use is to reach out of a program. Importing one counts as refused."""

SHOW = "__value__ = [("
SHOWN = '\n)]\nif __value__[0] is not None:\n    print(f"{__value__[0]!r}")\n__value__ = None'
"""Wrapped around the last statement of a program, these print its value if it is an expression. If
it is not, or begins elsewhere, the brackets do not match, and the parser refuses the program before
anything runs."""


def require_monty() -> Any:
    """The package. Raises MissingExtraError without it."""
    require_package("pydantic_monty", extra="sandbox", needed_for="The sandbox monty")
    import pydantic_monty

    return pydantic_monty


@dataclass(frozen=True, kw_only=True)
class MontyConfig(SandboxConfig):
    """The interpreter `monty`: its own small Python without files, sockets or processes. Fast and
    deterministic, for calculations."""

    max_depth: ClassVar[int] = 500
    """Depth of nested calls."""
    max_session_mib: ClassVar[int] = 16
    """MiB of variables that a session keeps between programs. A program with more gets an error,
    and the session keeps its previous variables."""
    seed: ClassVar[int] = 0
    """Seed of `random` in each session. The clock is frozen, so nothing else varies."""

    def check(self) -> None:
        require_monty()

    def open(self) -> Sandbox:
        return MontySandbox(self)


class MontySandbox(Sandbox):
    """Programs in a pool of `workers` interpreters. See `MontyConfig`."""

    dialect = DIALECT

    def __init__(self, config: MontyConfig) -> None:
        super().__init__(config)
        self._monty = require_monty()
        self._config = config
        self._states: dict[str, bytes] = {}
        """Variables of each session. They need no process, so thousands of sessions may wait."""
        self._start: asyncio.Task[Any] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def _forget(self, session: str) -> None:
        self._states.pop(session, None)

    async def _end(self) -> None:
        self._states.clear()
        start, self._start = self._start, None
        if start is not None:
            with contextlib.suppress(SandboxError):  # it never started
                pool = await start
                await pool.__aexit__(None, None, None)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def _pool(self) -> Any:
        if self._start is None or (self._start.done() and self._start.exception()):
            self._start = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._start)

    async def _open(self) -> Any:
        pool = self._monty.AsyncMonty(
            binary_path=self._worker_script(),
            min_processes=self._config.workers,
            max_processes=self._config.workers,
            max_checkouts_per_worker=MAX_CHECKOUTS,
            feed_duration_limit_grace=GRACE_SECONDS,
            # Of requests that run no program, such as loading a state.
            request_timeout=self._limits.seconds + 2 * GRACE_SECONDS,
        )
        try:
            opened = await pool.__aenter__()
            async with opened.checkout() as feed:  # fails here if the interpreter cannot run
                await feed.feed_run("None")
            return opened
        except (OSError, RuntimeError, self._monty.MontyError) as error:
            text = f"sandbox=monty does not start: {error}. May programs run from "
            text += f"{tempfile.gettempdir()}? TMPDIR names another place."
            raise SandboxError(text) from error

    def _worker_script(self) -> str:
        """Path of a script that starts an interpreter without our environment, with kernel limits
        on memory, and without its messages, which also come as errors."""
        from pydantic_monty._binary import find_monty_binary

        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-monty-")
        script = Path(self._folder.name) / "worker"
        kib = (2 * self._limits.memory_mib + 1024) * 1024  # its heap, a copy on its way out, itself
        script.write_text(
            f"#!/bin/sh\nulimit -c 0\nulimit -v {kib}\n"
            f'exec env -i {shlex.quote(find_monty_binary())} "$@" 2>/dev/null\n'
        )
        script.chmod(0o700)
        return str(script)

    async def _run(self, code: str, session: str) -> ProgramResult:
        monty = self._monty
        pool = await self._pool()
        checkout = pool.checkout(
            script_name="program.py",
            limits={
                "max_feed_duration_secs": self._limits.seconds,
                "max_memory": self._limits.memory_mib << 20,
                "max_recursion_depth": self._config.max_depth,
            },
            os_policy={
                "datetime": CLOCK,
                "sleep": "zero",  # the time limit does not count sleep
                "random_start": {"seed": self._config.seed},
            },
        )
        began, printed = time.monotonic(), ""
        try:
            async with checkout as feed:
                # The interpreter's own limit is per request, and may be late.
                async with asyncio.timeout(self._limits.seconds + GRACE_SECONDS):
                    if (state := self._states.get(session)) is not None:
                        await feed.load_session(state)
                    printed, ending, error = await self._feed(feed, code, began)
                    # After these endings the interpreter's state is undefined.
                    is_defined = ending not in ("timeout", "memory", "crashed")
                    if session and is_defined and not await self._keep(feed, session):
                        lost = f"MemoryError: more than {self._config.max_session_mib} MiB of "
                        lost += "variables cannot be kept for the next program; those from before "
                        ending, error = "memory", f"{error}\n{lost}this one are back".lstrip()
        except TimeoutError:
            ending, error = "timeout", ""
        except monty.MontyCrashedError as crash:
            ending, error = "crashed", "error: the sandbox crashed"
            # A timeout that the interpreter did not notice is a timeout to the model, not a crash.
            if crash.timed_out or time.monotonic() - began >= self._limits.seconds:
                ending, error = "timeout", ""
        except monty.MontyError as failure:
            text = failure.display("type-msg") if hasattr(failure, "display") else str(failure)
            ending, error = "crashed", f"error: the sandbox failed: {text}"
        return self._result(printed, ending, error, seconds=time.monotonic() - began)

    async def _feed(self, feed: Any, code: str, began: float) -> tuple[str, Ending, str]:
        """Runs `code` and prints its last value, if it has one: (printed text, ending, error)."""
        monty = self._monty
        shown, spans_lines = show_value(code)
        if spans_lines and not await self._can_be_parsed(feed, code):
            shown = ""
        asked: list[str] = []

        def refuse(*, name: str, **_: Any) -> Any:
            asked.append(name)
            return monty.NOT_HANDLED

        # A last None, so that no value leaves as an object.
        for program in filter(None, (shown, code + "\n\nNone")):
            printed = monty.CollectString(max_bytes=self._limits.output_bytes)
            try:
                await feed.feed_run(program, print_callback=printed, os=refuse)
            except monty.MontySyntaxError as error:
                # One that was raised at run time (by `eval`) has a frame with a name.
                if program is shown and all(f.function_name is None for f in error.traceback()):
                    continue  # it could not be parsed, so nothing ran
                return printed.output, "error", _traceback(error)
            except monty.MontyRuntimeError as error:
                ending = self._ending_of(error, bool(asked), began)
                is_shown = ending in ("error", "refused")
                return printed.output, ending, _traceback(error) if is_shown else ""
            return printed.output, "ok", ""
        raise AssertionError("the last program has a result")

    async def _can_be_parsed(self, feed: Any, code: str) -> bool:
        """Whether `code` is a program without our brackets, within which a wrongly indented line
        would be an argument."""
        try:
            await feed.feed_run("assert False\n" + code)
        except (self._monty.MontySyntaxError, self._monty.MontyRuntimeError) as error:
            return error.display("type-msg").startswith("AssertionError")
        return False

    def _ending_of(self, error: Any, has_asked: bool, began: float) -> Ending:
        """has_asked: the program asked for something of the operating system."""
        kind, _, text = error.display("type-msg").partition(":")
        if kind == "TimeoutError" and "time limit exceeded" in text:
            return "timeout"
        if kind == "MemoryError" and text.endswith(f"> {self._limits.output_bytes} bytes"):
            is_late = time.monotonic() - began >= self._limits.seconds  # hidden by this error
            return "timeout" if is_late else "ok"
        if kind == "MemoryError":
            return "memory"
        missing = text.strip().removeprefix("No module named ").strip("'")
        is_refused = (
            (kind == "PermissionError" and has_asked)
            or (kind == "RuntimeError" and has_asked and "not supported in this" in text)
            or (kind == "ModuleNotFoundError" and missing in OUTSIDE)
        )
        return "refused" if is_refused else "error"

    async def _keep(self, feed: Any, session: str) -> bool:
        """Saves the session's variables. False if they are too large."""
        try:
            state = await feed.dump()
        except self._monty.MontyRuntimeError:  # no memory left to write them
            return False
        if len(state) > self._config.max_session_mib << 20:
            return False
        self._states[session] = state
        return True


def show_value(code: str) -> tuple[str, bool]:
    """(`code` changed to print the value of its last statement, whether that spans lines); ("",
    False) if the statement cannot be an expression.

    The statement begins at the last line that is not indented. `code` is not parsed here: deep
    nesting has crashed Python's own parser.
    """
    code = code.replace("\r\n", "\n")
    if "\r" in code:  # ends a line in Python, and nowhere else
        return "", False
    lines = code.rstrip().split("\n")
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        is_continued = index > 0 and lines[index - 1].endswith("\\")
        if not line.strip() or line[0] in " \t\f#)]}\\" or is_continued:
            continue
        if STATEMENT.match(line):
            break
        shown = "\n".join([*lines[:index], SHOW + line, *lines[index + 1 :]]) + SHOWN
        return shown, index < len(lines) - 1
    return "", False


def _traceback(error: Any) -> str:
    """The error as Python words it, with its innermost calls, without our additions to the
    program."""
    frames = error.traceback()
    lines = ["Traceback (most recent call last):"] if frames else []
    if len(frames) > NUM_FRAMES:
        lines.append("  [...]")
    for frame in frames[-NUM_FRAMES:]:
        where = f", in {frame.function_name}" if frame.function_name else ""
        lines.append(f'  File "program.py", line {frame.line}{where}')
        if source := (frame.source_line or "").replace(SHOW, "", 1).strip():
            lines.append(f"    {source[:SOURCE_CHARS]}")
    text = error.display("type-msg").replace(UNSUPPORTED, "this Python does not support", 1)
    return "\n".join([*lines, text])
