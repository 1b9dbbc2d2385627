"""In which precision each side computed its logits, read from differences of log-probs.

A log-prob is a logit less a normaliser that all tokens of one place share. At a branch (different
tokens after the same ids) the normaliser falls out, and what is left is a difference of two
logits: of logits that were rounded to 16 bits it is a multiple of a power of two, up to float32.

# N tokens  B pairs at branches
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.types import Float32Array

GRIDS = (("bfloat16", 2.0**-7), ("float16", 2.0**-10))
"""What a type's numbers from 1 to 2 are apart by; larger ones are further apart, on the same grid.
Logits below 1 are rare and finer: a share of the pairs may be off the grid."""
TOLERANCE = 4e-6
"""What float32 leaves of a difference of two log-probs of some 20 nats."""
MIN_PAIRS = 6
"""Branches: so many are on bfloat16's grid by chance once in 1e18, on float16's once in 1e12."""
MIN_SHARE = 0.8
"""Of the pairs that must be on the grid; by chance 0.1 % and 0.8 % are."""
MIN_SHARE_NOISY = 0.1
"""The same where the passes that drew the two tokens differ now and then, and with them the
normaliser."""


@dataclass(slots=True)
class Marks:
    """How many of a side's branches are on the grid of a 16-bit type."""

    pairs: int = 0
    on_bfloat16: int = 0
    on_float16: int = 0

    def add(self, rows: Rows, side: Float32Array, *, temperature: float | None) -> None:
        """Counts a chunk. side: [N] log-probs; temperature: that the logits were divided by."""
        contexts = rows.contexts
        apart = np.abs(side[contexts.one].astype(np.float64) - side[contexts.other])
        apart = apart[apart > GRIDS[0][1] / 2]  # equal logits are on every grid
        self.pairs += len(apart)
        for name, step in GRIDS:
            on_grid = np.zeros(len(apart), np.bool_)
            for scale in {1.0, temperature or 1.0}:
                steps = apart * (scale / step)
                on_grid |= np.abs(steps - np.round(steps)) * step < TOLERANCE
            setattr(self, f"on_{name}", getattr(self, f"on_{name}") + int(on_grid.sum()))

    def name(self, *, min_share: float = MIN_SHARE) -> str:
        """bfloat16, float16, or empty: of more bits, or not known."""
        if self.pairs < MIN_PAIRS:
            return ""
        counts = {"bfloat16": self.on_bfloat16, "float16": self.on_float16}
        return next((n for n, _ in GRIDS if counts[n] >= min_share * self.pairs), "")


class Precision(Check):
    """The grid of each side's logits."""

    name = "values/precision"
    claim = "both sides compute their logits in one precision"
    cause = "precision"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._rollout, self._trainer = Marks(), Marks()

    def look(self, rows: Rows) -> None:
        assert rows.rollout_logprobs is not None and rows.trainer_logprobs is not None, "needs"
        temperature = self.setting.temperature
        self._rollout.add(rows, rows.rollout_logprobs, temperature=temperature)
        self._trainer.add(rows, rows.trainer_logprobs, temperature=temperature)

    def conclude(self) -> Finding:
        rollout, trainer = self._rollout, self._trainer
        if min(rollout.pairs, trainer.pairs) < MIN_PAIRS:
            return self.not_checkable(("several rows of one prompt in one step",))
        figures = {
            "branches": rollout.pairs,
            "rollout_on_bfloat16": rollout.on_bfloat16,
            "rollout_on_float16": rollout.on_float16,
            "trainer_on_bfloat16": trainer.on_bfloat16,
            "trainer_on_float16": trainer.on_float16,
        }
        named = [marks.name() or "more than 16 bits" for marks in (rollout, trainer)]
        told = (
            f"at {rollout.pairs} places where rows part, the sampler's logits are in {named[0]}, "
            f"the trainer's in {named[1]}"
        )
        verdict = "consistent" if rollout.name() == trainer.name() else "information"
        return self.found(verdict, told, **figures)
