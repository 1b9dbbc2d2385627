"""Agents that play one episode over HTTP: programs that are started here, or that connect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.agent.environment import Score
from lockstep.agent.harness import Endpoint, Harness
from lockstep.agent.scoring import ScorerConfig
from lockstep.children import own_variables
from lockstep.errors import ConfigError, RolloutError
from lockstep.system import kill_group
from lockstep.types import Task

KEPT_BYTES = 1 << 16
"""Bytes kept of the end of a program's output."""
SHOWN_CHARS = 2000
"""Characters of the output that an error shows."""
DRAIN_SECONDS = 1.0
"""Seconds that output may take to arrive when the program has ended."""
KILL_ROUNDS = 20
"""Searches for processes that a program left. One that cannot be killed does not hold up the run.
"""
MAX_VARIABLE_BYTES = 100_000
"""Size of LOCKSTEP_TASK: Linux refuses a variable of 128 KiB. A larger task comes on stdin alone.
"""


def words_of(command: str) -> tuple[str, ...]:
    """The words of a command line. Raises ConfigError if it cannot be started."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"task.command={command!r} cannot be read: {error}.") from None
    if not words:
        raise ConfigError('task.command is empty; expected task.command="python my_agent.py".')
    if words[0] == "python":
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise ConfigError(f"task.command={command!r}: there is no program {words[0]!r} here.")
    return tuple(words)


class ProgramHarness(Harness):
    """Runs a command in a process group of its own, which ends with it. So does what left the
    group, on Linux: it has the address of the session in its environment."""

    lacks_reward = (
        'the last line of the program\'s output is no number and no {"reward": NUMBER}, '
        "there is no task.scorer"
    )

    def __init__(
        self, command: str, scorer: ScorerConfig | None, *, pass_variables: Sequence[str]
    ) -> None:
        self._words, self._scorer = words_of(command), scorer
        self._pass_variables = pass_variables
        self._process: asyncio.subprocess.Process | None = None
        self._task: Task | None = None
        self._mark = b""
        """Words in the environment of all that the program starts."""

    async def run(self, task: Task, endpoint: Endpoint) -> Score | None:
        self._task, text = task, json.dumps({"id": task.id, **task.payload})
        self._mark = f"LOCKSTEP_SESSION_URL={endpoint.session_url}\0".encode()
        variables = {**own_variables(self._pass_variables), **_variables(endpoint, text)}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = self._process = await asyncio.create_subprocess_exec(
            *self._words, env=variables, start_new_session=True, **streams
        )
        assert process.stdin and process.stdout and process.stderr, "all three are pipes"
        printed, complaints = bytearray(), bytearray()
        pipes = [
            asyncio.create_task(_feed(process.stdin, text.encode() + b"\n")),
            asyncio.create_task(_drain(process.stdout, printed)),
            asyncio.create_task(_drain(process.stderr, complaints)),
            asyncio.create_task(process.wait()),  # until the pipes are closed
        ]
        try:
            await _ended(process)
            # A child of the program may hold the pipes open for longer.
            await asyncio.wait(pipes, timeout=DRAIN_SECONDS)
        finally:
            self.output = _end(bytes(printed) + b"\n" + bytes(complaints))
            await self._kill()
            await asyncio.wait(pipes, timeout=DRAIN_SECONDS)
            for pipe in pipes:
                pipe.cancel()
        if process.returncode:
            raise RolloutError(
                f"the program ended with {_ending(process.returncode)}: {_end(bytes(complaints))}"
                f"{_end(bytes(printed))}"
            )
        self.has_ended, output = True, printed.decode(errors="replace").strip()
        if self._scorer is None:
            return score_of(output)
        score, self.metrics = await self._scorer.score(task, output, ())
        return score

    async def score_cut(self) -> Score | None:
        if self._scorer is None or self._task is None:
            return None
        score, self.metrics = await self._scorer.score(self._task, None, ())
        return score

    async def close(self) -> None:
        if self._process is not None:
            await self._kill()
            await _ended(self._process)

    async def _kill(self) -> None:
        """Kills the program and everything that it started."""
        if self._process is not None:
            kill_group(self._process.pid)
            await asyncio.to_thread(_kill_marked, self._mark)


class ConnectedHarness(Harness):
    """Waits for an agent that claims the episode over HTTP, posts its reward and finishes the
    session."""

    lacks_reward = "its agent finished the session without one"

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds

    async def run(self, task: Task, endpoint: Endpoint) -> Score | None:
        await endpoint.offer()
        return None


def score_of(output: str) -> Score | None:
    """Reads the score from the last line of a program's output; None if that is no number and no
    object with a `reward`.

    >>> score_of("thinking...\\n0.5").reward
    0.5
    """
    try:
        found: Any = json.loads(output.rpartition("\n")[2])
    except ValueError:
        return None
    said = found if isinstance(found, dict) else {"reward": found}
    reward = said.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return None
    return Score(reward=reward, parts=said.get("parts") or {})


def _variables(endpoint: Endpoint, task_text: str) -> Mapping[str, str]:
    out = {
        "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "LOCKSTEP_MODEL": endpoint.model,
        "LOCKSTEP_SESSION_URL": endpoint.session_url,
    }
    if len(task_text.encode()) <= MAX_VARIABLE_BYTES:
        out["LOCKSTEP_TASK"] = task_text
    return out


def _kill_marked(mark: bytes) -> None:
    """Kills all processes with `mark` in their environment, and processes they start meanwhile."""
    for _ in range(KILL_ROUNDS):
        found = False
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of the process. `Process.wait` also waits for its pipes, which a child of
    the process may hold open."""
    while process.returncode is None:
        await asyncio.sleep(0.01)


async def _feed(stdin: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        stdin.write(text)
        await stdin.drain()
    stdin.close()


async def _drain(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while chunk := await stream.read(1 << 16):
        kept += chunk
        del kept[:-KEPT_BYTES]


def _end(printed: bytes) -> str:
    text = printed.decode(errors="replace").strip()
    return text if len(text) <= SHOWN_CHARS else f"...{text[-SHOWN_CHARS:]}"


def _ending(code: int) -> str:
    return f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
