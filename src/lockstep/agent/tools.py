"""Typed Python functions as tools: their schemas, and how calls are run.

A call never breaks the run. A tool that raises, hangs, returns megabytes or was called wrongly
becomes text that the model reads, and a counter in the metrics.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import contextvars
import functools
import inspect
import itertools
import json
import random
import re
import threading
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation
from lockstep.agent.guard import (
    ForeignExit,
    Settled,
    TookTooLong,
    checked_numbers,
    guarded,
    result_of,
    settle,
)
from lockstep.agent.json_schema import JSON_TYPES, json_type, mismatch
from lockstep.errors import ConfigError, SandboxError, ToolServerError, shortened
from lockstep.launch.process_state import AT_START, put_back
from lockstep.renderers.calls import load_json
from lockstep.types import Message, ToolCall, ToolSchema

MAX_NAME_CHARS = 64
"""Length of a name that the model made up; the reply is addressed to it."""

_OPEN = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
"""A schema with one of these at its top may name arguments elsewhere than under "properties"."""

# ---------------------------------------------------------------------------------------------
# Function to schema
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool(ToolSchema):
    """A schema with its function. Made by `tool`."""

    function: Callable[..., Any]
    """Called with keyword arguments. A plain function runs in a thread of its own, a coroutine
    function on the event loop."""
    is_instant: bool = False
    """Call the plain function on the event loop, without a thread and without a time limit: for
    functions that only compute, in well under a millisecond."""
    bounds_itself: bool = False
    """The coroutine function keeps a time limit of its own and is awaited for as long as it takes:
    a call's wait for a free sandbox is not the model's fault."""
    parallel: bool = True
    """Run calls of one turn at once. Otherwise a call begins when the calls before it have ended,
    and those after it wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Result of a function that wants to count something; plain text otherwise."""

    text: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Added to the trajectory's."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the output's text is {shortened(self.text)}; expected text")
        object.__setattr__(self, "text", str.__str__(self.text))
        object.__setattr__(self, "metrics", checked_numbers(self.metrics, "metrics"))


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    is_instant: bool = False,
    parallel: bool | None = None,
) -> Any:
    """Makes a typed function a tool; also a decorator, with or without arguments.

    The schema comes from the signature: str, int, float, bool, None, list[T], dict[str, T],
    Literal, unions, Optional, defaults, and `Annotated[T, "its meaning"]`. The docstring's text
    before "Args:" is the description, its "Args:" section describes parameters.

    parallel: see `Tool`. None: yes for a function, and no for a method, which shares the state of
    its object with other calls.

    >>> @tool
    ... def add(a: int, b: int = 1) -> int:
    ...     "Adds two numbers."
    ...     return a + b
    >>> add.parameters["properties"]["b"]
    {'type': 'integer', 'default': 1}

    Raises ConfigError for a parameter without a type, or of one that JSON cannot carry.
    """
    if function is None:
        options: dict[str, Any] = {"is_instant": is_instant, "parallel": parallel}
        return lambda f: tool(f, name=name, description=description, **options)
    return Tool(
        name=name or getattr(function, "__name__", type(function).__name__),
        description=description or _split_docstring(function)[0],
        parameters=_parameters_schema(function),
        function=function,
        is_instant=is_instant,
        parallel=not inspect.ismethod(function) if parallel is None else parallel,
    )


def _parameters_schema(function: Callable[..., Any]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    where = f"tool {getattr(function, '__qualname__', type(function).__name__)}"
    try:
        hints = typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: a type cannot be resolved: {error}.") from error
    described = _split_docstring(function)[1]
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        at = f"{where}, parameter {name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{at}: *args and **kwargs have no schema; name every parameter.")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{at}: tools are called by keyword; remove the '/'.")
        if name not in hints:
            raise ConfigError(f"{at}: has no type. Write one, for example `{name}: str`.")
        schema = _type_schema(hints[name], at)
        if name in described and "description" not in schema:
            schema["description"] = described[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            try:
                json.dumps(parameter.default, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{at}: its default is not JSON: {error}.") from error
            schema["default"] = parameter.default
        properties[name] = schema
    return {"type": "object", "properties": properties, "required": required}


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        schema = _type_schema(args[0], where)
        texts = [text for text in args[1:] if isinstance(text, str)]
        return {**schema, "description": texts[0]} if texts else schema
    if hint is Any:
        return {}
    hint = type(None) if hint is None else hint
    if isinstance(hint, type) and hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is Literal:
        kinds = {type(value) for value in args}
        if len(kinds) > 1 or not kinds <= JSON_TYPES.keys():
            raise ConfigError(f"{where}: the values of {hint} must be of one plain type.")
        return {"type": JSON_TYPES[kinds.pop()], "enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        options = [_type_schema(arg, where) for arg in args]
        if all(set(option) == {"type"} and isinstance(option["type"], str) for option in options):
            return {"type": [option["type"] for option in options]}
        return {"oneOf": options}  # harmony reads oneOf, not anyOf
    if origin in (list, collections.abc.Sequence):
        return {"type": "array", "items": _type_schema(args[0] if args else Any, where)}
    if origin in (dict, collections.abc.Mapping):
        key, value = args or (str, Any)
        if key is not str:
            raise ConfigError(f"{where}: JSON objects have text keys; found {hint}.")
        return {"type": "object", "additionalProperties": _type_schema(value, where)}
    raise ConfigError(
        f"{where}: the type {hint} has no JSON schema here. Use str, int, float, bool, None, "
        "list[T], dict[str, T], Literal[...], unions of these, or Annotated[T, 'text']."
    )


def _split_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(text before "Args:", parameter -> text), of a docstring in the Google style."""
    text = inspect.getdoc(function) or ""
    if not inspect.isroutine(function) and function.__doc__ == type(function).__doc__:
        text = inspect.getdoc(type(function).__call__) or text
    head, *rest = re.split(r"^(?:Args|Arguments|Parameters):[ ]*$", text, maxsplit=1, flags=re.M)
    described: dict[str, str] = {}
    if rest:
        section = re.split(r"^\S", rest[0], maxsplit=1, flags=re.M)[0]
        for name, words in re.findall(
            r"^[ ]+(\w+)(?: *\([^)]*\))?: *(.*(?:\n(?![ ]+\w+(?: *\([^)]*\))?:).*\S.*)*)",
            section,
            flags=re.M,
        ):
            described[name] = " ".join(words.split())
    head = re.split(r"^(?:Returns|Raises|Yields):[ ]*$", head, maxsplit=1, flags=re.M)[0]
    return head.strip(), described


# ---------------------------------------------------------------------------------------------
# Call to arguments
# ---------------------------------------------------------------------------------------------


def parse_arguments(text: str, schema: ToolSchema) -> dict[str, Any]:
    """Parses the model's arguments and checks them against the schema of the tool.

    Raises ValueError whose text is written for the model. A whole number is accepted where a float
    is expected, 3.0 where an integer is, and nothing else is converted: "3" is not 3. An argument
    that the schema does not name is refused, unless the schema allows others.
    """
    try:
        arguments = load_json(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be a JSON object, found {json_type(arguments)}")
    parameters = dict(schema.parameters)
    if not _OPEN & parameters.keys():
        parameters["additionalProperties"] = False
    if problem := mismatch(arguments, parameters, "the call"):
        raise ValueError(problem.replace("the call.", ""))
    given = parameters.get("properties", {}).items()
    whole = {name for name, of in given if isinstance(of, dict) and of.get("type") == "integer"}
    return {name: int(value) if name in whole else value for name, value in arguments.items()}


# ---------------------------------------------------------------------------------------------
# Running calls
# ---------------------------------------------------------------------------------------------

Outcome = Literal["ok", "errors", "timeouts", "invalid_arguments", "unknown"]
"""Result of a call; all but "ok" are names of counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of one call."""

    timeout_seconds: float = 30.0
    """Seconds until a call is given up. A plain function's thread keeps running as a daemon: Python
    cannot stop it, and the run does not wait for it."""
    output_chars: int = 8192
    """Characters of the output that the model reads; the rest is cut, with a notice."""

    @classmethod
    def of(cls, agent: AgentConfig) -> ToolLimits:
        return cls(timeout_seconds=agent.tool_timeout_seconds, output_chars=agent.tool_output_chars)

    def shown(self, text: str) -> str:
        """Returns the part of an output that the model reads."""
        if len(text) > self.output_chars:
            notice = f"\n[cut: {len(text)} characters in all]"
            text = text[: max(0, self.output_chars - len(notice))] + notice
        # A lone surrogate cannot be encoded as UTF-8, and so not as tokens either.
        return text.encode("utf-8", "replace").decode("utf-8")


class ToolFailure(Exception):
    """Raised by a tool to tell the model this text alone; of any other exception it reads the type
    as well."""

    def __init__(
        self, text: str, *, outcome: Outcome = "errors", metrics: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(str(text))
        if outcome not in get_args(Outcome):
            raise TypeError(f"outcome is {shortened(outcome)}; expected one of {Outcome}")
        self.outcome: Outcome = outcome
        self.metrics = checked_numbers(metrics or {}, "metrics")
        """Counters of the tool itself."""


def check_names(tools: Sequence[ToolSchema], where: str) -> None:
    """Raises ConfigError if two tools share a name. where: says whose they are."""
    names = [entry.name for entry in tools]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(
            f"{where} has tools that share a name: {', '.join(twice)}. A call could mean any of "
            "them: rename all but one, as tool(function, name=...)."
        )


class ToolRunner:
    """Runs calls against a set of tools, within limits. Raises nothing that a tool raises, except
    SandboxError when there is nothing to run code in, and ToolServerError when an environment's
    server cannot be used.

    Counters of `run`: tool/calls, tool/errors, tool/timeouts, tool/truncated,
    tool/invalid_arguments, tool/unknown; and the metrics of each `ToolOutput`.
    """

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits | None = None) -> None:
        self.tools = {entry.name: entry for entry in tools}
        self.limits = limits or ToolLimits()
        check_names(tools, "the environment")

    async def run(self, calls: Sequence[ToolCall]) -> tuple[list[Message], dict[str, float]]:
        """Runs the calls, at once where their tools allow it. Returns one tool message per call, in
        the order of the calls, and counters."""
        found: list[tuple[ToolOutput, Outcome]] = []
        for is_parallel, several in itertools.groupby(calls, self._is_parallel):
            group = list(several)
            if is_parallel and len(group) > 1:
                # Each has draws of its own from global generators, however they interleave.
                jobs = (self.call(call, seed=random.getrandbits(63)) for call in group)
                for ended in await asyncio.gather(*jobs, return_exceptions=True):
                    if isinstance(ended, BaseException):
                        raise ended
                    found.append(ended)
            else:
                found += [await self.call(call) for call in group]
        replies: list[Message] = []
        counters: Counter[str] = Counter()
        for call, (output, outcome) in zip(calls, found, strict=True):
            is_cut = len(output.text) > self.limits.output_chars
            happened = {"calls": True, outcome: outcome != "ok", "truncated": is_cut}
            own = {f"tool/{name}": 1.0 for name, is_so in happened.items() if is_so}
            counters.update({**output.metrics, **own})
            name = call.name[:MAX_NAME_CHARS] or "unknown"
            text = self.limits.shown(output.text)
            replies.append(Message(role="tool", name=name, content=text, tool_call_id=call.id))
        return replies, dict(counters)

    def _is_parallel(self, call: ToolCall) -> bool:
        entry = self.tools.get(call.name)
        return entry is None or (entry.parallel and not entry.is_instant)

    async def call(self, call: ToolCall, *, seed: int | None = None) -> tuple[ToolOutput, Outcome]:
        """Runs one call. Returns what the model reads before it is cut, and the result. seed: of
        `guarded`."""
        if (entry := self.tools.get(call.name)) is None:
            known = ", ".join(self.tools) or "there are none"
            text = f"error: unknown tool {call.name!r}; tools: {known}"
            return ToolOutput(text=text), "unknown"
        parse = functools.partial(parse_arguments, call.arguments, entry)
        try:
            # A schema of somebody else's server may take a second.
            arguments = parse() if entry.is_instant else await asyncio.to_thread(parse)
        except ValueError as error:
            return ToolOutput(text=f"error: {error}"), "invalid_arguments"
        try:
            return await self._invoke(entry, arguments, seed), "ok"
        except (SandboxError, ToolServerError):  # not the model's fault
            raise
        except TookTooLong:
            text = f"error: {entry.name} took longer than {self.limits.timeout_seconds:g} s"
            return ToolOutput(text=text), "timeouts"
        except ToolFailure as error:
            return ToolOutput(text=f"error: {error}", metrics=error.metrics), error.outcome
        except ForeignExit as error:
            is_cancelled = isinstance(error.__cause__, asyncio.CancelledError)
            text = "the tool cancelled itself" if is_cancelled else str(error)
        except Exception as error:
            text, _ = settle(error.__str__)
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return ToolOutput(text=f"error: {text}"), "errors"

    async def _invoke(self, entry: Tool, arguments: dict[str, Any], seed: int | None) -> ToolOutput:
        """Returns the result of a call, or raises TookTooLong or whatever the tool raised."""
        call = functools.partial(entry.function, **arguments)
        if entry.is_instant:
            return result_of(settle(lambda: as_output(call())))
        of_object = getattr(entry.function, "__call__", None)  # noqa: B004 - may be async
        if any(map(inspect.iscoroutinefunction, (entry.function, of_object))):
            seconds = None if entry.bounds_itself else self.limits.timeout_seconds
            return await guarded(call, check=as_output, seconds=seconds, seed=seed)

        def in_thread() -> Any:
            found = call()
            return found if inspect.isawaitable(found) else as_output(found)

        async def awaited() -> Any:  # a decorator may hide that the function is async
            found = result_of(await in_daemon_thread(in_thread))
            return await found if inspect.isawaitable(found) else found

        return await guarded(awaited, check=as_output, seconds=self.limits.timeout_seconds)


def as_output(value: Any) -> ToolOutput:
    """Converts the result of a function to text for the model."""
    if isinstance(value, ToolOutput):
        return ToolOutput(text=value.text, metrics=value.metrics)
    if value is None or isinstance(value, str):
        return ToolOutput(text=value or "")
    if isinstance(value, bytes):
        return ToolOutput(text=value.decode("utf-8", "replace"))
    try:
        return ToolOutput(text=json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return ToolOutput(text=str(value))


def in_daemon_thread(call: Callable[[], Any]) -> asyncio.Future[Settled]:
    """Runs `call` in a thread of its own. Not a pool: hanging calls would use a pool up, and the
    interpreter waits at exit for a pool's threads, but not for daemons."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Settled] = loop.create_future()
    context, at_start = contextvars.copy_context(), AT_START.get()

    def deliver(outcome: Settled) -> None:
        put_back(at_start)  # the call ran beside everything else
        if not future.done():  # else it was given up before the call came back
            future.set_result(outcome)

    def work() -> None:
        outcome = context.run(settle, call)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run ended meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=work, name="lockstep-tool", daemon=True).start()
    return future


# ---------------------------------------------------------------------------------------------
# An environment made of tools
# ---------------------------------------------------------------------------------------------


class ToolEnvironment(Environment):
    """An episode of tool calls that ends with an answer without a call.

    Subclasses give `tools`, `reset` and `score`; the answer is in `answer` by then. A turn that
    cannot be read is answered with the reason, so that the model can try again.

    >>> @tool
    ... def add(a: int, b: int) -> int:
    ...     "Adds two numbers."
    ...     return a + b
    >>> from lockstep.agent.environment import Score
    >>> class Sums(ToolEnvironment):
    ...     tools = (add,)
    ...     async def reset(self):
    ...         return [Message(role="user", content="What is 2 + 3?")]
    ...     async def score(self):
    ...         return Score(reward=float(self.answer == "5"))
    """

    tools: Sequence[Tool] = ()
    limits: ToolLimits = ToolLimits()
    answer: str | None = None
    """The text of the turn that called no tool; None if the episode ended before it."""

    async def step(self, message: Message) -> Observation:
        if message.parse_error:
            return Observation(messages=(unreadable(message),))
        if not message.tool_calls:
            self.answer = message.content
            return Observation(done=True)
        replies, counters = await self.runner.run(message.tool_calls)
        return Observation(messages=replies, metrics=counters)

    @functools.cached_property
    def runner(self) -> ToolRunner:
        """The runner of this episode. It is made on first use, so that `__init__` or `reset` can
        set `tools`."""
        return ToolRunner(self.tools, self.limits)


def unreadable(message: Message) -> Message:
    """Returns the message that follows a turn that could not be read."""
    return Message(
        role="user",
        content=f"Your last message could not be read ({message.parse_error}). "
        "Call a tool or give your answer.",
    )
