"""CPython in an isolated process: the common part of the sandboxes `bwrap` and `container`.

Each program has a fresh process, started ahead of time; programs of a session share one. The
process runs `inside.py` and is never trusted: its output is bounded here, it is killed at its time
limit, and it stands still between programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import math
import os
import secrets
import signal
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from lockstep.agent.sandbox.base import (
    ENDINGS,
    MAX_ERROR_CHARS,
    Ending,
    ProgramResult,
    Sandbox,
    SandboxConfig,
    SandboxLimits,
)
from lockstep.config import at_least
from lockstep.errors import ConfigError, SandboxError
from lockstep.launch.background import Background
from lockstep.system import signal_tree

ASK_SECONDS = 60.0
"""Longest wait for a command that tells about this machine."""
START_SECONDS = 30.0
"""Seconds for a process to start, before it has a program."""
COMPLAINT_SECONDS = 2.0
"""Seconds for the error output of a process that did not start to arrive."""
END_SECONDS = 5.0
"""Seconds for a killed process to be gone."""
MARK_SECONDS = 1.0
"""Seconds from the report of a program to the mark at the end of its output."""
MAX_REPORT_BYTES = 64 * 1024
"""Bytes of one report of `inside.py`, whose error is at most 4000 characters."""
FLOOD_BYTES = 1024 * 1024
"""Bytes that a program may write past its output limit, around `print`, before it is ended."""
INTERPRETER_MIB = 64
"""MiB of address space of an idle interpreter, on top of a program's memory."""
GONE = "[the variables of earlier programs are gone]\n"


@dataclass(frozen=True, kw_only=True)
class _ProcessConfig(SandboxConfig):
    """Base of the settings of sandboxes that run CPython in an isolated process."""

    disk_mib: Annotated[int, at_least(1)] = 16
    """MiB of files that a program may write to /tmp, which is in memory."""
    max_sessions: ClassVar[int] = 64
    """Processes that wait for the next program of their session. With more, the longest waiting
    process is ended, and its next program reads that its variables are gone."""

    @property
    def dialect(self) -> str:
        """See `Sandbox.dialect`."""
        return "CPython with its standard library. No network; files only in /tmp."

    def prepare(self) -> Callable[[], Launch]:
        """Looks for all that is needed. Returns a function that gives the command of the next
        process. Raises ConfigError if something is missing."""
        raise NotImplementedError

    def check(self) -> None:
        self.prepare()

    def open(self) -> Sandbox:
        return ProcessSandbox(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command that starts one isolated process."""

    argv: Sequence[str]
    pass_fds: Sequence[int] = ()
    """Descriptors for the process; closed here once it has them."""
    kill_argv: Sequence[str] = ()
    """Command that ends it, if killing the started process does not."""
    env: dict[str, str] = field(default_factory=dict[str, str])


def inside_arguments(config: _ProcessConfig, *, has_group: bool) -> list[str]:
    """Arguments of the Python inside: the program `inside.py` and its orders. has_group: a control
    group bounds memory and processes; otherwise limits on the address space and on the user's
    processes do."""
    limits = config.limits
    rlimits = {
        "CORE": 0,
        "CPU": 100 * math.ceil(limits.seconds) + 1,  # of a session; wall time ends programs
        "FSIZE": config.disk_mib << 20,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "NOFILE": 64,
    }
    if not has_group:
        rlimits["AS"] = (limits.memory_mib + INTERPRETER_MIB) << 20
        # One more, for the process that waits for it in the same namespace.
        rlimits["NPROC"] = limits.processes + 1
    source = importlib.resources.files("lockstep.agent.sandbox").joinpath("inside.py").read_text()
    order = {"limits": rlimits, "output_bytes": max_printed_bytes(limits)}
    return ["-c", source, json.dumps(order)]


def said_by(*command: str, seconds: float = ASK_SECONDS) -> subprocess.CompletedProcess[str]:
    """Runs a short command, with its output. Raises ConfigError if it takes over `seconds`."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": seconds}
    try:
        return subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired:
        text = f"sandbox: `{' '.join(command)[:200]}` does not answer in {seconds:g} s."
        raise ConfigError(f"{text} Does it in a terminal? Is its server well?") from None


def max_printed_bytes(limits: SandboxLimits) -> int:
    return 4 * limits.output_chars + 1


class Worker:
    """One isolated process, from start to end."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch, max_bytes: int) -> None:
        self._process = process
        self._launch = launch
        self._max_bytes = max_bytes
        self._printed = bytearray()
        self._mark = b""
        self._marked = asyncio.Event()
        self._is_flooded = False
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, launch: Launch, *, max_bytes: int) -> Worker:
        """Returns a process that is ready for a program. Raises SandboxError if it does not
        start."""
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                **dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE),
                env=launch.env,
                pass_fds=launch.pass_fds,
                start_new_session=True,  # Ctrl-C at the terminal must not reach it
                limit=MAX_REPORT_BYTES,
            )
        except OSError as error:
            raise SandboxError(f"{launch.argv[0]} cannot be started: {error}.") from error
        finally:
            for fd in launch.pass_fds:
                os.close(fd)
        worker = cls(process, launch, max_bytes)
        failure = "ended before it had started Python"
        try:
            async with asyncio.timeout(START_SECONDS):
                if ((await worker._report()) or {}).get("ready") is True:
                    return worker
        except TimeoutError:
            failure = f"did not start Python in {START_SECONDS:g} s"
        except asyncio.CancelledError:
            await worker.end()
            raise
        # Its error output comes through another pipe than its reports.
        await asyncio.wait({worker._reading}, timeout=COMPLAINT_SECONDS)
        said = worker._printed.decode("utf-8", "replace").strip()[-MAX_ERROR_CHARS:]
        await worker.end()
        raise SandboxError(f"{launch.argv[0]} {failure}; it said: {said or 'nothing'}")

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._reading.done()

    async def run(self, code: str, *, seconds: float, is_last: bool) -> tuple[Ending, str, str]:
        """Runs one program. Returns (ending, printed text, error). After any ending but ok, error
        and refused the process must not be used again."""
        self._mark = secrets.token_hex(8).encode()
        self._signal(signal.SIGCONT)
        self._printed.clear()
        self._marked.clear()
        request = {"code": code, "mark": self._mark.decode(), "is_last": is_last}
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(OSError):  # it died: there will be no report
                    assert self._process.stdin is not None
                    self._process.stdin.write(json.dumps(request).encode() + b"\n")
                    await self._process.stdin.drain()
                report = await self._report()
                if report is None:  # it ended, or only closed its output
                    await self._process.wait()
        except TimeoutError:
            return "timeout", self._text(), ""
        # A program that wrote the report itself goes on; it stands still until the next one, whose
        # time it then takes.
        self._signal(signal.SIGSTOP)
        if report is None:
            await self._gone()
        elif report:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._marked.wait(), MARK_SECONDS)
        text = self._text()
        if self._is_flooded:
            return "output", text, ""
        if report is None:
            ending, error = _end_of(self._process.returncode or 0)
            return ending, text, error
        ending, error = report.get("ending"), report.get("error")
        if ending not in ENDINGS or not isinstance(error, str):
            return "crashed", text, "error: the sandbox gave a malformed answer"
        return ending, text, "" if ending == "memory" else error

    def _text(self) -> str:
        """Text that the program printed."""
        printed = bytes(self._printed).partition(b"\0END " + self._mark)[0]
        return printed.decode("utf-8", "replace")

    async def end(self) -> None:
        """Kills it with everything that it started. Returns when it is gone."""
        self.kill()
        if self._launch.kill_argv:
            with contextlib.suppress(OSError):
                nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.DEVNULL)
                killer = await asyncio.create_subprocess_exec(*self._launch.kill_argv, **nowhere)
                await killer.wait()
        await self._gone()

    def _signal(self, number: int) -> None:
        # A stopped client of containers would keep back what the program printed.
        if self._process.returncode is None and not self._launch.kill_argv:
            signal_tree(self._process.pid, number)

    def kill(self) -> None:
        """Kills it without waiting."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # `self._process.kill` would take the exit status that asyncio waits for.
                os.kill(self._process.pid, signal.SIGKILL)

    async def _gone(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
                await asyncio.wait({self._reading})
        self._reading.cancel()

    async def _report(self) -> dict[str, Any] | None:
        """Its next report; None at the end, {} for a line that is no report."""
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            report = json.loads(line) if line else None
        except (ValueError, RecursionError):  # ValueError: a line that is too long, too
            return {}
        return report if isinstance(report, dict | None) else {}

    async def _read(self) -> None:
        """Keeps the printed text, up to the output limit."""
        assert self._process.stderr is not None
        num_dropped = 0
        tail = b""  # the mark may come after the part that is kept
        while chunk := await self._process.stderr.read(65536):
            kept = chunk[: max(0, self._max_bytes - len(self._printed))]
            self._printed += kept
            num_dropped += len(chunk) - len(kept)
            tail = (tail + chunk)[-256:] if len(chunk) < 256 else chunk[-256:]
            if self._mark and self._mark in tail:
                self._marked.set()
            if num_dropped > FLOOD_BYTES and not self._is_flooded:
                self._is_flooded = True
                self.kill()


def _end_of(status: int) -> tuple[Ending, str]:
    """(ending, error) of an interpreter that ended without a report."""
    number = -status if status < 0 else status - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return "error", f"SystemExit: the program ended itself with status {status}"
    # Within its time, only the kernel kills it.
    known: dict[str, Ending] = {"SIGXCPU": "timeout", "SIGKILL": "memory"}
    if ending := known.get(name):
        return ending, ""
    return "crashed", f"error: the interpreter was ended by {name}"


class ProcessSandbox(Sandbox):
    """Isolated processes, `workers` at a time."""

    def __init__(self, config: _ProcessConfig) -> None:
        super().__init__(config)
        self.dialect, self._config = config.dialect, config
        self._launch: Callable[[], Launch] | None = None
        """None until everything that is needed was found."""
        self._ready: list[asyncio.Task[Worker]] = []
        """Processes that are starting, or wait for their only program."""
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        """Processes of sessions, the least recently used first."""
        self._lost: set[str] = set()
        """Sessions whose process was ended, until their next program reads so."""
        self._ending = Background()

    async def _forget(self, session: str) -> None:
        self._lost.discard(session)
        if (worker := self._sessions.pop(session, None)) is not None:
            await worker.end()

    async def _end(self) -> None:
        starting, self._ready = self._ready, []
        # They are not cancelled: nobody would end a process that is half started.
        started = await asyncio.gather(*starting, return_exceptions=True)
        workers = [each for each in started if isinstance(each, Worker)]
        workers += self._sessions.values()
        self._sessions.clear()
        self._lost.clear()
        await asyncio.gather(*(worker.end() for worker in workers), *self._ending)

    async def _run(self, code: str, session: str) -> ProgramResult:
        worker = self._sessions.pop(session, None)
        has_lost_variables = session in self._lost
        self._lost.discard(session)
        if worker is not None and not worker.is_alive:  # it died between programs
            self._end_later(worker)
            worker, has_lost_variables = None, True
        if worker is None:
            worker = await self._take()
        is_kept = False
        began = time.monotonic()
        try:
            limit = self._limits.seconds
            ending, printed, error = await worker.run(code, seconds=limit, is_last=not session)
            seconds = time.monotonic() - began
            is_kept = bool(session) and ending in ("ok", "error", "refused") and worker.is_alive
        finally:
            if is_kept:
                self._keep(session, worker)
            else:
                self._end_later(worker)
        if session and not is_kept:
            error = f"{error or self._error_of(ending)}\n{GONE}".strip()
        printed, is_truncated = GONE * has_lost_variables + printed, ending == "output"
        return self._result(printed, ending, error, is_truncated=is_truncated, seconds=seconds)

    def _keep(self, session: str, worker: Worker) -> None:
        self._sessions[session] = worker
        while len(self._sessions) > self._config.max_sessions:
            oldest, ended = self._sessions.popitem(last=False)
            self._lost.add(oldest)
            self._end_later(ended)

    def _end_later(self, worker: Worker) -> None:
        """Kills it at once, and waits for its end in the background."""
        worker.kill()
        self._ending.start(worker.end())

    async def _take(self) -> Worker:
        """A process that has run nothing. Starts others for the programs to come."""
        if self._launch is None:
            self._launch = await asyncio.to_thread(self._config.prepare)
        while True:
            while len(self._ready) <= self._config.workers:
                starting = Worker.start(self._launch(), max_bytes=max_printed_bytes(self._limits))
                self._ready.append(asyncio.ensure_future(starting))
            start = self._ready.pop(0)
            try:
                worker = await asyncio.shield(start)
            except asyncio.CancelledError:  # of this program: the process is left for another
                self._ready.insert(0, start)
                raise
            if worker.is_alive:
                return worker
            self._end_later(worker)
