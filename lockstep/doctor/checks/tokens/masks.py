"""Whether what is trained is what the model sampled, and begins where its turn begins.

# N tokens  S spans (runs of sampled or trained tokens)  R rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.template_ids import TemplateIds
from lockstep.types import Int32Array, Int64Array

MIN_OPENED = 0.5
"""Openings per row that the renderer's template must have in the rows, to be their template."""
MAX_BORDER = 8
"""Tokens by which a border is taken for misplaced. A run that begins further before its turn is a
message that is trained."""
MIN_ANSWER = 8
"""Tokens of the engine's answer, for it to be looked for in the row."""
MAX_ALIKE = 64
"""Tokens of it that are compared where a reply begins."""
MIN_ALIKE = 0.75
"""Share of them that are the engine's where a reply begins at its place, and was changed."""
LOST_GAP = 0.5
"""Mean |d| of a row whose first reply is moved, from which its log-probs are moved too."""


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


class Boundary(Check):
    """Prompt lengths, the first trained token, and the engine's first answer, against each other.

    A border some tokens off leaves log-probs beside their own tokens; a prompt's length that is
    negative, beyond the row, or far off says that the row was cut by arithmetic, and none of its
    columns is where it should be.
    """

    name = "tokens/boundary"
    claim = "the first reply of a row begins where its prompt ends"
    cause = "boundary"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._rows = 0
        self._rows_hit = 0
        self._impossible = 0
        self._unlike = 0
        self._of_engine = 0
        self._far = 0
        self._early = 0

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self._template.add(rows)
        self._rows += len(rows)
        found = self._borders(rows)
        early = misplaced(rows, self._template).early
        begin, _ = runs_of(early, rows)
        hit = found.is_impossible | found.is_unlike | (found.moved_by != 0)
        hit[rows.row_of[begin]] = True
        self._rows_hit += int(hit.sum())
        self._impossible += int(found.is_impossible.sum())
        self._unlike += int(found.is_unlike.sum())
        self._of_engine += int((found.moved_by != 0).sum())
        self._far += int((np.abs(found.moved_by) > MAX_BORDER).sum())
        self._early += len(begin)
        for r in np.flatnonzero(hit)[:64].tolist():
            first = int(found.first[r])
            said = "" if rows.prompt_lengths is None else (
                f"the dump says {int(rows.prompt_lengths[r])}, "
            )  # fmt: skip
            moved = int(found.moved_by[r])
            engine = f", the engine's answer at {first + moved}" if moved else ""
            size = int(rows.sizes[r])
            self.show(
                2.0 if found.is_impossible[r] else 1.0,
                Evidence(
                    row=rows.row_ids[r],
                    begin=min(max(first - 1, 0), size),
                    end=min(first + 1, size),
                    note=f"{said}the first reply begins at {first}{engine}",
                ),
            )

    def _borders(self, rows: Rows) -> Borders:
        num = len(rows)
        spans = rows.spans
        is_first = np.diff(spans.row, prepend=-1) > 0
        begin = spans.begin[is_first]
        first = rows.sizes.copy()
        first[spans.row[is_first]] = rows.position[begin]
        has_reply = np.zeros(num, np.bool_)
        has_reply[spans.row[is_first]] = True
        is_impossible, is_unlike = np.zeros(num, np.bool_), np.zeros(num, np.bool_)
        if rows.prompt_lengths is not None:
            said = rows.prompt_lengths
            is_impossible = (said < 0) | (has_reply & (said > rows.sizes))
            off = said != first
            if rows.is_sampled is None:
                # A reply's first tokens may well be left out of a mask, and a prompt that is
                # trained is another matter.
                off = (said > first) & (said <= first + MAX_BORDER)
            is_unlike = has_reply & off & ~is_impossible
        moved_by, is_nowhere = np.zeros(num, np.int64), np.zeros(num, np.bool_)
        for r, answers in enumerate(rows.engine_ids or ()):
            if answers and has_reply[r] and len(answers[0]) >= MIN_ANSWER:
                ids = rows.token_ids[int(rows.offsets[r]) : int(rows.offsets[r + 1])]
                moved = moved_to(ids, int(first[r]), answers[0])
                is_nowhere[r] = moved is None
                moved_by[r] = moved or 0
        if rows.is_sampled is None:
            # Trained from the middle of what others wrote on.
            observed = misplaced(rows, self._template).observed[begin]
            is_nowhere[spans.row[is_first]] |= observed & (rows.position[begin] > 0)
        return Borders(
            first=first,
            is_impossible=is_impossible,
            is_unlike=is_unlike,
            moved_by=moved_by,
            is_nowhere=is_nowhere,
        )

    @property
    def _lost_too(self) -> bool:
        """Rows without the engine's answer are of the same defect: others are, beyond doubt."""
        return self._impossible + self._far > 0

    def conclude(self) -> Finding:
        figures = {
            "rows": self._rows,
            "rows_hit": self._rows_hit,
            "impossible_lengths": self._impossible,
            "other_lengths": self._unlike,
            "moved_from_engine": self._of_engine,
            "early_borders": self._early,
        }
        if not self._rows_hit:
            return self.found(
                "consistent", f"the borders of {self._rows} rows are where they are said", **figures
            )
        parts = [
            f"{num} {what}"
            for num, what in (
                (self._impossible, "prompt lengths are negative or beyond the row"),
                (self._unlike, "are not where the first reply begins"),
                (self._of_engine, "first replies begin elsewhere than the engine's answer"),
                (self._early, "replies are trained from before their first token"),
            )
            if num
        ]
        return self.found("differs", f"of {self._rows} rows, " + "; ".join(parts), **figures)

    def repair(self, rows: Rows) -> Rows:
        """Tokens before a reply are not trained, and its own first ones were sampled; rows whose
        columns are of nothing that stands there are left out."""
        early = misplaced(rows, self._template).early
        found = self._borders(rows)
        is_lost = found.is_impossible | (np.abs(found.moved_by) > MAX_BORDER)
        if self._lost_too:
            is_lost |= found.is_nowhere
        gap = np.abs(rows.gap)
        compared = np.flatnonzero(~np.isnan(gap))
        row = rows.row_of[compared]
        mean = np.bincount(row, gap[compared], minlength=len(rows)) / np.maximum(
            np.bincount(row, minlength=len(rows)), 1
        )
        is_lost |= (found.moved_by != 0) & (mean > LOST_GAP)
        is_late = (found.moved_by < 0) & ~is_lost
        if not early.any() and not is_lost.any() and not is_late.any():
            return rows
        kept = ~np.repeat(is_lost, rows.sizes)
        end = rows.offsets[:-1] + found.first
        late = np.zeros(rows.num_tokens, np.bool_)
        late[indices_of((end + found.moved_by)[is_late], end[is_late])] = True
        changed: dict[str, Any] = {"loss_mask": rows.loss_mask & ~early & kept}
        if rows.is_sampled is not None:
            changed["is_sampled"] = (rows.is_sampled | late) & kept
        if rows.turn is not None:
            turn = np.where(late, rows.turn[np.repeat(np.minimum(end, len(kept) - 1), rows.sizes)],
                            rows.turn)  # fmt: skip
            changed["turn"] = np.where(kept, turn, -1).astype(np.int32)
        return rows.with_(**changed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Borders:
    """Of each row. [R] each."""

    first: Int64Array
    """Place of the first reply; the row's size without one."""
    is_impossible: BoolArray
    """The prompt's length is negative, or beyond the row."""
    is_unlike: BoolArray
    """It is possible, and not where the reply begins."""
    moved_by: Int64Array
    """Places from there to where the engine's first answer stands; 0 if it is there, or nowhere."""
    is_nowhere: BoolArray
    """The engine's first answer is not in the row, and nothing like it where it should begin."""


def moved_to(ids: Int32Array, first: int, answer: Int32Array) -> int | None:
    """Places from `first` to where `answer` stands in `ids`, the nearest such; None if nowhere, and
    0 if something like it stands there: it was changed, which is not about borders."""
    answer = np.asarray(answer)
    head = ids[first : first + min(len(answer), MAX_ALIKE)]
    alike = float((head == answer[: len(head)]).mean())
    if alike == 1.0:
        return 0
    at = np.flatnonzero(ids[: max(len(ids) - len(answer) + 1, 0)] == answer[0])
    for step in range(1, len(answer)):
        at = at[ids[at + step] == answer[step]]
        if not len(at):
            return 0 if alike >= MIN_ALIKE else None
    return int(at[np.argmin(np.abs(at - first))]) - first if len(at) else None


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
    is_after, is_none = np.zeros(len(begin), np.bool_), np.zeros(len(begin), np.bool_)
    if rows.is_sampled is None:
        is_after = is_joined & ~np.isin(end, ends)
        is_after &= ~_opens_message(rows, begin, template)
        # No opening until the run ends, from the row's first token on: a dump of replies alone.
        is_none |= is_first & ~np.isin(end, ends)
    for where, chosen in (
        (early, is_early),
        (after, is_after),
        (observed, ~is_early & ~is_after & ~is_none),
    ):
        where[indices_of(begin[chosen], end[chosen])] = True
    return Misplaced(observed=observed, early=early, after_stop=after)


def _opens_message(rows: Rows, begin: Int64Array, template: TemplateIds) -> BoolArray:
    """Whether what stands behind a stop id begins a message of the template: at once, or behind
    one id between."""
    out = np.zeros(len(begin), np.bool_)
    for opener in {opening[0] for opening in template.openings}:
        for step in (0, 1):
            at = np.minimum(begin + step, rows.num_tokens - 1)
            out |= (rows.token_ids[at] == opener) & (rows.row_of[at] == rows.row_of[begin])
    return out


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
