"""Sessions of Tinker's API: one for each client."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from lockstep.agent.gateway.reading import Value
from lockstep.tinker.journal import Journal, Session
from lockstep.tinker.requests import TinkerError, not_found
from lockstep.tinker.wire import metadata_of


class Sessions:
    """All sessions that the journal has, ended ones included."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.known = journal.all(Session)
        self._last_seen = dict.fromkeys(self.known, time.monotonic())
        """Session -> when its client last sent a request."""

    def create(self, body: Value) -> dict[str, Any]:
        session = Session(
            id=secrets.token_hex(8),
            created=time.time(),
            metadata=metadata_of(body["user_metadata"]),
            display_name=body["display_name"].text("") or None,
        )
        self._journal.put(session)
        self.known[session.id], self._last_seen[session.id] = session, time.monotonic()
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, body: Value) -> dict[str, Any]:
        self.live(body["session_id"].text())
        return {"type": "session_heartbeat"}

    def live(self, session_id: str) -> Session:
        """Returns a session that has not ended, and notes that its client is there. Raises
        TinkerError (404), (410)."""
        session = self.known.get(session_id)
        if session is None:
            raise not_found(
                f"session {session_id[:80]!r} is not known to this server. Make another "
                "ServiceClient."
            )
        if session.ended:
            raise TinkerError(
                f"session {session_id} is over: {session.ended}. Make another ServiceClient, and "
                "continue from a checkpoint.",
                status=410,
            )
        self.note_request(session_id)
        return session

    def note_request(self, session_id: str) -> None:
        self._last_seen[session_id] = time.monotonic()

    def silent(self, seconds: float) -> Iterator[tuple[Session, float]]:
        """(session, seconds since its last request) for each live one silent for over `seconds`."""
        now = time.monotonic()
        for session in self.known.values():
            silent = now - self._last_seen[session.id]
            if not session.ended and silent > seconds:
                yield session, silent

    def end(self, session: Session, reason: str) -> None:
        session.ended, session.ended_at = reason, time.time()
        self._journal.put(session)
