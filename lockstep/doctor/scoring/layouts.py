"""Rows as a program lays them out that gets padding, packing or positions wrong. numpy only.

A layout is other rows, whose tokens know where they are in the real ones: padding or another row in
front, tokens that no attention sees left out, and positions of its own.

# R rows  N tokens of the real rows  M tokens of the layout
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.rows import BoolArray, Rows
from lockstep.types import Int32Array, Int64Array

MAX_BEFORE = 3
"""Rows in front of one that attention leaks into: more change what it sees but little."""
MAX_PADDING_SHARE = 4
"""Ratio of padding to a row's own tokens from which on a layout is not tried: it costs a forward of
that many more tokens."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Other rows that stand for some of the real ones."""

    rows: Rows
    positions: Int64Array
    """[M] position that the model is told."""
    place: Int64Array
    """[M] index of the token among the N; -1 for one of no row or of another."""

    @classmethod
    def of(cls, found: Sequence[Laid], rows: Rows) -> Layout | None:
        """The layout of these rows, which stand for some of `rows`; None if there are none."""
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


Laid = tuple[Sequence[int] | Int32Array, Int64Array, Int64Array]
"""One row of a layout: its ids, their positions, and the places of its tokens in the real rows."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Facts about the batches in which rows were computed."""

    prompts: Int64Array
    """[R] tokens before the first that is trained."""
    longest_prompt: int
    """Tokens of the longest prompt in the whole dump."""
    longest: int
    preceding: Sequence[tuple[Int32Array, ...]]
    """[R] ids of the rows before this one in the dump, the nearest first."""
    turns: Mapping[str, Sequence[Int64Array]]
    """Where positions begin again, in words -> [R] positions of each row's tokens."""
    pad_id: int | None
    max_positions: int


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """One way to lay out rows wrongly."""

    cause: str
    text: str
    family: str = ""
    """Arrangements of one family are one defect, of which each row has another size."""
    of_row: Callable[[int, Int32Array, Lines], tuple[Int32Array, int, Int64Array] | None]
    """(row, its ids, the batches) -> (ids in front, its first tokens that are left out, positions
    of both); None if this row is as it was."""


def laid_out(
    arrangement: Arrangement, rows: Rows, chosen: Sequence[int], lines: Lines
) -> Layout | None:
    """The chosen rows under this arrangement, without those that it does not change."""
    out: list[Laid] = []
    for row in chosen:
        begin, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
        found = arrangement.of_row(row, rows.token_ids[begin:end], lines)
        if found is None:
            continue
        front, left_out, told = found
        if told.max(initial=0) >= lines.max_positions or told.min(initial=0) < 0:
            continue
        if len(front) > MAX_PADDING_SHARE * (end - begin):
            continue
        own = np.arange(begin + left_out, end)
        place = np.concatenate([np.full(len(front), -1), own])
        out.append((np.concatenate([front, rows.token_ids[own]]), told, place))
    return Layout.of(out, rows)


NONE = np.empty(0, np.int32)


def arrangements(lines: Lines) -> Iterator[Arrangement]:
    """Every arrangement that the dump allows, in the order in which it is tried."""
    yield from _positions(lines)
    for before in range(1, MAX_BEFORE + 1):
        for is_restarted in (True, False):
            yield _leak(before, is_restarted)
    if lines.pad_id is not None:
        for to, size in _TO.items():
            yield _attended(to, size, lines.pad_id)
    for to, size in _TO.items():
        yield _cut(to, size)


_Size = Callable[[int, int, Lines], int]


_TO: dict[str, _Size] = {
    "the longest prompt": lambda row, size, lines: lines.longest_prompt - int(lines.prompts[row]),
    "the longest row": lambda row, size, lines: lines.longest - size,
}
"""Length to which rows are padded -> tokens of padding."""


# -- positions ------------------------------------------------------------------------------------


def _positions(lines: Lines) -> Iterator[Arrangement]:
    def told(text: str, of: Callable[[int, int, int, Lines], Int64Array | None]) -> Arrangement:
        def of_row(row: int, ids: Int32Array, lines: Lines):
            positions = of(row, len(ids), int(lines.prompts[row]), lines)
            return None if positions is None else (NONE, 0, positions)

        return Arrangement(cause="wrong_positions", text=text, of_row=of_row)

    def moved(by: int) -> Callable[[int, int, int, Lines], Int64Array | None]:
        def of(row: int, size: int, prompt: int, lines: Lines) -> Int64Array | None:
            positions = np.arange(size)
            return np.maximum(positions + np.where(positions >= prompt, by, 0), 0)

        return of

    yield told("with positions of the reply one too high", moved(1))
    yield told("with positions of the reply one too low", moved(-1))
    for where in lines.turns:
        yield told(
            f"with positions that begin again at {where}",
            lambda row, size, prompt, lines, where=where: lines.turns[where][row],
        )
    for to, size_of in _TO.items():
        yield told(
            f"with positions that count left padding to {to}",
            lambda row, size, prompt, lines, size_of=size_of: (
                np.arange(size) + size_of(row, size, lines)
            ),
        )
    yield told(
        "with positions of a reply that begins at the longest prompt",
        lambda row, size, prompt, lines: (
            np.arange(size) + np.where(np.arange(size) >= prompt, lines.longest_prompt - prompt, 0)
        ),
    )
    for by in (1, 2):
        yield told(f"with positions from {by}", lambda row, size, *_, by=by: np.arange(size) + by)
    yield told(
        "with positions that go on after the row before it",
        lambda row, size, prompt, lines: (
            np.arange(size) + len(lines.preceding[row][0]) if lines.preceding[row] else None
        ),
    )
    yield told("with every token at position 0", lambda row, size, *_: np.zeros(size, np.int64))


def turn_positions(rows: Rows) -> dict[str, list[Int64Array]]:
    """`Lines.turns`: a turn is a reply of the model, with what comes before it."""
    flips = np.diff(rows.loss_mask.astype(np.int8), prepend=0)

    def restarted(is_first: BoolArray) -> list[Int64Array]:
        first = np.flatnonzero((rows.position == 0) | is_first)
        sizes = np.diff(np.append(first, rows.num_tokens))
        told = np.arange(rows.num_tokens) - np.repeat(first, sizes)
        return np.split(told, rows.offsets[1:-1])

    return {"each message": restarted(flips != 0), "each turn": restarted(flips < 0)}


# -- what attention sees --------------------------------------------------------------------------


def _leak(before: int, is_restarted: bool) -> Arrangement:
    def of_row(row: int, ids: Int32Array, lines: Lines):
        seen = lines.preceding[row]
        if len(seen) < before:
            return None
        front = np.concatenate(seen[before - 1 :: -1] if before > 1 else seen[:1])
        if is_restarted:
            parts = [*seen[:before][::-1], ids]
            told = np.concatenate([np.arange(len(part)) for part in parts])
        else:
            told = np.arange(len(front) + len(ids))
        return front, 0, told

    rows = "the row" if before == 1 else f"the {before} rows"
    how = "positions that begin again" if is_restarted else "positions that go on"
    return Arrangement(
        cause="packing_leak",
        text=f"after {rows} before it, with {how},",
        family=f"leak {is_restarted}",
        of_row=of_row,
    )


def _attended(to: str, size_of: _Size, pad_id: int) -> Arrangement:
    def of_row(row: int, ids: Int32Array, lines: Lines):
        count = size_of(row, len(ids), lines)
        if count <= 0:
            return None
        return np.full(count, pad_id, np.int32), 0, np.arange(count + len(ids))

    return Arrangement(
        cause="padding_attended",
        text=f"after left padding to {to} that attention sees",
        of_row=of_row,
    )


def _cut(to: str, size_of: _Size) -> Arrangement:
    """Padding on the right, and a mask that says it is on the left: the first n tokens of the row
    are not seen."""

    def of_row(row: int, ids: Int32Array, lines: Lines):
        count = size_of(row, len(ids), lines)
        if not 0 < count < len(ids) - 1:
            return None
        return NONE, count, np.arange(count, len(ids))

    return Arrangement(
        cause="padding_attended",
        text=f"without its first tokens, as many as right padding to {to} has",
        of_row=of_row,
    )
