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
import re
import sysconfig
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import lockstep.types
from lockstep.agent.environment import Observation, Score
from lockstep.agent.tasks import made_anew, seed_globals
from lockstep.errors import RolloutError, named, shortened
from lockstep.launch.event_loop import VISITED, VisitedTask, is_interrupt, own_context
from lockstep.launch.process_state import Visit
from lockstep.types import Message, ToolSchema

MAX_NUMBER = 1e30
"""Largest reward or counter: sums and squares of such numbers over a batch stay finite."""
CLOSE_SECONDS = 10.0
"""Seconds that an environment may take to close."""
_OWN_FIGURES = re.compile(r"mean|std|min|max|failed|(mean|pass)@\d+(/.*)?|(source|reward)/.*")
"""Names that the run gives its own figures, beside the parts of a reward."""
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    "<",
)
"""Beginnings of files that no user wrote: Lockstep, Python, installed packages, made code."""
CANCEL_SECONDS = 1.0
"""Seconds that a cancelled hook has to clean up before it is closed by force."""


class ForeignExit(RolloutError):
    """Foreign code raised something that is no Exception: SystemExit, or a CancelledError of its
    own. The original is the `__cause__`."""


class Unusable(TypeError):
    """Foreign code returned something that cannot be used."""


class TookTooLong(TimeoutError):
    """The guard cut the call off. A TimeoutError of the foreign code's own is not one of these."""


Settled = tuple[Any, BaseException | None]
"""(result, None), or (None, error)."""


async def guarded(
    hook: Callable[[], Any],
    *,
    check: Callable[[Any], Any] = lambda result: result,
    seconds: float | None = None,
    setting: str = "",
    seed: int | None = None,
) -> Any:
    """Returns `check` of the result of `hook()`, which is awaited if it is awaitable.

    seconds: time limit; None: no limit. setting: name of the setting that raises the limit. seed:
    of the global generators of Python, numpy and torch, which go on where they were each time the
    hook goes on: what runs meanwhile does not change its draws. What else it changes of the process
    (`lockstep.launch.process_state`) is put back. Raises TookTooLong after `seconds`, ForeignExit
    in place of anything that is no Exception, and otherwise what the hook raised. A late hook is
    cancelled; if it does not end within CANCEL_SECONDS, its coroutine is closed. A CancelledError
    comes through only if the task of the caller was cancelled from outside.

    The hook runs in the caller's task, so `close` can leave a cancel scope that `reset` entered.

    >>> await guarded(environment.reset, seconds=600)                           # doctest: +SKIP
    """
    late = TookTooLong(f"took longer than {seconds or 0:g} s{f' ({setting})' if setting else ''}")
    return await _driven(_called(hook, check), seconds, late, seed)


async def _called(hook: Callable[[], Any], check: Callable[[Any], Any]) -> Any:
    result = hook()
    return check(await result if inspect.isawaitable(result) else result)


@types.coroutine
def _driven(
    coroutine: Coroutine[Any, Any, Any], seconds: float | None, late: TookTooLong, seed: int | None
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
    loop, context = asyncio.get_running_loop(), own_context()
    timers = [loop.call_later(limit, cut, context=context) for limit in limits]
    num_own = 0  # cancellations by the hook of its own task
    own_before = task.num_own if isinstance(task, VisitedTask) else 0
    thrown: BaseException | None = None
    is_within = seed is None and VISITED.get() is task  # a tool's call in its environment's
    state = Visit(None if seed is None else partial(seed_globals, seed), is_within=is_within)
    try:
        while True:
            before = task.cancelling()
            visit = VISITED.set(task)
            state.enter()
            try:
                awaited = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                settled: Settled = stop.value, None
                break
            except BaseException as error:
                if is_interrupt(error):
                    raise
                settled = None, error
                break
            finally:
                state.leave()
                VISITED.reset(visit)
                num_own += max(0, task.cancelling() - before)
            thrown = None
            state.keep_draws()
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
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED:
            state.enter()
            settle(coroutine.close)
            state.leave()
        state.end()
    if isinstance(task, VisitedTask):  # which knows it of callbacks too
        num_own = task.num_own - own_before
    num_outside = task.cancelling() - num_before - num_cuts - num_own
    while task.cancelling() > num_before + max(0, num_outside):
        task.uncancel()
    if isinstance(task, VisitedTask):
        task.num_own = own_before
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
    """Returns `Type: text (file:line)`: the innermost place in the user's code, or where it was
    raised if there is none."""
    text = named(error)
    if isinstance(error, TookTooLong):
        text = f"TimeoutError: {error}"
    elif isinstance(error, ForeignExit) and error.__cause__ is not None:
        text, error = str(error), error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    while frames and frames[-1].filename in ("<string>", lockstep.types.__file__):
        frames.pop()  # a constructor that refused its fields
    if isinstance(error, Unusable):
        return str(error)
    if not own and (not frames or frames[-1].filename == __file__):
        return text
    at = (own or frames)[-1]
    return f"{text} ({Path(at.filename).name}:{at.lineno})"


# -- values of foreign code ------------------------------------------------------------------------
#
# Values from foreign code are checked here, once, and copied: a plain value cannot change later, or
# run code when it is read. Each of these raises Unusable or DataError.


def checked_number(found: Any, where: str) -> float:
    """A finite number, as a float."""
    try:
        is_real = isinstance(found, int | float | np.integer | np.floating)
        number = float(found) if is_real else math.nan
    except OverflowError:
        raise Unusable(f"{where} is too large for a float; expected a finite number") from None
    if not math.isfinite(number):
        raise Unusable(f"{where} is {shortened(found)}; expected a finite number")
    if abs(number) > MAX_NUMBER:
        raise Unusable(f"{where} is {number:g}; expected a number of at most {MAX_NUMBER:g}")
    return number


def checked_numbers(found: Any, where: str) -> dict[str, float]:
    """Finite numbers by name.

    >>> checked_numbers({"right": 10**400}, "parts")
    Traceback (most recent call last):
    lockstep.agent.guard.Unusable: parts.right is too large for a float; expected a finite number
    """
    numbers: dict[str, float] = {}
    for name, value in _pairs(found, where, "a mapping from names to finite numbers"):
        if not isinstance(name, str):
            raise Unusable(f"{where} has the key {shortened(name)}; expected text")
        numbers[str.__str__(name)] = checked_number(value, f"{where}.{str.__str__(name)}")
    return numbers


def checked_parts(found: Any) -> dict[str, float]:
    """Parts of a reward by name. They are logged beside the run's own figures of rewards."""
    numbers = checked_numbers(found, "parts")
    if taken := [name for name in numbers if _OWN_FIGURES.fullmatch(name)]:
        raise Unusable(f"parts.{taken[0]} has the name of the run's own figure; expected another")
    return numbers


def checked_messages(found: Any) -> tuple[Message, ...]:
    """Messages, for a dialogue."""
    plain: list[Message] = []
    for message in _listed(found, "messages"):
        if not isinstance(message, Message):
            raise Unusable(f"returned {shortened(message)} among its messages; expected a Message")
        plain.append(made_anew(message, Message))
    return tuple(plain)


def checked_observation(found: Any) -> Observation:
    """An answer to a turn; what ends the episode has no messages."""
    if not isinstance(found, Observation):
        raise Unusable(f"returned {shortened(found)}; expected an Observation")
    return Observation(
        messages=() if found.done else checked_messages(found.messages),
        done=bool(found.done),
        metrics=checked_numbers(found.metrics, "metrics"),
    )


def checked_tools(found: Any) -> tuple[ToolSchema, ...]:
    """Tools that a prompt offers."""
    for entry in (tools := tuple(_listed(found, "tools"))):
        if not isinstance(entry, ToolSchema):
            raise Unusable(f"tools has {shortened(entry)}; expected a ToolSchema, or @tool")
    return tools


def checked_score(found: Any, *, num_turns: int) -> Score:
    """A score that can be trained on."""
    if not isinstance(found, Score):
        what = type(found).__name__
        raise Unusable(f"returned {what}; expected lockstep.agent.environment.Score")
    turn_rewards: dict[int, float] = {}
    for turn, reward in _pairs(found.turn_rewards, "turn_rewards", "a mapping from turns"):
        if not isinstance(turn, int) or turn not in range(num_turns):
            text = f"turn_rewards has turn {shortened(turn)}"
            raise Unusable(f"{text}; the episode has turns 0 to {num_turns - 1}")
        turn_rewards[int(turn)] = checked_number(reward, f"turn_rewards[{turn}]")
    reward = checked_number(found.reward, "reward")
    parts = checked_parts(found.parts)
    return Score(reward=reward, parts=parts, turn_rewards=turn_rewards)


def _listed(found: Any, what: str) -> Sequence[Any]:
    if isinstance(found, str | bytes) or not isinstance(found, Sequence):
        raise Unusable(f"returned {shortened(found)}; expected a list of {what}")
    return cast("Sequence[Any]", found)


def _pairs(found: Any, where: str, expected: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(found, Mapping):
        raise Unusable(f"{where} is {shortened(found)}; expected {expected}")
    return cast("Mapping[Any, Any]", found).items()
