"""Checks that a sandbox keeps the promises of `Sandbox`, for your own implementations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.agent.sandbox.base import (
    ENDINGS,
    Ending,
    ProgramResult,
    Sandbox,
    SandboxLimits,
    metrics_of,
)
from lockstep.errors import SandboxError

GRACE_SECONDS = 3.0
"""Seconds past its limit for a program to be ended, on a busy machine."""
MAX_HOST_GROWTH_MIB = 256
"""MiB by which this process may grow over all programs."""
VARIABLE = "LOCKSTEP_SANDBOX_SECRET"


@dataclass(slots=True)
class SandboxReport:
    """Measurements of a sandbox that kept every promise."""

    endings: dict[str, Ending] = field(default_factory=dict[str, Ending])
    """name of the program -> ending, in the order of `programs`."""
    max_seconds: float = 0.0
    """Seconds of the slowest program."""
    max_stall_seconds: float = 0.0
    """Longest time in seconds for which the event loop was blocked."""
    host_growth_mib: float = 0.0
    """MiB by which this process grew."""


async def check_sandbox(
    sandbox: Sandbox,
    *,
    limits: SandboxLimits,
    programs: Mapping[str, str],
    max_stall_seconds: float = 5.0,
) -> SandboxReport:
    """Raises SandboxError, naming the program, if `sandbox` breaks a promise. Closes the sandbox.

    Plants secrets in a file, in the environment and behind a port of this machine, and runs all
    `programs`. Then looks for leaked secrets, written files and processes that still run. Plain
    programs must work before and after.

    programs: name -> code, in which SECRET_PATH, CANARY_PATH, PORT and HOST_PID are replaced by
    things of this machine. limits: the sandbox's own. max_stall_seconds: seconds for which the
    event loop may be blocked.

    Guard: tests/cpu/agent/sandbox/test_check_sandbox.py breaks each promise.
    """
    report = SandboxReport()
    with _Host() as host:
        before = _descendants()
        size = _max_resident_mib()
        watch = asyncio.ensure_future(_watch(report))
        try:
            await _check_plain(sandbox)
            await _check_sessions(sandbox)
            results = await asyncio.gather(
                *(_run_hostile(sandbox, name, host.fill(code)) for name, code in programs.items())
            )
            for name, result in zip(programs, results, strict=True):
                _check_result(name, result, limits, host)
                report.endings[name] = result.ending
                report.max_seconds = max(report.max_seconds, result.seconds)
            await _check_plain(sandbox)
        finally:
            watch.cancel()
            await _check_close(sandbox)
        report.host_growth_mib = _max_resident_mib() - size
        host.check()
        left = await _left_over(before)
        _expect("close", not left, f"left the processes {sorted(left)} of this one running")
    _expect(
        "all programs",
        report.host_growth_mib <= MAX_HOST_GROWTH_MIB,
        f"made this process grow by {report.host_growth_mib:.0f} MiB",
    )
    _expect(
        "all programs",
        report.max_stall_seconds <= max_stall_seconds,
        f"held the event loop up for {report.max_stall_seconds:.1f} s",
    )
    return report


def _expect(name: str, holds: bool, problem: str) -> None:
    if not holds:
        raise SandboxError(f"check_sandbox: {name}: {problem}.")


async def _run_hostile(sandbox: Sandbox, name: str, code: str) -> ProgramResult:
    try:
        return await sandbox.run(code)
    except Exception as error:
        raise SandboxError(
            f"check_sandbox: {name}: run raised {type(error).__name__}: {error}. What a program "
            "does must become a ProgramResult."
        ) from error


def _check_result(name: str, result: ProgramResult, limits: SandboxLimits, host: _Host) -> None:
    _expect(name, result.ending in ENDINGS, f"ending={result.ending!r} is none of {ENDINGS}")
    _expect(
        name,
        len(result.output) <= limits.output_chars,
        f"an output of {len(result.output)} characters, at most {limits.output_chars}",
    )
    try:
        result.output.encode()
    except UnicodeEncodeError as error:
        raise SandboxError(f"check_sandbox: {name}: {error}; tokenizers need text.") from error
    for secret in host.secrets:
        _expect(name, secret not in result.output, "read a secret of this machine")
    _expect(
        name,
        result.seconds <= limits.seconds + GRACE_SECONDS,
        f"ran for {result.seconds:.1f} s, limit {limits.seconds:g}",
    )
    expected = metrics_of(result.ending, is_truncated=result.is_truncated)
    missing = {k: v for k, v in expected.items() if result.metrics.get(k) != v}
    _expect(name, not missing, f"metrics={result.metrics} lack {missing}")


async def _check_plain(sandbox: Sandbox) -> None:
    for code, output, ending in (
        ("1 + 1", "2", "ok"),
        ("print('a')\nx = [1]\nx", "a\n[1]", "ok"),
        ("x = 1", "", "ok"),
        ("print('a')\n1 / 0", "ZeroDivisionError: division by zero", "error"),
        ("def f(:", "SyntaxError", "error"),
    ):
        result = await sandbox.run(code)
        is_right = result.output == output if ending == "ok" else output in result.output
        _expect(
            repr(code),
            is_right and result.ending == ending,
            f"expected {ending}, {output!r}; found {result.ending}, {result.output!r}",
        )


async def _check_sessions(sandbox: Sandbox) -> None:
    async def said(code: str, session: str) -> str:
        return (await sandbox.run(code, session=session)).output

    await sandbox.run("x = 41", session="a")
    at_once = [asyncio.ensure_future(sandbox.run("x = x + 1", session="a")) for _ in range(4)]
    await asyncio.gather(*at_once)
    found = await said("x", "a")
    _expect("session", found == "45", f"expected 45 after 41 and four times 1, found {found!r}")
    for name in ("b", ""):
        found = await said("x", name)
        _expect(
            "session", "NameError" in found, f"{name!r} saw a variable of another one: {found!r}"
        )
    await said("1 / 0", "a")
    found = await said("x", "a")
    _expect("session", found == "45", f"an error lost its variables: found {found!r}")
    await sandbox.end_session("a")
    await sandbox.end_session("unknown")
    found = await said("x", "a")
    _expect("end_session", "NameError" in found, f"kept a variable: {found!r}")
    await sandbox.end_session("a")
    await sandbox.end_session("b")


async def _check_close(sandbox: Sandbox) -> None:
    """Closes the sandbox while a program runs."""
    running = asyncio.ensure_future(sandbox.run("while True: pass"))
    await asyncio.sleep(0.05)
    await sandbox.close()
    result = await running
    _expect("close", result.ending == "crashed", f"a program under way ended as {result.ending}")


async def _watch(report: SandboxReport) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.01)
        stall = time.monotonic() - began - 0.01
        report.max_stall_seconds = max(report.max_stall_seconds, stall)


class _Host:
    """Secrets and traps of this machine that programs look for."""

    def __enter__(self) -> _Host:
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.secrets = [f"secret-{secrets.token_hex(8)}" for _ in range(2)]
        self._file, self._canary = folder / "secret", folder / "canary"
        self._file.write_text(self.secrets[0])
        self._stack.enter_context(_environment(VARIABLE, self.secrets[1]))
        self._stream = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._stream.setblocking(False)
        self._port = self._stream.getsockname()[1]
        self._datagrams = self._stack.enter_context(
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        )
        self._datagrams.bind(("127.0.0.1", self._port))
        self._datagrams.setblocking(False)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def fill(self, code: str) -> str:
        for name, value in (
            ("SECRET_PATH", str(self._file)),
            ("CANARY_PATH", str(self._canary)),
            ("HOST_PID", str(os.getpid())),
            ("PORT", str(self._port)),
        ):
            code = code.replace(name, value)
        return code

    def check(self) -> None:
        _expect("files", self._file.exists(), "a program deleted a file of this machine")
        _expect("files", not self._canary.exists(), "a program wrote a file of this machine")
        for kind, receive in (
            ("connected", self._stream.accept),
            ("sent a datagram", lambda: self._datagrams.recv(16)),
        ):
            with contextlib.suppress(BlockingIOError):
                receive()
                raise SandboxError(f"check_sandbox: network: a program {kind} to this machine.")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _descendants() -> set[tuple[int, str]]:
    """(process id, name) of all descendants of this process; empty without /proc."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            parents[int(entry.name)] = (int(rest.split()[1]), name)
    found: set[tuple[int, str]] = set()
    for process, (parent, name) in parents.items():
        while parent in parents and parent != os.getpid():
            parent = parents[parent][0]
        if parent == os.getpid():
            found.add((process, name))
    return found


async def _left_over(before: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Processes that remain after the grace; a killed one may take a moment to go."""
    end = time.monotonic() + GRACE_SECONDS
    while (left := _descendants() - before) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return left


def _max_resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
