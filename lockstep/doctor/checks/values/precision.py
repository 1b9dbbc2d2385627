"""Tokens that follow the same ids in several rows, and the precision that they show of each side.

The rows of one task share their prompt, and some ids after it. If a token occurs again after the
same ids, a side that computes deterministically gives it the same log-prob each time. At a
*branch*, where different tokens follow the same ids, their log-probs share one normaliser, which
cancels in differences. Neither needs a model. Rows are compared within one chunk.

The difference at a branch is that of two logits: if logits were rounded to 16 bits, it is a
multiple of a power of two, up to float32.

# N tokens  M tokens that occur again  G groups of these  B pairs at branches
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows, once_per_chunk
from lockstep.types import Float32Array, Int64Array

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Contexts:
    """Trained tokens with finite log-probs on both sides that follow the same ids, under the same
    weights as far as versions and steps are known."""

    repeated: Int64Array
    """[M] indices of tokens that occur again, group by group."""
    group: Int64Array
    """[M] group of each, 0 .. G-1."""
    size: Int64Array
    """[G] tokens of each group, at least 2."""
    one: Int64Array
    """[B] index of a token at a branch, ..."""
    other: Int64Array
    """[B] ... and of a different token there. k different tokens make k - 1 pairs, in a chain."""

    def means(self, values: Float64Array) -> Float64Array:
        """[G] mean of each group. values: [M]."""
        return np.bincount(self.group, values, minlength=len(self.size)) / self.size


@once_per_chunk
def contexts_of(rows: Rows) -> Contexts:
    """The repeated contexts of one chunk, found once."""
    at = np.flatnonzero(rows.loss_mask & (rows.position > 0))
    for side in (rows.rollout_logprobs, rows.trainer_logprobs):
        if side is not None:
            at = at[np.isfinite(side[at])]
    weights = _weights_keys(rows, at)
    context, key = (rows.prefix_keys[places] + weights for places in (at - 1, at))
    order = np.argsort(key)
    begins = np.diff(key[order], prepend=~key[order[:1]]) != 0
    size = np.diff(np.flatnonzero(np.append(begins, True)))
    # The fastest sort is not stable: the tokens of each group are put in order here.
    order = np.sort(np.cumsum(begins) * len(at) + order) % max(len(at), 1)
    different = order[begins]
    different = different[np.argsort(context[different], kind="stable")]
    is_pair = context[different][1:] == context[different][:-1]
    num_repeated = size[size > 1]
    return Contexts(
        repeated=at[order][np.repeat(size > 1, size)],
        group=np.repeat(np.arange(len(num_repeated)), num_repeated),
        size=num_repeated,
        one=at[different[:-1][is_pair]],
        other=at[different[1:][is_pair]],
    )


def _weights_keys(rows: Rows, at: Int64Array) -> npt.NDArray[np.uint64]:
    """Hash of the weights that sampled and scored the tokens `at` (any shape)."""
    out = np.zeros(at.shape, np.uint64)
    if rows.policy_version is not None:
        out += rows.policy_version[at].astype(np.uint64)
    for of_row in (rows.steps, rows.trainer_version):
        if of_row is not None:
            out = out * np.uint64(1_000_003) + of_row[rows.row_of[at]].astype(np.uint64)
    return out * np.uint64(0xD6E8FEB86659FD93)


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

    def begin(self) -> None:
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
