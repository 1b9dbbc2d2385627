"""Is each advantage beside its own token?

Advantages move no log-prob, so that no gap shows them. Their places do: a token that is trained has
a weight, and one that is not trained needs none.

# N tokens  R rows  S runs of trained tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.types import Int64Array

MIN_RUN = 3
"""Trained tokens of a run that is judged: one of two is not most of it."""
MIN_ROWS = 4
"""Rows whose advantages are moved for certain: a token that is not trained has the weight that a
trained one lacks."""
MIN_OPEN_ROWS = 16
"""Rows that only lack the first or last weight, for their rows end there: without the token that
the weight moved to, one reward of 0 would look alike."""
MIN_OPEN_SHARE = 0.9
"""Share of the rows with advantages that these must be."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """Rows whose advantages are one token off in one direction."""

    proved: BoolArray
    """[R] a token that is not trained has the lost weight."""
    open: BoolArray
    """[R] the place where it would be is outside of the row, or not recorded."""


class LateAdvantages(Check):
    """Compares the tokens that have an advantage with those that are trained, run by run."""

    name = "training/advantages"
    basis = "shown"
    claim = "each trained token has its own advantage"
    cause = "late_advantages"
    needs = ("advantages",)

    def look(self, rows: Rows) -> None:
        moved = {by: _moved(rows, by) for by in (1, -1)}
        trained = np.flatnonzero(rows.loss_mask & _weighted(rows))
        self.count(
            rows=len(rows),
            rows_with_advantages=rows.row_sums(trained) > 0,
            late=moved[1].proved,
            early=moved[-1].proved,
            late_at_end=moved[1].open,
            early_at_start=moved[-1].open,
        )
        begin, end = rows.runs(rows.loss_mask)
        for by, of in moved.items():
            is_hit = of.proved[rows.row_of[begin]]
            for b, e in zip(begin[is_hit].tolist(), end[is_hit].tolist(), strict=True):
                lost = b if by > 0 else e - 1
                where = "behind" if by > 0 else "before"
                note = f"trained with the advantage 0; one untrained token {where} the run has one"
                self.show(float(e - b), rows, lost, lost + 1, note)

    def conclude(self) -> Finding:
        by, told = self._found()
        if by:
            return self.differs(told)
        return self.consistent(
            f"the trained tokens of {self.counts['rows_with_advantages']} rows have advantages"
        )

    def _found(self) -> tuple[int, str]:
        """(1 for late, -1 for early, 0 for neither; in words)."""
        c = self.counts
        num = c["rows_with_advantages"]
        for by, word, proved, at_edge in (
            (1, "late", c["late"], c["late_at_end"]),
            (-1, "early", c["early"], c["early_at_start"]),
        ):
            side = "first" if by > 0 else "last"
            told = f"the {side} trained token of each run has no advantage"
            if proved >= MIN_ROWS:
                return by, (
                    f"in {proved + at_edge} of {num} rows advantages are one token {word}: {told}, "
                    "and the token beyond the other end, which is not trained, has one"
                )
            if at_edge >= max(MIN_OPEN_ROWS, MIN_OPEN_SHARE * num):
                return by, (
                    f"in {at_edge} of {num} rows {told}, as if they were one token {word}; the "
                    "rows end where the other end would show"
                )
        return 0, ""

    def repair(self, rows: Rows) -> Rows:
        """The advantages of these rows moved back by a token; NaN where the row's edge cut one."""
        by, _ = self._found()
        if not by or rows.advantages is None:
            return rows
        moved = _moved(rows, by)
        back = np.full_like(rows.advantages, np.nan)
        source = np.arange(rows.num_tokens) + by
        is_inside = (source >= 0) & (source < rows.num_tokens)
        is_inside &= rows.row_of[np.clip(source, 0, rows.num_tokens - 1)] == rows.row_of
        back[is_inside] = rows.advantages[source[is_inside]]
        is_hit = (moved.proved | moved.open)[rows.row_of]
        return rows.with_(advantages=np.where(is_hit, back, rows.advantages))


def _weighted(rows: Rows) -> BoolArray:
    """[N] True where the token has an advantage other than 0."""
    assert rows.advantages is not None, "the check's needs"
    return np.nan_to_num(rows.advantages) != 0


def _moved(rows: Rows, by: int) -> _Moved:
    """The rows in which every run of trained tokens looks as if advantages were `by` tokens late:
    its first token (by -1: its last) has none, and all others have. Programs that give a whole
    response one weight, observations included, fill the runs between."""
    assert rows.advantages is not None, "the check's needs"
    has = _weighted(rows)
    begin, end = rows.runs(rows.loss_mask)
    num, size = rows.num_in(has, begin, end), end - begin
    row = rows.row_of[begin]
    edge = begin if by > 0 else end - 1
    is_full = num == size
    is_short = (num == size - 1) & ~has[edge] & (size >= MIN_RUN)
    beyond = end if by > 0 else begin - 1
    is_inside = (beyond < rows.offsets[row + 1]) & (beyond >= rows.offsets[row])
    at = np.clip(beyond, 0, max(rows.num_tokens - 1, 0))
    is_known = is_inside & ~np.isnan(rows.advantages[at])
    is_active = num > 0
    is_late = np.zeros(len(rows), np.bool_)
    outer = _outermost(row, is_active, len(rows), is_first=by > 0)
    has_any = outer >= 0
    is_late[has_any] = is_short[outer[has_any]]
    is_late[row[is_active & ~is_short & ~is_full]] = False
    # Where each run is one short, any of them may prove it; beside a run that is full, which the
    # weights of what is between may have filled, only the last one (by -1: the first).
    judged = is_active & is_short
    filled = row[is_active & is_full]
    far = _outermost(row, is_active, len(rows), is_first=by < 0)
    judged[np.isin(row, filled)] = False
    judged[far[filled]] = True
    is_late[row[judged & is_known & ~has[at]]] = False
    proved = np.zeros(len(rows), np.bool_)
    proved[row[judged & is_known & has[at]]] = True
    return _Moved(proved=is_late & proved, open=is_late & ~proved)


def _outermost(
    row: Int64Array, is_active: BoolArray, num_rows: int, *, is_first: bool
) -> Int64Array:
    """[R] index of the first or last active run of each row, -1 for a row without."""
    out = np.full(num_rows, -1, np.int64)
    at = np.flatnonzero(is_active)
    order = at[::-1] if is_first else at
    out[row[order]] = order  # the last write stays
    return out
