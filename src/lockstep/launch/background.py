"""Background work: the asyncio tasks that an object has started and not seen the end of."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
