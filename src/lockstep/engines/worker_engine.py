"""The embedded engine in a process of its own: the same decoder over the same ops, other memory.

First the trainer's side, then weights on their way, then the worker's side.
A question is (number, name, arguments). An answer is (number, kind, value), with kind "delta",
"end", "result" or "error". Weights lie one after another in memory that both sides map.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.engines.base import Engine, EngineContext, Scores
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.ledger import check_source
from lockstep.errors import EngineDownError, EngineError, LockstepError, TornWeightsError
from lockstep.launch.shared_file import Address, SharedFile, mapped
from lockstep.launch.threads import in_thread
from lockstep.launch.workers import Batch, Line, WorkerProcess, end_now, portable
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import HFTensors, load_checkpoint
from lockstep.ops.base import Ops
from lockstep.ops.invariant import ask_for_reproducible_gemm
from lockstep.system import keep_freed_memory
from lockstep.types import Delta, Int32Array, Request

Tensor = torch.Tensor

READY = 0
"""Number of the first answer: the engine's capabilities, or why there is no engine."""

CLOSE_SECONDS = 10.0
"""Time that a worker has to end after it was asked to; then it is killed."""

REPORT_SECONDS = 10.0
"""Interval between two messages about an engine that is still starting."""


@dataclass(slots=True, eq=False)
class _WorkerCall:
    """A question and its answers, in the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    is_done: bool = False

    async def next(self) -> Any:
        """The value of the next answer; None at the end. Raises the worker's error."""
        kind, value = await self.answers.get()
        self.is_done = kind != "delta"
        if kind == "error":
            raise value
        return value


class WorkerEngine(Engine):
    """An `EmbeddedEngine` in a worker that runs `serve`. May be used from several event loops.

    A worker that dies fails every request in flight, and each later one, with an EngineDownError
    that holds the end of its log. `load_weights` starts it again.
    """

    def __init__(self, model: Decoder, config: EmbeddedConfig, context: EngineContext) -> None:
        """model: the trainer's. The worker makes its ops anew with the same rules; its self-test
        holds there too: the fingerprint, which includes a fixed computation, is compared.

        Returns when the engine answers; meanwhile calls `context.on_wait` now and then. Raises the
        worker's own error, or EngineDownError with its log, if the engine cannot be made.
        """
        self._context, self._device = context, model.embedding.device
        self._log = (context.scratch or Path(tempfile.mkdtemp(prefix="lockstep-"))) / "engine.log"
        self._make = partial(
            make_here,
            config,
            directory=context.directory,
            token_bytes=list(context.token_bytes),
            control_ids=sorted(context.control_ids),
            dtype=context.dtype if config.dtype == "same" else config.dtype,
            vocab_size=context.vocab_size,
            device=self._device.type,
            threads=torch.get_num_threads(),
            ops=model.ops,
        )
        self._restarts = config.restarts
        self._numbers = itertools.count(READY + 1)
        self._calls: dict[int, _WorkerCall] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_restarts = 0
        """Since the last `take_metrics`."""
        self._starting: Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        context = self._context
        gpu = context.gpus[context.replica : context.replica + 1]
        worker = WorkerProcess(
            "lockstep.engines.worker_engine:serve",
            name=f"engine {context.replica}",
            log=self._log,
            environment={"CUDA_VISIBLE_DEVICES": gpu[0]} if gpu else {},
        )
        worker.send([self._make])
        try:
            while (batch := worker.receive(seconds=REPORT_SECONDS)) is None:
                context.on_wait(f"{worker.name} is still starting.")
        except (EOFError, OSError):
            raise EngineDownError(f"no engine: {worker.why_ended()}") from None
        except BaseException:
            worker.end(seconds=0)
            raise
        ((_, kind, value),) = batch
        if kind == "error":
            worker.end(seconds=CLOSE_SECONDS)
            raise value
        self._worker, self._lost = worker, ""
        found, self.version = value
        self.capabilities = replace(found, has_restart=self._restarts > 0)
        worker.listen(self._deliver, lambda: self._lose(worker.why_ended()))

    @property
    def pid(self) -> int:
        return self._worker.pid

    # -- the protocol -------------------------------------------------------------------------

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
        check_source(source, self.capabilities)
        while True:
            try:
                await self._load(source, version)
            except EngineDownError:
                await self._start_again()
            else:
                self.version = version
                return

    async def _load(self, source: Mapping[str, Any] | str | None, version: int) -> None:
        if not isinstance(source, Mapping):
            await self._ask("load_weights", source=str(source), version=version)
            return
        outlines = outlines_of(source)
        # Held until the worker has answered: the memory goes with the last reference to it.
        write = partial(shared, source, outlines)
        written = partial(self._context.newest.written, source, version, write)
        file = await in_thread(written, device=self._device)
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
        return self._context.newest.has(source, version)

    async def ping(self) -> None:
        """Raises EngineDownError if the worker is gone. One that does not answer is killed."""
        try:
            await self._ask("ping")
        except asyncio.CancelledError:
            await asyncio.to_thread(self._worker.end, seconds=0)
            raise

    async def _start_again(self) -> None:
        """Starts a worker that is gone; others who ask meanwhile wait for the same start."""
        if self._starting is None:
            if not self._restarts or self._is_closed:
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

    def _send(self, name: str, arguments: dict[str, Any]) -> tuple[int, _WorkerCall]:
        call = _WorkerCall(asyncio.get_running_loop())
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
        closed = "the engine was closed while the request was in flight."
        with self._lock:
            self._lost = why
            numbers = list(self._calls)
        kind, text = (EngineError, closed) if self._is_closed else (EngineDownError, why)
        self._deliver([(number, "error", kind(text)) for number in numbers])


# -- weights on their way -------------------------------------------------------------------------

ALIGNMENT = 64  # of a tensor's first byte: a cache line, and more than any dtype takes

Outline = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape) of a tensor."""


def outlines_of(source: Mapping[str, Tensor]) -> list[Outline]:
    """The tensors of a source, in its order. Sharded tensors are not gathered."""
    found = source.outlines() if isinstance(source, HFTensors) else source
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]


def tensors_in(memory: Any, outlines: Sequence[Outline]) -> dict[str, Tensor]:
    """name -> a view of the tensor at its place in `memory`, a writable buffer."""
    whole, out, at = torch.frombuffer(memory, dtype=torch.uint8), {}, 0
    for name, dtype, shape in outlines:
        num_bytes = math.prod(shape) * dtype.itemsize
        out[name] = whole[at : at + num_bytes].view(dtype).view(shape)
        at += _aligned(num_bytes)
    return out


def shared(source: Mapping[str, Tensor], outlines: Sequence[Outline]) -> SharedFile:
    """A file that holds the tensors, copied in the order of the mapping."""
    sizes = [_aligned(math.prod(shape) * dtype.itemsize) for _, dtype, shape in outlines]
    file = SharedFile(sum(sizes))
    for name, tensor in tensors_in(file.memory, outlines).items():
        tensor.copy_(source[name].detach())
    return file


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# -- in the worker --------------------------------------------------------------------------------


def make_here(
    config: EmbeddedConfig,
    *,
    directory: Path,
    dtype: str,
    vocab_size: int,
    device: str,
    threads: int,
    ops: Ops,
    **tokens: Any,
) -> EmbeddedEngine:
    """The engine of a worker, which sees one GPU only. tokens: arguments of `EmbeddedEngine`."""
    if ops.name == "invariant":
        ask_for_reproducible_gemm()  # where the trainer's environment is not this one's
    keep_freed_memory()
    torch.set_num_threads(threads)
    model = load_checkpoint(
        directory, dtype=getattr(torch, dtype), device=device, ops=ops, vocab_size=vocab_size
    )
    model.requires_grad_(False)
    return EmbeddedEngine(model, config, is_shared=False, **tokens)


def serve(line: Line) -> None:
    """Calls the first message, which makes the engine, and serves it until it is closed.

    The process also ends when the other end of the line is gone.
    """
    batch = line.receive()
    assert batch is not None, "it waits"
    try:
        engine: Engine = batch[0]()
    except Exception as error:
        line.send([(READY, "error", portable(error, kind=EngineError))])
        raise
    line.send([(READY, "result", (engine.capabilities, engine.version))])
    asyncio.run(_Host(engine, line).run())


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
            self._reply(number, "error", portable(error, kind=EngineError))
        finally:
            del self._running[number]

    # -- questions that are not methods of the engine ---------------------------------------------

    async def _load_shared(self, outlines: list[Outline], address: Address, version: int) -> None:
        await self._engine.load_weights(tensors_in(mapped(address), outlines), version=version)

    async def _close(self) -> None:
        await self._engine.close()
        self._closed.set()

    def _reply(self, number: int, kind: str, value: Any) -> None:
        self._line.send([(number, kind, value)])
