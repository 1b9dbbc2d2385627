"""ChatML as Qwen2.5 and Qwen3 write it, piece by piece.

    <|im_start|>user
    Who is it?<|im_end|>
    <|im_start|>assistant                                      <- render ends after this line break
    <think>
    I search.
    </think>

    <tool_call>
    {"name": "find", "arguments": {"q": 1}}
    </tool_call><|im_end|>                                     <- sampled
    <|im_start|>user                                           <- extend begins with the line break
    <tool_response>
    Bela
    </tool_response><|im_end|>
    <|im_start|>assistant                                      <- extend ends after this line break

Sources: the chat templates of Qwen3 and Qwen2.5 (tokenizer_config.json), with which tests/parity/
test_qwen3_template_parity.py compares and lists every difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lockstep.errors import RendererError
from lockstep.renderers.base import Constraint, TokenIds, TurnRenderer, grammar_of, json_rule
from lockstep.renderers.calls import call_text, function_json
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.jinja.formats import CallFormat
from lockstep.renderers.jinja.marks import Marks
from lockstep.renderers.jinja.reader import ShapeReader
from lockstep.renderers.jinja.shape import Shape, Thinking
from lockstep.renderers.pieces import Piece, encode_pieces, split_system
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.tables import tables_beside
from lockstep.types import Message, ToolSchema

_TEXTS = tables_beside(__file__)
QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
THINKING_TOKENS = ("<think>", "</think>", "<tool_response>", "</tool_response>")


class ChatMLRenderer(ShapeReader, TurnRenderer):
    """Messages to Qwen3 tokens and back; with `variant=qwen2.5`, to Qwen2.5 tokens.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> from lockstep.types import ToolCall
    >>> tokenizer = byte_tokenizer()
    >>> renderer = ChatMLRenderer(tokenizer, ChatMLConfig(has_empty_thinking=False))
    >>> print(tokenizer.decode(renderer.render([Message(role="user", content="hi")])), end="")
    <|im_start|>user
    hi<|im_end|>
    <|im_start|>assistant
    >>> call = ToolCall(name="find", arguments='{"q": 1}')
    >>> message = Message(role="assistant", tool_calls=(call,))
    >>> sampled = renderer.render_reply(message)
    >>> print(tokenizer.decode(sampled))
    <tool_call>
    {"name": "find", "arguments": {"q": 1}}
    </tool_call><|im_end|>
    >>> renderer.parse(sampled) == message
    True
    """

    name = "chatml"

    def __init__(self, tokenizer: Tokenizer, config: ChatMLConfig | None = None) -> None:
        """Raises RendererError, which lists the missing control tokens."""
        self.config = config or ChatMLConfig()
        self._thinks = self.config.variant != "qwen2.5"
        names = CHATML_TOKENS + (THINKING_TOKENS if self._thinks else ())
        ids = list(tokenizer.require(names).values())
        self._start, self._end, self._call, self._call_end = ids[:4]
        self._think = self._think_end = -1  # no id: never written, never sampled
        self._reply: Piece = "<tool_response>"
        self._reply_end: Piece = "</tool_response>"
        if self._thinks:
            self._think, self._think_end, self._reply, self._reply_end = ids[4:]
        super().__init__(tokenizer, stop_ids=(self._end,))
        self._marks = Marks(tokenizer)
        thinking = Thinking(key="", open="<think>\n", close="\n</think>\n\n")
        end, call, call_end = CHATML_TOKENS[1:]
        self.shape = Shape(
            words_end=end,
            stop=end,
            thinking=thinking if self._thinks else None,
            calls=CallFormat(kind="json", open=call, close=call_end),
        )
        self._opening: list[Piece] = [self._start, "assistant\n"]
        if self._thinks and not self.config.enable_thinking:
            self._opening += self._thinking_pieces("")
        # Empty unless `enable_thinking` is off: Qwen3 models sample them.
        self.thinking_opening = tuple(encode_pieces(tokenizer, self._opening[2:]))

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """As the Qwen3 template renders it with a generation prompt. A developer message is written
        as a system message: ChatML has no developer role."""
        words, rest = split_system(messages)
        if words is None and not self._thinks:
            words = QWEN25_SYSTEM
        system: list[Piece] = [] if words is None else [words]
        if tools and self.config.tools_in_prompt:
            system += [*(["\n\n"] if system else []), *self._tools_pieces(tools)]
        if system:
            system = [self._start, "system\n", *system, self._end, "\n"]
        return [*system, *self._dialogue_pieces(rest), *self._opening]

    def _follow_up(self, messages: Sequence[Message]) -> list[Piece]:
        return ["\n", *self._dialogue_pieces(messages), *self._opening]

    def forgets(self, messages: Sequence[Message]) -> bool:
        """True with thinking=drop, when a user speaks. A user message between <tool_response> tags
        counts as a tool's reply, as in the Qwen3 template."""
        return self.config.thinking == "drop" and self._thinks and any(map(_is_query, messages))

    def _body(self, message: Message) -> list[Piece]:
        """Raises RendererError for thinking if the opening already closed the thinking block."""
        pieces: list[Piece] = []
        if message.thinking and not self.config.enable_thinking:
            raise RendererError(
                "the message has thinking, but renderer.enable_thinking=False opens each turn with "
                "an empty thinking block. Leave the thinking out, or turn it on."
            )
        has_empty = self._thinks and self.config.enable_thinking and self.config.has_empty_thinking
        if message.thinking or has_empty:
            pieces += self._thinking_pieces(message.thinking)
        return [*pieces, message.content, *self._call_pieces(message), self._end]

    def grammar(self, constraint: Constraint) -> str:
        """See `base.Constraining`."""
        bodies: list[str] = []
        if constraint.schema is not None:
            bodies.append(json_rule(constraint.schema))
        for tool in constraint.tools:
            called = {"name": {"const": tool.name}, "arguments": tool.parameters}
            # References such as #/$defs/City are to the root.
            names = ("$defs", "definitions")
            shared = {name: tool.parameters[name] for name in names if name in tool.parameters}
            call = json_rule(_closed(called) | shared)
            bodies.append(f'<[{self._call}]> "\\n" {call} "\\n" <[{self._call_end}]>')
        thinking = ""
        if self._thinks and self.config.enable_thinking:
            thinking = f'<[{self._think}]> TEXT <[{self._think_end}]> "\\n\\n"'
        return grammar_of(bodies, thinking=thinking, after=f" <[{self._end}]>")

    def _dialogue_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Writes whole messages, each with the line break after it. Consecutive tool replies share
        one user turn."""
        pieces: list[Piece] = []
        queries = [at for at, message in enumerate(messages) if _is_query(message)]
        last_query = queries[-1] if queries else len(messages) - 1
        for at, message in enumerate(messages):
            match message.role:
                case "tool":
                    if at == 0 or messages[at - 1].role != "tool":
                        pieces += [self._start, "user"]
                    pieces += ["\n", self._reply, f"\n{message.content}\n", self._reply_end]
                    if at + 1 == len(messages) or messages[at + 1].role != "tool":
                        pieces += [self._end, "\n"]
                case "user":
                    pieces += [self._start, f"user\n{message.content}", self._end, "\n"]
                case "system" | "developer":
                    pieces += [self._start, f"system\n{message.content}", self._end, "\n"]
                case "assistant":
                    is_last = at + 1 == len(messages)
                    body = self._history_pieces(message, at > last_query, is_last)
                    pieces += [self._start, "assistant\n", *body, self._end, "\n"]
        return pieces

    def _history_pieces(self, message: Message, is_after_query: bool, is_last: bool) -> list[Piece]:
        """Writes an assistant message of a history. The template strips line breaks around the
        thinking and before the content, and writes an empty block in the very last message."""
        has_block = bool(message.thinking)
        if self.config.thinking == "drop":
            has_block = is_after_query and ((is_last and self._thinks) or has_block)
        if not has_block:
            return [message.content, *self._call_pieces(message)]
        thinking = self._thinking_pieces(message.thinking.strip("\n"))
        return [*thinking, message.content.lstrip("\n"), *self._call_pieces(message)]

    def _thinking_pieces(self, thinking: str) -> list[Piece]:
        if not self._thinks:
            raise RendererError(
                "a message has thinking, and renderer.variant=qwen2.5 has no place for it. Leave "
                "the thinking out, or choose the renderer of a model that thinks."
            )
        return [self._think, f"\n{thinking}\n", self._think_end, "\n\n"]

    def _call_pieces(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = []
        for at, call in enumerate(message.tool_calls):
            separator = "\n" if at or message.content else ""
            pieces += [separator, self._call, f"\n{call_text(call)}\n", self._call_end]
        return pieces

    def _tools_pieces(self, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The template's instructions. Where they show the tags of a call, those are control
        tokens."""
        lines = [f"\n{json.dumps(function_json(tool), ensure_ascii=False)}" for tool in tools]
        tags = {"<tool_call>": self._call, "</tool_call>": self._call_end}
        words = re.split("(</?tool_call>)", _TEXTS["tools"])
        return [tags.get(word, word.replace("SCHEMAS", "".join(lines))) for word in words]

    def _close(self, sampled_ids: TokenIds) -> list[Piece]:
        """Closes open thinking too. An open <tool_call> stays open: closing it would say that a
        call was made."""
        for id_ in reversed(sampled_ids):
            if id_ == self._think_end:
                break
            if id_ == self._think:
                return ["\n", self._think_end, "\n\n", self._end]
        return [self._end]


def _is_query(message: Message) -> bool:
    """True if a user speaks; tool replies may be wrapped in a user's message."""
    text = message.content
    is_reply = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message.role == "user" and not is_reply


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of an object with exactly these."""
    exactly = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **exactly}
