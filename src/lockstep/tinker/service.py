"""Tinker's API without HTTP: sessions, models, samplers, futures, and their common life.

A request for work is checked, written to the journal, and answered with the id of its future. Its
result is written before anybody reads it. So a process that is killed loses nothing: the next one
over the same directory restores the models, executes the requests that waited, and gives the same
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from lockstep.agent.gateway.reading import Value
from lockstep.errors import RunError
from lockstep.launch.background import Background
from lockstep.tinker.checkpoints import SCHEME, SEGMENTS, check_ttl
from lockstep.tinker.journal import Accepted, Checkpoint, Session, Trained
from lockstep.tinker.models import Models, adapter_of
from lockstep.tinker.requests import not_found
from lockstep.tinker.resources import Resources
from lockstep.tinker.samplers import Samplers

LOGGER = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Seconds between two searches for silent sessions."""
EXPIRE_SECONDS = 60.0
"""Seconds between two deletions of old results, samplers and checkpoints."""


class TinkerService(Resources):
    """Serves `backend` over a store directory, from `start` to `close`.

    Its own methods, and those of `sessions`, `models`, `samplers` and `futures`, answer the
    requests: they take a JSON body and return the JSON of the answer. They raise Refusal, with an
    HTTP status, for a request that cannot be done.
    """

    def __init__(self, *resources: Any, **options: Any) -> None:
        """As for `Resources`."""
        super().__init__(*resources, **options)
        self.samplers = Samplers(self)
        self.models = Models(self, self.samplers)
        self._background = Background()

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Goes on where the last process ended. Models are restored one after the other, while the
        service already answers."""
        alive = [model for model in self.models.known.values() if not model.ended]
        for needed in [*alive, *self.samplers.known.values()]:
            base = needed.spec["base_model"] if isinstance(needed, Trained) else needed.base_model
            if base not in self.bases:
                raise RunError(
                    f"{self.store.directory} has {needed.id}, which needs {base}; served are "
                    f"{', '.join(self.bases)}. Serve that model, or choose another directory."
                )
        self.models.restore()
        for request in self.journal.waiting():
            self._resume(request)
        self.models.start()
        for session in self.sessions.known.values():
            if session.ended:  # the last process may have been killed while it freed the memory
                self._background.start(self._free(session))
        self._background.start(self._sweep())

    def _resume(self, request: Accepted) -> None:
        """Goes on with a request that a process accepted before it ended."""
        run = self.models.runs.get(request.target)
        if request.kind == "sample" and request.target in self.samplers.known:
            self.samplers.start(request)
        elif run is not None:
            self.models.resume(run, request)
        else:
            self.journal.fail(request, "its session ended before it was executed.")

    async def close(self) -> None:
        """Stops at once; the journal keeps waiting requests. The backend stays open."""
        await self._background.cancel()
        await self.samplers.stop()
        await asyncio.gather(*(run.stop() for run in self.models.runs.values()))
        self.journal.close()

    async def _sweep(self) -> None:
        due = 0.0
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for session, seconds in list(self.sessions.silent(self.config.silent_seconds)):
                self._end(session, f"nothing was heard of its client for {seconds:.0f} s")
            if time.monotonic() < due:
                continue
            due = time.monotonic() + EXPIRE_SECONDS
            try:
                await self.expire()
            except Exception:  # a full disk, say: tried again
                LOGGER.exception("old results could not be deleted")

    async def expire(self) -> None:
        """Deletes old results, samplers and checkpoints."""
        self.store.expire()
        await self.samplers.expire()
        now = time.time()
        before = now - self.config.result_seconds
        over = [s.id for s in self.sessions.known.values() if s.ended and s.ended_at < before]
        drawn_before = now - self.config.drawn_seconds
        with self.journal.transaction():
            self.journal.expire(fetched_before=before, drawn_before=drawn_before, sessions=over)

    # -- sessions ---------------------------------------------------------------------------------

    def finish_session(self, body: Value, session_id: str) -> dict[str, Any]:
        """Ends a session; the first reason counts."""
        session = self.sessions.known.get(session_id)
        if session is not None and not session.ended:
            reason = body["reason"]["type"].text("success")
            self._end(session, f"its client finished ({reason[:40]})")
        return {}

    def _end(self, session: Session, reason: str) -> None:
        """Frees the memory of a session. Its checkpoints stay."""
        self.sessions.end(session, reason)
        self._background.start(self._free(session))

    async def _free(self, session: Session) -> None:
        await self.models.end(session.id, session.ended)
        await self.samplers.end(session.id, session.ended)

    def list_sessions(self, body: Value) -> dict[str, Any]:
        return {"sessions": [*self.sessions.known][::-1]}

    def show_session(self, body: Value, session_id: str) -> dict[str, Any]:
        session = self.sessions.known.get(session_id)
        if session is None:
            raise not_found(f"session {session_id[:80]!r} is not known.")
        models, samplers = self.models.known.values(), self.samplers.known.values()
        return {
            "training_run_ids": [each.id for each in models if each.session == session_id],
            "sampler_ids": [each.id for each in samplers if each.session == session_id],
            "user_metadata": session.metadata or None,
            "display_name": session.display_name,
        }

    def counts(self) -> dict[str, int]:
        """Counts the contents of the store, for people."""
        sessions = self.sessions.known.values()
        return {
            "sessions": len(sessions),
            "of them live": sum(not session.ended for session in sessions),
            "training runs": len(self.models.known),
            "checkpoints": sum(1 for _ in self.store.of_model()),
        }

    # -- stored models and checkpoints ------------------------------------------------------------

    def capabilities(self, body: Value) -> dict[str, Any]:
        can = {"trainable": True, "sampleable": True}
        models = [
            {"model_name": base.name, "max_context_length": base.max_tokens, **can}
            for base in self.bases.values()
        ]
        return {"supported_models": models}

    def weights_info(self, body: Value) -> dict[str, Any]:
        spec = self.store.find(body["tinker_path"].text()).spec
        names = ("base_model", "train_unembed", "train_mlp", "train_attn")
        return {name: spec[name] for name in names} | adapter_of(spec)

    def training_run(self, body: Value, model_id: str) -> dict[str, Any]:
        model = self.models.known.get(model_id)
        if model is None:
            raise not_found(f"training run {model_id[:200]!r} is not known.")
        latest: dict[str, dict[str, Any]] = {}
        for checkpoint in self.store.of_model(model_id):
            latest.setdefault(_kind(checkpoint), _described(checkpoint))
        return {
            "training_run_id": model.id,
            "base_model": model.spec["base_model"],
            "model_owner": "local",
            **adapter_of(model.spec),
            "corrupted": model.ended.startswith(("its state could", "it could not")),
            "last_request_time": _time(model.last_request),
            "last_checkpoint": latest.get("training"),
            "last_sampler_checkpoint": latest.get("sampler"),
            "user_metadata": model.metadata or None,
        }

    def training_runs(self, body: Value) -> dict[str, Any]:
        ids, cursor = _page([*self.models.known][::-1], body)
        return {"training_runs": [self.training_run(body, each) for each in ids], "cursor": cursor}

    def checkpoints(self, body: Value, model_id: str | None = None) -> dict[str, Any]:
        """Lists the checkpoints of a model, or a page of all."""
        found = list(self.store.of_model(model_id))
        if model_id is not None:
            self.training_run(body, model_id)
            body = Value({"limit": max(1, len(found))})
        found, cursor = _page(found, body)
        return {"checkpoints": [_described(each) for each in found], "cursor": cursor}

    def delete(self, body: Value, model_id: str, segment: str, name: str) -> dict[str, Any]:
        """Deletes a checkpoint."""
        self.store.delete(self.store.find(f"{SCHEME}{model_id}/{segment}/{name}"))
        return {}

    def set_ttl(self, body: Value, model_id: str, segment: str, name: str) -> dict[str, Any]:
        """Sets how long a checkpoint lives."""
        checkpoint = self.store.find(f"{SCHEME}{model_id}/{segment}/{name}")
        self.store.set_ttl(checkpoint, check_ttl(body["ttl_seconds"]))
        return {}


def _page(found: list[Any], query: Value) -> tuple[list[Any], dict[str, int]]:
    """(entries of the page that the query asks for, its cursor)."""
    limit, offset = query["limit"].integer(1, 10**6), query["offset"].integer(0) or 0
    limit = 20 if limit is None else limit
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor


def _kind(checkpoint: Checkpoint) -> str:
    return SEGMENTS[checkpoint.id.split("/")[-2]]


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(checkpoint.id.split("/")[-2:]),
        "checkpoint_type": _kind(checkpoint),
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.id,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
        "user_metadata": checkpoint.metadata or None,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
