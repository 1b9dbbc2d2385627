"""The parts of a `Wire` that servers behind HTTP share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lockstep.engines.base import EngineContext
from lockstep.engines.config import ServedConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.lease import Lease
from lockstep.engines.served import Wire
from lockstep.errors import CapabilityError, EngineError


class HttpWire(Wire):
    """Base of a wire over HTTP. A subclass names its routes."""

    name: ClassVar[str]
    """Name of the engine, for messages."""
    how_started: ClassVar[str]
    """Command that starts such a server, for messages."""
    ping_path = "/health"
    adapter_routes: tuple[str, str] = ("", "")
    """Routes that load and unload an adapter."""
    label_options: Mapping[str, Any] = {}
    """Further fields of a request that changes the label."""

    def __init__(
        self, config: ServedConfig, context: EngineContext, client: HttpClient | None = None
    ) -> None:
        """client: of a server that answers. None: of the first of engine.urls, once it answers."""
        self._context = context
        self._loaded: dict[str, Path] = {}
        """Adapters on the server."""
        if client is None:
            client = HttpClient(
                config.urls[0],
                name=self.name,
                request_seconds=config.request_seconds,
                api_key_env=config.api_key_env,
                how_started=self.how_started,
            )
            client.wait_until_up("/health", config.start_seconds, context.on_wait)
        self._client = client
        self.lease = Lease(context.run, server=client.url, take_over=config.take_over)

    @property
    def url(self) -> str:
        return self._client.url

    async def load_adapter(self, name: str, directory: Path) -> None:
        body = {"lora_name": name, "lora_path": str(directory)}
        await self._client.post(self.adapter_routes[0], body, is_json=False)
        self._loaded[name] = directory

    async def drop_adapter(self, name: str) -> None:
        await self._client.post(self.adapter_routes[1], {"lora_name": name}, is_json=False)
        del self._loaded[name]

    async def write_label(self, label: str) -> None:
        body = {"new_version": label, **self.label_options}
        await self._client.post("/update_weight_version", body)

    async def ping(self) -> None:
        await self._client.get(self.ping_path)

    def check_model(self, found: Mapping[str, Any], keys: Sequence[str]) -> None:
        """Raises CapabilityError if the server's model differs from the trainer's config.json in
        one of these keys. For servers whose weights are replaced: their first weights cannot be
        compared."""
        directory = self._context.directory
        file = directory / "config.json"
        own = json.loads(file.read_text()) if file.is_file() else {}
        differing = [
            f"{key} {found[key]!r} (the trainer's: {own[key]!r})"
            for key in keys
            if own.get(key) is not None and found.get(key) is not None and own[key] != found[key]
        ]
        if differing:
            raise CapabilityError(
                f"engine {self.name} at {self.url} serves another model than {directory}: "
                f"{', '.join(differing)}. Start it with that directory, or name its model with "
                "model=."
            )

    def check_scored(self, scored: list[int], ids: list[int]) -> None:
        """Raises EngineError unless log-probs belong to the ids beside them. scored: ids of the
        log-probs."""
        if scored != ids:
            raise EngineError(
                f"{self.url}: log-probs of the ids {scored[:8]} beside the ids {ids[:8]}."
            )

    @staticmethod
    def labels_of(answer: Mapping[str, Any]) -> tuple[str, ...]:
        """The labels of the weights that sampled an answer, in order."""
        return tuple(span["version"] for span in answer.get("weight_versions") or ())
