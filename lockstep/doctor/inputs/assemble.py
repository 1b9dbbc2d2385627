"""One row of a trainer's file, the conversions of its values, and chunks of rows as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.rows import TOKEN_COLUMNS, BoolArray, Rows
from lockstep.errors import DataError
from lockstep.types import Int32Array

Array = npt.NDArray[Any]
T = TypeVar("T")

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
"""Column -> its dtype, and the value for rows that lack it."""
_NEVER_LOST = frozenset({"rollout_logprobs", "trainer_logprobs", "advantages", "routed_experts"})
"""Columns that are read completely or not at all."""
_TOKENS_OF_TEXT = 256
"""Tokens that a row without ids counts as, so that chunks of texts end too."""


@dataclass(kw_only=True)
class Row:
    """One row of a dump: its ids, its loss mask, and any other fields of `Rows`.

    Columns that are None are dropped, and so are steps, groups and rewards that are not numbers.
    Trainers fill log-probs of prompts and tool replies with 0.0: those become NaN.

    >>> row = Row(
    ...     row_id="step 3, row 0",
    ...     token_ids=np.array([5, 6, 7], np.int32),
    ...     loss_mask=np.array([False, True, True]),
    ...     columns={"rollout_logprobs": np.float32([0.0, -0.5, 0.0]), "steps": 3, "groups": None},
    ... )
    >>> row.columns["rollout_logprobs"].tolist(), sorted(row.columns)
    ([nan, -0.5, 0.0], ['rollout_logprobs', 'steps'])
    """

    row_id: str
    """Name of the row in findings."""
    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """[T] the whole row: prompt, replies, tool replies."""
    loss_mask: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    """[T] true where the token is trained."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of `Rows`: an array [T, ...], or the one value of the row."""

    def __post_init__(self) -> None:
        columns = self.columns
        for name in ("steps", "groups", "trainer_version"):
            columns[name] = whole(columns.get(name))
        columns["rewards"] = real(columns.get("rewards"))
        self.columns = {name: value for name, value in columns.items() if value is not None}
        rollout = self.columns.get("rollout_logprobs")
        if rollout is not None:
            rollout[~self.loss_mask & (rollout == 0.0)] = np.nan

    def __len__(self) -> int:
        return len(self.token_ids)


def row_name(step: object, name: object) -> str:
    """`STEP/NAME`, or NAME alone if the step is unknown."""
    return f"{name}" if step is None else f"{step}/{name}"


def in_chunks(rows: Iterable[Row], has: frozenset[str], *, max_tokens: int) -> Iterator[Rows]:
    """Chunks of at most `max_tokens` tokens, or of one row; each has exactly the columns `has`.

    A row that lacks a column gets NaN, -1, False or None. Raises DataError for a row whose values
    per token are in a column that the head of the dump does not have.
    """

    def checked() -> Iterator[tuple[int, Row]]:
        for row in rows:
            if lost := _NEVER_LOST & row.columns.keys() - has:
                raise DataError(
                    f"row {row.row_id!r} is the first with {min(lost)}; expected every column in "
                    "the first rows of the dump. Give the part from that row on by itself."
                )
            yield len(row) or _TOKENS_OF_TEXT, row

    for pending in grouped(checked(), max_tokens):
        yield _join(pending, has)


def grouped(pieces: Iterable[tuple[int, T]], max_tokens: int) -> Iterator[list[T]]:
    """Pieces in order, in lists of at most `max_tokens` tokens, or of one piece. pieces: (tokens,
    piece) each.

    >>> list(grouped([(3, "a"), (4, "b"), (9, "c"), (1, "d")], 8))
    [['a', 'b'], ['c'], ['d']]
    """
    pending: list[T] = []
    size = 0
    for tokens, piece in pieces:
        if pending and size + tokens > max_tokens:
            yield pending
            pending, size = [], 0
        pending.append(piece)
        size += tokens
    if pending:
        yield pending


def _join(rows: Sequence[Row], has: frozenset[str]) -> Rows:
    columns: dict[str, Any] = {}
    for name in has:
        if name not in _FILLS:  # messages, texts: one object per row
            columns[name] = tuple(row.columns.get(name) for row in rows)
            continue
        dtype, fill = _FILLS[name]
        if name not in TOKEN_COLUMNS:
            columns[name] = np.array([row.columns.get(name, fill) for row in rows], dtype)
            continue
        shapes = {row.columns[name].shape[1:] for row in rows if name in row.columns}
        if len(shapes) > 1:
            raise DataError(f"{name} has other shapes in other rows, near {rows[0].row_id!r}.")
        shape = shapes.pop() if shapes else ()
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


# -- values of a file ------------------------------------------------------------------------------


def numbers(value: Any) -> Array | None:
    """A list of numbers, a tensor or an array as an array; None for anything else."""
    if not isinstance(value, np.ndarray):
        if not isinstance(value, list | tuple):
            value = getattr(value, "values", None)  # an array inside of a pickle
        elif set(map(type, value)) <= {int, float, bool}:
            value = np.asarray(value) if len(value) else np.empty(0)
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else None


def ids_of(values: Any, where: str) -> Int32Array:
    """Token ids as int32. Raises DataError for anything but whole numbers of 32 bits."""
    if isinstance(values, list) and set(map(type, values)) <= {int}:
        try:
            values = np.asarray(values, np.int64)
        except OverflowError:
            raise DataError(f"{where}: a token id is beyond 64 bits.") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(f"{where}: expected a list of token ids, whole numbers.")
    if len(values) and (values.min() < -(1 << 31) or values.max() >= 1 << 31):
        raise DataError(f"{where}: a token id is beyond 32 bits: {values.min()} to {values.max()}.")
    return values.astype(np.int32)


def floats_of(values: Any, size: int, where: str) -> Array:
    """[size] float32 of a JSON list; null is NaN. Raises DataError for anything else."""
    if not isinstance(values, list) or len(values) != size:
        found = f"{len(values)} entries" if isinstance(values, list) else type(values).__name__
        raise DataError(f"{where}: expected {size} numbers, one per token; found {found}.")
    if not set(map(type, values)) <= {int, float, type(None)}:
        raise DataError(f"{where}: expected numbers; found an entry that is not a number.")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float32)
    except OverflowError:
        raise DataError(f"{where}: expected numbers; an entry is beyond any float.") from None


def mask_of(values: Any, size: int, where: str) -> BoolArray:
    """[size] of a JSON list of true and false, or of 1 and 0."""
    if isinstance(values, list):
        values = [int(value) if isinstance(value, bool) else value for value in values]
    found = floats_of(values, size, where)
    if not np.isin(found, (0.0, 1.0)).all():
        raise DataError(f"{where}: expected true and false (or 1 and 0); found something else.")
    return found > 0


def at_the_end(
    values: Sequence[Any] | Array, size: int, where: str, *, fill: Any = np.nan, dtype: str = "f4"
) -> Array:
    """[size, ...]: the values of a response at the end of its row, `fill` before them.

    Of more values than the row has tokens the last are kept: the prompt length of the row is then
    negative, which the check of the boundary reports.

    >>> at_the_end([-0.5, -0.25], 4, "row 0").tolist()
    [nan, nan, -0.5, -0.25]
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float32: infinite
            response = np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError):
        raise DataError(f"{where}: expected numbers ({dtype}), found something else.") from None
    out = np.full((size, *response.shape[1:]), fill, dtype)
    kept = min(size, len(response))
    if kept:
        out[size - kept :] = response[len(response) - kept :]
    return out


def whole(value: Any) -> int | None:
    """A whole number of 31 bits (a step, a group, a version); None for anything else."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_whole and abs(int(value)) < 1 << 31 else None


def real(value: Any) -> float | None:
    """A number (a reward); None for anything else."""
    try:
        is_real = isinstance(value, int | float | np.floating | np.integer)
        return float(value) if is_real else None
    except OverflowError:
        return None
