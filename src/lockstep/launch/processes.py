"""Runs a function on every process of a run: processes of this machine, of torchrun, or of Ray.

The process that the user started is rank 0, and its result is the run's. The error that stops a
rank is reported to rank 0, which shows it once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

from lockstep.children import NOTICE_SECONDS, NUM_LINES, end_of, how_ended
from lockstep.errors import ConfigError, LockstepError, RankError
from lockstep.launch.config import Demand, ParallelConfig, PlacementConfig, RayPlacement
from lockstep.launch.place import END_SECONDS, Rank, end_by_sigterm, failed_call, free_port

T = TypeVar("T")

POLL_SECONDS = 0.1
"""Interval of checks whether a process that should join has ended."""


def on_all_ranks(
    parallel: ParallelConfig,
    work: Callable[..., T],
    *args: Any,
    device: str,
    placement: PlacementConfig | None = None,
    demand: Demand | None = None,
) -> T:
    """Calls `work(ranks, *args)` on every process; returns the result of this one, or, if all of
    them are elsewhere, of rank 0.

    ranks: None if there is one process. work and args are pickled for the others, so work is a
    function of a module. device: cpu or cuda. demand: what `placement` sets aside for the
    processes. Raises RankError if another rank stopped.
    """
    if isinstance(placement, RayPlacement) and placement.is_elsewhere():
        from lockstep.launch.ray import on_ray

        call = partial(on_all_ranks, parallel, work, *args, device=device)
        return on_ray(placement, parallel, demand or Demand(), call)
    world = parallel.num_processes(os.environ)
    if world == 1:
        return work(None, *args)
    call = partial(_call, parallel, device, work, args)
    if (place := Rank.from_torchrun()) is not None:
        return call(place)
    meeting = f"tcp://127.0.0.1:{free_port()}"
    places = [
        Rank(rank=rank, world=world, local_rank=rank, meeting=meeting) for rank in range(world)
    ]
    followers: list[_Follower] = []

    def why_lost(seconds: float) -> str:
        ended = wait_for([follower.process.sentinel for follower in followers], seconds)
        lost = [follower for follower in followers if follower.process.sentinel in ended]
        return lost[0].why_ended() if lost else ""

    try:
        with _ending_at_second_signal(lambda: [follower.end(0) for follower in followers]):
            followers += [_Follower(place, call) for place in places[1:]]
            return call(places[0], why_lost)
    finally:
        ends = time.monotonic() + END_SECONDS
        for follower in followers:
            follower.end(max(0.0, ends - time.monotonic()))


class _Follower:
    """The process of a rank from 1 up, as rank 0 sees it. Its output is passed on."""

    def __init__(self, place: Rank, call: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._output, theirs = context.Pipe(duplex=False)
        self._printed: deque[str] = deque(maxlen=NUM_LINES)
        self._rank, self._failed = place.rank, ""
        self.process = context.Process(target=_rank_main, args=(place, call, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        with open(self._output.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                self._printed.append(line.rstrip())
                self._failed = failed_call(line) or self._failed
                with contextlib.suppress(OSError, ValueError):
                    print(line, end="", file=sys.stderr, flush=True)

    def why_ended(self) -> str:
        """How the process ended, with its last output."""
        self.process.join()
        self._reader.join(1.0)  # an own child of it may hold the pipe open
        how = how_ended(self.process.pid, self.process.exitcode)
        failed = self._failed and f" The failed call: {self._failed}."
        return f"rank {self._rank} {how} before the run did.{failed}{end_of(self._printed)}"

    def end(self, seconds: float) -> None:
        """Waits `seconds` for the process to end by itself, then kills it."""
        self.process.join(timeout=seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def _ending_at_second_signal(end_others: Callable[[], object]) -> Generator[None]:
    """Ends all processes at a second Ctrl-C or SIGTERM, also where this one waits for a rank that
    hangs: gloo waits in C++, where Python hears no signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    is_left = threading.Event()

    def watch() -> None:
        heard: Counter[int] = Counter()
        while number := os.read(reading, 1):
            heard[number[0]] += 1
            if max(heard[signal.SIGINT], heard[signal.SIGTERM]) > 1:
                break
        if number and not is_left.wait(2 * END_SECONDS):
            end_others()
            os._exit(130)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_left.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
        watching.join()
        os.close(reading)


def _rank_main(place: Rank, call: Callable[..., Any], output: Connection) -> None:
    """The main function of ranks 1 and up. It prints nothing: rank 0 explains why a run stopped."""
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank)}
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    end_by_sigterm()
    code = 0
    try:
        call(place)
    except (LockstepError, KeyboardInterrupt) as error:
        if isinstance(error, ConfigError):  # which may be of this rank alone
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a group that broke may have left threads that never end


def _end_with_parent() -> None:
    """Ends this process when rank 0 is gone, whatever its main thread waits for."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "rank 0 has started it"
    parent.join()
    os._exit(2)


def _call(
    parallel: ParallelConfig,
    device: str,
    work: Callable[..., T],
    args: Any,
    place: Rank,
    why_lost: Callable[[float], str] = lambda seconds: "",
) -> T:
    """Joins the other ranks and makes the call. why_lost: waits up to the given seconds for a
    process that this one started to end. It returns how the process ended, or ""."""
    from lockstep.launch.ranks import Ranks

    ranks = _in_thread(partial(Ranks.join, place, parallel, device=device), why_lost)
    ranks.use_device()
    try:
        with ranks.taking_interrupts():
            result = work(ranks, *args)
    except BaseException as error:
        explained = None
        if isinstance(error, Exception) and ranks.is_lost(error):
            explained = ranks.explain(error, why_lost(NOTICE_SECONDS))
        ranks.leave(error)
        if explained is not None:
            raise RankError(explained) from error
        raise
    ranks.leave()
    return result


def _in_thread(work: Callable[[], T], why_lost: Callable[[float], str]) -> T:
    """Runs `work()` in a thread, so that this thread handles signals and ends of other processes.
    Raises RankError if `why_lost` returns a text."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not wait([result], POLL_SECONDS).done:
        if lost := why_lost(0.0):
            raise RankError(f"{lost} Nothing was started.")
    return result.result()
