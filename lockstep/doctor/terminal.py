"""The diagnosis for people at a terminal, worst first."""

from __future__ import annotations

from lockstep.doctor.diagnosis import Diagnosis


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
