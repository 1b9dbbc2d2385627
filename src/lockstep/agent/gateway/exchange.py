"""The border between an HTTP dialect and a session: one turn requested, one turn returned.

A dialect (OpenAI chat completions, Responses, Anthropic messages) reads a body into a `TurnRequest`
and writes a `TurnReply`. A session turns the first into the second, and knows nothing of HTTP but
the status of a `Refusal`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.errors import LockstepError
from lockstep.renderers.base import Constraint
from lockstep.types import FinishReason, Float32Array, Int32Array, Message, ToolSchema


class Refusal(LockstepError):
    """A request that gets no turn. The text names the expected and the found value, and the next
    step.

    status: of HTTP. code: short and stable, for programs (`unknown_session`, `context_overflow`).
    parameter: the field of the body, if the refusal is about one.
    """

    def __init__(self, status: int, code: str, message: str, *, parameter: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One requested turn, in any dialect."""

    messages: tuple[Message, ...]
    """The whole dialogue, as the agent sends it. The last message is not an assistant's."""
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    """None leaves it to the session, as with all that follows."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    constraint: Constraint | None = None
    """Set if the reply must be JSON or a call."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that have no effect here; counted."""
    key: str = ""
    """Says that two requests are one: made of the body and the client's count of retries. Empty:
    never the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnReply:
    """One turn of the model. It is recorded in the session's trajectory before it is returned."""

    message: Message
    """The message as the renderer parsed it, without a stop string that ended it, as in every
    dialect. Its tool calls have ids that are unique in the session."""
    token_ids: Int32Array
    """All that was sampled, the stop id included."""
    logprobs: Float32Array
    finish_reason: FinishReason
    stop: int | str | None
    leaf: int
    """The segment that ends it."""
    prompt_ids: Int32Array
    """Ids that the engine was sent."""
    num_reused_tokens: int
    """Tokens of the prompt that were in the session before this request."""
    policy_version: int
    reason: str = ""
    """Why this turn began a branch; empty where it extends a path."""
    is_repeated: bool = False
    """The request had been answered before, and this is that answer."""


def client_message(message: Message, *, leaf: int, stop: int | str | None) -> Message:
    """The message as a client sees it: without the stop string that ended it, as in every dialect,
    and with ids of calls that no other turn of the session has. leaf: the segment that ends the
    turn. The client's next history contains this message.

    >>> reply = Message(role="assistant", content="Go on.\\nObs")
    >>> client_message(reply, leaf=1, stop="\\nObs").content
    'Go on.'
    """
    calls = (replace(call, id=f"call_{leaf}_{at}") for at, call in enumerate(message.tool_calls))
    message = replace(message, tool_calls=tuple(calls))
    if not isinstance(stop, str):
        return message
    if stop in message.content:
        return replace(message, content=message.content.partition(stop)[0])
    return replace(message, thinking=message.thinking.partition(stop)[0])
