"""Undoes the changes that foreign code makes to the state of the whole process.

An environment that turns gradients off, changes the working directory or raises on warnings would
do so for the trainer and for all other episodes. Each pause and each end of its code undoes its
changes. When that code continues after a pause, its own values are restored.
"""

from __future__ import annotations

import _signal  # pyright: ignore
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import numpy as np

Part = tuple[Callable[[], Any], Callable[[Any], object]]
"""(reads a part of the state, writes it)."""
Values = Mapping[str, Any]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _set_warnings(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # pyright: ignore
    getattr(warnings, "_filters_mutated", lambda: None)()  # their cache


_OF_RUN: dict[str, Part] = {
    "cwd": (_working_directory, lambda path: path and os.chdir(path)),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "switching": (sys.getswitchinterval, sys.setswitchinterval),
    "stdout": (lambda: sys.stdout, lambda stream: setattr(sys, "stdout", stream)),
    "stderr": (lambda: sys.stderr, lambda stream: setattr(sys, "stderr", stream)),
    "locale": (lambda: locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    "timeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "logging": (lambda: logging.root.manager.disable, logging.disable),
    "log level": (lambda: logging.root.level, logging.root.setLevel),
    "collector": (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
}
"""Parts that Lockstep itself leaves alone during a run."""
_OF_PYTHON: dict[str, Part] = {
    "warnings": (lambda: list(warnings.filters), _set_warnings),
    "numpy errors": (np.geterr, lambda found: np.seterr(**found)),
}
_DRAWS: dict[str, Part] = {
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
}
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_handler_of = _signal.getsignal
"""`signal.getsignal` looks each handler up in an enum, which prints the task that it belongs to."""


@cache
def _of_torch() -> dict[str, Part]:
    import torch

    cudnn, held, cpu = torch.backends.cudnn, list[Any](), torch.device("cpu")

    def set_inference(is_on: bool) -> None:
        has_gradients = torch.is_grad_enabled()
        # Left open, and alive: its end would restore the mode before it.
        held.append(torch.inference_mode(is_on))
        held[-1].__enter__()
        torch.set_grad_enabled(has_gradients)

    def set_draws(state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return {
        "inference": (torch.is_inference_mode_enabled, set_inference),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "device": (
            # A default device is on this stack, and to look it up takes long.
            lambda: torch.get_default_device() if torch._C._len_torch_function_stack() else cpu,
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "determinism": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "autocast": (
            lambda: torch.is_autocast_enabled("cpu"),
            lambda is_on: torch.set_autocast_enabled("cpu", is_on),
        ),
        "cudnn": (
            lambda: (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
            lambda flags: cudnn.set_flags(flags[0], None, *flags[1:]),
        ),
        "torch draws": (lambda: torch.get_rng_state().numpy().tobytes(), set_draws),
    }


AT_START: ContextVar[Values | None] = ContextVar("at_start", default=None)
"""The process's state at the start of the run."""


def state_at_start() -> Values:
    """Returns the process's state at the start of a run, for `AT_START`."""
    handlers = [_handler_of(number) for number in _SIGNALS]
    return {**_read(_OF_RUN), "environ": _variables(), "path": sys.path[:], "signals": handlers}


def _variables() -> dict[bytes, bytes]:
    """The environment's variables, encoded as `os.environ` holds them: to decode all takes long."""
    return dict(os.environ._data)  # pyright: ignore


def put_back(values: Values | None) -> None:
    """Puts back what differs from the start of a run; None outside of one."""
    if values is not None:
        _write_changed(_OF_RUN, {name: values[name] for name in _OF_RUN})
        _put_back_shared(values)


def _put_back_shared(values: Values) -> None:
    """Variables, folders to import from, and handlers of signals, which stay while a hook pauses.
    Variables and folders that were added since the start stay: modules add them as they are
    imported."""
    for name, value in values["environ"].items() - _variables().items():
        os.environ[os.fsdecode(name)] = os.fsdecode(value)
    if missing := [folder for folder in values["path"] if folder not in sys.path]:
        sys.path[:0] = missing
    if threading.current_thread() is threading.main_thread():
        for number, handler in zip(_SIGNALS, values["signals"], strict=True):
            if handler is not None and _handler_of(number) != handler:
                signal.signal(number, handler)


class Visit:
    """Process state of one hook of foreign code: call `enter` before each of its steps, `leave`
    after it, then `keep_draws` if it pauses, or `end` if it is over."""

    def __init__(self, seed: Callable[[], object] | None, *, is_within: bool) -> None:
        """seed: seeds the generators of Python, numpy and torch, which are then the hook's own.
        is_within: another visit of the same task keeps the state."""
        self.at_start = None if is_within else AT_START.get()
        self._parts: dict[str, Part] = {}
        if not is_within:
            self._parts = {**_OF_RUN, **_OF_PYTHON}
            if "torch" in sys.modules:
                self._parts |= _of_torch()
                if seed is None:
                    del self._parts["torch draws"]
        self._inside: dict[str, Any] = {}
        self._outside: dict[str, Any] = {}
        self._seed = seed
        self._draws: Values = {}

    def enter(self) -> None:
        outside = {} if self.at_start is None else {name: self.at_start[name] for name in _OF_RUN}
        unknown = {name: part for name, part in self._parts.items() if name not in outside}
        self._outside = outside | _read(unknown)
        _write_changed(self._parts, self._inside)
        for name, state in self._draws.items():
            _DRAWS[name][1](state)
        if self._seed is not None and not self._draws:
            self._seed()

    def leave(self) -> None:
        self._inside = _write_changed(self._parts, self._outside)

    def keep_draws(self) -> None:
        """Call it after `leave` if the hook goes on later, before other code draws."""
        if self._seed is not None:
            self._draws = _read(_DRAWS)

    def end(self) -> None:
        if self.at_start is not None:
            _put_back_shared(self.at_start)


def _read(parts: Mapping[str, Part]) -> dict[str, Any]:
    return {name: read() for name, (read, _) in parts.items()}


def _write_changed(parts: Mapping[str, Part], values: Values) -> dict[str, Any]:
    """Writes the values that differ. Returns the old values by name."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if (found := parts[name][0]()) != value:
            changed[name] = found
    for name in changed:
        with suppress(OSError):  # the working directory of before is gone
            parts[name][1](values[name])
    return changed
