"""The worker's side of an engine in a process of its own: answers what `WorkerEngine` asks.

A question is (number, name, arguments). An answer is (number, kind, value), with kind "delta",
"end", "result" or "error".
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from functools import partial
from typing import Any

from lockstep.engines.base import Engine
from lockstep.engines.worker_weights import Outline, TornWeightsError, tensors_in
from lockstep.errors import LockstepError
from lockstep.launch.shared_file import Address, mapped
from lockstep.launch.workers import Batch, Line, end_now

READY = 0
"""Number of the first answer: the engine's capabilities, or why there is no engine."""


def serve(line: Line) -> None:
    """Calls the first message, which makes an engine, and serves that until it is closed.

    The process also ends when the other end of the line is gone.
    """
    batch = line.receive()
    assert batch is not None, "it waits"
    try:
        engine: Engine = batch[0]()
    except Exception as error:
        line.send([(READY, "error", in_words(error))])
        raise
    line.send([(READY, "result", (engine.capabilities, engine.version))])
    asyncio.run(_Host(engine, line).run())


def in_words(error: BaseException) -> tuple[str, str]:
    """(type, text) of an error, for the other end."""
    return type(error).__name__, str(error)


class _Host:
    def __init__(self, engine: Engine, line: Line) -> None:
        self._engine, self._line = engine, line
        self._running: dict[int, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._line.listen(partial(loop.call_soon_threadsafe, self._receive), end_now)
        await self._closed.wait()

    def _receive(self, batch: Batch) -> None:
        for number, name, arguments in batch:
            if name != "cancel":
                task = asyncio.get_running_loop().create_task(self._answer(number, name, arguments))
                self._running[number] = task
            elif number in self._running:
                self._running[number].cancel()

    async def _answer(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            if name == "generate":
                async for delta in self._engine.generate(**arguments):
                    self._reply(number, "delta", delta)
                self._reply(number, "end", None)
            else:
                method = getattr(self, f"_{name}", None) or getattr(self._engine, name)
                self._reply(number, "result", await method(**arguments))
        except asyncio.CancelledError:
            self._reply(number, "end", None)
        except TornWeightsError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        except Exception as error:
            if not isinstance(error, LockstepError):
                traceback.print_exc()
            self._reply(number, "error", in_words(error))
        finally:
            del self._running[number]

    # -- questions that are not methods of the engine ---------------------------------------------

    async def _load_shared(self, outlines: list[Outline], address: Address, version: int) -> None:
        tensors = tensors_in(mapped(address), outlines)
        await self._engine.load_weights(tensors, version=version)

    async def _close(self) -> None:
        await self._engine.close()
        self._closed.set()

    def _reply(self, number: int, kind: str, value: Any) -> None:
        self._line.send([(number, kind, value)])
