"""Is exactly what the model sampled trained, from the first token of each turn on?

# N tokens  S spans (runs of sampled or trained tokens)  R rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.doctor.checks.base import MAX_SHOWN, Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.context import TemplateCheck, TemplateIds, first_of
from lockstep.types import Int32Array, Int64Array

MIN_OPENED = 0.5
"""Openings of the renderer's template per row, for the rows to be of that template."""
MAX_BORDER = 8
"""Tokens by which a border may be misplaced; a run that begins further before its turn is a
message that is trained."""
MIN_ANSWER = 8
"""Tokens that the engine's answer must have to be searched for in the row."""
MAX_ALIKE = 64
"""Tokens of it that are compared where a reply begins."""
MIN_ALIKE = 0.75
"""Share of them that must be the engine's, where a reply is at its place but was changed."""
LOST_GAP = 0.5
"""Mean |d| above which the log-probs of a row with a moved reply are moved too."""


class ObservationTrained(TemplateCheck):
    """Trained tokens that the model did not sample.

    If the dump says what was sampled, that decides. Else the template does: tokens between a stop
    id and the end of the next opening ("<|im_start|>assistant" and a line break) were written by
    others, and so was the first token of a row.
    """

    name = "tokens/observation_trained"
    claim = "only sampled tokens are trained"
    cause = "observation_trained"

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self.template.add(rows)
        begin, end = rows.runs(misplaced(rows, self.template).observed)
        self.count(
            trained_tokens=rows.loss_mask,
            observed_tokens_trained=(end - begin).sum(),
            rows=len(rows),
            rows_hit=len(np.unique(rows.row_of[begin])),
        )

        def note(b: int, _: int) -> str:
            return "trained, but not sampled" if rows.position[b] else "the prompt is trained"

        self.show_runs(rows, begin, end, note)

    def conclude(self) -> Finding:
        c = self.counts
        bad, trained = c["observed_tokens_trained"], c["trained_tokens"]
        if not bad:
            return self.consistent(f"0 of {trained} trained tokens were written by others")
        return self.differs(
            f"{bad} of {trained} trained tokens were not sampled, in {c['rows_hit']} of "
            f"{c['rows']} rows"
        )

    def repair(self, rows: Rows) -> Rows:
        """Tokens that were not sampled are not trained."""
        return rows.untrained(misplaced(rows, self.template).observed)


class Boundary(TemplateCheck):
    """Prompt lengths, the first trained token and the engine's first answer, against each other.

    A border some tokens off leaves log-probs at their own tokens. A prompt's length that is
    negative, beyond the row, or far off says that the row was cut by arithmetic, and that none of
    its columns is where it should be.
    """

    name = "tokens/boundary"
    claim = "the first reply of a row begins where its prompt ends"
    cause = "boundary"

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self.template.add(rows)
        found, has_early = Borders(rows, self.template), np.zeros(len(rows), np.bool_)
        begin, _ = rows.runs(misplaced(rows, self.template).early)
        has_early[rows.row_of[begin]] = True
        has_moved = found.moved_by != 0
        hit = found.is_impossible | found.is_unlike | has_moved | has_early
        self.count(
            rows=len(rows),
            rows_hit=hit,
            impossible_lengths=found.is_impossible,
            other_lengths=found.is_unlike,
            moved_from_engine=has_moved,
            moved_far=np.abs(found.moved_by) > MAX_BORDER,
            early_borders=len(begin),
        )
        for r in np.flatnonzero(hit)[:MAX_SHOWN].tolist():
            first, moved = int(found.first[r]), int(found.moved_by[r])
            note = f"the first reply begins at {first}"
            if rows.prompt_lengths is not None:
                note = f"the dump says {int(rows.prompt_lengths[r])}, {note}"
            if moved:
                note += f", the engine's answer at {first + moved}"
            end = min(first + 1, int(rows.sizes[r]))
            shown = Evidence(row=rows.row_ids[r], begin=max(first - 1, 0), end=end, note=note)
            self.keep(2.0 if found.is_impossible[r] else 1.0, shown)

    def conclude(self) -> Finding:
        c = self.counts
        if not c["rows_hit"]:
            return self.consistent(f"the borders of {c['rows']} rows are where they should be")
        parts = [
            f"{c[name]} {what}"
            for name, what in (
                ("impossible_lengths", "prompt lengths are negative or beyond the row"),
                ("other_lengths", "are not where the first reply begins"),
                ("moved_from_engine", "first replies begin elsewhere than the engine's answer"),
                ("early_borders", "replies are trained from before their first token"),
            )
            if c[name]
        ]
        return self.differs(f"of {c['rows']} rows, " + "; ".join(parts))

    def repair(self, rows: Rows) -> Rows:
        """Tokens before a reply are not trained, and its own first ones count as sampled; rows
        whose columns are of other tokens are left out."""
        early = misplaced(rows, self.template).early
        found = Borders(rows, self.template)
        is_lost = found.is_impossible | (np.abs(found.moved_by) > MAX_BORDER)
        if self.counts["impossible_lengths"] + self.counts["moved_far"]:
            # Some rows are cut beyond doubt, so those that cannot be found are too.
            is_lost |= found.is_nowhere
        mean = rows.row_means(rows.compared, np.abs(rows.gap[rows.compared]))
        is_lost |= (found.moved_by != 0) & (mean > LOST_GAP)
        is_late = (found.moved_by < 0) & ~is_lost
        if not (early.any() or is_lost.any() or is_late.any()):
            return rows
        kept = ~np.repeat(is_lost, rows.sizes)
        end = rows.offsets[:-1] + found.first
        late = rows.within((end + found.moved_by)[is_late], end[is_late])
        changed: dict[str, Any] = {"loss_mask": rows.loss_mask & ~early & kept}
        if rows.is_sampled is not None:
            changed["is_sampled"] = (rows.is_sampled | late) & kept
        if rows.turn is not None:
            of_reply = rows.turn[np.repeat(np.minimum(end, len(kept) - 1), rows.sizes)]
            turn = np.where(late, of_reply, rows.turn)
            changed["turn"] = np.where(kept, turn, -1).astype(np.int32)
        return rows.with_(**changed)


class Borders:
    """Where the first reply of each row begins."""

    def __init__(self, rows: Rows, template: TemplateIds) -> None:
        num, spans = len(rows), rows.spans
        replied, begin = spans.row[spans.is_first], spans.begin[spans.is_first]
        self.first = rows.sizes.copy()
        """[R] position of the first reply; the row's size without one."""
        self.first[replied] = rows.position[begin]
        self.is_impossible = np.zeros(num, np.bool_)
        """[R] True if the prompt's length is negative or beyond the row."""
        self.is_unlike = np.zeros(num, np.bool_)
        """[R] True if it is possible, but not where the reply begins."""
        self.moved_by = np.zeros(num, np.int64)
        """[R] offset from there to the engine's first answer; 0 if it is there, or nowhere."""
        self.is_nowhere = np.zeros(num, np.bool_)
        """[R] True if neither the engine's first answer nor something like it is in the row."""
        has_reply = np.zeros(num, np.bool_)
        has_reply[replied] = True
        if rows.prompt_lengths is not None:
            said = rows.prompt_lengths
            self.is_impossible = (said < 0) | (has_reply & (said > rows.sizes))
            off = said != self.first
            if rows.is_sampled is None:
                # A mask may leave out a reply's first tokens, and a trained prompt is another
                # matter.
                off = (said > self.first) & (said <= self.first + MAX_BORDER)
            self.is_unlike = has_reply & off & ~self.is_impossible
        for r, answers in enumerate(rows.engine_ids or ()):
            if answers and has_reply[r] and len(answers[0]) >= MIN_ANSWER:
                ids = rows.token_ids[int(rows.offsets[r]) : int(rows.offsets[r + 1])]
                moved = moved_to(ids, int(self.first[r]), answers[0])
                self.is_nowhere[r] = moved is None
                self.moved_by[r] = moved or 0
        if rows.is_sampled is None:
            # Trained from the middle of a message of others on.
            observed = misplaced(rows, template).observed[begin]
            self.is_nowhere[replied] |= observed & (rows.position[begin] > 0)


def moved_to(ids: Int32Array, first: int, answer: Int32Array) -> int | None:
    """Offset from `first` to the nearest occurrence of `answer` in `ids`; None if there is none.
    0 if something like it is at `first`: a changed reply is not a moved one."""
    answer = np.asarray(answer)
    head = ids[first : first + min(len(answer), MAX_ALIKE)]
    alike = float((head == answer[: len(head)]).mean())
    if alike == 1.0:
        return 0
    at = first_of(answer.tolist(), ids)
    if not len(at):
        return 0 if alike >= MIN_ALIKE else None
    return int(at[np.argmin(np.abs(at - first))]) - first


@dataclass(frozen=True, kw_only=True)
class Misplaced:
    """Trained tokens that were not sampled."""

    observed: BoolArray
    """[N] True for tokens that others wrote."""
    early: BoolArray
    """[N] True for a few tokens before a trained turn: its border is misplaced."""
    after_stop: BoolArray
    """[N] True for tokens after the stop id of a trained turn that no other turn follows."""


def misplaced(rows: Rows, template: TemplateIds) -> Misplaced:
    """Trained tokens that were not sampled, by `is_sampled` or else by the template.

    By the template, these are the tokens of a trained run from a stop id to the end of the next
    opening, and those before the first opening if the run begins with its row. With a renderer,
    runs that begin in a message of others count too.
    """
    if rows.is_sampled is not None:
        bad, ends = rows.loss_mask & ~rows.is_sampled, rows.spans.begin
        behind = _behind_stops(rows, template)
    else:
        bad, ends = _observed_by_template(rows, template)
        behind = np.zeros(rows.num_tokens, np.bool_)
    if not bad.any():
        return Misplaced(observed=bad, early=bad, after_stop=behind)
    begin, end = rows.runs(bad)
    size = end - begin
    is_first = rows.position[begin] == 0
    before = np.where(is_first, begin, begin - 1)
    is_joined = ~is_first & rows.loss_mask[before]
    """[X] True for runs that directly follow a trained token."""
    is_followed = np.isin(end, ends)
    is_followed[is_followed] = rows.loss_mask[np.minimum(end, rows.num_tokens - 1)[is_followed]]
    is_early = ~is_first & ~is_joined & is_followed & (size <= MAX_BORDER)
    is_after, is_none = np.zeros(len(begin), np.bool_), np.zeros(len(begin), np.bool_)
    if rows.is_sampled is None:
        is_after = is_joined & ~np.isin(end, ends)
        is_after &= ~_opens_message(rows, begin, template)
        # No opening from the row's first token until the run ends: a dump of replies only.
        is_none |= is_first & ~np.isin(end, ends)
    is_observed = ~is_early & ~is_after & ~is_none
    return Misplaced(
        observed=rows.within(begin[is_observed], end[is_observed]),
        early=rows.within(begin[is_early], end[is_early]),
        after_stop=behind | rows.within(begin[is_after], end[is_after]),
    )


def _opens_message(rows: Rows, begin: Int64Array, template: TemplateIds) -> BoolArray:
    """[X] True where a message of the template begins at `begin`, or one id later."""
    out = np.zeros(len(begin), np.bool_)
    for opener in {opening[0] for opening in template.openings}:
        for step in (0, 1):
            at = np.minimum(begin + step, rows.num_tokens - 1)
            out |= (rows.token_ids[at] == opener) & (rows.row_of[at] == rows.row_of[begin])
    return out


def _behind_stops(rows: Rows, template: TemplateIds) -> BoolArray:
    """[N] True for trained tokens after a stop id of the same sampled turn."""
    spans = rows.spans
    at = np.flatnonzero(template.is_stop(rows) & rows.sampled)
    span = np.searchsorted(spans.begin, at, side="right") - 1
    is_inner = at < spans.end[span] - 1
    span, first = np.unique(span[is_inner], return_index=True)
    return rows.within(at[is_inner][first] + 1, spans.end[span]) & rows.loss_mask


def _observed_by_template(rows: Rows, template: TemplateIds) -> tuple[BoolArray, Int64Array]:
    """([N] True for trained tokens in a message of others, by the template; where openings end)."""
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
        bad &= rows.within(spans.begin[suspect], spans.end[suspect])
    return bad, ends
