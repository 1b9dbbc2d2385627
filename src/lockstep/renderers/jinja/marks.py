"""Rendered text to ids, so that no text of the dialogue becomes a control token.

A template mixes its own control tokens and the dialogue's text in one string. Before it renders,
each text that could be part of a control token's name gets a mark: a character that occurs nowhere
in the dialogue. A name that contains a mark, or lies across the seam between the template's text
and the dialogue's, is text. Marks are removed before text is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from lockstep.errors import RendererError
from lockstep.renderers.pieces import Piece
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.tables import tables_beside

_CANDIDATES = range(0xE000, 0xF8FF)  # private use: no font, no language and no protocol has them
_ESCAPE = re.compile(r"\\u([ef][0-9a-f]{3})", re.IGNORECASE)
_TABLES = tables_beside(__file__)
_PLAIN: frozenset[str] = frozenset(_TABLES["plain"])
"""Values that templates compare with; none of them is the whole name of a control token."""
_PROTOCOL_KEYS: frozenset[str] = frozenset(_TABLES["protocol_keys"])
"""Keys that a template needs to read messages and tools. A mark would hide the field: Granite's
`<|start_of_role|>` contains `role`, and Kimi's `[start_header_id]` contains `id`."""


class Marks:
    """Marks for the control tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = {tokenizer.control_name(id_): id_ for id_ in tokenizer.control_ids}
        # A name of blanks or of one character cannot be marked: in a template it is text.
        self._ids = {name: id_ for name, id_ in names.items() if len(name.strip()) > 1}
        self._sizes = sorted({len(name) for name in self._ids}, reverse=True)
        self._longest = max(self._sizes, default=0)
        self._inside = "\0".join(self._ids)
        firsts, lasts = {name[0] for name in self._ids}, {name[-1] for name in self._ids}
        first = re.escape("".join(sorted(firsts)))
        self._first = re.compile(f"[{first}]" if firsts else "(?!)")
        self._begin = {ord(c) for c in firsts if not c.isalnum() and not c.isspace()}
        self._end = {ord(c) for c in lasts if not c.isalnum() and not c.isspace()}
        self._has_word_edges = any(c.isalnum() or c.isspace() for c in firsts | lasts)

    def choose(self, texts: Iterable[str]) -> str:
        """Returns a character that occurs in none of the texts, neither itself nor as a JSON
        escape."""
        whole = "\0".join(texts)
        used = {*map(ord, set(whole)), *(int(code, 16) for code in _ESCAPE.findall(whole))}
        for code in _CANDIDATES:
            if code not in used:
                return chr(code)
        raise RendererError("the dialogue has every character of the private use area.")

    def marked(self, value: Any, mark: str) -> Any:
        """Returns `value` (JSON) with marks in all its texts, and in keys that are not the
        protocol's. Equal texts stay equal."""
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value)
            return {
                k if k in _PROTOCOL_KEYS else self.mark(k, mark): self.marked(v, mark)
                for k, v in fields.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(v, mark) for v in cast("list[Any]", value)]
        return value

    def mark(self, text: str, mark: str) -> str:
        """Puts a mark after each character that begins a name and before each that ends one. Text
        that could be the middle of a name is also marked at both edges, inside the white space that
        a template may strip."""
        core = text.strip()
        if not core or text in _PLAIN:
            return text
        table: dict[int, str] = {}
        for code in self._begin | self._end:
            before = mark if code in self._end else ""
            table[code] = before + chr(code) + (mark if code in self._begin else "")
        out = text.translate(table)
        if self._has_word_edges:
            out = self.protect(out, mark)
        if self._has_word_edges or (len(core) < self._longest and core in self._inside):
            begin = len(out) - len(out.lstrip())
            end = len(out.rstrip())
            out = f"{out[:begin]}{mark}{out[begin:end]}{mark}{out[end:]}"
        return out

    def protect(self, text: str, mark: str) -> str:
        """Returns `text` with a mark inside each name that it spells."""
        out: list[str] = []
        begin = 0
        for at, _ in self._found(text):
            out.append(text[begin : at + 1] + mark)
            begin = at + 1
        return "".join([*out, text[begin:]])

    def pieces(self, text: str, mark: str) -> list[Piece]:
        """Splits rendered text into control ids and text without marks."""
        out: list[Piece] = []
        begin = 0
        for at, name in self.names(text):
            if at > begin:
                out.append(unmarked(text[begin:at], mark))
            out.append(self._ids[name])
            begin = at + len(name)
        rest = unmarked(text[begin:], mark)
        return [*out, rest] if rest else out

    def names(self, text: str) -> list[tuple[int, str]]:
        """Returns (position, name) of the control tokens in rendered text. Where several names
        begin, the longest counts, as in the tokenizers library."""
        out: list[tuple[int, str]] = []
        end = 0
        for at, name in self._found(text):
            if at >= end:
                out.append((at, name))
                end = at + len(name)
        return out

    def _found(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields every position of a name, also overlapping ones; the longest name per position."""
        for found in self._first.finditer(text):
            at = found.start()
            for size in self._sizes:
                if text[at : at + size] in self._ids:
                    yield at, text[at : at + size]
                    break


def unmarked(text: str, mark: str) -> str:
    """Returns `text` without marks, also without marks that a template wrote as JSON escapes."""
    if not mark:
        return text
    text = text.replace(mark, "")
    escape = f"\\u{ord(mark):04x}"
    return re.sub(re.escape(escape), "", text, flags=re.IGNORECASE) if "\\u" in text else text
