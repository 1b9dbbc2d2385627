"""Rows in the doctor's own columns (`schema.COLUMNS`): Parquet, JSON lines, or a directory of them.

The form for a trainer without a format of its own. `Facts` of a Parquet file are in its metadata
under the key `lockstep.doctor`, as JSON; in a JSONL file they are a first line
`{"lockstep.doctor": {...}}`. Neither is required.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.assemble import grouped
from lockstep.doctor.inputs.base import CHUNK_TOKENS, HOW_TO_GET, Dump, Facts
from lockstep.doctor.inputs.lines import json_line, lines_of, numbers_in, parse_json
from lockstep.doctor.inputs.places import PARQUET_MAGIC, check_place, head_of, why_no_rows
from lockstep.doctor.inputs.schema import (
    BY_NAME,
    COLUMNS,
    HEAD,
    OFTEN_CALLED,
    REQUIRED,
    Where,
    facts_from_dict,
    facts_to_dict,
    rows_of,
)
from lockstep.errors import AlignmentError, DataError
from lockstep.store.files import write_atomically

MAX_ROW_BYTES = 1 << 29
"""Largest average size of the rows of a Parquet file: a larger one is no training row, and would be
unpacked in one piece."""
HEAD_BYTES = 1 << 20
"""Part of a JSONL file that is read to find out which columns it has."""
_MAX_BATCH_ROWS = 4096
_BYTES_PER_TOKEN = 8
"""Approximate size of a token in a Parquet file before compression: how many rows to ask for."""
_UNREADABLE = (pa.ArrowException, OSError, ValueError)


# -- reading ---------------------------------------------------------------------------------------


class RowsDump(Dump):
    """Files in the doctor's own columns.

    A directory is read as its `*.parquet` files, or as its `*.jsonl` files if it has none, in the
    order of the numbers in their names; all must have the same columns.
    """

    format: ClassVar[str] = "rows"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts = [_open_part(file) for file in _part_paths(path)]
        first = self._parts[0]
        for part in self._parts:
            if differs := part.columns ^ first.columns:
                name = min(differs)
                has, lacks = (part, first) if name in part.columns else (first, part)
                raise DataError(
                    f"{has.path} has the column {name} and {lacks.path} does not; the parts of a "
                    "directory must have the same columns. Give one of the files, or write the "
                    "column (null where it is not known) into all."
                )
            part.check_columns()
        self.facts = first.facts
        names = first.columns
        known = {BY_NAME[name].field for name in names if name in BY_NAME}
        self.has = frozenset(known | ({"is_sampled"} if "turn" in names else set()))
        self.lacks = {
            column.field: f"there is no column {column.name}: "
            f"{HOW_TO_GET[column.field]}.{_hint(column, names)}"
            for column in COLUMNS
            if column.field not in self.has and column.name != "id"
        }

    @classmethod
    def recognises(cls, path: Path) -> bool:
        try:
            return "token_ids" in _open_part(_part_paths(path)[0]).columns
        except DataError:
            return False

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        for part in self._parts:
            prefix = f"{part.path.stem}:" if len(self._parts) > 1 else ""
            number = 0
            for columns, where in part.blocks(max_tokens):
                row_ids = [f"{prefix}{number + i}" for i in range(len(columns["token_ids"]))]
                number += len(row_ids)
                yield rows_of(columns, row_ids=row_ids, where=where)


def _hint(column: Any, names: Iterable[str]) -> str:
    meant = sorted(n for n in names if OFTEN_CALLED.get(n) == column.name)
    return f" The file has {meant[0]}: if that is it, rename it." if meant else ""


def _part_paths(path: Path) -> list[Path]:
    check_place(path)
    if why := why_no_rows(path):
        raise DataError(f"{path} {why}.")
    if not path.is_dir():
        return [path]
    for suffix in (".parquet", ".jsonl"):
        files = [f for f in path.iterdir() if f.suffix == suffix and f.name[0] not in "._"]
        if files:
            return sorted(files, key=lambda f: (numbers_in(f.name), f.name))
    raise DataError(f"{path} has no .parquet and no .jsonl file.")


def _open_part(path: Path) -> _Part:
    check_place(path)
    if why := why_no_rows(path):
        raise DataError(f"{path} {why}.")
    return _ParquetPart(path) if head_of(path, 4) == PARQUET_MAGIC else _JsonPart(path)


_Columns = Mapping[str, "pa.Array | list[Any]"]
"""Some rows of a file as columns."""


class _Part(ABC):
    """One file."""

    columns: frozenset[str]
    """All its columns, known ones and others."""
    facts: Facts = Facts()

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def blocks(self, max_tokens: int) -> Iterator[tuple[_Columns, Where]]:
        """Its rows in blocks of at most `max_tokens` tokens, or of one row."""

    def check_columns(self) -> None:
        for name in (name for name in REQUIRED if name not in self.columns):
            if {"segments", "task_payload_json"} <= self.columns:
                raise DataError(
                    f"{self.path} is a part of a run of Lockstep; give the run's directory, with "
                    "config.json in it."
                )
            raise DataError(
                f"{self.path} has no column {name}; every row must have "
                f"{' and '.join(REQUIRED)} (docs/doctor-dumps.md). It has: "
                f"{', '.join(sorted(self.columns)[:12]) or 'none'}."
                f"{_hint(BY_NAME[name], self.columns)}"
            )


class _ParquetPart(_Part):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with self._open() as file:
                schema, metadata = file.schema_arrow, file.metadata
                self.columns = frozenset(schema.names)
                num_rows = metadata.num_rows
                # Sizes of row groups and not of columns: pyarrow ends the process over statistics
                # that a flipped bit has damaged (26.0), where reading the column raises an error.
                groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                sizes = (group.total_byte_size / max(group.num_rows, 1) for group in groups)
                self._row_bytes = max(sizes, default=1.0)
                source = (schema.metadata or {}).get(HEAD.encode())
        except DataError:
            raise
        except _UNREADABLE as error:
            raise self._broken(error) from None
        if not num_rows:
            raise DataError(
                f"{path} has no rows: a Parquet file of 0 rows with the columns "
                f"{', '.join(sorted(self.columns)) or '(none)'}. Was it written before the first "
                "step?"
            )
        if self._row_bytes > MAX_ROW_BYTES:
            raise DataError(
                f"{path}: its rows have {self._row_bytes / 2**20:.0f} MiB each on average; "
                f"expected training rows, of at most {MAX_ROW_BYTES >> 20}. Is all of it one row?"
            )
        if source is not None:
            where = f"{path}: metadata {HEAD}"
            self.facts = facts_from_dict(parse_json(source, where), where)

    def _open(self) -> pq.ParquetFile:
        try:
            # Buffered: otherwise a whole column of a row group is read into memory at once.
            return pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
        except _UNREADABLE as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> DataError:
        reason = " ".join(str(error).split())[:200]
        return DataError(
            f"{self.path} begins as Parquet and cannot be read ({reason}): its end is missing, or "
            "it is damaged. Write or copy it again."
        )

    def blocks(self, max_tokens: int) -> Iterator[tuple[_Columns, Where]]:
        first = 0
        for batches in grouped(self._slices(max_tokens), max_tokens):
            table = pa.Table.from_batches(batches)
            columns = {name: self._column(table, name, first) for name in table.column_names}
            yield columns, lambda i, first=first: f"{self.path}: row {first + i}"
            first += len(table)

    def _slices(self, max_tokens: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(tokens, rows) of runs of rows of at most `max_tokens`, or of one row."""
        names = [name for name in BY_NAME if name in self.columns]
        batch_rows = int(_BYTES_PER_TOKEN * max_tokens / max(self._row_bytes, 1.0))
        batch_rows = min(max(batch_rows, 1), _MAX_BATCH_ROWS)
        with self._open() as file:
            try:
                for batch in file.iter_batches(batch_rows, columns=names, use_threads=False):
                    sizes = _sizes(batch.column("token_ids"))
                    for run in grouped(((n, i) for i, n in enumerate(sizes)), max_tokens):
                        rows = batch.slice(run[0], len(run))
                        yield sum(sizes[run[0] : run[-1] + 1]), rows
            except (pa.ArrowException, OSError) as error:
                raise self._broken(error) from None

    def _column(self, table: pa.Table, name: str, first: int) -> pa.Array | list[Any]:
        column = table.column(name)
        if BY_NAME[name].shape not in ("text", "messages"):
            return pa.concat_arrays(column.chunks)
        try:
            return column.to_pylist()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: {name}, rows {first} to {first + len(table) - 1}, has text that is "
                f"not UTF-8 ({error.reason}). Write it as UTF-8."
            ) from None


def _sizes(column: pa.Array) -> list[int]:
    """Tokens of each row; 1 for anything but a list, which is refused where it is read."""
    try:
        return pc.fill_null(pc.call_function("list_value_length", [column]), 0).to_pylist()
    except (pa.ArrowException, NotImplementedError):
        return [1] * len(column)


class _JsonPart(_Part):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        columns: set[str] = set()
        num_bytes = 0
        for _, row, size in self._rows():
            columns |= {name for name, value in row.items() if value is not None}
            num_bytes += size
            if num_bytes >= HEAD_BYTES:
                break
        if not num_bytes:
            raise DataError(f"{path} has no rows; expected one JSON object per line and row.")
        self.columns = frozenset(columns)

    def _rows(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """(line, row, bytes) of each row."""
        for place, (line, text) in enumerate(lines_of(self.path)):
            row = json_line(text, f"{self.path}:{line}")
            if HEAD not in row:
                yield line, row, len(text)
            elif place:
                raise DataError(
                    f"{self.path}:{line}: a second line of facts ({HEAD}); expected it first in "
                    "the file. Were two files put together? Give them as a directory."
                )
            else:
                self.facts = facts_from_dict(row[HEAD], f"{self.path}:{line}: {HEAD}")

    def blocks(self, max_tokens: int) -> Iterator[tuple[_Columns, Where]]:
        for rows in grouped(self._checked_rows(), max_tokens):
            lines = [line for line, _ in rows]

            def where(i: int, lines: list[int] = lines) -> str:
                return f"{self.path}:{lines[i]}"

            columns: dict[str, pa.Array | list[Any]] = {}
            for name in (name for name in BY_NAME if name in self.columns):
                values = [row.get(name) for _, row in rows]
                is_plain = BY_NAME[name].shape in ("text", "messages")
                columns[name] = values if is_plain else _array(values, name, where)
            yield columns, where

    def _checked_rows(self) -> Iterator[tuple[int, tuple[int, dict[str, Any]]]]:
        """(tokens, (line, row)) of each row."""
        for line, row, _ in self._rows():
            for name in row.keys() - self.columns:
                if name in BY_NAME and row[name] is not None:
                    raise DataError(
                        f"{self.path}:{line}: the first row with {name}; the first "
                        f"{HEAD_BYTES >> 20} MiB of the file say which columns it has. Write it "
                        "into the first row too, or leave it out of all."
                    )
            ids = row.get("token_ids")
            yield len(ids) if isinstance(ids, list) else 1, (line, row)


def _array(values: list[Any], name: str, where: Where) -> pa.Array:
    """Python values as an Arrow array of the type that Arrow infers."""
    problems = (pa.ArrowException, OverflowError, TypeError, ValueError)
    kinds: set[str] = set()
    for i in range(-1, len(values)):  # all at once, and one by one if that fails
        try:
            array = pa.array(values if i < 0 else [values[i]])
        except problems as error:
            if i < 0:
                continue
            reason = " ".join(str(error).split())[:100]
            raise DataError(f"{where(i)}: {name} is no column of numbers ({reason}).") from None
        if i < 0:
            return array
        kinds |= {str(array.type)}
        if len({kind for kind in kinds if "null" not in kind}) > 1:
            raise DataError(f"{where(i)}: {name} is {array.type}, other than in rows before it.")
    raise DataError(f"{where(0)}: {name}, in this or a later row, holds no column of numbers.")


# -- writing ---------------------------------------------------------------------------------------


def write_rows(path: str | Path, chunks: Iterable[Rows], facts: Facts | None = None) -> int:
    """Writes rows in the doctor's own columns; JSON lines if `path` ends in .jsonl, else Parquet.

    chunks: taken one at a time, so that memory holds one. All must have the same fields; the
    columns are those that are not None, without `rescored_logprobs`. Returns the number of rows.
    The file appears when all rows are written, or not at all.

    Raises DataError if there are no rows, or for another ending; AlignmentError if a chunk has
    other fields.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: rows are written to a file that ends in .parquet or .jsonl.")
    left = (rows for rows in chunks if len(rows))
    first = next(left, None)
    if first is None:
        raise DataError(f"{path}: there are no rows to write.")
    names = _names(first)
    num_rows = 0

    def checked() -> Iterator[Rows]:
        nonlocal num_rows
        for rows in chain([first], left):
            if differs := set(names) ^ set(_names(rows)):
                raise AlignmentError(
                    f"{path}: the rows from {rows.row_ids[0]!r} on "
                    f"{'lack' if min(differs) in names else 'have'} {min(differs)}, other than "
                    f"those before; the columns of a file are those of its first rows "
                    f"({', '.join(names)})."
                )
            num_rows += len(rows)
            yield rows

    head = json.dumps(facts_to_dict(facts or Facts()))
    write = _write_parquet if path.suffix == ".parquet" else _write_jsonl
    write_atomically(path, lambda file: write(file, checked(), names, head))
    return num_rows


def _names(rows: Rows) -> list[str]:
    """The columns of the file that `rows` fill."""
    return [c.name for c in COLUMNS if getattr(rows, c.field) is not None]


def _write_parquet(file: BinaryIO, chunks: Iterable[Rows], names: list[str], head: str) -> None:
    kinds = [(name, BY_NAME[name].arrow_type) for name in names]
    schema = pa.schema(kinds, metadata={HEAD: head})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in chunks:
            arrays = [_arrow(rows, name, kind) for name, kind in kinds]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _arrow(rows: Rows, name: str, kind: pa.DataType) -> pa.Array:
    shape, value = BY_NAME[name].shape, getattr(rows, BY_NAME[name].field)
    if shape in ("token", "token or row", "route"):
        # NaN stays NaN: a log-prob that is missing, or one that came out so.
        sizes = [rows.offsets]
        for width in value.shape[1:]:
            sizes.append(np.arange(0, (sizes[-1][-1]) * width + 1, width))
        array = pa.array(value.reshape(-1))
        for offsets in reversed(sizes):
            array = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array)
        return array.cast(kind)
    if shape == "messages":
        value = [None if m is None else json.dumps([entry.to_dict() for entry in m]) for m in value]
    try:
        return pa.array(value, kind)
    except UnicodeEncodeError:
        raise DataError(
            f"{name} of the rows from {rows.row_ids[0]!r} on holds half of a surrogate pair, which "
            "no Parquet file can; write the rows as .jsonl."
        ) from None


def _write_jsonl(file: BinaryIO, chunks: Iterable[Rows], names: list[str], head: str) -> None:
    file.write(f'{{"{HEAD}": {head}}}\n'.encode())
    for rows in chunks:
        for number, (_, tokens) in enumerate(rows.rows()):
            row = {name: _plain(rows, name, number, tokens) for name in names}
            file.write(json.dumps(row).encode() + b"\n")


def _plain(rows: Rows, name: str, number: int, tokens: slice) -> Any:
    """The value of a row as JSON; NaN is null."""
    value, shape = getattr(rows, BY_NAME[name].field), BY_NAME[name].shape
    if shape in ("token", "token or row", "route"):
        return [None if v != v else v for v in value[tokens].tolist()]
    entry = value[number]
    if shape == "row":
        return None if entry != entry else entry.item()
    if shape == "messages" and entry is not None:
        return [m.to_dict() for m in entry]
    if shape == "turn" and entry is not None:
        return [ids.tolist() for ids in entry]
    return entry
