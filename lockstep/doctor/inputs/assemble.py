"""Rows one by one, as a trainer's file has them, laid end to end in chunks of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.rows import TOKEN_COLUMNS, BoolArray, Rows
from lockstep.errors import DataError
from lockstep.types import Int32Array

Array = npt.NDArray[Any]

_FILLS: Mapping[str, tuple[str, Any]] = {
    "rollout_logprobs": ("f4", np.nan),
    "trainer_logprobs": ("f4", np.nan),
    "is_sampled": ("?", False),
    "turn": ("i4", -1),
    "policy_version": ("i4", -1),
    "advantages": ("f4", np.nan),
    "routed_experts": ("i2", -1),
    "trainer_version": ("i8", -1),
    "prompt_lengths": ("i8", -1),
    "rewards": ("f8", np.nan),
    "groups": ("i8", -1),
    "steps": ("i8", -1),
}
"""Column -> its type, and what stands where a row has none."""
assert _FILLS.keys() <= {f.name for f in fields(Rows)}


HEAD_ROWS = 64
"""That are read to find out which columns a file of lines has."""
_NEVER_LOST = frozenset({"rollout_logprobs", "trainer_logprobs", "advantages", "routed_experts"})
"""Columns that are read in full or not at all."""
_TOKENS_OF_TEXT = 256
"""That a row without ids counts for, so that a chunk of texts ends too."""


@dataclass(kw_only=True)
class Row:
    """One row of a dump, before it is laid beside others."""

    row_id: str
    token_ids: Int32Array
    """[T]"""
    loss_mask: BoolArray
    """[T]"""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of `Rows`: [T, ...] per token, or the one value of the row."""

    def __len__(self) -> int:
        return len(self.token_ids)


def in_chunks(rows: Iterable[Row], has: frozenset[str], *, max_tokens: int) -> Iterator[Rows]:
    """At most `max_tokens` at a time, or one row; each chunk has exactly the columns `has`.

    A row without one of them has NaN, -1, False or None there. Raises DataError for a row that has
    numbers of its tokens which the head did not have: they would be lost.
    """
    pending: list[Row] = []
    size = 0
    for row in rows:
        if lost := _NEVER_LOST & row.columns.keys() - has:
            raise DataError(
                f"row {row.row_id!r} is the first with {min(lost)}, and the head of the dump says "
                "which columns it has. Give the part from there on by itself."
            )
        tokens = len(row) or _TOKENS_OF_TEXT
        if pending and size + tokens > max_tokens:
            yield _lay(pending, has)
            pending, size = [], 0
        pending.append(row)
        size += tokens
    if pending:
        yield _lay(pending, has)


def columns_of(rows: Iterable[Row]) -> frozenset[str]:
    """Those that any of the rows has."""
    return frozenset(name for row in rows for name in row.columns)


def head_of(rows: Iterator[Row]) -> list[Row]:
    """The first HEAD_ROWS, or as many as there are."""
    return list(islice(rows, HEAD_ROWS))


def of_response(
    values: Sequence[Any] | Array, size: int, where: str, *, fill: Any, dtype: str
) -> Array:
    """[size, ...]: `values` at the end of a row of `size` tokens, `fill` before them.

    If they are more than the row has tokens, the last ones: the row's prompt length is then
    negative, which is for the check of the boundary to say. where: for an error.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # too large for float32: infinite
            response = np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError):
        raise DataError(f"{where}: expected numbers ({dtype}), found something else.") from None
    out = np.full((size, *response.shape[1:]), fill, dtype)
    kept = min(size, len(response))
    if kept:
        out[size - kept :] = response[len(response) - kept :]
    return out


def ids_of(values: Any, where: str) -> Int32Array:
    """Token ids as int32. Raises DataError if they are not whole numbers of 32 bits."""
    if isinstance(values, list) and set(map(type, values)) <= {int}:
        try:
            values = np.asarray(values, np.int64) if values else np.empty(0, np.int64)
        except OverflowError:
            raise DataError(f"{where}: a token id is beyond 64 bits.") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(f"{where}: expected a list of token ids, whole numbers.")
    if len(values) and (values.min() < -(1 << 31) or values.max() >= 1 << 31):
        raise DataError(f"{where}: a token id is beyond 32 bits: {values.min()} to {values.max()}.")
    return values.astype(np.int32)


def whole(value: Any) -> int | None:
    """A step, a group, a version: a whole number of 31 bits; None if it is something else."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_whole and abs(int(value)) < 1 << 31 else None


def real(value: Any) -> float | None:
    """A reward: a number; None if it is something else."""
    try:
        is_real = isinstance(value, int | float | np.floating | np.integer)
        return float(value) if is_real else None
    except OverflowError:
        return None


def floats_of(values: Any, size: int, where: str) -> Array:
    """[size] float32 of a JSON list in which null stands for what is not known (or not finite).

    Raises DataError if it is no list of `size` numbers.
    """
    if not isinstance(values, list) or len(values) != size:
        found = f"{len(values)} entries" if isinstance(values, list) else type(values).__name__
        raise DataError(f"{where}: expected {size} numbers, one per token; found {found}.")
    if not set(map(type, values)) <= {int, float, type(None)}:
        raise DataError(f"{where}: expected numbers; some entry is none.")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float32)
    except OverflowError:
        raise DataError(f"{where}: expected numbers; some entry is beyond any float.") from None


def mask_of(values: Any, size: int, where: str) -> BoolArray:
    """[size] of a JSON list of true and false, or of 0 and 1."""
    if not isinstance(values, list) or len(values) != size:
        found = f"{len(values)} entries" if isinstance(values, list) else type(values).__name__
        raise DataError(f"{where}: expected {size} of true and false; found {found}.")
    if any(value not in (0, 1) for value in values):
        raise DataError(f"{where}: expected true and false (or 1 and 0); found something else.")
    return np.array(values, np.bool_)


def _lay(rows: Sequence[Row], has: frozenset[str]) -> Rows:
    columns: dict[str, Any] = {}
    for name in has:
        if name not in _FILLS:  # messages, texts: one object of each row
            columns[name] = tuple(row.columns.get(name) for row in rows)
            continue
        dtype, fill = _FILLS[name]
        if name not in TOKEN_COLUMNS:
            columns[name] = np.array([row.columns.get(name, fill) for row in rows], dtype)
            continue
        known = next((row.columns[name] for row in rows if name in row.columns), None)
        shape = () if known is None else known.shape[1:]
        if any(row.columns[name].shape[1:] != shape for row in rows if name in row.columns):
            raise DataError(f"{name} has other shapes in other rows, around {rows[0].row_id!r}.")
        columns[name] = np.concatenate(
            [
                row.columns[name].astype(dtype, copy=False)
                if name in row.columns
                else np.full((len(row), *shape), fill, dtype)
                for row in rows
            ]
        )
    return Rows(
        row_ids=tuple(row.row_id for row in rows),
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        token_ids=np.concatenate([row.token_ids for row in rows]),
        loss_mask=np.concatenate([row.loss_mask for row in rows]),
        **columns,
    )
