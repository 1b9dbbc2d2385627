"""Base class of checks, the facts they know besides the rows, and the findings they report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.rows import Once, Rows
from lockstep.errors import ConfigError
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int64Array

Verdict = Literal["consistent", "information", "differs", "not_checkable"]
"""consistent: the claim holds. differs: it does not, and `cause` says why. information: worth
knowing, and no defect. not_checkable: the dump lacks what the check needs."""

Basis = Literal["shown", "repair", "fit"]
"""Why a cause is believed. shown: records of one dump contradict each other, such as the row and
the ids that the engine returned. repair: undoing it makes the two sides agree. fit: the figures
have its pattern, which something else may make too; never proved."""

MAX_EVIDENCE = 8
"""Places that a finding shows; its figures count all of them."""


StageName = Literal["masks", "structure", "values", "processed", "noise", "training"]
MAX_SHOWN = 64
"""Runs of one chunk that are offered as evidence."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about the run that made the rows. None and empty values are unknown."""

    trainer: str = ""
    """Program that wrote the rows: "lockstep", "verl", "slime", "trl", "prime-rl", "nemo-rl",
    "tinker", or a name of your own."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a reply; default: those of the renderer."""
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
    """Whether sampler and trainer share one process and the same ops, so that noise is a defect."""
    is_moe: bool | None = None
    """Whether the model is a mixture of experts."""


@dataclass(frozen=True, kw_only=True)
class Setting(RunFacts, Once):
    """Everything that checks know besides the rows. None and empty values are unknown."""

    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    model: object | None = None
    """Model that can score rows again: a `doctor.numerics.rescore.Rescoring`."""
    step_metrics: Sequence[Mapping[str, Any]] = ()
    """Metrics of each step, by the names of docs/reference/metrics.md."""
    resumes: Sequence[int] = ()
    """Steps that a resume of the run began with."""
    generation_defaults: Mapping[str, float] | None = None
    """Sampling settings in the model's generation_config.json, by the names there; None without
    one. Engines use them where a request says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Tokens of one row that prove a finding."""

    row: str
    begin: int
    """Position of the first token in its row."""
    end: int
    """Position after the last token."""
    note: str
    """The defect of these tokens, in words."""
    expected_ids: tuple[int, ...] = ()
    """Ids that should be there, where they are known (the engine's, or rendered)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check, as `--only` takes it: "tokens/shifted"."""
    claim: str
    """The property that healthy data has, in one sentence."""
    verdict: Verdict
    measured: str
    """The result, with numbers, in one sentence."""
    cause: str = ""
    """Name in `causes.CAUSES`, unless the finding is consistent."""
    basis: Basis = "repair"
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """The numbers behind `measured`, by stable names."""
    evidence: tuple[Evidence, ...] = ()
    """Strongest first, at most MAX_EVIDENCE."""
    lacks: tuple[str, ...] = ()
    """Missing inputs of a check that cannot be made: columns, `tokenizer`, `model`."""


def evidence_at(
    rows: Rows, begin: int, end: int, note: str, expected_ids: Sequence[int] = ()
) -> Evidence:
    """Evidence of the tokens begin..end of `rows`, which are of one row."""
    row, at = rows.where(begin)
    return Evidence(
        row=row, begin=at, end=at + end - begin, note=note, expected_ids=tuple(expected_ids)
    )


class Check(ABC):
    """One claim about rows, tested on all of them, one chunk at a time.

    A subclass declares the class variables, counts in `look`, and judges in `conclude`. Its memory
    must not grow with the dump. It never raises about the data: what is wrong is its finding.

    Checks run in stages (`examine.py`). A check sees the rows after the `repair` of every cause
    that an earlier stage found, so that it explains only what is left.

    A plugin adds one by a subclass that names its `stage`: docs/doctor-causes.md has an example.
    """

    name: ClassVar[str]
    """ROOM/NAME: "tokens/shifted"."""
    claim: ClassVar[str]
    """The property that healthy data has."""
    cause: ClassVar[str] = ""
    """Name in CAUSES; empty for a check that only informs."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `Rows` and `Setting` that the check cannot do without."""
    stage: ClassVar[StageName | Literal[""]] = ""
    """Stage that the check is made in; empty for bases and for checks that need a model."""
    basis: ClassVar[Basis] = "repair"
    """Basis of the cause, unless a finding has another."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.cause and cls.cause not in CAUSES:
            raise ConfigError(
                f"the check {cls.__name__} names the cause {cls.cause!r}, which is not known. Add "
                "it first: lockstep.doctor.checks.causes.add_cause(Cause(...))."
            )

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.counts: Counter[str] = Counter()
        self._evidence: list[tuple[float, Evidence]] = []
        self.begin()

    def begin(self) -> None:  # noqa: B027 - most checks count nothing more
        """Makes what the check counts besides `counts`, before the first chunk."""

    @abstractmethod
    def look(self, rows: Rows) -> None:
        """Reads the next chunk. A row is never split over two chunks."""

    @abstractmethod
    def conclude(self) -> Finding:
        """The finding over all chunks."""

    def repair(self, rows: Rows) -> Rows:
        """`rows` without this cause, once it was found: log-probs moved back, NaN where the right
        number is not in the dump, the mask as it should be. Rows and tokens that the cause has not
        touched stay equal. The gap that goes away is the share of this cause."""
        return rows

    # -- for subclasses -----------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The setting's, for checks that need it."""
        assert self.setting.tokenizer is not None, "the check does not declare its need"
        return self.setting.tokenizer

    @property
    def renderer(self) -> Renderer:
        """The setting's, for checks that need it."""
        assert self.setting.renderer is not None, "the check does not declare its need"
        return self.setting.renderer

    def count(self, **amounts: Any) -> None:
        """Adds numbers, or the True entries of arrays, to `counts`."""
        for name, amount in amounts.items():
            is_mask = isinstance(amount, np.ndarray)
            self.counts[name] += int(np.count_nonzero(amount) if is_mask else amount)

    def show(
        self,
        weight: float,
        rows: Rows,
        begin: int,
        end: int,
        note: str,
        expected_ids: Sequence[int] = (),
    ) -> None:
        """Keeps the tokens begin..end of `rows` as evidence if they are among the heaviest."""
        self.keep(weight, evidence_at(rows, begin, end, note, expected_ids))

    def keep(self, weight: float, evidence: Evidence) -> None:
        ranked = sorted([*self._evidence, (weight, evidence)], key=lambda pair: -pair[0])
        self._evidence = ranked[:MAX_EVIDENCE]

    def show_runs(
        self, rows: Rows, begin: Int64Array, end: Int64Array, note: Callable[[int, int], str]
    ) -> None:
        """`show` for the first runs, the longest as the strongest."""
        shown = zip(begin[:MAX_SHOWN].tolist(), end[:MAX_SHOWN].tolist(), strict=True)
        for b, e in shown:
            self.show(e - b, rows, b, e, note(b, e))

    def found(
        self, verdict: Verdict, measured: str, basis: Basis | None = None, /, **figures: float
    ) -> Finding:
        """The finding, with `counts`, these figures, and the evidence unless it is consistent."""
        return Finding(
            check=self.name,
            claim=self.claim,
            verdict=verdict,
            measured=measured,
            cause="" if verdict == "consistent" else self.cause,
            basis=basis or self.basis,
            figures={**self.counts, **figures},
            evidence=() if verdict == "consistent" else tuple(e for _, e in self._evidence),
        )

    def differs(self, measured: str, basis: Basis | None = None, /, **figures: float) -> Finding:
        return self.found("differs", measured, basis, **figures)

    def information(self, measured: str, **figures: float) -> Finding:
        return self.found("information", measured, **figures)

    def consistent(self, measured: str, **figures: float) -> Finding:
        return self.found("consistent", measured, **figures)

    @classmethod
    def not_checkable(cls, *lacks: str, measured: str = "") -> Finding:
        return Finding(
            check=cls.name,
            claim=cls.claim,
            verdict="not_checkable",
            measured=measured or f"needs {', '.join(lacks)}",
            lacks=lacks,
        )
