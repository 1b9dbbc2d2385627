"""The doctor's own columns: one row per training row, in Parquet or as JSON lines.

# N tokens of all rows  R rows  L layers  K active experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config import from_dict
from lockstep.dialogues import read_messages
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.rows import Rows
from lockstep.errors import ConfigError, DataError
from lockstep.types import UNKNOWN_EXPERT, Int64Array

HEAD = "lockstep.doctor"
"""Key of the facts: in the metadata of a Parquet file, in the first line of a JSONL file."""
VERSION = 1
"""Version of the schema. A reader refuses a file that is newer than itself."""

Shape = Literal["token", "row", "token or row", "turn", "route", "text", "messages"]
_DEPTHS: Mapping[Shape, int] = {"token": 1, "token or row": 1, "turn": 2, "route": 3}
"""Levels of lists of a shape."""
Values = pa.Array | list[Any]
"""[R] the values of a column, one per row."""
Where = Callable[[int], str]
"""Place in the file of the row with an index; begins an error."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the file."""

    name: str
    """Name in the file."""
    shape: Shape
    """Content of each row: a list with an entry per token, one value, ..."""
    dtype: str = ""
    """dtype of the array in `Rows`; empty for text and messages."""
    fill: float | int | None = None
    """Value of null; None forbids null."""
    as_field: str = ""
    """Name in `Rows`, if it is another."""

    @property
    def field(self) -> str:
        return self.as_field or self.name

    @property
    def arrow_type(self) -> pa.DataType:
        """The type that is written. Any type that holds the same values is read."""
        return self.arrow_type_of(_DEPTHS.get(self.shape, 0)) if self.dtype else pa.string()

    def arrow_type_of(self, depth: int) -> pa.DataType:
        """The type of the values in so many levels of lists."""
        kind = pa.from_numpy_dtype(self.dtype)
        for _ in range(depth):
            kind = pa.list_(kind)
        return kind

    @property
    def expected(self) -> str:
        kind = {"f": "numbers", "i": "whole numbers", "b": "true or false (or 1 and 0)"}
        lists = "a list per row of " * bool(_DEPTHS.get(self.shape))
        lists += {"turn": "a list per reply of ", "route": "lists per token and layer of "}.get(
            self.shape, ""
        )
        return f"{lists}{kind[np.dtype(self.dtype).kind]}"


COLUMNS: tuple[Column, ...] = (
    Column("token_ids", "token", "int32"),
    Column("loss_mask", "token", "bool"),
    Column("rollout_logprobs", "token", "float32", fill=np.nan),
    Column("trainer_logprobs", "token", "float32", fill=np.nan),
    Column("is_sampled", "token", "bool"),
    Column("turn", "token", "int32", fill=-1),
    Column("policy_version", "token or row", "int32", fill=-1),
    Column("trainer_version", "row", "int64"),
    Column("advantages", "token or row", "float32", fill=np.nan),
    Column("prompt_length", "row", "int64", as_field="prompt_lengths"),
    Column("reward", "row", "float64", fill=np.nan, as_field="rewards"),
    Column("group", "row", "int64", as_field="groups"),
    Column("step", "row", "int64", as_field="steps"),
    Column("id", "text", as_field="row_ids"),
    Column("messages", "messages"),
    Column("text", "text", as_field="texts"),
    Column("finish_reason", "text", as_field="finish_reasons"),
    Column("engine_ids", "turn", "int32"),
    Column("engine_prompt_ids", "turn", "int32"),
    Column("routed_experts", "route", "int16", fill=UNKNOWN_EXPERT),
    Column("trainer_routed_experts", "route", "int16", fill=UNKNOWN_EXPERT),
)
"""docs/doctor-dumps.md has the meaning of each."""
BY_NAME: Mapping[str, Column] = {column.name: column for column in COLUMNS}
REQUIRED = ("token_ids", "loss_mask")

OFTEN_CALLED: Mapping[str, frozenset[str]] = {
    "token_ids": frozenset({"input_ids", "tokens", "ids"}),
    "loss_mask": frozenset({"mask", "response_mask", "action_mask", "assistant_masks"}),
    "rollout_logprobs": frozenset({"logprobs", "log_probs", "rollout_log_probs"})
    | {"inference_logprobs", "sampling_logprobs"},
    "trainer_logprobs": frozenset({"old_log_probs", "old_logprobs", "training_logprobs"}),
    "advantages": frozenset({"advantage"}),
    "reward": frozenset({"rewards"}),
    "prompt_length": frozenset({"prompt_lengths"}),
    "messages": frozenset({"conversation"}),
    "policy_version": frozenset({"version"}),
}
"""Common other names of these columns. They are suggested, not read: only the writer knows which
side computed a column of log-probs, and whether it covers the whole row."""


# -- facts -----------------------------------------------------------------------------------------


def facts_to_dict(facts: Facts) -> dict[str, Any]:
    """The JSON form, without unknown facts."""
    known = {n: value for n, value in asdict(facts).items() if value not in (None, "", frozenset())}
    return {"version": VERSION, **known} | {"stop_ids": sorted(facts.stop_ids)}


def facts_from_dict(source: object, where: str) -> Facts:
    """Inverse of `facts_to_dict`. Raises DataError, which begins with `where`."""
    if not isinstance(source, dict):
        raise DataError(f"{where}: expected a JSON object of facts, found {source!r:.40}.")
    facts = {name: value for name, value in source.items() if value is not None}
    version, stop_ids = facts.pop("version", VERSION), facts.pop("stop_ids", [])
    if type(version) is not int or version > VERSION:
        found = f"{where}: its schema is of version {version!r:.40}"
        raise DataError(f"{found}; this Lockstep reads up to {VERSION}.")
    if not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids):
        raise DataError(f"{where}: stop_ids must be a list of ids, found {stop_ids!r:.40}.")
    try:
        return replace(from_dict(Facts, facts), stop_ids=frozenset(stop_ids))
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None


# -- columns to rows -------------------------------------------------------------------------------


def rows_of(columns: Mapping[str, Values], *, row_ids: Sequence[str], where: Where) -> Rows:
    """Rows from the columns of a file.

    columns: [R] each, by their name in the file: Arrow arrays, or lists of Python values (text and
    messages are always lists). row_ids: [R] names for rows without an id. Raises DataError for
    values that cannot be rows; strange values of log-probs are left to the checks.

    >>> columns = {"token_ids": pa.array([[5, 6]]), "loss_mask": pa.array([[False, True]])}
    >>> rows = rows_of(columns, row_ids=["0"], where=lambda i: f"rows.jsonl:{i + 1}")
    >>> rows.token_ids.tolist(), rows.loss_mask.tolist()
    ([5, 6], [False, True])
    """
    sizes, token_ids = _named(BY_NAME["token_ids"], columns["token_ids"], None, where)
    parts: dict[str, Any] = {
        "row_ids": tuple(row_ids),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "token_ids": token_ids,
    }
    for column in COLUMNS:
        found: Any = columns.get(column.name)
        if found is None or column.name == "token_ids":
            continue
        if column.shape == "text":
            parts[column.field] = _texts(column, found, row_ids, where)
        elif column.shape == "messages":
            parts[column.field] = tuple(
                None if m is None else read_messages(m, where=f"{where(i)}: messages")
                for i, m in enumerate(found)
            )
        else:
            parts[column.field] = _named(column, found, sizes, where)
    if "turn" in parts and "is_sampled" not in parts:
        parts["is_sampled"] = parts["turn"] >= 0
    # One value of a row applies to the tokens that it can be about.
    for name, over in (
        ("policy_version", parts.get("is_sampled", parts["loss_mask"])),
        ("advantages", parts["loss_mask"]),
    ):
        found = columns.get(name)
        if found is not None and not _has_lists(found):
            fill = np.array(BY_NAME[name].fill, parts[name].dtype)
            parts[name] = np.where(over, np.repeat(parts[name], sizes), fill)
    return Rows(**parts)


def _texts(
    column: Column, found: Sequence[Any], row_ids: Sequence[str], where: Where
) -> tuple[str | None, ...]:
    out: list[str | None] = []
    for i, value in enumerate(found):
        if column.name == "id" and (value is None or type(value) is int):
            value = row_ids[i] if value is None else str(value)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{where(i)}: {column.name} must be text, found {value!r:.40}.")
        out.append(value)
    return tuple(out)


def _named(column: Column, found: Values, sizes: Int64Array | None, where: Where) -> Any:
    """`_read`; a DataError names the first row that cannot be read."""
    try:
        return _read(column, found, sizes)
    except ValueError as error:
        reason = error
    for i in range(len(found)):
        try:
            _read(column, found[i : i + 1], None if sizes is None else sizes[i : i + 1])
        except ValueError as error:
            raise DataError(f"{where(i)}: {column.name} {error}") from None
    raise DataError(f"{where(0)}: in this or a later row, {column.name} {reason}")


def _read(column: Column, found: Values, sizes: Int64Array | None) -> Any:
    """A column as the field of `Rows`. sizes: [R] tokens of each row; None for the ids, which are
    returned with them. Raises ValueError for values that cannot be rows."""
    is_row = column.shape == "row" or (column.shape == "token or row" and not _has_lists(found))
    levels, values = _unnested(column, found, 0 if is_row else _DEPTHS[column.shape])
    if sizes is None:
        return levels[0], values
    if is_row:
        return values
    entries, *inner = levels
    if column.shape == "turn":
        replies = iter(np.split(values, np.cumsum(inner[0])[:-1]))
        return tuple(None if n < 0 else tuple(next(replies) for _ in range(n)) for n in entries)
    if column.shape == "route":
        layers, experts = (int(level[0]) if len(level) else 0 for level in inner)
        values = values.reshape(len(inner[0]), layers, experts)
    wrong = np.flatnonzero((entries >= 0) & (entries != sizes))
    if len(wrong):
        raise ValueError(
            f"has {entries[wrong[0]]} entries and token_ids {sizes[wrong[0]]}; expected one per "
            "token, null (in a mask: false) where a token has none."
        )
    if (entries >= 0).all():
        return values
    out = np.full((sizes.sum(), *values.shape[1:]), column.fill, values.dtype)
    out[np.repeat(entries >= 0, sizes)] = values
    return out


def _unnested(
    column: Column, source: Values, depth: int
) -> tuple[list[Int64Array], npt.NDArray[Any]]:
    """(entries of each list, level by level, -1 where a row is null; all values in order)."""
    found = _cast(column, source, depth)
    levels: list[Int64Array] = []
    for level in range(depth):
        sizes = pc.call_function("list_value_length", [found]).cast(pa.int64()).fill_null(-1)
        sizes = sizes.to_numpy(zero_copy_only=False)
        may_be_null = not level and (column.fill is not None or column.shape == "turn")
        if (sizes < 0).any() and not may_be_null:
            raise ValueError(f"is null or missing; expected {column.expected}.")
        if level and column.shape == "route" and (sizes != sizes[:1].sum()).any():
            raise ValueError(f"is not equally long at all tokens; expected {column.expected}.")
        levels.append(sizes)
        found = found.flatten()
    if found.null_count:
        if column.fill is None:
            raise ValueError(f"is null; expected {column.expected}.")
        found = found.fill_null(column.fill)
    values = found.to_numpy(zero_copy_only=False)
    if column.name.endswith("_ids") and (values < 0).any():
        raise ValueError(f"has {values[values < 0][0]}; expected ids from 0.")
    return levels, values


def _cast(column: Column, found: Values, depth: int) -> pa.Array:
    """`found` in the type of the column."""
    try:
        array = pa.array(found) if isinstance(found, list) else found
        leaf = array.type
        while _is_list(leaf):
            leaf = leaf.value_type
        is_number = pa.types.is_primitive(leaf) or pa.types.is_null(leaf)
        if is_number and not (pa.types.is_boolean(leaf) and column.dtype != "bool"):
            return array.cast(column.arrow_type_of(depth))
        reason = f"found {leaf}"
    except (pa.ArrowException, NotImplementedError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())[:100]
    raise ValueError(f"must be {column.expected} ({reason}).")


def _has_lists(found: Values) -> bool:
    if isinstance(found, list):
        return any(isinstance(value, list) for value in found)
    return _is_list(found.type)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
