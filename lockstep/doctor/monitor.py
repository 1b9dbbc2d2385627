"""The checks that need no model, inside of a run: a few rows of every step, as they are trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.examine import Examination, Stage, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.suite import STAGES
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.inputs.run import prompt_length, replies
from lockstep.types import Group, Sample

MAX_KEPT = 8
"""Steps whose rows are kept for each cause: more of the same prove no more."""


@dataclass(slots=True)
class Monitor:
    """Looks at the rows of each step, after its update, with the log-probs of both sides."""

    num_rows: int
    """Rows of a step that are looked at."""
    setting: Setting
    facts: Facts
    """What the files of kept rows say of themselves."""
    directory: Path
    """Where rows that show a cause are kept: RUN/doctor."""
    warn: Callable[[str], None]

    _kept: dict[str, int] = field(init=False, default_factory=dict[str, int])
    """Cause -> steps that it was found in."""

    def look(
        self, step: int, rows: Sequence[Sample], groups: Sequence[Group], *, version: int
    ) -> dict[str, float]:
        """The metrics `doctor/...` of one step.

        rows: as they were trained, with both sides' log-probs. groups: what they were made of:
        what the engine answered stands there. version: of the weights before the update. A cause is
        said once, when it is first found; the rows that show it are kept.
        """
        began = time.perf_counter()
        chosen = choose(rows, self.num_rows, step=step)
        if not chosen:
            return {}
        examined = self._examine(step, chosen, groups, version)
        causes = list(
            dict.fromkeys(f.cause for f in examined[1].findings if f.verdict == "differs")
        )
        if causes:
            self._keep(step, *examined, causes)
        return {
            "doctor/rows": len(chosen),
            "doctor/causes": len(causes),
            **{f"doctor/{cause}": 1.0 for cause in causes},
            "time/doctor_seconds": time.perf_counter() - began,
        }

    def _examine(
        self, step: int, chosen: Sequence[Sample], groups: Sequence[Group], version: int
    ) -> tuple[Rows, Examination]:
        rows = rows_of(step, chosen, groups, version=version)
        has = frozenset(name for name in _FIELDS if getattr(rows, name) is not None)
        stages = [Stage(checks=checks) for checks in STAGES]
        return rows, examine(lambda: [rows], stages, self.setting, has=has)

    def _keep(self, step: int, rows: Rows, examined: Examination, causes: Sequence[str]) -> None:
        path = self.directory / f"step-{step:06d}.parquet"
        is_due = any(self._kept.get(cause, 0) < MAX_KEPT for cause in causes)
        if is_due:
            self.directory.mkdir(exist_ok=True)
            write_rows(path, [rows], self.facts)
        share = {s.cause: s.k2 for s in examined.shares}
        for finding in examined.findings:
            cause = finding.cause
            if finding.verdict != "differs" or cause in self._kept:
                continue
            explained = f" ({share[cause]:.0%} of k2)" if cause in share else ""
            self.warn(
                f"step {step}: doctor: {cause}{explained}: {CAUSES[cause].title} "
                f"{finding.measured}. `lockstep doctor {self.directory}` shows the tokens."
            )
        for cause in causes:
            self._kept[cause] = self._kept.get(cause, 0) + 1


_FIELDS = (
    "rollout_logprobs",
    "trainer_logprobs",
    "is_sampled",
    "turn",
    "policy_version",
    "trainer_version",
    "advantages",
    "routed_experts",
    "prompt_lengths",
    "groups",
    "steps",
    "engine_ids",
)


def choose(rows: Sequence[Sample], num_rows: int, *, step: int) -> list[Sample]:
    """At most `num_rows` of `rows`, group by group: rows of one prompt say the most about each
    other. Another group comes first in each step."""
    groups = sorted({row.group for row in rows})
    out: list[Sample] = []
    for i in range(len(groups)):
        group = groups[(step + i) % len(groups)]
        out += [row for row in rows if row.group == group]
        if len(out) >= num_rows:
            break
    return out[:num_rows]


def rows_of(step: int, samples: Sequence[Sample], groups: Sequence[Group], *, version: int) -> Rows:
    """Training rows with what the engine answered beside them: as the doctor reads a run, but as
    they are trained. Without messages: of ids that changed on the way the engine's tell more, and
    rendering them again would cost as much as all other checks."""
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    placed = [
        (trajectories[name], int(leaf))
        for name, _, leaf in (sample.id.rpartition("/") for sample in samples)
    ]
    return Rows.of(
        samples,
        steps=np.full(len(samples), step, np.int64),
        trainer_version=np.full(len(samples), version, np.int64),
        prompt_lengths=np.array([prompt_length(sample) for sample in samples], np.int64),
        engine_ids=tuple(replies(t, leaf) for t, leaf in placed),
    )
