"""Was text from a tool or user encoded as control tokens?

Each message is searched in the text of its row: no control token may be inside it. The control
tokens between two replies are compared with those that the template writes, with messages or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.context import NEXT, around_words, openings_of
from lockstep.doctor.checks.tokens.replies import control_spelling
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.types import Int32Array, Message

MIN_WORDS_BYTES = 4
"""Bytes of a message that is searched for: shorter text is everywhere."""
MIN_UNWRITTEN = 2
"""Rows that must have a control token that the template does not write: one may be of another
dialogue format."""


class InjectedControl(Check):
    """Control tokens inside of messages from users and tools."""

    name = "tokens/injected_control"
    claim = "messages of users and tools are text in the rows, never control tokens"
    cause = "injected_control"
    needs = ("tokenizer",)

    def begin(self) -> None:
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
        unwritten = list(self._between_replies(rows))
        self.count(unwritten=len({int(rows.row_of[at]) for at in unwritten}))
        for at in unwritten:
            name = self.tokenizer.control_name(int(rows.token_ids[at]))
            note = f"{name} is inside what follows a reply, where the template writes none"
            self.show(0.5, rows, at, at + 1, note)

    def _between_replies(self, rows: Rows) -> Iterator[int]:
        """Index of each control token inside a message after a reply, by the template alone."""
        renderer = self.setting.renderer
        if renderer is None:
            return
        frames = self.setting.once("frames", lambda: Frames(renderer))
        spans, is_control = rows.spans, self._is_control(rows)
        begin, end = spans.end[:-1] - 1, spans.begin[1:]
        for at in np.flatnonzero(spans.row[:-1] == spans.row[1:]):
            self.count(observations=1)
            part = slice(begin[at], end[at])
            if (place := frames.too_many(rows.token_ids[part], is_control[part])) is not None:
                yield int(begin[at]) + place

    def _is_control(self, rows: Rows) -> BoolArray:
        return rows.once("control", lambda: np.isin(rows.token_ids, [*self.tokenizer.control_ids]))

    def _injected(self, rows: Rows) -> Iterator[tuple[int, bool]]:
        """(index of the first control token inside a message, whether the message spells it)."""
        is_control = self._is_control(rows)
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
        if c["unwritten"] >= MIN_UNWRITTEN:
            return self.differs(
                f"{c['unwritten']} rows have a control token inside a message after a reply, where "
                "the template writes none",
                "fit",
            )
        if not c["messages"] and not c["observations"]:
            return self.not_checkable("messages, or a renderer and several replies in a row")
        return self.consistent(
            f"{c['messages']} messages of users and tools are text in their rows; "
            f"{c['spelt_messages']} of them spell a control token"
        )

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained after an injected control token: the sampler may have read text."""
        unwritten = self._between_replies(rows) if self.counts["unwritten"] >= MIN_UNWRITTEN else ()
        return rows.cut_from([*(at for at, _ in self._injected(rows)), *unwritten])


class Frames:
    """The control tokens that a template writes between two replies, for any number of messages."""

    def __init__(self, renderer: Renderer) -> None:
        control, stop = renderer.tokenizer.control_ids, [renderer.stop_ids[0]]

        def controls(ids: Sequence[int]) -> str:
            return "".join(chr(i) for i in ids if i in control)

        heads, tails, inner = dict[Message, str](), dict[Message, str](), set[str]()
        for message in NEXT:
            around = around_words(message, lambda m: renderer.extend(stop, [m]))
            if around is not None:
                heads[message], tails[message] = map(controls, around)
        for one, two in product(heads, repeat=2):
            try:
                both = controls(renderer.extend(stop, [one, two]))
            except RendererError:
                continue
            inner.add(both[len(heads[one]) : len(both) - len(tails[two])])

        def any_of(words: Iterable[str]) -> str:
            return f"(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})"

        begin, end = any_of(heads.values()), any_of(tails.values())
        between = f"{any_of(inner)}*?" * bool(inner)
        self._sound = re.compile(f"{begin}{between}{end}", re.DOTALL)
        self._more = re.compile(f"{begin}{between}(?P<more>.){between}{end}", re.DOTALL)
        self._stops = frozenset(renderer.stop_ids)
        self._openings = openings_of(renderer) if heads else ()

    def too_many(self, ids: Int32Array, is_control: BoolArray) -> int | None:
        """Position of one inside a message where the template writes none; None if all are as it
        writes them, or otherwise in several places. ids: from the last one of a reply, which may
        have been cut before its stop id, to the next reply. is_control: of the same length."""
        places = 1 + np.flatnonzero(is_control[1:])
        is_cut = int(ids[0]) not in self._stops and not self._stops.isdisjoint(ids[places[:1]])
        places = places[int(is_cut) :]
        text = "".join(map(chr, ids[places].tolist()))
        found = None if self._sound.fullmatch(text) else self._more.fullmatch(text)
        if not self._openings or found is None:
            return None
        place = int(places[found.start("more")])
        before = ids[:place].tolist()
        # Directly behind the opening of a reply there is another prompt, and no message.
        is_prompt = any(before[len(before) - len(o) :] == list(o) for o in self._openings)
        return None if is_prompt else place


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
