"""Whether text that a tool or a user wrote has become control tokens.

A message's words are looked up in the text of its row: no control token may stand between them.
Where the messages are not known, the control tokens of what was observed are compared, pair by
pair, with those that the renderer writes; that is information, for padding and a prompt that stands
there twice are out of order too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.reencoded import without_explained
from lockstep.doctor.checks.tokens.spelling import control_spelling
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.types import Message, ToolCall, ToolSchema

MIN_WORDS_BYTES = 4
"""Bytes of a message that is looked up: fewer stand anywhere."""


class InjectedControl(Check):
    """Control tokens inside of what users and tools wrote."""

    name = "tokens/injected_control"
    claim = "what users and tools wrote stands in the rows as text, never as control tokens"
    cause = "injected_control"
    needs = ("tokenizer",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        tokenizer = setting.tokenizer
        assert tokenizer is not None, "the check's needs"
        self._tokenizer = tokenizer
        self._bytes = tokenizer.all_token_bytes()
        self._spelling = control_spelling(tokenizer)
        self._control = np.zeros(tokenizer.vocab_size + 1, np.bool_)
        self._control[list(tokenizer.control_ids)] = True
        renderer = setting.renderer
        self._pairs = (
            None
            if renderer is None
            else setting.once("pairs of control ids", lambda: written_pairs(renderer))
        )
        self._num_messages = self._num_spelt = self._num_injected = self._num_rows = 0
        self._num_stretches = self._num_irregular = 0
        self._irregular: Counter[str] = Counter()

    def look(self, rows: Rows) -> None:
        seen: set[int] = set()
        for row, at, spelt in self._injected(rows):
            self._num_injected += 1
            self._num_rows += row not in seen
            seen.add(row)
            name = self._tokenizer.control_name(int(rows.token_ids[rows.offsets[row] + at]))
            self.show(
                1e6,
                Evidence(
                    row=rows.row_ids[row],
                    begin=at,
                    end=at + 1,
                    note=f"{name} stands inside of what a user or a tool wrote"
                    + ("; as the text that was written it is beside" if spelt else ""),
                    expected_ids=tuple(self._tokenizer.encode(name)) if spelt else (),
                ),
            )
        if rows.messages is not None:
            return
        for row, at, name in self._out_of_order(rows):
            self._irregular[name] += 1
            self.show(
                1.0,
                Evidence(
                    row=rows.row_ids[row],
                    begin=at,
                    end=at + 1,
                    note=f"the renderer writes no {name} here: not behind the control token that "
                    "stands before it, among what was observed",
                ),
            )

    def _injected(self, rows: Rows) -> Iterator[tuple[int, int, bool]]:
        """(row, place, whether the message spells it) of the first control token inside of the
        words of each message that has one."""
        if rows.messages is None:
            return
        is_control = self._control[np.clip(rows.token_ids, 0, len(self._control) - 1)]
        for r, messages in enumerate(rows.messages):
            written = [
                message.content
                for message in messages or ()
                if message.role != "assistant" and len(message.content) >= MIN_WORDS_BYTES
            ]
            self._num_messages += len(written)
            if not written:
                continue
            begin, end = int(rows.offsets[r]), int(rows.offsets[r + 1])
            known = len(self._bytes)
            ids = rows.token_ids[begin:end].tolist()
            row = _Spelt(
                [self._bytes[i] if 0 <= i < known else b"" for i in ids], is_control[begin:end]
            )
            for content in written:
                is_spelt = self._spelling.search(content) is not None
                self._num_spelt += is_spelt
                at = row.control_inside(content.encode("utf-8", "replace"), is_spelt=is_spelt)
                if at is not None:
                    yield r, at, is_spelt

    def _out_of_order(self, rows: Rows) -> Iterator[tuple[int, int, str]]:
        """(row, place, name) of the first control token of each observed stretch that the renderer
        does not write behind the one before it."""
        if self._pairs is None:
            return
        is_control = self._control[np.clip(rows.token_ids, 0, len(self._control) - 1)]
        observed = np.flatnonzero(is_control & ~rows.sampled)
        if not len(observed):
            return
        # A stretch ends with its row and at a sampled token.
        sampled_before = np.cumsum(rows.sampled)[observed]
        stretch = rows.row_of[observed] * (rows.num_tokens + 1) + sampled_before
        ids = rows.token_ids[observed].astype(np.int64)
        self._num_stretches += len(np.unique(stretch))
        size = len(self._control)
        allowed = np.array(sorted(a * size + b for a, b in self._pairs), np.int64)
        is_irregular = (stretch[1:] == stretch[:-1]) & ~np.isin(ids[:-1] * size + ids[1:], allowed)
        at = np.flatnonzero(is_irregular) + 1
        _, first = np.unique(stretch[at], return_index=True)
        self._num_irregular += len(first)
        for place in observed[at[first]].tolist():
            row = int(rows.row_of[place])
            name = self._tokenizer.control_name(int(rows.token_ids[place]))
            yield row, place - int(rows.offsets[row]), name

    def conclude(self) -> Finding:
        figures = {
            "messages": self._num_messages,
            "spelt_messages": self._num_spelt,
            "injected_messages": self._num_injected,
            "rows": self._num_rows,
            "stretches": self._num_stretches,
            "irregular_stretches": self._num_irregular,
        }
        if self._num_injected:
            return self.found(
                "differs",
                f"{self._num_injected} messages of users and tools have control tokens inside, in "
                f"{self._num_rows} rows",
                **figures,
            )
        if self._num_irregular:
            said = (
                f"{self._num_irregular} of {self._num_stretches} observed stretches have control "
                f"tokens in an order that the renderer does not write ({self._names()})"
            )
            return self.found(
                "information",
                f"{said}; with the messages it could be said what they stand in",
                **figures,
            )
        if not self._num_messages and not self._num_stretches:
            return self.not_checkable(("messages or renderer",))
        return self.found(
            "consistent",
            f"{self._num_messages} messages of users and tools are text in their rows; "
            f"{self._num_spelt} of them spell a control token"
            if self._num_messages
            else f"the control tokens of {self._num_stretches} observed stretches stand in an "
            "order that the renderer writes",
            **figures,
        )

    def _names(self) -> str:
        return ", ".join(name for name, _ in self._irregular.most_common(3))

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained behind a control token that was injected: the sampler may have read
        text there."""
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for row, at, _ in self._injected(rows):
            begin[row] = min(begin[row], int(rows.offsets[row]) + at)
        return without_explained(rows, begin)


class _Spelt:
    """The tokens of one row as bytes, with and without its control tokens."""

    def __init__(self, pieces: list[bytes], is_control: BoolArray) -> None:
        self._pieces, self._is_control = pieces, is_control
        self._whole = b"".join(pieces)

    def control_inside(self, words: bytes, *, is_spelt: bool) -> int | None:
        """Place of the first control token inside of `words`, if they stand nowhere without one.

        is_spelt: they name a control token, which may have become it. None too if they do not
        stand in the row at all.
        """
        begin = self._whole.find(words)
        if begin >= 0 and not is_spelt:
            return None
        controls = np.flatnonzero(self._is_control)
        found: int | None = None
        if begin >= 0:
            sizes = np.array([len(piece) for piece in self._pieces])
            starts, ends = (np.cumsum(sizes) - sizes)[controls], np.cumsum(sizes)[controls]
            while begin >= 0:
                inside = controls[(starts >= begin) & (ends <= begin + len(words))]
                if not len(inside):
                    return None
                found = int(inside[0]) if found is None else found
                begin = self._whole.find(words, begin + 1)
            return found
        text = [
            b"" if control else piece
            for piece, control in zip(self._pieces, self._is_control.tolist(), strict=True)
        ]
        begin = b"".join(text).find(words)
        if begin < 0:
            return None
        ends = np.cumsum([len(piece) for piece in text])[controls]
        inside = controls[(ends > begin) & (ends < begin + len(words))]
        return int(inside[0]) if len(inside) else None


_CALL = ToolCall(name="f", arguments="{}")
_TOOLS = (ToolSchema(name="f", description="f", parameters={"type": "object", "properties": {}}),)


def written_pairs(renderer: Renderer) -> frozenset[tuple[int, int]]:
    """Control ids that the renderer writes one behind the other in what is observed: prompts with
    and without tools, and what follows turns that ended and that were cut off at each token."""
    user = Message(role="user", content="u")
    system = Message(role="system", content="s")
    tool = Message(role="tool", name="f", content="t")
    replies = (
        Message(role="assistant", content="a"),
        Message(role="assistant", tool_calls=(_CALL,)),
        Message(role="assistant", content="a", thinking="h"),
        Message(role="assistant", thinking="h", tool_calls=(_CALL,)),
    )
    given = [[system, user], [user], [user, user], [user, replies[0], user]]
    given += [[user, replies[1], tool], [user, replies[1], tool, tool, replies[0], user]]
    stretches: list[list[int]] = []
    for messages in given:
        stretches += [renderer.render(messages), renderer.render(messages, _TOOLS)]
    for reply in replies:
        try:
            sampled = renderer.render_reply(reply)
        except RendererError:
            continue
        for cut in range(1, len(sampled) + 1):
            for new in ([], [user], [tool], [tool, tool], [tool, user], [user, user], [system]):
                stretches.append(renderer.extend(sampled[:cut], new))
    control = renderer.tokenizer.control_ids
    pairs: set[tuple[int, int]] = set()
    for ids in stretches:
        pairs |= set(pairwise([i for i in ids if i in control]))
    return frozenset(pairs)
