"""Which figure of the gap to trust, and how many of its tokens could not have been others."""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.attribution import gap_of, gap_of_all
from lockstep.doctor.checks.base import Check, Gap, Setting
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.types import FORCED_LOGPROB

NUM_ERRORS = 4.0
"""Standard errors of k1 within which it says nothing about the size of a gap."""
MAX_K3_OVER_K2 = 3.0
"""Above it a few tokens make k3: exp(d) of a token that the trainer finds far likelier."""
MIN_K2 = 1e-10
"""Below it the sides agree to float32, and no estimate needs an interpretation."""
MIN_FORCED_SHARE = 0.05
"""Share of forced tokens from which on the gap without them is worth a look."""


class Estimators(Check):
    """k1 beside k2 and k3."""

    name = "values/estimators"
    claim = "k1, k2 and k3 tell the same of the gap"
    cause = ""
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._gap = Gap()

    def look(self, rows: Rows) -> None:
        self._gap.add(gap_of_all(rows))

    def conclude(self) -> Finding:
        figures = self._gap.means()
        k1, k2, k3 = figures["k1"], figures["k2"], figures["k3"]
        n = max(self._gap.tokens, 1)
        told = f"k1 {k1:.1e}, k2 {k2:.1e}, k3 {k3:.1e}"
        if k2 < MIN_K2:
            return self.found("consistent", told, **figures)
        error = (2 * k2 / n) ** 0.5
        if abs(k1) < NUM_ERRORS * error and k2 > error:
            told += f": k1 is within {NUM_ERRORS:g} standard errors of 0 and cancels; trust k2"
        elif k3 > MAX_K3_OVER_K2 * k2:
            told += ": k3 is made by a few tokens that the trainer finds far likelier; trust k2"
        else:
            return self.found("consistent", told, **figures)
        return self.found("information", told, **figures)


class Forced(Check):
    """Tokens that could not have been others: the sampler's log-prob is as good as 0."""

    name = "values/forced"
    claim = "the gap is not diluted by tokens that were as good as certain"
    cause = ""
    needs = ("rollout_logprobs", "trainer_logprobs")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._all, self._unforced = Gap(), Gap()
        self._zero = 0

    def look(self, rows: Rows) -> None:
        assert rows.rollout_logprobs is not None, "the check's needs"
        self._all.add(gap_of_all(rows))
        rollout = rows.rollout_logprobs[rows.compared]
        unforced = rows.compared[rollout < FORCED_LOGPROB]  # the seed's second mask
        self._unforced.add(gap_of(rows.gap[unforced]))
        self._zero += int(np.count_nonzero(rollout == 0))

    def conclude(self) -> Finding:
        whole, left = self._all, self._unforced
        share = 1.0 - left.tokens / max(whole.tokens, 1)
        figures = {
            "forced_share": share,
            "zero_share": self._zero / max(whole.tokens, 1),
            "k2_unforced": left.means()["k2"],
            "k3_unforced": left.means()["k3"],
        }
        told = (
            f"{share:.0%} of {whole.tokens} compared tokens are forced (log-prob above "
            f"{FORCED_LOGPROB}, {figures['zero_share']:.0%} exactly 0); without them k2 is "
            f"{figures['k2_unforced']:.1e} in place of {whole.means()['k2']:.1e}"
        )
        is_worth_it = share >= MIN_FORCED_SHARE and whole.means()["k2"] >= MIN_K2
        return self.found("information" if is_worth_it else "consistent", told, **figures)
