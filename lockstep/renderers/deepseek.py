"""The format of DeepSeek V3, piece by piece. Its control tokens are written with U+FF5C and U+2581;
here with | and _:

    <|begin_of_sentence|>Search, then answer.<|User|>Who is it?<|Assistant|>    <- render ends here
    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>find
    ```json
    {"q": 1}
    ```<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>                   <- sampled
    <|tool_outputs_begin|><|tool_output_begin|>Bela<|tool_output_end|>          <- extend begins
    <|tool_outputs_end|>                                                        <- extend ends here

All system messages stand at the very beginning. Behind the outputs of tools the model goes on
without another <|Assistant|>.

The template opens the block of calls and that of outputs only once in a dialogue, closes the calls
only behind the second one, and leaves out words beside calls. Here each block is opened and closed.
It has no place for tools; they stand behind the system message as in DeepSeek's own examples.

Source: the chat template of DeepSeek V3 (tokenizer_config.json); tests/parity/
test_deepseek_template_parity.py compares with it and lists every difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds
from lockstep.renderers.calls import function_json
from lockstep.renderers.config import DeepSeekConfig
from lockstep.renderers.pieces import Piece, split_turn, text_of
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.turn_renderer import TurnRenderer
from lockstep.types import Message, ToolCall, ToolSchema


def control_name(name: str) -> str:
    """Returns DeepSeek's spelling of a control token, given its words: "tool calls begin".

    >>> control_name("User").isascii(), len(control_name("User"))
    (False, 8)
    """
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


class DeepSeekRenderer(TurnRenderer):
    """Messages to DeepSeek V3 tokens and back.

    >>> from lockstep.testing.tokenizers import DEEPSEEK_TOKENS, byte_tokenizer
    >>> tokenizer = byte_tokenizer(control_tokens=DEEPSEEK_TOKENS)
    >>> renderer = DeepSeekRenderer(tokenizer)
    >>> text = tokenizer.decode(renderer.render([Message(role="user", content="hi")]))
    >>> text.endswith(control_name("User") + "hi" + control_name("Assistant"))
    True
    >>> call = ToolCall(name="find", arguments='{"q": 1}')
    >>> sampled = renderer.render_reply(Message(role="assistant", tool_calls=(call,)))
    >>> renderer.parse(sampled).tool_calls == (call,)
    True
    """

    name = "deepseek"

    def __init__(self, tokenizer: Tokenizer, config: DeepSeekConfig | None = None) -> None:
        """Raises RendererError, which lists the missing control tokens."""
        names = (
            *("begin of sentence", "end of sentence", "User", "Assistant", "tool sep"),
            *("tool calls begin", "tool calls end", "tool call begin", "tool call end"),
            *("tool outputs begin", "tool outputs end", "tool output begin", "tool output end"),
        )
        ids = list(tokenizer.require(map(control_name, names)).values())
        self._begin, self._end, self._user, self._assistant, self._separator = ids[:5]
        self._calls, self._calls_end, self._call, self._call_end = ids[5:9]
        self._outputs, self._outputs_end, self._output, self._output_end = ids[9:]
        super().__init__(tokenizer, stop_ids=(self._end,))
        self.config = config or DeepSeekConfig()

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        declared = tools if self.config.tools_in_prompt else ()
        texts = [message.content for message in messages if _is_system(message)]
        if declared:
            texts.append(_tools_text(declared))
        rest = [message for message in messages if not _is_system(message)]
        return [self._begin, "\n\n".join(texts), *self._follow_up(rest)]

    def _follow_up(self, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        has_outputs = False
        for message in messages:
            if has_outputs and message.role == "user":
                pieces.append(self._outputs_end)
            match message.role:
                case "tool":
                    pieces.append("\n" if has_outputs else self._outputs)
                    pieces += [self._output, message.content, self._output_end]
                case "user":
                    pieces += [self._user, message.content]
                case "assistant":
                    pieces += [self._opening(has_outputs), *self._body(message)]
                case "system" | "developer":
                    raise RendererError(
                        "DeepSeek's template writes every system message at the very beginning, "
                        "which the model has already seen. Give later instructions as a user's "
                        "words, or all of them in the first prompt."
                    )
            has_outputs = message.role == "tool"
        return [*pieces, self._opening(has_outputs)]

    def _opening(self, has_outputs: bool) -> int:
        return self._outputs_end if has_outputs else self._assistant

    def _body(self, message: Message) -> list[Piece]:
        self._refuse_thinking(message)
        pieces: list[Piece] = [message.content]
        for at, call in enumerate(message.tool_calls):
            pieces += ["\n" if at else self._calls, self._call, "function", self._separator]
            pieces += [f"{call.name}\n```json\n{call.arguments}\n```", self._call_end]
        if message.tool_calls:
            pieces.append(self._calls_end)
        return [*pieces, self._end]

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Reads one turn: words, and a block of calls.

        Only control tokens make a call; what stands between its fences is kept as it was written,
        JSON or not. A block that is not closed holds no call. What is malformed stays in `content`,
        control tokens by name, and `parse_error` says why.
        """
        parts, error = split_turn(self.tokenizer, sampled_ids, self.stop_ids)
        texts: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        while at < len(parts):
            part = parts[at]
            end = at
            if part == self._calls:
                inside = parts[at + 1 :]
                size = inside.index(self._calls_end) if self._calls_end in inside else len(inside)
                end = at + 1 + size
                found = self._read_calls(inside[:size])
                if end == len(parts):
                    found = "the calls are not closed"
                if isinstance(found, str):
                    error = error or found
                    texts.append(text_of(self.tokenizer, parts[at : end + 1]))
                else:
                    calls += found
            else:
                if not isinstance(part, str):
                    error = error or f"{self.tokenizer.control_name(part)} is out of place"
                texts.append(text_of(self.tokenizer, [part]))
            at = end + 1
        return Message(
            role="assistant",
            content="\n".join(texts),
            tool_calls=tuple(calls),
            parse_error=error,
        )

    def _read_calls(self, block: Sequence[Piece]) -> list[ToolCall] | str:
        """Returns the calls in a block, or the reason why there is none."""
        calls: list[ToolCall] = []
        pieces = [part for part in block if not isinstance(part, str) or part.strip()]
        for at in range(0, len(pieces), 5):
            match pieces[at : at + 5]:
                case [self._call, "function", self._separator, str(text), self._call_end]:
                    call = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```", text, re.DOTALL)
                    if call is None or not call[1].isprintable():
                        return "a call is not a name and its arguments between fences"
                    calls.append(ToolCall(name=call[1], arguments=call[2]))
                case _:
                    return "a block of calls holds something else"
        return calls or "a block of calls is empty"


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _tools_text(tools: Sequence[ToolSchema]) -> str:
    listed = "\n".join(
        f"- `{tool.name}`:\n```json\n"
        f"{json.dumps(function_json(tool)['function'], ensure_ascii=False)}\n```"
        for tool in tools
    )
    return f"## Tools\n\n### Function\n\nYou have the following functions available:\n\n{listed}"
