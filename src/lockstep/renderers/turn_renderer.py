"""The base of renderers that write a dialogue from parts: ChatML, harmony, Llama 3, Mistral."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds
from lockstep.renderers.pieces import Piece, encode_pieces, refuse_replies, require_reply
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolSchema


class TurnRenderer(ABC):
    """Writes a dialogue from the parts that a format defines: the beginning, the text after a turn,
    the body of a turn, and the end of a turn that was cut off. `base.Renderer` documents the
    methods."""

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
