"""Starts a function on every process of a run: by itself on this machine, or under torchrun.

The process that the user started is rank 0, and its result is the run's. What a rank stops with is
told to rank 0, which says it once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.errors import LockstepError, RankError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.placement import PlacementConfig, RayPlacement

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from lockstep.launch.ranks import Ranks

T = TypeVar("T")

END_SECONDS = 10.0
"""How long the others may take to end after rank 0 has; they have nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which of a run's processes this is, and where they meet."""

    rank: int
    world: int
    local_rank: int
    """On its machine: the number of its GPU."""
    address: str
    port: int

    @classmethod
    def from_torchrun(cls) -> Place | None:
        """None where torchrun has not started this process, or nothing beside it."""
        found = os.environ
        if int(found.get("WORLD_SIZE", "0")) < 2:
            return None
        return cls(
            rank=int(found["RANK"]), world=int(found["WORLD_SIZE"]),
            local_rank=int(found.get("LOCAL_RANK", "0")),
            address=found["MASTER_ADDR"], port=int(found["MASTER_PORT"]),
        )  # fmt: skip


def end_by_sigterm() -> None:
    """SIGTERM, by which a cluster's scheduler ends a job, is Ctrl-C: it leaves the same checkpoint.

    A script starts its background jobs with SIGINT ignored, and SIGTERM would then be lost with it:
    such a job hears both from here on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def is_follower() -> bool:
    """Whether another process of the run speaks for this one."""
    return int(os.environ.get("RANK", "0")) > 0


def on_all_ranks(
    parallel: ParallelConfig,
    work: Callable[..., T],
    *args: Any,
    device: str,
    placement: PlacementConfig | None = None,
    engines: tuple[str, int, int] = ("", 0, 0),
    **settings: Any,
) -> T:
    """`work(ranks, *args, **settings)` on every process; returns what it did on this one, or, where
    all of them are elsewhere, on rank 0.

    ranks: None where there is one process. work, args and settings are pickled for the others, so
    work is a function of a module. device: cpu or cuda. engines: (function, how many, how often
    each is started again) of the workers that stand with the ranks, where `placement` is not this
    machine. Raises RankError if another rank stopped.
    """
    if isinstance(placement, RayPlacement) and placement.is_elsewhere():
        from lockstep.launch.ray import on_ray

        return on_ray(placement, parallel, engines, work, args, settings)
    world = parallel.num_processes(os.environ)
    if world == 1:
        return work(None, *args, **settings)
    if (place := Place.from_torchrun()) is not None:
        from lockstep.launch.ranks import store_of_environment

        meet = partial(store_of_environment, timeout_seconds=parallel.timeout_seconds)
        with _joined(place, parallel, device, meet) as ranks:
            return work(ranks, *args, **settings)
    return _on_local_ranks(world, parallel, work, args, settings, device)


def _on_local_ranks(
    world: int,
    parallel: ParallelConfig,
    work: Callable[..., T],
    args: tuple[Any, ...],
    settings: dict[str, Any],
    device: str,
) -> T:
    import multiprocessing

    from lockstep.launch.ranks import open_store

    store = open_store(world=world, timeout_seconds=parallel.timeout_seconds)
    context = multiprocessing.get_context("spawn")
    followers: list[BaseProcess] = []

    def place_of(rank: int) -> Place:
        return Place(rank=rank, world=world, local_rank=rank, address="127.0.0.1", port=store.port)

    try:
        for rank in range(1, world):
            follower = context.Process(
                target=_follow,
                args=(place_of(rank), parallel, device, work, args, settings),
                daemon=True,
            )
            follower.start()
            followers.append(follower)
        with _joined(place_of(0), parallel, device, lambda: store) as ranks:
            return work(ranks, *args, **settings)
    finally:
        for follower in followers:
            follower.join(timeout=END_SECONDS)
            if follower.is_alive():
                follower.kill()
                follower.join()


def _follow(
    place: Place,
    parallel: ParallelConfig,
    device: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    settings: dict[str, Any],
) -> None:
    """The main function of ranks 1 and up. Silent: rank 0 tells why a run has stopped."""
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank)}
    end_by_sigterm()
    code = 0
    try:
        from lockstep.launch.ranks import reach_store

        meet = partial(reach_store, place, timeout_seconds=parallel.timeout_seconds)
        with _joined(place, parallel, device, meet) as ranks:
            work(ranks, *args, **settings)
    except (LockstepError, KeyboardInterrupt):
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a group that broke may have left threads that never end


@contextlib.contextmanager
def _joined(
    place: Place, parallel: ParallelConfig, device: str, meet: Callable[[], Any]
) -> Iterator[Ranks]:
    from lockstep.launch.ranks import Ranks

    ranks = Ranks.join(
        place, meet, sequence=parallel.sequence, device=device,
        timeout_seconds=parallel.timeout_seconds,
    )  # fmt: skip
    try:
        with ranks.taking_interrupts():
            yield ranks
    except Exception as error:
        explained = ranks.explain(error)
        ranks.leave(error)
        if explained is not None:
            raise RankError(explained) from error
        raise
    except BaseException as error:
        ranks.leave(error)
        raise
    ranks.leave()
