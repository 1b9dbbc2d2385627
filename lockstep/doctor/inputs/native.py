"""Rows in the doctor's own columns (`schema.COLUMNS`): Parquet, JSON lines, or a directory of them.

The form for a trainer that no importer knows. What a file says of itself (`Facts`) stands in the
metadata of a Parquet file under the key `lockstep.doctor`, as JSON; in a JSONL file it is a first
line `{"lockstep.doctor": {...}}`. Neither has to be there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.config import did_you_mean
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.inputs.files import (
    BYTE_ORDER_MARK,
    PARQUET_MAGIC,
    check_place,
    head_of,
    why_no_rows,
)
from lockstep.doctor.inputs.schema import (
    BY_NAME,
    COLUMNS,
    HEAD,
    OFTEN_CALLED,
    REQUIRED,
    facts_from_dict,
    facts_to_dict,
    rows_of,
)
from lockstep.errors import AlignmentError, DataError
from lockstep.store.files import write_atomically

MAX_LINE_BYTES = 64 << 20
"""Of one row of JSONL: a million tokens with both log-probs. Long rows' routes are for Parquet."""
MAX_ROW_BYTES = 1 << 29
"""That a row of a Parquet file may take on average: more is no training row, and it would be
unpacked in one piece."""
HEAD_BYTES = 1 << 20
"""Of a JSONL file are read to find out which columns it has."""
_LINE_PIECE = 1 << 20
_MAX_BATCH_ROWS = 4096
_BYTES_PER_TOKEN = 8
"""About what a token takes in a Parquet file before compression: how many rows are asked for."""

_PARQUET_TYPES: Mapping[str, pa.DataType] = {
    "token_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),
    "rollout_logprobs": pa.list_(pa.float32()),
    "trainer_logprobs": pa.list_(pa.float32()),
    "is_sampled": pa.list_(pa.bool_()),
    "turn": pa.list_(pa.int32()),
    "policy_version": pa.list_(pa.int32()),
    "trainer_version": pa.int64(),
    "advantages": pa.list_(pa.float32()),
    "prompt_length": pa.int64(),
    "reward": pa.float64(),
    "group": pa.int64(),
    "step": pa.int64(),
    "id": pa.string(),
    "messages": pa.string(),
    "text": pa.string(),
    "engine_ids": pa.list_(pa.list_(pa.int32())),
    "routed_experts": pa.list_(pa.list_(pa.list_(pa.int16()))),
    "trainer_routed_experts": pa.list_(pa.list_(pa.list_(pa.int16()))),
}
"""As they are written. Whatever holds the same values is read."""


# -- reading ---------------------------------------------------------------------------------------


class RowsDump(Dump):
    """Files in the doctor's own columns.

    A directory is read as its `*.parquet` files, or as its `*.jsonl` files if it has none, in the
    order of the numbers in their names; all must have the same columns.
    """

    format: ClassVar[str] = "rows"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        check_place(path)
        if why := why_no_rows(path):
            raise DataError(f"{path} {why}.")
        self._parts: list[_Part] = [_open_part(file) for file in _part_paths(path)]
        first = self._parts[0]
        for part in self._parts[1:]:
            if differs := part.columns ^ first.columns:
                name = min(differs)
                has, lacks = (part, first) if name in part.columns else (first, part)
                raise DataError(
                    f"{has.path} has the column {name} and {lacks.path} does not; the parts of a "
                    "directory must have the same columns. Give one of the files, or write the "
                    "column (null where it is not known) into all."
                )
        for part in self._parts:
            part.check_columns()

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if why_no_rows(path):
            return False
        try:
            return "token_ids" in _open_part(_part_paths(path)[0]).columns
        except DataError:
            return False

    @cached_property
    def facts(self) -> Facts:
        return self._parts[0].facts

    @cached_property
    def has(self) -> frozenset[str]:
        names = self._parts[0].columns
        fields = {BY_NAME[name].field for name in names if name in BY_NAME}
        return frozenset(fields | ({"is_sampled"} if "turn" in names else set()))

    @cached_property
    def lacks(self) -> Mapping[str, str]:
        names = self._parts[0].columns
        out: dict[str, str] = {}
        for column in COLUMNS:
            if column.field in self.has or column.name == "id":
                continue
            meant = sorted(n for n in names if OFTEN_CALLED.get(n) == column.name)
            hint = f" The file has {meant[0]}: if that is it, rename it." if meant else ""
            out[column.field] = f"there is no column {column.name}: {column.how}.{hint}"
        return out

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        for part in self._parts:
            prefix = f"{part.path.stem}:" if len(self._parts) > 1 else ""
            for block in part.blocks(max_tokens):
                yield rows_of(
                    block.columns,
                    row_ids=[f"{prefix}{number}" for number in block.numbers],
                    where=block.where,
                )


def _part_paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for suffix in (".parquet", ".jsonl"):
        files = [f for f in path.iterdir() if f.suffix == suffix and f.name[0] not in "._"]
        if files:
            return sorted(files, key=lambda f: _by_number(f.name))
    raise DataError(f"{path} has no .parquet and no .jsonl file.")


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@dataclass(kw_only=True)
class _Block:
    """Some rows of a file as columns."""

    columns: Mapping[str, pa.Array | list[Any]]
    numbers: Sequence[int]
    """Of the rows in their file, from 0."""
    where: Callable[[int], str]


class _Part:
    """One file."""

    path: Path
    columns: frozenset[str]
    """All that it has, known ones and others."""
    facts: Facts

    def blocks(self, max_tokens: int) -> Iterator[_Block]:
        raise NotImplementedError

    def check_columns(self) -> None:
        for name in REQUIRED:
            if name in self.columns:
                continue
            meant = sorted(n for n in self.columns if OFTEN_CALLED.get(n) == name)
            if {"segments", "task_payload_json"} <= self.columns:
                raise DataError(
                    f"{self.path} is a part of a run of Lockstep; give the run's directory, with "
                    "config.json in it."
                )
            found = ", ".join(sorted(self.columns)[:12]) or "none"
            hint = (
                f" If {meant[0]} is that, rename it."
                if meant
                else did_you_mean(name, self.columns)
                if self.columns
                else ""
            )
            raise DataError(
                f"{self.path} has no column {name}; every row must have "
                f"{' and '.join(REQUIRED)} (docs/doctor-inputs.md). It has: {found}.{hint}"
            )


def _open_part(path: Path) -> _Part:
    check_place(path)
    if why := why_no_rows(path):
        raise DataError(f"{path} {why}.")
    return _ParquetPart(path) if head_of(path, 4) == PARQUET_MAGIC else _JsonPart(path)


class _ParquetPart(_Part):
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._open() as file:
                schema, metadata = file.schema_arrow, file.metadata
                self.columns = frozenset(schema.names)
                self.num_rows = metadata.num_rows
                # Not asked of each column: pyarrow ends the process over statistics that a flipped
                # bit has damaged (26.0), where reading the column raises an error.
                groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                self._row_bytes = max(
                    (group.total_byte_size / max(group.num_rows, 1) for group in groups),
                    default=1.0,
                )
                source = (schema.metadata or {}).get(HEAD.encode())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise error if isinstance(error, DataError) else self._broken(error) from None
        if not self.num_rows:
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
        where = f"{path}: metadata {HEAD}"
        self.facts = Facts() if source is None else facts_from_dict(_json(source, where), where)

    def _open(self) -> pq.ParquetFile:
        try:
            # Buffered: else a whole column of a row group is read into memory at once.
            return pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> DataError:
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            file.seek(max(size - 4, 0))
            is_whole = file.read() == PARQUET_MAGIC and size > 8
        if not is_whole:
            return DataError(
                f"{self.path} begins as Parquet and its end is missing ({size} bytes): it was cut "
                "off, or is still being written. The list of its columns stands at the end, so "
                "that nothing of it can be read; write or copy it again."
            )
        reason = " ".join(str(error).split())[:300]
        return DataError(
            f"{self.path} is Parquet, but what is in it cannot be read ({reason}): it was damaged "
            "on its way. Write or copy it again."
        )

    def blocks(self, max_tokens: int) -> Iterator[_Block]:
        names = [name for name in BY_NAME if name in self.columns]
        batch_rows = int(_BYTES_PER_TOKEN * max_tokens / max(self._row_bytes, 1.0))
        batch_rows = min(max(batch_rows, 1), _MAX_BATCH_ROWS)
        pending: list[pa.RecordBatch] = []
        size = number = 0
        with self._open() as file:
            for batch in self._batches(file, batch_rows, names):
                begin = 0
                for end, tokens in _cuts(_sizes(batch.column("token_ids")), max_tokens):
                    if pending and size + tokens > max_tokens:
                        yield self._block(pending, number)
                        number += sum(len(b) for b in pending)
                        pending, size = [], 0
                    pending.append(batch.slice(begin, end - begin))
                    size += tokens
                    begin = end
        if pending:
            yield self._block(pending, number)

    def _batches(
        self, file: pq.ParquetFile, batch_rows: int, names: list[str]
    ) -> Iterator[pa.RecordBatch]:
        try:
            yield from file.iter_batches(batch_rows, columns=names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(error) from None

    def _block(self, batches: list[pa.RecordBatch], number: int) -> _Block:
        table = pa.Table.from_batches(batches)
        columns: dict[str, pa.Array | list[Any]] = {}
        for name in table.column_names:
            column = table.column(name)
            if BY_NAME[name].shape in ("text", "messages"):
                try:
                    columns[name] = column.to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.path}: {name}, rows {number} to {number + len(table) - 1}, has "
                        f"text that is not UTF-8 ({error.reason}). Write it as UTF-8."
                    ) from None
            else:
                columns[name] = pa.concat_arrays(column.chunks)
        return _Block(
            columns=columns,
            numbers=range(number, number + len(table)),
            where=lambda i: f"{self.path}: row {number + i}",
        )


def _sizes(column: pa.Array) -> list[int]:
    """Tokens of each row; 1 each of what is no list, which is refused where it is read."""
    try:
        return pc.fill_null(pc.call_function("list_value_length", [column]), 0).to_pylist()
    except (pa.ArrowException, NotImplementedError):
        return [1] * len(column)


def _cuts(sizes: Sequence[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """(end, tokens) of runs of rows of at most `max_tokens`, or of one row."""
    total = begin = 0
    for at, size in enumerate(sizes):
        if at > begin and total + size > max_tokens:
            yield at, total
            begin, total = at, 0
        total += size
    if len(sizes) > begin:
        yield len(sizes), total


class _JsonPart(_Part):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = Facts()
        columns: set[str] = set()
        num_read = 0
        for _, row in self._rows(self._note_facts, max_bytes=HEAD_BYTES):
            columns |= {name for name, value in row.items() if value is not None}
            num_read += 1
        if not num_read:
            raise DataError(f"{path} has no rows; expected one JSON object per line and row.")
        self.columns = frozenset(columns)

    def _note_facts(self, line: int, source: object) -> None:
        self.facts = facts_from_dict(source, f"{self.path}:{line}: {HEAD}")

    def _rows(
        self, on_facts: Callable[[int, object], None], *, max_bytes: int | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line, row) of each row; only those of about the first `max_bytes`, if that is given."""
        num_bytes = 0
        for place, (line, text) in enumerate(lines_of(self.path)):
            row = json_line(text, f"{self.path}:{line}")
            if HEAD in row:
                if place:
                    raise DataError(
                        f"{self.path}:{line}: a second line of facts ({HEAD}); expected it first "
                        "in the file. Were two files put together? Give them as a directory."
                    )
                on_facts(line, row[HEAD])
                continue
            yield line, row
            num_bytes += len(text)
            if max_bytes is not None and num_bytes >= max_bytes:
                return

    def blocks(self, max_tokens: int) -> Iterator[_Block]:
        pending: list[tuple[int, dict[str, Any]]] = []
        size = number = 0
        for line, row in self._rows(lambda line, source: None):
            ids = row.get("token_ids")
            tokens = len(ids) if isinstance(ids, list) else 1
            if pending and size + tokens > max_tokens:
                yield self._block(pending, number)
                number += len(pending)
                pending, size = [], 0
            for name in row.keys() - self.columns:
                if name in BY_NAME and row[name] is not None:
                    raise DataError(
                        f"{self.path}:{line}: the first row with {name}; the first "
                        f"{HEAD_BYTES >> 20} MiB of the file say which columns it has. Write it "
                        "into the first row too, or leave it out of all."
                    )
            pending.append((line, row))
            size += tokens
        if pending:
            yield self._block(pending, number)

    def _block(self, pending: list[tuple[int, dict[str, Any]]], number: int) -> _Block:
        lines = [line for line, _ in pending]

        def where(i: int) -> str:
            return f"{self.path}:{lines[i]}"

        columns: dict[str, pa.Array | list[Any]] = {}
        for name in (name for name in BY_NAME if name in self.columns):
            values = [row.get(name) for _, row in pending]
            is_plain = BY_NAME[name].shape in ("text", "messages")
            columns[name] = values if is_plain else _array(values, name, where)
        return _Block(columns=columns, numbers=range(number, number + len(pending)), where=where)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, text) of each line that is not blank; DataError for one that is too long."""
    number = 0
    with open(path, "rb") as file:
        while text := _line(file, f"{path}:{number + 1}"):
            number += 1
            if number == 1:
                text = text.removeprefix(BYTE_ORDER_MARK)
            if not text.isspace() and text:
                yield number, text


def _line(file: BinaryIO, where: str) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := file.readline(_LINE_PIECE):
        if b"\0" in piece:
            raise DataError(
                f"{where}: zero bytes in place of text: space that was reserved and never written, "
                "or a copy that failed. Write or copy the file again."
            )
        pieces.append(piece)
        size += len(piece)
        if size > MAX_LINE_BYTES:
            raise DataError(
                f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB; expected one row "
                "per line. Write rows that large as Parquet."
            )
        if piece.endswith(b"\n"):
            break
    return b"".join(pieces)


def json_line(text: bytes, where: str) -> dict[str, Any]:
    """The object on a line of JSON lines. Raises DataError, which begins with `where`."""
    row = _json(text, where)
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, one row; found a {type(row).__name__}.")
    return row


def _json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start} is not UTF-8 ({error.reason}). Write the text as UTF-8."
        ) from None
    except RecursionError:
        raise DataError(f"{where}: JSON that is nested too deeply to be a row.") from None
    except ValueError as error:
        at = getattr(error, "pos", 0)
        if text.strip() in (b"{", b"["):
            why = (
                "the object goes on over several lines; expected each row on one line: "
                "jq -c . FILE > rows.jsonl"
            )
        elif not text.endswith(b"\n"):
            why = (
                f"the file ends in the middle of a row (character {at}): it was cut off, or is "
                "still being written. Write or copy it again, or remove the last line"
            )
        else:
            why = f"not JSON at character {at} ({getattr(error, 'msg', error)})"
        raise DataError(f"{where}: {why}.") from None


def _array(values: list[Any], name: str, where: Callable[[int], str]) -> pa.Array:
    """Python values as an Arrow array, whose type is what they are."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    first: tuple[int, str] | None = None
    for i, value in enumerate(values):
        try:
            kind = str(pa.array([value]).type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{where(i)}: {name} holds values that do not belong together, or numbers too "
                f"large for 64 bits ({reason})."
            ) from None
        if "null" in kind:
            continue
        first = first or (i, kind)
        if kind != first[1]:
            raise DataError(
                f"{where(i)}: {name} is {kind}, and at {where(first[0])} {first[1]}; expected the "
                "same in all rows."
            )
    raise DataError(f"{where(0)}: {name}, in this or a later row, holds no column of numbers.")


# -- writing ---------------------------------------------------------------------------------------


def write_rows(path: str | Path, chunks: Iterable[Rows], facts: Facts | None = None) -> int:
    """Writes rows as the doctor reads them; Parquet, or JSON lines if `path` ends in .jsonl.

    chunks: taken one at a time; memory is that of one. All must have the same fields, which are
    those that are not None (`rescored_logprobs`, which the doctor computes, is not written).
    Returns how many rows were written; the file is there when all are, or not at all.

    Raises DataError if there are none, or for another ending; AlignmentError if the fields of a
    chunk are others.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: rows are written to a file that ends in .parquet or .jsonl.")
    left = iter(chunks)
    first = next((rows for rows in left if len(rows)), None)
    if first is None:
        raise DataError(f"{path}: there are no rows to write.")
    names = _names(first)
    num_rows = 0

    def checked() -> Iterator[Rows]:
        nonlocal num_rows
        for rows in chain([first], left):
            if not len(rows):
                continue
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
    schema = pa.schema([(name, _PARQUET_TYPES[name]) for name in names], metadata={HEAD: head})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in chunks:
            arrays = [_arrow(rows, name) for name in names]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _arrow(rows: Rows, name: str) -> pa.Array:
    kind, value = _PARQUET_TYPES[name], getattr(rows, BY_NAME[name].field)
    shape = BY_NAME[name].shape
    if shape in ("token", "token or row"):
        # NaN stays what it is: a log-prob that is not there, or one that came out so.
        return pa.ListArray.from_arrays(
            pa.array(rows.offsets, pa.int32()), pa.array(value, kind.value_type), type=kind
        )
    if shape == "route":
        num_tokens, num_layers, num_active = value.shape
        inner = kind.value_type
        layers = pa.ListArray.from_arrays(
            pa.array(np.arange(num_tokens * num_layers + 1) * num_active, pa.int32()),
            pa.array(value.reshape(-1)),
            type=inner.value_type,
        )
        tokens = pa.ListArray.from_arrays(
            pa.array(np.arange(num_tokens + 1) * num_layers, pa.int32()), layers, type=inner
        )
        return pa.ListArray.from_arrays(pa.array(rows.offsets, pa.int32()), tokens, type=kind)
    if shape == "messages":
        return pa.array([_messages_json(m) for m in value], kind)
    try:
        return pa.array(value, kind)
    except UnicodeEncodeError:
        raise DataError(
            f"{name} of the rows from {rows.row_ids[0]!r} on holds half of a surrogate pair, which "
            "no Parquet file can; write the rows as .jsonl."
        ) from None


def _messages_json(messages: Sequence[Any] | None) -> str | None:
    return None if messages is None else json.dumps([m.to_dict() for m in messages])


def _write_jsonl(file: BinaryIO, chunks: Iterable[Rows], names: list[str], head: str) -> None:
    file.write(f'{{"{HEAD}": {head}}}\n'.encode())
    for rows in chunks:
        for number, (_, tokens) in enumerate(rows.rows()):
            row = {name: _plain(rows, name, number, tokens) for name in names}
            file.write(json.dumps(row).encode() + b"\n")


def _plain(rows: Rows, name: str, number: int, tokens: slice) -> Any:
    value, shape = getattr(rows, BY_NAME[name].field), BY_NAME[name].shape
    if shape in ("token", "token or row", "route"):
        return [None if v != v else v for v in value[tokens].tolist()]
    entry = value[number]
    if shape == "row":
        number_of = entry.item()
        return None if number_of != number_of else number_of
    if shape == "messages":
        return None if entry is None else [m.to_dict() for m in entry]
    if shape == "turn":
        return None if entry is None else [ids.tolist() for ids in entry]
    return entry
