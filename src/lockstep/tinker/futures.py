"""Clients of Tinker's API: their sessions, and the results of accepted requests (futures)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.reading import Value
from lockstep.errors import named
from lockstep.tinker.journal import Accepted, Journal, Record, Session
from lockstep.tinker.requests import TinkerError, invalid, not_found
from lockstep.tinker.wire import PROTOBUF, metadata_of
from lockstep.tinker_config import TinkerConfig

LOGGER = logging.getLogger(__name__)

MAX_INLINE_BYTES = 1_000_000
"""Larger results are announced with their size first, so that a client makes room."""
PROTOBUF_KINDS = ("forward_backward", "sample")


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
            raise not_found(f"session {session_id!r:.80} is not known. Make another ServiceClient.")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer about a future."""

    status: int = 200
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Outcome of a request that was executed."""

    payload: bytes | dict[str, Any]
    """A message as it is sent, or the object of a JSON answer, whose `type` is the request's."""
    records: tuple[Record, ...] = ()
    """Written together with the result."""
    keeps_body: bool = False
    """A restart has to repeat the request, until the state is saved."""
    write: Callable[[], None] | None = field(default=None, repr=False)
    """Writes more, together with the result."""
    then: Callable[[], Awaitable[None]] | None = field(default=None, repr=False)
    """Follows once the client may read the result."""


def as_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


class Futures:
    """Writes outcomes, and answers clients that ask for them."""

    def __init__(self, journal: Journal, config: TinkerConfig, sessions: Sessions) -> None:
        self._journal, self._config, self._sessions = journal, config, sessions
        self._settled: dict[str, asyncio.Event] = {}
        """Request -> set when it is settled."""

    def accept(
        self, request: Accepted, read: Callable[[], Any], start: Callable[[Accepted], object]
    ) -> dict[str, Any]:
        """Accepts a request, unless it came before: a client may send it several times. Returns the
        beginning of the answer.

        read: its body as a value, raises Refusal. start: called with the request that the journal
        has. Raises TinkerError if another payload came under this number, and repeats an earlier
        refusal.
        """
        known = self._journal.find(request.target, request.seq_id)
        if known is None:
            accepted = replace(request, value=read())
            self._journal.add(accepted)
            start(accepted)
        elif known.digest != request.digest:
            raise invalid(
                f"seq_id={known.seq_id} of {known.target} was used before with another payload"
                + (f" ({known.result.decode()})" if known.state == "refused" else "")
                + ". Count by one for each request; a repeated one must be the same."
            )
        elif known.state == "refused":
            raise TinkerError(known.result.decode(), status=int(known.category))
        return {"request_id": request.id}

    async def settle(self, request: Accepted, outcome: Done | BaseException) -> None:
        """Writes an outcome, and wakes the clients that wait for it. While the disk is full, it
        tries again: the request is not executed twice."""
        if isinstance(outcome, Exception) and not isinstance(outcome, Refusal):
            LOGGER.error("%s %s failed", request.kind, request.id, exc_info=outcome)
        while True:
            try:
                self.write(request, outcome)
                break
            except sqlite3.OperationalError as error:
                LOGGER.error("the result of %s cannot be written: %s", request.id, error)
                await asyncio.sleep(1.0)
        if (event := self._settled.pop(request.id, None)) is not None:
            event.set()

    def write(self, request: Accepted, outcome: Done | BaseException) -> None:
        """Writes an outcome to the journal, whole or not at all."""
        with self._journal.transaction():
            match outcome:
                case Done():
                    for record in outcome.records:
                        self._journal.put(record)
                    if outcome.write is not None:
                        outcome.write()
                    result = outcome.payload
                    if not isinstance(result, bytes):
                        result = as_json({"type": request.kind, **result})
                    self._journal.finish(request, result, keeps_body=outcome.keeps_body)
                case Refusal():
                    category = "user" if outcome.status < 500 else "server"
                    self._journal.fail(request, str(outcome), category)
                case _:
                    self._journal.fail(request, named(outcome))

    async def retrieve(self, body: Value) -> Reply:
        """Waits for a result for a while. It may be fetched any number of times."""
        request_id = body["request_id"].text()
        found = self._journal.outcome(request_id)
        if found is not None and found.state == "waiting":
            event = self._settled.setdefault(request_id, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.hold_seconds):
                    await event.wait()
            found = self._journal.outcome(request_id)
        if found is None:
            raise not_found(
                f"request {request_id[:80]!r} is not known to this server: it was never accepted, "
                "or its session ended long ago. Send the request again."
            )
        self._sessions.note_request(found.session)
        match found.state:
            case "waiting":
                state = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return Reply(status=408, body=as_json(state))
            case "expired":
                raise TinkerError(
                    f"the result of {request_id} was fetched before, and deleted "
                    f"{self._config.result_seconds:g} s later.",
                    status=410,
                )
            case "failed" | "refused":
                self._journal.mark_fetched(request_id)
                error = {"error": found.result.decode(), "category": found.category}
                return Reply(body=as_json(error))
        size = len(found.result)
        if body["allow_metadata_only"].truth() and size > MAX_INLINE_BYTES:
            size_alone = {"status": "complete_metadata", "response_payload_size": size}
            return Reply(body=as_json(size_alone))
        self._journal.mark_fetched(request_id)
        kind = PROTOBUF if found.kind in PROTOBUF_KINDS else "application/json"
        return Reply(body=found.result, content_type=kind)
