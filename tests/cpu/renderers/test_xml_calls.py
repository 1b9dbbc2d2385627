"""Types of the values in calls that are written as tags."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.renderers.xml_calls import DIALECTS, read_xml_call

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DEFS = {
    "Zip": {"type": ["string", "null"]},
    "Deep": {"anyOf": [{"$ref": "#/$defs/Zip"}, INTEGER]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]},
}
OPTIONAL = {"anyOf": [STRING, NULL]}
WORDS = {"anyOf": [{"type": "array", "items": STRING}, STRING]}
VALUES = [
    *json.loads(Path(__file__).with_suffix(".json").read_text()),
    (INTEGER, "9" * 5000, "9" * 5000),
]
"""(schema of a parameter, its text, its value); no schema: the parameter is not declared."""


def said(dialect, parameters):
    """One call; a parameter whose value is a list has no end tag."""
    opening, tags = {
        "qwen": ("<function=find>", "<parameter={}>\n{}\n|</parameter>\n|</function>"),
        "glm": ("find", "\n<arg_key>{}</arg_key>\n<arg_value>{}|</arg_value>|"),
        "minimax": ('<invoke name="find">', '<parameter name="{}">{}|</parameter>\n|</invoke>'),
    }[dialect]
    written, end, close = tags.split("|")
    body = "".join(
        written.format(key, value[0] if isinstance(value, list) else value)
        + ("" if isinstance(value, list) else end)
        for key, value in parameters
    )
    return f"{opening}\n{body}{close}"


def arguments(dialect, parameters, properties=None):
    declared = {} if properties is None else {"properties": properties, "$defs": DEFS}
    schemas = {} if properties is None else {"find": declared}
    read = read_xml_call(said(dialect, parameters), schemas, DIALECTS[dialect])
    assert not isinstance(read, str), read
    read.arguments.encode()  # no half of a surrogate pair, which no file can hold
    return json.loads(read.arguments, parse_constant=pytest.fail)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_value_has_the_type_that_the_tool_declares(dialect, schema, text, value):
    properties = {"code": STRING} | ({} if schema is None else {"q": schema})
    found = arguments(dialect, [("code", "x"), ("q", text)], properties)
    assert found == {"code": "x", "q": value} and type(found["q"]) is type(value)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>\n\r")))
def test_an_optional_text_is_never_another_text(text):
    for dialect in DIALECTS:
        found = arguments(dialect, [("q", text)], {"q": OPTIONAL})["q"]
        assert found == (None if text in ("null", "None") or text.strip() == "null" else text)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_parameter_without_an_end_tag_ends_where_the_next_one_begins(dialect):
    properties = {"code": STRING, "zip": OPTIONAL, "n": INTEGER}
    found = arguments(dialect, [("code", ["x"]), ("zip", ["1"]), ("n", "2")], properties)
    assert found == {"code": "x", "zip": "1", "n": 2}
    assert arguments(dialect, [("code", ["x"]), ("zip", "1")]) == {"code": "x", "zip": 1}
    if dialect == "glm":
        text = said(dialect, [("code", ["x"])])
        assert "code of a call is not closed" in read_xml_call(text, {}, DIALECTS["glm"])
    else:
        assert arguments(dialect, [("n", "2"), ("code", ["x"])]) == {"n": 2, "code": "x"}
        mention = said(dialect, [("other", ["y"])])  # no parameter of this tool: text
        assert arguments(dialect, [("code", mention)], properties)["code"] == mention.strip()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a0"},
        {"anyOf": [{"$ref": "#"}] * 50},
        {"allOf": [{"$ref": "#/properties/q"}]},
        json.loads('{"anyOf": [' * 40 + '{"type": "string"}' + "]}" * 40),
    ],
)
def test_schemas_that_expand_are_looked_at_in_bounded_time(schema):
    defs = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
    parameters = {"properties": {"q": schema}, "$defs": defs, "anyOf": [{"$ref": "#"}] * 9}
    texts = {"f": parameters}
    begun = time.process_time()
    read = read_xml_call("<function=f><parameter=q>[1]</parameter></function>", texts)
    assert time.process_time() - begun < 1
    assert json.loads(read.arguments)["q"] in ([1], "[1]")
