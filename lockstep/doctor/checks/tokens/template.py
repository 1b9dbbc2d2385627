"""Effects of the chat template on the rows of a dialogue: other ids, or thinking that is gone."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.checks.base import Check
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.dialogue import dialogues, first_difference, rendered_whole

MAX_DIALOGUES = 512
"""Dialogues that are rendered: a property of the template shows on the first few."""
MAX_EXPECTED = 64
"""Ids that are shown from where the template differs."""
MIN_LINE = 6
"""Characters of a line of thinking that is searched for: shorter ones are in any row."""


class TemplateDrift(Check):
    """Compares rows with the template applied to their whole dialogue.

    A row that was extended may differ from that rendering, which is why rows must be extended. So
    this is information; `tokens/rerendered` finds rows where the rendering was trained.
    """

    name = "template/template_drift"
    claim = "the template, applied to the whole dialogue, gives the ids of the row"
    cause = "template_drift"
    needs = ("renderer", "messages")

    def look(self, rows: Rows) -> None:
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        for dialogue in dialogues(rows):
            if self.counts["dialogues"] >= MAX_DIALOGUES:
                return
            expected = rendered_whole(dialogue, renderer) if dialogue.is_paired else None
            if expected is None:
                continue
            self.counts["dialogues"] += 1
            last = int(dialogue.begin[-1])
            found = dialogue.ids[:last]
            if len(found) == len(expected) and (found == expected).all():
                continue
            self.counts["other_rows"] += 1
            at = first_difference(found, expected)
            turn = int((dialogue.begin <= at).sum()) - 1
            message = dialogue.replies[max(turn, 0)]
            self.show(
                1.0 / (1 + len(dialogue.replies)),
                rows,
                dialogue.offset + at,
                dialogue.offset + last,
                f"from message {message} ({dialogue.messages[message].role}) on, the template over "
                "the whole dialogue writes the expected ids instead",
                expected[at : at + MAX_EXPECTED].tolist(),
            )

    def conclude(self) -> Finding:
        total, other = self.counts["dialogues"], self.counts["other_rows"]
        if not other:
            return self.consistent(f"{total} dialogues of several turns render to their rows")
        return self.information(
            f"a program that applies the template to the whole history would change {other} of "
            f"{total} rows of several turns"
        )


class ThinkingDropped(Check):
    """Searches the lines of each turn's thinking in the text of its row."""

    name = "template/thinking_dropped"
    claim = "the thinking that was sampled in a turn is in the rows that contain the turn"
    cause = "thinking_dropped"
    needs = ("tokenizer", "renderer")

    def look(self, rows: Rows) -> None:
        tokenizer = self.setting.tokenizer
        assert tokenizer is not None, "the check's needs"
        for known in (rows.messages or ()) + (rows.engine_ids or ()):
            self.counts["known"] += known is not None
        for turn, span, thinking in self._dropped(rows):
            self.counts["dropped_thoughts"] += 1
            if span is None:
                self.counts["forked_thoughts"] += 1
                continue
            self.show(
                float(len(thinking)),
                rows,
                *span,
                f"turn {turn} was sampled with thinking that is not in the row",
                tokenizer.encode(thinking),
            )

    def _dropped(self, rows: Rows) -> Iterator[tuple[int, tuple[int, int] | None, str]]:
        """(number, tokens, thinking) of each earlier turn whose thinking is not in its row; no
        tokens if the row does not contain the turn as it was sampled."""
        tokenizer, renderer = self.setting.tokenizer, self.setting.renderer
        assert tokenizer is not None and renderer is not None, "the check's needs"
        spans = rows.spans
        first = spans.of_rows(len(rows))
        for r, (_, tokens) in enumerate(rows.rows()):
            messages = None if rows.messages is None else rows.messages[r]
            answered = None if rows.engine_ids is None else rows.engine_ids[r]
            replies = [m.thinking for m in messages or () if m.role == "assistant"]
            if answered is not None and (not replies or len(answered) == len(replies)):
                # The last turn's thinking is not searched.
                replies = [*(renderer.parse(ids).thinking for ids in answered[:-1]), ""]
            if not any(replies[:-1]):
                continue
            low, high = int(first[r]), int(first[r + 1])
            is_own = len(replies) == high - low
            whole = "" if is_own else tokenizer.decode(rows.token_ids[tokens].tolist())
            for turn, thinking in enumerate(replies[:-1]):
                lines = [line for line in thinking.splitlines() if len(line.strip()) >= MIN_LINE]
                if not lines:
                    continue
                self.counts["thoughts"] += 1
                span, text = low + turn, whole
                if is_own:  # with the tokens before it: a mask may leave the thinking out
                    begin = int(spans.end[span - 1]) if turn else tokens.start
                    text = tokenizer.decode(rows.token_ids[begin : int(spans.end[span])].tolist())
                if not any(line.strip() in text for line in lines):
                    place = (int(spans.begin[span]), int(spans.end[span])) if is_own else None
                    yield turn, place, thinking

    def conclude(self) -> Finding:
        c = self.counts
        if own := c["dropped_thoughts"] - c["forked_thoughts"]:
            return self.differs(
                f"the thinking of {own} earlier turns is missing from rows that contain the turns "
                "as sampled"
            )
        if c["forked_thoughts"]:
            return self.information(
                f"{c['forked_thoughts']} of {c['thoughts']} earlier thoughts are not in their rows"
                ", which train later turns only: what is trained is what the model read"
            )
        if not c["known"]:
            return self.not_checkable("messages or engine_ids")
        return self.consistent(f"{c['thoughts']} earlier turns have thinking, all in their rows")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first turn without its thinking on."""
        return rows.cut_from([span[0] for _, span, _ in self._dropped(rows) if span is not None])
