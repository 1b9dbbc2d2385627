"""A renderer of your own: a format that is not among the shipped ones, proven before it is used.

    <|user|>Who is it?<|end|><|assistant|>           <- render ends, sampling begins here
    I search.<|call|>find
    {"q": 1}<|end|>                                  <- sampled, <|end|> is its stop id
    <|tool|>find
    Bela<|end|><|assistant|>                         <- extend ends, sampling begins here

`python my_renderer.py` proves it. In a run: `--plugin my_renderer renderer=plain model=DIR`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer, TokenIds
from lockstep.renderers.config import RendererConfig
from lockstep.renderers.pieces import Piece, encode_pieces
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolCall, ToolSchema

CONTROL_TOKENS = ("<|system|>", "<|user|>", "<|tool|>", "<|assistant|>", "<|call|>", "<|end|>")


class PlainRenderer:
    """Messages to tokens and back. `encode` never makes a control token from text."""

    name = "plain"
    thinking_opening: tuple[int, ...] = ()  # this format has no thinking

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = tokenizer.require(CONTROL_TOKENS)  # one error that names all that are missing
        self._system, self._user, self._tool, self._assistant, self._call, self._end = ids.values()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._end,)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        pieces: list[Piece] = []
        if tools:
            declared = [{"name": t.name, "parameters": dict(t.parameters)} for t in tools]
            pieces += [self._system, f"Tools: {json.dumps(declared)}", self._end]
        for message in messages:
            pieces += self._pieces(message)
        return encode_pieces(self.tokenizer, [*pieces, self._assistant])

    def extend(self, sampled_ids: TokenIds, messages: Sequence[Message]) -> list[int]:
        """Encodes new messages only: sampled ids are never written again."""
        is_closed = len(sampled_ids) > 0 and int(sampled_ids[-1]) == self._end
        pieces: list[Piece] = [] if is_closed else [self._end]
        for message in messages:
            if message.role == "assistant":
                raise RendererError("an assistant's turn enters a dialogue as sampled ids.")
            pieces += self._pieces(message)
        return encode_pieces(self.tokenizer, [*pieces, self._assistant])

    def forgets(self, messages: Sequence[Message]) -> bool:
        return False

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        return list(sampled_ids)

    def render_reply(self, message: Message) -> list[int]:
        return encode_pieces(self.tokenizer, self._pieces(message)[1:])

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Never raises: `parse_error` names a malformed part, and all text is kept."""
        ids = [int(id_) for id_ in sampled_ids]
        error = "" if ids[-1:] == [self._end] else "the turn was cut off"
        body = ids if error else ids[:-1]
        stray = [i for i in body if i in self.tokenizer.control_ids and i != self._call]
        if stray:
            error = f"{self.tokenizer.control_name(stray[0])} stands inside a turn"
        if error:
            text = self.tokenizer.decode(body)
            return Message(role="assistant", content=text, parse_error=error)
        content, *calls = self._split(body)
        read = [call.partition("\n") for call in calls]
        if any(not name or not newline for name, newline, _ in read):
            text, error = self.tokenizer.decode(body), "a call has no name"
            return Message(role="assistant", content=text, parse_error=error)
        return Message(
            role="assistant",
            content=content,
            tool_calls=tuple(ToolCall(name=name, arguments=text) for name, _, text in read),
        )

    def _split(self, ids: list[int]) -> list[str]:
        parts: list[list[int]] = [[]]
        for id_ in ids:
            if id_ == self._call:
                parts.append([])
            else:
                parts[-1].append(id_)
        return [self.tokenizer.decode(part) for part in parts]

    def _pieces(self, message: Message) -> list[Piece]:
        match message.role:
            case "assistant":
                pieces: list[Piece] = [self._assistant, message.content]
                for call in message.tool_calls:
                    pieces += [self._call, f"{call.name}\n{call.arguments}"]
                return [*pieces, self._end]
            case "tool":
                return [self._tool, f"{message.name}\n{message.content}", self._end]
            case "user":
                return [self._user, message.content, self._end]
            case _:
                return [self._system, message.content, self._end]


@dataclass(frozen=True, kw_only=True)
class PlainConfig(RendererConfig):
    """The format above. Its tag on the command line is `plain`."""


@make_renderer.register
def _(config: PlainConfig, tokenizer: Tokenizer) -> Renderer:
    return PlainRenderer(tokenizer)


if __name__ == "__main__":
    from lockstep.testing.renderers import check_renderer
    from lockstep.testing.tokenizers import byte_tokenizer

    check_renderer(PlainRenderer(byte_tokenizer(control_tokens=CONTROL_TOKENS)), has_thinking=False)
    print("every invariant holds")
