"""Rows that a trainer takes, for the benchmarks that train without episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.types import COLUMNS, Sample


def row_to_train(name: str, token_ids: np.ndarray, mask: np.ndarray, **columns: Any) -> Sample:
    """A row that trains the tokens of its mask. columns: one value for all of them, or one each."""
    filled: dict[str, np.ndarray] = {}
    for column, values in columns.items():
        filled[column] = np.full(len(mask), COLUMNS[column].fill, np.float32)
        filled[column][mask] = values
    return Sample(id=name, token_ids=token_ids.astype(np.int32), loss_mask=mask, columns=filled)
