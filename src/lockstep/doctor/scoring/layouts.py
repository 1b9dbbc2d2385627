"""Rows as a program lays them out that gets padding, packing or positions wrong. numpy only.

A layout is other rows, whose tokens know where they are in the real ones: padding or another row in
front, tokens that no attention sees left out, and positions of its own.

# R rows  N tokens of the real rows  M tokens of the layout
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lockstep.doctor.rows import BoolArray, Rows
from lockstep.types import Int32Array, Int64Array

MAX_BEFORE = 3
"""Largest number of rows that attention leaks from: further rows change little."""
MAX_PADDING_SHARE = 4
"""Largest ratio of padding to a row's own tokens: padding costs a forward as the row does."""

Laid = tuple[Sequence[int] | Int32Array, Int64Array, Int64Array]
"""One row of a layout: its ids, their positions, and the places of its tokens in the real rows."""
_Way = Callable[[int], tuple[Int32Array, int, Int64Array] | None]
"""Row -> (ids in front, number of its first tokens that are left out, positions of both); None if
this row is as it was."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Other rows in place of some real ones."""

    rows: Rows
    positions: Int64Array
    """[M] position that the model gets."""
    place: Int64Array
    """[M] index of the token among the N; -1 for one of no row or of another."""

    @classmethod
    def of(cls, found: Sequence[Laid], rows: Rows) -> Layout | None:
        """The layout of these rows in place of some of `rows`; None if there are none."""
        if not found:
            return None
        ids, positions, places = (
            [np.asarray(part) for part in parts] for parts in zip(*found, strict=True)
        )
        place = np.concatenate(places).astype(np.int64)
        return cls(
            rows=Rows(
                row_ids=tuple(map(str, range(len(ids)))),
                offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
                token_ids=np.concatenate(ids).astype(np.int32),
                loss_mask=(place >= 0) & rows.loss_mask[place],
            ),
            positions=np.concatenate(positions).astype(np.int64),
            place=place,
        )


def layouts(
    rows: Rows, *, pad_id: int | None, max_positions: int
) -> Iterator[tuple[str, str, Callable[[Int64Array], Layout | None]]]:
    """(cause, defect in words, indices of rows -> their layout) of every wrong layout that the rows
    allow, in the order of the trials."""
    trained = np.flatnonzero(rows.loss_mask & (rows.position > 0))
    prompts = np.minimum(rows.firsts(trained) - rows.offsets[:-1], rows.sizes)
    ids = np.split(rows.token_ids, rows.offsets[1:-1])
    padding = {
        "the longest prompt": prompts.max(initial=0) - prompts,
        "the longest row": rows.sizes.max(initial=0) - rows.sizes,
    }

    def laid(way: _Way, chosen: Int64Array) -> Layout | None:
        out: list[Laid] = []
        for row in chosen.tolist():
            if (found := way(row)) is None:
                continue
            front, left_out, told = found
            is_valid = told.min(initial=0) >= 0 and told.max(initial=0) < max_positions
            if is_valid and len(front) <= MAX_PADDING_SHARE * len(ids[row]):
                begin, end = rows.offsets[row : row + 2].tolist()
                own = np.arange(begin + left_out, end)
                place = np.concatenate([np.full(len(front), -1), own])
                out.append((np.concatenate([front, rows.token_ids[own]]), told, place))
        return Layout.of(out, rows)

    def leaked(row: int, before: int, is_restarted: bool):
        if row < before:
            return None
        parts = [np.arange(len(part)) for part in ids[row - before : row + 1]]
        front = np.concatenate(ids[row - before : row])
        told = np.concatenate(parts) if is_restarted else np.arange(len(front) + len(ids[row]))
        return front, 0, told

    def attended(row: int, counts: Int64Array):
        count = int(counts[row])
        front = np.full(max(count, 0), pad_id, np.int32)
        return (front, 0, np.arange(count + len(ids[row]))) if count > 0 else None

    def cut(row: int, counts: Int64Array):
        """Padding on the right, and a mask that says it is on the left: the first n tokens of the
        row are not seen."""
        count, size = int(counts[row]), len(ids[row])
        return (_NONE, count, np.arange(count, size)) if 0 < count < size - 1 else None

    def at_positions(row: int, told: Int64Array):
        return _NONE, 0, told[rows.slices[row]]

    for text, told in _positions(rows, prompts, padding).items():
        yield "wrong_positions", f"with {text}", partial(laid, partial(at_positions, told=told))
    for before in range(1, MAX_BEFORE + 1):
        for is_restarted in (True, False):
            which = "the row" if before == 1 else f"the {before} rows"
            how = "positions that begin again" if is_restarted else "positions that go on"
            way = partial(leaked, before=before, is_restarted=is_restarted)
            yield "packing_leak", f"after {which} before it, with {how},", partial(laid, way)
    for to, counts in padding.items() if pad_id is not None else ():
        text = f"after left padding to {to} that attention sees"
        yield "padding_attended", text, partial(laid, partial(attended, counts=counts))
    for to, counts in padding.items():
        text = f"without its first tokens: the number that right padding to {to} has"
        yield "padding_attended", text, partial(laid, partial(cut, counts=counts))


_NONE = np.empty(0, np.int32)


def _positions(
    rows: Rows, prompts: Int64Array, padding: Mapping[str, Int64Array]
) -> dict[str, Int64Array]:
    """Defect of positions in words -> [N] positions; below 0 in rows that cannot have it.

    A turn is a reply of the model, with the tokens before it.
    """
    own, row = rows.position, rows.row_of
    is_reply = own >= prompts[row]
    flips = np.diff(rows.loss_mask.astype(np.int8), prepend=0)

    def restarted(is_first: BoolArray) -> Int64Array:
        first = np.flatnonzero((own == 0) | is_first)
        return np.arange(len(own)) - np.repeat(first, np.diff(np.append(first, len(own))))

    after = np.where(row == 0, -1, own + rows.sizes[row - 1])
    return {
        "positions of the reply one too high": own + is_reply,
        "positions of the reply one too low": np.maximum(own - is_reply, 0),
        "positions that begin again at each message": restarted(flips != 0),
        "positions that begin again at each turn": restarted(flips < 0),
        **{
            f"positions that count left padding to {to}": own + by[row]
            for to, by in padding.items()
        },
        "positions of a reply that begins at the longest prompt": own
        + is_reply * padding["the longest prompt"][row],
        "positions from 1": own + 1,
        "positions from 2": own + 2,
        "positions that go on after the row before it": after,
        "every token at position 0": 0 * own,
    }
