"""Processes of a run that do not train: started, watched, ended.

A worker is a function `work(line)` of a module, in an interpreter of its own. It ends with whoever
started it: when the other end of its connection closes, for whatever reason, it ends. Messages are
pickled, so that they may hold tensors, and may cross machines: `lockstep.children` has neither.
No torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Protocol

from lockstep.children import NOTICE_SECONDS, end_group, how_ended
from lockstep.errors import ConfigError, EngineDownError
from lockstep.launch.config import share_of
from lockstep.launch.shared_file import SharedFile

_MAIN = "from lockstep.launch.workers import main; main()"

NUM_LOG_LINES = 12
"""Lines of a dead worker's log that errors repeat: the end of a traceback."""

CONNECT_SECONDS = 10.0
"""Limit of the wait for another machine to accept a connection."""

ADDRESSES, KEY = "LOCKSTEP_ENGINES", "LOCKSTEP_ENGINES_KEY"
"""Environment variables: addresses of engines, as HOST:PORT,HOST:PORT, and the key that both ends
prove to have."""

Batch = Sequence[Any]
"""Messages that travel together: anything that can be pickled."""


class Worker:
    """A worker, as its user sees it: messages both ways, in order, none lost.

    Messages are pickled: both ends are processes of one run, and trust each other.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        name: str,
        process: subprocess.Popen[bytes] | None = None,
        log: Path | None = None,
        maps_memory: bool = False,
    ) -> None:
        """process, log: of a worker on this machine; one on another is known by its name alone.
        maps_memory: it has `Workers.memory` open."""
        self.name, self.maps_memory = name, maps_memory
        self._connection, self._process, self._log = connection, process, log
        self._sending = threading.Lock()

    @property
    def pid(self) -> int:
        """0 for a process of another machine."""
        return 0 if self._process is None else self._process.pid

    def send(self, batch: Batch) -> None:
        """Hands messages over. May wait while the worker is busy, never for an answer. Messages to
        a dead worker are lost; `listen` reports its death."""
        _send(self._connection, self._sending, batch)

    def receive(self, *, seconds: float) -> Batch | None:
        """The next messages, before `listen` takes over; None if none came within the time. Raises
        EOFError if the worker is gone."""
        return _receive(self._connection) if self._connection.poll(seconds) else None

    def listen(self, on_batch: Callable[[Batch], object], on_lost: Callable[[str], object]) -> None:
        """Calls `on_batch` with what comes from here on, and `on_lost` with the reason when the
        worker ends; both from a thread of their own."""

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    on_batch(_receive(self._connection))
            on_lost(self.why_ended())

        threading.Thread(target=read, name=f"{self.name} reader", daemon=True).start()

    def why_ended(self) -> str:
        """How the process ended, in words, with the end of its log."""
        if self._process is None or self._log is None:
            return f"{self.name} is gone: its process, its machine or the network between."
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(NOTICE_SECONDS)
        return f"{self.name} {how_ended(self._process)}. {log_tail(self._log)}"

    def end(self, *, seconds: float) -> None:
        """Waits `seconds` for the process to end as it was asked to, then kills it. One on another
        machine ends because this end of its connection is closed."""
        if self._process is None:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as line,
            ):
                line.shutdown(socket.SHUT_RDWR)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self._process.returncode is None:
            end_group(self._process)


class Workers(Protocol):
    """Starts the workers of a process."""

    @property
    def memory(self) -> SharedFile:
        """Memory for weights that go to all of them. Workers on this machine map it."""
        ...

    def start(self, index: int, work: str, *, name: str, log: Path) -> Worker:
        """Worker `index` of this process, running `work` ("module:function"). name: for messages.
        log: file for its output."""
        ...


class LocalWorkers:
    """Workers on this machine. gpus: the one that each worker sees, by its index; may be empty."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._gpus = gpus
        self.memory = SharedFile()

    def start(self, index: int, work: str, *, name: str, log: Path) -> Worker:
        environment = {"CUDA_VISIBLE_DEVICES": self._gpus[index]} if self._gpus else {}
        return start_worker(
            work, name=name, log=log, environment=environment, pass_fds=(self.memory.fd,)
        )


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


class RemoteWorkers:
    """Workers that somebody else starts, and restarts: reached at their addresses.

    first: index of the address of this process's worker 0. key: both ends prove that they have it.
    """

    def __init__(self, addresses: Sequence[str], *, first: int, key: bytes) -> None:
        self.memory = SharedFile()
        self._addresses, self._first, self._key = addresses, first, key

    @classmethod
    def from_environment(cls, *, first: int) -> RemoteWorkers | None:
        """The workers that the launcher of this process has started for it; None if none."""
        if not (listed := os.environ.get(ADDRESSES)):
            return None
        return cls(listed.split(","), first=first, key=bytes.fromhex(os.environ[KEY]))

    def start(self, index: int, work: str, *, name: str, log: Path) -> Worker:
        address = self._addresses[self._first + index]
        host, _, port = address.rpartition(":")
        name = f"{name} at {address}"
        try:
            line = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        except OSError as error:
            raise EngineDownError(f"{name} is not reached: {error}.") from error
        connection = _connection(line)
        try:
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
        except (AuthenticationError, EOFError, OSError) as error:
            raise EngineDownError(f"{name} does not answer: {error!r}.") from error
        return Worker(connection, name=name)


def start_worker(
    work: str,
    *,
    name: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Worker:
    """Starts `work` ("module:function") in a process on this machine.

    name, log: as in `Workers.start`. environment: variables on top of those of this process.
    pass_fds: descriptors that it keeps, under the same numbers.
    """
    ours, theirs = Pipe()
    process = _start(
        [work, "pipe", str(theirs.fileno())],
        log=log,
        environment=environment,
        pass_fds=(theirs.fileno(), *pass_fds),
    )
    theirs.close()
    return Worker(ours, name=name, process=process, log=log, maps_memory=bool(pass_fds))


def start_listener(
    work: str, listening: socket.socket, *, log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `work` in a process that serves the first client of `listening` that has the key of
    its environment. The socket stays open here, for the next process."""
    theirs, ours = os.pipe()
    number = listening.fileno()
    process = _start(
        [work, "listen", f"{number},{theirs}"],
        log=log,
        environment=environment,
        pass_fds=(number, theirs),
    )
    os.close(theirs)
    # Never written to: it closes when this process ends, and the worker ends with it.
    process.lifeline = ours  # pyright: ignore[reportAttributeAccessIssue]
    return process


def _start(
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None,
    pass_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    # A session of its own: Ctrl-C is for the trainer, which then ends its workers in order.
    with log.open("ab", buffering=0) as output:
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, *arguments],
            env=_environment() | dict(environment or {}),
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _environment() -> dict[str, str]:
    """The environment of this process, with its modules importable, also those beside a script."""
    found = [os.path.abspath(path) for path in sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(found))}


def log_tail(path: Path) -> str:
    """The last lines of a worker's log, for a message."""
    try:
        lines = path.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return f"Its log {path} cannot be read."
    if not lines:
        return f"Its log {path} is empty."
    tail = "\n".join(f"  | {line}" for line in lines[-NUM_LOG_LINES:])
    return f"The end of its log {path}:\n{tail}"


# -- in the worker --------------------------------------------------------------------------------


class Line:
    """The worker's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def receive(self) -> Batch:
        """The next messages. Ends the process if the other end is gone."""
        try:
            return _receive(self._connection)
        except (EOFError, OSError):
            os._exit(0)

    def send(self, batch: Batch) -> None:
        _send(self._connection, self._sending, batch)

    def listen(self, on_batch: Callable[[Batch], object]) -> None:
        """Calls `on_batch` with what comes from here on, from a thread of its own."""

        def read() -> None:
            while True:
                on_batch(self.receive())

        threading.Thread(target=read, name="reader", daemon=True).start()


def main() -> None:
    """The main function of a worker's process."""
    work, kind, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A thread that blocks signals, as those of a Ray actor do, hands that down to what it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    module, _, function = work.partition(":")
    code = 0
    try:
        run = getattr(import_module(module), function)
        if kind == "listen":
            number, _, lifeline = descriptor.partition(",")
            threading.Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()
            connection = _accept(socket.socket(fileno=int(number)))
        else:
            connection = Connection(int(descriptor))
        run(Line(connection))
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # the reader waits for messages that nobody will send


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def _accept(listening: socket.socket) -> Connection:
    """The connection of the first client that has the key; others are turned away."""
    key = bytes.fromhex(os.environ[KEY])
    while True:
        line, address = listening.accept()
        connection = _connection(line)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except (AuthenticationError, EOFError, OSError) as error:
            print(f"{address} was turned away: {error!r}", file=sys.stderr)
            connection.close()
            continue
        return connection


# -- both ends ------------------------------------------------------------------------------------


def _connection(line: socket.socket) -> Connection:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(line.detach())


def _send(connection: Connection, lock: threading.Lock, batch: Batch) -> None:
    packed = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
    with lock, contextlib.suppress(OSError):  # gone: its reader knows
        connection.send_bytes(packed)


def _receive(connection: Connection) -> Batch:
    return pickle.loads(connection.recv_bytes())
