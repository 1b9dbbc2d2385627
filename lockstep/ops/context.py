"""Where attention finds its keys: the two layouts in which a decoder is called.

The trainer packs whole rows one after another (`PackedContext`). A sampler runs the new tokens of
many sequences over a paged cache (`PagedContext`). Both are records of index tensors, built once
per forward and read by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lockstep.types import Ragged, packed_tokens

Tensor = torch.Tensor

KEY_BLOCK = 128
"""Keys that invariant ops sum in one piece, counted from the start of each sequence. Part of the
numerics, unlike the page size, which only says where keys are stored."""

MAX_PADDING = 1.25  # rows of one padded block differ in length by at most this factor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] over the first dim, with a gradient that is summed in a fixed order.

    The gradient of `x[index]` is not: CPU threads add to a row that is indexed several times in the
    order in which they arrive.
    Guard: tests/cpu/test_determinism.py
    """
    return F.embedding(index, x.flatten(1)).view(*index.shape, *x.shape[1:])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of numbers of this dtype are kept."""
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
            torch.from_numpy(support.values.astype(np.int64)).to(device),
            torch.from_numpy(token).to(device),
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
            listed = torch.from_numpy(np.flatnonzero(is_listed)).to(ids.device)
            token, ids = token[listed], ids[listed]
        num_columns = vocab_size
        if columns is not None:
            left, right, _ = columns.indices(vocab_size)
            inside = (ids >= left) & (ids < right)
            token, ids, num_columns = token[inside], ids[inside] - left, right - left
        kept = torch.zeros(stop - start, num_columns, dtype=torch.bool, device=self.ids.device)
        kept[token, ids] = True
        is_whole = np.diff(self.offsets[start : stop + 1]) == 0
        if is_whole.any():
            kept[torch.from_numpy(is_whole).to(kept.device)] = True
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
class PackedContext:
    """Rows of packed tokens, without padding. A row sees only its own tokens, which may be anywhere
    among the T: rows with a common beginning share its tokens.

    >>> context = PackedContext.of([2, 3])      # tokens 0, 1 are row 0; tokens 2, 3, 4 row 1
    >>> [index.tolist() for index in context.blocks]    # longest first
    [[[2, 3, 4]], [[0, 1]]]
    >>> context.place_index.tolist()            # outputs of the blocks -> packed order
    [3, 4, 0, 1, 2]
    """

    blocks: tuple[Tensor, ...]
    """Rows of similar length, as padded blocks of attention: [B, L] int64 each, the token at each
    place. Places past a row's end repeat its last token."""
    place_index: Tensor | None
    """[T] int64: index of each token's output in the blocks laid end to end (any one, where rows
    share the token); None if that is the packed order already (rows of one length)."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Values that ops compute once per forward and read in every layer: how they cut the rows."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedContext:
        """Context of rows that follow one another and share nothing. lengths: in packed order, each
        at least 1."""
        ends = np.cumsum(lengths)
        return cls.of_rows(
            [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)], device=device
        )

    @classmethod
    def of_rows(
        cls, rows: Sequence[npt.NDArray[np.int64]], *, device: torch.device | str = "cpu"
    ) -> PackedContext:
        """rows: for each row, the indices of its tokens among the T, in the row's order."""
        lens = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        flat = torch.from_numpy(np.concatenate(rows))
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
            index = flat[starts[chosen, None] + torch.minimum(steps, last)]
            inside = steps <= last
            place[index[inside]] = (base + torch.arange(index.numel()).view_as(index))[inside]
            blocks.append(index.to(device))
            base, at = base + index.numel(), end
        is_identity = base == len(place) and bool((place == torch.arange(base)).all())
        return cls(tuple(blocks), None if is_identity else place.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class ResidentRows:
    """A second copy of the keys and values of a block's sequences, each sequence contiguous.

    Decode reads it in place; gathering pages would copy all keys in every step.
    """

    keys: Tensor
    """[layers, R, G, N, D], R >= B: row b belongs to sequence b of the block. Places past a
    sequence's end hold any finite numbers."""
    values: Tensor
    """Same shape as `keys`."""
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

    keys: Tensor
    """[layers, G, pages, page_size, D] in the compute dtype, written in place. Heads come before
    pages so that the gathered pages of a sequence are its keys in order without another copy."""
    values: Tensor
    """Same shape as `keys`."""
    write_index: Tensor
    """[T] int64: place of each new token's key and value: page * page_size + offset."""
    blocks: tuple[PagedBlock, ...]
    place_index: Tensor | None
    """[T] int64: index of each token's output in the blocks laid end to end ([B * Q] each); None if
    they are in order already."""

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        tables: npt.NDArray[np.int64],
        starts: Sequence[int],
        stops: Sequence[int],
    ) -> PagedContext:
        """Context of sequences that each feed their positions [start, stop), one after another.

        tables: [B, P], the pages of each sequence in order; unused places name any valid page.
        Neighbours that feed the same number of tokens share a block.

        >>> keys = torch.zeros(1, 2, 8, 16, 4)          # 8 pages of 16 places
        >>> tables = np.array([[3, 5], [2, 0]])
        >>> context = PagedContext.of(keys, keys.clone(), tables, starts=[17, 0], stops=[18, 2])
        >>> context.write_index.tolist()                # page 5 at offset 1, page 2 from its start
        [81, 32, 33]
        """
        size, device = keys.shape[3], keys.device
        at = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
        written = [row[a // size] * size + a % size for row, a in zip(tables, at, strict=True)]
        blocks: list[PagedBlock] = []
        first = token = 0
        for _, group in groupby(at, key=len):
            positions = np.stack(list(group))
            stop, num_keys = first + len(positions), int(positions.max()) + 1
            pages = np.ascontiguousarray(tables[first:stop, : -(-num_keys // size)])
            places, used = (torch.from_numpy(x).to(device) for x in (positions, pages))
            blocks.append(PagedBlock(None, places, used, num_keys, first_token=token))
            first, token = stop, token + positions.size
        write_index = torch.from_numpy(np.concatenate(written)).to(device)
        return cls(keys, values, write_index, tuple(blocks), None)

    def write(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Writes the new tokens' keys and values to their places."""
        for cache, new in ((self.keys[layer], k_TGD), (self.values[layer], v_TGD)):
            places = cache.view(cache.shape[0], -1, cache.shape[3])
            places.index_copy_(1, self.write_index, new.transpose(0, 1))
