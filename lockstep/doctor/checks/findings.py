"""What a check found: a claim, what was measured, a verdict, and the tokens that prove it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["consistent", "information", "differs", "not_checkable"]
"""consistent: the claim was tried and holds. differs: it does not, and `cause` says why.
information: it is worth knowing and no defect (a pair of precisions, how many tokens are forced).
not_checkable: what the check needs is not there."""

MAX_EVIDENCE = 8
"""Places that a finding shows. How many there are is in its figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Tokens of one row that prove a finding."""

    row: str
    begin: int
    """Place of the first one in its row."""
    end: int
    """Place after the last one."""
    note: str
    """What is wrong there, in words."""
    expected_ids: tuple[int, ...] = ()
    """What should stand there (encoded again, rendered, answered by the engine), if it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    """ROOM/NAME, as `--only` takes it."""
    claim: str
    """What holds of healthy data, in one sentence."""
    verdict: Verdict
    measured: str
    """What was found, with its figures, in one sentence."""
    cause: str = ""
    """Name in `causes.CAUSES` if it differs, or of what the information is about."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same as numbers, by stable names."""
    evidence: tuple[Evidence, ...] = ()
    """The worst first, at most MAX_EVIDENCE."""
    lacks: tuple[str, ...] = ()
    """What is missing if it is not checkable: columns of the dump, `tokenizer`, `model`."""
