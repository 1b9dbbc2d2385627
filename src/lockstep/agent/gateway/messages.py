"""Anthropic messages: bodies to turns, turns to bodies and streams."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.agent.gateway.exchange import Refusal, TurnReply
from lockstep.agent.gateway.reading import (
    MAX_TOOLS,
    Answered,
    Asked,
    BodyTranscript,
    Dialogues,
    Value,
    asked_of,
    call_of,
    constraint_of,
    event,
    tool_of,
)
from lockstep.types import TEXT_ONLY, Message, ToolCall, ToolSchema

MALFORMED = "malformed_arguments"
"""Key for arguments that are no JSON object. A call's input must be an object in this dialect, so
the text is sent under this key, and read back from it."""

KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'


# -- bodies to turns ------------------------------------------------------------------------------


def read(body: Mapping[str, Any], dialogues: Dialogues, *, is_counted: bool = False) -> Asked:
    """is_counted: the request is to count tokens and has no max_tokens. Raises Refusal (400)."""
    asked = Value(body)
    found = asked.check_fields("others", "messages")
    found += asked["output_config"].check_fields("messages_output")
    found += asked["tool_choice"].check_fields("messages_choice")
    if body.get("max_tokens") is None and not is_counted:
        raise asked["max_tokens"].refusal("is missing: it is required.")
    transcript = BodyTranscript()
    if system := asked["system"].content("text"):
        transcript.add(Message(role="system", content=system))
    for message in asked["messages"].entries():
        message.check_fields("messages_message")
        _add(transcript, message["role"], message["content"])
    has_tools = asked["tool_choice"]["type"].raw != "none"
    tools = tuple(_tool(tool) for tool in asked["tools"].entries(MAX_TOOLS)) if has_tools else ()
    return asked_of(
        asked,
        transcript.messages,
        tools,
        constraint=constraint_of(asked["tool_choice"], asked["output_config"]["format"], tools),
        stops="stop_sequences",
        ignored=found,
    )


def _tool(entry: Value) -> ToolSchema:
    if entry["type"].raw not in ("custom", None):
        raise entry["type"].unsupported("only tools that the agent runs itself are known here.")
    return tool_of(entry, parameters="input_schema")


def _add(transcript: BodyTranscript, role: Value, content: Value) -> None:
    match role.raw:
        case "assistant":
            transcript.add(assistant(content))
        case "user" if isinstance(content.raw, list):
            _add_blocks(transcript, content)
        case "user" | "system":
            transcript.add(Message(role=role.raw, content=content.content("text")))
        case _:
            raise role.wrong("user, assistant or system")


def _add_blocks(transcript: BodyTranscript, content: Value) -> None:
    """A user's blocks. Results of tools become messages of their own, in their order."""
    texts: list[str] = []

    def flush() -> None:
        if texts:
            transcript.add(Message(role="user", content="\n".join(texts)))
            texts.clear()

    for block in content.entries():
        match block["type"].raw:
            case "tool_result":
                flush()
                transcript.add_result(block["tool_use_id"], block["content"].content("text"))
            case "text":
                texts.append(block["text"].text())
            case _:
                raise block["type"].unsupported(TEXT_ONLY)
    flush()
    if not content.raw:
        raise content.refusal("is empty.")


def assistant(content: Value) -> Message:
    """The assistant's message of text or blocks."""
    if isinstance(content.raw, str):
        return Message(role="assistant", content=content.raw)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in content.entries():
        match block["type"].raw:
            case "text":
                texts.append(block["text"].text())
            case "thinking":
                thoughts.append(block["thinking"].text())
            case "tool_use":
                given = block["input"].object()
                arguments = given.get(MALFORMED) if set(given) == {MALFORMED} else None
                if not isinstance(arguments, str):
                    arguments = json.dumps(given, ensure_ascii=False)
                calls.append(call_of(block, arguments, block["id"]))
            case _:
                raise block["type"].unsupported(TEXT_ONLY)
    return Message(
        role="assistant",
        content="\n".join(texts),
        thinking="\n".join(thoughts),
        tool_calls=tuple(calls),
    )


# -- turns to bodies ------------------------------------------------------------------------------


def write(answered: Answered) -> dict[str, Any]:
    reply = answered.replies[0]
    return {
        "id": f"msg_{answered.id}",
        "type": "message",
        "role": "assistant",
        "model": answered.asked.model,
        "content": _blocks(reply.message),
        **_ending(reply),
        "usage": {
            # This dialect excludes tokens read from the cache from input_tokens.
            "input_tokens": len(reply.prompt_ids) - reply.num_reused_tokens,
            "cache_read_input_tokens": reply.num_reused_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(reply.token_ids),
        },
    }


def events(answered: Answered) -> Iterator[bytes]:
    """The events of a stream."""
    body, ending = write(answered), _ending(answered.replies[0])
    usage = {**body["usage"], "output_tokens": 0}
    begun = {**body, **dict.fromkeys(ending), "content": [], "usage": usage}
    yield _event("message_start", message=begun)
    for at, block in enumerate(body["content"]):
        texts = {
            key: (key, block[key]) for key in ("text", "thinking", "signature") if key in block
        }
        opened: dict[str, Any] = dict.fromkeys(texts, "")
        if block["type"] == "tool_use":
            opened = {"input": {}}
            texts = {"input_json": ("partial_json", json.dumps(block["input"], ensure_ascii=False))}
        yield _event("content_block_start", index=at, content_block={**block, **opened})
        for kind, (key, text) in texts.items():
            delta = {"type": f"{kind}_delta", key: text}
            yield _event("content_block_delta", index=at, delta=delta)
        yield _event("content_block_stop", index=at)
    yield _event("message_delta", delta=ending, usage=body["usage"], **answered.extension())
    yield _event("message_stop")


def _event(kind: str, **body: Any) -> bytes:
    return event({"type": kind, **body}, kind)


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.thinking:
        signature = _signature(message.thinking)
        blocks.append({"type": "thinking", "thinking": message.thinking, "signature": signature})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        given = input_of(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _signature(thinking: str) -> str:
    """Agents take unsigned thinking for another model's and tell it as a user's words. Nothing here
    reads the signature."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=24).digest()).decode()


def input_of(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}")
        # NaN, 1e999 and half surrogate pairs would not survive the way to the agent and back.
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {MALFORMED: arguments}


def _ending(reply: TurnReply) -> dict[str, Any]:
    reason = "tool_use" if reply.message.tool_calls else "end_turn"
    if reply.finish_reason != "stop":
        reason = "max_tokens"
    elif reason == "end_turn" and isinstance(reply.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": reason, "stop_sequence": None}


# -- refusals -------------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "api_error"
    text = str(refusal)
    if refusal.code == "context_overflow":  # the words that agents look for
        text = f"prompt is too long: {text}"
    return {
        "type": "error",
        "error": {"type": _TYPES.get(refusal.status, kind), "message": text},
        "code": refusal.code,
    }
