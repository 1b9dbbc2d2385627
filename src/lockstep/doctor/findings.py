"""The nouns of a diagnosis: the setting, evidence, and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from lockstep.doctor.inputs.base import RunFacts
from lockstep.doctor.rows import Rows
from lockstep.observe.alarms import DENSE_BAND, WARNING_LIMIT
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lockstep.doctor.scoring.model import Model

Verdict = Literal["consistent", "differs", "not_shown", "not_checkable"]
"""consistent: the cause is ruled out: the records agree, or its predictions were tested and lost.
differs: the cause is there. not_shown: the rows cannot tell. not_checkable: the dump lacks what the
test needs."""

Basis = Literal["shown", "repair", "fit"]
"""Why a cause is believed. shown: two records of the dump contradict each other. repair: other ids,
scored again by the model, give the recorded numbers. fit: a function of the columns gives them."""

MOST = 0.5
"""Share of the gap that a repair must remove to prove its cause, a fit to be likely, and a record
that was learnt from the rows to count: no other cause can then explain as much."""
FLOAT_NOISE = 1e-4
"""Upper bound in nats of |d| between two float32 computations of the same thing: metrics of a run
call a token above it an outlier (`correction/metrics.py: OUTLIER_DIFF`)."""
MIN_TOKENS = 32
"""Tokens that a mean of squares takes, whose error is then a quarter; and numbers that must all lie
on a grid: by chance, bfloat16 holds one float32 in 65,536."""
MAX_EVIDENCE = 8
"""Places that a finding shows; its figures count all of them. A screen has room for one, the page
for eight."""


@dataclass(frozen=True, kw_only=True)
class Setting(RunFacts):
    """Everything that is known besides the rows. None and empty values are unknown."""

    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    model: Model | None = None
    """Model that can score rows again."""
    step_metrics: Sequence[Mapping[str, Any]] = ()
    """Metrics of each step, by the names of docs/reference/metrics.md."""
    generation_defaults: Mapping[str, float] | None = None
    """Sampling settings in the model's generation_config.json; None without one. Engines use them
    where a request says nothing."""

    @property
    def band(self) -> float:
        """Mean of d^2 / 2 that the numerics of two engines can make."""
        return WARNING_LIMIT if self.is_moe else DENSE_BAND[1]

    @cached_property
    def has(self) -> frozenset[str]:
        """Names of the fields that are known."""
        empty = (None, "", (), frozenset())
        return frozenset(n for n in self.__dataclass_fields__ if getattr(self, n) not in empty)


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

    @classmethod
    def at(cls, rows: Rows, begin: int, end: int, note: str, ids: Sequence[int] = ()) -> Evidence:
        """Evidence of the tokens begin..end of `rows`, which are of one row. ids: expected."""
        row, at = rows.where(min(begin, rows.num_tokens - 1))
        at += begin - min(begin, rows.num_tokens - 1)
        expected = tuple(map(int, ids))
        return cls(row=row, begin=at, end=at + end - begin, note=note, expected_ids=expected)


def claim_of(check: Callable[..., object]) -> str:
    """The claim of a check: the first sentence of its function's docstring, without a period."""
    first = (check.__doc__ or "").partition("\n\n")[0].strip().removesuffix(".")
    return first[:1].lower() + first[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one fact or hypothesis."""

    check: str
    """Its name, as `--only` takes it: "facts/finite", "hypotheses/shifted"."""
    claim: str
    """The property that healthy data has, in one sentence."""
    verdict: Verdict
    measured: str
    """The result, with numbers, in one sentence."""
    cause: str = ""
    """Name in `causes.CAUSES`, if the verdict is differs."""
    basis: Basis = "fit"
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """The numbers behind `measured`, by stable names."""
    evidence: tuple[Evidence, ...] = ()
    """Strongest first, at most MAX_EVIDENCE."""
    lacks: tuple[str, ...] = ()
    """Missing inputs of a test that cannot be made: columns, `tokenizer`, `model`."""
