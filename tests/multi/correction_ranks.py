"""What each rank of the tests does: its part of every correction.

Kept apart from the tests because every process that is started imports it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.correction import Corrected, Correction, Layout, Rule, TokenFacts, correct

WORLD = 4

EVERY_RULE = (
    Rule(stat="ratio", low=0.213, high=4.7),
    Rule(stat="k3", aggregation="mean", high=0.413),
    Rule(stat="ratio", aggregation="sum", low=0.0213, high=51.7),
    Rule(stat="prob_diff", aggregation="max", high=0.413),
    Rule.veto_prob(3e-6),
    Rule.veto_ratio(0.0513),
    Rule.opsm(0.0613),
)


def _weights(level, bound="truncate", limits=(0.0, 1.913), **settings):
    return Correction(anchor="recomputed", level=level, bound=bound, limits=limits, **settings)


CORRECTIONS = {
    "token": _weights("token", normalize=True),
    "token_mask": _weights("token", "mask", (0.413, 1.913)),
    "sequence": _weights("sequence", limits=(0.0, 3.7)),
    "sequence_clip": _weights("sequence", "clip", (0.313, 3.7)),
    "sequence_mask": _weights("sequence", "mask", (0.113, 9.7)),
    "geometric": _weights("geometric", limits=(0.0, 1.213)),
    "geometric_mask": _weights("geometric", "mask", (0.913, 1.213)),
    "every_rule": _weights(
        "geometric",
        reject=EVERY_RULE,
        denominator="kept",
        kl_penalty_coef=0.1,
        kl_penalty_form="advantage",
        kl_penalty_clip=0.8,
    ),
    "vetoes": Correction(anchor="recomputed", reject=(Rule.veto_prob(3e-6), Rule.veto_ratio(0.3))),
    "penalty": Correction(anchor="recomputed", kl_penalty_coef=0.013, kl_penalty_form="advantage"),
    "mis": Correction.mis(level="sequence"),
}

LENGTHS = (9, 0, 1, 30, 2, 17, 0, 5, 12, 3, 24)
ROWS = tuple(range(len(LENGTHS)))

OWNER = {1: (0,) * 11, 2: (0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0), 4: (0, 0, 2, 3, 0, 2, 3, 3, 2, 0, 2)}
"""By the number of data-parallel ranks: whose each row is. The shares are uneven; of four, rank 1
has nothing."""


@dataclass(frozen=True)
class Part:
    """What one rank holds: for each of its rows, which of the row's tokens."""

    rows: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]

    def index(self) -> torch.Tensor:
        starts = [sum(LENGTHS[:r]) for r in ROWS]
        flat = [
            starts[r] + i for r, piece in zip(self.rows, self.pieces, strict=True) for i in piece
        ]
        return torch.tensor(flat, dtype=torch.int64)


def part_of(rank: int, *, data: int, sequence: int) -> Part:
    """Of data x sequence ranks, sequence-parallel ones next to each other."""
    rows = tuple(r for r in ROWS if OWNER[data][r] == rank // sequence)
    return Part(rows, tuple(_piece(LENGTHS[r], rank % sequence, sequence) for r in rows))


def _piece(length: int, rank: int, size: int) -> tuple[int, ...]:
    """A run of the row: the first rank has the shortest, and none at all of a short row."""
    ends = [length * i**2 // size**2 for i in range(size + 1)]
    return tuple(range(ends[rank], ends[rank + 1]))


def make_batch() -> dict[str, torch.Tensor]:
    """Tokens of all rows, packed; some are not finite, one is improbable, rows differ in noise."""
    size = sum(LENGTHS)
    g = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(size, generator=g)
    noise = torch.cat([torch.full((n,), 0.1 * i) for i, n in enumerate(LENGTHS)])
    new = (old + noise * torch.randn(size, generator=g)).clamp(max=0)
    new[3], old[20], old[41], new[50] = float("nan"), float("-inf"), float("nan"), -14.0
    return {
        "new": new,
        "old": old,
        "advantages": torch.randn(size, generator=g),
        "ages": torch.randint(0, 5, (size,), generator=g),
        "turns": torch.randint(0, 9, (size,), generator=g),
        "positions": torch.cat([torch.arange(n) for n in LENGTHS]),
        "kinds": torch.randint(0, 2, (size,), generator=g),
    }


@dataclass
class Result:
    """One rank's share of a correction, on the host."""

    index: torch.Tensor
    corrected: Corrected
    collectives: list[tuple[int, ...]] = field(default_factory=list)
    """The shapes that were all-reduced, in order."""


def run(
    correction: Correction,
    part: Part,
    *,
    sequence_group: dist.ProcessGroup | None = None,
    batch_group: dist.ProcessGroup | None = None,
) -> Result:
    batch, index = make_batch(), part.index()
    local = {name: values[index] for name, values in batch.items()}
    new, old = local.pop("new"), local.pop("old")
    layout = Layout.packed([len(p) for p in part.pieces], group=sequence_group)
    seen = Collectives()
    with seen if dist.is_initialized() else nullcontext():
        corrected = correct(
            new, old, correction, layout=layout, facts=TokenFacts(**local), group=batch_group
        )
    return Result(index, corrected, seen.shapes)


class Collectives(TorchDispatchMode):
    """Notes the shape that every collective inside is called with; refuses any but all_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.allreduce_.default, func
            self.shapes.append(tuple(args[0][0].shape))
        return func(*args, **(kwargs or {}))


SPLITS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
"""(data-parallel, sequence-parallel) ranks."""


def work(rank: int, directory: str) -> dict[tuple[int, int, str], Result]:
    """Everything that rank `rank` of WORLD does in all tests."""
    results: dict[tuple[int, int, str], Result] = {}
    for data, sequence in SPLITS:
        size = data * sequence
        # Every rank makes every group, in the same order; ranks beyond the split have no part.
        batch_group = dist.new_group(list(range(size)))
        groups = [
            dist.new_group(list(range(first, first + sequence)))
            for first in range(0, size, sequence)
        ]
        if rank >= size:
            continue
        for name, correction in CORRECTIONS.items():
            results[data, sequence, name] = run(
                correction,
                part_of(rank, data=data, sequence=sequence),
                sequence_group=groups[rank // sequence] if sequence > 1 else None,
                batch_group=batch_group,
            )
    # Without groups of its own: the world is the batch.
    for name, correction in CORRECTIONS.items():
        results[0, 0, name] = run(correction, part_of(rank, data=WORLD, sequence=1))
    return results
