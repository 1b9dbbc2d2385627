"""The parts that sessions, models, samplers and futures of one server work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.agent.gateway.reading import Value
from lockstep.tinker.checkpoints import CheckpointStore
from lockstep.tinker.journal import Journal
from lockstep.tinker.requests import BaseModel, not_found
from lockstep.tinker_config import TinkerConfig

if TYPE_CHECKING:
    from lockstep.tinker.embedded import EmbeddedBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The backend, the journal, the saved weights and the settings of one server."""

    backend: EmbeddedBackend
    journal: Journal
    store: CheckpointStore
    config: TinkerConfig
    bases: Mapping[str, BaseModel]
    """Name -> base model."""

    def base(self, name: Value) -> BaseModel:
        """Raises TinkerError (404)."""
        found = self.bases.get(name.text().partition(":")[0])
        if found is None:
            raise not_found(
                f"base_model={name.text()[:120]!r} is not served here; expected "
                f"{' or '.join(map(repr, self.bases))}."
            )
        return found
