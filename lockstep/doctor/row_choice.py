"""Rows to look at: the worst and a fair sample, chosen while a dump is read, and read again."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.inputs.base import Dump

MAX_WORST = 200
MAX_SAMPLED = 200
"""Rows that a page can show of each sort; choosing them takes this much memory, whatever the
dump's size."""


@dataclass(kw_only=True)
class RowChoice:
    """Numbers of rows, counted from the first of the dump."""

    seed: int = 0
    worst: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(largest |d|, number), of at most MAX_WORST rows; a heap, the smallest first."""
    sample: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(a draw's negative, number): those with the smallest draws are a sample of all."""
    num_rows: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def add(self, rows: Rows) -> None:
        """Takes in the next chunk."""
        first, draws = self.num_rows, self._random.random(len(rows))
        self.num_rows += len(rows)
        _keep(self.worst, largest_gaps(rows), first, MAX_WORST)
        _keep(self.sample, -draws, first, MAX_SAMPLED)

    @property
    def numbers(self) -> list[tuple[int, str]]:
        """(number, "worst mismatch" or "sample"), the worst first, then the sample in order."""
        worst = [n for size, n in sorted(self.worst, reverse=True) if size > 0]
        sampled = sorted({n for _, n in self.sample} - set(worst))
        return [(n, "worst mismatch") for n in worst] + [(n, "sample") for n in sampled]


def largest_gaps(rows: Rows) -> Float64Array:
    """[R] the largest |d| of each row; -1 of a row of which nothing was compared."""
    if not len(rows):
        return np.empty(0)
    out = np.full(len(rows), -1.0)
    at = np.flatnonzero(~np.isnan(rows.gap))
    np.maximum.at(out, rows.row_of[at], np.abs(rows.gap[at]))
    return out


def _keep(heap: list[tuple[float, int]], values: Float64Array, first: int, limit: int) -> None:
    """Puts the largest of `values` into the heap of the largest so far."""
    top = np.argpartition(values, -limit)[-limit:] if len(values) > limit else range(len(values))
    for i in np.asarray(top, np.int64).tolist():
        if len(heap) < limit:
            heapq.heappush(heap, (float(values[i]), first + i))
        elif values[i] > heap[0][0]:
            heapq.heapreplace(heap, (float(values[i]), first + i))


def fetch(
    dump: Dump, *, numbers: Collection[int] = (), names: Collection[str] = ()
) -> dict[int, Rows]:
    """Rows by their number, each by itself; those called `names` too. Reads until it has all.

    Where several rows have one name, the first is taken.
    """
    wanted, called = set(numbers), set(names)
    out: dict[int, Rows] = {}
    first = 0
    if not wanted and not called:
        return out
    for rows in dump.read():
        here = {n - first for n in wanted if first <= n < first + len(rows)}
        if called:
            for i, name in enumerate(rows.row_ids):
                if name in called:
                    here.add(i)
                    called.discard(name)
        for i in sorted(here):
            out[first + i] = rows.take([i])
        wanted -= set(out)
        first += len(rows)
        if not wanted and not called:
            break
    return out
