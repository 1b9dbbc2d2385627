"""Starts, watches and ends the processes of a run that do not train.

A worker is a function `work(line)` of a module, in an interpreter of its own. It ends when the
other end of its connection closes, for whatever reason. Messages are pickled, so that they may hold
tensors, which `lockstep.children` cannot send. No torch.
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
from typing import Any

from lockstep.children import NOTICE_SECONDS, end_group, how_ended
from lockstep.errors import ConfigError
from lockstep.launch.config import share_of

_MAIN = "from lockstep.launch.workers import main; main()"

NUM_LOG_LINES = 12
"""Lines of a dead worker's log that errors repeat: the end of a traceback."""

Batch = Sequence[Any]
"""Messages that travel together: anything that can be pickled."""


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


class Worker(Line):
    """A worker on this machine, as its user sees it."""

    def __init__(
        self, connection: Connection, process: subprocess.Popen[bytes], *, name: str, log: Path
    ) -> None:
        super().__init__(connection)
        self.name, self._process, self._log = name, process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    def why_ended(self) -> str:
        """How the process ended, in words, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(NOTICE_SECONDS)
        return (
            f"{self.name} {how_ended(self.pid, self._process.returncode)}. {_log_tail(self._log)}"
        )

    def end(self, *, seconds: float) -> None:
        """Waits `seconds` for the process to end as it was asked to, then kills it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self._process.returncode is None:
            end_group(self._process)


def start_worker(
    work: str, *, name: str, log: Path, environment: Mapping[str, str] | None = None
) -> Worker:
    """Starts `work` ("module:function") in a process on this machine with this process's module
    path.

    name: for messages. log: file for its output. environment: added to this process's variables.
    """
    ours, theirs = Pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(dict.fromkeys(os.path.abspath(each) for each in sys.path))
    with theirs, log.open("ab", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, work, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends its workers in order
        )
    return Worker(ours, process, name=name, log=log)


def _log_tail(path: Path) -> str:
    """The last lines of a worker's log, for a message."""
    try:
        lines = path.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return f"Its log {path} cannot be read."
    if not lines:
        return f"Its log {path} is empty."
    tail = "\n".join(f"  | {line}" for line in lines[-NUM_LOG_LINES:])
    return f"The end of its log {path}:\n{tail}"


def gpus_of_rank(
    count: int,
    rank: int,
    world: int,
    *,
    local_rank: int,
    local_world: int,
    gpus: Sequence[str],
    is_shared: bool,
) -> list[str]:
    """The GPU of each of a rank's workers, where the ranks divide `count` workers among them.

    local_rank, local_world: place on this machine, whose first GPUs the ranks train on. gpus: of
    this machine. is_shared: workers sample on the rank's own GPU. Raises ConfigError if there are
    too few.

    >>> gpus_of_rank(4, 1, 2, local_rank=1, local_world=2, gpus="abcdef", is_shared=False)
    ['e', 'f']
    """
    own = share_of(count, rank, world, "engine.replicas")
    if is_shared:
        return [gpus[local_rank]] * len(own)
    begin = share_of(count, rank - local_rank, world, "engine.replicas").start
    last = rank - local_rank + local_world - 1
    here = share_of(count, last, world, "engine.replicas").stop - begin
    if local_world + here > len(gpus):
        raise ConfigError(
            f"engine.replicas={count}: {here} of them on this machine, each with a GPU of its own "
            f"beside the {local_world} that train, and it has {len(gpus)}. Lower engine.replicas, "
            "or set engine.share_device=true: they then take turns with the trainer."
        )
    start = local_world + own.start - begin
    return list(gpus[start : start + len(own)])


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
