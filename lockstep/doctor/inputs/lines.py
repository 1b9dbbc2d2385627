"""Formats with a row, or a few, on each line of JSONL files."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.assemble import Row, columns_of, head_of, in_chunks
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.inputs.native import json_line, lines_of
from lockstep.errors import DataError


class LineDump(Dump):
    """Base of these formats: a subclass says which files, which lines are its own, and what rows
    are on a line."""

    trainer: ClassVar[str] = ""
    """`Facts.trainer`."""
    no_row: ClassVar[str]
    """What is said of an input without a row, behind its path."""
    why: ClassVar[Mapping[str, str]]
    """Field of `Rows` -> why a file may not have it, and how to get it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = self.files_of(path)
        head = head_of(self._rows())
        if not head:
            raise DataError(f"{path}{self.no_row}")
        self._has = columns_of(head)

    @staticmethod
    @abstractmethod
    def files_of(path: Path) -> list[Path]:
        """The files of an input, in order; none if it cannot be of this format."""

    @staticmethod
    @abstractmethod
    def is_own(line: Mapping[str, Any]) -> bool:
        """Whether the first line of a file is of this format."""

    @abstractmethod
    def rows_of(self, line: Mapping[str, Any], path: Path, number: int) -> Iterator[Row]:
        """The rows of a line. number: of the line in its file, from 1."""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = cls.files_of(path)
        line = first_line(files[0]) if files else None
        return line is not None and cls.is_own(line)

    @property
    def facts(self) -> Facts:
        return Facts(trainer=self.trainer)

    @property
    def has(self) -> frozenset[str]:
        return self._has

    @property
    def lacks(self) -> Mapping[str, str]:
        return {name: reason for name, reason in self.why.items() if name not in self._has}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        return in_chunks(self._rows(), self._has, max_tokens=max_tokens)

    def _rows(self) -> Iterator[Row]:
        for path in self._files:
            for number, text in lines_of(path):
                yield from self.rows_of(json_line(text, f"{path}:{number}"), path, number)


def first_line(path: Path) -> Mapping[str, Any] | None:
    """The object on the first line that is not blank; None if there is none."""
    try:
        number, text = next(lines_of(path))
        return json_line(text, f"{path}:{number}")
    except (DataError, StopIteration):
        return None


def by_number(path: Path) -> tuple[list[int], str]:
    """Orders files by the numbers in their names: step_2 before step_10."""
    return [int(n) for n in re.findall(r"\d+", str(path))], str(path)
