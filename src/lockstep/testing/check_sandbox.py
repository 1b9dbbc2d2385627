"""Checks that a sandbox keeps the promises of `Sandbox`, for your own implementations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.agent.sandbox.base import ENDINGS, Ending, ProgramResult, Sandbox, SandboxLimits
from lockstep.errors import SandboxError
from lockstep.system import children_of

GRACE_SECONDS = 3.0
"""Seconds past its limit for a program to be ended, on a busy machine."""
MAX_HOST_GROWTH_MIB = 256
"""Largest growth of this process over all programs, in MiB."""
VARIABLE = "LOCKSTEP_SANDBOX_SECRET"


@dataclass(slots=True)
class SandboxReport:
    """Measurements of a sandbox that kept every promise."""

    endings: dict[str, Ending] = field(default_factory=dict[str, Ending])
    """name of the program -> ending, in the order of `programs`."""
    max_seconds: float = 0.0
    """Seconds of the slowest program."""
    max_stall_seconds: float = 0.0
    """Longest block of the event loop, in seconds."""
    host_growth_mib: float = 0.0
    """Growth of this process, in MiB."""


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

    programs: name -> code. SECRET_PATH, CANARY_PATH, PORT and HOST_PID in it are replaced by things
    of this machine. limits: the sandbox's own. max_stall_seconds: longest allowed block of the
    event loop, in seconds.

    Guard: tests/cpu/agent/sandbox/test_check_sandbox.py breaks each promise.
    """
    report = SandboxReport()
    before, size = _descendants(os.getpid()), _max_resident_mib()
    with _planted() as (places, planted):
        watch = asyncio.ensure_future(_watch(report))
        try:
            await _check_plain(sandbox)
            await _check_sessions(sandbox)
            running = [_run(sandbox, name, code, places) for name, code in programs.items()]
            for name, result in zip(programs, await asyncio.gather(*running), strict=True):
                _check_result(name, result, limits, planted)
                report.endings[name] = result.ending
                report.max_seconds = max(report.max_seconds, result.seconds)
            await _check_plain(sandbox)
        finally:
            watch.cancel()
            await _check_close(sandbox)
        report.host_growth_mib = _max_resident_mib() - size
    end = time.monotonic() + GRACE_SECONDS  # a killed process may take a moment to go
    while (left := _descendants(os.getpid()) - before) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    growth, stall = report.host_growth_mib, report.max_stall_seconds
    _expect("close", not left, f"left the processes {sorted(left)} of this one running")
    _expect("memory", growth <= MAX_HOST_GROWTH_MIB, f"let this process grow by {growth:.0f} MiB")
    _expect("event loop", stall <= max_stall_seconds, f"held the event loop up for {stall:.1f} s")
    return report


def _expect(name: str, holds: bool, problem: str) -> None:
    if not holds:
        raise SandboxError(f"check_sandbox: {name}: {problem}.")


async def _run(
    sandbox: Sandbox, name: str, code: str, places: Mapping[str, object]
) -> ProgramResult:
    for word, value in places.items():
        code = code.replace(word, str(value))
    try:
        return await sandbox.run(code)
    except Exception as error:
        text = f"run raised {type(error).__name__}: {error}"
        raise SandboxError(f"check_sandbox: {name}: {text}; expected a ProgramResult.") from error


def _check_result(
    name: str, result: ProgramResult, limits: SandboxLimits, planted: list[str]
) -> None:
    size, most = len(result.output), limits.output_chars
    is_text = result.output.encode("utf-8", "replace").decode() == result.output
    late = limits.seconds + GRACE_SECONDS
    for holds, problem in (
        (result.ending in ENDINGS, f"ending={result.ending!r} is none of {ENDINGS}"),
        (size <= most, f"an output of {size} characters, at most {most}"),
        (is_text, "an output with half a character; tokenizers need text"),
        (not any(s in result.output for s in planted), "read a secret of this machine"),
        (result.seconds <= late, f"ran for {result.seconds:.1f} s, limit {limits.seconds:g}"),
    ):
        _expect(name, holds, problem)


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
        found = f"expected {ending}, {output!r}; found {result.ending}, {result.output!r}"
        _expect(repr(code), is_right and result.ending == ending, found)


async def _check_sessions(sandbox: Sandbox) -> None:
    async def expect(expected: str, session: str, problem: str) -> None:
        found = (await sandbox.run("x", session=session)).output
        _expect("session", expected in found, f"{problem}: found {found!r}")

    await sandbox.run("x = 41", session="a")
    await asyncio.gather(*(sandbox.run("x = x + 1", session="a") for _ in range(4)))
    await expect("45", "a", "expected 45 after 41 and four times 1")
    for name in ("b", ""):
        await expect("NameError", name, f"{name!r} saw a variable of another one")
    await sandbox.run("1 / 0", session="a")
    await expect("45", "a", "an error lost its variables")
    for name in ("a", "unknown"):
        await sandbox.end_session(name)
    await expect("NameError", "a", "end_session kept a variable")
    for name in ("a", "b"):
        await sandbox.end_session(name)


async def _check_close(sandbox: Sandbox) -> None:
    """Closes the sandbox while a program runs."""
    running = asyncio.ensure_future(sandbox.run("while True: pass"))
    await asyncio.sleep(0.05)
    await sandbox.close()
    ending = (await running).ending
    _expect("close", ending == "crashed", f"a running program ended as {ending}")


async def _watch(report: SandboxReport) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.01)
        stall = time.monotonic() - began - 0.01
        report.max_stall_seconds = max(report.max_stall_seconds, stall)


@contextlib.contextmanager
def _planted() -> Iterator[tuple[dict[str, object], list[str]]]:
    """({word of a program: place}, secrets): plants secrets and traps of this machine. At the end,
    raises SandboxError if a program got at them."""
    planted = [f"secret-{secrets.token_hex(8)}" for _ in range(2)]
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as stream,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        file, canary, port = Path(folder, "file"), Path(folder, "canary"), stream.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        file.write_text(planted[0])
        os.environ[VARIABLE] = planted[1]
        places = {"SECRET_PATH": file, "CANARY_PATH": canary, "PORT": port}
        try:
            yield {**places, "HOST_PID": os.getpid()}, planted
        finally:
            del os.environ[VARIABLE]
        _expect("files", file.exists(), "a program deleted a file of this machine")
        _expect("files", not canary.exists(), "a program wrote a file of this machine")
        reached, _, _ = select.select([stream, datagrams], [], [], 0)
        _expect("network", stream not in reached, "a program connected to this machine")
        _expect("network", datagrams not in reached, "a program sent a datagram to this machine")


def _descendants(process: int) -> set[int]:
    found = children_of(process)
    return found.union(*map(_descendants, found))


def _max_resident_mib() -> float:
    import resource  # like the sandboxes, for Linux

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
