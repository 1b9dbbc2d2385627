"""Reads the bodies of requests: the core that the dialects share. A refusal names the field."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep import dialogues
from lockstep.agent.config import MIN_TEMPERATURE
from lockstep.agent.gateway.exchange import Refusal, TurnReply, TurnRequest
from lockstep.agent.gateway.fields import FIELDS
from lockstep.agent.json_schema import shown
from lockstep.errors import DataError, FieldError
from lockstep.renderers.base import Constraint, Renderer
from lockstep.renderers.calls import load_json
from lockstep.types import Message, ToolCall, ToolSchema, text_of

T = TypeVar("T")

MAX_SCHEMA_DEPTH = 64
"""Levels of a tool's parameters; renderers recurse into them."""
MAX_SCHEMA_CHARS = 1 << 18
MAX_INTEGER = 2**31 - 1
MAX_ENTRIES = 10_000
"""Messages, or parts of one, that a request may have: others wait while they are gone through."""
MAX_TOOLS = 1000
LOOP_BYTES = 1 << 16
"""Size of a body that is read on the event loop: a few milliseconds."""

Dialogues = dict[str, list[Message]]
"""Response id -> its dialogue, of one session: the input of a request may be named by its response.
"""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was read."""

    turn: TurnRequest
    model: str
    num_choices: int = 1
    is_streamed: bool = False
    has_logprobs: bool = False
    has_usage: bool = True
    """A stream ends with its usage."""
    body: Mapping[str, Any]
    """The body itself; a dialect repeats parts of it in its answer."""
    is_stored: bool = False
    """A later request may name this one instead of repeating it."""
    num_instructions: int = 0
    """Messages at the beginning that belong to this request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The turns of one request, with everything that a dialect needs to write them."""

    asked: Asked
    replies: Sequence[TurnReply]
    id: str
    """Letters and digits; a dialect puts its own prefix before it."""
    created: int
    """Seconds since 1970."""
    session_id: str
    renderer: Renderer
    has_ids: bool = False
    """The header x-lockstep-ids asked for ids."""

    def extension(self) -> dict[str, Any]:
        """Returns `{"lockstep": ...}` if the header asked for ids."""
        if not self.has_ids:
            return {}
        names = ("leaf", "reason", "policy_version", "is_repeated", "num_reused_tokens")
        turns = [
            {
                **{name: getattr(reply, name) for name in names},
                "prompt_ids": reply.prompt_ids.tolist(),
                "token_ids": reply.token_ids.tolist(),
                "logprobs": reply.logprobs.tolist(),
                "parse_error": reply.message.parse_error,
            }
            for reply in self.replies
        ]
        return {"lockstep": {"session": self.session_id, "turns": turns}}

    def num_thinking_tokens(self, reply: TurnReply) -> int:
        if not reply.message.thinking:
            return 0
        kept = self.renderer.without_thinking(reply.token_ids.tolist())
        return max(0, len(reply.token_ids) - len(kept))

    def logprobs(self, reply: TurnReply) -> list[dict[str, Any]]:
        """Entries of all sampled ids, in order. Part of a character is shown as U+FFFD, with its
        bytes; an id without a spelling (padding of the vocabulary) has none."""
        entries: list[dict[str, Any]] = []
        for id_, logprob in zip(reply.token_ids.tolist(), reply.logprobs.tolist(), strict=True):
            spelled = self.renderer.tokenizer.token_bytes(id_)
            entry = {"token": spelled.decode("utf-8", "replace"), "logprob": logprob}
            entries.append({**entry, "bytes": list(spelled), "top_logprobs": []})
        return entries


# -- values ---------------------------------------------------------------------------------------


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises Refusal (400) for anything else."""
    try:
        # Decoded here: json.loads would read UTF-16 and let raw surrogates through.
        text = raw.decode("utf-8-sig")
        body = load_json(text)
        if "\\u" in text:  # half a pair, escaped, has no UTF-8 and no tokens
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise Refusal(400, "invalid_utf8", f"the body is not UTF-8 text: {error}.") from None
    except RecursionError:
        raise Refusal(400, "too_deep", "the body is nested too deeply.") from None
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "the body must be a JSON object.")
    return body


async def in_thread(raw: bytes, read: Callable[[], T]) -> T:
    """The result of `read`, which parses the body `raw`: in a thread if the body is large."""
    return read() if len(raw) <= LOOP_BYTES else await asyncio.to_thread(read)


async def parsed(raw: bytes) -> dict[str, Any]:
    """See `parse_body`."""
    return await in_thread(raw, lambda: parse_body(raw))


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a body with its place, which every refusal names. Null counts as left out.

    >>> Value({"stop": ["a", 5]})["stop"].stops()
    Traceback (most recent call last):
    lockstep.agent.gateway.exchange.Refusal: stop[1] must be text, found 5.
    """

    raw: Any
    where: str = ""

    def refusal(self, text: str, code: str = "invalid_value") -> Refusal:
        return Refusal(400, code, f"{self.where} {text}", parameter=self.where)

    def wrong(self, expected: str) -> Refusal:
        return self.refusal(f"must be {expected}, found {shown(self.raw)}.")

    def unsupported(self, text: str) -> Refusal:
        return self.refusal(f"is {shown(self.raw)}: {text}", "unsupported_value")

    def __getitem__(self, name: str) -> Value:
        return Value(self.object().get(name), f"{self.where}.{name}" if self.where else name)

    def _of_type(self, kind: type[T], expected: str, default: T | None) -> T:
        found = default if self.raw is None else self.raw
        if not isinstance(found, kind):
            raise self.wrong(expected)
        return found

    def object(self) -> dict[str, Any]:
        return self._of_type(dict, "an object", {})

    def entries(self, most: int = MAX_ENTRIES) -> list[Value]:
        found = self._of_type(list, "a list", [])
        if len(found) > most:
            raise self.refusal(f"has {len(found)} entries, more than {most}.")
        return [Value(each, f"{self.where}[{at}]") for at, each in enumerate(found)]

    def text(self, default: str | None = None) -> str:
        return self._of_type(str, "text", default)

    def truth(self, default: bool = False) -> bool:
        return self._of_type(bool, "true or false", default)

    def integer(self, low: int, high: int = MAX_INTEGER) -> int | None:
        is_whole = isinstance(self.raw, int) and not isinstance(self.raw, bool)
        if self.raw is not None and not (is_whole and low <= self.raw <= high):
            raise self.wrong(f"a whole number in {low}..{high}")
        return self.raw

    def number(self, low: float, high: float) -> float | None:
        if self.raw is None:
            return None
        is_number = isinstance(self.raw, int | float) and not isinstance(self.raw, bool)
        if not is_number or not low <= self.raw <= high:  # NaN included
            raise self.wrong(f"a finite number in {low:g}..{high:g}")
        return float(self.raw)

    def temperature(self) -> float | None:
        found = self.number(0, 100)
        if found is not None and 0 < found < MIN_TEMPERATURE:
            raise self.wrong(f"0 or at least {MIN_TEMPERATURE:g}")
        return found

    def finite(self) -> float:
        """A number that must be given."""
        found = self.number(-sys.float_info.max, sys.float_info.max)
        if found is None:
            raise self.wrong("a number")
        return found

    def stops(self) -> tuple[str, ...]:
        """One or several texts that end a reply."""
        values = [self] if isinstance(self.raw, str) else self.entries()
        if empty := [value for value in values if not value.text()]:
            raise empty[0].wrong("text that is not empty")
        return tuple(value.raw for value in values)

    def content(self, *kinds: str) -> str:
        """Text, or a list of parts that are text, joined by newlines. kinds: types of the parts."""
        if isinstance(self.raw, list):
            self.entries()  # not too many
        try:
            return text_of(self.raw, self.where, kinds)
        except FieldError as error:
            raise Refusal(400, error.code, str(error), parameter=error.field) from None

    def _unknown(self, name: str, known: Iterable[str]) -> Refusal:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        text = f"is not known, and would have no effect. {hint}"
        return self[name].refusal(text, "unknown_parameter")

    def check_known(self, *names: str, is_strict: bool = False) -> None:
        """Raises Refusal for an unknown field whose value is neither null, false, 0 nor empty.
        is_strict: only null is allowed."""
        for name, raw in self.object().items():
            if name not in names and (raw or (is_strict and raw is not None)):
                raise self._unknown(name, names)

    def check_fields(self, *tables: str) -> list[str]:
        """Returns the names of ignored fields that are set. Raises Refusal for a field that is
        refused, or in none of these tables of fields.toml; a later table comes first."""
        fields, found = ChainMap(*(dict(FIELDS[table]) for table in reversed(tables))), list[str]()
        for name, raw in self.object().items():
            known, value = fields.get(name), self[name]
            plain = _without_nulls(raw)
            if plain is None or (known is not None and plain in known.neutral):
                continue
            if known is None:
                raise self._unknown(name, fields)
            if known.treatment == "refused":
                text = f"is {shown(raw)}, which cannot be honoured here. {known.about}"
                raise value.refusal(text, "unsupported_parameter")
            if known.treatment == "ignored":
                found.append(value.where)
        return found


def _without_nulls(value: Any) -> Any:
    is_object = isinstance(value, dict)
    return {key: v for key, v in value.items() if v is not None} if is_object else value


# -- turns, tools and dialogues -------------------------------------------------------------------


def asked_of(
    body: Value,
    messages: Sequence[Message],
    tools: tuple[ToolSchema, ...],
    *,
    where: str = "messages",
    limits: Sequence[str] = ("max_tokens",),
    stops: str = "stop",
    ignored: Sequence[str] = (),
    constraint: Constraint | None = None,
    **own: Any,
) -> Asked:
    """Reads the fields that the dialects share. where: the field of the messages. limits: fields of
    the token limit; the smallest counts. stops: the field of the stop strings. own: what only this
    dialect asks for."""
    found = [limit for name in limits if (limit := body[name].integer(1)) is not None]
    top_k = body["top_k"].integer(-1)
    if not messages:
        raise body[where].refusal("is empty: there is nothing to answer.")
    if messages[-1].role == "assistant":
        raise body[where].refusal(
            "ends with an assistant's message, and a reply cannot be made to begin with given text;"
            " end with a user's or a tool's message.",
            "unsupported_value",
        )
    turn = TurnRequest(
        messages=tuple(messages),
        tools=tools,
        max_tokens=min(found, default=None),
        temperature=body["temperature"].temperature(),
        top_p=body["top_p"].number(1e-6, 1),
        top_k=None if top_k is None else max(0, top_k),
        stop_strings=body[stops].stops(),
        seed=body["seed"].integer(-(2**63), 2**63 - 1),
        constraint=constraint,
        ignored=tuple(ignored),
    )
    model, is_streamed = body["model"].text(), body["stream"].truth()
    return Asked(turn=turn, model=model, is_streamed=is_streamed, body=body.raw, **own)


def tool_of(entry: Value, *, parameters: str = "parameters") -> ToolSchema:
    """parameters: the dialect's name of the field."""
    name, schema = entry["name"], entry[parameters]
    if not _TOOL_NAME.fullmatch(name.text()):
        raise name.wrong("1 to 128 letters, digits or any of _ . : / -")
    return ToolSchema(
        name=name.raw,
        description=entry["description"].text(""),
        parameters=_bounded(schema) or {"type": "object", "properties": {}},
    )


def constraint_of(choice: Value, format: Value, tools: tuple[ToolSchema, ...]) -> Constraint | None:
    """Reads what a reply must be; None if it is free. choice: which tool to call. format: of the
    content. A tool that must be called leaves no content; tools that may be called stay so."""
    forced: tuple[ToolSchema, ...] = ()
    match kind := choice.raw if isinstance(choice.raw, str) else choice["type"].raw:
        case None | "auto" | "none":
            pass
        case "required" | "any":
            if not (forced := tools):
                raise choice.refusal("asks for a call, and the request has no tools.")
        case "function" | "tool":
            place = choice["function"] if choice["function"].raw is not None else choice
            forced = tuple(tool for tool in tools if tool.name == place["name"].text())
            if not forced:
                names = ", ".join(tool.name for tool in tools) or "none"
                raise place["name"].refusal(f"is no tool of the request; its tools: {names}.")
        case _:
            text = f"the type {shown(kind)} is not known here; a function can be named, or any."
            raise choice.unsupported(text)
    schema = _schema_of(format)
    if forced:
        return Constraint(tools=forced, where=choice.where)
    return None if schema is None else Constraint(schema=schema, tools=tools, where=format.where)


def _schema_of(format: Value) -> dict[str, Any] | None:
    match format["type"].raw:
        case None | "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            place = format["json_schema"] if format["json_schema"].raw is not None else format
            schema = place["schema"]
            if schema.raw is None:
                raise schema.wrong("a JSON Schema")
            return _bounded(schema)
        case _:
            raise format["type"].unsupported("known are text, json_object and json_schema.")


def _bounded(schema: Value) -> dict[str, Any]:
    if _is_deep(found := schema.object()):
        raise schema.refusal(f"is nested over {MAX_SCHEMA_DEPTH} levels.")
    if (size := len(json.dumps(found))) > MAX_SCHEMA_CHARS:
        raise schema.refusal(f"has {size} characters, more than {MAX_SCHEMA_CHARS}.")
    return found


def _is_deep(value: Any, levels: int = MAX_SCHEMA_DEPTH) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(not levels or _is_deep(each, levels - 1) for each in inner)


def call_of(named: Value, arguments: str, id_: Value) -> ToolCall:
    return ToolCall(name=named["name"].text(), arguments=arguments, id=id_.text())


class BodyTranscript(dialogues.Transcript):
    """The messages of a body in order. A refusal names the field."""

    def add_chat(self, message: Value) -> None:
        """Adds a message of OpenAI's chat form, whose fields were checked."""
        for name in ("content", "tool_calls"):
            if isinstance(message.raw.get(name), list):
                message[name].entries()  # not too many
        try:
            self.read(message.raw)
        except FieldError as error:
            where = f"{message.where}.{error.field}"
            text = f"{message.where}.{error}"
            raise Refusal(400, error.code, text, parameter=where) from None
        except DataError as error:
            raise message.refusal(f"is refused: {error}") from None
        for at, call in enumerate(self.messages[-1].tool_calls):
            if not call.id:
                raise message["tool_calls"].entries()[at]["id"].wrong("text")

    def add_result(self, call_id: Value, content: str, *, name: str = "") -> None:
        """name: taken if no call has the id."""
        name = self.called(call_id.text(), name)
        if not name:
            raise call_id.wrong("the id of a call of an assistant before it")
        self.add(Message(role="tool", content=content, name=name, tool_call_id=call_id.raw))


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    data = f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    return (f"event: {name}\n{data}" if name else data).encode()
