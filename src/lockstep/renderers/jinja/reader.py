"""Reads the model's turns by the shape of its template: thinking, text and calls."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds
from lockstep.renderers.jinja.formats import read_calls
from lockstep.renderers.jinja.marks import Marks, unmarked
from lockstep.renderers.jinja.shape import Shape, Thinking
from lockstep.renderers.pieces import (
    Piece,
    cut_front,
    cut_prefix,
    encode_pieces,
    split_turn,
    text_of,
)
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.xml_calls import TextParameters
from lockstep.types import Message


class ShapeReader:
    """The reading half of a renderer whose turns have a `Shape`."""

    tokenizer: Tokenizer
    shape: Shape
    stop_ids: tuple[int, ...]
    thinking_opening: tuple[int, ...] = ()
    _marks: Marks
    _schemas: TextParameters = {}  # noqa: RUF012  (never changed in place)

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one turn: thinking, text and calls, as the template writes them.

        A tag that is a control token counts only as that. The text of a call's arguments is kept;
        tags with one parameter each become JSON. Malformed parts stay in `content`, control tokens
        by name, and `parse_error` says why. With `with_tools`, a tool's schema decides between text
        and numbers where a call does not.
        """
        parts, error = split_turn(self.tokenizer, sampled_ids, self.stop_ids)
        try:
            mark = self._marks.choose(part for part in parts if isinstance(part, str))
        except RendererError as problem:
            content = text_of(self.tokenizer, parts)
            return Message(role="assistant", content=content, parse_error=str(problem))
        thinking, text, is_open = self._split_thinking(self._shown(parts, mark))
        if text.strip() and (self.shape.thinking is None or not self.shape.lead.strip()):
            text = text.removeprefix(self.shape.lead)  # Mistral's space before the words
        if not error:
            text = text.removesuffix(self.shape.words_end.removesuffix(self.shape.stop))
        error = error or ("the thinking is not closed" if is_open else "")
        turn = read_calls(text, self.shape.calls, self._schemas, mark, self._marks.names)
        error = error or turn.error
        if not error:
            stray = [name for words in turn.texts for _, name in self._marks.names(words)]
            error = f"{stray[0]} is out of place" if stray else ""
        return Message(
            role="assistant",
            content=unmarked(turn.content, mark),
            thinking=unmarked(thinking, mark),
            tool_calls=tuple(turn.calls),
            parse_error=error,
        )

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        """Returns the turn as the template writes it in a history, without the thinking and its
        tags."""
        ids = [int(id_) for id_ in sampled_ids]
        how = self.shape.thinking
        if how is None:
            return ids
        before, tag, _ = tag_in(how.open)
        blanks = self._ids(before)
        at = len(blanks) if ids[: len(blanks)] == blanks else 0
        opened = self._control(tag)
        begun = self.tokenizer.decode_bytes(ids[at : at + len(tag)]).startswith(tag.encode())
        if not (begun if opened is None else ids[at : at + 1] == [opened]):
            return ids
        body, end = ids[at:], list[int]()
        if ids and ids[-1] in self.stop_ids:
            body, end = ids[at:-1], ids[-1:]
        elif self.thinking_opening:
            end = self._ids(self.shape.words_end)
        return [*self._ids(self.shape.lead), *self._behind_thinking(body, how), *end]

    def _behind_thinking(self, ids: list[int], how: Thinking) -> list[int]:
        """Returns the ids after the thinking and its closing tag; none if it is not closed."""
        _, tag, blanks = tag_in(how.close)
        closed = self._control(tag)
        if closed is not None:
            rest = ids[ids.index(closed) + 1 :] if closed in ids else None
        else:
            found = self.tokenizer.decode_bytes(ids).find(tag.encode())
            size = found + len(tag.encode())
            rest = cut_front(self.tokenizer, ids, size) if found >= 0 else None
        if rest is None:
            return []
        return cut_prefix(self.tokenizer, rest, blanks.encode())

    def _shown(self, parts: Sequence[Piece], mark: str) -> str:
        """Returns the text of a turn, with control tokens by name and `mark` in spelled names."""
        shown = [self._marks.protect(p, mark) if isinstance(p, str) else p for p in parts]
        return text_of(self.tokenizer, shown)

    def _split_thinking(self, text: str) -> tuple[str, str, bool]:
        """Returns (thinking, the text after it, whether the thinking was left open)."""
        how = self.shape.thinking
        if how is None:
            return "", text, False
        before_open, opened, behind_open = tag_in(how.open)
        before_close, closed, behind_close = tag_in(how.close)
        begin = text.removeprefix(before_open)
        if not begin.startswith(opened):
            return "", text, False
        inside = begin[len(opened) :].removeprefix(behind_open)
        end = inside.find(closed)
        if end < 0:
            return inside, "", True
        rest = inside[end + len(closed) :].removeprefix(behind_close)
        return inside[:end].removesuffix(before_close), rest, False

    def _ids(self, text: str) -> list[int]:
        """Encodes the template's own text."""
        return encode_pieces(self.tokenizer, self._marks.pieces(text, ""))

    def _control(self, name: str) -> int | None:
        pieces = self._marks.pieces(name, "")
        return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], int) else None


def tag_in(text: str) -> tuple[str, str, str]:
    """(blanks, tag, blanks) of the text around thinking; three empty texts if it has no tag."""
    tag = text.strip()
    before, _, behind = text.partition(tag) if tag else ("", "", "")
    return before, tag, behind
