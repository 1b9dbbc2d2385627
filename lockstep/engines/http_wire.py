"""The parts of a `Wire` that servers behind HTTP share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from lockstep.engines.base import EngineContext
from lockstep.engines.config import ServedConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.served import Wire
from lockstep.errors import CapabilityError, EngineError
from lockstep.models import peft_format
from lockstep.types import SamplingParams

MIN_TEMPERATURE = 0.01
"""vLLM draws at this temperature if a lower one is asked for, with at most a warning in its log."""


def connect(
    config: ServedConfig, context: EngineContext, *, name: str, path: str, how_started: str
) -> HttpClient:
    """A client of the server at the first of engine.urls. Returns when it answers at `path`."""
    client = HttpClient(
        config.urls[0],
        name=name,
        request_seconds=config.request_seconds,
        api_key_env=config.api_key_env,
        how_started=how_started,
    )
    client.wait_until_up(path, config.start_seconds, context.on_wait)
    return client


class HttpWire(Wire):
    """Base of a wire over HTTP. A subclass names its routes."""

    ping_path = "/health"
    adapter_routes: tuple[str, str] = ("", "")
    """Routes that load and unload an adapter."""
    label_options: Mapping[str, Any] = {}
    """What a request for a new label says besides."""

    def __init__(self, client: HttpClient, context: EngineContext) -> None:
        self._client, self._context = client, context
        self._adapter = ""
        """Name of the adapter that requests are for; empty for the model itself."""
        self._owner = f"{context.run}-{secrets.token_hex(4)}"  # two runs must not share names

    @property
    def url(self) -> str:
        return self._client.url

    async def _load_adapter(self, directory: Path, version: int) -> None:
        # A name per version: it is part of the keys of cached prefixes.
        load, unload = self.adapter_routes
        before, self._adapter = self._adapter, f"{self._owner}-{version}"
        await self._client.post(load, {"lora_name": self._adapter, "lora_path": str(directory)})
        if before and before != self._adapter:
            await self._client.post(unload, {"lora_name": before})

    async def write_label(self, label: str) -> None:
        body = {"new_version": label, **self.label_options}
        await self._client.post("/update_weight_version", body)

    async def ping(self) -> None:
        await self._client.get(self.ping_path)

    async def close(self) -> None:
        await self._client.close()


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter in PEFT's format."""
    return (directory / peft_format.CONFIG).is_file()


def check_temperature(sampling: SamplingParams) -> None:
    """Raises CapabilityError for a temperature at which vLLM would not draw."""
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise CapabilityError(
            f"temperature={sampling.temperature:g}: vLLM would draw at {MIN_TEMPERATURE:g}. Choose "
            "0, which is greedy, or more."
        )


def finish_reason(found: object, where: str) -> Literal["stop", "length", "abort"] | None:
    """A server's finish reason. Raises EngineError for an unknown one."""
    if found not in (None, "stop", "length", "abort"):
        raise EngineError(f"{where} ended a reply with {found!r}; expected stop, length or abort.")
    return cast(Literal["stop", "length", "abort"] | None, found)


def check_told(told: list[int], ids: list[int], where: str) -> None:
    """Raises EngineError unless log-probs belong to the ids beside them."""
    if told != ids:
        raise EngineError(f"{where}: log-probs of the ids {told[:8]} beside the ids {ids[:8]}.")


def labels_of(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of the weights that sampled an answer, in order."""
    return tuple(span["version"] for span in answer.get("weight_versions") or ())


def num_cached(answer: Mapping[str, Any]) -> int:
    """Cached prompt tokens, as OpenAI's `usage` reports them."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
