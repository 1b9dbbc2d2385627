"""The report of a check: a claim, what was measured, a verdict, and the tokens that prove it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["consistent", "information", "differs", "not_checkable"]
"""consistent: the claim holds. differs: it does not, and `cause` says why. information: worth
knowing, and no defect. not_checkable: the dump lacks what the check needs."""

MAX_EVIDENCE = 8
"""Places that a finding shows; its figures count all of them."""


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
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """The numbers behind `measured`, by stable names."""
    evidence: tuple[Evidence, ...] = ()
    """Strongest first, at most MAX_EVIDENCE."""
    lacks: tuple[str, ...] = ()
    """Missing inputs of a check that cannot be made: columns, `tokenizer`, `model`."""
