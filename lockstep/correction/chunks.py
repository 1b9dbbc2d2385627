# torch leaves from_numpy partly untyped.
# pyright: reportUnknownMemberType=false
"""The tokens of a batch, a chunk at a time: those that can be compared, and what to add them to.

On a CPU only the compared tokens of a chunk are gathered, so that padding costs next to nothing,
and sums go run by run: tokens of one row and one cell of the report stand together. Elsewhere a
gather would wait for the device, so all tokens go through, under a mask.

# N tokens, flattened  n tokens of a chunk  u runs  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction import kl
from lockstep.correction.layout import Chunk, Layout
from lockstep.correction.metrics import CELLS, NUM_CELLS
from lockstep.observe.parts import PARTS, Part
from lockstep.types import FORCED_LOGPROB

Tensor = torch.Tensor
Int64Array = npt.NDArray[np.int64]

_CELL_PARTS = PARTS[: len(CELLS)]
_STRIDES = {
    part.name: NUM_CELLS // int(np.prod(CELLS[: i + 1])) for i, part in enumerate(_CELL_PARTS)
}
"""What the number of a cell rises by with each label of a part."""
_POSITIONS = next(part for part in _CELL_PARTS if part.name == "position")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenFacts:
    """What else is known of each token; the report tells tokens apart by it. All optional."""

    advantages: Tensor | None = None
    """float32; rules with `only_negative_advantage` read it."""
    ages: Tensor | None = None
    """int: updates between the policy that sampled and the one in training."""
    turns: Tensor | None = None
    """int: the episode's turn."""
    positions: Tensor | None = None
    """int: the token's place in its row; None counts from the row's first token in the layout."""
    kinds: Tensor | None = None
    """int: index into TOKEN_KINDS."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """What the tokens of a chunk are added to."""

    piece: Chunk
    cells: Tensor
    """[u] int64: the report's cell of each run; of each token, where there are no `starts`."""
    starts: Int64Array | None
    """[u]: the first token of each run, rising from 0. None: every token by itself."""
    rows: Tensor | None
    """[u] int64: each run's row, in the batch. None without `starts`."""

    def sums(self, values_n: Tensor) -> Tensor:
        """[u] float64, of float64."""
        if self.starts is None:
            return values_n
        return torch.from_numpy(np.add.reduceat(values_n.numpy(), self.starts))

    def add_to_cells(self, sums_Fu: Tensor, fields_FC: Tensor) -> None:
        fields_FC.index_add_(1, self.cells, sums_Fu)

    def raise_cells(self, values_n: Tensor, maxima_C: Tensor) -> None:
        """To the largest of the values."""
        if self.starts is not None:
            values_n = torch.from_numpy(np.maximum.reduceat(values_n.numpy(), self.starts))
        maxima_C.scatter_reduce_(0, self.cells, values_n.to(maxima_C.dtype), "amax")

    def add_to_rows(self, sums_Fu: Tensor, sums_FR: Tensor) -> None:
        if self.rows is None:
            sums_FR[:, self.piece.rows] += self.piece.row_sums(sums_Fu)
        else:
            sums_FR.index_add_(1, self.rows, sums_Fu)


class Columns:
    """Sums over some tokens of a chunk, of one column of values after another: each is widened,
    summed up and dropped while it is in the cache."""

    def __init__(self, runs: Runs, is_unforced: Tensor) -> None:
        self.runs, self._is_unforced = runs, is_unforced
        self.names: list[str] = []
        self._sums: list[Tensor] = []
        self._unforced: list[Tensor] = []

    def add(self, name: str, values: Tensor) -> Tensor:
        """[n], of any dtype. Returns them in float64."""
        if values.dtype == torch.bool:  # converted several times slower than the byte it is
            values = values.view(torch.uint8)
        wide = values.double()
        self.names.append(name)
        self._sums.append(self.runs.sums(wide))
        self._unforced.append(wide.dot(self._is_unforced))
        return wide

    def add_with_square(self, name: str, values: Tensor) -> None:
        """Two columns: NAME, NAME2."""
        wide = self.add(name, values)
        self.add(f"{name}2", wide * wide)

    def add_above(self, name: str, values: Tensor, bound: float) -> None:
        """How many are above it."""
        wide = torch.empty_like(values, dtype=torch.float64)
        self.add(name, torch.gt(values, bound, out=wide))  # into bools takes three times as long

    def sums(self, names: Sequence[str]) -> Tensor:
        """[F, u] float64: of each run."""
        return torch.stack([self._sums[self.names.index(name)] for name in names])

    def unforced(self, names: Sequence[str]) -> Tensor:
        """[F] float64: of the tokens that were not forced."""
        return torch.stack([self._unforced[self.names.index(name)] for name in names])


@dataclass(eq=False)
class Tokens:
    """Some tokens of a chunk, and what is derived from their log-probs, once."""

    runs: Runs
    here: Tensor | None
    """[tokens of the chunk] bool: which of them these are; None: all."""
    new: Tensor
    """[n]: the trainer's log-probs."""
    old: Tensor
    """[n]: the rollout's."""
    d: Tensor
    """[n]: their difference; 0.0 where it is not valid."""
    valid: Tensor | None
    """[n] bool: the tokens that are compared; None: all of these."""
    negative: Tensor | None
    """[n] bool: those of negative advantage."""
    active_rows: Tensor
    """[rows of the chunk] float64: tokens that count, finite or not."""
    impossible_rows: Tensor | None
    """[rows of the chunk] float64: tokens that count and have probability 0 under the trainer;
    None: there are none."""

    @cached_property
    def size(self) -> Tensor:
        return self.d.abs()

    def only_compared(self, flags: Tensor) -> Tensor:
        return flags if self.valid is None else flags & self.valid

    def cleaned(self, values: Tensor) -> Tensor:
        """0.0 where a token is not valid."""
        return values if self.valid is None else torch.where(self.valid, values, 0.0)

    def put(self, values: Tensor, out_N: Tensor) -> None:
        """Writes [n] values to these tokens' places in the batch."""
        out = out_N[self.runs.piece.tokens]
        if self.here is None:
            out.copy_(values)
        else:  # on a CPU, where numpy is twice as fast as torch
            out.numpy()[self.here.numpy()] = values.numpy()

    @cached_property
    def compared(self) -> Tensor:
        """[n] bool: the tokens that are compared."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.d.shape, dtype=torch.bool, device=self.d.device)

    @cached_property
    def ratio(self) -> Tensor:
        """exp(d), cut at exp(+-20); 0.0 where a token is not valid."""
        return self.cleaned(exp(self.d))

    @cached_property
    def k3(self) -> Tensor:
        return kl.k3(self.d)

    @cached_property
    def is_unforced(self) -> Tensor:
        """[n] float64: 1.0 where the rollout had a choice."""
        return unforced(self.old)


@dataclass(frozen=True, eq=False)
class Batch:
    """Log-probs and facts, flattened, and how they fall into rows."""

    new_N: Tensor
    old_N: Tensor
    layout: Layout
    facts: TokenFacts

    @property
    def device(self) -> torch.device:
        return self.new_N.device

    def pieces(self) -> Iterator[Chunk]:
        return self.layout.chunks(self.device)

    def active(self, piece: Chunk) -> Tensor | None:
        """[n] bool: the tokens that count, finite or not; None: all."""
        mask = self.layout.flat_mask()
        return None if mask is None else mask[piece.tokens]

    def negative(self, piece: Chunk) -> Tensor | None:
        advantages = self.facts.advantages
        return None if advantages is None else advantages.reshape(-1)[piece.tokens] < 0

    def tokens(self, piece: Chunk) -> Tokens:
        """A chunk's tokens: all of it under a mask, or on a CPU those that are compared."""
        new, old, active = self.new_N[piece.tokens], self.old_N[piece.tokens], self.active(piece)
        negative = self.negative(piece)
        rows = piece.lengths.double()
        if self.device.type != "cpu":
            d, valid = kl.log_ratio(new, old, active)
            is_zero = new == float("-inf")
            if active is not None:
                rows = piece.row_sums(active.double()[None])[0]
                is_zero &= active
            zeros = piece.row_sums(is_zero.double()[None])[0]
            return Tokens(self.runs(piece), None, new, old, d, valid, negative, rows, zeros)
        here, index = active, None if active is None else _places_of(active)
        if index is not None:
            new, old = new.index_select(0, index), old.index_select(0, index)
            rows = torch.from_numpy(np.diff(np.searchsorted(index.numpy(), piece.edges))).double()
        d, valid = kl.log_ratio(new, old)
        inside, zeros = _places_of(valid), None
        if inside is not None:
            places = np.flatnonzero(new.numpy() == -np.inf)
            places = places if index is None else index.numpy()[places]
            zeros = torch.from_numpy(np.diff(np.searchsorted(places, piece.edges))).double()
            index = inside if index is None else index.index_select(0, inside)
            here = torch.zeros(piece.num_tokens, dtype=torch.bool)
            here[index] = True
            new, old, d = (x.index_select(0, inside) for x in (new, old, d))
        if negative is not None and index is not None:
            negative = negative.index_select(0, index)
        here = None if index is None else here
        return Tokens(self.runs(piece, index), here, new, old, d, None, negative, rows, zeros)

    def runs(self, piece: Chunk, index: Tensor | None = None) -> Runs:
        """Of the tokens at these places of a chunk; None: of all of it."""
        cells = self._cells(piece, index)
        if self.device.type != "cpu":
            if cells is None:
                cells = torch.zeros(piece.num_tokens, dtype=torch.int64, device=self.device)
            if self.facts.positions is None:
                cells = cells + _cell_of(_POSITIONS, piece.places(self.layout))
            return Runs(piece, cells, None, None)
        starts, rows, labels = self._stretches(piece)
        size = piece.num_tokens
        if index is not None:  # where each stretch begins among those that are there
            size = len(index)
            starts = np.searchsorted(index.numpy(), starts)
        is_seen = np.diff(starts, append=size) > 0
        starts, rows, of_run = starts[is_seen], rows[is_seen], labels[is_seen]
        if cells is not None and size:
            cell_n = cells.numpy()
            begins = np.zeros(size, np.bool_)
            begins[starts] = True
            begins[1:] |= cell_n[1:] != cell_n[:-1]
            both = np.flatnonzero(begins)
            stretch = np.searchsorted(starts, both, side="right") - 1
            starts, rows, of_run = both, rows[stretch], of_run[stretch] + cell_n[both]
        return Runs(piece, torch.from_numpy(of_run), starts, torch.from_numpy(rows))

    def _cells(self, piece: Chunk, index: Tensor | None) -> Tensor | None:
        """[n] int64: each token's cell, as far as its facts say; None: they say nothing."""
        facts, cells = self.facts, None
        given = (facts.ages, facts.turns, facts.positions, facts.kinds)
        for part, values in zip(_CELL_PARTS, given, strict=True):
            if values is None:
                continue
            numbers = values.reshape(-1)[piece.tokens]
            if index is not None:
                numbers = numbers.index_select(0, index)
            cell = _cell_of(part, numbers)
            cells = cell if cells is None else cells + cell
        return cells

    def _stretches(self, piece: Chunk) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(start in the chunk, row, cell) of every stretch of one row and one range of positions;
        a start that is the next one's is of an empty stretch."""
        offsets, begin, end = self.layout.offsets, piece.tokens.start, piece.tokens.stop
        rows = np.arange(len(offsets) - 1)[piece.rows]
        ranges = np.asarray(_POSITIONS.starts if self.facts.positions is None else (0,))
        starts = np.minimum(offsets[rows][:, None] + ranges, offsets[rows + 1][:, None])
        cells = np.broadcast_to(np.arange(len(ranges)) * _STRIDES["position"], starts.shape)
        return (
            starts.clip(begin, end).reshape(-1) - begin,
            np.repeat(rows, len(ranges)),
            cells.reshape(-1),
        )


def _cell_of(part: Part, numbers: Tensor) -> Tensor:
    """[n] int64: what a part's numbers add to the cells of their tokens."""
    table = _cell_table(part, numbers.device)
    return table.index_select(0, numbers.clamp(0, len(table) - 1))


@cache
def _cell_table(part: Part, device: torch.device) -> Tensor:
    """[number] int64, up to the start of the last label."""
    with torch.inference_mode(False):  # kept for whoever comes next
        numbers = torch.arange(part.starts[-1] + 1, device=device)
        starts = torch.tensor(part.starts[1:], device=device)
        return torch.bucketize(numbers, starts, right=True) * _STRIDES[part.name]


def _places_of(flags: Tensor) -> Tensor | None:
    """[n] int64: where the flags are True, on a CPU; None: everywhere."""
    found = np.flatnonzero(flags.numpy())
    return None if len(found) == len(flags) else torch.from_numpy(found)


def unforced(rollout_logprobs: Tensor) -> Tensor:
    """float64: 1.0 where the rollout had a choice, 0.0 where the token was as good as forced."""
    out = torch.empty_like(rollout_logprobs, dtype=torch.float64)
    return torch.le(rollout_logprobs, FORCED_LOGPROB, out=out)


def exp(d: Tensor) -> Tensor:
    return d.clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT).exp()
