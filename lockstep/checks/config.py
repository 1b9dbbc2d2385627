"""Settings of the checks that a training run makes of its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What a run looks for in the rows that it trains, and what it does about what it finds."""

    rows: int = 16
    """Rows of each step that are looked at, whole groups of other tasks in turn: by the checks of
    `lockstep doctor` that need no model; 0 looks at none. It costs milliseconds."""
    on_critical: Literal["note", "stop"] = "note"
    """stop: end the run, with a checkpoint, at the first step in which a cause is found, or whose
    max(|k1|, k2, k3) is above 0.1. note: say so, and go on."""

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ConfigError(f"doctor.rows={self.rows} must be at least 0 (0 looks at none).")
