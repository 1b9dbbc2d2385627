"""A factor on the loss that keeps float16 gradients from underflow and overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

FIRST = 2.0**12
LARGEST = 2.0**24
GROWTH_UPDATES = 100
"""The factor doubles after this number of updates in a row without an overflow."""


@dataclass(slots=True)
class LossScale:
    """A power of two, so that scaling changes no bit of a gradient that stays in range.

    A float16 gradient below 6e-8 is 0 and one above 65504 is infinite; a factor on the loss moves
    gradients between. After an overflow it is halved and the same batch is run backward again, so
    no sample is lost (other trainers skip such an update).
    Source: Micikevicius et al. 2018, section 3.2; dynamic as in torch.amp.GradScaler.
    """

    value: float
    is_dynamic: bool
    num_good: int = 0
    """Updates since the last change of the factor."""
    num_overflows: int = 0
    """Backward passes repeated since the last `to_metrics`."""

    @classmethod
    def for_training(cls, dtype: torch.dtype) -> LossScale:
        """A dynamic factor for float16, and 1 for the dtypes that need none."""
        is_needed = dtype == torch.float16
        return cls(FIRST if is_needed else 1.0, is_dynamic=is_needed)

    def lower(self) -> bool:
        """Halves the factor after an overflow. Returns False if there is no smaller one to try."""
        if not self.is_dynamic or self.value <= 1.0:
            return False
        self.value /= 2
        self.num_good, self.num_overflows = 0, self.num_overflows + 1
        return True

    def made_update(self) -> None:
        """Notes an update whose gradient was finite; doubles the factor after many."""
        self.num_good += 1
        if self.is_dynamic and self.num_good >= GROWTH_UPDATES and self.value < LARGEST:
            self.value, self.num_good = self.value * 2, 0

    def to_metrics(self, role: str) -> dict[str, float]:
        """Figures of one update; none where nothing is scaled."""
        if not self.is_dynamic and self.value == 1.0:
            return {}
        count, self.num_overflows = self.num_overflows, 0
        return {f"{role}/loss_scale": self.value, f"{role}/overflows": float(count)}

    def state(self) -> dict[str, float]:
        """JSON-able state for a checkpoint."""
        return {"loss_scale": self.value, "loss_scale_good_updates": self.num_good}

    def load(self, state: Mapping[str, float]) -> None:
        """Restores `state` of a dynamic factor; a fixed one stays."""
        if self.is_dynamic:
            self.value = state.get("loss_scale", self.value)
            self.num_good = int(state.get("loss_scale_good_updates", 0))
