"""Runs a function on every process of a run: processes of this machine, of torchrun, or of Ray.

The process that the user started is rank 0, and its result is the run's. The error that stops a
rank is reported to rank 0, which shows it once.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lockstep.errors import LockstepError, RankError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.place import END_SECONDS, Place, end_by_sigterm, free_port
from lockstep.launch.placement import PlacementConfig, RayPlacement

T = TypeVar("T")


def on_all_ranks(
    parallel: ParallelConfig,
    work: Callable[..., T],
    *args: Any,
    device: str,
    placement: PlacementConfig | None = None,
    num_engines: int = 0,
    **settings: Any,
) -> T:
    """Calls `work(ranks, *args, **settings)` on every process; returns the result of this one, or,
    if all of them are elsewhere, of rank 0.

    ranks: None if there is one process. work, args and settings are pickled for the others, so work
    is a function of a module. device: cpu or cuda. num_engines: processes that sample, for which
    `placement` sets resources aside. Raises RankError if another rank stopped.
    """
    if isinstance(placement, RayPlacement) and placement.is_elsewhere():
        from lockstep.launch.ray import on_ray

        device = "cuda" if placement.trainer_gpus else "cpu"
        call = partial(on_all_ranks, parallel, work, *args, device=device, **settings)
        return on_ray(placement, parallel, num_engines, call)
    world = parallel.num_processes(os.environ)
    if world == 1:
        return work(None, *args, **settings)
    call = partial(_call, parallel, device, work, args, settings)
    if (place := Place.from_torchrun()) is not None:
        return call(place)
    meeting = f"tcp://127.0.0.1:{free_port()}"
    places = [
        Place(rank=rank, world=world, local_rank=rank, meeting=meeting) for rank in range(world)
    ]
    context = multiprocessing.get_context("spawn")
    followers = [
        context.Process(target=_follow, args=(place, call), daemon=True) for place in places[1:]
    ]
    try:
        for follower in followers:
            follower.start()
        return call(places[0])
    finally:
        for follower in followers:
            if follower.pid is None:
                continue
            follower.join(timeout=END_SECONDS)
            if follower.is_alive():
                follower.kill()
                follower.join()


def _follow(place: Place, call: Callable[[Place], Any]) -> None:
    """The main function of ranks 1 and up. Silent: rank 0 says why a run has stopped."""
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank)}
    end_by_sigterm()
    code = 0
    try:
        call(place)
    except (LockstepError, KeyboardInterrupt):
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a group that broke may have left threads that never end


def _call(
    parallel: ParallelConfig,
    device: str,
    work: Callable[..., T],
    args: Any,
    settings: dict[str, Any],
    place: Place,
) -> T:
    """Joins the other ranks and makes the call."""
    from lockstep.launch.ranks import Ranks

    ranks = Ranks.join(
        place, sequence=parallel.sequence, device=device, timeout_seconds=parallel.timeout_seconds
    )
    try:
        with ranks.taking_interrupts():
            result = work(ranks, *args, **settings)
    except BaseException as error:
        explained = ranks.explain(error) if isinstance(error, Exception) else None
        ranks.leave(error)
        if explained is not None:
            raise RankError(explained) from error
        raise
    ranks.leave()
    return result
