"""The diagnosis for people at a terminal, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.doctor.diagnosis import Diagnosis

if TYPE_CHECKING:
    from lockstep.doctor.ladder import Ladder


def summary(diagnosis: Diagnosis) -> str:
    """A screen of text."""
    examined = diagnosis.examination
    gap = examined.gap.means()
    share = {s.cause: s.k2 for s in examined.shares}
    lines = [
        f"{diagnosis.dump.path} ({diagnosis.dump.format}): {examined.num_rows} rows, "
        f"{examined.num_tokens} tokens, {diagnosis.seconds:.1f} s",
        f"gap: k1 {gap['k1']:.2e}  k2 {gap['k2']:.2e}  k3 {gap['k3']:.2e}  "
        f"largest {gap['max_abs_diff']:.2e}",
    ]
    for cause, finding in diagnosis.causes:
        lines += [
            f"- {cause.name} ({share.get(cause.name, 0.0):.0%} of k2): {cause.title}",
            f"    {finding.measured}",
            f"    {cause.in_trainers.get(diagnosis.setting.trainer, cause.remedy)}",
        ]
    lines.append(f"unexplained: {examined.unexplained_k2:.0%} of k2")
    return "\n".join(lines)


def ladder_summary(ladder: Ladder) -> str:
    """The rungs from the bottom up, the verdict, and what is ruled out."""
    lines = [f"{'rung':30} {'k1':>9} {'k2':>9} {'k3':>9} {'largest':>9} {'tokens':>7} {'match':>7}"]
    for rung in ladder.rungs:
        means = rung.gap.means()
        match = "-" if rung.match != rung.match else f"{rung.match:.1%}"
        figures = " ".join(f"{means[name]:9.1e}" for name in ("k1", "k2", "k3", "max_abs_diff"))
        kind = "what if" if rung.is_what_if else rung.alarm.level
        lines.append(f"{rung.name:30} {figures} {rung.gap.tokens:7} {match:>7}  {kind}")
    lines += ["", ladder.verdict, *(f"ruled out: {sentence}" for sentence in ladder.ruled_out)]
    return "\n".join(lines)
