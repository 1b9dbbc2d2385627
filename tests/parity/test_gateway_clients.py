"""The official `openai` and `anthropic` clients against the gateway, unmodified."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateways import MODEL, Gateway, says

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.fields import FIELDS
from lockstep.errors import EngineDownError
from lockstep.types import Message

openai = pytest.importorskip("openai", reason="the client `openai` is not installed")
anthropic = pytest.importorskip("anthropic", reason="the client `anthropic` is not installed")

USER: Any = {"role": "user", "content": "What is the weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
MESSAGES_TOOLS: Any = [{"name": "weather", "description": "now", "input_schema": SCHEMA}]


class _EagerGateway(GatewayConfig):
    keep_alive_seconds = 0.05


class Script:
    """Calls the tool, then answers; fails as often as it is told to."""

    def __init__(self) -> None:
        self.num_failures = 0

    def __call__(self, prompt: str) -> Message:
        if self.num_failures:
            self.num_failures -= 1
            raise EngineDownError("connection refused")
        last = prompt.rpartition("<|im_start|>user")[2]
        if "sunny" in last:
            return says("It is sunny.", thinking="The tool says so.")
        return says("I look.", thinking="Which city?", weather='{"city": "Oslo"}')


@pytest.fixture(scope="module")
def script():
    return Script()


@pytest.fixture(scope="module")
def gateway(script: Script):
    with Gateway(script, config=_EagerGateway()) as found:
        yield found


@pytest.fixture
def session(gateway: Gateway):
    return gateway.ask("POST", "/sessions")[1]


@pytest.fixture
def openai_client(session: dict[str, Any]):
    with openai.OpenAI(
        base_url=session["openai_base_url"], api_key=session["api_key"], max_retries=2
    ) as found:
        yield found


@pytest.fixture
def anthropic_client(session: dict[str, Any]):
    with anthropic.Anthropic(
        base_url=session["base_url"], api_key=session["api_key"], max_retries=2
    ) as found:
        yield found


# -- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_chat_completions_with_a_tool_over_two_turns(openai_client: Any, is_streamed: bool):
    dialogue: list[Any] = [USER]

    def turn() -> Any:
        ask = {"model": MODEL, "messages": dialogue, "tools": CHAT_TOOLS}
        if not is_streamed:
            return openai_client.chat.completions.create(**ask)
        with openai_client.chat.completions.stream(
            **ask, stream_options={"include_usage": True}
        ) as stream:
            return stream.get_final_completion()

    first = turn()
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("I look.", "Which city?")
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Oslo"},
    )
    dialogue += [
        message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    for one in dialogue[1].get("tool_calls", ()):
        one["function"].pop("parsed_arguments", None)
    second = turn()
    assert second.choices[0].message.content == "It is sunny."
    assert second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_stateless", [False, True], ids=["by-id", "whole-input"])
def test_responses_with_a_tool_over_two_turns(
    openai_client: Any, is_streamed: bool, is_stateless: bool
):
    def turn(**ask: Any) -> Any:
        ask = {"model": MODEL, "tools": RESPONSES_TOOLS, "instructions": "Be brief.", **ask}
        if not is_streamed:
            return openai_client.responses.create(**ask)
        with openai_client.responses.stream(**ask) as stream:
            seen = [event.sequence_number for event in stream]
            assert seen == list(range(len(seen)))
            return stream.get_final_response()

    first = turn(input=[USER], store=not is_stateless)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].content[0].text == "Which city?"
    call = first.output[-1]
    assert json.loads(call.arguments) == {"city": "Oslo"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    if is_stateless:
        echoed = [item.model_dump(exclude_none=True) for item in first.output]
        for item in echoed:
            item.pop("parsed_arguments", None)
        second = turn(input=[USER, *echoed, output], store=False)
    else:
        second = turn(input=[output], previous_response_id=first.id)
    assert second.output_text == "It is sunny."
    assert (second.status, second.error) == ("completed", None)
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_messages_with_a_tool_over_two_turns(anthropic_client: Any, is_streamed: bool):
    dialogue: list[Any] = [USER]

    def turn() -> Any:
        ask = {
            "model": MODEL,
            "max_tokens": 256,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": dialogue,
            "tools": MESSAGES_TOOLS,
        }
        if not is_streamed:
            return anthropic_client.messages.create(**ask)
        with anthropic_client.messages.stream(**ask) as stream:
            return stream.get_final_message()

    first = turn()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    dialogue += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    counted = anthropic_client.messages.count_tokens(
        model=MODEL, messages=dialogue, tools=MESSAGES_TOOLS, system="Be brief."
    )
    second = turn()
    assert second.content[-1].text == "It is sunny."
    assert second.stop_reason == "end_turn"
    used = second.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert used.cache_read_input_tokens == (
        first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    )


# -- errors ---------------------------------------------------------------------------------------


def test_errors_are_the_openai_clients_own_exceptions(gateway: Gateway, openai_client: Any):
    create = openai_client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=MODEL, messages=[USER], tools=CHAT_TOOLS, tool_choice="required")
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_value")
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=MODEL, messages=[{"role": "user", "content": "x" * 30_000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-9", messages=[USER])
    with (
        pytest.raises(openai.BadRequestError),
        openai_client.responses.stream(model=MODEL, input="x", truncation="auto"),
    ):
        pass
    other = openai.OpenAI(base_url=f"{gateway.url}/s/nobody/v1", api_key="x")
    with pytest.raises(openai.NotFoundError):
        other.chat.completions.create(model=MODEL, messages=[USER])


def test_errors_are_the_anthropic_clients_own_exceptions(
    session: dict[str, Any], gateway: Gateway, anthropic_client: Any
):
    create = anthropic_client.messages.create
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        choice: Any = {"type": "any"}
        create(model=MODEL, max_tokens=9, messages=[USER], tools=MESSAGES_TOOLS, tool_choice=choice)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x" * 30_000}])
    with pytest.raises(anthropic.NotFoundError):
        create(model="claude-9", max_tokens=9, messages=[USER])
    gateway.ask("POST", f"/sessions/{session['id']}/finish")
    with pytest.raises(anthropic.APIStatusError) as caught:
        create(model=MODEL, max_tokens=9, messages=[USER])
    assert caught.value.status_code == 410


def test_the_clients_own_retries_come_through_an_engine_that_was_down(
    gateway: Gateway, script: Script, session: dict[str, Any],
    openai_client: Any, anthropic_client: Any,
):  # fmt: skip
    for create in (openai_client.chat.completions.create, anthropic_client.messages.create):
        script.num_failures = 1
        create(model=MODEL, max_tokens=99, messages=[USER])
        assert script.num_failures == 0
    assert gateway.sessions.get(session["id"]).trajectory.num_turns == 2
    patient = openai_client.with_options(max_retries=0)
    script.num_failures = 1
    with pytest.raises(openai.InternalServerError) as caught:
        patient.chat.completions.create(model=MODEL, messages=[USER])
    assert caught.value.status_code == 503


def test_a_retry_after_a_timeout_gets_the_turn_that_was_sampled(
    gateway: Gateway, session: dict[str, Any], openai_client: Any
):
    gateway.engine.delay = 0.5
    slow = openai_client.with_options(timeout=0.3, max_retries=3)
    found = slow.chat.completions.create(model=MODEL, messages=[USER])
    gateway.engine.delay = 0.0
    assert found.choices[0].message.content == "I look."
    assert gateway.sessions.get(session["id"]).trajectory.num_turns == 1


# -- nothing is left out --------------------------------------------------------------------------


def test_every_field_that_the_clients_can_send_is_in_the_tables():
    from anthropic.types import message_create_params as anthropic_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params as responses_params

    for table, kinds in (
        (
            FIELDS["chat"],
            (
                chat_params.CompletionCreateParamsNonStreaming,
                chat_params.CompletionCreateParamsBase,
            ),
        ),
        (
            FIELDS["responses"],
            (
                responses_params.ResponseCreateParamsNonStreaming,
                responses_params.ResponseCreateParamsBase,
            ),
        ),
        (
            FIELDS["messages"],
            (
                anthropic_params.MessageCreateParamsNonStreaming,
                anthropic_params.MessageCreateParamsBase,
            ),
        ),
    ):
        names = {name for kind in kinds for name in kind.__annotations__}
        assert len(names) > 10
        assert names - set(table) - set(FIELDS["others"]) == set()
