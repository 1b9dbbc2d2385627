"""Whether earlier turns of a row are the ids that were sampled, or a rendering of what was read.

A program that keeps messages applies its template to all of them before each turn. The template
writes a header of its own, moves the recipient of a call, drops the reasoning: of the sampled turn
a few per cent of the ids are left at their places, and the log-probs belong to none of the others.
"""

from __future__ import annotations

import numpy as np

from lockstep.checks.base import Check, Setting
from lockstep.checks.findings import Evidence, Finding
from lockstep.checks.rows import Rows
from lockstep.checks.template.dialogue import (
    Dialogue,
    dialogues,
    first_unextended,
    rendered_whole,
)
from lockstep.checks.tokens.reencoded import MIN_BROKEN_ROWS, first_breaks, without_explained
from lockstep.checks.tokens.replies import (
    MIN_FORM_TOKENS,
    ChangedReply,
    changed_replies,
    renderings,
)
from lockstep.checks.tokens.spelling import Speller
from lockstep.errors import RendererError

MIN_HARMED = 0.25
"""Share of the rows with rendered turns whose log-probs must disagree from there on. Where the
template writes what the model would have sampled there is nothing to disagree about."""


class Rerendered(Check):
    """Sampled turns, compared with what the renderer writes for the messages that they became."""

    name = "tokens/rerendered"
    claim = "earlier turns of a row are the ids that were sampled, not a rendering of their message"
    cause = "rerendered"
    needs = ("tokenizer", "renderer")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert setting.tokenizer is not None, "the check's needs"
        self._speller = Speller(setting.tokenizer)
        self._num_engine_turns = self._num_turns = 0
        self._matched = 0.0
        self._num_dialogues = self._num_whole = self._num_harmed = 0

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
        return without_explained(rows, begin)
