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
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.agent.gateway.reading import Value
from lockstep.errors import RunError
from lockstep.tinker.checkpoints import CheckpointFiles
from lockstep.tinker.futures import Futures
from lockstep.tinker.journal import Accepted, Journal, Session, Trained
from lockstep.tinker.listings import Listings, notes
from lockstep.tinker.models import Models
from lockstep.tinker.origins import Origins
from lockstep.tinker.requests import ModelSpec, not_found
from lockstep.tinker.resources import Resources
from lockstep.tinker.samplers import Samplers
from lockstep.tinker.sessions import Sessions
from lockstep.tinker_config import TinkerConfig

if TYPE_CHECKING:
    from lockstep.tinker.embedded import EmbeddedBackend
    from lockstep.tinker.record import ModelRecord

LOGGER = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Seconds between two searches for silent sessions."""
EXPIRE_SECONDS = 60.0
"""Seconds between two deletions of old results, samplers and checkpoints."""
MAX_CONCURRENT_SAMPLES = 512
"""Requests that a sampling client has open at a time. Each holds a connection of the client and of
the server, and systems commonly allow a process 1024 files."""


class TinkerService:
    """Serves `backend` over a store directory, from `start` to `close`.

    `sessions`, `models`, `samplers`, `futures` and `listings` answer the requests: their methods
    take a JSON body and return the JSON of the answer. They raise Refusal, with an HTTP status, for
    a request that cannot be done.
    """

    def __init__(
        self,
        backend: EmbeddedBackend,
        directory: Path,
        config: TinkerConfig | None = None,
        *,
        open_record: Callable[[str, ModelSpec], ModelRecord] | None = None,
    ) -> None:
        """open_record: begins the record of a model by its id; None keeps none.

        Raises RunError if another process uses the directory, or a model in it needs a base model
        that is not served.
        """
        self.config = config or TinkerConfig()
        self.bases = {base.name: base for base in backend.base_models}
        directory.mkdir(parents=True, exist_ok=True)
        self.journal = journal = Journal(directory / "journal.sqlite")
        self.store = CheckpointFiles(directory, journal)
        self.sessions = Sessions(journal)
        self.futures = Futures(journal, self.config, self.sessions)
        resources = Resources(
            backend=backend,
            journal=journal,
            store=self.store,
            config=self.config,
            bases=self.bases,
            sessions=self.sessions,
            futures=self.futures,
            origins=Origins(journal, self.config),
            open_record=open_record,
        )
        self.samplers = Samplers(resources)
        self.models = Models(resources, self.samplers)
        self.listings = Listings(resources, self.models)
        self._background: set[asyncio.Task[None]] = set()

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
                self._spawn(self._free(session))
        self._spawn(self._sweep())

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
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, self.samplers.stop(), return_exceptions=True)
        await asyncio.gather(*(run.stop() for run in self.models.runs.values()))
        self.journal.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

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
        self._spawn(self._free(session))

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
            "user_metadata": notes(session.metadata),
            "display_name": session.display_name,
        }

    # -- about the server -------------------------------------------------------------------------

    def client_config(self, body: Value) -> dict[str, Any]:
        """Flags for clients."""
        return {
            "sample_use_retrieve_futures": self.config.uses_retrieve_futures,
            "custom_loss_server_side": True,
            "sample_max_concurrent_requests": MAX_CONCURRENT_SAMPLES,
            # Old clients write JSON otherwise; later ones know neither.
            "proto_write_fwdbwd": True,
            "fwd_via_fwdbwd": True,
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
