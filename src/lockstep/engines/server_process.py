"""The process of a server that the run starts and ends, with its port and its log."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.children import LoggedProcess
from lockstep.launch import keeper

_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: \S")
"""The last line of a Python traceback, which names the error."""

GRACE_SECONDS = 10.0
"""Time that a server has to end by itself; then it is killed."""


class ServerProcess(LoggedProcess):
    """One server and the processes that it starts, in a session of their own.

    It ends with `stop`, and with this process, even if that is killed: `launch.keeper` watches.
    `lockstep.children` is for children that answer over pipes; a server answers over HTTP and logs
    to a file. log: file for its output, overwritten.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     server = ServerProcess(["false"], log=Path(folder) / "server.log")
    ...     print(server.why_ended(5.0).splitlines()[0])
    its process ended
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """environment: all variables of the server; None: this process's own."""
        self.command = list(command)
        log.unlink(missing_ok=True)
        keeping = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid())]
        kept = [*keeping, str(GRACE_SECONDS), *command]
        super().__init__(kept, name="the server", log=log, env=environment)

    def why_ended(self, seconds: float = 0.0) -> str:
        """Empty if it still runs after `seconds`; else the first error in its log, which causes the
        later ones, and the end of the log."""
        self.wait(seconds)
        if self.is_running:
            return ""
        cause = next(filter(_ERROR.search, self.log_lines()), "").strip()
        return (
            f"its process ended{cause and f'. The first error in its log: {cause}'}\n"
            f"{self.end_of_log()}\nThe command: {' '.join(self.command)}"
        )

    def stop(self) -> None:
        """Ends the whole group and waits until it is gone. A second call does nothing."""
        if self.is_running:
            self._process.terminate()
        self.end(seconds=GRACE_SECONDS + 5.0)
