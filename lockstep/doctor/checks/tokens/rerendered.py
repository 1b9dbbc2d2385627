"""Are earlier turns of a row the ids that were sampled, or a rendering of their messages?

A program that keeps messages applies its template to all of them before each turn. The template
writes its own header, moves the recipient of a call, drops the reasoning: few of the sampled ids
stay at their positions, and the log-probs belong to none of the others.
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.base import Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows
from lockstep.doctor.checks.tokens.reencoded import MIN_BROKEN_ROWS, first_breaks
from lockstep.doctor.checks.tokens.replies import (
    MIN_FORM_TOKENS,
    Dialogue,
    ReplyCheck,
    dialogues,
    is_extended,
    rendered_whole,
    renderings,
)
from lockstep.errors import RendererError
from lockstep.types import Int64Array

MIN_HARMED = 0.25
"""Share of the rows with rendered turns whose log-probs must disagree from there on. They agree
where the template writes what the model would have sampled."""
MAX_ALIKE = 0.5
"""Ratio of the share of other rows that disagree to that."""
IMPROBABLE = -1.0
"""Trainer - rollout below which the sampler did not draw a token there."""
MIN_EARLY = 0.3
"""Share of such tokens in a row's earlier turns, where neither engine's ids nor messages are
known."""
MAX_LAST = 0.35
"""Ratio of their share in the last turns of these rows to that in earlier turns: the last one is as
it was sampled. Other weights make it 1."""
MAX_PROBABLE = 0.15
"""Share of the earlier turns' tokens that may be as much more probable: log-probs at other
positions are wrong in both directions."""


class Rerendered(ReplyCheck):
    """Compares sampled turns with what the renderer writes for the messages that they became."""

    name = "tokens/rerendered"
    claim = "earlier turns of a row are the ids that were sampled, not a rendering of their message"
    cause = change = "rerendered"
    needs = ("tokenizer", "renderer")

    def begin(self) -> None:
        self._matched = 0.0
        self._early_rates = np.zeros(4)
        self._by_early = False

    def look(self, rows: Rows) -> None:
        self.count(dialogues=len(dialogues(rows)))
        self.look_at_replies(rows)
        self._matched += sum(reply.match_rate for reply in self.changed(rows))
        if rows.engine_ids is None and rows.messages is None:
            self._look_at_early(rows)
        found = self._whole(rows)
        for begin, end, is_harmed in found:
            self.count(rerendered_rows=1, harmed_rows=is_harmed)
            note = "the ids that the template writes for the messages, not an extended sampled turn"
            self.show(1.0 + is_harmed, rows, begin, end, note)
        if found:
            # A dialogue of one reply has no earlier turn, and so none that was rendered.
            others = [d.row for d in dialogues(rows) if len(d.replies) < 2]
            is_broken = first_breaks(rows, has_clean_start=False)[others] >= 0
            self.count(other_rows=len(others), other_broken_rows=is_broken)

    def _look_at_early(self, rows: Rows) -> None:
        early, rates = self._early(rows)
        self.count(improbable_rows=len(early))
        self._early_rates += rates
        spans = rows.spans
        note = "the trainer finds these ids improbable, but not those of the row's last turn"
        for s in early:
            self.show(float(spans.size[s]), rows, int(spans.begin[s]), int(spans.end[s]), note)

    def _early(self, rows: Rows) -> tuple[list[int], Float64Array]:
        """(first span of each row whose earlier turns are improbable; improbable tokens and all
        tokens of these rows' earlier turns, and of their last turns)."""
        spans, gap = rows.spans, rows.gap
        if not len(spans) or not len(rows.compared):
            return [], np.zeros(4)
        known = rows.compared[rows.span_of[rows.compared] >= 0]
        span = rows.span_of[known]
        # [R, 2]: earlier turns, last turn
        where = spans.row[span] * 2 + spans.is_last[span]

        def count(chosen: BoolArray) -> Int64Array:
            return np.bincount(where[chosen], minlength=2 * len(rows)).reshape(-1, 2)

        num = count(np.ones(len(known), np.bool_))
        low, high = count(gap[known] < IMPROBABLE), count(gap[known] > -IMPROBABLE)
        is_early = (num[:, 0] >= MIN_FORM_TOKENS) & (low[:, 0] >= MIN_EARLY * num[:, 0])
        is_early &= high[:, 0] <= MAX_PROBABLE * num[:, 0]
        out: list[int] = []
        rates = np.zeros(4)
        for r in np.flatnonzero(is_early).tolist():
            s = int(np.searchsorted(spans.row, r))
            turn = self.renderer.parse(rows.token_ids[int(spans.begin[s]) : int(spans.end[s])])
            if not turn.tool_calls:  # a call that can be parsed was not rendered as content
                out.append(s)
                rates += (low[r, 0], num[r, 0], low[r, 1], num[r, 1])
        return out, rates

    def _whole(self, rows: Rows) -> list[tuple[int, int, bool]]:
        """(begin, end, whether log-probs disagree from there on) of ids that were rendered again
        and are marked as sampled."""
        out: list[tuple[int, int, bool]] = []
        breaks, clean = first_breaks(rows, has_clean_start=False), first_breaks(rows)
        for dialogue in dialogues(rows):
            if len(dialogue.begin) < 2 or len(dialogue.replies) < 2:
                continue
            answered = None if rows.engine_ids is None else rows.engine_ids[dialogue.row]
            last = dialogue.ids[int(dialogue.begin[-1]) : int(dialogue.end[-1])]
            if answered and not np.array_equal(last, answered[-1]):
                continue  # a rendering leaves the last turn as it was sampled
            is_whole_turn = self._is_whole_turn(dialogue)
            if is_whole_turn and dialogue.is_paired and is_extended(dialogue, self.renderer):
                continue
            size = self._rendered(dialogue, is_whole_turn=is_whole_turn)
            if size:
                begin = dialogue.offset + int(dialogue.begin[0])
                known = clean if is_whole_turn else breaks
                out.append((begin, begin + size, int(known[dialogue.row]) >= begin))
        return out

    def _is_whole_turn(self, dialogue: Dialogue) -> bool:
        """True if the first span begins with a whole turn that parses to its message. Masks differ
        in what they count to a turn after its stop id, so this alone proves nothing."""
        first = dialogue.ids[int(dialogue.begin[0]) : int(dialogue.end[0])]
        stops = np.flatnonzero(np.isin(first, list(self.renderer.stop_ids)))
        if len(stops):
            first = first[: int(stops[0]) + 1]
        return self.renderer.parse(first) == dialogue.messages[dialogue.replies[0]]

    def _rendered(self, dialogue: Dialogue, *, is_whole_turn: bool) -> int:
        """Number of ids from the first reply on that the template writes; 0 if it does not."""
        begin = int(dialogue.begin[0])
        expected = rendered_whole(dialogue, self.renderer)
        if expected is not None and np.array_equal(dialogue.ids[: len(expected)], expected):
            return len(expected) - begin
        first = dialogue.messages[dialogue.replies[0]]
        if first.parse_error or is_whole_turn:
            return 0
        try:
            sampled = self.renderer.render_reply(first)
        except RendererError:
            return 0
        for form, _ in renderings(np.asarray(sampled, np.int32), self.renderer):
            is_there = np.array_equal(dialogue.ids[begin : begin + len(form)], form)
            if is_there and len(form) >= MIN_FORM_TOKENS:
                return len(form)
        return 0

    def conclude(self) -> Finding:
        c = self.counts
        if c["changed_turns"]:
            rate = self._matched / c["changed_turns"]
            return self.differs(
                f"{c['changed_turns']} of {c['engine_turns']} turns are renderings of the "
                f"engine's replies: {rate:.1%} of their ids are at their place",
                "shown",
                match_rate=rate,
            )
        told = (
            f"{c['rerendered_rows']} of {c['dialogues']} rows have earlier turns as the template "
            "writes them, not as extended sampled turns"
        )
        is_harmed = c["harmed_rows"] >= max(MIN_BROKEN_ROWS, MIN_HARMED * c["rerendered_rows"])
        # Where rows that cannot have a rendering disagree as often, something else is wrong.
        own = c["other_broken_rows"] * c["rerendered_rows"]
        if is_harmed and own <= MAX_ALIKE * c["harmed_rows"] * c["other_rows"]:
            return self.differs(f"{told}; in {c['harmed_rows']} the two sides disagree there")
        low, num, last_low, last_num = self._early_rates.tolist()
        is_last_own = last_low * num <= MAX_LAST * low * max(last_num, 1.0)
        if c["improbable_rows"] >= MIN_BROKEN_ROWS and is_last_own:
            self._by_early = True
            return self.differs(
                f"in {c['improbable_rows']} rows the trainer finds the ids of earlier turns "
                "improbable, but not those of the last turn: a template wrote the earlier ones",
                "fit",
            )
        if c["rerendered_rows"]:
            return self.information(f"{told}; the log-probs do not show any harm")
        if not c["engine_turns"] and not c["dialogues"]:
            return self.not_checkable("messages or engine_ids")
        return self.consistent("no turn is a rendering of its message")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first different id of the first rendered turn on."""
        at = [reply.first for reply in self.changed(rows)]
        at += [begin for begin, _, is_harmed in self._whole(rows) if is_harmed]
        if self._by_early:
            at += rows.spans.begin[self._early(rows)[0]].tolist()
        return rows.cut_from(at)
