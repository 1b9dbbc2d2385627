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
from lockstep.checks.template.dialogue import dialogues, first_unextended, rendered_whole
from lockstep.checks.tokens.reencoded import without_logprobs
from lockstep.checks.tokens.replies import changed_replies
from lockstep.checks.tokens.spelling import Speller


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
        self._num_dialogues = self._num_whole = 0

    def look(self, rows: Rows) -> None:
        if rows.engine_ids is not None:
            self._num_engine_turns += sum(len(turns or ()) for turns in rows.engine_ids)
        for changed in changed_replies(rows, self._speller, self.setting):
            if changed.change != "rerendered":
                continue
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
        for row, begin, end in self._whole(rows):
            self._num_whole += 1
            name, _ = rows.where(begin)
            offset = int(rows.offsets[row])
            self.show(
                1.0,
                Evidence(
                    row=name,
                    begin=begin - offset,
                    end=end - offset,
                    note="these are the ids of the template over the whole dialogue, and not what "
                    "follows a sampled turn when it is extended",
                ),
            )

    def _whole(self, rows: Rows) -> list[tuple[int, int, int]]:
        """(row, begin, end) of what was rendered again and is said to be sampled."""
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        out: list[tuple[int, int, int]] = []
        for dialogue in dialogues(rows):
            self._num_dialogues += 1
            if len(dialogue.begin) < 2 or len(dialogue.replies) < 2:
                continue
            if dialogue.is_paired and first_unextended(dialogue, renderer) is None:
                continue
            expected = rendered_whole(dialogue, renderer)
            if expected is None or len(expected) > len(dialogue.ids):
                continue
            if np.array_equal(dialogue.ids[: len(expected)], expected):
                begin = dialogue.offset + int(dialogue.begin[0])
                out.append((dialogue.row, begin, dialogue.offset + len(expected)))
        return out

    def conclude(self) -> Finding:
        figures = {
            "engine_turns": self._num_engine_turns,
            "rerendered_turns": self._num_turns,
            "match_rate": self._matched / self._num_turns if self._num_turns else 1.0,
            "dialogues": self._num_dialogues,
            "rerendered_rows": self._num_whole,
        }
        if self._num_turns:
            return self.found(
                "differs",
                f"{self._num_turns} of {self._num_engine_turns} turns are renderings of the "
                f"engine's replies: {figures['match_rate']:.1%} of their ids stand at their place",
                **figures,
            )
        if self._num_whole:
            return self.found(
                "differs",
                f"{self._num_whole} of {self._num_dialogues} rows are the template over the whole "
                "dialogue, and earlier turns of it are said to be sampled",
                **figures,
            )
        if not self._num_engine_turns and not self._num_dialogues:
            return self.not_checkable(("messages or engine_ids",))
        return self.found("consistent", "no turn is a rendering of its message", **figures)

    def repair(self, rows: Rows) -> Rows:
        """NaN from the first rendered turn's first other id on."""
        if rows.rollout_logprobs is None:
            return rows
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for changed in changed_replies(rows, self._speller, self.setting):
            if changed.change == "rerendered":
                begin[changed.row] = min(begin[changed.row], changed.first)
        for row, first, _ in self._whole(rows):
            begin[row] = min(begin[row], first)
        return without_logprobs(rows, begin)
