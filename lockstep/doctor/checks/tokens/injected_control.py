"""Was text from a tool or user encoded as control tokens?

Each message is searched in the text of its row: no control token may be inside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.checks.base import Check, Finding, Setting
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.replies import control_spelling

MIN_WORDS_BYTES = 4
"""Bytes of a message that is searched for: shorter text is everywhere."""


class InjectedControl(Check):
    """Control tokens inside of messages from users and tools."""

    name = "tokens/injected_control"
    claim = "messages of users and tools are text in the rows, never control tokens"
    cause = "injected_control"
    needs = ("tokenizer", "messages")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._bytes = self.tokenizer.all_token_bytes()
        self._spelling = control_spelling(self.tokenizer)

    def look(self, rows: Rows) -> None:
        hit: set[int] = set()
        for at, is_spelt in self._injected(rows):
            hit.add(int(rows.row_of[at]))
            name = self.tokenizer.control_name(int(rows.token_ids[at]))
            note = f"{name} is inside a message of a user or tool"
            note += "; expected are the ids of its text" if is_spelt else ""
            self.show(1.0, rows, at, at + 1, note, self.tokenizer.encode(name) if is_spelt else ())
            self.count(injected_messages=1)
        self.count(rows=len(hit))

    def _injected(self, rows: Rows) -> Iterator[tuple[int, bool]]:
        """(index of the first control token inside a message, whether the message spells it)."""
        is_control = np.isin(rows.token_ids, list(self.tokenizer.control_ids))
        for tokens, messages in zip(rows.slices, rows.messages or (), strict=False):
            written = [
                message.content
                for message in messages or ()
                if message.role != "assistant" and len(message.content) >= MIN_WORDS_BYTES
            ]
            self.count(messages=len(written))
            if not written:
                continue
            ids, known = rows.token_ids[tokens].tolist(), len(self._bytes)
            pieces = [self._bytes[i] if 0 <= i < known else b"" for i in ids]
            for content in written:
                is_spelt = self._spelling.search(content) is not None
                self.count(spelt_messages=is_spelt)
                words = content.encode("utf-8", "replace")
                at = control_inside(pieces, is_control[tokens], words, is_spelt=is_spelt)
                if at is not None:
                    yield tokens.start + at, is_spelt

    def conclude(self) -> Finding:
        c = self.counts
        if c["injected_messages"]:
            return self.differs(
                f"{c['injected_messages']} messages of users and tools contain control tokens, in "
                f"{c['rows']} rows",
                "shown" if c["spelt_messages"] else "fit",
            )
        return self.consistent(
            f"{c['messages']} messages of users and tools are text in their rows; "
            f"{c['spelt_messages']} of them spell a control token"
        )

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained after an injected control token: the sampler may have read text."""
        return rows.cut_from([at for at, _ in self._injected(rows)])


def control_inside(
    pieces: list[bytes], is_control: BoolArray, words: bytes, *, is_spelt: bool
) -> int | None:
    """Position of the first control token inside `words`, if every occurrence of them in a row has
    one; None too if they are not in the row at all.

    pieces: [T] tokens as bytes. is_control: [T]. is_spelt: the words spell a control token, and may
    have become it.
    """
    controls = np.flatnonzero(is_control)
    whole = b"".join(pieces)
    begin = whole.find(words)
    if begin >= 0 and not is_spelt:
        return None
    found: int | None = None
    ends = np.cumsum([len(piece) for piece in pieces])[controls]
    starts = ends - np.array([len(pieces[i]) for i in controls.tolist()], np.int64)
    while begin >= 0:
        inside = controls[(starts >= begin) & (ends <= begin + len(words))]
        if not len(inside):
            return None
        found = int(inside[0]) if found is None else found
        begin = whole.find(words, begin + 1)
    if found is not None:
        return found
    text = [b"" if is_control[i] else piece for i, piece in enumerate(pieces)]
    begin = b"".join(text).find(words)
    ends = np.cumsum([len(piece) for piece in text])[controls]
    inside = controls[(ends > begin) & (ends < begin + len(words))]
    return int(inside[0]) if begin >= 0 and len(inside) else None
