"""Sandboxes for code that a model wrote: the interface, and what all kinds share.

Every sandbox isolates, and no setting turns that off: a model in training finds whatever its code
can reach, and a run that lasts days tries it thousands of times an hour.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from lockstep.config import ABOVE_0, Checked, at_least
from lockstep.launch.background import Background, in_background

Ending = Literal["ok", "error", "timeout", "memory", "output", "refused", "crashed"]
"""How a program ended. error: it raised, or is not Python. output: its output was cut at the limit
and it ended well otherwise. refused: it asked for something that no sandbox gives (a file, a
socket, a process). crashed: the sandbox process died and was replaced."""
ENDINGS: tuple[Ending, ...] = get_args(Ending)

CUT = "\n[output cut here]"
MAX_CODE_CHARS = 65_536
"""Longest program in characters."""
MAX_ERROR_CHARS = 1500
"""Longest text of an error. Longer ones lose their beginning: the end names the mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits(Checked):
    """Limits of one program."""

    seconds: Annotated[float, ABOVE_0] = 5.0
    """Wall time in seconds, sleeping included; then the program is ended."""
    memory_mib: Annotated[int, at_least(16)] = 256
    """Memory in MiB that the program may fill."""
    output_chars: Annotated[int, at_least(256)] = 8192
    """Characters of output; the rest is cut."""
    processes: Annotated[int, at_least(1)] = 1
    """Threads and processes at a time, the program itself included, in sandboxes that have any."""

    @property
    def output_bytes(self) -> int:
        """Bytes of printed text that are kept, enough for `output_chars`. An odd number, which
        tells an error about it from one about the memory."""
        return 4 * self.output_chars + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of one program."""

    output: str
    """Text for the model: what the program printed, then the value of its last expression on a line
    of its own; if it failed, then the error as Python words it."""
    ending: Ending
    is_truncated: bool = False
    seconds: float = 0.0
    """Wall time in seconds, without the wait for a free place."""

    @property
    def metrics(self) -> dict[str, float]:
        """Counters for the trajectory: `sandbox/programs`, `sandbox/ENDING` for every ending but
        ok, and `sandbox/truncated`."""
        failed, cut = {self.ending} - {"ok"}, ["truncated"] * self.is_truncated
        return {f"sandbox/{name}": 1.0 for name in ("programs", *failed, *cut)}


@dataclass(frozen=True, kw_only=True)
class SandboxConfig(Checked):
    """Base of the settings of a sandbox. A subclass is a choice of the setting `sandbox`, by its
    tag."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    workers: Annotated[int, at_least(1)] = 2
    """Programs that run at a time; others wait. Waiting does not count against a program's time."""

    def check(self) -> None:
        """Raises MissingExtraError or ConfigError if something is missing on this machine."""

    def open(self) -> Sandbox:
        """A sandbox that starts with its first program. The caller closes it."""
        raise NotImplementedError


class Sandbox:
    """Runs untrusted programs. Never raises for what a program does.

    One sandbox serves all episodes of a run. It starts with the first program, runs up to `workers`
    programs at a time, and queues the others. It may be used from any event loop. Subclasses give
    `_run`, `_forget` and `_end`, which run in the background loop.
    """

    dialect = "Python."
    """One or two sentences about this Python, for the description of a tool."""

    def __init__(self, config: SandboxConfig) -> None:
        self._limits = config.limits
        self._free = asyncio.Semaphore(config.workers)
        self._turns: dict[str, asyncio.Lock] = {}
        self._running = Background()
        self._is_closing = False

    async def run(self, code: str, *, session: str = "") -> ProgramResult:
        """Runs `code`. Programs of one `session` run in order and share their variables; without a
        session, each program starts from nothing."""
        if problem := unreadable(code):
            return self._result("", "error", problem)
        return await in_background(self._wait_and_run(code, session))

    async def end_session(self, session: str) -> None:
        """Forgets the variables of a session. Unknown sessions are ignored."""
        await in_background(self._forget(session))
        self._turns.pop(session, None)

    async def close(self) -> None:
        """Ends everything. Running programs end as crashed."""
        await in_background(self._close())

    async def _close(self) -> None:
        self._is_closing = True
        try:
            await self._running.cancel()
        finally:
            self._is_closing = False
            self._turns.clear()
        await self._end()

    async def _run(self, code: str, session: str) -> ProgramResult:
        """Runs one program, once it has a place."""
        raise NotImplementedError

    async def _forget(self, session: str) -> None:
        """Ends a session."""
        raise NotImplementedError

    async def _end(self) -> None:
        """Ends everything, after all programs have ended."""
        raise NotImplementedError

    async def _wait_and_run(self, code: str, session: str) -> ProgramResult:
        async def in_turn() -> ProgramResult:
            turn = self._turns.setdefault(session, asyncio.Lock()) if session else nullcontext()
            async with turn, self._free:
                return await self._run(code, session)

        try:
            return await self._running.start(in_turn())
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
            return self._result("", "crashed", "error: the sandbox was closed")

    def _error_of(self, ending: Ending) -> str:
        """The model's text for a program that met a limit."""
        if ending == "timeout":
            return f"TimeoutError: the program was ended after {self._limits.seconds:g} s"
        if ending == "memory":
            return f"MemoryError: the program may fill {self._limits.memory_mib} MiB"
        return ""

    def _result(
        self,
        printed: str,
        ending: Ending,
        error: str = "",
        *,
        is_truncated: bool = False,
        seconds: float = 0.0,
    ) -> ProgramResult:
        """A result whose text has at most `output_chars` characters. The printed text is cut to
        make room for the error, never the reverse, and "ok" then becomes "output".

        printed: text of any length. is_truncated: whether it was cut before.
        """
        error, limit = error or self._error_of(ending), self._limits.output_chars
        if len(error) > MAX_ERROR_CHARS:
            error = "[...]\n" + error[-MAX_ERROR_CHARS:]
        error = error[-limit:]
        room = limit - (len(error) + 1 if error else 0)
        if is_truncated or len(printed) > room:
            is_truncated = True
            printed = printed[: max(0, room - len(CUT))] + CUT
            ending = "output" if ending == "ok" else ending
        parts = [part for part in (printed.rstrip("\n"), error) if part]
        return ProgramResult(
            # A lone surrogate cannot be encoded as UTF-8, and so not as tokens either.
            output="\n".join(parts).encode("utf-8", "replace").decode("utf-8"),
            ending=ending,
            is_truncated=is_truncated,
            seconds=seconds,
        )


def unreadable(code: str) -> str:
    """Why no sandbox takes `code`, in Python's words; "" if they do."""
    if len(code) > MAX_CODE_CHARS:
        return f"SyntaxError: the program has {len(code)} characters; at most {MAX_CODE_CHARS}"
    try:
        code.encode()
    except UnicodeEncodeError as error:
        return f"SyntaxError: character {error.start} of the program is half a character"
    if "\0" in code:
        return "SyntaxError: source code cannot contain null bytes"
    return ""
