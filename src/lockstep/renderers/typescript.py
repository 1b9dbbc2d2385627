"""Tools in the form that gpt-oss was trained on: JSON schemas as TypeScript types.

Source: openai/harmony, src/encoding.rs at 14648ba. Its odd line breaks are kept: the model was
trained on them. Guard: tests/parity/test_harmony_parity.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lockstep.types import ToolSchema


def tools_text(tools: Sequence[ToolSchema]) -> str:
    """Writes tools as a TypeScript namespace.

    >>> city = {"type": "object", "properties": {"city": {"type": "string"}}}
    >>> print(tools_text([ToolSchema(name="weather", description="Of today.", parameters=city)]))
    # Tools
    <BLANKLINE>
    ## functions
    <BLANKLINE>
    namespace functions {
    <BLANKLINE>
    // Of today.
    type weather = (_: {
    city?: string,
    }) => any;
    <BLANKLINE>
    } // namespace functions
    """
    lines: list[str] = []
    for tool in tools:
        words = tool.description.removesuffix("\n").split("\n") if tool.description else []
        lines += [f"// {line.removesuffix(chr(13))}" for line in words]
        lines.append(f"type {tool.name} = (_: {_type_text(tool.parameters, '')}) => any;\n")
    body = "\n".join(["## functions\n", "namespace functions {\n", *lines])
    return f"# Tools\n\n{body}\n}} // namespace functions"


def _type_text(schema: Mapping[str, Any], indent: str) -> str:
    """Writes a JSON schema as a TypeScript type, with descriptions and defaults as comments."""
    if variants := schema.get("oneOf"):
        lines: list[str] = []
        for variant in variants:
            description = [variant["description"]] if "description" in variant else []
            notes = [*description, *_default_note(variant, quoted=True)]
            lines.append(f"\n{indent} | {_variant_text(variant, indent, notes)}")
        return "".join(lines)
    kind = schema.get("type")
    if isinstance(kind, list):
        names = cast("list[str]", kind)
        return " | ".join("number" if name == "integer" else name for name in names) or "any"
    match kind:
        case "object":
            return _object_text(schema, indent)
        case "string":
            values = [v for v in schema.get("enum") or () if isinstance(v, str)]
            return " | ".join(f'"{value}"' for value in values) or "string"
        case "number" | "integer":
            return "number"
        case "boolean":
            return "boolean"
        case "array":
            return f"{_type_text(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case _:
            return "any"


def _object_text(schema: Mapping[str, Any], indent: str) -> str:
    out = f"{indent}// {schema['description']}\n" if "description" in schema else ""
    out += "{\n"
    required: Sequence[str] = schema.get("required") or ()
    properties: Mapping[str, Mapping[str, Any]] = schema.get("properties") or {}
    for name, value in properties.items():
        out += _property_text(name if name in required else f"{name}?", value, indent)
    return f"{out}{indent}}}"


def _property_text(key: str, schema: Mapping[str, Any], indent: str) -> str:
    comments: list[str] = []
    if "title" in schema:
        comments += [f"// {schema['title']}", "//"]
    variants = schema.get("oneOf")
    description = schema.get("description")
    is_of_first = bool(variants) and variants[0].get("description") == description
    is_above = description is not None and not is_of_first
    if is_above and not variants:
        comments.append(f"// {description}")
    if examples := schema.get("examples"):
        comments.append("// Examples:")
        comments += [f'// - "{example}"' for example in examples if isinstance(example, str)]
    if is_above and variants:
        comments.append(f"// {description}")
    default = _default_note(schema)
    if variants:
        comments += [f"// {note}" for note in default]
    out = "".join(f"{indent}{comment}\n" for comment in comments)
    if not variants:
        note = f" // {default[0]}" if default else ""
        return f"{out}{indent}{key}: {_nullable_text(schema, indent + '    ')},{note}\n"
    out += f"{indent}{key}:\n"
    for at, variant in enumerate(variants):
        notes = _default_note(variant)
        own = variant.get("description")
        if own is not None and own != description and not (at == 0 and is_above):
            notes.insert(0, str(own))
        out += f"{indent} | {_variant_text(variant, indent, notes)}\n"
    return f"{out}{indent},\n"


def _variant_text(schema: Mapping[str, Any], indent: str, notes: Sequence[str]) -> str:
    comment = f" // {' '.join(notes)}" if notes else ""
    return _nullable_text(schema, indent + "   ") + comment


def _nullable_text(schema: Mapping[str, Any], indent: str) -> str:
    text = _type_text(schema, indent)
    return f"{text} | null" if schema.get("nullable") is True and "null" not in text else text


def _default_note(schema: Mapping[str, Any], *, quoted: bool = False) -> list[str]:
    """Writes "default: 5". Strings are quoted, except for an enum in a property."""
    if "default" not in schema:
        return []
    default = schema["default"]
    if isinstance(default, str) and schema.get("enum") and not quoted:
        return [f"default: {default}"]
    if isinstance(default, str):
        return [f'default: "{default}"']
    return [f"default: {json.dumps(default, ensure_ascii=False, separators=(',', ':'))}"]
