"""Background work: the asyncio tasks that an object has started and not seen the end of, and a
loop in a thread for what outlives event loops."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

STOP_SECONDS = 10.0
"""Seconds that the work in the background loop may take to end with the program."""


class Background(set["asyncio.Task[Any]"]):
    """Tasks in progress. asyncio alone would forget one that nobody holds.

    >>> async def two():
    ...     tasks = Background()
    ...     first, second = tasks.start(asyncio.sleep(0)), tasks.start(asyncio.sleep(60))
    ...     await first
    ...     await tasks.cancel()
    ...     return second.cancelled(), len(tasks)
    >>> asyncio.run(two())
    (True, 0)
    """

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def cancel(self) -> None:
        """Cancels all tasks, and returns when they have ended."""
        tasks = list(self)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_background(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Runs `work` in the background loop, for this one to await. Cancelling it cancels `work`.

    Processes, connections and locks belong to one event loop, and those that serve a whole run
    outlive the loops of its parts.
    """
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _background_loop()))


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop, is_over = runner.get_loop(), asyncio.Event()

    def work() -> None:
        with runner:  # its end cancels all tasks
            runner.run(is_over.wait())

    thread = threading.Thread(target=work, name="lockstep-background", daemon=True)
    thread.start()

    def stop() -> None:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(STOP_SECONDS)

    atexit.register(stop)
    return loop
