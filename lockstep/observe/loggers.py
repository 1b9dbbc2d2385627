"""Copies of the metrics rows for other trackers: tensorboard, wandb, trackio.

The run directory's `metrics.jsonl` is the record, so a tracker that fails is reported once and
never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import MissingExtraError


class Loggers:
    """The trackers of `record.loggers` for one run; each gets every row.

    Raises MissingExtraError if a package is not installed, before anything is trained. A service
    that cannot be reached is reported through `warn`, and its tracker gets no rows.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        run_path: Path,
        project: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._loggers: dict[str, Any] = {}
        self._failed: set[str] = set()
        for name in names:
            if find_spec(name) is None:
                raise MissingExtraError.of(name, extra=name, needed_for="record.loggers")
            module = import_module("tensorboard.summary" if name == "tensorboard" else name)

            def open_logger(name: str = name, module: Any = module) -> None:
                self._loggers[name] = _open(name, module, run_path, project, dict(config))

            self._guard(name, open_logger)

    def log(self, row: Mapping[str, Any]) -> None:
        """row: `step`, and numbers by metric name."""
        numbers = {name: value for name, value in row.items() if name != "step"}
        for name, logger in self._loggers.items():
            self._guard(name, lambda logger=logger: logger.log(numbers, step=row["step"]))

    def close(self) -> None:
        for name, logger in self._loggers.items():
            self._guard(name, logger.finish)

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's service may fail in any way; the run must not
            if name not in self._failed:
                self._failed.add(name)
                self._warn(
                    f"the {name} logger failed: {type(error).__name__}: {error}. The run goes on "
                    "and metrics.jsonl has every row; further failures are not shown."
                )


class _Tensorboard:
    """Event files in RUN/tensorboard, with the methods of the other trackers' runs."""

    def __init__(self, module: Any, run_path: Path) -> None:
        # tensorboard's own writer: torch.utils.tensorboard would import torch here.
        self._writer = module.Writer(str(run_path / "tensorboard"))

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _open(name: str, module: Any, run_path: Path, project: str, config: dict[str, Any]) -> Any:
    """The tracker's run. WANDB_MODE=offline keeps wandb local, and trackio is local unless told
    otherwise."""
    if name == "tensorboard":
        return _Tensorboard(module, run_path)
    # wandb's id makes a resumed run continue its curves.
    own = {"id": run_path.name, "dir": str(run_path)} if name == "wandb" else {}
    return module.init(project=project, name=run_path.name, resume="allow", config=config, **own)
