"""The format of Llama 3.1, 3.2 and 3.3, piece by piece.

    <|begin_of_text|><|start_header_id|>system<|end_header_id|>

    Environment: ipython
    Cutting Knowledge Date: December 2023
    Today Date: 26 Jul 2024

    <|eot_id|><|start_header_id|>user<|end_header_id|>

    Who is it?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

                                                               <- render ends after an empty line
    {"name": "find", "parameters": {"q": 1}}<|eot_id|>         <- sampled
    <|start_header_id|>ipython<|end_header_id|>                <- extend begins here

    "Bela"<|eot_id|><|start_header_id|>assistant<|end_header_id|>

                                                               <- extend ends after an empty line

A call alone is JSON and ends with <|eot_id|>, as the template writes it. The template has no place
for words beside a call, or for several calls; they are written as Llama's own agents do: the words,
<|python_tag|>, the calls with a semicolon between them, <|eom_id|>.

Source: the chat template of Llama 3.2 (tokenizer_config.json); tests/parity/
test_llama3_template_parity.py compares with it and lists every difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds, TurnRenderer
from lockstep.renderers.calls import call_text, function_json, read_call_list, read_whole_call
from lockstep.renderers.config import Llama3Config
from lockstep.renderers.pieces import Piece, cut_at, split_system, split_turn, text_of
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.tables import tables_beside
from lockstep.types import Message, ToolCall, ToolSchema

_TEXTS = tables_beside(__file__)
_KEY = "parameters"
_IGNORED = ("type",)  # the models often write the tool's "type": "function" with the call


_HEADER_NAMES = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id")
_TURN_NAMES = ("eot_id", "eom_id", "python_tag")
LLAMA3_TOKENS = tuple(f"<|{name}|>" for name in (*_HEADER_NAMES, *_TURN_NAMES))


class Llama3Renderer(TurnRenderer):
    """Messages to Llama 3 tokens and back.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer(control_tokens=LLAMA3_TOKENS)
    >>> renderer = Llama3Renderer(tokenizer, Llama3Config(current_date=""))
    >>> begun = tokenizer.decode(renderer.render([Message(role="user", content="hi")]))
    >>> begun.startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>")
    True
    >>> call = ToolCall(name="find", arguments='{"q": 1}')
    >>> sampled = renderer.render_reply(Message(role="assistant", tool_calls=(call,)))
    >>> tokenizer.decode(sampled)
    '{"name": "find", "parameters": {"q": 1}}<|eot_id|>'
    >>> renderer.parse(sampled).tool_calls == (call,)
    True
    """

    name = "llama3"

    def __init__(self, tokenizer: Tokenizer, config: Llama3Config | None = None) -> None:
        """Raises RendererError, which lists the missing control tokens."""
        ids = list(tokenizer.require(LLAMA3_TOKENS).values())
        self._begin, end_of_text, self._start, self._header_end = ids[:4]
        self._end, self._handover, self._python = ids[4:]
        super().__init__(tokenizer, stop_ids=(self._end, self._handover, end_of_text))
        self.config = config or Llama3Config()
        self._opening = self._header("assistant")

    def _header(self, role: str) -> list[Piece]:
        return [self._start, role, self._header_end, "\n\n"]

    def _block(self, role: str, text: str) -> list[Piece]:
        return [*self._header(role), text, self._end]

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        declared = tools if self.config.tools_in_prompt else ()
        system, rest = split_system(messages)
        shown = (json.dumps(function_json(t), ensure_ascii=False, indent=4) for t in declared)
        listed = "".join(f"{schema}\n\n" for schema in shown)
        is_in_user_message = bool(declared) and self.config.tools_in_user_message
        head = self._dates(bool(declared))
        if declared and not is_in_user_message:
            head += _TEXTS["in_system_message"] + listed
        pieces: list[Piece] = [self._begin]
        if head or system is not None:
            pieces += self._block("system", head + (system or "").strip())
        if is_in_user_message:
            if not rest or rest[0].role != "user":
                found = rest[0].role if rest else "nothing"
                raise RendererError(
                    "Llama 3 reads its tools in the first user message, which must come "
                    f"first: found {found}. Or set renderer.tools_in_user_message=false."
                )
            words = rest.pop(0).content.strip()
            pieces += self._block("user", _TEXTS["in_user_message"] + listed + words)
        return [*pieces, *self._follow_up(rest)]

    def _dates(self, has_tools: bool) -> str:
        if not self.config.current_date:
            return ""
        environment = "Environment: ipython\n" if has_tools else ""
        return (
            f"{environment}Cutting Knowledge Date: December 2023\n"
            f"Today Date: {self.config.current_date}\n\n"
        )

    def _follow_up(self, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for message in messages:
            match message.role:
                case "tool":
                    is_json = self.config.tool_replies == "json"
                    text = json.dumps(message.content, ensure_ascii=False)
                    pieces += self._block("ipython", text if is_json else message.content)
                case "user":
                    pieces += self._block("user", message.content.strip())
                case "system" | "developer":
                    pieces += self._block("system", message.content.strip())
                case "assistant":
                    pieces += [*self._opening, *self._body(message, is_given=True)]
        return [*pieces, *self._opening]

    def _body(self, message: Message, *, is_given: bool = False) -> list[Piece]:
        """is_given: the message is part of a history, where the template strips it."""
        self._refuse_thinking(message)
        content = message.content.strip() if is_given else message.content
        calls = [call_text(call, arguments_key=_KEY) for call in message.tool_calls]
        if not calls:
            return [content, self._end]
        if len(calls) == 1 and not content:
            return [calls[0], self._end]
        return [content, self._python, "; ".join(calls), self._handover]

    def render_reply(self, message: Message) -> list[int]:
        """Raises RendererError for messages that would be read back as another one: calls are
        text."""
        ids = super().render_reply(message)
        read = self.parse(ids)
        if read.parse_error or len(read.tool_calls) != len(message.tool_calls):
            shown = self.tokenizer.decode(ids)
            raise RendererError(f"a reply would be read back as another message: {shown!r}.")
        return ids

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one turn: text, or a call as JSON, or text <|python_tag|> calls.

        A JSON object of "name" and "parameters" is a call if it is the whole turn or follows
        <|python_tag|>; the text of its parameters is kept. Code after <|python_tag|>, which Llama
        writes for its built-in tools, is not a call. Malformed parts stay in `content`, control
        tokens by name, and `parse_error` says why.
        """
        parts, error = split_turn(self.tokenizer, sampled_ids, self.stop_ids)
        words, behind, problem = cut_at(self.tokenizer, parts, self._python)
        keys: dict[str, Any] = {"arguments_key": _KEY, "ignored_keys": _IGNORED}
        calls: list[ToolCall] | str = []
        if behind is not None:
            calls = read_call_list(behind, separator=";", **keys)
        elif not problem and (call := read_whole_call(words, **keys)):
            words, calls = ("", [call]) if isinstance(call, ToolCall) else (words, call)
        if isinstance(calls, str):
            words, problem, calls = text_of(self.tokenizer, parts), calls, []
        error = error or problem
        if not calls and not error and sampled_ids[-1] == self._handover:
            error = "<|eom_id|> ends a turn that calls nothing"
        return Message(role="assistant", content=words, tool_calls=tuple(calls), parse_error=error)
