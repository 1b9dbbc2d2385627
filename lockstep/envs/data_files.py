"""Data files of tasks: found on this machine or on the Hugging Face hub, read row by row, split.

Every error is a DataError that begins with the file and, where there is one, the line or row.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.agent.tasks import hold_out, read_jsonl
from lockstep.errors import DataError

T = TypeVar("T")
Row = tuple[str, Mapping[str, Any]]
"""(`path:line`, or `path:row N` of a parquet file, counted from 1; columns of the row)."""

SUFFIXES = (".jsonl", ".csv", ".parquet")
MAX_FIELD_CHARS = 10_000_000
"""Characters in a field of a CSV file; the csv module's own limit is 131,072."""


def locate_data(path: str, *, patterns: Sequence[str], examples: str = "") -> Path:
    """The file or folder that `path` names: a local one, or the downloaded files of a data set
    ORGANISATION/NAME of the hub.

    patterns: files to download. examples: names of data sets, for the error.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise DataError(
            f"{path}: no such file or folder. Give a {', '.join(SUFFIXES)} file, or ORGANISATION/"
            f"NAME of the Hugging Face hub{examples and f': {examples}'}."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, repo_type="dataset", allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises a dozen kinds; each means the same here
        raise DataError(
            f"task.path={path}: no such file, and the Hugging Face hub gave no answer "
            f"({type(error).__name__}: {error}). On a machine that reaches it: `hf download "
            f"--repo-type dataset {path} --local-dir DIR`; then task.path=DIR."
        ) from error


def read_rows(file: Path, *, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a .jsonl, .csv or .parquet file. columns: those that are needed; others
    are not read from a parquet file that has these."""
    if file.suffix == ".parquet":
        return _parquet_rows(file, columns)
    if file.suffix == ".csv":
        return _csv_rows(file)
    return ((f"{file}:{line}", record) for line, record in read_jsonl(file))


def _csv_rows(file: Path) -> Iterator[Row]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    with file.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, strict=True)
        try:
            for record in rows:
                where = f"{file}:{rows.line_num}"
                if None in record or None in record.values():
                    raise DataError(f"{where}: not as many fields as the header has columns.")
                yield where, record
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file}:{rows.line_num}: not a CSV record: {error}.") from error


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            # A file of another kind is read whole, so that the caller can say what it holds.
            wanted = list(columns) if columns and set(columns) <= set(names) else names
            number = 0
            for batch in opened.iter_batches(batch_size=4096, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read as parquet: {error}.") from error


def split_files(
    path: str, eval_path: str, eval_share: float, *, read: Callable[[str], Sequence[Any]]
) -> dict[str, list[Any]]:
    """Tasks by split, "train" and "eval", of two files, or of one whose share is held out by id.

    read: file -> its tasks, each with an `id`. Raises DataError as `split_tasks` does.
    """
    held_out = read(eval_path) if eval_path else None
    return split_tasks(read(path), held_out, eval_share, name=path, key=lambda task: task.id)


def split_tasks(
    tasks: Sequence[T],
    held_out: Sequence[T] | None,
    eval_share: float,
    *,
    name: str,
    key: Callable[[T], str],
) -> dict[str, list[T]]:
    """Tasks by split, "train" and "eval".

    held_out: tasks to evaluate on; None holds out `eval_share` of `tasks`, chosen by `key`.
    name: where `tasks` come from, for errors. Raises DataError if a split is empty, or if a key is
    in both.
    """
    if held_out is None:
        train, evaluated = hold_out(tasks, eval_share, key=key)
    else:
        train, evaluated = list(tasks), list(held_out)
        if both := set(map(key, train)) & set(map(key, evaluated)):
            raise DataError(
                f"{name}: {min(both)!r} is among the tasks to evaluate on too; a task that is "
                "trained on cannot be evaluated on."
            )
    if not train or not evaluated:
        raise DataError(
            f"{name}: {len(tasks)} tasks with eval_share={eval_share} leave {len(train)} to train "
            f"on and {len(evaluated)} to evaluate on. Give more, change the share, or give a file "
            "to evaluate on."
        )
    return {"train": train, "eval": evaluated}
