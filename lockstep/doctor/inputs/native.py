"""Rows in the doctor's own columns (`schema.COLUMNS`): Parquet, JSON lines, or a directory of them.

The form for a trainer without a format of its own. `Facts` of a Parquet file are in its metadata
under the key `lockstep.doctor`, as JSON; in a JSONL file they are a first line
`{"lockstep.doctor": {...}}`. Neither is required.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.doctor.inputs.assemble import grouped
from lockstep.doctor.inputs.base import CHUNK_TOKENS, HOW_TO_GET, Dump, Facts
from lockstep.doctor.inputs.lines import json_line, lines_of, numbers_in, parse_json, whole_files
from lockstep.doctor.inputs.places import PARQUET_MAGIC, check_place, head_of, judged, why_no_rows
from lockstep.doctor.inputs.schema import (
    BY_NAME,
    COLUMNS,
    HEAD,
    OFTEN_CALLED,
    REQUIRED,
    Values,
    Where,
    facts_from_dict,
    facts_to_dict,
    rows_of,
)
from lockstep.doctor.rows import Rows
from lockstep.errors import AlignmentError, DataError
from lockstep.store.files import write_atomically
from lockstep.system import bounded_memory

HEAD_BYTES = 1 << 20
"""Part of a JSONL file that is read to find out which columns it has."""
_MAX_BATCH_ROWS, _BATCH_MEMORY = 4096, 4 << 30
_BYTES_PER_TOKEN = 8
"""Approximate size of a token in a Parquet file before compression: how many rows to ask for."""

# -- reading ---------------------------------------------------------------------------------------

_Blocks = Iterator[tuple[Mapping[str, Values], Where]]
"""Rows of a file as columns, in blocks of at most so many tokens, or of one row."""


class RowsDump(Dump):
    """Files in the doctor's own columns.

    A directory is read as its `*.parquet` files, or as its `*.jsonl` files if it has none, in the
    order of the numbers in their names; all must have the same columns.
    """

    format: ClassVar[str] = "rows"

    def __init__(self, path: Path) -> None:
        files = _part_paths(path)
        super().__init__(judged(path, files))
        ends, self.notes = whole_files(files)
        self._parts = [_open_part(*file) for file in ends.items()]
        first = self._parts[0]
        for part in self._parts:
            if differs := part.columns ^ first.columns:
                name = min(differs)
                has, lacks = (part, first) if name in part.columns else (first, part)
                raise DataError(
                    f"{has.path} has the column {name} and {lacks.path} does not; expected the "
                    "same columns in all parts of a directory (null where a value is not known)."
                )
        _check_columns(first)
        self.facts = first.facts
        names = first.columns
        known = {column.field for column in COLUMNS if column.name in names}
        self.has = frozenset(known | ({"is_sampled"} if "turn" in names else set()))
        self.lacks = {
            column.field: f"there is no column {column.name}: "
            f"{HOW_TO_GET.get(column.field, 'log it')}.{_hint(column.name, names)}"
            for column in COLUMNS
            if column.field not in self.has and column.name != "id"
        }

    @classmethod
    def recognises(cls, path: Path) -> bool:
        try:
            ends, _ = whole_files(_part_paths(path))
            return "token_ids" in _open_part(*next(iter(ends.items()))).columns
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


def _hint(name: str, names: Iterable[str]) -> str:
    meant = sorted(OFTEN_CALLED.get(name, frozenset()) & set(names))
    return f" The file has {meant[0]}: if that is it, rename it." if meant else ""


def _check_columns(part: _Part) -> None:
    for name in (name for name in REQUIRED if name not in part.columns):
        if {"segments", "task_payload_json"} <= part.columns:
            raise DataError(
                f"{part.path} is a part of a run of Lockstep; give the run's directory."
            )
        raise DataError(
            f"{part.path} has no column {name}; every row must have {' and '.join(REQUIRED)} "
            "(documentation: Doctor: dumps). It has: "
            f"{', '.join(sorted(part.columns)[:12]) or 'none'}."
            f"{_hint(name, part.columns)}"
        )


def _part_paths(path: Path) -> list[Path]:
    for suffix in (".parquet", ".jsonl") if path.is_dir() else ():
        files = [f for f in path.iterdir() if f.suffix == suffix and f.name[0] not in "._"]
        if files:
            return sorted(files, key=lambda f: (numbers_in(f.name), f.name))
    return [path]


def _open_part(path: Path, end: int) -> _Part:
    check_place(path)
    if why := why_no_rows(path):
        raise DataError(f"{path} {why}.")
    return _ParquetFile(path) if head_of(path, 4) == PARQUET_MAGIC else _JsonLines(path, end)


# -- Parquet


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


class _ParquetFile:
    """One Parquet file: its columns, known ones and others, its facts, and its rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            # Sizes of row groups and not of columns: pyarrow ends the process over statistics that
            # a flipped bit has damaged (26.0), where reading the column raises an error.
            groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
            sizes = [group.total_byte_size / max(group.num_rows, 1) for group in groups]
            self._row_bytes = max([1.0, *sizes])
            num_rows = metadata.num_rows
            source = (schema.metadata or {}).get(HEAD.encode())
        self.columns = frozenset(schema.names)
        if not num_rows:
            raise DataError(
                f"{path} has no rows: a Parquet file of 0 rows with the columns "
                f"{', '.join(sorted(self.columns)) or '(none)'}. Was it written before the first "
                "step?"
            )
        where, self.facts = f"{path}: metadata {HEAD}", Facts()
        if source is not None:
            self.facts = facts_from_dict(parse_json(source, where), where)

    def blocks(self, max_tokens: int) -> _Blocks:
        first = 0
        for batches in grouped(self._slices(max_tokens), max_tokens):
            table = pa.Table.from_batches(batches)
            rows = f"rows {first} to {first + len(table) - 1}"
            found: dict[str, Values] = {}
            for name in table.column_names:
                column = table.column(name)
                try:
                    is_text = BY_NAME[name].shape in ("text", "messages")
                    found[name] = column.to_pylist() if is_text else pa.concat_arrays(column.chunks)
                except UnicodeDecodeError as error:
                    reason = f"not UTF-8 ({error.reason})"
                    raise DataError(f"{self.path}: {name}, {rows}: {reason}.") from None
            yield found, lambda i, first=first: f"{self.path}: row {first + i}"
            first += len(table)

    def _slices(self, max_tokens: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(tokens, rows) of runs of rows of at most `max_tokens`, or of one row."""
        names = [name for name in BY_NAME if name in self.columns]
        batch_rows = int(_BYTES_PER_TOKEN * max_tokens / self._row_bytes)
        batch_rows = min(max(batch_rows, 1), _MAX_BATCH_ROWS)
        with _parquet(self.path) as file:
            batches = file.iter_batches(batch_rows, columns=names, use_threads=False)
            while True:
                with bounded_memory(_BATCH_MEMORY):
                    if (batch := next(batches, None)) is None:
                        return
                sizes = _sizes(batch.column("token_ids"))
                for run in grouped(((n, i) for i, n in enumerate(sizes)), max_tokens):
                    yield sum(sizes[run[0] : run[-1] + 1]), batch.slice(run[0], len(run))


def _sizes(column: pa.Array) -> list[int]:
    """Tokens of each row; 1 for anything but a list, which is refused where it is read."""
    try:
        return pc.fill_null(pc.call_function("list_value_length", [column]), 0).to_pylist()
    except (pa.ArrowException, NotImplementedError):
        return [1] * len(column)


# -- JSON lines


class _JsonLines:
    """One JSONL file: the columns of its first rows, its facts, and its rows."""

    def __init__(self, path: Path, end: int) -> None:
        self.path, self._end, self.facts = path, end, Facts()
        columns: set[str] = set()
        num_bytes = 0
        for line, row, size in self._rows():
            if HEAD in row:
                self.facts = facts_from_dict(row[HEAD], f"{path}:{line}: {HEAD}")
                continue
            columns |= {name for name, value in row.items() if value is not None}
            num_bytes += size
            if num_bytes >= HEAD_BYTES:
                break
        if not num_bytes:
            raise DataError(f"{path} has no rows; expected one JSON object per line and row.")
        self.columns = frozenset(columns)

    def blocks(self, max_tokens: int) -> _Blocks:
        for rows in grouped(self._checked(), max_tokens):
            lines = [line for line, _ in rows]
            names = [name for name in BY_NAME if name in self.columns]
            found = {name: [row.get(name) for _, row in rows] for name in names}
            yield found, lambda i, lines=lines: f"{self.path}:{lines[i]}"

    def _rows(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """(line, object, bytes) of each line: the facts of the file, if it has any, and rows."""
        for place, (line, text) in enumerate(lines_of(self.path, self._end)):
            where = f"{self.path}:{line}"
            row = json_line(text, where)
            if place and HEAD in row:
                raise DataError(f"{where}: {HEAD} again; expected it in the first line alone.")
            yield line, row, len(text)

    def _checked(self) -> Iterator[tuple[int, tuple[int, dict[str, Any]]]]:
        """(tokens, (line, row)) of each row."""
        for line, row, _ in self._rows():
            if HEAD in row:
                continue
            for name in row.keys() - self.columns:
                if name in BY_NAME and row[name] is not None:
                    raise DataError(
                        f"{self.path}:{line}: the first row with {name}. Write it into the first "
                        "row of the file too, or leave it out of all."
                    )
            ids = row.get("token_ids")
            yield len(ids) if isinstance(ids, list) else 1, (line, row)


_Part = _ParquetFile | _JsonLines


# -- writing ---------------------------------------------------------------------------------------


def write_rows(path: str | Path, chunks: Iterable[Rows], facts: Facts | None = None) -> int:
    """Writes rows to a Parquet file in the doctor's own columns.

    chunks: taken one at a time, so that memory holds one. All must have the same fields; the
    columns are those that are not None. Returns the number of rows.
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
    head = json.dumps(facts_to_dict(facts or Facts()))
    schema = pa.schema(kinds, metadata={HEAD: head})
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
            "no Parquet file can; write the rows as JSON lines."
        ) from None
