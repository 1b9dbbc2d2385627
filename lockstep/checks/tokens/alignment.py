"""Whether each log-prob stands beside its own token.

# N tokens  S spans (sampled turns)  O offsets that are tried
"""

from __future__ import annotations

import numpy as np

from lockstep.checks.base import Check
from lockstep.checks.findings import Evidence, Finding
from lockstep.checks.rows import Float64Array, Rows
from lockstep.types import Int64Array

MAX_OFFSET = 4
"""Places that a whole turn is tried at, to either side."""
MIN_PAIRS = 6
"""Pairs that must be compared before a turn is judged: chance aligns fewer."""
MAX_RESIDUAL = 0.1
"""Share of the gap that may be left at the best offset, for it to be the explanation."""
MIN_GAP = 0.1
"""Mean |d| in nats at offset 0 under which a turn is not looked at: kernels make as much."""


class Shifted(Check):
    """The best alignment of the two sides' log-probs over offsets, turn by turn."""

    name = "tokens/shifted"
    claim = "each log-prob stands beside its own token"
    cause = "shifted"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting) -> None:
        super().__init__(setting)
        self._num_turns = 0
        self._num_judged = 0
        self._by_offset: dict[int, int] = {}

    def look(self, rows: Rows) -> None:
        offset, gap, num = best_offsets(rows)
        spans = rows.spans
        self._num_turns += len(spans)
        self._num_judged += int((num >= MIN_PAIRS).sum())
        for s in np.flatnonzero(offset).tolist():
            self._by_offset[int(offset[s])] = self._by_offset.get(int(offset[s]), 0) + 1
            row, begin = rows.where(int(spans.begin[s]))
            self.show(
                float(gap[s]),
                Evidence(
                    row=row,
                    begin=begin,
                    end=begin + int(spans.size[s]),
                    note=f"the two sides agree if the sampler's are moved by {int(offset[s])}",
                ),
            )

    def conclude(self) -> Finding:
        hit = sum(self._by_offset.values())
        figures = {"turns": self._num_turns, "judged_turns": self._num_judged, "shifted_turns": hit}
        if not hit:
            return self.found(
                "consistent", f"0 of {self._num_judged} turns agree better at an offset", **figures
            )
        common = max(self._by_offset, key=lambda o: self._by_offset[o])
        return self.found(
            "differs",
            f"{hit} of {self._num_judged} turns agree if the sampler's log-probs are moved, most "
            f"of them by {common:+d}",
            **figures,
            offset=common,
        )

    def repair(self, rows: Rows) -> Rows:
        """The log-probs moved back; NaN where none is left for a token."""
        offset, _, _ = best_offsets(rows)
        if not offset.any():
            return rows
        moved = rows.rollout_logprobs.copy()
        spans = rows.spans
        for s in np.flatnonzero(offset).tolist():
            begin, end, by = int(spans.begin[s]), int(spans.end[s]), int(offset[s])
            values = np.full(end - begin, np.nan, np.float32)
            old = rows.rollout_logprobs[begin:end]
            if by > 0:
                values[by:] = old[:-by]
            else:
                values[:by] = old[-by:]
            moved[begin:end] = values
        return rows.with_(rollout_logprobs=moved)


def best_offsets(rows: Rows) -> tuple[Int64Array, Float64Array, Int64Array]:
    """For each span: the places by which the sampler's log-probs must be moved to agree with the
    trainer's (0 unless another offset explains the gap), mean |d| as it is, and pairs compared.

    Cost: one pass over the tokens per offset.
    """
    spans = rows.spans
    rollout, trainer = rows.rollout_logprobs, rows.trainer_logprobs
    assert rollout is not None and trainer is not None, "the check's needs"
    inside = np.full(rows.num_tokens, -1, np.int64)
    inside[rows.sampled] = np.repeat(np.arange(len(spans)), spans.size)

    def compared(by: int) -> tuple[Float64Array, Int64Array]:
        """Mean |trainer[i] - rollout[i - by]| inside of each span, and how many pairs."""
        size = max(rows.num_tokens - abs(by), 0)
        to = slice(by, by + size) if by >= 0 else slice(0, size)
        of = slice(0, size) if by >= 0 else slice(-by, -by + size)
        d = np.abs(trainer[to].astype(np.float64) - rollout[of])
        is_pair = (inside[to] == inside[of]) & (inside[to] >= 0) & np.isfinite(d)
        index = inside[to][is_pair]
        total = np.bincount(index, d[is_pair], minlength=len(spans))
        num = np.bincount(index, minlength=len(spans))
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / num, num

    base, num = compared(0)
    best, offset = base * MAX_RESIDUAL, np.zeros(len(spans), np.int64)
    for by in (b for size in range(1, MAX_OFFSET + 1) for b in (size, -size)):
        mean, pairs = compared(by)
        better = (mean < best) & (pairs >= MIN_PAIRS) & (base > MIN_GAP)
        best, offset = np.where(better, mean, best), np.where(better, by, offset)
    return offset, base, num
