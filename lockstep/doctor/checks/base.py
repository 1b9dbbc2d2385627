"""What a check is, and what it may know beside the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.doctor.checks.attribution import Gap
from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.findings import MAX_EVIDENCE, Evidence, Finding, Verdict
from lockstep.doctor.checks.once import Once

if TYPE_CHECKING:
    from lockstep.doctor.checks.rows import Rows
    from lockstep.renderers.base import Renderer
    from lockstep.renderers.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Setting(Once):
    """What is known of a run beside its rows. None and empty: not known."""

    trainer: str = ""
    """What wrote the rows: "lockstep", "verl", "trl", ...: remedies are said in its settings."""
    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a turn."""
    pad_id: int | None = None
    temperature: float | None = None
    """That tokens were sampled at."""
    top_p: float | None = None
    top_k: int | None = None
    is_moe: bool | None = None
    model: object | None = None
    """What rows can be scored by again: `doctor.numerics.rescore.Rescoring`. None: not given."""
    is_one_process: bool | None = None
    """Whether sampler and trainer are one process over the same ops."""
    max_staleness: int | None = None
    """Updates that a token may be behind by the run's own settings."""
    step_metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of metrics by step, by the names of docs/metrics.md."""
    seed: int = 0
    """Of whatever a check draws."""


class Check(ABC):
    """One claim about rows, tried on all of them, a chunk at a time.

    A subclass sets the class variables, collects in `look` (its memory must not grow with the
    dump: counts, and `evidence` through `show`), and says in `conclude` what that means. It never
    raises about the data: what is wrong there is its finding.

    Checks run in stages (`examine.py`). A check of a later stage sees the rows as `repair` of the
    causes that were found before has left them, so that it explains what is left.
    """

    name: ClassVar[str]
    """ROOM/NAME: "tokens/shifted"."""
    claim: ClassVar[str]
    """What holds of healthy data."""
    cause: ClassVar[str]
    """Name in CAUSES; empty for a check that only informs."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `Rows` and of `Setting` without which it cannot be made."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cause = cls.__dict__.get("cause")
        assert not cause or cause in CAUSES, f"{cls.__name__}: {cause!r} is not in CAUSES"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._evidence: list[tuple[float, Evidence]] = []

    @abstractmethod
    def look(self, rows: Rows) -> None:
        """Takes in the next chunk. Rows are whole: none is split over two chunks."""

    @abstractmethod
    def conclude(self) -> Finding:
        """The finding over all that was looked at."""

    def repair(self, rows: Rows) -> Rows:
        """The rows as they would be without this cause, once it was found: log-probs moved back,
        NaN where the right number is not in the dump, the mask as it should be. Of the rows and
        tokens that the cause has not touched, nothing changes. What the gap between the two sides
        loses by it is the share of this cause."""
        return rows

    # -- for subclasses -----------------------------------------------------------------------

    def show(self, weight: float, evidence: Evidence) -> None:
        """Keeps a place as evidence if it is among the heaviest."""
        self._evidence.append((weight, evidence))
        if len(self._evidence) > 4 * MAX_EVIDENCE:
            self._evidence.sort(key=lambda pair: -pair[0])
            del self._evidence[MAX_EVIDENCE:]

    def found(self, verdict: Verdict, measured: str, **figures: float) -> Finding:
        """The finding of this check, with the evidence that was kept unless it is consistent."""
        kept = sorted(self._evidence, key=lambda pair: -pair[0])[:MAX_EVIDENCE]
        return Finding(
            check=self.name,
            claim=self.claim,
            verdict=verdict,
            measured=measured,
            cause="" if verdict == "consistent" else self.cause,
            figures=figures,
            evidence=() if verdict == "consistent" else tuple(e for _, e in kept),
        )

    @classmethod
    def not_checkable(cls, lacks: tuple[str, ...]) -> Finding:
        return Finding(
            check=cls.name,
            claim=cls.claim,
            verdict="not_checkable",
            measured=f"needs {', '.join(lacks)}",
            lacks=lacks,
        )


@dataclass(slots=True)
class Share:
    """How much of the gap a cause explains."""

    cause: str
    k2: float
    """Of the sum of d^2 / 2, in [0, 1] of the whole dump's."""
    k3: float
    before: Gap = field(default_factory=Gap)
    after: Gap = field(default_factory=Gap)
