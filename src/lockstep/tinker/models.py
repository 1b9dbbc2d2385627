"""Models in training: the requests of one in order, its state and its recovery, and how clients
make models and ask them for work."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.reading import Value
from lockstep.agent.tasks import derive_seed
from lockstep.errors import named
from lockstep.tinker import wire
from lockstep.tinker.checkpoints import check_ttl, expiry, path_of, size_of
from lockstep.tinker.futures import Done
from lockstep.tinker.graph import GraphLoss
from lockstep.tinker.journal import Accepted, Checkpoint, Sampler, Trained, UploadedLoss, digest_of
from lockstep.tinker.requests import (
    ForwardBackward,
    ModelSpec,
    OptimStep,
    TinkerError,
    invalid,
    not_found,
)
from lockstep.tinker.resources import Resources, metrics_of
from lockstep.tinker.samplers import Samplers
from lockstep.tinker.wire import write_forward_backward

LOGGER = logging.getLogger(__name__)

MAX_AHEAD = 100_000
"""Requests that may be held because an earlier one has not come."""


class TinkerRun:
    """Executes the requests of one model strictly in order, from `start` until it is ended.

    read: reads a journalled body again.
    """

    def __init__(
        self,
        record: Trained,
        resources: Resources,
        *,
        samplers: Samplers,
        read: Callable[[Accepted], Any],
    ) -> None:
        self.record, self.spec = record, ModelSpec(**record.spec)
        self.base = resources.bases[self.spec.base_model]
        self._config, self._store = resources.config, resources.store
        self._backend, self._journal = resources.backend, resources.journal
        self._samplers, self._read, self._settle = samplers, read, resources.futures.settle
        self._run_record = resources.open_record and resources.open_record(record.id, self.spec)
        self.next_seq_id, refused = self._journal.progress(record.id)
        self._held: dict[int, Accepted | None] = dict.fromkeys(refused)
        """Seq_id -> request, None where it was refused."""
        self._arrived = asyncio.Event()
        self._ending = ""
        self._unload: Accepted | None = None
        self._work_seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Stops working; the journal keeps the waiting requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._tell_record("close")

    async def ended(self) -> None:
        """Waits until it is unloaded."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # -- order ------------------------------------------------------------------------------------

    def submit(self, request: Accepted) -> None:
        """Takes a request that the journal has."""
        self._held[request.seq_id] = request
        self.record.last_request = time.time()
        self._arrived.set()

    def skip(self, seq_id: int) -> None:
        """Goes past a request that was refused."""
        if seq_id >= self.next_seq_id:
            self._held[seq_id] = None
            self._arrived.set()

    def end(self, reason: str, unload: Accepted | None = None) -> None:
        """Unloads the model after what can still be executed in order. unload: the client's request
        for it."""
        self._ending = self._ending or reason
        self._unload = unload or self._unload
        self._arrived.set()

    async def _next(self) -> Accepted | None:
        """Waits for the next request in order; None at the end."""
        deadline: float | None = None  # of the missing request, once another is held behind it
        while True:
            while self.next_seq_id in self._held:
                request, deadline = self._held.pop(self.next_seq_id), None
                self.next_seq_id += 1
                if request is not None:
                    return request
            if self._ending:
                return None
            if self._held and deadline is None:
                deadline = asyncio.get_running_loop().time() + self._config.missing_seconds
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                self._give_up()

    def _give_up(self) -> None:
        text = (
            f"request {self.next_seq_id} of {self.record.id} did not arrive within "
            f"{self._config.missing_seconds:g} s, while {len(self._held)} later ones waited; they "
            "were executed without it."
        )
        LOGGER.warning(text)
        request = Accepted(self.record.session, self.record.id, self.next_seq_id, "missing")
        self._journal.refuse(request, text, 422)
        self.skip(self.next_seq_id)

    # -- execution --------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            await self._restore()
        except Exception as error:
            LOGGER.exception("%s could not be restored", self.record.id)
            self.end(f"its state could not be restored ({named(error)})")
            self.next_seq_id = -1  # nothing is in order any more
        while (request := await self._next()) is not None:
            await self._run(request)
        await self._unload_model()

    async def _run(self, request: Accepted) -> None:
        started = time.monotonic()
        try:
            done = await getattr(self, f"_do_{request.kind}")(request)
        except Exception as error:
            await self._settle(request, error)
            if not self.record.is_made:
                self.end(f"it could not be made ({named(error)})")
            return
        self._work_seconds += time.monotonic() - started
        await self._settle(request, done)
        if done.then is not None:
            try:
                await done.then()
            except Exception:  # the client has its result; the next update tries again
                LOGGER.exception("after %s %d of %s", request.kind, request.seq_id, request.target)

    async def _unload_model(self) -> None:
        record = self.record
        await self._backend.unload_model(record.id)
        await self._tell_record("close")
        error = TinkerError(f"{record.id} was unloaded: {self._ending}.")
        for request in self._held.values():
            if request is not None:
                await self._settle(request, error)
        self._held.clear()
        record.ended = self._ending
        with self._journal.transaction():
            self._journal.put(record)
            self._journal.forget_bodies(record.id, self.next_seq_id)
        self._store.remove(self._states())
        if self._unload is not None:
            await self._settle(self._unload, Done(payload={"model_id": record.id}))

    # -- requests ---------------------------------------------------------------------------------

    async def _do_create_model(self, request: Accepted) -> Done:
        await self._backend.create_model(self.record.id, self.spec)
        self.record.is_made = True
        return Done(payload={"model_id": self.record.id}, records=(self.record,))

    async def _do_load_weights(self, request: Accepted) -> Done:
        """Makes the checkpoint the model's state, so that a restart needs it no more."""
        record, body = self.record, self._read(request)
        checkpoint = self._store.find(body["path"])
        state = self._states(request.seq_id)
        await self._store.link(self._store.place(checkpoint.id), state)
        if not record.is_made:
            await self._backend.create_model(record.id, self.spec)
        await self._backend.load(record.id, state, with_optimizer=body["optimizer"])
        record.is_made, record.has_optimizer = True, body["optimizer"]
        record.state_seq_id, record.num_updates = request.seq_id, checkpoint.num_updates
        return Done(payload={"path": body["path"], "model_id": record.id}, records=(record,))

    async def _do_forward_backward(self, request: Accepted) -> Done:
        asked: ForwardBackward = self._read(request)
        result = await self._backend.forward_backward(self.record.id, asked)
        metrics = {**metrics_of(asked, self.record.num_updates), **result.metrics}
        payload = write_forward_backward(replace(result, metrics=metrics))
        if asked.is_forward_only:
            return Done(payload=payload)
        record = partial(self._tell_record, "add", asked, result, self.record.num_updates)
        return Done(payload=payload, keeps_body=True, then=record)

    async def _do_optim_step(self, request: Accepted) -> Done:
        asked: OptimStep = self._read(request)
        step = self.record.num_updates
        metrics = await self._backend.optim_step(self.record.id, asked)
        self.record.num_updates += 1

        async def record_and_save() -> None:
            await self._tell_record("step", step, asked, metrics)
            if self._work_seconds >= self._config.state_seconds:
                await self._save_state(request.seq_id)

        payload, then = {"metrics": metrics}, record_and_save
        return Done(payload=payload, records=(self.record,), keeps_body=True, then=then)

    async def _do_save_weights(self, request: Accepted) -> Done:
        body = self._read(request)
        path = path_of(self.record.id, "weights", body.get("path") or f"{request.seq_id:06}")
        if path in self._store.known and not body.get("overwrite"):
            raise TinkerError(f"{path} exists. Take another name or overwrite=True, or delete it.")
        return await self._save(request, path, body, with_optimizer=True)

    async def _do_save_weights_for_sampler(self, request: Accepted) -> Done:
        body = self._read(request)
        if body.get("path"):
            path = path_of(self.record.id, "sampler_weights", body["path"])
            return await self._save(request, path, body, with_optimizer=False)
        number = body["sampling_session_seq_id"]
        sampler = Sampler(
            id=f"{self.record.session}:sample:{number}",
            session=self.record.session,
            base_model=self.base.name,
            directory=f"samplers/{self.record.session}:sample:{number}",
            version=self.record.num_updates,
            model=self.record.id,
            is_inflight=body.get("kind") == "inflight",
        )
        await self._write(self._store.directory / str(sampler.directory), with_optimizer=False)
        followers = self._samplers.followers(sampler)
        replaced = {each.directory for each in followers}
        for each in followers:
            each.directory, each.version = sampler.directory, sampler.version
        self._samplers.add(sampler)
        payload = {"sampling_session_id": sampler.id}
        reload = partial(self._samplers.reload, followers, replaced)
        return Done(payload=payload, records=tuple(followers), then=reload)

    async def _save(
        self, request: Accepted, path: str, body: dict[str, Any], *, with_optimizer: bool
    ) -> Done:
        """Saves the weights under a path."""
        place = self._store.place(path)
        await self._write(place, with_optimizer=with_optimizer)
        checkpoint = Checkpoint(
            id=path,
            spec=self.record.spec,
            num_updates=self.record.num_updates,
            size_bytes=size_of(place),
            has_optimizer=with_optimizer,
            expires=expiry(body.get("ttl_seconds")),
            metadata=wire.metadata_of(Value(body)["user_metadata"]),
        )
        self._store.known[path] = checkpoint
        return Done(payload={"path": path}, records=(checkpoint,))

    async def _write(self, place: Path, *, with_optimizer: bool) -> None:
        async def write(directory: Path) -> None:
            await self._backend.save(self.record.id, directory, with_optimizer=with_optimizer)

        await self._store.write(place, write)

    # -- state ------------------------------------------------------------------------------------

    def _states(self, seq_id: int | None = None) -> Path:
        place = self._store.directory / "states" / self.record.id
        return place if seq_id is None else place / f"{seq_id}"

    async def _save_state(self, seq_id: int) -> None:
        """Saves the state after an update; earlier requests then need no repetition."""
        await self._write(self._states(seq_id), with_optimizer=True)
        self.record.state_seq_id, self.record.has_optimizer = seq_id, True
        with self._journal.transaction():
            self._journal.put(self.record)
            self._journal.forget_bodies(self.record.id, seq_id)
        self._work_seconds = 0.0
        for place in self._states().glob("*"):
            if place.name != f"{seq_id}":
                self._store.remove(place)

    async def _restore(self) -> None:
        """Makes the model as it was when the process ended: the saved state, and what came after
        it. A new model has neither."""
        record = self.record
        if not record.is_made:
            return
        await self._backend.unload_model(record.id)
        await self._backend.create_model(record.id, self.spec)
        if record.state_seq_id >= 0:
            state = self._states(record.state_seq_id)
            await self._backend.load(record.id, state, with_optimizer=record.has_optimizer)
        asked = [self._read(r) for r in self._journal.to_repeat(record.id, record.state_seq_id)]
        step = record.num_updates - sum(isinstance(each, OptimStep) for each in asked)
        for each in asked:
            if isinstance(each, OptimStep):
                metrics = await self._backend.optim_step(record.id, each)
                await self._tell_record("step", step, each, metrics)
                step += 1
            else:
                result = await self._backend.forward_backward(record.id, each)
                await self._tell_record("add", each, result, step)

    # -- the run directory ------------------------------------------------------------------------

    async def _tell_record(self, method: str, *arguments: Any) -> None:
        """Calls a method of the record of the run in a thread, if a record is kept."""
        if self._run_record is not None:
            await asyncio.to_thread(getattr(self._run_record, method), *arguments)


UNLOAD = -1
"""Seq_id of the request that unloads a model: it is outside the order."""


class Models:
    """All models that the journal has; the loaded ones each have a `TinkerRun`."""

    def __init__(self, resources: Resources, samplers: Samplers) -> None:
        self._resources, self._journal, self._store = resources, resources.journal, resources.store
        self._sessions, self._futures = resources.sessions, resources.futures
        self._samplers = samplers
        self.known = self._journal.all(Trained)
        self.runs: dict[str, TinkerRun] = {}
        self._losses = self._journal.all(UploadedLoss)

    # -- life -------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Makes a run of each model that is not unloaded. `start` restores its state."""
        for model in self.known.values():
            if not model.ended:
                self._make_run(model)

    def start(self) -> None:
        """Restores models one after the other, while the service already answers."""
        for run in self.runs.values():
            run.start()

    def resume(self, run: TinkerRun, request: Accepted) -> None:
        """Takes a request that a process accepted before it ended."""
        if request.kind == "unload_model":
            run.end("the client asked for it", request)
        else:
            run.submit(request)

    def _make_run(self, model: Trained) -> TinkerRun:
        run = TinkerRun(model, self._resources, samplers=self._samplers, read=self._read)
        self.runs[model.id] = run
        return run

    # -- making a model ---------------------------------------------------------------------------

    def create(self, body: Value) -> dict[str, Any]:
        spec = wire.model_spec_of(body)
        base = self._resources.base(body["base_model"])
        return self._make(body, "create_model", replace(spec, base_model=base.name))

    def load_weights(self, body: Value) -> dict[str, Any]:
        """Loads a checkpoint into a new model (create-via-load), or a model that was just made."""
        if body["model_id"].raw is not None:
            return self.submit(body, "load_weights")
        checkpoint = self._loadable(body)
        wire.check_optimizer(body["optimizer_config"])
        if body["base_model"].raw is not None:
            base = self._resources.base(body["base_model"])
            if base.name != checkpoint.spec["base_model"]:
                path = body["path"].text()
                raise invalid(f"{path} is of {checkpoint.spec['base_model']}, not of {base.name}.")
        return self._make(body, "load_weights", ModelSpec(**checkpoint.spec))

    def _loadable(self, body: Value) -> Checkpoint:
        path = body["path"].text()
        checkpoint = self._store.find(path)
        if body["optimizer"].truth() and not checkpoint.has_optimizer:
            raise invalid(
                f"{path} has no optimizer state: it was saved for sampling. Load it without "
                "(create_training_client_from_state), or a checkpoint of save_state."
            )
        return checkpoint

    def _make(self, body: Value, kind: str, spec: ModelSpec) -> dict[str, Any]:
        """Accepts a model's request 0. The client derives the same id."""
        session = self._sessions.live(body["session_id"].text())
        number = wire.whole_number(body["model_seq_id"])
        model_id, metadata = f"{session.id}:train:{number}", wire.metadata_of(body["user_metadata"])
        if spec.seed is None:  # a restart must draw the same again
            spec = replace(spec, seed=derive_seed(model_id) % 2**31)
        with self._journal.transaction():
            if model_id not in self.known:
                about = {"spec": asdict(spec), "metadata": metadata}
                model = Trained(id=model_id, session=session.id, **about)
                self._journal.put(model)
                self.known[model_id] = model
                self._make_run(model).start()
            return self._submit(self.run(model_id), kind, 0, wire.canonical(body), body)

    def run(self, model_id: str) -> TinkerRun:
        """Raises TinkerError (404), (410)."""
        model = self.known.get(model_id)
        if model is None:
            raise not_found(
                f"model {model_id[:200]!r} is not known to this server. Make it with "
                "create_lora_training_client, or load a checkpoint."
            )
        self._sessions.live(model.session)
        run = self.runs.get(model_id)
        if run is None or model.ended:
            raise TinkerError(
                f"model {model_id} was unloaded: {model.ended}. Continue from a checkpoint with "
                "create_training_client_from_state_with_optimizer.",
                status=410,
            )
        return run

    def get_info(self, body: Value) -> dict[str, Any]:
        run = self.run(body["model_id"].text())
        name = run.base.name
        return {
            "type": "get_info",
            "model_id": run.record.id,
            "model_data": {"arch": run.base.architecture, "model_name": name, "tokenizer_id": name},
            **adapter_of(run.record.spec),
            "model_name": name,
        }

    # -- requests ---------------------------------------------------------------------------------

    def forward_backward(self, raw: bytes) -> dict[str, Any]:
        try:
            found = wire.parse_forward_backward(raw)
        except TinkerError as error:
            self.refuse_forward_backward(raw, error)
            raise
        # Serialized anew: a retry may have its maps in another order.
        raw = found.SerializeToString(deterministic=True)
        run = self.run(found.model_id)
        return self._submit(run, "forward_backward", found.seq_id, raw, found)

    def refuse_forward_backward(self, head: bytes, error: Refusal) -> None:
        """Notes a request whose body cannot be read, if its beginning names the model and the
        number: the client goes on with the next request, which must not wait for this one."""
        model_id, seq_id = wire.peek_forward_backward(head) or ("", 0)
        run = self.runs.get(model_id)
        if run is None or seq_id < run.next_seq_id or self._journal.find(model_id, seq_id):
            return
        request = Accepted(run.record.session, model_id, seq_id, "forward_backward")
        self._refuse(run, request, error)

    def submit(self, body: Value, kind: str) -> dict[str, Any]:
        """Accepts a request other than forward_backward. kind: `optim_step`, `save_weights`, ..."""
        run, seq_id = self.run(body["model_id"].text()), wire.whole_number(body["seq_id"], 1)
        return self._submit(run, kind, seq_id, wire.canonical(body), body)

    def unload(self, body: Value) -> dict[str, Any]:
        run = self.run(body["model_id"].text())
        request = Accepted(run.record.session, run.record.id, UNLOAD, "unload_model")
        if self._journal.find(request.target, UNLOAD) is None:
            self._journal.add(request)
            self.resume(run, request)
        return {"request_id": request.id, "model_id": run.record.id}

    def _submit(
        self, run: TinkerRun, kind: str, seq_id: int, raw: bytes, body: Any
    ) -> dict[str, Any]:
        """Accepts a request of a model. raw: the form of `body` that is kept. A refusal uses up the
        seq_id, as the client goes on with the next."""
        digest = digest_of(kind, _without_retry(kind, raw))
        request = Accepted(run.record.session, run.record.id, seq_id, kind, raw, digest=digest)

        def read() -> Any:
            if seq_id > run.next_seq_id + MAX_AHEAD:
                raise invalid(
                    f"seq_id={seq_id} of {run.record.id}: the next one is {run.next_seq_id}, and "
                    f"at most {MAX_AHEAD} are held. Count by one for each request."
                )
            try:
                return self._checked(run, kind, body, is_new=True)
            except Refusal as error:
                self._refuse(run, request, error)
                raise

        return self._futures.accept(request, read, run.submit) | {"model_id": run.record.id}

    def _refuse(self, run: TinkerRun, request: Accepted, error: Refusal) -> None:
        self._journal.refuse(request, str(error), error.status)
        run.skip(request.seq_id)

    def _read(self, request: Accepted) -> Any:
        """Reads the body of a journalled request again, unless it is still at hand."""
        if request.value is not None:
            return request.value
        if request.kind == "forward_backward":
            body = wire.parse_forward_backward(request.body)
        else:
            body = Value(json.loads(request.body))
        return self._checked(self.runs[request.target], request.kind, body, is_new=False)

    def _checked(self, run: TinkerRun, kind: str, body: Any, *, is_new: bool) -> Any:
        """The body as the run executes it. is_new: False for a body that was accepted before.
        Raises Refusal."""
        if kind == "forward_backward":
            rules = {"find_loss": self._find_loss, "substitute": self._resources.config.substitute}
            asked = wire.forward_backward_of(body, run.base, **rules)
            return self._resources.origins.check(asked, is_new=is_new)
        if kind == "optim_step":
            return wire.optim_step_of(body)
        if is_new:
            self._check_weights(run, kind, body)
        return body.object()

    def _check_weights(self, run: TinkerRun, kind: str, body: Value) -> None:
        """Raises Refusal for a request about checkpoints that cannot be executed."""
        if kind == "save_weights_external":
            raise not_found(
                "save_weights_external is for weights for other providers, which the hosted "
                "service alone has. Save a checkpoint, and write it with `lockstep export`."
            )
        if kind.startswith("save"):
            check_ttl(body["ttl_seconds"])
            wire.metadata_of(body["user_metadata"])
            body["overwrite"].truth()
            is_for_sampler = kind == "save_weights_for_sampler"
            if body["path"].raw is not None:
                segment = "sampler_weights" if is_for_sampler else "weights"
                path_of(run.record.id, segment, body["path"].text())
            elif is_for_sampler and body["sampling_session_seq_id"].integer(0) is None:
                raise body["path"].wrong("a name, unless sampling_session_seq_id is given")
            if body["kind"].text("snapshot") not in ("snapshot", "inflight"):
                raise body["kind"].wrong('"snapshot" or "inflight"')
        elif kind == "load_weights" and body["model_id"].raw is not None:  # into a loaded model
            spec = self._loadable(body).spec
            if ModelSpec(**spec) != replace(run.spec, seed=spec["seed"]):
                raise invalid(
                    f"{body['path'].text()} is of {_described(spec)}, and {run.record.id} of "
                    f"{_described(run.record.spec)}. Use create_training_client_from_state."
                )

    # -- custom losses ----------------------------------------------------------------------------

    def create_custom_loss(self, body: Value) -> dict[str, Any]:
        """Stores a loss, if all of its operations are allowed; its future is done at once."""
        session = self._sessions.live(body["session_id"].text())
        number = wire.whole_number(body["custom_loss_seq_id"])
        target, digest = f"{session.id}:loss", digest_of("create_custom_loss", wire.canonical(body))
        request = Accepted(session.id, target, number, "create_custom_loss", digest=digest)
        loss = UploadedLoss(id=f"{target}:{number}", session=session.id, body=body.object())

        def finish(request: Accepted) -> None:
            self._futures.write(request, Done(payload={"loss_id": loss.id}, records=(loss,)))
            self._losses[loss.id] = loss

        with self._journal.transaction():
            return self._futures.accept(request, lambda: wire.custom_loss_of(body), finish)

    def _find_loss(self, loss_id: str) -> GraphLoss | None:
        loss = self._losses.get(loss_id)
        return None if loss is None else wire.custom_loss_of(Value(loss.body))

    async def end(self, session_id: str, reason: str) -> None:
        """Unloads the models of a session, and forgets its losses."""
        runs = [run for run in self.runs.values() if run.record.session == session_id]
        for run in runs:
            run.end(reason)
        await asyncio.gather(*(run.ended() for run in runs))
        for run in runs:
            self.runs.pop(run.record.id, None)
        for loss in [each for each in self._losses.values() if each.session == session_id]:
            self._journal.remove(loss)
            del self._losses[loss.id]


def adapter_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"is_lora": spec["rank"] > 0, "lora_rank": spec["rank"]}


def _without_retry(kind: str, raw: bytes) -> bytes:
    """The body without what a client changes when it sends the same request again."""
    if kind != "save_weights_for_sampler":
        return raw
    kept = json.loads(raw)
    kept.pop("sampling_session_seq_id", None)
    return json.dumps(kept, sort_keys=True).encode()


def _described(spec: Mapping[str, Any]) -> str:
    return f"{spec['base_model']} with an adapter of rank {spec['rank']}"
