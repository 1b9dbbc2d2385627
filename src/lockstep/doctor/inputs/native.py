"""Rows in the doctor's own columns (columns.toml): Parquet, JSON lines, or a directory of them.

The form for a trainer without a format of its own. `Facts` of a Parquet file are in its metadata
under the key `lockstep.doctor`, as JSON; in a JSONL file they are a first line
`{"lockstep.doctor": {...}}`. Neither is required.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.config import from_dict
from lockstep.doctor.inputs.assemble import (
    BY_NAME,
    COLUMNS,
    REQUIRED,
    Array,
    Column,
    Row,
    array_of,
    dialogue_of,
    numbers,
    shown,
)
from lockstep.doctor.inputs.base import DECLARED, HOW_TO_GET, Facts
from lockstep.doctor.inputs.lines import FileDump, Live, json_lines, parse_json, whole_files
from lockstep.doctor.inputs.places import PARQUET_MAGIC, check_place, head_of, why_no_rows
from lockstep.doctor.rows import Rows
from lockstep.errors import AlignmentError, ConfigError, DataError
from lockstep.store.files import write_atomically
from lockstep.system import bounded_memory

HEAD = "lockstep.doctor"
"""Key of the facts: in the metadata of a Parquet file, in the first line of a JSONL file."""
VERSION = 1
"""Version of the schema. A reader refuses a file that is newer than itself."""
HEAD_TOKENS = 1 << 15
"""Tokens of a JSONL file that are read to find out which columns it has: about 1 MB."""
_BATCH_TOKENS, _MAX_BATCH_ROWS, _BATCH_MEMORY = 1 << 18, 4096, 4 << 30
_BYTES_PER_TOKEN = 8
"""Approximate size of a token in a Parquet file before compression: how many rows to ask for."""

# -- reading ---------------------------------------------------------------------------------------


class RowsDump(FileDump):
    """Files in the doctor's own columns."""

    # A directory is read as its *.parquet files, or as its *.jsonl files if it has none. All must
    # have the same columns.
    format: ClassVar[str] = "rows"

    def __init__(self, path: Path) -> None:
        self._heads: dict[Path, tuple[frozenset[str], Facts]] = {}
        super().__init__(path)
        names, self.facts = self._head(self.files[0])
        known = {column.field for column in COLUMNS if column.name in names}
        sampled = {"is_sampled"} if "turn" in names else set[str]()
        self.has = frozenset({"row_ids"} | known | sampled) - self.unread.keys()
        self.lacks = {
            column.field: f"there is no column {column.name}: "
            f"{HOW_TO_GET.get(column.field, 'log it')}.{hint(column, names)}"
            for column in COLUMNS
            if column.field not in self.has
        } | self.unread

    @classmethod
    def files_of(cls, path: Path) -> list[Path]:
        for suffix in (".parquet", ".jsonl") if path.is_dir() else ():
            if files := [file for file in path.glob(f"*{suffix}") if file.name[0] not in "._"]:
                return cls.in_order(files)
        return [path]

    @classmethod
    def is_own(cls, path: Path) -> bool:
        try:
            return "token_ids" in _head_of(path, whole_files([path])[0][path])[0]
        except DataError:
            return False

    def rows_in(self, path: Path) -> Iterator[Row]:
        first, columns = (self._head(file)[0] for file in (self.files[0], path))
        for name in sorted(columns ^ first)[:1]:
            has, lacks = (path, self.files[0])[:: 1 if name in columns else -1]
            raise DataError(
                f"{has} has the column {name} and {lacks} does not; expected the same columns "
                "in all parts of a directory (null where a value is not known)."
            )
        prefix = f"{path.stem}:" if len(self.files) > 1 else ""
        names = [name for name in BY_NAME if name in columns]
        is_parquet = head_of(path, 4) == PARQUET_MAGIC
        found = _parquet_rows(path, names) if is_parquet else _json_rows(path, self.ends[path])
        for number, (where, source) in enumerate(found):
            for name in sorted(source.keys() - columns):
                if name in BY_NAME and source[name] is not None:
                    raise DataError(
                        f"{where}: the first row with {name}. Write it into the first row of the "
                        "file too, or leave it out of all."
                    )
            yield read_row(source, names, where, row_id=f"{prefix}{number}")

    @classmethod
    def live(cls, rows: Sequence[Mapping[str, Any]], *, step: int) -> Live:
        """Mappings with columns as lists, arrays or tensors."""
        if not all(isinstance(row, Mapping) for row in rows):
            raise DataError(f"the rows of step {step}: expected a mapping for each row, in a list.")
        names = [name for name in BY_NAME if any(row.get(name) is not None for row in rows)]
        if missing := [name for name in REQUIRED if rows and name not in names]:
            asked = hint(BY_NAME[missing[0]], rows[0])
            raise DataError(f"the rows of step {step} have no {missing[0]}.{asked}")

        def made(i: int) -> Row:
            source = {name: array_of(rows[i].get(name)) for name in names}
            return read_row(source, names, f"row {i} of step {step}", row_id=f"{step}/{i}")

        groups = [array_of(row.get("group")) for row in rows]
        return range(len(rows)) if None in groups else groups, partial(map, made), {}

    def _head(self, path: Path) -> tuple[frozenset[str], Facts]:
        """(names of all columns, facts) of a file."""
        if path not in self._heads:
            columns, _ = self._heads[path] = _head_of(path, self.ends[path])
            for name in (name for name in REQUIRED if name not in columns):
                for told, known_by in DECLARED["refused"].items():
                    if columns.issuperset(known_by):
                        raise DataError(f"{path} {told}.")
                raise DataError(
                    f"{path} has no column {name}; every row must have {' and '.join(REQUIRED)} "
                    "(documentation: Doctor: dumps). It has: "
                    f"{', '.join(sorted(columns)[:12]) or 'none'}.{hint(BY_NAME[name], columns)}"
                )
        return self._heads[path]


def hint(column: Column, names: Iterable[str]) -> str:
    """A question about a column of another name that may be meant."""
    others = sorted(set(names) - BY_NAME.keys())
    meant = [name for name in others if name in column.often_called]
    meant += get_close_matches(column.name, others, n=1, cutoff=0.8)
    return f" There is {meant[0]}: if that is it, rename it." if meant else ""


def _head_of(path: Path, end: int) -> tuple[frozenset[str], Facts]:
    check_place(path)
    if why := why_no_rows(path):
        raise DataError(f"{path} {why}.")
    if head_of(path, 4) == PARQUET_MAGIC:
        with _parquet(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
        if not num_rows:
            raise DataError(
                f"{path} has no rows: a Parquet file of 0 rows with the columns "
                f"{', '.join(sorted(schema.names)) or '(none)'}. Was it written before the first "
                "step?"
            )
        source, where = (schema.metadata or {}).get(HEAD.encode()), f"{path}: metadata {HEAD}"
        facts = facts_from_dict(parse_json(source, where), where) if source else Facts()
        return frozenset(schema.names), facts
    facts, columns, num_tokens = Facts(), set[str](), 0
    for _, where, row in json_lines(path, end):
        if HEAD in row:
            facts = facts_from_dict(row[HEAD], f"{where}: {HEAD}")
            continue
        columns |= {name for name, value in row.items() if value is not None}
        ids = row.get("token_ids")
        num_tokens += max(len(ids), 1) if isinstance(ids, list) else 1
        if num_tokens >= HEAD_TOKENS:
            break
    if not num_tokens:
        raise DataError(f"{path} has no rows; expected one JSON object per line and row.")
    return frozenset(columns), facts


_Sources = Iterator[tuple[str, Mapping[str, Any]]]
"""(place, values by column) of each row."""


def _json_rows(path: Path, end: int) -> _Sources:
    for place, (_, where, row) in enumerate(json_lines(path, end)):
        if HEAD not in row:
            yield where, row
        elif place:
            raise DataError(f"{where}: {HEAD} again; expected it in the first line alone.")


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        # Buffered: otherwise a whole column of a row group is read into memory at once.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} begins as Parquet and cannot be read ({reason}): its end is missing, it is "
            "damaged, or its rows expand. Write or copy it again."
        ) from None


def _parquet_rows(path: Path, names: list[str]) -> _Sources:
    with _parquet(path) as file:
        # Sizes of row groups and not of columns: pyarrow ends the process over statistics that a
        # flipped bit has damaged (26.0), where reading the column raises an error.
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        row_bytes = max([1.0, *(g.total_byte_size / max(g.num_rows, 1) for g in groups)])
        batch_rows = min(max(int(_BYTES_PER_TOKEN * _BATCH_TOKENS / row_bytes), 1), _MAX_BATCH_ROWS)
        batches = file.iter_batches(batch_rows, columns=names, use_threads=False)
        first = 0
        while True:
            with bounded_memory(_BATCH_MEMORY):
                if (batch := next(batches, None)) is None:
                    return
            found: dict[str, Any] = {}
            for name in names:
                try:
                    column = batch.column(name)
                    is_nested = isinstance(column.type, _LISTS) and BY_NAME[name].dtype
                    found[name] = _arrays(column, name) if is_nested else column.to_pylist()
                except UnicodeDecodeError as error:
                    where = f"{path}: {name}, rows {first} to {first + len(batch) - 1}"
                    raise DataError(f"{where}: not UTF-8 ({error.reason}).") from None
            for i in range(len(batch)):
                yield f"{path}: row {first + i}", {name: found[name][i] for name in names}
            first += len(batch)


def _arrays(column: pa.Array, name: str) -> Any:
    """The lists of a column as arrays, nested lists as lists of arrays, and lists of equal length
    as one array."""
    if not isinstance(column.type, _LISTS):
        if not pa.types.is_primitive(column.type):
            return column.to_pylist()
        values = column.to_numpy(zero_copy_only=False)
        with suppress(DataError):  # `read_row` names the row
            values = _cast(BY_NAME[name], values, "", ndim=1)
        return values
    sizes = pc.call_function("list_value_length", [column])
    is_null, sizes = sizes.is_null().to_pylist(), sizes.fill_null(0).to_numpy()
    inner = _arrays(column.flatten(), name)
    if isinstance(inner, np.ndarray) and len(sizes) and (sizes == sizes[0]).all() and sizes[0]:
        return inner.reshape(len(sizes), sizes[0], *inner.shape[1:])
    ends = np.cumsum(sizes)
    slices = map(slice, (ends - sizes).tolist(), ends.tolist())
    return [None if null else inner[at] for null, at in zip(is_null, slices, strict=True)]


_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


# -- one row ---------------------------------------------------------------------------------------


def read_row(source: Mapping[str, Any], names: Iterable[str], where: str, *, row_id: str) -> Row:
    """A row of the doctor's own columns.

    source: its values, as arrays or as JSON holds them. names: the columns of the file. row_id:
    used if it has no id. Raises DataError, which begins with `where`, for values that cannot be a
    row; strange values of log-probs are left to the checks.

    >>> source = {"token_ids": [5, 6], "loss_mask": [0, 1], "rollout_logprobs": [None, -0.5]}
    >>> row = read_row(source, source, "rows.jsonl:1", row_id="0")
    >>> row.loss_mask.tolist(), row.columns["rollout_logprobs"].tolist()
    ([False, True], [nan, -0.5])
    """
    ids = source.get("token_ids")
    size = len(ids) if isinstance(ids, list | tuple | np.ndarray) else 0  # others are refused
    found = {BY_NAME[n].field: _value(BY_NAME[n], source.get(n), size, where) for n in names}
    found["messages"], unread = dialogue_of(found.get("messages"), f"{where}: messages")
    if "turn" in found:
        turn = np.full(size, -1) if found["turn"] is None else found["turn"]
        found.setdefault("is_sampled", turn >= 0)
    # One value of a row applies to the tokens that it can be about.
    for name, over in (
        ("policy_version", found.get("is_sampled", found["loss_mask"])),
        ("advantages", found["loss_mask"]),
    ):
        if (value := found.get(name)) is not None and not value.ndim:
            found[name] = np.where(over, value, value.dtype.type(BY_NAME[name].fill))
    name = found.pop("row_ids", None)
    return Row(
        row_id=row_id if name is None else name,
        token_ids=found.pop("token_ids"),
        loss_mask=found.pop("loss_mask"),
        columns=found,
        unread=unread,
        is_exact=True,
    )


def _value(column: Column, value: Any, size: int, where: str) -> Any:
    """The value as a field of `Rows`. size: tokens of the row."""
    dtype, low, high = _LIMITS.get(column.name, (None, 0, 0))
    if isinstance(value, np.ndarray) and value.dtype == dtype and low and value.shape == (size,):
        return value  # as `_arrays` gives it
    shape, at = column.shape, f"{where}: {column.name}"
    may_lack = column.fill is not None or shape in ("text", "turn")
    is_null = type(value) is not np.ndarray and value in (None, [None] * size)
    if shape == "messages" or (is_null and may_lack):  # `read_row` reads messages
        return None if is_null else value
    if shape == "text":
        value = str(value) if column.name == "id" and type(value) is int else value
        if not isinstance(value, str):
            raise DataError(f"{at} must be text, found {value!r:.40}.")
        return value
    if value is None:
        raise DataError(f"{at} is null or missing; expected {column.expected}.")
    is_listed = isinstance(value, list | tuple | np.ndarray)
    if shape == "turn":
        return tuple(_cast(column, ids, at) for ids in (value if is_listed else [value]))
    if column.name == "group" and isinstance(value, str):  # a label: equal ones get one number
        return int.from_bytes(blake2b(value.encode(errors="replace"), digest_size=6).digest())
    if shape == "row" or (shape == "token or row" and not is_listed):
        is_plain = type(value) is int and column.dtype[0] == "i" and low <= value <= high
        return np.dtype(dtype).type(value) if is_plain else _cast(column, [value], at)[0]
    if shape == "route" and not size:
        return None
    out = _cast(column, value, at)
    if len(out) != size:
        raise DataError(
            f"{at} has {len(out)} entries and token_ids {size}; expected one per token, null (in a "
            "mask: false) where a token has none."
        )
    return out


def _cast(column: Column, value: Any, where: str, *, ndim: int = 0) -> Array:
    """A list of numbers in the dtype of the column. ndim: 0 means the column's own."""
    if column.shape == "route" and isinstance(value, list):
        with suppress(TypeError, ValueError):  # no lists, or of other lengths
            value = np.array([[numbers(experts) for experts in layers] for layers in value])
    found, (dtype, low, high) = numbers(value), _LIMITS[column.name]
    ndim = ndim or (3 if column.shape == "route" else 1)
    is_bool = found is not None and found.dtype.kind == "b" != dtype.kind
    if found is None or found.ndim != ndim or (is_bool and column.shape != "row"):
        raise DataError(f"{where} must be {column.expected}, found {shown(value)}.")
    if dtype.kind == "f" or (found.dtype == dtype and low):
        with np.errstate(over="ignore"):  # beyond float32: infinite
            return found.astype(dtype, copy=False)
    is_odd = False
    if found.dtype.kind == "f":
        is_null = np.isnan(found)
        if is_null.any() and column.fill is None:
            raise DataError(f"{where} is null; expected {column.expected}.")
        found = np.where(is_null, column.fill or 0, found)
        is_odd = found != np.floor(found)
    if dtype.kind == "i" and found.size and (found.min() < low or found.max() > high):
        is_odd |= (found < low) | (found > high)
    if dtype.kind == "i" and np.any(is_odd):
        expected = f"{column.expected}, from {low} to {high}"
        raise DataError(f"{where} must be {expected}, found {found[is_odd][0]}.")
    return found.astype(dtype, copy=False)


def _limits(column: Column) -> tuple[np.dtype[Any], int, int]:
    """The dtype of a column, and the least and largest whole number in it."""
    dtype = np.dtype(column.dtype)
    info = np.iinfo(dtype) if dtype.kind == "i" else np.iinfo(np.int64)
    return dtype, 0 if column.name.endswith("_ids") else int(info.min), int(info.max)


_LIMITS = {column.name: _limits(column) for column in COLUMNS if column.dtype}


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


# -- writing ---------------------------------------------------------------------------------------


def write_rows(path: str | Path, chunks: Iterable[Rows], facts: Facts | None = None) -> int:
    """Writes rows to a Parquet file in the doctor's own columns.

    chunks: taken one at a time, so that memory holds one. All must have the same fields; the
    columns are the fields that are not None. Returns the number of rows.
    The file appears when all rows are written, or not at all.

    Raises DataError if there are no rows, or for another ending; AlignmentError if a chunk has
    other fields.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise DataError(f"{path}: rows are written to a file that ends in .parquet.")
    left = (rows for rows in chunks if len(rows))
    first = next(left, None)
    if first is None:
        raise DataError(f"{path}: there are no rows to write.")
    names = _names(first)
    kinds = [(name, BY_NAME[name].arrow_type) for name in names]
    schema = pa.schema(kinds, metadata={HEAD: json.dumps(facts_to_dict(facts or Facts()))})
    num_rows = 0

    def write(file: BinaryIO) -> None:
        nonlocal num_rows
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in chain([first], left):
                if differs := set(names) ^ set(_names(rows)):
                    verb = "lack" if min(differs) in names else "have"
                    raise AlignmentError(
                        f"{path}: the rows from {rows.row_ids[0]!r} on {verb} {min(differs)}, "
                        f"other than those before ({', '.join(names)})."
                    )
                arrays = [_arrow(rows, name, kind) for name, kind in kinds]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
                num_rows += len(rows)

    write_atomically(path, write)
    return num_rows


def _names(rows: Rows) -> list[str]:
    """The columns of the file that `rows` fill."""
    return [c.name for c in COLUMNS if getattr(rows, c.field) is not None]


def _arrow(rows: Rows, name: str, kind: pa.DataType) -> pa.Array:
    shape, value = BY_NAME[name].shape, getattr(rows, BY_NAME[name].field)
    if shape in ("token", "token or row", "route"):
        # NaN stays NaN: a log-prob is missing, or the program computed NaN.
        value = [value[at] if value.ndim == 1 else value[at].tolist() for at in rows.slices]
    if shape == "messages":
        value = [None if m is None else json.dumps([entry.to_dict() for entry in m]) for m in value]
    try:
        return pa.array(value, kind)
    except UnicodeEncodeError:
        raise DataError(
            f"{name} of the rows from {rows.row_ids[0]!r} on holds half of a surrogate pair, which "
            "no Parquet file can; write the rows as JSON lines."
        ) from None
