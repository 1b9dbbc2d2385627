"""ChatML as Qwen2.5, Qwen3 and Qwen3.5 write it, piece by piece.

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

Qwen3.5 opens a turn with <think> and a line break, strips what it is given, and writes a call as
tags with one parameter each (`xml_calls`).

Sources: the chat templates of Qwen3 and Qwen2.5 (tokenizer_config.json), with which tests/parity/
test_qwen3_template_parity.py compares and lists every difference; Qwen3.5's (chat_template.jinja),
with whose port in the package renderers tests/parity/test_qwen35_parity.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds
from lockstep.renderers.calls import call_text, function_json, read_call
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.pieces import (
    Piece,
    cut_front,
    encode_pieces,
    refuse_replies,
    require_reply,
    split_turn,
    text_of,
)
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.xml_calls import TextParameters, read_xml_call, xml_call_text
from lockstep.types import Message, ToolCall, ToolSchema

QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_QWEN35_TOOLS = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

"""
_QWEN35_CALL = """
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
"""
_QWEN35_REMINDER = (
    "\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner "
    "<function=...></function> block must be nested within ",
    " XML tags\n- Required parameters MUST be specified\n- You may provide optional reasoning for "
    "your function call in natural language BEFORE the function call, but NOT after\n- If there is "
    "no function call available, answer the question like normal with your current knowledge and "
    "do not tell the user about function calls\n</IMPORTANT>",
)
"""Qwen3.5's instructions for tools. Where they show the tags of a call, those are control tokens.
"""
_QWEN3_TOKENS = ("<think>", "</think>", "<tool_response>", "</tool_response>")


class ChatMLRenderer:
    """Messages to Qwen3 tokens and back; with `variant`, to those of Qwen2.5 or Qwen3.5.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
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
        self.tokenizer = tokenizer
        self.config = config or ChatMLConfig()
        self._thinks = self.config.variant != "qwen2.5"
        self._is_35 = self.config.variant == "qwen3.5"
        self._texts = TextParameters()
        ids = list(tokenizer.require((*_TOKENS, *(_QWEN3_TOKENS if self._thinks else ()))).values())
        self._start, self._end, self._call, self._call_end = ids[:4]
        self._think = self._think_end = -1  # no id: never written, never sampled
        self._reply: Piece = "<tool_response>"
        self._reply_end: Piece = "</tool_response>"
        if self._thinks:
            self._think, self._think_end, self._reply, self._reply_end = ids[4:]
        self._opening: list[Piece] = [self._start, "assistant\n"]
        if self._thinks and not self.config.enable_thinking:
            self._opening += self._thinking_pieces("")
        elif self._is_35:
            self._opening += [self._think, "\n"]
        self._spoken = [self._think] if self._is_35 and self.config.enable_thinking else []
        """The part of a turn that its opening already contains; parsed as if it had been sampled.
        """

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._end,)

    # -- messages to ids ----------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Returns the first prompt, as the Qwen3 template renders it with a generation prompt.

        A developer message is written as a system message: ChatML has no developer role.
        """
        declared = tools if self.config.tools_in_prompt else ()
        self._texts.declare(tools)
        rest = list(messages)
        pieces: list[Piece] = []
        system: list[Piece] = []
        if self._is_35:
            system = self._qwen35_system(rest, declared)
            if not any(map(_is_query, rest)):
                raise RendererError(
                    "Qwen3.5's template writes no dialogue without a user's words, and in these "
                    f"{len(messages)} messages there are none."
                )
        elif rest and rest[0].role in ("system", "developer"):
            system = [rest.pop(0).content, *(["\n\n"] if declared else [])]
        elif not self._thinks:
            system = [QWEN25_SYSTEM, *(["\n\n"] if declared else [])]
        if declared and not self._is_35:
            system += self._tools_pieces(declared)
        if system:
            pieces += [self._start, "system\n", *system, self._end, "\n"]
        pieces += self._dialogue_pieces(rest)
        return encode_pieces(self.tokenizer, [*pieces, *self._opening])

    def extend(self, sampled_ids: TokenIds, messages: Sequence[Message]) -> list[int]:
        """Returns the line break after <|im_end|>, `messages`, and the next opening.

        A turn that was cut off gets its <|im_end|> first, after a closed thinking block if it was
        thinking. An open <tool_call> stays open: closing it would say that a call was made.
        """
        refuse_replies(messages)
        pieces = [*self._close(sampled_ids), "\n", *self._dialogue_pieces(messages)]
        return encode_pieces(self.tokenizer, [*pieces, *self._opening])

    @property
    def thinking_opening(self) -> tuple[int, ...]:
        """Ids of the empty block if `enable_thinking` is off; <think> and a line break for Qwen3.5;
        empty for Qwen3, whose models sample them."""
        return tuple(encode_pieces(self.tokenizer, self._opening[2:]))

    def forgets(self, messages: Sequence[Message]) -> bool:
        """With thinking=drop, when a user speaks. Like the Qwen3 template, a user message between
        <tool_response> tags counts as a tool's reply."""
        return self.config.thinking == "drop" and self._thinks and any(map(_is_query, messages))

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        """Cuts a leading <think> ... </think> and the empty line after it. Only the stop id remains
        if the block is not closed."""
        ids = [*self._spoken, *(int(id_) for id_ in sampled_ids)]
        if not self._thinks or not ids or ids[0] != self._think:
            return ids
        if self._spoken and ids[-1] != self._end:
            ids.append(self._end)  # without its opening nothing tells whether it was thinking
        control = self.tokenizer.control_ids
        borders = [at for at, id_ in enumerate(ids) if id_ in control] + [len(ids)] * 2
        closed, end = borders[1:3]
        if closed == len(ids) or ids[closed] != self._think_end:
            return ids[-1:] if ids[-1] == self._end else []
        run = ids[closed + 1 : end]
        has_empty_line = self.tokenizer.decode_bytes(run[:2]).startswith(b"\n\n")
        text = cut_front(self.tokenizer, run, 2) if has_empty_line else run
        return [*text, *ids[end:]]

    def render_reply(self, message: Message) -> list[int]:
        """Returns the ids that Qwen3 samples for `message`, up to <|im_end|>.

        Raises RendererError for thinking if the opening already closed the thinking block.
        """
        require_reply(message)
        pieces: list[Piece] = []
        content = self._stripped(message.content)
        if message.thinking and not self.config.enable_thinking:
            raise RendererError(
                "the message has thinking, but renderer.enable_thinking=False opens each turn with "
                "an empty thinking block. Leave the thinking out, or turn it on."
            )
        has_empty = self._thinks and self.config.enable_thinking and self.config.has_empty_thinking
        if self._spoken:
            pieces += [f"{message.thinking.strip()}\n", self._think_end, "\n\n"]
        elif message.thinking or (has_empty and not self._is_35):
            pieces += self._thinking_pieces(message.thinking)
        pieces += [content, *self._call_pieces(message)]
        return encode_pieces(self.tokenizer, [*pieces, self._end])

    def _dialogue_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """Writes whole messages, each with the line break after it. Consecutive tool replies share
        one user turn."""
        pieces: list[Piece] = []
        last_query = _last_query_index(messages)
        for at, message in enumerate(messages):
            content = self._stripped(message.content)
            match message.role:
                case "tool":
                    if at == 0 or messages[at - 1].role != "tool":
                        pieces += [self._start, "user"]
                    pieces += ["\n", self._reply, f"\n{content}\n", self._reply_end]
                    if at + 1 == len(messages) or messages[at + 1].role != "tool":
                        pieces += [self._end, "\n"]
                case "user":
                    pieces += [self._start, f"user\n{content}", self._end, "\n"]
                case "system" | "developer" if self._is_35:
                    raise RendererError(
                        "Qwen3.5's template takes a system message only at the beginning of a "
                        f"dialogue: {content[:80]!r}."
                    )
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
        if self._is_35:
            has_block = is_after_query or self.config.thinking == "keep"
        elif self.config.thinking == "keep":
            has_block = bool(message.thinking)
        else:
            has_block = is_after_query and ((is_last and self._thinks) or bool(message.thinking))
        content = self._stripped(message.content)
        if not has_block:
            return [content, *self._call_pieces(message)]
        thinking = self._thinking_pieces(self._stripped(message.thinking).strip("\n"))
        return [*thinking, content.lstrip("\n"), *self._call_pieces(message)]

    def _thinking_pieces(self, thinking: str) -> list[Piece]:
        if not self._thinks:
            raise RendererError(
                "a message has thinking, and renderer.variant=qwen2.5 has no place for it. Leave "
                "the thinking out, or choose the renderer of a model that thinks."
            )
        return [self._think, f"\n{thinking}\n", self._think_end, "\n\n"]

    def _stripped(self, text: str) -> str:
        return text.strip() if self._is_35 else text

    def _call_pieces(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = []
        for at, call in enumerate(message.tool_calls):
            text = f"\n{xml_call_text(call) if self._is_35 else call_text(call)}\n"
            separator = "\n" if at or message.content else ""
            if self._is_35 and not at:
                separator = "\n\n" if message.content.strip() else ""
            pieces += [separator, self._call, text, self._call_end]
        return pieces

    def _tools_pieces(self, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The template's instructions. Where they show the tags of a call, those are control
        tokens."""
        lines = "".join(
            f"\n{json.dumps(function_json(tool), ensure_ascii=False)}" for tool in tools
        )
        return [
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>{lines}\n</tools>\n\nFor each function call, return a json object with "
            "function name and arguments within ",
            self._call,
            self._call_end,
            " XML tags:\n",
            self._call,
            '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
            self._call_end,
        ]

    def _qwen35_system(self, rest: list[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """Returns the system message, after the tools if there are any; removes it from `rest`."""
        words = ""
        has_system = bool(rest) and rest[0].role in ("system", "developer")
        if has_system:
            words = rest.pop(0).content.strip()
        if not tools:
            return [words] if has_system else []
        lines = "".join(
            f"\n{json.dumps(function_json(tool), ensure_ascii=False)}" for tool in tools
        )
        tags = [self._call, self._call_end]
        return [
            f"# Tools\n\nYou have access to the following functions:\n\n<tools>{lines}",
            _QWEN35_TOOLS,
            *(self._call, _QWEN35_CALL, self._call_end),
            *(_QWEN35_REMINDER[0], *tags, _QWEN35_REMINDER[1]),
            f"\n\n{words}" if words else "",
        ]

    def _close(self, sampled_ids: TokenIds) -> list[Piece]:
        """The end of a turn that was cut off."""
        if len(sampled_ids) and sampled_ids[-1] == self._end:
            return []
        for id_ in reversed([*self._spoken, *sampled_ids]):
            if id_ == self._think_end:
                break
            if id_ == self._think:
                return ["\n", self._think_end, "\n\n", self._end]
        return [self._end]

    # -- ids to a message ---------------------------------------------------------------------

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one turn: [<think> ... </think>] text and <tool_call> ... </tool_call> <|im_end|>.

        Tags count only as control tokens; spelled out they are text. A call must be a JSON object
        of "name" and "arguments", whose text is kept; a complete call counts even if the turn was
        cut off after it. Malformed parts stay in `content`, control tokens by name, and
        `parse_error` says why.
        """
        parts, error = split_turn(self.tokenizer, sampled_ids, self.stop_ids)
        parts = [*self._spoken, *parts]
        thinking = ""
        texts: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if parts and parts[0] == self._think:
            closed = self._block_end(parts, 0, self._think_end)
            text, at = text_of(self.tokenizer, parts[1:closed]), closed + 1
            thinking = text.removeprefix("\n")
            if closed < len(parts):
                thinking = thinking.removesuffix("\n")
                if at < len(parts) and isinstance(parts[at], str):
                    parts[at] = str(parts[at]).removeprefix("\n\n")
            error = error or ("" if closed < len(parts) else "the thinking is not closed")
        while at < len(parts):
            part = parts[at]
            if isinstance(part, str):
                has_call_next = at + 1 < len(parts) and parts[at + 1] == self._call
                text = part.removesuffix("\n") if has_call_next else part
                text = text.removesuffix("\n") if has_call_next and self._is_35 else text
                if text.strip() or not calls:
                    texts.append(text)
                at += 1
                continue
            closed = self._block_end(parts, at, self._call_end) if part == self._call else at
            block = text_of(self.tokenizer, parts[at + 1 : closed])
            found = (
                (read_xml_call(block, self._texts) if self._is_35 else read_call(block))
                if part == self._call and closed < len(parts)
                else f"{self.tokenizer.control_name(part)} is out of place"
                if part != self._call
                else "a call is not closed"
            )
            if isinstance(found, ToolCall):
                calls.append(found)
            else:
                texts.append(text_of(self.tokenizer, parts[at : closed + 1]))
                error = error or found
            at = closed + 1
        return Message(
            role="assistant",
            content="\n".join(text for text in texts if text),
            thinking=thinking,
            tool_calls=tuple(calls),
            parse_error=error,
        )

    def _block_end(self, parts: Sequence[Piece], at: int, closer: int) -> int:
        """Returns the index of the `closer` of the block that opens at `at`, or len(parts).

        A block contains only text: any other control token in it leaves it open.
        """
        for index in range(at + 1, len(parts)):
            if parts[index] == closer:
                return index
            if not isinstance(parts[index], str):
                break
        return len(parts)


def _last_query_index(messages: Sequence[Message]) -> int:
    """Returns the index of the last user message that is not a wrapped tool reply."""
    for at in range(len(messages) - 1, -1, -1):
        if _is_query(messages[at]):
            return at
    return len(messages) - 1


def _is_query(message: Message) -> bool:
    text = message.content
    is_reply = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message.role == "user" and not is_reply
