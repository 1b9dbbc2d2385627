"""Does every trained token have a log-prob, and can it be one?

# N tokens  R rows  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.types import Float32Array, Int64Array

ROUNDING = 1e-3
"""Nats above 0 that rounding may make: a softmax in 16 bits. A larger number is no log-prob."""
MAX_UNIT_ERROR = 0.02
"""Relative error of a unit's ratio between two unforced log-probs: float noise is 1e-6, and neither
another unit nor a temperature keeps one ratio over all tokens of a row."""
MIN_UNIT_TOKENS = 4
"""Unforced tokens of a row that must all have that ratio."""
UNFORCED = -0.05
"""Log-probs below it have enough digits for a ratio."""
NUM_SHOWN = 8
"""Tokens or rows of one chunk that are offered as evidence."""


class NonFinite(Check):
    """NaN and infinities among the log-probs of trained tokens."""

    name = "values/nonfinite"
    claim = "every trained token has a finite log-prob"
    cause = "nonfinite"
    basis = "shown"
    needs = ("rollout_logprobs",)

    def look(self, rows: Rows) -> None:
        self.count(trained_tokens=rows.loss_mask)
        for who, field, side, _ in rows.sides():
            at = np.flatnonzero(nonfinite(rows, side))
            self.count(**{field.replace("logprobs", "nonfinite"): len(at)})
            for i in at[:NUM_SHOWN].tolist():
                self.show(1.0, rows, i, i + 1, f"the {who}'s log-prob is {side[i]}")

    def conclude(self) -> Finding:
        rollout, trainer = self.counts["rollout_nonfinite"], self.counts["trainer_nonfinite"]
        told = (
            f"of {self.counts['trained_tokens']} trained tokens {rollout} have no finite log-prob "
            f"of the sampler, {trainer} none of the trainer"
        )
        return self.differs(told) if rollout or trainer else self.consistent(told)

    def repair(self, rows: Rows) -> Rows:
        """Such tokens are not trained, and not compared."""
        for _, _, side, _ in rows.sides():
            rows = rows.untrained(nonfinite(rows, side))
        return rows


def nonfinite(rows: Rows, side: Float32Array) -> BoolArray:
    """[N] trained tokens without a finite log-prob. side: [N] log-probs.

    A turn with only NaN was not scored, or not stored: that is no defect. Infinities always are.
    """
    wrong = rows.loss_mask & ~np.isfinite(side)
    if not wrong.any():
        return wrong
    spans, is_nan = rows.spans, np.isnan(side)
    is_empty = rows.num_in(rows.loss_mask & ~is_nan, spans.begin, spans.end) == 0
    return wrong & ~(np.append(is_empty, False)[rows.span_of] & is_nan)


class Positive(Check):
    """Numbers that no natural log of a probability is: above 0, or in another unit."""

    name = "values/positive"
    claim = "log-probs are natural logs of probabilities, 0 or below"
    cause = "positive"
    needs = ("rollout_logprobs",)

    def begin(self) -> None:
        self._kinds: Counter[str] = Counter()

    def look(self, rows: Rows) -> None:
        self.count(rows=len(rows))
        for who, _, side, other in rows.sides():
            kinds = kinds_of(rows, side, other)
            for kind in np.unique(kinds[kinds > 0]).tolist():
                told = f"{who}: {KINDS[kind]}"
                hit = np.flatnonzero(kinds == kind)
                self._kinds[told] += len(hit)
                self.count(tokens=rows.loss_mask & (kinds == kind)[rows.row_of])
                for r in hit[:NUM_SHOWN].tolist():
                    is_own = rows.loss_mask & np.isfinite(side) & (rows.row_of == r)
                    at = int(np.argmax(np.where(is_own, side, -np.inf)))
                    self.show(float(abs(side[at])), rows, at, at + 1, f"{told}: {side[at]:.4f}")

    def conclude(self) -> Finding:
        num_rows = self.counts["rows"]
        if not self._kinds:
            return self.consistent(f"in all of {num_rows} rows")
        told = "; ".join(f"{kind} in {n} rows" for kind, n in self._kinds.items())
        return self.differs(f"{told}, of {num_rows}")

    def repair(self, rows: Rows) -> Rows:
        """Natural logs of the same probabilities."""
        changed: dict[str, Float32Array] = {}
        for _, field, side, other in rows.sides():
            kinds = kinds_of(rows, side, other)
            if not kinds.any():
                continue
            of_token = kinds[rows.row_of]
            out = side.astype(np.float64)
            is_prob = (of_token == 1) & (out > 0)  # negative numbers in such a row are log-probs
            out[is_prob] = np.log(out[is_prob])
            changed[field] = (out * FACTORS[of_token]).astype(np.float32)
        return rows.with_(**changed) if changed else rows


KINDS = ("", "probabilities", "negated log-probs", "log2", "log10")
"""Scales that a row's numbers may be on instead of natural logs."""
FACTORS = np.array([1.0, 1.0, -1.0, np.log(2.0), np.log(10.0)])
"""The factor that makes natural logs of each; probabilities have none."""


def kinds_of(rows: Rows, side: Float32Array, other: Float32Array | None) -> Int64Array:
    """[R] index into KINDS of each row. side: [N] log-probs. other: [N] those of the other side;
    it tells what positive numbers are, and units are known by it only."""
    at = np.flatnonzero(rows.loss_mask & np.isfinite(side))
    row, values = rows.row_of[at], side[at].astype(np.float64)
    truth = np.full(len(at), np.nan) if other is None else other[at].astype(np.float64)

    def count(what: BoolArray) -> Int64Array:
        return np.bincount(row[what], minlength=len(rows))

    def error(guess: Float64Array) -> npt.NDArray[Any]:
        return np.bincount(row, np.nan_to_num(np.abs(guess - truth)), minlength=len(rows))

    has_above = count(values > ROUNDING) > 0
    # A row of probabilities, or of negated logs, has no number below 0.
    is_turned = has_above & (count(values < -ROUNDING) == 0)
    kinds = has_above.astype(np.int64)
    if is_turned.any():
        as_prob = count(values > 1.0 + ROUNDING) == 0
        if other is None:  # most tokens of most replies are likelier than e^-0.5
            as_prob &= 2 * count(values > 0.5) >= count(values > -1.0)
        else:
            as_prob &= error(np.log(np.maximum(values, 1e-30))) <= error(-values)
        kinds[is_turned & ~as_prob] = 2
    unforced = (values < UNFORCED) & (truth < UNFORCED)
    num = count(unforced)
    for number in (KINDS.index("log2"), KINDS.index("log10")):
        factor = FACTORS[number]
        fits = unforced & (np.abs(values * factor - truth) < MAX_UNIT_ERROR * np.abs(truth))
        kinds[(kinds == 0) & (num >= MIN_UNIT_TOKENS) & (count(fits) == num)] = number
    return kinds
