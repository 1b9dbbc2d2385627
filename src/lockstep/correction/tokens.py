# torch leaves from_numpy partly untyped.
# pyright: reportUnknownMemberType=false
"""The compared tokens of some whole rows, on the host, and sums over them.

Only tokens that can be compared are gathered, so padding costs next to nothing. Sums go run by run:
neighbouring tokens of one row and one cell of the report.

# N tokens, flattened  n compared tokens  u runs  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction import kl
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import CELLS, NUM_CELLS
from lockstep.observe.parts import PARTS, Partition
from lockstep.types import FORCED_LOGPROB

Tensor = torch.Tensor
Int64Array = npt.NDArray[np.int64]

CHUNK_TOKENS = 1 << 15
"""Tokens worked on at a time, and the rest of the row that they end in. So few that temporaries
stay in the cache. 262,144 tokens of `mis` take 0.034 s with one thread and 0.058 s with two, whose
waking costs more than they save; with 1 << 14 0.05 and 0.09 s, with 1 << 17 0.04 and 0.07 s."""

_CELL_PARTS = PARTS[: len(CELLS)]
_STRIDES = {
    part.name: NUM_CELLS // int(np.prod(CELLS[: i + 1])) for i, part in enumerate(_CELL_PARTS)
}
"""Difference between the cells of neighbouring labels of a part."""
_POSITIONS = next(part for part in _CELL_PARTS if part.name == "position")


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenFacts:
    """Optional columns of the tokens that the report groups by; [N] or [B, T]."""

    advantages: Tensor | None = None
    """float32; read by rules with `only_negative_advantage`."""
    ages: Tensor | None = None
    """int: updates between the policy that sampled and the one in training."""
    turns: Tensor | None = None
    """int: the episode's turn."""
    positions: Tensor | None = None
    """int: the token's place in its row; None counts from the row's first token in the layout."""
    kinds: Tensor | None = None
    """int: index into TOKEN_KINDS."""


class Runs:
    """Sums of columns of values over runs of tokens: each column is widened to float64, summed run
    by run and dropped while it is in the cache."""

    def __init__(self, starts: Int64Array, rows: Int64Array, cells: Int64Array, old: Tensor):
        """starts: [u], first token of each run, rising from 0. rows, cells: [u], where a run's sum
        is added. old: [n], the rollout's log-probs."""
        self._starts, self._rows = starts, torch.from_numpy(rows)
        self._lengths = torch.from_numpy(np.diff(starts, append=len(old)))
        self._cells = torch.from_numpy(cells)
        self._is_unforced = torch.empty_like(old, dtype=torch.float64)
        torch.le(old, FORCED_LOGPROB, out=self._is_unforced)
        self._sums: dict[str, Tensor] = {}
        self._unforced: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> Tensor:
        """values: [n], of any dtype. Returns them in float64."""
        if values.dtype == torch.bool:  # converted several times slower than the byte it is
            values = values.view(torch.uint8)
        wide = values.double()
        self._sums[name] = torch.from_numpy(np.add.reduceat(wide.numpy(), self._starts))
        self._unforced[name] = wide.dot(self._is_unforced)
        return wide

    def add_with_square(self, name: str, values: Tensor) -> None:
        """Adds two columns: NAME, NAME2."""
        wide = self.add(name, values)
        self.add(f"{name}2", wide * wide)

    def add_above(self, name: str, values: Tensor, bound: float) -> None:
        """Counts the values above the bound."""
        wide = torch.empty_like(values, dtype=torch.float64)
        self.add(name, torch.gt(values, bound, out=wide))  # into bools takes three times as long

    def by_row(self, name: str, num_rows: int) -> Tensor:
        """[R]: the column's sum over each row."""
        zeros = torch.zeros(num_rows, dtype=torch.float64)
        return zeros.index_add_(0, self._rows, self._sums[name])

    def by_cell(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """([F, C] the columns' sums over each cell, [F] those over tokens that were not forced);
        0 for a column that was not added."""
        zero = torch.zeros(len(self._rows), dtype=torch.float64)
        sums_Fu = torch.stack([self._sums.get(name, zero) for name in names])
        fields_FC = zero.new_zeros(len(names), NUM_CELLS).index_add_(1, self._cells, sums_Fu)
        zero = zero.new_zeros(())
        return fields_FC, torch.stack([self._unforced.get(name, zero) for name in names])

    def largest_by_cell(self, values: Tensor) -> Tensor:
        """[C] float64: the largest of [n] values in each cell; -inf where there is none."""
        tops = torch.from_numpy(np.maximum.reduceat(values.numpy(), self._starts)).double()
        none = torch.full((NUM_CELLS,), float("-inf"), dtype=torch.float64)
        return none.scatter_reduce_(0, self._cells, tops, "amax")

    def spread(self, values_R: Tensor) -> Tensor:
        """[n]: at each token, the value of its row."""
        return torch.repeat_interleave(values_R[self._rows], self._lengths)


@dataclass(eq=False)
class Tokens:
    """The compared tokens of some whole rows, and values derived once from their log-probs."""

    num_all: int
    """N."""
    index: Tensor | None
    """[n] int64: their places among the N; None: all of them."""
    new: Tensor
    """[n]: the trainer's log-probs."""
    old: Tensor
    """[n]: the rollout's."""
    d: Tensor
    """[n]: new - old."""
    negative: Tensor | None
    """[n] bool: tokens of negative advantage."""
    runs: Runs
    active_R: Tensor
    """[R] float64: tokens that count, finite or not."""
    impossible_R: Tensor | None
    """[R] float64: tokens that count and have probability 0 under the trainer; None: there are
    none."""

    @classmethod
    def of(cls, columns: Mapping[str, Tensor | None], offsets: Int64Array) -> Tokens:
        """The tokens that count and are finite on both sides, of rows that begin at `offsets`.

        columns: [N] each, on the host: `new`, `old`, `mask` and the columns of `TokenFacts`.
        """
        new, old, mask = columns["new"], columns["old"], columns["mask"]
        advantages, negative = columns["advantages"], None
        assert new is not None and old is not None, "both log-probs are always given"
        num_all = len(new)
        if advantages is not None:
            negative = advantages < 0
        index = None if mask is None else _places_of(mask)
        active_R = torch.from_numpy(np.diff(offsets)).double()
        if index is not None:
            new, old = new.index_select(0, index), old.index_select(0, index)
            active_R = _count_by_row(index.numpy(), offsets)
        d, is_valid = kl.log_ratio(new, old)
        inside, impossible_R = _places_of(is_valid), None
        if inside is not None:
            places = np.flatnonzero(new.numpy() == -np.inf)
            impossible_R = _count_by_row(
                places if index is None else index.numpy()[places], offsets
            )
            index = inside if index is None else index.index_select(0, inside)
            new, old, d = (x.index_select(0, inside) for x in (new, old, d))
        if negative is not None and index is not None:
            negative = negative.index_select(0, index)
        runs = _runs_of(old, index, columns, offsets)
        return cls(num_all, index, new, old, d, negative, runs, active_R, impossible_R)

    @cached_property
    def size(self) -> Tensor:
        return self.d.abs()

    @cached_property
    def ratio(self) -> Tensor:
        return exp(self.d)

    @cached_property
    def k3(self) -> Tensor:
        return kl.k3(self.d)

    def among_all(self, values: Tensor) -> Tensor:
        """[N]: [n] values at these tokens' places, 0 elsewhere."""
        if self.index is None:
            return values
        out = values.new_zeros(self.num_all)
        out.numpy()[self.index.numpy()] = values.numpy()  # twice as fast as torch here
        return out


def chunks_of(layout: Layout) -> list[slice]:
    """Rows that are worked on at once. All rows where they are split over ranks, which decide about
    them together."""
    edges = [0, layout.num_rows]
    if layout.group is None and layout.num_tokens > CHUNK_TOKENS:
        number = layout.offsets[:-1] // CHUNK_TOKENS
        edges = [*np.flatnonzero(np.diff(number, prepend=-1)).tolist(), layout.num_rows]
    return [slice(first, stop) for first, stop in pairwise(edges)]


def _runs_of(
    old: Tensor, index: Tensor | None, columns: Mapping[str, Tensor | None], offsets: Int64Array
) -> Runs:
    """Runs of the tokens at these places among all N; None: of all of them. old: theirs."""
    ranges = _POSITIONS.starts if columns["positions"] is None else (0,)
    starts, rows, cells = _stretches(np.asarray(ranges), offsets)
    if index is not None:  # where each stretch begins among the tokens that are left
        starts = np.searchsorted(index.numpy(), starts)
    is_seen = np.diff(starts, append=len(old)) > 0
    starts, rows, cells = starts[is_seen], rows[is_seen], cells[is_seen]
    cell_n = _cells(columns, index)
    if cell_n is not None and len(old):
        begins = np.zeros(len(old), np.bool_)
        begins[starts] = True
        begins[1:] |= cell_n[1:] != cell_n[:-1]
        both = np.flatnonzero(begins)
        stretch = np.searchsorted(starts, both, side="right") - 1
        starts, rows, cells = both, rows[stretch], cells[stretch] + cell_n[both]
    return Runs(starts, rows, cells, old)


def _cells(columns: Mapping[str, Tensor | None], index: Tensor | None) -> Int64Array | None:
    """[n]: each token's cell, as far as its facts decide it; None: no fact is known."""
    cells = None
    for part in _CELL_PARTS:
        if (numbers := columns[f"{part.name}s"]) is None:
            continue
        if index is not None:
            numbers = numbers.index_select(0, index)
        table = _cell_table(part)
        cell = table.index_select(0, numbers.clamp(0, len(table) - 1))
        cells = cell if cells is None else cells + cell
    return None if cells is None else cells.numpy()


def _stretches(
    ranges: Int64Array, offsets: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(start, row, cell) of every stretch of one row and one range of positions, which begin at
    `ranges`; an empty stretch has the start of the next one."""
    starts = np.minimum(offsets[:-1, None] + ranges, offsets[1:, None])
    cells = np.broadcast_to(np.arange(len(ranges)) * _STRIDES["position"], starts.shape)
    rows = np.repeat(np.arange(len(starts)), len(ranges))
    return starts.reshape(-1), rows, cells.reshape(-1)


def _count_by_row(places: Int64Array, offsets: Int64Array) -> Tensor:
    """[R] float64: how many of these places, in order, lie in each row."""
    return torch.from_numpy(np.diff(np.searchsorted(places, offsets))).double()


@cache
def _cell_table(part: Partition) -> Tensor:
    """[number] int64: offset that each number of a part adds to a token's cell, up to the start of
    the last label."""
    with torch.inference_mode(False):  # kept for whoever comes next
        numbers = torch.arange(part.starts[-1] + 1)
        starts = torch.tensor(part.starts[1:])
        return torch.bucketize(numbers, starts, right=True) * _STRIDES[part.name]


def _places_of(flags: Tensor) -> Tensor | None:
    """[n] int64: where the flags are True; None: everywhere."""
    found = np.flatnonzero(flags.numpy())
    return None if len(found) == len(flags) else torch.from_numpy(found)


def exp(d: Tensor) -> Tensor:
    """exp(d), with d cut at +-20."""
    return d.clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT).exp()
