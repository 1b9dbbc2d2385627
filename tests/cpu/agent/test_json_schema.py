"""Arguments against JSON schemas: what is wrong, and where."""

import json
import time

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
        ('{"root": {"n": "1"}, "a": 1}', "root.n"),
        ('{"root": {"n": 1}}', "'a'.*'b'"),
        ('{"c": 1, "a": 1}', "'c'"),
        ('{"a": NaN}', "NaN.*JSON"),
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
        ({"items": {"$ref": "#/$defs/a%20b"}, "$defs": {"a b": {}}}, ""),
        ({"items": {"$ref": "#/enum"}, "enum": [1]}, "#/$defs/#/enum: [1] is not of type 'object'"),
        ({"items": {"$ref": "#/examples/0"}, "examples": [{"type": 5}]},
         "#/$defs/#/examples/0/type: 5 is not valid"),
        ({"items": {"$ref": "#/title/0"}, "title": "ab"}, "#/$defs/#/title/0: 'a' is not of type"),
        ({"items": {"$ref": "#/maxItems/0"}, "maxItems": 3}, "$ref '#/maxItems/0' leads nowhere"),
        ({"items": {"$dynamicRef": "#node"}}, "$ref '#node' is not of this schema"),
        ({"properties": {f"p{at}": {"type": "object"} for at in range(6000)}},
         "it cannot be checked: its schema takes too many steps"),
    ],
    ids=range(18),
)  # fmt: skip
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


def levels(of_next, *, last=True, count=18):
    """A chain of definitions, each made of a reference to the next one."""
    defs = {f"a{at}": of_next({"$ref": f"#/$defs/a{at + 1}"}) for at in range(count)}
    start = {"$ref": "#/$defs/a0"}
    return {"properties": {"x": start}, "$defs": {**defs, f"a{count}": last}}


LONG = "a" * 60 + "b"
MIXED = [at if at % 2 else str(at) for at in range(9000)]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("schema", "value", "answer"),
    [
        (levels(lambda r: {"anyOf": [r, r]}, last=False), {"x": 5}, "cannot be checked"),
        (levels(lambda r: {"oneOf": [r, r]}, last=False), {"x": 5}, "cannot be checked"),
        (levels(lambda r: {"allOf": [r, r]}, last={"type": "string"}), {"x": "a"},
         "cannot be checked"),
        (levels(lambda r: {"if": r, "then": r, "else": r}), {"x": 5}, "cannot be checked"),
        (levels(lambda r: {"not": {"allOf": [r, r]}}), {"x": 5}, ""),
        (levels(lambda r: {"dependentSchemas": {"a": r, "b": r}}), {"x": {"a": 1, "b": 2}},
         "cannot be checked"),
        ({**levels(lambda r: {"dependentSchemas": {"a": r, "b": r}}), "$ref": "#/$defs/a0",
          "unevaluatedProperties": False}, {"a": 1, "b": 2}, "cannot be checked"),
        (levels(lambda r: {"$defs": {"b": r}, "allOf": [{"$dynamicRef": r["$ref"]}] * 2}), {"x": 1},
         "cannot be checked"),
        (levels(lambda r: {"contains": r, "items": r}, count=9),
         {"x": [[[[[[["a"] * 4] * 4] * 4] * 4] * 4] * 4]}, "cannot be checked"),
        (levels(lambda r: r, count=400), {"x": 5}, "nested too deep"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {}, "nested too deep"),
        ({"patternProperties": {"(a+)+$": {}}, "properties": {"x": {"pattern": "(a|a)*$"}}},
         {LONG: 1, "x": LONG}, ""),
        ({"allOf": [{"patternProperties": {"(a+)+$": {}}}], "unevaluatedProperties": False},
         {LONG: 1}, ""),
        ({"patternProperties": {"(a+)+$": {}}, "additionalProperties": False}, {LONG: 1}, ""),
        ({"properties": {"x": {"$schema": DRAFT_7, "pattern": "(a+)+$"}}}, {"x": LONG}, ""),
        ({"$schema": DRAFT_7, "properties": {"y": {"$ref": "#"}, "x": {"pattern": "(a+)+$"}}},
         {"y": {"x": LONG}}, ""),
        ({"properties": {"x": {"pattern": "[", "format": "regex"}}}, {"x": "("}, ""),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": MIXED}, ""),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": [*MIXED, {"a": 1}, {"a": 1.0}]},
         "non-unique"),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": [1, True, "1", None, [], {}]}, ""),
        ({"properties": {"x": {"allOf": [{"uniqueItems": True}] * 500}}}, {"x": MIXED},
         "cannot be checked"),
        ({"properties": {"x": {"prefixItems": [{}], "unevaluatedItems": False}}}, {"x": MIXED},
         "cannot be checked"),
        ({"unevaluatedProperties": {"type": "integer"}}, dict.fromkeys(map(str, MIXED)),
         "cannot be checked"),
        ({"properties": {"x": {"items": {"enum": [f"v{at}" for at in range(1500)]}}}},
         {"x": ["v1499"] * 9000}, "cannot be checked"),
        ({"properties": {"x": {"items": {"anyOf": [{"const": at} for at in range(900)]}}}},
         {"x": ["w"] * 5000}, "cannot be checked"),
        ({"anyOf": [{"maxProperties": 1}] * 800}, dict.fromkeys(map(str, MIXED)),
         "cannot be checked"),
        ({"properties": {"x": {"multipleOf": 0.5}}}, {"x": 10**400}, "a number in it is too large"),
        ({"properties": {"x": {"items": {"type": "integer", "minimum": 0, "maximum": 9}}}},
         {"x": [1] * 20_000}, ""),
    ],
    ids=range(28),
)  # fmt: skip
def test_a_short_schema_does_not_hold_the_run(schema, value, answer):
    begun = time.thread_time()
    assert schema_problem(schema) == ""
    problem = mismatch(value, schema, "v")
    assert answer in problem and bool(problem) == bool(answer)
    assert len(json.dumps(simplified(schema))) <= max(32_768, len(json.dumps(schema)))
    assert time.thread_time() - begun < 10, "it took minutes, and takes about one second"


def test_references_are_put_in_place_unless_that_is_far_longer():
    def wide(num):
        return {f"p{at}": {"$ref": "#/$defs/d"} for at in range(num)}

    schema = {"$defs": {"d": {"enum": ["y" * 1000]}}, "properties": wide(9)}
    assert "$ref" not in json.dumps(simplified(schema))
    assert simplified({**schema, "properties": wide(90)}) == {**schema, "properties": wide(90)}
    own = {"$id": "http://h/", "items": {"$ref": "#/$defs/b"}, "$defs": {"b": {"type": "null"}}}
    schema = {"$defs": {"a": own, "b": True}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    assert simplified(schema) == schema, "the reference within `a` is to its own b"


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
