"""Models in training: how they are made, and the requests that clients send to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.reading import Value
from lockstep.agent.tasks import derive_seed
from lockstep.tinker import wire
from lockstep.tinker.checkpoints import check_ttl, path_of
from lockstep.tinker.futures import Done
from lockstep.tinker.graph import GraphLoss
from lockstep.tinker.journal import Accepted, Checkpoint, Trained, UploadedLoss, digest_of
from lockstep.tinker.requests import ModelSpec, TinkerError, invalid, not_found
from lockstep.tinker.resources import Resources
from lockstep.tinker.samplers import Samplers
from lockstep.tinker.training_run import TinkerRun

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
                now = time.time()
                model = Trained(
                    id=model_id,
                    session=session.id,
                    spec=asdict(spec),
                    created=now,
                    last_request=now,
                    metadata=metadata,
                )
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
            "model_data": {
                "arch": run.base.architecture,
                "model_name": name,
                "tokenizer_id": name,
            },
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
        run = self.run(body["model_id"].text())
        return self._submit(
            run, kind, wire.whole_number(body["seq_id"], 1), wire.canonical(body), body
        )

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
            run.check_ahead(seq_id)
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
            substitute = self._resources.config.substitute
            asked = wire.forward_backward_of(
                body, run.base, find_loss=self._find_loss, substitute=substitute
            )
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
            payload = {"loss_id": loss.id, "type": "create_custom_loss"}
            self._futures.write(request, Done(payload=payload, records=(loss,)))
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
