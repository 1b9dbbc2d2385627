"""Runs a function on every process of a run: processes of this machine, of torchrun, or of Ray.

The process that the user started is rank 0, and its result is the run's. The error that stops a
rank is reported to rank 0, which shows it once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.errors import LockstepError, RankError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.place import END_SECONDS, Place, end_by_sigterm
from lockstep.launch.placement import PlacementConfig, RayPlacement

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

T = TypeVar("T")


def on_all_ranks(
    parallel: ParallelConfig,
    work: Callable[..., T],
    *args: Any,
    device: str,
    placement: PlacementConfig | None = None,
    engines: tuple[str, int, int] = ("", 0, 0),
    **settings: Any,
) -> T:
    """Calls `work(ranks, *args, **settings)` on every process; returns the result of this one, or,
    if all of them are elsewhere, of rank 0.

    ranks: None if there is one process. work, args and settings are pickled for the others, so work
    is a function of a module. device: cpu or cuda. engines: (function, number, restarts of each) of
    the workers that run beside the ranks if `placement` is not this machine. Raises RankError if
    another rank stopped.
    """
    if isinstance(placement, RayPlacement) and placement.is_elsewhere():
        from lockstep.launch.ray import on_ray

        device = "cuda" if placement.trainer_gpus else "cpu"
        call = partial(on_all_ranks, parallel, work, *args, device=device, **settings)
        return on_ray(placement, parallel, engines, call)
    world = parallel.num_processes(os.environ)
    if world == 1:
        return work(None, *args, **settings)
    if (place := Place.from_torchrun()) is not None:
        from lockstep.launch.ranks import store_of_environment

        meet = partial(store_of_environment, timeout_seconds=parallel.timeout_seconds)
        with _joined(place, parallel, device, meet) as ranks:
            return work(ranks, *args, **settings)
    return _on_local_ranks(world, parallel, device, partial(_call, work, args, settings))


def _call(work: Callable[..., T], args: Any, settings: dict[str, Any], ranks: Ranks) -> T:
    return work(ranks, *args, **settings)


def _on_local_ranks(
    world: int, parallel: ParallelConfig, device: str, work: Callable[[Ranks], T]
) -> T:
    from lockstep.launch.ranks import open_store

    store = open_store(world=world, timeout_seconds=parallel.timeout_seconds)
    context = multiprocessing.get_context("spawn")
    places = [
        Place(rank=rank, world=world, local_rank=rank, address="127.0.0.1", port=store.port)
        for rank in range(world)
    ]
    followers = [
        context.Process(target=_follow, args=(place, parallel, device, work), daemon=True)
        for place in places[1:]
    ]
    try:
        for follower in followers:
            follower.start()
        with _joined(places[0], parallel, device, lambda: store) as ranks:
            return work(ranks)
    finally:
        for follower in followers:
            if follower.pid is None:
                continue
            follower.join(timeout=END_SECONDS)
            if follower.is_alive():
                follower.kill()
                follower.join()


def _follow(
    place: Place, parallel: ParallelConfig, device: str, work: Callable[[Ranks], Any]
) -> None:
    """The main function of ranks 1 and up. Silent: rank 0 says why a run has stopped."""
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank)}
    end_by_sigterm()
    code = 0
    try:
        from lockstep.launch.ranks import reach_store

        meet = partial(reach_store, place, timeout_seconds=parallel.timeout_seconds)
        with _joined(place, parallel, device, meet) as ranks:
            work(ranks)
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
        place,
        meet,
        sequence=parallel.sequence,
        device=device,
        timeout_seconds=parallel.timeout_seconds,
    )
    try:
        with ranks.taking_interrupts():
            yield ranks
    except BaseException as error:
        explained = ranks.explain(error) if isinstance(error, Exception) else None
        ranks.leave(error)
        if explained is not None:
            raise RankError(explained) from error
        raise
    ranks.leave()
