# torch leaves from_numpy partly untyped.
# pyright: reportUnknownMemberType=false
"""The compared tokens of a batch, a chunk at a time, on the host, and sums over them.

Only tokens that can be compared are gathered, so padding costs next to nothing. Sums go run by run:
neighbouring tokens of one row and one cell of the report.

# N tokens, flattened  n compared tokens of a chunk  u runs  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction import kl
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import CELLS, NUM_CELLS
from lockstep.observe.parts import PARTS, Part
from lockstep.types import FORCED_LOGPROB

Tensor = torch.Tensor
Int64Array = npt.NDArray[np.int64]

CHUNK_TOKENS = 1 << 17
"""Tokens worked on at a time: few enough that temporaries are small beside a batch and stay near
the cache."""

_CELL_PARTS = PARTS[: len(CELLS)]
_STRIDES = {
    part.name: NUM_CELLS // int(np.prod(CELLS[: i + 1])) for i, part in enumerate(_CELL_PARTS)
}
"""Difference between the cells of neighbouring labels of a part."""
_POSITIONS = next(part for part in _CELL_PARTS if part.name == "position")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenFacts:
    """Optional columns of the tokens, by which the report tells them apart; [N] or [B, T]."""

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

    def columns(self) -> dict[str, Tensor | None]:
        """The columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A run of flattened tokens, and the rows that it touches."""

    at: slice
    """Tokens of the chunk among the N."""
    rows: slice
    edges: Int64Array
    """[rows + 1]: where in the chunk each row begins, and where the last one ends."""

    def expand(self, values_R: Tensor) -> Tensor:
        """[R] of all rows -> one value per token of this chunk."""
        lengths = torch.from_numpy(np.diff(self.edges))
        return torch.repeat_interleave(values_R[self.rows], lengths)

    def count_by_row(self, places: Int64Array) -> Tensor:
        """[rows] float64: how many of these places of the chunk, in order, lie in each row."""
        return torch.from_numpy(np.diff(np.searchsorted(places, self.edges))).double()


class Sums:
    """Sums of columns of values over some tokens: each column is widened to float64, summed run by
    run and dropped while it is in the cache."""

    def __init__(self, starts: Int64Array, rows: Int64Array, cells: Int64Array, old: Tensor):
        """starts: [u], first token of each run, rising from 0. rows, cells: [u], where a run's sum
        is added. old: [n], the rollout's log-probs."""
        self._starts, self._rows = starts, torch.from_numpy(rows)
        self._cells = torch.from_numpy(cells)
        self._is_unforced = torch.empty_like(old, dtype=torch.float64)
        torch.le(old, FORCED_LOGPROB, out=self._is_unforced)
        self._sums: dict[str, Tensor] = {}
        self._unforced: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        return list(self._sums)

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

    def add_to_rows(self, names: Sequence[str], sums_FR: Tensor) -> None:
        sums_FR.index_add_(1, self._rows, torch.stack([self._sums[name] for name in names]))

    def add_to_cells(self, names: Sequence[str], fields_FC: Tensor, unforced_F: Tensor) -> None:
        fields_FC.index_add_(1, self._cells, torch.stack([self._sums[name] for name in names]))
        unforced_F += torch.stack([self._unforced[name] for name in names])

    def raise_cells(self, values: Tensor, maxima_C: Tensor) -> None:
        tops = torch.from_numpy(np.maximum.reduceat(values.numpy(), self._starts))
        maxima_C.scatter_reduce_(0, self._cells, tops.to(maxima_C.dtype), "amax")


@dataclass(eq=False)
class Tokens:
    """The compared tokens of a chunk, and what is derived from their log-probs, once."""

    chunk: Chunk
    index: Tensor | None
    """[n] int64: their places in the chunk; None: all of it."""
    new: Tensor
    """[n]: the trainer's log-probs."""
    old: Tensor
    """[n]: the rollout's."""
    d: Tensor
    """[n]: new - old."""
    negative: Tensor | None
    """[n] bool: tokens of negative advantage."""
    sums: Sums
    active_rows: Tensor
    """[rows of the chunk] float64: tokens that count, finite or not."""
    impossible_rows: Tensor | None
    """[rows of the chunk] float64: tokens that count and have probability 0 under the trainer;
    None: there are none."""

    @cached_property
    def size(self) -> Tensor:
        return self.d.abs()

    @cached_property
    def ratio(self) -> Tensor:
        return exp(self.d)

    @cached_property
    def k3(self) -> Tensor:
        return kl.k3(self.d)

    def put(self, values: Tensor, out_N: Tensor) -> None:
        """Writes [n] values to these tokens' places in the batch."""
        out = out_N[self.chunk.at]
        if self.index is None:
            out.copy_(values)
        else:  # numpy is twice as fast as torch here
            out.numpy()[self.index.numpy()] = values.numpy()


@dataclass(frozen=True, eq=False)
class Batch:
    """Log-probs and facts, flattened and on the host, and how they fall into rows."""

    new_N: Tensor
    old_N: Tensor
    layout: Layout
    mask_N: Tensor | None
    facts: TokenFacts

    @classmethod
    def of(cls, logprobs: Tensor, rollout: Tensor, layout: Layout, facts: TokenFacts) -> Batch:
        def flat(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.cpu().reshape(-1)

        host = TokenFacts(**{name: flat(values) for name, values in facts.columns().items()})
        new, old = logprobs.cpu().reshape(-1), rollout.cpu().reshape(-1)
        return cls(new, old, layout, flat(layout.mask), host)

    def chunks(self) -> Iterator[Chunk]:
        offsets = self.layout.offsets
        for start in range(0, self.layout.num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, self.layout.num_tokens)
            first = int(np.searchsorted(offsets, start, side="right")) - 1
            last = int(np.searchsorted(offsets, end, side="left"))
            edges = offsets[first : last + 1].clip(start, end)
            yield Chunk(slice(start, end), slice(first, last), edges - start)

    def negative(self, chunk: Chunk) -> Tensor | None:
        advantages = self.facts.advantages
        return None if advantages is None else advantages[chunk.at] < 0

    def tokens(self, chunk: Chunk) -> Tokens:
        """The tokens of a chunk that count and are finite on both sides."""
        new, old, negative = self.new_N[chunk.at], self.old_N[chunk.at], self.negative(chunk)
        index = None if self.mask_N is None else _places_of(self.mask_N[chunk.at])
        active_rows = torch.from_numpy(np.diff(chunk.edges)).double()
        if index is not None:
            new, old = new.index_select(0, index), old.index_select(0, index)
            active_rows = chunk.count_by_row(index.numpy())
        d, is_valid = kl.log_ratio(new, old)
        inside, impossible_rows = _places_of(is_valid), None
        if inside is not None:
            places = np.flatnonzero(new.numpy() == -np.inf)
            impossible_rows = chunk.count_by_row(places if index is None else index.numpy()[places])
            index = inside if index is None else index.index_select(0, inside)
            new, old, d = (x.index_select(0, inside) for x in (new, old, d))
        if negative is not None and index is not None:
            negative = negative.index_select(0, index)
        sums = self.sums(chunk, old, index)
        return Tokens(chunk, index, new, old, d, negative, sums, active_rows, impossible_rows)

    def sums(self, chunk: Chunk, old: Tensor, index: Tensor | None = None) -> Sums:
        """Sums over the tokens at these places of a chunk; None: over all of it. old: theirs."""
        starts, rows, cells = self._stretches(chunk)
        size = chunk.at.stop - chunk.at.start
        if index is not None:  # where each stretch begins among the tokens that are left
            size = len(index)
            starts = np.searchsorted(index.numpy(), starts)
        is_seen = np.diff(starts, append=size) > 0
        starts, rows, cells = starts[is_seen], rows[is_seen], cells[is_seen]
        cell_n = self._cells(chunk, index)
        if cell_n is not None and size:
            begins = np.zeros(size, np.bool_)
            begins[starts] = True
            begins[1:] |= cell_n[1:] != cell_n[:-1]
            both = np.flatnonzero(begins)
            stretch = np.searchsorted(starts, both, side="right") - 1
            starts, rows, cells = both, rows[stretch], cells[stretch] + cell_n[both]
        return Sums(starts, rows, cells, old)

    def _cells(self, chunk: Chunk, index: Tensor | None) -> Int64Array | None:
        """[n]: each token's cell, as far as its facts decide it; None: no fact is known."""
        facts, cells = self.facts, None
        given = (facts.ages, facts.turns, facts.positions, facts.kinds)
        for part, values in zip(_CELL_PARTS, given, strict=True):
            if values is None:
                continue
            numbers = values[chunk.at]
            if index is not None:
                numbers = numbers.index_select(0, index)
            table = _cell_table(part)
            cell = table.index_select(0, numbers.clamp(0, len(table) - 1))
            cells = cell if cells is None else cells + cell
        return None if cells is None else cells.numpy()

    def _stretches(self, chunk: Chunk) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(start in the chunk, row, cell) of every stretch of one row and one range of positions;
        an empty stretch has the start of the next one."""
        offsets, begin, end = self.layout.offsets, chunk.at.start, chunk.at.stop
        rows = np.arange(len(offsets) - 1)[chunk.rows]
        ranges = np.asarray(_POSITIONS.starts if self.facts.positions is None else (0,))
        starts = np.minimum(offsets[rows][:, None] + ranges, offsets[rows + 1][:, None])
        cells = np.broadcast_to(np.arange(len(ranges)) * _STRIDES["position"], starts.shape)
        return (
            starts.clip(begin, end).reshape(-1) - begin,
            np.repeat(rows, len(ranges)),
            cells.reshape(-1),
        )


@cache
def _cell_table(part: Part) -> Tensor:
    """[number] int64: what each number of a part adds to a token's cell, up to the start of the
    last label."""
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
