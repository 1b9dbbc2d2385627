"""The interface of a dump format, and the registry of formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lockstep.doctor.rows import Rows
from lockstep.tables import tables_beside

CHUNK_TOKENS = 1 << 18
"""Tokens held in memory at a time: 20 bytes each, plus the arrays of the check that runs."""
DECLARED: Mapping[str, Mapping[str, Any]] = tables_beside(__file__, "formats.toml")
"""Format of a dump -> its declaration: attributes of its class."""
HOW_TO_GET: Mapping[str, str] = DECLARED["any"]["why"]
"""Data that a check lacks -> how the writer of the input gets it, if the format does not say."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about the run that made the rows. None and empty values are unknown."""

    trainer: str = ""
    """Program that wrote the rows: "lockstep", "verl", "slime", "trl", "prime-rl", "nemo-rl",
    "tinker", or a name of your own."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a reply; default: the renderer's stop ids."""
    pad_id: int | None = None
    """Id of the padding token; default: the one in tokenizer_config.json."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Sampling top-p; 1 keeps the whole vocabulary."""
    top_k: int | None = None
    """Sampling top-k; 0 keeps the whole vocabulary."""
    max_staleness: int | None = None
    """Number of updates that a token may lag behind, according to the settings of the run."""
    is_one_process: bool | None = None
    """True if sampler and trainer share one process and the same ops, so that noise is a defect."""
    is_moe: bool | None = None
    """True for a mixture of experts."""
    tools: str = ""
    """Tools of the dialogues: the JSON list that the template was given."""


@dataclass(frozen=True, kw_only=True)
class Facts(RunFacts):
    """Facts that a dump states beside its rows. None and empty values are unknown."""

    model: str = ""
    """Directory or name of the trained model."""
    tokenizer: str = ""
    """Directory or file of the tokenizer, if it is not beside the model."""
    renderer: str = ""
    """Name of the renderer (harmony, chatml, ...), or its settings as JSON: {"type": "chatml"}."""
    vocab_size: int | None = None
    """Ids that log-probs are normalised over, where the model's head has rows behind them."""


class Dump(ABC):
    """The rows of one run, read on demand; memory does not grow with the file.

    Each subclass with a `format` is a format. It is known once it is defined: load a file that
    defines your own with `lockstep doctor PATH --plugin FILE.py`. Most formats need only
    `FileDump` or `LineDump` (inputs/lines.py). formats.toml declares the package's own: names of
    files and columns. Opening a dump reads its head only. A defect of the
    file raises a DataError of one paragraph: path, what was expected, what was found, what to do.
    Nothing in a dump is ever executed.
    """

    format: ClassVar[str] = ""
    """Name for `--format`."""
    formats: ClassVar[list[type[Dump]]] = []
    """Every format that is defined, in the order of definition."""

    facts: Facts = Facts()
    """Facts about the run beside its rows."""
    has: frozenset[str] = frozenset()
    """Fields of `Rows` that the rows have; known from the head of the file."""
    lacks: Mapping[str, str] = {}
    """Missing field of `Rows` -> why it is missing and how to get it."""
    notes: Sequence[str] = ()
    """Sentences for the reader of the verdict: the rows are a sample, the run still goes on."""
    found_before: Mapping[str, int] = {}
    """Cause -> number of training steps that showed it; the stored rows may no longer show it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if name := cls.__dict__.get("format"):
            Dump.formats.append(cls)
            for attribute, value in DECLARED.get(name, {}).items():
                setattr(cls, attribute, tuple(value) if isinstance(value, list) else value)

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Says if the file or directory looks like this format, by its name and first bytes."""

    @abstractmethod
    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        """All rows from the beginning, at most `max_tokens` tokens (or one row) at a time."""

    def find(self, *, numbers: Iterable[int] = (), names: Iterable[str] = ()) -> dict[int, Rows]:
        """Number -> row, each alone: the rows with these numbers, and the first of each name."""
        wanted, called = set(numbers), set(names)
        out: dict[int, Rows] = {}
        first = 0
        for rows in self.chunks() if wanted or called else ():
            for i, name in enumerate(rows.row_ids):
                if first + i in wanted or name in called:
                    out[first + i] = rows.take([i])
                    called.discard(name)
            first += len(rows)
            if wanted <= out.keys() and not called:
                break
        return out

    def step_metrics(self) -> Iterable[Mapping[str, Any]]:
        """Metrics of each step, under the names of docs/reference/metrics.md."""
        return ()
