"""Settings of the record: which trajectories are kept, and which trackers get the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config import Checked, Interval, at_least, require
from lockstep.errors import ConfigError

Logger = Literal["tensorboard", "wandb", "trackio", "prometheus"]
"""A metric sink beside the run directory's own `metrics.jsonl`; each is an extra of the package."""


@dataclass(frozen=True, kw_only=True)
class AllConfig:
    """Every trajectory of every step is kept."""


@dataclass(frozen=True, kw_only=True)
class LastConfig(Checked):
    """Only the most recent steps keep their trajectories."""

    steps: Annotated[int, at_least(1)] = 20
    """Number of steps whose trajectories are kept; older parts are deleted during the run."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Checked):
    """A share of the groups of each step is kept, chosen by the task's id: a rerun keeps the same.

    A group is kept whole or not at all, so that its baseline can be computed from the record.
    """

    fraction: Annotated[float, Interval("(0, 1]")] = 0.1
    """Share of the groups to keep, above 0 and at most 1."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Checked):
    """Settings of a run's record."""

    keep: AllConfig | LastConfig | SampleConfig = field(default_factory=AllConfig)
    """Trajectories to keep: all, the last steps', or a sample of the groups."""
    loggers: tuple[Logger, ...] = ()
    """Trackers that get the metrics besides metrics.jsonl: tensorboard, wandb, trackio,
    prometheus."""
    project: str = "lockstep"
    """Project name shown by wandb and trackio."""
    prometheus: str = "127.0.0.1:9464"
    """HOST:PORT at which the prometheus logger serves the latest row, under /metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.loggers)) != len(self.loggers):
            raise ConfigError(f"record.loggers={self.loggers} names a logger twice.")
        host, _, port = self.prometheus.rpartition(":")
        is_address = bool(host) and port.isdecimal() and 0 < int(port) < 65536
        require(self, prometheus=(is_address, "HOST:PORT, such as 0.0.0.0:9464"))
