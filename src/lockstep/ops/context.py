"""Places of attention's keys: the decoder's two input layouts.

The trainer packs whole rows one after another (`PackedContext`). A sampler runs the new tokens of
many sequences over a paged cache (`PagedContext`). Both are records of index tensors, built once
per forward and read by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lockstep.ops.chunks import Chunks, StateStep, fed_positions, previous_tokens
from lockstep.ops.transfer import to_device
from lockstep.types import Ragged, packed_tokens

Tensor = torch.Tensor

KEY_BLOCK = 128
"""Keys that invariant ops sum in one piece, counted from the start of each sequence. Part of the
numerics, unlike the page size, which only says where keys are stored."""

SPLIT_KEYS = 512
"""Keys that attention on a GPU sums by itself, counted from the start of each sequence; these sums
are combined from the left. Part of the numerics there."""

TILE_ROWS = 64  # rows of one piece of attention's work on a GPU: queries times heads of a key head

VALUE_PARTS = 16  # most programs among which the columns of a piece's values are divided
WHOLE_ROW = 1 << 30  # page size of a row whose keys are adjacent

MAX_PADDING = 1.25  # rows of one padded block differ in length by at most this factor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] over the first dim, with a gradient that is summed in a fixed order.

    The gradient of `x[index]` has no fixed order: if a row is indexed several times, CPU threads
    add to it as they arrive.   Guard: tests/cpu/test_determinism.py
    """
    return F.embedding(index, x.flatten(1)).view(*index.shape, *x.shape[1:])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of numbers of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The ids that each of N tokens was drawn from, where top-k or top-p cut the vocabulary.

    The log-prob head normalises over them. A token without ids has the whole vocabulary.

    >>> support = Support.of(Ragged.of([[3, 5], [], [1]]))  # 3 tokens; the second is not cut
    >>> support.ids.tolist(), support.token.tolist(), support.offsets.tolist()
    ([3, 5, 1], [0, 0, 2], [0, 2, 2, 3])
    """

    ids: Tensor
    """[M] int64: the ids of all tokens, one token after another."""
    token: Tensor
    """[M] int64 in [0, N): the token that each id belongs to."""
    offsets: npt.NDArray[np.int64]
    """[N + 1], on the host: token i has ids[offsets[i]:offsets[i + 1]]."""
    is_packed: npt.NDArray[np.bool_]
    """[N], on the host: whether a token has -1 and a bit for each id (`types.pack_support`) in the
    place of its ids."""

    @classmethod
    def of(cls, support: Ragged, *, device: torch.device | str = "cpu") -> Support:
        token = np.repeat(np.arange(len(support)), support.sizes)
        return cls(
            to_device(support.values.astype(np.int64), device),
            to_device(token, device),
            support.offsets,
            packed_tokens(support),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, index_N: Tensor) -> Support:
        """Support of the tokens at these places, in this order."""
        all_of_them = Ragged(self.ids.cpu().numpy().astype(np.int32), self.offsets)
        return Support.of(all_of_them.take(index_N.cpu().numpy()), device=self.ids.device)

    def mask(self, part: slice, vocab_size: int, columns: slice | None = None) -> Tensor:
        """[rows of the part, V] bool: which ids each token could be. columns: a slice of V."""
        start, stop, _ = part.indices(len(self))
        first, last = self.offsets[start], self.offsets[stop]
        token, ids = self.token[first:last] - start, self.ids[first:last]
        packed = np.flatnonzero(self.is_packed[start:stop])
        if len(packed):
            is_listed = ~np.repeat(self.is_packed, np.diff(self.offsets))[first:last]
            listed = to_device(np.flatnonzero(is_listed), ids.device)
            token, ids = token[listed], ids[listed]
        left, right, _ = (columns or slice(None)).indices(vocab_size)
        # Ids of other columns go to an extra column, which is cut off.
        ids = torch.where((ids >= left) & (ids < right), ids - left, right - left)
        shape = stop - start, right - left + 1
        kept = torch.zeros(shape, dtype=torch.bool, device=self.ids.device)
        kept[token, ids] = True
        kept = kept[:, :-1]
        is_whole = np.diff(self.offsets[start : stop + 1]) == 0
        if is_whole.any():
            kept |= to_device(is_whole, kept.device)[:, None]
        shifts = torch.arange(32, device=kept.device)
        for row in packed.tolist():
            words = self.ids[self.offsets[start + row] + 1 : self.offsets[start + row + 1]]
            bits = ((words[:, None] >> shifts) & 1).reshape(-1)[:vocab_size] > 0
            kept[row] = bits if columns is None else bits[columns]
        return kept


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Settings of one layer's attention."""

    sinks: Tensor | None
    """[H] logits that take part in the softmax and have no value (gpt-oss)."""
    window: int | None
    """A position sees itself and the window - 1 before it; None sees all before it."""
    scale: float
    """Factor of the scores."""
    layer: int = 0
    """Layer of the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWork:
    """Rows of variable length as attention on a GPU reads them, and its pieces of work.

    All tensors are int32 on the device. They may be the static buffers of a CUDA graph: nothing
    here is read on the host but the four numbers.
    """

    query_starts: Tensor
    """[B + 1]: place of each row's first query; its queries are adjacent."""
    lengths: Tensor
    """[B]: keys that a row's last query sees. The queries are at the last positions."""
    page_starts: Tensor
    """[B]: where in `pages` the first page of a row is."""
    pages: Tensor
    """[*]: place of the first key of each page, the pages of a row in order."""
    page_size: int
    items: Tensor
    """[W, 4]: (row, first of the row's queries times heads, split, slot). Split -1: all splits of
    the keys in one piece. Otherwise the piece is one split, whose result waits in a slot."""
    num_items: Tensor
    """[1]: how many of the W are real."""
    counters: Tensor
    """[slots, key heads, VALUE_PARTS]: zeros, and zeros again after each call."""
    max_queries: int
    """Queries of the longest row."""
    max_keys: int
    """Keys of the longest row."""
    tokens: Tensor | None = None
    """[T]: token of each query, where rows share tokens; None: query t is token t."""
    token_places: Tensor | None = None
    """[T] int64: the query of each token, where rows share tokens."""
    num_programs: int | None = None
    """Programs per key head that take the items in turn; None: one for each of the W."""

    @classmethod
    def of(
        cls,
        query_counts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        page_starts: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int64],
        *,
        page_size: int,
        heads: tuple[int, int],
        device: torch.device | str,
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> AttentionWork:
        """heads: (of the queries, of the keys). See `plan_work`."""
        items, num_slots = plan_work(
            query_counts, lengths, heads=heads, num_programs=programs_of(device)
        )
        parts = {
            "query_starts": np.concatenate([[0], np.cumsum(query_counts)]),
            "lengths": lengths,
            "page_starts": page_starts,
            "pages": pages,
            "items": items.reshape(-1),
            "num_items": np.array([len(items)]),
            **({} if tokens is None else {"tokens": tokens}),
        }
        whole = to_device(np.concatenate([*parts.values()]).astype(np.int32), device)
        found = dict[str, Any](zip(parts, whole.split([*map(len, parts.values())]), strict=True))
        counters = torch.zeros(num_slots, heads[1], VALUE_PARTS, dtype=torch.int32, device=device)
        return cls(
            **found | {"items": found["items"].view(-1, 4)},
            page_size=page_size,
            counters=counters,
            max_queries=int(query_counts.max()),
            max_keys=int(lengths.max()),
            token_places=None if tokens is None else to_device(np.argsort(tokens), device),
        )


def programs_of(device: torch.device | str) -> int:
    """Pieces of attention that run at once: two on each multiprocessor."""
    device = torch.device(device)
    if device.type == "cpu":
        return 32  # Triton's interpreter
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def plan_work(
    query_counts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    *,
    heads: tuple[int, int],
    num_programs: int,
) -> tuple[npt.NDArray[np.int32], int]:
    """(items [W, 4] of `AttentionWork`, the longest first; slots of partial results).

    query_counts, lengths: [B] queries of each row and keys of its last query. A piece that reads
    more keys than an even share of all is cut into its splits: with few rows they fill the chip,
    and one long row does not outlast the others. The cut changes no bit.

    >>> queries, lengths = np.array([1, 1]), np.array([1100, 9])
    >>> items, num_slots = plan_work(queries, lengths, heads=(8, 2), num_programs=64)
    >>> items.tolist(), num_slots
    ([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2], [1, 0, -1, -1]], 3)
    """
    repeat = heads[0] // heads[1]
    num_tiles = -(-query_counts * repeat // TILE_ROWS)
    row = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first = (np.arange(len(row)) - (np.cumsum(num_tiles) - num_tiles)[row]) * TILE_ROWS
    last_query = np.minimum((first + TILE_ROWS - 1) // repeat, query_counts[row] - 1)
    num_keys = lengths[row] - query_counts[row] + last_query + 1
    share = num_keys.sum() * heads[1] // num_programs
    num_splits = -(-num_keys // SPLIT_KEYS)
    is_cut = (num_keys > max(share, SPLIT_KEYS)) & (num_splits > 1)
    num_items = np.where(is_cut, num_splits, 1)
    tile = np.repeat(np.arange(len(row)), num_items)
    split = np.arange(len(tile)) - (np.cumsum(num_items) - num_items)[tile]
    cut = is_cut[tile]
    slot = np.where(cut, np.cumsum(cut) - 1, -1)
    items = np.stack([row[tile], first[tile], np.where(cut, split, -1), slot], 1)
    cost = np.where(cut, np.minimum(SPLIT_KEYS, num_keys[tile]), num_keys[tile])
    order = np.argsort(-cost, kind="stable")
    return items[order].astype(np.int32), int(cut.sum())


def decode_capacity(
    num_rows: int, max_keys: int, *, heads: tuple[int, int], num_programs: int
) -> tuple[int, int]:
    """(most items, most slots) that `plan_work` gives for rows of one query and up to `max_keys`
    keys. Fewer rows than programs are cut, since each has more than an even share of the keys.
    Guard: tests/cpu/engines/test_decode_graph.py
    """
    num_tiles = num_rows * -(-heads[0] // heads[1] // TILE_ROWS)
    num_cut = min(num_tiles, num_programs // heads[1])
    num_slots = num_cut * -(-max_keys // SPLIT_KEYS)
    return num_tiles + num_slots, num_slots


@dataclass(frozen=True, eq=False)
class PackedContext:
    """Rows of packed tokens, without padding. A row sees only its own tokens, which may be anywhere
    among the T: rows with a common beginning share its tokens.

    >>> context = PackedContext.of([2, 3])      # tokens 0, 1 are row 0; tokens 2, 3, 4 row 1
    >>> [index.tolist() for index in context.blocks]    # longest first
    [[[2, 3, 4]], [[0, 1]]]
    >>> context.place_index.tolist()            # outputs of the blocks -> packed order
    [3, 4, 0, 1, 2]
    """

    lengths: npt.NDArray[np.int64]
    """[B], on the host: tokens of each row, at least 1."""
    index: npt.NDArray[np.int64]
    """[sum of lengths], on the host: tokens of the rows, laid end to end."""
    device: torch.device
    memo: dict[Any, Any] = field(default_factory=dict)
    """Values that ops compute once per forward and read in every layer: how they cut the rows."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedContext:
        """Context of rows that follow one another and share nothing. lengths: in packed order, each
        at least 1."""
        sizes = np.array(lengths, np.int64)
        return cls(sizes, np.arange(sizes.sum()), torch.device(device))

    @classmethod
    def of_rows(
        cls, rows: Sequence[npt.NDArray[np.int64]], *, device: torch.device | str = "cpu"
    ) -> PackedContext:
        """rows: for each row, the indices of its tokens among the T, in the row's order."""
        sizes = np.array([len(row) for row in rows], np.int64)
        return cls(sizes, np.concatenate(rows), torch.device(device))

    @property
    def rows(self) -> list[npt.NDArray[np.int64]]:
        """Each row's tokens, as indices among the T."""
        return np.split(self.index, np.cumsum(self.lengths)[:-1])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[B]: tokens at a row's beginning that an earlier row has too, and asks for.

        >>> PackedContext.of_rows([np.array([0, 1, 2]), np.array([0, 1, 3, 4])]).starts.tolist()
        [0, 2]
        """
        is_first = np.zeros(len(self.index), np.int64)
        is_first[np.unique(self.index, return_index=True)[1]] = 1
        return self.lengths - np.add.reduceat(is_first, _starts(self.lengths))

    @cached_property
    def is_ordered(self) -> bool:
        """True if each token t of the T is at place t: the rows follow one another."""
        return np.array_equal(self.index, np.arange(len(self.index)))

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        """Rows of similar length, as padded blocks of attention: [B, L] int64 each, the token at
        each place. Places past a row's end repeat its last token."""
        return self._padded[0]

    @property
    def place_index(self) -> Tensor | None:
        """[T] int64: index of each token's output in the blocks laid end to end (any one, where
        rows share the token); None if that is the packed order already (rows of one length)."""
        return self._padded[1]

    @cached_property
    def _padded(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        return _pad_rows(self.lengths, self.index, self.device)

    @cached_property
    def chunks(self) -> Chunks:
        """The rows as linear attention reads them."""
        return Chunks.of(self.rows, int(self.index.max()) + 1, device=self.device)

    def previous(self, width: int) -> tuple[Tensor, Tensor]:
        """`chunks.previous_tokens`, on the device."""
        if ("previous", width) not in self.memo:
            found = previous_tokens(self.index, self.lengths, width, int(self.index.max()) + 1)
            before, is_there = (to_device(array, self.device) for array in found)
            self.memo["previous", width] = before, is_there
        return self.memo["previous", width]

    def work(self, heads: tuple[int, int]) -> AttentionWork:
        """The rows as attention on a GPU reads them. heads: (of the queries, of the keys). Each
        token asks in the first row that has it; rows with nothing to ask are left out."""
        if ("work", heads) not in self.memo:
            asked = self.lengths - self.starts
            lengths, rows = self.lengths, {"page_size": WHOLE_ROW, "pages": _starts(self.lengths)}
            page_starts = np.arange(len(lengths))
            if not self.is_ordered:
                asking = [
                    (row, n) for row, n in zip(self.rows, self.starts, strict=True) if n < len(row)
                ]
                asked, lengths = asked[asked > 0], lengths[asked > 0]
                page_starts = _starts(lengths)
                rows = {"page_size": 1, "pages": np.concatenate([row for row, _ in asking])}
                rows["tokens"] = np.concatenate([row[n:] for row, n in asking])
            self.memo["work", heads] = AttentionWork.of(
                asked, lengths, page_starts, **rows, heads=heads, device=self.device
            )
        return self.memo["work", heads]


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def _pad_rows(
    lengths: npt.NDArray[np.int64], index: npt.NDArray[np.int64], device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    lens, flat = torch.from_numpy(lengths), torch.from_numpy(index)
    starts = torch.cumsum(lens, 0) - lens
    order = torch.argsort(lens, descending=True, stable=True)
    blocks: list[Tensor] = []
    place = torch.empty(int(flat.max()) + 1, dtype=torch.int64)
    base = at = 0
    while at < len(order):
        longest = int(lens[order[at]])
        end = at + int((lens[order[at:]] * MAX_PADDING >= longest).sum())
        chosen = order[at:end]
        steps = torch.arange(longest)
        last = lens[chosen, None] - 1
        tokens = flat[starts[chosen, None] + torch.minimum(steps, last)]
        inside = steps <= last
        place[tokens[inside]] = (base + torch.arange(tokens.numel()).view_as(tokens))[inside]
        blocks.append(tokens.to(device))
        base, at = base + tokens.numel(), end
    is_identity = base == len(place) and bool((place == torch.arange(base)).all())
    return tuple(blocks), None if is_identity else place.to(device)


def planes_of(cache: Any) -> tuple[Any, ...]:
    """The keys and values of a context or cache; the keys alone where they hold the values."""
    return (cache.keys,) if cache.values is cache.keys else (cache.keys, cache.values)


@dataclass(frozen=True, slots=True, eq=False)
class ResidentRows:
    """A second copy of the keys and values of a block's sequences, each sequence contiguous.

    Decode reads it in place; gathering pages would copy all keys in every step.
    """

    keys: Tensor
    """[layers, R, G, N, D], R >= B: row b belongs to sequence b of the block. Places past a
    sequence's end hold any finite numbers."""
    values: Tensor
    """As `PagedContext.values`."""
    write_index: Tensor
    """[B * G] int64: index of each sequence's new key, by head, among a layer's R * G * N
    places."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Views and masks that ops make of these tensors; valid as long as the tensors are."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedBlock:
    """Sequences that attend together, each with Q new tokens (padded to the longest)."""

    token_index: Tensor | None
    """[B, Q] int64 into the step's T tokens; None if they are in order from `first_token`."""
    positions: Tensor
    """[B, Q] int64: each query's position in its sequence. Keys at or before it are seen."""
    pages: Tensor
    """[B, P] int64: the sequence's pages in order; unused places hold any valid page."""
    num_keys: int
    """Number of leading places of the P pages that any query of the block may see: the longest
    sequence, possibly rounded up. At most P * page_size."""
    first_token: int = 0
    resident: ResidentRows | None = None
    """Read in place of `pages`, and written as well; only with Q = 1 and no token_index."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Masks, which ops compute once per step and read in every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedContext:
    """One step of a sampler: where the keys of the T new tokens go, and which pages each query
    reads."""

    keys: Tensor | Sequence[Tensor]
    """[layers, G, pages, page_size, D] in the compute dtype, written in place. Heads come before
    pages so that the gathered pages of a sequence are its keys in order without another copy."""
    values: Tensor | Sequence[Tensor]
    """Same shape as `keys`; `keys` itself where they hold the values."""
    write_index: Tensor
    """[T] int64: place of each new token's key and value: page * page_size + offset."""
    blocks: tuple[PagedBlock, ...] = ()
    """For ops that read padded blocks; () for ops that read `work`."""
    place_index: Tensor | None = None
    """[T] int64: index of each token's output in the blocks laid end to end ([B * Q] each); None if
    they are in order already."""
    work: AttentionWork | None = None
    """For ops that read it (`Ops.reads_work`)."""
    states: StateStep | None = None
    """For layers of linear attention."""

    @classmethod
    def of(
        cls,
        keys: Tensor | Sequence[Tensor],
        values: Tensor | Sequence[Tensor],
        tables: npt.NDArray[np.int64],
        starts: npt.ArrayLike,
        stops: npt.ArrayLike,
        *,
        num_heads: int | None = None,
        groups: Sequence[npt.NDArray[np.int64]] | None = None,
        resident: ResidentRows | None = None,
        states: StateStep | None = None,
    ) -> PagedContext:
        """Context of sequences that each feed their positions [start, stop), one after another.

        tables: [B, P], the pages of each sequence in order; unused places name any valid page.
        num_heads: of the queries, for ops that read `work` in place of blocks. groups: sequences
        that share a block; None: neighbours that feed the same number of tokens. resident: of the
        first group.

        >>> keys = torch.zeros(1, 2, 8, 16, 4)          # 8 pages of 16 places
        >>> tables = np.array([[3, 5], [2, 0]])
        >>> context = PagedContext.of(keys, keys.clone(), tables, starts=[17, 0], stops=[18, 2])
        >>> context.write_index.tolist()                # page 5 at offset 1, page 2 from its start
        [81, 32, 33]
        """
        num_kv_heads, size, device = len(keys[0]), keys[0].shape[2], keys[0].device
        start, stop = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        lengths = stop - start
        sequence, positions = fed_positions(start, lengths)
        written = tables[sequence, positions // size] * size + positions % size
        write_index = to_device(written, device)
        if num_heads is not None:
            work = AttentionWork.of(
                lengths,
                stop,
                np.arange(len(tables)) * tables.shape[1],
                tables.reshape(-1) * size,
                page_size=size,
                heads=(num_heads, num_kv_heads),
                device=device,
            )
            return cls(keys, values, write_index, work=work, states=states)
        if groups is None:
            groups = np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(lengths)) + 1)
        blocks, place_index = _blocks(groups, start, lengths, tables, size, resident, device)
        return cls(keys, values, write_index, blocks, place_index, states=states)

    def write(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Writes the new tokens' keys and values to their places."""
        for plane, new in zip(planes_of(self), (k_TGD, v_TGD), strict=False):
            cache = plane[layer]
            places = cache.view(cache.shape[0], -1, cache.shape[3])
            places.index_copy_(1, self.write_index, new.transpose(0, 1))


def _blocks(
    groups: Sequence[npt.NDArray[np.int64]],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int64],
    size: int,
    resident: ResidentRows | None,
    device: torch.device,
) -> tuple[tuple[PagedBlock, ...], Tensor | None]:
    """(blocks, place_index) of `PagedContext`: a block for each group of sequences, padded to the
    longest by repeating a last query."""
    firsts = _starts(lengths)
    blocks: list[PagedBlock] = []
    fed: list[npt.NDArray[np.int64]] = []
    for group in groups:
        steps = np.minimum(np.arange(int(lengths[group].max())), lengths[group, None] - 1)
        tokens, positions = firsts[group, None] + steps, starts[group, None] + steps
        num_keys = int(positions.max()) + 1
        block = PagedBlock(
            None if _is_ordered(tokens) else to_device(tokens, device),
            to_device(positions, device),
            to_device(tables[group, : -(-num_keys // size)], device),
            num_keys,
            first_token=int(tokens[0, 0]),
            resident=None if blocks else resident,
        )
        blocks.append(block)
        fed.append(tokens.reshape(-1))
    tokens = np.concatenate(fed)
    if _is_ordered(tokens):
        return tuple(blocks), None
    # A padded place repeats its chunk's last token; the first place of a token is the real one.
    places = np.empty(int(lengths.sum()), np.int64)
    places[tokens[::-1]] = np.arange(len(tokens))[::-1]
    return tuple(blocks), to_device(places, device)


def _is_ordered(tokens: npt.NDArray[np.int64]) -> bool:
    flat = tokens.reshape(-1)
    return bool((flat[1:] == flat[:-1] + 1).all())
