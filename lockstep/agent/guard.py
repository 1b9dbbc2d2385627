"""The one guard for foreign code: hooks of environments, harnesses, scorers and tools.

Whatever such code does becomes an ordinary exception of the call. A `sys.exit()`, a stray
cancellation, a hang or a swallowed cancellation neither ends nor hangs the run. Only code that
blocks the event loop without awaiting cannot be cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import random
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lockstep.agent.tasks import seed_globals
from lockstep.errors import RolloutError, named

T = TypeVar("T")

MAX_NUMBER = 1e30
"""Largest reward or counter: sums and squares of such numbers over a batch stay finite."""
CANCEL_SECONDS = 1.0
"""Seconds that a cancelled hook has to clean up before it is closed by force."""


class ForeignExit(RolloutError):
    """Foreign code raised something that is no Exception: SystemExit, or a CancelledError of its
    own. The original is the `__cause__`."""


class TookTooLong(TimeoutError):
    """The guard cut the call off. A TimeoutError of the foreign code's own is not one of these."""


Settled = tuple[Any, BaseException | None]
"""(result, None), or (None, error)."""


async def guarded(
    hook: Callable[[], Any],
    *,
    seconds: float | None = None,
    setting: str = "",
    seed: int | None = None,
) -> Any:
    """Returns the result of `hook()`, awaited if it is awaitable.

    seconds: time limit; None is none. setting: name of the setting that raises the limit. seed: of
    the global generators of Python and numpy, which go on where they were each time the hook goes
    on: what runs meanwhile does not change its draws.
    Raises TookTooLong after `seconds`, ForeignExit in place of anything that is no Exception, and
    otherwise what the hook raised. A late hook is cancelled; if it does not end within
    CANCEL_SECONDS, its coroutine is closed. A CancelledError comes through only if the task of the
    caller was cancelled from outside.

    The hook runs in the caller's task, so `close` can leave a cancel scope that `reset` entered.

    >>> await guarded(environment.reset, seconds=600)                           # doctest: +SKIP
    """
    late = TookTooLong(f"took longer than {seconds or 0:g} s{f' ({setting})' if setting else ''}")
    return await _driven(_called(hook), seconds, late, seed)


async def _called(hook: Callable[[], Any]) -> Any:
    result = hook()
    return await result if inspect.isawaitable(result) else result


@types.coroutine
def _driven(
    coroutine: Coroutine[Any, Any, Any],
    seconds: float | None,
    late: TookTooLong,
    seed: int | None,
) -> Generator[Any, None, Any]:
    """Steps a foreign coroutine, so that it can be closed where it ignores a cancellation."""
    task = asyncio.current_task()
    assert task is not None, "hooks are called in a task"
    num_before = task.cancelling()  # cancellations that are not due to the hook
    num_cuts = 0  # times that the limit cancelled the task

    def cut() -> None:
        nonlocal num_cuts
        num_cuts += 1
        task.cancel()

    limits = () if seconds is None else (seconds, seconds + CANCEL_SECONDS)
    timers = [asyncio.get_running_loop().call_later(limit, cut) for limit in limits]
    num_own = 0  # cancellations by the hook of its own task
    thrown: BaseException | None = None
    draws: tuple[Any, Any] | None = None
    try:
        while True:
            before = task.cancelling()
            if draws is not None:
                random.setstate(draws[0])
                np.random.set_state(draws[1])
            elif seed is not None:
                seed_globals(seed)
            try:
                awaited = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                settled: Settled = stop.value, None
                break
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                settled = None, error
                break
            finally:
                num_own += max(0, task.cancelling() - before)
            thrown = None
            if seed is not None:
                draws = random.getstate(), np.random.get_state()
            try:
                yield awaited
            except GeneratorExit:
                raise
            except BaseException as error:
                thrown = error
            if num_cuts > 1:
                settled = None, late
                break
    finally:
        for timer in timers:
            timer.cancel()
        settle(coroutine.close)
    num_outside = task.cancelling() - num_before - num_cuts - num_own
    while task.cancelling() > num_before + max(0, num_outside):
        task.uncancel()
    if num_own:  # the last one may be pending still
        with contextlib.suppress(asyncio.CancelledError):
            yield
    if num_outside > 0 and isinstance(settled[1], asyncio.CancelledError):
        raise settled[1]
    if num_cuts:
        raise late from settled[1]
    return result_of(settled)


def settle(call: Callable[[], Any]) -> Settled:
    """Runs plain code, in whatever thread this is."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def result_of(outcome: Settled) -> Any:
    """Returns the result, or raises the error as an Exception."""
    result, error = outcome
    if error is None:
        return result
    if isinstance(error, Exception):
        raise error
    raise ForeignExit(named(error)) from error


def described(error: BaseException) -> str:
    """Returns `Type: text (file:line)`; the place is where it was raised."""
    text = named(error)
    if isinstance(error, TookTooLong):
        text = f"TimeoutError: {error}"
    elif isinstance(error, ForeignExit):
        text, error = str(error), error.__cause__ or error
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


# -- numbers of foreign code ----------------------------------------------------------------------


def numbers_problem(found: Any, where: str) -> str:
    """Explains why `found` is no mapping from names to finite numbers, or returns "".

    >>> numbers_problem({"right": 10**400}, "parts")
    'parts.right is too large for a float; expected a finite number'
    """
    if not isinstance(found, Mapping):
        return f"{where} is {shortened(found)}; expected a mapping from names to finite numbers"
    for name, value in found.items():
        if not isinstance(name, str):
            return f"{where} has the key {shortened(name)}; expected text"
        if problem := number_problem(value, f"{where}.{name}"):
            return problem
    return ""


def number_problem(value: Any, where: str) -> str:
    """Explains why `value` is no finite number, or returns ""."""
    try:
        if isinstance(value, int | float | np.number) and math.isfinite(value):
            if abs(value) <= MAX_NUMBER:
                return ""
            return f"{where} is {float(value):g}; expected a number of at most {MAX_NUMBER:g}"
    except OverflowError:
        return f"{where} is too large for a float; expected a finite number"
    except TypeError:  # a complex number
        pass
    return f"{where} is {shortened(value)}; expected a finite number"


def shortened(value: Any) -> str:
    """Returns the beginning of `repr(value)`, or the name of the type if repr fails."""
    text, _ = settle(lambda: repr(value))
    return text[:80] if isinstance(text, str) else type(value).__name__
