"""The renderer protocol: messages to token ids and back.

Code above this room sees messages, code below it sees ids. An id that the model sampled is read by
`parse` and never encoded again.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import RendererError
from lockstep.renderers.pieces import Piece, encode_pieces, refuse_replies, require_reply
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Message, ToolSchema

TokenIds = Sequence[int] | Int32Array
"""Token ids of one turn: a list, or the array that an engine returned."""


@runtime_checkable
class Renderer(Protocol):
    """Writes one dialogue as ids, piece by piece, and parses the model's turns.

    The engine sees `render(m) + sampled_1 + extend(sampled_1, reply_1) + sampled_2 + ...` for every
    dialogue. `lockstep.testing.check_renderer` checks an implementation.
    """

    name: str
    tokenizer: Tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn. The engine stops after the first one, which is sampled and
        trained."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Returns the first prompt, up to the model's first sampled id."""
        ...

    def extend(self, sampled_ids: TokenIds, messages: Sequence[Message]) -> list[int]:
        """Returns the ids after a sampled turn: its end if it was cut off, `messages`, the next
        opening.

        The result never contains `sampled_ids`. `messages` are those since the turn (tool replies,
        a user's next message), never an assistant's. A turn that ended with a stop id needs no end;
        one that reached its length limit gets one, as observed ids.
        """
        ...

    @property
    def thinking_opening(self) -> tuple[int, ...]:
        """Ids at the end of an opening that begin the thinking of the turn. Empty if the model
        samples them itself (Qwen3) or never thinks; `<think>` and a line break for Qwen3.5. On a
        path whose thinking was dropped, openings end before them."""
        ...

    def forgets(self, messages: Sequence[Message]) -> bool:
        """True if the thinking of all earlier turns is dropped when `messages` follow a turn.

        Only with `thinking=drop`, when a user speaks again. The dialogue then continues as a new
        branch: its earlier turns are `without_thinking`, and their tokens are observed there. The
        branch equals what `render` writes for the same history, as far as the model spelled its
        turns as `render` does.
        """
        ...

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        """Returns the ids of a sampled turn without its thinking, or the same ids if it has none.

        Ids are cut; text is encoded again only where the cut lies inside a token. `extend` accepts
        the result like a sampled turn. The result lies on a path whose openings lost their
        `thinking_opening`, and is not cut again. With such an opening, a turn that was cut off
        comes back closed: without the opening nothing shows whether it was still thinking.
        """
        ...

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one sampled turn. Never raises: `parse_error` says what is malformed, and all text
        that the model wrote is kept."""
        ...

    def render_reply(self, message: Message) -> list[int]:
        """Returns the ids that a model would sample for an assistant message, stop id included.

        For supervised data. The ids continue after `render` or `extend`; `parse` reads them back
        equal.
        """
        ...


class TurnRenderer(ABC):
    """Base of ChatML, harmony, Llama 3 and Mistral. Writes a dialogue from the parts that a format
    defines: the beginning, the text after a turn, the body of a turn, and the end of a turn that
    was cut off. `Renderer` documents the methods."""

    name: str
    thinking_opening: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, *, stop_ids: tuple[int, ...]) -> None:
        """stop_ids: the format's. The model's own (`Tokenizer.eos_ids`) follow them."""
        self.tokenizer = tokenizer
        self.stop_ids = tuple(dict.fromkeys((*stop_ids, *tokenizer.eos_ids)))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Returns the first prompt, as the model's template writes it; the module lists
        exceptions."""
        return encode_pieces(self.tokenizer, self._prompt(messages, tools))

    def extend(self, sampled_ids: TokenIds, messages: Sequence[Message]) -> list[int]:
        """Returns the end of a turn that was cut off, `messages`, and the next opening. A turn that
        was cut off inside a call gets no end of the call: it would say that the call was made."""
        refuse_replies(messages)
        is_whole = len(sampled_ids) > 0 and int(sampled_ids[-1]) in self.stop_ids
        close = [] if is_whole else self._close(sampled_ids)
        return encode_pieces(self.tokenizer, [*close, *self._follow_up(messages)])

    def render_reply(self, message: Message) -> list[int]:
        """Returns the ids that the model samples for `message`, stop id included.

        Raises RendererError for what the format cannot write.
        """
        require_reply(message)
        return encode_pieces(self.tokenizer, self._body(message))

    @abstractmethod
    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one sampled turn."""

    def forgets(self, messages: Sequence[Message]) -> bool:
        return False

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        return [int(id_) for id_ in sampled_ids]

    @abstractmethod
    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """The first prompt, opening included."""

    @abstractmethod
    def _follow_up(self, messages: Sequence[Message]) -> list[Piece]:
        """The pieces from a stop id to the end of the next opening."""

    @abstractmethod
    def _body(self, message: Message) -> list[Piece]:
        """An assistant message without its opening, stop id included."""

    def _refuse_thinking(self, message: Message) -> None:
        if message.thinking:
            raise RendererError(
                f"a message has thinking, and the format of {self.name} has no place for it. Leave "
                "the thinking out, or choose the renderer of a model that thinks."
            )

    def _close(self, sampled_ids: TokenIds) -> list[Piece]:
        """The end of a turn that was cut off."""
        return [self.stop_ids[0]]


@runtime_checkable
class TypesArguments(Protocol):
    """Renderers whose calls may carry no types: the dialogue's tools say which arguments are
    text."""

    def with_tools(self, tools: Sequence[ToolSchema]) -> Renderer:
        """Returns this renderer for the turns of one dialogue, which declares `tools`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Limits of a reply: JSON of the schema, or one call of one of the tools."""

    schema: Mapping[str, Any] | None = None
    """JSON Schema of the content; None allows no content."""
    tools: tuple[ToolSchema, ...] = ()
    where: str = "the request"
    """Name of the field that asks for it, for messages."""


@runtime_checkable
class Constraining(Protocol):
    """Renderers that can write a constraint as a grammar of sampled turns."""

    def grammar(self, constraint: Constraint) -> str:
        """The grammar (`engines.grammar`) of whole turns, stop id included. Thinking is free."""
        ...


# One spelling of JSON: `json.dumps` writes it, and so do the calls that models are trained on.
# Free white space would let a model write spaces until its limit.
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Part of a grammar: JSON of this schema.

    >>> json_rule({"type": "integer"})[:30]
    '%json {"type": "integer", "x-g'
    """
    return f"%json {json.dumps({**schema, 'x-guidance': _SPELLING})}"


def grammar_of(bodies: Sequence[str], *, thinking: str, before: str = "", after: str = "") -> str:
    """The grammar of a turn: thinking, which may be left out, then one of `bodies` between the
    other two. thinking: part of a grammar whose TEXT is any text; "" allows none.

    >>> print(grammar_of(["<[7]>", "<[8]>"], thinking="", after=" <[9]>"))
    start: (body0 | body1) <[9]>
    body0: <[7]>
    body1: <[8]>
    """
    lines = [f"body{at}: {body}" for at, body in enumerate(bodies)]
    names = " | ".join(f"body{at}" for at in range(len(bodies)))
    if thinking:
        lines += [f"thinking: {thinking}", "TEXT: /(.|\\n)*/"]
        before = f"thinking? {before}"
    return "\n".join([f"start: {before}({names}){after}", *lines])


def dialogue_pieces(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> Iterator[tuple[list[int], int | None]]:
    """Writes a dialogue as a rollout would have seen it: the first prompt once, each reply as the
    ids that the model would sample, and between replies only the new messages.

    Yields (ids, index of the reply among `messages`; None where no assistant wrote the ids). What
    follows the last reply is not written.
    """
    first, reply = 0, None
    for at, message in enumerate(messages):
        if message.role != "assistant":
            continue
        new = messages[first:at]
        yield renderer.render(new, tools) if reply is None else renderer.extend(reply, new), None
        first, reply = at + 1, renderer.render_reply(message)
        yield reply, at
