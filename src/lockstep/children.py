"""Child processes that answer requests.

Foreign code that may hang, fill the memory or crash (a chat template, a verifier, an environment of
another package) runs in a child. The parent holds a `Child`; the child's program calls `serve`, or
follows the same protocol where Lockstep is not installed.

Protocol: one JSON object per line, in both directions. A request has `id`, `seconds` (null: no
limit) and the arguments of the caller; its reply has the same `id`, and `error` with `text` if the
request failed. Request 0 is the opening and comes before all others. `{"cancel": ID}` asks a child
that answers several requests at a time to give one up. The child ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from pathlib import Path
from typing import Any

from lockstep.errors import ChildError, ChildRefusal, ChildTimeoutError
from lockstep.system import kill_group

NUM_LINES = 12
"""Lines of a child's error output that an error repeats."""
NOTICE_SECONDS = 5.0
"""Seconds until the end of a process that closed its output must be known."""
ORPHAN_SECONDS = 30
"""Seconds past a request's limit until a child ends itself: its parent should have ended it, so the
parent is gone."""

_PASSED = """
PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE TZ TMPDIR PWD VIRTUAL_ENV CONDA_PREFIX
LD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR CUDA_VISIBLE_DEVICES NO_PROXY no_proxy
"""
PASSED = frozenset(_PASSED.split())
PASSED_PREFIXES = ("LC_", "PYTHON", "XDG_", "OMP_", "NODE_PATH")
OWN_KEYS = ("LOCKSTEP_KEY", "LOCKSTEP_SANDBOX_SECRET", "TINKER_API_KEY")
"""Keys of this program's own servers. No child gets them unless the user names them."""

Reply = dict[str, Any]


def own_variables(names: Collection[str] = (), *, has_others: bool = False) -> dict[str, str]:
    """Environment variables of this process that a child gets: the ones needed to start, and
    `names`. has_others: all others too, including the user's keys and tokens, except `OWN_KEYS`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in names
        or name in PASSED
        or name.startswith(PASSED_PREFIXES)
        or (has_others and name not in OWN_KEYS)
    }


def module_path() -> str:
    """PYTHONPATH for a process that finds the modules that this process finds."""
    return os.pathsep.join(dict.fromkeys(os.path.abspath(each) for each in sys.path))


class Child:
    """A child process, started by the first request and again by the first one after its end.

    It may be asked from any thread. It ends with `close`, with this object, and with this process.

    >>> echo = "import sys; from lockstep.children import serve; serve(lambda text: {'said': text})"
    >>> child = Child([sys.executable, "-c", echo], name="the echo")
    >>> child.ask({"text": "hello"}, seconds=60)
    {'said': 'hello'}
    >>> child.close()
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        opening: Mapping[str, Any] | None = None,
        start_seconds: float = 60.0,
        environment: Mapping[str, str] | None = None,
        has_variables: bool = False,
    ) -> None:
        """name: the child's name in errors. opening: arguments of the first request to each
        process. start_seconds: limit of the start and of that request. environment: additional
        variables. has_variables: it gets the user's variables too, but none of Lockstep's keys."""
        self._has_variables = has_variables
        self._command, self._name, self._start_seconds = list(command), name, start_seconds
        self._opening, self._environment = dict(opening or {}), dict(environment or {})
        self._turn, self._starting = threading.Lock(), threading.Lock()
        self._process: _Process | None = None

    @classmethod
    def of_module(cls, module: str, **options: Any) -> Child:
        """A child that runs `main` of a module, with this Python and this process's module path.
        options: see `Child`."""
        environment = {"PYTHONPATH": module_path(), **options.pop("environment", {})}
        run = f"from {module} import main; main()"
        return cls([sys.executable, "-P", "-c", run], environment=environment, **options)

    def open(self) -> Reply:
        """Starts the process unless it runs. Returns the reply to its opening.

        Raises ChildError, ChildTimeoutError or ChildRefusal, as `ask` does.
        """
        return self._started().opened

    def _started(self) -> _Process:
        with self._starting:
            if self._process is None or not self._process.is_usable:
                self._process = _Process(
                    self._command,
                    own_variables(has_others=self._has_variables) | self._environment,
                    self._name,
                )
                weakref.finalize(self, self._process.end)
                try:
                    self._process.opened = self._process.ask(self._opening, self._start_seconds)
                except BaseException:
                    self._process.end()
                    raise
            return self._process

    def ask(self, request: Mapping[str, Any], *, seconds: float) -> Reply:
        """The reply to one request; other threads wait for their turn, which `seconds` leaves out.

        Raises ChildTimeoutError when the time is over and ChildError when the child died or
        answered with anything but a reply: the process has then ended, and the next request starts
        another. Raises ChildRefusal for an error that the child answered with.
        """
        with self._turn:
            process = self._started()
            try:
                return process.ask(request, seconds)
            except ChildRefusal:
                raise
            except BaseException:  # KeyboardInterrupt too: a late reply would be the next one's
                process.end()
                raise

    async def ask_concurrently(self, request: Mapping[str, Any]) -> Reply:
        """The reply to one of several requests that the child works on at a time. There is no
        limit on time: a caller that is cancelled cancels the request. Raises as `ask` does."""
        process = await asyncio.to_thread(self._started)
        number, reply = process.send(request, None)
        try:
            return _checked(await asyncio.wrap_future(reply))
        except asyncio.CancelledError:
            process.write({"cancel": number})
            raise

    def close(self, *, seconds: float = 0.0) -> None:
        """Ends the process, after giving it `seconds` to end by itself."""
        process, self._process = self._process, None
        if process is not None:
            process.end(seconds)


class GroupProcess:
    """A process that leads a group of processes, which ends as one."""

    def __init__(self, command: Sequence[str], *, name: str, **options: Any) -> None:
        """name: for errors. options: arguments of `subprocess.Popen`."""
        self.name = name
        # A session of its own: Ctrl-C is for this process, which ends the other in order.
        self._process = subprocess.Popen[bytes](command, start_new_session=True, **options)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Returns at the end of the process, or after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self, seconds: float = 0.0) -> None:
        """Waits `seconds` for the process to end by itself, then kills the group."""
        self.wait(seconds)
        if self._process.returncode is None:
            end_group(self._process)

    def how_ended(self) -> str:
        """How the process ended, in words. Waits for its end if that is near."""
        self.wait(NOTICE_SECONDS)
        return f"{self.name} {how_ended(self.pid, self._process.returncode)}."


class LoggedProcess(GroupProcess):
    """A process that prints into a log."""

    def __init__(self, command: Sequence[str], *, log: Path, **options: Any) -> None:
        """options: see `GroupProcess`."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            super().__init__(command, **streams, **options)

    def why_ended(self) -> str:
        """How the process ended, in words, with the end of its log."""
        return f"{self.how_ended()} {self.end_of_log()}"

    def end_of_log(self) -> str:
        """The last lines of the log, for the end of a message."""
        lines = self.log_lines()[-NUM_LINES:]
        if not lines:
            return f"Its log {self.log} is empty."
        return "\n  | ".join([f"The end of its log {self.log}:", *lines])

    def log_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").rstrip().splitlines()
        return []


class _Process(GroupProcess):
    """One process, from its start to its end."""

    def __init__(self, command: list[str], environment: dict[str, str], name: str) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            super().__init__(command, name=name, env=environment, **pipes)
        except OSError as error:
            raise ChildError(f"{name}: {command[0]} cannot be started: {error}.") from error
        self._owner = os.getpid()
        self.opened: Reply = {}
        """Reply to the opening."""
        self._numbers = itertools.count()
        self._writing, self._lock = threading.Lock(), threading.Lock()
        self._waiting: dict[int, Future[Reply]] = {}
        self._why_ended = ""
        self._printed: deque[str] = deque(maxlen=NUM_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._printing = threading.Thread(target=self._keep_printed, daemon=True)
        self._printing.start()  # first: the listener may end at once, and waits for it
        self._listener.start()

    @property
    def is_usable(self) -> bool:
        """True if it runs and this process started it. A fork must not use its parent's child."""
        return self._owner == os.getpid() and not self._why_ended and self.is_running

    def ask(self, request: Mapping[str, Any], seconds: float) -> Reply:
        # Also frees a thread that writes to a child that does not read.
        timer = threading.Timer(seconds, end_group, [self._process])
        timer.daemon = True
        until = time.monotonic() + seconds
        timer.start()
        try:
            _, answered = self.send(request, seconds)
            wait([answered], seconds + NOTICE_SECONDS)
        finally:
            timer.cancel()
            timer.join()  # it may be ending the process at this moment
        if time.monotonic() > until or not answered.done():
            raise ChildTimeoutError(
                f"{self.name} did not answer within {seconds:g} s.{end_of(self._printed)}"
            )
        return _checked(answered.result())

    def send(self, request: Mapping[str, Any], seconds: float | None) -> tuple[int, Future[Reply]]:
        number, reply = next(self._numbers), Future[Reply]()
        with self._lock:
            if self._why_ended:
                raise ChildError(self._why_ended)
            self._waiting[number] = reply
        self.write({**request, "id": number, "seconds": seconds})
        return number, reply

    def write(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # A broken pipe means that the child ended; `_listen` reports it to all waiting callers.
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def end(self, seconds: float = 0.0) -> None:
        """Kills the group, after `seconds` to end by itself; a fork leaves its parent's alone."""
        if self._owner != os.getpid():
            return
        assert self._process.stdin is not None
        if seconds:
            with self._writing, contextlib.suppress(OSError):
                self._process.stdin.close()
            self.wait(seconds)
        end_group(self._process)
        self._listener.join(NOTICE_SECONDS)
        self._printing.join(NOTICE_SECONDS)
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _listen(self) -> None:
        """Hands each reply to the thread that waits for it, and the end to all that still do."""
        assert self._process.stdout is not None
        problem = self._hand_out(self._process.stdout)
        if problem:
            end_group(self._process)
        ended = self.how_ended()
        self._printing.join(NOTICE_SECONDS)
        with self._lock:
            self._why_ended = (problem or ended) + end_of(self._printed)
            waiting_still, self._waiting = list(self._waiting.values()), {}
        for each in waiting_still:
            with contextlib.suppress(InvalidStateError):
                each.set_exception(ChildError(self._why_ended))
        self._process.stdout.close()

    def _hand_out(self, lines: Iterable[bytes]) -> str:
        """Hands out replies until the end, or until a line that is none: the text of an error."""
        for line in lines:
            try:
                reply = json.loads(line)
                waiting = self._waiting.pop(reply.pop("id"))
            # Any exception: a garbage collection within deep nesting can raise anything.
            except Exception:
                text = line[:200].decode("utf-8", "replace").rstrip()
                return f"{self.name} wrote a line that is no reply: {text!r}."
            with contextlib.suppress(InvalidStateError):  # cancelled
                waiting.set_result(reply)
        return ""

    def _keep_printed(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._printed.append(line[:2000].decode("utf-8", "replace").rstrip())
        self._process.stderr.close()


def _checked(reply: Reply) -> Reply:
    if "error" in reply:
        raise ChildRefusal(str(reply.get("text", "")), kind=str(reply["error"]))
    return reply


def end_of(printed: Iterable[str]) -> str:
    """The last lines that a process printed, for the end of a message."""
    lines = "".join(f"\n  | {line}" for line in list(printed))
    return f" The end of its output:{lines}" if lines else " It printed nothing."


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, and all of the group, and waits for its end."""
    kill_group(process.pid)
    process.wait()


def how_ended(pid: int | None, code: int | None) -> str:
    """How a process ended, in words that follow its name. code: its exit code, or -signal.

    >>> how_ended(31, 1)
    '(pid 31) ended with exit code 1'
    """
    if code is None:
        how = "closed its connection and goes on running"
    elif code >= 0:
        how = f"ended with exit code {code}"
    else:
        names = {known.value: known.name for known in signal.Signals}
        how = f"was ended by {names.get(-code, f'signal {-code}')}"
        if names.get(-code) == "SIGKILL":
            how += " (by hand, or by the system for want of memory)"
    return f"(pid {pid}) {how}"


def serve(answer: Callable[..., Reply], *, opened: Callable[..., Reply] | None = None) -> None:
    """Answers requests one after the other until the input ends. Prints go to the error output.

    answer: called with the arguments of a request. opened: called with the arguments of the
    opening. If either raises an Exception, its class and text are the reply.
    """
    alarm = getattr(signal, "alarm", lambda seconds: None)  # Windows has none
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        number, seconds = request.pop("id"), request.pop("seconds")
        function = answer if number else opened or (lambda: {})
        alarm(0 if seconds is None else math.ceil(seconds) + ORPHAN_SECONDS)
        try:
            reply = function(**request)
        except Exception as error:
            reply = {"error": type(error).__name__, "text": str(error)}
        alarm(0)
        replies.write(json.dumps({**reply, "id": number}) + "\n")
        replies.flush()
