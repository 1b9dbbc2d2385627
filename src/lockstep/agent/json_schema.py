"""Checks arguments against the JSON schema of a tool, in words that a model can act on.

The package jsonschema decides, by draft 2020-12, within a number of steps: schemas come from
servers of tools, and a short one can take for ever. Regular expressions are not tried for the same
reason, and nothing is fetched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import PointerToNowhere, Unresolvable
from referencing.jsonschema import DRAFT202012

MAX_INLINED_CHARS = 32_768
"""Length of a schema whose references `simplified` put in place; a longer one keeps them."""
MAX_STEPS = 50_000
"""Keywords that may be tried on a value, about a second; each character of the value adds 2."""
MAX_SCHEMA_STEPS = 300_000
"""Keywords that may be tried on a schema, several times what 16 kB of it take."""
MAX_ERRORS = 100
"""Errors of a value among which the one to report is chosen."""

_ONE = ("additionalProperties", "items")
_SEVERAL = ("allOf", "anyOf", "oneOf")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
"""Keywords that do not change which values are accepted."""
_UNCHECKED = {"pattern", "patternProperties", "format"}


# -- bounded work ---------------------------------------------------------------------------------


class _TooMuchWork(Exception):
    """The text is for whoever wrote the schema."""


_LEFT: ContextVar[float] = ContextVar("_LEFT")
"""Steps that the work in progress may still take."""
_HAS_PATTERNS: ContextVar[bool] = ContextVar("_HAS_PATTERNS", default=False)
"""True if the schema in use names keys by regular expressions."""


@contextmanager
def _limited(steps: float, *, has_patterns: bool = False) -> Iterator[None]:
    """Inside of it, `_spend` raises _TooMuchWork once more than `steps` are spent."""
    left, patterns = _LEFT.set(steps), _HAS_PATTERNS.set(has_patterns)
    try:
        yield
    finally:
        _LEFT.reset(left)
        _HAS_PATTERNS.reset(patterns)


def _spend(steps: float) -> None:
    left = _LEFT.get() - steps
    if left < 0:
        raise _TooMuchWork("its schema takes too many steps")
    _LEFT.set(left)


def _counted(keyword: str, check: Any) -> Any:
    """The keyword's check, which spends steps for the values it reads and the errors it writes."""

    def counted(validator: Any, expected: Any, value: Any, schema: Any) -> Iterator[Any]:
        _spend(1 + _size(expected) / 8 + _size(value) / 64)
        if keyword.startswith("unevaluated"):
            _spend(_size(value) ** 2 / 64)  # the package looks up each entry in a list
        if keyword in ("additionalProperties", "unevaluatedProperties") and (
            "patternProperties" in schema or (keyword[0] == "u" and _HAS_PATTERNS.get())
        ):
            return
        for error in check(validator, expected, value, schema) or ():
            _spend(1 + len(error.message) / 64)
            yield error

    return counted


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _unique(_: Any, expected: Any, value: Any, __: Any) -> Iterator[ValidationError]:
    """`uniqueItems`, which the package tries by pairs."""
    if expected and isinstance(value, list):
        written = [canonical(each) for each in value]
        _spend(len(written) + sum(map(len, written)) / 16)
        if len(set(written)) < len(written):
            yield ValidationError(f"{shown(value)} has non-unique elements")


def _evolve(validator: Any, **changes: Any) -> Any:
    """The validator of another part of the schema. The package would take the one of a dialect that
    the part names, which tries regular expressions."""
    _spend(3)
    kept = {"registry": validator._registry, "_resolver": validator._resolver}
    return _Validator(**{"schema": validator.schema, **kept, **changes})


_Validator: Any = extend(
    Draft202012Validator,
    {
        keyword: _counted(keyword, _unique if keyword == "uniqueItems" else check)
        for keyword, check in Draft202012Validator.VALIDATORS.items()
        if keyword not in _UNCHECKED
    }
    | dict.fromkeys(_UNCHECKED, lambda *_: ()),
)
_Validator.evolve = _evolve


# -- values ---------------------------------------------------------------------------------------


def mismatch(value: Any, schema: Any, where: str) -> str:
    """Describes the mistake in `value`, or returns "". where: its name.

    >>> mismatch({"n": "3"}, {"properties": {"n": {"type": "integer"}}}, "size")
    'size.n must be integer, found string'
    """
    steps = MAX_STEPS + 2 * len(json.dumps(value))
    try:
        with _limited(steps, has_patterns="patternProperties" in json.dumps(schema)):
            errors = _Validator(schema, registry=Registry()).iter_errors(value)
            error = best_match(islice(errors, MAX_ERRORS))
            return "" if error is None else _said(error, where, error.absolute_path)
    except Unresolvable as unknown:
        return f"{where} cannot be checked: $ref {unknown.ref!r} leads nowhere"
    except RecursionError:
        return f"{where} cannot be checked: it is nested too deep"
    except _TooMuchWork as error:
        return f"{where} cannot be checked: {error}"
    except ArithmeticError:
        return f"{where} cannot be checked: a number in it is too large"


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
            return f"{where} must be one of {json.dumps(expected)}, found {shown(found)}"
        case "const":
            return f"{where} must be {json.dumps(expected)}, found {shown(found)}"
        case "required":
            return f"{where} lacks {next(name for name in expected if name not in found)!r}"
        case "additionalProperties":
            known = schema.get("properties", {})
            unknown = next(key for key in found if key not in known)
            return f"{where} has an unknown key {unknown!r}; known: {', '.join(known) or '-'}"
        case "anyOf" | "oneOf" if error.context:
            problems = (_said(each, where, each.relative_path) for each in error.context)
            return ", or ".join(dict.fromkeys(problems))
    return f"{where} does not fit: {error.message[:200]}"


# -- schemas --------------------------------------------------------------------------------------


def schema_problem(schema: Any) -> str:
    """Describes why `schema` cannot describe an object of arguments, or returns ""."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        found = schema.get("type") if isinstance(schema, Mapping) else schema
        return f"arguments are an object, and its type is {shown(found)}"
    try:
        with _limited(MAX_SCHEMA_STEPS):
            # A reference may lead to a part that is no schema by its place.
            return _invalid(schema) or _invalid(
                {"$defs": {place: resolve(place, schema) for place in _references(schema)}}
            )
    except LookupError as error:
        return str(error.args[0])
    except RecursionError:
        return "it is nested too deep"
    except _TooMuchWork as error:
        return f"it cannot be checked: {error}"


def _invalid(schema: Any) -> str:
    """The first place that is not as draft 2020-12 has it."""
    errors = _Validator(Draft202012Validator.META_SCHEMA, registry=Registry()).iter_errors(schema)
    for error in errors:
        return f"{'/'.join(map(str, ['#', *error.absolute_path]))}: {error.message[:200]}"
    return ""


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        found = [schema.get(name) for name in ("$ref", "$dynamicRef")]
        yield from (each for each in found if isinstance(each, str))
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def resolve(reference: str, root: Any) -> Any:
    """Returns the schema that a `$ref` within `root` refers to. Raises LookupError if there is no
    such place, or it is in another document."""
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(f"$ref {reference!r} is not of this schema (#/...)")
    registry = Registry().with_resource("", DRAFT202012.create_resource(root))
    try:
        return registry.resolver().lookup(reference).contents
    except (PointerToNowhere, LookupError, TypeError, ValueError):
        raise LookupError(f"$ref {reference!r} leads nowhere") from None


def simplified(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites a schema with the keywords that prompt formats show: a model cannot keep to keywords
    it never sees. The result accepts exactly the same values.

    References are put in place (recursive ones stay), alternatives of different types become a list
    of types or `oneOf`, and titles that repeat a name are left out. Takes a schema without a
    `schema_problem`.

    >>> simplified({"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}})
    {'properties': {'n': {'type': ['integer', 'null']}}}
    """
    try:
        with _limited(8 * MAX_INLINED_CHARS):  # a part is written once for each reference around it
            simple = _simplified(schema, schema, ())
        with _limited(max(MAX_INLINED_CHARS, len(json.dumps(schema)))):
            _spend(len(json.dumps(simple)))
    except (_TooMuchWork, RecursionError):
        with _limited(math.inf):
            simple = _simplified(schema, schema, None)
    if "$ref" not in json.dumps(simple):
        simple = {k: v for k, v in simple.items() if k not in ("$defs", "definitions")}
    return simple


def _simplified(schema: Any, root: Any, above: tuple[str, ...] | None, name: str = "") -> Any:
    """above: references that were put in place on the way here; None keeps all references."""
    if isinstance(schema, bool):
        return schema
    if "$id" in schema and schema is not root:
        above = None  # "#" is this part, for the references in it
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
    if reference is not None and above is not None and reference not in above:
        target = resolve(reference, root)
        beside = {k: v for k, v in out.items() if k != "$ref"}
        if isinstance(target, Mapping) and not (beside.keys() - _ANNOTATIONS):
            inner = _simplified(target, root, (*above, reference), name)
            written = json.dumps(inner)
            _spend(len(written))
            if "$ref" not in written:
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
    """True if no value has two of their types."""
    if not all(isinstance(each, Mapping) and "type" in each for each in options):
        return False
    types = [t for each in options for t in _listed(each["type"])]
    return len(types) == len({"number" if t == "integer" else t for t in types})


# -- JSON -----------------------------------------------------------------------------------------


def canonical(value: Any) -> str:
    """One text for all spellings of a JSON value: 1e3 and 1000.0 are 1000."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(of_key) for key, of_key in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


JSON_TYPES: dict[Any, str] = {
    **{type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"},
    **{list: "array", dict: "object"},
}
"""Types of Python -> of JSON Schema."""


def json_type(value: Any) -> str:
    return JSON_TYPES.get(type(value), "object")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
