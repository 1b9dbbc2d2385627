"""Finds out how a chat template writes a turn, by rendering short dialogues.

The dialogues contain words that no template contains; the text around them is the generation
prompt, the end of a turn, the tags of thinking, the format of a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

from lockstep.errors import RendererError
from lockstep.renderers.jinja.formats import CallFormat, derive_format, units
from lockstep.renderers.jinja.marks import Marks
from lockstep.renderers.jinja.template import TemplateRefusal
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.xml_calls import arguments_of
from lockstep.types import Message, ToolCall

HELLO = Message(role="user", content="Hello.")
_REPLY = Message(role="tool", name="qz7_call_0", content="Qz7reply")
WORDS = "Qz7words"
THOUGHT = "Qz7thought"


def calls_of(count: int) -> tuple[ToolCall, ...]:
    """Returns `count` probe calls, one for each tool's reply."""
    arguments = [json.dumps({"qz7_key": f"Qz7value{n}"}) for n in range(count)]
    return tuple(ToolCall(name=f"qz7_call_{n}", arguments=a) for n, a in enumerate(arguments))


CALLS = calls_of(2)
"""Calls of the probe dialogues. No template and no control token contains such words."""


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """How the template writes thinking."""

    key: str
    """Field of a message that holds the thinking, such as reasoning_content; "content" if the
    template takes it from the content; empty if a history never shows it."""
    open: str
    """Text before the thinking, after the opening; empty if the opening contains it."""
    close: str
    """Text between the thinking and the content."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The pieces of a turn, as the template writes them."""

    opening: str = ""
    """The generation prompt."""
    header: str = ""
    """The part of the opening that precedes the turn in a history too."""
    lead: str = ""
    """Text between the header and the content of a turn without thinking, in a history."""
    words_end: str
    """Text from the content of a turn to its end, stop token included."""
    stop: str
    is_ended_by_next: bool = False
    """True if a turn ends with the token that opens the next message (GLM-4.5: `<|user|>`, or
    `<|observation|>` after calls). The template then writes no end for the last turn."""
    call_stop: str = ""
    """Token that ends a turn of calls; empty if the template writes no calls."""
    thinking: Thinking | None = None
    has_text_arguments: bool = False
    """True if the template takes arguments as JSON text rather than as an object."""
    empty_content: str | None = ""
    """Content that the template expects for a turn of calls without text."""
    calls: CallFormat | None = None
    no_calls: str = ""
    """Reason why the template can make no call."""


@dataclass(frozen=True, kw_only=True)
class ShapeFinder:
    """Finds the shape of one template."""

    run: Callable[[list[Any], list[Any], bool], str]
    """Renders messages and tools, with or without the generation prompt."""
    marks: Marks
    source: str
    where: str

    def find(self) -> Shape:
        base = self._write(None, HELLO)
        asked = self.run([message_dict(HELLO, None)], [], True)
        if not asked.startswith(base):
            raise RendererError(
                f"{self.where}: with add_generation_prompt the template does not only add to a "
                f"history. Without: {base[-80:]!r}; with: {asked[-80:]!r}."
            )
        opening = asked[len(base) :]
        answer = Message(role="assistant", content=WORDS)
        plain = self._write(None, HELLO, answer, HELLO)
        if WORDS not in plain or not plain.startswith(base):
            raise RendererError(
                f"{self.where}: the template does not write an assistant's words behind "
                f"the user's. It wrote {plain[:200]!r}."
            )
        text = plain[len(base) :]
        begun = units(opening, self.marks)
        header = "".join(begun[: first_difference(begun, units(text, self.marks))])
        lead, _, rest = text[len(header) :].partition(WORDS)
        names = self.marks.names(rest)
        if not names:
            raise RendererError(
                f"{self.where}: no control token ends an assistant's words. The template "
                f"writes {rest[:80]!r} behind them; an engine would never stop."
            )
        at, stop = names[0]
        last = self._write(None, HELLO, answer)
        shape = Shape(
            opening=opening,
            header=header,
            lead=lead,
            words_end=rest[: at + len(stop)],
            stop=stop,
            is_ended_by_next=not self.marks.names(last.partition(WORDS)[2]),
        )
        shape = replace(shape, thinking=self._find_thinking(base, shape))
        return self._with_calls(base, shape)

    def _write(self, shape: Shape | None, *messages: Message) -> str:
        """Returns a history as the template writes it."""
        return self.run([message_dict(message, shape) for message in messages], [], False)

    def _find_thinking(self, base: str, shape: Shape) -> Thinking | None:
        rest = shape.opening[len(shape.header) :]
        is_closed = rest.count("<") > 1  # an empty block: the model is not to think
        for key in ("reasoning_content", "reasoning", "thinking", "content"):
            if key == "content" and "</think>" not in self.source:
                continue
            message: dict[str, Any] = {"role": "assistant", "content": WORDS, key: THOUGHT}
            if key == "content":
                message["content"] = f"<think>\n{THOUGHT}\n</think>\n\n{WORDS}"
            try:
                text = self.run([message_dict(HELLO, None), message], [], False)
            except RendererError:
                continue
            text = text[len(base) :] if text.startswith(base) else ""
            if not 0 <= text.find(THOUGHT) < text.find(WORDS):
                continue
            before, _, behind = text.partition(THOUGHT)
            if not before.startswith(shape.opening):
                return None if is_closed else Thinking(key="", open="", close=behind)
            opened, closed = before[len(shape.opening) :], behind.partition(WORDS)[0]
            return Thinking(key=key, open=opened, close=closed)
        if "<think>" in rest and not is_closed:
            return Thinking(key="", open="", close="\n</think>\n\n")
        return None

    def _with_calls(self, base: str, shape: Shape) -> Shape:
        """Adds the format of calls, or the reason why there is none."""
        problem = ""
        for has_text, empty in product((True, False), ("", None)):
            tried = replace(shape, has_text_arguments=has_text, empty_content=empty)
            try:
                one = self._calling(base, tried, 1)
            except TemplateRefusal as refusal:
                problem = problem or f"it takes no tool's reply: {refusal}"
                continue
            except RendererError as error:
                problem = problem or str(error)
                continue
            is_quoted = json.dumps(CALLS[0].arguments)[1:-1] in one
            if value_of(CALLS[0]) not in one or (has_text and is_quoted):
                problem = problem or "it writes nothing for a call"
                continue
            try:
                two = self._calling(base, tried, 2)
            except RendererError:
                two = ""  # one call at a time
            return self._with_format(tried, one, two)
        return replace(shape, no_calls=problem)

    def _with_format(self, shape: Shape, one: str, two: str) -> Shape:
        behind = _behind(one, 0)
        names = self.marks.names(behind)
        stop = shape.stop
        if stop not in dict(names).values():
            last = _behind(self._write(shape, HELLO, _calling(1)), 0)
            stops = [name for _, name in self.marks.names(last)][-1:]
            if shape.is_ended_by_next:
                stops = [name for at, name in names if at >= len(last)]
            if not stops:
                return replace(shape, no_calls="no control token ends a turn that calls")
            stop = stops[0]
        one = one[: one.find(stop, len(one) - len(behind))]
        two = two[: max(two.find(stop, len(two) - len(_behind(two, 1))), 0)]
        found = derive_format(one, two, CALLS, self.marks)
        if found is None:
            why = f"it writes no known format of calls: {one[:160]!r}"
            return replace(shape, call_stop=stop, no_calls=why)
        return replace(shape, call_stop=stop, calls=self._with_gap(found, shape))

    def _with_gap(self, found: CallFormat, shape: Shape) -> CallFormat:
        """Adds the text that the template writes between content and a call."""
        turn = replace(_calling(1), content=WORDS)
        try:
            text = self._write(shape, HELLO, turn)
        except RendererError:
            return found
        gap, begins, _ = text.partition(WORDS)[2].partition(found.head or found.open or "{")
        return replace(found, gap=gap) if begins and not gap.strip() else found

    def _calling(self, base: str, shape: Shape, count: int) -> str:
        """Returns the template's text for `count` calls, up to the first tool's reply."""
        replies = [replace(_REPLY, name=call.name) for call in CALLS[:count]]
        text = self._write(shape, HELLO, _calling(count), *replies)
        if not text.startswith(base) or _REPLY.content not in text:
            raise RendererError(f"the template writes no tool's reply: {text[-80:]!r}")
        text = text[len(base) :].partition(_REPLY.content)[0].removeprefix(shape.header)
        text = text.removeprefix(shape.opening[len(shape.header) :])
        closed = "" if shape.thinking is None else shape.thinking.close.strip()
        if closed and 0 <= text.find(closed) < text.find(CALLS[0].name):
            text = text.partition(closed)[2]  # an empty block before the calls
        return text


def _calling(count: int) -> Message:
    return Message(role="assistant", tool_calls=CALLS[:count])


def _behind(text: str, number: int) -> str:
    """Returns the text after the arguments of a probe call."""
    return text.partition(value_of(CALLS[number]))[2]


def value_of(call: ToolCall) -> str:
    return json.loads(call.arguments)["qz7_key"]


def message_dict(message: Message, shape: Shape | None) -> dict[str, Any]:
    """Returns a message in the form that transformers gives to templates."""
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": message.content}
    if message.role == "tool":
        out["name"] = message.name
        out["tool_call_id"] = message.tool_call_id or "call00000"
    elif message.name:
        out["name"] = message.name
    how = None if shape is None else shape.thinking
    if message.thinking and how is not None and how.key:
        out["thinking_text" if how.key == "content" else how.key] = message.thinking
    if message.tool_calls:
        has_text = shape is not None and shape.has_text_arguments
        if not message.content and shape is not None:
            out["content"] = shape.empty_content

        def function_of(call: ToolCall) -> dict[str, Any]:
            arguments = call.arguments if has_text else (arguments_of(call) or {})
            return {"name": call.name, "arguments": arguments}

        out["tool_calls"] = [
            {"type": "function", "id": call.id or "call00000", "function": function_of(call)}
            for call in message.tool_calls
        ]
    return out


def with_inline(message: dict[str, Any], how: Thinking) -> dict[str, Any]:
    """Moves the thinking in front of the content, between the tags that the template looks for."""
    thinking = message.get("thinking_text")
    if thinking is None:
        return message
    words = cast("str | None", message["content"]) or ""
    kept = {key: value for key, value in message.items() if key != "thinking_text"}
    return {**kept, "content": f"<think>\n{thinking}\n</think>\n\n{words}"}
