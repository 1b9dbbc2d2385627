"""The doctor's own columns: one row per training row, in Parquet or as JSON lines.

# N tokens of all rows  R rows  L layers  K active experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config import from_dict
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.messages import read_messages
from lockstep.errors import ConfigError, DataError
from lockstep.types import UNKNOWN_EXPERT, Int64Array

HEAD = "lockstep.doctor"
"""Key of the facts: in the metadata of a Parquet file, in the first line of a JSONL file."""
VERSION = 1
"""Version of the schema. A reader refuses a file that is newer than itself."""

Shape = Literal["token", "row", "token or row", "turn", "route", "text", "messages"]
_DEPTHS: Mapping[Shape, int] = {"token": 1, "token or row": 1, "turn": 2, "route": 3}
"""Levels of lists of a shape."""
_KINDS = {"f": "numbers", "i": "whole numbers", "b": "true or false (or 1 and 0)"}
Where = Callable[[int], str]
"""Place in the file of the row with an index; begins an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    about: str
    """Meaning, for the reader of the documentation."""
    as_field: str = ""
    """Name in `Rows`, if it is another."""

    @property
    def field(self) -> str:
        return self.as_field or self.name

    @property
    def arrow_type(self) -> pa.DataType:
        """The type that is written. Any type that holds the same values is read."""
        if not self.dtype:
            return pa.string()
        kind = pa.from_numpy_dtype(self.dtype)
        for _ in range(_DEPTHS.get(self.shape, 0)):
            kind = pa.list_(kind)
        return kind


COLUMNS: tuple[Column, ...] = (
    Column(
        name="token_ids",
        shape="token",
        dtype="int32",
        about="The whole row as it is trained: prompt, replies, observations; no padding needed.",
    ),
    Column(
        name="loss_mask",
        shape="token",
        dtype="bool",
        about="true (or 1) where the token is trained.",
    ),
    Column(
        name="rollout_logprobs",
        shape="token",
        dtype="float32",
        fill=np.nan,
        about="The sampler's log-prob (natural log) of the token itself, at the token's own index; "
        "null where it has none (the prompt).",
    ),
    Column(
        name="trainer_logprobs",
        shape="token",
        dtype="float32",
        fill=np.nan,
        about="The trainer's log-prob, before the update, in the same layout.",
    ),
    Column(
        name="is_sampled",
        shape="token",
        dtype="bool",
        about="true where the model drew the token, trained or not; default: the loss mask.",
    ),
    Column(
        name="turn",
        shape="token",
        dtype="int32",
        fill=-1,
        about="Number of the reply that the token belongs to, from 0; -1 where it was not sampled. "
        "It implies is_sampled.",
    ),
    Column(
        name="policy_version",
        shape="token or row",
        dtype="int32",
        fill=-1,
        about="Version of the weights that sampled it.",
    ),
    Column(
        name="trainer_version",
        shape="row",
        dtype="int64",
        about="Version of the weights that computed trainer_logprobs.",
    ),
    Column(
        name="advantages",
        shape="token or row",
        dtype="float32",
        fill=np.nan,
        about="Weight of the token in the loss. One number applies to every trained token.",
    ),
    Column(
        name="prompt_length",
        shape="row",
        dtype="int64",
        as_field="prompt_lengths",
        about="Tokens before the response, as the trainer has it: it may be wrong.",
    ),
    Column(
        name="reward",
        shape="row",
        dtype="float64",
        fill=np.nan,
        as_field="rewards",
        about="Reward of the row's episode.",
    ),
    Column(
        name="group",
        shape="row",
        dtype="int64",
        as_field="groups",
        about="The same number for the rows of one task in one step.",
    ),
    Column(
        name="step",
        shape="row",
        dtype="int64",
        as_field="steps",
        about="Training step.",
    ),
    Column(
        name="id",
        shape="text",
        as_field="row_ids",
        about="Name of the row in the verdict; default: its number in the file.",
    ),
    Column(
        name="messages",
        shape="messages",
        about="The dialogue of the row, replies included, in OpenAI's chat form: role, content, "
        "thinking (or reasoning_content), tool_calls, name, tool_call_id. In Parquet a list of "
        "structs, or JSON text.",
    ),
    Column(
        name="text",
        shape="text",
        as_field="texts",
        about="The response as the trainer spells it.",
    ),
    Column(
        name="engine_ids",
        shape="turn",
        dtype="int32",
        about="The ids that the engine returned: a list of ids per reply.",
    ),
    Column(
        name="routed_experts",
        shape="route",
        dtype="int16",
        fill=UNKNOWN_EXPERT,
        about="The sampler's experts of each token: a list per token of a list per layer; -1 where "
        "not recorded.",
    ),
    Column(
        name="trainer_routed_experts",
        shape="route",
        dtype="int16",
        fill=UNKNOWN_EXPERT,
        about="The trainer's experts, in the same layout.",
    ),
)
BY_NAME: Mapping[str, Column] = {column.name: column for column in COLUMNS}
REQUIRED = ("token_ids", "loss_mask")

OFTEN_CALLED: Mapping[str, str] = {
    "input_ids": "token_ids",
    "tokens": "token_ids",
    "ids": "token_ids",
    "mask": "loss_mask",
    "response_mask": "loss_mask",
    "action_mask": "loss_mask",
    "assistant_masks": "loss_mask",
    "logprobs": "rollout_logprobs",
    "log_probs": "rollout_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "inference_logprobs": "rollout_logprobs",
    "sampling_logprobs": "rollout_logprobs",
    "old_log_probs": "trainer_logprobs",
    "old_logprobs": "trainer_logprobs",
    "training_logprobs": "trainer_logprobs",
    "advantage": "advantages",
    "rewards": "reward",
    "prompt_lengths": "prompt_length",
    "conversation": "messages",
    "version": "policy_version",
}
"""Common other names of these columns. They are suggested, not read: only the writer knows which
side computed a column of log-probs, and whether it covers the whole row."""


# -- facts -----------------------------------------------------------------------------------------


def facts_to_dict(facts: Facts) -> dict[str, Any]:
    """The JSON form, without unknown facts."""
    out: dict[str, Any] = {"version": VERSION}
    for f in fields(facts):
        value = getattr(facts, f.name)
        if value not in (None, "", frozenset()):
            out[f.name] = sorted(value) if isinstance(value, frozenset) else value
    return out


def facts_from_dict(source: object, where: str) -> Facts:
    """Inverse of `facts_to_dict`. Raises DataError, which begins with `where`."""
    if not isinstance(source, dict):
        raise DataError(f"{where}: expected a JSON object of facts, found {_shown(source)}.")
    facts = {name: value for name, value in source.items() if value is not None}
    version, stop_ids = facts.pop("version", VERSION), facts.pop("stop_ids", [])
    if type(version) is not int or version > VERSION:
        raise DataError(
            f"{where}: its schema is of version {_shown(version)}; this Lockstep reads up to "
            f"{VERSION}. Read it with the version that wrote it."
        )
    if not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids):
        raise DataError(f"{where}: stop_ids must be a list of ids, found {_shown(stop_ids)}.")
    try:
        return replace(from_dict(Facts, facts), stop_ids=frozenset(stop_ids))
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None


# -- columns to rows -------------------------------------------------------------------------------


def rows_of(
    columns: Mapping[str, pa.Array | list[Any]], *, row_ids: Sequence[str], where: Where
) -> Rows:
    """Rows from the columns of a file.

    columns: [R] each, by their name in the file: Arrow arrays, or lists of Python values for text
    and messages. row_ids: [R] names for rows without an id. Raises DataError for values that cannot
    be rows; strange values of log-probs are left to the checks.

    >>> columns = {"token_ids": pa.array([[5, 6]]), "loss_mask": pa.array([[False, True]])}
    >>> rows = rows_of(columns, row_ids=["0"], where=lambda i: f"rows.jsonl:{i + 1}")
    >>> rows.token_ids.tolist(), rows.loss_mask.tolist()
    ([5, 6], [False, True])
    """
    (sizes,), token_ids = _unnested(columns["token_ids"], BY_NAME["token_ids"], where)
    parts: dict[str, Any] = {
        "row_ids": tuple(row_ids),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "token_ids": token_ids,
    }
    for column in COLUMNS:
        if column.name in columns and column.name != "token_ids":
            parts[column.field] = _read(column, columns[column.name], sizes, row_ids, where)
    if "turn" in parts and "is_sampled" not in parts:
        parts["is_sampled"] = parts["turn"] >= 0
    # One value of a row applies to the tokens that it can be about.
    for name, over in (
        ("policy_version", parts.get("is_sampled", parts["loss_mask"])),
        ("advantages", parts["loss_mask"]),
    ):
        if name in columns and not _is_of_tokens(columns[name].type):
            fill = np.array(BY_NAME[name].fill, parts[name].dtype)
            parts[name] = np.where(over, np.repeat(parts[name], sizes), fill)
    return Rows(**parts)


def _read(
    column: Column, found: Any, sizes: Int64Array, row_ids: Sequence[str], where: Where
) -> Any:
    """A column as the field of `Rows`. sizes: [R] tokens of each row."""
    if column.shape == "text":
        return _texts(column, found, row_ids, where)
    if column.shape == "messages":
        return tuple(
            None if m is None else read_messages(m, where=f"{where(i)}: messages")
            for i, m in enumerate(found)
        )
    if column.shape == "row" or (column.shape == "token or row" and not _is_of_tokens(found.type)):
        return _values(found, column, lambda at: f"{where(at)}: {column.name}")
    (entries, *inner), values = _unnested(found, column, where)
    if column.shape == "turn":
        replies = iter(np.split(values, np.cumsum(inner[0])[:-1]))
        return tuple(None if n < 0 else tuple(next(replies) for _ in range(n)) for n in entries)
    if column.shape == "route":
        layers, experts = (int(level[0]) if len(level) else 0 for level in inner)
        values = values.reshape(len(inner[0]), layers, experts)
    wrong = np.flatnonzero((entries >= 0) & (entries != sizes))
    if len(wrong):
        i = int(wrong[0])
        raise DataError(
            f"{where(i)}: {column.name} has {entries[i]} entries and token_ids {sizes[i]}; "
            "expected one per token, at the token's own index. Put as many nulls (in a mask: "
            "false) before the values of a response as the prompt has tokens."
        )
    if (entries >= 0).all():
        return values
    out = np.full((sizes.sum(), *values.shape[1:]), column.fill, values.dtype)
    out[np.repeat(entries >= 0, sizes)] = values
    return out


def _texts(
    column: Column, found: Sequence[Any], row_ids: Sequence[str], where: Where
) -> tuple[str | None, ...]:
    is_id = column.name == "id"
    out: list[str | None] = []
    for i, value in enumerate(found):
        if is_id and (value is None or type(value) is int):
            value = row_ids[i] if value is None else str(value)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{where(i)}: {column.name} must be text, found {_shown(value)}.")
        out.append(value)
    return tuple(out)


def _unnested(
    found: pa.Array, column: Column, where: Where
) -> tuple[list[Int64Array], npt.NDArray[Any]]:
    """(entries of each list, level by level, -1 where a row is null; all values in order)."""
    kind = _KINDS[np.dtype(column.dtype).kind]
    expected = {
        "turn": "a list per row, of a list of ids per reply",
        "route": "a list per token, of a list per layer, of the experts' numbers",
    }.get(column.shape, f"a list of {kind} per row")
    row = np.arange(len(found))
    """Index of the row that each entry of this level belongs to."""
    levels: list[Int64Array] = []
    for level in range(_DEPTHS[column.shape]):
        if pa.types.is_null(found.type):
            sizes, found = np.full(len(found), -1, np.int64), pa.nulls(0)
        elif _is_list(found.type):
            sizes = pc.call_function("list_value_length", [found]).cast(pa.int64()).fill_null(-1)
            sizes, found = sizes.to_numpy(zero_copy_only=False), found.flatten()
        else:
            at, value = _first_value(found)
            raise DataError(
                f"{where(int(row[at]) if len(row) else 0)}: {column.name} is {value} "
                f"({found.type}); expected {expected}."
            )
        _check_level(sizes, level, column, lambda at, row=row: where(int(row[at])))
        levels.append(sizes)
        row = np.repeat(row, np.maximum(sizes, 0))

    def of_value(at: int) -> str:
        first = int(np.searchsorted(row, row[at]))
        return f"{where(int(row[at]))}: entry {at - first} of {column.name}"

    return levels, _values(found, column, of_value)


def _check_level(sizes: Int64Array, level: int, column: Column, where: Where) -> None:
    """Raises DataError for a null that may not be, or for routes of unequal sizes."""
    is_null = sizes < 0
    at = int(np.argmax(is_null)) if is_null.any() else -1
    if at >= 0 and level:
        raise DataError(
            f"{where(at)}: {column.name} is null inside of a row; expected a list at each place "
            "(for routes of -1 where nothing was recorded)."
        )
    if at >= 0 and column.fill is None and column.shape != "turn":
        raise DataError(
            f"{where(at)}: {column.name} is null or missing, and other rows have it; expected a "
            "value in every row, or the column left out."
        )
    if column.shape == "route" and level and len(sizes) and (sizes != sizes[0]).any():
        at = int(np.argmax(sizes != sizes[0]))
        raise DataError(
            f"{where(at)}: {column.name} has {int(sizes[at])} {('layers', 'experts')[level - 1]} "
            f"at one place and {int(sizes[0])} at another; expected as many at each."
        )


def _values(values: pa.Array, column: Column, of_value: Where) -> npt.NDArray[Any]:
    """`values` as an array of the column's dtype. of_value: the place of one, for an error."""
    dtype, kind = np.dtype(column.dtype), values.type
    expected = _KINDS[dtype.kind]
    if pa.types.is_dictionary(kind):
        values, kind = values.dictionary_decode(), kind.value_type
    is_number = pa.types.is_integer(kind) or (dtype.kind == "f" and pa.types.is_floating(kind))
    is_bool = dtype.kind == "b" and pa.types.is_boolean(kind)
    if not (is_number or is_bool or pa.types.is_null(kind)):
        at, value = _first_value(values)
        hint = ""
        if pa.types.is_floating(kind):
            hint = (
                " pandas makes numbers with a fraction of a column that has gaps."
                if dtype.kind == "i"
                else " Weights are written as weight != 0."
            )
        raise DataError(f"{of_value(at)} is {value} ({kind}); expected {expected}.{hint}")
    if values.null_count and column.fill is None:
        at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{of_value(at)} is null; expected {expected}.")
    if values.null_count == len(values):
        return np.full(len(values), column.fill if len(values) else 0, dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # becomes infinite, which the checks judge
            return values.to_numpy(zero_copy_only=False).astype(dtype)
    if values.null_count:
        values = pc.fill_null(values.cast(pa.int64()), int(column.fill or 0))
    array = values.to_numpy(zero_copy_only=False)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low = 0 if column.name in ("token_ids", "engine_ids") else low
    if not is_bool and ((array < low) | (array > high)).any():
        at = int(np.argmax((array < low) | (array > high)))
        raise DataError(f"{of_value(at)} is {array[at]}; expected {expected} of {low} to {high}.")
    return array.astype(dtype, copy=False)


def _first_value(values: pa.Array) -> tuple[int, str]:
    """(index, text) of the first entry that is not null."""
    if not len(values):
        return 0, "nothing"
    at = int(np.argmax(values.is_valid().to_numpy(zero_copy_only=False)))
    return at, _shown(values[at].as_py())


def _is_of_tokens(kind: pa.DataType) -> bool:
    return _is_list(kind) or pa.types.is_null(kind)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({type(value).__name__})"
