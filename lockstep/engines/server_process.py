"""The process of a server that the run starts and ends, with its port and its log."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.engines import guard
from lockstep.system import kill_group

NUM_LOG_LINES = 12
"""Last lines of the log that the message about the end of a server repeats."""

_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: \S")
"""The last line of a Python traceback, which names the error."""

END_SECONDS = guard.GRACE_SECONDS + 5.0
"""Time that a server has to end; then it is killed."""


class ServerProcess:
    """One server and the processes that it starts, in a session of their own.

    It ends with `stop`, and with this process, even if that is killed: a guard watches (see
    `guard`). `lockstep.children` is for children that answer over pipes; a server answers over HTTP
    and logs to a file. log: file for its output, overwritten.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     server = ServerProcess(["false"], log=Path(folder) / "server.log")
    ...     print(server.why_ended(5.0).splitlines()[0])
    its process ended
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """environment: the complete environment; None: this process's."""
        self.command, self.log = list(command), log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._guard = subprocess.Popen(
                [sys.executable, guard.__file__, str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None

    @property
    def session_id(self) -> int:
        """Session and process group of the server and all that it has started."""
        return self._guard.pid

    def why_ended(self, seconds: float = 0.0) -> str:
        """Empty if it still runs after `seconds`; else the first error in its log, which later ones
        follow from, and the end of the log."""
        self._wait(seconds)
        if self.is_running:
            return ""
        cause = next(filter(_ERROR.search, self.log_tail(10_000).splitlines()), "").strip()
        return (
            f"its process ended{cause and f'. The first error in its log: {cause}'}\n"
            f"The end of its log:\n{self.log_tail()}\n"
            f"The whole log: {self.log}. The command: {' '.join(self.command)}"
        )

    def log_tail(self, num_lines: int = NUM_LOG_LINES) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
        return f"({self.log} cannot be read)"

    def stop(self) -> None:
        """Ends the whole group and waits until it is gone. A second call does nothing."""
        if self.is_running:
            self._guard.terminate()
            self._wait(END_SECONDS)
        if self.is_running:
            kill_group(self.session_id)
            self._wait(END_SECONDS)

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout=seconds)
