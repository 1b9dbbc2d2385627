"""The format of Gemma 3, piece by piece.

    <bos><start_of_turn>user
    Search, then answer.                                       <- the system message

    Who is it?<end_of_turn>
    <start_of_turn>model                                       <- render ends after this line break
    {"name": "find", "parameters": {"q": 1}}<end_of_turn>      <- sampled
    <start_of_turn>user                                        <- extend begins with the line break
    ```tool_output
    Bela
    ```<end_of_turn>
    <start_of_turn>model                                       <- extend ends after this line break

The template knows a user and a model that take turns, and a system message before the first. What
it has no place for stands in the user's turn, with an empty line between its parts: a later system
message, several messages of the user, and what tools say, each between fences of `tool_output`.

Gemma has no tokens for tools. They are declared in the words that Google documents, behind the
system message. A call alone is a JSON object; beside words, or with others, it stands between
fences of `json`.

Source: the chat template of Gemma 3 (tokenizer_config.json), and "Function calling with Gemma"
(ai.google.dev); tests/parity/test_gemma_template_parity.py compares with the template and lists
every difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lockstep.renderers.base import TokenIds
from lockstep.renderers.calls import (
    call_text,
    function_json,
    json_extent,
    read_whole_call,
)
from lockstep.renderers.config import GemmaConfig
from lockstep.renderers.pieces import Piece, split_turn, text_of
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.turn_renderer import TurnRenderer
from lockstep.types import Message, ToolCall, ToolSchema

_TOOLS = (
    "You have access to functions. If you decide to invoke any of the function(s), you MUST put it "
    'in the format of {"name": function name, "parameters": dictionary of argument name and its '
    "value}\n\nYou SHOULD NOT include any other text in the response if you call a function\n"
)
_KEY = "parameters"
_FENCE = re.compile(r"```(?:json|tool_code)?[ \t]*\n\s*(?=\{)")
_FENCE_END = re.compile(r"\s*```")


class GemmaRenderer(TurnRenderer):
    """Messages to Gemma 3 tokens and back.

    >>> from lockstep.testing.tokenizers import GEMMA_TOKENS, sentencepiece_tokenizer
    >>> tokenizer = sentencepiece_tokenizer(control_tokens=GEMMA_TOKENS)
    >>> renderer = GemmaRenderer(tokenizer)
    >>> print(tokenizer.decode(renderer.render([Message(role="user", content="hi")])), end="")
    <bos><start_of_turn>user
    hi<end_of_turn>
    <start_of_turn>model
    >>> call = ToolCall(name="find", arguments='{"q": 1}')
    >>> sampled = renderer.render_reply(Message(role="assistant", tool_calls=(call,)))
    >>> tokenizer.decode(sampled)
    '{"name": "find", "parameters": {"q": 1}}<end_of_turn>'
    >>> renderer.parse(sampled).tool_calls == (call,)
    True
    """

    name = "gemma"
    has_text_calls = True

    def __init__(self, tokenizer: Tokenizer, config: GemmaConfig | None = None) -> None:
        """Raises RendererError, which lists the missing control tokens."""
        names = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>")
        self._begin, self._start, self._end, eos = tokenizer.require(names).values()
        super().__init__(tokenizer, stop_ids=(self._end, eos))
        self.config = config or GemmaConfig()
        self._opening: list[Piece] = [self._start, "model\n"]

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        declared = tools if self.config.tools_in_prompt else ()
        return [self._begin, *self._dialogue(messages, declared)]

    def _follow_up(self, messages: Sequence[Message]) -> list[Piece]:
        return ["\n", *self._dialogue(messages, ())]

    def _dialogue(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """Writes turns, each with the line break after it, and the next opening. Messages between
        two turns of the model share one user turn."""
        pieces: list[Piece] = []
        rest = list(messages)
        words: list[str] = []
        if rest and rest[0].role in ("system", "developer"):
            words.append(rest.pop(0).content)
        if tools:
            listed = [function_json(tool)["function"] for tool in tools]
            words.append(_TOOLS + json.dumps(listed, ensure_ascii=False))
        for message in [*rest, None]:
            if message is not None and message.role != "assistant":
                is_tool = message.role == "tool"
                words.append(_output(message.content) if is_tool else message.content.strip())
                continue
            if words:
                pieces += [self._start, "user\n", "\n\n".join(words), self._end, "\n"]
                words = []
            pieces += self._opening
            if message is not None:
                pieces += [*self._body(message, is_given=True), "\n"]
        return pieces

    def _body(self, message: Message, *, is_given: bool = False) -> list[Piece]:
        """is_given: the message is part of a history, where the template strips it."""
        self._refuse_thinking(message)
        content = message.content.strip() if is_given else message.content
        calls = [call_text(call, arguments_key=_KEY) for call in message.tool_calls]
        if len(calls) == 1 and not content:
            return [calls[0], self._end]
        fenced = [f"```json\n{call}\n```" for call in calls]
        return ["\n".join([*([content] if content or not calls else []), *fenced]), self._end]

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one turn: text and calls.

        A JSON object of "name" and "parameters" is a call if it is the whole turn, or lies between
        fences of `json` or `tool_code`; the text of its parameters is kept. Malformed parts stay in
        `content`, control tokens by name, and `parse_error` says why.
        """
        parts, error = split_turn(self.tokenizer, sampled_ids, self.stop_ids)
        text = text_of(self.tokenizer, parts)
        control = [part for part in parts if not isinstance(part, str)]
        calls: list[ToolCall] = []
        if control:
            error = error or f"{self.tokenizer.control_name(control[0])} is out of place"
        else:
            whole = read_whole_call(text, arguments_key=_KEY)
            if isinstance(whole, ToolCall):
                text, calls = "", [whole]
            else:
                text, calls, reason = _read_fenced(text)
                error = error or whole or reason
        return Message(role="assistant", content=text, tool_calls=tuple(calls), parse_error=error)


def _read_fenced(text: str) -> tuple[str, list[ToolCall], str]:
    """Returns (text, calls between fences, the first reason why a fenced call is malformed)."""
    words: list[str] = []
    calls: list[ToolCall] = []
    error = ""
    at = 0
    for fence in _FENCE.finditer(text):
        begin, end = fence.end(), json_extent(text, fence.end())
        close = _FENCE_END.match(text, end) if end >= 0 else None
        if fence.start() < at:
            continue  # inside the arguments of the call before
        inside = text[begin : end if close else len(text)]
        call = read_whole_call(inside, arguments_key=_KEY)
        if close and isinstance(call, ToolCall):
            words.append(text[at : fence.start()])
            calls.append(call)
            at = close.end()
        elif isinstance(call, str):
            error = error or call
    words.append(text[at:])
    # The line break at each side of a fence is its own.
    kept = [
        part.removeprefix("\n" if n else "").removesuffix("\n" if n + 1 < len(words) else "")
        for n, part in enumerate(words)
    ]
    return "\n".join(part for part in kept if part), calls, error


def _output(text: str) -> str:
    return f"```tool_output\n{text}\n```"
