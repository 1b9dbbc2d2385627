"""Starts, watches and ends the processes of a run that do not train.

A worker is a function `work(line)` of a module, in an interpreter of its own. It ends when the
other end of its connection closes, for whatever reason. Messages are pickled, so that they may hold
tensors, which `lockstep.children` cannot send. A server is a program that answers over HTTP, and
ends with this process. No torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep import errors
from lockstep.children import LoggedProcess, module_path
from lockstep.errors import LockstepError
from lockstep.launch import keeper

_MAIN = "from lockstep.launch.workers import main; main()"

Batch = Sequence[Any]
"""Messages that travel together: anything that can be pickled."""

_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: \S")
"""The last line of a Python traceback, which names the error."""

GRACE_SECONDS = 10.0
"""Time that a server has to end by itself; then it is killed."""


class Line:
    """One end of a connection between two processes of a run: messages both ways, in order, none
    lost."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, batch: Batch) -> None:
        """Hands messages over. May wait while the other end is busy, never for an answer. Messages
        to a dead process are lost; `listen` reports its end."""
        packed = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(packed)

    def receive(self, *, seconds: float | None = None) -> Batch | None:
        """The next messages, before `listen` takes over; None if none came within the time. Raises
        EOFError or OSError if the other end is gone."""
        if not self._connection.poll(seconds):
            return None
        return pickle.loads(self._connection.recv_bytes())

    def listen(self, on_batch: Callable[[Batch], object], on_lost: Callable[[], object]) -> None:
        """Calls `on_batch` with each later batch, and `on_lost` when the other end is gone. Both
        are called from a thread of their own."""

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    on_batch(pickle.loads(self._connection.recv_bytes()))
            on_lost()

        threading.Thread(target=read, name="reader", daemon=True).start()


class WorkerProcess(Line, LoggedProcess):
    """A worker on this machine, as its user sees it."""

    def __init__(
        self, work: str, *, name: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts `work` ("module:function") in a process on this machine with this process's module
        path. environment: added to this process's variables."""
        ours, theirs = Pipe()
        Line.__init__(self, ours)
        with theirs:
            LoggedProcess.__init__(
                self,
                [sys.executable, "-c", _MAIN, work, str(theirs.fileno())],
                name=name,
                log=log,
                env={**os.environ, "PYTHONPATH": module_path(), **(environment or {})},
                pass_fds=(theirs.fileno(),),
            )


def portable(error: BaseException, *, kind: type[LockstepError] = LockstepError) -> LockstepError:
    """The error as one of Lockstep's, which can be pickled. kind: for errors of other packages."""
    if not isinstance(error, LockstepError):
        return kind(f"{type(error).__name__}: {error}")
    own = next(own for own in type(error).__mro__ if own.__module__ == errors.__name__)
    return own(str(error))


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
        command = kept(command, grace_seconds=GRACE_SECONDS)
        super().__init__(command, name="the server", log=log, env=environment)

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


def kept(command: Sequence[str], *, grace_seconds: float = 0.0) -> list[str]:
    """The command under `launch.keeper`, which ends it with this process, after a grace period."""
    keeping = (sys.executable, "-I", "-S", keeper.__file__, os.getpid(), grace_seconds)
    return [*map(str, keeping), *command]


# -- in the worker --------------------------------------------------------------------------------


def end_now() -> None:
    """Ends this process, whatever its threads do: the other end of its line is gone."""
    os._exit(0)


def main() -> None:
    """The main function of a worker's process."""
    work, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A thread that blocks signals, as in a Ray actor, hands the mask down to its child processes.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    module, _, function = work.partition(":")
    code = 0
    try:
        getattr(import_module(module), function)(Line(Connection(int(descriptor))))
    except (EOFError, ConnectionError):  # the other end is gone
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # the reader waits for messages that nobody will send
