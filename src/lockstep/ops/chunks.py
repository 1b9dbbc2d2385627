"""How the gated delta rule cuts rows into chunks, and where a sampler keeps its states.

A layer of linear attention has one state per sequence in place of keys and values. Sampler and
trainer alike update it once per CHUNK tokens, counted from the start of the sequence. A token reads
the state before its chunk, and the chunk's own tokens up to itself.

# T tokens  N chunks  C = CHUNK  S sequences  W width of the convolution
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lockstep.ops.contract import BLOCK, CHUNK
from lockstep.ops.transfer import to_device

Tensor = torch.Tensor
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The chunks that are computed together: the first of every row, the second, and so on."""

    part: slice
    """Its chunks among the N."""
    parents: Tensor | None
    """[n] int64: number in the previous level of the chunk before each; None: the same number."""
    num_parents: int
    """Chunks of the previous level; 0 at the first level."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Rows cut into chunks, level by level. A chunk whose tokens several rows share is there once;
    where rows part inside a chunk, each has one of its own, which computes their common tokens
    again.

    >>> rows = [np.arange(70), np.concatenate([np.arange(66), [70, 71]])]
    >>> chunks = Chunks.of(rows, 72)
    >>> [level.part for level in chunks.levels], chunks.places[[0, 64, 69, 70, 71]].tolist()
    ([slice(0, 1, None), slice(1, 3, None)], [0, 64, 69, 130, 131])
    """

    tokens: Tensor
    """[N * C] int64: the token at each place. Places past a row's end repeat its last token."""
    is_real: Tensor
    """[N, C] bool: whether a place holds a token."""
    places: Tensor
    """[T] int64: a place of each token, where its output is read."""
    levels: tuple[Level, ...]
    ends: Indices
    """[B], on the host: last chunk of each row."""

    @classmethod
    def of(
        cls, rows: Sequence[Indices], num_tokens: int, *, device: torch.device | str = "cpu"
    ) -> Chunks:
        """rows: the tokens of each row, in its order. Every token is in one of them."""
        known: dict[tuple[int, int], int] = {}
        chunks: list[tuple[Indices, int]] = []
        """(tokens, number of the chunk before)."""
        by_level: list[list[int]] = []
        ends: list[int] = []
        for row in rows:
            before = -1
            for level, at in enumerate(range(0, len(row), CHUNK)):
                tokens = row[at : at + CHUNK]
                key = level, int(tokens[-1])
                found = known.get(key)
                # A token is in one place of the tree of rows: its last token tells a chunk.
                if found is None or len(chunks[found][0]) != len(tokens):
                    found = known[key] = len(chunks)
                    chunks.append((tokens, before))
                    if level == len(by_level):
                        by_level.append([])
                    by_level[level].append(found)
                before = found
            ends.append(before)
        order = [chunk for level in by_level for chunk in level]
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        tokens = np.empty((len(order), CHUNK), np.int64)
        is_real = np.zeros((len(order), CHUNK), bool)
        for at, chunk in enumerate(order):
            own = chunks[chunk][0]
            tokens[at, : len(own)], tokens[at, len(own) :] = own, own[-1]
            is_real[at, : len(own)] = True
        places = np.zeros(num_tokens, np.int64)
        real = np.flatnonzero(is_real.reshape(-1))[::-1]  # the first place of a token stands
        places[tokens.reshape(-1)[real]] = real
        levels: list[Level] = []
        first = num_before = 0
        for level in by_level:
            parents = None
            if num_before:
                start = first - num_before
                found = np.array([number[chunks[chunk][1]] - start for chunk in level])
                is_same = len(found) == num_before and (found == np.arange(num_before)).all()
                parents = None if is_same else to_device(found, device)
            levels.append(Level(slice(first, first + len(level)), parents, num_before))
            first, num_before = first + len(level), len(level)
        return cls(
            to_device(tokens.reshape(-1), device),
            to_device(is_real, device),
            to_device(places, device),
            tuple(levels),
            number[ends],
        )


def fed_positions(starts: Indices, lengths: Indices) -> tuple[Indices, Indices]:
    """([T] sequence, [T] position) of each token, where sequences feed `lengths` tokens from
    `starts` on, one after another."""
    if (lengths == 1).all():
        return np.arange(len(lengths)), starts
    sequence, first = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    return sequence, np.arange(len(sequence)) + (starts - first)[sequence]


def previous_tokens(
    index: Indices, lengths: Indices, width: int, num_tokens: int
) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """([width - 1, T] token that is 1, 2, ... before each of T in its row, whether it is there).

    index, lengths: the tokens of rows, laid end to end, and how many each has.

    >>> before, is_there = previous_tokens(np.arange(5), np.array([2, 3]), 3, 5)
    >>> before[0].tolist(), is_there.astype(int).tolist()
    ([0, 0, 2, 2, 3], [[0, 1, 0, 1, 1], [0, 0, 0, 0, 1]])
    """
    _, at = fed_positions(np.zeros_like(lengths), lengths)
    before = np.zeros((width - 1, num_tokens), np.int64)
    is_there = np.zeros((width - 1, num_tokens), bool)
    for back in range(1, width):
        has = at >= back
        source = np.where(has, np.roll(index, back), index)
        before[back - 1, index], is_there[back - 1, index] = source, has
    return before, is_there


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """States of the sequences that a sampler runs: a slot for each, in every linear layer.

    # L linear layers  R slots  G key heads  H value heads  K key width  V value width
    """

    state: Tensor
    """[L, R, H, K, V] float32: that before the chunk that runs."""
    keys: Tensor
    """[L, R, G, C, K] float32: keys of the chunk's tokens."""
    values: Tensor
    """[L, R, H, C, V] float32: writes of its tokens; their values where one kernel runs a chunk."""
    decays: Tensor
    """[L, R, H, C] float32: log of each token's decay."""
    strengths: Tensor
    """[L, R, H, C] float32: their strengths, where one kernel runs a chunk."""
    inverse: Tensor
    """[L, R, H, BLOCK, BLOCK] float32: rows of the inverse of the block that runs."""
    wanted: Tensor
    """[L, R, H, BLOCK, V] float32: its right-hand sides."""
    tails: Tensor
    """[L, R, W - 1, channels] in the compute dtype: last inputs of the convolution."""
    border_tails: Tensor
    """The same, at the border before the chunk that runs."""

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        num_slots: int,
        *,
        heads: tuple[int, int],
        widths: tuple[int, int],
        tail: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> States:
        """heads: (G, H); widths: (K, V); tail: (W - 1, channels); dtype: of the tails."""
        (G, H), (K, V), of = heads, widths, (num_layers, num_slots)

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*of, *sizes, dtype=dtype, device=device)

        return cls(
            state=zeros(H, K, V),
            keys=zeros(G, CHUNK, K),
            values=zeros(H, CHUNK, V),
            decays=zeros(H, CHUNK),
            strengths=zeros(H, CHUNK),
            inverse=zeros(H, BLOCK, BLOCK),
            wanted=zeros(H, BLOCK, V),
            tails=zeros(*tail, dtype=dtype),
            border_tails=zeros(*tail, dtype=dtype),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Places of the tokens that B rows feed, and their attention masks; the same in every layer.

    # B rows  N rows that are computed  G key heads  H value heads  C = CHUNK
    """

    keys: Tensor
    """[B * G] int64: among the R * G * C keys of a layer."""
    values: Tensor
    """[B * H] int64: among its R * H * C values."""
    copies: Tensor
    """[B * H] int64: among the N * H * C values of the rows that are computed."""
    blocks: Tensor
    """[B * H] int64: among its R * H * BLOCK rows of inverses."""
    here: Tensor
    """[N, H, 1] int64: in the chunk."""
    block: Tensor
    """[N, H, BLOCK] int64: places of the token's block in the chunk."""
    later: Tensor
    """[N, 1, C] float32: -inf at later places, else 0."""
    before: Tensor
    """[N, 1, BLOCK] float32: 1 at earlier places of the token's block, else 0."""
    earlier: Tensor | None
    """[N, 1, C] float32: 1 at places of earlier blocks, else 0; None if there are none."""
    unit: Tensor
    """[N, 1, BLOCK] float32: 1 at the token's own place in its block, else 0."""

    @classmethod
    def of(
        cls, slots: Tensor, at: Tensor, order: Tensor | None, heads: tuple[int, int]
    ) -> RowPlaces:
        """slots, at [B] int64: slot of each row, and place of its token in its chunk. order:
        `StateStep.order`."""
        device, (G, H) = at.device, heads
        columns, in_block = (torch.arange(n, device=device) for n in (CHUNK, BLOCK))
        here = at if order is None else at[order]
        row = here % BLOCK
        first = here - row

        def places(of: Tensor, num_heads: int, size: int, place: Tensor) -> Tensor:
            head = torch.arange(num_heads, device=device)
            return ((of[:, None] * num_heads + head) * size + place[:, None]).reshape(-1)

        later = (columns > here[:, None])[:, None]
        earlier = (columns < first[:, None])[:, None]
        return cls(
            keys=places(slots, G, CHUNK, at),
            values=places(slots, H, CHUNK, at),
            copies=places(torch.arange(len(at), device=device), H, CHUNK, at),
            blocks=places(slots, H, BLOCK, at % BLOCK),
            here=here[:, None, None].expand(-1, H, 1),
            block=(first[:, None] + in_block)[:, None].expand(-1, H, -1),
            later=torch.zeros(later.shape, device=device).masked_fill_(later, float("-inf")),
            before=(in_block < row[:, None])[:, None].float(),
            earlier=earlier.float() if earlier.any() else None,
            unit=(in_block == row[:, None])[:, None].float(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """One step of a sampler, as linear layers read it: rows that feed one token each, then parts of
    prompts that begin at a border of chunks."""

    states: States
    slots: Tensor
    """[S] int64: slot of each sequence, the rows first."""
    offsets: Tensor
    """[rows] int64: place of each row's token in its chunk."""
    full: Tensor | None
    """Indices of the computed rows whose token ends a chunk; None: no row's."""
    full_slots: Tensor
    """Slots of the same rows."""
    chunks: Chunks | None
    """Chunks of the parts of prompts. Their tokens follow the rows' tokens."""
    last_places: Tensor
    """[S - rows] int64: place in its chunk of each part's last token."""
    taps: Tensor
    """[W, T] int64: inputs of each token's convolution, the oldest first, among the tails of all
    sequences, laid end to end, and the T tokens behind them."""
    tails: Tensor
    """[S, W - 1] int64: each sequence's tail after the step, among the same."""
    borders: Tensor
    """[S', W - 1] int64: its tail at the last border that the step comes to, of the sequences in
    `bordering`."""
    bordering: Tensor
    """[S'] int64: slots of the sequences that come to a border."""
    span: slice | None = None
    """Slots from the rows' first to their last, which are read in place. None: the rows lie too far
    apart, and their states are copied."""
    order: Tensor | None = None
    """[N] int64: row of each slot of the span; 0 for a slot without a row, whose result is thrown
    away. None: the rows are in the order of their slots, which follow one another, or there is no
    span."""
    back: Tensor | None = None
    """[rows] int64: place of each row in the span; None as `order`."""
    memo: dict[tuple[int, int], RowPlaces] = field(default_factory=dict)

    def places(self, heads: tuple[int, int]) -> RowPlaces:
        """heads: (of the keys, of the values)."""
        if heads not in self.memo:
            slots = self.slots[: self.num_rows]
            self.memo[heads] = RowPlaces.of(slots, self.offsets, self.order, heads)
        return self.memo[heads]

    def computed(self, of_rows: Tensor) -> Tensor:
        """[rows, ...] -> [N, ...]: reorders rows to the order of `stored`."""
        return of_rows if self.order is None else of_rows.index_select(0, self.order)

    def rows(self, computed: Tensor) -> Tensor:
        """[N, ...] -> [rows, ...]: undoes `computed`."""
        return computed if self.back is None else computed.index_select(0, self.back)

    def stored(self, of_slots: Tensor, layer: int) -> Tensor:
        """of_slots [L, R, ...] in a layer: [N, ...]."""
        if self.span is not None:
            return of_slots[layer, self.span]
        return of_slots[layer].index_select(0, self.slots[: self.num_rows])

    @property
    def num_rows(self) -> int:
        return len(self.offsets)

    @classmethod
    def of(
        cls, states: States, slots: Indices, starts: Indices, stops: Indices, *, num_rows: int
    ) -> StateStep:
        """slots, starts, stops: of each sequence and the positions that it feeds; of the first
        `num_rows` one each."""
        device, width = states.tails.device, states.tails.shape[2] + 1
        slots, begin, end = (array.astype(np.int64) for array in (slots, starts, stops))
        lengths = end - begin
        first = np.cumsum(lengths) - lengths
        sequence, at = fed_positions(np.zeros_like(begin), lengths)
        num_tokens, base = len(at), len(lengths) * (width - 1)
        taps = np.stack(
            [_place(sequence, at - back, first, base, width) for back in range(width - 1, -1, -1)]
        )

        def tail_at(chosen: Indices, fed: Indices) -> Indices:
            """The tail of sequences `chosen` after `fed` tokens."""
            backs = range(width - 1, 0, -1)
            places = [_place(chosen, fed - back, first, base, width) for back in backs]
            return np.stack(places, 1)

        span, order, back = _span_of(slots[:num_rows])
        border = end // CHUNK * CHUNK
        comes = np.flatnonzero(border > begin)
        full = np.flatnonzero(border[:num_rows] > begin[:num_rows])
        chunks = None
        if num_rows < len(lengths):
            rows = [
                np.arange(f, f + n) - num_rows
                for f, n in zip(first[num_rows:], lengths[num_rows:], strict=True)
            ]
            chunks = Chunks.of(rows, num_tokens - num_rows, device=device)

        def on(array: Indices) -> Tensor:
            return to_device(np.ascontiguousarray(array), device)

        return cls(
            states,
            on(slots),
            on(begin[:num_rows] % CHUNK),
            on(full if back is None else back[full]) if len(full) else None,
            on(slots[full]),
            chunks,
            on((end[num_rows:] - 1) % CHUNK),
            on(taps),
            on(tail_at(np.arange(len(lengths)), lengths)),
            on(tail_at(comes, (border - begin)[comes])),
            on(slots[comes]),
            span,
            None if order is None else on(order),
            None if back is None else on(back),
        )

    @classmethod
    def of_rows(cls, states: States, slots: Tensor, offsets: Tensor, unread_slot: int) -> StateStep:
        """Rows alone, over tensors of the device whose values may change, as a graph's do, for ops
        with one kernel for a chunk. Rows that end no chunk write their border's tail to
        `unread_slot`."""
        tail, row = states.tails.shape[2], torch.arange(len(slots), device=slots.device)
        before = row[:, None] * tail + torch.arange(tail, device=slots.device)
        window = torch.cat([before, len(slots) * tail + row[:, None]], 1)
        return cls(
            states,
            slots,
            offsets,
            full=None,
            full_slots=slots[:0],
            chunks=None,
            last_places=slots[:0],
            taps=window.t(),
            tails=window[:, 1:],
            borders=window[:, 1:],
            bordering=torch.where(offsets == CHUNK - 1, slots, unread_slot),
        )


def _span_of(slots: Indices) -> tuple[slice | None, Indices | None, Indices | None]:
    """(`span`, `order`, `back`) of `StateStep` for the slots of its rows."""
    num_rows = len(slots)
    if not num_rows or np.ptp(slots) >= 2 * num_rows:
        return None, None, None
    span = slice(slots.min(), slots.max() + 1)
    if (np.diff(slots) == 1).all():
        return span, None, None
    back = slots - span.start
    order = np.zeros(span.stop - span.start, np.int64)
    order[back] = np.arange(num_rows)
    return span, order, back


def _place(sequence: Indices, at: Indices, first: Indices, base: int, width: int) -> Indices:
    """Place of a sequence's token `at` (below 0: in its tail) among tails and tokens."""
    return np.where(at >= 0, base + first[sequence] + at, sequence * (width - 1) + width - 1 + at)
