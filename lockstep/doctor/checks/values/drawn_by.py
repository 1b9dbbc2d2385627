"""Which of the two sides' distributions drew the tokens?

With d = log p_trainer - log p_rollout of each token:

- tokens drawn from the distribution that the sampler's log-probs are of have mean(exp(d)) = 1: the
  ratios of another distribution to one's own;
- if they were drawn from the trainer's, and the sampler's numbers are of a third thing (a draft
  model, another head), mean(exp(-d)) = 1, and mean(exp(d)) is 1 + chi^2.

Both means are of bounded numbers: min(exp(d), BOUND) can only lower them, so that a mean above 1
refutes the first reading whatever the tails.

# N tokens  R rows
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows, largest
from lockstep.doctor.checks.training.staleness import groups_of, signs
from lockstep.types import Int64Array

BOUND = 20.0
"""Largest ratio that counts, e^3: a bound keeps the standard error honest. A draft model as far
away as k2 = 1 has one token in fifty beyond it."""
MIN_EXCESS = 0.02
"""mean(exp(d)) - 1 that is judged: a k2 of 0.01, above which a mismatch counts as an alarm. The
noise of engines is less, and has both means above 1."""
MIN_ERRORS = 6.0
"""Standard errors by which the mean must be above 1: over rows or over groups, whichever is larger,
for rows of one prompt are not independent."""
MAX_OTHER = 0.3
"""|mean(exp(-d)) - 1|, and its standard error added, over the excess: 1 for noise in the recorded
numbers, -1 for an update on the same rows, 0 if the trainer's distribution drew them."""
MIN_ROWS = 16
"""Rows for a standard error that is known to a fifth."""
MIN_ROWS_OF_SIGN = 8
"""Rows of each sign of the advantage from which on each must say the same: an update on the rows
has one mean for rewarded rows and another one for others."""
NUM_SHOWN = 4
"""Tokens of one chunk that are offered as evidence."""


class DraftLogprobs(Check):
    """Tests both readings of the means of exp(d) and exp(-d), over rows."""

    name = "values/drawn_by"
    basis = "fit"
    claim = "the tokens were drawn from the distribution that the sampler's log-probs are of"
    cause = "draft_logprobs"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def begin(self) -> None:
        self._rows = {sign: [np.zeros((0, 4))] for sign in (-1, 0, 1)}
        """Sign of the row's advantage (0: none, or unknown) -> [R, 4] of each chunk: tokens, the
        sums of exp(d) - 1 and exp(-d) - 1, and the group; 32 bytes of a row."""
        self._num_rows = 0

    def look(self, rows: Rows) -> None:
        at, d = rows.compared, rows.gap[rows.compared]
        num = rows.row_sums(at).astype(np.float64)
        # [n] min(exp(x), BOUND) - 1
        up, down = (rows.row_sums(at, np.expm1(np.minimum(x, np.log(BOUND)))) for x in (d, -d))
        sign = _row_signs(rows, at)
        group = groups_of(rows) + self._num_rows
        self._num_rows += len(rows)
        for s, of in self._rows.items():
            kept = (num > 0) & (sign == s)
            of.append(np.stack([num, up, down, group.astype(np.float64)], axis=1)[kept])
        for i in largest(d, NUM_SHOWN).tolist():
            note = f"the trainer gives this token exp({d[i]:.2f}) times the sampler's probability"
            self.show(float(d[i]), rows, int(at[i]), int(at[i]) + 1, note)

    def conclude(self) -> Finding:
        of_sign = {sign: np.concatenate(parts) for sign, parts in self._rows.items()}
        whole = np.concatenate(list(of_sign.values()))
        if len(whole) < MIN_ROWS:
            return self.not_checkable(f"{MIN_ROWS} rows with log-probs of both sides")
        (up, up_error), (down, down_error) = _means(whole)
        figures = {
            "mean_ratio": 1 + up,
            "mean_ratio_error": up_error,
            "mean_inverse": 1 + down,
            "mean_inverse_error": down_error,
        }
        told = (
            f"mean(exp(d)) is {1 + up:.4f} +- {up_error:.4f} and mean(exp(-d)) {1 + down:.4f} +- "
            f"{down_error:.4f} over {len(whole)} rows: the first is 1 if the sampler's numbers are "
            "of what drew the tokens, the second if the trainer's are"
        )
        halves = [of for s, of in of_sign.items() if s and len(of) >= MIN_ROWS_OF_SIGN]
        is_drawn = all(_is_drawn_by_trainer(of, is_whole=False) for of in halves)
        if not (is_drawn and _is_drawn_by_trainer(whole, is_whole=True)):
            return self.consistent(told, **figures)
        setting = self.setting
        processing = {"temperature": (None, 1.0), "top_p": (None, 1.0), "top_k": (None, 0, -1)}
        declared = [name for name, off in processing.items() if getattr(setting, name) not in off]
        if declared:
            told += f". Raw log-probs of a sampler with {', '.join(declared)} have the same mark"
            return self.information(told, **figures)
        return self.differs(told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """None of the sampler's numbers is of what was drawn: all of the gap is theirs."""
        return rows.agreeing(rows.loss_mask)


def _row_signs(rows: Rows, at: Int64Array) -> Float64Array:
    """[R] sign of the mean advantage over the tokens `at`; 0 where unknown."""
    sign = signs(rows)
    if sign is None:
        return np.zeros(len(rows))
    return np.sign(rows.row_means(at, sign[at]))


def _means(of_rows: Float64Array) -> list[tuple[float, float]]:
    """(mean over tokens, its standard error) of exp(d) - 1 and of exp(-d) - 1."""
    num = of_rows[:, 0]
    _, group = np.unique(of_rows[:, 3], return_inverse=True)
    out: list[tuple[float, float]] = []
    for sums in of_rows[:, 1:3].T:
        mean = sums.sum() / num.sum()
        left = sums - mean * num
        spreads = [
            np.sqrt(part @ part * len(part) / max(len(part) - 1, 1))
            for part in (left, np.bincount(group, left))
        ]
        out.append((float(mean), float(max(spreads) / num.sum())))
    return out


def _is_drawn_by_trainer(of_rows: Float64Array, *, is_whole: bool) -> bool:
    """True if the means refute the sampler's distribution and fit the trainer's. is_whole: False
    for a part of the rows, which need only lean that way."""
    (up, up_error), (down, down_error) = _means(of_rows)
    if not is_whole:
        return up > 0 and down > -up / 2 and down < up / 2
    return up > max(MIN_EXCESS, MIN_ERRORS * up_error) and abs(down) + down_error < MAX_OTHER * up
