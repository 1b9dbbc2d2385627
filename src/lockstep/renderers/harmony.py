"""Harmony, the format of gpt-oss, written piece by piece.

    <|start|>user<|message|>Who is it?<|end|>
    <|start|>assistant                                        <- render ends, sampling begins here
        <|channel|>analysis<|message|>I search.<|end|><|start|>assistant
        <|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": 1}<|call|>
    <|start|>functions.find to=assistant<|channel|>commentary<|message|>Bela<|end|>
    <|start|>assistant                                        <- extend ends, sampling begins here
        <|channel|>final<|message|>Bela.<|return|>

A turn is one or more messages. Those before the last end with <|end|>; the last ends with <|call|>,
which hands over to a tool, or with <|return|>.

Source: openai/harmony, docs/format.md and src/encoding.rs at 14648ba; tests/parity/
test_harmony_parity.py compares with the package openai-harmony and lists every difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import RendererError
from lockstep.renderers.base import Constraint, TokenIds, TurnRenderer, grammar_of, json_rule
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.pieces import Piece, encode_pieces, split_ids, split_system
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.typescript import tools_text
from lockstep.types import Message, ToolCall, ToolSchema

_NAMESPACE = "functions."
_CHANNELS = ("analysis", "commentary", "final")


_NAMES = ("start", "end", "message", "channel", "constrain", "call", "return")
HARMONY_TOKENS = tuple(f"<|{name}|>" for name in _NAMES)


class HarmonyRenderer(TurnRenderer):
    """Messages to gpt-oss tokens and back.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> config = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
    >>> renderer = HarmonyRenderer(tokenizer, config)
    >>> tokenizer.decode(renderer.render([Message(role="user", content="hi")]))
    '<|start|>user<|message|>hi<|end|><|start|>assistant'
    >>> call = Message(role="assistant", tool_calls=(ToolCall(name="find", arguments="{}"),))
    >>> sampled = renderer.render_reply(call)
    >>> tokenizer.decode(sampled)
    '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}<|call|>'
    >>> renderer.parse(sampled) == call
    True
    >>> reply = [Message(role="tool", name="find", content="Bela")]
    >>> text = tokenizer.decode(renderer.extend(sampled, reply))
    >>> print(text.replace("<|end|>", "<|end|>" + chr(10)))
    <|start|>functions.find to=assistant<|channel|>commentary<|message|>Bela<|end|>
    <|start|>assistant
    """

    name = "harmony"

    def __init__(self, tokenizer: Tokenizer, config: HarmonyConfig | None = None) -> None:
        """Raises RendererError, which lists the missing control tokens."""
        self.config = config or HarmonyConfig()
        ids = list(tokenizer.require(HARMONY_TOKENS).values())
        self._start, self._end, self._message, self._channel = ids[:4]
        self._constrain, self._call, self._return = ids[4:]
        stop_ids = (self._call, self._return, *([self._end] if self.config.stop_at_end else []))
        super().__init__(tokenizer, stop_ids=stop_ids)
        self._closers = frozenset((self._end, *self.stop_ids))
        self._opening: list[Piece] = [self._start, "assistant"]

    # -- messages to ids ----------------------------------------------------------------------

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """As openai-harmony renders a conversation for completion.

        Leading system or developer text becomes the developer message, which also declares the
        tools. Harmony's own system message comes from the settings.
        """
        declared = tools if self.config.tools_in_prompt else ()
        pieces: list[Piece] = []
        if self.config.system_message:
            system_text = _system_text(self.config, has_tools=bool(declared))
            pieces += self._block("system", system_text)
        instructions, rest = split_system(messages)
        if instructions is not None or declared:
            pieces += self._block("developer", self._developer_text(instructions, declared))
        return [*pieces, *self._follow_up(_without_dropped_thinking(rest, self.config.thinking))]

    def grammar(self, constraint: Constraint) -> str:
        """See `base.Constraining`. A call's recipient comes after the channel."""
        bodies: list[str] = []
        if constraint.schema is not None:
            header = f'"final" <[{self._message}]>'
            bodies.append(f"{header} {json_rule(constraint.schema)} <[{self._return}]>")
        for tool in constraint.tools:
            header = f'"commentary to={_NAMESPACE}{tool.name} " <[{self._constrain}]> "json"'
            arguments = json_rule(tool.parameters)
            bodies.append(f"{header} <[{self._message}]> {arguments} <[{self._call}]>")
        thinking = ""
        if not self.config.stop_at_end:  # else the end of the thinking ends the turn
            thinking = f'<[{self._channel}]> "analysis" <[{self._message}]> TEXT '
            thinking += f'<[{self._end}]> <[{self._start}]> "assistant"'
        return grammar_of(bodies, thinking=thinking, before=f"<[{self._channel}]> ")

    def _follow_up(self, messages: Iterable[Message]) -> list[Piece]:
        pieces = [piece for message in messages for piece in self._pieces(message)]
        return [*pieces, *self._opening]

    def _body(self, message: Message) -> list[Piece]:
        """The recipient comes after the channel. Raises RendererError for several calls: one
        sampled turn makes one."""
        if len(message.tool_calls) > 1:
            raise RendererError(
                f"{len(message.tool_calls)} calls in one message: a harmony turn ends with its "
                "first <|call|>. Write one message per call, each followed by its tool's reply."
            )
        pieces = self._assistant_pieces(message, is_sampled=True)
        if not message.tool_calls:
            pieces[-1] = self._return
        num_messages = pieces.count(self._message)
        if num_messages > 1 and self.config.stop_at_end:
            raise RendererError(
                "renderer.stop_at_end ends a turn with its first <|end|>, and this message needs "
                f"{num_messages}: leave out its thinking and the text before the call."
            )
        return pieces[len(self._opening) :]

    def forgets(self, messages: Sequence[Message]) -> bool:
        """True with thinking=drop, when anybody except a tool speaks, after a final answer.

        A previous turn that was cut off, or called a tool that never replied, counts as an answer
        here; `render` keeps the thinking before it.
        """
        return self.config.thinking == "drop" and any(m.role != "tool" for m in messages)

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        """Cuts the messages of the analysis channel, also an unfinished message. The first message
        that remains loses its <|start|>assistant, which the prompt already contains."""
        ids = [int(id_) for id_ in sampled_ids]
        parts = self._split(ids)
        kept: list[list[int]] = []
        for at, part in enumerate(parts):
            header = self._read_header(part.ids[: (part.body or 1) - 1], is_first=at == 0)
            if part.body is None or header != ("analysis", ""):
                kept.append(part.ids)
        if len(kept) == len(parts):
            return ids
        opening = encode_pieces(self.tokenizer, self._opening)
        if kept and kept[0] is not parts[0].ids and kept[0][: len(opening)] == opening:
            kept[0] = kept[0][len(opening) :]
        return [id_ for part in kept for id_ in part]

    def _block(
        self, author: str, text: str, *, channel: str = "", is_call: bool = False
    ) -> list[Piece]:
        """Writes one whole message. `author` includes the recipient: "assistant
        to=functions.find"."""
        header: list[Piece] = [self._start, author]
        if channel:
            header += [self._channel, channel]
        if is_call:
            header += [" ", self._constrain, "json"]
        return [*header, self._message, text, self._call if is_call else self._end]

    def _pieces(self, message: Message) -> list[Piece]:
        """Writes one message of a given history."""
        author = f":{message.name}" if message.name else ""
        match message.role:
            case "tool":
                author = f"{_NAMESPACE}{message.name} to=assistant"
                return self._block(author, message.content, channel="commentary")
            case "system" | "developer":
                return self._block(f"developer{author}", self._developer_text(message.content, ()))
            case "user":
                return self._block(f"user{author}", message.content)
            case "assistant":
                return self._assistant_pieces(message, is_sampled=False)

    def _assistant_pieces(self, message: Message, *, is_sampled: bool) -> list[Piece]:
        """Writes thinking, content and calls. A sampled call names its recipient after the channel;
        in a history, openai-harmony puts it first."""
        pieces: list[Piece] = []
        if message.thinking:
            pieces += self._block("assistant", message.thinking, channel="analysis")
        if message.content or not message.tool_calls:
            channel = "commentary" if message.tool_calls else "final"
            pieces += self._block("assistant", message.content, channel=channel)
        for call in message.tool_calls:
            to = f" to={_NAMESPACE}{call.name}"
            author, channel = f"assistant{to}", "commentary"
            if is_sampled:
                author, channel = "assistant", f"commentary{to}"
            pieces += self._block(author, call.arguments, channel=channel, is_call=True)
        return pieces

    def _developer_text(self, instructions: str | None, tools: Sequence[ToolSchema]) -> str:
        sections: list[str] = []
        if instructions is not None:
            heading = ["# Instructions"] if self.config.developer_heading else []
            sections += [*heading, instructions]
        if tools:
            sections.append(tools_text(tools))
        return "\n\n".join(sections)

    def _close(self, sampled_ids: TokenIds) -> list[Piece]:
        """Inside a message <|end|>, also inside a call, since <|call|> would say that a call was
        made; inside a header <|message|><|end|>, an empty message; after <|end|> nothing."""
        if len(sampled_ids) and int(sampled_ids[-1]) in self._closers:
            return []
        for id_ in reversed(sampled_ids):
            if id_ == self._message:
                return [self._end]
            if int(id_) in self._closers:
                break
        return [self._message, self._end]

    # -- ids to a message ---------------------------------------------------------------------

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one turn: analysis becomes `thinking`, final and commentary become `content`, a
        call to functions.NAME becomes a tool call.

        The recipient may come before or after the channel, a header may have any spaces, and the
        content type may lack <|constrain|>. A call counts only if <|call|> ended it. A malformed
        message is kept whole in `content`, control tokens by name, and `parse_error` says why.
        """
        thinking: list[str] = []
        content = ""
        is_kept_whole = False
        calls: list[ToolCall] = []
        parts = self._split([int(id_) for id_ in sampled_ids])
        errors = [] if parts else ["the turn is empty"]
        for at, part in enumerate(parts):
            is_last = at == len(parts) - 1
            header, text = self._read(part, is_first=at == 0)
            if isinstance(header, str):
                errors.append(header)
                gap = "\n" if content and not is_kept_whole else ""
                content += gap + self.tokenizer.decode(part.ids)
                is_kept_whole = True
                continue
            channel, recipient = header
            if recipient:
                calls.append(ToolCall(name=recipient, arguments=text))
            elif channel == "analysis":
                thinking.append(text)
            else:
                content += f"\n{text}" if content else text
            if not recipient:
                errors.append(self._problem(part, channel, is_last=is_last))
            is_kept_whole = False
            if not is_last and part.end in self.stop_ids:
                errors.append(
                    f"tokens follow {self.tokenizer.control_name(part.end)}, which ends a turn"
                )
        return Message(
            role="assistant",
            content=content,
            thinking="\n".join(thinking),
            tool_calls=tuple(calls),
            parse_error=next(filter(None, errors), ""),
        )

    def _split(self, ids: list[int]) -> list[_Part]:
        parts: list[_Part] = []
        begin, body = 0, None
        for at, id_ in enumerate(ids):
            if body is None and id_ == self._message:
                body = at + 1 - begin
            if id_ in self._closers:
                parts.append(_Part(ids[begin : at + 1], body, id_))
                begin, body = at + 1, None
        if begin < len(ids):
            parts.append(_Part(ids[begin:], body, -1))
        return parts

    def _read(self, part: _Part, *, is_first: bool) -> tuple[tuple[str, str] | str, str]:
        """(header, text) of a message; in place of the header the reason why it is malformed."""
        if part.body is None:
            return "a message has no <|message|>", ""
        header = self._read_header(part.ids[: part.body - 1], is_first=is_first)
        body = part.ids[part.body : len(part.ids) - (part.end >= 0)]
        stray = next((id_ for id_ in body if id_ in self.tokenizer.control_ids), None)
        is_closed_thinking = header == ("analysis", "") and part.end == self._end
        if not isinstance(header, str) and stray is not None and not is_closed_thinking:
            name = self.tokenizer.control_name(stray)
            return f"the control token {name} stands inside a message", ""
        if not isinstance(header, str) and header[1] and part.end != self._call:
            how = "was cut off"
            if part.end >= 0:
                how = f"ends with {self.tokenizer.control_name(part.end)}"
            return f"a call {how}, expected <|call|>", ""
        return header, self.tokenizer.decode(body)

    def _problem(self, part: _Part, channel: str, *, is_last: bool) -> str:
        """The reason why a message that is no call may not end as it does; empty if it may."""
        if part.end < 0:
            return "the turn was cut off"
        if part.end == self._call:
            return "<|call|> ends a message that calls nothing"
        if channel == "analysis" and (is_last or part.end == self._return):
            return "the turn ends after its analysis, without an answer or a call"
        if is_last and part.end not in self.stop_ids:
            return "the turn ends with <|end|>, expected <|return|> or <|call|>"
        return ""

    def _read_header(self, ids: list[int], *, is_first: bool) -> tuple[str, str] | str:
        """Returns (channel, function that is called or ""), or the reason why it is malformed.

        [<|start|>] author [to=R] <|channel|> channel [to=R] [type] [<|constrain|> type]; the first
        message's <|start|>assistant belongs to the prompt.
        """
        pieces = split_ids(self.tokenizer, ids)
        if not is_first and (not pieces or pieces.pop(0) != self._start):
            return "a message does not begin with <|start|>"
        rank = {self._start: 0, self._channel: 1, self._constrain: 2}
        words: dict[int, list[str]] = {key: [] for key in rank}
        key = self._start
        for piece in pieces:
            if isinstance(piece, str):
                words[key] = piece.split()
            elif rank.get(piece, 0) > rank[key]:
                key = piece
            else:
                return f"{self.tokenizer.control_name(piece)} is out of place in a header"
        author, channel, types = words.values()
        if not is_first and (not author or author.pop(0) != "assistant"):
            return "a message is not by the assistant"
        name = channel.pop(0) if channel else ""
        if name not in _CHANNELS:
            return f"channel {name!r} is not one of {', '.join(_CHANNELS)}"
        recipients = [word for word in author + channel if word.startswith("to=")]
        others = [word for word in author + channel if not word.startswith("to=")] + types
        if len(others) > 1 or len(recipients) > 1:
            return f"the header has more than it should: {' '.join(recipients + others)!r}"
        recipient = recipients[0].removeprefix("to=") if recipients else ""
        if recipients and not (recipient.startswith(_NAMESPACE) and recipient != _NAMESPACE):
            return f"the recipient {recipient!r} is not a function: expected {_NAMESPACE}NAME"
        if recipient and name == "final":
            return "a call is in the final channel"
        return name, recipient.removeprefix(_NAMESPACE)


@dataclass(frozen=True, slots=True)
class _Part:
    """One message inside a sampled turn."""

    ids: list[int]
    body: int | None
    """Index of the text, after <|message|>; None if there is no <|message|>."""
    end: int
    """The id that closed the message; -1 if the turn was cut off."""


def _without_dropped_thinking(messages: Sequence[Message], policy: str) -> Iterable[Message]:
    """With "drop", removes the thinking of everything up to and including the last final answer.

    vLLM prepares a history for openai-harmony in this way. openai-harmony itself drops only
    thinking before the first final answer, and writes it again while a call is open; no dialogue
    could be extended like that.
    """
    answers = [at for at, m in enumerate(messages) if m.role == "assistant" and not m.tool_calls]
    last = answers[-1] if answers and policy == "drop" else -1
    for at, message in enumerate(messages):
        yield replace(message, thinking="") if at <= last else message


def _system_text(config: HarmonyConfig, *, has_tools: bool) -> str:
    top = [
        config.identity,
        "Knowledge cutoff: 2024-06",
        config.current_date and f"Current date: {config.current_date}",
    ]
    channels = f"# Valid channels: {', '.join(_CHANNELS)}. "
    channels += "Channel must be included for every message."
    if has_tools:
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    sections = ["\n".join(filter(None, top)), f"Reasoning: {config.reasoning_effort}", channels]
    return "\n\n".join(section for section in sections if section)
