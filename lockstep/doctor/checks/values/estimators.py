"""Which figure of the gap to trust, and how many of its tokens were forced."""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.attribution import Gap, gap_of, gap_of_all
from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.types import FORCED_LOGPROB

NUM_ERRORS = 4.0
"""Standard errors of k1 within which it says nothing about the size of a gap."""
MAX_K3_OVER_K2 = 3.0
"""Ratio above which a few tokens make k3: exp(d) of a token that the trainer finds far likelier."""
MIN_K2 = 1e-10
"""Below it the sides agree to float32, and no estimate needs an interpretation."""
MIN_FORCED_SHARE = 0.05
"""Share of forced tokens above which the gap without them is reported."""


class Estimators(Check):
    """Compares k1, k2 and k3."""

    name = "values/estimators"
    claim = "k1, k2 and k3 say the same about the gap"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._gap = Gap()

    def look(self, rows: Rows) -> None:
        self._gap.add(gap_of_all(rows))

    def conclude(self) -> Finding:
        figures = self._gap.means()
        k1, k2, k3 = figures["k1"], figures["k2"], figures["k3"]
        told = f"k1 {k1:.1e}, k2 {k2:.1e}, k3 {k3:.1e}"
        error = (2 * k2 / max(self._gap.tokens, 1)) ** 0.5
        if k2 >= MIN_K2 and abs(k1) < NUM_ERRORS * error and k2 > error:
            told += f": k1 is within {NUM_ERRORS:g} standard errors of 0 and cancels; trust k2"
        elif k2 >= MIN_K2 and k3 > MAX_K3_OVER_K2 * k2:
            told += ": a few tokens that the trainer finds far likelier make k3; trust k2"
        else:
            return self.consistent(told, **figures)
        return self.information(told, **figures)


class Forced(Check):
    """Tokens that were as good as certain: the sampler's log-prob is almost 0."""

    name = "values/forced"
    claim = "the gap is not diluted by tokens that were as good as certain"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._all, self._unforced = Gap(), Gap()

    def look(self, rows: Rows) -> None:
        self._all.add(gap_of_all(rows))
        rollout = rows.rollout[rows.compared]
        self._unforced.add(gap_of(rows.gap[rows.compared[rollout < FORCED_LOGPROB]]))
        self.counts["zero"] += int(np.count_nonzero(rollout == 0))

    def conclude(self) -> Finding:
        total, whole, left = max(self._all.tokens, 1), self._all.means(), self._unforced.means()
        figures = {
            "forced_share": 1.0 - self._unforced.tokens / total,
            "zero_share": self.counts["zero"] / total,
            "k2_unforced": left["k2"],
            "k3_unforced": left["k3"],
        }
        told = (
            f"{figures['forced_share']:.0%} of {self._all.tokens} compared tokens are forced "
            f"(log-prob above {FORCED_LOGPROB}, {figures['zero_share']:.0%} exactly 0); without "
            f"them k2 is {left['k2']:.1e} instead of {whole['k2']:.1e}"
        )
        is_worth_it = figures["forced_share"] >= MIN_FORCED_SHARE and whole["k2"] >= MIN_K2
        return self.found("information" if is_worth_it else "consistent", told, **figures)
