"""The processes that train one model together: their groups and their collective calls.

Ranks that share micro-batches (sequence parallelism) are neighbours: of 8 ranks with sequence=2,
ranks 0 and 1 are a pair, and ranks 0, 2, 4 and 6 divide the rows.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lockstep.config import differences
from lockstep.errors import ConfigError, RankError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.place import Rank, failed_call, handling_interrupts

T = TypeVar("T")

_STOPPED = "lockstep/stopped/{}"
"""Key of the store for the error that stopped a rank."""

JOIN_SECONDS = 300.0
"""Time that processes of one machine have to import torch and meet."""

FREEZE_FACTOR = 20.0
"""A process counts as frozen when the others have waited this many times their longest step."""

NUM_NAMED = 5  # differing settings to name; more would hide the first


class Ranks:
    """This process and the others of its run. All ranks must make each collective call."""

    def __init__(self, place: Rank, store: Store, *, sequence: int, device: torch.device) -> None:
        self.rank, self.world, self.device = place.rank, place.world, device
        self._store = store
        self._is_stop_asked = False
        # Every rank makes every group, in one order.
        pairs = [_group(range(at, at + sequence)) for at in range(0, self.world, sequence)]
        across = [_group(range(at, self.world, sequence)) for at in range(sequence)]
        self.sequence_group: dist.ProcessGroup | None = None
        """Ranks that share this rank's micro-batches; None if it has them alone."""
        if sequence > 1:
            self.sequence_group = pairs[self.rank // sequence]
        self.data_group: dist.ProcessGroup = across[self.rank % sequence]
        """One rank of each such set: together they have all rows, each once."""
        self.data_rank, self.data_size = self.rank // sequence, self.world // sequence

    @classmethod
    def join(cls, place: Rank, parallel: ParallelConfig, *, device: str) -> Ranks:
        """Joins the other ranks. Raises RankError, naming them, if some do not come within the
        limit of all waits, or JOIN_SECONDS if that is less. Waits without hearing signals."""
        limit = parallel.timeout_seconds
        if place.meeting.startswith("tcp://127."):  # all are processes of this machine
            limit = min(limit, JOIN_SECONDS)
        where = torch.device(device)
        if where.type == "cuda":
            if place.local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {place.rank} is process {place.local_rank} of its machine, which has "
                    f"{torch.cuda.device_count()} GPU(s): each process needs one. Lower "
                    "parallel.processes, or choose device=cpu."
                )
            where = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(where)
        try:
            store = _open_store(place, timedelta(seconds=limit))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
                store=store,
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=parallel.timeout_seconds),
            )
            ranks = cls(place, store, sequence=parallel.sequence, device=where)
            dist.barrier()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankError(
                f"the {place.world} processes of the run did not meet within {limit:g} s "
                f"(parallel.timeout_seconds={parallel.timeout_seconds:g}): {reason}"
            ) from error
        return ranks

    def use_device(self) -> None:
        """Selects the rank's GPU for the calling thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def is_leader(self) -> bool:
        """True for rank 0, which writes, shows and reports."""
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """All ranks in one axis. Parameters are sharded over it."""
        return init_device_mesh(self.device.type, (self.world,))

    # -- telling each other -----------------------------------------------------------------------

    def gather(self, mine: T) -> list[T]:
        """[world] The values of all ranks, in order; anything that can be pickled."""
        return self._gather(mine, dist.group.WORLD, self.world)

    def gather_data(self, mine: T) -> list[T]:
        """[data_size] The values of the ranks that together have all rows."""
        return self._gather(mine, self.data_group, self.data_size)

    def from_leader(self, mine: T) -> T:
        """The value of rank 0."""
        held = [mine]
        dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        return held[0]

    def sum_data(self, values: torch.Tensor) -> None:
        """Sums over the ranks that together have all rows, in place."""
        dist.all_reduce(values, group=self.data_group)

    def sum(self, values: torch.Tensor) -> None:
        """Sums over all ranks, in place."""
        dist.all_reduce(values)

    def _gather(self, mine: T, group: Any, size: int) -> list[T]:
        out: list[Any] = [None] * size
        with torch.device("cpu"):
            dist.all_gather_object(out, mine, group=group)
        return out

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Raises RankError, on all ranks alike, unless every rank has these settings."""
        found = self.gather(dict(settings))
        for rank, theirs in enumerate(found):
            if differing := differences(found[0], theirs):
                listed = [
                    f"{name} is {of_first!r} on rank 0 and {of_other!r} on rank {rank}"
                    for name, (of_first, of_other) in list(differing.items())[:NUM_NAMED]
                ]
                raise RankError(
                    f"ranks disagree about the config: {'; '.join(listed)}. Give every process the "
                    "same recipe and settings. Nothing was started."
                )

    # -- the end ----------------------------------------------------------------------------------

    def limit_waits(self, seconds: float) -> None:
        """Limits every later wait for another process to `seconds`."""
        for group in {dist.group.WORLD, self.sequence_group, self.data_group} - {None}:
            _set_pg_timeout(timedelta(seconds=seconds), group)

    def taking_interrupts(self) -> contextlib.AbstractContextManager[None]:
        """Makes Ctrl-C ask for a stop at the next point where all ranks can stop (`is_stop_asked`).
        A second one stops this process at once."""

        def ask() -> None:
            if self._is_stop_asked:
                raise KeyboardInterrupt
            self._is_stop_asked = True

        return handling_interrupts(ask)

    def is_stop_asked(self) -> bool:
        """True if any rank was interrupted."""
        return any(self.gather(self._is_stop_asked))

    def is_lost(self, error: BaseException) -> bool:
        """True if `error` comes from waiting in vain for another rank."""
        is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        return isinstance(error, dist.DistError) or is_of_gloo

    def explain(self, error: Exception, why_lost: str) -> str:
        """The reason, in words, of an error that `is_lost`. why_lost: how a process that this one
        started has ended; "" if none has."""
        if stopped := self._stopped():
            return "; ".join(f"rank {rank} has stopped: {why}" for rank, why in stopped.items())
        if why_lost:
            return f"{why_lost} Everything up to the last checkpoint is kept."
        where = failed_call(str(error)) or f"rank {self.rank} in {_call_of(error)}"
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return (
                f"{where}: another process did not answer within the limit of waits "
                "(parallel.timeout_seconds): it hangs, or does something that takes longer. "
                "Everything up to the last checkpoint is kept."
            )
        return (
            f"{where}: another process of the run is gone without a word: killed, or out of "
            "memory. Everything up to the last checkpoint is kept; go on with resume=true."
        )

    def _stopped(self) -> dict[int, str]:
        """rank -> its error, for the ranks that could still report it."""
        out: dict[int, str] = {}
        for rank in range(self.world):
            key = _STOPPED.format(rank)
            with contextlib.suppress(RuntimeError):  # the store goes with rank 0
                if rank != self.rank and self._store.check([key]):
                    out[rank] = self._store.get(key).decode()
        return out

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the other ranks: in order, or at once with an error of this rank."""
        if error is None:
            dist.barrier()
        elif not self.is_lost(error):
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            with contextlib.suppress(RuntimeError):
                self._store.set(_STOPPED.format(self.rank), why)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _open_store(place: Rank, timeout: timedelta) -> Store:
    """The store through which the ranks find each other, once all are there. Raises RuntimeError
    naming the missing ranks."""
    if place.meeting == "env://":
        store, _, _ = next(rendezvous(place.meeting, place.rank, place.world, timeout=timeout))
    else:
        host, _, port = place.meeting.removeprefix("tcp://").rpartition(":")
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), is_master=place.rank == 0, timeout=timeout, wait_for_workers=False
        )
    keys = [f"lockstep/here/{rank}" for rank in range(place.world)]
    store.set(keys[place.rank], "")
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(f"rank {', '.join(missing)} did not come") from None
    return store


def _group(ranks: range) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))  # a number to those outside


def _call_of(error: BaseException) -> str:
    """The function of torch.distributed that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [f.name for f in frames if Path(f.filename).name == "distributed_c10d.py"]
    return next(iter(calls), "a collective call")
