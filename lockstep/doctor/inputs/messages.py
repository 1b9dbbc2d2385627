"""The dialogues of a dump as `Message`s."""

from __future__ import annotations

import json
from typing import Any

from lockstep.errors import DataError
from lockstep.types import Message


def read_messages(source: object, *, where: str) -> tuple[Message, ...]:
    """A chat as dumps hold it: a list of objects in OpenAI's form, or the JSON text of one.

    Keys whose value is null say nothing and are left out (Parquet gives every object all keys). A
    tool's message without `name` is called as the call that it answers. Raises DataError, which
    begins with `where`, for what `Message.from_dict` refuses.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(f"{where} is text that is not JSON: {reason}.") from None
    if not isinstance(source, list):
        raise DataError(f"{where} must be a list of messages, found {type(source).__name__}.")
    out: list[Message] = []
    for number, value in enumerate(source):
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise DataError(f"{where}: message {number} must be an object, found {kind}.")
        known = {str(k): v for k, v in value.items() if v is not None}
        if known.get("role") == "tool" and not known.get("name"):
            known["name"] = _called(known.get("tool_call_id"), out)
        try:
            out.append(Message.from_dict(known))
        except DataError as error:
            raise DataError(f"{where}: message {number}: {error}") from None
    return tuple(out)


def _called(call_id: Any, before: list[Message]) -> str:
    """The function whose call a tool's message answers: by its id, else by its place."""
    for place in range(len(before) - 1, -1, -1):
        calls = before[place].tool_calls
        for call in calls:
            if call_id and call.id == call_id:
                return call.name
        if calls and not call_id:
            answered = len(before) - 1 - place
            return calls[answered].name if answered < len(calls) else ""
    return ""
