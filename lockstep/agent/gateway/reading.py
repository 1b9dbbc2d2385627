"""Reads the bodies of requests: the core that the three dialects share.

Each dialect has a table of its fields. A field is honoured, accepted without effect, ignored
(counted in the trajectory's metrics), or refused. A field in no table is refused as well, because
its sender expects something of it. A refusal names the field.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from lockstep.agent.gateway.exchange import Refusal, TurnReply, TurnRequest
from lockstep.types import Message, ToolCall, ToolSchema

MAX_SCHEMA_DEPTH = 64
"""Levels of a tool's parameters; renderers recurse into them."""
MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0: logits divided by less overflow float32."""

TEXT_ONLY = "Only text is read here; leave the other parts out."
NO_CONSTRAINT = "Sampling is not constrained, so that log-probs stay the model's own."

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Field:
    """Treatment of one field of a body."""

    treatment: Literal["honoured", "accepted", "ignored", "refused"]
    """accepted: changes nothing and need not. ignored: has no effect; a request that sets it is
    counted as gateway/ignored/NAME. refused: status 400."""
    about: str = ""
    """Explains how the field is honoured, why it is accepted or ignored, or what to send instead.
    """
    neutral: tuple[Any, ...] = ()
    """Values of an ignored or refused field that change nothing; null always is one."""


Fields = Mapping[str, Field]


def honoured(about: str = "") -> Field:
    return Field("honoured", about)


def accepted(about: str = "") -> Field:
    return Field("accepted", about)


def ignored(about: str, *neutral: Any) -> Field:
    return Field("ignored", about, neutral)


def refused(about: str, *neutral: Any) -> Field:
    return Field("refused", about, neutral)


SHARED: Fields = {
    "model": honoured("one of GET /v1/models"),
    "tools": honoured("functions; `strict` is not enforced"),
    "temperature": honoured("0 is greedy"),
    "top_p": honoured(),
    "stream": honoured("sent when the turn is complete"),
    "metadata": accepted("the sender's own notes"),
    "service_tier": accepted("there is one"),
}
"""Fields that all dialects have."""

OPENAI: Fields = {
    **SHARED,
    "tool_choice": refused(
        f"{NO_CONSTRAINT} Send auto, or none to leave the tools out.", "auto", "none"
    ),
    "top_logprobs": refused("Only the log-probs of sampled ids are recorded.", 0),
    "parallel_tool_calls": ignored(f"{NO_CONSTRAINT} A turn may have several calls.", True),
    "moderation": refused("Nothing is moderated here."),
    **dict.fromkeys(("user", "safety_identifier"), accepted("names the sender, not the session")),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        accepted("prefixes are reused by what they are"),
    ),
}
"""Fields that both OpenAI dialects have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was read."""

    turn: TurnRequest
    model: str
    num_choices: int = 1
    is_streamed: bool = False
    has_logprobs: bool = False
    has_usage: bool = True
    """Whether a stream ends with its usage."""
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
    token_bytes: Sequence[bytes]
    """Spelling of each id of the tokenizer; the model's vocabulary may be larger."""
    num_thinking_tokens: Sequence[int]
    """One number per reply."""
    has_ids: bool = False
    """The header x-lockstep-ids asked for ids."""

    def extension(self) -> dict[str, Any]:
        """Returns `{"lockstep": ...}` if the header asked for ids."""
        if not self.has_ids:
            return {}
        turns = [
            {
                "leaf": reply.leaf,
                "reason": reply.reason,
                "policy_version": reply.policy_version,
                "is_repeated": reply.is_repeated,
                "num_reused_tokens": reply.num_reused_tokens,
                "prompt_ids": reply.prompt_ids.tolist(),
                "token_ids": reply.token_ids.tolist(),
                "logprobs": [float(value) for value in reply.logprobs],
                "parse_error": reply.message.parse_error,
            }
            for reply in self.replies
        ]
        return {"lockstep": {"session": self.session_id, "turns": turns}}

    def logprobs(self, reply: TurnReply) -> list[dict[str, Any]]:
        """Entries of all sampled ids, in order. Part of a character is shown as U+FFFD, with its
        bytes; an id without a spelling (padding of the vocabulary) has none."""
        entries: list[dict[str, Any]] = []
        for id_, logprob in zip(reply.token_ids.tolist(), reply.logprobs.tolist(), strict=True):
            spelled = self.token_bytes[id_] if id_ < len(self.token_bytes) else b""
            token = spelled.decode("utf-8", "replace")
            entries.append(
                {"token": token, "logprob": logprob, "bytes": list(spelled), "top_logprobs": []}
            )
        return entries


@dataclass(slots=True)
class Memory:
    """State of one session that the server needs to read its requests."""

    dialogues: dict[str, list[Message]] = field(default_factory=dict[str, list[Message]])
    """Response id -> its dialogue."""
    keys: dict[bytes, str] = field(default_factory=dict[bytes, str])
    """Digest of a body -> the key of the latest first attempt."""
    bodies: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """A client's own idempotency key -> digest of the body that came with it."""


# -- a body ---------------------------------------------------------------------------------------


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises Refusal (400) for anything else."""
    if not raw.strip():
        raise Refusal(400, "invalid_json", "the body is empty; expected a JSON object.")
    try:
        # Decoded here: json.loads would read UTF-16 and let raw surrogates through.
        text = raw.decode("utf-8-sig")
        body = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:  # half a pair, escaped, has no UTF-8 and no tokens
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise Refusal(400, "invalid_utf8", f"the body is not UTF-8 text: {error}.") from None
    except RecursionError:
        raise Refusal(400, "too_deep", "the body is nested too deeply.") from None
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}.") from None
    return object_of(body, "the body", code="invalid_json")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def check_fields(body: Mapping[str, Any], fields: Fields, *, where: str = "") -> list[str]:
    """Returns the names of ignored fields that are set. Raises Refusal for a field that is refused,
    or in no table."""
    found: list[str] = []
    for name, value in body.items():
        known = fields.get(name)
        if value is None or (known is not None and value in known.neutral):
            continue
        if known is None:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f" Did you mean {near[0]!r}?" if near else " Leave it out."
            text = f"unknown field {where + name!r}: what it asks for would not happen.{hint}"
            raise Refusal(400, "unknown_parameter", text, parameter=where + name)
        if known.treatment == "refused":
            text = f"{where}{name}={shown(value)} cannot be honoured here. {known.about}"
            raise Refusal(400, "unsupported_parameter", text, parameter=where + name)
        if known.treatment == "ignored":
            found.append(where + name)
    return found


def turn_of(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: tuple[ToolSchema, ...],
    *,
    where: str = "messages",
    limits: Sequence[str] = ("max_tokens",),
    stops: str = "stop",
    ignored: Sequence[str] = (),
) -> TurnRequest:
    """Builds the requested turn. where: the field of the messages. limits: fields of the token
    limit; the smallest counts. stops: the field of the stop strings."""
    found = [integer_of(body.get(name), name, low=1, high=2**31 - 1) for name in limits]
    top_k = integer_of(body.get("top_k"), "top_k", low=-1, high=2**31 - 1)
    temperature = number_of(body.get("temperature"), "temperature", low=0, high=100)
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
        raise wrong_value(
            "temperature",
            f"must be 0 or at least {MIN_TEMPERATURE:g}, found {shown(body['temperature'])}.",
        )
    return TurnRequest(
        messages=check_dialogue(messages, where),
        tools=tools,
        max_tokens=min((limit for limit in found if limit is not None), default=None),
        temperature=temperature,
        top_p=number_of(body.get("top_p"), "top_p", low=1e-6, high=1),
        top_k=None if top_k is None else max(0, top_k),
        stop_strings=stops_of(body.get(stops), stops),
        seed=integer_of(body.get("seed"), "seed", low=-(2**63), high=2**63 - 1),
        ignored=tuple(ignored),
    )


# -- values ---------------------------------------------------------------------------------------

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "text"),
    (list, "a list"),
    (dict, "an object"),
    (type(None), "null"),
)


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def wrong_type(where: str, expected: str, value: Any, code: str = "invalid_type") -> Refusal:
    kind = next(name for type_, name in _KINDS if isinstance(value, type_))
    return Refusal(400, code, f"{where} must be {expected}, found {kind}.", parameter=where)


def wrong_value(where: str, text: str) -> Refusal:
    return Refusal(400, "invalid_value", f"{where} {text}", parameter=where)


def unsupported(where: str, text: str) -> Refusal:
    return Refusal(400, "unsupported_value", f"{where}: {text}", parameter=where)


def text_of(value: Any, where: str, *, optional: bool = False) -> str:
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise wrong_type(where, "text", value)
    return value


def truth_of(value: Any, where: str, *, default: bool = False) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(where, "true or false", value)
    return value


def object_of(value: Any, where: str, *, code: str = "invalid_type") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value, code)
    return cast("dict[str, Any]", value)


def list_of(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(where, "a list", value)
    return cast("list[Any]", value)


def objects_of(value: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """(place, object) of each entry of a list; null is an empty list."""
    listed = [] if value is None else list_of(value, where)
    return [(f"{where}[{at}]", object_of(one, f"{where}[{at}]")) for at, one in enumerate(listed)]


def integer_of(value: Any, where: str, *, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(where, "a whole number", value)
    if not low <= value <= high:
        raise wrong_value(where, f"must lie in {low}..{high}, found {shown(value)}.")
    return value


def number_of(value: Any, where: str, *, low: float, high: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(where, "a number", value)
    if not low <= value <= high:  # NaN included
        text = f"must be a finite number in {low:g}..{high:g}, found {shown(value)}."
        raise wrong_value(where, text)
    return float(value)


def reward_of(value: Any, where: str) -> float:
    """A finite number. Raises Refusal."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(where, "a number", value)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise wrong_value(where, "must be a finite number.")
    return found


def stops_of(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else list_of(value, where)
    for at, text in enumerate(texts):
        if not text_of(text, f"{where}[{at}]"):
            raise wrong_value(f"{where}[{at}]", "is empty: it would stop at once.")
    return tuple(texts)


def content_of(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Text, or a list of parts that are text, joined by newlines. kinds: names of such parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong_type(where, "text or a list of parts", value)
    texts: list[str] = []
    for here, part in objects_of(value, where):
        found = part.get("type")
        if found not in kinds:
            raise unsupported(f"{here}.type", f"a part of {str(found)[:40]!r}. {TEXT_ONLY}")
        key = "refusal" if found == "refusal" else "text"
        texts.append(text_of(part.get(key), f"{here}.{key}"))
    return "\n".join(texts)


# -- tools and dialogues --------------------------------------------------------------------------


def tool_of(entry: Mapping[str, Any], where: str, *, parameters: str = "parameters") -> ToolSchema:
    """parameters: the dialect's name of the field."""
    name = text_of(entry.get("name"), f"{where}.name")
    if not _TOOL_NAME.fullmatch(name):
        raise wrong_value(f"{where}.name", "must be 1 to 128 letters, digits or any of _ . : / -")
    given = entry.get(parameters)
    found = object_of({} if given is None else given, f"{where}.{parameters}")
    if _is_deep(found):
        raise wrong_value(f"{where}.{parameters}", f"is nested over {MAX_SCHEMA_DEPTH} levels.")
    return ToolSchema(
        name=name,
        description=text_of(entry.get("description"), f"{where}.description", optional=True),
        parameters=found or {"type": "object", "properties": {}},
    )


def _is_deep(value: Any) -> bool:
    layer: Sequence[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return False
    return True


def call_of(name: Any, arguments: Any, id_: Any, where: str, id_where: str) -> ToolCall:
    return ToolCall(
        name=text_of(name, f"{where}.name"),
        arguments=text_of(arguments, f"{where}.arguments"),
        id=text_of(id_, id_where),
    )


class Transcript:
    """The messages of a body in order. A tool's reply gets the name of the function that the call
    with its id named."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)
        self._names = {call.id: call.name for m in messages for call in m.tool_calls}

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._names.update({call.id: call.name for call in message.tool_calls})

    def add_result(self, call_id: Any, content: str, where: str, *, name: str = "") -> None:
        """where: the field of the id. name: taken if no call has the id."""
        call_id = text_of(call_id, where)
        name = self._names.get(call_id) or name
        if not name:
            text = f"is {call_id[:80]!r}, and no call of an assistant before it has this id."
            raise wrong_value(where, text)
        self.add(Message(role="tool", content=content, name=name, tool_call_id=call_id))


def check_dialogue(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """The dialogue, if a turn of the model can follow it. Raises Refusal."""
    if not messages:
        raise wrong_value(where, "is empty: there is nothing to answer.")
    if messages[-1].role == "assistant":
        raise unsupported(
            where,
            "the last message is the assistant's. A reply is sampled whole and cannot be made to "
            "begin with given text; end with a user's or a tool's message.",
        )
    return tuple(messages)


# -- answers --------------------------------------------------------------------------------------


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    data = f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    return (f"event: {name}\n{data}" if name else data).encode()
