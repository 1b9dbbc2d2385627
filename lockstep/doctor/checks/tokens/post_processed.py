"""Are replies in the rows as they were sampled, or stripped, cut, completed or rewritten?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.dialogue import dialogues
from lockstep.doctor.checks.tokens.reencoded import BREAK, first_breaks
from lockstep.doctor.checks.tokens.replies import Change, ChangedReply, changed_replies, rewriting
from lockstep.doctor.checks.tokens.spelling import control_spelling, speller_of
from lockstep.errors import RendererError
from lockstep.types import Int32Array, Int64Array, Message

MIN_BROKEN_ROWS = 3
"""Rows with another text than their message and log-probs that disagree, to be a defect. Other
programs parse replies in their own way, and a stripped message proves nothing."""
MIN_BROKEN = 0.5
"""Share of the rows with another text that must disagree."""
MIN_IMPROBABLE = 1.0
"""Nats by which the trainer finds the end of a turn less probable than the sampler did."""
MIN_AT_ENDS = 0.7
"""Share of the rows with a clean start whose first disagreement must be at the end of a turn, where
neither engine's ids nor messages are known. Other causes put it anywhere."""
NUM_END_TOKENS = 2
"""Control tokens that close a turn: of a call, and of the turn."""


class PostProcessed(Check):
    """Compares turns with the engine's replies, or else with the messages."""

    name = "tokens/post_processed"
    claim = "replies are in the rows as they were sampled"
    cause = "post_processed"
    needs = ("tokenizer",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._speller = speller_of(setting)
        self._control = control_spelling(self._speller.tokenizer)
        self._by_ends = False
        self._what = ""

    def look(self, rows: Rows) -> None:
        self.counts["engine_turns"] += sum(len(turns or ()) for turns in rows.engine_ids or ())
        for changed in self._changed(rows):
            self.counts["changed_turns"] += 1
            self._what = self._what or changed.what
            self.show(
                1e6 + changed.end - changed.first,
                rows,
                changed.begin,
                changed.end,
                f"{changed.what} since the engine answered",
                changed.engine_ids.tolist(),
            )
        self._look_at_messages(rows)
        self._look_at_texts(rows)
        if rows.engine_ids is None and rows.messages is None:
            self._look_at_ends(rows)

    def _changed(self, rows: Rows) -> list[ChangedReply]:
        replies = changed_replies(rows, self._speller, self.setting)
        return [reply for reply in replies if reply.change == "post_processed"]

    def _look_at_messages(self, rows: Rows) -> None:
        if self.setting.renderer is None:
            return
        self.counts["dialogues"] += len(dialogues(rows))
        is_big = np.abs(rows.gap) > BREAK  # NaN is not
        seen: set[int] = set()
        for row, begin, end, what in self._rewritten(rows):
            if row in seen:
                continue
            seen.add(row)
            self._what = self._what or what
            is_broken = bool(is_big[begin : int(rows.offsets[row + 1])].any())
            self.counts["other_rows"] += 1
            self.counts["broken_rows"] += is_broken
            note = f"the text of these ids is not their message's: {what}"
            self.show(1.0 + is_broken, rows, begin, end, note)

    def _rewritten(self, rows: Rows) -> Iterator[tuple[int, int, int, str]]:
        """(row, begin, end, in words) of the turns whose text is not their message's."""
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
                    continue  # malformed replies are kept as text in more than one way
                if not found.parse_error:
                    told = rewriting(_words(kept), _words(found))
                else:
                    told = self._unreadable(kept, ids)
                if told is not None:
                    yield dialogue.row, dialogue.offset + begin, dialogue.offset + end, told[1]

    def _unreadable(self, kept: Message, ids: Int32Array) -> tuple[Change, str] | None:
        """How a turn that cannot be parsed any more was changed from its message."""
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
        first, at = self._ends(rows)
        self.counts["clean_starts"] += int((first >= 0).sum())
        self.counts["improbable_ends"] += len(at)
        for i in at.tolist():
            note = (
                "both sides agree up to here, and the trainer finds it improbable that the turn "
                "ends here: something before it was removed"
            )
            self.show(-float(rows.gap[i]), rows, i, i + 1, note)

    def _ends(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        """([R] index of each row's first disagreement after a clean start, -1 without one; the
        indices of those that are an improbable end of a turn)."""
        first = first_breaks(rows, min_tokens=1)
        spans = rows.spans
        if not len(spans):
            return first, first[:0]
        span = np.maximum(np.searchsorted(spans.begin, first, side="right") - 1, 0)
        # After the turn, it is an observation that is trained, and not a reply that was cut.
        is_close = (first >= spans.end[span] - NUM_END_TOKENS) & (first < spans.end[span])
        is_control = ~self._speller.is_text(rows.token_ids[first])
        is_low = rows.gap[first] < -MIN_IMPROBABLE
        return first, first[(first >= 0) & is_close & is_control & is_low]

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
            self.counts["texts"] += 1
            self.counts["other_texts"] += "".join(words.split()) not in "".join(spelt.split())

    def conclude(self) -> Finding:
        c = self.counts
        if c["changed_turns"]:
            return self.differs(
                f"{c['changed_turns']} of {c['engine_turns']} turns are the engine's replies after "
                f"a change ({self._what})"
            )
        if c["broken_rows"] >= max(MIN_BROKEN_ROWS, MIN_BROKEN * c["other_rows"]):
            return self.differs(
                f"the turns of {c['other_rows']} of {c['dialogues']} rows are not what their "
                f"messages say ({self._what}), and in {c['broken_rows']} of them the two sides "
                "disagree from there on"
            )
        if c["improbable_ends"] >= max(MIN_BROKEN_ROWS, MIN_AT_ENDS * c["clean_starts"]):
            self._by_ends = True
            return self.differs(
                f"{c['improbable_ends']} of {c['clean_starts']} rows that begin to disagree do so "
                "at the end of a turn, which the trainer finds improbable there: text before it is "
                "missing"
            )
        if c["other_rows"] or c["other_texts"]:
            return self.information(
                f"{c['other_rows']} of {c['dialogues']} rows and {c['other_texts']} of "
                f"{c['texts']} texts differ from their ids"
                + (f" ({self._what})" if self._what else "")
                + ": the log-probs do not say that the ids were changed"
            )
        if not any(c[name] for name in ("engine_turns", "dialogues", "texts", "clean_starts")):
            return self.not_checkable("messages, texts or engine_ids")
        return self.consistent("every turn has the text that was kept")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first different token of a changed turn on."""
        at = [changed.first for changed in self._changed(rows)]
        if not self.counts["changed_turns"]:
            at += [begin for _, begin, _, _ in self._rewritten(rows)]
        if self._by_ends:
            at += self._ends(rows)[1].tolist()
        return rows.cut_from(at)


def _words(message: Message) -> str:
    """All text of a message."""
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join(part for part in (message.thinking, message.content, *calls) if part)
