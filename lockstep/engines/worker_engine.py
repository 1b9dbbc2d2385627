"""The trainer's side of an engine that runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from lockstep import errors
from lockstep.engines.base import Capabilities, Engine, Scores
from lockstep.engines.ledger import check_source
from lockstep.engines.worker_host import READY, in_words
from lockstep.engines.worker_weights import outlines_of, written
from lockstep.errors import EngineDownError, EngineError, LockstepError
from lockstep.launch.shared_file import Newest
from lockstep.launch.threads import in_thread
from lockstep.launch.workers import Batch, Worker
from lockstep.types import Delta, Int32Array, Request

CLOSE_SECONDS = 10.0
"""Time that a worker has to end after it was asked to; then it is killed."""

TELL_SECONDS = 10.0
"""Interval between two messages about an engine that is still starting."""


@dataclass(slots=True, eq=False)
class _Call:
    """A question and its answers, in the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    is_done: bool = False

    async def next(self) -> Any:
        """The value of the next answer; None at the end. Raises the worker's error."""
        kind, value = await self.answers.get()
        self.is_done = kind != "delta"
        if kind == "error":
            raise _error(*value)
        return value


class WorkerEngine(Engine):
    """`Engine` over a worker that runs `worker_host.serve`. May be used from several event loops.

    A worker that dies fails every request in flight, and each later one, with an EngineDownError
    that holds the end of its log. `ping` starts it again, with the weights of the beginning.
    """

    def __init__(
        self,
        start: Callable[[], Worker],
        make: Callable[[], Engine],
        *,
        newest: Newest,
        device: torch.device,
        restarts: int = 0,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """start: starts a worker. make: makes its engine there. newest: holds weights
        for workers, which map it. device: of the trainer's tensors. restarts: number of
        times that a dead worker is started again.

        Returns when the engine answers; meanwhile calls on_wait now and then. Raises the worker's
        own error, or EngineDownError with its log, if the engine cannot be made.
        """
        self._start, self._make = start, make
        self._newest, self._device = newest, device
        self._restarts, self._on_wait = restarts, on_wait
        self._numbers = itertools.count(READY + 1)
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_restarts = 0
        """Since the last `take_metrics`."""
        self._starting: Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        worker = self._start()
        worker.send([self._make])
        try:
            while (batch := worker.receive(seconds=TELL_SECONDS)) is None:
                self._on_wait(f"{worker.name} is still starting.")
        except (EOFError, OSError):
            raise EngineDownError(f"no engine: {worker.why_ended()}") from None
        except BaseException:
            worker.end(seconds=0)
            raise
        ((_, kind, value),) = batch
        if kind == "error":
            worker.end(seconds=CLOSE_SECONDS)
            raise _error(*value)
        self._worker, self._lost = worker, ""
        self._capabilities, self._version = value
        worker.listen(self._deliver, lambda: self._lose(worker.why_ended()))

    @property
    def pid(self) -> int:
        return self._worker.pid

    # -- the protocol -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        number, call = self._send("generate", {"request": request})
        try:
            while (delta := await call.next()) is not None:
                yield delta
        finally:
            if not call.is_done and not self._lost:
                self._worker.send([(number, "cancel", None)])
            self._calls.pop(number, None)

    async def score(self, token_ids: Int32Array, **how: Any) -> Scores:
        return await self._ask("score", token_ids=token_ids, **how)

    async def abort(self, request_id: str) -> None:
        await self._ask("abort", request_id=request_id)

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        await self._ask("resume", kv=kv)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Named tensors, or a directory that the worker reads. A worker that dies meanwhile is
        started again, and given them again."""
        check_source(source, self._capabilities)
        while True:
            try:
                await self._load(source, version)
            except EngineDownError:
                if not self._restarts or self._is_closed:
                    raise
                await self.ping()
            else:
                self._version = version
                return

    async def _load(self, source: Mapping[str, Any] | str | None, version: int) -> None:
        if not isinstance(source, Mapping):
            await self._ask("load_weights", source=str(source), version=version)
            return
        outlines = outlines_of(source)
        # Held until the worker has answered: the memory goes with the last reference to it.
        write = partial(written, self._newest, source, outlines, version=version)
        file = await in_thread(write, device=self._device)
        await self._ask("load_shared", outlines=outlines, address=file.address, version=version)

    async def load_adapter(self, name: str, source: Any, *, version: int) -> None:
        """A directory that the worker reads. A worker that is started again has forgotten it."""
        await self._ask("load_adapter", name=name, source=str(source), version=version)

    async def drop_adapter(self, name: str) -> None:
        await self._ask("drop_adapter", name=name)

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    async def close(self) -> None:
        """Closes the engine and ends its process, by force if it does not end."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._ask("close")
        await asyncio.to_thread(self._worker.end, seconds=CLOSE_SECONDS)

    def remembers(self, source: Mapping[str, Any], *, version: int) -> bool:
        """True if the weights are still in the place that the worker reads."""
        return self._newest.has(source, version)

    async def ping(self) -> None:
        """Raises EngineDownError if the worker is gone. The first ping after its end starts it
        again, and later ones wait for that. A worker that does not answer is killed."""
        if not self._lost:
            try:
                await self._ask("ping")
            except asyncio.CancelledError:
                await asyncio.to_thread(self._worker.end, seconds=0)
                raise
            return
        if self._starting is None:
            if not self._restarts:
                raise EngineDownError(self._lost)
            self._restarts -= 1
            self._starting = ThreadPoolExecutor(1).submit(self._begin_again)
        try:
            await asyncio.shield(asyncio.wrap_future(self._starting))
        finally:
            if self._starting is not None and self._starting.done():
                self._starting = None

    def _begin_again(self) -> None:
        self._worker.end(seconds=0)
        self._begin()
        self._num_restarts += 1

    def take_metrics(self) -> dict[str, float]:
        """Starts of a worker that had died; without one nothing."""
        count, self._num_restarts = self._num_restarts, 0
        return {"restarts": float(count)} if count else {}

    # -- questions and answers ----------------------------------------------------------------

    async def _ask(self, method: str, /, **arguments: Any) -> Any:
        """The result of a method of the worker's engine, or of its host."""
        number, call = self._send(method, arguments)
        try:
            return await call.next()
        finally:
            self._calls.pop(number, None)

    def _send(self, name: str, arguments: dict[str, Any]) -> tuple[int, _Call]:
        call = _Call(asyncio.get_running_loop())
        with self._lock:
            if self._is_closed and name != "close":
                raise EngineError("the engine is closed.")
            if self._lost:
                raise EngineDownError(self._lost)
            number = next(self._numbers)
            self._calls[number] = call
        self._worker.send([(number, name, arguments)])
        return number, call

    def _deliver(self, batch: Batch) -> None:
        """Hands each loop its answers. Runs in the reader's thread."""
        for number, kind, value in batch:
            if (call := self._calls.get(number)) is not None:
                with contextlib.suppress(RuntimeError):  # its loop has been closed: nobody waits
                    call.loop.call_soon_threadsafe(call.answers.put_nowait, (kind, value))

    def _lose(self, why: str) -> None:
        closed = EngineError("the engine was closed while the request was in flight.")
        with self._lock:
            self._lost = why
            numbers = list(self._calls)
        error = in_words(closed if self._is_closed else EngineDownError(why))
        self._deliver([(number, "error", error) for number in numbers])


def _error(kind: str, text: str) -> LockstepError:
    """The worker's error, of its own type if it is one of Lockstep's."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, LockstepError):
        return found(text)
    return EngineError(f"{kind}: {text}")
