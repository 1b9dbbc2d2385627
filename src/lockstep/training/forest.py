"""Rows as a forest of common beginnings, and the plan of micro-batches that keeps them together.

Attention is causal, so a common beginning (the prompt of a group, the turns before a branch) is the
same in each row. A micro-batch computes it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.types import Int64Array

TokenIds = npt.NDArray[np.int32]
Routes = npt.NDArray[np.int16]


def sort_rows(
    rows: Sequence[TokenIds], routes: Sequence[Routes] | None = None
) -> tuple[list[int], list[int]]:
    """(rows, ordered so that neighbours share the most tokens; tokens that each row shares with the
    row before it).

    Two rows share a token if they are equal up to and including it, in ids and, if given, in routes
    [T, layers, active]. Apart from the sorting, the cost is linear in tokens.

    >>> sort_rows([np.array(row, np.int32) for row in ([7, 8, 9], [4], [7, 8, 5])])
    ([1, 2, 0], [0, 0, 2])
    """
    keys: Sequence[npt.NDArray[Any]] = rows
    if routes is not None:
        keys = [
            np.concatenate([row[:, None], of_row.reshape(len(row), -1)], 1, dtype=np.int32)
            for row, of_row in zip(rows, routes, strict=True)
        ]
    order = sorted(range(len(rows)), key=lambda i: keys[i].tobytes())
    shared = [0] * len(order)
    for at in range(1, len(order)):
        before, row = keys[order[at - 1]], keys[order[at]]
        size = min(len(before), len(row))
        differs = (before[:size] != row[:size]).reshape(size, -1).any(1)
        shared[at] = int(differs.argmax()) if differs.any() else size
    return order, shared


def share_beginnings(
    rows: Sequence[TokenIds], routes: Sequence[Routes] | None = None
) -> tuple[list[Int64Array], TokenIds, Int64Array]:
    """(per row its tokens' indices, ids [T] of the distinct tokens, their positions [T]).

    >>> rows = [np.array(row, np.int32) for row in ([7, 8, 9], [7, 8, 5])]
    >>> index, ids, positions = share_beginnings(rows)
    >>> sorted(ids.tolist()), [ids[i].tolist() for i in index], len(set(index[0]) & set(index[1]))
    ([5, 7, 8, 9], [[7, 8, 9], [7, 8, 5]], 2)
    """
    index: list[Int64Array] = [np.empty(0, np.int64)] * len(rows)
    ids: list[TokenIds] = []
    positions: list[Int64Array] = []
    num_tokens, before = 0, index[0]
    for at, num_shared in zip(*sort_rows(rows, routes), strict=True):
        row, end = rows[at], num_tokens + len(rows[at]) - num_shared
        before = index[at] = np.concatenate([before[:num_shared], np.arange(num_tokens, end)])
        ids.append(row[num_shared:])
        positions.append(np.arange(num_shared, len(row)))
        num_tokens = end
    return index, np.concatenate(ids), np.concatenate(positions)


@dataclass(slots=True, kw_only=True)
class Part:
    """Rows that are computed together."""

    rows: list[int]
    num_tokens: int
    """Distinct tokens of the rows."""
    num_trained: int
    """Log-probs that the rows ask for."""


@dataclass(slots=True)
class _Branching:
    """A place where rows part."""

    num_shared: int
    """Tokens before it."""
    parts: list[Part] = field(default_factory=list[Part])


def plan_forest(
    rows: Mapping[int, TokenIds],
    num_trained: Mapping[int, int],
    max_tokens: int,
    *,
    routes: Mapping[int, Routes] | None = None,
    num_ranks: int = 1,
) -> list[Part]:
    """Divides rows, by number, into parts of at most `max_tokens` distinct tokens and `max_tokens`
    log-probs. Deterministic. Ranks take the parts in this order, in turn.

    From the leaves to the roots, the branches of a place are joined again, the largest first, each
    into the first part that has room. Tokens that they share count once in a part. So a tree that
    fits is not split, and a larger tree is split near its root. A row longer than `max_tokens` has
    a part of its own. For several ranks, the budget is the smallest that needs no more rounds: then
    parts have similar sizes, and a tree is split so that no rank is idle.

    Source: first fit decreasing, over a tree of longest common prefixes.

    >>> lists = [1, 2, 3, 4], [1, 2, 3, 5], [9]
    >>> rows = {i: np.array(row, np.int32) for i, row in enumerate(lists)}
    >>> plan = plan_forest(rows, dict.fromkeys(rows, 1), 6)
    >>> [(part.rows, part.num_tokens) for part in plan]
    [([0, 1, 2], 6)]
    >>> [part.rows for part in plan_forest(rows, dict.fromkeys(rows, 1), 4)]
    [[0], [1], [2]]
    """
    numbers = list(rows)
    found = sort_rows(
        [rows[i] for i in numbers], None if routes is None else [routes[i] for i in numbers]
    )
    order, shared = [numbers[at] for at in found[0]], found[1]
    sizes = {i: len(row) for i, row in rows.items()}

    def plan_for(budget: int) -> list[Part]:
        parts = _grow(order, shared, sizes, num_trained, budget)
        for part in parts:
            # Neighbours have similar lengths, which is fast in attention.
            part.rows.sort(key=lambda i: (-sizes[i], i))
        return parts

    plan = plan_for(max_tokens)
    if num_ranks == 1 or not numbers:
        return plan
    # As many micro-batches as fill the rounds, each as small as that number allows.
    most = -(-len(plan) // num_ranks) * num_ranks
    low, high = max(sizes.values()) - 1, max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        smaller = plan_for(middle)
        if len(smaller) <= most:
            plan, high = smaller, middle
        else:
            low = middle
    plan.sort(key=lambda part: -part.num_tokens)  # ranks compute like parts at a time
    return plan


def _grow(
    order: Sequence[int],
    shared: Sequence[int],
    sizes: Mapping[int, int],
    num_trained: Mapping[int, int],
    budget: int,
) -> list[Part]:
    open_places = [_Branching(0)]
    parts: list[Part] = []

    def close() -> None:
        nonlocal parts
        place = open_places.pop()
        parts = _fit([*place.parts, *parts], place.num_shared, budget)

    for row, num_shared in zip(order, shared, strict=True):
        while open_places[-1].num_shared > num_shared:
            close()
        if open_places[-1].num_shared < num_shared:
            open_places.append(_Branching(num_shared))
        open_places[-1].parts += parts
        parts = [Part(rows=[row], num_tokens=sizes[row], num_trained=num_trained[row])]
    while open_places:
        close()
    return parts


def _fit(parts: Sequence[Part], num_shared: int, budget: int) -> list[Part]:
    """Puts parts together whose rows have their first `num_shared` tokens in common."""
    out: list[Part] = []
    for part in sorted(parts, key=lambda part: (-part.num_tokens, min(part.rows))):
        own = part.num_tokens - num_shared
        for other in out:
            if other.num_tokens + own <= budget and other.num_trained + part.num_trained <= budget:
                other.rows += part.rows
                other.num_tokens += own
                other.num_trained += part.num_trained
                break
        else:
            out.append(part)
    return out
