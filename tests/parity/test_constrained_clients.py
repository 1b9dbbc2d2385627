"""Unmodified clients ask an embedded engine for JSON of a schema and for calls of a tool."""

import json
from typing import Any

import pytest

from lockstep.model_server import BackgroundServer

openai = pytest.importorskip("openai", reason="the client `openai` is not installed")
anthropic = pytest.importorskip("anthropic", reason="the client `anthropic` is not installed")
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

USER: Any = [{"role": "user", "content": "Where was Bela born?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


class Answer(pydantic.BaseModel):
    is_known: bool
    kind: Any = pydantic.Field(json_schema_extra={"enum": ["town", "village"]})


@pytest.fixture(
    scope="module",
    params=[
        ("tiny-qwen3", "renderer=chatml", "renderer.enable_thinking=false"),
        ("tiny-gpt-oss", "renderer=harmony", "renderer.stop_at_end=true"),
    ],
    ids=lambda words: words[0],
)
def server(request: pytest.FixtureRequest):
    model, *settings = request.param
    found = BackgroundServer(model, "agent.max_turn_tokens=150", *settings)
    yield model, found.url
    found.close()


def test_openais_client_parses_replies_of_a_model_and_gets_forced_calls(server: Any):
    model, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        parse = client.chat.completions.parse
        chosen = parse(model=model, messages=USER, response_format=Answer).choices[0]
        assert chosen.finish_reason == "stop" and chosen.message.parsed.kind in ("town", "village")
        found = client.responses.parse(model=model, input="hi", text_format=Answer)
        assert found.output_parsed.kind in ("town", "village")
        named: Any = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            chosen = client.chat.completions.create(
                model=model, messages=USER, tools=CHAT_TOOLS, tool_choice=choice
            ).choices[0]
            (call,) = chosen.message.tool_calls
            assert chosen.finish_reason == "tool_calls" and call.function.name == "weather"
            assert json.loads(call.function.arguments).keys() == {"city"}


def test_a_reply_that_is_cut_inside_its_json_says_so(server: Any):
    model, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        cut = create(
            model=model, messages=USER, tools=CHAT_TOOLS, tool_choice="required", max_tokens=6
        ).choices[0]
        assert cut.finish_reason == "length"
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
        with pytest.raises(openai.BadRequestError, match="schema cannot be read") as caught:
            create(model=model, messages=USER, response_format=bad)
        assert caught.value.param == "response_format"


def test_anthropics_client_gets_forced_calls(server: Any):
    model, url = server
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            reply = client.messages.create(
                model=model, max_tokens=100, messages=USER, tools=tools, tool_choice=choice
            )
            (block,) = reply.content
            assert reply.stop_reason == "tool_use" and block.input.keys() == {"city"}
