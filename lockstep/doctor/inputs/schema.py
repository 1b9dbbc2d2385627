"""The doctor's own columns: one row per training row, in Parquet or as JSON lines.

# N tokens of all rows  R rows  L layers  K active experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.messages import read_messages
from lockstep.errors import DataError
from lockstep.types import UNKNOWN_EXPERT, Int64Array

HEAD = "lockstep.doctor"
"""Key of the facts: in the metadata of a Parquet file, in the first line of a JSONL file."""
VERSION = 1
"""Of the schema. A reader refuses a file that is newer than itself."""

Shape = Literal["token", "row", "token or row", "turn", "route", "text", "messages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the file."""

    name: str
    """In the file."""
    field: str
    """Of `Rows`."""
    shape: Shape
    """What each row holds: a list with an entry per token, one value, ..."""
    dtype: str = ""
    """Of the array in `Rows`."""
    fill: float | int | None = None
    """What null is read as; None: null may not be."""
    about: str
    how: str = ""
    """Where a trainer has it, for who has left it out."""


COLUMNS: tuple[Column, ...] = (
    Column(
        name="token_ids",
        field="token_ids",
        shape="token",
        dtype="int32",
        about="The whole row as it is trained: prompt, replies, observations; no padding needed.",
        how="what the trainer feeds to the model",
    ),
    Column(
        name="loss_mask",
        field="loss_mask",
        shape="token",
        dtype="bool",
        about="true (or 1) where the token is trained.",
        how="the mask of the loss, laid over the whole row: false over the prompt",
    ),
    Column(
        name="rollout_logprobs",
        field="rollout_logprobs",
        shape="token",
        dtype="float32",
        fill=np.nan,
        about="The sampler's log-prob (natural log) of the token itself, at the token's own index; "
        "null where it has none (the prompt).",
        how="ask the engine for the log-probs of what it samples, and keep them beside the ids",
    ),
    Column(
        name="trainer_logprobs",
        field="trainer_logprobs",
        shape="token",
        dtype="float32",
        fill=np.nan,
        about="The trainer's, before the update, laid out in the same way.",
        how='have the trainer compute the log-probs of its rows before the update ("old" '
        "log-probs), or give the doctor the model to score the rows again",
    ),
    Column(
        name="is_sampled",
        field="is_sampled",
        shape="token",
        dtype="bool",
        about="true where the model drew the token, trained or not. Without it the loss mask "
        "stands for it.",
        how="write true where the id came from the engine",
    ),
    Column(
        name="turn",
        field="turn",
        shape="token",
        dtype="int32",
        fill=-1,
        about="Number of the reply that the token is of, from 0; -1 of what was not sampled. It "
        "says is_sampled as well.",
        how="count the calls of the engine",
    ),
    Column(
        name="policy_version",
        field="policy_version",
        shape="token or row",
        dtype="int32",
        fill=-1,
        about="Of the weights that sampled it.",
        how="note with each reply the number of the last sync of weights",
    ),
    Column(
        name="trainer_version",
        field="trainer_version",
        shape="row",
        dtype="int64",
        about="Of the weights that trainer_logprobs are of.",
        how="note the number of updates before the log-probs were computed",
    ),
    Column(
        name="advantages",
        field="advantages",
        shape="token or row",
        dtype="float32",
        fill=np.nan,
        about="What the loss weighs the token by. One number stands for every trained token.",
        how="write what the loss was given",
    ),
    Column(
        name="prompt_length",
        field="prompt_lengths",
        shape="row",
        dtype="int64",
        about="Tokens before the response, as the trainer has it: it may be wrong.",
        how="write where the trainer begins the response",
    ),
    Column(
        name="reward",
        field="rewards",
        shape="row",
        dtype="float64",
        fill=np.nan,
        about="Of the row's episode.",
        how="write what the environment gave",
    ),
    Column(
        name="group",
        field="groups",
        shape="row",
        dtype="int64",
        about="The same number for the rows of one task in one step.",
        how="number the prompts of a step",
    ),
    Column(
        name="step",
        field="steps",
        shape="row",
        dtype="int64",
        about="Training step.",
        how="write the number of the update that the row is of",
    ),
    Column(
        name="id",
        field="row_ids",
        shape="text",
        about="What the row is called in the verdict. Without it: its number in the file.",
        how="any text or number",
    ),
    Column(
        name="messages",
        field="messages",
        shape="messages",
        about="The dialogue that the row shows, replies included, in OpenAI's chat form: role, "
        "content, thinking (or reasoning_content), tool_calls, name, tool_call_id. In Parquet "
        "a list of structs, or JSON text.",
        how="write the chat that the environment saw",
    ),
    Column(
        name="text",
        field="texts",
        shape="text",
        about="The response as the trainer spells it.",
        how="write what the environment was given as the reply",
    ),
    Column(
        name="engine_ids",
        field="engine_ids",
        shape="turn",
        dtype="int32",
        about="What the engine answered: a list of ids per reply.",
        how="keep the ids of each response as the engine gave them",
    ),
    Column(
        name="routed_experts",
        field="routed_experts",
        shape="route",
        dtype="int16",
        fill=UNKNOWN_EXPERT,
        about="The sampler's experts of each token: a list per token of a list per layer; -1 where "
        "not recorded.",
        how="engines return them on request (SGLang, vLLM: return_routed_experts)",
    ),
    Column(
        name="trainer_routed_experts",
        field="trainer_routed_experts",
        shape="route",
        dtype="int16",
        fill=UNKNOWN_EXPERT,
        about="The trainer's, laid out in the same way.",
        how="record the router's choice in the trainer's forward pass",
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
"""Names that people give these columns. They are not read under them: which side a column of
log-probs is of, and whether it stands over the whole row, is for the writer to say."""


# -- what a file says of itself --------------------------------------------------------------------


def facts_to_dict(facts: Facts) -> dict[str, Any]:
    """The JSON form: what is not known is left out."""
    out: dict[str, Any] = {"version": VERSION}
    for f in fields(facts):
        value = getattr(facts, f.name)
        if value not in (None, "", frozenset()):
            out[f.name] = sorted(value) if isinstance(value, frozenset) else value
    return out


def facts_from_dict(source: object, where: str) -> Facts:
    """Reads `facts_to_dict` back; DataError that begins with `where`."""
    if not isinstance(source, dict):
        raise DataError(f"{where}: expected a JSON object of facts, found {_shown(source)}.")
    source = dict(source)
    version = source.pop("version", VERSION)
    if not _is_int(version) or version > VERSION:
        raise DataError(
            f"{where}: its schema is of version {_shown(version)}; this Lockstep reads up to "
            f"{VERSION}. Read it with the version that wrote it."
        )
    kinds = {f.name: str(f.type) for f in fields(Facts)}
    values: dict[str, Any] = {}
    for name, value in source.items():
        if name not in kinds:
            raise DataError(
                f"{where}: no fact is called {name!r}. Known: {', '.join(kinds)}, version."
            )
        if value is None:
            continue
        values[name] = _fact(kinds[name], value, f"{where}: {name}")
    return Facts(**values)


def _fact(kind: str, value: object, where: str) -> Any:
    if kind.startswith("str"):
        ok, expected, made = isinstance(value, str), "text", value
    elif kind.startswith("bool"):
        ok, expected, made = isinstance(value, bool), "true or false", value
    elif kind.startswith("int"):
        ok, expected, made = _is_int(value), "a whole number", value
    elif kind.startswith("float"):
        ok = _is_int(value) or isinstance(value, float)
        expected, made = "a number", value
    else:
        ok = isinstance(value, list) and all(_is_int(i) for i in value)
        expected, made = "a list of ids", frozenset(value) if ok else value  # pyright: ignore
    if not ok:
        raise DataError(f"{where} must be {expected}, found {_shown(value)}.")
    return made


# -- columns to rows -------------------------------------------------------------------------------


def rows_of(
    columns: Mapping[str, pa.Array | list[Any]],
    *,
    row_ids: Sequence[str],
    where: Callable[[int], str],
) -> Rows:
    """Rows of a file's columns.

    columns: by their name in the file, [R] each: Arrow arrays, and for "text" and "messages" lists
    of Python values. row_ids: [R] of those that have no id. where: place in the file of row i, to
    begin an error with. Raises DataError for what cannot be rows; a strange value of a log-prob is
    left to the checks.
    """
    sizes, token_ids = _flat(columns["token_ids"], BY_NAME["token_ids"], where)
    block = _Block(sizes=sizes, where=where, row_ids=row_ids)
    parts: dict[str, Any] = {
        "row_ids": tuple(row_ids),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "token_ids": token_ids,
    }
    for column in COLUMNS:
        if column.name in columns and column.name != "token_ids":
            parts[column.field] = block.read(column, columns[column.name])
    if "turn" in parts and "is_sampled" not in parts:
        parts["is_sampled"] = parts["turn"] >= 0
    # One value of a row is of the tokens that it can be of.
    for name, over in (
        ("policy_version", parts.get("is_sampled", parts["loss_mask"])),
        ("advantages", parts["loss_mask"]),
    ):
        if name not in columns:
            continue
        kind: pa.DataType = columns[name].type  # pyright: ignore[reportAttributeAccessIssue]
        if not (kind in _NULL or _is_list(kind)):
            values = parts[name]
            fill = np.array(BY_NAME[name].fill, values.dtype)
            parts[name] = np.where(over, np.repeat(values, sizes), fill)
    return Rows(**parts)


@dataclass(slots=True, kw_only=True)
class _Block:
    """Rows that are read together."""

    sizes: Int64Array
    where: Callable[[int], str]
    row_ids: Sequence[str]

    def read(self, column: Column, found: Any) -> Any:
        if column.shape == "text":
            return self._texts(column, found)
        if column.shape == "messages":
            return tuple(
                None if m is None else read_messages(m, where=f"{self.where(i)}: messages")
                for i, m in enumerate(found)
            )
        if column.shape == "turn":
            return self._turns(column, found)
        if column.shape == "route":
            return self._routes(column, found)
        is_of_tokens = _is_list(found.type) or found.type in _NULL
        if column.shape == "row" or (column.shape == "token or row" and not is_of_tokens):
            return _values(found, column, lambda at: f"{self.where(at)}: {column.name}")
        return self._laid(column, *_flat(found, column, self.where))

    def _laid(
        self, column: Column, sizes: Int64Array, values: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """`values` of the rows that have them, and the column's fill in the others."""
        wrong = np.flatnonzero((sizes >= 0) & (sizes != self.sizes))
        if len(wrong):
            i = int(wrong[0])
            raise DataError(
                f"{self.where(i)}: {column.name} has {sizes[i]} entries and token_ids "
                f"{self.sizes[i]}; expected one per token, at the token's own index. Values of the "
                "response alone are laid behind as many nulls (of a mask: false) as the prompt has "
                "tokens."
            )
        if (sizes >= 0).all():
            return values
        out = np.full((self.sizes.sum(), *values.shape[1:]), column.fill, values.dtype)
        out[np.repeat(sizes >= 0, self.sizes)] = values
        return out

    def _texts(self, column: Column, found: Sequence[Any]) -> tuple[str | None, ...]:
        out: list[str | None] = []
        for i, value in enumerate(found):
            if isinstance(value, str) or value is None:
                out.append(value)
            elif column.name == "id" and _is_int(value):
                out.append(str(value))
            else:
                raise DataError(
                    f"{self.where(i)}: {column.name} must be text, found {_shown(value)}."
                )
        if column.name == "id":
            return tuple(self.row_ids[i] if v is None else v for i, v in enumerate(out))
        return tuple(out)

    def _turns(self, column: Column, found: pa.Array) -> tuple[Any, ...]:
        sizes, inner = _unnested(found, column, self.where, "a list of ids per reply")
        row = np.repeat(np.arange(len(self.sizes)), np.maximum(sizes, 0))
        lengths, values = _flat(inner, column, lambda at: self.where(int(row[at])))
        ends = np.cumsum(lengths)
        replies = np.split(values, ends[:-1]) if len(ends) else []
        out: list[tuple[Any, ...] | None] = []
        at = 0
        for size in sizes.tolist():
            out.append(None if size < 0 else tuple(replies[at : at + size]))
            at += max(size, 0)
        return tuple(out)

    def _routes(self, column: Column, found: pa.Array) -> npt.NDArray[np.int16]:
        expected = "a list per token, of a list per layer, of the experts' numbers"
        sizes, tokens = _unnested(found, column, self.where, expected)
        row = np.repeat(np.arange(len(self.sizes)), np.maximum(sizes, 0))

        def of_token(at: int) -> str:
            return self.where(int(row[at]))

        num_layers, layers = _unnested(tokens, column, of_token, expected)
        depth = self._common(column, num_layers, of_token, "layers")
        num_active, values = _flat(layers, column, lambda at: of_token(at // depth if depth else 0))
        width = self._common(
            column, num_active, lambda at: of_token(at // depth if depth else 0), "experts"
        )
        return self._laid(column, sizes, values.reshape(len(num_layers), depth, width))

    def _common(
        self, column: Column, sizes: Int64Array, where: Callable[[int], str], what: str
    ) -> int:
        if not len(sizes):
            return 0
        if (sizes < 0).any():
            raise DataError(
                f"{where(int(np.argmax(sizes < 0)))}: {column.name} is null inside of a row; "
                "expected -1 in each place that was not recorded."
            )
        wrong = np.flatnonzero(sizes != sizes[0])
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{where(at)}: {column.name} has {int(sizes[at])} {what} at one place and "
                f"{int(sizes[0])} at another; expected as many at each."
            )
        return int(sizes[0])


def _flat(
    found: pa.Array, column: Column, where: Callable[[int], str]
) -> tuple[Int64Array, npt.NDArray[Any]]:
    """([R] entries of each row, -1 where the row is null; all values in order)."""
    sizes, values = _unnested(found, column, where, f"a list of {_expected(column)} per row")
    if column.fill is None and (sizes < 0).any():
        raise DataError(
            f"{where(int(np.argmax(sizes < 0)))}: {column.name} is null or missing, and other rows "
            "have it; expected a value in every row, or the column left out."
        )
    ends = np.cumsum(np.maximum(sizes, 0))

    def of_value(at: int) -> str:
        """Place of the value `at`."""
        row = int(np.searchsorted(ends, at, side="right"))
        inside = at - int(ends[row] - max(int(sizes[row]), 0))
        return f"{where(row)}: entry {inside} of {column.name}"

    return sizes, _values(values, column, of_value)


def _expected(column: Column) -> str:
    return {"f": "numbers", "i": "whole numbers", "b": "true or false (or 1 and 0)"}[
        np.dtype(column.dtype).kind
    ]


def _values(values: pa.Array, column: Column, of_value: Callable[[int], str]) -> npt.NDArray[Any]:
    """`values` as an array of the column's dtype. of_value: the place of one, for an error."""
    expected = _expected(column)
    dtype, kind = np.dtype(column.dtype), values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.dictionary_decode(), kind.value_type
    is_number = pa.types.is_integer(kind) or (dtype.kind == "f" and pa.types.is_floating(kind))
    is_bool = dtype.kind == "b" and pa.types.is_boolean(kind)
    if not (is_number or is_bool or pa.types.is_null(kind)):
        at = int(np.argmax(values.is_valid().to_numpy(zero_copy_only=False))) if len(values) else 0
        value = _shown(values[at].as_py()) if len(values) else "nothing"
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
        with np.errstate(over="ignore"):  # to infinity, which is for the checks to judge
            return values.to_numpy(zero_copy_only=False).astype(dtype)
    if values.null_count:
        values = pc.fill_null(values.cast(pa.int64()), int(column.fill or 0))
    array = values.to_numpy(zero_copy_only=False)
    if dtype.kind == "b":
        low, high = 0, 1
    elif column.name in ("token_ids", "engine_ids"):
        low, high = 0, np.iinfo(np.int32).max
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if not is_bool and len(array):
        is_wrong = (array < low) | (array > high)
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            raise DataError(
                f"{of_value(at)} is {array[at]}; expected {expected} of {low} to {high}."
            )
    return array.astype(dtype, copy=False)


def _unnested(
    found: pa.Array, column: Column, where: Callable[[int], str], expected: str
) -> tuple[Int64Array, pa.Array]:
    """([R] entries of each row, -1 where it is null; the entries of all rows in order)."""
    if pa.types.is_null(found.type):
        return np.full(len(found), -1, np.int64), pa.nulls(0)
    if not _is_list(found.type):
        at = int(np.argmax(found.is_valid().to_numpy(zero_copy_only=False))) if len(found) else 0
        value = _shown(found[at].as_py()) if len(found) else "nothing"
        raise DataError(
            f"{where(at)}: {column.name} is {value} ({found.type}); expected {expected}."
        )
    sizes = pc.call_function("list_value_length", [found]).cast(pa.int64()).fill_null(-1)
    return sizes.to_numpy(zero_copy_only=False), found.flatten()


_NULL = (pa.null(),)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({type(value).__name__})"
