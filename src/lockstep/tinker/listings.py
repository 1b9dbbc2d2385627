"""Listings of Tinker's API: training runs, checkpoints, and what the server offers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lockstep.agent.gateway.reading import Value
from lockstep.tinker.checkpoints import SCHEME, SEGMENTS, check_ttl
from lockstep.tinker.journal import Checkpoint
from lockstep.tinker.models import Models, adapter_of
from lockstep.tinker.requests import not_found
from lockstep.tinker.resources import Resources


class Listings:
    """Answers questions about stored models and checkpoints, and deletes checkpoints."""

    def __init__(self, resources: Resources, models: Models) -> None:
        self._resources, self._store, self._models = resources, resources.store, models

    def capabilities(self, body: Value) -> dict[str, Any]:
        can = {"trainable": True, "sampleable": True}
        return {
            "supported_models": [
                {"model_name": base.name, "max_context_length": base.max_tokens, **can}
                for base in self._resources.bases.values()
            ]
        }

    def weights_info(self, body: Value) -> dict[str, Any]:
        spec = self._store.find(body["tinker_path"].text()).spec
        names = ("base_model", "train_unembed", "train_mlp", "train_attn")
        return {name: spec[name] for name in names} | adapter_of(spec)

    def training_run(self, body: Value, model_id: str) -> dict[str, Any]:
        model = self._models.known.get(model_id)
        if model is None:
            raise not_found(f"training run {model_id[:200]!r} is not known.")
        latest: dict[str, dict[str, Any]] = {}
        for checkpoint in self._store.of_model(model_id):
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
            "user_metadata": notes(model.metadata),
        }

    def training_runs(self, body: Value) -> dict[str, Any]:
        ids, cursor = _page([*self._models.known][::-1], body)
        return {"training_runs": [self.training_run(body, each) for each in ids], "cursor": cursor}

    def checkpoints(self, body: Value, model_id: str | None = None) -> dict[str, Any]:
        """Lists the checkpoints of a model, or a page of all."""
        found = list(self._store.of_model(model_id))
        if model_id is not None:
            self.training_run(body, model_id)
            body = Value({"limit": max(1, len(found))})
        found, cursor = _page(found, body)
        return {"checkpoints": [_described(each) for each in found], "cursor": cursor}

    def delete(self, body: Value, model_id: str, segment: str, name: str) -> dict[str, Any]:
        self._store.delete(self._store.find(f"{SCHEME}{model_id}/{segment}/{name}"))
        return {}

    def set_ttl(self, body: Value, model_id: str, segment: str, name: str) -> dict[str, Any]:
        checkpoint = self._store.find(f"{SCHEME}{model_id}/{segment}/{name}")
        self._store.set_ttl(checkpoint, check_ttl(body["ttl_seconds"]))
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
        "user_metadata": notes(checkpoint.metadata),
    }


def notes(metadata: Any) -> dict[str, str] | None:
    """The sender's notes as clients read them; an old journal may have notes of other types."""
    if not isinstance(metadata, dict):
        return None
    return {str(name): str(value) for name, value in metadata.items()} or None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
