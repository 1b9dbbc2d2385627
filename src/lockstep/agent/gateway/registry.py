"""All sessions of one gateway: created, found by id or key, and ended when idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.session import GatewaySession
from lockstep.launch.background import Background
from lockstep.types import Task

SWEEPS_PER_TIMEOUT = 4
"""Searches for idle sessions, per timeout of an idle session."""


class SessionRegistry:
    """All sessions of one gateway.

    A finished session is found until it is removed, or until its slot is needed; the first to
    finish is dropped. A session that is not finished is never dropped for another.
    """

    def __init__(
        self,
        make: Callable[[Task | None], GatewaySession] | None = None,
        *,
        max_sessions: int = 4096,
        idle_seconds: float = 0.0,
        on_finished: Callable[[GatewaySession], None] = lambda session: None,
    ) -> None:
        """make: a session for `create`; None refuses those, because all are handed out by a run.
        max_sessions: at the same time, finished ones included. idle_seconds: a session without a
        request for so long fails; 0 waits forever.
        on_finished: called with each session when it has ended."""
        self._make, self._max_sessions = make, max_sessions
        self._idle_seconds, self._on_finished = idle_seconds, on_finished
        self._sessions: dict[str, GatewaySession] = {}
        self._by_key: dict[str, GatewaySession] = {}
        self._offers: asyncio.Queue[_Offer | None] = asyncio.Queue()
        """None: no more will come."""
        self._sweeping = Background()

    def create(self, *, task: Task | None = None) -> GatewaySession:
        if self._make is None:
            text = "the sessions are episodes of a training run: claim one (POST /claim), "
            text += "or use the address and key that the run gave to your program."
            raise Refusal(409, "no_free_sessions", text)
        return self.add(self._make(task))

    def add(self, session: GatewaySession) -> GatewaySession:
        """Adds a session that was made elsewhere. Raises Refusal (429) if there are too many."""
        if len(self._sessions) >= self._max_sessions:
            old = next((s for s in self._sessions.values() if s.ended.is_set()), None)
            if old is None:
                text = f"{len(self._sessions)} sessions are open, the most there may be."
                raise Refusal(429, "too_many_sessions", f"{text} Finish some.")
            self._drop(old)
        self._sessions[session.id] = session
        self._by_key[session.key] = session
        session.on_finish = self._on_finished
        if self._idle_seconds and not self._sweeping:
            self._sweeping.start(self._sweep())
        return session

    def get(self, session_id: str) -> GatewaySession:
        if (found := self._sessions.get(session_id)) is None:
            text = f"there is no session {session_id!r}: it was never made here, or it was removed."
            raise Refusal(404, "unknown_session", text)
        return found

    def of_key(self, key: str) -> GatewaySession | None:
        return self._by_key.get(key)

    def all(self) -> Sequence[GatewaySession]:
        return list(self._sessions.values())

    async def remove(self, session_id: str) -> None:
        session = self.get(session_id)
        await session.finish(error="" if session.is_finished else "removed before it was finished")
        self._drop(session)

    async def close(self) -> None:
        """Fails all sessions that are not finished, and ends all waiting claims."""
        self._offers.put_nowait(None)
        await self._sweeping.cancel()
        for session in self.all():
            if not session.is_finished:
                await session.finish(error="the gateway was closed")

    # -- agents that connect on their own -----------------------------------------------------

    async def offer(
        self, session: GatewaySession, task: Task, *, wait_seconds: float, max_seconds: float
    ) -> None:
        """Offers the episode to the next agent that claims one, and returns when the agent has
        finished the session. Raises TimeoutError if no agent claims it within wait_seconds, or the
        agent does not finish within max_seconds."""
        offer = _Offer(session, task)
        self._offers.put_nowait(offer)
        for event, seconds, text in (
            (offer.claimed, wait_seconds, "no agent claimed the episode"),
            (session.ended, max_seconds, "the agent that claimed it did not finish"),
        ):
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                offer.is_over = True
                raise TimeoutError(f"{text} within {seconds:g} s") from None

    async def claim(self) -> tuple[GatewaySession, Task]:
        if self._make is not None:
            text = "nothing hands out episodes here. Make a session, or start a run (task=connect)"
            raise Refusal(409, "nothing_to_claim", text)
        while True:
            if (offer := await self._offers.get()) is None:
                self._offers.put_nowait(None)  # for the next one
                raise Refusal(410, "run_over", "the run is over: there is nothing more to claim.")
            if not offer.is_over and not offer.session.is_finished:
                offer.claimed.set()
                return offer.session, offer.task

    # -- the end of a session -----------------------------------------------------------------

    def _drop(self, session: GatewaySession) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.key, None)

    async def _sweep(self) -> None:
        """Fails idle sessions, until the registry is closed."""
        while True:
            await asyncio.sleep(self._idle_seconds / SWEEPS_PER_TIMEOUT)
            for session in self.all():
                idle = time.monotonic() - session.last_used
                if not session.is_finished and not session.is_busy and idle >= self._idle_seconds:
                    await session.finish(error=f"idle: no request for {self._idle_seconds:g} s")


@dataclass(slots=True, eq=False)
class _Offer:
    """An episode that waits for an agent."""

    session: GatewaySession
    task: Task
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
