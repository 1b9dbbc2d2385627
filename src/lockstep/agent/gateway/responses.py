"""OpenAI Responses: bodies to turns, turns to bodies and streams."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.agent.gateway import chat
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
from lockstep.types import TEXT_ONLY, Message, ToolSchema

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include` that a request may have."""
HOSTED_TOOLS = ("web_search", "web_search_preview", "image_generation")
"""Tools that OpenAI's server runs. Agents offer them unasked, so they are left out and counted."""
FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool, whose input is plain text."""

KEEP_ALIVE = chat.KEEP_ALIVE


# -- bodies to turns ------------------------------------------------------------------------------


def read(body: Mapping[str, Any], dialogues: Dialogues) -> Asked:
    """Raises Refusal (400) that names the field."""
    asked = Value(body)
    found = asked.check_fields("others", "responses")
    found += asked["text"].check_fields("responses_text")
    transcript = BodyTranscript()
    if instructions := asked["instructions"].text(""):
        transcript.add(Message(role="system", content=instructions))
    num_instructions = len(transcript.messages)
    if (previous := asked["previous_response_id"]).text(""):
        if previous.raw not in dialogues:
            text = "is no response of this session that was stored. Send the whole input."
            raise previous.refusal(text, "previous_response_not_found")
        for message in dialogues[previous.raw]:
            transcript.add(message)
    _add_input(transcript, asked["input"], dialogues)
    for name in asked["include"].entries():
        if name.raw not in (LOGPROBS, ENCRYPTED):
            raise name.unsupported(f"known are {LOGPROBS} and {ENCRYPTED}.")
    tools = _tools(asked["tools"], found) if body.get("tool_choice") != "none" else ()
    return asked_of(
        asked,
        transcript.messages,
        tools,
        constraint=constraint_of(asked["tool_choice"], asked["text"]["format"], tools),
        where="input",
        limits=("max_output_tokens",),
        ignored=found,
        has_logprobs=LOGPROBS in (body.get("include") or ()),
        is_stored=asked["store"].truth(default=True),
        num_instructions=num_instructions,
    )


def _tools(listed: Value, left_out: list[str]) -> tuple[ToolSchema, ...]:
    tools: list[ToolSchema] = []
    for entry in listed.entries(MAX_TOOLS):
        match entry["type"].raw:
            case "function":
                tools.append(tool_of(entry))
            case "custom":
                tools.append(tool_of(Value({**entry.raw, "parameters": FREE_TEXT}, entry.where)))
                if entry["format"].raw not in (None, {"type": "text"}):
                    left_out.append("tools.format")  # a grammar of OpenAI's
            case kind if kind in HOSTED_TOOLS:
                left_out.append(f"tools.{kind}")
            case _:
                raise entry["type"].unsupported("only functions are tools here.")
    return tuple(tools)


def _add_input(transcript: BodyTranscript, given: Value, dialogues: Dialogues) -> None:
    """Adds the messages of the items. One turn of the model is several items: reasoning, then a
    message, then calls."""
    if isinstance(given.raw, str):
        transcript.add(Message(role="user", content=given.raw))
        return
    turn: dict[str, Any] = {}

    def flush() -> None:
        if turn:
            calls = tuple(turn.pop("tool_calls", ()))
            transcript.add(Message(role="assistant", tool_calls=calls, **turn))
            turn.clear()

    for entry in given.entries():
        if entry["type"].raw == "item_reference" or entry.object().keys() == {"id"}:
            entry = _referenced(entry, dialogues)
        match entry["type"].raw or "message":
            case "message":
                role, content = entry["role"].raw, _content(entry["content"])
                if role not in ("system", "developer", "user", "assistant"):
                    raise entry["role"].wrong("system, developer, user or assistant")
                if role != "assistant" or turn.keys() & {"content", "tool_calls"}:
                    flush()
                if role == "assistant":
                    turn["content"] = content
                else:
                    transcript.add(Message(role=role, content=content))
            case "reasoning":
                flush()
                turn["thinking"] = _reasoning(entry)
            case "function_call":
                call = call_of(entry, entry["arguments"].text(), entry["call_id"])
                turn.setdefault("tool_calls", []).append(call)
            case "custom_tool_call":
                arguments = json.dumps({"input": entry["input"].text()}, ensure_ascii=False)
                call = call_of(entry, arguments, entry["call_id"])
                turn.setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                flush()
                output = _content(entry["output"])
                transcript.add_result(entry["call_id"], output, name=entry["name"].text(""))
            case _:
                raise entry["type"].unsupported(f"send the items themselves. {TEXT_ONLY}")
    flush()


def _referenced(entry: Value, dialogues: Dialogues) -> Value:
    """The item of an earlier response that an item refers to by its id."""
    name = entry["id"].text()
    number = name.partition("_")[2].partition("_")[0]
    for item in _items_of(number, dialogues.get(f"resp_{number}", ())[-1:]):
        if item["id"] == name.replace("ctc_", "fc_"):
            return Value(item, entry.where)
    text = "is no item of a response of this session that was stored. Send the item itself."
    raise entry["id"].refusal(text, "item_not_found")


def _content(value: Value) -> str:
    return value.content("input_text", "output_text", "text", "refusal")


def _reasoning(entry: Value) -> str:
    """The thinking. Agents that do not store send back `encrypted_content` and no text; a summary
    is taken where it is all that came back."""
    content, sealed = entry["content"], entry["encrypted_content"].raw
    if not content.raw and isinstance(sealed, str):
        with contextlib.suppress(ValueError):  # of another server
            return base64.b64decode(sealed, validate=True).decode()
    return (content if content.raw else entry["summary"]).content("reasoning_text", "summary_text")


# -- turns to bodies ------------------------------------------------------------------------------


def response_id(answered: Answered) -> str:
    return f"resp_{answered.id}"


def write(answered: Answered) -> dict[str, Any]:
    """The reply, with the request's settings repeated."""
    asked, reply = answered.asked, answered.replies[0]
    body, turn = asked.body, asked.turn
    is_complete = reply.finish_reason == "stop"
    repeated = ("instructions", "previous_response_id", "user")
    return {
        "id": response_id(answered),
        **{name: body.get(name) for name in repeated},
        "object": "response",
        "created_at": answered.created,
        "completed_at": answered.created if is_complete else None,
        "status": "completed" if is_complete else "incomplete",
        "error": None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
        "max_output_tokens": turn.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": asked.model,
        "output": _items(answered),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "store": asked.is_stored,
        "temperature": turn.temperature,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": turn.top_p,
        "truncation": "disabled",
        "usage": _usage(answered),
    }


def events(answered: Answered) -> Iterator[bytes]:
    """The events of a stream."""
    number = -1

    def numbered(kind: str, **body: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **body}, kind)

    body = write(answered)
    later = dict.fromkeys(("completed_at", "incomplete_details", "usage"))
    begun = {**body, **later, "status": "in_progress", "output": []}
    yield numbered("response.created", response=begun)
    yield numbered("response.in_progress", response=begun)
    for at, item in enumerate(body["output"]):
        place = {"output_index": at, "item_id": item["id"]}
        if item["type"] in ("function_call", "custom_tool_call"):
            key = "arguments" if item["type"] == "function_call" else "input"
            opened = {**item, key: "", "status": "in_progress"}
            yield numbered("response.output_item.added", output_index=at, item=opened)
            kind = f"response.{item['type']}_{key}"
            yield numbered(f"{kind}.delta", **place, delta=item[key])
            yield numbered(f"{kind}.done", **place, **{key: item[key]}, name=item["name"])
        else:
            opened = {**item, "content": [], "status": "in_progress"}
            yield numbered("response.output_item.added", output_index=at, item=opened)
            part = item["content"][0]
            place["content_index"] = 0
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            kind = f"response.{part['type']}"
            empty = {**part, "text": "", **({"logprobs": []} if more else {})}
            yield numbered("response.content_part.added", **place, part=empty)
            yield numbered(f"{kind}.delta", **place, delta=part["text"], **more)
            yield numbered(f"{kind}.done", **place, text=part["text"], **more)
            yield numbered("response.content_part.done", **place, part=part)
        yield numbered("response.output_item.done", output_index=at, item=item)
    yield numbered(f"response.{body['status']}", response={**body, **answered.extension()})


def _items(answered: Answered) -> list[dict[str, Any]]:
    asked, reply = answered.asked, answered.replies[0]
    status = "completed" if reply.finish_reason == "stop" else "incomplete"
    custom = {one["name"] for one in asked.body.get("tools") or () if one.get("type") == "custom"}
    items = _items_of(answered.id, [reply.message])
    for item in items:
        if item["type"] == "function_call":
            item["status"] = "completed"
            if item["name"] in custom:
                name = item["id"].replace("fc_", "ctc_", 1)
                item |= {"id": name, "type": "custom_tool_call"}
                item["input"] = _free_text(item.pop("arguments"))
            continue
        item["status"] = status
        if item["type"] == "message":
            item["content"][0] |= {
                "annotations": [],
                "logprobs": answered.logprobs(reply) if asked.has_logprobs else [],
            }
        elif ENCRYPTED in (asked.body.get("include") or ()):
            thinking = reply.message.thinking.encode()
            item["encrypted_content"] = base64.b64encode(thinking).decode()
    return items


def _items_of(number: str, replies: Sequence[Message]) -> list[dict[str, Any]]:
    """The items of a response with that number: of its reply, which is left out if not known."""
    items: list[dict[str, Any]] = []
    for message in replies:
        if message.thinking:
            content = {"type": "reasoning_text", "text": message.thinking}
            item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [content]}
            items.append(item)
        if message.content or not message.tool_calls:
            content = {"type": "output_text", "text": message.content}
            item = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
            items.append({**item, "content": [content]})
        for at, call in enumerate(message.tool_calls):
            item = {"id": f"fc_{number}_{at}", "type": "function_call", "call_id": call.id}
            items.append({**item, "name": call.name, "arguments": call.arguments})
    return items


def _free_text(arguments: str) -> str:
    """Returns the input of a custom tool, or arguments of another form as they are."""
    try:
        found = json.loads(arguments)
        text = found["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) and len(found) == 1 else arguments


def _usage(answered: Answered) -> dict[str, Any]:
    reply = answered.replies[0]
    return {
        "input_tokens": len(reply.prompt_ids),
        "input_tokens_details": {"cached_tokens": reply.num_reused_tokens},
        "output_tokens": len(reply.token_ids),
        "output_tokens_details": {"reasoning_tokens": answered.num_thinking_tokens(reply)},
        "total_tokens": len(reply.prompt_ids) + len(reply.token_ids),
    }


# -- refusals -------------------------------------------------------------------------------------

error = chat.error
