"""What the doctor says: findings, shares, and one verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.checks.base import Setting
from lockstep.checks.causes import CAUSES, Cause
from lockstep.checks.examine import Examination
from lockstep.checks.findings import Finding
from lockstep.doctor.inputs.base import Dump

Outcome = Literal["consistent", "differs", "could_not_check"]
EXIT_CODES: Mapping[Outcome, int] = {"consistent": 0, "differs": 1, "could_not_check": 2}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of one examination of one input."""

    dump: Dump
    setting: Setting
    examination: Examination
    seconds: float

    @property
    def outcome(self) -> Outcome:
        verdicts = {finding.verdict for finding in self.examination.findings}
        if "differs" in verdicts:
            return "differs"
        return "consistent" if "consistent" in verdicts else "could_not_check"

    @property
    def causes(self) -> list[tuple[Cause, Finding]]:
        """What was found, the one that explains most of the gap first; those that move no log-prob
        (a missing stop token) after those that do, in the order of the checks."""
        share = {s.cause: s.k2 for s in self.examination.shares}
        found = [f for f in self.examination.findings if f.verdict == "differs"]
        found.sort(key=lambda finding: -share.get(finding.cause, 0.0))
        return [(CAUSES[finding.cause], finding) for finding in found]

    def to_json(self) -> dict[str, Any]:
        """Everything, as `--json` prints it."""
        examined = self.examination
        return {
            "input": str(self.dump.path),
            "format": self.dump.format,
            "outcome": self.outcome,
            "rows": examined.num_rows,
            "tokens": examined.num_tokens,
            "seconds": self.seconds,
            "gap": examined.gap.means(),
            "causes": [
                {
                    "cause": cause.name,
                    "class": cause.equivalents,
                    "title": cause.title,
                    "remedy": cause.in_trainers.get(self.setting.trainer, cause.remedy),
                }
                for cause, _ in self.causes
            ],
            "shares": [{"cause": s.cause, "k2": s.k2, "k3": s.k3} for s in examined.shares],
            "unexplained_k2": examined.unexplained_k2,
            "findings": [asdict(finding) for finding in examined.findings],
            "not_in_dump": dict(self.dump.lacks),
        }
