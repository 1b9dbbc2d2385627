"""Tool calls as tags with one parameter each. Three dialects:

    qwen (Qwen3-Coder, 3.5)   glm (GLM-4.5 and later)       minimax (MiniMax-M2)
    <function=find>           find                          <invoke name="find">
    <parameter=q>             <arg_key>q</arg_key>          <parameter name="q">Bela</parameter>
    Bela                      <arg_value>Bela</arg_value>   </invoke>
    </parameter>
    </function>

The tags carry no types: `1` may be a number or a word. The tool's schema decides. A parameter that
may be a string stays text; only null, a list or an object is read as JSON where the schema takes
that too. Any other parameter is read as JSON, or as Python's True, False or None, if it can be.

A parameter without an end tag ends where the next one of its tool begins, or the call ends, as vLLM
reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lockstep.renderers.calls import load_json
from lockstep.renderers.jinja.marks import unmarked
from lockstep.tables import tables_beside
from lockstep.types import ToolCall, ToolSchema


@dataclass(frozen=True, kw_only=True)
class TagDialect:
    """The tags that one family of models uses for calls."""

    open: str = ""
    """Text before the name of the function."""
    name_end: str = ""
    """Text after the name; empty if the first parameter ends it."""
    close: str = ""
    """Text after the parameters; empty if only the markers around the call end it."""
    key_open: str
    key_end: str
    value_open: str = ""
    """Text before a value, if blanks may stand between it and the key."""
    value_end: str
    next_key: str
    """Pattern of the beginning of a parameter, up to its name."""
    sketch: str
    """The form of a call, for error messages."""
    blank: str = ""
    """Text that is cut from both ends of a value."""


_TABLES = tables_beside(__file__)
DIALECTS = {name: TagDialect(**fields) for name, fields in _TABLES.items()}

WORDS_BETWEEN = "a call has words between its parameters"

TextParameters = dict[str, Mapping[str, Any]]
"""Tool -> the JSON schema of its arguments, which says which of them may be text."""


def text_parameters(tools: Iterable[ToolSchema]) -> TextParameters:
    """Name of a tool -> the schema of its parameters: the types that `read_xml_call` reads by."""
    return {tool.name: tool.parameters for tool in tools}


def read_xml_call(
    text: str, schemas: TextParameters, dialect: TagDialect = DIALECTS["qwen"], *, mark: str = ""
) -> ToolCall | str:
    """Reads one call; its arguments become JSON. Returns the reason, as text, if it is malformed.

    mark: is taken out of the name and the values.

    >>> read_xml_call("<function=f><parameter=x>1</parameter></function>", {})
    ToolCall(name='f', arguments='{"x": 1}', id='')
    """
    read = scan_xml_call(text, schemas, dialect, mark=mark)
    if isinstance(read, str):
        return read
    call, end = read
    return WORDS_BETWEEN if text[end:].strip() else call


def scan_xml_call(
    text: str, schemas: TextParameters, dialect: TagDialect, *, mark: str = ""
) -> tuple[ToolCall, int] | str:
    """Reads the call at the beginning of a text: (the call, its end), or the reason why it is
    malformed. Each character is looked at a bounded number of times."""
    at = _skip_blanks(text, 0) + len(dialect.open)
    end = text.find(dialect.name_end or dialect.key_open, at)
    end = len(text) if end < 0 and not dialect.name_end else end
    name = unmarked(text[at : max(end, at)].strip(), mark)
    if not text[:at].endswith(dialect.open) or not re.fullmatch(r'[^<>"\n]+', name):
        return f"a call is not {dialect.sketch}"
    if not name.isprintable():
        return "a call's name is not printable text"
    at = end + len(dialect.name_end)
    root = schemas.get(name)
    declared = None if root is None else _properties_of(root)
    found: dict[str, int] = {}

    def find(tag: str) -> int:
        """Position of a tag from `begin` on; -1 if there is none. No text is searched twice."""
        if -1 < found.get(tag, 0) < begin or tag not in found:
            found[tag] = text.find(tag, begin) if tag else -1
        return found[tag]

    arguments: dict[str, Any] = {}
    while True:
        end, at = at, _skip_blanks(text, at)
        if dialect.close and text.startswith(dialect.close, at):
            end = at + len(dialect.close)
            break
        if not text.startswith(dialect.key_open, at):
            if not dialect.close:
                break
            return "a call is not closed" if at == len(text) else WORDS_BETWEEN
        begin = at + len(dialect.key_open)
        key_end = text.find(dialect.key_end, begin)
        key = unmarked(text[begin : max(key_end, begin)].strip(), mark)
        at = key_end + len(dialect.key_end)
        at = _skip_blanks(text, at) if dialect.value_open else at
        if key_end < 0 or not key or "\n" in key or not text.startswith(dialect.value_open, at):
            return WORDS_BETWEEN
        begin = at + len(dialect.value_open)
        end = find(dialect.value_end)
        at = end + len(dialect.value_end)
        if end < 0:
            end = at = find(dialect.close)
        if end < 0:
            return f"the parameter {key} of a call is not closed"
        for following in re.compile(dialect.next_key).finditer(text, begin, end):
            if declared is None or unmarked(following[1].strip(), mark) in declared:
                end = at = following.start()
                break
        if key in arguments:
            return f"a call gives the parameter {key} twice"
        blank = "\n" if end == at else dialect.blank  # before the next tag, where there is no end
        value = text[begin:end].removeprefix(dialect.blank).removesuffix(blank)
        arguments[key] = _typed(unmarked(value, mark), key, declared, root)
    is_ascii = "\\ud" in text.lower()  # halves of surrogate pairs, which JSON can spell, stay so
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=is_ascii)), end


def _properties_of(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    found = schema.get("properties")
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Returns the arguments of a call as a dict, or None if they are not a JSON object."""
    try:
        arguments: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else None


# -- types ----------------------------------------------------------------------------------------

_PYTHON = {"True": True, "False": False, "None": None}
_TYPES = {"string": str, "null": type(None), "array": list, "object": dict}
"""Types that decide between text and a value: numbers are read without them."""
_MAX_DEPTH = 32
_MAX_SCHEMAS = 1000
"""Nested schemas that are looked at for one value: a tool server's schemas may branch without
end. A schema behind the limit counts as accepting the value."""


def _typed(
    text: str, key: str, declared: Mapping[str, Any] | None, root: Mapping[str, Any] | None
) -> Any:
    """The value of a parameter. declared: the tool's parameters, by name. root: the schema of all
    arguments; None for a tool that was not declared."""
    try:
        value: Any = _PYTHON[text] if text in _PYTHON else load_json(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    schema = None if root is None else (declared or {}).get(key, root.get("additionalProperties"))
    if root is None or schema is None or not _Acceptance(root).accepts(schema, text):
        return value
    is_number = isinstance(value, int | float)  # True and False too
    return text if is_number or not _Acceptance(root).accepts(schema, value) else value


class _Acceptance:
    """Tells if schemas accept a text, list, object or null, as far as its type, `enum` and `const`
    decide."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.num_left = root, _MAX_SCHEMAS

    def accepts(self, schema: Any, value: Any, depth: int = 0) -> bool:
        self.num_left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self.num_left < 0:
            return schema is not False
        fields = cast("dict[str, Any]", schema)
        named = _listed(fields["type"]) if "type" in fields else [*_TYPES]
        if fields.get("nullable") is True:  # OpenAPI 3.0
            named = [*named, "null"]
        checks = [type(value) in [_TYPES.get(str(name)) for name in named]]
        if (listed := fields.get("enum")) is not None:
            checks.append(value in _listed(listed))
        if "const" in fields:
            checks.append(value == fields["const"])
        if isinstance(reference := fields.get("$ref"), str):
            checks.append(self.accepts(self._target(reference), value, depth + 1))
        for name, combine in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            if name in fields:
                branches = _listed(fields[name])
                checks.append(combine(self.accepts(one, value, depth + 1) for one in branches))
        return all(checks)

    def _target(self, reference: str) -> Any:
        """The schema that a local reference names; True, which accepts all, if there is none."""
        found: Any = self.root
        for step in reference.split("/")[1:] if reference.startswith("#") else ("",):
            step = step.replace("~1", "/").replace("~0", "~")
            fields = cast("dict[str, Any]", found if isinstance(found, dict) else {})
            found = fields.get(step, True)
        return found


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]
