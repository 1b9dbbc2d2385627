"""The one reader of dialogues: task files, supervised files, dumps, `lockstep render`, the gateway.

It reads OpenAI's chat form, ShareGPT's (`from` and `value`), and the JSON text of either, whole or
message by message, as Arrow and CSV store it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import DataError, FieldError, located
from lockstep.types import Message, ToolSchema

SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of ShareGPT's form that are called otherwise in OpenAI's."""


COLUMNS = ("messages", "conversations")
"""Columns of a dialogue: OpenAI's, ShareGPT's."""
BESIDE = ("tools", "system", "parallel_tool_calls")
"""Other columns of a dialogue's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One record of a file: a dialogue, and the tools that it may call."""

    messages: tuple[Message, ...]
    weights: tuple[float, ...]
    """Per message, for training: factor on the loss of an assistant's tokens."""
    tools: tuple[ToolSchema, ...] = ()


class Transcript:
    """The messages of a dialogue, added in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._names: dict[str, str] = {}

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._names.update({call.id: call.name for call in message.tool_calls if call.id})

    def read(self, source: Any) -> None:
        """Adds a message in one of the forms. Raises DataError."""
        fields = dict(source) if isinstance(source, Mapping) else source
        if isinstance(fields, dict) and "role" not in fields and "from" in fields:
            fields = _openai_form(fields)
        if isinstance(fields, dict) and fields.get("role") == "tool":
            call_id, name = fields.get("tool_call_id") or "", fields.get("name") or ""
            fields["name"] = self.called(call_id, name)
            if call_id and not fields["name"] and call_id not in self._names:
                text = "must be the id of a call of an assistant before it"
                raise FieldError("tool_call_id", f"{text}, found {call_id!r:.60}.")
        self.add(Message.from_dict(fields))

    def called(self, call_id: Any, name: Any = "") -> Any:
        """The function that a tool's message answers: by the id of the call; else `name`; else,
        without an id, by its place after the calls. Empty if none."""
        if isinstance(call_id, str) and call_id in self._names:
            return self._names[call_id]
        if name or call_id:
            return name
        for place, message in enumerate(reversed(self.messages)):
            if calls := message.tool_calls:
                return calls[place].name if place < len(calls) else ""
        return ""


def read_messages(source: object, *, where: str = "messages") -> tuple[Message, ...]:
    """The messages of a dialogue. A key whose value is null says nothing (Parquet gives every
    object all keys). Raises DataError, which begins with `where`."""
    transcript = Transcript()
    for number, each in enumerate(entries_of(source, where=where, of="messages")):
        with located(f"{where}: message {number}", DataError):
            transcript.read(each)
    return tuple(transcript.messages)


def read_dialogue(source: Mapping[str, Any], *, where: str = "") -> Dialogue:
    """The dialogue of a record with one of COLUMNS and any of BESIDE. Raises DataError, which
    begins with `where` or the column."""
    name = next((name for name in COLUMNS if source.get(name) is not None), "")
    if not name:
        raise DataError(f"{where}: expected a list of messages, or an object with `messages`.")
    raw = entries_of(source[name], where=where or name, of="messages")
    raw = [dict(each) if isinstance(each, Mapping) else each for each in raw]
    if source.get("system"):
        raw = [{"role": "system", "content": source["system"]}, *raw]
    weights = [each.pop("weight", None) if isinstance(each, dict) else None for each in raw]
    return Dialogue(
        messages=read_messages(raw, where=where or name),
        weights=tuple(
            1.0 if weight is None else read_weight(weight, f"message {at}: weight")
            for at, weight in enumerate(weights)
        ),
        tools=read_tools(source.get("tools") or [], where=f"{where}: tools" if where else "tools"),
    )


def read_weight(value: Any, name: str) -> float:
    """The factor on a loss. Raises DataError, which begins with `name`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1e30:  # float32 holds it
        raise DataError(f"{name}: expected a number of 0 to 1e30, found {value!r:.60}.")
    return float(value)


def read_prompt(source: object, *, where: str = "messages") -> list[Message]:
    """`read_messages` of a dialogue that the model is to answer. One that ends with an assistant's
    message is refused: the model would read the answer in its prompt."""
    messages = list(read_messages(source, where=where))
    if not messages:
        raise DataError(f"{where} must be a list with at least one message.")
    if messages[-1].role == "assistant":
        raise DataError(
            f"{where} ends with an assistant's message, which the model would read in its prompt. "
            "End with a user's or a tool's message, and keep the answer in a column of its own."
        )
    if not any(message.content.strip() for message in messages):
        raise DataError(f"{where} has no text to answer.")
    return messages


def read_tools(source: object, *, where: str = "tools") -> tuple[ToolSchema, ...]:
    """The tools that a dialogue may call: a list, or one. Raises DataError."""
    found = parsed_json(source, where)
    found = [found] if isinstance(found, Mapping) else found
    listed = entries_of(found, where=where, of="tools")
    at = where.removesuffix("tools")
    return tuple(
        ToolSchema.from_dict(each, where=f"{at}tool {number}") for number, each in enumerate(listed)
    )


def entries_of(source: object, *, where: str, of: str) -> list[Any]:
    """The entries of a list. The list or an entry may be JSON text."""
    found = parsed_json(source, where)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise DataError(f"{where} must be a list of {of}, found {type(found).__name__}.")
    is_text = [isinstance(each, str) and each.lstrip().startswith("{") for each in found]
    return [
        parsed_json(each, f"{where}: entry {number}") if is_text[number] else each
        for number, each in enumerate(found)
    ]


def parsed_json(source: object, where: str) -> Any:
    """A value of which files keep the JSON text, in lists and objects again. Raises DataError."""
    if not isinstance(source, str):
        return source
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{where} is text that is not JSON: {why}, found {source!r:.60}.") from None


def _openai_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    role, text = fields.get("from"), fields.get("value")
    rest = {key: value for key, value in fields.items() if key not in ("from", "value")}
    rest["role"] = SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role != "function_call":
        return rest | {"content": text}
    calls = parsed_json(text, "the value of function_call")
    return rest | {"tool_calls": calls if isinstance(calls, list) else [calls]}
