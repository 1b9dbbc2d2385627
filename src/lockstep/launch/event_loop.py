"""Runs a coroutine to its end from plain code, also where an event loop runs already: in a notebook
a cell is such code, called by the loop of the kernel."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from lockstep.launch.process_state import AT_START, state_at_start

T = TypeVar("T")

CANCEL_SECONDS = 1.0
"""Seconds that a cancelled task has to clean up before it is left."""

VISITED: ContextVar[asyncio.Task[Any] | None] = ContextVar("visited", default=None)
"""The task that is calling foreign code; None in Lockstep's own code. Tasks and callbacks that
foreign code makes inherit it."""


def own_context() -> Context:
    """A context for tasks and callbacks of Lockstep itself that foreign code causes."""
    context = copy_context()
    context.run(VISITED.set, None)
    return context


_ON_SIGINT = asyncio.Runner._on_sigint.__code__  # pyright: ignore
"""The handler of Ctrl-C, which may come while foreign code runs."""


class VisitedTask(asyncio.Task[Any]):
    """A task that foreign code cannot cancel, unless it was called by it or began it."""

    def __init__(self, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        context = options.get("context")
        self._is_ours = (VISITED.get() if context is None else context.get(VISITED)) is None
        self.num_own = 0
        """Cancellations by the foreign code that this task calls, without those taken back."""
        super().__init__(work, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        by = VISITED.get()
        if by is self:
            self.num_own += not self.done()
        elif by is not None and self._is_ours:
            if sys._getframe(1).f_code is _ON_SIGINT:
                return own_context().run(super().cancel, msg)
            raise RuntimeError(f"{_name_of(self)} is a task of Lockstep, and is not cancelled")
        return super().cancel(msg)

    def uncancel(self) -> int:
        if VISITED.get() is self:
            self.num_own -= 1
        return super().uncancel()


class _Loop(asyncio.SelectorEventLoop if sys.platform != "win32" else asyncio.ProactorEventLoop):
    """An event loop that runs until its main task is done, whatever foreign code does: stop the
    loop, cancel all tasks, or raise SystemExit in a task or callback of its own."""

    _awaited: asyncio.Future[Any] | None = None

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return VisitedTask(coro, loop=self, **options)

    def run_until_complete(self, future: Any) -> Any:
        self._awaited = awaited = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(awaited)

    def run_forever(self) -> None:
        while True:
            try:
                super().run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                if self._awaited is None or self._awaited.done() or is_interrupt(error):
                    raise
            if self._awaited is None or self._awaited.done():
                return

    def set_default_executor(self, executor: Any) -> None:
        raise RuntimeError("the threads of a run's event loop cannot be replaced")

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        raise RuntimeError("the threads of a run's event loop cannot be ended")


def is_interrupt(error: BaseException) -> bool:
    """True if Ctrl-C raised the error, and not code that raises KeyboardInterrupt by itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not isinstance(error, KeyboardInterrupt):
        return False
    handler = signal.getsignal(signal.SIGINT)
    code = getattr(getattr(handler, "func", handler), "__code__", None)
    if code is None:  # Python's own handler leaves no trace
        return True
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` in an event loop of its own, as asyncio.run does, and ends.

    Unlike asyncio.run it works inside a running loop, which is blocked meanwhile, as by any other
    call that takes time. Ctrl-C, and a notebook's button, interrupt `main` in both cases.

    Tasks and generators that foreign code left have CANCEL_SECONDS to end. asyncio.run would wait
    without limit for a task that ignores its cancellation, and for a thread of its executor.

    >>> async def cell():
    ...     return run_to_end(asyncio.sleep(0, "done"))
    >>> asyncio.run(cell())
    'done'
    """
    with _outside_loop():
        runner = asyncio.Runner(loop_factory=_Loop)
        loop = runner.get_loop()
        try:
            return runner.run(_remembering(main))
        finally:
            # Before the loop goes on: a task that is ready could block it again.
            for task in (left := asyncio.all_tasks(loop)):
                task.cancel()
            loop.run_until_complete(_wait_for(left))
            ends = loop.create_task(loop.shutdown_asyncgens(), name="asynchronous generators")
            loop.run_until_complete(_wait_for([ends]))
            loop.close()
            asyncio.set_event_loop(None)


async def _remembering(main: Coroutine[Any, Any, T]) -> T:
    AT_START.set(state_at_start())  # the handler of Ctrl-C included, which is asyncio's by now
    return await main


def running(
    task: asyncio.Task[T] | None, work: Callable[[], Coroutine[Any, Any, T]]
) -> asyncio.Task[T]:
    """`task` if it still runs in the running event loop; else a new one of `work`."""
    loop = asyncio.get_running_loop()
    if task is None or task.done() or task.get_loop() is not loop:
        return loop.create_task(work())
    return task


@contextmanager
def _outside_loop() -> Generator[None]:
    """Hides the running loop, if there is one, and its task inside the block.

    A thread would be simpler, but the caller's code needs its own: signals reach only the main
    thread, and a notebook's objects (a database, torch's settings) often belong to its thread.
    """
    try:
        outer = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    task = asyncio.current_task()
    is_main = threading.current_thread() is threading.main_thread()
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    # The handler of an outer asyncio.run would only mark its task, which is blocked.
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
        asyncio.set_event_loop(outer)
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)


async def _wait_for(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Waits for tasks that are to end, and names any that do not."""
    if not (waited := set(tasks)):
        return
    _, pending = await asyncio.wait(waited, timeout=CANCEL_SECONDS)
    for task in pending:
        task._log_destroy_pending = False  # pyright: ignore
    if pending:
        names = ", ".join(sorted({_name_of(task) for task in pending}))
        text = f"left at the end of the run, and still busy {CANCEL_SECONDS:g} s later: {names}"
        print(text, file=sys.stderr)


def _name_of(task: asyncio.Task[Any]) -> str:
    name, work = task.get_name(), getattr(task.get_coro(), "__qualname__", "")
    return work if name.startswith("Task-") and work else name
