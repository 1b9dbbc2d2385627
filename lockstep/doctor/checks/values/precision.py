"""The precision in which each side computed its logits, from differences of log-probs.

A log-prob is a logit minus a normaliser that all tokens of one context share. At a branch
(different tokens after the same ids) the normaliser cancels, and the difference is that of two
logits: if logits were rounded to 16 bits, it is a multiple of a power of two, up to float32.

# N tokens  B pairs at branches
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lockstep.doctor.checks.base import Check, Finding, Setting
from lockstep.doctor.checks.contexts import contexts_of
from lockstep.doctor.checks.rows import Rows
from lockstep.types import Float32Array

GRIDS = (("bfloat16", 2.0**-7), ("float16", 2.0**-10))
"""Distance between a type's numbers from 1 to 2; larger ones are further apart, on the same grid.
Logits below 1 are rare and finer: a share of the pairs may be off the grid."""
TOLERANCE = 4e-6
"""Error of float32 in a difference of two log-probs of some 20 nats."""
MIN_PAIRS = 6
"""Branches: so many are on bfloat16's grid by chance once in 1e18, on float16's once in 1e12."""
MIN_SHARE = 0.8
"""Share of the pairs that must be on the grid; by chance 0.1 % and 0.8 % are."""
MIN_SHARE_NOISY = 0.1
"""The same if the passes that drew the two tokens differ now and then, and with them the
normaliser."""


class Marks:
    """Number of a side's branches, and of those on the grid of each 16-bit type."""

    def __init__(self) -> None:
        self.pairs = 0
        self.on_grid: Counter[str] = Counter()

    def add(self, rows: Rows, side: Float32Array, *, temperature: float | None) -> None:
        """Counts a chunk. side: [N] log-probs. temperature: divisor of the logits."""
        contexts = contexts_of(rows)
        apart = np.abs(side[contexts.one].astype(np.float64) - side[contexts.other])
        apart = apart[apart > GRIDS[0][1] / 2]  # equal logits are on every grid
        self.pairs += len(apart)
        for name, step in GRIDS:
            on_grid = np.zeros(len(apart), np.bool_)
            for scale in {1.0, temperature or 1.0}:
                steps = apart * (scale / step)
                on_grid |= np.abs(steps - np.round(steps)) * step < TOLERANCE
            self.on_grid[name] += int(on_grid.sum())

    def name(self, *, min_share: float = MIN_SHARE) -> str:
        """bfloat16 or float16; empty if the type has more bits, or is unknown."""
        if self.pairs < MIN_PAIRS:
            return ""
        return next((n for n, _ in GRIDS if self.on_grid[n] >= min_share * self.pairs), "")


class Precision(Check):
    """Compares the grids of the two sides' logits."""

    name = "values/precision"
    claim = "both sides compute their logits in one precision"
    cause = "precision"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._rollout, self._trainer = Marks(), Marks()

    def look(self, rows: Rows) -> None:
        temperature = self.setting.temperature
        self._rollout.add(rows, rows.rollout, temperature=temperature)
        self._trainer.add(rows, rows.trainer, temperature=temperature)

    def conclude(self) -> Finding:
        rollout, trainer = self._rollout, self._trainer
        if min(rollout.pairs, trainer.pairs) < MIN_PAIRS:
            return self.not_checkable("several rows of one prompt in one step")
        self.count(branches=rollout.pairs)
        for side, marks in (("rollout", rollout), ("trainer", trainer)):
            self.count(**{f"{side}_on_{name}": num for name, num in marks.on_grid.items()})
        named = [marks.name() or "more than 16 bits" for marks in (rollout, trainer)]
        told = (
            f"at {rollout.pairs} branches the sampler's logits are in {named[0]}, the trainer's in "
            f"{named[1]}"
        )
        verdict = "consistent" if rollout.name() == trainer.name() else "information"
        return self.found(verdict, told)
