# torch leaves from_numpy and all_reduce partly untyped.
# pyright: reportUnknownMemberType=false
"""Which row (sequence) each token belongs to, and which tokens count.

Tensors are `[B, T]` padded or `[N]` packed. Flattened, a row is a run of tokens in both, so there
is one code path, and padded and packed give the same numbers.

# N tokens, flattened  R rows  F fields
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lockstep.errors import AlignmentError
from lockstep.ops.transfer import to_device

Tensor = torch.Tensor
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The rows (sequences) of the tokens of some tensors.

    >>> padded = Layout.padded(torch.tensor([[True, True, False], [True, False, False]]))
    >>> padded.row_sums(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])).tolist()
    [3.0, 3.0]
    >>> packed = Layout.packed([2, 1])
    >>> packed.row_sums(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [3.0, 3.0]
    """

    shape: tuple[int, ...]
    """Shape of every per-token tensor: [B, T] padded, [N] packed."""
    offsets: Int64Array
    """[R + 1] int64 on the host: row r is the flattened tokens offsets[r]:offsets[r + 1]."""
    mask: Tensor | None = None
    """`shape` bool: the tokens that count. None counts all."""
    group: dist.ProcessGroup | None = None
    """The ranks that each row is split over (sequence parallelism). Every rank holds the same R
    rows, in the same order, and its own piece of each. None: rows are whole."""

    @classmethod
    def of(cls, layout: Layout | Tensor | None, **tensors: Tensor) -> Layout:
        """The layout of these tensors: itself, made from a [B, T] mask, or for None one row per
        line of the first. Raises AlignmentError naming each tensor of another shape."""
        if layout is None:
            like = next(iter(tensors.values()))
            ones = torch.ones(like.shape, dtype=torch.bool, device=like.device)
            layout = cls.packed([len(like)]) if like.ndim == 1 else ones
        found = layout if isinstance(layout, Layout) else cls.padded(layout)
        found.check(**tensors)
        return found

    @classmethod
    def padded(cls, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Layout:
        """Layout of [B, T] tensors; mask [B, T], True or 1 where a token counts."""
        mask = torch.as_tensor(mask)
        if mask.ndim != 2:
            raise AlignmentError(
                f"a padded mask has the shape {list(mask.shape)}; expected [rows, tokens]. "
                "Layout.packed(lengths) is for rows that follow one another."
            )
        rows, tokens = mask.shape
        return cls((rows, tokens), np.arange(rows + 1) * tokens, counted(mask), group)

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int] | npt.NDArray[np.integer] | Tensor,
        mask: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Layout:
        """Layout of [N] tensors that concatenate rows of these lengths; 0 is an empty row. mask:
        [N], True or 1 where a token counts; None counts all."""
        if isinstance(lengths, Tensor):
            lengths = lengths.detach().cpu().numpy()
        sizes = np.asarray(lengths, np.int64).reshape(-1)
        if sizes.size and sizes.min() < 0:
            raise AlignmentError(f"row {int(sizes.argmin())} has the length {int(sizes.min())}.")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        total = int(offsets[-1])
        mask = None if mask is None else torch.as_tensor(mask)
        if mask is not None and tuple(mask.shape) != (total,):
            raise AlignmentError(
                f"the rows' lengths sum to {total} tokens, the mask has the shape "
                f"{list(mask.shape)}: expected [{total}]."
            )
        return cls((total,), offsets, None if mask is None else counted(mask), group)

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
        """Row and index of the flattened token, in words."""
        row = int(np.searchsorted(self.offsets, token, side="right")) - 1
        return f"row {row}, token {token - int(self.offsets[row])}"

    def lengths(self, device: torch.device | str) -> Tensor:
        """[R] int64: tokens of each row, padding included."""
        return to_device(np.diff(self.offsets), device)

    def row_counts(self, device: torch.device | str = "cpu") -> Tensor:
        """[R] float64: the tokens of each row that count."""
        return self.row_sums(torch.ones(self.shape, device=device))

    def row_sums(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` (`shape`) over the tokens of each row that count.

        Other places may hold anything. No gradient flows through it. All-reduced over the ranks
        that share the rows.
        """
        self.check(values=values)
        flat = values.detach().double()
        if self.mask is not None:
            flat = torch.where(self.mask, flat, 0.0)
        sums = torch.segment_reduce(
            flat.reshape(-1), "sum", lengths=self.lengths(values.device), unsafe=True
        )
        return self.all_reduce_rows(sums)

    def expand(self, values_R: Tensor) -> Tensor:
        """[R] -> `shape`: each row's value at all of its tokens."""
        lengths = self.lengths(values_R.device)
        out = torch.repeat_interleave(values_R, lengths, output_size=self.num_tokens)
        return out.reshape(self.shape)

    def all_reduce_rows(self, sums: Tensor) -> Tensor:
        """Sums of local pieces -> sums of whole rows, [..., R]. In place, one collective."""
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums

    @property
    def counts_rows(self) -> bool:
        """True if this rank reports the rows that it shares, so that each is counted once."""
        return self.group is None or dist.get_rank(self.group) == 0


def counted(mask: Tensor) -> Tensor:
    """The mask as bool. Raises AlignmentError for a negative number or NaN, on a CPU: labels of
    Hugging Face have -100 where a token does not count."""
    is_on = mask > 0
    if mask.device.type == "cpu" and bool((is_wrong := is_on != (mask != 0)).any()):
        found = float(mask[is_wrong][0])
        raise AlignmentError(f"the mask has the value {found:g}; expected 1 and 0, or bool.")
    return is_on
