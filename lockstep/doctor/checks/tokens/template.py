"""Is the thinking of earlier turns gone, because the chat template drops it?"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Rows

MIN_LINE = 6
"""Characters of a line of thinking that is searched for: shorter ones are in any row."""


class ThinkingDropped(Check):
    """Searches the lines of each turn's thinking in the text of its row.

    Rows that train later turns only are left out: what they train is what the model read.
    """

    name = "template/thinking_dropped"
    claim = "the thinking that was sampled in a turn is in the rows that contain the turn"
    cause = "thinking_dropped"
    needs = ("tokenizer", "renderer")

    def look(self, rows: Rows) -> None:
        known = (rows.messages or ()) + (rows.engine_ids or ())
        self.count(
            known=sum(dialogue is not None for dialogue in known),
            engine_turns=sum(len(turns or ()) for turns in rows.engine_ids or ()),
        )
        for begin, end, thinking in self._dropped(rows):
            self.count(dropped_thoughts=1)
            note = "the turn was sampled with thinking that is not in the row"
            self.show(len(thinking), rows, begin, end, note, self.tokenizer.encode(thinking))

    def _dropped(self, rows: Rows) -> Iterator[tuple[int, int, str]]:
        """(begin, end, thinking) of each earlier turn whose thinking is not in its row."""
        spans = rows.spans
        for r, turns in enumerate(spans.of_rows(len(rows))):
            messages = None if rows.messages is None else rows.messages[r]
            answered = None if rows.engine_ids is None else rows.engine_ids[r]
            replies = [m.thinking for m in messages or () if m.role == "assistant"]
            if answered is not None and (not replies or len(answered) == len(replies)):
                # The last turn's thinking is not searched.
                replies = [*(self.renderer.parse(ids).thinking for ids in answered[:-1]), ""]
            if not any(replies[:-1]) or len(replies) != len(turns):
                continue
            begin = rows.slices[r].start
            for span, thinking in zip(turns[:-1], replies, strict=False):
                end = int(spans.end[span])
                lines = [line for line in thinking.splitlines() if len(line.strip()) >= MIN_LINE]
                self.count(thoughts=bool(lines))
                # With the tokens before the turn: a mask may leave the thinking out.
                text = self.tokenizer.decode(rows.token_ids[begin:end].tolist()) if lines else ""
                if lines and not any(line.strip() in text for line in lines):
                    yield int(spans.begin[span]), end, thinking
                begin = end

    def conclude(self) -> Finding:
        c = self.counts
        if c["dropped_thoughts"]:
            return self.differs(
                f"the thinking of {c['dropped_thoughts']} earlier turns is missing from rows that "
                "contain the turns as sampled",
                "shown" if c["engine_turns"] else "fit",
            )
        if not c["known"]:
            return self.not_checkable("messages or engine_ids")
        return self.consistent(f"{c['thoughts']} earlier turns have thinking, all in their rows")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first turn without its thinking on."""
        return rows.cut_from([begin for begin, _, _ in self._dropped(rows)])
