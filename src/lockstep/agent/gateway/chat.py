"""OpenAI chat completions: bodies to turns, turns to bodies and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.reading import (
    MAX_TOOLS,
    Answered,
    Asked,
    BodyTranscript,
    Dialogues,
    Value,
    asked_of,
    constraint_of,
    event,
    tool_of,
)
from lockstep.types import ROLES, ToolCall

READ = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "name")
"""Fields of a message that are read; the others are notes."""
MAX_CHOICES = 64
"""Largest `n` of one request: replies that are sampled side by side."""
KEEP_ALIVE = b": the turn is being sampled\n\n"


# -- bodies to turns ------------------------------------------------------------------------------


def read(body: Mapping[str, Any], dialogues: Dialogues) -> Asked:
    """Raises Refusal (400) that names the field."""
    asked = Value(body)
    found = asked.check_fields("others", "chat")
    transcript = BodyTranscript()
    for message in asked["messages"].entries():
        message.check_fields("chat_message")
        _add(transcript, message)
    entries = asked["tools"].entries(MAX_TOOLS) if body.get("tool_choice") != "none" else []
    tools = tuple(tool_of(_function(tool)) for tool in entries)
    return asked_of(
        asked,
        transcript.messages,
        tools,
        constraint=constraint_of(asked["tool_choice"], asked["response_format"], tools),
        limits=("max_tokens", "max_completion_tokens"),
        ignored=found,
        num_choices=asked["n"].integer(1, MAX_CHOICES) or 1,
        has_logprobs=asked["logprobs"].truth(),
        has_usage=asked["stream_options"]["include_usage"].truth(),
    )


def _function(entry: Value) -> Value:
    if entry["type"].raw not in ("function", None):
        raise entry["type"].unsupported("only functions are tools here.")
    return entry["function"]


def _add(transcript: BodyTranscript, entry: Value) -> None:
    role = entry["role"].raw
    if role not in ROLES:
        raise entry["role"].wrong("system, developer, user, assistant or tool")
    if role == "tool":
        entry["tool_call_id"].text()
    fields = {key: entry.raw[key] for key in READ if key in entry.raw}
    transcript.add_chat(Value(fields if role == "tool" else fields | {"name": None}, entry.where))


# -- turns to bodies ------------------------------------------------------------------------------


def write(answered: Answered) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answered.id}",
        "object": "chat.completion",
        "created": answered.created,
        "model": answered.asked.model,
        "system_fingerprint": f"policy-{answered.replies[-1].policy_version}",
        "choices": [_choice(answered, at) for at in range(len(answered.replies))],
        "usage": _usage(answered),
    }


def events(answered: Answered) -> Iterator[bytes]:
    """The chunks of a stream."""
    head = {**write(answered), "object": "chat.completion.chunk"}
    choices, usage = head.pop("choices"), head.pop("usage")
    for choice in choices:
        message = choice.pop("message")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for name in ("reasoning_content", "content"):
            deltas += [{name: message[name]}] if message.get(name) else []
        for index, call in enumerate(message.get("tool_calls", ())):
            arguments = {"arguments": call["function"]["arguments"]}
            opened = {**call, "function": {**call["function"], "arguments": ""}}
            deltas.append({"tool_calls": [{"index": index, **opened}]})
            deltas.append({"tool_calls": [{"index": index, "function": arguments}]})
        open_end = {**choice, "finish_reason": None, "logprobs": None}
        for delta in deltas:
            yield event({**head, "choices": [{**open_end, "delta": delta}]})
        yield event({**head, "choices": [{**choice, "delta": {}}]})
    if answered.asked.has_usage or answered.has_ids:
        yield event({**head, "choices": [], "usage": usage, **answered.extension()})
    yield b"data: [DONE]\n\n"


def _choice(answered: Answered, at: int) -> dict[str, Any]:
    reply = answered.replies[at]
    message, logprobs = reply.message, None
    # null for a call without text, as OpenAI has it
    text = message.content or (None if message.tool_calls else "")
    content: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if message.thinking:
        content["reasoning_content"] = message.thinking
    if message.tool_calls:
        content["tool_calls"] = [_call_of(call) for call in message.tool_calls]
    if answered.asked.has_logprobs:
        logprobs = {"content": answered.logprobs(reply), "refusal": None}
    reason = "tool_calls" if message.tool_calls else "stop"
    reason = reason if reply.finish_reason == "stop" else "length"
    return {"index": at, "message": content, "finish_reason": reason, "logprobs": logprobs}


def _call_of(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answered: Answered) -> dict[str, Any]:
    num_prompt = len(answered.replies[0].prompt_ids)  # one prompt, however many replies
    num_sampled = sum(len(reply.token_ids) for reply in answered.replies)
    num_thinking = sum(map(answered.num_thinking_tokens, answered.replies))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": answered.replies[0].num_reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_thinking},
    }


# -- refusals -------------------------------------------------------------------------------------

# Clients look for OpenAI's own codes.
_CODES = {"context_overflow": "context_length_exceeded", "unknown_model": "model_not_found"}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {
        "error": {
            "message": str(refusal),
            "type": _TYPES.get(refusal.status, kind),
            "param": refusal.parameter or None,
            "code": _CODES.get(refusal.code, refusal.code),
        }
    }
