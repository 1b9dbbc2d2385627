"""Where metrics go besides the run directory: tensorboard, wandb, trackio.

The run directory's `metrics.jsonl` is the record. These are copies, so a sink that breaks is
reported once, counted, and never stops a run.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from lockstep.errors import ConfigError, MissingExtraError


class Logger(Protocol):
    """A sink of metrics rows."""

    def log(self, row: Mapping[str, Any]) -> None:
        """`row`: `step` and numbers by metric name."""
        ...

    def close(self) -> None: ...


class GuardedLoggers:
    """Hands each row to every sink; one that raises is reported once and counted.

    warn: gets the one line about a sink that failed.
    """

    def __init__(self, sinks: Mapping[str, Logger], *, warn: Callable[[str], None]) -> None:
        self._sinks = dict(sinks)
        self._warn = warn
        self._failures: Counter[str] = Counter()

    @property
    def num_failed_rows(self) -> int:
        """Rows lost so far, over all sinks; the metric sinks/failed_rows."""
        return self._failures.total()

    def log(self, row: Mapping[str, Any]) -> None:
        for name, sink in self._sinks.items():
            self._guard(name, lambda sink=sink: sink.log(row))

    def close(self) -> None:
        for name, sink in self._sinks.items():
            self._guard(name, sink.close)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's service may fail in any way; the run must not
            self._failures[name] += 1
            if self._failures[name] == 1:
                self._warn(
                    f"the {name} logger failed: {type(error).__name__}: {error}. The run goes on "
                    "and metrics.jsonl has every row; further failures are counted, not shown."
                )


def open_loggers(
    names: Sequence[str],
    *,
    run_path: Path,
    project: str,
    config: Mapping[str, Any],
    warn: Callable[[str], None],
) -> GuardedLoggers:
    """Opens the sinks of `record.loggers` for one run.

    Raises MissingExtraError if a package is not installed: that is found before anything is
    trained. A service that cannot be reached is reported through `warn`, and its sink is left out.
    """
    sinks: dict[str, Logger] = {}
    for name in names:
        if name not in _SINKS:
            raise ConfigError(f"unknown logger {name!r}; known are {', '.join(_SINKS)}.")
        try:
            sinks[name] = _SINKS[name](run_path, project, config)
        except MissingExtraError:
            raise
        except Exception as error:  # see GuardedLoggers
            warn(
                f"the {name} logger could not start: {type(error).__name__}: {error}. The run goes "
                "on without it; metrics.jsonl has every row."
            )
    return GuardedLoggers(sinks, warn=warn)


class TensorboardLogger:
    """Event files in RUN/tensorboard."""

    def __init__(self, run_path: Path, project: str, config: Mapping[str, Any]) -> None:
        # tensorboard's own writer: torch.utils.tensorboard would import torch here.
        writer = _import("tensorboard.summary", extra="tensorboard", needed_for="record.loggers")
        self._writer = writer.Writer(str(run_path / "tensorboard"))

    def log(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, named as the run directory. WANDB_MODE=offline keeps it local."""

    def __init__(self, run_path: Path, project: str, config: Mapping[str, Any]) -> None:
        wandb = _import("wandb", extra="wandb", needed_for="record.loggers")
        # The id makes a resumed run continue its curves.
        self._run = wandb.init(
            project=project,
            name=run_path.name,
            id=run_path.name,
            resume="allow",
            dir=str(run_path),
            config=dict(config),
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    """A run of trackio, which keeps its data on this machine unless told otherwise."""

    def __init__(self, run_path: Path, project: str, config: Mapping[str, Any]) -> None:
        trackio = _import("trackio", extra="trackio", needed_for="record.loggers")
        self._run = trackio.init(
            project=project, name=run_path.name, resume="allow", config=dict(config)
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step"}


def _import(module: str, *, extra: str, needed_for: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there and lacks one of its own is another problem, and says so itself.
        if error.name is not None and error.name.partition(".")[0] != extra:
            raise
        raise MissingExtraError.of(extra, extra=extra, needed_for=needed_for) from error
