"""Is exactly what the model sampled trained, from the first token of each turn to its stop id?

# N tokens  S spans (runs of sampled or trained tokens)  R rows
"""

from __future__ import annotations

from collections import Counter
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
MIN_LATE = 0.25
"""Share of the rows whose first reply must begin at one distance after the opening, to be late."""
MIN_LATE_TEXTS = 4
"""Texts that stand there: a program that writes the first words of replies has one or two. Two are
enough where later replies begin at their opening: such a program writes their words too."""
MAX_EARLY = 16
"""Tokens before the end of an opening at which a run may begin and still be of its reply."""
MIN_ANSWER = 8
"""Tokens that the engine's answer must have to be searched for in the row."""
MAX_ALIKE = 64
"""Tokens of it that are compared where a reply begins."""
MIN_ALIKE = 0.75
"""Share of them that must be the engine's, where a reply is at its place but was changed."""
LOST_GAP = 0.5
"""Mean |d| above which the log-probs of a row with a moved reply are moved too."""
MIN_STOPPED = 0.5
"""Share of the turns that must end with a stop id, where stop ids are learnt, before the others
count."""
MIN_UNFINISHED = 3
"""Turns without an end that are more than an engine's failure."""
MIN_UNFINISHED_SHARE = 0.02
"""The same as a share of the turns: aborted requests leave as many."""
MIN_AT_CEILING = 2
"""Turns that must be cut at the same count before it is a limit: one turn is always the longest."""
MAX_KEPT = 4096
"""Turns without an end whose lengths are kept. The share of them that a limit explains is taken for
the share of all."""


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
            rows_that_tell_turns=0 if rows.is_sampled is None else len(rows),
            observed_tokens_trained=(end - begin).sum(),
            rows=len(rows),
            rows_hit=len(np.unique(rows.row_of[begin])),
        )

        def note(b: int, _: int) -> str:
            return "trained, but not sampled" if rows.position[b] else "the prompt is trained"

        self.show_runs(rows, begin, end, note)

    def conclude(self) -> Finding:
        c = self.counts
        bad, trained, told = (
            c[name]
            for name in ("observed_tokens_trained", "trained_tokens", "rows_that_tell_turns")
        )
        if not bad:
            return self.consistent(f"0 of {trained} trained tokens were written by others")
        return self.differs(
            f"{bad} of {trained} trained tokens were not sampled, in {c['rows_hit']} of "
            f"{c['rows']} rows",
            "shown" if told else "repair" if self.template.is_exact else "fit",
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

    def begin(self) -> None:
        self._late: dict[int, Counter[tuple[int, ...]]] = {}
        """Tokens between the opening and the first reply, by their number."""

    def look(self, rows: Rows) -> None:
        if rows.is_sampled is None:
            self.template.add(rows)
        if self.template.is_exact:
            self._look_behind_openings(rows)
        found = Borders(rows, self.template)
        begin, _ = rows.runs(misplaced(rows, self.template).early)
        has_moved = found.moved_by != 0
        hit = found.is_impossible | found.is_unlike | has_moved | (rows.row_sums(begin) > 0)
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

    def _look_behind_openings(self, rows: Rows) -> None:
        """Counts the texts between the opening and the first reply, without a stop id."""
        spans, ends = rows.spans, self.template.opening_ends(rows)
        first = spans.begin[spans.is_first]
        if not len(ends) or not len(first):
            return
        self.count(later_at_opening=np.isin(spans.begin[~spans.is_first], ends))
        begin = ends[np.maximum(np.searchsorted(ends, first, side="right") - 1, 0)]
        size = first - begin
        is_near = (begin <= first) & (rows.row_of[begin - 1] == rows.row_of[first])
        is_near &= size <= MAX_BORDER
        for b, e in zip(begin[is_near].tolist(), first[is_near].tolist(), strict=True):
            text = tuple(rows.token_ids[b:e].tolist())
            if self.template.stop_ids.isdisjoint(text):
                texts = self._late.setdefault(e - b, Counter())
                if len(texts) < MAX_KEPT or text in texts:
                    texts[text] += 1
                if e > b:
                    note = f"the opening of the reply ends {e - b} tokens before"
                    self.show(0.5, rows, e, e + 1, note)

    @property
    def _late_by(self) -> int:
        """Tokens by which first replies begin too late, by the template; 0 if they do not."""
        late = {size: texts for size, texts in self._late.items() if size}
        if not late:
            return 0
        size = max(late, key=lambda k: late[k].total())
        least = max(MIN_UNFINISHED, MIN_LATE * self.counts["rows"])
        least_texts = 2 if self.counts["later_at_opening"] >= MIN_UNFINISHED else MIN_LATE_TEXTS
        is_late = late[size].total() >= least and len(late[size]) >= least_texts
        return size if is_late else 0

    def conclude(self) -> Finding:
        c = self.counts
        if not c["rows_hit"] and (late := self._late_by):
            return self.differs(
                f"{self._late[late].total()} of {c['rows']} first replies begin {late} tokens "
                f"after the opening that the template writes, with {len(self._late[late])} texts "
                "between the two",
                "fit",
            )
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
        is_shown = c["impossible_lengths"] or c["other_lengths"] or c["moved_from_engine"]
        told = f"of {c['rows']} rows, {'; '.join(parts)}"
        return self.differs(told, "shown" if is_shown else "fit")

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
        has_reply = rows.row_sums(begin) > 0
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
                moved = moved_to(rows.token_ids[rows.slices[r]], int(self.first[r]), answers[0])
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


class MissingFinal(TemplateCheck):
    """Turns without their stop id that no limit of length explains.

    Replies that a limit cuts off end at a common count: tokens of the turn, of the row, of the
    response, or sampled in the row so far. Replies that lost tokens after sampling end anywhere.
    The engine's answers are the proof, where the dump has them.
    """

    name = "tokens/missing_final"
    claim = "each turn ends with its stop id, or at a limit of length"
    cause = "missing_final"

    def begin(self) -> None:
        self._kept: list[tuple[int, ...]] = []
        self._largest = np.zeros(4, np.int64)

    def look(self, rows: Rows) -> None:
        self.template.add(rows)
        spans = rows.spans
        if not len(spans):
            return
        is_cut, is_answered = self._compare_with_engine(rows)
        counts = lengths_so_far(rows)
        self.count(turns=len(spans))
        self._largest = np.maximum(self._largest, counts.max(axis=0))
        stops = self.template.stop_ids
        if not stops:
            return
        follows = np.zeros(len(spans), np.bool_)  # the row's next turn begins where this one ends
        follows[:-1] = (spans.begin[1:] == spans.end[:-1]) & ~spans.is_last[:-1]
        # `AfterStop` looks at turns that continue behind theirs.
        has_stop = rows.num_in(self.template.is_stop(rows), spans.begin, spans.end) > 0
        # A turn that other weights continued is not open, nor one that the engine ended so.
        is_open = ~has_stop & ~follows & ~is_answered
        self.count(turns_without_stop=is_open)
        index = np.flatnonzero(is_open & ~is_cut)
        self._kept += map(tuple, counts[index[: MAX_KEPT - len(self._kept)]].tolist())
        for s in index[:MAX_SHOWN].tolist():
            end = int(spans.end[s])
            id_, size = int(rows.token_ids[end - 1]), int(spans.size[s])
            note = f"the turn ends with id {id_} after {size} tokens"
            weight = 1.0 - float((counts[s] == self._largest).any())
            self.show(weight, rows, end - 1, end, note, sorted(stops))

    def _compare_with_engine(self, rows: Rows) -> tuple[BoolArray, BoolArray]:
        """([S] turns that are a strict prefix of the engine's answer, [S] turns that are all of
        it)."""
        spans = rows.spans
        is_cut, is_answered = np.zeros(len(spans), np.bool_), np.zeros(len(spans), np.bool_)
        for turns, answers in zip(spans.of_rows(len(rows)), rows.engine_ids or (), strict=False):
            for s, answer in zip(turns, answers or (), strict=False):
                begin, size = int(spans.begin[s]), int(spans.size[s])
                found = rows.token_ids[begin : begin + size]
                self.count(turns_of_engine=1)
                if size >= len(answer):
                    is_answered[s] = np.array_equal(found, answer)
                elif np.array_equal(found, answer[:size]):
                    is_cut[s] = True
                    num_lost = len(answer) - size
                    self.count(turns_cut_short=1, tokens_cut_off=num_lost)
                    note = f"the engine answered {len(answer)} tokens, the row has {size}"
                    end, lost = begin + size, np.asarray(answer[size : size + 8]).tolist()
                    self.show(2.0 + num_lost, rows, end - 1, end, note, lost)
        return is_cut, is_answered

    def conclude(self) -> Finding:
        kept = np.array(self._kept, np.int64).reshape(-1, 4)
        is_largest = kept == self._largest
        at_limit = is_largest[:, is_largest.sum(axis=0) >= MIN_AT_CEILING].any(axis=1)
        unexplained = float((~at_limit).mean()) if len(kept) else 0.0
        c = self.counts
        num_open = c["turns_without_stop"]
        unfinished = round(unexplained * (num_open - c["turns_cut_short"]))
        if c["turns_cut_short"]:
            return self.differs(
                f"{c['turns_cut_short']} of {c['turns_of_engine']} turns lack the last tokens that "
                f"the engine answered, {c['tokens_cut_off']} tokens in all",
                "shown",
                unfinished_turns=unfinished,
            )
        template = self.template
        if not template.stop_ids:
            return self.not_checkable("stop_ids")
        stopped = c["turns"] - num_open
        if unfinished < max(MIN_UNFINISHED, MIN_UNFINISHED_SHARE * c["turns"]):
            told = f"{stopped} of {c['turns']} turns end with a stop id, the others at a limit"
            return self.consistent(told, unfinished_turns=unfinished)
        is_proof = template.is_sure and (
            bool(self.setting.stop_ids) or stopped >= MIN_STOPPED * c["turns"]
        )
        return self.found(
            "differs" if is_proof else "information",
            f"{unfinished} of {c['turns']} turns end with no stop id and at no limit of length",
            "fit",
            unfinished_turns=unfinished,
        )


class AfterStop(TemplateCheck):
    """Sampled or trained tokens after a stop id of the same turn.

    Where only the loss mask is known, trained tool replies join two turns into one run. These are
    left to `observation_trained`.
    """

    name = "tokens/after_stop"
    claim = "nothing is trained after the stop id of a turn"
    cause = "after_stop"

    def look(self, rows: Rows) -> None:
        self.template.add(rows)
        behind = misplaced(rows, self.template).after_stop
        begin, end = rows.runs(behind)
        self.count(
            turns=len(rows.spans),
            tokens_after_stop=behind,
            turns_with_tokens_after_stop=len(begin),
            rows_that_tell_turns=0 if rows.is_sampled is None else len(rows),
        )

        def note(b: int, e: int) -> str:
            return f"{e - b} tokens after stop id {int(rows.token_ids[b - 1])}"

        self.show_runs(rows, begin, end, note)

    def conclude(self) -> Finding:
        template, c = self.template, self.counts
        if not template.stop_ids:
            return self.not_checkable("stop_ids")
        if not c["tokens_after_stop"]:
            return self.consistent(f"0 of {c['turns']} turns continue after a stop id")
        is_told = bool(template.openings) or c["rows_that_tell_turns"] > 0
        return self.found(
            "differs" if template.is_sure and is_told else "information",
            f"{c['turns_with_tokens_after_stop']} of {c['turns']} turns continue after a stop id, "
            f"with {c['tokens_after_stop']} trained tokens",
            "shown" if c["rows_that_tell_turns"] or template.is_exact else "fit",
        )

    def repair(self, rows: Rows) -> Rows:
        """Tokens after a stop id are not trained."""
        return rows.untrained(misplaced(rows, self.template).after_stop)


def lengths_so_far(rows: Rows) -> Int64Array:
    """[S, 4] at the end of each turn: tokens of the turn, of the row, of the response (from the
    first sampled token on), and sampled in the row."""
    spans = rows.spans
    of_row = spans.end - rows.offsets[spans.row]
    first = np.maximum.accumulate(np.where(spans.is_first, np.arange(len(spans)), 0))
    total = np.cumsum(spans.size)
    sampled = total - (total - spans.size)[first]
    return np.stack([spans.size, of_row, spans.end - spans.begin[first], sampled], axis=1)


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
    is_after = is_none = np.zeros(len(begin), np.bool_)
    if rows.is_sampled is None:
        is_unopened = ~np.isin(end, ends)
        is_after = is_joined & is_unopened & ~_opens_message(rows, begin, template)
        # No opening from the row's first token until the run ends: a dump of replies only.
        is_none = is_first & is_unopened
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
    # Rows whose replies follow no opening are not of this template, or lost it.
    later = spans.begin[rows.position[spans.begin] > 0]
    around = np.searchsorted(ends, later + MAX_EARLY, side="right")
    is_opened = around > np.searchsorted(ends, later - MAX_BORDER)
    is_exact &= bool(is_opened.sum() >= MIN_OPENED * len(later))
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
