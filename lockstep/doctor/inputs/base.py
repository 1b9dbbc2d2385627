"""What every kind of input gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.checks.rows import Rows

CHUNK_TOKENS = 1 << 18
"""Tokens that are in memory at a time: 20 bytes each, and a check's own arrays."""
KEPT_BYTES = 64 << 20
"""Of rows that are kept once they were read: three million tokens with both log-probs. Checks read
all rows several times, and unpacking a run costs more than most of them."""
_WORDS_BYTES = 16
"""About what a token takes as words, in messages."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an input says about itself, beside its rows. None and empty: it does not say."""

    trainer: str = ""
    """"lockstep", "verl", "slime", "trl", "prime-rl", "nemo-rl", "tinker", or empty."""
    model: str = ""
    """Directory or name of the model that was trained."""
    tokenizer: str = ""
    """Directory or file of its tokenizer, where that is not beside the model."""
    renderer: str = ""
    """harmony, chatml, ..., or the settings of one as JSON: {"type": "chatml", ...}."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a reply; default: the renderer's."""
    pad_id: int | None = None
    """What rows are padded with; default: as tokenizer_config.json says."""
    temperature: float | None = None
    """That the rows were sampled at."""
    top_p: float | None = None
    """Likewise; 1 is all of the vocabulary."""
    top_k: int | None = None
    """Likewise; 0 is all of the vocabulary."""
    max_staleness: int | None = None
    """Updates that a token may be behind what it is trained on, by the run's own settings."""
    is_one_process: bool | None = None
    """Whether sampler and trainer are one process over the same ops: noise is then no weather."""
    is_moe: bool | None = None
    """Whether the model is a mixture of experts."""


class Dump(ABC):
    """Rows of one run, read as they are asked for; memory does not grow with the file.

    A subclass is one format. Opening it reads its head only; whatever is wrong with the file is
    raised as a DataError of one clear paragraph: path, what was expected, what is there, what to
    do. Nothing in a dump is ever executed.
    """

    format: ClassVar[str]
    """What `--format` takes."""
    _kept: list[Rows] | None = None
    has_ids: ClassVar[bool] = True
    """False of a format of texts: its rows have no tokens, and no check can be made of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Whether the file or directory looks like this format, by its name and first bytes."""

    @property
    @abstractmethod
    def facts(self) -> Facts: ...

    @property
    @abstractmethod
    def has(self) -> frozenset[str]:
        """Fields of `Rows` that its rows have: known from the head, before they are read."""

    @property
    def lacks(self) -> Mapping[str, str]:
        """Field of `Rows` -> why this format does not have it, and how to get it."""
        return {}

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on what these rows are of, for who reads the verdict: that they are a sample,
        that the run still goes on."""
        return ()

    @property
    def found_before(self) -> Mapping[str, int]:
        """Cause -> steps in whose rows it was found while they were trained; the rows that are read
        here may no longer show it."""
        return {}

    @abstractmethod
    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        """All rows from the beginning, at most `max_tokens` (or one row) at a time."""

    def read(self) -> Iterator[Rows]:
        """`chunks()`, out of memory if all of them were read before and are few (KEPT_BYTES). Their
        arrays are read-only."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Rows] = []
        size = 0
        for rows in self.chunks():
            size += _freeze(rows)
            kept.append(rows)
            if size > KEPT_BYTES:
                kept.clear()
            yield rows
        if size <= KEPT_BYTES:
            self._kept = kept

    def step_metrics(self) -> Iterable[Mapping[str, Any]]:
        """Rows of metrics by step, by the names of docs/metrics.md; none if it has none."""
        return ()


def _freeze(rows: Rows) -> int:
    """Makes the arrays read-only, and says how many bytes they take."""
    size = 0
    for field in fields(rows):
        value = getattr(rows, field.name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
            size += value.nbytes
    return size + _WORDS_BYTES * rows.num_tokens * (rows.messages is not None)
