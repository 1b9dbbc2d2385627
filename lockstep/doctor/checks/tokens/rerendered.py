"""Whether earlier turns of a row are the ids that were sampled, or a rendering of what was read.

A program that keeps messages applies its template to all of them before each turn. The template
writes a header of its own, moves the recipient of a call, drops the reasoning: of the sampled turn
a few per cent of the ids are left at their places, and the log-probs belong to none of the others.
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.checks.template.dialogue import (
    Dialogue,
    dialogues,
    first_unextended,
    rendered_whole,
)
from lockstep.doctor.checks.tokens.reencoded import MIN_BROKEN_ROWS, first_breaks, without_explained
from lockstep.doctor.checks.tokens.replies import (
    MIN_FORM_TOKENS,
    ChangedReply,
    changed_replies,
    renderings,
)
from lockstep.doctor.checks.tokens.spelling import speller_of
from lockstep.errors import RendererError

MIN_HARMED = 0.25
"""Share of the rows with rendered turns whose log-probs must disagree from there on. Where the
template writes what the model would have sampled there is nothing to disagree about."""


IMPROBABLE = -1.0
"""Trainer - rollout from which on a token is one that the sampler did not draw there."""
MIN_EARLY = 0.3
"""Share of such tokens in a row's earlier turns. Asked only where neither the engine's ids nor
messages are known."""
MAX_LAST = 0.35
"""Share of such tokens in the last turns of these rows, over that in their earlier turns: the last
one is as it was sampled. Of other weights it is 1."""
MAX_PROBABLE = 0.15
"""Share of the earlier turns' tokens that may be as much more probable: log-probs that stand at
other places are wrong in both directions."""


class Rerendered(Check):
    """Sampled turns, compared with what the renderer writes for the messages that they became."""

    name = "tokens/rerendered"
    claim = "earlier turns of a row are the ids that were sampled, not a rendering of their message"
    cause = "rerendered"
    needs = ("tokenizer", "renderer")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._speller = speller_of(setting)
        self._num_engine_turns = self._num_turns = 0
        self._matched = 0.0
        self._num_dialogues = self._num_whole = self._num_harmed = 0
        self._num_early = 0
        self._early_rates = np.zeros(4)
        self._by_early = False

    def look(self, rows: Rows) -> None:
        self._num_dialogues += len(dialogues(rows))
        if rows.engine_ids is not None:
            self._num_engine_turns += sum(len(turns or ()) for turns in rows.engine_ids)
        for changed in self._changed(rows):
            self._num_turns += 1
            self._matched += changed.match_rate
            row, begin = rows.where(changed.begin)
            self.show(
                2.0 - changed.match_rate,
                Evidence(
                    row=row,
                    begin=begin,
                    end=begin + changed.end - changed.begin,
                    note=f"{changed.what}: {changed.match_rate:.1%} of the sampled ids, which are "
                    "beside, stand at their place",
                    expected_ids=tuple(changed.engine_ids.tolist()),
                ),
            )
        if rows.engine_ids is None and rows.messages is None:
            self._look_at_early(rows)
        for row, begin, end, is_harmed in self._whole(rows):
            self._num_whole += 1
            self._num_harmed += is_harmed
            offset = int(rows.offsets[row])
            self.show(
                1.0 + is_harmed,
                Evidence(
                    row=rows.row_ids[row],
                    begin=begin - offset,
                    end=end - offset,
                    note="these are the ids that the template writes for the messages, and not a "
                    "sampled turn with what follows it",
                ),
            )

    def _look_at_early(self, rows: Rows) -> None:
        early, rates = self._early(rows)
        self._num_early += len(early)
        self._early_rates += rates
        spans = rows.spans
        for s in early:
            row, begin = rows.where(int(spans.begin[s]))
            self.show(
                float(spans.size[s]),
                Evidence(
                    row=row,
                    begin=begin,
                    end=begin + int(spans.size[s]),
                    note="the trainer finds these ids improbable and the row's last turn not: the "
                    "model did not sample this turn as it stands",
                ),
            )

    def _early(self, rows: Rows) -> tuple[list[int], Float64Array]:
        """(the first span of each row whose earlier turns are improbable; improbable tokens and all
        tokens of the earlier turns of these rows, and of their last ones)."""
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        spans, gap = rows.spans, rows.gap
        if not len(spans) or np.isnan(gap).all():
            return [], np.zeros(4)
        number = np.full(rows.num_tokens, -1, np.int64)
        number[rows.sampled] = np.repeat(np.arange(len(spans)), spans.size)
        known = np.flatnonzero((number >= 0) & ~np.isnan(gap))
        is_last = np.append(spans.row[1:] != spans.row[:-1], True)
        # [R, 2] of earlier turns and of the last one
        where = spans.row[number[known]] * 2 + is_last[number[known]]
        size = 2 * len(rows)
        num = np.bincount(where, minlength=size).reshape(-1, 2)
        low = np.bincount(where[gap[known] < IMPROBABLE], minlength=size).reshape(-1, 2)
        high = np.bincount(where[gap[known] > -IMPROBABLE], minlength=size).reshape(-1, 2)
        is_early = (num[:, 0] >= MIN_FORM_TOKENS) & (low[:, 0] >= MIN_EARLY * num[:, 0])
        is_early &= high[:, 0] <= MAX_PROBABLE * num[:, 0]
        out: list[int] = []
        rates = np.zeros(4)
        for r in np.flatnonzero(is_early).tolist():
            s = int(np.searchsorted(spans.row, r))
            turn = renderer.parse(rows.token_ids[int(spans.begin[s]) : int(spans.end[s])])
            if not turn.tool_calls:  # a call that can be read was not written over
                out.append(s)
                rates += (low[r, 0], num[r, 0], low[r, 1], num[r, 1])
        return out, rates

    def _changed(self, rows: Rows) -> list[ChangedReply]:
        """The turns that are renderings. Where a rendering is also the spelling of the tokenizer,
        the row tells which it was: by another turn that is a rendering for sure, or by a last turn
        that has kept a spelling of its own."""
        found = list(changed_replies(rows, self._speller, self.setting))
        sure = {reply.row for reply in found if reply.change == "rerendered"}
        return [
            reply
            for reply in found
            if reply.change == "rerendered"
            or (
                reply.change == "reencoded"
                and not reply.is_last
                and (reply.row in sure or reply.is_last_own)
            )
        ]

    def _whole(self, rows: Rows) -> list[tuple[int, int, int, bool]]:
        """(row, begin, end, whether log-probs disagree from there on) of what was rendered again
        and is said to be sampled."""
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        out: list[tuple[int, int, int, bool]] = []
        breaks = first_breaks(rows, has_clean_start=False)
        clean = first_breaks(rows)
        for dialogue in dialogues(rows):
            if len(dialogue.begin) < 2 or len(dialogue.replies) < 2:
                continue
            is_whole_turn = self._is_whole_turn(dialogue)
            is_extended = dialogue.is_paired and first_unextended(dialogue, renderer) is None
            if is_whole_turn and is_extended:
                continue
            size = self._rendered(dialogue, is_whole_turn=is_whole_turn)
            if not size:
                continue
            begin = dialogue.offset + int(dialogue.begin[0])
            known = clean if is_whole_turn else breaks
            is_harmed = int(known[dialogue.row]) >= begin
            out.append((dialogue.row, begin, begin + size, is_harmed))
        return out

    def _is_whole_turn(self, dialogue: Dialogue) -> bool:
        """Whether the first span begins with a whole turn that reads as its message. Masks differ
        in what they count to a turn behind its stop id, so that this alone proves nothing."""
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        first = dialogue.ids[int(dialogue.begin[0]) : int(dialogue.end[0])]
        stops = np.flatnonzero(np.isin(first, list(renderer.stop_ids)))
        if len(stops):
            first = first[: int(stops[0]) + 1]
        return renderer.parse(first) == dialogue.messages[dialogue.replies[0]]

    def _rendered(self, dialogue: Dialogue, *, is_whole_turn: bool) -> int:
        """How many ids from the first reply on are the template's own; 0 if it is not."""
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        begin = int(dialogue.begin[0])
        expected = rendered_whole(dialogue, renderer)
        if expected is not None and np.array_equal(dialogue.ids[: len(expected)], expected):
            return len(expected) - begin
        first = dialogue.messages[dialogue.replies[0]]
        if first.parse_error or is_whole_turn:
            return 0
        try:
            sampled = renderer.render_reply(first)
        except RendererError:
            return 0
        for form, _ in renderings(np.asarray(sampled, np.int32), renderer):
            if len(form) >= MIN_FORM_TOKENS and np.array_equal(
                dialogue.ids[begin : begin + len(form)], form
            ):
                return len(form)
        return 0

    def conclude(self) -> Finding:
        figures = {
            "engine_turns": self._num_engine_turns,
            "rerendered_turns": self._num_turns,
            "dialogues": self._num_dialogues,
            "rerendered_rows": self._num_whole,
            "harmed_rows": self._num_harmed,
            "improbable_rows": self._num_early,
        }
        if self._num_turns:
            rate = self._matched / self._num_turns
            return self.found(
                "differs",
                f"{self._num_turns} of {self._num_engine_turns} turns are renderings of the "
                f"engine's replies: {rate:.1%} of their ids stand at their place",
                **figures,
                match_rate=rate,
            )
        said = (
            f"{self._num_whole} of {self._num_dialogues} rows have earlier turns as the template "
            "writes them, and not as turns that were extended"
        )
        if self._num_harmed >= max(MIN_BROKEN_ROWS, MIN_HARMED * self._num_whole):
            return self.found(
                "differs",
                f"{said}; in {self._num_harmed} the two sides disagree from there on",
                **figures,
            )
        low, num, last_low, last_num = self._early_rates.tolist()
        is_last_own = last_low * num <= MAX_LAST * low * max(last_num, 1.0)
        if self._num_early >= MIN_BROKEN_ROWS and is_last_own:
            self._by_early = True
            return self.found(
                "differs",
                f"in {self._num_early} rows the earlier turns are ids that the trainer finds "
                "improbable, and the last turn is not: they were written by a template",
                **figures,
            )
        if self._num_whole:
            return self.found(
                "information", f"{said}; the log-probs do not say that it did harm", **figures
            )
        if not self._num_engine_turns and not self._num_dialogues:
            return self.not_checkable(("messages or engine_ids",))
        return self.found("consistent", "no turn is a rendering of its message", **figures)

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first rendered turn's first other id on."""
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for changed in self._changed(rows):
            begin[changed.row] = min(begin[changed.row], changed.first)
        for row, first, _, is_harmed in self._whole(rows):
            if is_harmed:
                begin[row] = min(begin[row], first)
        if self._by_early:
            spans = rows.spans
            for s in self._early(rows)[0]:
                row = int(spans.row[s])
                begin[row] = min(begin[row], int(spans.begin[s]))
        return without_explained(rows, begin)
