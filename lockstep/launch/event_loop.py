"""Runs a coroutine to its end from plain code, also where an event loop runs already: in a notebook
a cell is such code, called by the loop of the kernel."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_SECONDS = 1.0
"""Seconds that a cancelled task has to clean up before it is left."""


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` in an event loop of its own, as asyncio.run does, and ends.

    Unlike asyncio.run it works inside a running loop, which stands still meanwhile, as it does for
    any other call that takes time. Ctrl-C, and a notebook's button, interrupt `main` in both cases.

    Tasks that foreign code left have CANCEL_SECONDS to end; asyncio.run would wait for one that
    ignores its cancellation, and for a thread of its executor, without limit.

    >>> async def cell():
    ...     return run_to_end(asyncio.sleep(0, "done"))
    >>> asyncio.run(cell())
    'done'
    """
    with _outside_loop():
        runner = asyncio.Runner()
        loop = runner.get_loop()
        try:
            return runner.run(main)
        finally:
            loop.run_until_complete(_end_other_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            asyncio.set_event_loop(None)


def running(
    task: asyncio.Task[None] | None, work: Callable[[], Coroutine[Any, Any, None]]
) -> asyncio.Task[None]:
    """`task` if it still runs in the running event loop; else a new one of `work`."""
    loop = asyncio.get_running_loop()
    if task is None or task.done() or task.get_loop() is not loop:
        return loop.create_task(work())
    return task


@contextmanager
def _outside_loop() -> Generator[None]:
    """A block in which the running loop, if there is one, and its task do not count as running.

    A thread would do as well, were it not for the caller's code: signals reach the main thread
    alone, and what a notebook opened (a database, torch's settings) often belongs to its thread.
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
    # Not the handler of an outer asyncio.run, which only marks a task that stands still.
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


async def _end_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_SECONDS)
