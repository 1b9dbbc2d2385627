"""Chooses the rows to show, the worst and a fair sample, while a dump is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import nlargest
from random import Random

import numpy as np

from lockstep.doctor.inputs.base import Dump
from lockstep.doctor.rows import Rows

MAX_ROWS = 200
"""Rows of each sort that a page can show, whatever the size of the dump."""


@dataclass(kw_only=True)
class RowChoice:
    """Numbers of rows, counted from the first of the dump."""

    worst: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(largest |d|, number) of the rows with the largest gaps."""
    num_rows: int = 0

    def add(self, rows: Rows) -> None:
        """Takes the next chunk into account."""
        numbers = range(self.num_rows, self.num_rows + len(rows))
        self.num_rows += len(rows)
        largest = np.full(len(rows), -1.0)  # of a row without a compared token
        np.maximum.at(largest, rows.row_of[rows.compared], np.abs(rows.gap[rows.compared]))
        worst = zip(largest.tolist(), numbers, strict=True)
        self.worst = nlargest(MAX_ROWS, [*self.worst, *worst])

    @property
    def numbers(self) -> list[tuple[int, str]]:
        """(number, "worst mismatch" or "sample"), the worst first, then the sample in order."""
        worst = [n for size, n in self.worst if size > 0]
        drawn = Random(0).sample(range(self.num_rows), min(self.num_rows, MAX_ROWS))
        sampled = sorted(set(drawn) - set(worst))
        return [(n, "worst mismatch") for n in worst] + [(n, "sample") for n in sampled]


def fetch(
    dump: Dump, *, numbers: Collection[int] = (), names: Collection[str] = ()
) -> dict[int, Rows]:
    """Number -> row, each alone: the rows with these numbers, and the first of each name."""
    wanted, called = set(numbers), set(names)
    out: dict[int, Rows] = {}
    first = 0
    for rows in dump.chunks() if wanted or called else ():
        for i, name in enumerate(rows.row_ids):
            if first + i in wanted or name in called:
                out[first + i] = rows.take([i])
                called.discard(name)
        first += len(rows)
        if wanted <= out.keys() and not called:
            break
    return out
