"""Arguments against JSON schemas: what is wrong, and where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agent.json_schema import mismatch, schema_problem, simplified
from lockstep.agent.tools import parse_arguments
from lockstep.types import ToolSchema

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("value", "schema", "problem"),
    [
        ({"n": 1, "left": {"n": 2}}, TREE, ""),
        ({"n": 1, "left": {"m": 2}}, TREE, "v.left lacks 'n'"),
        ({"n": 1, "left": {"n": 1, "m": 2}}, TREE, "v.left has an unknown key 'm'; known: left, n"),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]},
         "v must be integer, found string, or v must be null, found string"),
        ({"kind": "b", "size": "1"},
         {"anyOf": [
             {"properties": {"kind": {"const": "a"}}},
             {"properties": {"kind": {"const": "b"}, "size": {"type": "integer"}}},
         ]}, "v.kind must be \"a\", found \"b\""),
        (3, {"oneOf": [{"type": "integer"}, {"enum": [3]}]},
         "v does not fit: 3 is valid under each of {'enum': [3]}, {'type': 'integer'}"),
        (3, {"allOf": [{"type": "integer"}, {"const": 2}]}, "v must be 2, found 3"),
        (2.0, {"type": "integer"}, ""),
        (2.5, {"type": "integer"}, "v must be integer, found number"),
        (True, {"enum": [1]}, "v must be one of [1], found true"),
        ({"a": 1}, {"properties": {"a": False}}, "v does not fit: False schema does not allow 1"),
        ({}, {"$ref": "#"}, "v cannot be checked: it is nested too deep"),
        ({}, {"$ref": "#/x"}, "v cannot be checked: $ref '/x' leads nowhere"),
        ("(" * 50, {"pattern": "(.*)*$", "format": "date"}, ""),  # not checked, on purpose
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(value, schema, problem):
    assert mismatch(value, schema, "v") == problem


def test_arguments_are_checked_by_the_whole_schema_of_a_tool():
    schema = ToolSchema(
        name="t",
        description="",
        parameters={
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/node"}, "a": {}, "b": {}},
            "$defs": TREE["$defs"],
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            "additionalProperties": False,
        },
    )
    assert parse_arguments('{"root": {"n": 1}, "a": 1}', schema) == {"root": {"n": 1}, "a": 1}
    for text, message in (
        ('{"root": {"n": "1"}, "a": 1}', "root.n must be integer, found string"),
        ('{"root": {"n": 1}}', "the call lacks 'a', or the call lacks 'b'"),
        ('{"c": 1, "a": 1}', "the call has an unknown key 'c'; known: root, a, b"),
        ('{"a": NaN}', "NaN is not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_arguments(text, schema)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (TREE | {"type": "object"}, ""),
        ({}, ""),
        (None, "arguments are an object, and its type is null"),
        ({"type": "string"}, 'arguments are an object, and its type is "string"'),
        ({"properties": []}, "#/properties: [] is not of type 'object'"),
        ({"properties": {"a": {"type": "int"}}}, "#/properties/a/type: 'int' is not valid"),
        ({"properties": {"a": 7}}, "#/properties/a: 7 is not of type 'object', 'boolean'"),
        ({"required": "a"}, "#/required: 'a' is not of type 'array'"),
        ({"anyOf": [{"type": "1"}]}, "#/anyOf/0/type: '1' is not valid"),
        ({"$ref": 5}, "#/$ref: 5 is not of type 'string'"),
        ({"items": {"$ref": "#/$defs/a"}}, "$ref '#/$defs/a' leads nowhere"),
    ],
    ids=range(11),
)
def test_a_schema_that_is_none_is_told_apart(schema, problem):
    assert schema_problem(schema).startswith(problem)
    assert bool(schema_problem(schema)) == bool(problem)


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        (
            {"properties": {"at": {"$ref": "#/$defs/P", "title": "At"}},
             "$defs": {"P": {"title": "P", "type": "object", "properties": {"x": True}}}},
            {"properties": {"at": {"type": "object", "properties": {"x": True}}}},
        ),
        (
            {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
             "default": None},
            {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
             "default": None},
        ),
        (
            {"anyOf": [{"type": "integer"}, {"type": "number"}]},
            {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        ),
        (TREE, TREE),
        ({"properties": {"title": {"title": "Title", "type": "string"}}},
         {"properties": {"title": {"type": "string"}}}),
    ],
    ids=["reference", "null", "overlap", "recursive", "title"],
)  # fmt: skip
def test_a_schema_is_put_in_words_that_prompts_show(schema, simple):
    assert simplified(schema) == simple


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0, "", "a", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
KEYWORDS = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
}
SCHEMAS = st.recursive(
    st.booleans() | st.fixed_dictionaries({}, optional=KEYWORDS),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            **KEYWORDS,
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "$ref": st.sampled_from(["#/$defs/own"]),
            "$defs": st.just({"own": {"type": ["object", "integer"]}}),
        },
    ),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(value=VALUES, schema=SCHEMAS)
def test_a_simplified_schema_accepts_the_same_values(value, schema):
    root = {"$defs": {"own": {"type": ["object", "integer"]}}, "allOf": [schema]}
    assert schema_problem(root) == ""
    assert (mismatch(value, simplified(root), "v") == "") == (mismatch(value, root, "v") == "")
