"""Matches: messages in, messages out, for several seats. A match never sees a token."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from lockstep.agent.environment import Score
from lockstep.errors import RolloutError
from lockstep.types import Message, ToolSchema


class OutOfBudget(RolloutError):
    """The budget of a seat ended its episode before it could reply. A match that lets this through
    is over, and is scored as it stands."""


class Ask(Protocol):
    """Asks a seat for its next turn: `reply = await ask("first", [Message(...)])`.

    The messages are appended to the dialogue of this seat, which nobody else reads. Several seats
    may be asked at the same time, with `asyncio.gather`. player: tells apart the players of one
    seat. Each has its own dialogue. Raises OutOfBudget.
    """

    def __call__(
        self, seat: str, messages: Sequence[Message], *, player: int = 0
    ) -> Awaitable[Message]: ...


class Match:
    """One match. Made by a factory from a `Task`; used once; closed at the end.

    Subclasses give `play` and `score`. An exception in any of them fails the trajectories of all
    seats (stored with the reason, never trained), and never the run.

    >>> class Echo(Match):
    ...     async def play(self, ask):
    ...         said = await ask("first", [Message(role="user", content="Say a word.")])
    ...         self.heard = await ask("second", [said])
    ...         self.is_equal = self.heard.content == said.content
    ...     async def score(self):
    ...         return {"first": Score(reward=0.0), "second": Score(reward=float(self.is_equal))}
    """

    tools: Mapping[str, Sequence[ToolSchema]] = {}
    """Seat -> the tools that its prompt offers; the match answers the calls."""

    async def play(self, ask: Ask) -> None:
        """The whole match, from the first turn to the last."""
        raise NotImplementedError

    async def score(self) -> Mapping[str, Score | Sequence[Score]]:
        """Seat -> its score, or one for each of its players that was asked, in order. Called once,
        after `play`, also when a budget ended it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Frees the resources of `play`. Called once, also after a failure."""
