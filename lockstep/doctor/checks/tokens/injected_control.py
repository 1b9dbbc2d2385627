"""Was text from a tool or user encoded as control tokens?

Each message is searched in the text of its row: no control token may be inside it. Where messages
are not known, the control tokens of observed text are compared, pair by pair, with those that the
renderer writes; that is information only, for padding and a duplicated prompt are out of order too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.spelling import control_spelling
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.types import Message, ToolCall, ToolSchema

MIN_WORDS_BYTES = 4
"""Bytes of a message that is searched for: shorter text is everywhere."""


class InjectedControl(Check):
    """Control tokens inside of messages from users and tools."""

    name = "tokens/injected_control"
    claim = "messages of users and tools are text in the rows, never control tokens"
    cause = "injected_control"
    needs = ("tokenizer",)
    counted = (
        "messages",
        "spelt_messages",
        "injected_messages",
        "rows",
        "stretches",
        "irregular_stretches",
    )

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
        self._irregular: Counter[str] = Counter()

    def look(self, rows: Rows) -> None:
        hit: set[int] = set()
        for at, is_spelt in self._injected(rows):
            hit.add(int(rows.row_of[at]))
            self.counts["injected_messages"] += 1
            name = self._tokenizer.control_name(int(rows.token_ids[at]))
            note = f"{name} is inside a message of a user or tool"
            note += "; expected are the ids of its text" if is_spelt else ""
            self.show(1e6, rows, at, at + 1, note, self._tokenizer.encode(name) if is_spelt else ())
        self.counts["rows"] += len(hit)
        if rows.messages is not None:
            return
        for at in self._out_of_order(rows):
            name = self._tokenizer.control_name(int(rows.token_ids[at]))
            self._irregular[name] += 1
            note = f"the renderer never writes {name} after the control token before it"
            self.show(1.0, rows, at, at + 1, note)

    def _is_control(self, rows: Rows) -> BoolArray:
        return self._control[np.clip(rows.token_ids, 0, len(self._control) - 1)]

    def _injected(self, rows: Rows) -> Iterator[tuple[int, bool]]:
        """(index of the first control token inside a message, whether the message spells it)."""
        if rows.messages is None:
            return
        is_control = self._is_control(rows)
        for (_, tokens), messages in zip(rows.rows(), rows.messages, strict=True):
            written = [
                message.content
                for message in messages or ()
                if message.role != "assistant" and len(message.content) >= MIN_WORDS_BYTES
            ]
            self.counts["messages"] += len(written)
            if not written:
                continue
            ids, known = rows.token_ids[tokens].tolist(), len(self._bytes)
            row = _Spelt(
                [self._bytes[i] if 0 <= i < known else b"" for i in ids], is_control[tokens]
            )
            for content in written:
                is_spelt = self._spelling.search(content) is not None
                self.counts["spelt_messages"] += is_spelt
                at = row.control_inside(content.encode("utf-8", "replace"), is_spelt=is_spelt)
                if at is not None:
                    yield tokens.start + at, is_spelt

    def _out_of_order(self, rows: Rows) -> list[int]:
        """Index of the first control token of each observed stretch that the renderer never writes
        after the one before it."""
        observed = np.flatnonzero(self._is_control(rows) & ~rows.sampled)
        if self._pairs is None or not len(observed):
            return []
        # A stretch ends with its row and at a sampled token.
        sampled_before = np.cumsum(rows.sampled)[observed]
        stretch = rows.row_of[observed] * (rows.num_tokens + 1) + sampled_before
        ids = rows.token_ids[observed].astype(np.int64)
        self.counts["stretches"] += len(np.unique(stretch))
        size = len(self._control)
        allowed = np.array(sorted(a * size + b for a, b in self._pairs), np.int64)
        is_irregular = (stretch[1:] == stretch[:-1]) & ~np.isin(ids[:-1] * size + ids[1:], allowed)
        at = np.flatnonzero(is_irregular) + 1
        _, first = np.unique(stretch[at], return_index=True)
        self.counts["irregular_stretches"] += len(first)
        return observed[at[first]].tolist()

    def conclude(self) -> Finding:
        c = self.counts
        if c["injected_messages"]:
            return self.differs(
                f"{c['injected_messages']} messages of users and tools contain control tokens, in "
                f"{c['rows']} rows"
            )
        if c["irregular_stretches"]:
            names = ", ".join(name for name, _ in self._irregular.most_common(3))
            return self.information(
                f"{c['irregular_stretches']} of {c['stretches']} observed stretches have control "
                f"tokens in an order that the renderer does not write ({names}); the messages "
                "would tell where they come from"
            )
        if c["messages"]:
            return self.consistent(
                f"{c['messages']} messages of users and tools are text in their rows; "
                f"{c['spelt_messages']} of them spell a control token"
            )
        if c["stretches"]:
            return self.consistent(
                f"the control tokens of {c['stretches']} observed stretches are in an order that "
                "the renderer writes"
            )
        return self.not_checkable("messages or renderer")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained after an injected control token: the sampler may have read text."""
        return rows.cut_from([at for at, _ in self._injected(rows)])


class _Spelt:
    """The tokens of one row as bytes, with and without its control tokens."""

    def __init__(self, pieces: list[bytes], is_control: BoolArray) -> None:
        self._pieces, self._is_control = pieces, is_control
        self._whole = b"".join(pieces)

    def control_inside(self, words: bytes, *, is_spelt: bool) -> int | None:
        """Position of the first control token inside `words`, if every occurrence of them has one.

        is_spelt: the words spell a control token, and may have become it. None too if they are not
        in the row at all.
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
    """Pairs of control ids that the renderer writes one after the other in observed text: in
    prompts with and without tools, and after turns that ended or were cut off at any token."""
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
