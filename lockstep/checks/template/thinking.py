"""Whether the thinking of earlier turns is in the rows that train it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.checks.base import Check, Setting
from lockstep.checks.findings import Evidence, Finding
from lockstep.checks.rows import Rows
from lockstep.checks.template.dialogue import Dialogue, dialogues
from lockstep.checks.tokens.reencoded import without_logprobs

MIN_LINE = 6
"""Characters of a line of thinking that is looked for: shorter ones stand in any row."""


class ThinkingDropped(Check):
    """The lines of each turn's thinking, looked for in the text of its row."""

    name = "template/thinking_dropped"
    claim = "the thinking that was sampled in a turn stands in the rows that have the turn"
    cause = "thinking_dropped"
    needs = ("tokenizer", "renderer")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._num_thoughts = self._num_dropped = self._num_rows = self._num_forked = 0
        self._num_dialogues = 0

    def look(self, rows: Rows) -> None:
        self._num_dialogues += len(dialogues(rows))
        for dialogue, turn, thinking in self._dropped(rows):
            self._num_dropped += 1
            if not dialogue.is_paired:
                self._num_forked += 1
                continue
            assert self.setting.tokenizer is not None, "the check's needs"
            self._num_rows += 1
            at = dialogue.replies[turn]
            self.show(
                float(len(thinking)),
                Evidence(
                    row=rows.row_ids[dialogue.row],
                    begin=int(dialogue.begin[turn]),
                    end=int(dialogue.end[turn]),
                    note=f"message {at} has thinking that is not in the row; it is beside",
                    expected_ids=tuple(self.setting.tokenizer.encode(thinking)),
                ),
            )

    def _dropped(self, rows: Rows) -> Iterator[tuple[Dialogue, int, str]]:
        """(dialogue, turn, thinking) of each earlier reply whose thinking the row does not have."""
        tokenizer, renderer = self.setting.tokenizer, self.setting.renderer
        assert tokenizer is not None and renderer is not None, "the check's needs"
        for dialogue in dialogues(rows):
            answered = rows.engine_ids[dialogue.row] if rows.engine_ids is not None else None
            thoughts = [dialogue.messages[at].thinking for at in dialogue.replies[:-1]]
            if answered is not None and len(answered) == len(dialogue.replies):
                thoughts = [
                    renderer.parse(ids).thinking or thought
                    for ids, thought in zip(answered[:-1], thoughts, strict=True)
                ]
            if not any(thoughts):
                continue
            text = tokenizer.decode(dialogue.ids.tolist())
            for turn, thinking in enumerate(thoughts):
                lines = [line for line in thinking.splitlines() if len(line.strip()) >= MIN_LINE]
                if not lines:
                    continue
                self._num_thoughts += 1
                if not any(line.strip() in text for line in lines):
                    yield dialogue, turn, thinking

    def conclude(self) -> Finding:
        figures = {
            "dialogues": self._num_dialogues,
            "thoughts": self._num_thoughts,
            "dropped_thoughts": self._num_dropped,
        }
        if self._num_rows:
            return self.found(
                "differs",
                f"the thinking of {self._num_rows} earlier turns is not in the rows that have the "
                "turns as sampled",
                **figures,
            )
        if self._num_forked:
            return self.found(
                "information",
                f"{self._num_forked} of {self._num_thoughts} earlier thoughts are not in their "
                "rows, which train later turns alone: what is trained is what was read",
                **figures,
            )
        if not self._num_dialogues:
            return self.not_checkable(("messages",))
        return self.found(
            "consistent",
            f"{self._num_thoughts} earlier turns have thinking, and it stands in their rows",
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """NaN from the turn whose thinking is gone on."""
        if rows.rollout_logprobs is None:
            return rows
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for dialogue, turn, _ in self._dropped(rows):
            if dialogue.is_paired:
                first = dialogue.offset + int(dialogue.begin[turn])
                begin[dialogue.row] = min(begin[dialogue.row], first)
        return without_logprobs(rows, begin)
