# torch leaves from_numpy and all_reduce partly untyped.
# pyright: reportUnknownMemberType=false
"""Which sequence each token belongs to, and which tokens count: padded, packed, or over ranks.

Every function of this room takes tensors of one shape, `[B, T]` padded or `[N]` packed, and a
`Layout` that says how they fall into rows. Flattened, a row is a run of tokens in both, so there is
one code path, and padded and packed give the same numbers.

# N tokens, flattened  R rows  F fields
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lockstep.errors import AlignmentError

Tensor = torch.Tensor
Int64Array = npt.NDArray[np.int64]

CHUNK_TOKENS = {"cpu": 1 << 17}
"""Tokens that are worked on at a time, by device: on a CPU so few that temporaries are small beside
a batch and stay near the cache; elsewhere launches cost more than memory."""
OTHER_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the tokens of some tensors fall into rows (sequences).

    >>> padded = Layout.padded(torch.tensor([[True, True, False], [True, False, False]]))
    >>> padded.row_sums(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])).tolist()
    [3.0, 3.0]
    >>> packed = Layout.packed([2, 1])
    >>> packed.row_sums(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [3.0, 3.0]
    """

    shape: tuple[int, ...]
    """Of every per-token tensor: [B, T] padded, [N] packed."""
    offsets: Int64Array
    """[R + 1] int64 on the host: row r is the flattened tokens offsets[r]:offsets[r + 1]."""
    mask: Tensor | None = None
    """`shape` bool: the tokens that count. None counts all."""
    group: dist.ProcessGroup | None = None
    """The ranks over which each row is split (sequence parallelism); every one of them holds the
    same R rows, in the same order, and its own piece of each. None: rows are whole."""

    @classmethod
    def padded(cls, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Layout:
        """Of tensors [B, T]; mask [B, T], True or non-zero where a token counts."""
        if mask.ndim != 2:
            raise AlignmentError(
                f"a padded mask has the shape {list(mask.shape)}; expected [rows, tokens]. "
                "Layout.packed(lengths) is for rows that stand one after another."
            )
        rows, tokens = mask.shape
        return cls((rows, tokens), np.arange(rows + 1) * tokens, mask != 0, group)

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int] | npt.NDArray[np.integer] | Tensor,
        mask: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Layout:
        """Of tensors [N] in which rows of these lengths stand one after another; 0 is an empty row.

        mask: [N], True or non-zero where a token counts; None counts all.
        """
        if isinstance(lengths, Tensor):
            lengths = lengths.detach().cpu().numpy()
        sizes = np.asarray(lengths, np.int64).reshape(-1)
        if sizes.size and sizes.min() < 0:
            raise AlignmentError(f"row {int(sizes.argmin())} has the length {int(sizes.min())}.")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        total = int(offsets[-1])
        if mask is not None and tuple(mask.shape) != (total,):
            raise AlignmentError(
                f"the rows' lengths sum to {total} tokens, the mask has the shape "
                f"{list(mask.shape)}: expected [{total}]."
            )
        return cls((total,), offsets, None if mask is None else mask != 0, group)

    @classmethod
    def one_row(cls, num_tokens: int) -> Layout:
        """All tokens are one sequence."""
        return cls.packed([num_tokens])

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def check(self, **tensors: Tensor | None) -> None:
        """Raises AlignmentError naming each tensor that does not have one value per token."""
        wrong = {
            name: list(tensor.shape)
            for name, tensor in tensors.items()
            if tensor is not None and tuple(tensor.shape) != self.shape
        }
        if wrong:
            found = ", ".join(f"{name} {shape}" for name, shape in wrong.items())
            raise AlignmentError(
                f"expected one value per token, the shape {list(self.shape)}; found {found}. "
                "Shifted twice, or not at all? Rows of another batch?"
            )

    def locate(self, token: int) -> str:
        """Where the flattened token stands, in words."""
        row = int(np.searchsorted(self.offsets, token, side="right")) - 1
        return f"row {row}, token {token - int(self.offsets[row])}"

    # -- rows -------------------------------------------------------------------------------------

    def row_counts(self, device: torch.device | str = "cpu") -> Tensor:
        """[R] float64: the tokens of each row that count."""
        return self.row_sums(torch.ones(self.shape, device=device))

    def row_sums(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` (`shape`) over the tokens of each row that count.

        What stands elsewhere may be anything. No gradient flows through it. All-reduced over the
        ranks that share the rows.
        """
        self.check(values=values)
        flat, mask = values.detach().reshape(-1), self.flat_mask()
        sums = torch.zeros(1, self.num_rows, dtype=torch.float64, device=values.device)
        for piece in self.chunks(values.device):
            part = flat[piece.tokens].double()
            if mask is not None:
                part = torch.where(mask[piece.tokens], part, 0.0)
            sums[:, piece.rows] += piece.row_sums(part[None])
        return self.all_reduce_rows(sums)[0]

    def expand(self, values_R: Tensor) -> Tensor:
        """[R] -> `shape`: each row's value at all of its tokens."""
        lengths = torch.from_numpy(np.diff(self.offsets)).to(values_R.device)
        out = torch.repeat_interleave(values_R, lengths, output_size=self.num_tokens)
        return out.reshape(self.shape)

    def all_reduce_rows(self, sums_FR: Tensor) -> Tensor:
        """Sums of local pieces -> sums of whole rows. In place, one collective; [F, R]."""
        if self.group is not None:
            dist.all_reduce(sums_FR, group=self.group)
        return sums_FR

    @property
    def counts_rows(self) -> bool:
        """Whether this rank speaks for the rows that it shares, so that each is counted once."""
        return self.group is None or dist.get_rank(self.group) == 0

    # -- mechanism --------------------------------------------------------------------------------

    def flat_mask(self) -> Tensor | None:
        return None if self.mask is None else self.mask.reshape(-1)

    def chunks(self, device: torch.device) -> Iterator[Chunk]:
        """The tokens in runs, each with the rows that it touches."""
        size = CHUNK_TOKENS.get(device.type, OTHER_CHUNK_TOKENS)
        for start in range(0, self.num_tokens, size):
            end = min(start + size, self.num_tokens)
            first = int(np.searchsorted(self.offsets, start, side="right")) - 1
            last = int(np.searchsorted(self.offsets, end, side="left"))
            edges = self.offsets[first : last + 1].clip(start, end)
            lengths = torch.from_numpy(np.diff(edges)).to(device, non_blocking=True)
            yield Chunk(slice(start, end), slice(first, last), lengths, edges - start)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A run of flattened tokens and the rows that it touches."""

    tokens: slice
    rows: slice
    lengths: Tensor
    """[rows] int64: how many of the run's tokens each of these rows has."""
    edges: Int64Array
    """[rows + 1] on the host: where in the run each of them begins, and the last one ends."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    def row_sums(self, values_FN: Tensor) -> Tensor:
        """[F, rows]: the sums over this run's part of each row; float64, values already masked."""
        lengths = self.lengths.expand(len(values_FN), -1)
        return torch.segment_reduce(values_FN, "sum", lengths=lengths, axis=1, unsafe=True)

    def expand(self, values_R: Tensor) -> Tensor:
        """[R] of all rows -> [tokens of this run]."""
        values = values_R[self.rows]
        return torch.repeat_interleave(values, self.lengths, output_size=self.num_tokens)

    def places(self, layout: Layout) -> Tensor:
        """[tokens of this run] int64: each token's index in its row."""
        starts = torch.from_numpy(layout.offsets[self.rows]).to(self.lengths.device)
        index = torch.arange(self.tokens.start, self.tokens.stop, device=self.lengths.device)
        return index - torch.repeat_interleave(starts, self.lengths, output_size=self.num_tokens)
