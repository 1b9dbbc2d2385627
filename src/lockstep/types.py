"""The nouns shared by all rooms. No torch: the command line imports this file.

A dialogue consists of `Message`s. A `Renderer` turns them into ids. A `Request` carries ids to an
engine, and a `Delta` brings ids back. A `Trajectory` is the forest of `Segment`s that one episode
produced, and a `Sample` is one row of it to train on.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from lockstep.display import block, number, table
from lockstep.errors import (
    AlignmentError,
    ConfigError,
    DataError,
    FieldError,
    RoutingReplayError,
    TokenError,
    named,
    shortened,
)
from lockstep.tables import tables_beside

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Routes = npt.NDArray[np.integer[Any]]
"""[positions, layers, active]: the experts that processed each token, in slot order, for each layer
with a router. uint8 up to 256 experts, int16 above."""

MAX_LOGPROB = 1e-6
"""Largest log-prob that is accepted; a larger one means probabilities, or a shifted row. Rounding
leaves values a few 1e-7 above 0, which `Trajectory.record` counts and clamps."""

FORCED_LOGPROB = -0.01
"""Rollout log-prob above which a token counts as forced (probability over 0.99), as most protocol
tokens are. Mismatch metrics are reported with and without them."""


UNKNOWN_EXPERT = -1
"""Marks positions of a training row whose routes are unknown."""


TOKEN_KINDS = ("text", "control")
"""Names of the values of column `token_kind`: tokens that spell text, and control tokens."""


def route_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest dtype that holds the ids of `num_experts` experts."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.int16)


def frozen_ids(ids: Sequence[int] | npt.NDArray[Any], *, where: str) -> Int32Array:
    """`ids` as a read-only int32 array [T], each >= 0. where: their name in errors."""
    array = np.array(ids, dtype=np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        bad = int(np.flatnonzero((array < 0) | (array > np.iinfo(np.int32).max))[0])
        raise TokenError(f"{where}: token {bad} has the id {int(array[bad])}; ids are 0..2^31-1.")
    out = array.astype(np.int32)
    out.setflags(write=False)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A varying number of int32 per token: token t has `values[offsets[t]:offsets[t + 1]]`.
    Read-only.

    >>> support = Ragged.of([[4, 9], [], [7]])
    >>> len(support), support[0].tolist(), support.sizes.tolist()
    (3, [4, 9], [2, 0, 1])
    >>> [ids.tolist() for ids in support.take([2, 0])]
    [[7], [4, 9]]
    """

    values: Int32Array
    """[M] int32: the values of all tokens, one token after another."""
    offsets: Int64Array
    """[T + 1] int64, from 0 to M, not decreasing."""

    def __post_init__(self) -> None:
        offsets = self.offsets
        if not len(offsets) or offsets[0] or (np.diff(offsets) < 0).any():
            raise AlignmentError("ragged values: offsets must begin with 0 and not decrease.")
        if offsets[-1] != len(self.values):
            raise AlignmentError(
                f"ragged values: the offsets end at {int(offsets[-1])}, and there are "
                f"{len(self.values)} values."
            )
        self.values.setflags(write=False)
        offsets.setflags(write=False)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | npt.NDArray[Any]]) -> Ragged:
        """Makes a column from one list of ids per token. Raises TokenError for an invalid id."""
        flat = np.concatenate([np.empty(0, np.int64), *(np.asarray(r, np.int64) for r in rows)])
        return cls.of_sizes(frozen_ids(flat, where="ragged values"), [len(r) for r in rows])

    @classmethod
    def of_rows(cls, rows: Sequence[Int32Array]) -> Ragged:
        """Makes a column from one array per token. Values may be packed (`pack_support`)."""
        values = np.concatenate([np.empty(0, np.int32), *rows])
        return cls.of_sizes(values, [len(row) for row in rows])

    @classmethod
    def of_sizes(cls, values: Int32Array, sizes: Sequence[int] | npt.NDArray[Any]) -> Ragged:
        """Makes a column from the concatenated values and the number of values per token."""
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def empty(cls, num_tokens: int) -> Ragged:
        """No value for any token: the fill of a ragged column."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens + 1, np.int64))

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The tokens of all parts, in order."""
        return cls.of_sizes(
            np.concatenate([np.empty(0, np.int32), *(part.values for part in parts)]),
            np.concatenate([np.empty(0, np.int64), *(part.sizes for part in parts)]),
        )

    @property
    def sizes(self) -> Int64Array:
        """[T] int64: number of values of each token."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> Int32Array:
        if not 0 <= token < len(self):
            raise IndexError(f"token {token} of {len(self)}")
        return self.values[self.offsets[token] : self.offsets[token + 1]]

    def __iter__(self) -> Iterator[Int32Array]:
        return (self[token] for token in range(len(self)))

    def take(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Ragged:
        """The entries of these tokens, in this order, like `array[tokens]` of a dense column."""
        index = np.asarray(tokens, np.int64)
        sizes = self.sizes[index]
        ends = np.cumsum(sizes)
        # Added to an index of the result, this gives the index of the same value here.
        shift = np.repeat(self.offsets[index] - (ends - sizes), sizes)
        return Ragged.of_sizes(self.values[np.arange(len(shift)) + shift], sizes)


# ---------------------------------------------------------------------------------------------
# Dialogue
# ---------------------------------------------------------------------------------------------


MAX_JSON = 16_000_000
"""Largest size of a payload or schema: its characters, and 16 for each value."""
MAX_DEPTH = 100
"""Deepest nesting of a payload or schema. A value that contains itself exceeds it."""
MAX_BITS = 13_000
"""Largest whole number, about 4000 digits. Python refuses to write one of more than 4300."""


def plain_json(value: Any, where: str) -> Any:
    """A copy of `value` that is made of dict, list, str, int, float, bool and None, so that it can
    be stored and nobody else changes it. A tuple becomes a list.

    where: name of the value in errors. Raises DataError, which names the first part that is not
    JSON.

    >>> plain_json({"grid": (1, 2)}, "payload")
    {'grid': [1, 2]}
    """
    size = 0

    def refuse(at: str, found: str) -> DataError:
        return DataError(f"{at} is {found}; expected JSON (text, finite numbers, lists, dicts).")

    def text_of(found: str) -> str:
        nonlocal size
        size += len(found)
        return str.__str__(found)

    def copied(found: Any, at: str, depth: int) -> Any:
        nonlocal size
        size += 16
        if depth > MAX_DEPTH:
            raise refuse(where, f"nested more than {MAX_DEPTH} deep (does it contain itself?)")
        if size > MAX_JSON:
            raise refuse(where, f"larger than {MAX_JSON:,} characters, at 16 for each value")
        if found is None or isinstance(found, bool):
            return found
        if isinstance(found, str):
            return text_of(found)
        if isinstance(found, int) and found.bit_length() <= MAX_BITS:
            return int.__int__(found)
        if isinstance(found, float) and math.isfinite(found):
            return float.__float__(found)
        if isinstance(found, list | tuple):
            listed = cast("Sequence[Any]", found)
            return [copied(each, f"{at}[{i}]", depth + 1) for i, each in enumerate(listed)]
        if not isinstance(found, Mapping):
            raise refuse(at, shortened(found))
        out: dict[str, Any] = {}
        for key, each in cast("Mapping[Any, Any]", found).items():
            if not isinstance(key, str):
                raise refuse(at, f"a dict with the key {shortened(key)}, which is not text")
            name = text_of(key)
            out[name] = copied(each, f"{at}.{name}", depth + 1)
        return out

    return copied(value, where, 0)


def _make_plain(owner: object, where: str, *names: str) -> None:
    """Makes these fields of a frozen object plain text. Raises DataError for a value that is not
    text."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, str):
            found = type(value).__name__
            raise DataError(f"{where} {name} must be text, found {found}.")
        object.__setattr__(owner, name, str.__str__(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the model made."""

    name: str
    """The function's name, without a namespace."""
    arguments: str
    """The argument text exactly as the model wrote it; JSON in a well-formed call."""
    id: str = ""
    """Call id in protocols that have one (OpenAI); empty in harmony and ChatML."""

    def __post_init__(self) -> None:
        _make_plain(self, "tool call", "name", "arguments", "id")


_TEXT_KEYS = ("role", "name", "tool_call_id", "parse_error")
_THINKING_KEYS = ("thinking", "reasoning_content", "reasoning")
MESSAGE_KEYS = (*_TEXT_KEYS, "content", *_THINKING_KEYS, "tool_calls")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a content that are text."""
TEXT_ONLY = "Only text is read here; leave the other parts out."


def text_of(content: Any, where: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
    """The text of a content: text, or a list of parts of these kinds, joined by line breaks.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "content")
    'a\\nb'
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise FieldError(where, f"must be text or a list of parts, found {content!r:.60}.")
    texts: list[str] = []
    for at, part in enumerate(cast("Sequence[Any]", content)):
        fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        kind = fields.get("type")
        text = fields.get("refusal" if kind == "refusal" else "text")
        if kind not in kinds:
            raise FieldError(f"{where}[{at}].type", f"is {kind!r:.60}: {TEXT_ONLY}", "unsupported")
        if not isinstance(text, str):
            raise FieldError(f"{where}[{at}].text", f"must be text, found {text!r:.60}.")
        texts.append(text)
    return "\n".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a dialogue, in words. Environments see messages and never a token.

    >>> Message.from_dict({"role": "user", "content": "hi"}).to_dict()
    {'role': 'user', 'content': 'hi'}
    """

    role: Role
    content: str = ""
    thinking: str = ""
    """Reasoning that the model wrote before its answer (harmony's analysis channel)."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant only."""
    name: str = ""
    """Name of the function that answers; role "tool" only."""
    tool_call_id: str = ""
    parse_error: str = ""
    """Reason why the sampled ids are not a well-formed turn; empty if they are. Set by
    `Renderer.parse`."""

    def __post_init__(self) -> None:
        texts = ("role", "content", "thinking", "name", "tool_call_id", "parse_error")
        _make_plain(self, "message", *texts)
        if self.role not in ROLES:
            raise DataError(f"message role {self.role!r} is not one of {', '.join(ROLES)}.")
        try:
            calls = [ToolCall(name=c.name, arguments=c.arguments, id=c.id) for c in self.tool_calls]
        except (TypeError, AttributeError) as error:
            raise DataError(f"message tool_calls must be ToolCalls: {error}.") from None
        object.__setattr__(self, "tool_calls", tuple(calls))
        if (self.tool_calls or self.thinking) and self.role != "assistant":
            found = "tool_calls" if self.tool_calls else "thinking"
            raise DataError(f"a {self.role} message has {found}; only an assistant's can.")
        if self.role == "tool" and not (self.name or self.tool_call_id):
            raise DataError("a tool message needs `name`: the function that answers.")

    def lines(self) -> list[str]:
        """The turn as a person reads it: thinking, text and calls, each after its speaker.

        >>> Message(role="tool", name="add", content="5").lines()
        ['tool add: 5']
        """
        calls = (f"{call.name}({call.arguments})" for call in self.tool_calls)
        texts = filter(None, (self.thinking, self.content, *calls))
        return [f"{f'{self.role} {self.name}'.strip()}: {text}" for text in texts]

    @classmethod
    def from_dict(cls, source: Any) -> Message:
        """Reads the OpenAI chat form and our own: a call nested under "function", or flat. A key
        whose value is null or empty says nothing.

        Raises DataError for anything else, also for an unknown key: nothing is dropped silently.
        """
        if not isinstance(source, Mapping):
            raise DataError(f"a message must be an object, found {type(source).__name__}.")
        given = {str(k): v for k, v in cast("Mapping[Any, Any]", source).items() if _says(v)}
        if unknown := sorted(given.keys() - set(MESSAGE_KEYS)):
            raise DataError(f"message has unknown keys {unknown}; known are {list(MESSAGE_KEYS)}.")
        thinking = next((key for key in _THINKING_KEYS if key in given), "thinking")
        texts = {key: given.get(key, "") for key in (*_TEXT_KEYS, thinking)}
        for key, text in texts.items():
            if not isinstance(text, str):
                raise FieldError(key, f"must be text, found {text!r:.60}.")
        role, thought = cast("Role", texts.pop("role") or "?"), texts.pop(thinking)
        content, calls = text_of(given.get("content"), "content"), given.get("tool_calls", ())
        return cls(
            role=role, content=content, thinking=thought, tool_calls=_calls_of(calls), **texts
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without empty fields. `from_dict` reads it back equal."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        for key in ("thinking", "name", "tool_call_id", "parse_error"):
            if value := getattr(self, key):
                out[key] = value
        if self.tool_calls:
            out["tool_calls"] = [
                {"name": c.name, "arguments": c.arguments, **({"id": c.id} if c.id else {})}
                for c in self.tool_calls
            ]
        return out


def _says(value: Any) -> bool:
    return value is not None and not (isinstance(value, str | list | dict | tuple) and not value)


def _calls_of(source: Any) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    listed = cast("Sequence[Any]", source if isinstance(source, list | tuple) else [source])
    for at, call in enumerate(listed):
        where = f"tool_calls[{at}]"
        fields = cast("Mapping[str, Any]", call if isinstance(call, Mapping) else {})
        inside = fields.get("function") or fields
        body = cast("Mapping[str, Any]", inside if isinstance(inside, Mapping) else {})
        if fields.get("type") not in (None, "function"):
            raise FieldError(
                f"{where}.type", f"is {fields['type']!r:.60}; only functions are read."
            )
        name, arguments, id_ = body.get("name"), body.get("arguments"), fields.get("id") or ""
        if not isinstance(name, str):  # a model may have drawn an empty one
            raise FieldError(where, f"is malformed: it needs a `name`, found {call!r:.60}.")
        if not isinstance(id_, str):
            raise FieldError(f"{where}.id", f"must be text, found {id_!r:.60}.")
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise FieldError(f"{where}.arguments", f"cannot be JSON: {error}.") from None
        calls.append(ToolCall(name=name, arguments=arguments, id=id_))
    return tuple(calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """The description of a tool that the model reads."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""

    def __post_init__(self) -> None:
        _make_plain(self, "tool", "name", "description")
        parameters = plain_json(self.parameters, f"tool {self.name}: parameters")
        if not isinstance(parameters, dict):
            raise DataError(f"tool {self.name}: parameters must be a JSON schema (an object).")
        object.__setattr__(self, "parameters", parameters)

    @classmethod
    def from_dict(cls, source: Any, *, where: str = "a tool") -> ToolSchema:
        """Reads the OpenAI form, nested under "function", or flat. Raises DataError; its text
        begins with `where`."""
        of_call = cast("Mapping[str, Any]", source if isinstance(source, Mapping) else {})
        inside: Any = of_call.get("function", of_call)
        body = cast("Mapping[str, Any]", inside if isinstance(inside, Mapping) else {})
        if not isinstance(body.get("name"), str):
            raise DataError(
                f"{where} must be an object with name, description and parameters, or "
                '{"type": "function", "function": {...}}.'
            )
        return cls(
            name=body["name"],
            description=body.get("description") or "",
            parameters=body.get("parameters") or {"type": "object", "properties": {}},
        )


# ---------------------------------------------------------------------------------------------
# Engine traffic
# ---------------------------------------------------------------------------------------------

Distribution = Literal["model", "tempered", "sampled"]
FinishReason = Literal["stop", "length", "abort", "weight_update"]


PACKED = -1
"""First value of a token's support that is packed: a bit for each id follows."""
PACKED_FROM = 1024
"""Ids of a support that are always listed. A nucleus is smaller; what a grammar allows inside a
string is nearly the vocabulary."""


def pack_support(kept: npt.NDArray[np.bool_]) -> Int32Array:
    """The support of one token from kept [V]: its ids in order, or if that is shorter, -1 and a bit
    for each id of the vocabulary, 32 in a value. Empty if all are kept.

    >>> pack_support(np.arange(8) % 3 == 0).tolist()
    [0, 3, 6]
    >>> words = pack_support(np.arange(200_000) != 33)
    >>> len(words), words[:3].tolist()
    (6251, [-1, -1, -3])
    """
    ids = np.flatnonzero(kept).astype(np.int32)
    if len(ids) == len(kept):
        return ids[:0]
    if len(ids) <= max(PACKED_FROM, len(kept) // 32):
        return ids
    bits = np.zeros(-(-len(kept) // 32) * 32, np.bool_)
    bits[: len(kept)] = kept
    words = np.packbits(bits, bitorder="little").view("<i4")
    return np.concatenate([np.array([PACKED], np.int32), words]).astype(np.int32)


def packed_tokens(support: Ragged) -> npt.NDArray[np.bool_]:
    """[T]: whether each token's support is packed."""
    is_packed, some = np.zeros(len(support), np.bool_), support.sizes > 0
    is_packed[some] = support.values[support.offsets[:-1][some]] == PACKED
    return is_packed & (support.sizes > 1)


def listed_ids(support: Ragged) -> Int32Array:
    """The ids of all tokens whose support is a list of ids."""
    return support.values[~np.repeat(packed_tokens(support), support.sizes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request."""

    max_tokens: int
    """Largest number of tokens to sample, the stop token included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end sampling. The stop id is kept and trained: the model chose it."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end sampling, matched on the bytes of the sampled tokens, across token borders.
    Nothing is trimmed."""
    distribution: Distribution = "tempered"
    """Distribution of the recorded log-probs: softmax(logits) ("model"), softmax(logits /
    temperature) ("tempered"), or the latter after top-k and top-p, renormalised ("sampled"). Greedy
    requests record the model's."""
    record_support: bool = False
    """Return `Delta.support` with the tokens of a truncated request. Needs distribution "sampled",
    whose log-probs are over the support."""
    record_routes: bool = False
    """Return `Delta.routed_experts`, the experts that processed the tokens."""
    grammar: str = ""
    """Grammar of the reply (`engines.grammar`): tokens are drawn from the ids that it allows. Needs
    distribution "sampled", unless the request is greedy."""

    def __post_init__(self) -> None:
        is_drawn_so = self.distribution == "sampled"
        needed = f"needs distribution='sampled', found {self.distribution!r}"
        for is_right, text in (
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens} must be at least 1"),
            (self.temperature >= 0, f"temperature={self.temperature} must be at least 0"),
            (0 < self.top_p <= 1, f"top_p={self.top_p} must lie in (0, 1]"),
            (self.top_k >= 0, f"top_k={self.top_k} must be at least 0 (0 is off)"),
            ("" not in self.stop_strings, "an empty stop string would stop at once"),
            (is_drawn_so or not self.record_support, f"record_support=True {needed}"),
            (is_drawn_so or not self.grammar or self.temperature == 0, f"a grammar {needed}"),
        ):
            if not is_right:
                raise ConfigError(f"sampling: {text}.")

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from only a part of the vocabulary."""
        return self.temperature > 0 and (self.is_filtered or bool(self.grammar))

    @property
    def is_filtered(self) -> bool:
        """True if top-p or top-k is on."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One generation: the ids that an engine is to continue.

    `id` is idempotent: an engine that gets the same id twice answers once. `seed` and the position
    decide every draw, never the batch, so a request repeats alone or among others.
    """

    id: str
    prompt_ids: Int32Array
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    """Requests with a lower value run first."""
    affinity: str = ""
    """Equal for requests that share a prefix: a pool sends them to one replica."""
    adapter: str = ""
    """Name of the adapter that samples; none is the base model."""
    stream: bool = False
    """Return one delta per token, instead of one at the end."""
    routes_from: int = 0
    """First position whose routes are returned, with `SamplingParams.record_routes`. The path
    already has those before it (`Trajectory.num_routed`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    """An engine's answer: the next sampled ids of one request, with their log-probs.

    len(token_ids) == len(logprobs). Only the last delta of a request has a `finish_reason`; but
    "weight_update" ends a segment, and more deltas follow it.

    >>> delta = Delta(
    ...     token_ids=frozen_ids([7, 9], where="here"), logprobs=np.array([-0.1, -2.0], np.float32),
    ...     policy_version=3, finish_reason="stop", stop=9,
    ... )
    >>> delta.token_ids.tolist(), delta.stop
    ([7, 9], 9)
    """

    token_ids: Int32Array
    logprobs: Float32Array
    """[T] float32, natural log, of `token_ids` under `SamplingParams.distribution`."""
    policy_version: int
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    """The stop id or string that ended the request."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused; on the first delta."""
    num_prefilled_tokens: int = 0
    """Prompt tokens that were computed; on the first delta."""
    routed_experts: Routes | None = None
    """Routes of the positions processed for these tokens: from `Request.routes_from`, later from
    the end of the delta before, up to but without the last of `token_ids`, which was drawn and not
    yet read. Empty where no token was sampled. None unless asked for."""
    support: Ragged | None = None
    """Ids that top-k and top-p left to draw from, for each of `token_ids`; an empty entry is the
    whole vocabulary. None unless the request is truncated and asks for it."""
    fingerprint: str = ""
    """Fingerprint of the numerics behind `logprobs` (`ops.contract.Fingerprint.text`); empty:
    unknown."""
    first: int | None = None
    """Index of the first of `token_ids` among all sampled ids of the request, which reveals deltas
    that came twice, late or never; None if the engine does not say."""


# ---------------------------------------------------------------------------------------------
# The token forest
# ---------------------------------------------------------------------------------------------

Status = Literal["running", "finished", "truncated", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A run of ids of a trajectory that was either sampled or observed as a whole. Immutable.

    Made by `Trajectory.observe` and `Trajectory.record`, which check the invariants.

    >>> t = Trajectory(id="demo")
    >>> turn = t.record([3, 4], logprobs=[-1, -2], parent=t.observe([5]), prompt_ids=[5])
    >>> segment = t.segments[turn]
    >>> segment.parent, segment.token_ids.tolist(), segment.is_sampled, segment.turn
    (0, [3, 4], True, 0)
    """

    parent: int | None
    """Index of the parent in `Trajectory.segments`, always smaller than this segment's own."""
    token_ids: Int32Array
    is_sampled: bool
    turn: int
    """Turn it belongs to: number of sampled turns that end before it on its path."""
    logprobs: Float32Array | None = None
    """[T] float32 for a sampled segment, None for an observed one. There is no filler value."""
    policy_version: int | None = None
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    sampling: SamplingParams | None = None
    messages: tuple[Message, ...] = ()
    """The same in words, for people, tools and reports. Never encoded again."""
    reason: str = ""
    """Reason for another child of the same parent: "retry", "compaction", ..."""
    reward: float | None = None
    """Reward of this segment alone, in addition to the leaf's."""
    fingerprint: str = ""
    """Fingerprint of the numerics behind `logprobs`."""
    routed_experts: Routes | None = None
    """Routes of its ids: of all if they were observed, of all but the last if they were sampled (a
    request ends before its last id is read). None if they were not captured."""
    boundary_routes: Routes | None = None
    """[layers, active]: routes of the parent's last id, which was read with this segment's prompt.
    None if the parent has them, or they were not captured."""
    support: Ragged | None = None
    """Per id, the ids that it was drawn from; `logprobs` are normalised over them. An empty entry
    means the whole vocabulary. None if nothing was cut, or the support was not recorded."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def ends_turn(self) -> bool:
        """True if a sampled turn ends with it; new weights only interrupt one."""
        return self.is_sampled and self.finish_reason != "weight_update"


class SampledFacts(TypedDict, total=False):
    """Fields of a sampled `Segment` that `Trajectory.record` stores as they are."""

    policy_version: int
    finish_reason: FinishReason
    stop: int | str | None
    sampling: SamplingParams | None
    reason: str
    fingerprint: str
    support: Ragged | None


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Layout of a per-token column. Packing, sharding and storage follow it."""

    dtype: str
    fill: float | int | None = None
    """Value at observed tokens and padding. None for a ragged column, whose entry is empty
    there."""
    trailing_shape: Sequence[int | str] = ()
    """Shape of one token's entry. A name is a size of the model, equal for all rows of a batch."""
    is_ragged: bool = False
    """True if tokens have varying numbers of values: the column is a `Ragged`, not an array."""
    is_of_inputs: bool = False
    """True if the column describes how a token is read, not how it was predicted. Then every token
    fed to the model has an entry, not only the trained tokens."""


_TABLES = tables_beside(__file__)
COLUMNS: dict[str, ColumnSpec] = {
    name: ColumnSpec(**fields) for name, fields in _TABLES["columns"].items()
}
"""Every column by name. A log-prob that does not exist is NaN, so that its use is noticed."""


@dataclass(slots=True, eq=False)
class Sample:
    """One training row: the tokens from root to leaf, and which of them are trained.

    Every column has one entry per token, at the token's own index: the shift to "position t
    predicts token t+1" happens in `training/packing.py` and nowhere else.

    A two-turn episode: prompt 1 2, sampled 3 4, tool reply 5, sampled 6.

    >>> t = Trajectory(id="demo")
    >>> a = t.record([3, 4], logprobs=[-1, -2], parent=t.observe([1, 2]), prompt_ids=[1, 2])
    >>> reply = t.observe([5], parent=a)
    >>> b = t.record([6], logprobs=[-3], parent=reply, prompt_ids=[1, 2, 3, 4, 5])
    >>> row = t.row(b)
    >>> row.token_ids.tolist(), row.loss_mask.astype(int).tolist()
    ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    >>> row.columns["rollout_logprobs"].tolist(), row.segments
    ([nan, nan, -1.0, -2.0, nan, -3.0], {1: slice(2, 4, None), 3: slice(5, 6, None)})
    """

    id: str
    """`trajectory/leaf`, for messages and reports."""
    token_ids: Int32Array
    """[T] int32."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] bool: trained in this row. False also where another row trains a shared segment."""
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])
    """name -> [T, *trailing_shape]: the dense columns; see COLUMNS."""
    group: int = 0
    """Index of the row's group in its batch."""
    ragged: dict[str, Ragged] = field(default_factory=dict[str, Ragged])
    """name -> T entries: the ragged columns; see COLUMNS."""
    segments: dict[int, slice] = field(default_factory=dict[int, slice])
    """Sampled segment of the trajectory -> its tokens in this row, for those trained in it."""
    fingerprints: tuple[str, ...] = ()
    """Distinct fingerprints of the numerics behind `rollout_logprobs`, in order."""

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        if len(self.loss_mask) != size:
            raise AlignmentError(
                f"sample {self.id}: {size} ids but a loss_mask of {len(self.loss_mask)}."
            )
        if size and self.loss_mask[0]:
            raise AlignmentError(
                f"sample {self.id}: token 0 is marked as trained, but nothing predicts it."
            )
        for name, column in (*self.columns.items(), *self.ragged.items()):
            self._check(name, column)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def leaf(self) -> int:
        """Index of the trajectory's leaf that ends this row."""
        return int(self.id.rpartition("/")[2])

    def set(self, name: str, column: npt.NDArray[Any] | Ragged) -> None:
        """Adds or replaces a column; raises AlignmentError if it is not one entry per token."""
        self._check(name, column)
        if isinstance(column, Ragged):
            self.ragged[name] = column
        else:
            self.columns[name] = column

    def _check(self, name: str, column: npt.NDArray[Any] | Ragged) -> None:
        spec = COLUMNS.get(name)
        if spec is None:
            raise AlignmentError(f"sample {self.id}: unknown column {name!r}; known: {[*COLUMNS]}")
        is_ragged = isinstance(column, Ragged)
        shape = (len(self.token_ids), *spec.trailing_shape)
        found = (len(column),) if isinstance(column, Ragged) else column.shape
        dtype = (column.values if isinstance(column, Ragged) else column).dtype
        is_shaped = len(found) == len(shape) and all(
            isinstance(size, str) or size == there for size, there in zip(shape, found, strict=True)
        )
        if not is_shaped or is_ragged != spec.is_ragged or dtype != np.dtype(spec.dtype):
            expected = "a Ragged of" if spec.is_ragged else "an array of"
            raise AlignmentError(
                f"sample {self.id}: column {name!r} must be {expected} {spec.dtype} "
                f"[{', '.join(map(str, shape))}], found {type(column).__name__} of {dtype} "
                f"{list(found)}."
            )


@dataclass(slots=True, eq=False, kw_only=True)
class Rescorings:
    """Log-probs of an episode from scoring it again by the engine that sampled it."""

    logprobs: dict[int, list[Float32Array]] = field(default_factory=dict[int, list[Float32Array]])
    """Sampled segment -> [T] float32 of its ids, one array per scoring by the weights that sampled
    it."""
    num_scored: int = 0
    """Scorings of a turn that `logprobs` contains, whole or in part."""
    num_overlapped: int = 0
    """Scorings among them that were finished before the last episode of the batch."""
    num_stale: int = 0
    """Scorings dropped because the weights had changed since sampling."""
    num_failed: int = 0
    """Scorings that the engine failed to give."""
    error: str = ""
    """Reason of the first failure."""
    num_prefix_tokens: int = 0
    """Number of ids before the scored ones, over all scorings."""
    num_cached_tokens: int = 0
    """Ids among them whose keys and values were cached."""
    waited_seconds: float = 0.0
    """Seconds that the batch waited for scorings after its last episode had ended."""


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Trajectory:
    """The forest of segments that one episode produced, with a reward per leaf.

    A path from a root to a leaf concatenates to exactly what the engine saw. It only grows.

    >>> t = Trajectory(id="demo")
    >>> p = t.observe([1, 2])
    >>> a = t.record([3, 4], logprobs=[-0.5, -0.1], parent=p, prompt_ids=[1, 2])
    >>> t.row(a).token_ids.tolist(), t.row(a).loss_mask.tolist()
    ([1, 2, 3, 4], [False, False, True, True])
    """

    id: str
    task_id: str = ""
    seat: str = ""
    """Seat of a match that it was played from; "" where one policy plays alone."""
    policy: str = ""
    """Who played it, if not the policy of the run: a frozen one, or the one of its seat."""
    segments: list[Segment] = field(default_factory=list[Segment])
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """leaf -> reward."""
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])
    """Named parts of the episode's score, before they are weighed."""
    status: Status = "running"
    """finished: ended by the environment. truncated: ended by a budget. failed: never trained."""
    error: str = ""
    """Reason why it failed or was truncated."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Counters of the episode: tool errors, timeouts, tokens encoded, ..."""
    rescorings: Rescorings | None = None
    """Repeated scorings of its turns by the engine; not stored."""

    def __repr__(self) -> str:
        num_tokens = sum(len(segment) for segment in self.segments)
        return (
            f"Trajectory({self.id!r}, {self.status}, {self.num_turns} turns, {num_tokens} tokens, "
            f"reward {number(self.reward)})"
        )

    def _repr_html_(self) -> str:
        """The dialogue in a notebook: a row per segment, with its messages where it has any."""
        rows: list[tuple[Any, ...]] = []
        for index, segment in enumerate(self.segments):
            origin = f"sampled, turn {segment.turn + 1}" if segment.is_sampled else "observed"
            origin += f" ({segment.reason})" if segment.reason else ""
            lines = [line for message in segment.messages for line in message.lines()]
            parent = "" if segment.parent is None else segment.parent
            reward = self.rewards.get(index, "")
            rows.append((index, parent, origin, len(segment), "\n".join(lines), reward))
        head = ("segment", "after", "origin", "tokens", "messages", "reward")
        parts = [f"{name} {number(value)}" for name, value in self.reward_parts.items()]
        notes = ", ".join(filter(None, [*parts, self.error]))
        return block(repr(self), table([(notes,)]) if notes else "", table(rows, head=head))

    # -- growing ------------------------------------------------------------------------------

    def observe(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        *,
        parent: int | None = None,
        messages: Sequence[Message] = (),
        reason: str = "",
    ) -> int:
        """Adds ids that the model did not choose (prompt, tool reply). Returns the index."""
        ids = frozen_ids(token_ids, where=self._next(parent))
        return self._add(parent, ids, messages, is_sampled=False, reason=reason)

    def record(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        *,
        logprobs: Sequence[float] | npt.NDArray[Any],
        parent: int,
        prompt_ids: Sequence[int] | npt.NDArray[Any],
        messages: Sequence[Message] = (),
        routed_experts: Routes | None = None,
        routes_from: int = 0,
        **facts: Unpack[SampledFacts],
    ) -> int:
        """Adds ids that the model sampled after `prompt_ids`. Returns the index.

        routed_experts: routes of the positions from `routes_from` on, as in `Delta`. They are
        given to the segments that they belong to: this one, and those above it that have none.
        facts: version 0 and the finish reason "stop" unless given.

        Raises RoutingReplayError if they leave a gap in the path's routes. Raises TokenError if the
        row would differ from the model's actions: the prompt was not the path to `parent`, the
        log-probs are not one finite non-positive number per id, the stop id is not the last one, or
        an id is not in its support.
        """
        where = self._next(parent)
        ids = frozen_ids(token_ids, where=where)
        self._check_prompt(where, parent, prompt_ids)
        values = np.array(logprobs, dtype=np.float32).reshape(-1)
        _check_logprobs(where, ids, values)
        _check_stop(where, ids, facts.get("stop"))
        if (support := facts.get("support")) is not None:
            _check_support(where, ids, support)
        own_routes = boundary_routes = None
        if routed_experts is not None:
            self._check_routes(where, parent, len(ids), routed_experts, routes_from)
            if len(ids):
                own_routes, boundary_routes = self._lay_routes(parent, routed_experts, routes_from)
        if num_above := int((values > 0).sum()):
            self.metrics["clamped_logprobs"] = self.metrics.get("clamped_logprobs", 0) + num_above
            np.minimum(values, 0.0, out=values)
        values.setflags(write=False)
        stored = SampledFacts(policy_version=0, finish_reason="stop") | facts
        routes = {"routed_experts": own_routes, "boundary_routes": boundary_routes}
        return self._add(
            parent, ids, messages, is_sampled=True, logprobs=values, **routes, **stored
        )

    def set_segment_reward(self, index: int, reward: float) -> None:
        """Gives a sampled segment a reward of its own, in addition to its leaf's."""
        if not self.segments[index].is_sampled:
            raise TokenError(
                f"trajectory {self.id}, segment {index}: only a sampled segment can have a reward."
            )
        self.segments[index] = replace(self.segments[index], reward=float(reward))

    # -- reading ------------------------------------------------------------------------------

    def path(self, leaf: int) -> list[int]:
        """Indices of the segments from the root to `leaf`, both included."""
        out: list[int] = []
        at: int | None = leaf
        while at is not None:
            out.append(at)
            at = self.segments[at].parent
        return out[::-1]

    def path_ids(self, leaf: int | None) -> Int32Array:
        """The ids from the root to the end of `leaf`, as the engine read them; empty for None."""
        return self.ids_of([] if leaf is None else self.path(leaf))

    def ids_of(self, segments: Iterable[int]) -> Int32Array:
        """The ids of these segments, one after another."""
        ids = [self.segments[index].token_ids for index in segments]
        return np.concatenate([np.empty(0, np.int32), *ids])

    def turn_of(self, leaf: int) -> list[int]:
        """The segments of the turn that ends with `leaf`: one, or one per policy version."""
        out, above = [leaf], self.segments[leaf].parent
        while above is not None and self.segments[above].finish_reason == "weight_update":
            out.append(above)
            above = self.segments[above].parent
        return out[::-1]

    def runs(self, leaf: int) -> list[list[int]]:
        """The path to `leaf`, with the segments of each turn together: a turn that spans weight
        updates has several."""
        runs: list[list[int]] = [[]]
        for index in self.path(leaf):
            runs[-1].append(index)
            if self.segments[index].finish_reason != "weight_update":
                runs.append([])
        return runs[:-1]

    def num_routed(self, leaf: int) -> int:
        """Number of positions with routes, without a gap, from the beginning of the path to `leaf`:
        the `routes_from` of a request that continues it."""
        path = [self.segments[i] for i in self.path(leaf)]
        total = 0
        for segment, child in zip(path, [*path[1:], None], strict=True):
            known = 0 if segment.routed_experts is None else len(segment.routed_experts)
            if child is not None and child.boundary_routes is not None:
                known += 1
            total += known
            if known < len(segment):
                break
        return total

    def leaves(self) -> list[int]:
        """Segments without children, in order of creation."""
        parents = {s.parent for s in self.segments}
        return [i for i in range(len(self.segments)) if i not in parents]

    def messages(self, leaf: int) -> list[Message]:
        return [m for i in self.path(leaf) for m in self.segments[i].messages]

    @property
    def reward(self) -> float:
        """Mean over the rewarded leaves; NaN before the first reward."""
        return float(np.mean(list(self.rewards.values()))) if self.rewards else float("nan")

    @property
    def match(self) -> str:
        """Id of the match; "" without a seat. The trajectories of its seats have ids below it."""
        return self.id.rpartition("/")[0] if self.seat else ""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(s) for s in self.segments if s.is_sampled)

    @property
    def num_turns(self) -> int:
        return sum(s.ends_turn for s in self.segments)

    def row(self, leaf: int, *, owned: set[int] | None = None) -> Sample:
        """The path to `leaf` as a training row.

        owned: segments that this row trains; None trains every sampled one. The final tokens of the
        last turn are part of the row because they are part of the path. Where a segment has
        routes, the column `routed_experts` has them, and UNKNOWN_EXPERT at all other positions;
        the row's last is always one of these, since no request has read it.
        """
        path = self.path(leaf)
        segments = [self.segments[i] for i in path]
        ends = np.cumsum([len(s) for s in segments]).tolist()
        trained = {
            i: slice(end - len(s), end)
            for i, s, end in zip(path, segments, ends, strict=True)
            if s.is_sampled and (owned is None or i in owned)
        }

        def column(dtype: str, values: list[Any]) -> npt.NDArray[Any]:
            return np.concatenate(
                [
                    np.asarray(v, dtype) if np.ndim(v) else np.full(len(s), v, dtype)
                    for s, v in zip(segments, values, strict=True)
                ]
            )

        logprobs = [float("nan") if s.logprobs is None else s.logprobs for s in segments]
        versions = [-1 if s.policy_version is None else s.policy_version for s in segments]
        turns = [s.turn if s.is_sampled else -1 for s in segments]
        return Sample(
            id=f"{self.id}/{leaf}",
            token_ids=np.concatenate([s.token_ids for s in segments]),
            loss_mask=column("bool", [i in trained for i in path]),
            segments=trained,
            ragged=_support_of(segments),
            fingerprints=tuple(dict.fromkeys(s.fingerprint for s in segments if s.is_sampled)),
            columns={
                "rollout_logprobs": column("float32", logprobs),
                "policy_version": column("int32", versions),
                "turn": column("int32", turns),
                **_routes_of(segments),
            },
        )

    def rows(self) -> Iterator[Sample]:
        """The row of every rewarded path that has something to train, in order of their ends.

        A sampled segment is trained in the row of the first rewarded path through it, so each
        sampled token is trained once. Segments behind a rewarded end are not trained, and neither
        is what another policy sampled.
        """
        taken: set[int] = set()
        for leaf in () if self.policy else sorted(self.rewards):
            owned = {i for i in self.path(leaf) if self.segments[i].is_sampled} - taken
            taken |= owned
            if owned:
                yield self.row(leaf, owned=owned)

    # -- invariants ---------------------------------------------------------------------------

    def _next(self, parent: int | None) -> str:
        """A name for the segment that is about to be added, for errors; checks its parent."""
        where = f"trajectory {self.id}, segment {len(self.segments)} (parent {parent})"
        if parent is not None and not 0 <= parent < len(self.segments):
            raise TokenError(f"{where}: there are only {len(self.segments)} segments.")
        return where

    def _check_prompt(
        self, where: str, parent: int, prompt_ids: Sequence[int] | npt.NDArray[Any]
    ) -> None:
        expected, sent = self.path_ids(parent), np.asarray(prompt_ids)
        if len(expected) != len(sent):
            raise TokenError(
                f"{where}: the prompt sent to the engine has {len(sent)} ids, its path has "
                f"{len(expected)}. A turn was rendered anew or cut."
            )
        differs = np.flatnonzero(expected != sent)
        if differs.size:
            at = int(differs[0])
            raise TokenError(
                f"{where}: the prompt sent to the engine differs from its path at token {at}: "
                f"{int(sent[at])} was sent, {int(expected[at])} is recorded."
            )

    def _check_routes(
        self, where: str, parent: int, num_ids: int, routes: Routes, routes_from: int
    ) -> None:
        """Raises RoutingReplayError unless the routes begin at or before the end of the path's
        routes and end before the last sampled id."""
        if routes.ndim != 3 or routes.dtype.name not in ("uint8", "int16"):
            raise RoutingReplayError(
                f"{where}: routes must be uint8 or int16 [positions, layers, active], found "
                f"{routes.dtype} {list(routes.shape)}."
            )
        num_prompt, known = len(self.path_ids(parent)), self.num_routed(parent)
        end = num_prompt + num_ids - 1
        found = f"{where}: the engine returned the routes of {len(routes)} positions from "
        if routes_from > known:
            raise RoutingReplayError(
                f"{found}{routes_from} on, but the path has routes only up to {known}: positions "
                f"{known} to {routes_from - 1} would have none. Ask with routes_from="
                "Trajectory.num_routed(parent)."
            )
        if routes_from + len(routes) != end:
            raise RoutingReplayError(
                f"{found}{routes_from} on; expected {end - routes_from}: {num_prompt} prompt ids "
                f"and {num_ids} sampled ones; the last id is not read. Did the engine leave out "
                "prompt ids from its prefix cache, or the boundary to the turn before?"
            )
        above = (self.segments[i].routed_experts for i in self.path(parent))
        other = next((r.shape[1:] for r in above if r is not None), routes.shape[1:])
        if routes.shape[1:] != other:
            raise RoutingReplayError(
                f"{where}: routes of {routes.shape[1]} layers x {routes.shape[2]} experts after "
                f"a path with {other[0]} x {other[1]}. Another model?"
            )

    def _lay_routes(
        self, parent: int, routes: Routes, routes_from: int
    ) -> tuple[Routes, Routes | None]:
        """Gives the segments of the path to `parent` the routes that they lack. Returns the routes
        of the next segment, and the routes of its parent's last id."""
        routes = routes.copy()
        routes.setflags(write=False)
        at, end = self.num_routed(parent), 0
        boundary: Routes | None = None
        for index in self.path(parent):
            segment = self.segments[index]
            if boundary is not None:
                segment = replace(segment, boundary_routes=boundary)
                boundary = None
            begin, end = end, end + len(segment)
            own_end = end - segment.is_sampled
            if at < own_end:
                assert at == begin, "a segment has the routes of all its positions or of none"
                part = routes[at - routes_from : own_end - routes_from]
                segment = replace(segment, routed_experts=part)
            if at <= own_end < end:
                boundary = routes[own_end - routes_from]
            at = max(at, end)
            self.segments[index] = segment
        return routes[at - routes_from :], boundary

    def _add(
        self, parent: int | None, ids: Int32Array, messages: Sequence[Message], **fields: Any
    ) -> int:
        """Adds a segment with these other fields. Returns its index."""
        where, said = self._next(parent), tuple(messages)
        above = None if parent is None else self.segments[parent]
        turn = 0 if above is None else above.turn + above.ends_turn
        segment = Segment(parent=parent, token_ids=ids, turn=turn, messages=said, **fields)
        if segment.is_sampled and parent is None:
            raise TokenError(f"{where}: a sampled segment needs a prompt before it.")
        if not len(ids):
            raise TokenError(f"{where}: it has no ids.")
        self.segments.append(segment)
        return len(self.segments) - 1


def _check_logprobs(where: str, ids: Int32Array, logprobs: Float32Array) -> None:
    if len(logprobs) != len(ids):
        raise TokenError(f"{where}: {len(ids)} sampled ids but {len(logprobs)} log-probs.")
    bad = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_LOGPROB))
    if bad.size:
        at = int(bad[0])
        raise TokenError(
            f"{where}: token {at} (id {int(ids[at])}) has the log-prob {logprobs[at]:g}; "
            f"expected a finite number <= {MAX_LOGPROB:g}. Probabilities, or a shifted row?"
        )


def _check_stop(where: str, ids: Int32Array, stop: int | str | None) -> None:
    if not isinstance(stop, int):
        return
    places = np.flatnonzero(ids == stop)
    if not places.size or places[0] != len(ids) - 1:
        found = f"token {int(places[0])} of {len(ids)}" if places.size else "missing"
        raise TokenError(
            f"{where}: the stop id {stop} must be the last sampled id, and is {found}."
        )


def _check_support(where: str, ids: Int32Array, support: Ragged) -> None:
    if len(support) != len(ids):
        raise TokenError(f"{where}: {len(ids)} sampled ids but a support of {len(support)} tokens.")
    listed = listed_ids(support)
    if listed.size and int(listed.min()) < 0:
        raise TokenError(f"{where}: the support has the id {int(listed.min())}; ids are 0..2^31-1.")
    sizes, is_packed = support.sizes, packed_tokens(support)
    is_found = np.zeros(len(ids), np.bool_)
    token_of = np.repeat(np.arange(len(ids)), sizes)
    is_found[token_of[support.values == ids[token_of]]] = True
    for at in np.flatnonzero(is_packed).tolist():
        word, bit = divmod(int(ids[at]), 32)
        words = support[at][1:]
        is_found[at] = word < len(words) and bool(int(words[word]) >> bit & 1)
    missing = np.flatnonzero(~is_found & (sizes > 0))
    if missing.size:
        at = int(missing[0])
        shown = ", ".join([*map(str, support[at][:8].tolist()), *["..."][: int(sizes[at] > 8)]])
        raise TokenError(
            f"{where}: token {at} (id {int(ids[at])}) is not among the {int(sizes[at])} ids of its "
            f"support ({shown}): it cannot have been drawn from them. A shifted row?"
        )


def _support_of(segments: Sequence[Segment]) -> dict[str, Ragged]:
    """The ragged columns of a path: `support` if any of its segments has one."""
    if all(s.support is None for s in segments):
        return {}
    parts = [Ragged.empty(len(s)) if s.support is None else s.support for s in segments]
    return {"support": Ragged.concatenate(parts)}


def _routes_of(segments: Sequence[Segment]) -> dict[str, npt.NDArray[np.int16]]:
    """The column `routed_experts` of a path; none if no segment has routes."""
    shape = next((s.routed_experts.shape[1:] for s in segments if s.routed_experts is not None), ())
    if not shape:
        return {}
    column = np.full((sum(map(len, segments)), *shape), UNKNOWN_EXPERT, np.int16)
    begin = 0
    for segment in segments:
        if segment.boundary_routes is not None:
            column[begin - 1] = segment.boundary_routes
        if segment.routed_experts is not None:
            column[begin : begin + len(segment.routed_experts)] = segment.routed_experts
        begin += len(segment)
    return {"routed_experts": column}


# ---------------------------------------------------------------------------------------------
# Tasks, groups, batches
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem to solve.

    >>> Task(id="a", payload={"seen": {1}}).problem
    'payload.seen is {1}; expected JSON (text, finite numbers, lists, dicts).'
    """

    id: str
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Content of the task for the environment, as JSON. The task has its own copy, with lists in
    place of tuples."""
    source: str = ""
    """Component of the mixture that it came from; "" if there is one source."""
    problem: str = ""
    """Reason why it cannot be played: its episodes fail with it. Set where the payload is not
    JSON, which is then empty, or the id is not text."""

    def __post_init__(self) -> None:
        try:
            _make_plain(self, "task", "id", "source", "problem")
            payload, problem = plain_json(self.payload, "payload"), self.problem
            if not isinstance(payload, dict):
                raise DataError(f"payload is {shortened(payload)}; expected a dict.")
        except Exception as error:  # a strange object may raise anything where it is read
            payload, problem = dict[str, Any](), named(error).removeprefix("DataError: ")
            for name in ("id", "source"):
                if not isinstance(getattr(self, name), str):
                    object.__setattr__(self, name, shortened(getattr(self, name)))
        object.__setattr__(self, "payload", payload)
        object.__setattr__(self, "problem", problem)

    @property
    def reference(self) -> str | None:
        """The expected answer, shown to readers of a run beside the reply: the payload's `answer`;
        None where it has none."""
        answer = self.payload.get("answer")
        return answer if isinstance(answer, str | None) else json.dumps(answer, ensure_ascii=False)


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """Several trajectories of one task: the unit of a group baseline."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trajectories that did not fail."""
        return [t.reward for t in self.trajectories if t.status != "failed"]

    @property
    def has_signal(self) -> bool:
        """True if rewards differ within a seat of the run's policy. Only then does a group baseline
        separate good episodes from bad ones."""
        for part in self.by_seat():
            scored = [t for t in part.trajectories if t.status != "failed" and t.rewards]
            if len({t.reward for t in scored if not t.policy}) > 1:
                return True
        return False

    def by_seat(self) -> list[Group]:
        """Groups for the baseline: one per seat over all matches of the task, so that no seat is
        compared with its opponent. Several players of one seat in a match had the same opponent;
        they form a group of their own.

        >>> def played(id, seat):
        ...     return Trajectory(id=id, seat=seat)
        >>> whole = Group(task=Task(id="t"), trajectories=[
        ...     *(played(f"t/{m}/proposer", "proposer") for m in (0, 1)),
        ...     *(played(f"t/{m}/solver-{n}", "solver") for m in (0, 1) for n in (0, 1)),
        ... ])
        >>> for part in whole.by_seat():
        ...     print(*(t.id for t in part.trajectories))
        t/0/proposer t/1/proposer
        t/0/solver-0 t/0/solver-1
        t/1/solver-0 t/1/solver-1
        """
        players = Counter((t.seat, t.match) for t in self.trajectories)
        crowded = {seat for (seat, _), count in players.items() if count > 1}
        parts: dict[tuple[str, str], list[Trajectory]] = {}
        for trajectory in self.trajectories:
            match = trajectory.match if trajectory.seat in crowded else ""
            parts.setdefault((trajectory.seat, match), []).append(trajectory)
        return [Group(task=self.task, trajectories=found) for found in parts.values()]
