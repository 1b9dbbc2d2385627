"""How a run ended, for the command line and for callers from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["done", "interrupted", "stopped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    path: Path
    """The run directory."""
    status: Status
    """done; interrupted: resume=true goes on; stopped: by an alarm that was asked to."""
    summary: dict[str, Any]
    """Last figures: steps, reward, evaluation."""
