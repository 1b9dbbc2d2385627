"""Is the thinking of earlier turns gone, because the chat template drops it?"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import Rows

MIN_LINE = 6
"""Characters of a line of thinking that is searched for: shorter ones are in any row."""


MIN_ROWS = 4
"""Rows whose last reply alone thinks, before that is the template's doing."""
MAX_OTHERS = 0.1
"""Rows whose replies think now and then, over these: a model that does so may stop at any."""


class ThinkingDropped(Check):
    """Searches the lines of each turn's thinking in the text of its row.

    Rows that train later turns only are left out: what they train is what the model read. Rows that
    hold their turns and no messages are compared with each other: a template that drops thinking
    leaves it in the last reply alone.
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
        bare, num_others = rows.once("bare replies", lambda: self._bare(rows))
        self.count(bare=len(bare), others=num_others)
        for begin, end in bare:
            self.show(0.5, rows, begin, end, "the last reply of the row alone has its thinking")
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

    def _bare(self, rows: Rows) -> tuple[list[tuple[int, int]], int]:
        """([(begin, end)] of the first reply of rows whose last one alone thinks, number of rows
        some of whose replies think otherwise), of rows without messages."""
        ids, spans = rows.token_ids, rows.spans
        bare, num_others = list[tuple[int, int]](), 0
        for r, turns in enumerate(spans.of_rows(len(rows))):
            has_words = any(known and known[r] for known in (rows.messages, rows.engine_ids))
            if len(turns) < 2 or has_words:
                continue
            thinks = [
                bool(self.renderer.parse(ids[spans.begin[t] : spans.end[t]]).thinking)
                for t in turns
            ]
            if thinks[-1] and not any(thinks[:-1]):
                bare.append((int(spans.begin[turns[0]]), int(spans.end[turns[0]])))
            num_others += any(thinks) and not all(thinks)
        return bare, num_others - len(bare)

    @property
    def _is_bare(self) -> bool:
        c = self.counts
        return c["bare"] >= MIN_ROWS and c["others"] <= MAX_OTHERS * c["bare"]

    def conclude(self) -> Finding:
        c = self.counts
        if c["dropped_thoughts"]:
            return self.differs(
                f"the thinking of {c['dropped_thoughts']} earlier turns is missing from their rows",
                "shown" if c["engine_turns"] else "fit",
            )
        if self._is_bare:
            rows = f"{c['bare']} rows of several replies"
            return self.differs(f"in {rows} the last one alone has its thinking", "fit")
        if not c["known"]:
            return self.not_checkable("messages or engine_ids")
        return self.consistent(f"{c['thoughts']} earlier turns have thinking, all in their rows")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first turn without its thinking on."""
        bare = rows.once("bare replies", lambda: self._bare(rows))[0] if self._is_bare else ()
        dropped = (begin for begin, _, _ in self._dropped(rows))
        return rows.cut_from([*dropped, *(begin for begin, _ in bare)])
