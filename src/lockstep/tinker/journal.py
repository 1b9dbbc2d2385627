"""The journal: every accepted request, its result, and what exists, in one sqlite file.

A request is written before it is answered, and its result before it is sent, in a write-ahead log:
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from lockstep.errors import RunError
from lockstep.tinker.provenance import Drawn
from lockstep.tinker.requests import SampledSequence
from lockstep.types import Int32Array

State = Literal["waiting", "done", "failed", "refused", "expired"]
_COLUMNS = ("session", "target", "seq_id", "kind", "digest", "state", "category")
"""Columns of a request that are small."""

_SCHEMA = Path(__file__).with_suffix(".sql").read_text("utf-8")
# Each index costs every request some pages. Values that are looked up once at the start, or when a
# session is over (its targets begin with its id), have none.


@dataclass(frozen=True, slots=True)
class Accepted:
    """One accepted or refused request, and how it ended."""

    session: str
    target: str
    seq_id: int
    kind: str
    body: bytes = field(repr=False, default=b"")
    value: Any = field(repr=False, default=None, compare=False)
    """The body as it was read; None after a restart."""
    digest: bytes = field(repr=False, default=b"")
    state: State = "waiting"
    result: bytes = field(repr=False, default=b"")
    category: str = ""
    """Category of a failed one; the HTTP status of a refused one; otherwise empty."""

    @property
    def id(self) -> str:
        """As the client names it."""
        return f"{self.target}/{self.seq_id}"


# -- what exists ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Session:
    """One client."""

    id: str
    created: float = field(default_factory=time.time)
    ended: str = ""
    """Why it is over; empty while it is not."""
    ended_at: float = 0.0
    metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None


@dataclass(slots=True, kw_only=True)
class Trained:
    """One model in training: a training run in the words of the wire."""

    id: str
    session: str
    spec: dict[str, Any]
    created: float = field(default_factory=time.time)
    last_request: float = field(default_factory=time.time)
    metadata: dict[str, str] = field(default_factory=dict)
    is_made: bool = False
    num_updates: int = 0
    state_seq_id: int = -1
    """Seq_id of the last request in the saved state; -1 without one."""
    has_optimizer: bool = True
    """The saved state has an optimizer's."""
    ended: str = ""
    """Why it is no longer loaded; empty while it is."""


@dataclass(slots=True, kw_only=True)
class Sampler:
    """One sampling session."""

    id: str
    session: str
    base_model: str = ""
    directory: str | None = None
    """Its weights, relative to the store; None samples the base model."""
    model_path: str | None = None
    """Path of the checkpoint, if it has a name."""
    version: int = 0
    model: str = ""
    """The model whose weights it has, if they have no name."""
    is_inflight: bool = False
    """Later saves of the model replace its weights."""
    last_used: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """Weights with a path."""

    id: str
    """The path, tinker://MODEL/weights/NAME or .../sampler_weights/NAME."""
    spec: dict[str, Any]
    num_updates: int
    size_bytes: int
    has_optimizer: bool
    created: float = field(default_factory=time.time)
    expires: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """True if its time has passed: it counts as deleted."""
        return self.expires is not None and self.expires <= time.time()


@dataclass(slots=True, kw_only=True)
class UploadedLoss:
    """A custom loss that was uploaded."""

    id: str
    session: str
    body: dict[str, Any]


Record = Session | Trained | Sampler | Checkpoint | UploadedLoss
R = TypeVar("R", Session, Trained, Sampler, Checkpoint, UploadedLoss)


def digest_of(kind: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=kind[:16].encode()).digest()


class Journal:
    """The file. Methods write at once, or with the others of a `transaction`."""

    def __init__(self, path: Path) -> None:
        """Raises RunError if another process has the file, or it is none."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # ends with the process
            self._db.execute("PRAGMA page_size=1024")  # a request changes a few small places
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=40000")  # 40 MB: a disk waits seldom
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except sqlite3.Error as error:
            raise RunError(
                f"{path} cannot be opened ({error}). Does another server use the directory? "
                "End it, or choose another directory."
            ) from error
        done = self._db.execute("SELECT target, seq_id FROM requests WHERE result IS NOT NULL")
        self._fetched = {f"{target}/{seq_id}": time.time() for target, seq_id in done}
        """Request -> when its result was first fetched; of an earlier process, as if just now."""

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Writes all or nothing. One inside another is part of it."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:  # commits, or rolls back
            yield

    # -- records ----------------------------------------------------------------------------------

    def put(self, record: Record) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
            (type(record).__name__, record.id, json.dumps(dataclasses.asdict(record))),
        )

    def remove(self, record: Record) -> None:
        place = type(record).__name__, record.id
        self._db.execute("DELETE FROM records WHERE kind = ? AND id = ?", place)

    def all(self, kind: type[R]) -> dict[str, R]:
        """Id -> record, in the order of creation where there is a time."""
        rows = self._db.execute("SELECT value FROM records WHERE kind = ?", (kind.__name__,))
        found = [kind(**json.loads(value)) for (value,) in rows]
        found.sort(key=lambda record: getattr(record, "created", 0.0))
        return {record.id: record for record in found}

    # -- requests ---------------------------------------------------------------------------------

    def add(self, request: Accepted) -> None:
        """Accepts a request, or notes a refused one: its seq_id is used."""
        small = [getattr(request, name) for name in _COLUMNS]
        self._db.execute(
            f"INSERT INTO requests ({', '.join(_COLUMNS)}, body, result) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*small, request.body or None, request.result or None),
        )

    def refuse(self, request: Accepted, text: str, status: int) -> None:
        about = {"state": "refused", "result": text.encode(), "category": str(status)}
        self.add(replace(request, body=b"", **about))

    def fail(self, request: Accepted, text: str, category: str = "server") -> None:
        self.finish(request, text.encode("utf-8", "replace"), state="failed", category=category)

    def finish(
        self,
        request: Accepted,
        result: bytes,
        *,
        state: State = "done",
        category: str = "",
        keeps_body: bool = False,
    ) -> None:
        """Stores a result. keeps_body: a restart must repeat the request."""
        body = "body" if keeps_body else "NULL"
        self._db.execute(
            f"UPDATE requests SET state = ?, result = ?, category = ?, body = {body} "
            "WHERE target = ? AND seq_id = ?",
            (state, result, category, request.target, request.seq_id),
        )

    def forget_bodies(self, target: str, up_to: int) -> None:
        """Deletes the bodies of requests that no restart has to repeat."""
        self._db.execute(
            "UPDATE requests SET body = NULL WHERE target = ? AND seq_id <= ? AND state = 'done'",
            (target, up_to),
        )

    def find(self, target: str, seq_id: int) -> Accepted | None:
        """Returns the request that has this seq_id, without its body."""
        found = self._requests("target = ? AND seq_id = ?", (target, seq_id), "result")
        return found[0] if found else None

    def outcome(self, request_id: str) -> Accepted | None:
        """The same, by the request's id."""
        target, _, number = request_id.rpartition("/")
        is_seq_id = len(number) < 19 and number.removeprefix("-").isdecimal()
        return self.find(target, int(number)) if is_seq_id else None

    def mark_fetched(self, request_id: str) -> None:
        self._fetched.setdefault(request_id, time.time())

    def waiting(self) -> list[Accepted]:
        """Returns the accepted requests without a result."""
        return self._requests("state = 'waiting'", (), "body")

    def to_repeat(self, target: str, after: int) -> list[Accepted]:
        """Returns the executed requests of a model whose effect is in no saved state, in order."""
        where = "target = ? AND seq_id > ? AND state = 'done' AND body IS NOT NULL"
        return self._requests(where, (target, after), "body")

    def _requests(self, where: str, values: tuple[Any, ...], large: str) -> list[Accepted]:
        """large: the column to be read besides the small ones."""
        names = (*_COLUMNS, large)
        rows = self._db.execute(
            f"SELECT {', '.join(names)} FROM requests WHERE {where} ORDER BY target, seq_id", values
        )
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [Accepted(**{n: v for n, v in row.items() if v is not None}) for row in found]

    def progress(self, target: str) -> tuple[int, list[int]]:
        """The first seq_id of a model that was neither executed nor refused, and the refused ones
        after it."""
        rows = self._db.execute(
            "SELECT seq_id FROM requests WHERE target = ? AND seq_id >= 0 AND state != 'waiting' "
            "ORDER BY seq_id",
            (target,),
        )
        used = [seq_id for (seq_id,) in rows]
        first = next((at for at, seq_id in enumerate(used) if at != seq_id), len(used))
        return first, used[first:]

    # -- drawn replies ----------------------------------------------------------------------------

    def add_drawn(
        self, request: Accepted, prompt_ids: Int32Array, replies: Sequence[SampledSequence]
    ) -> None:
        """replies: all to one prompt. `drawn` finds a reply by the id of the request, a dot and its
        number."""
        whole = (
            np.concatenate([getattr(reply, name) for reply in replies]).astype(dtype)
            for name, dtype in _ARRAYS.items()
        )
        lengths = np.array([len(reply.token_ids) for reply in replies], "<i4")
        arrays = (prompt_ids.astype("<i4"), lengths, *whole)
        self._db.execute(
            "INSERT OR REPLACE INTO drawn VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (request.target, request.seq_id, time.time(), *(a.tobytes() for a in arrays)),
        )

    def drawn(self, sequence_id: str) -> Drawn | None:
        request_id, _, number = sequence_id.rpartition(".")
        target, _, seq_id = request_id.rpartition("/")
        row = self._db.execute(
            "SELECT prompt, lengths, ids, logprobs, versions FROM drawn "
            "WHERE target = ? AND seq_id = ?",
            (target, seq_id),
        ).fetchone()
        if row is None:
            return None
        ends = np.cumsum(np.frombuffer(row[1], "<i4"))
        if not number.isdecimal() or int(number) >= len(ends):
            return None
        here = slice(ends[int(number) - 1] if int(number) else 0, ends[int(number)])
        arrays = {
            name: np.frombuffer(array, dtype)[here]
            for (name, dtype), array in zip(_ARRAYS.items(), row[2:], strict=True)
        }
        return Drawn(prompt_ids=np.frombuffer(row[0], "<i4"), **arrays)

    def prompts(self) -> Iterator[tuple[str, Int32Array]]:
        """(sequence_id, its prompt) of all that was drawn, the oldest first."""
        rows = self._db.execute("SELECT target, seq_id, prompt, lengths FROM drawn ORDER BY rowid")
        for target, seq_id, prompt, lengths in rows:
            for number in range(len(lengths) // 4):
                yield f"{target}/{seq_id}.{number}", np.frombuffer(prompt, "<i4")

    # -- deletion ---------------------------------------------------------------------------------

    def expire(
        self, *, fetched_before: float, drawn_before: float, sessions: Iterable[str]
    ) -> None:
        """Deletes old results, old replies, and everything of some sessions."""
        over = [name for name, fetched in self._fetched.items() if fetched < fetched_before]
        self._db.executemany(
            "UPDATE requests SET result = NULL, state = 'expired' "
            "WHERE target = ? AND seq_id = ? AND state IN ('done', 'failed') AND body IS NULL",
            [name.rpartition("/")[::2] for name in over],
        )
        for name in over:
            del self._fetched[name]
        oldest = "SELECT rowid FROM drawn ORDER BY rowid LIMIT 1000"  # rows are in order of time
        delete = f"DELETE FROM drawn WHERE time < ? AND rowid IN ({oldest})"
        while self._db.execute(delete, (drawn_before,)).rowcount:
            pass
        for session in sessions:
            for table in ("requests", "drawn"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE target BETWEEN ? AND ?", (session, f"{session}:~")
                )


_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "versions": "<i4"}
"""Arrays of one reply, and how they are stored."""
