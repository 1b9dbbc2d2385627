"""The size of injected noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GrowingNoise:
    """Size of the noise of a computation. Its standard deviation is

        std + growth * max(version - growth_from, 0)

    which depends on the policy version only, so that a resumed run has the same noise. Draws are a
    hash of `seed`, the version and the inputs: a run repeats bitwise, while another batch, or the
    same tokens scored again, have other noise.
    """

    std: float
    """Standard deviation, in logits."""
    growth: float = 0.0
    """Added to `std` with each policy version."""
    growth_from: int = 0
    """The policy version from which on it grows: that of the checkpoint, for a run forked late."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        for name in ("std", "growth"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be a finite number of at least 0.")
        if self.growth_from < 0:
            raise ConfigError(f"growth_from={self.growth_from} must be at least 0.")

    def std_at(self, version: int) -> float:
        """The standard deviation under this policy version."""
        return self.std + self.growth * max(version - self.growth_from, 0)
