"""An engine in a process of its own: answers what `WorkerEngine` asks, over a worker's line.

What several requests have to say in one turn of the event loop goes out in one message, so that a
token costs little of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.engines.base import Engine
from lockstep.engines.worker_weights import Layout, TornWeightsError, reading, tensors_in
from lockstep.errors import LockstepError
from lockstep.launch.shared_file import Region
from lockstep.launch.workers import Batch, Line

READY = 0
"""The number of the first message from a worker: what its engine can do, or why there is none."""


def serve(line: Line, make: Callable[[Any], Engine]) -> None:
    """Makes the engine that the first message describes, and serves it until it is told to close.

    Returns after `close`; the process is ended by the other end's death at any time.
    """
    (order,) = line.receive()
    try:
        engine = make(order)
    except Exception as error:
        line.send([(READY, "error", told(error))])
        raise
    line.send([(READY, "result", (engine.capabilities, engine.version))])
    asyncio.run(_Server(engine, line, order.memory_fd).run())


def told(error: BaseException) -> tuple[str, str]:
    """(type, text) of an error, for the other end."""
    return type(error).__name__, str(error)


class _Server:
    def __init__(self, engine: Engine, line: Line, memory_fd: int) -> None:
        self._engine, self._line, self._memory_fd = engine, line, memory_fd
        self._running: dict[int, asyncio.Task[None]] = {}
        self._going_out: list[Any] = []
        self._closed = asyncio.Event()
        self._arriving: bytearray | None = None
        """Weights that come in pieces."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()

        def take(batch: Batch) -> None:
            loop.call_soon_threadsafe(self._take, batch)

        self._line.listen(take)
        await self._closed.wait()
        await asyncio.sleep(0)
        self._flush()

    # -- what comes in ------------------------------------------------------------------------

    def _take(self, batch: Batch) -> None:
        for number, name, arguments in batch:
            if name == "cancel":
                if (task := self._running.get(number)) is not None:
                    task.cancel()
                continue
            task = asyncio.get_running_loop().create_task(self._answer(number, name, arguments))
            self._running[number] = task

    async def _answer(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            if name == "generate":
                async for delta in self._engine.generate(**arguments):
                    self._say(number, "delta", delta)
                self._say(number, "end", None)
            else:
                found = await getattr(self, f"_{name}")(**arguments)
                self._say(number, "result", found)
        except asyncio.CancelledError:
            self._say(number, "end", None)
        except TornWeightsError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        except Exception as error:
            if not isinstance(error, LockstepError):
                traceback.print_exc()
            self._say(number, "error", told(error))
        finally:
            del self._running[number]

    async def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        return await getattr(self._engine, method)(**arguments)

    async def _load_directory(self, directory: str, version: int) -> None:
        await self._engine.load_weights(directory, version=version)

    async def _load_shared(self, layout: Layout, region: Region, version: int) -> None:
        with reading(self._memory_fd, layout, region) as tensors:
            await self._engine.load_weights(tensors, version=version)

    async def _begin_weights(self, num_bytes: int) -> None:
        self._arriving = bytearray(num_bytes)

    async def _piece_of_weights(self, start: int, piece: bytes) -> None:
        assert self._arriving is not None, "pieces come after their beginning"
        self._arriving[start : start + len(piece)] = piece

    async def _load_arrived(self, layout: Layout, version: int) -> None:
        memory, self._arriving = self._arriving, None
        tensors = tensors_in(layout, memory)
        await self._engine.load_weights(tensors, version=version)

    async def _ping(self) -> None:
        """The answer is that there is one."""

    async def _stats(self) -> dict[str, Any]:
        return asdict(getattr(self._engine, "stats"))  # noqa: B009  not of every engine

    async def _close(self) -> None:
        await self._engine.close()
        self._closed.set()

    # -- what goes out ------------------------------------------------------------------------

    def _say(self, number: int, kind: str, value: Any) -> None:
        if not self._going_out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._going_out.append((number, kind, value))

    def _flush(self) -> None:
        if self._going_out:
            going, self._going_out = self._going_out, []
            self._line.send(going)
