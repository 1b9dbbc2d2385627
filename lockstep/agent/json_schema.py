"""Checks a JSON value against a JSON schema, in words that a model can act on.

Knows the keywords of draft 2020-12 that schemas of tools use: types, values, properties, items,
alternatives and references. Any other keyword (ranges, sizes, patterns) is not checked here; the
owner of the tool checks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 100
"""Levels of schemas within schemas, references included; one may refer to itself without end."""
MAX_INLINED = 8
"""Levels of references within references that `simplified` puts in place."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ONE = ("additionalProperties", "items")
_SEVERAL = ("allOf", "anyOf", "oneOf")
_NAMED = ("properties", "$defs", "definitions")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
"""Keywords that do not change which values are accepted."""


# -- values ---------------------------------------------------------------------------------------


def mismatch(value: Any, schema: Any, where: str, root: Any = None, depth: int = 0) -> str:
    """Describes what is wrong with `value`, or returns "". where: its place. root: the schema that
    `$ref` is resolved in; None is `schema` itself.

    >>> mismatch({"n": "3"}, {"properties": {"n": {"type": "integer"}}}, "size")
    'size.n must be integer, found string'
    """
    if schema is True:
        return ""
    if schema is False:
        return f"{where} must not be given"
    if depth > MAX_DEPTH:
        return f"{where} cannot be checked: it is nested too deep"
    root = schema if root is None else root
    if "$ref" in schema:
        try:
            target = resolve(schema["$ref"], root)
        except LookupError as error:
            return f"{where} cannot be checked: {error.args[0]}"
        if problem := mismatch(value, target, where, root, depth + 1):
            return problem
    return (
        _kind_problem(value, schema, where)
        or _choice_problem(value, schema, where, root, depth + 1)
        or _part_problem(value, schema, where, root, depth + 1)
    )


def _kind_problem(value: Any, schema: Mapping[str, Any], where: str) -> str:
    if "type" in schema:
        allowed, found = _listed(schema["type"]), json_type(value)
        is_whole = isinstance(value, float) and value.is_integer() and "integer" in allowed
        is_number = found == "integer" and "number" in allowed
        if found not in allowed and not is_number and not is_whole:
            return f"{where} must be {' or '.join(allowed)}, found {found}"
    if "enum" in schema and not any(_equal(value, each) for each in schema["enum"]):
        return f"{where} must be one of {json.dumps(schema['enum'])}, found {_short(value)}"
    if "const" in schema and not _equal(value, schema["const"]):
        return f"{where} must be {json.dumps(schema['const'])}, found {_short(value)}"
    return ""


def _choice_problem(
    value: Any, schema: Mapping[str, Any], where: str, root: Any, depth: int
) -> str:
    for option in schema.get("allOf", ()):
        if problem := mismatch(value, option, where, root, depth):
            return problem
    for name in ("anyOf", "oneOf"):
        if options := schema.get(name):
            problems = [mismatch(value, option, where, root, depth) for option in options]
            num_met = problems.count("")
            if not num_met:
                return _nearest(problems, options, value, where)
            if name == "oneOf" and num_met > 1:
                return f"{where} fits {num_met} of its alternatives, and must fit one alone"
    return ""


def _part_problem(value: Any, schema: Mapping[str, Any], where: str, root: Any, depth: int) -> str:
    if isinstance(value, list) and "prefixItems" not in schema:
        for index, each in enumerate(value):
            part = schema.get("items", True)
            if problem := mismatch(each, part, f"{where}[{index}]", root, depth):
                return problem
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                return f"{where} lacks {name!r}"
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        others = True if "patternProperties" in schema else others
        for key, each in value.items():
            if key not in known and others is False:
                return f"{where} has an unknown key {key!r}; known: {', '.join(known) or '-'}"
            part = known.get(key, others)
            if problem := mismatch(each, part, f"{where}.{key}", root, depth):
                return problem
    return ""


def _nearest(problems: Sequence[str], options: Sequence[Any], value: Any, where: str) -> str:
    """The problem with the alternative that was probably meant: the first whose type fits, or the
    one that got deepest into the value."""
    types = [str(option.get("type", "")) for option in options if isinstance(option, Mapping)]
    if len(types) == len(problems) and all(types):
        found = json_type(value)
        fitting = [p for p, kind in zip(problems, types, strict=True) if kind == found]
        if not fitting:
            return f"{where} must be {' or '.join(dict.fromkeys(types))}, found {found}"
        return fitting[0]
    return max(problems, key=lambda p: p.split(" ", 1)[0].count(".") + p.count("["))


# -- schemas --------------------------------------------------------------------------------------


def resolve(reference: Any, root: Any) -> Any:
    """Returns the schema that a `$ref` within `root` refers to. Raises LookupError if there is no
    such place, or it is in another document: nothing is fetched."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise LookupError(f"$ref {reference!r} is not of this schema (#/...)")
    at = root
    for part in [p for p in reference[1:].split("/") if p]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(key)] if isinstance(at, list) else at[key]
        except (LookupError, TypeError, ValueError):
            raise LookupError(f"$ref {reference!r} leads nowhere") from None
    return at


def schema_problem(schema: Any) -> str:
    """Describes why `schema` cannot be that of an object of arguments, or returns "". A schema
    without a problem makes `mismatch` and `simplified` raise nothing."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        found = schema.get("type") if isinstance(schema, Mapping) else schema
        return f"arguments are an object, and its type is {_short(found)}"
    try:
        return _form_problem(schema, schema, "#", 0)
    except RecursionError:
        return "it is nested too deep"


def _form_problem(schema: Any, root: Any, at: str, depth: int) -> str:
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{at} is {_short(schema)}, and a schema is an object, true or false"
    if depth > MAX_DEPTH:
        return f"{at} is nested too deep"
    parts: list[tuple[str, Any]] = []
    for name, value in schema.items():
        place, expected, is_list = f"{at}/{name}", "", isinstance(value, list)
        if name == "type" and not (_listed(value) and all(t in _TYPES for t in _listed(value))):
            expected = "one or several of " + ", ".join(_TYPES)
        elif name == "required" and not (is_list and all(isinstance(v, str) for v in value)):
            expected = "a list of names"
        elif name in (*_SEVERAL, "enum") and not (is_list and value):
            expected = "a list with a value"
        elif name in _NAMED and not isinstance(value, Mapping):
            expected = "schemas by name"
        elif name in _SEVERAL:
            parts += [(f"{place}/{i}", each) for i, each in enumerate(value)]
        elif name in _NAMED:
            parts += [(f"{place}/{key}", each) for key, each in value.items()]
        elif name in _ONE:
            parts.append((place, value))
        elif name == "$ref":
            try:
                resolve(value, root)
            except LookupError as error:
                return f"{at}: {error.args[0]}"
        if expected:
            return f"{place} must be {expected}, found {_short(value)}"
    problems = (_form_problem(each, root, place, depth + 1) for place, each in parts)
    return next(filter(None, problems), "")


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


def _equal(left: Any, right: Any) -> bool:
    """Equality of JSON: true is not 1, and 1 is 1.0."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    return left == right


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
