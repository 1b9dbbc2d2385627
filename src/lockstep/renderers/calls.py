"""Tool calls written as JSON, read without changing the text of their arguments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

from lockstep.types import ToolCall, ToolSchema

_NOT_JSON = "a call is not JSON"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
load_json = _DECODER.decode
"""Reads JSON as its standard has it: NaN, Infinity and numbers like 1e999 raise ValueError."""


@dataclass(slots=True)
class ReadTurn:
    """The text and calls of a turn, after its thinking."""

    gap: str = "\n"
    """Text that a template writes between words and a call."""
    texts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    error: str = ""
    _ends_with_call: bool = False

    def say(self, words: str) -> None:
        """Adds text outside of calls. Blanks between and behind calls are left out."""
        if words.strip() or not self.calls:
            self.texts.append(words)
            self._ends_with_call = False

    def add(self, found: ToolCall | str, text: str) -> None:
        """Adds a call, or the text of a malformed call, with the reason."""
        self._ends_with_call = isinstance(found, ToolCall)
        if isinstance(found, ToolCall):
            self.calls.append(found)
        else:
            self.error = self.error or found
            self.texts.append(text)

    @property
    def content(self) -> str:
        """All text outside of calls, as it was sampled; without the gap before a last call."""
        whole = "".join(self.texts)
        return whole.removesuffix(self.gap) if self._ends_with_call else whole


def read_call(
    text: str,
    *,
    arguments_key: str = "arguments",
    ignored_keys: Collection[str] = (),
    has_id: bool = False,
) -> ToolCall | str:
    """Reads a JSON object of "name" and `arguments_key`. Returns the call, or the reason it is
    none.

    The arguments may be any JSON; their text is kept. ignored_keys: other keys that may be present.
    has_id: an "id" may be present, and is kept.

    >>> read_call('{"name": "f", "arguments": {"x":1e3}}')
    ToolCall(name='f', arguments='{"x":1e3}', id='')
    >>> read_call('{"name": "f"}')
    'a call is not an object of "name" and "arguments"'
    """
    try:
        call: Any = load_json(text)
        arguments = _value_text(text, arguments_key) if isinstance(call, dict) else ""
    except (ValueError, RecursionError):
        return _NOT_JSON
    fields = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    call_id = fields.pop("id", "") if has_id else ""
    if set(fields) - set(ignored_keys) != {"name", arguments_key}:
        return f'a call is not an object of "name" and "{arguments_key}"'
    name = fields["name"]
    if not isinstance(name, str) or not name or not name.isprintable():
        return "a call's name is not a printable text"
    if not isinstance(call_id, str):
        return "a call's id is not a text"
    return ToolCall(name=name, arguments=arguments, id=call_id)


def read_whole_call(
    text: str, *, arguments_key: str = "arguments", ignored_keys: Collection[str] = ()
) -> ToolCall | str | None:
    """Reads a whole text as one call, in formats that have no tags for calls.

    Returns None for text that is no call: an answer may be a JSON object too. Returns the reason,
    as text, if it begins like a call and is not valid JSON.

    >>> read_whole_call('{"name": "Bela", "age": 3}') is None
    True
    >>> read_whole_call('{"name": "f", "arguments": {')
    'a call is not JSON'
    """
    if re.match(r'\s*\{\s*"', text) is None:
        return None
    found = read_call(text, arguments_key=arguments_key, ignored_keys=ignored_keys)
    if isinstance(found, ToolCall):
        return found
    begins_as_call = re.match(r'\s*\{\s*"name"\s*:', text) is not None
    return found if begins_as_call and found == _NOT_JSON else None


def read_call_list(text: str, *, separator: str = "", **keys: Any) -> list[ToolCall] | str:
    """Reads JSON calls that follow one another. Returns the reason, as text, if there are none.

    separator: text that must stand between two calls; empty allows blanks, commas and semicolons.
    keys: as for `read_call`.
    """
    calls: list[ToolCall] = []
    text, at = text.rstrip(" \r\n\t,;"), 0
    while (at := _skip(text, at, " \r\n\t,;")) < len(text):
        try:
            end = _DECODER.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            return _NOT_JSON
        call = read_call(text[at:end], **keys)
        if isinstance(call, str):
            return call
        calls.append(call)
        at = _skip(text, end, " \r\n\t")
        if at < len(text) and not text.startswith(separator, at):
            return f"something stands between calls that is not {separator}"
    return calls or "a call is missing"


def read_call_array(text: str, **keys: Any) -> list[ToolCall] | str:
    """Reads a JSON list of calls. Returns the reason, as text, if it is none. keys: as for
    `read_call`."""
    try:
        found = load_json(text)
    except (ValueError, RecursionError):
        return _NOT_JSON
    if not isinstance(found, list):
        return "calls are not a JSON list"
    return read_call_list(text.strip()[1:-1], separator=",", **keys)


def call_text(call: ToolCall, *, arguments_key: str = "arguments", has_id: bool = False) -> str:
    """Writes a call as the JSON object that `read_call` reads; the text of the arguments is
    kept."""
    name, id_ = (json.dumps(text, ensure_ascii=False) for text in (call.name, call.id))
    last = f', "id": {id_}' if has_id and call.id else ""
    return f'{{"name": {name}, "{arguments_key}": {call.arguments}{last}}}'


def function_json(tool: ToolSchema) -> dict[str, Any]:
    """Returns a tool in the form that chat templates expect."""
    named = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": {**named, "parameters": dict(tool.parameters)}}


def _value_text(text: str, key: str) -> str:
    """Returns the text of the value of `key` in the JSON object `text`, unchanged."""
    found = ""
    at = text.index("{") + 1
    while True:
        at = _skip(text, at, " \t\r\n,")
        if text[at] == "}":
            return found
        name, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, at, " \t\r\n:")
        _, at = _DECODER.raw_decode(text, begin)
        if name == key:
            found = text[begin:at]


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
