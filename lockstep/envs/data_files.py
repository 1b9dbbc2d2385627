"""Data files of tasks: found on this machine or on the Hugging Face hub, read row by row, split.

Every error is a DataError that begins with the file and, where there is one, the line or row.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import (
    GeneratedSource,
    ListSource,
    TaskSource,
    derive_seed,
    is_held_out,
    read_tasks,
)
from lockstep.config import require
from lockstep.errors import ConfigError, DataError
from lockstep.store.files import read_jsonl
from lockstep.types import Task

T = TypeVar("T")
Row = tuple[str, Mapping[str, Any]]
"""(`path:line`, or `path:row N` of a parquet file, counted from 1; columns of the row)."""


@dataclass(frozen=True, kw_only=True)
class FileTasks(TaskConfig):
    """Base of task kinds that read a file of tasks."""

    is_generating: ClassVar[bool] = False
    """Whether `_make` generates tasks where no path is given."""
    may_hold_out_all: ClassVar[bool] = False

    path: str = ""
    """JSONL with a task per line: any object. Without an "id" the line number is its id."""
    eval_path: str = ""
    """File of the same form for evaluation. Empty: eval_share of `path` is held out."""
    eval_share: float = 0.1
    """Share of `path` that is held out, chosen by id."""

    def __post_init__(self) -> None:
        is_share = 0 < self.eval_share < 1 or (self.may_hold_out_all and self.eval_share == 1)
        require(
            self,
            "",
            eval_share=(is_share, "in (0, 1)"),
            eval_path=(bool(self.path) or not self.eval_path, "given with path"),
        )

    def check(self) -> None:
        if self.path or not self.is_generating:
            _ = self._tasks

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Training: the file's tasks, reshuffled in each epoch. Evaluation: once, in its order.
        Generated tasks: endless, one stream per split and seed."""
        if not self.path and self.is_generating:
            return GeneratedSource(self._make, seed=seed, split=split)
        return ListSource.of_split(self._tasks[split], split=split, seed=seed, name=self.path)

    def label(self, task: Task) -> str:
        """The key `label` of the task's line."""
        return str(task.payload.get("label", ""))

    def _read(self, path: str) -> list[Task]:
        return read_tasks(path)

    def _make(self, seed: int, index: int) -> Task:
        raise NotImplementedError

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        if not self.path:
            raise ConfigError("path is empty: give the tasks, task.path=FILE.jsonl.")
        tasks = self._read(self.path)
        if self.eval_share == 1 and not self.eval_path:
            return {"train": [], "eval": tasks}
        held_out = self._read(self.eval_path) if self.eval_path else None
        return split_tasks(tasks, held_out, self.eval_share, name=self.path, key=lambda t: t.id)


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
        said = " ".join(str(error).split())
        raise DataError(
            f"task.path={path}: no such file, and the Hugging Face hub gave no answer "
            f"({type(error).__name__}: {said}). On a machine that reaches it: `hf download "
            f"--repo-type dataset {path} --local-dir DIR`; then task.path=DIR."
        ) from error


def read_rows(file: Path, *, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a .jsonl, .json, .csv or .parquet file. columns: those that are needed; others
    are not read from a parquet file that has these."""
    if file.suffix == ".parquet":
        return _parquet_rows(file, columns)
    if file.suffix == ".csv":
        return _csv_rows(file)
    if file.suffix == ".json":
        return _json_rows(file)
    return ((f"{file}:{line}", record) for line, record in read_jsonl(file))


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        records = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON: {error}.") from error
    if not isinstance(records, list):
        raise DataError(f"{file}: expected a list of objects, found {type(records).__name__}.")
    for number, record in enumerate(records, start=1):
        yield f"{file}:row {number}", record


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


def split_tasks(
    tasks: Sequence[T],
    held_out: Sequence[T] | None,
    eval_share: float,
    *,
    name: str,
    key: Callable[[T], str],
    holds_out_one: bool = False,
) -> dict[str, list[T]]:
    """Tasks by split, "train" and "eval".

    held_out: tasks to evaluate on; None holds out `eval_share` of `tasks`, chosen by `key`;
    holds_out_one: at least one of several. name: where `tasks` come from, for errors. Raises
    DataError if a split is empty, or if a key is in both.
    """
    if held_out is None:
        ranked = sorted(tasks, key=lambda task: derive_seed("held out", key(task)))
        num_held_out = sum(is_held_out(eval_share, key(task)) for task in tasks)
        if holds_out_one:
            num_held_out = min(max(num_held_out, 1), len(tasks) - 1)
        chosen = set(map(key, ranked[:num_held_out]))
        train = [task for task in tasks if key(task) not in chosen]
        evaluated = [task for task in tasks if key(task) in chosen]
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
