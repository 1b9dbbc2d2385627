"""The columns of rows, one row of a file, the conversions of its values, and chunks of rows."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.dialogues import read_messages
from lockstep.doctor.rows import SIDES, TOKEN_COLUMNS, BoolArray, Rows
from lockstep.errors import DataError
from lockstep.tables import tables_beside
from lockstep.types import Int32Array, Message

Array = npt.NDArray[Any]
Line = Mapping[str, Any]
"""One JSON object of a file: a row, or several."""
T = TypeVar("T")

Shape = Literal["token", "row", "token or row", "turn", "route", "text", "messages"]
_DEPTHS: Mapping[Shape, int] = {"token": 1, "token or row": 1, "turn": 2, "route": 3}
"""Levels of lists of a shape."""
_LISTS: Mapping[Shape, str] = {
    "token": "a list of ",
    "token or row": "a list of ",
    "turn": "a list per reply of ",
    "route": "lists per token and layer, equally long at all tokens, of ",
}
_KINDS = {"f": "numbers", "i": "whole numbers", "b": "true or false (or 1 and 0)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of the doctor's own columns, as columns.toml declares it: one row per training row."""

    name: str
    """Name in the file."""
    shape: Shape
    dtype: str = ""
    fill: float | int | None = None
    field: str = ""
    """Name in `Rows`."""
    often_called: tuple[str, ...] = ()

    @property
    def arrow_type(self) -> pa.DataType:
        """The type that is written. Any type that holds the same values is read."""
        kind = pa.from_numpy_dtype(self.dtype) if self.dtype else pa.string()
        for _ in range(_DEPTHS.get(self.shape, 0)):
            kind = pa.list_(kind)
        return kind

    @property
    def expected(self) -> str:
        return f"{_LISTS.get(self.shape, '')}{_KINDS[np.dtype(self.dtype).kind]}"


BY_NAME: Mapping[str, Column] = {
    name: Column(**{"name": name, "field": name} | told)
    for name, told in tables_beside(__file__, "columns.toml").items()
}
COLUMNS = tuple(BY_NAME.values())
REQUIRED = ("token_ids", "loss_mask")
_UNKNOWN = {"bool": False, "int32": -1, "int64": -1}
_FILLS: Mapping[str, tuple[str, Any]] = {
    column.field: (column.dtype, _UNKNOWN.get(column.dtype) if column.fill is None else column.fill)
    for column in COLUMNS
    if column.shape in ("token", "token or row", "row", "route")
}
"""Column -> its dtype, and the value for rows that lack it."""
_NEVER_LOST = frozenset({"rollout_logprobs", "trainer_logprobs", "advantages", "routed_experts"})
"""Columns that are read completely or not at all."""


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
    token_ids: Int32Array
    """[T] the whole row: prompt, replies, tool replies."""
    loss_mask: BoolArray
    """[T] true where the token is trained."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of `Rows`: an array [T, ...], or the one value of the row."""
    unread: str = ""
    """Reason why its messages are left out; empty if they are not."""
    is_exact: bool = False
    """True if every value is as its writer means it: nothing is dropped."""

    @classmethod
    def of(cls, *, row_id: str, token_ids: Int32Array, loss_mask: BoolArray, **columns: Any) -> Row:
        """The same, with the other fields by their names."""
        return cls(row_id=row_id, token_ids=token_ids, loss_mask=loss_mask, columns=columns)

    def __post_init__(self) -> None:
        columns = self.columns
        if not self.is_exact:
            for name in ("steps", "groups", "trainer_version"):
                columns[name] = whole(columns.get(name))
            columns["rewards"] = real(columns.get("rewards"))
            if (rollout := columns.get("rollout_logprobs")) is not None:
                rollout[~self.loss_mask & (rollout == 0.0)] = np.nan
        self.columns = {name: value for name, value in columns.items() if value is not None}

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
            yield len(row), row

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
    for name in has - {"row_ids", "token_ids", "loss_mask"}:
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
        absent=tuple(has & set(SIDES.values()) - row.columns.keys() for row in rows),
        row_ids=tuple(row.row_id for row in rows),
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        token_ids=np.concatenate([row.token_ids for row in rows]),
        loss_mask=np.concatenate([row.loss_mask for row in rows]),
        **columns,
    )


# -- values of a file ------------------------------------------------------------------------------


def per_token(
    source: Line, names: Sequence[str], where: str, *, size: int, kept: BoolArray | None = None
) -> Array | None:
    """[size] float32 under the first of `names` that a row of a file has; None if it has none.

    size: tokens of the row. kept: true at each place of a response that is no padding; the numbers
    then are of the response alone, and NaN comes before it. None: they are of the whole row. Raises
    DataError for anything but a number per place. Of more numbers than the row has tokens the last
    are kept: the prompt length of the row is then negative, which the check of the boundary
    reports.

    >>> response = np.array([True, True, False])  # its third place is padding
    >>> source = {"lp": [-0.5, -0.25, 0.0]}
    >>> per_token(source, ["old_lp", "lp"], "row 0", size=4, kept=response).tolist()
    [nan, nan, -0.5, -0.25]
    """
    name = next((name for name in names if source.get(name) is not None), None)
    if name is None:
        return None
    where = f"{where}: {name}"
    if kept is None:
        return floats_of(source[name], size, where)
    response = floats_of(source[name], len(kept), where)[kept]
    before = np.full(max(size - len(response), 0), np.nan, np.float32)
    return np.concatenate([before, response[max(len(response) - size, 0) :]])


def row_of(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One row of each tensor, or list of tensors, of a batch; an empty one where there are fewer
    rows. Nothing else leaves the device.

    >>> row_of({"ids": np.array([[1, 2], [3, 4], [5, 6]]), "uid": ["a", "b", "c"]}, 2)
    {'ids': array([5, 6]), 'uid': 'c'}
    """
    return {
        name: array_of(column[number] if number < len(column) else column[:0])
        for name, column in batch.items()
        if isinstance(column, list) or getattr(column, "ndim", 0)
    }


def array_of(value: Any) -> Any:
    """A tensor of torch, on any device, as an array: bfloat16 as float32, and a jagged one as a
    list of arrays. One number is Python's. Anything else as it is."""
    if hasattr(value, "untyped_storage"):  # torch may not be loaded
        if value.is_nested:
            return [array_of(row) for row in value.unbind()]
        tensor = value.detach().cpu()
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    is_number = isinstance(value, np.generic | np.ndarray) and not value.ndim
    return value.item() if is_number else value


def numbers(value: Any) -> Array | None:
    """A list of numbers (null is NaN), a tensor or an array as an array; None for anything else."""
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if not all(issubclass(kind, int | float | np.number | np.bool_ | None) for kind in kinds):
            return None  # lists of lists may be shared, and expand
        dtype = np.float64 if type(None) in kinds else None if kinds else np.int64
        try:
            value = np.array(value, dtype)
        except OverflowError:
            return None
    elif not isinstance(value, np.ndarray):
        value = getattr(value, "values", None)  # an array inside of a pickle
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else None


def ids_of(values: Any, where: str) -> Int32Array:
    """Token ids as int32. Raises DataError for anything but whole numbers of 32 bits."""
    found = numbers(values)
    if found is None or found.dtype.kind not in "iu" or found.ndim != 1:
        told = f"expected a list of token ids, whole numbers of 32 bits; found {shown(values)}"
        raise DataError(f"{where}: {told}.")
    if len(found) and (found.min() < -(1 << 31) or found.max() >= 1 << 31):
        raise DataError(f"{where}: a token id is beyond 32 bits: {found.min()} to {found.max()}.")
    return found.astype(np.int32)


def floats_of(values: Any, size: int, where: str) -> Array:
    """[size] float32 of a list of numbers, or a tensor; null is NaN. Raises DataError for anything
    else."""
    found = numbers(values)
    if found is None or found.shape != (size,):
        kind = shown(values if found is None else found)
        raise DataError(f"{where}: expected {size} numbers, one per token; found {kind}.")
    with np.errstate(over="ignore"):  # beyond float32: infinite
        return found.astype(np.float32)


def shown(value: Any) -> str:
    """The value in an error: an array by its shape, anything else by its first characters."""
    if isinstance(value, np.ndarray):
        return f"{' x '.join(map(str, value.shape))} entries of {value.dtype}"
    return reprlib.repr(value)[:40]  # a pickle's lists may be shared, and expand


def dialogue_of(source: Any, where: str) -> tuple[tuple[Message, ...] | None, str]:
    """(the messages of a row, or None if there are none; the reason why they cannot be read)."""
    try:
        return None if source is None else read_messages(source, where=where), ""
    except DataError as error:
        return None, str(error)


def whole(value: Any) -> int | None:
    """A whole number of 31 bits (a step, a group, a version); None for anything else."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_whole and abs(int(value)) < 1 << 31 else None


def real(value: Any) -> float | None:
    """A number (a reward); None for anything else."""
    try:
        return float(value) if isinstance(value, int | float | np.number) else None
    except OverflowError:
        return None
