"""The journal: every accepted request, its result, and what exists, in one sqlite file.

A request is written before it is answered, and its result before it is told, in a write-ahead log:
a process that is killed at any moment loses neither. (After a power cut the last moments may be
gone, but never a part of one.) One process has the file at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from lockstep.errors import RunError
from lockstep.tinker.provenance import Drawn
from lockstep.tinker.requests import Category
from lockstep.types import Int32Array

State = Literal["waiting", "done", "failed", "refused", "expired"]
CLONE = 1_000_000_000
"""Seq_ids of one unpickled sampling client: its number times this, and up."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY,      -- told to the client
    session TEXT NOT NULL,
    target TEXT NOT NULL,     -- model, sampler or session, within which seq_id counts
    seq_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    digest BLOB NOT NULL,     -- of the payload
    body BLOB,                -- NULL once nothing needs it any more
    state TEXT NOT NULL,
    result BLOB,              -- protobuf, JSON, or the text of the error
    category TEXT,            -- of a failed one; the HTTP status of a refused one
    finished INTEGER,         -- counts the results, in order
    fetched REAL,             -- seconds since 1970
    UNIQUE (target, seq_id)
);
CREATE INDEX IF NOT EXISTS by_finished ON requests (target, finished);
CREATE INDEX IF NOT EXISTS by_state ON requests (state);
CREATE INDEX IF NOT EXISTS by_session ON requests (session);
CREATE TABLE IF NOT EXISTS prompts (
    request TEXT PRIMARY KEY, session TEXT NOT NULL, time REAL NOT NULL, ids BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS replies (  -- what was drawn after the prompt of a request
    sequence TEXT PRIMARY KEY, request TEXT NOT NULL, ids BLOB, logprobs BLOB, versions BLOB
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_request ON replies (request);
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, id)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request."""

    id: str
    session: str
    target: str
    seq_id: int
    kind: str
    body: bytes = field(repr=False, default=b"")
    value: Any = field(repr=False, default=None, compare=False)
    """The body as it was read; None after a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended, or that it has not."""

    state: State
    digest: bytes = field(repr=False)
    result: bytes = field(repr=False)
    category: str
    """Category of a failed one; the HTTP status of a refused one; otherwise empty."""


# -- what exists ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Session:
    """One client."""

    KIND: ClassVar[str] = "session"
    id: str
    created: float
    ended: str = ""
    """Why it is over; empty while it is not."""
    ended_at: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    display_name: str | None = None


@dataclass(slots=True, kw_only=True)
class Model:
    """One model in training: a training run in the words of the wire."""

    KIND: ClassVar[str] = "model"
    id: str
    session: str
    spec: dict[str, Any]
    created: float
    last_request: float
    metadata: dict[str, Any] | None = None
    is_made: bool = False
    num_updates: int = 0
    state_seq_id: int = -1
    """Seq_id of the request after which the state was saved; -1 if none was."""
    has_optimizer: bool = True
    """The saved state has an optimizer's."""
    ended: str = ""
    """Why it is no longer loaded; empty while it is."""


@dataclass(slots=True, kw_only=True)
class Sampler:
    """One sampling session."""

    KIND: ClassVar[str] = "sampler"
    id: str
    session: str
    base_model: str
    directory: str | None
    """Its weights, relative to the store; None samples the base model."""
    model_path: str | None = None
    """Path of the checkpoint, if it has a name."""
    version: int = 0
    model: str = ""
    """The model whose weights it has, if they have no name."""
    is_inflight: bool = False
    """Later saves of the model replace its weights."""
    last_used: float = 0.0


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """Weights with a path."""

    KIND: ClassVar[str] = "checkpoint"
    id: str
    """The path, tinker://MODEL/weights/NAME or .../sampler_weights/NAME."""
    spec: dict[str, Any]
    created: float
    num_updates: int
    size_bytes: int
    has_optimizer: bool
    expires: float | None = None
    metadata: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Loss:
    """A custom loss that was uploaded."""

    KIND: ClassVar[str] = "loss"
    id: str
    session: str
    body: dict[str, Any]


Record = Session | Model | Sampler | Checkpoint | Loss
R = TypeVar("R", Session, Model, Sampler, Checkpoint, Loss)


def digest_of(kind: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=kind[:16].encode()).digest()


class Journal:
    """The file. Methods write at once, or with the others of a `transaction`."""

    def __init__(self, path: Path) -> None:
        """Raises RunError if another process has the file, or it is none."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # ends with the process
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except sqlite3.Error as error:
            raise RunError(
                f"{path} cannot be opened ({error}). Does another server use the directory? "
                "End it, or choose another directory."
            ) from error
        self._depth = 0
        last = self._db.execute("SELECT max(finished) FROM requests").fetchone()[0]
        self._finished = last or 0

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Writes all or nothing. One inside another is part of it."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._db.execute("BEGIN IMMEDIATE")
            yield
            if self._depth == 1:
                self._db.execute("COMMIT")
        except BaseException:
            if self._depth == 1 and self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._depth -= 1

    # -- records ----------------------------------------------------------------------------------

    def put(self, record: Record) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
            (record.KIND, record.id, json.dumps(dataclasses.asdict(record))),
        )

    def remove(self, record: Record) -> None:
        self._db.execute("DELETE FROM records WHERE kind = ? AND id = ?", (record.KIND, record.id))

    def all(self, kind: type[R]) -> dict[str, R]:
        """Id -> record, in the order of creation where there is a time."""
        rows = self._db.execute("SELECT value FROM records WHERE kind = ?", (kind.KIND,))
        found = [kind(**json.loads(value)) for (value,) in rows]
        found.sort(key=lambda record: getattr(record, "created", 0.0))
        return {record.id: record for record in found}

    # -- requests ---------------------------------------------------------------------------------

    def add(self, request: Request, digest: bytes) -> None:
        """Accepts a request."""
        self._db.execute(
            "INSERT INTO requests (id, session, target, seq_id, kind, digest, body, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 'waiting')",
            (
                *(request.id, request.session, request.target, request.seq_id, request.kind),
                *(digest, request.body),
            ),
        )

    def refuse(self, request: Request, digest: bytes, text: str, status: int) -> None:
        """Notes a request that was refused: its seq_id is used."""
        self._db.execute(
            "INSERT INTO requests "
            "(id, session, target, seq_id, kind, digest, state, result, category) "
            "VALUES (?, ?, ?, ?, ?, ?, 'refused', ?, ?)",
            (
                *(request.id, request.session, request.target, request.seq_id, request.kind),
                *(digest, text.encode(), str(status)),
            ),
        )

    def finish(self, request_id: str, result: bytes, *, keeps_body: bool = False) -> None:
        """Stores a result. keeps_body: a restart must repeat the request."""
        self._end(request_id, "done", result, None, keeps_body)

    def fail(self, request_id: str, text: str, category: Category = "server") -> None:
        self._end(request_id, "failed", text.encode("utf-8", "replace"), category, False)

    def _end(
        self, request_id: str, state: State, result: bytes, category: str | None, keeps_body: bool
    ) -> None:
        self._finished += 1
        body = "body" if keeps_body else "NULL"
        self._db.execute(
            f"UPDATE requests SET state = ?, result = ?, category = ?, finished = ?, body = {body} "
            "WHERE id = ?",
            (state, result, category, self._finished, request_id),
        )

    def forget_bodies(self, target: str, up_to: int) -> None:
        """Deletes the bodies of requests that no restart has to repeat."""
        self._db.execute(
            "UPDATE requests SET body = NULL WHERE target = ? AND seq_id <= ? AND state = 'done'",
            (target, up_to),
        )

    def find(self, target: str, seq_id: int) -> tuple[str, Outcome] | None:
        """Returns the id and outcome of the request that has this seq_id."""
        row = self._db.execute(
            "SELECT id, state, digest, result, category FROM requests "
            "WHERE target = ? AND seq_id = ?",
            (target, seq_id),
        ).fetchone()
        return None if row is None else (row[0], _outcome(*row[1:]))

    def outcome(self, request_id: str) -> tuple[Request, Outcome] | None:
        """Returns the request without its body."""
        row = self._db.execute(
            "SELECT session, target, seq_id, kind, state, digest, result, category FROM requests "
            "WHERE id = ?",
            (request_id,),
        ).fetchone()
        if row is None:
            return None
        session, target, seq_id, kind = row[:4]
        request = Request(id=request_id, session=session, target=target, seq_id=seq_id, kind=kind)
        return request, _outcome(*row[4:])

    def mark_fetched(self, request_id: str) -> None:
        self._db.execute(
            "UPDATE requests SET fetched = ? WHERE id = ? AND fetched IS NULL",
            (time.time(), request_id),
        )

    def waiting(self) -> list[Request]:
        """Returns the accepted requests without a result."""
        return self._requests("state = 'waiting'", ())

    def to_repeat(self, target: str, after: int) -> list[Request]:
        """Returns the executed requests of a model whose effect is in no saved state, in order."""
        where = "target = ? AND seq_id > ? AND state = 'done' AND body IS NOT NULL"
        return self._requests(where, (target, after))

    def _requests(self, where: str, values: tuple[Any, ...]) -> list[Request]:
        rows = self._db.execute(
            "SELECT id, session, target, seq_id, kind, body FROM requests "
            f"WHERE {where} ORDER BY target, seq_id",
            values,
        )
        names = ("id", "session", "target", "seq_id", "kind", "body")
        return [Request(**dict(zip(names, row, strict=True))) for row in rows]

    def progress(self, target: str) -> tuple[int, list[int]]:
        """The first seq_id of a model that has not been executed or refused, and the later ones
        that were refused."""
        rows = self._db.execute(
            "SELECT seq_id FROM requests WHERE target = ? AND seq_id >= 0 AND state != 'waiting' "
            "ORDER BY seq_id",
            (target,),
        )
        used = [seq_id for (seq_id,) in rows]
        first = next((at for at, seq_id in enumerate(used) if at != seq_id), len(used))
        return first, used[first:]

    def completions(self, target: str, clone: int, after: int) -> list[tuple[int, str, State, int]]:
        """(count, request, state, bytes of its result) of the results of one sampling client after
        the `after`-th, in order."""
        return self._db.execute(
            "SELECT finished, id, state, length(result) FROM requests "
            "WHERE target = ? AND finished > ? AND seq_id >= ? AND seq_id < ? "
            "AND state IN ('done', 'failed') ORDER BY finished",
            (target, after, clone * CLONE, (clone + 1) * CLONE),
        ).fetchall()

    # -- what was drawn ---------------------------------------------------------------------------

    def add_drawn(self, request: Request, drawn: Mapping[str, Drawn]) -> None:
        """drawn: sequence_id -> a reply, all to the same prompt."""
        prompt_ids = next(iter(drawn.values())).prompt_ids
        self._db.execute(
            "INSERT OR REPLACE INTO prompts VALUES (?, ?, ?, ?)",
            (request.id, request.session, time.time(), prompt_ids.astype("<i4").tobytes()),
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)",
            [
                (
                    *(name, request.id, reply.token_ids.astype("<i4").tobytes()),
                    *(
                        reply.logprobs.astype("<f4").tobytes(),
                        reply.versions.astype("<i4").tobytes(),
                    ),
                )
                for name, reply in drawn.items()
            ],
        )

    def drawn(self, sequence_id: str) -> Drawn | None:
        row = self._db.execute(
            "SELECT prompts.ids, replies.ids, logprobs, versions FROM replies "
            "JOIN prompts ON prompts.request = replies.request WHERE sequence = ?",
            (sequence_id,),
        ).fetchone()
        if row is None:
            return None
        return Drawn(
            prompt_ids=np.frombuffer(row[0], "<i4"),
            token_ids=np.frombuffer(row[1], "<i4"),
            logprobs=np.frombuffer(row[2], "<f4"),
            versions=np.frombuffer(row[3], "<i4"),
        )

    def prompts(self) -> Iterator[tuple[str, Int32Array]]:
        """(sequence_id, its prompt) of all that was drawn, the oldest first."""
        rows = self._db.execute(
            "SELECT sequence, prompts.ids FROM replies "
            "JOIN prompts ON prompts.request = replies.request ORDER BY time"
        )
        for name, ids in rows:
            yield name, np.frombuffer(ids, "<i4")

    # -- deletion ---------------------------------------------------------------------------------

    def expire(
        self, *, fetched_before: float, drawn_before: float, sessions: Iterable[str]
    ) -> None:
        """Deletes results that were fetched before a time, what was drawn before another, and all
        that belongs to some sessions."""
        self._forget_drawn("time < ?", drawn_before)
        self._db.execute(
            "UPDATE requests SET result = NULL, state = 'expired' "
            "WHERE fetched < ? AND state IN ('done', 'failed') AND body IS NULL",
            (fetched_before,),
        )
        for session in sessions:
            self._db.execute("DELETE FROM requests WHERE session = ?", (session,))
            self._forget_drawn("session = ?", session)

    def _forget_drawn(self, where: str, value: float | str) -> None:
        self._db.execute(
            f"DELETE FROM replies WHERE request IN (SELECT request FROM prompts WHERE {where})",
            (value,),
        )
        self._db.execute(f"DELETE FROM prompts WHERE {where}", (value,))


def _outcome(state: State, digest: bytes, result: bytes | None, category: str | None) -> Outcome:
    return Outcome(state=state, digest=digest, result=result or b"", category=category or "")
