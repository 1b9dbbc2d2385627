"""Named intermediate values, recorded on demand for a report or a comparison.

with tracing() as values:
    model(...)
values["sink_share"]  # one tensor per call, in order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_values: dict[str, list[torch.Tensor]] | None = None


def is_on() -> bool:
    """Whether values are recorded. Guards values that cost time to compute."""
    return _values is not None


def record(name: str, value: torch.Tensor) -> None:
    """Keeps a detached copy of `value` under `name`, if tracing is on."""
    if _values is not None:
        _values[name].append(value.detach().clone())


@contextmanager
def tracing() -> Iterator[dict[str, list[torch.Tensor]]]:
    """Records until the end of the block. Does not nest."""
    global _values
    if _values is not None:
        raise RuntimeError("tracing is on already; it does not nest.")
    _values = defaultdict(list)
    try:
        yield _values
    finally:
        _values = None
