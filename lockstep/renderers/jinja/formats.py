"""Formats of tool calls: derived from what a template writes for a known call, and read from turns.

There are three kinds: a JSON object of name and arguments (Hermes, Qwen, Llama, Mistral), tags with
one parameter each (Qwen3-Coder, GLM, MiniMax), and a name and JSON arguments with fixed text around
them (DeepSeek, Kimi).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from lockstep.renderers.calls import read_call, read_call_list
from lockstep.renderers.jinja.marks import Marks, unmarked
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.xml_calls import DIALECTS, TextParameters, read_xml_call
from lockstep.types import ToolCall


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """[head] (open ... close)+ [tail], with any white space between."""

    kind: Literal["json", "xml", "fields"]
    open: str = ""
    close: str = ""
    head: str = ""
    """Text before the first call that is not part of `open`: Mistral's [TOOL_CALLS] [."""
    tail: str = ""
    arguments_key: str = "arguments"
    """json: key of the arguments, beside "name"."""
    between: str = ""
    """fields: text between the name and the arguments."""
    gap: str = "\n"
    """Text between the content of a turn and its calls."""
    is_single: bool = False
    """Whether the template makes only one call per turn."""
    other_keys: tuple[str, ...] = ()
    """json: other keys that the template writes."""
    dialect: str = "qwen"
    """xml: key of `xml_calls.DIALECTS`."""


_Span = tuple[int, int, CallFormat]
"""Begin and end of one call in a text, and its format."""


def derive_format(one: str, two: str, calls: Sequence[ToolCall], marks: Marks) -> CallFormat | None:
    """Derives the format from a turn that makes the first call and a turn that makes both.

    two: empty if the template makes one call at a time. Returns None if no format is recognized.
    """
    spans = _spans(two, calls) if two else []
    if len(spans) == 2:
        (begin, end, found), (next_begin, next_end, _) = spans
        middle = units(two[end:next_begin].strip(), marks)
        before = units(two[:begin].strip(), marks)
        after = units(two[next_end:].strip(), marks)
        num_head = len(before) - first_difference(before[::-1], middle[::-1])
        num_close = first_difference(after, middle)
        return replace(
            found,
            open="".join(before[num_head:]).strip(),
            close="".join(after[:num_close]).strip(),
            head="".join(before[:num_head]).strip(),
            tail="".join(after[num_close:]).strip(),
        )
    spans = _spans(one, calls[:1])
    if len(spans) != 1:
        return None
    begin, end, found = spans[0]
    return replace(found, open=one[:begin].strip(), close=one[end:].strip(), is_single=not two)


def _spans(text: str, calls: Sequence[ToolCall]) -> list[_Span]:
    """Returns the extent of each call, or [] if the calls are not all written in one known way."""
    for find in (_xml_span, _json_span, _fields_span):
        spans: list[_Span] = []
        at = 0
        for call in calls:
            span = find(text, at, call)
            if span is None:
                break
            spans.append(span)
            at = span[1]
        if len(spans) == len(calls):
            return spans
    return []


def _xml_span(text: str, at: int, call: ToolCall) -> _Span | None:
    for name, dialect in DIALECTS.items():
        written = re.compile(
            re.escape(dialect.open + call.name)
            + rf'"?>?\s*(?:{dialect.parameter.pattern})+\s*'
            + re.escape(dialect.close),
            re.DOTALL,
        )
        found = written.search(text, at)
        if found is None:
            continue
        read = read_xml_call(found[0], {}, dialect)
        if isinstance(read, ToolCall) and json.loads(read.arguments) == json.loads(call.arguments):
            return found.start(), found.end(), CallFormat(kind="xml", dialect=name)
    return None


def _json_span(text: str, at: int, call: ToolCall) -> _Span | None:
    arguments = json.loads(call.arguments)
    while (begin := text.find("{", at)) >= 0:
        at = begin + 1
        try:
            found, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            continue
        fields = cast("dict[str, Any]", found)
        keys = [key for key, value in fields.items() if value == arguments]
        if fields.get("name") == call.name and keys:
            others = tuple(key for key in fields if key not in ("name", keys[0]))
            made = CallFormat(kind="json", arguments_key=keys[0], other_keys=others)
            return begin, end, made
    return None


def _fields_span(text: str, at: int, call: ToolCall) -> _Span | None:
    begin = text.find(call.name, at)
    from_ = text.find("{", begin)
    if begin < 0 or from_ < 0:
        return None
    try:
        found, end = json.JSONDecoder().raw_decode(text, from_)
    except ValueError:
        return None
    if found != json.loads(call.arguments):
        return None
    between = text[begin + len(call.name) : from_]
    return begin, end, CallFormat(kind="fields", between=between)


def units(text: str, marks: Marks) -> list[str]:
    """Splits a text into whole control names and single other characters."""
    out: list[str] = []
    begin = 0
    for at, name in marks.names(text):
        out += [*text[begin:at], name]
        begin = at + len(name)
    return [*out, *text[begin:]]


# -- reading a turn -------------------------------------------------------------------------------


@dataclass(slots=True)
class ReadTurn:
    """The text and calls of a turn, after its thinking."""

    texts: list[str]
    calls: list[ToolCall]
    error: str = ""

    def fail(self, reason: str, text: str) -> None:
        self.error = self.error or reason
        self.texts.append(text)


def read_calls(
    text: str, format: CallFormat | None, parameters: TextParameters, mark: str
) -> ReadTurn:
    """Reads text and calls of a turn. In `text`, control tokens appear by name, and names that the
    model spelled contain `mark`. Text that makes no call is kept in `texts`."""
    turn = ReadTurn([], [])
    if format is not None and (format.open or format.kind == "xml"):
        _read_blocks(text, format, parameters, mark, turn)
    elif format is not None and format.kind == "json":
        _read_list(text, format, mark, turn)
    else:
        turn.texts.append(text)
    if format is not None and format.is_single and len(turn.calls) > 1:
        return ReadTurn([text], [], "several calls in one turn, and the template has place for one")
    return turn


def _read_blocks(
    text: str, format: CallFormat, parameters: TextParameters, mark: str, turn: ReadTurn
) -> None:
    opening = format.open or DIALECTS[format.dialect].open
    at = 0
    while True:
        begin = text.find(opening, at)
        words = text[at:] if begin < 0 else text[at:begin].removesuffix(format.gap)
        if format.head:
            words, found, behind = words.partition(format.head)
            words = words.removesuffix(format.gap) if found else words
            words += behind if behind.strip() else ""
        if turn.calls:
            words = words.replace(format.tail, "", 1) if format.tail else words
        if words.strip() or not turn.calls:
            turn.texts.append(words)
        if begin < 0:
            return
        inside = begin + len(format.open)
        if format.kind == "xml" and not format.close:
            last = DIALECTS[format.dialect].close
            end = after = text.find(last, inside) + len(last)
        else:
            begins = text.find(format.between.strip(), inside) if format.between else inside
            begins = begins + len(format.between.strip()) if begins >= 0 else inside
            end = text.find(format.close, begins) if format.close else len(text)
            after = end + len(format.close)
        other = text.find(opening, begin + len(opening))
        if end < inside or 0 <= other < end:
            end = after = other if other >= 0 else len(text)
            turn.fail("a call is not closed", text[begin:end])
        else:
            read = _read_one(text[inside:end], format, parameters, mark)
            if isinstance(read, ToolCall):
                turn.calls.append(read)
            else:
                turn.fail(read, text[begin:after])
        at = after


def _read_one(
    text: str, format: CallFormat, parameters: TextParameters, mark: str
) -> ToolCall | str:
    if format.kind == "xml":  # a tag that is a control token counts only as that
        read = read_xml_call(text, parameters, DIALECTS[format.dialect])
        if isinstance(read, str):
            return read
        return ToolCall(name=unmarked(read.name, mark), arguments=unmarked(read.arguments, mark))
    text = unmarked(text, mark)
    if format.kind == "json":
        return read_call(text, arguments_key=format.arguments_key, ignored_keys=format.other_keys)
    between = format.between.strip()
    at = text.find(between or "{")  # white space alone: the arguments are an object
    name, arguments = text[: max(at, 0)].strip(), text[at + len(between) :].strip()
    if not name or not name.isprintable():
        return f"a call is not NAME {between} ARGUMENTS"
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return "a call's arguments are not JSON"
    return ToolCall(name=name, arguments=arguments)


def _read_list(text: str, format: CallFormat, mark: str, turn: ReadTurn) -> None:
    """Reads consecutive JSON objects, after `head` or, if the format has none, as the whole
    turn."""
    head = format.head.rstrip("[ ")
    words, found, calls = text.partition(head) if head else ("", "", text)
    if head and not found:
        turn.texts.append(text)
        return
    rest = whole = unmarked(calls, mark).strip()
    if head and rest.startswith("[") and rest.endswith("]"):
        rest = rest[1:-1]
    read = read_call_list(rest, arguments_key=format.arguments_key, ignored_keys=format.other_keys)
    if isinstance(read, list):
        turn.texts += [words] if words.strip() else []
        turn.calls += read
    elif head or re.match(r'\{\s*"name"', whole):
        turn.fail(read, text)
    else:
        turn.texts.append(text)
