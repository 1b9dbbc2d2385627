"""Formats of tool calls: derived from what a template writes for a known call, and read from turns.

There are three kinds: a JSON object of name and arguments (Hermes, Qwen, Llama, Mistral), tags with
one parameter each (Qwen3-Coder, GLM, MiniMax), and a name and JSON arguments with fixed text around
them (DeepSeek, Kimi).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.renderers.calls import ReadTurn, load_json, read_call, read_call_list
from lockstep.renderers.jinja.marks import Marks, unmarked
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.xml_calls import DIALECTS, TextParameters, read_xml_call, scan_xml_call
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
    """True if the template makes only one call per turn."""
    other_keys: tuple[str, ...] = ()
    """json: other keys that the template writes."""
    dialect: str = "qwen"
    """xml: key of `xml_calls.DIALECTS`."""


Names = Callable[[str], Sequence[tuple[int, str]]]
"""Finds (position, name) of the control tokens in a text."""

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
        begin = text.find(dialect.open + call.name, at)
        read = scan_xml_call(text[begin:], {}, dialect) if begin >= 0 else ""
        if isinstance(read, tuple) and json.loads(read[0].arguments) == json.loads(call.arguments):
            return begin, begin + read[1], CallFormat(kind="xml", dialect=name)
    return None


def _json_span(text: str, at: int, call: ToolCall) -> _Span | None:
    arguments = json.loads(call.arguments)
    while (begin := text.find("{", at)) >= 0:
        at = begin + 1
        fields, end = _object(text, begin)
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
    found, end = _object(text, from_)
    if found != json.loads(call.arguments):
        return None
    between = text[begin + len(call.name) : from_]
    return begin, end, CallFormat(kind="fields", between=between)


def _object(text: str, begin: int) -> tuple[dict[str, Any], int]:
    """The JSON object at `begin` and its end; an empty one if there is none."""
    with suppress(ValueError, RecursionError):
        return json.JSONDecoder().raw_decode(text, begin)
    return {}, begin


def units(text: str, marks: Marks) -> list[str]:
    """Splits a text into whole control names and single other characters."""
    out: list[str] = []
    begin = 0
    for at, name in marks.names(text):
        out += [*text[begin:at], name]
        begin = at + len(name)
    return [*out, *text[begin:]]


# -- reading a turn -------------------------------------------------------------------------------


def read_calls(
    text: str,
    format: CallFormat | None,
    schemas: TextParameters,
    mark: str,
    names: Names = lambda text: [],
) -> ReadTurn:
    """Reads text and calls of a turn. In `text`, control tokens appear by name, and names that the
    model spelled contain `mark`. Text that makes no call is kept in `texts`. Takes linear time.

    names: finds control tokens, which no JSON of a call may hold.
    """
    turn = ReadTurn(gap="\n" if format is None else format.gap)
    if format is not None and _opening(format):
        _read_blocks(text, format, schemas, mark, turn, names)
    elif format is not None and format.kind == "json":
        _read_list(text, format, mark, turn)
    else:
        turn.say(text)
    if format is not None and format.is_single and len(turn.calls) > 1:
        why = "several calls in one turn, and the template has place for one"
        return ReadTurn(texts=[text], error=why)
    return turn


def _opening(format: CallFormat) -> str:
    """Beginning of a call; empty if only its name does."""
    return format.open or (DIALECTS[format.dialect].open if format.kind == "xml" else "")


def _read_blocks(
    text: str, format: CallFormat, schemas: TextParameters, mark: str, turn: ReadTurn, names: Names
) -> None:
    opening = _opening(format)
    at, is_behind_call = 0, False
    while (begin := text.find(opening, at)) >= 0:
        following = text.find(opening, begin + len(opening))
        limit = following if following >= 0 else len(text)
        found, end = _read_block(text[begin:limit], format, schemas, mark)
        inside = text[begin + len(opening) : begin + end - len(format.close)]
        if isinstance(found, ToolCall) and format.kind == "json" and (stray := names(inside)):
            found = f"{stray[0][1]} is out of place"
        words = _without_tail(text[at:begin], format) if is_behind_call else text[at:begin]
        if is_behind_call := isinstance(found, ToolCall):
            words = _without_head(words, format)
        at = begin + end
        turn.say(words)
        turn.add(found, text[begin:at])
    turn.say(_without_tail(text[at:], format) if is_behind_call else text[at:])


def _without_head(words: str, format: CallFormat) -> str:
    """Takes out the text that stands before the first call, and blanks behind it."""
    before, found, behind = words.rpartition(format.head) if format.head else (words, "", "")
    return words if not found or behind.strip() else before.removesuffix(format.gap) or before


def _without_tail(words: str, format: CallFormat) -> str:
    behind = words.lstrip()
    is_tail = format.tail and behind.startswith(format.tail)
    return behind.removeprefix(format.tail) if is_tail else words


def _read_block(
    text: str, format: CallFormat, schemas: TextParameters, mark: str
) -> tuple[ToolCall | str, int]:
    """Reads the call at the beginning of a text that has no other call: (the call or the reason why
    it is malformed, its end)."""
    dialect = DIALECTS[format.dialect]
    if format.kind == "xml" and not format.close and dialect.close:
        inside = len(format.open)
        read = scan_xml_call(text[inside:], schemas, dialect, mark=mark)
        return (read, len(text)) if isinstance(read, str) else (read[0], inside + read[1])
    inside = len(format.open)
    between = format.between.strip()
    after_name = text.find(between, inside) + len(between)  # it may look like the end of a call
    end = text.find(format.close, max(after_name, inside)) if format.close else len(text)
    if end < 0:
        return "a call is not closed", len(text)
    return _read_one(text[inside:end], format, schemas, mark), end + len(format.close)


def _read_one(text: str, format: CallFormat, schemas: TextParameters, mark: str) -> ToolCall | str:
    if format.kind == "xml":  # a tag that is a control token counts only as that
        return read_xml_call(text, schemas, DIALECTS[format.dialect], mark=mark)
    text = unmarked(text, mark)
    if format.kind == "json":
        return read_call(text, arguments_key=format.arguments_key, ignored_keys=format.other_keys)
    between = format.between.strip()
    at = text.find(between or "{")  # white space alone: the arguments are an object
    name, arguments = text[: max(at, 0)].strip(), text[at + len(between) :].strip()
    if not name or not name.isprintable():
        return f"a call is not NAME {between} ARGUMENTS"
    try:
        load_json(arguments)
    except (ValueError, RecursionError):
        return "a call's arguments are not JSON"
    return ToolCall(name=name, arguments=arguments)


def _read_list(text: str, format: CallFormat, mark: str, turn: ReadTurn) -> None:
    """Reads consecutive JSON objects, after `head` or, if the format has none, as the whole
    turn."""
    head = format.head.rstrip("[ ")
    words, found, calls = text.partition(head) if head else ("", "", text)
    if head and not found:
        turn.say(text)
        return
    rest = whole = unmarked(calls, mark).strip()
    if head and rest.startswith("[") and rest.endswith("]"):
        rest = rest[1:-1]
    read = read_call_list(rest, arguments_key=format.arguments_key, ignored_keys=format.other_keys)
    if isinstance(read, list):
        turn.say(words if words.strip() else "")
        for call in read:
            turn.add(call, "")
    elif head or re.match(r'\{\s*"name"', whole):
        turn.add(read, text)
    else:
        turn.say(text)
