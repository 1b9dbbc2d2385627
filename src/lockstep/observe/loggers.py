"""Copies of the metrics rows for other trackers: tensorboard, wandb, trackio, prometheus.

The run directory's `metrics.jsonl` is the record, so a tracker that fails or blocks is reported
once and never stops a run.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import MissingExtraError, named

if TYPE_CHECKING:
    from lockstep.store.config import RecordConfig

CLOSE_SECONDS = 30.0
"""Seconds at the end of a run for the rows that a tracker has not taken yet."""
MODULES = {"tensorboard": "tensorboard.plugins.text.summary_v2", "prometheus": "prometheus_client"}
"""Logger -> its module, where that has another name."""


def check_loggers(names: Sequence[str]) -> None:
    """Raises MissingExtraError for a tracker whose package is not installed."""
    for name in names:
        if find_spec(MODULES.get(name, name).partition(".")[0]) is None:
            raise MissingExtraError.of(name, extra=name, needed_for="record.loggers")


class Loggers:
    """The trackers of `record.loggers` for one run; each gets every row, in a thread of its own.

    Raises MissingExtraError if a package is not installed, before anything is trained. A service
    that cannot be reached, or does not answer, is reported once through `warn`.
    """

    def __init__(
        self,
        record: RecordConfig,
        *,
        run_path: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._trackers: list[_Tracker] = []
        check_loggers(record.loggers)
        for name in record.loggers:
            module = import_module(MODULES.get(name, name))
            make = partial(_open, name, module, record, run_path, dict(config))
            self._trackers.append(_Tracker(name, make, warn))

    def log(self, row: Mapping[str, Any]) -> None:
        """row: `step`, and numbers by metric name; `health/line` is a text."""
        values = {name: value for name, value in row.items() if name != "step"}
        for tracker in self._trackers:
            tracker.rows.put((values, row["step"]))

    def close(self) -> None:
        """Waits CLOSE_SECONDS for the rows that are not written yet."""
        for tracker in self._trackers:
            tracker.rows.put(None)
        ends = time.monotonic() + CLOSE_SECONDS
        for tracker in self._trackers:
            tracker.thread.join(max(0.0, ends - time.monotonic()))
            if tracker.thread.is_alive():
                self._warn(
                    f"the {tracker.name} logger did not end within {CLOSE_SECONDS:g} s and is "
                    f"given up with {tracker.rows.qsize()} rows; metrics.jsonl has every row."
                )


class _Tracker:
    """One tracker in a daemon thread: it may fail, block or exit, and the run goes on."""

    def __init__(self, name: str, make: Callable[[], Any], warn: Callable[[str], None]) -> None:
        self.name, self._make, self._warn = name, make, warn
        self.rows: queue.SimpleQueue[tuple[Mapping[str, Any], int] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        tracker = self._done(self._make)
        while (row := self.rows.get()) is not None:
            if tracker is not None:
                self._done(partial(tracker.log, row[0], step=row[1]))
        if tracker is not None:
            self._done(tracker.finish)

    def _done(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:
            self._warn(
                f"the {self.name} logger failed: {named(error)}. The run goes on and metrics.jsonl "
                "has every row; further failures are not shown."
            )
            self._warn = lambda text: None


class _Tensorboard:
    """Event files in RUN/tensorboard, with the methods of the other trackers' runs."""

    def __init__(self, module: Any, run_path: Path) -> None:
        # tensorboard's own writer: torch.utils.tensorboard would import torch here.
        found = partial(import_module, package="tensorboard")
        self._event = found(".compat.proto.event_pb2").Event
        self._scalar = found(".plugins.scalar.summary_v2").scalar_pb
        self._text = module.text_pb
        writer = found(".summary.writer.event_file_writer").EventFileWriter
        self._writer = writer(str(run_path / "tensorboard"))

    def log(self, values: Mapping[str, float | str], *, step: int) -> None:
        for name, value in values.items():
            summary = (self._text if isinstance(value, str) else self._scalar)(name, value)
            self._writer.add_event(self._event(summary=summary, step=step, wall_time=time.time()))
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def metric_name(name: str) -> str:
    """The name of a metric in Prometheus.

    >>> metric_name("eval/sampled/mean@4")
    'lockstep_eval_sampled_mean_4'
    """
    return "lockstep_" + re.sub(r"\W", "_", name)


class _Prometheus:
    """Serves the latest value of each metric as a gauge with the label `run`; a text is one too."""

    def __init__(self, module: Any, address: str, run: str) -> None:
        self._gauge, self._run = module.metrics_core.GaugeMetricFamily, run
        self._latest: Mapping[str, float | str] = {}
        registry = module.CollectorRegistry()
        registry.register(self)
        host, _, port = address.rpartition(":")
        self._server, self._thread = module.start_http_server(int(port), host, registry)

    def log(self, values: Mapping[str, float | str], *, step: int) -> None:
        # A trigger of health that no longer holds is in no row.
        kept = {name: old for name, old in self._latest.items() if not name.startswith("health/")}
        self._latest = {**kept, **values, "step": step}

    def collect(self) -> Iterator[Any]:
        """Called by the server, in a thread of its own."""
        for name, value in self._latest.items():
            labels = {"run": self._run} | ({"text": value} if isinstance(value, str) else {})
            gauge = self._gauge(metric_name(name), f"{name} of the latest step", labels=[*labels])
            gauge.add_metric([*labels.values()], 1 if "text" in labels else value)
            yield gauge

    def finish(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _open(
    name: str, module: Any, record: RecordConfig, run_path: Path, config: dict[str, Any]
) -> Any:
    """The tracker's run. WANDB_MODE=offline keeps wandb local, and trackio is local unless told
    otherwise."""
    if name == "tensorboard":
        return _Tensorboard(module, run_path)
    if name == "prometheus":
        return _Prometheus(module, record.prometheus, run_path.name)
    # wandb's id makes a resumed run continue its curves.
    own = {"id": run_path.name, "dir": str(run_path)} if name == "wandb" else {}
    settings: Any = {"project": record.project, "name": run_path.name, "config": config}
    return module.init(**settings, **own, resume="allow")
