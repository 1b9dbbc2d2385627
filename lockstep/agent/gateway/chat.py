"""OpenAI chat completions: bodies to turns, turns to bodies and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.agent.gateway.exchange import Refusal, TurnReply, client_message
from lockstep.agent.gateway.reading import (
    NO_CONSTRAINT,
    OPENAI,
    TEXT_ONLY,
    Answered,
    Asked,
    Memory,
    Transcript,
    accepted,
    call_of,
    check_fields,
    content_of,
    event,
    honoured,
    ignored,
    integer_of,
    list_of,
    object_of,
    objects_of,
    refused,
    shown,
    text_of,
    tool_of,
    truth_of,
    turn_of,
    unsupported,
    wrong_value,
)
from lockstep.types import Message, ToolSchema

FIELDS = {
    **OPENAI,
    "messages": honoured("text; a last message of the assistant's is refused"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "seed"), honoured()),
    "top_k": honoured("not OpenAI's, but usual; 0 and -1 are off"),
    "stop": honoured("the reply that is sent ends before it; its ids are kept"),
    "n": honoured("siblings in the session's tree"),
    "stream_options": honoured("include_usage"),
    "logprobs": honoured("of every sampled id, thinking and stop id included"),
    "reasoning_effort": ignored("It is a setting of the renderer, the same for all requests."),
    "verbosity": ignored("Ask for it in a message."),
    "response_format": refused(
        f"{NO_CONSTRAINT} Ask for the format in a message.", {"type": "text"}
    ),
    **dict.fromkeys(
        ("logit_bias", "frequency_penalty", "presence_penalty"), refused(NO_CONSTRAINT, {}, 0)
    ),
    "modalities": refused(TEXT_ONLY, ["text"]),
    "audio": refused(TEXT_ONLY),
    "prediction": refused("Leave it out: prefixes are reused anyway."),
    "functions": refused("It is the old form: use tools."),
    "function_call": refused("It is the old form: use tool_choice.", "auto", "none"),
    "web_search_options": refused("There is no search here; give the model a tool."),
    "store": accepted("every session is kept"),
}

_MESSAGE_FIELDS = {
    **dict.fromkeys(("role", "content", "tool_calls", "tool_call_id"), honoured()),
    **dict.fromkeys(("reasoning_content", "reasoning"), honoured("the model's thinking")),
    "refusal": refused("A refusal is content here.", ""),
    "audio": refused(TEXT_ONLY),
    "function_call": refused("It is the old form: use tool_calls."),
    "name": accepted("of a tool's message: the function, if no call has its id"),
    "annotations": accepted("the server's notes on a reply"),
    "cache_control": accepted("prefixes are reused by what they are"),
    "lockstep": accepted("what this server added itself"),
}

_PLAIN_FIELDS = {name for name, field in _MESSAGE_FIELDS.items() if field.treatment != "refused"}

KEEP_ALIVE = b": the turn is being sampled\n\n"


# -- bodies to turns ------------------------------------------------------------------------------


def read(body: Mapping[str, Any], memory: Memory) -> Asked:
    """Raises Refusal (400) that names the field."""
    found = check_fields(body, FIELDS)
    options = object_of(body.get("stream_options") or {}, "stream_options")
    has_tools = body.get("tool_choice") != "none"
    return Asked(
        turn=turn_of(
            body,
            _messages(body.get("messages")),
            _tools(body.get("tools")) if has_tools else (),
            limits=("max_tokens", "max_completion_tokens"),
            ignored=found,
        ),
        model=text_of(body.get("model"), "model"),
        num_choices=integer_of(body.get("n"), "n", low=1, high=2**31 - 1) or 1,
        is_streamed=truth_of(body.get("stream"), "stream"),
        has_logprobs=truth_of(body.get("logprobs"), "logprobs"),
        has_usage=truth_of(options.get("include_usage"), "stream_options.include_usage"),
        body=body,
    )


def _tools(value: Any) -> tuple[ToolSchema, ...]:
    tools: list[ToolSchema] = []
    for where, entry in objects_of(value, "tools"):
        function = _function(entry, where, "only functions are tools here.")
        tools.append(tool_of(function, f"{where}.function"))
    return tuple(tools)


def _function(entry: dict[str, Any], where: str, otherwise: str) -> dict[str, Any]:
    if entry.get("type", "function") != "function":
        raise unsupported(f"{where}.type", otherwise)
    return object_of(entry.get("function"), f"{where}.function")


def _messages(value: Any) -> list[Message]:
    transcript = Transcript()
    for where, entry in objects_of(list_of(value, "messages"), "messages"):
        _add(transcript, entry, where)
    return transcript.messages


def _add(transcript: Transcript, entry: dict[str, Any], where: str) -> None:
    if not entry.keys() <= _PLAIN_FIELDS:
        check_fields(entry, _MESSAGE_FIELDS, where=f"{where}.")
    role = entry.get("role")
    content = content_of(entry.get("content"), f"{where}.content", ("text", "refusal"))
    if role in ("system", "developer", "user"):
        transcript.add(Message(role=role, content=content))
    elif role == "assistant":
        thinking = entry.get("reasoning_content") or entry.get("reasoning")
        calls: list[Any] = []
        for here, call in objects_of(entry.get("tool_calls"), f"{where}.tool_calls"):
            function = _function(call, here, "only functions are called here.")
            calls.append(
                call_of(
                    function.get("name"),
                    function.get("arguments"),
                    call.get("id"),
                    f"{here}.function",
                    f"{here}.id",
                )
            )
        transcript.add(
            Message(
                role="assistant",
                content=content,
                thinking=text_of(thinking, f"{where}.reasoning_content", optional=True),
                tool_calls=tuple(calls),
            )
        )
    elif role == "tool":
        name = text_of(entry.get("name"), f"{where}.name", optional=True)
        at = f"{where}.tool_call_id"
        transcript.add_result(entry.get("tool_call_id"), content, at, name=name)
    else:
        text = f"must be system, developer, user, assistant or tool, found {shown(role)}."
        raise wrong_value(f"{where}.role", text)


# -- turns to bodies ------------------------------------------------------------------------------


def write(answered: Answered) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for at, reply in enumerate(answered.replies):
        message = client_message(reply.message, reply.stop)
        content: dict[str, Any] = {
            "role": "assistant",
            # null for a call without text, as OpenAI has it
            "content": message.content or (None if message.tool_calls else ""),
            "refusal": None,
        }
        if message.thinking:
            content["reasoning_content"] = message.thinking
        if message.tool_calls:
            content["tool_calls"] = _calls(message)
        choices.append({"index": at, "message": content, **_ending(answered, reply)})
    return {
        **_head(answered, "chat.completion"),
        "choices": choices,
        "usage": _usage(answered),
        **answered.extension(),
    }


def events(answered: Answered) -> Iterator[bytes]:
    """The chunks of a stream."""
    head = _head(answered, "chat.completion.chunk")

    def chunk(at: int, delta: dict[str, Any], **ending: Any) -> bytes:
        ending = {"finish_reason": None, "logprobs": None, **ending}
        return event({**head, "choices": [{"index": at, "delta": delta, **ending}]})

    for at, reply in enumerate(answered.replies):
        message = client_message(reply.message, reply.stop)
        yield chunk(at, {"role": "assistant", "content": ""})
        if message.thinking:
            yield chunk(at, {"reasoning_content": message.thinking})
        if message.content:
            yield chunk(at, {"content": message.content})
        for index, call in enumerate(_calls(message)):
            arguments = {"arguments": call["function"].pop("arguments")}
            opened = {**call, "function": {**call["function"], "arguments": ""}}
            yield chunk(at, {"tool_calls": [{"index": index, **opened}]})
            yield chunk(at, {"tool_calls": [{"index": index, "function": arguments}]})
        yield chunk(at, {}, **_ending(answered, reply))
    if answered.asked.has_usage or answered.has_ids:
        usage = _usage(answered)
        yield event({**head, "choices": [], "usage": usage, **answered.extension()})
    yield b"data: [DONE]\n\n"


def _head(answered: Answered, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answered.id}",
        "object": kind,
        "created": answered.created,
        "model": answered.asked.model,
        "system_fingerprint": f"policy-{answered.replies[-1].policy_version}",
    }


def _calls(message: Message) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]


def _ending(answered: Answered, reply: TurnReply) -> dict[str, Any]:
    reason = "tool_calls" if reply.message.tool_calls else "stop"
    logprobs = None
    if answered.asked.has_logprobs:
        logprobs = {"content": answered.logprobs(reply), "refusal": None}
    return {
        "finish_reason": reason if reply.finish_reason == "stop" else "length",
        "logprobs": logprobs,
    }


def _usage(answered: Answered) -> dict[str, Any]:
    num_prompt = len(answered.replies[0].prompt_ids)  # one prompt, however many replies
    num_sampled = sum(len(reply.token_ids) for reply in answered.replies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": answered.replies[0].num_reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(answered.num_thinking_tokens)},
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


def late_error(refusal: Refusal) -> bytes:
    """Within a stream that has begun."""
    return event(error(refusal))
