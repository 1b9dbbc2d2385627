"""Processes of a run that do something else than train: started, heard of when they die, ended.

A worker is a function `work(connection)` of a module, in an interpreter of its own. It ends with
whoever started it: a connection that is closed at the other end, for whatever reason, is its end.
No torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

_MAIN = "from lockstep.launch.workers import main; main()"

NUM_LOG_LINES = 12
"""Of a worker that died, the last lines that it wrote: a traceback's end with its cause."""

NOTICE_SECONDS = 5.0
"""How long the end of a process may take to be known once it has closed its connection."""

Batch = Sequence[Any]
"""Messages that go together: anything that can be pickled."""


class Worker:
    """A worker, as whoever drives it sees it: messages both ways, in order, none lost.

    Messages are pickled: both ends are processes of one run, and trust each other.
    """

    shares_memory = True
    """It is on this machine, and maps files whose descriptors it was given at its start."""

    def __init__(
        self, connection: Connection, process: subprocess.Popen[bytes], *, name: str, log: Path
    ) -> None:
        self.name, self.log = name, log
        self._connection, self._process = connection, process
        self._sending = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, batch: Batch) -> None:
        """Hands messages over. May wait while the worker is at work, never for an answer; to one
        that has died they are lost, which `listen` tells."""
        _send(self._connection, self._sending, batch)

    def receive(self, *, seconds: float) -> Batch | None:
        """The next messages, before `listen` takes them; None if none came within the time. Raises
        EOFError if the worker is gone."""
        if not self._connection.poll(seconds):
            return None
        return _receive(self._connection)

    def listen(self, on_batch: Callable[[Batch], None], on_lost: Callable[[str], None]) -> None:
        """Calls `on_batch` with what comes from here on, and at the worker's end `on_lost`, with
        what is known of it. Both are called from a thread of their own."""

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    on_batch(_receive(self._connection))
            on_lost(self.why_ended())

        threading.Thread(target=read, name=f"{self.name} reader", daemon=True).start()

    def why_ended(self) -> str:
        """In words, how the process ended, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(NOTICE_SECONDS)
        code = self._process.returncode
        if code is None:
            how = "has closed its connection and goes on running"
        elif code < 0:
            how = f"was ended by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += " (by hand, or by the system for want of memory)"
        else:
            how = f"has ended with exit code {code}"
        return f"{self.name} (pid {self._process.pid}) {how}. {log_tail(self.log)}"

    def end(self, *, seconds: float) -> None:
        """Waits until the process has ended, as it was asked to; kills it after the time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_worker(
    work: str,
    *,
    name: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Worker:
    """Starts `work` ("module:function") in a process on this machine.

    name: for messages. log: the file that takes what it prints. environment: variables beside those
    of this process. pass_fds: descriptors that it keeps, under the same numbers.
    """
    ours, theirs = Pipe()
    # A session of its own: Ctrl-C is for the trainer, which then ends its workers in good order.
    with log.open("ab", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, work, str(theirs.fileno())],
            env=_environment() | dict(environment or {}), pass_fds=(theirs.fileno(), *pass_fds),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    theirs.close()
    return Worker(ours, process, name=name, log=log)


def _environment() -> dict[str, str]:
    """This process's, with its modules importable: those beside a script as well."""
    found = [os.path.abspath(path) for path in sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(found))}


def log_tail(path: Path) -> str:
    """The last lines of a worker's log, in words."""
    try:
        lines = path.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return f"Its log {path} cannot be read."
    if not lines:
        return f"Its log {path} is empty."
    tail = "\n".join(f"  | {line}" for line in lines[-NUM_LOG_LINES:])
    return f"The end of its log {path}:\n{tail}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- in the worker --------------------------------------------------------------------------------


class Line:
    """The worker's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def receive(self) -> Batch:
        """The next messages. The process ends here if nobody is left to send any."""
        try:
            return _receive(self._connection)
        except (EOFError, OSError):
            os._exit(0)

    def send(self, batch: Batch) -> None:
        _send(self._connection, self._sending, batch)

    def listen(self, on_batch: Callable[[Batch], None]) -> None:
        """Calls `on_batch`, from a thread of its own, with what comes from here on."""

        def read() -> None:
            while True:
                on_batch(self.receive())

        threading.Thread(target=read, name="reader", daemon=True).start()


def main() -> None:
    """Of a worker's process: runs the function that `start_worker` was given."""
    work, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, function = work.partition(":")
    code = 0
    try:
        getattr(import_module(module), function)(Line(Connection(int(descriptor))))
    except BaseException:
        traceback.print_exc()
        code = 1
    _flush(sys.stdout, sys.stderr)
    os._exit(code)  # the reader waits for messages that nobody will send


def _flush(*streams: IO[str]) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


# -- both ends ------------------------------------------------------------------------------------


def _send(connection: Connection, lock: threading.Lock, batch: Batch) -> None:
    packed = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
    with lock, contextlib.suppress(OSError):  # gone: its reader knows
        connection.send_bytes(packed)


def _receive(connection: Connection) -> Batch:
    return pickle.loads(connection.recv_bytes())
