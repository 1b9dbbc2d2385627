"""Data files as people store them, read row by row: JSON lines, JSON, CSV, TSV, Parquet and Arrow,
on this machine or on the Hugging Face hub.

Every error is a DataError that begins with the file and, where there is one, the line or row. What
a file may expand to is bounded.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from lockstep.errors import DataError, LockstepError
from lockstep.store.files import PACKED, lines_of, max_bytes, read_jsonl, unique_keys
from lockstep.system import bounded_memory

Row = tuple[str, Mapping[str, Any]]
"""(`path:line`, or `path:row N` of a file without lines, counted from 1; columns of the row)."""

SUFFIXES = (".jsonl", ".csv", ".parquet")
FORMATS = (*SUFFIXES, ".ndjson", ".json", ".tsv", ".arrow")
NOT_DATA = ("dataset_info", "dataset_dict", "state.json")
"""Beginnings of the names of files that the library `datasets` puts beside the data."""
MAX_FIELD_CHARS = 10_000_000
"""Characters in a field of a CSV file; the csv module's own limit is 131,072."""
BATCH_BYTES, BATCH_MEMORY = 256 << 20, 4 << 30
"""Largest size of a batch of Parquet rows, if every value is as long as its whole column; and
memory that reading a batch may take."""
_TOOL_KEYS = ("arguments", "parameters")
"""Objects of a dialogue that have other keys in each row: a null there is a key that is absent."""


@dataclass(frozen=True, slots=True)
class NotJson:
    """Stands for a value that JSON does not have: a time, bytes, an image. It was not read."""

    kind: str


def locate_data(path: str, *, patterns: Sequence[str], setting: str = "task.path") -> Path:
    """The file or folder that `path` names: a local one, or the downloaded files of a data set
    ORGANISATION/NAME of the hub.

    patterns: files to download.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    is_file = format_of(local) in FORMATS
    if is_file or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise DataError(
            f"{path}: no such file or folder. Give a {', '.join(SUFFIXES)} file, or ORGANISATION/"
            "NAME of the Hugging Face hub."
        )
    how = {"repo_type": "dataset", "allow_patterns": list(patterns)}
    return from_hub(path, DataError, setting=setting, **how)


def from_hub(name: str, kind: type[LockstepError], *, setting: str, **how: Any) -> Path:
    """The directory of a repository's files on the Hugging Face hub, downloaded. kind: of the error
    if they cannot be had. setting: the user's, for errors. how: options of `snapshot_download`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **how))
    except Exception as error:  # the hub's client raises a dozen kinds; each means the same here
        said = " ".join(str(error).split())
        option = f"--repo-type {how['repo_type']} " if "repo_type" in how else ""
        raise kind(
            f"{setting}={name}: no such file or directory, and the Hugging Face hub gave no answer "
            f"({type(error).__name__}: {said}). On a machine that reaches it: `hf download "
            f"{option}{name} --local-dir DIR`; then {setting}=DIR."
        ) from error


def data_files(path: str, *, is_eval: bool = False, setting: str = "task.path") -> list[Path]:
    """The data files that `path` names. In a folder: files with train in their names, or else all
    that are not for tests; is_eval: files with test, or else validation, in their names."""
    patterns = [f"{place}*{suffix}*" for suffix in FORMATS for place in ("", "**/")]
    root = locate_data(path, patterns=patterns, setting=setting)
    if root.is_file():
        return [] if is_eval else [root]
    files = sorted(p for p in root.rglob("*") if format_of(p) in FORMATS and p.is_file())
    files = [file for file in files if not file.name.startswith(NOT_DATA)]
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        raise DataError(
            f"{root} has several folders of data: {', '.join(folders)}. Name one, as "
            f"{setting}={folders[0]}."
        )
    named = {word: [f for f in files if word in f.name] for word in ("train", "test", "valid")}
    if is_eval:
        return named["test"] or named["valid"]
    rest = [f for f in files if f not in named["test"] and f not in named["valid"]]
    return named["train"] or rest


def format_of(file: Path) -> str:
    """The suffix of a file without a packing suffix."""
    return (file.with_suffix("") if file.suffix in PACKED else file).suffix


def read_rows(file: Path, *, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a file of one of FORMATS. columns: the needed ones; if a Parquet file has these,
    no others are read from it. NaN is read as such; a value that JSON cannot write is a `NotJson`.
    """
    match format_of(file):
        case ".parquet":
            return _parquet_rows(file, columns)
        case ".arrow":
            return _arrow_rows(file)
        case ".csv" | ".tsv" as suffix:
            return _csv_rows(file, "," if suffix == ".csv" else "\t")
        case ".json":
            return _json_rows(file)
        case ".jsonl" | ".ndjson":
            return _json_lines(file)
    raise DataError(f"{file}: expected a {', '.join(FORMATS)} file, or one with .gz or .zst added.")


# -- text -----------------------------------------------------------------------------------------


def _json_lines(file: Path) -> Iterator[Row]:
    return ((f"{file}:{line}", record) for line, record in read_jsonl(file, allow_nan=True))


def _json_rows(file: Path) -> Iterator[Row]:
    text = b"".join(line for _, line in lines_of(file))
    try:
        records = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith(b"{"):  # JSON lines, as `datasets` calls them .json too
            yield from _json_lines(file)
            return
        raise DataError(f"{file}: cannot be read as JSON: {error}.") from error
    if isinstance(records, dict) and b"\n" not in text.strip():
        records = [records]
    if not isinstance(records, list):
        raise DataError(
            f"{file}: expected a list of objects, or an object per line, found one "
            f"{type(records).__name__}. With pandas: to_json(FILE, orient='records', lines=True)."
        )
    for number, record in enumerate(records, start=1):
        yield f"{file}:row {number}", record


def _csv_rows(file: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    lines = lines_of(file)
    text = (line.decode("utf-8-sig" if number == 1 else "utf-8") for number, line in lines)
    rows = csv.DictReader(text, strict=True, delimiter=delimiter)
    try:
        _check_names(file, rows.fieldnames or ())
        for record in rows:
            where = f"{file}:{rows.line_num}"
            if None in record or None in record.values():
                raise DataError(f"{where}: the number of fields differs from the header's columns.")
            yield where, record
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}:{rows.line_num}: not a CSV record: {error}.") from error


def _check_names(file: Path, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{file}: the column {twice[0]!r} is there twice. Rename one.")


# -- Arrow ----------------------------------------------------------------------------------------


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet

    with _as_data(file), pyarrow.parquet.ParquetFile(file) as opened:
        schema, metadata = opened.schema_arrow, opened.metadata
        # Sizes of row groups and not of columns: pyarrow ends the process over statistics that a
        # flipped bit has damaged (26.0).
        sizes = [metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups)]
        names = [field.name for field in schema if not isinstance(_reader(field), NotJson)]
        # A file of another kind is read whole, so that the caller can name its contents.
        names = list(columns) if columns and set(columns) <= set(names) else names
        if (longest := max(sizes, default=1)) > max_bytes(file):
            raise DataError(f"{file}: a group of its rows expands to {longest:,} bytes.")
        # A dictionary may hold one value of that size for all rows.
        batch = max(4, min(1024, BATCH_BYTES // max(longest, 1)))
        yield from _rows_of(file, schema, opened.iter_batches(batch_size=batch, columns=names))


def _arrow_rows(file: Path) -> Iterator[Row]:
    import pyarrow.ipc

    with _as_data(file), pa.memory_map(str(file)) as source:
        is_stream = source.read(6) != b"ARROW1"
        source.seek(0)
        opened = (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(source)
        batches = opened if is_stream else map(opened.get_batch, range(opened.num_record_batches))
        yield from _rows_of(file, opened.schema, batches)


@contextmanager
def _as_data(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError, pa.ArrowException) as error:
        kind, found = format_of(file).lstrip("."), " ".join(str(error).split())
        text = "it expands to too much memory" if isinstance(error, MemoryError) else found
        raise DataError(f"{file}: cannot be read as {kind}: {text}.") from error


def _rows_of(file: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    _check_names(file, schema.names)
    found = {field.name: _reader(field) for field in schema}
    skipped = {name: read for name, read in found.items() if isinstance(read, NotJson)}
    readers = {name: read for name, read in found.items() if not isinstance(read, NotJson)}
    number = size = 0
    waiting = iter(batches)
    while True:
        with bounded_memory(BATCH_MEMORY):
            if (batch := next(waiting, None)) is None:
                return
            batch = batch.select([name for name in batch.schema.names if name not in skipped])
            if (size := size + batch.nbytes) > max_bytes(file):
                text = f"it expands to over {max_bytes(file):,} bytes"
                raise DataError(f"{file}:row {number}: {text}.")
            listed = batch.to_pylist()
        for row in listed:
            number += 1
            for name in row:
                try:
                    if (read := readers[name]) is not None:
                        row[name] = read(row[name])
                except (ValueError, RecursionError) as error:
                    text = f"{file}:row {number}: {name} is not JSON: {error}."
                    raise DataError(text) from None
            yield f"{file}:row {number}", row | skipped


def _reader(field: pa.Field) -> Callable[[Any], Any] | NotJson | None:
    """Makes the JSON of a Python value of this field; None: it is that already."""
    kind, types, extension = field.type, pa.types, (field.metadata or {}).get(_EXTENSION, b"")
    if "arrow.json" in (getattr(kind, "extension_name", ""), extension.decode()):
        return _parsed
    if types.is_dictionary(kind):
        return _reader(field.with_type(kind.value_type))
    if types.is_struct(kind):
        inner = {each.name: _reader(each) for each in kind}
    elif hasattr(kind, "value_field") and not types.is_map(kind):
        inner = {"": _reader(kind.value_field)}
    else:
        return None if any(is_kind(kind) for is_kind in _PLAIN) else NotJson(str(kind))
    if unread := [read for read in inner.values() if isinstance(read, NotJson)]:
        return unread[0]
    if not any(inner.values()) and not inner.keys() & _TOOL_KEYS:
        return None
    return partial(_inside, inner)


_EXTENSION = b"ARROW:extension:name"
_PLAIN = [
    getattr(pa.types, f"is_{kind}")
    for kind in ["null", "boolean", "integer", "floating", "string", "large_string", "string_view"]
]


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _inside(readers: Mapping[str, Any], value: Any) -> Any:
    """`value`, a struct or a list, read by the readers of its fields or of its entries."""
    if value is None:
        return None
    if isinstance(value, list):
        return [readers[""](each) for each in value]
    for name, each in value.items():
        read = readers[name]
        each = each if read is None else read(each)
        value[name] = _without_nulls(each) if name in _TOOL_KEYS else each
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value
