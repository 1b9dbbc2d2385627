"""Whether what is trained is what the model sampled, and begins where its turn begins.

# N tokens  S spans (runs of sampled or trained tokens)  R rows
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.checks.base import Check, Setting
from lockstep.checks.findings import Evidence, Finding
from lockstep.checks.rows import BoolArray, Rows
from lockstep.checks.tokens.template_ids import TemplateIds
from lockstep.types import Int64Array

MIN_OPENED = 0.5
"""Openings per row that the renderer's template must have in the rows, to be their template."""
MAX_BORDER = 8
"""Tokens by which a border is taken for misplaced. A run that begins further before its turn is a
message that is trained."""


class ObservationTrained(Check):
    """Trained tokens that the model did not sample.

    Where the dump says what was sampled, that decides. Else the template does: what stands between
    a stop id and the end of the next opening ("<|im_start|>assistant" and a line break) was written
    by others, and so was the first token of a row.
    """

    name = "tokens/observation_trained"
    claim = "only what the model sampled is trained"
    cause = "observation_trained"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._trained = 0
        self._tokens = 0
        self._rows = 0
        self._rows_hit = 0

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self._template.add(rows)
        self._trained += int(np.count_nonzero(rows.loss_mask))
        self._rows += len(rows)
        bad = misplaced(rows, self._template).observed
        if not bad.any():
            return
        begin, end = runs_of(bad, rows)
        self._tokens += int((end - begin).sum())
        self._rows_hit += len(np.unique(rows.row_of[begin]))
        for b, e in zip(begin[:64].tolist(), end[:64].tolist(), strict=True):
            row, place = rows.where(b)
            note = "the prompt is trained" if place == 0 else "trained, and not sampled"
            self.show(e - b, Evidence(row=row, begin=place, end=place + e - b, note=note))

    def conclude(self) -> Finding:
        figures = {
            "trained_tokens": self._trained,
            "observed_tokens_trained": self._tokens,
            "rows": self._rows,
            "rows_hit": self._rows_hit,
        }
        if not self._tokens:
            return self.found(
                "consistent", f"0 of {self._trained} trained tokens are others' words", **figures
            )
        return self.found(
            "differs",
            f"{self._tokens} of {self._trained} trained tokens were not sampled, in "
            f"{self._rows_hit} of {self._rows} rows",
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """What was not sampled is not trained."""
        bad = misplaced(rows, self._template).observed
        return rows.with_(loss_mask=rows.loss_mask & ~bad) if bad.any() else rows


@dataclass(frozen=True, kw_only=True)
class Misplaced:
    """Trained tokens that were not sampled."""

    observed: BoolArray
    """[N] others' words."""
    early: BoolArray
    """[N] a few tokens before a turn that is trained: its border is misplaced."""
    after_stop: BoolArray
    """[N] behind the stop id of a turn that is trained, with no other turn after them."""


def misplaced(rows: Rows, template: TemplateIds) -> Misplaced:
    """Trained tokens that were not sampled: by `is_sampled`, or by the template's word.

    By the template, in a run of trained tokens: what stands behind a stop id up to the end of an
    opening, and what stands before the first opening if the run begins with its row. With a
    renderer also runs that begin in a message of others.
    """
    observed = np.zeros(rows.num_tokens, np.bool_)
    early, after = observed.copy(), observed.copy()
    if rows.is_sampled is not None:
        bad = rows.loss_mask & ~rows.is_sampled
        ends = rows.spans.begin
    else:
        bad, ends = _observed_by_template(rows, template)
    if rows.is_sampled is not None:
        after |= _behind_stops(rows, template)
    if not bad.any():
        return Misplaced(observed=observed, early=early, after_stop=after)
    begin, end = runs_of(bad, rows)
    size = end - begin
    is_first = rows.position[begin] == 0
    before = np.where(is_first, begin, begin - 1)
    is_joined = ~is_first & rows.loss_mask[before]
    """Goes on from a turn that is trained."""
    is_followed = np.isin(end, ends)
    is_followed[is_followed] = rows.loss_mask[np.minimum(end, rows.num_tokens - 1)[is_followed]]
    is_early = ~is_first & ~is_joined & is_followed & (size <= MAX_BORDER)
    is_after = np.zeros(len(begin), np.bool_)
    if rows.is_sampled is None:
        is_after = is_joined & ~np.isin(end, ends)
    for where, chosen in ((early, is_early), (after, is_after), (observed, ~is_early & ~is_after)):
        where[indices_of(begin[chosen], end[chosen])] = True
    return Misplaced(observed=observed, early=early, after_stop=after)


def _behind_stops(rows: Rows, template: TemplateIds) -> BoolArray:
    """[N] trained, and behind a stop id among the sampled tokens of one turn."""
    out = np.zeros(rows.num_tokens, np.bool_)
    spans = rows.spans
    if not len(spans):
        return out
    at = np.flatnonzero(template.is_stop(rows) & rows.sampled)
    span = np.searchsorted(spans.begin, at, side="right") - 1
    is_inner = at < spans.end[span] - 1
    span, first = np.unique(span[is_inner], return_index=True)
    out[indices_of(at[is_inner][first] + 1, spans.end[span])] = True
    return out & rows.loss_mask


def _observed_by_template(rows: Rows, template: TemplateIds) -> tuple[BoolArray, Int64Array]:
    """[N] trained, and by the template in a message of others; and where openings end."""
    none = np.zeros(rows.num_tokens, np.bool_)
    spans = rows.spans
    if not len(spans):
        return none, np.empty(0, np.int64)
    stops = np.flatnonzero(template.is_stop(rows))
    ends = template.opening_ends(rows)
    is_exact = template.is_exact and len(stops) > 0 and len(ends) >= MIN_OPENED * len(rows)
    suspect = rows.position[spans.begin] == 0
    inner = stops[rows.loss_mask[stops]]
    span = np.searchsorted(spans.begin, inner, side="right") - 1
    suspect[span[inner < spans.end[span] - 1]] = True
    if not is_exact and not suspect.any():
        return none, ends
    opened = np.full(rows.num_tokens + 1, -1, np.int64)
    opened[ends] = ends
    closed = np.full(rows.num_tokens + 1, -1, np.int64)
    closed[stops + 1] = stops + 1
    closed[rows.offsets[:-1]] = rows.offsets[:-1]
    is_observed = np.maximum.accumulate(closed)[:-1] > np.maximum.accumulate(opened)[:-1]
    bad = rows.loss_mask & is_observed
    if not is_exact:
        in_suspect = np.zeros(rows.num_tokens, np.bool_)
        in_suspect[indices_of(spans.begin[suspect], spans.end[suspect])] = True
        bad &= in_suspect
    return bad, ends


def runs_of(mask: BoolArray, rows: Rows) -> tuple[Int64Array, Int64Array]:
    """Where each run of True begins and ends, inside of one row."""
    index = np.flatnonzero(mask)
    if not len(index):
        return index, index
    is_begin = np.ones(len(index), np.bool_)
    is_begin[1:] = (np.diff(index) > 1) | (rows.position[index[1:]] == 0)
    begin = index[is_begin]
    end = index[np.append(is_begin[1:], True)] + 1
    return begin, end


def indices_of(begin: Int64Array, end: Int64Array) -> Int64Array:
    """All indices of the slices begin..end, in order."""
    size = end - begin
    before = np.cumsum(size) - size
    return np.arange(int(size.sum())) + np.repeat(begin - before, size)
