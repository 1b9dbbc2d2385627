"""Formats that are read row by row, file by file or line by line: the bases of most formats."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Line, Row, in_chunks, per_token
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.inputs.places import BYTE_ORDER_MARK, PARQUET_MAGIC, judged
from lockstep.doctor.rows import BoolArray, Rows
from lockstep.errors import DataError
from lockstep.types import Int32Array

MAX_LINE_BYTES = 64 << 20
"""Longest line of a JSONL file: a million tokens with both log-probs."""
HEAD_ROWS = 64
"""Rows that are read on opening, to find out which columns a dump has."""


Live = tuple[Sequence[Hashable], Callable[[Sequence[int]], Iterable[Row]], dict[str, Any]]
"""A batch in memory: the group of each row, the rows with some indices, and facts about the run.
Only the rows that are asked for leave the device."""


class RowDump(Dump):
    """A format that yields one `Row` after another."""

    trainer: ClassVar[str | None] = None
    """`Facts.trainer`; None is the name of the format."""
    no_row: ClassVar[str] = "the documentation (Doctor: dumps) lists the files that it reads."
    """Reason for a dump without rows, or where to read on."""
    why: ClassVar[Mapping[str, str]] = {}
    """Field of `Rows` -> why a dump may lack it, and how to get it."""
    columns: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Field of `Rows` with a number per token -> its names in a file, the first that is there."""
    keys: ClassVar[Collection[str]] = ()
    """Names that every line has, or every batch."""
    live: ClassVar[Callable[..., Live]]
    """The batch as the method of `lockstep.watch` takes it, and its step -> the rows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.unread: dict[str, str] = {}
        """"messages", if those of a row cannot be read -> the reason."""
        head = list(islice(map(self._noted, self.rows()), HEAD_ROWS))
        if not head:
            raise DataError(f"{path} has no row of the format {self.format}: {self.no_row}")
        always = frozenset({"row_ids", "token_ids", "loss_mask"})
        self.has = always.union(*(row.columns for row in head)) - self.unread.keys()
        self.facts = Facts(**self.facts_in(self.has))
        self.lacks = {n: why for n, why in self.why.items() if n not in self.has} | self.unread

    @classmethod
    def facts_in(cls, has: frozenset[str]) -> dict[str, Any]:
        """Facts that the format and the columns of a dump tell."""
        trainer = cls.format if cls.trainer is None else cls.trainer
        return {"trainer": trainer, "is_moe": True if "routed_experts" in has else None}

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """All rows from the beginning."""

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        return in_chunks(map(self._noted, self.rows()), self.has, max_tokens=max_tokens)

    def _noted(self, row: Row) -> Row:
        """The row; the first one whose messages are left out becomes a note."""
        if row.unread and not self.unread:
            self.unread["messages"] = row.unread
            self.notes = [*self.notes, f"messages are left out: {row.unread}"]
        return row

    @classmethod
    def row(
        cls,
        source: Line,
        where: str,
        ids: Int32Array,
        *,
        row_id: str,
        kept: BoolArray | None = None,
        **known: Any,
    ) -> Row:
        """A row whose numbers per token are in `columns`. source: one row of a file, by its names.

        ids: [T] the row without padding. kept: as for `per_token`; the response is trained where
        no loss mask is given. known: further fields, in place of those of `columns`.
        """
        size = len(ids)
        prompt = 0 if kept is None else size - int(kept.sum())
        found: dict[str, Any] = {
            field: per_token(source, names, where, size=size, kept=kept)
            for field, names in cls.columns.items()
        }
        mask = found.pop("loss_mask", None)
        found["loss_mask"] = np.arange(size) >= prompt if mask is None else mask > 0
        found["prompt_lengths"] = None if kept is None else prompt
        return Row.of(row_id=row_id, token_ids=ids, **found | known)


class FileDump(RowDump):
    """A format that is read file by file. A subclass says which files and which rows."""

    patterns: ClassVar[tuple[str, ...]] = ("*.jsonl",)
    """Files of a directory, as globs."""
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)
    """Names of a file that is given by itself."""

    def __init__(self, path: Path) -> None:
        found = self.files_of(path)
        self.ends, self.notes = whole_files(found)
        """File -> bytes to read of it."""
        self.files = list(self.ends)
        super().__init__(judged(path, found))

    @classmethod
    def files_of(cls, path: Path) -> list[Path]:
        """The files of a dump in the order of the numbers in their names: step_2 before step_10."""
        if path.is_file():
            return [path] if path.name.endswith(cls.suffixes) else []
        found = {file for pattern in cls.patterns for file in path.glob(pattern) if file.is_file()}
        return cls.in_order(found)

    @staticmethod
    def in_order(files: Iterable[Path]) -> list[Path]:
        return sorted(files, key=lambda file: (numbers_in(str(file)), str(file)))

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = cls.files_of(path)
        return bool(files) and cls.is_own(files[0])

    @classmethod
    @abstractmethod
    def is_own(cls, path: Path) -> bool:
        """Says if a file is of this format, by its first bytes."""

    @abstractmethod
    def rows_in(self, path: Path) -> Iterator[Row]:
        """The rows of one file."""

    def rows(self) -> Iterator[Row]:
        for path in self.files:
            yield from self.rows_in(path)


class LineDump(FileDump):
    """A format with one row, or several, on each line of JSONL files."""

    @classmethod
    def is_own(cls, path: Path) -> bool:
        try:  # the first dialogues may have failed, and have no ids
            return any(cls.is_own_line(line) for *_, line in islice(json_lines(path), 8))
        except DataError:
            return False

    @classmethod
    def is_own_line(cls, line: Line) -> bool:
        return line.keys() >= {*cls.keys}

    @classmethod
    def check(cls, line: Line, where: str, how: str = "") -> None:
        """Raises DataError unless the line has all `keys`. how: to give them, in a sentence."""
        if missing := sorted({*cls.keys} - line.keys()):
            raise DataError(f"{where}: {', '.join(missing)} is missing. {how}".rstrip())

    def rows_in(self, path: Path) -> Iterator[Row]:
        for number, where, line in json_lines(path, self.ends[path]):
            self.check(line, where)
            yield from self.rows_of(line, path, number, where)

    def rows_of(self, line: Line, path: Path, number: int, where: str) -> Iterator[Row]:
        """The rows of a line. number: of the line in its file, from 1. where: begins an error."""
        yield self.row_of(line, where, f"{path.stem}/{number - 1}")

    @classmethod
    def row_of(cls, line: Line, where: str, name: str) -> Row:
        """The row of a line, in a format with one row on each. name: used if it has no other."""
        raise NotImplementedError


def numbers_in(text: str) -> list[int]:
    """The numbers in a name: "step_2/rank_10" -> [2, 10]."""
    return [int(n) for n in re.findall(r"[0-9]+", text)]


def step_in(path: Path) -> int | None:
    """The last number in the name of a file, if it can be a step."""
    found = numbers_in(path.stem)
    return found[-1] if found and found[-1] < 1 << 31 else None


# -- files that are still written ------------------------------------------------------------------

_RANK = re.compile(r"((?<=\d)_|rank[_-]?)\d+(?=\.\w+$)")
"""The rank in the name of a file: step_10/rank_1.jsonl, 10_1.pt."""


def whole_files(files: Sequence[Path]) -> tuple[dict[Path, int], list[str]]:
    """(file -> bytes to read of it, a sentence for each file that is not read to its end).

    A trainer that runs may be writing the files of the newest step, the last of `files`: JSON lines
    are read up to the last whole one, and a file of another kind without its end is left out,
    unless there is no other. What is torn elsewhere is an error where it is read.
    """
    ends, notes = dict.fromkeys(files, sys.maxsize), list[str]()
    newest = [f for f in files if _RANK.sub("", str(f)) == _RANK.sub("", str(files[-1]))]
    for file in (f for f in newest if f.is_file() and os.access(f, os.R_OK)):
        size, ends[file] = _sizes(file)
        left = f"ends in the middle of a row: its last {size - ends[file]:,} bytes are left out"
        if not ends[file]:
            if len(ends) == 1:
                return {file: size}, []
            del ends[file]
            why = "its end is missing" if size else "nothing is in it yet"
            left = f"({size:,} bytes) is left out: {why}"
        if ends.get(file) != size:
            notes.append(f"{file} {left}. It is still being written, or was cut off")
    return ends, notes


def _sizes(path: Path) -> tuple[int, int]:
    """Bytes of a file, and those from its beginning that are whole: all, if its kind is unknown."""
    with open(path, "rb") as file:
        head, size = file.read(64).removeprefix(BYTE_ORDER_MARK), file.seek(0, os.SEEK_END)
        is_json = head.lstrip().startswith(b"{")
        file.seek(max(size - (MAX_LINE_BYTES if is_json else len(PARQUET_MAGIC)), 0))
        tail = file.read(MAX_LINE_BYTES)
    last = tail[tail.rfind(b"\n") + 1 :] if is_json else b""
    if last.lstrip().startswith(b"{"):
        try:
            json.loads(last)
        except (ValueError, RecursionError):
            return size, size - len(last)
    is_torn = (
        (head.startswith(PARQUET_MAGIC) and tail != PARQUET_MAGIC)
        or (head.startswith(b"PK") and not zipfile.is_zipfile(path))
        or (head.startswith(b"\x80") and not tail.endswith(b"."))  # a pickle's last instruction
    )
    return size, 0 if is_torn else size


# -- JSON lines ------------------------------------------------------------------------------------


def json_lines(path: Path, end: int = sys.maxsize) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number from 1, place in words, object) of each line of the first `end` bytes that is not
    blank. Raises DataError for any other line."""
    with open(path, "rb") as file:
        for number in count(1):
            where = f"{path}:{number}"
            # A line without end is refused before all of it is in memory.
            text = file.readline(min(MAX_LINE_BYTES + 1, end - file.tell()))
            if not text:
                return
            if b"\0" in text:
                raise DataError(f"{where}: zero bytes, not text. Write or copy the file again.")
            if len(text) > MAX_LINE_BYTES:
                raise DataError(
                    f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB; expected one "
                    "row per line. Write rows that large as Parquet."
                )
            text = text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text
            if text and not text.isspace():
                row = parse_json(text, where)
                if not isinstance(row, dict):
                    found = f"found a {type(row).__name__}"
                    raise DataError(f"{where}: expected a JSON object, one row; {found}.")
                yield number, where, row


def parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(f"{where}: JSON that is nested too deeply to be a row.") from None
    except ValueError as error:  # UnicodeDecodeError is one
        is_cut = not text.endswith(b"\n") and text.strip() not in (b"{", b"[")
        why = "the file ends in the middle of a row" if is_cut else "not JSON"
        raise DataError(
            f"{where}: {why} ({error}). Expected one object per line in UTF-8: "
            "jq -c . FILE > rows.jsonl"
        ) from None
