"""Are replies in the rows as they were sampled, or stripped, cut, completed or rewritten?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.checks.base import Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.reencoded import BREAK, first_breaks
from lockstep.doctor.checks.tokens.replies import ReplyCheck, dialogues, rewriting
from lockstep.errors import RendererError
from lockstep.types import Int32Array, Int64Array, Message

MIN_BROKEN_ROWS = 3
"""Rows with another text than their message and log-probs that disagree, to be a defect. Other
programs parse replies in their own way, and a stripped message proves nothing."""
MIN_BROKEN = 0.5
"""Share of the rows with another text that must disagree."""
MAX_ALIKE = 0.5
"""Ratio to the share of other rows that disagree."""
MIN_IMPROBABLE = 1.0
"""Nats by which the trainer finds the end of a turn less probable than the sampler did."""
MIN_AT_ENDS = 0.7
"""Share of the rows with a clean start whose first disagreement must be at the end of a turn, where
neither engine's ids nor messages are known. Other causes put it anywhere."""
MAX_INSERTED = 16
"""Untrained tokens of text before the end of a turn that may have been added to it."""
NUM_END_TOKENS = 2
"""Control tokens that close a turn: of a call, and of the turn."""


class PostProcessed(ReplyCheck):
    """Compares turns with the engine's replies, or else with the messages."""

    name = "tokens/post_processed"
    claim = "replies are in the rows as they were sampled"
    cause = change = "post_processed"
    needs = ("tokenizer",)

    _by_ends = False
    _what = ""

    def look(self, rows: Rows) -> None:
        self.look_at_replies(rows)
        for reply in self.changed(rows):
            self._what = self._what or reply.what
        if self.setting.renderer is not None:
            self.count(dialogues=len(dialogues(rows)))
        begin, end = self._inserted(rows)
        self.count(inserted=len(begin))
        self.show_runs(rows, begin, end, lambda b, e: "added before the end of a sampled turn")
        self._look_at_messages(rows)
        if rows.engine_ids is None and rows.messages is None:
            self._look_at_ends(rows)

    def _inserted(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        """(begin, end) of text that is not trained, inside a trained turn and before its end: the
        model did not write it, and no template writes text alone."""
        begin, end = rows.runs(~rows.loss_mask)
        is_inner = (begin > rows.offsets[rows.row_of[begin]]) & (end - begin <= MAX_INSERTED)
        is_inner &= end < rows.offsets[rows.row_of[begin] + 1]
        begin, end = begin[is_inner], end[is_inner]
        is_text = self.speller.is_text(rows.token_ids)
        before, stops = rows.token_ids[begin - 1], self.setting.stop_ids
        is_open = ~np.isin(before, list(stops)) if stops else is_text[begin - 1]
        is_inner = is_open & ~is_text[end] & (rows.num_in(is_text, begin, end) == end - begin)
        # Where the two sides disagree before it, the turn is another one, and not only longer.
        first = first_breaks(rows, has_clean_start=False, min_tokens=1)[rows.row_of[begin]]
        is_inner &= (first < 0) | (first >= begin)
        return begin[is_inner], end[is_inner]

    def _look_at_messages(self, rows: Rows) -> None:
        is_big = np.abs(rows.gap) > BREAK  # NaN is not
        if rows.rollout_logprobs is not None:  # a filler is no disagreement about the ids
            is_big &= rows.rollout_logprobs != 0.0
        seen: set[int] = set()
        for row, begin, end, what in self._rewritten(rows):
            if row in seen:
                continue
            seen.add(row)
            self._what = self._what or what
            is_broken = bool(is_big[begin : int(rows.offsets[row + 1])].any())
            self.count(other_rows=1, broken_rows=is_broken)
            note = f"the text of these ids is not their message's: {what}"
            self.show(1.0 + is_broken, rows, begin, end, note)
        if seen:
            others = [d.row for d in dialogues(rows) if d.row not in seen]
            is_hit = rows.row_sums(np.flatnonzero(is_big)) > 0
            self.count(same_rows=len(others), same_broken_rows=is_hit[others])

    def _rewritten(self, rows: Rows) -> Iterator[tuple[int, int, int, str]]:
        """(row, begin, end, in words) of the turns whose text is not their message's."""
        if self.setting.renderer is None:
            return
        for dialogue in dialogues(rows):
            for turn, at in enumerate(dialogue.replies if dialogue.is_paired else ()):
                begin, end = int(dialogue.begin[turn]), int(dialogue.end[turn])
                what = self._changed_from(dialogue.messages[at], dialogue.ids[begin:end])
                if what is not None:
                    yield dialogue.row, dialogue.offset + begin, dialogue.offset + end, what

    def _changed_from(self, kept: Message, ids: Int32Array) -> str | None:
        """How a turn was changed from its message; None if it was not, or beyond recognition."""
        found = self.renderer.parse(ids)
        if kept.parse_error or found == kept:
            return None  # malformed replies are kept as text in more than one way
        if not found.parse_error:
            was, now = _words(kept), _words(found)
        else:
            try:
                written = self.renderer.render_reply(kept)
            except RendererError:
                return None
            stops, decode = self.renderer.stop_ids, self.tokenizer.decode
            was, now = (decode(i for i in turn if i not in stops) for turn in (written, ids))
        # Programs strip the text of a message, and write its JSON in their own way. That its ids
        # were stripped is another matter.
        is_own_way = "".join(was.split()) == "".join(now.split()) and now != was.strip()
        return None if is_own_way else rewriting(was, now)

    def _look_at_ends(self, rows: Rows) -> None:
        first, at = self._ends(rows)
        self.count(clean_starts=first >= 0, improbable_ends=len(at))
        note = "both sides agree up to here, and the trainer finds this end of a turn improbable"
        for i in at.tolist():
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
        is_control = ~self.speller.is_text(rows.token_ids[first])
        is_low = rows.gap[first] < -MIN_IMPROBABLE
        return first, first[(first >= 0) & is_close & is_control & is_low]

    def conclude(self) -> Finding:
        c = self.counts
        if c["changed_turns"]:
            return self.differs(
                f"{c['changed_turns']} of {c['engine_turns']} turns are the engine's replies after "
                f"a change ({self._what})",
                "shown",
            )
        if c["inserted"] >= MIN_BROKEN_ROWS:
            return self.differs(
                f"{c['inserted']} turns have text before their end that is not trained: the model "
                "did not write it"
            )
        is_harmed = c["broken_rows"] >= max(MIN_BROKEN_ROWS, MIN_BROKEN * c["other_rows"])
        # Where rows with their messages' text disagree as often, something else is wrong.
        own = c["same_broken_rows"] * c["other_rows"]
        if is_harmed and own <= MAX_ALIKE * c["broken_rows"] * c["same_rows"]:
            return self.differs(
                f"the turns of {c['other_rows']} of {c['dialogues']} rows are not what their "
                f"messages say ({self._what}), and in {c['broken_rows']} of them the two sides "
                "disagree from there on"
            )
        if c["improbable_ends"] >= max(MIN_BROKEN_ROWS, MIN_AT_ENDS * c["clean_starts"]):
            self._by_ends = True
            return self.differs(
                f"{c['improbable_ends']} of {c['clean_starts']} rows begin to disagree at the end "
                "of a turn, which the trainer finds improbable: text before it is missing",
                "fit",
            )
        if c["other_rows"]:
            return self.information(
                f"{c['other_rows']} of {c['dialogues']} rows differ from their messages "
                f"({self._what}): the log-probs do not say that the ids were changed"
            )
        if not any(c[name] for name in ("engine_turns", "dialogues", "clean_starts")):
            return self.not_checkable("messages or engine_ids")
        return self.consistent("every turn has the text that was kept")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first different token of a changed turn on."""
        at = [reply.first for reply in self.changed(rows)]
        if not self.counts["changed_turns"] and self.counts["inserted"] < MIN_BROKEN_ROWS:
            at += [begin for _, begin, _, _ in self._rewritten(rows)]
        at += (self._inserted(rows)[0] - 1).tolist()  # the turn that it was added to
        if self._by_ends:
            at += self._ends(rows)[1].tolist()
        return rows.cut_from(at)


def _words(message: Message) -> str:
    """All text of a message."""
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join(part for part in (message.thinking, message.content, *calls) if part)
