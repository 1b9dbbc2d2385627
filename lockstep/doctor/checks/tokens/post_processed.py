"""Whether replies are in the rows as they were sampled, or stripped, cut, completed, rewritten."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.template.dialogue import dialogues
from lockstep.doctor.checks.tokens.reencoded import BREAK, first_breaks, without_explained
from lockstep.doctor.checks.tokens.replies import Change, changed_replies, rewriting
from lockstep.doctor.checks.tokens.spelling import control_spelling, speller_of
from lockstep.errors import RendererError
from lockstep.types import Int32Array, Int64Array, Message

MIN_BROKEN_ROWS = 3
"""Rows whose text is not their message's and whose log-probs disagree, before that is a defect.
Other programs read replies in their own way, and a message that was stripped proves nothing."""
MIN_BROKEN = 0.5
"""Share of the rows with another text that must disagree."""


MIN_IMPROBABLE = 1.0
"""Nats by which the trainer finds the end of a turn less probable than the sampler said."""
MIN_AT_ENDS = 0.7
"""Share of the rows with a clean start whose first disagreement must be at the end of a turn, where
neither the engine's ids nor messages are known: of other causes it is anywhere."""
NUM_END_TOKENS = 2
"""Control tokens that close a turn: of a call, and of the turn."""


class PostProcessed(Check):
    """The engine's replies beside the row's turns; without them, the messages beside the turns."""

    name = "tokens/post_processed"
    claim = "replies stand in the rows as they were sampled"
    cause = "post_processed"
    needs = ("tokenizer",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert setting.tokenizer is not None, "the check's needs"
        self._speller = speller_of(setting)
        self._control = control_spelling(setting.tokenizer)
        self._num_engine_turns = self._num_turns = 0
        self._num_dialogues = self._num_other = self._num_broken = 0
        self._num_texts = self._num_other_texts = 0
        self._num_ends = self._num_clean = 0
        self._by_ends = False
        self._what = ""

    def look(self, rows: Rows) -> None:
        if rows.engine_ids is not None:
            self._num_engine_turns += sum(len(turns or ()) for turns in rows.engine_ids)
        for changed in changed_replies(rows, self._speller, self.setting):
            if changed.change != "post_processed":
                continue
            self._num_turns += 1
            self._what = self._what or changed.what
            row, begin = rows.where(changed.begin)
            self.show(
                1e6 + changed.end - changed.first,
                Evidence(
                    row=row,
                    begin=begin,
                    end=begin + changed.end - changed.begin,
                    note=f"{changed.what}; the engine's ids are beside",
                    expected_ids=tuple(changed.engine_ids.tolist()),
                ),
            )
        self._look_at_messages(rows)
        self._look_at_texts(rows)
        if rows.engine_ids is None and rows.messages is None:
            self._look_at_ends(rows)

    def _look_at_messages(self, rows: Rows) -> None:
        if self.setting.renderer is None:
            return
        self._num_dialogues += len(dialogues(rows))
        is_big = np.abs(rows.gap) > BREAK  # NaN is not
        seen: set[int] = set()
        for row, begin, end, what in self._rewritten(rows):
            if row in seen:
                continue
            seen.add(row)
            self._what = self._what or what
            is_broken = bool(is_big[begin : int(rows.offsets[row + 1])].any())
            self._num_other += 1
            self._num_broken += is_broken
            offset = int(rows.offsets[row])
            self.show(
                2.0 if is_broken else 1.0,
                Evidence(
                    row=rows.row_ids[row],
                    begin=begin - offset,
                    end=end - offset,
                    note=f"the row's text is not its message's: {what}",
                ),
            )

    def _rewritten(self, rows: Rows) -> Iterator[tuple[int, int, int, str]]:
        """(row, begin, end, in words) of the turns that read otherwise than their message says."""
        renderer = self.setting.renderer
        if renderer is None:
            return
        for dialogue in dialogues(rows):
            if not dialogue.is_paired:
                continue
            for turn, at in enumerate(dialogue.replies):
                begin, end = int(dialogue.begin[turn]), int(dialogue.end[turn])
                ids = dialogue.ids[begin:end]
                found, kept = renderer.parse(ids), dialogue.messages[at]
                if kept.parse_error or found == kept:
                    continue  # what is malformed is kept as text in more than one way
                if not found.parse_error:
                    told = rewriting(_words(kept), _words(found))
                else:
                    told = self._unreadable(kept, ids)
                if told is not None:
                    yield dialogue.row, dialogue.offset + begin, dialogue.offset + end, told[1]

    def _unreadable(self, kept: Message, ids: Int32Array) -> tuple[Change, str] | None:
        """How a turn that cannot be read any more was changed from what its message says."""
        renderer = self.setting.renderer
        assert renderer is not None, "asked where there is one"
        try:
            was = renderer.render_reply(kept)
        except RendererError:
            return None
        decode = renderer.tokenizer.decode
        stops = set(renderer.stop_ids)
        return rewriting(
            decode([i for i in was if i not in stops]),
            decode([i for i in ids.tolist() if i not in stops]),
        )

    def _look_at_ends(self, rows: Rows) -> None:
        first, is_end = self._ends(rows)
        self._num_clean += int((first >= 0).sum())
        self._num_ends += int(is_end.sum())
        for r in np.flatnonzero(is_end).tolist():
            at = int(first[r])
            row, place = rows.where(at)
            self.show(
                -float(rows.gap[at]),
                Evidence(
                    row=row,
                    begin=place,
                    end=place + 1,
                    note="both sides agree up to here; to end the turn here is what the trainer "
                    "finds improbable: something stood before it",
                ),
            )

    def _ends(self, rows: Rows) -> tuple[Int64Array, BoolArray]:
        """([R] index of each row's first disagreement after a clean start, -1 without one; [R]
        whether that is an improbable end of a turn)."""
        first = first_breaks(rows, min_tokens=1)
        spans = rows.spans
        if not len(spans):
            return first, np.zeros(len(rows), np.bool_)
        span = np.maximum(np.searchsorted(spans.begin, first, side="right") - 1, 0)
        # Behind the end it is another's words that are trained, and not a reply that was cut.
        is_close = (first >= spans.end[span] - NUM_END_TOKENS) & (first < spans.end[span])
        is_control = ~self._speller.is_text(rows.token_ids[first])
        is_low = rows.gap[first] < -MIN_IMPROBABLE
        return first, (first >= 0) & is_close & is_control & is_low

    def _look_at_texts(self, rows: Rows) -> None:
        if rows.texts is None:
            return
        is_text = self._speller.is_text(rows.token_ids)
        for (_, tokens), text in zip(rows.rows(), rows.texts, strict=True):
            if not text:
                continue
            ids = rows.token_ids[tokens][is_text[tokens]]
            spelt = self._speller.tokenizer.decode(ids.tolist())
            words = self._control.sub("", text)
            self._num_texts += 1
            self._num_other_texts += "".join(words.split()) not in "".join(spelt.split())

    def conclude(self) -> Finding:
        figures = {
            "engine_turns": self._num_engine_turns,
            "changed_turns": self._num_turns,
            "dialogues": self._num_dialogues,
            "other_rows": self._num_other,
            "broken_rows": self._num_broken,
            "texts": self._num_texts,
            "other_texts": self._num_other_texts,
            "improbable_ends": self._num_ends,
        }
        if self._num_turns:
            return self.found(
                "differs",
                f"{self._num_turns} of {self._num_engine_turns} turns are the engine's replies "
                f"after a change ({self._what})",
                **figures,
            )
        if self._num_broken >= max(MIN_BROKEN_ROWS, MIN_BROKEN * self._num_other):
            return self.found(
                "differs",
                f"the turns of {self._num_other} of {self._num_dialogues} rows are not what their "
                f"messages say ({self._what}), and in {self._num_broken} of them the two sides "
                "disagree from there on",
                **figures,
            )
        if self._num_ends >= max(MIN_BROKEN_ROWS, MIN_AT_ENDS * self._num_clean):
            self._by_ends = True
            return self.found(
                "differs",
                f"{self._num_ends} of {self._num_clean} rows that begin to disagree do so at the "
                "end of a turn, which the trainer finds improbable there: text before it is gone",
                **figures,
            )
        if self._num_other or self._num_other_texts:
            return self.found(
                "information",
                f"{self._num_other} of {self._num_dialogues} rows and {self._num_other_texts} of "
                f"{self._num_texts} texts read otherwise than their ids"
                + (f" ({self._what})" if self._what else "")
                + ": the log-probs do not say that the ids were changed",
                **figures,
            )
        if not (
            self._num_engine_turns or self._num_dialogues or self._num_texts or self._num_clean
        ):
            return self.not_checkable(("messages, texts or engine_ids",))
        return self.found("consistent", "every turn reads as it was kept", **figures)

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first other token of a changed turn on."""
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for changed in changed_replies(rows, self._speller, self.setting):
            if changed.change == "post_processed":
                begin[changed.row] = min(begin[changed.row], changed.first)
        if not self._num_turns:
            for row, first, _, _ in self._rewritten(rows):
                begin[row] = min(begin[row], first)
        if self._by_ends:
            first, is_end = self._ends(rows)
            begin[is_end] = np.minimum(begin[is_end], first[is_end])
        return without_explained(rows, begin)


def _words(message: Message) -> str:
    """All that a message says."""
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join(part for part in (message.thinking, message.content, *calls) if part)
