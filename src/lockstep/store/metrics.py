"""`metrics.jsonl`: one row of numbers per step, on disk before the next step starts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, RunError, StorageError
from lockstep.store.files import decode_number, durably, encode_number, write_atomically

_log = logging.getLogger(__name__)


class JsonlLogger:
    """Appends rows to a file; each is on disk when `log` returns, so a kill loses at most one.

    A torn last line, left by a kill within a write, is cut off when the file is opened. If the file
    is deleted meanwhile, it is written again with all its rows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content.endswith(b"\n"):
            whole = content[: content.rfind(b"\n") + 1]
            write_atomically(self.path, lambda file: file.write(whole))
        self._last_step = max((row["step"] for row in read_rows(self.path)), default=None)
        self._open()

    def _open(self) -> None:
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._size = self._file.seek(0, os.SEEK_END)

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends `row`: `step` (int) and numbers by metric name.

        Raises RunError if the step lies before a recorded step: two histories in one file could not
        be separated afterwards. Raises DataError for a value that is not a number, and StorageError
        if the row cannot be written; the file is then unchanged.
        """
        values = {name: encode_number(value) for name, value in row.items()}
        for name, value in values.items():
            if not isinstance(value, int | float) and not isinstance(decode_number(value), float):
                found = f"{type(value).__name__} {value!r}"
                raise DataError(f"{self.path}: metric {name!r} must be a number, found {found}.")
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise DataError(f"{self.path}: a row needs an integer `step`, found {step!r}.")
        if self._last_step is not None and step < self._last_step:
            raise RunError(
                f"{self.path}: step {step} cannot follow step {self._last_step}. To continue from "
                "an earlier checkpoint, move the later rows aside with RunDirectory.rewind."
            )
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        try:
            durably(self.path, partial(self._append, line))
        except StorageError:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size, self._last_step = self._size + len(line), step

    def _append(self, line: bytes) -> None:
        self._file.truncate(self._size)  # what a failed attempt left
        self._file.seek(self._size)
        while line:
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    def check(self) -> None:
        """Writes the file anew if somebody deleted it: its rows are there as long as it is open.
        Raises StorageError if somebody wrote to it."""
        held = os.fstat(self._file.fileno())
        try:
            is_same = os.path.samestat(held, os.stat(self.path))
        except FileNotFoundError:
            self._file.seek(0)
            content = self._file.read(self._size)
            write_atomically(self.path, lambda file: file.write(content))
            _log.warning("%s was deleted and is written anew, with all its rows.", self.path)
            self.close()
            self._open()
            return
        if not is_same or held.st_size != self._size:
            raise StorageError(
                f"{self.path} was replaced or cut during the run by another program, so nothing is "
                "appended. Restore the file and go on with resume=true."
            )

    def close(self) -> None:
        self._file.close()


def read_rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file, in order. A torn last line (a run in mid-write) is left out.

    Raises DataError, naming the line, for damage anywhere else.
    """
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                    raise ValueError("expected an object with an integer `step`")
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: not a metrics row ({error}). Every line is one JSON object; "
                    "restore the file, or delete this line to read the rest."
                ) from None
            yield {name: decode_number(value) for name, value in row.items()}
