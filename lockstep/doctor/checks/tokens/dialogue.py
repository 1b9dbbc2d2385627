"""A row and its messages: which span is which reply, and what a template makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.rows import Rows
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.types import Int32Array, Int64Array, Message


@dataclass(frozen=True, kw_only=True, eq=False)
class Dialogue:
    """One row with its messages."""

    row: int
    ids: Int32Array
    """[T]"""
    offset: int
    """Index of the row's first token."""
    begin: Int64Array
    """[S] position of the first token of each sampled turn."""
    end: Int64Array
    """[S] position after its last token."""
    messages: tuple[Message, ...]
    replies: list[int]
    """Indices of the assistant's messages."""

    @property
    def is_paired(self) -> bool:
        """True if each assistant message is a sampled turn of this row."""
        return len(self.replies) == len(self.begin)

    def between(self, turn: int) -> Sequence[Message]:
        """The messages after sampled turn `turn`, before the next one."""
        return self.messages[self.replies[turn] + 1 : self.replies[turn + 1]]


def dialogues(rows: Rows) -> list[Dialogue]:
    """The rows that have messages and a reply."""
    if rows.messages is None:
        return []
    spans = rows.spans
    first = spans.of_rows(len(rows))
    out: list[Dialogue] = []
    for r, messages in enumerate(rows.messages):
        low, high = int(first[r]), int(first[r + 1])
        offset, end = int(rows.offsets[r]), int(rows.offsets[r + 1])
        if not messages or low == high:
            continue
        out.append(
            Dialogue(
                row=r,
                ids=rows.token_ids[offset:end],
                offset=offset,
                begin=spans.begin[low:high] - offset,
                end=spans.end[low:high] - offset,
                messages=messages,
                replies=[i for i, message in enumerate(messages) if message.role == "assistant"],
            )
        )
    return out


def is_extended(dialogue: Dialogue, renderer: Renderer) -> bool:
    """True if the row is its turns, extended: between them is what the renderer writes after the
    sampled turn. Also where it cannot write that.

    Only for a paired dialogue. The first prompt is not compared: it declares tools, which a row
    does not record.
    """
    for turn in range(len(dialogue.begin) - 1):
        begin, end = int(dialogue.end[turn]), int(dialogue.begin[turn + 1])
        sampled = dialogue.ids[int(dialogue.begin[turn]) : begin]
        try:
            glue = renderer.extend(sampled.tolist(), dialogue.between(turn))
        except RendererError:
            return True
        if not np.array_equal(dialogue.ids[begin:end], glue):
            return False
    return True


def rendered_whole(dialogue: Dialogue, renderer: Renderer) -> Int32Array | None:
    """The row's first prompt, then the ids that the renderer writes for all messages before the
    last reply; None without an earlier reply, or if the first prompt is no prefix of it."""
    if len(dialogue.replies) < 2:
        return None
    try:
        first = renderer.render(dialogue.messages[: dialogue.replies[0]])
        whole = renderer.render(dialogue.messages[: dialogue.replies[-1]])
    except RendererError:
        return None
    if whole[: len(first)] != first:
        return None
    prompt = dialogue.ids[: int(dialogue.begin[0])]
    return np.concatenate([prompt, np.asarray(whole[len(first) :], np.int32)])
