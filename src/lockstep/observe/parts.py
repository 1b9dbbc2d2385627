"""The partitions of tokens that figures of the mismatch are split by: age, turn, position, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.types import TOKEN_KINDS


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of tokens by one of their numbers, in half-open ranges."""

    name: str
    labels: tuple[str, ...]
    starts: tuple[int, ...]
    """First number of each label's range, rising; numbers below the first belong to it."""


def _part(name: str, *starts: int, labels: Sequence[str] = ()) -> Partition:
    ends = [*starts[1:], None]
    made = [
        f"{a}+" if b is None else str(a) if b == a + 1 else f"{a}-{b - 1}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return Partition(name, tuple(labels) or tuple(made), starts)


PARTS = (
    _part("age", 0, 1, 2, 4),
    _part("turn", 0, 1, 2, 3, 4, 8),
    _part("position", 0, 16, 64, 256, 1024, 4096, 16384),
    _part("kind", *range(len(TOKEN_KINDS)), labels=TOKEN_KINDS),
    _part("forced", 0, 1, labels=("no", "yes")),
)
"""age: updates between the policy that sampled and the one in training (0: what differs is
numerics, above: staleness too). turn: of the episode. position: of the token in its row. kind: see
TOKEN_KINDS. forced: probability under the sampler over 0.99."""
