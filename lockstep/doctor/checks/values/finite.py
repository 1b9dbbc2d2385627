"""Whether every trained token has a log-prob, and whether it can be one.

# N tokens  R rows  S spans (sampled turns)
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.types import Float32Array, Int64Array

ROUNDING = 1e-3
"""Nats above 0 that rounding may make: a softmax in 16 bits. Beyond it a number is no log-prob."""
UNITS = (("log2", float(np.log(2.0))), ("log10", float(np.log(10.0))))
"""Logs to other bases, and what makes natural ones of them."""
MAX_UNIT_ERROR = 0.02
"""How far the ratio of two unforced log-probs may be from a unit's, as a share: float noise is
1e-6, and no other unit or temperature keeps one ratio over all tokens of a row."""
MIN_UNIT_TOKENS = 4
"""Unforced tokens of a row that must all have that ratio."""
UNFORCED = -0.05
"""Log-probs below it have enough digits for a ratio."""


class NonFinite(Check):
    """NaN and infinities among the log-probs of trained tokens."""

    name = "values/nonfinite"
    claim = "every trained token has a finite log-prob"
    cause = "nonfinite"
    needs = ("rollout_logprobs",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._rollout = self._trainer = self._trained = 0

    def look(self, rows: Rows) -> None:
        self._trained += int(rows.loss_mask.sum())
        of_rollout, of_trainer = nonfinite(rows)
        self._rollout += int(of_rollout.sum())
        self._trainer += int(of_trainer.sum())
        for who, wrong, side in (
            ("sampler", of_rollout, rows.rollout_logprobs),
            ("trainer", of_trainer, rows.trainer_logprobs),
        ):
            for at in np.flatnonzero(wrong)[:8].tolist():
                assert side is not None, "only what is there can be wrong"
                row, place = rows.where(at)
                note = f"the {who}'s log-prob is {side[at]}"
                self.show(1.0, Evidence(row=row, begin=place, end=place + 1, note=note))

    def conclude(self) -> Finding:
        figures = {
            "trained_tokens": self._trained,
            "rollout_nonfinite": self._rollout,
            "trainer_nonfinite": self._trainer,
        }
        told = (
            f"of {self._trained} trained tokens {self._rollout} have no finite log-prob of the "
            f"sampler, {self._trainer} none of the trainer"
        )
        is_wrong = self._rollout or self._trainer
        return self.found("differs" if is_wrong else "consistent", told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """Such tokens are not trained, and compared with nothing."""
        of_rollout, of_trainer = nonfinite(rows)
        return rows.with_(loss_mask=rows.loss_mask & ~of_rollout & ~of_trainer)


def nonfinite(rows: Rows) -> tuple[BoolArray, BoolArray]:
    """([N], [N]) trained tokens without a finite log-prob of the sampler, of the trainer.

    A turn that has NaN everywhere was not scored, or its figures were not kept: that is no defect
    of numbers. Infinities always are.
    """
    spans = rows.spans
    out: list[BoolArray] = []
    for side in (rows.rollout_logprobs, rows.trainer_logprobs):
        if side is None:
            out.append(np.zeros(rows.num_tokens, np.bool_))
            continue
        wrong = rows.loss_mask & ~np.isfinite(side)
        if wrong.any():
            is_nan = np.isnan(side)
            total = np.concatenate([[0], np.cumsum(rows.loss_mask & ~is_nan)])
            is_empty = total[spans.end] == total[spans.begin]
            in_empty = np.zeros(rows.num_tokens, np.bool_)
            in_empty[rows.sampled] = np.repeat(is_empty, spans.size)
            wrong &= ~(in_empty & is_nan)
        out.append(wrong)
    return out[0], out[1]


class Positive(Check):
    """Numbers that no natural log of a probability is: above 0, or in another unit."""

    name = "values/positive"
    claim = "log-probs are natural logs of probabilities: 0 or below"
    cause = "positive"
    needs = ("rollout_logprobs",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._num_rows = 0
        self._kinds: dict[str, int] = {}
        self._tokens = 0

    def look(self, rows: Rows) -> None:
        self._num_rows += len(rows)
        for who, side, other in _sides(rows):
            kinds = kinds_of(rows, side, other)
            for kind in np.unique(kinds[kinds > 0]).tolist():
                told = f"{who}: {KINDS[kind]}"
                hit = np.flatnonzero(kinds == kind)
                self._kinds[told] = self._kinds.get(told, 0) + len(hit)
                self._tokens += int(rows.loss_mask[(kinds == kind)[rows.row_of]].sum())
                for r in hit[:8].tolist():
                    begin, end = int(rows.offsets[r]), int(rows.offsets[r + 1])
                    inside = np.flatnonzero(
                        rows.loss_mask[begin:end] & np.isfinite(side[begin:end])
                    )
                    at = int(inside[np.argmax(side[begin:end][inside])])
                    self.show(
                        float(abs(side[begin + at])),
                        Evidence(
                            row=rows.row_ids[r],
                            begin=at,
                            end=at + 1,
                            note=f"{told}: {side[begin + at]:.4f}",
                        ),
                    )

    def conclude(self) -> Finding:
        figures = {"rows": self._num_rows, "tokens": self._tokens}
        if not self._kinds:
            return self.found("consistent", f"in all of {self._num_rows} rows", **figures)
        told = "; ".join(f"{kind} in {n} rows" for kind, n in self._kinds.items())
        return self.found("differs", f"{told}, of {self._num_rows}", **figures)

    def repair(self, rows: Rows) -> Rows:
        """Natural logs of the same probabilities."""
        changed: dict[str, Float32Array] = {}
        for who, side, other in _sides(rows):
            kinds = kinds_of(rows, side, other)
            if not kinds.any():
                continue
            of_token = kinds[rows.row_of]
            out = side.astype(np.float64)
            is_prob = (of_token == 1) & (out > 0)  # what is below 0 in such a row is a log-prob
            out[is_prob] = np.log(out[is_prob])
            out = np.where(of_token == 2, -out, out)
            for number, (_, factor) in enumerate(UNITS, 3):
                out = np.where(of_token == number, out * factor, out)
            name = "rollout_logprobs" if who == "sampler" else "trainer_logprobs"
            changed[name] = out.astype(np.float32)
        return rows.with_(**changed) if changed else rows


KINDS = ("", "probabilities", "log-probs with the sign turned", "log2", "log10")
"""What the numbers of a row are, in place of natural logs."""


def kinds_of(
    rows: Rows, side: Float32Array, other: Float32Array | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[R] index into KINDS, row by row. side: [N]; other: [N] of the other side, if it is known:
    it says what positive numbers are, and is what units are seen by."""
    judged = rows.loss_mask & np.isfinite(side)
    at = np.flatnonzero(judged)
    row, values = rows.row_of[at], side[at].astype(np.float64)
    num_rows = len(rows)

    def count(what: BoolArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.bincount(row[what], minlength=num_rows)

    above = values > ROUNDING
    has_above = count(above) > 0
    kinds = np.zeros(num_rows, np.int64)
    if has_above.any():
        # A row of probabilities, or of turned logs, has no number below 0 at all.
        is_turned = has_above & (count(values < -ROUNDING) == 0)
        as_prob = count(values > 1.0 + ROUNDING) == 0
        if other is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(np.maximum(values, 1e-30))
            truth = other[at].astype(np.float64)
            known = np.isfinite(truth)
            error = [
                np.bincount(row[known], np.abs(guess - truth)[known], minlength=num_rows)
                for guess in (logs, -values)
            ]
            as_prob &= error[0] <= error[1]
        else:  # most tokens of most replies are likelier than e^-0.5
            as_prob &= 2 * count(values > 0.5) >= count(values > -1.0)
        kinds = np.where(is_turned, np.where(as_prob, 1, 2), kinds)
        kinds = np.where(has_above & ~is_turned, 1, kinds)
    if other is not None and _has_units(row, values, other[at], num_rows):
        truth = other[at].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = values / truth
        unforced = (values < UNFORCED) & (truth < UNFORCED)
        for number, (_, factor) in enumerate(UNITS, 3):
            fits = unforced & (np.abs(ratio * factor - 1.0) < MAX_UNIT_ERROR)
            is_unit = (count(unforced) >= MIN_UNIT_TOKENS) & (count(fits) == count(unforced))
            kinds = np.where(is_unit & (kinds == 0), number, kinds)
    return kinds


def _has_units(row: Int64Array, values: Float64Array, other: Float32Array, num_rows: int) -> bool:
    """Whether the sums of some row stand in the ratio of a unit, as those of all its tokens do: a
    look at sums, before each token is looked at."""
    known = np.isfinite(other)
    if not known.all():
        row, values, other = row[known], values[known], other[known]
    sums = [np.bincount(row, x, num_rows) for x in (values, other)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sums[0] / sums[1]
    return any((np.abs(ratio * factor - 1.0) < 2 * MAX_UNIT_ERROR).any() for _, factor in UNITS)


def _sides(rows: Rows) -> list[tuple[str, Float32Array, Float32Array | None]]:
    out: list[tuple[str, Float32Array, Float32Array | None]] = []
    if rows.rollout_logprobs is not None:
        out.append(("sampler", rows.rollout_logprobs, rows.trainer_logprobs))
    if rows.trainer_logprobs is not None:
        out.append(("trainer", rows.trainer_logprobs, rows.rollout_logprobs))
    return out
