"""Checks arguments against the JSON schema of a tool, in words that a model can act on.

The package jsonschema decides, by draft 2020-12. Regular expressions are not tried: they come from
servers of tools, and one of them can take for ever. Nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

MAX_INLINED = 8
"""Levels of references within references that `simplified` puts in place."""

_ONE = ("additionalProperties", "items")
_SEVERAL = ("allOf", "anyOf", "oneOf")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
"""Keywords that do not change which values are accepted."""

_DRAFT = Draft202012Validator.VALIDATORS


def _unchecked(*_: Any) -> Iterator[ValidationError]:
    return iter(())


def _unknown_keys(
    validator: Any, allowed: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if "patternProperties" not in schema:
        yield from _DRAFT["additionalProperties"](validator, allowed, value, schema)


_Validator = extend(
    Draft202012Validator,
    {
        "pattern": _unchecked,
        "patternProperties": _unchecked,
        "additionalProperties": _unknown_keys,
    },
)


# -- values ---------------------------------------------------------------------------------------


def mismatch(value: Any, schema: Any, where: str) -> str:
    """Describes what is wrong with `value`, or returns "". where: its name.

    >>> mismatch({"n": "3"}, {"properties": {"n": {"type": "integer"}}}, "size")
    'size.n must be integer, found string'
    """
    try:
        error = best_match(_Validator(schema, registry=Registry()).iter_errors(value))
        return "" if error is None else _said(error, where, error.absolute_path)
    except Unresolvable as unknown:
        return f"{where} cannot be checked: $ref {unknown.ref!r} leads nowhere"
    except RecursionError:
        return f"{where} cannot be checked: it is nested too deep"


def _said(error: ValidationError, where: str, path: Iterable[str | int]) -> str:
    """where: the place that `path` begins at."""
    for step in path:
        where += f"[{step}]" if isinstance(step, int) else f".{step}"
    expected: Any = error.validator_value
    found: Any = error.instance
    schema: Any = error.schema
    match error.validator:
        case "type":
            return f"{where} must be {' or '.join(_listed(expected))}, found {json_type(found)}"
        case "enum":
            return f"{where} must be one of {json.dumps(expected)}, found {_short(found)}"
        case "const":
            return f"{where} must be {json.dumps(expected)}, found {_short(found)}"
        case "required":
            return f"{where} lacks {next(name for name in expected if name not in found)!r}"
        case "additionalProperties":
            known = schema.get("properties", {})
            unknown = next(key for key in found if key not in known)
            return f"{where} has an unknown key {unknown!r}; known: {', '.join(known) or '-'}"
        case "anyOf" | "oneOf" if error.context:
            problems = dict.fromkeys(
                _said(each, where, each.relative_path) for each in error.context
            )
            return ", or ".join(problems)
    return f"{where} does not fit: {error.message[:200]}"


# -- schemas --------------------------------------------------------------------------------------


def schema_problem(schema: Any) -> str:
    """Describes why `schema` cannot be that of an object of arguments, or returns ""."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        found = schema.get("type") if isinstance(schema, Mapping) else schema
        return f"arguments are an object, and its type is {_short(found)}"
    try:
        _Validator.check_schema(schema)
        for reference in _references(schema):
            resolve(reference, schema)
    except SchemaError as error:
        return f"{'/'.join(map(str, ['#', *error.absolute_path]))}: {error.message[:200]}"
    except LookupError as error:
        return str(error.args[0])
    except RecursionError:
        return "it is nested too deep"
    return ""


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def resolve(reference: str, root: Any) -> Any:
    """Returns the schema that a `$ref` within `root` refers to. Raises LookupError if there is no
    such place, or it is in another document."""
    if not reference.startswith("#"):
        raise LookupError(f"$ref {reference!r} is not of this schema (#/...)")
    at = root
    for part in [p for p in reference[1:].split("/") if p]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(key)] if isinstance(at, list) else at[key]
        except (LookupError, TypeError, ValueError):
            raise LookupError(f"$ref {reference!r} leads nowhere") from None
    return at


def simplified(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites a schema with the keywords that prompt formats show: a model cannot keep to what it
    is not shown. The result accepts exactly the same values.

    References are put in place (but for recursive ones), alternatives of different types become a
    list of types or `oneOf`, and titles that repeat a name are left out. Takes a schema without a
    `schema_problem`.

    >>> simplified({"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}})
    {'properties': {'n': {'type': ['integer', 'null']}}}
    """
    simple = _simplified(schema, schema, ())
    if "$ref" not in json.dumps(simple):
        simple = {k: v for k, v in simple.items() if k not in ("$defs", "definitions")}
    return simple


def _simplified(schema: Any, root: Any, above: tuple[str, ...], name: str = "") -> Any:
    if isinstance(schema, bool):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ONE:
            out[key] = _simplified(value, root, above)
        elif key in _SEVERAL:
            out[key] = [_simplified(each, root, above) for each in value]
        elif key == "properties":
            out[key] = {k: _simplified(v, root, above, k) for k, v in value.items()}
        elif key != "title" or not _repeats(value, name):
            out[key] = value
    reference = out.get("$ref")
    if reference is not None and reference not in above and len(above) < MAX_INLINED:
        target = resolve(reference, root)
        beside = {k: v for k, v in out.items() if k != "$ref"}
        if isinstance(target, Mapping) and not (beside.keys() - _ANNOTATIONS):
            inner = _simplified(target, root, (*above, reference), name)
            if "$ref" not in json.dumps(inner):
                out = {**{k: v for k, v in inner.items() if k != "title"}, **beside}
    options = out.get("anyOf")
    if options is not None and not {"oneOf", "type"} & out.keys() and _are_disjoint(options):
        rest = {k: v for k, v in out.items() if k != "anyOf"}
        if all(each.keys() == {"type"} for each in options):
            return {"type": [t for each in options for t in _listed(each["type"])], **rest}
        return {"oneOf": options, **rest}
    return out


def _repeats(title: Any, name: str) -> bool:
    return bool(name) and str(title).replace(" ", "").lower() == name.replace("_", "").lower()


def _are_disjoint(options: Sequence[Any]) -> bool:
    """Whether no value can be of two of their types."""
    if not all(isinstance(each, Mapping) and "type" in each for each in options):
        return False
    types = [t for each in options for t in _listed(each["type"])]
    return len(types) == len({"number" if t == "integer" else t for t in types})


# -- JSON -----------------------------------------------------------------------------------------


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
