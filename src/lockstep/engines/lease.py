"""The label that a run writes beside a server's weights, so that two trainers never share one.

Two trainers that load weights into one server would each train on what the other's policy has
sampled, and no log-prob would show it. A run therefore writes `lockstep/RUN/PROCESS/VERSION` to the
server with every load, refuses a server that has another run's label, and stops when its own label
is gone.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field

from lockstep.errors import EngineDownError, LeaseError

_PREFIX = "lockstep"
FREE = f"{_PREFIX}-free"
"""Label after the end of a run: anybody may use the server, which keeps its last weights."""


@dataclass(slots=True)
class Lease:
    """One run's claim to one server.

    >>> lease = Lease("docs", server="http://10.0.0.1:8000", process="3f")
    >>> lease.label(7)
    'lockstep/docs/3f/7'
    >>> lease.claim("lockstep/other/77/12")                 # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    lockstep.errors.LeaseError: ... is in use by the run 'other' ...
    """

    run: str
    server: str
    """Address of the server, for messages."""
    take_over: bool = False
    process: str = field(default_factory=lambda: secrets.token_hex(4))
    """Distinguishes this process from an earlier one of the same run."""

    held: int | None = None
    """Version of the weights that this process has loaded into the server."""
    violation: LeaseError | None = None
    """The first proof that another run used the server."""

    @property
    def is_ours(self) -> bool:
        return self.held is not None and self.violation is None

    def claim(self, found: str) -> None:
        """Raises LeaseError if the label is another run's, before a load replaces its weights.

        The label of an earlier process of this run is taken over: the run is resumed.
        """
        holder = _holder(found)
        if self.held is not None:
            with contextlib.suppress(EngineDownError):  # a restarted server gets its weights now
                self.check_held(found)
        elif holder is not None and holder[0] != self.run and not self.take_over:
            raise LeaseError(
                f"engine at {self.server} is in use by the run {holder[0]!r}, which has loaded "
                f"version {holder[2]}; this one is {self.run!r}. Two trainers on one engine would "
                "each train on the other's policy. Give each an engine of its own. If that run has "
                "crashed, or should stop, set engine.take_over=true."
            )

    def take(self, version: int) -> str:
        """The label to write after a load."""
        self.held = version
        return self.label(version)

    def label(self, version: int) -> str:
        """The label for the weights of this version."""
        return f"{_PREFIX}/{self.run}/{self.process}/{version}"

    def check_held(self, found: str) -> None:
        """Raises LeaseError unless this process's last load set the label, and EngineDownError if
        there is no label: the server was restarted with its first weights."""
        if self.held is None or found == self.label(self.held):
            return
        if (holder := _holder(found)) is None:
            raise EngineDownError(
                f"engine at {self.server} has the label {found!r} in place of version {self.held}: "
                "it was started again, or its weights were loaded by something else"
            )
        by = f"the run {holder[0]!r}" if holder[0] != self.run else "another process of this run"
        if holder[:2] == (self.run, self.process):
            by = "this process, at another time"
        self.violation = LeaseError(
            f"engine at {self.server} has weights of version {holder[2]}, loaded by {by}, in place "
            f"of version {self.held} of {self.run!r}. What it has sampled since is not trained on. "
            "Stop the other one, and resume this run."
        )
        raise self.violation


def _holder(label: str) -> tuple[str, str, str] | None:
    """(run, process, version) of one of our labels; None for any other text."""
    prefix, _, rest = label.partition("/")
    parts = rest.rsplit("/", 2)
    return (parts[0], parts[1], parts[2]) if prefix == _PREFIX and len(parts) == 3 else None
