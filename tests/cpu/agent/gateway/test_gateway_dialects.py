"""Bodies of the three dialects: what is honoured, what is refused, what comes back."""

import asyncio
import json
import secrets
import threading
from itertools import count
from typing import Any

import pytest
from gateways import MODEL, Gateway, says

from lockstep.agent.gateway import chat, messages, responses
from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.fields import FIELDS
from lockstep.agent.gateway.reading import Value, in_thread, parse_body
from lockstep.types import Message

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", "strict": True, **FUNCTION}
MESSAGES_TOOL = {"name": "weather", "description": "of a city", "input_schema": PARAMETERS}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], **more}


def messages_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "messages": [USER], **more}


def read_chat(body: dict[str, Any]) -> Any:
    return chat.read(body, {})


def read_responses(body: dict[str, Any]) -> Any:
    return responses.read(body, {})


def read_messages(body: dict[str, Any]) -> Any:
    return messages.read(body, {})


def script(prompt: str) -> Message:
    if "sunny" in prompt:
        return says("It is sunny.", thinking="easy")
    return says("Let me see.", thinking="hm", weather='{"city": "Oslo"}')


@pytest.fixture(scope="module")
def gateway():
    with Gateway(script) as found:
        yield found


def test_the_same_dialogue_is_read_equal_from_all_three_dialects():
    expected = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="hi"),
        Message.from_dict(
            {
                "role": "assistant",
                "content": "Let me see.",
                "thinking": "hm",
                "tool_calls": [{"name": "weather", "arguments": '{"city": "Oslo"}', "id": "c1"}],
            }
        ),
        Message(role="tool", content="sunny", name="weather", tool_call_id="c1"),
    )
    arguments = '{"city": "Oslo"}'
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    told_chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    told_responses = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    told_messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "sunny"}],
                }
            ],
        },
    ]
    found = [
        read_chat(chat_body(messages=told_chat, tools=[CHAT_TOOL])),
        read_responses(
            {
                "model": MODEL,
                "instructions": "Be brief.",
                "input": told_responses,
                "tools": [RESPONSES_TOOL],
            }
        ),
        read_messages(
            messages_body(system="Be brief.", messages=told_messages, tools=[MESSAGES_TOOL])
        ),
    ]
    for asked in found:
        assert asked.turn.messages == expected
        assert [(t.name, t.description, t.parameters) for t in asked.turn.tools] == [
            ("weather", "of a city", PARAMETERS)
        ]


def test_sampling_fields_reach_the_turn():
    turn = read_chat(
        chat_body(
            max_tokens=9, max_completion_tokens=7, temperature=0.5, top_p=0.9, top_k=-1,
            stop="X", seed=3, n=2, stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert (turn.num_choices, turn.is_streamed, turn.has_usage) == (2, True, True)
    found = turn.turn
    assert (found.max_tokens, found.temperature, found.top_p, found.top_k) == (7, 0.5, 0.9, 0)
    assert (found.stop_strings, found.seed) == (("X",), 3)
    found = read_messages(messages_body(top_k=5, stop_sequences=["a", "b"])).turn
    assert (found.max_tokens, found.top_k, found.stop_strings) == (64, 5, ("a", "b"))
    assert (
        read_responses({"model": MODEL, "input": "x", "max_output_tokens": 5}).turn.max_tokens == 5
    )
    assert read_chat(chat_body(tools=[CHAT_TOOL], tool_choice="none")).turn.tools == ()


REFUSED = {
    "forced-tool": (chat, {"tool_choice": "required"}, "tool_choice"),
    "named-tool": (chat, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_"),
    "json-schema": (chat, {"response_format": {"type": "json_schema"}}, "response_format"),
    "logit-bias": (chat, {"logit_bias": {"5": 3}}, "logit_bias"),
    "penalty": (chat, {"frequency_penalty": 0.5}, "frequency_penalty"),
    "top-logprobs": (chat, {"top_logprobs": 5}, "top_logprobs"),
    "unknown": (chat, {"temprature": 1}, "temprature"),
    "prefill": (chat, {"messages": [USER, {"role": "assistant", "content": "A"}]}, "messages"),
    "image": (
        chat,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    "lost-call": (
        chat,
        {"messages": [USER, {"role": "tool", "tool_call_id": "x", "content": "?"}]},
        "messages[1].tool_call_id",
    ),
    "no-messages": (chat, {"messages": []}, "messages"),
    "message-type": (chat, {"messages": ["hi"]}, "messages[0]"),
    "role": (chat, {"messages": [{"role": "critic", "content": ""}]}, "messages[0].role"),
    "user-thinks": (chat, {"messages": [USER | {"reasoning": "Hm."}]}, "messages[0]"),
    "temperature-type": (chat, {"temperature": "hot"}, "temperature"),
    "temperature-tiny": (chat, {"temperature": 1e-40}, "temperature"),
    "temperature-infinite": (chat, {"temperature": float("inf")}, "temperature"),
    "seed": (chat, {"seed": 2**70}, "seed"),
    "limit": (chat, {"max_tokens": 0}, "max_tokens"),
    "stop": (chat, {"stop": ["", "a"]}, "stop[0]"),
    "tool-name": (chat, {"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    "tool-kind": (chat, {"tools": [{"type": "custom"}]}, "tools[0].type"),
    "any-tool": (messages, {"tool_choice": {"type": "any"}}, "tool_choice"),
    "choice-field": (messages, {"tool_choice": {"type": "auto", "strict": True}}, "tool_choice."),
    "no-limit": (messages, {"max_tokens": None}, "max_tokens"),
    "document": (
        messages,
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0].type",
    ),
    "server-tool": (messages, {"tools": [{"type": "web_search_20250305"}]}, "tools[0].type"),
    "lost-result": (
        messages,
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    "cut": (responses, {"truncation": "auto"}, "truncation"),
    "background": (responses, {"background": True}, "background"),
    "format": (responses, {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    "no-schema": (chat, {"response_format": {"type": "json_schema"}}, "response_format.schema"),
    "no-tools": (chat, {"tool_choice": "required"}, "tool_choice"),
    "no-such-tool": (messages, {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    "choice": (responses, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    "reference": (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    "unknown-id": (responses, {"previous_response_id": "resp_0"}, "previous_response_id"),
    "include": (responses, {"include": ["file_search_call.results"]}, "include[0]"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_honoured_is_refused_by_its_field(case: str):
    dialect, change, field = REFUSED[case]
    base = {
        chat: chat_body(),
        messages: messages_body(),
        responses: {"model": MODEL, "input": "hi"},
    }[dialect]
    with pytest.raises(Refusal) as caught:
        dialect.read({**base, **change}, {})
    assert caught.value.status == 400
    assert caught.value.parameter.startswith(field), str(caught.value)
    assert len(str(caught.value)) > len(field) + 10


MANY, FAR_TOO_MANY = 10_001, 1001
BIG = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(20_000)}}
TOO_LARGE = {
    "chat": (chat, {"messages": [USER] * MANY}, "messages"),
    "parts": (chat, {"messages": [{**USER, "content": [{"type": "text"}] * MANY}]}, "messages[0]"),
    "calls": (chat, {"messages": [{"role": "assistant", "tool_calls": [CALL] * MANY}]},
              "messages[0].tool_calls"),
    "chat tools": (chat, {"tools": [CHAT_TOOL] * FAR_TOO_MANY}, "tools"),
    "chat schema": (chat, {"tools": [{"function": {**FUNCTION, "parameters": BIG}}]}, "tools[0]"),
    "format": (chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": BIG}}},
               "response_format"),
    "stop": (chat, {"stop": ["a"] * MANY}, "stop"),
    "items": (responses, {"input": [USER] * MANY}, "input"),
    "item parts": (responses, {"input": [{**USER, "content": [{}] * MANY}]}, "input[0].content"),
    "response tools": (responses, {"tools": [RESPONSES_TOOL] * FAR_TOO_MANY}, "tools"),
    "include": (responses, {"include": ["x"] * MANY}, "include"),
    "messages": (messages, {"messages": [USER] * MANY}, "messages"),
    "blocks": (messages, {"messages": [{**USER, "content": [{}] * MANY}]}, "messages[0].content"),
    "anthropic tools": (messages, {"tools": [MESSAGES_TOOL] * FAR_TOO_MANY}, "tools"),
    "system": (messages, {"system": [{}] * MANY}, "system"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_request_that_others_would_wait_for_is_refused(case, gateway: Gateway):
    dialect, change, field = TOO_LARGE[case]
    path, base = {
        chat: ("/v1/chat/completions", chat_body()),
        messages: ("/v1/messages", messages_body()),
        responses: ("/v1/responses", {"model": MODEL, "input": "hi"}),
    }[dialect]
    status, found = gateway.ask("POST", path, {**base, **change})
    assert status == 400 and found["error"]["message"].startswith(field), found
    assert "more than" in found["error"]["message"]
    if dialect is messages:
        assert gateway.ask("POST", f"{path}/count_tokens", {**base, **change})[0] == 400


def test_a_large_body_is_read_beside_the_event_loop():
    async def thread_of(size):
        return await in_thread(b" " * size, threading.current_thread)

    assert asyncio.run(thread_of(1 << 16)) is threading.current_thread()
    assert asyncio.run(thread_of(1 + (1 << 16))) is not threading.current_thread()


def test_what_is_harmless_or_asks_for_what_happens_anyway_is_accepted():
    read_chat(
        chat_body(
            user="u", metadata={"a": "b"}, store=True, service_tier="auto", logit_bias={},
            frequency_penalty=0, presence_penalty=0.0, parallel_tool_calls=True, tool_choice="auto",
            response_format={"type": "text"}, top_logprobs=None, unknown_field=None,
        )
    )  # fmt: skip
    read_messages(messages_body(metadata={"user_id": "u"}, thinking={"type": "adaptive"}))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    (ignored,) = messages.read(messages_body(tool_choice=choice), {}).turn.ignored
    assert ignored == "tool_choice.disable_parallel_tool_use"
    read_responses({"model": MODEL, "input": "x", "truncation": "disabled", "background": False})


@pytest.mark.parametrize("dialect", [chat, responses, messages])
def test_settings_of_other_servers_are_accepted_where_they_change_nothing(dialect):
    base = {
        chat: chat_body(),
        messages: messages_body(),
        responses: {"model": MODEL, "input": "hi"},
    }[dialect]
    own = {chat: {"n", "logprobs"}}.get(dialect, set())
    others = FIELDS["others"]
    neutral = {name: value for name, field in others.items() for value in field.neutral}
    assert len(neutral) > 35
    for top_k in (-1, 0):
        found = dialect.read({**base, **neutral, "top_k": top_k, "seed": 7}, {}).turn
        assert (found.top_k, found.seed, found.ignored) == (0, 7, ())
    dialect.read({**base, **dict.fromkeys(others), "repetition_penalty": 1.0, "min_p": 0.0}, {})
    for name, value in neutral.items():
        other = not value if isinstance(value, bool) else {"a": 1} if value == {} else [1]
        for asked in (other, 2, "x"):
            if name not in own:
                with pytest.raises(Refusal, match=name) as caught:
                    dialect.read({**base, name: asked}, {})
                assert caught.value.parameter == name


def test_items_of_stored_responses_can_be_referred_to(gateway: Gateway, monkeypatch):
    ids = (f"{number:022x}fc" for number in count())  # "fc_" begins an item's id, too
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(ids))
    _, made = gateway.ask("POST", "/sessions")
    path = f"/s/{made['id']}/v1/responses"
    user = {"role": "user", "content": "Q?"}
    for tool in (RESPONSES_TOOL, {"type": "custom", "name": "weather"}):
        body = {"model": MODEL, "input": [user], "tools": [tool]}
        first = gateway.ask("POST", path, body)[1]["output"]
        assert [item["type"] for item in first][:2] == ["reasoning", "message"]
        told = {"call_id": first[2]["call_id"], "output": "sunny", "type": "function_call_output"}
        references = [{"type": "item_reference", "id": item["id"]} for item in first]
        untyped = [{"id": item["id"]} for item in first]
        reused = []
        for items in (first, references, untyped, [*references[:2], first[2]]):
            body["input"] = [user, *items, told]
            status, found = gateway.ask("POST", path, body)
            assert status == 200, found
            assert found["output"][1]["content"][0]["text"] == "It is sunny."
            reused.append(found["usage"]["input_tokens"])
        assert reused[1] == reused[2]
        if tool is RESPONSES_TOOL:  # a custom tool's input is text, and this call had none
            assert len(set(reused)) == 1, "the same tokens, however the items come"
    for name in ("rs_0", "msg_", "fc_x_9", "", "resp_1", references[2]["id"] + "9"):
        body["input"] = [user, {"type": "item_reference", "id": name}]
        status, found = gateway.ask("POST", path, body)
        assert (status, found["error"]["code"]) == (400, "item_not_found"), found
        assert found["error"]["param"] == "input[1].id"
    body = {"model": MODEL, "input": [user], "store": False}
    (item, *_) = gateway.ask("POST", path, body)[1]["output"]
    body["input"] = [user, {"type": "item_reference", "id": item["id"]}]
    assert gateway.ask("POST", path, body)[0] == 400, "it was not to be stored"
    _, other = gateway.ask("POST", "/sessions")
    body["input"] = [user, references[0]]
    assert gateway.ask("POST", f"/s/{other['id']}/v1/responses", body)[0] == 400


@pytest.mark.parametrize(
    "raw, code",
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": "\\ud800"}', "invalid_utf8"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8"),
        ('{"a": "b"}'.encode("utf-16"), "invalid_utf8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "invalid_json"),
        (b"[" * 200_000, "too_deep"),
        (b'{"a":' * 200_000, "too_deep"),
    ],
    ids=[
        "empty", "cut", "a-list", "nan", "infinity", "latin-1", "half-a-pair", "raw-surrogate",
        "utf-16", "digits", "deep-lists", "deep-objects",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, code: str):
    with pytest.raises(Refusal) as caught:
        parse_body(raw)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(Refusal, match="64"):
        read_chat(chat_body(tools=[{"function": {"name": "f", "parameters": schema}}]))


def test_arguments_that_are_no_object_survive_the_way_to_the_agent_and_back():
    for text in ('{"a": NaN}', "[1]", '{"a": 1e999}', "{", '{"a": "\\ud800"}'):
        told = messages.input_of(text)
        json.dumps(told, allow_nan=False).encode()
        block = {"type": "tool_use", "id": "c", "name": "f", "input": told}
        found = messages.assistant(Value([block])).tool_calls[0]
        assert found.arguments == text
    assert messages.input_of('{"a": "Infinity"}') == {"a": "Infinity"}


def test_a_chat_completion_has_calls_thinking_logprobs_and_usage(gateway: Gateway):
    found = gateway.chat(USER, tools=[CHAT_TOOL], logprobs=True)
    choice = found["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Oslo"}',
    }
    usage = found["usage"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == usage["completion_tokens"]
    assert bytes(b for token in tokens for b in token["bytes"]).startswith(b"<think>\nhm\n</think>")
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_thinking_is_signed_because_agents_tell_unsigned_thinking_as_a_users_words(
    gateway: Gateway,
):
    _, found = gateway.ask("POST", "/v1/messages", messages_body(max_tokens=256))
    thinking = found["content"][0]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert len(thinking["signature"]) == 32


def test_a_cut_reply_says_so_in_each_dialect(gateway: Gateway):
    assert gateway.chat(USER, max_tokens=3)["choices"][0]["finish_reason"] == "length"
    _, found = gateway.ask("POST", "/v1/messages", messages_body(max_tokens=3))
    assert found["stop_reason"] == "max_tokens"
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 3}
    _, found = gateway.ask("POST", "/v1/responses", body)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}


def test_several_choices_are_several_turns_of_the_session(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    found = gateway.chat(USER, path=f"/s/{made['id']}", n=3, seed=5)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    session = gateway.sessions.get(made["id"])
    assert session.trajectory.num_turns == 3


def test_previous_response_id_continues_without_the_instructions_before(gateway: Gateway):
    _, made = gateway.ask("POST", "/sessions")
    url = f"/s/{made['id']}/v1/responses"
    body = {"model": MODEL, "instructions": "Be brief.", "input": "hi", "tools": [RESPONSES_TOOL]}
    _, first = gateway.ask("POST", url, body)
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    body = {"model": MODEL, "previous_response_id": first["id"], "input": [output]}
    status, second = gateway.ask("POST", url, body)
    assert status == 200
    assert second["output"][-1]["content"][0]["text"] == "It is sunny."
    sent = gateway.sessions.get(made["id"]).trajectory.messages(
        gateway.sessions.get(made["id"]).trajectory.leaves()[-1]
    )
    assert [m.role for m in sent][:3] == ["user", "assistant", "tool"]
    # of another session, and of one that was not stored
    _, other = gateway.ask("POST", "/sessions")
    status, found = gateway.ask("POST", f"/s/{other['id']}/v1/responses", body)
    assert (status, found["error"]["code"]) == (400, "previous_response_not_found")
    _, first = gateway.ask("POST", url, {"model": MODEL, "input": "sunny?", "store": False})
    status, found = gateway.ask("POST", url, {**body, "previous_response_id": first["id"]})
    assert (status, found["error"]["param"]) == (400, "previous_response_id")


def test_ids_come_with_a_reply_where_they_are_asked_for(gateway: Gateway):
    body = chat_body()
    _, raw, headers = gateway.ask_raw("POST", "/v1/chat/completions", body, x_lockstep_ids="1")
    found = json.loads(raw)
    turn = found["lockstep"]["turns"][0]
    assert headers["x-lockstep-session"] == found["lockstep"]["session"]
    assert headers["x-lockstep-leaf"] == str(turn["leaf"])
    assert len(turn["token_ids"]) == len(turn["logprobs"]) == found["usage"]["completion_tokens"]
    assert len(turn["prompt_ids"]) == found["usage"]["prompt_tokens"]
    assert "lockstep" not in gateway.chat(USER)


def test_a_stream_ends_with_its_usage_and_done(gateway: Gateway):
    body = chat_body(stream=True, tools=[CHAT_TOOL], stream_options={"include_usage": True})
    _, raw, headers = gateway.ask_raw("POST", "/v1/chat/completions", body)
    assert headers["Content-Type"] == "text/event-stream"
    lines = [line for line in raw.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] > 0
