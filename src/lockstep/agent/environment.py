"""Environments: messages in, messages out. An environment never sees a token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.types import Message, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to one turn of the model."""

    messages: Sequence[Message] = ()
    """Appended to the dialogue before the next turn; ignored when `done`."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counters that are added to the trajectory's: tool errors, timeouts, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Reward of an episode."""

    reward: float
    """The trained reward; finite."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Raw named parts, before weights; logged as reward/<part>."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """turn -> reward for that turn's segment alone, beside `reward`."""


class Environment:
    """One episode. Made by a factory from a `Task`; used once; closed at the end.

    Subclasses give `tools`, `reset`, `step` and `score`. An exception in any of them fails the
    trajectory (stored with its reason, never trained), and never the run.
    """

    tools: Sequence[ToolSchema] = ()

    async def reset(self) -> Sequence[Message]:
        """The first messages: system, developer, user."""
        raise NotImplementedError

    async def step(self, message: Message) -> Observation:
        """Answers the model's turn. Called with every turn, the last included."""
        raise NotImplementedError

    async def score(self) -> Score:
        """Called once, after the last step, however the episode ended."""
        raise NotImplementedError

    async def close(self) -> None:
        """Frees the resources of `reset`. Called once, also after a failure."""


def first_messages(asked: str | Sequence[Message], *, instructions: str) -> list[Message]:
    """The developer's instructions, unless they are empty, and the user's question, or messages."""
    said = [Message(role="developer", content=instructions)] if instructions else []
    return [*said, *([Message(role="user", content=asked)] if isinstance(asked, str) else asked)]


GroupScorer = Callable[[Sequence[Environment]], "Sequence[Score] | Awaitable[Sequence[Score]]"]
"""Scores the episodes of one group against each other, instead of each `Environment.score`.

Called once per group when its last episode has ended, before the environments close, with the
environments that did not fail; returns one score for each, in the same order. May be a coroutine
function.
"""
