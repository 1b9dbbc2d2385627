"""Checks that a reader's time grows with the length of its text alone.

An absolute bound depends on the machine and on its other work. So the processor time of a text is
compared with the time of a text TIMES as long. A linear reader takes TIMES as much, a
quadratic one TIMES * TIMES, and the limit is MARGIN * TIMES. Other work on the machine only adds
time: the least of several runs counts, and a text fails only if all runs fail.

Steps are not counted: `str.find` and a pattern visit characters that no Python counter sees.

A reader that never returns is ended by a signal after MOST_SECONDS of processor time.
"""

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

CHARS = 4_000
TIMES = 16
MARGIN = 3
RUNS = 5
SLACK_SECONDS = 2e-3
"""Added to the limit: below it, clocks and first calls decide."""
MOST_SECONDS = 5.0


class NeverReturns(BaseException):
    """A reader took too long. It is no Exception: readers may catch all of them."""


def grows_linearly(read: Callable[[T], object], made: Callable[[int], T]) -> bool:
    """made: makes a text, or its ids, of about that size. Raises NeverReturns."""
    short, long = made(CHARS), made(CHARS * TIMES)
    least, most = math.inf, math.inf
    for _ in range(RUNS):
        least, most = min(least, _seconds(read, short)), min(most, _seconds(read, long))
        if most <= MARGIN * TIMES * least + SLACK_SECONDS:
            return True
    return False


def _seconds(read: Callable[[T], object], text: T) -> float:
    gc.disable()
    try:
        with _stopped(MOST_SECONDS):
            begun = time.thread_time()
            read(text)
            return time.thread_time() - begun
    finally:
        gc.enable()


@contextmanager
def _stopped(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise NeverReturns(f"no result after {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
