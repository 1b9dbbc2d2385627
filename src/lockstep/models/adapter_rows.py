"""Batches whose rows have different adapters: one low-rank product for all adapters of a shape.

A decoder is handed an `AdapterRows` along with its rows, and has no state of its own for it. The
base's products run over all rows at once; then each projection adds to every row the product of
that row's adapter, as `lora.LowRank` computes it for one.

# T tokens  K inputs  N outputs  R rank  S parts of a fused projection  E experts
# G groups: adapters of one shape, or pairs of adapter and expert  P rows of a grouped product
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.ops.base import Counts, Ops, on_host
from lockstep.ops.transfer import to_device

Tensor = torch.Tensor
IntArray = npt.NDArray[np.int64]

MOST_PADDED_ROWS = 64
"""Groups of at most this many rows are padded to one size, so that one batched product does all:
more rows fill a product of their own."""

ROW_QUANTUM = 4  # rows that `ops.invariant` would pad each product to, one by one

SPARE_ROWS = 64
"""Padding rows allowed beyond twice the real rows. Computing them takes less time than one product
per group."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows of a batch, sorted by what multiplies them.

    >>> groups = Groups.of(np.array([1, -1, 0, 1]), 2, torch.device("cpu"))
    >>> groups.source_P.tolist(), groups.counts   # both are padded to four rows
    ([2, 2, 2, 2, 0, 3, 3, 3], [4, 4])
    >>> groups.places_T.tolist(), groups.is_member_T1[:, 0].tolist()
    ([4, 0, 0, 5], [True, False, True, True])
    """

    source_P: Tensor
    """[P] int64: row of the batch that each row of the product reads."""
    counts: Counts
    """[G]: rows of each group, padding included."""
    places_T: Tensor
    """[T] int64: row of the product that belongs to each row of the batch; 0 if none does."""
    is_member_T1: Tensor | None
    """[T, 1] bool: rows of the batch that are in a group; None if all are."""

    @staticmethod
    def of(group_T: IntArray, num_groups: int, device: torch.device) -> Groups:
        """group_T: [T] group of each row, -1 for none."""
        source, counts, places = sort_rows(group_T, num_groups)
        longest = -(-int(counts.max()) // ROW_QUANTUM) * ROW_QUANTUM
        num_padded, is_member = num_groups * longest, group_T >= 0
        if longest <= MOST_PADDED_ROWS and num_padded <= 2 * len(source) + SPARE_ROWS:
            starts = counts.cumsum() - counts
            steps = np.minimum(np.arange(longest), np.maximum(counts[:, None] - 1, 0))
            source = source[np.minimum(starts[:, None] + steps, len(source) - 1).reshape(-1)]
            places = np.where(is_member, group_T * longest + places - starts[group_T], 0)
            counts = np.full(num_groups, longest)
        return Groups(
            to_device(source, device),
            counts.tolist(),
            to_device(places, device),
            None if is_member.all() else to_device(is_member[:, None], device),
        )


def sort_rows(group_T: IntArray, num_groups: int) -> tuple[IntArray, IntArray, IntArray]:
    """`Groups.of` without padding: (source, counts, places)."""
    members = np.flatnonzero(group_T >= 0)
    source = members[np.argsort(group_T[members], kind="stable")]
    places = np.zeros(len(group_T), np.int64)
    places[source] = np.arange(len(source))
    return source, np.bincount(group_T[source], minlength=num_groups), places


@dataclass(frozen=True, slots=True, eq=False)
class StackedFactors:
    """The factors of all groups at one projection."""

    A: Tensor
    """[G, S * R, K]."""
    B: tuple[Tensor, ...]
    """For each part [G, N, R]."""
    columns: tuple[slice, ...]
    """Outputs of each part."""
    scale: float

    def add(self, x_TK: Tensor, out_TN: Tensor, groups: Groups, ops: Ops) -> None:
        """Adds B (A x * scale) to the rows of `out_TN` that are in a group, in place."""
        x_PK = x_TK.index_select(0, groups.source_P)
        h_PC = ops.expert_linear(x_PK, self.A, None, groups.counts) * self.scale
        h_PSR = h_PC.view(len(h_PC), len(self.B), -1)
        for part, (B, columns) in enumerate(zip(self.B, self.columns, strict=True)):
            h_PR = h_PSR[:, part].contiguous()
            product_PN = ops.expert_linear(h_PR, B, None, groups.counts)
            target = out_TN[:, columns]
            added = target + product_PN.index_select(0, groups.places_T)
            if groups.is_member_T1 is not None:
                added = torch.where(groups.is_member_T1, added, target)
            target.copy_(added)


@dataclass(slots=True, eq=False)
class AdaptersOfShape:
    """The rows whose adapters have one shape."""

    group_T: IntArray
    """[T] index of each row's adapter in `factors`, -1 for an adapter of another shape."""
    num_adapters: int
    groups: Groups
    factors: Mapping[tuple[Any, str], StackedFactors]
    """(module, its attribute for an adapter) -> factors; nothing where it is not adapted."""


@dataclass(slots=True, eq=False)
class AdapterRows:
    """Which adapter each row of a batch has. For forwards without a gradient."""

    shapes: Sequence[AdaptersOfShape]
    device: torch.device
    _on_all_experts: dict[int, list[Groups]] = field(default_factory=dict[int, list[Groups]])

    def add(self, owner: Any, x_TK: Tensor, out_TN: Tensor, ops: Ops) -> Tensor:
        """`out_TN` of a projection, with the product of each row's adapter added in place."""
        for shape in self.shapes:
            if (factors := shape.factors.get((owner, "lora"))) is not None:
                factors.add(x_TK, out_TN, shape.groups, ops)
        return out_TN

    def of_experts(self, owner: Any, *attributes: str) -> list[list[StackedFactors | None]]:
        """For each attribute and each of `shapes`, the factors of all pairs of adapter and expert;
        empty lists if there are none at all, and no row must be sorted."""
        found = [[shape.factors.get((owner, a)) for shape in self.shapes] for a in attributes]
        return found if any(map(any, found)) else [[] for _ in attributes]

    def by_expert(self, token_R: Tensor, counts: Counts) -> list[Groups]:
        """For each of `shapes`, rows sorted by expert (counts: how many each has) as groups, one
        per pair of adapter and expert. token_R: [R] token of each row. The host waits for the
        device: batches of several adapters over a mixture are not captured in a graph."""
        return self._by_expert(token_R.cpu().numpy(), on_host(counts))

    def on_all_experts(self, num_experts: int) -> list[Groups]:
        """`by_expert` where every expert has every token; made once."""
        if num_experts not in self._on_all_experts:
            T = len(self.shapes[0].group_T)
            token_R = np.tile(np.arange(T), num_experts)
            self._on_all_experts[num_experts] = self._by_expert(token_R, [T] * num_experts)
        return self._on_all_experts[num_experts]

    def _by_expert(self, token_R: IntArray, counts: list[int]) -> list[Groups]:
        E = len(counts)
        expert_R = np.repeat(np.arange(E), counts)
        out: list[Groups] = []
        for shape in self.shapes:
            adapter_R = shape.group_T[token_R]
            pair_R = np.where(adapter_R < 0, -1, adapter_R * E + expert_R)
            out.append(Groups.of(pair_R, shape.num_adapters * E, self.device))
        return out
