"""How old the tokens of a batch are when it is trained, and what becomes of those that are too old.

The age of a token is counted in updates: the version in training minus the one that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lockstep.types import Sample

OverStale = Literal["correct", "drop"]
"""What becomes of a row with a token over the limit: trained like any other, by the correction, or
left out."""


def sort_by_age(
    rows: Sequence[Sample], *, version: int, limit: int, over_stale: OverStale
) -> tuple[list[Sample], dict[str, float]]:
    """The rows that are trained, and `staleness/...` of all of them.

    version: the one in training. limit: the largest age of a trained token that is not over-stale,
    in updates. A row that is left out has had its part in the baseline of its group.
    """
    ages = [version - row.columns["policy_version"][row.loss_mask] for row in rows]
    if not any(len(of_row) for of_row in ages):
        return list(rows), {}
    is_over = [bool(len(of_row)) and int(of_row.max()) > limit for of_row in ages]
    every = np.concatenate(ages)
    kept = list(rows)
    if over_stale == "drop":
        kept = [row for row, over in zip(rows, is_over, strict=True) if not over]
    mixed = sum(len(np.unique(of_row)) > 1 for of_row in ages)
    return kept, {
        "staleness/version": float(version),
        "staleness/mean": float(every.mean()),
        "staleness/max": float(every.max()),
        "staleness/mixed_rows": float(mixed),
        "staleness/over_rows": float(sum(is_over)),
        "staleness/dropped_rows": float(len(rows) - len(kept)),
    }
