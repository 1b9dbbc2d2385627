"""Whether the template over a whole dialogue gives the ids that the row has, turn by turn."""

from __future__ import annotations

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.template.dialogue import dialogues, first_difference, rendered_whole

MAX_DIALOGUES = 512
"""Dialogues that are rendered, of a dump: a property of the template shows on the first few."""
MAX_EXPECTED = 64
"""Ids that are shown beside a row from where the template differs."""


class TemplateDrift(Check):
    """The prefix property of a template on the dump's own dialogues.

    A row that was extended may well differ from the template over the whole: that is why it must
    be extended. So this is information; `tokens/rerendered` says where the rendering was trained.
    """

    name = "template/template_drift"
    claim = "the template over the whole dialogue gives the ids of the row"
    cause = "template_drift"
    needs = ("renderer", "messages")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._num_dialogues = self._num_other = 0

    def look(self, rows: Rows) -> None:
        renderer = self.setting.renderer
        assert renderer is not None, "the check's needs"
        if self._num_dialogues >= MAX_DIALOGUES:
            return
        for dialogue in dialogues(rows):
            if not dialogue.is_paired or self._num_dialogues >= MAX_DIALOGUES:
                continue
            expected = rendered_whole(dialogue, renderer)
            if expected is None:
                continue
            self._num_dialogues += 1
            last = int(dialogue.begin[-1])
            found = dialogue.ids[:last]
            if len(found) == len(expected) and (found == expected).all():
                continue
            self._num_other += 1
            at = first_difference(found, expected)
            turn = int((dialogue.begin <= at).sum()) - 1
            message = dialogue.replies[max(turn, 0)]
            self.show(
                1.0 / (1 + len(dialogue.replies)),
                Evidence(
                    row=rows.row_ids[dialogue.row],
                    begin=at,
                    end=last,
                    note=f"from message {message} ({dialogue.messages[message].role}) on the "
                    "template over the whole dialogue writes what stands beside",
                    expected_ids=tuple(expected[at : at + MAX_EXPECTED].tolist()),
                ),
            )

    def conclude(self) -> Finding:
        figures = {"dialogues": self._num_dialogues, "other_rows": self._num_other}
        if not self._num_other:
            return self.found(
                "consistent",
                f"{self._num_dialogues} dialogues of several turns come back as they stand",
                **figures,
            )
        return self.found(
            "information",
            f"a program that applies the template to the whole history would change "
            f"{self._num_other} of {self._num_dialogues} rows of several turns",
            **figures,
        )
