"""Sessions, models, samplers and futures of Tinker's API, without HTTP.

A request for work is checked, written to the journal, and answered with the id of its future; it is
executed behind that, and its result written before anybody reads it. So a process that is killed
loses nothing: the next one over the same directory knows every session, restores the models, goes
on with what was not executed, and gives the same answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.reading import Value
from lockstep.agent.tasks import derive_seed
from lockstep.errors import RunError, named
from lockstep.tinker.checkpoints import (
    MAX_TTL_SECONDS,
    MIN_TTL_SECONDS,
    SCHEME,
    SEGMENTS,
    CheckpointStore,
    path_of,
)
from lockstep.tinker.journal import (
    CLONE,
    Checkpoint,
    Journal,
    Loss,
    Model,
    Outcome,
    Request,
    Sampler,
    Session,
    digest_of,
)
from lockstep.tinker.origins import Origins
from lockstep.tinker.requests import (
    BaseModel,
    CustomLoss,
    ForwardBackward,
    ModelSpec,
    Sampling,
    TinkerError,
    invalid,
    not_found,
)
from lockstep.tinker.samplers import SamplerPool
from lockstep.tinker.training_run import Done, TrainingRun, as_json
from lockstep.tinker.wire import (
    MAX_SAMPLE_SEQ_ID,
    MAX_SEQ_ID,
    PROTOBUF,
    check_optimizer,
    forward_backward_of,
    metadata_of,
    model_spec_of,
    optim_step_of,
    parse_forward_backward,
    peek_forward_backward,
    sampling_of,
    whole_number,
    write_sampling,
)
from lockstep.tinker_config import TinkerConfig

if TYPE_CHECKING:
    from lockstep.tinker.embedded import EmbeddedBackend
    from lockstep.tinker.record import RunRecords

LOGGER = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Interval of looking for silent sessions."""
EXPIRE_SECONDS = 60.0
"""Interval of deleting what is over."""
MAX_INLINE_BYTES = 1_000_000
"""Size above which a result is told before it is sent, so that a client has room for it."""
MAX_CONCURRENT_SAMPLES = 512
"""Requests that a sampling client has open at a time. Each holds a connection of the client and of
the server, and systems commonly allow a process 1024 files."""
UNLOAD = -1
"""Seq_id of the request that unloads a model: it is outside the order."""
PROTOBUF_KINDS = ("forward_backward", "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer about a future."""

    status: int = 200
    body: bytes
    content_type: str = "application/json"


class TinkerService:
    """Serves `backend` over a store directory, from `start` to `close`.

    Methods take the checked JSON body of a request and return the JSON of its answer. They raise
    TinkerError or Refusal, both with an HTTP status, for what is refused.
    """

    def __init__(
        self,
        backend: EmbeddedBackend,
        directory: Path,
        config: TinkerConfig | None = None,
        *,
        records: RunRecords | None = None,
    ) -> None:
        """records: write the run directories of the models; None writes none.

        Raises RunError if another process uses the directory, or a model in it needs a base model
        that is not served.
        """
        self.config = config or TinkerConfig()
        self.bases = {base.name: base for base in backend.base_models}
        directory.mkdir(parents=True, exist_ok=True)
        self._backend, self._directory, self._records = backend, directory, records
        self._journal = journal = Journal(directory / "journal.sqlite")
        self.store = CheckpointStore(directory, journal)
        self._samplers = SamplerPool(
            backend, bases=self.bases, journal=journal, store=self.store, config=self.config
        )
        self._origins = Origins(journal, self.config)
        self._sessions, self._models = journal.all(Session), journal.all(Model)
        self._losses = journal.all(Loss)
        self._custom = {loss.id: _loss_of(Value(loss.body)) for loss in self._losses.values()}
        self._runs: dict[str, TrainingRun] = {}
        self._seen = dict.fromkeys(self._sessions, time.monotonic())
        """Session -> when it last gave a sign of life."""
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._settled: dict[str, asyncio.Event] = {}
        """Request or target -> set when it, or another one of it, is settled."""
        self._endings: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Goes on where the last process ended. Models are restored one after the other, while the
        service already answers."""
        alive = [model for model in self._models.values() if not model.ended]
        for needed in [*alive, *self._samplers.known.values()]:
            base = needed.spec["base_model"] if isinstance(needed, Model) else needed.base_model
            if base not in self.bases:
                raise RunError(
                    f"{self._directory} has {needed.id}, which needs {base}; served are "
                    f"{', '.join(self.bases)}. Serve that model, or choose another directory."
                )
        for model in alive:
            self._run_of(model)
        for request in self._journal.waiting():
            self._resume(request)
        for model in alive:
            self._runs[model.id].start()
        for session in self._sessions.values():
            if session.ended:  # the last process may have been killed while it freed what it had
                self._spawn(self._free(session))
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def _resume(self, request: Request) -> None:
        """Goes on with a request that was accepted by a process that has ended."""
        run = self._runs.get(request.target)
        if request.kind == "sample" and request.target in self._samplers.known:
            self._start_sample(request)
        elif run is not None and request.kind == "unload_model":
            run.end("the client asked for it", request)
        elif run is not None:
            run.submit(request)
        else:
            self._journal.fail(request, "its session ended before it was executed.", "server")

    async def close(self) -> None:
        """Stops at once; the journal keeps what is left. The backend stays open."""
        tasks = [*self._samples.values(), *self._endings]
        tasks += [] if self._sweeper is None else [self._sweeper]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(run.stop() for run in self._runs.values()))
        self._journal.close()

    async def _sweep(self) -> None:
        due = 0.0
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            for session in self._sessions.values():
                silent = now - self._seen.get(session.id, now)
                if not session.ended and silent > self.config.silent_seconds:
                    self._end(session, f"nothing was heard of its client for {silent:.0f} s")
            if now < due:
                continue
            due = now + EXPIRE_SECONDS
            try:
                await self._expire()
            except Exception:  # a full disk, say: tried again
                LOGGER.exception("what is over could not be deleted")

    async def _expire(self) -> None:
        self.store.expire()
        await self._samplers.expire()
        now = time.time()
        before = now - self.config.result_seconds
        over = [s.id for s in self._sessions.values() if s.ended and s.ended_at < before]
        drawn_before = now - self.config.drawn_seconds
        with self._journal.transaction():
            self._journal.expire(fetched_before=before, drawn_before=drawn_before, sessions=over)

    # -- sessions ---------------------------------------------------------------------------------

    def create_session(self, body: Value) -> dict[str, Any]:
        session = Session(
            id=secrets.token_hex(8),
            created=time.time(),
            metadata=metadata_of(body["user_metadata"]),
            display_name=body["display_name"].text("") or None,
        )
        self._journal.put(session)
        self._sessions[session.id], self._seen[session.id] = session, time.monotonic()
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, body: Value) -> dict[str, Any]:
        self._session(body["session_id"].text())
        return {"type": "session_heartbeat"}

    def finish_session(self, body: Value, session_id: str) -> dict[str, Any]:
        """Ends a session; the first reason counts."""
        session = self._sessions.get(session_id)
        if session is not None and not session.ended:
            reason = body["reason"]["type"].text("success")
            self._end(session, f"its client finished ({reason[:40]})")
        return {}

    def _session(self, session_id: str) -> Session:
        """Returns a session that is not over, and notes the sign of life. Raises TinkerError (404),
        (410)."""
        session = self._sessions.get(session_id)
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
        self._seen[session_id] = time.monotonic()
        return session

    def _end(self, session: Session, reason: str) -> None:
        """Unloads what a session has in memory. Its checkpoints stay."""
        session.ended, session.ended_at = reason, time.time()
        self._journal.put(session)
        self._spawn(self._free(session))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _free(self, session: Session) -> None:
        runs = [run for run in self._runs.values() if run.record.session == session.id]
        for run in runs:
            run.end(session.ended)
        await asyncio.gather(*(run.ended() for run in runs))
        for run in runs:
            self._runs.pop(run.record.id, None)
        ended = {s.id for s in self._samplers.known.values() if s.session == session.id}
        for request_id, task in list(self._samples.items()):
            if task.get_name() in ended:
                await self._cancel(request_id, f"its session is over: {session.ended}.")
        await self._samplers.end(session.id)
        for loss in [each for each in self._losses.values() if each.session == session.id]:
            self._journal.remove(loss)
            del self._losses[loss.id], self._custom[loss.id]

    def sessions(self) -> dict[str, Any]:
        return {"sessions": [*self._sessions][::-1]}

    def session(self, session_id: str) -> dict[str, Any]:
        session = self._sessions.get(session_id)
        if session is None:
            raise not_found(f"session {session_id[:80]!r} is not known.")
        samplers = self._samplers.known.values()
        return {
            "training_run_ids": [m.id for m in self._models.values() if m.session == session_id],
            "sampler_ids": [each.id for each in samplers if each.session == session_id],
            "user_metadata": _notes(session.metadata),
            "display_name": session.display_name,
        }

    # -- models -----------------------------------------------------------------------------------

    def create_model(self, body: Value) -> dict[str, Any]:
        spec = model_spec_of(body)
        base = self._base(body["base_model"])
        return self._make(body, "create_model", replace(spec, base_model=base.name))

    def load_weights(self, body: Value) -> dict[str, Any]:
        """Loads a checkpoint into a new model (create-via-load), or one that has just been made."""
        path = body["path"].text()
        with_optimizer = body["optimizer"].truth()
        if body["model_id"].raw is not None:
            run = self._run(body["model_id"].text())

            def read() -> dict[str, Any]:
                checkpoint = self._loadable(path, with_optimizer)
                if ModelSpec(**checkpoint.spec) != replace(run.spec, seed=checkpoint.spec["seed"]):
                    raise invalid(
                        f"{path} is of {_described(checkpoint.spec)}, and {run.record.id} of "
                        f"{_described(run.record.spec)}. Use create_training_client_from_state."
                    )
                return body.object()

            return self._submit_json("load_weights", body, read)
        checkpoint = self._loadable(path, with_optimizer)
        check_optimizer(body["optimizer_config"])
        if body["base_model"].raw is not None:
            base = self._base(body["base_model"])
            if base.name != checkpoint.spec["base_model"]:
                raise invalid(f"{path} is of {checkpoint.spec['base_model']}, not of {base.name}.")
        return self._make(body, "load_weights", ModelSpec(**checkpoint.spec))

    def _loadable(self, path: str, with_optimizer: bool) -> Checkpoint:
        checkpoint = self.store.find(path)
        if with_optimizer and not checkpoint.has_optimizer:
            raise invalid(
                f"{path} has no optimizer state: it was saved for sampling. Load it without "
                "(create_training_client_from_state), or a checkpoint of save_state."
            )
        return checkpoint

    def _make(self, body: Value, kind: str, spec: ModelSpec) -> dict[str, Any]:
        """Accepts a model's request 0. The client derives the same id."""
        session = self._session(body["session_id"].text())
        number = whole_number(body["model_seq_id"])
        model_id, metadata = f"{session.id}:train:{number}", metadata_of(body["user_metadata"])
        if spec.seed is None:  # a restart must draw the same again
            spec = replace(spec, seed=derive_seed(model_id) % 2**31)
        with self._journal.transaction():
            if model_id not in self._models:
                now = time.time()
                model = Model(
                    id=model_id,
                    session=session.id,
                    spec=asdict(spec),
                    created=now,
                    last_request=now,
                    metadata=metadata,
                )
                self._journal.put(model)
                self._models[model_id] = model
                self._run_of(model).start()
            run = self._run(model_id)
            return self._submit(run, kind, 0, _canonical(body), body.object)

    def _run_of(self, model: Model) -> TrainingRun:
        records = self._records
        run = self._runs[model.id] = TrainingRun(
            model,
            base=self.bases[model.spec["base_model"]],
            backend=self._backend,
            journal=self._journal,
            store=self.store,
            samplers=self._samplers,
            config=self.config,
            run_record=None if records is None else records.of(model.id, ModelSpec(**model.spec)),
            read=self._read,
            settle=self._settle,
        )
        return run

    def _run(self, model_id: str) -> TrainingRun:
        """Raises TinkerError (404), (410)."""
        model = self._models.get(model_id)
        if model is None:
            raise not_found(
                f"model {model_id[:200]!r} is not known to this server. Make it with "
                "create_lora_training_client, or load a checkpoint."
            )
        self._session(model.session)
        run = self._runs.get(model_id)
        if run is None or model.ended:
            raise TinkerError(
                f"model {model_id} was unloaded: {model.ended}. Continue from a checkpoint with "
                "create_training_client_from_state_with_optimizer.",
                status=410,
            )
        return run

    def _base(self, name: Value) -> BaseModel:
        found = self.bases.get(name.text().partition(":")[0])
        if found is None:
            raise not_found(
                f"base_model={name.text()[:120]!r} is not served here; expected "
                f"{' or '.join(map(repr, self.bases))}."
            )
        return found

    def get_info(self, body: Value) -> dict[str, Any]:
        run = self._run(body["model_id"].text())
        name = run.base.name
        about = {"arch": run.base.architecture, "model_name": name, "tokenizer_id": name}
        return {
            "type": "get_info",
            "model_id": run.record.id,
            "model_data": about,
            **_adapter_of(run.record.spec),
            "model_name": name,
        }

    # -- requests of models -----------------------------------------------------------------------

    def forward_backward(self, raw: bytes) -> dict[str, Any]:
        try:
            found = parse_forward_backward(raw)
        except TinkerError as error:
            self.refuse_forward_backward(raw, error)
            raise
        run = self._run(found.model_id)
        # Serialized anew: a retry may have its maps in another order.
        return self._submit(
            run,
            "forward_backward",
            found.seq_id,
            found.SerializeToString(deterministic=True),
            lambda: self._origins.check(self._forward_backward_of(found, run), is_new=True),
        )

    def refuse_forward_backward(self, head: bytes, error: TinkerError) -> None:
        """Notes a request whose body cannot be read, by the beginning of it: the client goes on
        with the next one, which must not wait for this."""
        told = peek_forward_backward(head)
        run = self._runs.get(told[0]) if told is not None else None
        if told is None or run is None or told[1] < run.next_seq_id:
            return
        if self._journal.find(*told) is None:
            self._refuse(run, "forward_backward", told[1], b"", error)

    def optim_step(self, body: Value) -> dict[str, Any]:
        return self._submit_json("optim_step", body, lambda: optim_step_of(body))

    def save_weights(self, body: Value) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            _check_ttl(body["ttl_seconds"])
            metadata_of(body["user_metadata"])
            body["overwrite"].truth()
            if body["path"].raw is not None:
                path_of(body["model_id"].text(), "weights", body["path"].text())
            return body.object()

        return self._submit_json("save_weights", body, read)

    def save_weights_for_sampler(self, body: Value) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            _check_ttl(body["ttl_seconds"])
            metadata_of(body["user_metadata"])
            if body["kind"].text("snapshot") not in ("snapshot", "inflight"):
                raise body["kind"].wrong('"snapshot" or "inflight"')
            if body["path"].raw is not None:
                path_of(body["model_id"].text(), "sampler_weights", body["path"].text())
            elif body["sampling_session_seq_id"].integer(0) is None:
                raise body["path"].wrong("a name, unless sampling_session_seq_id is given")
            return body.object()

        return self._submit_json("save_weights_for_sampler", body, read)

    def save_weights_external(self, body: Value) -> dict[str, Any]:
        """Refuses the request; its seq_id is used up."""

        def read() -> None:
            raise not_found(
                "save_weights_external is for weights for other providers, which the hosted "
                "service alone has. Save a checkpoint, and write it with `lockstep export`."
            )

        return self._submit_json("save_weights_external", body, read)

    def unload_model(self, body: Value) -> dict[str, Any]:
        run = self._run(body["model_id"].text())
        request = Request(run.record.session, run.record.id, UNLOAD, "unload_model")
        if self._journal.find(request.target, UNLOAD) is None:
            self._journal.add(request, b"")
            run.end("the client asked for it", request)
        return {"request_id": request.id, "model_id": run.record.id}

    def _submit_json(self, kind: str, body: Value, read: Callable[[], Any]) -> dict[str, Any]:
        run = self._run(body["model_id"].text())
        return self._submit(run, kind, whole_number(body["seq_id"], 1), _canonical(body), read)

    def _submit(
        self, run: TrainingRun, kind: str, seq_id: int, body: bytes, read: Callable[[], Any]
    ) -> dict[str, Any]:
        """Accepts a request of a model once. read: checks its body; a refusal uses up the seq_id,
        as the client goes on with the next."""
        answer = {"model_id": run.record.id}
        digest = digest_of(kind, _without_retry(kind, body))
        known = self._journal.find(run.record.id, seq_id)
        if known is not None:
            return {"request_id": _same(known, digest, run.record.id, seq_id), **answer}
        run.check_ahead(seq_id)
        try:
            value = read()
        except (TinkerError, Refusal) as error:
            self._refuse(run, kind, seq_id, digest, error)
            raise
        request = Request(run.record.session, run.record.id, seq_id, kind, body)
        self._journal.add(request, digest)
        run.submit(replace(request, value=value))
        return {"request_id": request.id, **answer}

    def _refuse(
        self, run: TrainingRun, kind: str, seq_id: int, digest: bytes, error: TinkerError | Refusal
    ) -> None:
        request = Request(run.record.session, run.record.id, seq_id, kind)
        self._journal.refuse(request, digest, str(error), error.status)
        run.skip(seq_id)

    def _forward_backward_of(self, found: Any, run: TrainingRun) -> ForwardBackward:
        known = self._custom.get
        return forward_backward_of(
            found, run.base, find_loss=known, substitute=self.config.substitute
        )

    def _sampling_of(self, body: Value, sampler: Sampler) -> Sampling:
        return sampling_of(body, self._samplers.base_of(sampler), substitute=self.config.substitute)

    def _read(self, request: Request) -> Any:
        """Reads the body of a journalled request again, unless it is still at hand."""
        if request.value is not None:
            return request.value
        if request.kind == "sample":
            sampler = self._samplers.find(request.target)
            return self._sampling_of(Value(json.loads(request.body)), sampler)
        run = self._runs[request.target]
        if request.kind == "forward_backward":
            asked = self._forward_backward_of(parse_forward_backward(request.body), run)
            return self._origins.check(asked, is_new=False)
        body = json.loads(request.body)
        return optim_step_of(Value(body)) if request.kind == "optim_step" else body

    # -- custom losses ----------------------------------------------------------------------------

    def create_custom_loss(self, body: Value) -> dict[str, Any]:
        """Stores a loss that the backend allows; its future is done at once."""
        session = self._session(body["session_id"].text())
        number = whole_number(body["custom_loss_seq_id"])
        target, raw = f"{session.id}:loss", _canonical(body)
        digest, known = digest_of("create_custom_loss", raw), self._journal.find(target, number)
        if known is not None:
            return {"request_id": _same(known, digest, target, number)}
        custom = _loss_of(body)
        self._backend.check_loss(custom)
        loss = Loss(id=f"{target}:{number}", session=session.id, body=body.object())
        request = Request(session.id, target, number, "create_custom_loss")
        with self._journal.transaction():
            self._journal.put(loss)
            self._journal.add(request, digest)
            payload = as_json({"loss_id": loss.id, "type": "create_custom_loss"})
            self._journal.finish(request, payload)
        self._losses[loss.id], self._custom[loss.id] = loss, custom
        return {"request_id": request.id}

    # -- samplers ---------------------------------------------------------------------------------

    async def create_sampling_session(self, body: Value) -> dict[str, Any]:
        session = self._session(body["session_id"].text())
        number = whole_number(body["sampling_session_seq_id"])
        sampler_id = f"{session.id}:sample:{number}"
        path = body["model_path"].text("") or None
        checkpoint = None if path is None else self.store.find(path)
        sampler = Sampler(
            id=sampler_id,
            session=session.id,
            base_model=self._base(body["base_model"]).name
            if checkpoint is None
            else checkpoint.spec["base_model"],
            directory=None if checkpoint is None else f"samplers/{sampler_id}",
            model_path=path,
            version=0 if checkpoint is None else checkpoint.num_updates,
        )
        known = self._samplers.known.get(sampler.id)
        if known is None:
            if checkpoint is not None:  # its own, as the checkpoint may be deleted or replaced
                place = self.store.directory / str(sampler.directory)
                await self.store.link(self.store.place(checkpoint.id), place)
            self._samplers.add(sampler)
        elif (known.model_path, known.base_model) != (path, sampler.base_model):
            raise invalid(
                f"sampling_session_seq_id={number} of session {session.id} was used before for "
                f"other weights ({known.model_path or known.base_model}). Count by one."
            )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        found = self._samplers.find(sampler_id)
        about = {"sampler_id": found.id, "base_model": found.base_model}
        return about | ({} if found.model_path is None else {"model_path": found.model_path})

    def sample(self, body: Value) -> dict[str, Any]:
        sampler = self._samplers.find(body["sampling_session_id"].text())
        self._session(sampler.session)
        seq_id, raw = whole_number(body["seq_id"], 0, MAX_SAMPLE_SEQ_ID), _canonical(body)
        digest, known = digest_of("sample", raw), self._journal.find(sampler.id, seq_id)
        num_samples = body["num_samples"].integer(1) or 1
        if known is not None:
            return _accepted(_same(known, digest, sampler.id, seq_id), num_samples)
        if len(self._samples) >= self.config.max_pending_samples:
            raise TinkerError(
                f"{len(self._samples)} requests for samples are waiting "
                "(tinker.max_pending_samples); ask again in a second.",
                status=429,
            )
        asked = self._sampling_of(body, sampler)
        request = Request(sampler.session, sampler.id, seq_id, "sample", raw)
        self._journal.add(request, digest)
        self._start_sample(replace(request, value=asked))
        return _accepted(request.id, num_samples)

    def _start_sample(self, request: Request) -> None:
        task = asyncio.get_running_loop().create_task(self._sample(request), name=request.target)
        self._samples[request.id] = task
        task.add_done_callback(lambda _: self._samples.pop(request.id, None))

    async def _sample(self, request: Request) -> None:
        try:
            asked: Sampling = self._read(request)
            sampler = self._samplers.find(request.target)
            result = await self._samplers.sample(sampler, asked, request.seq_id, request.id)
            outcome: Done | BaseException = Done(
                payload=write_sampling(result, asked),
                write=lambda: self._origins.add(request, asked, result),
            )
        except Exception as error:
            outcome = error
        await self._settle(request, outcome)

    async def cancel(self, body: Value) -> dict[str, Any]:
        """Stops a request for samples; any other one is executed nevertheless."""
        await self._cancel(body["request_id"].text(), "the client cancelled it.")
        return {}

    async def _cancel(self, request_id: str, reason: str) -> None:
        task, found = self._samples.get(request_id), self._journal.outcome(request_id)
        if task is None or found is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._journal.outcome(request_id)[1].state == "waiting":  # type: ignore[index]
            await self._settle(found[0], TinkerError(reason))

    # -- futures ----------------------------------------------------------------------------------

    async def _settle(self, request: Request, outcome: Done | BaseException) -> None:
        """Writes an outcome, and wakes those who wait for it. While the disk does not take it, it
        is tried again: the request is not executed twice."""
        if isinstance(outcome, Exception) and not isinstance(outcome, TinkerError):
            LOGGER.error("%s %s failed", request.kind, request.id, exc_info=outcome)
        while True:
            try:
                self._write(request, outcome)
                break
            except sqlite3.OperationalError as error:
                LOGGER.error("the result of %s cannot be written: %s", request.id, error)
                await asyncio.sleep(1.0)
        self._samples.pop(request.id, None)
        for name in (request.id, request.target):
            if (event := self._settled.pop(name, None)) is not None:
                event.set()

    def _write(self, request: Request, outcome: Done | BaseException) -> None:
        with self._journal.transaction():
            match outcome:
                case Done():
                    for record in outcome.records:
                        self._journal.put(record)
                    if outcome.write is not None:
                        outcome.write()
                    self._journal.finish(request, outcome.payload, keeps_body=outcome.keeps_body)
                case TinkerError():
                    self._journal.fail(request, str(outcome), outcome.category)
                case Refusal():
                    self._journal.fail(request, str(outcome), "user")
                case _:
                    self._journal.fail(request, named(outcome), "server")

    async def retrieve(self, body: Value) -> Reply:
        """Waits for a result for a while. It may be fetched any number of times."""
        request_id = body["request_id"].text()
        found = await self._settled_within(request_id, self.config.hold_seconds)
        if found is None:
            raise not_found(
                f"request {request_id[:80]!r} is not known to this server: it was never accepted, "
                "or its session ended long ago. Send the request again."
            )
        request, outcome = found
        if request.session in self._seen:
            self._seen[request.session] = time.monotonic()
        match outcome.state:
            case "waiting":
                state = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return Reply(status=408, body=as_json(state))
            case "expired":
                raise TinkerError(
                    f"the result of {request_id} was fetched before, and deleted "
                    f"{self.config.result_seconds:g} s later (tinker.result_seconds).",
                    status=410,
                )
            case "failed" | "refused":
                text, category = outcome.result.decode(), outcome.category
                self._journal.mark_fetched(request_id)
                return Reply(body=as_json({"error": text, "category": category}))
        size = len(outcome.result)
        if body["allow_metadata_only"].truth() and size > MAX_INLINE_BYTES:
            told = {"status": "complete_metadata", "response_payload_size": size}
            return Reply(body=as_json(told))
        self._journal.mark_fetched(request_id)
        kind = PROTOBUF if request.kind in PROTOBUF_KINDS else "application/json"
        return Reply(body=outcome.result, content_type=kind)

    async def _settled_within(
        self, request_id: str, seconds: float
    ) -> tuple[Request, Outcome] | None:
        if request_id not in self._samples:
            found = self._journal.outcome(request_id)
            if found is None or found[1].state != "waiting":
                return found
        await self._wait_for(request_id, seconds)
        return self._journal.outcome(request_id)

    async def _wait_for(self, name: str, seconds: float) -> None:
        """Waits until the request, or another one of the target, is settled."""
        event = self._settled.setdefault(name, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    async def retrieve_many(self, body: Value) -> dict[str, Any]:
        """Tells which requests of one sampling client have a result, after the `prev_cursor`-th."""
        target = body["target"]
        sampler = self._samplers.find(target["sampling_session_id"].text())
        self._session(sampler.session)
        clone = target["cloned_sampler_id"].integer(0, MAX_SAMPLE_SEQ_ID // CLONE - 1) or 0
        cursor = body["prev_cursor"].integer(0, 2**63 - 1) or 0
        seconds = body["timeout"].number(0, 1e9)
        for request_id in body["retrieved_request_ids"].entries(MAX_SEQ_ID):
            self._journal.mark_fetched(request_id.text())
        ends = time.monotonic() + min(
            self.config.hold_seconds, self.config.hold_seconds if seconds is None else seconds
        )
        while not (found := self._journal.completions(sampler.id, clone, cursor)):
            if (left := ends - time.monotonic()) <= 0:
                break
            await self._wait_for(sampler.id, left)
        completions = [
            {"state": "finished", "request_id": name, "response_payload_uncompressed_size": size}
            if state == "done"
            else {"state": "failed", "request_id": name}
            for name, state, size in ((f"{sampler.id}/{each[1]}", *each[2:]) for each in found)
        ]
        return {"completions": completions, "cursor": found[-1][0] if found else cursor}

    # -- what is stored ---------------------------------------------------------------------------

    def weights_info(self, body: Value) -> dict[str, Any]:
        spec = self.store.find(body["tinker_path"].text()).spec
        names = ("base_model", "train_unembed", "train_mlp", "train_attn")
        return {name: spec[name] for name in names} | _adapter_of(spec)

    def training_run(self, model_id: str) -> dict[str, Any]:
        model = self._models.get(model_id)
        if model is None:
            raise not_found(f"training run {model_id[:200]!r} is not known.")
        last: dict[str, Checkpoint] = {}
        for checkpoint in self.store.of_model(model_id):
            last.setdefault(_kind(checkpoint), checkpoint)
        return {
            "training_run_id": model.id,
            "base_model": model.spec["base_model"],
            "model_owner": "local",
            **_adapter_of(model.spec),
            "corrupted": model.ended.startswith(("its state could", "it could not")),
            "last_request_time": _time(model.last_request),
            "last_checkpoint": _shown(last["training"]) if "training" in last else None,
            "last_sampler_checkpoint": _shown(last["sampler"]) if "sampler" in last else None,
            "user_metadata": _notes(model.metadata),
        }

    def counts(self) -> dict[str, int]:
        """Counts what the store holds, for people."""
        live = sum(not session.ended for session in self._sessions.values())
        return {
            "sessions": len(self._sessions),
            "of them live": live,
            "training runs": len(self._models),
            "checkpoints": sum(1 for _ in self.store.of_model()),
        }

    def training_runs(self, *, limit: int, offset: int) -> dict[str, Any]:
        ids = [*self._models][::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(ids)}
        found = [self.training_run(each) for each in ids[offset : offset + limit]]
        return {"training_runs": found, "cursor": cursor}

    def checkpoints(
        self, model_id: str | None, *, limit: int = 10**9, offset: int = 0
    ) -> dict[str, Any]:
        if model_id is not None:
            self.training_run(model_id)
        found = [_shown(each) for each in self.store.of_model(model_id)]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    def delete_checkpoint(self, model_id: str, segment: str, name: str) -> dict[str, Any]:
        self.store.delete(self.store.find(f"{SCHEME}{model_id}/{segment}/{name}"))
        return {}

    def set_ttl(self, body: Value, model_id: str, segment: str, name: str) -> dict[str, Any]:
        checkpoint = self.store.find(f"{SCHEME}{model_id}/{segment}/{name}")
        self.store.set_ttl(checkpoint, _check_ttl(body["ttl_seconds"]))
        return {}

    def capabilities(self) -> dict[str, Any]:
        models = [
            {"model_name": base.name, "max_context_length": base.max_tokens}
            for base in self.bases.values()
        ]
        can = {"trainable": True, "sampleable": True}
        return {"supported_models": [model | can for model in models]}

    def client_config(self) -> dict[str, Any]:
        """Flags for clients."""
        return {
            "sample_use_retrieve_futures": self.config.uses_retrieve_futures,
            "custom_loss_server_side": True,
            "sample_max_concurrent_requests": MAX_CONCURRENT_SAMPLES,
            # Old clients write JSON otherwise; later ones know neither.
            "proto_write_fwdbwd": True,
            "fwd_via_fwdbwd": True,
        }


# -- small things ---------------------------------------------------------------------------------


def _canonical(body: Value) -> bytes:
    return json.dumps(body.object(), sort_keys=True).encode()


def _without_retry(kind: str, body: bytes) -> bytes:
    """The body without what a client changes when it sends the same request again."""
    if kind != "save_weights_for_sampler":
        return body
    kept = json.loads(body)
    kept.pop("sampling_session_seq_id", None)
    return json.dumps(kept, sort_keys=True).encode()


def _same(known: tuple[Request, Outcome], digest: bytes, target: str, seq_id: int) -> str:
    """The id of a request that came before. Raises TinkerError for another payload, and the refusal
    again."""
    request, outcome = known
    if outcome.digest != digest:
        raise invalid(
            f"seq_id={seq_id} of {target} was used before with another payload"
            + (f" ({outcome.result.decode()})" if outcome.state == "refused" else "")
            + ". Count by one for each request; a repeated one must be the same."
        )
    if outcome.state == "refused":
        raise TinkerError(outcome.result.decode(), status=int(outcome.category))
    return request.id


def _accepted(request_id: str, num_samples: int) -> dict[str, Any]:
    names = [f"{request_id}.{at}" for at in range(num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": names}


def _loss_of(body: Value) -> CustomLoss:
    inputs: list[tuple[str, int]] = []
    for each in body["inputs"].entries():
        rank = each["rank"].integer(0, 2)
        if rank is None:
            raise each["rank"].wrong("0, 1 or 2")
        inputs.append((each["name"].text(), rank))
    return CustomLoss(name=body["name"].text(), inputs=tuple(inputs), graph=body["graph"].object())


def _check_ttl(seconds: Value) -> int | None:
    return seconds.integer(MIN_TTL_SECONDS, MAX_TTL_SECONDS)


def _described(spec: Mapping[str, Any]) -> str:
    return f"{spec['base_model']} with an adapter of rank {spec['rank']}"


def _adapter_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"is_lora": spec["rank"] > 0, "lora_rank": spec["rank"]}


def _kind(checkpoint: Checkpoint) -> str:
    return SEGMENTS[checkpoint.id.split("/")[-2]]


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(checkpoint.id.split("/")[-2:]),
        "checkpoint_type": _kind(checkpoint),
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.id,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
        "user_metadata": _notes(checkpoint.metadata),
    }


def _notes(metadata: Any) -> dict[str, str] | None:
    """The sender's notes as clients read them; a journal may have others of before."""
    if not isinstance(metadata, dict):
        return None
    return {str(name): str(value) for name, value in metadata.items()} or None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
