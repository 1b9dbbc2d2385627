# torch leaves from_numpy partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The tokens of some whole rows, on their device, and sums over them.

Nothing waits for a GPU: shapes are known on the host, and a token that cannot be compared stays in
its place, with a log ratio of 0. A CPU leaves out tokens that do not count, so that padding costs
next to nothing.

# N tokens, flattened  n tokens worked on  R rows  C cells of a report
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction import kl
from lockstep.correction.arrays import Values
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import CELLS, NUM_CELLS
from lockstep.observe.metrics import PARTS, Partition
from lockstep.ops.transfer import to_device
from lockstep.types import FORCED_LOGPROB

Tensor = torch.Tensor
Columns = Mapping[str, Tensor | None]
Int64Array = npt.NDArray[np.int64]

CHUNK_TOKENS = 1 << 15
"""Tokens worked on at a time, and the rest of the row that they end in. So few that temporaries
stay in the cache. 262,144 tokens of `mis` take 0.034 s with one thread and 0.058 s with two, whose
waking costs more than they save; with 1 << 14 0.05 and 0.09 s, with 1 << 17 0.04 and 0.07 s."""

MIN_RUN = 8
"""Neighbouring tokens of one cell, on average, from which sums over runs are faster."""

_STRIDES = {part.name: NUM_CELLS // int(np.prod(CELLS[: i + 1])) for i, part in enumerate(PARTS)}
"""Difference between the cells of neighbouring labels of a part; 1 for the last."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenFacts:
    """Optional columns of the tokens that the report groups by; [N] or [B, T]."""

    advantages: Values | None = None
    """float32; read by rules with `only_negative_advantage`."""
    ages: Values | None = None
    """int: updates between the policy that sampled and the one in training."""
    turns: Values | None = None
    """int: the episode's turn."""
    positions: Values | None = None
    """int: the token's place in its row; None counts from the row's first token in the layout."""
    kinds: Values | None = None
    """int: index into TOKEN_KINDS."""


class Tokens:
    """The tokens of some whole rows, and values derived once from their log-probs."""

    def __init__(self, columns: Columns, offsets: Int64Array) -> None:
        """The tokens of rows that begin at `offsets`. columns: [N] each, on one device: `new`,
        `old`, `mask` and the columns of `TokenFacts`."""
        new, self.num_all = columns["new"], int(offsets[-1])
        assert new is not None, "both log-probs are always given"
        lengths = to_device(np.diff(offsets), new.device)
        if columns["positions"] is None:
            first_R = lengths.cumsum(0) - lengths
            begins = torch.repeat_interleave(first_R, lengths, output_size=self.num_all)
            positions = torch.arange(self.num_all, device=new.device) - begins
            columns = {**columns, "positions": positions}
        self.index: Tensor | None = None
        """[n] int64: the tokens' places among the N; None: all of them."""
        if (mask := columns["mask"]) is not None and kl.is_readable(mask):
            self.index = index = mask.nonzero().flatten()
            lengths = torch.from_numpy(np.diff(np.searchsorted(index.numpy(), offsets)))
            columns = {
                name: None if x is None or x is mask else x.index_select(0, index)
                for name, x in columns.items()
            }
        new, old, advantages = columns["new"], columns["old"], columns["advantages"]
        assert new is not None and old is not None, "both log-probs are always given"
        self.lengths, self.mask = lengths, columns["mask"]
        """[R] int64: of the rows, in these tokens. [n] bool: the tokens that count; None: all."""
        self.d, self.is_compared = kl.log_ratio(new, old, self.mask)
        """[n]: trainer - rollout, 0.0 where a token is not compared. [n] bool: the tokens that
        count and are finite on both sides."""
        self.new, self.old = new.to(self.d.dtype), old.to(self.d.dtype)
        self.size, self.ratio, self.k3 = self.d.abs(), exp(self.d), kl.k3(self.d)
        self.negative = None if advantages is None else advantages < 0
        self.cell: Tensor = _cells(columns, old)
        self.run_lengths: Tensor | None = None
        """[n] int64: each token's cell of the report. On a CPU, [k] cells and the [k] numbers of
        neighbouring tokens in each, unless most neighbours differ."""
        if kl.is_readable(old):
            runs: tuple[Tensor, Tensor] = torch.unique_consecutive(self.cell, return_counts=True)
            if len(runs[0]) * MIN_RUN <= len(old):  # summed several times as fast
                self.cell, self.run_lengths = runs
        self.active_R = lengths.double() if self.mask is None else self.by_row(self.mask)
        """[R] float64: tokens that count, finite or not."""

    def by_row(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of [n] values over each row, in the same order on every run."""
        return torch.segment_reduce(widened(values), "sum", lengths=self.lengths, unsafe=True)

    def by_cell(self, values: Tensor) -> Tensor:
        """[C] float64: the sum of [n] values over each cell."""
        wide = widened(values)
        if self.run_lengths is not None:
            wide = torch.segment_reduce(wide, "sum", lengths=self.run_lengths, unsafe=True)
        return wide.new_zeros(NUM_CELLS).scatter_add_(0, self.cell, wide)

    def largest_by_cell(self, values: Tensor) -> Tensor:
        """[C] float64: the largest of [n] values of compared tokens in each cell; -inf where there
        is none."""
        tops = torch.where(self.is_compared, values, float("-inf")).double()
        if self.run_lengths is not None:
            tops = torch.segment_reduce(tops, "max", lengths=self.run_lengths, unsafe=True)
        none = tops.new_full((NUM_CELLS,), float("-inf"))
        return none.scatter_reduce_(0, self.cell, tops, "amax")

    def spread(self, values_R: Tensor) -> Tensor:
        """[n]: at each token, the value of its row."""
        return torch.repeat_interleave(values_R, self.lengths, output_size=len(self.d))

    def among_all(self, values: Tensor) -> Tensor:
        """[N]: [n] values at these tokens' places, 0 elsewhere."""
        if self.index is None:
            return values
        return values.new_zeros(self.num_all).scatter_(0, self.index, values)


def chunks_of(layout: Layout, device: torch.device | str = "cpu") -> list[slice]:
    """Rows that are worked on at once. All rows on a GPU, and where they are split over ranks,
    which decide about them together."""
    edges = [0, layout.num_rows]
    is_cut = layout.group is None and torch.device(device).type == "cpu"
    if is_cut and layout.num_tokens > CHUNK_TOKENS:
        number = layout.offsets[:-1] // CHUNK_TOKENS
        edges = [*np.flatnonzero(np.diff(number, prepend=-1)).tolist(), layout.num_rows]
    return [slice(first, stop) for first, stop in pairwise(edges)]


def widened(values: Tensor) -> Tensor:
    """The values in float64. A bool is converted several times slower than the byte it is."""
    return (values.view(torch.uint8) if values.dtype == torch.bool else values).double()


def exp(d: Tensor) -> Tensor:
    """exp(d), with d cut at +-20."""
    return d.clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT).exp()


def _cells(columns: Columns, old: Tensor) -> Tensor:
    """[n] int64: each token's cell, as far as its facts are known."""
    cell = (old > FORCED_LOGPROB).long()  # the last part
    for part in PARTS[:-1]:
        if (numbers := columns[f"{part.name}s"]) is not None:
            table = _cell_table(part, cell.device)
            cell += table.index_select(0, numbers.long().clamp(0, len(table) - 1))
    return cell


@cache
def _cell_table(part: Partition, device: torch.device) -> Tensor:
    """[number] int64: offset that each number of a part adds to a token's cell, up to the start of
    the last label."""
    with torch.inference_mode(False):  # kept for whoever comes next
        label = np.searchsorted(part.starts[1:], np.arange(part.starts[-1] + 1), side="right")
        return to_device(label * _STRIDES[part.name], device)
