"""Whether the thinking of earlier turns is in the rows that train it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.reencoded import without_explained

MIN_LINE = 6
"""Characters of a line of thinking that is looked for: shorter ones stand in any row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dropped:
    row: int
    turn: int
    begin: int
    """Index of the turn's first token; -1 where the row does not have the turn as sampled."""
    end: int
    thinking: str


class ThinkingDropped(Check):
    """The lines of each turn's thinking, looked for in the text of its row."""

    name = "template/thinking_dropped"
    claim = "the thinking that was sampled in a turn stands in the rows that have the turn"
    cause = "thinking_dropped"
    needs = ("tokenizer", "renderer")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._num_thoughts = self._num_dropped = self._num_forked = 0
        self._num_known = 0

    def look(self, rows: Rows) -> None:
        assert self.setting.tokenizer is not None, "the check's needs"
        self._num_known += sum(
            known is not None for known in (rows.messages or ()) + (rows.engine_ids or ())
        )
        for dropped in self._dropped(rows):
            self._num_dropped += 1
            if dropped.begin < 0:
                self._num_forked += 1
                continue
            offset = int(rows.offsets[dropped.row])
            self.show(
                float(len(dropped.thinking)),
                Evidence(
                    row=rows.row_ids[dropped.row],
                    begin=dropped.begin - offset,
                    end=dropped.end - offset,
                    note=f"turn {dropped.turn} was sampled with thinking that is not in the row; "
                    "it is beside",
                    expected_ids=tuple(self.setting.tokenizer.encode(dropped.thinking)),
                ),
            )

    def _dropped(self, rows: Rows) -> Iterator[_Dropped]:
        """Each earlier turn whose thinking its row does not have."""
        tokenizer, renderer = self.setting.tokenizer, self.setting.renderer
        assert tokenizer is not None and renderer is not None, "the check's needs"
        spans = rows.spans
        first = np.searchsorted(spans.row, np.arange(len(rows) + 1))
        for r in range(len(rows)):
            messages = None if rows.messages is None else rows.messages[r]
            answered = None if rows.engine_ids is None else rows.engine_ids[r]
            replies = [m.thinking for m in messages or () if m.role == "assistant"]
            if answered is not None and (not replies or len(answered) == len(replies)):
                # The last turn's is not asked for.
                replies = [*(renderer.parse(ids).thinking for ids in answered[:-1]), ""]
            if not any(replies[:-1]):
                continue
            low, high = int(first[r]), int(first[r + 1])
            is_own = len(replies) == high - low
            places = (int(rows.offsets[r]), int(rows.offsets[r + 1]))
            whole = "" if is_own else tokenizer.decode(rows.token_ids[slice(*places)].tolist())
            for turn, thinking in enumerate(replies[:-1]):
                lines = [line for line in thinking.splitlines() if len(line.strip()) >= MIN_LINE]
                if not lines:
                    continue
                self._num_thoughts += 1
                span = low + turn
                text = whole
                if is_own:  # with what stands before it: a mask may leave the thinking out
                    begin = int(spans.end[span - 1]) if turn else places[0]
                    text = tokenizer.decode(rows.token_ids[begin : int(spans.end[span])].tolist())
                if any(line.strip() in text for line in lines):
                    continue
                yield _Dropped(
                    row=r,
                    turn=turn,
                    begin=int(spans.begin[span]) if is_own else -1,
                    end=int(spans.end[span]) if is_own else -1,
                    thinking=thinking,
                )

    def conclude(self) -> Finding:
        figures = {
            "thoughts": self._num_thoughts,
            "dropped_thoughts": self._num_dropped,
            "forked_thoughts": self._num_forked,
        }
        if own := self._num_dropped - self._num_forked:
            return self.found(
                "differs",
                f"the thinking of {own} earlier turns is not in the rows that have the turns as "
                "sampled",
                **figures,
            )
        if self._num_forked:
            return self.found(
                "information",
                f"{self._num_forked} of {self._num_thoughts} earlier thoughts are not in their "
                "rows, which train later turns alone: what is trained is what was read",
                **figures,
            )
        if not self._num_known:
            return self.not_checkable(("messages or engine_ids",))
        return self.found(
            "consistent",
            f"{self._num_thoughts} earlier turns have thinking, and it stands in their rows",
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained from the first turn whose thinking is gone on."""
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for dropped in self._dropped(rows):
            if dropped.begin >= 0:
                begin[dropped.row] = min(begin[dropped.row], dropped.begin)
        return without_explained(rows, begin)
