"""Tool calls as tags with one parameter each. Three dialects:

    qwen (Qwen3-Coder, 3.5)   glm (GLM-4.5 and later)       minimax (MiniMax-M2)
    <function=find>           find                          <invoke name="find">
    <parameter=q>             <arg_key>q</arg_key>          <parameter name="q">Bela</parameter>
    Bela                      <arg_value>Bela</arg_value>   </invoke>
    </parameter>
    </function>

The tags carry no types: `1` may be a number or a word. A parameter that its tool declares as a
string is read as text; any other is read as JSON, or as Python's True, False or None, if it can be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lockstep.types import ToolCall, ToolSchema


@dataclass(frozen=True)
class TagDialect:
    """The tags that one family of models uses for calls."""

    open: str
    """Text before the name of the function."""
    close: str
    """Text after the parameters; empty if only the markers around the call end it."""
    call: re.Pattern[str]
    """Matches a whole call: its name, and its parameters as one text."""
    parameter: re.Pattern[str]
    """Matches one parameter: its name and its value."""
    sketch: str
    """The form of a call, for error messages."""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


DIALECTS = {
    "qwen": TagDialect(
        open="<function=",
        close="</function>",
        call=_pattern(r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*"),
        parameter=_pattern(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
        sketch="<function=NAME> ... </function>",
    ),
    "glm": TagDialect(
        open="",
        close="",
        call=_pattern(r"\s*([^<\n]+?)\s*((?:<arg_key>.*)?)\s*"),
        parameter=_pattern(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        sketch="NAME <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> ...",
    ),
    "minimax": TagDialect(
        open='<invoke name="',
        close="</invoke>",
        call=_pattern(r'\s*<invoke name="([^"\n]+)">\s*(.*?)\s*</invoke>\s*'),
        parameter=_pattern(r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>'),
        sketch='<invoke name="NAME"> ... </invoke>',
    ),
}


TextParameters = dict[str, frozenset[str]]
"""Tool -> its parameters that take a string."""


def text_parameters(tools: Iterable[ToolSchema]) -> TextParameters:
    """Returns which parameters of each declared tool take a string."""
    out: TextParameters = {}
    for tool in tools:
        properties: Any = tool.parameters.get("properties")
        fields = cast("Mapping[str, Any]", properties if isinstance(properties, dict) else {})
        out[tool.name] = frozenset(
            key
            for key, schema in fields.items()
            if isinstance(schema, Mapping)
            and cast("Mapping[str, Any]", schema).get("type") == "string"
        )
    return out


def read_xml_call(
    text: str, texts: TextParameters, dialect: TagDialect = DIALECTS["qwen"]
) -> ToolCall | str:
    """Reads one call; its arguments become JSON. Returns the reason, as text, if it is malformed.

    >>> read_xml_call("<function=f><parameter=x>1</parameter></function>", {})
    ToolCall(name='f', arguments='{"x": 1}', id='')
    """
    found = dialect.call.fullmatch(text)
    if found is None:
        return f"a call is not {dialect.sketch}"
    name, body = found[1].strip(), found[2]
    arguments: dict[str, Any] = {}
    at = 0
    while body[at:].strip():
        parameter = dialect.parameter.match(body, at)
        if parameter is None:
            return "a call has words between its parameters"
        key, value = parameter[1].strip(), parameter[2]
        if key in arguments:
            return f"a call gives the parameter {key} twice"
        arguments[key] = value if key in texts.get(name, ()) else _json_or_text(value)
        at = parameter.end()
    if not name or not name.isprintable():
        return "a call's name is not printable text"
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Returns the arguments of a call as a dict, or None if they are not a JSON object."""
    try:
        arguments: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else None


_PYTHON = {"True": True, "False": False, "None": None}


def _json_or_text(text: str) -> Any:
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value
